"""Unrolled blocks of queries over all keys that they may see: the fastest form for short rows.

Shapes: B batch, T time, H query heads, K key/value heads, G = H/K, Q head size, n queries of a
block, C keys that the block can see.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.model.attention.base import MASKED, Backend, Case, on_mesh

BLOCK = 64  # query rows of a block; small blocks skip most of the masked half of the scores
LONGEST = 512  # beyond, the chunked backend is as fast, and this one unrolls ever more blocks


def refuses(case: Case) -> str | None:
    if case.context > 1:
        return "it cannot split a row's time over devices"
    if case.length > LONGEST:
        return f"rows of {case.length} tokens are longer than {LONGEST}"
    return None


def run(
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    mesh: Mesh | None,
) -> jax.Array:
    """Causal attention within segments; returns [B, T, H, Q].

    Query blocks are recomputed in the backward pass, so no [T, T] score tensor is ever kept. Both
    products are plain batched matrix products over B*K, the form that XLA compiles well everywhere.
    """

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *_: Any) -> jax.Array:
        return _attend(q, k, v, ids)

    return on_mesh(local, mesh, q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT)


def _attend(
    q_BTHQ: jax.Array, k_BTKQ: jax.Array, v_BTKQ: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    B, T, H, Q = q_BTHQ.shape
    K = k_BTKQ.shape[2]
    q = q_BTHQ.transpose(0, 2, 1, 3).reshape(B * K, H // K, T, Q)
    k = k_BTKQ.transpose(0, 2, 3, 1).reshape(B * K, Q, T)
    v = v_BTKQ.transpose(0, 2, 1, 3).reshape(B * K, T, Q)
    blocks = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        rows, cols = jnp.arange(start, stop), jnp.arange(stop)
        same = segment_ids_BT[:, start:stop, None] == segment_ids_BT[:, None, :stop]
        visible = same & (rows[:, None] >= cols[None, :])
        blocks.append(_query_block(q[:, :, start:stop], k[:, :, :stop], v[:, :stop], visible))
    out = jnp.concatenate(blocks, axis=2)
    return out.reshape(B, H, T, Q).transpose(0, 2, 1, 3)


@jax.checkpoint
def _query_block(
    q_XGnQ: jax.Array, k_XQC: jax.Array, v_XCQ: jax.Array, visible_BnC: jax.Array
) -> jax.Array:
    """Softmax attention of one block, X = B*K; scores and softmax in float32."""
    X, G, n, Q = q_XGnQ.shape
    B, _, C = visible_BnC.shape
    scores = jnp.matmul(q_XGnQ.reshape(X, G * n, Q), k_XQC, preferred_element_type=jnp.float32)
    bias_BnC = jnp.where(visible_BnC, 0.0, MASKED)
    scores = scores.reshape(B, -1, n, C) * Q**-0.5 + bias_BnC[:, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(v_XCQ.dtype).reshape(X, G * n, C)
    return jnp.matmul(weights, v_XCQ).reshape(X, G, n, Q)


BLOCKS = Backend(refuses, run)

"""Causal grouped-query attention over packed rows.

Shapes: B batch, T time, H query heads, K key/value heads, G = H/K, Q head size, n queries of a
block, C keys that the block can see.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with nothing to see gives a mean and never NaN
MIN_BLOCK = 64  # query rows of a block; small blocks skip most of the masked half of the scores
MAX_BLOCKS = 16  # blocks are unrolled, so long rows get larger ones


def attention(
    q_BTHQ: jax.Array, k_BTKQ: jax.Array, v_BTKQ: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention within segments; returns [B, T, H, Q].

    A position sees itself and the earlier positions of its own segment. Query blocks are
    recomputed in the backward pass, so no [T, T] score tensor is ever kept. Both products are
    plain batched matrix products over B*K, the form that XLA compiles well everywhere.
    """
    B, T, H, Q = q_BTHQ.shape
    K = k_BTKQ.shape[2]
    q = q_BTHQ.transpose(0, 2, 1, 3).reshape(B * K, H // K, T, Q)
    k = k_BTKQ.transpose(0, 2, 3, 1).reshape(B * K, Q, T)
    v = v_BTKQ.transpose(0, 2, 1, 3).reshape(B * K, T, Q)
    size = max(MIN_BLOCK, -(-T // MAX_BLOCKS))
    blocks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
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

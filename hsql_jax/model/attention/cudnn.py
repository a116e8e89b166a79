"""cuDNN's flash attention on NVIDIA GPUs, for rows of one segment each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.model.attention.base import Backend, Case, on_mesh

WIDEST = 128  # of a head, on every GPU that cuDNN's kernel runs on
DTYPES = ("bfloat16", "float16")


def refuses(case: Case) -> str | None:
    if case.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on '{case.platform}'"
    if case.packed:
        return "it cannot keep several segments of a row apart (packed=False promises one a row)"
    if case.context > 1:
        return "it cannot split a row's time over devices"
    if case.dtype not in DTYPES:
        return f"dtype {case.dtype} is neither of {', '.join(DTYPES)}"
    if case.head_dim % 8 or case.head_dim > WIDEST:
        return f"head size {case.head_dim} is not a multiple of 8 up to {WIDEST}"
    return None


def run(
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    mesh: Mesh | None,
) -> jax.Array:
    """Causal attention of rows that hold one segment from their start and padding behind it.

    jax's public interface to cuDNN knows a length a row but no segments (a mask would take T*T
    memory). What a row holds is known only as it runs, so a row that breaks the promise gives NaN,
    at which training stops, and never attention across segments. Padding gives zeros.
    """

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *_: Any) -> jax.Array:
        lengths = jnp.sum(ids > 0, axis=1, dtype=jnp.int32)
        filled = jnp.arange(ids.shape[1]) < lengths[:, None]
        kept = jnp.all(ids == jnp.where(filled, ids[:, :1], 0), axis=1)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_seq_lengths=jnp.maximum(lengths, 1),
            key_value_seq_lengths=jnp.maximum(lengths, 1),
            implementation="cudnn",
        )
        out = jnp.where(filled[..., None, None], out, 0.0)
        return jnp.where(kept[:, None, None, None], out, jnp.nan)

    return on_mesh(local, mesh, q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT)


CUDNN = Backend(refuses, run)

"""jax's Pallas splash attention, on TPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hsql_jax.model.attention.base import Backend, Case, on_mesh
from hsql_jax.sharding import shards, spec_of

LANES = 128  # of a TPU's vector unit
BLOCK = 512  # most queries of a block, and keys of a product
STORED = 2048  # most keys held beside the products, half of what a TPU core's memory takes
COPIES = 16  # most partial gradients of the queries that one fused backward kernel may write


def refuses(case: Case) -> str | None:
    if case.platform != "tpu":
        return f"it runs on TPUs, not on '{case.platform}'"
    if case.head_dim % LANES:
        return f"head size {case.head_dim} is not a multiple of {LANES}"
    if case.length % (case.context * LANES):
        share = f"{case.length} tokens on {case.context} devices"
        return f"rows of {share} are not multiples of {LANES}"
    return None


def run(
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    mesh: Mesh | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention within segments; returns [B, T, H, Q].

    Queries are scaled in their own dtype before the kernel. Its fused backward pass writes one
    gradient of the queries for each 2,048 keys and sums them at the end; beyond 32,768 tokens, for
    which that memory grows too large, a second kernel computes it. `interpret` runs the kernel
    step by step on any platform: for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    _, T, H, Q = q_BTHQ.shape
    stored = STORED if Q * q_BTHQ.dtype.itemsize <= 2 * LANES else STORED // 4
    kernel = _kernel(H, T, shards(mesh, "heads"), shards(mesh, "time"), stored, interpret)
    split = mesh and kernel.manual_sharding_spec(NamedSharding(mesh, spec_of(("heads", "time"))))

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_ids: jax.Array,
        kv_ids: jax.Array,
        _: Any,
        kernel: Any,
    ) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * q.shape[-1] ** -0.5, k, v))
        return jax.vmap(kernel)(q, k, v, SegmentIds(q_ids, kv_ids)).transpose(0, 2, 1, 3)

    return on_mesh(local, mesh, q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT, kernel, split)


@functools.cache
def _kernel(
    heads: int, length: int, head_shards: int, time_shards: int, stored: int, interpret: bool
) -> Any:
    """The kernel with its causal block mask, a pytree whose masks are split as the queries are."""
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # 0.3 s, for TPUs only

    queries, stored = _divisor(length // time_shards, BLOCK), _divisor(length, stored)
    keys = _divisor(stored, BLOCK)
    fused = length <= COPIES * stored
    sizes = pallas.BlockSizes(
        block_q=queries,
        block_kv=stored,
        block_kv_compute=keys,
        block_q_dkv=queries,
        block_kv_dkv=stored,
        block_kv_dkv_compute=keys,
        use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else keys,
    )
    mask = pallas.MultiHeadMask([pallas.CausalMask((length, length))] * heads)
    with jax.ensure_compile_time_eval():
        kernel = pallas.make_splash_mha(
            mask,
            head_shards=head_shards,
            q_seq_shards=time_shards,
            block_sizes=sizes,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)  # no device array, no tracer, in the cache


def _divisor(length: int, most: int) -> int:
    """The largest multiple of `LANES` up to `most` that divides `length`, a multiple itself."""
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)


SPLASH = Backend(refuses, run)

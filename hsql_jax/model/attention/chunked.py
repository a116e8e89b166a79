"""Attention whose memory grows with T, not its square, in plain XLA on any platform.

Shapes: t queries, T keys, X = B*K, G = H/K query heads of a key/value head, n queries or keys of
a block. Inside, queries are [X, G, t, Q], keys and values [X, T, Q], both padded to whole blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.model.attention.base import MASKED, Backend, Case, on_mesh
from hsql_jax.sharding import platform_of

BLOCK = 512  # queries and keys of a block: scores [X, G, 512, 512] are the most that is ever held
CPU_BLOCK = 64  # with one row after the other, what a core's cache holds; and it skips more


def refuses(case: Case) -> str | None:
    return None


def run(
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    mesh: Mesh | None,
) -> jax.Array:
    """Causal attention within segments; returns [B, T, H, Q].

    Softmax is accumulated over blocks of keys. The backward pass keeps the output and one log-sum
    a query and recomputes the scores. Blocks that no query of a block may see are skipped: those
    ahead in time, and those of other segments, whose ids ascend in a row. Scores and sums are in
    float32.
    """
    on_cpu = platform_of(mesh) == "cpu"
    size = CPU_BLOCK if on_cpu else BLOCK

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_ids: jax.Array,
        kv_ids: jax.Array,
        offset: jax.Array | int,
        _: Any,
    ) -> jax.Array:
        B, t, H, Q = q.shape
        K, block = k.shape[2], min(size, t)

        def whole(x: jax.Array) -> jax.Array:  # causality hides the padding from real queries
            return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))

        def rows(
            q: jax.Array, k: jax.Array, v: jax.Array, q_ids: jax.Array, kv_ids: jax.Array
        ) -> Any:
            masks = Masks(q_ids, kv_ids, jnp.asarray(offset, jnp.int32))
            q = q.transpose(0, 2, 1, 3).reshape(-1, H // K, q.shape[1], Q)
            k, v = (x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], Q) for x in (k, v))
            return _attend(q, k, v, masks, block)

        padded = tuple(whole(x) for x in (q, k, v, q_ids, kv_ids))
        if on_cpu:
            one_row = jax.tree.map(lambda x: x[:, None], padded)
            out = jax.lax.map(lambda row: rows(*row), one_row)
        else:
            out = rows(*padded)
        return out.reshape(B, H, -1, Q)[:, :, :t].transpose(0, 2, 1, 3)

    return on_mesh(local, mesh, q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT)


class Masks(NamedTuple):
    """What decides whether a query may see a key."""

    q_ids: jax.Array  # [B, t], segments
    kv_ids: jax.Array  # [B, T]
    offset: jax.Array  # the time of the first query


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, block: int) -> jax.Array:
    return _forward(q, k, v, masks, block)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, masks: Masks, block: int) -> tuple[Any, Any]:
    """The output [X, G, t, Q], and what the backward pass reads."""
    X, G, t, Q = q.shape
    first, stop = _span(_seen(masks, block))

    def queries(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def keys(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, mixed = sums
            scores = _scores(q, k, masks, i, j, block)
            top = jnp.maximum(peak, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - top[..., None]), jnp.exp(peak - top)
            mixed_j = _matmul(weights.astype(v.dtype), _rows(v, j, block))
            total = total * shrink + weights.sum(axis=-1)
            return top, total, mixed * shrink[..., None] + mixed_j

        row = jnp.zeros((X, G * block), jnp.float32)
        empty = (row + MASKED, row, jnp.zeros((X, G * block, Q), jnp.float32))
        peak, total, mixed = jax.lax.fori_loop(first[i], stop[i], keys, empty)
        return (mixed / total[..., None]).astype(q.dtype), peak + jnp.log(total)

    out, log_sum = jax.lax.map(queries, jnp.arange(t // block))
    out = out.reshape(-1, X, G, block, Q).transpose(1, 2, 0, 3, 4).reshape(q.shape)
    log_sum = log_sum.reshape(-1, X, G, block).transpose(1, 2, 0, 3).reshape(X, G, t)
    return out, (q, k, v, masks, out, log_sum)


def _backward(block: int, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    """Gradients of q, k and v, one block of keys after the other."""
    q, k, v, masks, out, log_sum = saved
    X, G, _, Q = q.shape
    first, stop = _span(_seen(masks, block).T)
    inner = jnp.sum(out.astype(jnp.float32) * d_out, axis=-1)

    def keys(dq: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_j, v_j = _rows(k, j, block), _rows(v, j, block)

        def queries(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk_j, dv_j = sums
            q_i, d_out_i = _flat_rows(q, i, block), _flat_rows(d_out, i, block)
            scores = _scores(q, k, masks, i, j, block)
            weights = jnp.exp(scores - _flat_rows(log_sum, i, block)[..., None])
            dv_j += _matmul(weights.swapaxes(1, 2).astype(d_out.dtype), d_out_i)
            d_weights = _matmul(d_out_i, v_j.swapaxes(1, 2))
            d_scores = weights * (d_weights - _flat_rows(inner, i, block)[..., None])
            d_scores = (d_scores * Q**-0.5).astype(q.dtype)
            dk_j += _matmul(d_scores.swapaxes(1, 2), q_i)
            dq_i = _matmul(d_scores, k_j).reshape(X, G, block, Q) + _rows(dq, i, block)
            return jax.lax.dynamic_update_slice_in_dim(dq, dq_i, i * block, 2), dk_j, dv_j

        zeros = jnp.zeros(k_j.shape, jnp.float32)
        dq, dk_j, dv_j = jax.lax.fori_loop(first[j], stop[j], queries, (dq, zeros, zeros))
        return dq, (dk_j.astype(k.dtype), dv_j.astype(v.dtype))

    dq = jnp.zeros(q.shape, jnp.float32)
    dq, grads = jax.lax.scan(keys, dq, jnp.arange(k.shape[1] // block))
    dk, dv = (grad.transpose(1, 0, 2, 3).reshape(k.shape) for grad in grads)
    return dq.astype(q.dtype), dk, dv, None


_attend.defvjp(_forward, _backward)


def _seen(masks: Masks, block: int) -> jax.Array:
    """Whether a query of block i may see a key of block j, [t/n, T/n].

    Judged by the blocks' times and ranges of segment ids, so never falsely no. Padding counts as
    the last segment, where it stands.
    """
    q_ids, kv_ids, offset = masks
    last = jnp.iinfo(jnp.int32).max
    q, kv = (
        jnp.where(ids > 0, ids, last).reshape(ids.shape[0], -1, block) for ids in (q_ids, kv_ids)
    )
    q, kv = q[:, :, None], kv[:, None]
    shared = (q.max(-1) >= kv.min(-1)) & (q.min(-1) <= kv.max(-1))
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(kv.shape[2])
    return shared.any(axis=0) & (offset + (i + 1) * block > j * block)


def _span(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each row, the first true place and the one behind the last; 0, 0 where there is none."""
    return jnp.argmax(seen, axis=1), jnp.max(seen * (jnp.arange(seen.shape[1]) + 1), axis=1)


def _scores(
    q: jax.Array, k: jax.Array, masks: Masks, i: jax.Array, j: jax.Array, block: int
) -> jax.Array:
    """Masked scores [X, G*n, n] of query block i and key block j, in float32."""
    q_ids, kv_ids, offset = masks
    steps = jnp.arange(block)
    late = (offset + i * block + steps)[:, None] >= (j * block + steps)[None, :]
    same = _rows(q_ids, i, block, 1)[:, :, None] == _rows(kv_ids, j, block, 1)[:, None, :]
    scores = _matmul(_flat_rows(q, i, block), _rows(k, j, block).swapaxes(1, 2))
    bias = jnp.where(late & same, 0.0, MASKED)[:, None]
    wide = scores.reshape(same.shape[0], -1, block, block) * q.shape[-1] ** -0.5 + bias
    return wide.reshape(scores.shape)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _rows(array: jax.Array, index: jax.Array, block: int, axis: int = -2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, index * block, block, axis)


def _flat_rows(array_XGt: jax.Array, index: jax.Array, block: int) -> jax.Array:
    """Query block `index` of [X, G, t, ...], its groups and queries in one axis."""
    rows = _rows(array_XGt, index, block, 2)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


CHUNKED = Backend(refuses, run)

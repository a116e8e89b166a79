"""What attention backends share: their contract, and the way onto a mesh.

Shapes: B batch, T time, H query heads, K key/value heads, Q head size, t = T / context ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.sharding import RULES, layout, shards, spec_of

MASKED = -1e30  # finite, so that a row with nothing to see gives a mean and never NaN


class Case(NamedTuple):
    """What is known of a call before it runs."""

    platform: str  # "cpu", "gpu" or "tpu"
    length: int  # T
    head_dim: int
    dtype: str
    packed: bool  # a row may hold several segments
    context: int  # devices that share the time of one row


class Backend(NamedTuple):
    """One way to compute attention.

    `refuses` says what of a case it cannot honour, None where it can honour all of it. `run` takes
    queries [B, T, H, Q], keys and values [B, T, K, Q], segment ids [B, T] and the mesh or None.
    """

    refuses: Callable[[Case], str | None]
    run: Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Mesh | None], jax.Array]


def on_mesh(
    local: Callable[..., jax.Array],
    mesh: Mesh | None,
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    extra: Any = None,
    extra_specs: Any = None,
) -> jax.Array:
    """Run `local(q, k, v, q_ids, kv_ids, offset, extra)` on each device's rows, time and heads.

    Queries keep their part of the time, [b, t, h, Q] from time `offset` on; keys, values and
    their segment ids are gathered, [b, T, k, Q] and [b, T]. The parts are contiguous, so later
    ranks see more keys: of C context ranks the last does 2 - 1/C times the average work, and the
    others wait for it. Where the heads are split over more devices than there are key/value
    heads, those are repeated. Raises `ValueError` where a size does not divide over the mesh.
    """
    if mesh is None or mesh.size == 1:
        ids = segment_ids_BT
        return local(q_BTHQ, k_BTKQ, v_BTKQ, ids, ids, 0, extra)
    time, tensor = RULES["time"], shards(mesh, "heads")
    repeat = tensor // math.gcd(k_BTKQ.shape[2], tensor)
    k_BTKQ, v_BTKQ = (jnp.repeat(kv, repeat, axis=2) for kv in (k_BTKQ, v_BTKQ))
    axes = ("batch", "time", "heads", None)
    layout(mesh, q_BTHQ.shape, axes)

    def rank(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, extra: Any) -> jax.Array:
        k, v, all_ids = (jax.lax.all_gather(x, time, axis=1, tiled=True) for x in (k, v, ids))
        return local(q, k, v, ids, all_ids, jax.lax.axis_index(time) * q.shape[1], extra)

    heads, rows = spec_of(axes), spec_of(axes[:2])
    run = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(heads, heads, heads, rows, extra_specs),
        out_specs=heads,
        check_vma=False,
    )
    return run(q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT, extra)

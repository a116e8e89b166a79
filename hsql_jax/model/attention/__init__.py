"""Causal grouped-query attention over packed rows, by one of several backends.

Shapes: B batch, T time, H query heads, K key/value heads, Q head size.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from hsql_jax.model.attention.base import MASKED, Backend, Case
from hsql_jax.model.attention.blocks import BLOCKS
from hsql_jax.model.attention.chunked import CHUNKED
from hsql_jax.model.attention.cudnn import CUDNN
from hsql_jax.model.attention.splash import SPLASH
from hsql_jax.sharding import platform_of, shards

__all__ = ["BACKENDS", "MASKED", "attention", "choose"]

BACKENDS: dict[str, Backend] = {
    "blocks": BLOCKS,
    "chunked": CHUNKED,
    "cudnn": CUDNN,
    "splash": SPLASH,
}
FASTEST = {"cpu": "blocks", "gpu": "cudnn", "tpu": "splash"}  # where it does not refuse
EVERYWHERE = "chunked"  # refuses nothing


def attention(
    q_BTHQ: jax.Array,
    k_BTKQ: jax.Array,
    v_BTKQ: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    backend: str = "auto",
    packed: bool = True,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention within segments; returns [B, T, H, Q].

    A position sees itself and the earlier positions of its own segment, earlier by its place in
    the row. With a `mesh`, rows, heads and time are split over it by the rules of
    `hsql_jax.sharding`; keys and values are gathered over the devices that share a row. `backend`
    is a name of `BACKENDS`, or "auto" for the platform's fastest that can do what is asked.
    `packed=False` promises that each row is one segment from its start, with padding behind it.
    Raises `ValueError`, naming the backends that can, where the one that is named cannot.
    """
    case = Case(
        platform=platform_of(mesh),
        length=q_BTHQ.shape[1],
        head_dim=q_BTHQ.shape[3],
        dtype=str(q_BTHQ.dtype),
        packed=packed,
        context=shards(mesh, "time"),
    )
    run = BACKENDS[choose(backend, case)].run
    return run(q_BTHQ, k_BTKQ, v_BTKQ, segment_ids_BT, mesh)


def choose(backend: str, case: Case) -> str:
    """The backend's name: for "auto" the platform's fastest, or, if that refuses, "chunked"."""
    able = [name for name, entry in BACKENDS.items() if entry.refuses(case) is None]
    if backend == "auto":
        fastest = FASTEST.get(case.platform, EVERYWHERE)
        return fastest if fastest in able else EVERYWHERE
    if backend not in BACKENDS:
        raise ValueError(f"attention {backend!r} is not known; use auto, {', '.join(BACKENDS)}")
    if backend not in able:
        raise ValueError(
            f"attention '{backend}': {BACKENDS[backend].refuses(case)}; use {' or '.join(able)}"
        )
    return backend

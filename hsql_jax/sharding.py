"""Meshes and logical axis rules: the only module that names physical mesh axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hsql_jax.model.config import ModelConfig
from hsql_jax.model.qwen3 import is_spec, param_specs

# Logical axis of a parameter or batch -> mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
}


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices."""

    data: int = 1  # whole replicas
    fsdp: int = 1  # parameters and optimizer state split, gathered for each layer
    tensor: int = 1  # heads, feed-forward and vocabulary split


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over the first devices; `ValueError` when there are too few."""
    needed = math.prod((config.data, config.fsdp, config.tensor))
    if needed > jax.device_count():
        raise ValueError(
            f"mesh data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} needs "
            f"{needed} devices, {jax.device_count()} found; lower one of the axes"
        )
    return jax.make_mesh(
        (config.data, config.fsdp, config.tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:needed],
    )


def spec_of(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The partition of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] or None if axis else None for axis in axes))


def param_shardings(mesh: Mesh, config: ModelConfig) -> Any:
    """A sharding for each parameter; `ValueError` names a dimension that does not divide."""

    def leaf(path: Any, spec: Any) -> NamedSharding:
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            parts = math.prod(mesh.shape[name] for name in RULES[axis]) if axis else 1
            if size % parts:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: {axis} = {size} does not divide over "
                    f"{parts} devices of the mesh {dict(mesh.shape)}"
                )
        return NamedSharding(mesh, spec_of(spec.axes))

    return jax.tree.map_with_path(leaf, param_specs(config), is_leaf=is_spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For batch leaves [A, B, T]: rows split over data and fsdp, micro-batches and time whole."""
    return NamedSharding(mesh, PartitionSpec(None, RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())

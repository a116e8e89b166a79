"""Meshes and logical axis rules: the only module that names physical mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Logical axis of a parameter, batch or activation -> mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("slice", "data", "fsdp"),
    "time": ("context",),
    "embed": ("fsdp", "context"),  # of parameters: ranks of one sequence share its memory too
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "tokens": ("slice", "data", "fsdp", "context"),  # rows and time in one
}


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes, outermost first; their product is the number of devices."""

    data: int = 1  # whole replicas
    fsdp: int = 1  # parameters and optimizer state split, gathered for each layer
    tensor: int = 1  # heads, feed-forward and vocabulary split
    context: int = 1  # one sequence's time split; parameters are split over it as over fsdp
    slices: int = 1  # replicas joined by the data-centre network, each of all the axes above

    @property
    def shape(self) -> dict[str, int]:
        """The mesh's axes and their sizes, outermost first."""
        return {
            "slice": self.slices,
            "data": self.data,
            "fsdp": self.fsdp,
            "context": self.context,
            "tensor": self.tensor,
        }

    @property
    def devices(self) -> int:
        """How many devices the mesh needs."""
        return math.prod(self.shape.values())


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first of `devices` (default: all); `ValueError` when there are too few."""
    devices = jax.devices() if devices is None else devices
    if config.devices > len(devices):
        sizes = " x ".join(
            f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config)
        )
        raise ValueError(
            f"mesh {sizes} needs {config.devices} devices, {len(devices)} found; "
            "lower one of the axes"
        )
    shape, names = tuple(config.shape.values()), tuple(config.shape)
    if config.slices > 1 and hasattr(devices[0], "slice_index"):
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, *shape[1:]), (config.slices, 1, 1, 1, 1), devices[: config.devices]
        )
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices[: config.devices]
    )


def platform_of(mesh: Mesh | None) -> str:
    """Where the computation will run: "cpu", "gpu" or "tpu"."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if name == "cuda" else name


def spec_of(axes: Sequence[str | None]) -> PartitionSpec:
    """The partition of an array with these logical axes."""
    return PartitionSpec(*(RULES[axis] or None if axis else None for axis in axes))


def shards(mesh: Mesh | None, axis: str) -> int:
    """Over how many devices a logical axis is split."""
    return math.prod(mesh.shape[name] for name in RULES[axis]) if mesh else 1


def constrain(array: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """The array, laid out by its logical axes where there is a mesh."""
    if mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(axes)))


def layout(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of such an array; `ValueError` names a dimension that does not divide."""
    for size, axis in zip(shape, axes, strict=True):
        parts = shards(mesh, axis) if axis else 1
        if size % parts:
            raise ValueError(
                f"{axis} = {size} does not divide over {parts} devices of the mesh "
                f"{dict(mesh.shape)}"
            )
    return NamedSharding(mesh, spec_of(axes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For batch leaves [A, B, T]: rows and time split, micro-batches whole."""
    return NamedSharding(mesh, spec_of((None, "batch", "time")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())

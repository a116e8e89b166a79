"""Meshes and logical axis rules: the only module that names physical mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hsql_jax.errors import UserError

if TYPE_CHECKING:
    from hsql_jax.model.config import ModelConfig

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

    def __post_init__(self) -> None:
        for name, size in self.shape.items():
            if size < 1:
                raise ValueError(f"mesh {name} = {size}: give at least 1")

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


@dataclass(frozen=True)
class Meshes:
    """Where training and generation run: on the same devices, or side by side on disjoint ones."""

    train: MeshConfig = MeshConfig()
    rollout: MeshConfig = MeshConfig()
    disjoint: bool = False

    def __post_init__(self) -> None:
        for name, size in self.rollout.shape.items():
            if name != "tensor" and size != 1:
                raise ValueError(
                    f"rollout mesh {name} = {size}: generation is split over tensor alone; {name} "
                    "may be 1"
                )

    @property
    def devices(self) -> int:
        """How many devices both together need."""
        sizes = self.train.devices, self.rollout.devices
        return sum(sizes) if self.disjoint else max(sizes)


def make_meshes(config: Meshes, devices: Sequence[Any] | None = None) -> tuple[Mesh, Mesh]:
    """The training and the rollout mesh; `ValueError` when there are too few devices."""
    devices = jax.devices() if devices is None else devices
    start = config.train.devices if config.disjoint else 0
    return make_mesh(config.train, devices), make_mesh(config.rollout, devices[start:])


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first of `devices` (default: all); `ValueError` when there are too few."""
    devices = jax.devices() if devices is None else devices
    if config.devices > len(devices):
        raise ValueError(
            f"mesh {_sizes(config)} needs {config.devices} devices, {len(devices)} found; "
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


def _sizes(config: MeshConfig) -> str:
    return " x ".join(f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config))


def check_devices(config: MeshConfig, count: int) -> None:
    """`UserError`, naming the axis sizes that would work, unless the mesh fills `count` devices."""
    if config.devices == count:
        return
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    others = {name: config.devices // size for name, size in sizes.items()}
    works = [f"{name} = {count // rest}" for name, rest in others.items() if count % rest == 0]
    advice = f"{' or '.join(works)} would" if works else f"give sizes whose product is {count}"
    raise UserError(
        f"mesh {_sizes(config)} is {config.devices} devices where there are {count}; {advice}"
    )


def model_sizes(model: ModelConfig) -> dict[str, int]:
    """How many parts each logical axis of the model has that can live on different devices."""
    return {
        "kv_heads": model.kv_heads,
        "heads": model.heads,
        "mlp": model.d_ff,
        "vocab": model.vocab_size,
        "embed": model.d_model,
    }


def check_sizes(config: MeshConfig, sizes: Mapping[str, int]) -> None:
    """`UserError`, naming the sizes that would work, for a logical axis that does not divide.

    `sizes` are those of `model_sizes`, with `batch` rows of a micro-batch and `time` tokens of a
    row: a model, a mesh and a batch that pass compile on that mesh.
    """
    for axis, size in sizes.items():
        over = [name for name in RULES[axis] if config.shape[name] > 1] or RULES[axis][-1:]
        parts = math.prod(config.shape[name] for name in over)
        if size % parts:
            together = [other for name, other in sizes.items() if RULES[name] == RULES[axis]]
            names = " x ".join(over)
            raise UserError(
                f"{axis} = {size} does not divide over {names} = {parts}; {names} may be "
                f"{_divisors(math.gcd(*together))}"
            )


def _divisors(size: int, most: int = 9) -> str:
    found = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
    return ", ".join(map(str, found[:most])) + (", ..." if len(found) > most else "")


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

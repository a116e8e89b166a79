"""Parameters from a Hugging Face folder, on the host or straight into the shards of a mesh."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_shardings
from hsql_jax.model.qwen3 import Params
from hsql_jax.weights.files import Stored, bits, stored_tensors
from hsql_jax.weights.layout import EMBED, HEAD, Leaf, is_leaf, leaves, read_config

A, B = TypeVar("A"), TypeVar("B")
Index = tuple[tuple[int, int], ...]  # (start, stop) of each axis

CHUNK_BYTES = 2 << 20  # of one device's shard, read and sent at a time
READS_AHEAD = 4  # chunks being read while one is sent
HOST_BYTES_PER_DEVICE = (READS_AHEAD + 2) * CHUNK_BYTES  # the most that loading holds on the host


def load_hf(
    folder: str | Path, dtype: str | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params]:
    """Config and parameters of a Hugging Face folder.

    With a `mesh` the parameters are arrays in their shardings. Each process reads the slices of its
    own devices, each once, and holds at most `HOST_BYTES_PER_DEVICE` a device beside the arrays.
    Without one they are numpy arrays on the host.

    `dtype` is that of parameters and activations; None keeps the stored one (float64 becomes
    float32). `UserError` names the file, key or tensor that is missing, unexpected or broken, or
    the dimension that the mesh does not divide.
    """
    folder = Path(folder)
    stored = stored_tensors(folder)
    if EMBED not in stored:
        raise UserError(f"{folder}: no tensor {EMBED}, but {', '.join(sorted(stored)[:5])} ..")
    stored_dtype = stored[EMBED].dtype.name
    dtype = dtype or ("float32" if stored_dtype == "float64" else stored_dtype)
    config = read_config(folder / "config.json", dtype)
    tree = leaves(config)
    flat, structure = jax.tree.flatten(tree, is_leaf)
    _check(folder, config, flat, stored)
    read = partial(_read, stored, np.dtype(jnp.dtype(dtype)))
    if mesh is None:
        arrays = [read(leaf, tuple((0, size) for size in leaf.shape)) for leaf in flat]
    else:
        try:
            shardings = jax.tree.leaves(param_shardings(mesh, config))
        except ValueError as error:
            raise UserError(f"{folder}: {error}") from None
        arrays = _load_sharded(flat, shardings, jnp.dtype(dtype), read)
    return config, jax.tree.unflatten(structure, arrays)


def _check(folder: Path, config: ModelConfig, flat: list[Leaf], stored: dict[str, Stored]) -> None:
    expected = {name: leaf.stored_shape for leaf in flat for name in leaf.names}
    ignored = {HEAD} if config.tied else set()  # some tied files repeat the embedding here
    for problem, names in {
        "no tensor": expected.keys() - stored.keys(),
        "unexpected tensor": stored.keys() - expected.keys() - ignored,
    }.items():
        if names:  # the layers after the first are left out of the list
            listed = (key for key in expected if ".layers." not in key or ".layers.0." in key)
            raise UserError(f"{folder}: {problem} {min(names)}; expected are {', '.join(listed)}")
    for name, shape in expected.items():
        file, _, content = stored[name]
        if content.shape != shape:
            raise UserError(
                f"{file}: {name} has shape {content.shape}, but config.json makes it {shape}"
            )


def _read(stored: dict[str, Stored], dtype: np.dtype, leaf: Leaf, index: Index) -> np.ndarray:
    """The part `index` of a parameter. The array's memory is in the order of the files."""
    slices = tuple(slice(*bounds) for bounds in index)
    layers = slices[0] if leaf.stacked else slice(0, 1)
    part = leaf.reorder(slices[leaf.stacked :])
    shape = tuple(stop - start for start, stop in index)
    names = leaf.names[layers]
    result = np.empty((len(names), *leaf.reorder(shape[leaf.stacked :])), dtype)
    for into, name in zip(result, names, strict=True):
        content = stored[name].bits[part]
        if stored[name].dtype == dtype:
            bits(into)[...] = content
        else:
            into[...] = content.view(stored[name].dtype)
    result = result.transpose(0, *leaf.reorder(tuple(range(1, result.ndim))))
    return result if leaf.stacked else result[0]


def _load_sharded(
    flat: list[Leaf],
    shardings: list[NamedSharding],
    dtype: np.dtype,
    read: Callable[[Leaf, Index], np.ndarray],
) -> list[jax.Array]:
    """The parameters, each filled chunk by chunk; files are read ahead in threads.

    All processes take the same steps, whichever devices are theirs.
    """
    shards = [s.shard_shape(leaf.shape) for leaf, s in zip(flat, shardings, strict=True)]
    chunks = [
        chunk_shape(shard, (0, leaf.rows_axis), dtype.itemsize)
        for leaf, shard in zip(flat, shards, strict=True)
    ]
    steps = [
        (number, start)
        for number, (shard, chunk) in enumerate(zip(shards, chunks, strict=True))
        for start in chunk_starts(shard, chunk)
    ]

    def parts(step: tuple[int, Index]) -> dict[jax.Device, np.ndarray]:
        """The chunk of each device of this process; devices with the same slice share it."""
        number, start = step
        leaf = flat[number]
        places = shardings[number].addressable_devices_indices_map(leaf.shape)
        index_of = {
            device: tuple(
                ((place.start or 0) + offset, (place.start or 0) + offset + size)
                for place, offset, size in zip(places, start, chunks[number], strict=True)
            )
            for device, places in places.items()
        }
        distinct = {index: read(leaf, index) for index in dict.fromkeys(index_of.values())}
        return {device: distinct[index] for device, index in index_of.items()}

    arrays: list[Any] = [None] * len(flat)
    with ThreadPoolExecutor(READS_AHEAD) as pool:
        for (number, start), by_device in _ahead(pool, parts, steps, READS_AHEAD):
            sharding, shard, chunk = shardings[number], shards[number], chunks[number]
            shape = tuple(
                size * (whole // part)
                for size, whole, part in zip(chunk, flat[number].shape, shard, strict=True)
            )
            sent = jax.make_array_from_single_device_arrays(
                shape, sharding, [jax.device_put(part, d) for d, part in by_device.items()]
            )
            if chunk == shard:
                arrays[number] = sent
                continue
            if arrays[number] is None:
                arrays[number] = jnp.zeros(flat[number].shape, dtype, device=sharding)
            arrays[number] = _place(sharding, arrays[number], sent, np.array(start, np.uint32))
            arrays[number].block_until_ready()  # so that chunks do not pile up on the way
    return arrays


def chunk_shape(shard: tuple[int, ...], axes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The largest equal parts of a shard along `axes`, the first first, of `CHUNK_BYTES` or less.

    What is not divided along these axes stays whole, however large.
    """
    chunk = list(shard)
    for axis in axes:
        too_large = math.ceil(math.prod(chunk) * itemsize / CHUNK_BYTES)
        chunk[axis] = max(1, chunk[axis] // too_large)
    return tuple(chunk)


def chunk_starts(shard: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where the chunks of a shard begin; the last of an axis ends with it, over the one before."""
    return itertools.product(
        *(
            (min(start, size - step) for start in range(0, size, step))
            for size, step in zip(shard, chunk, strict=True)
        )
    )


def _ahead(
    pool: ThreadPoolExecutor, function: Callable[[A], B], items: Iterable[A], count: int
) -> Iterator[tuple[A, B]]:
    """Each item with `function` of it, computed in the pool for `count` items ahead."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) > count:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        last, future = waiting.popleft()
        yield last, future.result()


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _place(sharding: NamedSharding, array: jax.Array, chunk: jax.Array, start: Any) -> jax.Array:
    """`array` with every shard's part from `start` on replaced by that of `chunk`, in place.

    As unsigned integers: XLA on CPUs widens and rounds a whole bfloat16 array for it.
    """
    unsigned = jnp.dtype(f"u{array.dtype.itemsize}")

    def within_shard(array: jax.Array, chunk: jax.Array, start: jax.Array) -> jax.Array:
        as_bits = jax.lax.bitcast_convert_type(array, unsigned)
        chunk_bits = jax.lax.bitcast_convert_type(chunk, unsigned)
        filled = jax.lax.dynamic_update_slice(as_bits, chunk_bits, tuple(start))
        return jax.lax.bitcast_convert_type(filled, array.dtype)

    spec = sharding.spec
    return jax.shard_map(
        within_shard, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )(array, chunk, start)

"""Sharded arrays filled from files: in chunks, bounded on the host, read ahead in threads."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Index = tuple[tuple[int, int], ...]  # (start, stop) of each axis

CHUNK_BYTES = 2 << 20  # of one device's shard, read and sent at a time
READS_AHEAD = 4  # chunks being read while one is sent
HOST_BYTES_PER_DEVICE = (READS_AHEAD + 2) * CHUNK_BYTES  # the most that is held beside the arrays


@dataclass(frozen=True)
class Target:
    """An array to fill: `read` gives a part of it, from the files, of `dtype`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    axes: tuple[int, ...]  # along which a shard is divided into chunks, the first first
    read: Callable[[Index], np.ndarray]

    @cached_property
    def shard(self) -> tuple[int, ...]:
        """The shape of every device's part."""
        return tuple(self.sharding.shard_shape(self.shape))

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The shape of what a device gets at a time: `CHUNK_BYTES` or less.

        What is not divided along `axes` stays whole, however large.
        """
        chunk = list(self.shard)
        for axis in self.axes:
            excess = math.ceil(math.prod(chunk) * self.dtype.itemsize / CHUNK_BYTES)
            chunk[axis] = max(1, chunk[axis] // excess)
        return tuple(chunk)

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Where chunks begin in a shard; the last of an axis ends with it, over the one before."""
        sizes = zip(self.shard, self.chunk, strict=True)
        return itertools.product(
            *([min(at, size - step) for at in range(0, size, step)] for size, step in sizes)
        )

    def read_chunk(self, start: tuple[int, ...]) -> list[tuple[jax.Device, np.ndarray]]:
        """The chunk of each device of this process; what several devices share is read once."""
        indices = {}
        for device, slices in self.sharding.addressable_devices_indices_map(self.shape).items():
            begins = [(s.start or 0) + at for s, at in zip(slices or (), start, strict=True)]
            ends = [begin + size for begin, size in zip(begins, self.chunk, strict=True)]
            indices[device] = tuple(zip(begins, ends, strict=True))
        parts = {index: self.read(index) for index in dict.fromkeys(indices.values())}
        return [(device, parts[index]) for device, index in indices.items()]

    def send(self, chunks: Sequence[tuple[jax.Device, np.ndarray]]) -> jax.Array:
        """The chunks of all devices as one array in the same sharding."""
        sizes = zip(self.chunk, self.shape, self.shard, strict=True)
        shape = tuple(step * (whole // part) for step, whole, part in sizes)
        parts = [jax.device_put(part, device) for device, part in chunks]
        return jax.make_array_from_single_device_arrays(shape, self.sharding, parts)


def fill(targets: Sequence[Target]) -> list[jax.Array]:
    """The arrays. Each process reads only what its devices hold; all take the same steps.

    The host holds at most `HOST_BYTES_PER_DEVICE` a device beside the arrays.
    """
    steps = ((number, at) for number, target in enumerate(targets) for at in target.starts())
    arrays: dict[int, jax.Array] = {}
    for number, at, chunks in _read_ahead(targets, steps):
        target, sent = targets[number], targets[number].send(chunks)
        if target.chunk == target.shard:
            arrays[number] = sent
            continue
        if number not in arrays:
            arrays[number] = jnp.zeros(target.shape, target.dtype, device=target.sharding)
        arrays[number] = _place(target.sharding, arrays[number], sent, np.array(at, np.uint32))
        arrays[number].block_until_ready()  # so that chunks do not pile up on their way
    return [arrays[number] for number in range(len(targets))]


def _read_ahead(
    targets: Sequence[Target], steps: Iterator[tuple[int, tuple[int, ...]]]
) -> Iterator[tuple[int, tuple[int, ...], list[tuple[jax.Device, np.ndarray]]]]:
    """Each step with its chunks, while those of the next `READS_AHEAD` are being read."""
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(READS_AHEAD) as pool:
        for number, at in steps:
            if len(waiting) == READS_AHEAD:
                first, start, chunks = waiting.popleft()
                yield first, start, chunks.result()
            waiting.append((number, at, pool.submit(targets[number].read_chunk, at)))
        while waiting:
            first, start, chunks = waiting.popleft()
            yield first, start, chunks.result()


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _place(sharding: NamedSharding, array: jax.Array, chunk: jax.Array, start: Any) -> jax.Array:
    """`array` with every shard's part from `start` on replaced by that of `chunk`, in place.

    As unsigned integers: XLA on CPUs widens and rounds a whole bfloat16 array for it.
    """
    unsigned = jnp.dtype(f"u{array.dtype.itemsize}")

    def within_shard(array: jax.Array, chunk: jax.Array, start: jax.Array) -> jax.Array:
        array_bits = jax.lax.bitcast_convert_type(array, unsigned)
        chunk_bits = jax.lax.bitcast_convert_type(chunk, unsigned)
        filled = jax.lax.dynamic_update_slice(array_bits, chunk_bits, tuple(start))
        return jax.lax.bitcast_convert_type(filled, array.dtype)

    spec = sharding.spec
    return jax.shard_map(
        within_shard, mesh=sharding.mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )(array, chunk, start)

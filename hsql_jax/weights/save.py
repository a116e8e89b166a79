"""Parameters to a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from hsql_jax.model import ModelConfig
from hsql_jax.model.qwen3 import Params
from hsql_jax.weights.files import INDEX, SHARDS, TENSORS, write_tensors
from hsql_jax.weights.layout import Leaf, hf_config, is_leaf, leaves

FILE_BYTES = 5_000_000_000  # a larger model becomes several files and an index


def save_hf(
    folder: str | Path, config: ModelConfig, params: Params, file_bytes: int = FILE_BYTES
) -> None:
    """Write a folder that `load_hf` reads back bit by bit, and transformers too.

    Files of at most `file_bytes` of tensors, unless a single tensor is larger. All processes of a
    run call this; the first one writes. The host holds one tensor at a time. Until the last step
    the folder has no `config.json`, so a folder that was left half-written loads nowhere.
    """
    folder = Path(folder)
    places = {
        name: (leaf, array, layer)
        for leaf, array in zip(
            jax.tree.leaves(leaves(config), is_leaf), jax.tree.leaves(params), strict=True
        )
        for layer, name in enumerate(leaf.names)
    }
    shapes = {name: leaf.stored_shape for name, (leaf, _, _) in places.items()}
    dtype = jnp.dtype(config.param_dtype)
    if other := {leaf.dtype for leaf in jax.tree.leaves(params)} - {dtype}:
        raise ValueError(f"parameters of {other} under a config of {dtype}")
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    parts = _split(sizes, file_bytes)
    first = jax.process_index() == 0
    for file, names in parts.items():
        tensors = (_gather(*places[name]) for name in names)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            part = {name: shapes[name] for name in names}
            write_tensors(_partial(folder / file), part, dtype, tensors)
        else:
            deque(tensors, maxlen=0)  # gathering takes every process
    if first:
        _put_in_place(folder, config, parts, sum(sizes.values()))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_hf")


def _split(sizes: Mapping[str, int], file_bytes: int) -> dict[str, list[str]]:
    """The names of each file's tensors, in order."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {TENSORS: groups[0]}
    files = (f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1))
    return dict(zip(files, groups, strict=True))


def _gather(leaf: Leaf, array: Any, layer: int) -> np.ndarray:
    """The stored tensor of a layer, on the host of every process."""
    if isinstance(array, jax.Array):
        bits = _layer_bits(array, np.uint32(layer), leaf.stacked)
        whole = np.asarray(multihost_utils.process_allgather(bits, tiled=True))
        return whole.T if leaf.turned else whole
    return np.asarray(leaf.view(array, layer))


@partial(jax.jit, static_argnums=2)
def _layer_bits(array: jax.Array, layer: Any, stacked: bool) -> jax.Array:
    """A layer as unsigned integers, which no backend rounds."""
    part = jax.lax.bitcast_convert_type(array, jnp.dtype(f"u{array.dtype.itemsize}"))
    return jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) if stacked else part


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def _put_in_place(
    folder: Path, config: ModelConfig, parts: Mapping[str, list[str]], total_bytes: int
) -> None:
    """Make the partial files the folder's model, in the place of one that was there before."""
    (folder / "config.json").unlink(missing_ok=True)
    for old in (folder / TENSORS, folder / INDEX, *folder.glob(SHARDS)):
        old.unlink(missing_ok=True)
    for file in parts:
        _partial(folder / file).replace(folder / file)
    if len(parts) > 1:
        weight_map = {name: file for file, names in parts.items() for name in names}
        _write_json(
            folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        )
    _write_json(folder / "config.json", hf_config(config))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    _partial(file).write_text(json.dumps(content, indent=2) + "\n")
    _partial(file).replace(file)

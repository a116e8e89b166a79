"""Safetensors files: their tensors as mapped memory, and writing one tensor after another."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from hsql_jax.errors import UserError

TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*.safetensors"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": jnp.dtype("bfloat16"),
    "F16": np.dtype(np.float16),
}


class Stored(NamedTuple):
    """One tensor of a file, mapped into memory: only what is indexed is read."""

    file: Path
    dtype: np.dtype
    bits: np.ndarray  # of unsigned integers as wide as `dtype`, which numpy copies faster


def bits(array: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers of the same width."""
    return array.view(f"u{array.dtype.itemsize}")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by name; `UserError` names the file that is missing or broken."""
    found: dict[str, Stored] = {}
    for file in _tensor_files(folder):
        for name, tensor in _tensors(file).items():
            if name in found:
                raise UserError(
                    f"{folder}: {name} is in {found[name].file.name} and in {file.name}; "
                    "remove the files that are not of this model"
                )
            found[name] = tensor
    return found


def _tensor_files(folder: Path) -> list[Path]:
    """The one file, those of the index, or without an index all that are named as shards."""
    if (folder / TENSORS).is_file():
        return [folder / TENSORS]
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(names))]
    if shards := sorted(folder.glob(SHARDS)):
        return shards
    raise UserError(
        f"{folder}: no {TENSORS}, no {INDEX} and no {SHARDS}; give a Hugging Face model folder"
    )


def _tensors(file: Path) -> dict[str, Stored]:
    start, header = _header(file)
    header.pop("__metadata__", None)
    if not header:
        return {}
    data = np.memmap(file, np.uint8, "r", offset=start)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise UserError(f"{file}: {name} is stored as {entry['dtype']}; known are {known}")
        dtype = DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        flat = data[begin:end].view(f"u{dtype.itemsize}")
        tensors[name] = Stored(file, dtype, flat.reshape(entry["shape"]))
    return tensors


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what the file says of each."""
    try:
        with safe_open(file, "numpy"):  # the library checks the header against the file's size
            pass
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            return 8 + size, json.loads(content.read(size))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({error}); copy the file again") from None


def write_tensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterable[np.ndarray],
) -> None:
    """Write a safetensors file, each tensor of `shapes` as it comes, and wait until it is on disk.

    Strips of 16 rows: turned views are copied fastest by lines of the processor's cache.
    """
    tag = next(tag for tag, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as content:
        content.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            rows = bits(tensor)
            for row in range(0, len(rows), 16):
                content.write(np.ascontiguousarray(rows[row : row + 16]).data)
        content.flush()
        os.fsync(content.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `UserError` when there is none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None

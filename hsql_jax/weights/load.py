"""Parameters from a Hugging Face folder, on the host or straight into the shards of a mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_shardings
from hsql_jax.model.qwen3 import Params
from hsql_jax.weights.files import Stored, bits, stored_tensors
from hsql_jax.weights.hub import model_folder
from hsql_jax.weights.layout import EMBED, HEAD, Leaf, is_leaf, leaves, read_config
from hsql_jax.weights.shards import Index, Target, fill


def load_hf(
    source: str | Path, dtype: str | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params]:
    """Config and parameters of a Hugging Face folder or hub id, such as Qwen/Qwen3-0.6B.

    With a `mesh` the parameters are arrays in their shardings. Each process reads the slices of its
    own devices, each once, and holds at most `HOST_BYTES_PER_DEVICE` a device beside the arrays.
    Without one they are numpy arrays on the host.

    `dtype` is that of parameters and activations; None keeps the stored one (float64 becomes
    float32). `UserError` names the file, key or tensor that is missing, unexpected or broken, or
    the dimension that the mesh does not divide.
    """
    folder = model_folder(source)
    stored = stored_tensors(folder)
    if EMBED not in stored:
        raise UserError(f"{folder}: no tensor {EMBED}, but {', '.join(sorted(stored)[:5])} ..")
    stored_dtype = stored[EMBED].dtype.name
    dtype = dtype or ("float32" if stored_dtype == "float64" else stored_dtype)
    config = read_config(folder / "config.json", dtype)
    flat, structure = jax.tree.flatten(leaves(config), is_leaf)
    _check(folder, config, flat, stored)
    kind = jnp.dtype(dtype)
    reads = [partial(_read, stored, kind, leaf) for leaf in flat]
    if mesh is None:
        wholes = (tuple((0, size) for size in leaf.shape) for leaf in flat)
        arrays = [read(whole) for read, whole in zip(reads, wholes, strict=True)]
        return config, jax.tree.unflatten(structure, arrays)
    try:
        shardings = jax.tree.leaves(param_shardings(mesh, config))
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    targets = [
        Target(leaf.shape, kind, sharding, (0, leaf.rows_axis), read)
        for leaf, sharding, read in zip(flat, shardings, reads, strict=True)
    ]
    return config, jax.tree.unflatten(structure, fill(targets))


SIZES = ("vocab_size", "d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff", "tied")


def load_into(model: ModelConfig, source: str | Path, mesh: Mesh) -> Params:
    """Parameters of a folder or hub id for `model`, in its dtype, over a mesh.

    `UserError` where the two differ in a size.
    """
    found, params = load_hf(source, dtype=model.param_dtype, mesh=mesh)
    for name in SIZES:
        if getattr(found, name) != getattr(model, name):
            raise UserError(
                f"{source}: {name} is {getattr(found, name)}, but the config's model has "
                f"{getattr(model, name)}"
            )
    return params


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

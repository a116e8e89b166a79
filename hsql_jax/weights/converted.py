"""A model as an Orbax checkpoint, made once: on any path that TensorStore writes, for any mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from hsql_jax.config import from_json, to_json
from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_shardings, param_specs
from hsql_jax.model.qwen3 import Params, is_spec
from hsql_jax.weights.load import load_hf

MODEL = "model.json"  # our config; written last, so a path that has it is complete
PARAMS = "params"


def convert(
    source: str | Path, target: str | Path, mesh: Mesh, dtype: str | None = None
) -> ModelConfig:
    """Load a Hugging Face folder or hub id over `mesh`, and write it to `target`.

    `target` is a new folder or bucket path (`gs://..`). Raises as `load_hf`, and `UserError` where
    `target` has a model already.
    """
    path = epath.Path(target)
    if (path / MODEL).exists():
        raise UserError(f"{path}: holds a model already; name another path")
    config, params = load_hf(source, dtype, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.resolve() / PARAMS, params, force=True)
    if jax.process_index() == 0:
        (path / MODEL).write_text(to_json(config))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("convert")
    return config


def load_converted(path: str | Path, mesh: Mesh) -> tuple[ModelConfig, Params]:
    """Config and parameters of a path that `convert` wrote, in their shardings over `mesh`.

    `UserError` where there is none, or the mesh does not divide it.
    """
    folder = epath.Path(path)
    if not (folder / MODEL).exists():
        raise UserError(f"{folder}: no {MODEL}; convert a model to this path first")
    config = from_json(ModelConfig, (folder / MODEL).read_text())
    try:
        shardings = param_shardings(mesh, config)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    target = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, config.param_dtype, sharding=sharding
        ),
        param_specs(config),
        shardings,
        is_leaf=is_spec,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        return config, checkpointer.restore(folder.resolve() / PARAMS, target)

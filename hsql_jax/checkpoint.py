"""Orbax checkpoints: train state beside a small JSON record, restored onto any mesh."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, init_params
from hsql_jax.train import TrainState, state_shardings

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save


class Checkpoints:
    """The checkpoints of one stage in one folder, the newest `keep` of them. A context manager."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        # Not in the background: the next step donates the very arrays that would be read.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self.directory = directory.resolve()
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, extra: dict[str, Any]) -> None:
        """Save under `state.step`; `extra` is JSON (data position, counters)."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
        )
        self._manager.save(step, args=args)

    def restore(
        self, model: ModelConfig, tx: optax.GradientTransformation, mesh: Mesh
    ) -> tuple[TrainState, dict[str, Any]]:
        """The newest state, laid out over `mesh`, and its `extra`. `UserError` if there is none."""
        step = self.latest()
        if step is None:
            raise UserError(f"{self.directory}: no complete checkpoint; run the stage first")
        shardings = state_shardings(mesh, model, tx)

        def fresh() -> TrainState:
            params = init_params(model, jax.random.key(0))
            return TrainState(step=jax.numpy.int32(0), params=params, opt_state=tx.init(params))

        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(fresh),
            shardings,
        )
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=args)
        return restored.state, restored.extra

"""Supervised stages: trajectories to examples, and training on them to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hsql_env.records import Message, Trajectory
from hsql_jax.chat import ChatRenderer, Tools
from hsql_jax.checkpoint import Checkpoints
from hsql_jax.data import Batch, BatchStream, Example, trim
from hsql_jax.metrics import RunLog
from hsql_jax.model import ModelConfig
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.train import Metrics, TrainState, create_state, make_train_step, train


@dataclass(frozen=True)
class StageConfig:
    """One supervised stage: warm-up or SFT."""

    steps: int
    rows: int  # packed rows an optimizer step
    row_tokens: int  # tokens of a row; longer examples are dropped and counted
    optim: OptimConfig


SCHEMA_CALL = '{"name": "sql_schema"'


def full_example(renderer: ChatRenderer, trajectory: Trajectory, tools: Tools) -> Example:
    """The whole trajectory as one example, loss on assistant tokens only, equation (6)."""
    return trim(Example(*renderer.render(trajectory.messages, tools)))


def static_example(renderer: ChatRenderer, trajectory: Trajectory) -> Example | None:
    """The static pair (question and schema -> SQL) of equation (3); None if no schema was read."""
    messages = trajectory.messages
    for call, observation in pairwise(messages):
        if call.role == "assistant" and SCHEMA_CALL in call.content:
            prompt = f"{observation.content}\n{trajectory.task.question}"
            pair = [
                Message(role="user", content=prompt),
                Message(role="assistant", content=trajectory.final_sql),
            ]
            return trim(Example(*renderer.render(pair, [])))
    return None


def run_stage(
    name: str,
    config: StageConfig,
    model: ModelConfig,
    examples: Iterable[Example],
    start: Callable[[], Any],
    mesh: Mesh,
    folder: Path,
    log: RunLog,
    seed: int,
    save_every: int,
) -> Any:
    """Train `config.steps` steps from the parameters of `start()`; return the final parameters.

    Continues from the newest checkpoint in `folder`, with the same data order, if there is one.
    """
    tx = make_optimizer(config.optim, config.steps)
    stream = BatchStream(examples, config.row_tokens, config.rows, seed)
    with Checkpoints(folder) as checkpoints:
        if checkpoints.latest() is None:
            state = create_state(start(), model, tx, mesh)
        else:
            state, extra = checkpoints.restore(model, tx, mesh)
            stream.restore(extra["data"])
        done = int(state.step)
        counts = stream.counts
        log.print(
            f"{name}: {counts.kept} examples in rows of {config.row_tokens} tokens, "
            f"{stream.fill:.0%} full; {counts.too_long} longer ones left out"
        )
        if done == 0:
            log.write(name, 0, {"fill": stream.fill, "dropped": counts.too_long})
        with log.stage(name, config.steps, "steps", done) as stage:

            def on_step(state: TrainState, metrics: Metrics) -> None:
                step = int(state.step)
                tokens = config.rows * config.row_tokens * stream.fill
                stage.advance(1, loss=metrics["loss"])
                log.write(name, step, metrics | {"tokens_per_s": stage.rate * tokens})
                if step % save_every == 0 or step == config.steps:
                    checkpoints.save(state, {"data": stream.state()})

            state = train(
                state,
                make_train_step(model, sft().loss, tx, mesh),
                lambda _: stack([next(stream)]),
                config.steps,
                on_step,
            )
    return state.params


def stack(batches: Sequence[Batch]) -> Batch:
    """Micro-batches [B, T] as one batch of leaves [A, B, T]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def restore_params(
    folder: Path, model: ModelConfig, tx: optax.GradientTransformation, mesh: Mesh
) -> Any:
    """The parameters of the newest checkpoint in `folder`."""
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(model, tx, mesh)[0].params

"""Supervised stages: trajectories to examples, and training on them to a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from hsql_env.records import Message, Trajectory
from hsql_env.teacher.takeover import first_mistake
from hsql_jax.chat import ChatRenderer, Tools
from hsql_jax.checkpoint import Checkpoints
from hsql_jax.config import fingerprint
from hsql_jax.data import Batch, BatchStream, Example, trim
from hsql_jax.data.organise import schemas_shown, static_pair
from hsql_jax.errors import UserError
from hsql_jax.metrics import RunLog
from hsql_jax.model import ModelConfig
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, eval_params, make_optimizer
from hsql_jax.train import Metrics, TrainState, create_state, make_train_step, skip_line, train


@dataclass(frozen=True)
class StageConfig:
    """One supervised stage."""

    steps: int
    rows: int  # packed rows an optimizer step
    row_tokens: int  # tokens of a row; longer examples are dropped and counted
    optim: OptimConfig

    def __post_init__(self) -> None:
        if min(self.steps, self.rows, self.row_tokens) < 1:
            raise ValueError(
                f"steps = {self.steps}, rows = {self.rows}, row_tokens = {self.row_tokens}: "
                "each must be at least 1"
            )


STATEMENT = re.compile(r"^(?=CREATE )", re.MULTILINE)  # where a table begins in a schema


def full_example(renderer: ChatRenderer, trajectory: Trajectory, tools: Tools) -> Example:
    """The whole trajectory as one example, loss on assistant tokens only, equation (6)."""
    return trim(Example(*renderer.render(trajectory.messages, tools)))


def correction_example(renderer: ChatRenderer, trajectory: Trajectory, tools: Tools) -> Example:
    """A trajectory that the teacher took over: loss on what follows the first mistake."""
    mistake = first_mistake(trajectory.messages)
    ids, mask = renderer.render(trajectory.messages, tools)
    begin = len(renderer.render(trajectory.messages[:mistake], tools)[0])  # ids are append-only
    return trim(Example(ids, [0] * begin + list(mask[begin:])))


def static_examples(
    renderer: ChatRenderer, trajectories: Iterable[Trajectory], length: int
) -> list[Example]:
    """The static pairs (question and schema -> SQL) of equation (3), several to a conversation.

    Pairs of one database share a conversation of at most `length` tokens, in which each table's
    schema is shown once, before the first question that needs it: most tokens of a pair are
    schema, so this multiplies the pairs a step can learn from. Trajectories that read no schema
    give no pair.
    """
    by_database: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_database[trajectory.task.database_id].append(trajectory)
    examples = []
    for group in by_database.values():
        messages: list[Message] = []
        shown: set[str] = set()
        for trajectory in group:
            tables = schema_read(trajectory)
            if not tables:
                continue
            question, sql = trajectory.task.question, trajectory.final_sql
            longer = messages + static_pair([t for t in tables if t not in shown], question, sql)
            if messages and len(renderer.render(longer, [])[0]) > length:
                examples.append(trim(Example(*renderer.render(messages, []))))
                longer, shown = static_pair(tables, question, sql), set()
            messages = longer
            shown.update(tables)
        if messages:
            examples.append(trim(Example(*renderer.render(messages, []))))
    return examples


def schema_read(trajectory: Trajectory) -> list[str]:
    """What the first `sql_schema` call of the trajectory showed, one string a table."""
    for shown in schemas_shown(trajectory.messages):
        return [table.rstrip("\n") for table in STATEMENT.split(shown) if table]
    return []


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
    """Train `config.steps` steps from the parameters of `start()`; return those to evaluate.

    Continues from the newest checkpoint in `folder`, with the same data order, if there is one.
    """
    tx = make_optimizer(config.optim, config.steps)
    stream = BatchStream(examples, config.row_tokens, config.rows, seed, packed=model.packed)
    with Checkpoints(folder, config=fingerprint(config), say=log.print) as checkpoints:
        if checkpoints.latest() is None:
            state = create_state(start(), model, tx, mesh)
        else:
            state, extra = checkpoints.restore(model, tx, mesh)
            try:
                stream.restore(extra["data"])
            except ValueError as error:
                raise UserError(
                    f"{folder}: the stage began on other data ({error}); delete this folder to "
                    "begin it again"
                ) from None
        done = int(state.step)
        counts = stream.counts
        log.print(
            f"{name}: {counts.kept} examples in rows of {config.row_tokens} tokens, "
            f"{stream.fill:.0%} full; {counts.too_long} longer ones left out, "
            f"{counts.without_policy_tokens} without a loss"
        )
        if done == 0:
            log.write(name, 0, {"fill": stream.fill, "dropped": counts.too_long})
        with log.stage(name, config.steps, "steps", done) as stage:

            def on_step(state: TrainState, metrics: Metrics) -> None:
                step = int(state.step)
                tokens = config.rows * config.row_tokens * stream.fill
                stage.advance(1, loss=metrics["loss"])
                if metrics["skipped"]:
                    log.print(f"{name}: {skip_line(state, metrics)}")
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
    return eval_params(state.opt_state, state.params)


def stack(batches: Sequence[Batch]) -> Batch:
    """Micro-batches [B, T] as one batch of leaves [A, B, T]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def restore_params(
    folder: Path, model: ModelConfig, tx: optax.GradientTransformation, mesh: Mesh
) -> Any:
    """The parameters to evaluate of the newest checkpoint in `folder`."""
    with Checkpoints(folder) as checkpoints:
        state, _ = checkpoints.restore(model, tx, mesh)
    return eval_params(state.opt_state, state.params)

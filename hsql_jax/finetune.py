"""`hsql sft`: supervised training on a file of conversations, on one device or many processes."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from hsql_jax import distributed
from hsql_jax.chat import ChatRenderer, load_tokenizer
from hsql_jax.checkpoint import Checkpoints
from hsql_jax.config import claim_run_folder, fingerprint, option, to_json
from hsql_jax.data import Batch
from hsql_jax.data.config import DataConfig, open_stream
from hsql_jax.data.records import read_conversations
from hsql_jax.distributed import ClusterConfig
from hsql_jax.errors import UserError
from hsql_jax.metrics import RunLog
from hsql_jax.model import ModelConfig, init_params, param_shardings
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, eval_params, make_optimizer
from hsql_jax.run_folder import mark, mark_ended
from hsql_jax.sharding import MeshConfig, batch_sharding, check_sizes, make_mesh, model_sizes
from hsql_jax.sinks import LogConfig, Sink, check_sinks, open_sinks
from hsql_jax.speed import Meter, mesh_peak, trace
from hsql_jax.train import (
    Metrics,
    TrainState,
    batch_loss,
    create_state,
    make_train_step,
    skip_line,
    train,
)
from hsql_jax.weights import load_into, save_hf


@dataclass(frozen=True)
class SftConfig:
    """One supervised run."""

    data: DataConfig
    model: ModelConfig
    tokenizer: Path  # a folder with tokenizer.json
    weights: str | None = None  # a Hugging Face folder or hub id; None: random parameters
    thinking: bool | None = None  # as `ChatRenderer`'s
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    epochs: int = 3
    micro_batches: int = 1  # a step's rows are taken in so many parts, one after the other
    held_out: Path | None = None  # records whose loss is measured with every checkpoint
    save_every: int = 50  # steps between checkpoints
    keep: int = 3  # the newest so many checkpoints stay, and the best on `held_out`
    max_skipped: int = 5  # steps in a row that are not finite before the run ends
    examples: int | None = None  # how many a dry run counts with while the data is not there
    seed: int = 0  # of random parameters; the data has its own
    run_dir: Path = option(Path("runs/sft"))
    resume: bool = option(False)
    dry_run: bool = option(False)  # print the plan and leave
    json: bool = option(False)  # print the plan as JSON
    trace_steps: int = option(0)  # steps to record with JAX's profiler, from the third on
    log: LogConfig = option(LogConfig())
    cluster: ClusterConfig = option(ClusterConfig())

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("epochs", "save_every", "keep")}
        if small := [f"{name} = {size}" for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{small[0]}: give at least 1")
        if self.micro_batches < 1 or self.data.rows % self.micro_batches:
            raise ValueError(
                f"micro_batches = {self.micro_batches} must divide data.rows = {self.data.rows}"
            )


def main(config: SftConfig) -> None:
    """Train, or print the plan. Continues from the newest checkpoint with `resume`.

    SIGTERM ends the run after the step it is in, with a checkpoint and status 0.
    """
    sizes = model_sizes(config.model) | {
        "batch": config.data.rows // config.micro_batches,
        "time": config.data.row_tokens,
    }
    check_sizes(config.mesh, sizes)
    if config.dry_run:
        found = plan(config)
        print(json.dumps(found, indent=2) if config.json else show(found))
        return
    distributed.start(config.cluster)
    first = distributed.is_first()
    sinks: list[Sink] = []

    def prepare() -> None:
        check_sinks(config.log)
        claim_run_folder(config.run_dir, config, config.resume)
        sinks.extend(open_sinks(config.log, config.run_dir, config))

    distributed.first_does(prepare)
    log = RunLog(config.run_dir, None if first else Console(quiet=True), keep=first, sinks=sinks)
    with closing(log), _stop_signal() as stopped:
        try:
            _run(config, log, stopped)
        except BaseException as error:
            if first:
                mark_ended(config.run_dir, error)
            raise


def plan(config: SftConfig) -> dict[str, Any]:
    """What a run will do: its counts, its mesh, its config, as JSON values."""
    count, source = _example_count(config)
    return {
        "trajectories": count,
        "source": source,
        "epochs": config.epochs,
        "rows": config.data.rows,
        "row_tokens": config.data.row_tokens,
        "micro_batches": config.micro_batches,
        "updates": config.epochs * math.ceil(count / config.data.rows),
        "updates_are_exact": not config.data.packed,  # else packing may need fewer
        "mesh": config.mesh.shape,
        "devices": config.mesh.devices,
        "config": json.loads(to_json(config)),
    }


def show(plan: dict[str, Any]) -> str:
    """The plan as lines for people."""
    at_most = "" if plan["updates_are_exact"] else " at most; packing puts several in a row"
    return "\n".join(
        [
            f"trajectories  {plan['trajectories']:,} ({plan['source']})",
            f"epochs        {plan['epochs']}",
            f"batch         {plan['rows']} rows of {plan['row_tokens']:,} tokens, "
            f"in {plan['micro_batches']} micro-batches",
            f"updates       {plan['updates']:,}{at_most}",
            f"mesh          {plan['mesh']}, {plan['devices']} devices",
            "config",
            json.dumps(plan["config"], indent=2),
        ]
    )


def _example_count(config: SftConfig) -> tuple[int, str]:
    if config.data.path.exists():
        records = read_conversations(config.data.path, config.data.format)
        return sum(1 for _ in records), f"records of {config.data.path}"
    if config.examples is None:
        raise UserError(f"{config.data.path} is not there; give --data.path, or --examples N")
    return config.examples, f"planned; {config.data.path} is not there yet"


def _run(config: SftConfig, log: RunLog, stopped: Callable[[], bool]) -> None:
    mesh = make_mesh(config.mesh)
    process, count = _share(config, mesh)
    renderer = ChatRenderer(load_tokenizer(config.tokenizer), config.thinking)
    model = dataclasses.replace(config.model, packed=config.data.packed)
    stream = open_stream(config.data, renderer, config.epochs, process, count)
    steps = config.epochs * stream.steps_per_epoch
    tx = make_optimizer(config.optim, steps)
    held_out = _held_out(config, renderer, process, count)
    measure = make_measure(model, mesh)
    place = _placer(config, mesh)
    counts = stream.counts
    log.print(
        f"sft: {counts.kept} examples, {counts.tokens:,} tokens, {counts.policy_tokens:,} with "
        f"loss; rows {stream.fill:.0%} full; {counts.too_long} too long, "
        f"{counts.without_policy_tokens} without a loss; {steps} steps"
    )
    _mark(config.run_dir, "running", steps=steps)
    folder = config.run_dir / "checkpoints"
    with (
        Checkpoints(folder, config.keep, fingerprint(config), log.print) as checkpoints,
        distributed.watchdog(config.cluster.stall_seconds) as beat,
    ):
        if checkpoints.latest() is None:
            state = create_state(_start(config, model, mesh), model, tx, mesh)
        else:
            state, extra = checkpoints.restore(model, tx, mesh)
            try:
                stream.restore(extra["data"])
            except ValueError as error:
                raise UserError(
                    f"{folder}: the run began on other data ({error}); bring that back, or choose "
                    "another folder with --run-dir"
                ) from None
        done = int(state.step)
        meter = Meter(model, mesh_peak(mesh))

        def next_batch(_: TrainState) -> Batch:
            with meter.waiting():
                batch = place(next(stream))
            meter.take(batch)
            return batch

        with (
            log.stage("sft", steps, "steps", done) as stage,
            trace(config.run_dir / "trace", config.trace_steps) as traced,
        ):

            def on_step(state: TrainState, metrics: Metrics) -> None:
                step = int(state.step)
                beat()
                speed = meter.lap(metrics["loss_tokens"])
                stage.advance(1, loss=metrics["loss"], **_shown(speed))
                row = metrics | speed | {"epoch": step / stream.steps_per_epoch}
                if metrics["skipped"]:
                    log.print(f"sft: {skip_line(state, metrics)}")
                if step % config.save_every == 0 or step == steps:
                    row |= _save(state)
                log.write("sft", step, row)
                traced()

            def _save(state: TrainState) -> Metrics:
                values = {}
                if held_out:
                    params = eval_params(state.opt_state, state.params)
                    values["held_out_loss"] = measure(params, map(place, held_out))
                score = -values["held_out_loss"] if values else None
                checkpoints.save(state, {"data": stream.state()}, score)
                return values

            state = train(
                state,
                make_train_step(model, sft().loss, tx, mesh),
                next_batch,
                steps,
                on_step,
                max_skipped=config.max_skipped,
                should_stop=lambda: distributed.any_process(stopped()),
            )
        if int(state.step) < steps:
            checkpoints.save(state, {"data": stream.state()})
            checkpoints.wait()
            _mark(config.run_dir, "stopped", step=int(state.step), steps=steps)
            log.print(f"sft: stopped after step {int(state.step)}; --resume continues it")
            return
    params = eval_params(state.opt_state, state.params)
    save_hf(config.run_dir / "model", model, params)
    _mark(config.run_dir, "finished", step=steps, steps=steps)
    log.print(f"sft: done; the model is in {config.run_dir / 'model'}")


def _share(config: SftConfig, mesh: Mesh) -> tuple[int, int]:
    """Which share of every batch this process brings, and of how many."""
    count = jax.process_count()
    rows = config.mesh.slices * config.mesh.data * config.mesh.fsdp
    if rows % count:
        raise UserError(
            f"{count} processes cannot share rows split over slices x data x fsdp = {rows}; make "
            f"that a multiple of {count}, with tensor and context inside a process"
        )
    return jax.process_index(), count


def _start(config: SftConfig, model: ModelConfig, mesh: Mesh) -> Any:
    """The parameters to begin with."""
    if config.weights is None:
        init = jax.jit(
            lambda: init_params(model, jax.random.key(config.seed)),
            out_shardings=param_shardings(mesh, model),
        )
        return init()
    return load_into(model, config.weights, mesh)


def _held_out(config: SftConfig, renderer: ChatRenderer, process: int, count: int) -> list[Batch]:
    if config.held_out is None:
        return []
    data = dataclasses.replace(config.data, path=config.held_out)
    return list(open_stream(data, renderer, 1, process, count))


def make_measure(model: ModelConfig, mesh: Mesh) -> Callable[[Any, Iterator[Batch]], float]:
    """A function `(params, batches) -> loss`: the mean over the policy tokens of all batches."""

    @jax.jit
    def sums(params: Any, batch: Batch) -> jax.Array:
        def one(micro: Batch) -> jax.Array:
            total, parts = batch_loss(params, model, sft().loss, micro, 1.0, mesh)
            return jnp.stack([total, parts.weight])

        return jax.lax.map(one, batch).sum(axis=0)

    def measure(params: Any, batches: Iterator[Batch]) -> float:
        total, weight = np.sum([np.asarray(sums(params, b), np.float64) for b in batches], axis=0)
        return float(total / weight)

    return measure


def _placer(config: SftConfig, mesh: Mesh) -> Callable[[Batch], Batch]:
    """Turns a process's rows [b, T] into its part of the global [A, B, T]."""
    sharding = batch_sharding(mesh)

    def split(leaf: Any) -> Any:
        return leaf.reshape(config.micro_batches, -1, leaf.shape[-1])

    return lambda batch: distributed.global_arrays(jax.tree.map(split, batch), sharding)


def _shown(speed: Metrics) -> dict[str, str]:
    """What the console says of a step's speed."""
    mfu = {"MFU": f"{speed['mfu']:.1%}"} if "mfu" in speed else {}
    return {"tokens/s": f"{speed['tokens_per_s']:,.0f}"} | mfu


def _mark(run_dir: Path, status: str, **values: Any) -> None:
    if distributed.is_first():
        mark(run_dir, status, **values)


@contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM, a scheduler's notice, has come since."""
    came: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, previous)

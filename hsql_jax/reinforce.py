"""`hsql rl`: policy optimisation from a model folder, with rollouts in the environment service."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsql_env.analysis.episodes import pick_episodes
from hsql_env.analysis.report import render_report
from hsql_env.driver import run_episodes
from hsql_env.records import PublicTask, Task, Trajectory, read_jsonl
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess
from hsql_env.teacher.oracle import Oracle
from hsql_jax.chat import ChatRenderer, load_tokenizer
from hsql_jax.config import claim_run_folder, option
from hsql_jax.errors import UserError
from hsql_jax.evaluate import (
    EvalConfig,
    change_line,
    changes,
    decoding_name,
    evaluate,
    split_summary,
)
from hsql_jax.metrics import RunLog, final_table, read_metrics
from hsql_jax.model.config import AttentionName, Remat
from hsql_jax.objectives import resolve
from hsql_jax.optim import make_optimizer
from hsql_jax.rl import RlConfig, run_rl
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.rollout.environment import environment
from hsql_jax.rollout.player import Player
from hsql_jax.run_folder import mark, mark_ended, write_whole
from hsql_jax.sharding import Meshes, make_meshes
from hsql_jax.sinks import LogConfig, check_sinks, open_sinks
from hsql_jax.train import Metrics
from hsql_jax.weights import load_hf, save_hf

Stages = dict[str, dict[str, dict[str, list[Trajectory]]]]  # stage -> split -> decoding


@dataclass(frozen=True)
class RlRunConfig:
    """One run of reinforcement learning."""

    tasks: Path  # task records; those of split "train" are trained on, the others evaluated
    databases: Path  # the register of their databases
    tokenizer: Path  # a folder with tokenizer.json
    weights: str  # a Hugging Face folder or hub id: where the policy starts
    rl: RlConfig
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    evaluation: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    thinking: bool | None = None  # as `ChatRenderer`'s
    dtype: str = "float32"  # of activations and matrix products
    remat: Remat = "full"
    attention: AttentionName = "auto"
    meshes: Meshes = dataclasses.field(default_factory=Meshes)
    call_tokens: int = 96  # most new tokens of one model call
    workers: int = 2  # sandbox processes of the environment service
    replayed: int = 64  # reference queries that must earn their reward before the first step
    eval_tasks: int = 1024  # held-out tasks a split, before and after
    watched: int = 128  # of them, those evaluated every `rl.eval_every` iterations
    seed: int = 0
    run_dir: Path = option(Path("runs/rl"))
    resume: bool = option(False)
    log: LogConfig = option(LogConfig())

    def __post_init__(self) -> None:
        for name in ("call_tokens", "workers", "eval_tasks", "watched"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")
        if self.replayed < 0:
            raise ValueError(f"replayed = {self.replayed}: give at least 0")


def main(config: RlRunConfig) -> None:
    """Evaluate, train, evaluate again; leaves `summary.json`, `report.html` and the model."""
    # Before the folder is claimed, so that bad input leaves nothing behind.
    resolve(config.rl.objective)
    make_optimizer(config.rl.optim, 1)
    check_sinks(config.log)
    splits = read_splits(config.tasks)
    claim_run_folder(config.run_dir, config, config.resume)
    sinks = open_sinks(config.log, config.run_dir, config)
    with closing(RunLog(config.run_dir, sinks=sinks)) as log:
        try:
            mark(config.run_dir, "running")
            run(config, splits, log)
        except BaseException as error:
            mark_ended(config.run_dir, error)
            raise
        mark(config.run_dir, "finished")


def read_splits(file: Path) -> dict[str, list[Task]]:
    """The tasks of each split. `UserError` without any to train on."""
    if not file.exists():
        raise UserError(f"{file} is not there; give the tasks' file with --tasks")
    splits: dict[str, list[Task]] = {"train": []}
    for task in read_jsonl(file, Task):
        splits.setdefault(task.public.split, []).append(task)
    if not splits["train"]:
        raise UserError(f"{file}: no task of split train; there are {sorted(splits)}")
    return splits


def run(config: RlRunConfig, splits: dict[str, list[Task]], log: RunLog) -> None:
    """The stages of a run, those already on file read back."""
    mesh, rollout_mesh = make_meshes(config.meshes)
    found, start = load_hf(config.weights, dtype="float32", mesh=mesh)
    model = dataclasses.replace(
        found, dtype=config.dtype, remat=config.remat, attention=config.attention
    )
    renderer = ChatRenderer(load_tokenizer(config.tokenizer), config.thinking)
    held_out = {
        split: [task.public for task in tasks][: config.eval_tasks]
        for split, tasks in splits.items()
        if split != "train"
    }
    folder = config.run_dir / "trajectories"
    folder.mkdir(exist_ok=True)
    with environment(config.tasks, config.databases, config.workers) as service:
        replay(config, service, splits["train"], log)
        sizes = config.engine, renderer, config.call_tokens
        with Player(service.url, model, *sizes, service.check, rollout_mesh) as player:

            def play(params: Any, stage: str) -> dict[str, dict[str, list[Trajectory]]]:
                """Every split and way of decoding of a stage's policy."""
                temperatures = config.evaluation.temperatures
                temperatures += config.evaluation.sharpened if stage == "start" else ()
                results: dict[str, dict[str, list[Trajectory]]] = {}
                for split, tasks in held_out.items():
                    for temperature in temperatures:
                        way = decoding_name(temperature)
                        name = f"{stage}-{split}-{way}"
                        results.setdefault(split, {})[way] = evaluate(
                            player, params, tasks, temperature, name, config.seed,
                            folder / f"{name}.jsonl", log,
                        )  # fmt: skip
                return results

            def measure(params: Any, iteration: int) -> Metrics:
                """Greedy accuracy on the first tasks of each split, in the middle of training."""
                values = {}
                for split, tasks in held_out.items():
                    jobs = [(task, config.seed) for task in tasks[: config.watched]]
                    played = player.play(params, jobs, 0.0, f"rl@{iteration}")
                    right = sum(one.rollout.trajectory.verdict.result_ok for one in played)
                    values[f"accuracy_{split}"] = right / len(jobs)
                return values

            stages = {"start": play(start, "start")}
            trained = run_rl(
                config.rl, model, start, player, [task.public for task in splits["train"]], mesh,
                config.run_dir / "checkpoints", folder / "rl.jsonl",
                config.engine.session_tokens, log, config.seed, measure,
            )  # fmt: skip
            save_hf(config.run_dir / "model", model, trained)
            stages["rl"] = play(trained, "rl")
    conclude(config, stages, log)


def replay(
    config: RlRunConfig, service: ServiceProcess, tasks: Sequence[Task], log: RunLog
) -> None:
    """Submit reference queries through the service: each must earn its reward.

    `UserError` for one that does not, since a policy would then be taught the verifier's fault.
    """
    chosen = tasks[: config.replayed]
    jobs: list[tuple[PublicTask, int]] = [(task.public, config.seed) for task in chosen]

    async def play() -> list[Trajectory]:
        async with AsyncEnvironment(service.url) as env:
            rollouts = await run_episodes(env, jobs, Oracle(chosen), 16)
            return [rollout.trajectory for rollout in rollouts]

    played = asyncio.run(play())
    for trajectory in played:
        if trajectory.verdict.reward != 1:
            raise UserError(
                f"{config.tasks}: the reference query of task {trajectory.task.task_id} earns "
                f"{trajectory.verdict.reward} ({trajectory.verdict.infrastructure or 'its result'}"
                f" or its protocol is refused: {dict(trajectory.verdict.violations)}); mend the "
                "task, or leave this check out with --replayed 0"
            )
    log.print(f"rl: the reference queries of {len(played)} tasks earn their reward")


def conclude(config: RlRunConfig, stages: Stages, log: RunLog) -> None:
    """`summary.json`, `report.html`, and the tables on the console."""
    summary: dict[str, Any] = {
        "stages": {
            stage: {split: split_summary(by) for split, by in splits.items()}
            for stage, splits in stages.items()
        },
        "changes": changes(
            ("start", stages["start"]), ("rl", stages["rl"]), config.evaluation.resamples
        ),
        "objective": config.rl.objective,
        "seed": config.seed,
        "wall_seconds": log.stage_seconds,
    }
    write_whole(config.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    episodes = {
        f"{stage}, {split}": pick_episodes(by["greedy"])
        for stage, splits in stages.items()
        for split, by in splits.items()
    }
    page = render_report(summary, read_metrics(config.run_dir), episodes)
    write_whole(config.run_dir / "report.html", page)
    log.print(final_table(summary))
    for row in summary["changes"]:
        log.print(change_line(row))
    log.print(f"{config.run_dir / 'summary.json'}, report.html and model beside it")

"""Evaluation in the environment service: episodes, accuracy with intervals, paired changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsql_env.analysis.behaviour import behaviour
from hsql_env.analysis.stats import paired_bootstrap, significance_text, wilson_interval
from hsql_env.records import PublicTask, Trajectory, read_jsonl, write_jsonl
from hsql_jax.errors import UserError
from hsql_jax.metrics import RunLog
from hsql_jax.rollout.player import Player


@dataclass(frozen=True)
class EvalConfig:
    """How each stage's policy is evaluated, on seen and on unseen databases."""

    base_tasks: int = 32  # the base fails nearly everything: fewer tasks tell as much
    temperatures: tuple[float, ...] = (0.0, 1.0)  # of every stage; 0 is greedy
    sharpened: tuple[float, ...] = (0.5,)  # of the SFT policy besides: what sharpening alone gives
    resamples: int = 4_000  # of the bootstrap intervals

    def __post_init__(self) -> None:
        if 0.0 not in self.temperatures:
            raise ValueError(f"temperatures {self.temperatures} lack 0, the greedy evaluation")
        if self.base_tasks < 1:
            raise ValueError(f"base_tasks = {self.base_tasks}: evaluate at least one task")


ByDecoding = Mapping[str, Sequence[Trajectory]]  # "greedy", "t1", ... -> one trajectory a task


def decoding_name(temperature: float) -> str:
    """The key of a way of decoding in `summary.json`: greedy, t1, t0.5."""
    return "greedy" if temperature == 0 else f"t{temperature:g}"


def evaluate(
    player: Player,
    params: Any,
    tasks: Sequence[PublicTask],
    temperature: float,
    name: str,
    seed: int,
    file: Path,
    log: RunLog,
) -> list[Trajectory]:
    """Play each task once and store the trajectories in `file`; a stored evaluation is read back.

    Raises `UserError` when the environment failed in an episode: a share over the rest would not
    be the accuracy over all tasks.
    """
    if file.exists():
        return list(read_jsonl(file, Trajectory))
    with log.stage(name, len(tasks), "episodes") as stage:
        played = player.play(
            params,
            [(task, seed) for task in tasks],
            temperature,
            name,
            lambda rollout: stage.advance(1),
        )
    trajectories = [one.rollout.trajectory for one in played]
    for trajectory in trajectories:
        if trajectory.verdict.infrastructure:
            raise UserError(
                f"{name}: the environment failed on task {trajectory.task.task_id}: "
                f"{trajectory.verdict.infrastructure}; run again with --resume"
            )
    write_jsonl(file, trajectories)
    return trajectories


def correct(trajectories: Sequence[Trajectory]) -> list[int]:
    """1 for each trajectory whose submitted result equals the reference's, equation (14)."""
    return [int(trajectory.verdict.result_ok) for trajectory in trajectories]


def split_summary(by_decoding: ByDecoding) -> dict[str, Any]:
    """Accuracy, tasks and Wilson interval of each way of decoding; behaviour, greedy and at T=1."""
    summary: dict[str, Any] = {}
    for decoding, trajectories in by_decoding.items():
        right, total = sum(correct(trajectories)), len(trajectories)
        summary[decoding] = {
            "accuracy": right / total,
            "tasks": total,
            "interval": list(wilson_interval(right, total)),
        }
    for key, decoding in (("behaviour", "greedy"), ("behaviour_t1", "t1")):
        if decoding in by_decoding:
            rates = behaviour(by_decoding[decoding])
            summary[key] = {name: rate.as_dict() for name, rate in rates.items()}
    return summary


def changes(
    before: tuple[str, Mapping[str, ByDecoding]],
    after: tuple[str, Mapping[str, ByDecoding]],
    resamples: int,
) -> list[dict[str, Any]]:
    """Paired bootstrap of each accuracy that two stages share, over the tasks both played."""
    rows = []
    for split, decodings in after[1].items():
        for decoding, trajectories in decodings.items():
            earlier = {t.task.task_id: t for t in before[1][split].get(decoding, ())}
            pairs = [
                (earlier[t.task.task_id], t) for t in trajectories if t.task.task_id in earlier
            ]
            if not pairs:
                continue
            change = paired_bootstrap(
                correct([old for old, _ in pairs]), correct([new for _, new in pairs]), resamples
            )
            rows.append(
                {
                    "before": before[0],
                    "after": after[0],
                    "split": split,
                    "decoding": decoding,
                    "tasks": len(pairs),
                    "mean": change.mean,
                    "low": change.low,
                    "high": change.high,
                    "verdict": significance_text(change.mean, change.low, change.high),
                }
            )
    return rows


def change_line(row: Mapping[str, Any]) -> str:
    """One of `changes` for people."""
    return (
        f"{row['before']} -> {row['after']}, {row['split']}, {row['decoding']}: "
        f"{row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] {row['verdict']}"
    )

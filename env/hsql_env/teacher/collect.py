"""Collect a policy's trajectories over tasks, and keep those whose result and protocol verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hsql_env.driver import Policy, Rollout, run_episodes
from hsql_env.records import PublicTask, Trajectory, read_jsonl
from hsql_env.service.client import AsyncEnvironment

SEEDS_PER_RUN = 1_000  # rollouts of one run seed, so that two run seeds never share an episode

Progress = Callable[[int, int], None]  # (episodes done, episodes in all)


@dataclass
class Collection:
    """What a collection gave: the trajectories that verify, and why the others do not."""

    kept: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> trajectories
    failures: Counter[str] = field(default_factory=Counter)  # why the harness failed, likewise

    def add(self, trajectory: Trajectory) -> None:
        """Keep the trajectory, or count the reason it is dropped for."""
        reason = drop_reason(trajectory)
        if reason:
            self.dropped[reason] += 1
            if trajectory.verdict.infrastructure:
                self.failures[trajectory.verdict.infrastructure] += 1
        else:
            self.kept.append(trajectory)


def drop_reason(trajectory: Trajectory) -> str:
    """Return why a trajectory is no training example, "" where it is one."""
    verdict = trajectory.verdict
    if verdict.infrastructure:
        return "infrastructure"
    if not verdict.submitted:
        return "no submit"
    if not verdict.protocol_ok:
        return "protocol"
    return "" if verdict.result_ok else "wrong result"


async def collect(
    env: AsyncEnvironment,
    tasks: Iterable[PublicTask],
    policy: Policy,
    rollouts: int,
    seed: int,
    concurrency: int,
    on_progress: Progress,
    sink: Path,
) -> Collection:
    """Run `rollouts` episodes a task and return those kept, in the order of tasks and rollouts.

    Every trajectory is appended to the JSON Lines file `sink` as it finishes, whatever its
    verdict; what an earlier, interrupted call stored there is not run again. An episode that the
    harness failed is counted but not stored, so that a later call tries it again.
    """
    first = seed * SEEDS_PER_RUN
    jobs = [(task, first + rollout) for task in tasks for rollout in range(rollouts)]
    wanted = {(task.task_id, job_seed) for task, job_seed in jobs}
    done = {_key(t): t for t in stored(sink) if _key(t) in wanted}
    left = [(task, job_seed) for task, job_seed in jobs if (task.task_id, job_seed) not in done]
    on_progress(len(done), len(jobs))
    with sink.open("a", encoding="utf-8") as file:

        def finished(rollout: Rollout) -> None:
            trajectory = rollout.trajectory
            done[_key(trajectory)] = trajectory
            on_progress(len(done), len(jobs))
            if not trajectory.verdict.infrastructure:
                file.write(trajectory.model_dump_json() + "\n")
                file.flush()

        await run_episodes(env, left, policy, concurrency, finished)
    collection = Collection()
    for task, job_seed in jobs:
        collection.add(done[task.task_id, job_seed])
    return collection


def stored(sink: Path) -> list[Trajectory]:
    """Return the trajectories of `sink`, after cutting a last line that was not written whole."""
    if not sink.exists():
        sink.parent.mkdir(parents=True, exist_ok=True)
        return []
    content = sink.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with sink.open("r+b") as file:
            file.truncate(whole)
    return list(read_jsonl(sink, Trajectory))


def _key(trajectory: Trajectory) -> tuple[str, int]:
    return trajectory.task.task_id, trajectory.seed

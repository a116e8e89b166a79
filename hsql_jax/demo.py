"""The whole loop in one command: databases, tasks, teacher, warm-up, SFT, RL, evaluation, report.

SFT has two parts: `sft` and, after the policy's own mistakes were mended, `refine`. What results
and report call SFT is the policy after both.

Each stage writes its result into the run folder under a name that appears only when it is whole;
`--resume` reads finished stages back and goes on with the first that is missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from hsql_env.analysis.episodes import pick_episodes
from hsql_env.analysis.report import render_report
from hsql_env.harness.tools import SYSTEM_PROMPT, TOOLS
from hsql_env.records import Database, PublicTask, Task, Trajectory, read_jsonl, write_jsonl
from hsql_env.registry import open_database, open_folder
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess
from hsql_env.tasks.examples import write_examples
from hsql_env.tasks.overlap import overlap
from hsql_env.tasks.splits import split_tasks
from hsql_env.tasks.synth import synthesise_all
from hsql_env.teacher.collect import collect
from hsql_env.teacher.scripted import ScriptedTeacher
from hsql_env.teacher.takeover import TakeOver, correction_problem
from hsql_jax.chat import ChatRenderer, load_tokenizer, template_fragments
from hsql_jax.config import claim_run_folder
from hsql_jax.data import Example
from hsql_jax.demo_config import DemoConfig
from hsql_jax.errors import UserError
from hsql_jax.evaluate import change_line, changes, decoding_name, evaluate, split_summary
from hsql_jax.metrics import RunLog, final_table, read_metrics
from hsql_jax.model import ModelConfig, init_params
from hsql_jax.objectives import resolve
from hsql_jax.optim import make_optimizer
from hsql_jax.rl import NothingToLearn, run_rl
from hsql_jax.rollout.environment import environment
from hsql_jax.rollout.player import Player
from hsql_jax.run_folder import write_whole
from hsql_jax.sft import (
    correction_example,
    full_example,
    restore_params,
    run_stage,
    static_examples,
)
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.tokenizer import frequent_fragments, tool_call_fragments, train_tokenizer
from hsql_jax.weights import save_hf

SPLITS = ("seen", "unseen")
Results = dict[str, dict[str, dict[str, list[Trajectory]]]]  # stage -> split -> decoding


@dataclass(frozen=True)
class Run:
    """One demo run: its config, its folder, its log and its devices."""

    config: DemoConfig
    folder: Path
    log: RunLog
    mesh: Mesh

    def path(self, *parts: str) -> Path:
        """A path in the run folder; its parent exists."""
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def main(config: DemoConfig) -> None:
    """Run or resume the demo; prints the final table and leaves `summary.json`, `report.html`."""
    # Before the folder is claimed, so that bad input leaves nothing behind.
    resolve(config.rl.objective)
    for stage in (config.warmup, config.sft, config.refine, config.rl):
        make_optimizer(stage.optim, 1)
    given = None if config.databases is None else open_folder(config.databases)
    claim_run_folder(config.run_dir, config, config.resume)
    run = Run(config, config.run_dir, RunLog(config.run_dir), make_mesh(MeshConfig()))
    begun = time.monotonic()
    with timed(run, "total"):
        tasks, trajectories, results = run_stages(run, given)
        finish(run, tasks, trajectories, results, time.monotonic() - begun)


def run_stages(
    run: Run, given: list[Database] | None
) -> tuple[list[Task], list[Trajectory], Results]:
    """Every stage that is not finished; the tasks, the teacher's trajectories, the evaluations."""
    tasks = make_data(run, given)
    files = run.path("data", "tasks.jsonl"), run.path("data", "databases.jsonl")
    with environment(*files, run.config.workers) as service:
        trajectories = teach(run, service, tasks)
        renderer, model = make_tokenizer(run, trajectories)
        base = warm_up(run, renderer, model, trajectories)
        first = fine_tune(run, renderer, model, trajectories, base)
        sizes = run.config.engine, renderer, run.config.call_tokens
        with Player(service.url, model, *sizes, on_failure=service.check) as player:
            corrections = correct(run, player, first, tasks)
            sft = refine(run, renderer, model, trajectories, corrections, first)
            rl = reinforce(run, model, sft, player, tasks)
            export(run, model, {"sft": sft, "rl": rl})
            results = evaluate_all(run, player, {"base": base, "sft": sft, "rl": rl}, tasks)
    return tasks, trajectories, results


def export(run: Run, model: ModelConfig, policies: Mapping[str, Any]) -> None:
    """Each policy as a Hugging Face folder, where `hsql rl` and others can begin."""
    for name, params in policies.items():
        folder = run.path("models", name)
        if not (folder / "config.json").exists():
            save_hf(folder, model, params)


# --- data --------------------------------------------------------------------------------------


def make_data(run: Run, given: list[Database] | None) -> list[Task]:
    """Verified tasks over the given or the embedded databases, in train, seen and unseen."""
    file, register = run.path("data", "tasks.jsonl"), run.path("data", "databases.jsonl")
    config = run.config
    if file.exists():
        if given is not None and given != list(read_jsonl(register, Database)):
            raise UserError(
                f"{config.databases}: not the files that {run.folder} began with; put those back, "
                "or choose another folder with --run-dir"
            )
        return list(read_jsonl(file, Task))
    databases = embedded_databases(run) if given is None else given
    with timed(run, "tasks"), run.log.stage("tasks", len(databases), "databases") as stage:
        tasks, report = synthesise_all(
            databases,
            config.tasks.tasks_per_database,
            config.seed,
            processes=2,
            on_progress=lambda done, total, made: stage.advance(done - stage.done, tasks=made),
        )
    by_database: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_database[task.public.database_id].append(task)
    problems = {name: entry.problem for name, entry in report.databases.items() if entry.problem}
    if len(by_database) < 2:
        raise UserError(
            f"{config.databases or 'the embedded set'}: {len(by_database)} of {len(databases)} "
            "databases gave tasks and at least 2 are needed, one to train on and one to hold out; "
            f"reasons: {problems or dict(report.deaths)}"
        )
    most = len(by_database) - 1  # one is left to train on
    unseen = min(max(1, round(config.tasks.unseen_share * len(by_database))), most)
    held_out = max(1, min(config.tasks.eval_tasks, len(tasks) // 4))
    splits = split_tasks(by_database, config.seed, unseen, held_out, held_out)
    if not splits.train:
        raise UserError(
            f"{config.databases or 'the embedded set'}: none of {len(tasks)} tasks is left to "
            f"train on, {splits.dropped} share SQL with held-out ones; "
            "raise --tasks.tasks-per-database or give more databases"
        )
    facts = {
        "databases": len(databases),
        "databases with tasks": len(by_database),
        "tasks": {"train": len(splits.train), **{s: len(getattr(splits, s)) for s in SPLITS}},
        "training tasks dropped for sharing SQL with a held-out one": splits.dropped,
        "tasks by family": dict(Counter(task.public.kind for task in tasks).most_common()),
        "share of candidates that survive each layer": report.survival(),
        "databases without tasks": problems,
    }
    write_whole(run.path("data", "facts.json"), json.dumps(facts, indent=2) + "\n")
    run.log.print(
        f"tasks: {len(by_database)} of {len(databases)} databases give tasks; {len(splits.train)} "
        f"to train on, {len(splits.seen)} seen and {len(splits.unseen)} unseen"
        + (f"; the other databases: {problems}" if problems else "")
    )
    chosen = [*splits.train, *splits.seen, *splits.unseen]
    write_jsonl(register, databases)
    write_jsonl(file, chosen)
    return chosen


def embedded_databases(run: Run) -> list[Database]:
    """The embedded set, written into the run folder."""
    folder = run.path("data", "databases")
    paths = write_examples(folder, run.config.tasks.databases, run.config.seed)
    return [open_database(path) for path in paths]


# --- teacher and tokenizer ---------------------------------------------------------------------


def teach(run: Run, service: ServiceProcess, tasks: Sequence[Task]) -> list[Trajectory]:
    """One trajectory of the scripted bootstrap teacher a training task; those that verify."""
    sink = run.path("trajectories", "teacher.jsonl")
    file = run.path("data", "corpus.jsonl")
    if file.exists():
        return list(read_jsonl(file, Trajectory))
    train = [task for task in tasks if task.public.split == "train"]
    teacher = ScriptedTeacher(
        {task.public.task_id: task for task in train}, error_rate=run.config.tasks.error_rate
    )

    async def play() -> list[Trajectory]:
        async with AsyncEnvironment(service.url) as env:
            public = [task.public for task in train]
            collection = await collect(env, public, teacher, 1, run.config.seed, 32, advance, sink)
        refuse_failures("teacher", collection.failures)
        dropped = dict(collection.dropped) or "none"
        run.log.print(
            f"teacher, scripted and reading each task's blueprint: {len(collection.kept)} "
            f"trajectories kept, dropped: {dropped}"
        )
        return collection.kept

    with timed(run, "teacher"), run.log.stage("teacher", len(train), "episodes") as stage:

        def advance(done: int, total: int) -> None:
            service.check()
            stage.advance(done - stage.done)

        kept = asyncio.run(play())
    if not kept:
        raise UserError(f"teacher: no trajectory verified; see {sink}")
    write_jsonl(file, kept)
    return kept


def refuse_failures(stage: str, failures: Counter[str]) -> None:
    """Raises `UserError` if the environment failed in an episode: the data would have holes."""
    if failures:
        reason, _ = failures.most_common(1)[0]
        raise UserError(
            f"{stage}: the environment failed in {failures.total()} episodes, most often with "
            f"{reason!r}; run again with --resume"
        )


def make_tokenizer(
    run: Run, trajectories: Sequence[Trajectory]
) -> tuple[ChatRenderer, ModelConfig]:
    """The word-level tokenizer of the training corpus, and the model sized for it."""
    folder = run.path("tokenizer")
    config = run.config.model
    if not (folder / "tokenizer.json").exists():
        texts = [
            message.content
            for trajectory in trajectories
            for message in trajectory.messages
            if message.role != "system"
        ]
        known = template_fragments(SYSTEM_PROMPT, TOOLS) + tool_call_fragments(TOOLS)
        fragments = known + frequent_fragments(texts, known, min_count=30, limit=300)
        try:
            train_tokenizer(texts, fragments, folder, max_vocab=config.vocab_size, min_count=5)
        except ValueError as error:
            raise UserError(f"{error}; raise --model.vocab-size") from None
    tokenizer = load_tokenizer(folder)
    model = dataclasses.replace(config, vocab_size=len(tokenizer))
    return ChatRenderer(tokenizer), model


# --- training ----------------------------------------------------------------------------------


def warm_up(
    run: Run, renderer: ChatRenderer, model: ModelConfig, trajectories: Sequence[Trajectory]
) -> Any:
    """From scratch, on question and schema -> SQL: the base that SFT starts from."""

    return supervised(
        run,
        "warmup",
        model,
        lambda: static_examples(renderer, trajectories, run.config.warmup.row_tokens),
        lambda: init_params(model, jax.random.key(run.config.seed)),
    )


def fine_tune(
    run: Run,
    renderer: ChatRenderer,
    model: ModelConfig,
    trajectories: Sequence[Trajectory],
    base: Any,
) -> Any:
    """SFT on whole trajectories, loss on assistant tokens only."""
    return supervised(
        run,
        "sft",
        model,
        lambda: [full_example(renderer, trajectory, TOOLS) for trajectory in trajectories],
        lambda: base,
    )


def correct(run: Run, player: Player, params: Any, tasks: Sequence[Task]) -> list[Trajectory]:
    """The policy's own mistakes on training tasks, each followed by the teacher's recovery."""
    file = run.path("data", "corrections.jsonl")
    if file.exists():
        return list(read_jsonl(file, Trajectory))
    config = run.config.corrections
    train = {task.public.task_id: task for task in tasks if task.public.split == "train"}
    teacher = ScriptedTeacher(train)
    chosen = random.Random(run.config.seed).sample(sorted(train), min(config.tasks, len(train)))
    jobs = [(train[task_id].public, run.config.seed) for task_id in chosen]
    with timed(run, "corrections"), run.log.stage("corrections", len(jobs), "episodes") as stage:
        played = player.play(
            params,
            jobs,
            config.temperature,
            "student",
            lambda rollout: stage.advance(1),
            lambda student: TakeOver(student, teacher),
        )
    trajectories = [one.rollout.trajectory for one in played]
    reasons = Counter(correction_problem(trajectory) for trajectory in trajectories)
    failures = (t.verdict.infrastructure for t in trajectories)
    refuse_failures("corrections", Counter(filter(None, failures)))
    mended = [t for t in trajectories if not correction_problem(t)]
    run.log.print(
        f"corrections: {len(mended)} of {len(jobs)} episodes were mended, the others: "
        f"{ {reason: count for reason, count in reasons.items() if reason} or 'none' }"
    )
    write_jsonl(run.path("trajectories", "corrections.jsonl"), trajectories)
    write_jsonl(file, mended)
    return mended


def refine(
    run: Run,
    renderer: ChatRenderer,
    model: ModelConfig,
    trajectories: Sequence[Trajectory],
    corrections: Sequence[Trajectory],
    params: Any,
) -> Any:
    """SFT goes on: corrections with loss on the teacher's turns, and whole trajectories again."""
    others = run.config.corrections.others
    again = review(trajectories, corrections, others, random.Random(run.config.seed))
    return supervised(
        run,
        "refine",
        model,
        lambda: [
            *(correction_example(renderer, trajectory, TOOLS) for trajectory in corrections),
            *(full_example(renderer, trajectory, TOOLS) for trajectory in again),
        ],
        lambda: params,
    )


def review(
    trajectories: Sequence[Trajectory],
    corrections: Sequence[Trajectory],
    others: float,
    rng: random.Random,
) -> list[Trajectory]:
    """Whole trajectories of the tasks that were mended, and of `others` times as many other tasks.

    All of them where there was nothing to mend.
    """
    mended = {correction.task.task_id for correction in corrections}
    if not mended:
        return list(trajectories)
    rest = [t for t in trajectories if t.task.task_id not in mended]
    chosen = rng.sample(rest, min(len(rest), round(others * len(mended))))
    return [t for t in trajectories if t.task.task_id in mended] + chosen


def supervised(
    run: Run,
    name: str,
    model: ModelConfig,
    examples: Callable[[], list[Example]],
    start: Callable[[], Any],
) -> Any:
    """One supervised stage, or its stored result."""
    config = getattr(run.config, name)
    folder, done = run.path("checkpoints", name), run.path("checkpoints", f"{name}.done")
    if done.exists():
        return restore_params(folder, model, make_optimizer(config.optim, config.steps), run.mesh)
    with timed(run, name):
        params = run_stage(
            name, config, model, examples(), start, run.mesh, folder, run.log,
            run.config.seed, run.config.save_every,
        )  # fmt: skip
    done.touch()
    return params


def reinforce(run: Run, model: ModelConfig, sft: Any, player: Player, tasks: Sequence[Task]) -> Any:
    """DAPO from the SFT checkpoint, rollouts in the service."""
    config = run.config.rl
    folder, done = run.path("checkpoints", "rl"), run.path("checkpoints", "rl.done")
    if done.exists():
        if done.read_text():  # why a guard stopped it
            return sft
        tx = make_optimizer(config.optim, config.iterations * config.updates)
        return restore_params(folder, model, tx, run.mesh)
    sink = run.path("trajectories", "rl.jsonl")
    train = public(tasks, "train")
    try:
        with timed(run, "rl"):
            params = run_rl(
                config, model, sft, player, train, run.mesh, folder, sink,
                run.config.engine.session_tokens, run.log, run.config.seed,
            )  # fmt: skip
    except NothingToLearn as stopped:
        run.log.print(f"{stopped}. The SFT policy is evaluated in its place.")
        write_whole(done, str(stopped))
        return sft
    done.touch()
    return params


# --- evaluation and report ---------------------------------------------------------------------


def evaluate_all(
    run: Run, player: Player, policies: Mapping[str, Any], tasks: Sequence[Task]
) -> Results:
    """Every stage's policy on held-out tasks, greedy and sampled."""
    config = run.config.evaluation
    results: Results = {}
    with timed(run, "evaluation"):
        for stage, params in policies.items():
            temperatures = config.temperatures + (config.sharpened if stage == "sft" else ())
            results[stage] = {split: {} for split in SPLITS}
            for split in SPLITS:
                chosen = public(tasks, split)
                chosen = chosen[: config.base_tasks] if stage == "base" else chosen
                for temperature in temperatures:
                    decoding = decoding_name(temperature)
                    name = f"{stage}-{split}-{decoding}"
                    file = run.path("trajectories", f"{name}.jsonl")
                    results[stage][split][decoding] = evaluate(
                        player, params, chosen, temperature, name, run.config.seed, file, run.log
                    )
    return results


def finish(
    run: Run,
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    results: Results,
    seconds_so_far: float,
) -> None:
    """`summary.json`, `report.html`, and the final table on the console.

    `seconds_so_far` are those of this process; those before an interruption are on file.
    """
    resamples = run.config.evaluation.resamples
    seconds = json.loads(run.path("seconds.json").read_text())
    wall_seconds = seconds.pop("total", 0.0) + seconds_so_far
    train = [task for task in tasks if task.public.split == "train"]
    shared = {
        f"normalised SQL shared with {split}": len(
            overlap(train, [task for task in tasks if task.public.split == split])
        )
        for split in SPLITS
    }
    summary = {
        "stages": {
            stage: {split: split_summary(by) for split, by in splits.items()}
            for stage, splits in results.items()
        },
        "changes": [
            *changes(("base", results["base"]), ("sft", results["sft"]), resamples),
            *changes(("sft", results["sft"]), ("rl", results["rl"]), resamples),
        ],
        "wall_seconds": round(wall_seconds, 1),
        "stage_seconds": seconds,
        "seed": run.config.seed,
        "teacher": "scripted bootstrap teacher; it sees each task's blueprint",
        "data": json.loads(run.path("data", "facts.json").read_text()),
        "overlap": shared,
        "rl_stopped": run.path("checkpoints", "rl.done").read_text(),  # "" when it went to the end
    }
    path = run.path("summary.json")
    write_whole(path, json.dumps(summary, indent=2) + "\n")
    episodes = {"teacher": pick_episodes(trajectories[:200])}
    episodes |= {s: pick_episodes(by["unseen"]["greedy"]) for s, by in results.items()}
    page = render_report(summary | {"wall_seconds": seconds}, read_metrics(run.folder), episodes)
    write_whole(run.path("report.html"), page)
    run.log.print(final_table(summary))
    if summary["rl_stopped"]:
        run.log.print(f"The rows of RL are the SFT policy's: {summary['rl_stopped']}")
    for row in summary["changes"]:
        run.log.print(change_line(row))
    run.log.print(f"{summary['wall_seconds']:.0f} s; {path} and {run.path('report.html')}")


def public(tasks: Sequence[Task], split: str) -> list[PublicTask]:
    """The public halves of one split."""
    return [task.public for task in tasks if task.public.split == split]


@contextmanager
def timed(run: Run, stage: str) -> Iterator[None]:
    """Add the block's wall seconds to the stage's in `seconds.json`, interrupted or not."""
    begin = time.monotonic()
    try:
        yield
    finally:
        file = run.path("seconds.json")
        seconds = json.loads(file.read_text()) if file.exists() else {}
        seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - begin, 1)
        write_whole(file, json.dumps(seconds) + "\n")

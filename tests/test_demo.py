"""`hsql demo` end to end at toy size: real processes, real databases, real checkpoints."""

from __future__ import annotations

import json
import lzma
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from demo_process import TOY, Demo, alive

from hsql_env.harness.tools import TOOLS
from hsql_env.records import Task, Trajectory, read_jsonl
from hsql_env.teacher.takeover import first_mistake
from hsql_jax.chat import ChatRenderer, load_tokenizer
from hsql_jax.config import load_config, to_json
from hsql_jax.demo import review
from hsql_jax.metrics import read_metrics
from hsql_jax.sft import full_example

DROPPED = "training tasks dropped for sharing SQL with a held-out one"
EPISODES = {"base": 4, "sft": 6, "rl": 6}  # of an evaluation
STEPS = {"warmup": 6, "sft": 6, "refine": 4, "rl": 2}  # of the toy config
EVALUATIONS = [
    f"{stage}-{split}-{decoding}"
    for stage in ("base", "sft", "rl")
    for split in ("seen", "unseen")
    for decoding in ("greedy", "t1")
]

MINE = """
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import optax
from hsql_jax.objectives import LossSum, Objective, any_group, ones


@dataclass(frozen=True)
class Anchor:
    value: float = 3.0


def objective():
    def loss(tokens):
        weight = jnp.sum(tokens.mask)
        anchored = -Anchor().value * weight + 0.0 * jnp.sum(tokens.logprobs * tokens.mask)
        return LossSum(anchored, weight, {"mine": 2.0 * weight})

    return Objective(any_group, ones, loss)


def optimizer(config, steps):
    return optax.sgd(config.learning_rate)
"""


def test_the_whole_loop(tmp_path: Path, compiled: Path) -> None:
    folder = tmp_path / "run"
    ended = Demo(folder, compiled).end()
    assert ended.status == 0, ended.err
    assert "Execution accuracy" in ended.out
    tasks = list(read_jsonl(folder / "data" / "tasks.jsonl", Task))
    summary = json.loads((folder / "summary.json").read_text())
    check_config_and_checkpoints(folder)
    check_metrics(folder)
    check_splits(tasks, summary)
    check_trajectories(folder, tasks)
    check_nothing_hidden_is_shown(folder, tasks)
    check_mask(folder)
    check_corrections(folder, tasks)
    check_review(folder)
    check_summary(folder, summary)
    check_report(folder, summary)

    before = modified(folder)
    again = Demo(folder, compiled, "--resume").end()
    assert again.status == 0, again.err
    assert modified(folder) == before
    assert timeless(json.loads((folder / "summary.json").read_text())) == timeless(summary)


def test_a_cut_run_leaves_no_process_and_goes_on_where_it_was(
    tmp_path: Path, compiled: Path
) -> None:
    folder = tmp_path / "run"
    demo = Demo(folder, compiled)
    demo.wait_until(lambda: steps(folder, "warmup") >= 3)
    children = demo.children()
    demo.kill()
    assert demo.end().status == -9
    assert alive(children) == {}
    tasks = (folder / "data" / "tasks.jsonl").read_bytes()

    demo = Demo(folder, compiled, "--resume")
    demo.wait_until(lambda: steps(folder, "sft") >= 3)
    children = demo.children()
    assert any("hsql_env serve" in line for line in children.values())
    demo.interrupt()
    cut = demo.end()
    again = "hsql" if shutil.which("hsql") else demo.program
    assert (cut.status, cut.err) == (
        130,
        f"\nhsql: interrupted; to continue: {again} demo --config {TOY} --run-dir {folder} "
        "--resume\n",
    )
    assert alive(children) == {}
    assert not (folder / "summary.json").exists()

    ended = Demo(folder, compiled, "--resume").end()
    assert ended.status == 0, ended.err
    assert "tasks:" not in ended.out
    assert "warmup:" not in ended.out
    assert (folder / "data" / "tasks.jsonl").read_bytes() == tasks
    check_metrics(folder)
    check_steps_run_twice(folder)
    check_same_from_the_start(folder, tmp_path / "fresh", compiled)


def test_real_databases(shared: Path, tmp_path: Path, compiled: Path) -> None:
    """The whole way on databases of the world, with a user's own objective and optimizer.

    Each database gives tasks, and the trajectories that are longer than a row are counted.
    """
    packed = sorted((shared / "data" / "dbs_general").glob("*.sqlite.xz"))
    databases, folder = tmp_path / "databases", tmp_path / "run"
    databases.mkdir()
    for path in packed:
        (databases / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    rows = ("--warmup.row-tokens", "1024", "--sft.row-tokens", "1024", "--sft.rows", "2")
    rows += ("--refine.row-tokens", "1024")
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    rows += ("--rl.objective", f"{mine}:objective", "--rl.optim.name", f"{mine}:optimizer")
    ended = Demo(folder, compiled, "--databases", str(databases), *rows).end()
    assert ended.status == 0, ended.err
    facts = json.loads((folder / "data" / "facts.json").read_text())
    assert facts["databases"] == facts["databases with tasks"] == len(packed) == 7
    assert facts["databases without tasks"] == {}
    assert facts["tasks"]["seen"] == facts["tasks"]["unseen"] == 6
    assert facts["tasks"]["train"] + 6 + facts[DROPPED] == 5 * 8  # two databases are unseen
    check_metrics(folder)
    teacher = list(read_jsonl(folder / "trajectories" / "teacher.jsonl", Trajectory))
    assert all(trajectory.verdict.reward == 1 for trajectory in teacher)
    renderer = ChatRenderer(load_tokenizer(folder / "tokenizer"))
    sizes = [len(full_example(renderer, trajectory, TOOLS).ids) for trajectory in teacher]
    (start,) = (r for r in read_metrics(folder) if (r["stage"], r["step"]) == ("sft", 0))
    assert start["values"]["dropped"] == sum(size > 1024 for size in sizes) > 0
    assert f"{start['values']['dropped']} longer ones left out" in ended.out
    updates = [
        r["values"] for r in read_metrics(folder) if (r["stage"], r["step"] > 0) == ("rl", True)
    ]
    assert [values["mine"] for values in updates] == [2.0, 2.0]  # a constant a token, averaged
    np.testing.assert_allclose([values["loss"] for values in updates], -3.0)
    summary = json.loads((folder / "summary.json").read_text())
    for stage, splits in summary["stages"].items():
        for values in splits.values():
            assert values["greedy"]["tasks"] == EPISODES[stage]


# --- what a finished run holds ------------------------------------------------------------------


def check_config_and_checkpoints(folder: Path) -> None:
    config = json.loads(to_json(load_config(TOY)))
    assert json.loads((folder / "config.json").read_text()) == config | {"run_dir": str(folder)}
    for stage, last in STEPS.items():
        newest = max(int(path.name) for path in (folder / "checkpoints" / stage).iterdir())
        assert newest == last
    assert [str(path) for path in folder.rglob("*.partial")] == []


def check_metrics(folder: Path) -> None:
    rows = read_metrics(folder)
    for stage, last in STEPS.items():
        trained = {r["step"]: r["values"] for r in rows if r["stage"] == stage and r["step"] > 0}
        assert sorted(trained) == list(range(1, last + 1))
        for values in trained.values():
            assert math.isfinite(values["loss"])
            assert values["grad_norm"] >= 0
            assert values["loss_tokens"] > 0


def check_splits(tasks: list[Task], summary: dict[str, Any]) -> None:
    """Held-out databases and SQL are apart from the training ones, by our own reckoning."""
    by_split: dict[str, list[Task]] = {"train": [], "seen": [], "unseen": []}
    for task in tasks:
        by_split[task.public.split].append(task)
    databases = {name: {t.public.database_id for t in own} for name, own in by_split.items()}
    sql = {name: {stripped(t.hidden.oracle_sql) for t in own} for name, own in by_split.items()}
    assert databases["train"] & databases["unseen"] == set()
    assert databases["seen"] & databases["unseen"] == set()
    assert len(databases["unseen"]) == 3  # a quarter of twelve
    assert sql["train"] & (sql["seen"] | sql["unseen"]) == set()
    assert set(summary["overlap"].values()) == {0}
    assert summary["data"]["tasks"] == {name: len(own) for name, own in by_split.items()}
    assert summary["data"]["tasks"]["seen"] == summary["data"]["tasks"]["unseen"] == 6


def stripped(sql: str) -> str:
    """Without literals, letter case and whitespace."""
    sql = re.sub(r"'(?:[^']|'')*'", "?", sql)
    sql = re.sub(r"(?<![\w\"])\d+(?:\.\d+)?", "?", sql)
    return " ".join(sql.lower().split())


def check_trajectories(folder: Path, tasks: list[Task]) -> None:
    """Every episode is stored once, and whole."""
    stored = {path.stem: list(read_jsonl(path, Trajectory)) for path in trajectories(folder)}
    assert sorted(stored) == sorted([*EVALUATIONS, "corrections", "rl", "teacher"])
    ids = {
        split: [t.public.task_id for t in tasks if t.public.split == split]
        for split in ("train", "seen", "unseen")
    }
    assert sorted(t.task.task_id for t in stored["teacher"]) == sorted(ids["train"])
    assert len({(t.task.task_id, t.seed) for t in stored["rl"]}) == len(stored["rl"]) == 2 * 2 * 2
    assert {t.task.task_id for t in stored["rl"]} <= set(ids["train"])
    for name in EVALUATIONS:
        stage, split, _ = name.split("-")
        assert [t.task.task_id for t in stored[name]] == ids[split][: EPISODES[stage]]
    for trajectory in (one for several in stored.values() for one in several):
        assert [m.role for m in trajectory.messages[:2]] == ["system", "user"]
        assert trajectory.messages[1].content == trajectory.task.question
        assert trajectory.verdict.infrastructure == ""


def check_nothing_hidden_is_shown(folder: Path, tasks: list[Task]) -> None:
    """No fingerprint is in a trajectory, no oracle in a message before the policy wrote it."""
    hidden = {task.public.task_id: task.hidden for task in tasks}
    fingerprints = [one.fingerprint for one in hidden.values()]
    assert all(len(fingerprint) >= 16 for fingerprint in fingerprints)
    for path in trajectories(folder):
        text = path.read_text()
        assert [fingerprint for fingerprint in fingerprints if fingerprint in text] == []
        for trajectory in read_jsonl(path, Trajectory):
            oracle = hidden[trajectory.task.task_id].oracle_sql
            shown = [oracle in message.content for message in trajectory.messages]
            if any(shown):
                assert trajectory.messages[shown.index(True)].role == "assistant"


def check_mask(folder: Path) -> None:
    """The loss is on the assistant's turns, their ends included, and on nothing else."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    trajectory = next(read_jsonl(folder / "data" / "corpus.jsonl", Trajectory))
    ids, mask = ChatRenderer(tokenizer).render(trajectory.messages, TOOLS)
    own = [m.content + "<|im_end|>" for m in trajectory.messages if m.role == "assistant"]
    assert len(own) == trajectory.turns > 2
    assert tokenizer.decode(np.asarray(ids)[np.asarray(mask) == 1]) == "".join(own)


def check_review(folder: Path) -> None:
    """`refine` repeats the mended tasks and as many others as asked."""
    trajectories = list(read_jsonl(folder / "data" / "corpus.jsonl", Trajectory))
    mended = trajectories[3:6]
    chosen = review(trajectories, mended, 2.0, random.Random(0))
    assert chosen[:3] == mended
    others = [t.trajectory_id for t in chosen[3:]]
    assert len(set(others)) == 6
    assert not set(others) & {t.trajectory_id for t in mended}
    assert review(trajectories, [], 2.0, random.Random(0)) == trajectories
    assert len(review(trajectories, mended, 1e6, random.Random(0))) == len(trajectories)


def check_corrections(folder: Path, tasks: list[Task]) -> None:
    """Mended mistakes on training tasks; every episode of the toy policy has one."""
    training = {task.public.task_id for task in tasks if task.public.split == "train"}
    mended = list(read_jsonl(folder / "data" / "corrections.jsonl", Trajectory))
    assert len({t.task.task_id for t in mended} & training) == len(mended) == 8
    for trajectory in mended:
        assert trajectory.policy == "student+scripted-teacher"
        assert trajectory.verdict.result_ok
        assert first_mistake(trajectory.messages) is not None
    (start,) = (r for r in read_metrics(folder) if (r["stage"], r["step"]) == ("refine", 0))
    assert start["values"]["dropped"] == 0


def check_summary(folder: Path, summary: dict[str, Any]) -> None:
    assert list(summary["stages"]) == ["base", "sft", "rl"]
    for stage, splits in summary["stages"].items():
        assert list(splits) == ["seen", "unseen"]
        for split, values in splits.items():
            assert list(values) == ["greedy", "t1", "behaviour", "behaviour_t1"]
            for decoding in ("greedy", "t1"):
                cell = values[decoding]
                path = folder / "trajectories" / f"{stage}-{split}-{decoding}.jsonl"
                right = [t.verdict.result_ok for t in read_jsonl(path, Trajectory)]
                assert list(cell) == ["accuracy", "tasks", "interval"]
                assert cell["tasks"] == len(right) == EPISODES[stage]
                assert cell["accuracy"] == sum(right) / len(right)
                low, high = cell["interval"]
                assert 0 <= low <= cell["accuracy"] <= high <= 1
            for key in ("behaviour", "behaviour_t1"):
                assert values[key]["invalid_call"]["denominator"] == EPISODES[stage]
    assert [(row["before"], row["after"]) for row in summary["changes"][::4]] == [
        ("base", "sft"),
        ("sft", "rl"),
    ]
    assert summary["seed"] == 0
    assert summary["rl_stopped"] == ""
    stages = ["tasks", "teacher", "warmup", "sft", "corrections", "refine", "rl", "evaluation"]
    assert list(summary["stage_seconds"]) == stages
    assert 0 < summary["wall_seconds"] - sum(summary["stage_seconds"].values()) < 60


def check_report(folder: Path, summary: dict[str, Any]) -> None:
    """The page holds every accuracy and its interval, and needs nothing from elsewhere."""
    page = (folder / "report.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    for splits in summary["stages"].values():
        for values in splits.values():
            for decoding in ("greedy", "t1"):
                low, high = values[decoding]["interval"]
                assert f"{100 * values[decoding]['accuracy']:.1f} %" in text
                assert f"{100 * low:.1f} % – {100 * high:.1f} %" in text
    assert re.findall(r'(?:src|href)="(?!#|data:)', page) == []


def trajectories(folder: Path) -> list[Path]:
    return sorted((folder / "trajectories").glob("*.jsonl"))


# --- resuming -----------------------------------------------------------------------------------


def modified(folder: Path) -> dict[str, int]:
    """When each file was written, but for those that a resume of a finished run writes again."""
    again = {"summary.json", "report.html", "seconds.json"}
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name not in again
    }


def timeless(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if "seconds" not in name}


def rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    """The stage's rows of metrics so far, those of steps run twice included."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in whole if row["stage"] == stage and row["step"] > 0]


def steps(folder: Path, stage: str) -> int:
    return len(rows(folder, stage))


def losses(folder: Path, stage: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows(folder, stage):
        found.setdefault(row["step"], []).append(row["values"]["loss"])
    return found


def check_steps_run_twice(folder: Path) -> None:
    """A step after the last checkpoint is run again, with the same batch and the same loss."""
    again = {
        (stage, step): values
        for stage in ("warmup", "sft")
        for step, values in losses(folder, stage).items()
        if len(values) > 1
    }
    assert ("warmup", 3) in again or ("sft", 3) in again
    for values in again.values():
        np.testing.assert_allclose(values, values[0], rtol=1e-6)


def check_same_from_the_start(folder: Path, fresh: Path, compiled: Path) -> None:
    """Another run of the same seed makes the same tasks and begins with the same losses."""
    demo = Demo(fresh, compiled)
    demo.wait_until(lambda: steps(fresh, "warmup") >= 2)
    demo.interrupt()
    assert demo.end().status == 130
    assert (fresh / "data" / "tasks.jsonl").read_bytes() == (
        folder / "data" / "tasks.jsonl"
    ).read_bytes()
    for step in (1, 2):
        assert losses(fresh, "warmup")[step][0] == losses(folder, "warmup")[step][0]

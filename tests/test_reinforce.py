"""`hsql rl` at toy size: real service, real databases, real checkpoints, a policy of no skill.

The objective keeps all groups where the rewards are equal, so that the loop turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from demo_process import compile_quickly

from hsql_env.harness.tools import SYSTEM_PROMPT, TOOLS
from hsql_env.records import Task, Trajectory, read_jsonl, write_jsonl
from hsql_env.registry import open_database
from hsql_env.tasks.examples import write_examples
from hsql_env.tasks.synth import synthesise_all
from hsql_jax.chat import template_fragments
from hsql_jax.cli import main
from hsql_jax.metrics import read_metrics
from hsql_jax.model import ModelConfig, init_params
from hsql_jax.tokenizer import tool_call_fragments, train_tokenizer
from hsql_jax.weights import load_hf, save_hf

TOY = f"{Path(__file__).parent / 'rl_toy.py'}:toy"
UPDATES = 6  # of the toy config: three iterations of two

# Rewards of a policy without skill are all zero, and DAPO would drop every group.
MINE = """
from hsql_jax.objectives import any_group, dapo, truncated, with_kl, token_weights
import numpy as np


def numbered(rewards):
    return np.linspace(-1, 1, rewards.size).astype(np.float32)


def objective():
    inner = dapo()._replace(keep=any_group, advantage=numbered)
    return with_kl(truncated(inner), token_weights, 0.1)
"""

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tasks over three databases, of which one is held out, and a model of random weights."""
    folder = tmp_path_factory.mktemp("given")
    databases = [open_database(path) for path in write_examples(folder / "databases", 3, 0)]
    found, _ = synthesise_all(databases, 6, 0, processes=1)
    last = databases[-1].database_id
    tasks = [
        task.model_copy(
            update={
                "public": task.public.model_copy(
                    update={"split": "unseen" if task.public.database_id == last else "train"}
                )
            }
        )
        for task in found
    ]
    write_jsonl(folder / "databases.jsonl", databases)
    write_jsonl(folder / "tasks.jsonl", tasks)
    model = ModelConfig(
        vocab_size=1000, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64
    )
    save_hf(folder / "model", model, init_params(model, jax.random.key(0)))
    texts = [task.public.question for task in tasks]
    fragments = template_fragments(SYSTEM_PROMPT, TOOLS) + tool_call_fragments(TOOLS)
    train_tokenizer(texts, fragments, folder / "tokenizer", max_vocab=1000, min_count=1)
    mine = folder / "mine.py"
    mine.write_text(MINE)
    return {
        "--tasks": folder / "tasks.jsonl",
        "--databases": folder / "databases.jsonl",
        "--tokenizer": folder / "tokenizer",
        "--weights": folder / "model",
        "--rl.objective": Path(f"{mine}:objective"),
    }


@pytest.fixture(scope="module")
def run(given: dict[str, Path], compiled: Path) -> Run:
    """Start `hsql rl`: run(FOLDER, *options)."""

    def start(run_dir: Path, *options: str, **other: Path) -> subprocess.Popen[str]:
        paths = {**given, **{f"--{name}": path for name, path in other.items()}}
        program = "from hsql_jax.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "rl", "--config", TOY, "--run-dir", str(run_dir)]
        return subprocess.Popen(
            [*command, *(str(part) for pair in paths.items() for part in pair), *options],
            env=os.environ | compile_quickly(compiled),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=200)
    except BaseException:
        process.kill()
        raise
    assert process.returncode == status, (process.returncode, out, err)
    return out, err


@pytest.fixture(scope="module")
def whole(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    out, _ = finish(run(folder))
    assert "the reference queries of 4 tasks earn their reward" in out
    assert "Execution accuracy" in out
    return folder


def updates(folder: Path) -> list[dict[str, float]]:
    return [row["values"] for row in read_metrics(folder) if row["stage"] == "rl"]


def weights(folder: Path) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(load_hf(folder)[1])]


def test_a_run_leaves_what_it_measured(whole: Path, given: dict[str, Path]) -> None:
    assert json.loads((whole / "status.json").read_text()) == {"status": "finished"}
    values = updates(whole)
    assert len(values) == UPDATES
    # The sampler's and the trainer's log-probabilities, float32.
    assert all(0 < row["sampler_gap"] <= 1e-4 for row in values)
    assert all(row["truncated"] == 0.0 for row in values)
    assert values[0]["kl_start"] == pytest.approx(0.0, abs=1e-6)
    assert values[-1]["kl_start"] > 1e-4
    assert ["accuracy_unseen" in row for row in values] == [i == 3 for i in range(UPDATES)]
    # The first update of an iteration is on policy, the second is not.
    assert all(row["logprob_gap"] <= 1e-5 for row in values[::2])
    assert all(row["logprob_gap"] > 1e-3 for row in values[1::2])
    assert weights(whole / "model") != weights(given["--weights"])
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["stages"].keys() == {"start", "rl"}
    assert summary["stages"]["rl"]["unseen"]["greedy"]["tasks"] == 4
    assert {row["decoding"] for row in summary["changes"]} == {"greedy", "t1"}
    played = list(read_jsonl(whole / "trajectories" / "rl.jsonl", Trajectory))
    assert len(played) == 3 * 2 * 2
    assert {one.task.split for one in played} == {"train"}
    assert "<svg" in (whole / "report.html").read_text()


def test_a_kill_changes_no_bit(run: Run, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = run(folder)
    deadline = time.monotonic() + 150
    while len(updates(folder)) < 3:  # in the middle of the second iteration
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    finish(run(folder, "--resume"))
    assert weights(folder / "model") == weights(whole / "model")
    assert len(updates(folder)) == UPDATES
    left, right = (
        list(read_jsonl(f / "trajectories" / "rl.jsonl", Trajectory)) for f in (folder, whole)
    )
    assert [one.messages for one in left] == [one.messages for one in right]


def test_a_reference_that_earns_nothing_is_refused(
    run: Run, given: dict[str, Path], tmp_path: Path
) -> None:
    tasks = list(read_jsonl(given["--tasks"], Task))
    hidden = tasks[0].hidden.model_copy(update={"oracle_sql": "SELECT random()"})
    write_jsonl(tmp_path / "tasks.jsonl", [tasks[0].model_copy(update={"hidden": hidden})])
    _, err = finish(run(tmp_path / "run", tasks=tmp_path / "tasks.jsonl"), status=2)
    assert f"the reference query of task {tasks[0].public.task_id} earns 0" in err
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "absent.jsonl"), "absent.jsonl is not there; give the tasks' file"),
        (("--rl.objective", "ppo"), "'ppo' is none of"),
        (("--rl.updates", "3"), "rl.updates = 3: each update needs a group"),
        (("--rl.rows", "0"), "rl.rows = 0: give at least 1"),
    ],
)
def test_bad_input_is_one_line(
    given: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    paths = [str(part) for pair in given.items() for part in pair]
    where = ["--run-dir", str(tmp_path / "run")]
    try:
        status = main(["rl", "--config", TOY, *where, *paths, *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()

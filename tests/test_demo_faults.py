"""What a user can get wrong, and what can break under a run: one clear line, and a way on."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_process import TOY, Demo

from hsql_env.records import Trajectory, read_jsonl
from hsql_env.tasks.examples import write_examples
from hsql_jax import demo
from hsql_jax.cli import main
from hsql_jax.config import load_config, to_json
from hsql_jax.errors import UserError


def refused(capsys: pytest.CaptureFixture[str], run_dir: Path, *options: str) -> str:
    """Run the demo, which ends with status 2 and one line on stderr; return what that says."""
    capsys.readouterr()
    assert main(["demo", "--config", TOY, "--run-dir", str(run_dir), *options]) == 2
    error = capsys.readouterr().err
    start, _, said = error.rstrip("\n").partition(": error: ")
    assert (start, error.count("\n")) == ("hsql", 1)
    return said


# --- databases ----------------------------------------------------------------------------------


def no_folder(folder: Path) -> None:
    folder.rmdir()


def no_databases(folder: Path) -> None:
    (folder / "notes.txt").write_text("none here")


def not_sqlite(folder: Path) -> None:
    write_examples(folder, 2, seed=0)
    (folder / "a.db").write_bytes(b"PK\x03\x04 a zip archive")


def truncated(folder: Path) -> None:
    for path in write_examples(folder, 2, seed=0):
        os.truncate(path, 2000)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_folder, "{folder}: not a folder; name one that holds SQLite files"),
        (
            no_databases,
            "{folder}: no databases; put files ending in .db, .sqlite, .sqlite3 there",
        ),
        (
            not_sqlite,
            "{folder}/a.db: not a SQLite database; remove it or name another file",
        ),
        (
            truncated,
            "{folder}/business_0000.sqlite: truncated, the file ends too early; copy it again "
            "(1 more of 2 files fail)",
        ),
    ],
)
def test_databases_that_cannot_be_used_are_refused_before_anything_is_written(
    make: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "databases", tmp_path / "run"
    folder.mkdir()
    make(folder)  # type: ignore[operator]
    assert refused(capsys, run, "--databases", str(folder)) == said.format(folder=folder)
    assert not run.exists()


def test_a_locked_database_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, *_ = write_examples(tmp_path / "databases", 2, seed=0)
    run, options = tmp_path / "run", ("--databases", str(tmp_path / "databases"))
    with locked(path):
        said = refused(capsys, run, *options)
    assert said == f"{path}: locked by another program; close it or copy the file when it is done"
    assert not run.exists()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process in the middle of a write (locks do not hold within one process)."""
    code = (
        "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1]);"
        "connection.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        yield
        holder.kill()


def test_one_database_is_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_examples(tmp_path / "databases", 1, seed=0)
    options = ("--databases", str(tmp_path / "databases"))
    said = refused(capsys, tmp_path / "run", *options)
    assert said.startswith(
        f"{tmp_path / 'databases'}: 1 of 1 databases gave tasks and at least 2 are needed, "
        "one to train on and one to hold out"
    )
    assert not (tmp_path / "run" / "data" / "tasks.jsonl").exists()


def test_rows_too_short_for_the_data_and_databases_changed_under_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "databases", tmp_path / "run"
    first, *_ = write_examples(folder, 3, seed=0)
    options = ("--databases", str(folder), "--warmup.row-tokens", "40")
    said = refused(capsys, run, *options)
    assert said.startswith("no example to train on: ")
    assert said.endswith("are longer than a row of 40 tokens; give longer rows (row_tokens)")
    assert not (run / "checkpoints" / "warmup.done").exists()
    with sqlite3.connect(first) as connection:
        connection.execute("CREATE TABLE late (x)")
    connection.close()
    said = refused(capsys, run, *options, "--resume")
    assert said == (
        f"{folder}: not the files that {run} began with; put those back, "
        "or choose another folder with --run-dir"
    )


# --- the command and the run folder -------------------------------------------------------------


def test_an_unknown_option_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, tmp_path / "run", "--sft.step", "3")
    assert said == "hsql demo: no option --sft.step; the nearest is --sft.steps (see --help)"
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_in_a_config_file_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from hsql_jax.demo_config import TaskConfig\n\n\n"
        "def mine():\n    return TaskConfig(databases=3, task_per_database=2)\n"
    )
    said = refused(capsys, tmp_path / "run", "--config", f"{file}:mine")
    assert said == (
        f"config {file}:mine, line 5: TaskConfig.__init__() got an unexpected keyword argument "
        "'task_per_database'"
    )


def test_a_run_folder_belongs_to_one_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(to_json(load_config(TOY)))
    assert refused(capsys, run, "--sft.steps", "9", "--resume") == (
        f"{run} holds a run of another config (sft.steps 6 -> 9): "
        "choose another folder with --run-dir, or run with the config it has"
    )
    assert refused(capsys, run) == (
        f"{run} already holds this run: add --resume to continue it, "
        "or choose another folder with --run-dir"
    )
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_run_of_another_version_names_the_unknown_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    stored = json.loads(to_json(load_config(TOY)))
    stored["sft"]["stepz"] = stored["sft"].pop("steps")
    (run / "config.json").write_text(json.dumps(stored))
    assert refused(capsys, run, "--resume") == (
        f"{run / 'config.json'}: config has no field sft.stepz; the nearest is sft.steps; "
        "choose another folder with --run-dir"
    )


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    assert refused(capsys, tmp_path) == (
        f"{tmp_path} is not empty and holds no config.json; choose another with --run-dir"
    )
    assert refused(capsys, note) == f"{note} is a file; choose another folder with --run-dir"
    assert refused(capsys, note / "run") == (
        f"{note / 'run'}: Not a directory; choose another with --run-dir"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


# --- the service --------------------------------------------------------------------------------


def test_a_service_that_dies_stops_the_run_and_resume_goes_on(
    tmp_path: Path, compiled: Path
) -> None:
    """Killed under the teacher, under RL and under an evaluation; each part is done once."""
    run = tmp_path / "run"
    corpus, rl_done = run / "data" / "corpus.jsonl", run / "checkpoints" / "rl.done"
    options: tuple[str, ...] = ()
    moments = [
        (run / "trajectories" / "teacher.jsonl", corpus),
        (run / "trajectories" / "rl.jsonl", rl_done),
        (run / "trajectories" / "base-seen-greedy.jsonl", run / "summary.json"),
    ]
    for reached, later in moments:
        process = Demo(run, compiled, *options)
        process.wait_until(reached.exists)
        process.kill_service()
        ended = process.end()
        assert (ended.status, ended.err) == (
            2,
            "hsql: error: the service died (exit code -9): it said nothing; "
            "run again with --resume\n",
        )
        assert not later.exists()
        options = ("--resume",)
    before = (run / "trajectories" / "base-seen-greedy.jsonl").stat().st_mtime_ns
    ended = Demo(run, compiled, *options).end()
    assert ended.status == 0, ended.err
    assert (run / "trajectories" / "base-seen-greedy.jsonl").stat().st_mtime_ns == before
    played = [(t.task.task_id, t.seed) for t in read_jsonl(moments[1][0], Trajectory)]
    assert len(set(played)) == len(played) == 2 * 2 * 2  # iterations, questions, group
    stages = json.loads((run / "summary.json").read_text())["stages"]
    assert stages["rl"]["unseen"]["greedy"]["tasks"] == 6


def test_an_rl_that_a_guard_stopped_is_not_run_again(tmp_path: Path, compiled: Path) -> None:
    """DAPO on a policy that never gets a reward: the run ends whole, and says so again."""
    folder = tmp_path / "run"
    dapo = ("--rl.objective", "dapo")
    ended = Demo(folder, compiled, *dapo).end()
    assert ended.status == 0, ended.err
    reason = "rl: no reward in the first 5 iterations; train the SFT policy further or check"
    assert f"{reason} the environment's verdicts before RL. The SFT policy" in one_line(ended.out)
    assert "The rows of RL are the SFT policy's: rl: no reward" in one_line(ended.out)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rl_stopped"].startswith(reason)
    assert summary["stages"]["rl"] == summary["stages"]["sft"]
    played = (folder / "trajectories" / "rl.jsonl").read_bytes()
    assert played.count(b"\n") == 5 * 2 * 2  # rollouts, questions, group

    again = Demo(folder, compiled, *dapo, "--resume").end()
    assert again.status == 0, again.err
    assert "rl:" not in again.out.partition("Execution accuracy")[0]
    assert (folder / "trajectories" / "rl.jsonl").read_bytes() == played


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--rl.iterations", "rl.iterations = 0: give at least 1"),
        ("--rl.group", "rl.group = 0: give at least 1"),
        ("--engine.slots", "engine slots = 0, rows = 8, width = 32, chunk = 8: each must be"),
        ("--save-every", "save_every = 0: give at least 1"),
        ("--tasks.databases", "counts are at least 1"),
    ],
)
def test_a_number_that_leaves_nothing_to_do_is_refused(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--config", TOY, "--run-dir", str(tmp_path / "run"), option, "0"])
    assert ended.value.code == 2
    assert message in one_line(re.sub("[^ -~]", "", capsys.readouterr().err))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, tmp_path / "run", "--model.vocab-size", "300")
    assert re.search(r"max_vocab=300: the fixed tokens alone are \d+; raise --model.vocab", said)


def test_a_stage_with_holes_is_refused() -> None:
    demo.refuse_failures("teacher", Counter())
    message = "teacher: the environment failed in 3 episodes, most often with 'it died'; run again"
    with pytest.raises(UserError, match=message):
        demo.refuse_failures("teacher", Counter({"it died": 2, "timed out": 1}))


def test_a_service_that_cannot_start_is_one_line(tmp_path: Path, compiled: Path) -> None:
    run = tmp_path / "run"
    process = Demo(run, compiled)
    process.wait_until((run / "data" / "tasks.jsonl").exists)
    process.interrupt()
    assert process.end().status == 130
    (run / "data" / "databases.jsonl").write_text("")
    ended = Demo(run, compiled, "--resume").end()
    assert ended.status == 2
    assert ended.err.startswith("hsql: error: the service did not start (exit code 1): hsql-env: ")
    assert ended.err.count("\n") == 1

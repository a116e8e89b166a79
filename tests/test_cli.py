"""The command line: help, errors in one line, and an interrupt that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsql_jax.cli import VERBS, Verb, main
from hsql_jax.config import load_config

TOY = """
from dataclasses import dataclass
from pathlib import Path

from hsql_env.records import RecordError
from hsql_jax.config import option
from hsql_jax.errors import UserError


@dataclass(frozen=True)
class Config:
    steps: int = 3
    ending: str = "done"
    resume: bool = option(False)


def toy() -> Config:
    return Config()


def long() -> Config:
    return Config(steps=99)


def main(config):
    if config.ending == "users":
        raise UserError("no databases in data/:\\n  give a folder of .sqlite files")
    if config.ending == "record":
        raise RecordError("tasks.jsonl line 3: no field question")
    if config.ending == "bug":
        raise ValueError("an index was wrong")
    print("steps", config.steps, config.resume)
"""

# Waits with a worker process and a service process open, as a real run does.
WAITING = """
import multiprocessing, os, subprocess, sys, time


def main(config):
    worker = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    worker.start()
    service = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        print("ready", worker.pid, service.pid, flush=True)
        time.sleep(60)
    finally:
        service.kill()
        service.wait()
"""


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Verb]]:
    (tmp_path / "toy_program.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    toy = Verb("A toy.", "toy_program", "toy_program.py:toy")
    yield {"toy": toy, "verb two": toy}
    sys.modules.pop("toy_program", None)


def test_a_verb_runs_its_program_with_the_resolved_config(
    verbs: dict[str, Verb], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", "--resume"], verbs) == 0
    assert main(["toy", "--config", "toy_program.py:long"], verbs) == 0
    assert main(["toy", "--config=toy_program.py:long", "--steps", "5"], verbs) == 0
    assert main(["verb", "two", "--steps", "6"], verbs) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps 3 True",
        "steps 99 False",
        "steps 5 False",
        "steps 6 False",
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["toy", "--ending", "users"],
            "hsql: error: no databases in data/: give a folder of .sqlite files",
        ),
        (["toy", "--ending", "record"], "hsql: error: tasks.jsonl line 3: no field question"),
        (
            ["toy", "--step", "3"],
            "hsql: error: hsql toy: no option --step; the nearest is --steps (see --help)",
        ),
        (
            ["verb", "--of-two"],
            "hsql: error: no verb 'verb'; did you mean `hsql verb two`? See `hsql --help`",
        ),
        (["tpy"], "hsql: error: no verb 'tpy'; did you mean `hsql toy`? See `hsql --help`"),
        (
            ["toy", "--config", "toy_program.py:tiny"],
            "hsql: error: config {cwd}/toy_program.py: no function 'tiny'; it has: long, main, toy",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    arguments: list[str],
    line: str,
    verbs: dict[str, Verb],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments, verbs) == 2
    captured = capsys.readouterr()
    assert captured.err == line.format(cwd=Path.cwd()) + "\n"
    assert captured.out == ""


def test_a_programming_error_keeps_its_traceback(verbs: dict[str, Verb]) -> None:
    with pytest.raises(ValueError, match="an index was wrong"):
        main(["toy", "--ending", "bug"], verbs)


def test_help_names_every_verb_without_loading_jax() -> None:
    code = (
        "import sys; from hsql_jax.cli import main; main(['--help']);"
        "assert not {'jax', 'numpy', 'transformers', 'tyro'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    width = max(map(len, VERBS))
    for name, verb in VERBS.items():
        assert f"  {name:<{width}}  {verb.summary}\n" in shown.stdout


def test_output_that_nobody_reads_is_no_traceback() -> None:
    code = "import sys; from hsql_jax.cli import main; sys.exit(main(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        shown = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (shown.returncode, shown.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_a_program_and_a_config(name: str) -> None:
    load_config(VERBS[name].config)
    path = Path(__file__).parent.parent / (VERBS[name].module.replace(".", "/") + ".py")
    assert "\ndef main(" in path.read_text()


@pytest.mark.parametrize(
    ("signum", "status", "message"),
    [
        (signal.SIGINT, 130, "\nhsql: interrupted; to continue: hsql toy --steps 7 --resume\n"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_an_interrupt_leaves_no_child_and_says_how_to_continue(
    signum: int, status: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "toy_program.py").write_text(TOY)
    (tmp_path / "waiting_program.py").write_text(WAITING)
    code = (
        "import sys; from hsql_jax.cli import main, Verb;"
        "verbs = {'toy': Verb('A toy.', 'waiting_program', 'toy_program.py:toy')};"
        "sys.exit(main(['toy', '--steps', '7'], verbs))"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready, *children = process.stdout.readline().split()
    assert ready == "ready"
    process.send_signal(signum)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (status, message)
    assert [pid for pid in map(int, children) if not _gone(pid)] == []


def _gone(pid: int, patience_s: float = 5.0) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False

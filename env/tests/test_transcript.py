"""The file of what was said: written before anything acts on it, and whole after a crash."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import call
from serving import COUNT, HANGING, Files, Served, wait_for, write_files

from hsql_env.service.client import Environment


@pytest.fixture
def files(tmp_path: Path, city_path: str) -> Files:
    """A tasks file and a databases file."""
    return write_files(tmp_path, city_path, tasks=2)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_message_and_the_verdict(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    run, submit = call("sql_exec", query=COUNT), call("sql_submit", query=COUNT)
    options = "--transcript", str(path)
    with Served(files, tmp_path / "log", *options) as served, Environment(served.url) as env:
        started = env.start("t1")
        replies = [env.step(started.episode_id, 1, run), env.step(started.episode_id, 2, submit)]
        env.step(started.episode_id, 2, submit)  # sent again: said once
        verdict = env.finish(started.episode_id).verdict
        env.finish(started.episode_id)
    first, *said, last = read(path)
    assert {event["episode"] for event in (first, *said, last)} == {started.episode_id}
    assert first["task"] == "t1"
    assert [(event["role"], event["content"]) for event in said] == [
        *((message.role, message.content) for message in started.messages),
        ("assistant", run),
        ("tool", replies[0].messages[0].content),
        ("assistant", submit),
        ("tool", replies[1].messages[0].content),
    ]
    assert last["verdict"] == verdict.model_dump(mode="json")
    assert last["final_sql"] == COUNT
    assert verdict.reward == 1.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_crash_in_the_middle_of_a_query_loses_nothing(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    hanging = call("sql_exec", query=HANGING)
    options = "--transcript", str(path)
    with Served(files, tmp_path / "log", *options) as served:
        episode_id = served.start()
        served.step(episode_id, 1, call("sql_list_tables"))
        body = json.dumps({"turn": 2, "content": hanging})
        asked = subprocess.Popen(
            [sys.executable, "-c", POST, f"{served.url}/episodes/{episode_id}/step", body],
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: len(read(path)) == 6)
        served.signal(signal.SIGKILL)
        asked.wait()
    events = read(path)
    roles = [event.get("role") for event in events]
    assert roles == [None, "system", "user", "assistant", "tool", "assistant"]
    assert events[-1]["content"] == hanging
    with path.open("ab") as file:
        file.write(b'{"episode": "torn')  # as where the machine failed too
    with Served(files, tmp_path / "log", *options) as served:
        episode_id = served.start("t0")
    lines = path.read_text().splitlines()
    assert lines[6] == '{"episode": "torn'
    assert json.loads(lines[7]) == {"episode": episode_id, "task": "t0"}


POST = """
import sys, urllib.request
headers = {"content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers))
"""


def test_an_episode_that_expires_says_so(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    options = "--transcript", str(path), "--idle-seconds", "0.2"
    with Served(files, tmp_path / "log", *options) as served:
        episode_id = served.start()
        wait_for(lambda: read(path)[-1] == {"episode": episode_id, "expired": True})


def test_a_full_disk_is_a_failure_of_the_harness(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--transcript", "/dev/full") as served:
        reply = served.ask("POST", "/episodes", {"task_id": "t1"})
        assert (reply.status, reply.kind) == (500, "infrastructure")
        assert served.ask("GET", "/healthz").json["episodes"] == 0


def test_a_transcript_that_cannot_be_written_stops_the_start(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    command = [sys.executable, "-m", "hsql_env", "serve", "--port", "0", "--transcript", str(path)]
    command += ["--tasks", str(files[0]), "--databases", str(files[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 1
    message = f"hsql-env: the transcript {path} cannot be written: No such file or directory"
    assert run.stderr.splitlines()[-1] == message

"""The service as a bare child process for tests: its address, what it said, its exit code."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, Self
from urllib.parse import urlsplit

from conftest import make_task

from hsql_env.records import write_jsonl
from hsql_env.registry import open_database

COUNT = "SELECT count(*) FROM city"
HANGING = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '1')"
Files = tuple[Path, Path]


class Reply(NamedTuple):
    """A plain HTTP reply."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)

    @property
    def kind(self) -> str:
        """The problem's kind."""
        return str(self.json["kind"])


class Served:
    """`hsql-env serve` with its standard error in a file."""

    def __init__(
        self, files: Files, log: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self._command = [sys.executable, "-m", "hsql_env", "serve"]
        self._command += ["--tasks", str(files[0]), "--databases", str(files[1]), "--port", "0"]
        self._command += options
        self._environment = environment or {}
        self._log = log
        self.announced: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._errors: IO[bytes] = self._log.open("wb")
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        self.announced = json.loads(self.process.stdout.readline())
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    @property
    def url(self) -> str:
        """The address over TCP."""
        return str(self.announced["url"])

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """End the service in order; return its exit code."""
        self.signal()
        return self.process.wait(20)

    def text(self) -> str:
        """Everything it wrote on standard error."""
        return self._log.read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The log's lines of these events, without their times."""
        lines = [json.loads(line) for line in self.text().splitlines()]
        assert all(line.pop("time").endswith("+00:00") for line in lines)
        return [line for line in lines if line["event"] in names]

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request on a connection of its own; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)
        try:
            sent = {"content-type": "application/json", **(headers or {})}
            connection.request(method, path, data, sent)
            reply = connection.getresponse()
            shown = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, shown, reply.read().decode())
        finally:
            connection.close()

    def start(self, task_id: str = "t1") -> str:
        """Begin an episode and return its id."""
        return str(self.ask("POST", "/episodes", {"task_id": task_id}).json["episode_id"])

    def step(self, episode_id: str, turn: int, content: str) -> Reply:
        """Send one turn."""
        body = {"turn": turn, "content": content}
        return self.ask("POST", f"/episodes/{episode_id}/step", body)

    def metrics(self) -> dict[str, float]:
        """The metrics' values by name and labels."""
        lines = self.ask("GET", "/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def write_files(folder: Path, path: str, tasks: int = 20) -> Files:
    """Write a tasks file and a databases file for the city database."""
    database = open_database(path)
    write_jsonl(folder / "databases.jsonl", [database])
    oracle = "SELECT count(id) FROM city"
    write_jsonl(folder / "tasks.jsonl", [make_task(oracle, f"t{i}") for i in range(tasks)])
    return folder / "tasks.jsonl", folder / "databases.jsonl"


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until the function returns something true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_background(
    send: Callable[..., Reply], *arguments: object
) -> tuple[threading.Thread, list[Reply]]:
    """Call a function in a thread; its result comes into the list."""
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(send(*arguments)))
    thread.start()
    return thread, replies

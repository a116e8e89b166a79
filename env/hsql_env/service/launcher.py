"""Starting and stopping the service as a child process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hsql_env.service.config import TOKEN_VARIABLE

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_DRAIN_SECONDS = 3  # less than the wait for the child's end
_SHOWN_LINES = 5


class ServiceProcessError(RuntimeError):
    """The service did not start, or died; the message holds its last lines."""


class ServiceProcess:
    """The environment service as a child process, ready when the `with` block is entered.

    The child has its own session, so that Ctrl-C reaches only the parent, which stops it. It also
    ends by itself when the parent dies, because its standard input closes.
    """

    def __init__(
        self,
        tasks: str | os.PathLike[str],
        databases: str | os.PathLike[str],
        workers: int = 2,
        options: Sequence[str] = (),
        start_s: float = _START_SECONDS,
        token: str | None = None,
    ) -> None:
        """`options` are further arguments of `hsql-env serve`; requests must carry a `token`."""
        self._command = [sys.executable, "-m", "hsql_env", "serve", "--stop-with-stdin"]
        self._command += ["--tasks", os.fspath(tasks), "--databases", os.fspath(databases)]
        self._command += ["--port", "0", "--workers", str(workers)]
        self._command += ["--drain-seconds", str(_DRAIN_SECONDS), "--log-level", "warning"]
        self._command += options
        self._start_s = start_s
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child and wait until it is ready. Raises `ServiceProcessError`."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=_environment(self._token),
        )
        line = self._first_line(self._process)
        try:
            self.url = str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError):
            self.stop()
            raise ServiceProcessError(self._explain("the service did not start")) from None

    def check(self) -> None:
        """Raise `ServiceProcessError` if the child has died."""
        if self._process is None or self._process.poll() is not None:
            raise ServiceProcessError(self._explain("the service died"))

    @property
    def pid(self) -> int:
        """The child's process id, 0 before it is started."""
        return self._process.pid if self._process else 0

    def stop(self) -> None:
        """End the child with SIGTERM, then SIGKILL; its worker processes end with it."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _first_line(self, process: subprocess.Popen[bytes]) -> bytes:
        """Return the first line of output, or what there is of it at the deadline or the end."""
        assert process.stdout is not None
        deadline = time.monotonic() + self._start_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                piece = os.read(process.stdout.fileno(), 4096)
                if not piece:
                    process.wait(_STOP_SECONDS)
                    break
                line += piece
        return line

    def _explain(self, what: str) -> str:
        code = self._process.returncode if self._process else None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = " / ".join(line.strip() for line in lines[-_SHOWN_LINES:]) or "it said nothing"
        return f"{what} (exit code {code}): {said}"


def _environment(token: str | None) -> dict[str, str]:
    """Return the child's environment: ours, with this package importable and its own token."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    own = {TOKEN_VARIABLE: token} if token else {}
    return {**inherited, **own, "PYTHONPATH": os.pathsep.join(paths)}

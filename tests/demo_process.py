"""The `hsql demo` command as a child process, at toy size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOY = f"{Path(__file__).parent / 'toy_config.py'}:toy"


@dataclass(frozen=True)
class Ended:
    """What a finished process left."""

    status: int
    out: str
    err: str


class Demo:
    """A running `hsql demo`, leader of its own process group as under a terminal."""

    def __init__(self, run_dir: Path, cache: Path, *options: str) -> None:
        self.program = str(Path(sys.executable).with_name("hsql"))
        self.run_dir = run_dir
        self._process = subprocess.Popen(
            [self.program, "demo", "--config", TOY, "--run-dir", str(run_dir), *options],
            env=os.environ | compile_quickly(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until(self, reached: Callable[[], bool], patience_s: float = 120.0) -> None:
        """Wait for a moment of the run; fails with the output if the process ends before it."""
        deadline = time.monotonic() + patience_s
        while not reached():
            if self._process.poll() is not None:
                raise AssertionError(f"ended too early: {self.end()}")
            assert time.monotonic() < deadline, "the moment did not come"
            time.sleep(0.005)

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to every process of the group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    def children(self) -> dict[int, str]:
        """The process ids of all descendants, with their command lines."""
        found, parents = {}, {self._process.pid}
        while parents:
            parents = {pid for pid in _processes() if _parent(pid) in parents} - found.keys()
            found |= {pid: _command(pid) for pid in parents}
        return found

    def kill_service(self) -> None:
        (pid,) = (pid for pid, line in self.children().items() if "hsql_env serve" in line)
        os.kill(pid, signal.SIGKILL)

    def end(self, patience_s: float = 200.0) -> Ended:
        """Wait for the end of the process."""
        try:
            out, err = self._process.communicate(timeout=patience_s)
        except BaseException:
            self._process.kill()
            raise
        return Ended(self._process.returncode, out, err)


def compile_quickly(cache: Path) -> dict[str, str]:
    """Variables with which JAX compiles without optimizations, and nothing twice."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def alive(pids: dict[int, str], patience_s: float = 10.0) -> dict[int, str]:
    """Those of the processes that are still there after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    left = dict(pids)
    while left and time.monotonic() < deadline:
        left = {pid: line for pid, line in left.items() if _command(pid) == line}
        time.sleep(0.05)
    return left


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _command(pid: int) -> str:
    """The command line; empty for a process that has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""

"""Many episodes at once against one service while queries hang, workers die and clients vanish.

Every episode knows what each of its observations must say, and every submit is of the right answer:
a reply that is another episode's, a right answer judged wrong, an episode that is neither judged
nor expired, or a process, descriptor or memory that grows, ends the run with exit code 1. Prints
the figures as a table and JSON.

    python tests/benchmarks/service_load.py                 # 256 episodes, 5 minutes
    python tests/benchmarks/service_load.py --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hsql_env.harness.actions import InfrastructureError
from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Database, HiddenTask, PublicTask, Task, write_jsonl
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess

TASKS = 64
WALL_S = 1.0  # the tool's limit, so that a hanging query ends soon
IDLE_S = 15.0  # after which the episode of a vanished client expires
SAMPLE_S = 5.0
HANGING = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '{}')"
MEMORY_GROWTH = 1.10  # of the service, from a fifth of the run to its end
SPARE_DESCRIPTORS = 16


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of the calls that hang on no query


@dataclass(frozen=True)
class Sample:
    """The service's processes at one moment."""

    at_s: float
    anonymous_mb: float  # RssAnon of the service itself
    descriptors: int
    processes: int


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write a database, and tasks with one answer each that no other task has."""
    path = folder / "numbers.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE number (id INTEGER PRIMARY KEY, value INTEGER)")
    connection.executemany("INSERT INTO number (value) VALUES (?)", [(i,) for i in range(5000)])
    connection.commit()
    connection.close()
    database = Database(database_id="numbers", path=str(path), sha256="0" * 64)
    tasks = [
        Task(
            public=PublicTask(
                task_id=f"t{n}", database_id="numbers", question=f"What is the total up to {n}?"
            ),
            hidden=HiddenTask(
                task_id=f"t{n}",
                oracle_sql=answer_sql(n),
                columns=("sum(value)",),
                row_count=1,
                fingerprint="",
            ),
        )
        for n in range(1, TASKS + 1)
    ]
    write_jsonl(folder / "databases.jsonl", [database])
    write_jsonl(folder / "tasks.jsonl", tasks)
    return folder / "tasks.jsonl", folder / "databases.jsonl"


def answer_sql(number: int) -> str:
    """The only right answer to a task."""
    return f"SELECT sum(value) FROM number WHERE id <= {number}"


class Client:
    """One seat of a trainer: plays episode after episode until the time is over."""

    def __init__(
        self, url: str, seed: int, args: argparse.Namespace, until: float, tally: Tally
    ) -> None:
        self._url = url
        self._env = AsyncEnvironment(url)
        self._rng = random.Random(seed)
        self._args, self._until, self._tally = args, until, tally

    async def run(self) -> None:
        """Play."""
        async with self._env:
            while time.monotonic() < self._until:
                try:
                    await self._episode()
                except InfrastructureError:
                    self._tally.counts["spoiled"] += 1  # reported as such, no sample

    async def _episode(self) -> None:
        number = self._rng.randint(1, TASKS)
        nonce = self._rng.randrange(10**12)
        started = await self._env.start(f"t{number}")
        self._tally.counts["started"] += 1
        if started.messages[1].content != f"What is the total up to {number}?":
            self._tally.faults["crossed"] += 1
        calls = self._rng.randint(3, 9)
        for turn in range(1, calls + 1):
            if self._rng.random() < self._args.vanish / calls:
                await self._vanish(started.episode_id, turn, nonce)
                return
            await self._exec(started.episode_id, turn, nonce)
        submit = tool_call_text("sql_submit", {"query": answer_sql(number)})
        reply = await self._env.step(started.episode_id, calls + 1, submit)
        finished = await self._env.finish(started.episode_id)
        if not reply.terminated:
            self._tally.counts["rejected"] += 1  # the worker of the check died twice
        elif finished.verdict.infrastructure:
            self._tally.counts["spoiled"] += 1
            return
        elif not finished.verdict.result_ok or finished.turns != calls + 1:
            self._tally.faults["wrong verdict"] += 1
        self._tally.counts["judged"] += 1

    async def _exec(self, episode_id: str, turn: int, nonce: int) -> None:
        hanging = self._rng.random() < self._args.hanging
        marker = f"{nonce}-{turn}"
        sql = (
            HANGING.format(marker)
            if hanging
            else f"SELECT '{marker}', id % 7, sum(value) FROM number GROUP BY 2"
        )
        begun = time.perf_counter()
        reply = await self._env.step(episode_id, turn, tool_call_text("sql_exec", {"query": sql}))
        self._tally.counts["calls"] += 1
        self._tally.counts["hanging"] += hanging
        text = reply.messages[0].content
        if hanging:
            if "took longer than" not in text:
                self._tally.faults["a hanging query was not stopped"] += 1
            return
        self._tally.seconds.append(time.perf_counter() - begun)
        if text.count(marker) != 7 + 1:  # seven rows, and the column's name
            self._tally.faults["crossed"] += 1

    async def _vanish(self, episode_id: str, turn: int, nonce: int) -> None:
        """Leave the episode for good, half of the time in the middle of a request."""
        self._tally.counts["vanished"] += 1
        if self._rng.random() < 0.5:
            return
        async with AsyncEnvironment(self._url) as other:
            request = asyncio.create_task(
                other.step(
                    episode_id, turn, tool_call_text("sql_exec", {"query": HANGING.format(nonce)})
                )
            )
            await asyncio.sleep(0.05)
            request.cancel()


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; none if it is gone."""
    try:
        texts = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]


def workers(pid: int) -> list[int]:
    """Return the sandbox processes: the service's fork server starts them."""
    return [grandchild for child in children(pid) for grandchild in children(child)]


def sample(pid: int, at_s: float) -> Sample:
    """Look at the service's processes."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) / 1024
    processes = len(children(pid)) + len(workers(pid))
    return Sample(at_s, anonymous, len(os.listdir(f"/proc/{pid}/fd")), processes)


async def watch(pid: int, samples: list[Sample], begun: float) -> None:
    """Sample until cancelled."""
    while True:
        samples.append(sample(pid, time.monotonic() - begun))
        await asyncio.sleep(SAMPLE_S)


async def kill_workers(pid: int, tally: Tally, share: float, rng: random.Random) -> None:
    """Kill workers from outside, `share` of the calls, until cancelled."""
    while True:
        await asyncio.sleep(0.2)
        due = int(share * tally.counts["calls"]) - tally.counts["killed"]
        for _ in range(max(0, min(due, 1))):
            if alive := workers(pid):
                os.kill(rng.choice(alive), signal.SIGKILL)
                tally.counts["killed"] += 1


async def load(service: ServiceProcess, args: argparse.Namespace) -> tuple[Tally, list[Sample]]:
    """Run the clients, the killer and the watch."""
    tally, samples = Tally(), []
    begun = time.monotonic()
    until = begun + args.seconds
    watching = asyncio.create_task(watch(service.pid, samples, begun))
    rng = random.Random(args.seed)
    killing = asyncio.create_task(kill_workers(service.pid, tally, args.kills, rng))
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(args.episodes):
                client = Client(service.url, args.seed * 10_000 + index, args, until, tally)
                group.create_task(client.run())
    finally:
        killing.cancel()
        watching.cancel()
    tally.counts["seconds"] = round(time.monotonic() - begun)
    await expect_expiry(service, tally)
    samples.append(sample(service.pid, time.monotonic() - begun))
    return tally, samples


async def expect_expiry(service: ServiceProcess, tally: Tally) -> None:
    """Wait until no episode is left, which only those of vanished clients may be."""
    async with AsyncEnvironment(service.url) as env:
        left = (await env.health()).episodes
        if left > tally.counts["vanished"] + tally.counts["spoiled"]:
            tally.faults["episodes left over"] += left
        deadline = time.monotonic() + 2 * IDLE_S + WALL_S
        while (await env.health()).episodes:
            if time.monotonic() > deadline:
                tally.faults["never expired"] += (await env.health()).episodes
                return
            await asyncio.sleep(0.5)


def check_growth(samples: list[Sample], tally: Tally, clients: int) -> dict[str, float]:
    """Compare the service at a fifth of the run with its end, all quiet again."""
    busy, last = samples[:-1], samples[-1]
    early = busy[len(busy) // 5]
    late = busy[-1]
    if late.anonymous_mb > MEMORY_GROWTH * early.anonymous_mb:
        tally.faults["memory grew"] += 1
    if late.descriptors > early.descriptors + SPARE_DESCRIPTORS:
        tally.faults["descriptors grew"] += 1
    if last.descriptors > samples[0].descriptors + SPARE_DESCRIPTORS + clients:
        tally.faults["descriptors left"] += 1
    if max(s.processes for s in busy) > samples[0].processes + 1:
        tally.faults["processes grew"] += 1
    return {
        "memory early MiB": early.anonymous_mb,
        "memory late MiB": late.anonymous_mb,
        "descriptors early": early.descriptors,
        "descriptors late": late.descriptors,
        "descriptors at rest": last.descriptors,
        "processes most": max(s.processes for s in busy),
        "processes at rest": last.processes,
    }


@contextmanager
def open_files(wanted: int) -> Iterator[None]:
    """Raise the limit of open files to what so many clients need, as far as it may be."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))
    yield


def main() -> int:
    """Run and print; 1 where anything was lost, crossed, wrong or growing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=256, help="at a time")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hanging", type=float, default=0.02, help="share of the calls")
    parser.add_argument("--kills", type=float, default=0.01, help="workers killed, a call")
    parser.add_argument("--vanish", type=float, default=0.05, help="share of the episodes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ["--tool-seconds", f"{WALL_S:g}", "--idle-seconds", f"{IDLE_S:g}"]
    with tempfile.TemporaryDirectory() as name, open_files(4 * args.episodes):
        files = write_tasks(Path(name))
        with ServiceProcess(*files, workers=args.workers, options=options) as service:
            tally, samples = asyncio.run(load(service, args))
            service.check()
            growth = check_growth(samples, tally, args.episodes)
    quick = statistics.quantiles(tally.seconds, n=100)
    figures = {
        **{name: float(count) for name, count in tally.counts.items()},
        "calls a second": tally.counts["calls"] / max(tally.counts["seconds"], 1),
        "p50 s": quick[49],
        "p99 s": quick[98],
        **growth,
    }
    for name, value in figures.items():
        print(f"{name:<24}{value:>12.6g}")
    print("faults: " + (", ".join(f"{k} {v}" for k, v in tally.faults.items()) or "none"))
    print(json.dumps({"arguments": vars(args), "figures": figures, "faults": tally.faults}))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())

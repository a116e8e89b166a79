"""Many episodes at once against one service while queries hang, workers die and clients vanish.

Every episode knows what each of its observations must say, and every submit is of the right answer.
These are faults, and end the run with exit code 1:

- an observation, a listing, a schema, a transcript or a verdict that is another episode's;
- a right answer that is rejected or judged wrong, a hanging query that is not stopped, a request
  that is refused;
- a failure of the harness that its episode's verdict does not tell; those that are told are counted
  as spoiled, with their reasons, and are no samples;
- an episode that is neither judged, spoiled nor a vanished client's, a vanished client's that does
  not expire, by the service's own counters; fewer kills of workers than asked for;
- memory or open files of the service that grow from the second fifth of the run to its last, or
  memory of a worker, open files, processes or the clients' tasks that are not back where they were
  when all is quiet again.

The databases' files get a new time now and then, so that their tables are read anew meanwhile.
Prints the figures as a table and JSON.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from hsql_env.harness.actions import InfrastructureError
from hsql_env.harness.tools import tool_call_text
from hsql_env.records import HiddenTask, PublicTask, Task, write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment, RequestRefused
from hsql_env.service.launcher import ServiceProcess

TASKS = 64
DATABASES = 16  # a task's is its number modulo this
WALL_S = 1.0  # the tool's limit, so that a hanging query ends soon
IDLE_S = 15.0  # after which the episode of a vanished client expires
SAMPLES = 60  # of the processes, a run
KILL_S = 0.02  # between two looks at how many workers are to be killed
TOUCH_S = 1.0  # between two files that get a new time
HANGING = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '{}')"
LATE = f"Error: the query took longer than {WALL_S:g} s"
MEMORY_GROWTH = 1.10  # of the service, from the second fifth of the run to its last
SPARE_MB = 8.0  # on top of it, and of what a worker at rest takes
SPARE_DESCRIPTORS = 16
KILLED_SHARE = 0.95  # of the kills that are due, the last ones of which come after the end


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    spoiled: Counter[str] = field(default_factory=Counter)  # by reason
    seconds: list[float] = field(default_factory=list)  # of the calls that hang on no query


@dataclass(frozen=True)
class Sample:
    """The processes at one moment."""

    at_s: float
    service_mb: float  # anonymous memory, as in the next two
    worker_mb: float  # of the largest worker
    workers_mb: float  # of all workers
    descriptors: int
    processes: int
    tasks: int  # of this program


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write databases that differ, and tasks with one answer each that no other task has."""
    databases = [open_database(write_database(folder, number)) for number in range(DATABASES)]
    tasks = [
        Task(
            public=PublicTask(
                task_id=f"t{n}",
                database_id=databases[n % DATABASES].database_id,
                question=f"What is the total up to {n}?",
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
    write_jsonl(folder / "databases.jsonl", databases)
    write_jsonl(folder / "tasks.jsonl", tasks)
    return folder / "tasks.jsonl", folder / "databases.jsonl"


def write_database(folder: Path, number: int) -> Path:
    """Write one database; a table's name and its only cell tell which one it is."""
    path = folder / f"numbers{number}.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE number (id INTEGER PRIMARY KEY, value INTEGER)")
    connection.executemany("INSERT INTO number (value) VALUES (?)", [(i,) for i in range(5000)])
    connection.execute(f"CREATE TABLE only_{number} (x INTEGER)")
    connection.execute(f"INSERT INTO only_{number} VALUES ({number})")
    connection.commit()
    connection.close()
    return path


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
        self._sent: list[str] = []  # the episode's tools in order

    async def run(self) -> None:
        """Play."""
        async with self._env:
            while time.monotonic() < self._until:
                try:
                    await self._episode()
                except RequestRefused as error:
                    self._tally.faults[f"refused: {error.kind}"] += 1
                except InfrastructureError as error:  # of the request itself, not of its episode
                    self._tally.faults[f"no answer: {error}"] += 1

    async def _episode(self) -> None:
        number = self._rng.randint(1, TASKS)
        started = await self._env.start(f"t{number}")
        self._tally.counts["started"] += 1
        self._expect("question", started.messages[1].content, f"What is the total up to {number}?")
        try:
            ended = await self._play(started.episode_id, number)
        except InfrastructureError as error:
            await self._spoiled(started.episode_id, str(error))
        else:
            if ended:
                await self._judged(started.episode_id)

    async def _play(self, episode_id: str, number: int) -> bool:
        """Play to the submit; return False where the client vanishes before."""
        nonce = self._rng.randrange(10**12)
        turns = ["sql_list_tables", "sql_schema"] + ["sql_exec"] * self._rng.randint(2, 7)
        self._rng.shuffle(turns)
        self._sent = []
        for turn, tool in enumerate(turns, 1):
            if self._rng.random() < self._args.vanish / len(turns):
                await self._vanish(episode_id, turn, nonce)
                return False
            if tool == "sql_exec":
                await self._exec(episode_id, turn, nonce)
            else:
                await self._describe(episode_id, turn, tool, number % DATABASES)
        arguments = {"query": answer_sql(number)}
        self._expect("submit", await self._step(episode_id, "sql_submit", arguments), "ACCEPTED")
        return True

    async def _judged(self, episode_id: str) -> None:
        finished = await self._env.finish(episode_id)
        if finished.verdict.infrastructure:
            self._count_spoiled(finished.verdict.infrastructure)
            return
        self._tally.counts["judged"] += 1
        self._expect("verdict", finished.verdict.result_ok, True)
        self._expect("end", finished.terminated, True)
        self._expect("turns", finished.turns, len(self._sent))
        self._expect("transcript", [call.tool for call in finished.calls], self._sent)

    async def _spoiled(self, episode_id: str, reason: str) -> None:
        """End an episode that the harness failed; its verdict must say the same."""
        finished = await self._env.finish(episode_id)
        self._expect("spoiled", finished.verdict.infrastructure, reason)
        self._count_spoiled(reason)

    def _count_spoiled(self, reason: str) -> None:
        self._tally.counts["spoiled"] += 1
        self._tally.spoiled[reason] += 1

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self._tally.faults[f"wrong {what}"] += 1
            if self._tally.faults[f"wrong {what}"] == 1:
                print(f"wrong {what}: {found!r}, not {expected!r}", file=sys.stderr)

    async def _step(self, episode_id: str, tool: str, arguments: dict[str, object]) -> str:
        self._sent.append(tool)
        content = tool_call_text(tool, arguments)
        reply = await self._env.step(episode_id, len(self._sent), content)
        self._tally.counts["calls"] += 1
        return reply.messages[0].content

    async def _exec(self, episode_id: str, turn: int, nonce: int) -> None:
        hanging = self._rng.random() < self._args.hanging
        marker = f"{nonce}-{turn}"
        sql = (
            HANGING.format(marker)
            if hanging
            else f"SELECT '{marker}', id % 7, sum(value) FROM number GROUP BY 2"
        )
        begun = time.perf_counter()
        text = await self._step(episode_id, "sql_exec", {"query": sql})
        if hanging:
            self._tally.counts["hanging"] += 1
            self._expect("end of a hanging query", text, LATE)
            return
        self._tally.seconds.append(time.perf_counter() - begun)
        # Seven rows, and the column's name.
        self._expect("rows", (text.count(marker), text.count("\n")), (7 + 1, 7 + 1))

    async def _describe(self, episode_id: str, turn: int, tool: str, database: int) -> None:
        name = f"only_{database}"
        if tool == "sql_list_tables":
            text = await self._step(episode_id, tool, {})
            self._expect("listing", text, f"number (table, 5000 rows)\n{name} (table, 1 row)")
        else:
            text = await self._step(episode_id, tool, {"tables": [name]})
            self._expect("schema", text, f"CREATE TABLE {name} (x INTEGER)\n{database}")

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
            with suppress(asyncio.CancelledError, InfrastructureError):
                await request


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; none if it is gone."""
    try:
        texts = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]


def workers(pid: int) -> list[int]:
    """Return the sandbox processes that run: the service's fork server starts them."""
    found = [grandchild for child in children(pid) for grandchild in children(child)]
    return [worker for worker in found if anonymous_mb(worker) > 0]


def anonymous_mb(pid: int) -> float:
    """Return the process's anonymous memory in MiB, 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    _, found, rest = status.partition("RssAnon:")
    return int(rest.split()[0]) / 1024 if found else 0.0


def sample(pid: int, at_s: float) -> Sample:
    """Look at the service's processes, and at this one."""
    sizes = [anonymous_mb(worker) for worker in workers(pid)]
    return Sample(
        at_s,
        anonymous_mb(pid),
        max(sizes, default=0.0),
        sum(sizes),
        len(os.listdir(f"/proc/{pid}/fd")),
        len(children(pid)) + len(sizes),
        len(asyncio.all_tasks()),
    )


async def watch(pid: int, samples: list[Sample], begun: float, every_s: float) -> None:
    """Sample until cancelled."""
    while True:
        samples.append(sample(pid, time.monotonic() - begun))
        await asyncio.sleep(every_s)


async def kill_workers(pid: int, tally: Tally, share: float, rng: random.Random) -> None:
    """Kill workers from outside, `share` of the calls, until cancelled."""
    while True:
        due = int(share * tally.counts["calls"]) - tally.counts["killed"]
        alive = workers(pid) if due > 0 else []
        for worker in rng.sample(alive, min(due, len(alive))):
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(worker, signal.SIGKILL)
                tally.counts["killed"] += 1
        await asyncio.sleep(KILL_S)


async def touch_files(folder: Path, rng: random.Random) -> None:
    """Give files a new time, so that they count as new ones, until cancelled."""
    while True:
        await asyncio.sleep(TOUCH_S)
        os.utime(folder / f"numbers{rng.randrange(DATABASES)}.sqlite")


async def load(
    service: ServiceProcess, folder: Path, args: argparse.Namespace
) -> tuple[Tally, list[Sample]]:
    """Run the clients, and beside them the killer, the toucher and the watch."""
    tally, samples = Tally(), []
    begun = time.monotonic()
    until = begun + args.seconds
    samples.append(sample(service.pid, 0.0))
    rng = random.Random(args.seed)
    beside = [
        asyncio.create_task(watch(service.pid, samples, begun, args.seconds / SAMPLES)),
        asyncio.create_task(kill_workers(service.pid, tally, args.kills, rng)),
        asyncio.create_task(touch_files(folder, rng)),
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(args.episodes):
                client = Client(service.url, args.seed * 10_000 + index, args, until, tally)
                group.create_task(client.run())
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    tally.counts["seconds"] = round(time.monotonic() - begun)
    if tally.counts["killed"] < KILLED_SHARE * args.kills * tally.counts["calls"] - args.workers:
        tally.faults["too few kills"] += 1
    await expect_expiry(service, tally)
    await replace_workers(service, args.workers)
    samples.append(sample(service.pid, time.monotonic() - begun))
    return tally, samples


async def expect_expiry(service: ServiceProcess, tally: Tally) -> None:
    """Check that the episodes left are those of vanished clients, and that these expire."""
    counts = tally.counts
    expected = counts["started"] - counts["judged"] - counts["spoiled"]
    tally.faults["episodes lost"] += abs(expected - counts["vanished"])
    deadline = time.monotonic() + 2 * IDLE_S + WALL_S
    while True:
        now = await metrics(service)
        live, expired = now["hsql_episodes_live"], now["hsql_episodes_expired_total"]
        if live + expired != counts["vanished"]:
            tally.faults["episodes left over"] += int(abs(live + expired - counts["vanished"]))
            break
        if not live:
            break
        if time.monotonic() > deadline:
            tally.faults["never expired"] += int(live)
            break
        await asyncio.sleep(0.5)
    if now["hsql_episodes_started_total"] != counts["started"]:
        tally.faults["started, as the service counts"] += 1
    untold = now["hsql_episodes_spoiled_total"] - counts["spoiled"]
    if not 0 <= untold <= counts["vanished"]:  # theirs nobody was there to tell
        tally.faults["spoiled, as the service counts"] += 1
    counts["workers replaced"] = int(now["hsql_sandbox_workers_replaced_total"])
    tally.faults = +tally.faults  # without those that are 0


async def metrics(service: ServiceProcess) -> dict[str, float]:
    """Return the service's counters by name."""
    async with aiohttp.ClientSession() as http, http.get(service.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def replace_workers(service: ServiceProcess, count: int) -> None:
    """Use every worker, so that those that were killed have their successors."""
    async with AsyncEnvironment(service.url) as env:
        for _ in range(2 * count):
            episode_id = (await env.start("t1")).episode_id
            turn = tool_call_text("sql_exec", {"query": answer_sql(1)})
            await env.step(episode_id, 1, turn)
            await env.finish(episode_id)


def check_growth(samples: Sequence[Sample], tally: Tally) -> dict[str, float]:
    """Compare the run with its beginning and with its end, when all is quiet again."""
    first, *busy, last = samples
    fifth = len(busy) // 5 or 1
    early, late = busy[fifth : 2 * fifth] or busy, busy[-fifth:]  # the most of each counts
    memory = [max(s.service_mb for s in part) for part in (early, late)]
    descriptors = [max(s.descriptors for s in part) for part in (early, late)]
    checks = {
        "memory": memory[1] > MEMORY_GROWTH * memory[0] + SPARE_MB,
        "worker's memory": last.worker_mb > first.worker_mb + 2 * SPARE_MB,
        "descriptors": descriptors[1] > descriptors[0] + SPARE_DESCRIPTORS,
        "descriptors at rest": last.descriptors > first.descriptors + SPARE_DESCRIPTORS,
        "processes": max(s.processes for s in busy) > first.processes + 1,
        "processes at rest": last.processes != first.processes,
        "tasks": last.tasks != first.tasks,
    }
    for name, grew in checks.items():
        if grew:
            tally.faults[f"{name} grew"] += 1
    return {
        "service MiB early": memory[0],
        "service MiB late": memory[1],
        "workers MiB most": max(s.workers_mb for s in busy),
        "worker MiB at first": first.worker_mb,
        "worker MiB at rest": last.worker_mb,
        "descriptors early": descriptors[0],
        "descriptors late": descriptors[1],
        "descriptors at first": first.descriptors,
        "descriptors at rest": last.descriptors,
        "processes most": max(s.processes for s in busy),
        "processes at rest": last.processes,
        "tasks most": max(s.tasks for s in busy),
        "tasks at rest": last.tasks,
    }


@contextmanager
def open_files(wanted: int) -> Iterator[None]:
    """Raise the limit of open files to what so many clients need, as far as it may be."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))
    yield


def main() -> int:
    """Run and print; 1 where there were faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=256, help="at a time")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hanging", type=float, default=0.02, help="share of the queries")
    parser.add_argument("--kills", type=float, default=0.01, help="workers killed, a call")
    parser.add_argument("--vanish", type=float, default=0.05, help="share of the episodes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ["--tool-seconds", f"{WALL_S:g}", "--idle-seconds", f"{IDLE_S:g}"]
    with tempfile.TemporaryDirectory() as name, open_files(4 * args.episodes):
        folder = Path(name)
        files = write_tasks(folder)
        with ServiceProcess(*files, workers=args.workers, options=options) as service:
            tally, samples = asyncio.run(load(service, folder, args))
            service.check()
            growth = check_growth(samples, tally)
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
    print("spoiled: " + (", ".join(f"{k} {v}" for k, v in tally.spoiled.items()) or "none"))
    print("faults: " + (", ".join(f"{k} {v}" for k, v in tally.faults.items()) or "none"))
    result = {"figures": figures, "spoiled": tally.spoiled, "faults": tally.faults}
    print(json.dumps({"arguments": vars(args), **result}))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())

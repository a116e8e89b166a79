"""What the sandbox's isolation costs: one query in process, through the pool, and a process each.

A bare worker, which runs what comes through a pipe with no guard and no limits, shows how much of
the pool's cost is the round trip between two processes on this machine. All are measured in turns,
in one run, so that their ratios stand on a busy machine too.
Prints a table and JSON; not a test. Needs the shared data (HSQL_SHARED or ../shared).
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import apsw

from hsql_env.sandbox import Limits, SandboxPool

SHARED = Path(os.environ.get("HSQL_SHARED") or Path(__file__).parents[3] / "shared")
CHINOOK = SHARED / "data" / "dbs_general" / "chinook.sqlite.xz"
# About a quarter of a millisecond in process.
QUERY = (
    "SELECT BillingCountry, BillingCity, count(*), sum(Total), max(InvoiceDate) "
    "FROM Invoice GROUP BY BillingCountry, BillingCity"
)
ONE_PROCESS = (
    "import sqlite3, sys; print(len(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchall()))"
)
LIMITS = Limits(rows=1000)  # all rows come back, as in process
TABLES = 200


def seconds(action: Callable[[], object]) -> float:
    """Return how long the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleave(
    actions: dict[str, tuple[int, Callable[[], object]]], rounds: int
) -> dict[str, float]:
    """Return each action's median seconds; a round runs each its number of times in turn."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (count, action) in actions.items():
            times[name] += [seconds(action) for _ in range(count)]
    return {name: statistics.median(taken) for name, taken in times.items()}


def serve_bare(pipe: Connection, database: str) -> None:
    """Run every statement that comes through the pipe."""
    connection = apsw.Connection(database, flags=apsw.SQLITE_OPEN_READONLY)
    while True:
        pipe.send(connection.execute(pipe.recv()).fetchall())


def ask_bare(pipe: Connection) -> object:
    """Have the bare worker run the query."""
    pipe.send(QUERY)
    return pipe.recv()


def measure_queries(database: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of the query, by how it is run."""
    bare = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    command = [sys.executable, "-c", ONE_PROCESS, str(database), QUERY]
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=serve_bare, args=(theirs, str(database)), daemon=True)
    worker.start()
    with SandboxPool(workers=1) as pool:
        execution = pool.execute(str(database), QUERY, LIMITS)
        assert execution.rows == tuple(bare.execute(QUERY).fetchall())
        batch = [QUERY] * 20
        medians = interleave(
            {
                "in process": (20, lambda: bare.execute(QUERY).fetchall()),
                "bare worker": (20, lambda: ask_bare(ours)),
                "pool": (20, lambda: pool.execute(str(database), QUERY, LIMITS)),
                "pool, 20 a call": (1, lambda: pool.execute_many(str(database), batch, LIMITS)),
                "process a query": (1, lambda: subprocess.run(command, stdout=subprocess.DEVNULL)),
            },
            rounds,
        )
    worker.kill()
    medians["pool, 20 a call"] /= len(batch)
    return medians


def measure_replacement(database: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds from a worker's end to its successor's first answer."""
    hanging = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '1')"
    limits = Limits(wall_s=0.2)
    killed, timed_out = [], []
    with SandboxPool(workers=1) as pool:
        for _ in range(rounds):
            pool.execute(str(database), QUERY)
            os.kill(pool.worker_pids()[0], signal.SIGKILL)
            killed.append(seconds(lambda: pool.execute(str(database), "SELECT 1")))
            stuck = seconds(lambda: pool.execute(str(database), hanging, limits))
            after = seconds(lambda: pool.execute(str(database), "SELECT 1"))
            timed_out.append(stuck - limits.wall_s + after)
    return {
        "killed from outside": statistics.median(killed),
        "killed at the wall limit": statistics.median(timed_out),
    }


def measure_listing(folder: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds to describe a database of many tables, at first and again."""
    path = folder / "many.sqlite"
    connection = sqlite3.connect(path)
    for number in range(TABLES):
        connection.execute(f"CREATE TABLE t{number} (id INTEGER PRIMARY KEY, name TEXT, x REAL)")
        rows = [(f"name {row}", row / 7) for row in range(100)]
        connection.executemany(f"INSERT INTO t{number} (name, x) VALUES (?, ?)", rows)
    connection.commit()
    connection.close()
    first, again = [], []
    for _ in range(rounds):
        with SandboxPool(workers=1) as pool:
            pool.execute(str(path), "SELECT 1")
            first.append(seconds(lambda: pool.tables(str(path))))
            again.append(seconds(lambda: pool.tables(str(path))))
            tables = pool.tables(str(path))
            assert isinstance(tables, tuple)
            assert len(tables) == TABLES
    return {"first": statistics.median(first), "again": statistics.median(again)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    if not CHINOOK.exists():
        sys.exit(f"no {CHINOOK}; set HSQL_SHARED to the folder that holds data/")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = folder / "chinook.sqlite"
        database.write_bytes(lzma.decompress(CHINOOK.read_bytes()))
        queries = measure_queries(database, rounds)
        replacement = measure_replacement(database, max(3, rounds // 3))
        listing = measure_listing(folder, 3)
    base = queries["in process"]
    print(f"{'one grouped query':<28}{'ms':>9}{'ratio':>9}")
    for how, taken in queries.items():
        print(f"{how:<28}{taken * 1e3:>9.3f}{taken / base:>9.1f}")
    for title, medians in (
        ("kill to the next answer", replacement),
        (f"describing {TABLES} tables", listing),
    ):
        print(f"\n{title:<28}{'ms':>9}")
        for how, taken in medians.items():
            print(f"{how:<28}{taken * 1e3:>9.3f}")
    result = {"rounds": rounds, "query_s": queries, "replace_s": replacement, "list_s": listing}
    result["ratios"] = {how: taken / base for how, taken in queries.items()}
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()

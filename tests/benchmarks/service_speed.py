"""Calls a second and their latency through the service's HTTP socket, many episodes at once.

Each episode is a client that sends its next `sql_exec` as soon as the last one is answered; the
query is the grouped one of `sandbox_speed.py`. Client and service share this machine's cores. Over
TCP and over a Unix socket in turns, in one run. Prints a table and JSON; not a test. Needs the
shared data (HSQL_SHARED or ../shared).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sandbox_speed import CHINOOK, QUERY

from hsql_env.harness.tools import tool_call_text
from hsql_env.records import HiddenTask, PublicTask, Task, write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess

MAX_TURNS = 1_000_000  # an episode lasts as long as the measurement


async def play(env: AsyncEnvironment, until: float) -> list[float]:
    """Play one episode until `until`; return the seconds of each call."""
    episode = await env.start("t1")
    taken = []
    turn = 0
    while (begun := time.perf_counter()) < until:
        turn += 1
        # Never the same query twice: a repeated call would be answered with a notice.
        call = tool_call_text("sql_exec", {"query": f"{QUERY} HAVING count(*) > -{turn}"})
        reply = await env.step(episode.episode_id, turn, call)
        taken.append(time.perf_counter() - begun)
        assert reply.messages[0].content.startswith("BillingCountry | BillingCity"), reply
    await env.finish(episode.episode_id)
    return taken


async def measure(url: str, episodes: int, seconds: float) -> dict[str, float]:
    """Return calls a second and percentiles of their seconds."""
    async with AsyncEnvironment(url) as env:
        begun = time.perf_counter()
        runs = await asyncio.gather(*(play(env, begun + seconds) for _ in range(episodes)))
        wall = time.perf_counter() - begun
    taken = sorted(second for run in runs for second in run)
    percentiles = statistics.quantiles(taken, n=100)
    return {
        "calls a second": len(taken) / wall,
        "p50 ms": 1e3 * percentiles[49],
        "p99 ms": 1e3 * percentiles[98],
        "most ms": 1e3 * taken[-1],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    if not CHINOOK.exists():
        sys.exit(f"no {CHINOOK}; set HSQL_SHARED to the folder that holds data/")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "chinook.sqlite"
        path.write_bytes(lzma.decompress(CHINOOK.read_bytes()))
        public = PublicTask(task_id="t1", database_id="chinook", question="?")
        hidden = HiddenTask(
            task_id="t1", oracle_sql=QUERY, columns=("x",), row_count=1, fingerprint=""
        )
        write_jsonl(folder / "tasks.jsonl", [Task(public=public, hidden=hidden)])
        write_jsonl(folder / "databases.jsonl", [open_database(path, "chinook")])
        files = folder / "tasks.jsonl", folder / "databases.jsonl"
        socket = folder / "service.sock"
        options = ["--max-turns", str(MAX_TURNS), "--socket", str(socket)]
        with ServiceProcess(*files, workers=args.workers, options=options) as service:
            ways = {"TCP": service.url, "Unix socket": f"unix:{socket}"}
            results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, url in ways.items():
                    results[way].append(asyncio.run(measure(url, args.episodes, args.seconds)))
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for way, runs in results.items()
    }
    columns = list(next(iter(medians.values())))
    print(f"{args.episodes:>4} episodes   " + "".join(f"{column:>16}" for column in columns))
    for way, figures in medians.items():
        print(f"{way:<16}" + "".join(f"{figures[column]:>16.1f}" for column in columns))
    print("\n" + json.dumps({"arguments": vars(args), "medians": medians}))


if __name__ == "__main__":
    main()

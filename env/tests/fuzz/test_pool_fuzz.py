"""Workers that die at any moment: every answer is right or a typed failure, and none stays lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress

from budget import EXAMPLES, patient

from hsql_env.sandbox import Execution, Limits, SandboxPool

pytestmark = patient

WORKERS = 2
CALLERS = 3
SLOW = (
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT {}) SELECT max(n) FROM c"
)


def test_workers_killed_at_random(city_path: str) -> None:
    rng = random.Random(0)
    sizes = [[rng.randrange(1, 60_000) for _ in range(EXAMPLES // 2)] for _ in range(CALLERS)]
    results: list[list[Execution]] = [[] for _ in range(CALLERS)]
    with SandboxPool(workers=WORKERS) as pool:

        def call(caller: int) -> None:
            for size in sizes[caller]:
                result = pool.execute(city_path, SLOW.format(size), Limits(wall_s=20))
                results[caller].append(result)

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(CALLERS)]
        for thread in threads:
            thread.start()
        kills = 0
        while any(thread.is_alive() for thread in threads):
            threads[0].join(rng.uniform(0.02, 0.1))
            alive = pool.worker_pids()
            if alive:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(alive), signal.SIGKILL)
                    kills += 1
        assert kills > 0
        check_results(sizes, results)
        for number in range(2 * WORKERS):
            assert pool.execute(city_path, f"SELECT {number}").rows == ((number,),)
        assert both_at_once(pool, city_path) == WORKERS


def check_results(sizes: list[list[int]], results: list[list[Execution]]) -> None:
    """Check that each caller got each of its answers, or was told that its workers died."""
    for asked, given in zip(sizes, results, strict=True):
        for size, result in zip(asked, given, strict=True):
            if result.failure is None:
                assert result.rows == ((size,),)
            else:
                assert result.failure.kind == "infrastructure"
                assert result.failure.message == "the query's worker process died"


def both_at_once(pool: SandboxPool, path: str) -> int:
    """Return how many workers answer when every one is kept busy at once."""
    calls = [
        threading.Thread(target=pool.execute, args=(path, SLOW.format(300_000)))
        for _ in range(WORKERS)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    return len(pool.worker_pids())

"""Limits, results and worker processes; edge cases 1-5, 12, 14-16, 18, 23."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from conftest import build_database

from hsql_env.sandbox import Execution, Failure, Limits, SandboxPool

HANGING = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '1')"
COUNTING = (
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c{}) SELECT count(*) FROM c"
)


def test_uninterruptible_query_is_killed_and_others_go_on(city_path: str) -> None:
    with SandboxPool(workers=2) as pool:
        before = set(pool.worker_pids())
        killed = []
        limits = Limits(wall_s=0.5)
        thread = threading.Thread(
            target=lambda: killed.append(pool.execute(city_path, HANGING, limits))
        )
        thread.start()
        assert pool.execute(city_path, "SELECT 1").rows == ((1,),)
        thread.join()
        assert killed[0].failure == Failure("timeout", "the query took longer than 0.5 s")
        for _ in range(2):
            assert pool.execute(city_path, "SELECT 2").rows == ((2,),)
        assert len(set(pool.worker_pids()) & before) == 1
        assert len(pool.worker_pids()) == 2


def test_recursive_queries(pool: SandboxPool, city_path: str) -> None:
    endless = pool.execute(city_path, COUNTING.format(""), Limits(wall_s=0.3))
    assert endless.failure is not None
    assert endless.failure.kind == "timeout"
    assert pool.execute(city_path, COUNTING.format(" LIMIT 1000")).rows == ((1000,),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT replace(hex(zeroblob(200000000)), '0', '00')",
        "WITH RECURSIVE c(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM c) SELECT max(s) FROM c",
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 5000) "
        "SELECT group_concat(hex(zeroblob(100000))) FROM c",
    ],
)
def test_memory_is_bounded(pool: SandboxPool, city_path: str, sql: str) -> None:
    failure = pool.execute(city_path, sql, Limits(memory_mb=64)).failure
    assert failure is not None
    assert failure.kind in {"memory", "too_large"}
    assert pool.execute(city_path, "SELECT 1").rows == ((1,),)


def test_rows_are_capped_and_counted(pool: SandboxPool, city_path: str) -> None:
    sql = COUNTING.format(" LIMIT 20000").replace("count(*)", "n, 'some text to fill the row'")
    execution = pool.execute(city_path, sql)
    assert execution.ok
    assert len(execution.rows) == 50
    assert execution.total_rows == 20_000
    assert not execution.complete
    bounded = pool.execute(city_path, sql, Limits(max_rows=1000))
    assert (bounded.total_rows, bounded.total_exact) == (1000, False)


def test_values(pool: SandboxPool, city_path: str) -> None:
    assert pool.execute(city_path, "SELECT 1 AS a, 2 AS a").columns == ("a", "a")
    assert pool.execute(city_path, "SELECT 9007199254740993, -9223372036854775808").rows == (
        (9007199254740993, -9223372036854775808),
    )
    empty = pool.execute(city_path, "SELECT id, name FROM city WHERE 0")
    assert (empty.columns, empty.rows, empty.total_rows) == (("id", "name"), (), 0)
    assert pool.execute(city_path, 'SELECT x FROM "a ""b"').rows == ((b"\x01\x02",),)
    broken = pool.execute(city_path, "SELECT CAST(x'ff41' AS TEXT) AS t, 1, NULL; -- x")
    assert (broken.columns, broken.rows) == (("t", "1", "NULL"), (("\ufffdA", 1, None),))


def test_execute_many_limits_each_statement(pool: SandboxPool, city_path: str) -> None:
    sqls = ["SELECT 1", COUNTING.format(""), "SELECT nosuch", "SELECT 2"]
    results = pool.execute_many(city_path, sqls, Limits(wall_s=0.3))
    kinds = [result.failure.kind if result.failure else "" for result in results]
    assert kinds == ["", "timeout", "sql_error", ""]
    assert (results[0].rows, results[3].rows) == (((1,),), ((2,),))


def test_tables(pool: SandboxPool, city_path: str) -> None:
    tables = pool.tables(city_path)
    assert not isinstance(tables, Failure)
    assert [(table.name, table.kind, table.row_count) for table in tables] == [
        ("city", "table", 3),
        ("river", "table", 2),
        ("large", "view", 2),
        ('a "b', "table", 1),
        ("order", "table", 0),
        ("note", "table", 2),
    ]
    river = tables[1]
    assert river.sql.startswith("CREATE TABLE river")
    assert river.sample_columns == ("name", "city_id", "km")
    assert river.sample_rows == (("Akerselva", 1, 8.2), ("Alna", 1, 17.0))


def test_missing_file_is_infrastructure(pool: SandboxPool, tmp_path: Path) -> None:
    path = str(tmp_path / "gone.sqlite")
    execution = pool.execute(path, "SELECT 1")
    tables = pool.tables(path)
    assert execution.failure == tables
    assert isinstance(tables, Failure)
    assert tables.kind == "infrastructure"
    assert path not in tables.message


def test_worker_killed_from_outside_is_replaced(city_path: str) -> None:
    with SandboxPool(workers=1) as pool:
        pool.execute(city_path, "SELECT 1")
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        assert pool.execute(city_path, "SELECT 2").rows == ((2,),)


def test_worker_that_keeps_dying_is_infrastructure(city_path: str) -> None:
    with SandboxPool(workers=1) as pool:
        stop = threading.Event()

        def assassin() -> None:
            while not stop.wait(0.02):
                for pid in pool.worker_pids():
                    with suppress(ProcessLookupError):  # it is dead and not yet replaced
                        os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=assassin)
        thread.start()
        failure = pool.execute(city_path, HANGING, Limits(wall_s=30)).failure
        stop.set()
        thread.join()
        assert failure == Failure("infrastructure", "the query's worker process died")
        assert pool.execute(city_path, "SELECT 1").rows == ((1,),)


def test_who_waits_longest_is_next(city_path: str) -> None:
    """A thread that asks again at once does not pass those that wait."""
    order: list[int] = []
    with SandboxPool(workers=1) as pool:

        def ask(number: int) -> None:
            pool.execute(city_path, "SELECT 1")
            order.append(number)
            if number == 0:
                pool.execute(city_path, "SELECT 2")
                order.append(99)

        first = threading.Thread(target=pool.execute, args=(city_path, HANGING, Limits(wall_s=1.5)))
        first.start()
        time.sleep(0.3)  # it holds the only worker now
        waiting = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        for thread in waiting:
            thread.start()
            time.sleep(0.1)
        for thread in (first, *waiting):
            thread.join(20)
    assert order == [0, 1, 2, 3, 4, 99]


def test_a_worker_killed_while_idle_costs_no_listing(city_path: str) -> None:
    with SandboxPool(workers=1) as pool:
        pool.execute(city_path, "SELECT 1")
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        tables = pool.tables(city_path)
        assert not isinstance(tables, Failure)
        assert len(tables) == 6


def test_workers_killed_while_idle_cost_no_query(city_path: str) -> None:
    with SandboxPool(workers=2) as pool:
        pids = list(pool.worker_pids())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert wait_until_dead(pids)
        assert pool.execute(city_path, "SELECT 1").rows == ((1,),)


def test_a_query_past_its_limit_says_how_long_it_took(city_path: str) -> None:
    with SandboxPool(workers=1) as pool:
        execution = pool.execute(city_path, HANGING, Limits(wall_s=0.2))
    assert (execution.failure, execution.elapsed_s) == (
        Failure("timeout", "the query took longer than 0.2 s"),
        0.2,
    )


def test_worker_pids_are_those_that_run(city_path: str) -> None:
    with SandboxPool(workers=2) as pool:
        first, second = pool.worker_pids()
        os.kill(first, signal.SIGKILL)
        assert wait_until_dead([first])
        assert pool.worker_pids() == (second,)
        for _ in range(3):
            pool.execute(city_path, "SELECT 1")
        assert len(pool.worker_pids()) == 2
    assert pool.worker_pids() == ()


def never_ready(pipe: Connection) -> None:
    """Be a worker process that never comes to its first word."""
    time.sleep(60)


def test_a_worker_that_never_starts_is_no_fault_of_the_query(
    city_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsql_env.sandbox.pool._START_SECONDS", 0.5)
    monkeypatch.setattr("hsql_env.sandbox.worker.serve", never_ready)
    with SandboxPool(workers=1) as pool:
        workers = list(pool.worker_pids())
        expected = Failure("infrastructure", "a worker process was not ready in 0.5 s")
        assert pool.execute(city_path, "SELECT 1").failure == expected
        assert pool.tables(city_path) == expected
        workers += pool.worker_pids()
    assert wait_until_dead(workers, 5)


def fork_server() -> int:
    """Return the process id of this process's fork server."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def both_places_work(pool: SandboxPool, path: str) -> list[int]:
    """Check that a pool of two executes in both places; return its workers' process ids."""
    for number in (1, 2):
        assert pool.execute(path, f"SELECT {number}").rows == ((number,),)
    pids = list(pool.worker_pids())
    assert len(pids) == 2
    return pids


def test_a_fork_server_killed_while_the_pool_is_idle(city_path: str) -> None:
    """A start after its death must not make a live worker count as ended."""
    with SandboxPool(workers=2) as pool:
        workers = list(pool.worker_pids())
        held = list(pool._all)  # a process ends with its object, too, which is to prove nothing
        timeout = Failure("timeout", "the query took longer than 0.3 s")
        os.kill(fork_server(), signal.SIGKILL)
        assert pool.execute(city_path, HANGING, Limits(wall_s=0.3)).failure == timeout
        for number in (1, 2):  # the worker that is left, then the other one's successor
            assert pool.execute(city_path, f"SELECT {number}").rows == ((number,),)
        for _ in range(2):
            assert pool.execute(city_path, HANGING, Limits(wall_s=0.3)).failure == timeout
        assert wait_until_dead(workers, 5)
        assert not any(worker in pool._all for worker in held)
        last = both_places_work(pool, city_path)
    assert wait_until_dead(last, 5)


def test_a_fork_server_killed_while_a_query_runs(city_path: str) -> None:
    with SandboxPool(workers=2) as pool:
        workers = list(pool.worker_pids())
        held = list(pool._all)
        done: list[Execution] = []
        limits = Limits(wall_s=2.0)
        thread = threading.Thread(
            target=lambda: done.append(pool.execute(city_path, HANGING, limits))
        )
        thread.start()
        os.kill(fork_server(), signal.SIGKILL)
        pool.execute(city_path, HANGING, Limits(wall_s=0.3))
        assert pool.execute(city_path, "SELECT 1").rows == ((1,),)  # its worker is a new one
        thread.join()
        assert done[0].failure == Failure("timeout", "the query took longer than 2 s")
        assert wait_until_dead(workers, 5)
        assert not any(worker in pool._all for worker in held)
        last = both_places_work(pool, city_path)
    assert wait_until_dead(last, 5)


def test_a_start_that_fails_keeps_the_place(
    city_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SandboxPool(workers=1, queue_s=5.0) as pool:
        start, failing = ForkServerProcess.start, 2

        def fail(process: ForkServerProcess) -> None:
            nonlocal failing
            failing -= 1
            if failing >= 0:
                raise EOFError("unexpected EOF")
            start(process)

        monkeypatch.setattr(ForkServerProcess, "start", fail)
        pool.execute(city_path, HANGING, Limits(wall_s=0.2))
        assert pool.execute(city_path, "SELECT 1").failure == Failure(
            "infrastructure", "no worker process could be started: unexpected EOF"
        )
        assert pool.execute(city_path, "SELECT 1").rows == ((1,),)
        pool.execute(city_path, HANGING, Limits(wall_s=0.2))
        failing = 1  # one failure is made good
        assert pool.execute(city_path, "SELECT 2").rows == ((2,),)


def test_a_listing_is_within_the_memory_limit(tmp_path: Path) -> None:
    script = (
        "CREATE TABLE t (x); INSERT INTO t VALUES (7);"
        "CREATE VIEW large AS SELECT hex(zeroblob(60000000)) AS x FROM t"
    )
    path = str(build_database(tmp_path / "large.sqlite", script))
    with SandboxPool(workers=1) as pool:
        tables = pool.tables(path, memory_mb=32)
        assert not isinstance(tables, Failure)
        assert [(table.name, table.sample_rows) for table in tables] == [
            ("t", ((7,),)),
            ("large", ()),
        ]
        assert pool.execute(path, "SELECT x FROM t").rows == ((7,),)


def test_closing_fails_a_query_in_flight(city_path: str) -> None:
    pool = SandboxPool(workers=1)
    pool.execute(city_path, "SELECT 1")
    results = []
    thread = threading.Thread(target=lambda: results.append(pool.execute(city_path, HANGING)))
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(5)
    assert results[0].failure.kind == "infrastructure"
    assert pool.execute(city_path, "SELECT 1").failure == Failure(
        "infrastructure", "the sandbox is closed"
    )


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_dead(pids: list[int], seconds: float = 10.0) -> bool:
    """Wait for every process to end; return whether all did."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


PARENT = """
import os, sys, threading
assert __name__ == "__main__", "a worker imported the program"
from hsql_env.sandbox import SandboxPool
pool = SandboxPool(workers=2)
for _ in range(4):
    pool.execute(sys.argv[1], "SELECT 1")
threading.Thread(target=pool.execute, args=(sys.argv[1], sys.argv[2]), daemon=True).start()
print(*pool.worker_pids(), flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_die_with_their_parent(
    city_path: str, tmp_path: Path, number: signal.Signals
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(program), city_path, HANGING],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        parent.send_signal(number)
    assert wait_until_dead(pids)

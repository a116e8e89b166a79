"""The PostgreSQL plane against a real server, which the tests start themselves."""

from __future__ import annotations

import glob
import json
import math
import os
import pwd
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import call, make_task

from hsql_env.harness import Episode, Verifier
from hsql_env.records import Database
from hsql_env.sandbox import Execution, Failure, Limits, SandboxPool

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: hsql-env[postgres]")

BINARIES = [Path(shutil.which("initdb") or "/nowhere/initdb").resolve().parent]
BINARIES += map(Path, sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True))
SERVER = next((folder for folder in BINARIES if (folder / "postgres").exists()), None)
pytestmark = pytest.mark.skipif(SERVER is None, reason="no PostgreSQL server is installed")

SHOP_SQL = """
CREATE TABLE city (id integer PRIMARY KEY, name text NOT NULL UNIQUE, founded date);
INSERT INTO city VALUES (1, 'Oslo', '1048-05-01'), (2, 'Bergen', NULL), (3, 'Bodø', '1816-05-20');
CREATE TABLE "Odd ""name" ("x y" integer REFERENCES city(id), price numeric(8, 2));
INSERT INTO "Odd ""name" VALUES (1, 9.90);
CREATE VIEW large AS SELECT name FROM city WHERE id < 3;
CREATE MATERIALIZED VIEW kept AS SELECT count(*) AS n FROM city;
CREATE VIEW broken AS SELECT 1 / (id - 1) AS x FROM city;
CREATE TABLE secret (x integer);
CREATE SCHEMA sales;
CREATE TABLE sales.bill (id bigint GENERATED ALWAYS AS IDENTITY, city_id integer);
CREATE SCHEMA hidden;
CREATE TABLE hidden.away (x integer);
CREATE SEQUENCE counter;
CREATE FUNCTION sneaky() RETURNS integer LANGUAGE sql AS
    'INSERT INTO public.city VALUES (9, ''x'', NULL) RETURNING id';
CREATE ROLE reader LOGIN;
CREATE ROLE keeper LOGIN IN ROLE pg_read_server_files;
ALTER ROLE reader SET search_path = sales, public;
GRANT USAGE ON SCHEMA sales, hidden TO reader;
GRANT ALL ON ALL TABLES IN SCHEMA public, sales, hidden TO reader;
GRANT ALL ON SEQUENCE counter TO reader;
REVOKE ALL ON secret FROM reader;
"""


class Server:
    """A PostgreSQL server that listens on a Unix socket only."""

    def __init__(self, folder: Path) -> None:
        assert SERVER is not None
        self.folder = folder
        # The server refuses to run as root.
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self.user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        made = subprocess.run(
            [SERVER / "initdb", "-D", folder / "data", "-U", "owner", "--auth=trust",
             "--encoding=UTF8", "--locale=C", "--no-sync"],
            cwd=folder, capture_output=True, text=True, **self.user,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        settings = ["listen_addresses=", "fsync=off", "max_connections=20", "shared_buffers=16MB"]
        self.process = subprocess.Popen(
            [SERVER / "postgres", "-D", folder / "data", "-k", folder,
             *(f"--{setting}" for setting in settings)],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self.user,
        )  # fmt: skip

    def locator(self, role: str = "reader", database: str = "postgres") -> str:
        """Return the address of a database for a role."""
        return f"postgresql://{role}@/{database}?host={self.folder}"

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Run statements as the owner; return the last one's rows."""
        with psycopg.connect(self.locator("owner"), autocommit=True) as connection:
            cursor = connection.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def wait(self) -> None:
        """Wait until the server takes connections."""
        wait_for(lambda: self.answers(), 30)

    def answers(self) -> bool:
        """Return whether the server takes connections."""
        try:
            return self.ask("SELECT 1") == [(1,)]
        except psycopg.OperationalError:
            return False

    def signal_all(self, number: signal.Signals) -> None:
        """Send all of the server's processes a signal."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in (self.process.pid, *map(int, children.split())):
            os.kill(pid, number)

    def stop(self) -> None:
        """End the server at once, and every session."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A running server with a database of a few tables."""
    # Not pytest's own folder, which is closed to other users, and the server is one.
    folder = Path(tempfile.mkdtemp(prefix="hsql-postgres-"))
    running = Server(folder)
    try:
        running.wait()
        running.ask(SHOP_SQL)
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def own_pool() -> Iterator[SandboxPool]:
    """One worker process of this module's own."""
    with SandboxPool(workers=1) as pool:
        yield pool


Ask = Callable[..., Execution]


@pytest.fixture
def ask(server: Server, own_pool: SandboxPool) -> Ask:
    """Return a function that executes a statement as a policy's would be."""

    def run(sql: str, limits: Limits = Limits(wall_s=20.0), **options: Any) -> Execution:  # noqa: B008
        return own_pool.execute(server.locator(), sql, limits, **options)

    return run


def failure(execution: Execution) -> tuple[str, str]:
    """Return the failure's kind and message."""
    assert execution.failure is not None, execution
    return execution.failure.kind, execution.failure.message


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("SELECT 9007199254740993::bigint", 9007199254740993),
        ("SELECT 7::smallint", 7),
        ("SELECT sum(x) FROM (VALUES (9223372036854775807), (1)) AS v(x)", 9223372036854775808),
        ("SELECT 12.50::numeric", 12.5),
        ("SELECT -3::numeric", -3),
        ("SELECT avg(x) FROM (VALUES (1), (2)) AS v(x)", 1.5),
        ("SELECT '-Infinity'::float8", -math.inf),
        ("SELECT 'Infinity'::numeric", math.inf),
        ("SELECT 0.1::float8 + 0.2", 0.1 + 0.2),
        ("SELECT (10::numeric ^ 400) + 0.5", "1" + "0" * 400 + ".5000000000000000"),
        ("SELECT true", "true"),
        ("SELECT NULL::integer", None),
        ("SELECT ''", ""),
        (r"SELECT '\x00ff'::bytea", b"\x00\xff"),
        ("SELECT ARRAY[1, NULL, 3]", "{1,NULL,3}"),
        ("SELECT ARRAY['a b', 'c,d', NULL]", '{"a b","c,d",NULL}'),
        ("SELECT '2024-02-03'::date", "2024-02-03"),
        ("SELECT '2024-02-03 04:05:06.5'::timestamp", "2024-02-03 04:05:06.5"),
        ("SELECT '2024-02-03 04:05:06+02'::timestamptz", "2024-02-03 02:05:06+00"),
        ("SELECT '1 day 2 hours'::interval", "1 day 02:00:00"),
        ("""SELECT '{"a": [1, null]}'::jsonb""", '{"a": [1, null]}'),
        ("SELECT 'Bodø ☃'", "Bodø ☃"),
        ("SELECT ROW(1, 'x')", "(1,x)"),
    ],
)
def test_values(ask: Ask, sql: str, value: object) -> None:
    execution = ask(sql)
    assert execution.rows == ((value,),)
    assert type(execution.rows[0][0]) is type(value)


def test_not_a_number_in_both_types(ask: Ask) -> None:
    for cell in ask("SELECT 'NaN'::float8, 'NaN'::numeric").rows[0]:
        assert isinstance(cell, float)
        assert math.isnan(cell)


def test_columns_and_totals(ask: Ask) -> None:
    twice = ask("SELECT 1 AS a, 2 AS a")
    assert (twice.columns, twice.rows) == (("a", "a"), ((1, 2),))
    none = ask("SELECT id, name FROM city WHERE false")
    assert (none.columns, none.rows, none.total_rows) == (("id", "name"), (), 0)
    assert none.complete
    no_column = ask("SELECT FROM city")
    assert (no_column.columns, no_column.total_rows, no_column.ok) == ((), 3, True)
    many = ask("SELECT * FROM generate_series(1, 20000)")
    assert (len(many.rows), many.total_rows, many.total_exact) == (50, 20_000, True)
    explained = ask("EXPLAIN SELECT * FROM city")
    assert explained.columns == ("QUERY PLAN",)


def test_counting_stops_and_the_connection_goes_on(ask: Ask) -> None:
    endless = "SELECT generate_series(1, 1000000000000)"
    for _ in range(5):
        bounded = ask(endless, Limits(wall_s=20, max_rows=1000))
        assert (bounded.total_rows, bounded.total_exact, bounded.ok) == (1000, False, True)
        assert ask("SELECT 1").rows == ((1,),)


@pytest.mark.parametrize(
    "sql",
    [
        "WITH gone AS (DELETE FROM city RETURNING id) SELECT * FROM gone",
        "WITH new AS (INSERT INTO city VALUES (8, 'x', NULL) RETURNING id) SELECT * FROM new",
        "SELECT * INTO copy FROM city",
        "SELECT * FROM city FOR UPDATE",
        "SELECT nextval('public.counter')",
        "SELECT setval('public.counter', 9)",
        "SELECT public.sneaky()",
        "EXPLAIN ANALYZE DELETE FROM city",
    ],
)
def test_writes_are_refused_by_the_server(ask: Ask, server: Server, sql: str) -> None:
    kind, message = failure(ask(sql))
    assert kind == "not_read_only"
    assert message.startswith("cannot execute ")
    assert message.endswith(" in a read-only transaction")
    assert server.ask("SELECT count(*), max(id) FROM city") == [(3, 3)]


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("DELETE FROM city", "not_read_only"),
        ("INSERT INTO city VALUES (8, 'x')", "not_read_only"),
        ("CREATE TEMP TABLE t (x int)", "not_read_only"),
        ("COPY city TO '/tmp/x'", "not_a_query"),
        ("COPY city TO PROGRAM 'id'", "not_a_query"),
        ("SET search_path = hidden", "not_a_query"),
        ("SET TRANSACTION READ WRITE", "not_a_query"),
        ("COMMIT", "not_a_query"),
        ("DO $$BEGIN END$$", "not_a_query"),
        ("CALL x()", "not_a_query"),
        ("LISTEN x", "not_a_query"),
        ("SELECT 1; SELECT 2", "multi_statement"),
        ("SELECT 1; COMMIT; DELETE FROM city", "multi_statement"),
        ("SELECT ';' /* ; */; DELETE FROM city", "multi_statement"),
        ("SELECT E'\\'; ' ; COMMIT", "multi_statement"),
        ("SELECT $a$ ; $a$; COMMIT", "multi_statement"),
        ("", "empty"),
        (" ; -- nothing\n/* at /* all */ */ ;", "empty"),
        ("SELECT pg_read_file('/etc/passwd')", "denied"),
        ("SELECT pg_read_binary_file('/etc/passwd')", "denied"),
        ("SELECT * FROM pg_ls_dir('.')", "denied"),
        ("SELECT lo_export(1, '/tmp/x')", "denied"),
        ("SELECT pg_catalog . \"lo_import\" /* x */ ('/etc/passwd')", "denied"),
        ("SELECT set_config('search_path', 'hidden', false)", "denied"),
        ("SELECT current_setting('listen_addresses')", "denied"),
        ("SELECT PG_TERMINATE_BACKEND(pid) FROM city", "denied"),
        ("SELECT pg_cancel_backend(1)", "denied"),
        ("SELECT pg_advisory_lock(1)", "denied"),
        ("SELECT inet_server_addr()", "denied"),
        ("SELECT pg_relation_filepath('city')", "denied"),
        ("SELECT pg_tablespace_location(1663)", "denied"),
        ("SELECT pg_current_logfile()", "denied"),
        ("SELECT * FROM pg_ls_waldir()", "denied"),
        ("SELECT current_setting('data_directory')", "denied"),
        ("SELECT ftoptions FROM pg_foreign_table", "denied"),
        ("SELECT * FROM information_schema.foreign_table_options", "denied"),
        ("SELECT query FROM pg_stat_activity", "denied"),
        ('SELECT query FROM "pg_stat_activity"', "denied"),
        ("SELECT pg_stat_get_activity(NULL)", "denied"),
        ("SELECT setting FROM pg_catalog.pg_settings", "denied"),
        ("SELECT query_to_xml('SELECT query FROM pg_stat_activity', true, true, '')", "denied"),
        ("SELECT schema_to_xml('pg_catalog', true, true, '')", "denied"),
        ("SELECT * FROM ts_stat('SELECT 1')", "denied"),
        ("SELECT U&\"pg\\005fread_file\"('/etc/passwd')", "denied"),
        ("SELECT E'a'\n'\\' , pg_read_file(1) , '", "denied"),
        ("SELECT 'never ended", "sql_error"),
        ("SELECT /* never /* ended */", "sql_error"),
        ("SELECT $x$ never $y$", "sql_error"),
    ],
)
def test_what_may_not_even_be_sent(ask: Ask, server: Server, sql: str, kind: str) -> None:
    assert failure(ask(sql))[0] == kind
    assert server.ask("SELECT count(*) FROM city") == [(3,)]


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("SELECT ';'", ";"),
        ("SELECT 1; -- x", 1),
        (";; SELECT 1;", 1),
        ("/* a /* nested; */ comment */ SELECT 1", 1),
        ("-- note\nSELECT 1", 1),
        ("(SELECT 1) UNION (SELECT 1)", 1),
        ("SELECT $$pg_read_file('x'); ''$$", "pg_read_file('x'); ''"),
        ("SELECT 'pg_stat_activity' -- pg_read_file(", "pg_stat_activity"),
        ("SELECT REPLACE('1,0', ',', '')", "10"),
        ("SELECT set_config FROM (SELECT 3 AS set_config) AS t", 3),
        ("SELECT 'it''s'", "it's"),
        (r"SELECT E'it\'s;'", "it's;"),
        ("SELECT name FROM city WHERE id = 3", "Bodø"),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 9) "
         "SELECT max(n) FROM c", 9),
    ],
)  # fmt: skip
def test_what_is_fine(ask: Ask, sql: str, value: object) -> None:
    assert ask(sql).rows == ((value,),)


def test_the_server_itself_takes_one_statement(server: Server) -> None:
    from hsql_env.sandbox.postgres.connection import Connection, Deadline, Failed

    deadline = Deadline.after(Limits().wall_s)
    connection = Connection(server.locator(), deadline)
    with pytest.raises(Failed, match="cannot insert multiple commands"):
        connection.query("SELECT 1; SELECT 2", Limits(), deadline)
    assert connection.query("SELECT 3", Limits(), deadline).rows == ((3,),)
    connection.close()


def test_the_strict_profile_refuses_a_leading_comment(ask: Ask) -> None:
    assert failure(ask("/* /* x */ */ SELECT 1", guard="strict"))[0] == "leading_comment"
    assert ask("SELECT /* x */ 1", guard="strict").rows == ((1,),)


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("SELECT nosuch FROM city", "sql_error", 'column "nosuch" does not exist'),
        ("SELECT nam FROM city", "sql_error",
         'column "nam" does not exist (hint: Perhaps you meant to reference the column '
         '"city.name".)'),
        ("SELECT FROM FROM", "sql_error", 'syntax error at or near "FROM"'),
        ("SELECT 1 / 0", "sql_error", "division by zero"),
        ("SELECT x FROM broken", "sql_error", "division by zero"),
        ("SELECT * FROM secret", "denied", "permission denied for table secret"),
        ("SELECT $1::int", "sql_error", "there is no parameter $1"),
    ],
)  # fmt: skip
def test_errors(ask: Ask, sql: str, kind: str, message: str) -> None:
    assert failure(ask(sql)) == (kind, message)


def active(server: Server) -> list[int]:
    """Return the process ids of the reader's sessions that run something."""
    found = server.ask(
        "SELECT pid FROM pg_stat_activity WHERE usename = 'reader' AND state = 'active'"
    )
    return [pid for (pid,) in found]


def test_a_statement_past_its_limit_is_stopped_on_both_sides(ask: Ask, server: Server) -> None:
    start = time.monotonic()
    assert failure(ask("SELECT pg_sleep(60)", Limits(wall_s=0.3))) == (
        "timeout",
        "the query took longer than 0.3 s",
    )
    assert time.monotonic() - start < 10
    wait_for(lambda: not active(server), 5)
    assert ask("SELECT 1").rows == ((1,),)


@pytest.mark.parametrize("wall_s", [1.0, 3.0])
def test_the_server_stops_a_statement_before_its_worker_is_killed(
    ask: Ask, own_pool: SandboxPool, wall_s: float
) -> None:
    ask("SELECT 1")
    (worker,) = own_pool.worker_pids()
    execution = ask("SELECT pg_sleep(60)", Limits(wall_s=wall_s))
    assert failure(execution) == ("timeout", f"the query took longer than {wall_s:g} s")
    assert 0.8 * wall_s < execution.elapsed_s < wall_s
    assert own_pool.worker_pids() == (worker,)


def test_a_server_that_falls_silent_under_a_statement(
    ask: Ask, own_pool: SandboxPool, server: Server
) -> None:
    ask("SELECT 1")
    (worker,) = own_pool.worker_pids()
    timer = threading.Timer(0.5, server.signal_all, (signal.SIGSTOP,))
    timer.start()
    try:
        execution = ask("SELECT pg_sleep(60)", Limits(wall_s=3))
    finally:
        timer.join()
        server.signal_all(signal.SIGCONT)
    assert failure(execution) == ("infrastructure", "the database server does not answer")
    assert 2.5 < execution.elapsed_s < 3
    assert own_pool.worker_pids() == (worker,)
    wait_for(lambda: not active(server), 10)


def test_killing_a_worker_cancels_its_statement(server: Server) -> None:
    with SandboxPool(workers=1) as pool:
        done: list[Execution] = []
        sleep = "SELECT pg_sleep(60)"
        thread = threading.Thread(
            target=lambda: done.append(pool.execute(server.locator(), sleep, Limits(wall_s=50)))
        )
        thread.start()
        seen: set[int] = set()
        for _ in range(2):  # a worker that dies gets one successor
            wait_for(lambda seen=frozenset(seen): bool(set(active(server)) - seen), 20)
            seen |= set(active(server))
            os.kill(pool.worker_pids()[0], signal.SIGKILL)
        thread.join(20)
        assert failure(done[0]) == ("infrastructure", "the query's worker process died")
        wait_for(lambda: not active(server), 5)


def test_one_giant_value_does_not_take_the_memory(ask: Ask) -> None:
    kind, message = failure(ask("SELECT repeat('x', 120000000)", Limits(memory_mb=32)))
    assert kind == "memory"
    assert message == "out of memory: the query needs more than its memory limit"
    assert ask("SELECT 1", Limits(memory_mb=32)).rows == ((1,),)
    large = Limits(result_mb=1)
    assert failure(ask("SELECT repeat('x', 2000000)", large)) == (
        "too_large",
        "the result is larger than 1 MiB",
    )
    assert ask("SELECT length(repeat('x', 2000000))", large).rows == ((2_000_000,),)


def test_nothing_stays_in_the_session(ask: Ask) -> None:
    assert ask("SELECT current_schemas(false)::text").rows == (("{sales,public}",),)
    ask("SELECT 1 / 0")
    ask("SELECT 1; COMMIT")
    assert ask("SELECT current_schemas(false)::text").rows == (("{sales,public}",),)
    assert ask("SELECT count(*) FROM bill").rows == ((0,),)
    assert failure(ask("SELECT * FROM away"))[1] == 'relation "away" does not exist'


def test_the_address_may_name_a_search_path(own_pool: SandboxPool, server: Server) -> None:
    options = "&options=-csearch_path%3Dhidden%20-cdefault_transaction_read_only%3Doff"
    locator = server.locator() + options
    assert own_pool.execute(locator, "SELECT count(*) FROM away").rows == ((0,),)
    tables = own_pool.tables(locator)
    assert not isinstance(tables, Failure)
    assert [table.name for table in tables] == ["away"]
    assert failure(own_pool.execute(locator, "SELECT 1 INTO t"))[0] == "not_read_only"


def test_a_connection_that_was_cut_is_replaced(ask: Ask, server: Server) -> None:
    (before,) = ask("SELECT pg_backend_pid()").rows[0]
    assert ask("SELECT pg_backend_pid()").rows == ((before,),)
    server.ask(f"SELECT pg_terminate_backend({before})")
    (after,) = ask("SELECT pg_backend_pid()").rows[0]
    assert after != before


def test_tables(own_pool: SandboxPool, server: Server) -> None:
    tables = own_pool.tables(server.locator())
    assert not isinstance(tables, Failure)
    found = {table.name: table for table in tables}
    assert [(table.name, table.kind, table.row_count) for table in tables] == [
        ("city", "table", 3),
        ('Odd "name', "table", 1),
        ("large", "view", 2),
        ("kept", "view", 1),
        ("broken", "view", 3),
        ("bill", "table", 0),
    ]
    assert found["city"].sql == (
        "CREATE TABLE city (id integer NOT NULL, name text NOT NULL, founded date, "
        "PRIMARY KEY (id), UNIQUE (name))"
    )
    assert found['Odd "name'].sql == (
        'CREATE TABLE "Odd ""name" ("x y" integer, price numeric(8,2), '
        'FOREIGN KEY ("x y") REFERENCES city(id))'
    )
    assert found["large"].sql.startswith("CREATE VIEW large AS SELECT city.name")
    assert found["kept"].sql.startswith("CREATE MATERIALIZED VIEW kept AS SELECT count(*) AS n")
    assert found["city"].sample_columns == ("id", "name", "founded")
    assert found["city"].sample_rows == (
        (1, "Oslo", "1048-05-01"),
        (2, "Bergen", None),
        (3, "Bodø", "1816-05-20"),
    )
    assert found["broken"].sample_rows == ()


@pytest.mark.parametrize("role", ["owner", "keeper"])
def test_a_role_that_may_do_more_than_read_is_refused(
    own_pool: SandboxPool, server: Server, role: str
) -> None:
    said = failure(own_pool.execute(server.locator(role), "SELECT 1"))
    assert said == (
        "infrastructure",
        "the database role is a superuser or may use the server's files; "
        "connect as a role that may only read",
    )


def test_a_server_that_is_not_there(own_pool: SandboxPool, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    unreachable = [
        f"postgresql://reader@127.0.0.1:{port}/postgres",
        server.locator(database="nosuch"),
        server.locator("stranger"),
    ]
    for locator in unreachable:
        expected = Failure("infrastructure", "the database server cannot be reached")
        assert own_pool.execute(locator, "SELECT 1").failure == expected
        assert own_pool.tables(locator) == expected
    bad = own_pool.execute("postgresql://reader@[", "SELECT 1")
    assert failure(bad) == ("infrastructure", "the database's locator is not a valid address")


@pytest.mark.parametrize(("wall_s", "least", "most"), [(8.0, 2.0, 6.0), (0.5, 0.4, 0.5)])
def test_a_server_that_takes_connections_and_says_nothing(
    own_pool: SandboxPool, wall_s: float, least: float, most: float
) -> None:
    """It is no fault of the query, whose limit has not come."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://reader@127.0.0.1:{silent.getsockname()[1]}/shop"
        execution = own_pool.execute(address, "SELECT 1", Limits(wall_s=wall_s))
    assert failure(execution) == ("infrastructure", "the database server cannot be reached")
    assert least < execution.elapsed_s < most


def forward_late(listener: socket.socket, target: Path, seconds: float) -> None:
    """Hand one client on to a server's Unix socket, after some seconds."""
    client, _ = listener.accept()
    time.sleep(seconds)
    with client, socket.socket(socket.AF_UNIX) as server:
        server.connect(str(target))
        ends = {client: server, server: client}
        while True:
            for source in select.select(list(ends), [], [])[0]:
                data = source.recv(65536)
                if not data:
                    return
                ends[source].sendall(data)


@pytest.mark.parametrize(
    ("delay", "expected"),
    [(0.6, None), (1.2, Failure("infrastructure", "the database server cannot be reached"))],
)
def test_a_slow_connection_is_not_the_statements_fault(
    server: Server, delay: float, expected: Failure | None
) -> None:
    """Under a limit of 1 s, of which the answer to a command may take a third."""
    with socket.create_server(("127.0.0.1", 0)) as listener, SandboxPool(workers=1) as pool:
        pool.execute(server.locator(), "SELECT 1")  # the worker runs
        target = server.folder / ".s.PGSQL.5432"
        thread = threading.Thread(target=forward_late, args=(listener, target, delay))
        thread.start()
        address = f"postgresql://reader@127.0.0.1:{listener.getsockname()[1]}/postgres"
        execution = pool.execute(address + "?sslmode=disable", "SELECT 1", Limits(wall_s=1))
        assert execution.failure == expected
        pool.close()
        thread.join()


def authenticate_and_fall_silent(listener: socket.socket, kept: list[socket.socket]) -> None:
    """Be a server that lets every client in and then says nothing more."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # the listener was shut down
            return
        kept.append(client)
        while True:
            (length,) = struct.unpack("!i", client.recv(4, socket.MSG_WAITALL))
            (code,) = struct.unpack("!i", client.recv(length - 4, socket.MSG_WAITALL)[:4])
            if code == 196608:  # protocol 3.0, not the question for an encrypted connection
                break
            client.sendall(b"N")
        client.sendall(b"R\0\0\0\x08\0\0\0\0" + b"Z\0\0\0\x05I")


@pytest.mark.parametrize("wall_s", [2.5, 6.0])
def test_a_server_that_lets_clients_in_and_says_nothing(
    own_pool: SandboxPool, wall_s: float
) -> None:
    (worker,) = own_pool.worker_pids()
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=authenticate_and_fall_silent, args=(listener, kept))
        thread.start()
        address = f"postgresql://reader@127.0.0.1:{listener.getsockname()[1]}/shop"
        begun = time.monotonic()
        said = own_pool.execute(address, "SELECT 1", Limits(wall_s=wall_s)).failure
        assert time.monotonic() - begun < wall_s / 2
        assert own_pool.tables(address, wall_s) == said
        assert said == Failure("infrastructure", "the database server does not answer")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for client in kept:
        client.close()
    assert own_pool.worker_pids() == (worker,)


def test_a_server_that_stops_answering(ask: Ask, server: Server) -> None:
    assert ask("SELECT 1").ok
    server.signal_all(signal.SIGSTOP)
    try:
        execution = ask("SELECT 1", Limits(wall_s=6))
    finally:
        server.signal_all(signal.SIGCONT)
    assert failure(execution) == ("infrastructure", "the database server cannot be reached")
    assert ask("SELECT 1").ok


def test_an_episode_on_the_server(own_pool: SandboxPool, server: Server) -> None:
    database = Database(database_id="city", path=server.locator(), sha256="")
    episode = Episode(make_task("SELECT count(*) FROM city WHERE id < 3"), database, own_pool)
    turns = [
        call("sql_list_tables"),
        call("sql_schema", tables=["CITY", "nosuch"]),
        call("sql_exec", query="SELECT count(*) FROM large"),
        call("sql_submit", query="SELECT count(*) FROM large"),
    ]
    seen = [episode.step(turn).messages[0].content for turn in turns]
    assert episode.messages[0].content.startswith(
        "Answer the question with one PostgreSQL query. Explore "
    )
    assert seen[0].splitlines()[:2] == ["city (table, 3 rows)", '"Odd ""name" (table, 1 row)']
    assert seen[1].endswith("3 | Bodø | 1816-05-20\nno such table: nosuch")
    assert seen[2:] == ["count\n2\n(1 row)", "ACCEPTED"]
    verdict = episode.verdict()
    assert (verdict.reward, verdict.strict_ok) == (1.0, True)


@pytest.mark.parametrize("key", ["name ~ '^B'", "name ~* '^b'", "nullif(id = 1, true) NULLS FIRST"])
def test_rows_that_an_order_leaves_tied(own_pool: SandboxPool, server: Server, key: str) -> None:
    """Oslo is first, and the others tied; as SQLite these keys cannot be read, or mean another."""
    oracle = f"SELECT name FROM city ORDER BY {key}"
    task = make_task(oracle, row_count=3, ordered=True).hidden
    verifier = Verifier(own_pool)

    def check(sql: str) -> bool:
        return verifier.check(server.locator(), task, sql)

    assert check(oracle)
    assert check(f"{oracle}, name")
    assert check(f"{oracle}, name DESC")
    assert not check("SELECT name FROM city ORDER BY name = 'Oslo'")


def test_files_and_servers_in_one_pool(
    own_pool: SandboxPool, server: Server, city_path: str
) -> None:
    for _ in range(2):
        # A bound on the memory of one does not stay for the other.
        own_pool.execute(server.locator(), "SELECT 1", Limits(memory_mb=1))
        file = own_pool.execute(city_path, "SELECT length(hex(zeroblob(60000000)))")
        assert file.rows == ((120_000_000,),)
        assert own_pool.execute(server.locator(), "SELECT count(*) FROM large").rows == ((2,),)


def test_exec_takes_an_address(server: Server) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "hsql_env", "exec", "--database", server.locator(),
         "SELECT name, 'NaN'::float8 AS x FROM city ORDER BY id LIMIT 1"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "")
    assert json.loads(said.stdout)["rows"] == [["Oslo", {"float": "nan"}]]

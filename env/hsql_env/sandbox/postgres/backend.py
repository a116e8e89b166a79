"""The PostgreSQL backend of a worker process.

The server stops a statement a little before its time limit, at which the worker would be killed;
where that happens all the same, the server sees its client gone and cancels. What a result may take
in this process is bounded by the operating system; what a statement may take on the server is the
server's configuration.
"""

from __future__ import annotations

import resource
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hsql_env.sandbox.postgres.connection import Connection, Deadline, Failed
from hsql_env.sandbox.postgres.guard import check_statement
from hsql_env.sandbox.postgres.tables import read_tables
from hsql_env.sandbox.types import Execution, Failure, GuardProfile, Limits, Table

_OPEN_CONNECTIONS = 4  # a worker; a server has few in all
_MIB = 1024 * 1024
_SLACK_MB = 64  # above what a query may take, for the process's own needs


class PostgresBackend:
    """Open connections, the least recently used ones closed."""

    def __init__(self) -> None:
        self._connections: OrderedDict[str, Connection] = OrderedDict()

    def execute(self, locator: str, sql: str, limits: Limits, guard: GuardProfile) -> Execution:
        """Execute one read-only statement; never raises."""
        start = time.perf_counter()
        deadline = Deadline.after(limits.wall_s)
        refused = check_statement(sql, guard, limits.sql_chars)
        if refused is not None:
            return Execution(failure=refused)
        try:
            connection = self._connection(locator, deadline)
            with _memory_bound(limits.memory_mb):
                done = connection.query(sql, limits, deadline)
        except Exception as error:
            done = Execution(failure=_failure(error, limits))
        return replace(done, elapsed_s=time.perf_counter() - start)

    def tables(self, locator: str, limits: Limits) -> tuple[Table, ...] | Failure:
        """Describe the tables and views on the search path; never raises."""
        deadline = Deadline.after(limits.wall_s)
        try:
            return read_tables(self._connection(locator, deadline), deadline)
        except Exception as error:
            return _failure(error, limits)

    def _connection(self, locator: str, deadline: Deadline) -> Connection:
        """Return a connection that answers; one that a restart of the server cut is replaced."""
        known = self._connections.pop(locator, None)
        if known is not None and not known.answers(deadline):
            known = None
        connection = known or Connection(locator, deadline)
        self._connections[locator] = connection
        if len(self._connections) > _OPEN_CONNECTIONS:
            self._connections.popitem(last=False)[1].close()
        return connection


def _failure(error: Exception, limits: Limits) -> Failure:
    if isinstance(error, MemoryError):
        return Failure("memory", "out of memory: the query needs more than its memory limit")
    if not isinstance(error, Failed):  # its text could name the server
        return Failure("infrastructure", f"the database backend failed: {type(error).__name__}")
    if error.failure.kind == "timeout":
        return Failure("timeout", f"the query took longer than {limits.wall_s:g} s")
    return error.failure


@contextmanager
def _memory_bound(memory_mb: int) -> Iterator[None]:
    """Bound what this process takes on top of what it has, for the time of one statement."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = _address_space() + (memory_mb + _SLACK_MB) * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _address_space() -> int:
    """Return the process's present virtual size in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

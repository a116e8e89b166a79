"""The worker process: executes requests from its pipe, one statement at a time, until it is killed.

A worker never enforces its own wall limit: a single step of SQLite's machine can ignore every
in-process interrupt, so the parent kills the process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import apsw

from hsql_env.sandbox.backend import Backend, Dialect, dialect
from hsql_env.sandbox.decode import select_decoded
from hsql_env.sandbox.guard import (
    Authorizer,
    Refused,
    StatementCheck,
    check_text,
    find_text_name,
)
from hsql_env.sandbox.introspect import read_tables
from hsql_env.sandbox.open import FileIdentity, file_identity, open_readonly
from hsql_env.sandbox.types import Execution, Failure, GuardProfile, Limits, Row, Table

_OPEN_DATABASES = 128  # connections kept open a worker
_MIB = 1024 * 1024
_SIZED = (str, bytes)


class ExecuteRequest(NamedTuple):
    """Execute every statement; the worker replies one `Execution` a statement."""

    path: str
    sqls: tuple[str, ...]
    limits: Limits
    guard: GuardProfile


class TablesRequest(NamedTuple):
    """Describe a database; the worker replies `tuple[Table, ...]` or a `Failure`."""

    path: str
    limits: Limits


class _Handle(NamedTuple):
    connection: apsw.Connection
    authorizer: Authorizer
    identity: FileIdentity


class Worker:
    """The backends of this process, and the requests they answer."""

    def __init__(self) -> None:
        self._backends: dict[Dialect, Backend] = {"SQLite": SqliteBackend()}

    def answer(self, request: ExecuteRequest | TablesRequest) -> Iterator[object]:
        """Yield the replies to one request, in order."""
        backend = self._backend(request.path)
        if isinstance(request, TablesRequest):
            yield backend.tables(request.path, request.limits)
            return
        for sql in request.sqls:
            yield backend.execute(request.path, sql, request.limits, request.guard)

    def _backend(self, locator: str) -> Backend:
        kind = dialect(locator)
        if kind not in self._backends:
            self._backends[kind] = _server_backend(kind)
        return self._backends[kind]


def _server_backend(kind: Dialect) -> Backend:
    # Imported here, because their drivers are optional extras and take time to load.
    if kind == "BigQuery":
        from hsql_env.sandbox.bigquery import BigQueryBackend

        return BigQueryBackend()
    from hsql_env.sandbox.postgres.backend import PostgresBackend

    return PostgresBackend()


class SqliteBackend:
    """Open databases (least recently used ones are closed) and the limits now in force."""

    def __init__(self) -> None:
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._memory_mb = -1
        self._base_bytes = _address_space()

    def execute(self, path: str, sql: str, limits: Limits, guard: GuardProfile) -> Execution:
        """Execute one read-only statement on the file at `path`."""
        start = time.perf_counter()
        refused = check_text(sql, guard, limits.sql_chars)
        if refused is not None:
            return Execution(failure=refused)
        self._limit_memory(limits.memory_mb)
        try:
            handle = self._open(path)
            return _run(handle, sql, limits, start)
        except Exception as error:  # every failure of a query is a value
            failure = self._failed(error, self._handles.get(path))
            return Execution(failure=failure, elapsed_s=time.perf_counter() - start)

    def tables(self, path: str, limits: Limits) -> tuple[Table, ...] | Failure:
        """Describe every table and view of the file at `path`."""
        self._limit_memory(limits.memory_mb)
        try:
            handle = self._open(path)
            handle.connection.authorizer = None  # our own statements, not the policy's
            try:
                return read_tables(handle.connection)
            finally:
                handle.connection.authorizer = handle.authorizer
        except Exception as error:
            return self._failed(error, None)

    def _failed(self, error: Exception, handle: _Handle | None) -> Failure:
        failure = _failure(error, handle)
        if failure.kind == "memory":
            self._close_all()  # their caches are within the same limit
        return failure

    def _open(self, path: str) -> _Handle:
        identity = file_identity(path)
        handle = self._handles.get(path)
        if handle is not None and handle.identity != identity:
            self._close(path)
            handle = None
        if handle is None:
            handle = _Handle(open_readonly(path), Authorizer(), identity)
            handle.connection.authorizer = handle.authorizer
            self._handles[path] = handle
            if len(self._handles) > _OPEN_DATABASES:
                self._handles.popitem(last=False)[1].connection.close()
        self._handles.move_to_end(path)
        handle.authorizer.denied = None
        return handle

    def _close(self, path: str) -> None:
        handle = self._handles.pop(path, None)
        if handle is not None:
            handle.connection.close()

    def _close_all(self) -> None:
        for path in list(self._handles):
            self._close(path)

    def _limit_memory(self, memory_mb: int) -> None:
        """Bound SQLite's heap, and the whole process a little above it as a backstop."""
        if memory_mb == self._memory_mb:
            return
        self._memory_mb = memory_mb
        apsw.hard_heap_limit(memory_mb * _MIB)
        ceiling = self._base_bytes + (memory_mb + 512) * _MIB
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, resource.RLIM_INFINITY))


def _run(handle: _Handle, sql: str, limits: Limits, start: float) -> Execution:
    check = StatementCheck(sql)
    cursor = handle.connection.cursor()
    cursor.exec_trace = check
    try:
        rows, total, exact = _fetch(cursor.execute(sql), limits)
    except UnicodeDecodeError:
        if check.columns is None or check.explains:  # no value of a query that can be decoded
            raise Refused("sql_error", "a name or a plan holds text that is not UTF-8") from None
        decoded = select_decoded(handle.connection, check.statement, check.columns)
        rows, total, exact = _fetch(decoded, limits)
    finally:
        cursor.close(True)
    return Execution(
        columns=check.columns or (),
        rows=tuple(rows),
        total_rows=total,
        total_exact=exact,
        text_name=find_text_name(handle.connection, sql),
        elapsed_s=time.perf_counter() - start,
    )


def _fetch(cursor: Iterator[Any], limits: Limits) -> tuple[list[Row], int, bool]:
    """Return the first rows, the number of all rows, and whether they were counted to the end."""
    rows: list[Row] = []
    room = limits.result_mb * _MIB
    for row in itertools.islice(cursor, limits.rows):
        room -= 8 * len(row)
        for cell in row:  # the loop of every query: a generator would cost more than SQLite does
            if isinstance(cell, _SIZED):
                room -= len(cell)
        if room < 0:
            raise Refused("too_large", f"the result is larger than {limits.result_mb} MiB")
        rows.append(row)
    total = len(rows)
    deadline = time.monotonic() + limits.count_s
    for _ in cursor:
        total += 1
        if total >= limits.max_rows or time.monotonic() > deadline:
            return rows, total, False
    return rows, total, True


def _failure(error: Exception, handle: _Handle | None) -> Failure:
    """Return the failure that an exception of a query stands for."""
    if isinstance(error, Refused):
        return error.failure
    if handle is not None and handle.authorizer.denied and "not authorized" in str(error):
        return handle.authorizer.denied
    if isinstance(error, MemoryError | apsw.NoMemError):
        return Failure("memory", "out of memory: the query needs more than its memory limit")
    if isinstance(error, apsw.TooBigError):
        return Failure("too_large", "string or blob too big")
    if isinstance(error, OSError):  # its text would show the path
        return Failure("infrastructure", f"the database file: {error.strerror or 'unreadable'}")
    if isinstance(error, apsw.CantOpenError | apsw.NotADBError | apsw.CorruptError | apsw.IOError):
        return Failure("infrastructure", f"the database cannot be read: {_text(error)}")
    return Failure("sql_error", _text(error))


def _text(error: Exception) -> str:
    return str(error).removeprefix("SQLError: ") or type(error).__name__


def _address_space() -> int:
    """Return the process's present virtual size in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1024 * _MIB


def serve(pipe: Connection) -> None:
    """Answer requests until the pipe closes. The process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file either
    threading.Thread(target=_die_with_parent, daemon=True).start()
    worker = Worker()
    try:
        pipe.send_bytes(pickle.dumps(os.getpid()))
        while True:
            for reply in worker.answer(pickle.loads(pipe.recv_bytes())):
                pipe.send_bytes(pickle.dumps(reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _die_with_parent() -> None:
    """Wait for the parent's end, then end at once, also in the middle of a query."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

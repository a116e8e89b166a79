"""The worker process: executes requests from its pipe, one statement at a time, until it is killed.

A worker never enforces its own wall limit: a single step of SQLite's machine can ignore every
in-process interrupt, so the parent kills the process.
"""

from __future__ import annotations

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

from hsql_env.sandbox.decode import select_decoded
from hsql_env.sandbox.guard import Authorizer, Refused, StatementCheck, check_text
from hsql_env.sandbox.introspect import read_tables
from hsql_env.sandbox.open import FileIdentity, file_identity, open_readonly
from hsql_env.sandbox.types import Execution, Failure, GuardProfile, Limits, Row, Table

_OPEN_DATABASES = 128  # connections kept open a worker
_MIB = 1024 * 1024


class ExecuteRequest(NamedTuple):
    """Execute every statement; the worker replies one `Execution` a statement."""

    path: str
    sqls: tuple[str, ...]
    limits: Limits
    guard: GuardProfile


class TablesRequest(NamedTuple):
    """Describe a database; the worker replies `tuple[Table, ...]` or a `Failure`."""

    path: str


class _Handle(NamedTuple):
    connection: apsw.Connection
    authorizer: Authorizer
    identity: FileIdentity


class Worker:
    """Open databases (least recently used ones are closed) and the limits now in force."""

    def __init__(self) -> None:
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._memory_mb = -1
        self._base_bytes = _address_space()

    def answer(self, request: ExecuteRequest | TablesRequest) -> Iterator[object]:
        """Yield the replies to one request, in order."""
        if isinstance(request, TablesRequest):
            yield self._tables(request.path)
            return
        for sql in request.sqls:
            yield self._execute(request.path, sql, request.limits, request.guard)

    def _execute(self, path: str, sql: str, limits: Limits, guard: GuardProfile) -> Execution:
        start = time.perf_counter()
        refused = check_text(sql, guard, limits.sql_chars)
        if refused is not None:
            return Execution(failure=refused)
        self._limit_memory(limits.memory_mb)
        try:
            handle = self._open(path)
            return _run(handle, sql, limits, start)
        except Exception as error:  # every failure of a query is a value
            failure = _failure(error, self._handles.get(path))
            if failure.kind == "memory":
                self._close(path)
            return Execution(failure=failure, elapsed_s=time.perf_counter() - start)

    def _tables(self, path: str) -> tuple[Table, ...] | Failure:
        try:
            handle = self._open(path)
            handle.connection.authorizer = None  # our own statements, not the policy's
            try:
                return read_tables(handle.connection)
            finally:
                handle.connection.authorizer = handle.authorizer
        except Exception as error:
            return _failure(error, None)

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
        rows, total = _fetch(cursor.execute(sql), limits)
    except UnicodeDecodeError:
        decoded = select_decoded(handle.connection, check.statement, check.columns or ())
        rows, total = _fetch(decoded, limits)
    finally:
        cursor.close(True)
    return Execution(
        columns=check.columns or (),
        rows=tuple(rows),
        total_rows=total,
        total_exact=total < limits.max_rows,
        elapsed_s=time.perf_counter() - start,
    )


def _fetch(cursor: Iterator[Any], limits: Limits) -> tuple[list[Row], int]:
    """Return the first rows and the number of all rows, counted up to the bound."""
    rows: list[Row] = []
    room = limits.result_mb * _MIB
    total = 0
    for row in cursor:
        total += 1
        if total <= limits.rows:
            room -= sum(len(cell) for cell in row if isinstance(cell, str | bytes)) + 8 * len(row)
            if room < 0:
                raise Refused("too_large", f"the result is larger than {limits.result_mb} MiB")
            rows.append(row)
        elif total >= limits.max_rows:
            break
    return rows, total


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

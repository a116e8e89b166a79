"""One connection to a PostgreSQL server: read-only transactions of one statement, read by rows.

Statements go by the extended protocol, where the server itself accepts exactly one, and rows are
taken as they arrive, so that a long result is never held.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hsql_env.sandbox.postgres.cells import read_cell
from hsql_env.sandbox.types import Execution, Failure, FailureKind, Limits, Row

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

_MIB = 1024 * 1024
_ANSWER_SECONDS = 10.0  # for a connection, and for each of our own commands
_CONNECT_SECONDS = 2.0  # that a connection may take at least, within a limit that has them
_SPARE_SECONDS = 1.0  # before the caller is killed; a tenth of a shorter limit
_CHECK_CLIENT_MS = 500  # how soon a server sees that a killed worker is gone
_CHECK_CLIENT_SINCE = 140_000
# Values look the same on every server; the search path is the database's or the role's own.
_SETTINGS = (
    "bytea_output=hex DateStyle=ISO,YMD IntervalStyle=postgres TimeZone=UTC extra_float_digits=1 "
    "standard_conforming_strings=on default_transaction_read_only=on"
)
_ROLE_IS_TOO_STRONG = """
    SELECT bool_or(rolsuper) OR EXISTS (
        SELECT FROM pg_roles AS strong WHERE strong.rolname IN (
            'pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program')
        AND pg_has_role(current_user, strong.oid, 'MEMBER'))
    FROM pg_roles WHERE rolname = current_user
"""
_KINDS: dict[str, FailureKind] = {
    "08P01": "sql_error",  # a statement that asks for parameters
    "25006": "not_read_only",
    "42501": "denied",
    "53100": "too_large",  # the disk is full; all that a reader writes are temporary files
    "53200": "memory",
    "53400": "too_large",  # a configured limit, such as that of temporary files
    "57014": "timeout",
}
_CLASSES: dict[str, FailureKind] = {"54": "too_large"}
# The connection, the server's resources, its shutdown, its files, its data: not the statement's.
_INFRASTRUCTURE = ("08", "53", "57P", "58", "XX001", "XX002")


class Failed(Exception):
    """A statement or a connection that failed; carries the failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


class Deadline(NamedTuple):
    """When a request must be over, so that its worker is not killed at the wall limit.

    That kill costs the worker, and the statement is blamed for it. So the server gets a slightly
    smaller limit, and a server that says nothing is given up a little later, as its own failure.
    """

    stop: float  # monotonic seconds: the server stops what it runs
    end: float  # no answer by then is a failure of the server
    patience_s: float  # for the answer to what takes a server no time

    @classmethod
    def after(cls, wall_s: float) -> Deadline:
        """Return the deadline of a request that begins now."""
        now = time.monotonic()
        spare = min(_SPARE_SECONDS, wall_s / 10)
        stop, end = now + wall_s - spare, now + wall_s - spare / 2
        return cls(stop, end, min(_ANSWER_SECONDS, wall_s / 3))

    def connected_by(self) -> float:
        """Return when a server that has not let us in counts as unreachable."""
        return min(self.stop, time.monotonic() + max(self.patience_s, _CONNECT_SECONDS))

    def within(self, wall_s: float) -> Deadline:
        """Return the deadline of one statement of the request that begins now."""
        stop = min(self.stop, time.monotonic() + wall_s)
        return self._replace(stop=stop, end=min(self.end, stop + self.patience_s))


class Connection:
    """A connection to one database."""

    def __init__(self, locator: str, deadline: Deadline) -> None:
        """Connect. Raises `Failed`; its message names no host and no user."""
        pq = _libpq()
        self._status = pq.ExecStatus
        conninfo = _conninfo(locator)
        self._connection: PGconn = _connect(conninfo, deadline.connected_by())
        self._open = True
        if self._connection.status != pq.ConnStatus.OK:
            self.close()
            raise Failed("infrastructure", "the database server cannot be reached")
        if self._is_too_strong(deadline):
            self.close()
            raise Failed(
                "infrastructure",
                "the database role is a superuser or may use the server's files; "
                "connect as a role that may only read",
            )

    def _is_too_strong(self, deadline: Deadline) -> bool:
        try:
            return self.query(_ROLE_IS_TOO_STRONG, Limits(), deadline).rows != (("false",),)
        except Failed as error:
            if error.failure.kind != "timeout":
                raise
            raise _too_slow() from error  # the statement, which has not begun, is not to blame

    def answers(self, deadline: Deadline) -> bool:
        """Return whether the server still answers; one that restarted does not."""
        try:
            if self._open:
                self._command("SELECT", deadline)
        except Failed:
            self.close()
        return self._open

    def close(self) -> None:
        """Close the connection; the server rolls back what is left."""
        self._open = False
        self._connection.finish()

    def query(self, sql: str, limits: Limits, deadline: Deadline) -> Execution:
        """Execute one statement in a read-only transaction that leaves nothing behind.

        Raises `Failed`.
        """
        own = deadline.within(limits.wall_s)
        self._command(self._begin(own), deadline)
        try:
            return self._fetch(sql, limits, own)
        finally:
            self._clean(deadline)

    def _begin(self, deadline: Deadline) -> str:
        left_ms = int(1000 * (deadline.stop - time.monotonic()))
        if left_ms < 1:  # a statement that has not begun is not to blame
            raise _too_slow()
        commands = ["BEGIN TRANSACTION READ ONLY"]
        commands += [f"SET LOCAL statement_timeout = {left_ms}"]
        if self._connection.server_version >= _CHECK_CLIENT_SINCE:
            commands += [f"SET LOCAL client_connection_check_interval = {_CHECK_CLIENT_MS}"]
        return "; ".join(commands)

    def _clean(self, deadline: Deadline) -> None:
        """End the transaction and forget what it left in the session; if in doubt, hang up."""
        try:
            self._command("ROLLBACK", deadline)
            self._command("DISCARD ALL", deadline)
        except Failed:  # also a cancel request that came too late for its own statement
            self.close()

    def _command(self, sql: str, deadline: Deadline) -> None:
        self._send(self._connection.send_query, sql.encode())
        for result in self._results(min(deadline.end, time.monotonic() + deadline.patience_s)):
            self._check(result)

    def _fetch(self, sql: str, limits: Limits, deadline: Deadline) -> Execution:
        """Return the first rows and the number of all rows, counted up to the bound."""
        self._send(self._connection.send_query_params, sql.encode(), None)
        self._connection.set_single_row_mode()
        columns: tuple[str, ...] = ()
        types: list[int] = []
        rows: list[Row] = []
        room = limits.result_mb * _MIB
        total = 0
        cancelled = False
        failed: Failed | None = None
        for result in self._results(deadline.end):
            if cancelled or failed:
                continue  # what was on its way
            try:
                self._check(result)
                if not columns:
                    columns = _columns(result)
                    types = [result.ftype(column) for column in range(result.nfields)]
                for place in range(result.ntuples):
                    total += 1
                    if total <= limits.rows:
                        cells = [result.get_value(place, c) for c in range(result.nfields)]
                        room -= sum(len(cell or b"") + 8 for cell in cells)
                        if room < 0:
                            raise _too_large(limits)
                        rows.append(tuple(map(read_cell, types, cells)))
            except Failed as error:
                failed = error
            cancelled = failed is not None or total >= limits.max_rows
            if cancelled:
                self._cancel()
        if failed:
            raise failed
        return Execution(columns, tuple(rows), total, total_exact=total < limits.max_rows)

    def _cancel(self) -> None:
        """Ask the server to stop; a connection that broke has stopped by itself."""
        from psycopg import Error

        with suppress(Error):
            self._connection.get_cancel().cancel()

    def _send(self, send: Any, *arguments: Any) -> None:
        from psycopg import Error

        try:
            send(*arguments)
        except Error as error:
            raise _lost(str(error)) from error

    def _results(self, end: float) -> Iterator[PGresult]:
        """Yield results as they arrive, waiting outside of libpq, where other threads can run.

        A server that has not said all by `end`, in monotonic seconds, is given up.
        """
        from psycopg import Error

        try:
            poller = select.poll()
            poller.register(self._connection.socket, select.POLLIN)
            while True:
                while self._connection.is_busy():
                    if not poller.poll(1000 * max(0.0, end - time.monotonic())):
                        self.close()
                        raise Failed("infrastructure", "the database server does not answer")
                    self._connection.consume_input()
                result = self._connection.get_result()
                if result is None:
                    return
                yield result
        except Error as error:
            raise _lost(str(error)) from error

    def _check(self, result: PGresult) -> None:
        """Raise `Failed` for a result that is an error."""
        fine = self._status.COMMAND_OK, self._status.TUPLES_OK, self._status.SINGLE_TUPLE
        if result.status in (*fine, self._status.EMPTY_QUERY):
            return
        raise _failed(result)


def _libpq() -> Any:
    try:
        from psycopg import pq
    except ImportError as error:
        raise Failed(
            "infrastructure", "PostgreSQL needs psycopg: pip install 'hsql-env[postgres]'"
        ) from error
    return pq


def _connect(conninfo: str, end: float) -> PGconn:
    """Return a connection, or what it has come to by `end`, in monotonic seconds."""
    pq = _libpq()
    events = {pq.PollingStatus.READING: select.POLLIN, pq.PollingStatus.WRITING: select.POLLOUT}
    connection: PGconn = pq.PGconn.connect_start(conninfo.encode())
    while (event := events.get(connection.connect_poll())) is not None:
        poller = select.poll()  # the socket is another one for every address that is tried
        poller.register(connection.socket, event)
        if not poller.poll(1000 * max(0.0, end - time.monotonic())):
            break
    return connection


def _conninfo(locator: str) -> str:
    """Return the connection string with our settings after the locator's own options."""
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        options = str(conninfo_to_dict(locator).get("options") or "")
        ours = " ".join(f"-c {setting}" for setting in _SETTINGS.split())
        return make_conninfo(
            locator,
            options=f"{options} {ours}".strip(),
            client_encoding="UTF8",
            application_name="hsql-env",
        )
    except Error as error:
        raise Failed("infrastructure", "the database's locator is not a valid address") from error


def _columns(result: PGresult) -> tuple[str, ...]:
    names = (result.fname(place) or b"" for place in range(result.nfields))
    return tuple(name.decode(errors="replace") for name in names)


def _too_slow() -> Failed:
    return Failed("infrastructure", "the database server answers too slowly")


def _too_large(limits: Limits) -> Failed:
    return Failed("too_large", f"the result is larger than {limits.result_mb} MiB")


def _failed(result: PGresult) -> Failed:
    """Return the failure that an error result stands for."""
    from psycopg.pq import DiagnosticField

    def field(name: Any) -> str:
        return (result.error_field(name) or b"").decode(errors="replace")

    state = field(DiagnosticField.SQLSTATE)
    if not state:  # libpq's own error
        return _lost(result.error_message.decode(errors="replace"))
    kind = _KINDS.get(state) or _CLASSES.get(state[:2])
    if kind == "timeout":
        return Failed("timeout", "the query was cancelled")
    if kind is None and state.startswith(_INFRASTRUCTURE):
        return Failed("infrastructure", f"the database server failed (SQLSTATE {state})")
    if state.startswith("XX"):  # its text is about the server's inside
        return Failed("sql_error", "internal error of the database server")
    hint = field(DiagnosticField.MESSAGE_HINT)
    message = field(DiagnosticField.MESSAGE_PRIMARY) + (f" (hint: {hint})" if hint else "")
    return Failed(kind or "sql_error", message)


def _lost(reason: str) -> Failed:
    """Return the failure of a connection that broke; libpq's text would name the host."""
    if "memory" in reason:
        return Failed("memory", "out of memory: the query needs more than its memory limit")
    return Failed("infrastructure", "the connection to the database server was lost")

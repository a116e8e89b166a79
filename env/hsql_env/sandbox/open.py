"""Opening a database file so that nothing can change it."""

from __future__ import annotations

import os
from urllib.parse import quote

import apsw

_LENGTH_BYTES = 128 * 1024 * 1024  # longest text or blob
_SQL_BYTES = 16 * 1024 * 1024  # longest statement; the guard's limit on a policy's is lower
_CACHE_KIB = 1024  # page cache; a worker keeps many databases open within one heap limit
# Those on columns, arguments and compound queries are SQLite's defaults, which a build may have
# raised: a lower one would refuse the schema of a database that is within them.
_LIMITS = {
    apsw.SQLITE_LIMIT_LENGTH: _LENGTH_BYTES,
    apsw.SQLITE_LIMIT_SQL_LENGTH: _SQL_BYTES,
    apsw.SQLITE_LIMIT_COLUMN: 2000,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 500,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 1000,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 10_000,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 500,
    apsw.SQLITE_LIMIT_VDBE_OP: 2_000_000,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
}


FileIdentity = tuple[int, int, int]


def file_identity(path: str | os.PathLike[str]) -> FileIdentity:
    """Return what changes when another file takes this path: inode, size, modification time."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_readonly(path: str | os.PathLike[str]) -> apsw.Connection:
    """Return a read-only, immutable connection with SQLite's limits set.

    Virtual tables are connected here, because connecting one prepares statements of its own that
    an authorizer set later would refuse. Raises `apsw.Error` when the file cannot be opened.
    """
    uri = f"file:{quote(os.fspath(path))}?mode=ro&immutable=1"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(uri, flags=flags)
    connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
    for limit, value in _LIMITS.items():
        connection.limit(limit, value)
    connection.execute("PRAGMA temp_store = MEMORY")  # sorts and such: within the heap limit
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    _connect_virtual_tables(connection)
    return connection


def _connect_virtual_tables(connection: apsw.Connection) -> None:
    query = "SELECT name FROM sqlite_schema WHERE type = 'table' AND rootpage = 0"
    for (name,) in connection.execute(query).fetchall():
        quoted = '"' + str(name).replace('"', '""') + '"'
        try:
            connection.execute(f"SELECT * FROM {quoted} LIMIT 1").fetchall()
        except (apsw.Error, UnicodeDecodeError):
            continue  # a module this build lacks: queries on it get SQLite's own error

"""Reading what the list and schema tools show: kinds, CREATE statements, counts, samples."""

from __future__ import annotations

import time

import apsw

from hsql_env.sandbox.decode import select_decoded
from hsql_env.sandbox.types import Row, Table, Value

_SAMPLE_ROWS = 3
_SAMPLE_CHARS = 2_000  # more than any observation shows of a cell
_VIEW_SECONDS = 2.0  # a view's row count and sample may take this long
_LIST = """
    SELECT l.name, l.type, s.sql FROM pragma_table_list AS l
    JOIN sqlite_schema AS s ON s.name = l.name AND s.type IN ('table', 'view')
    WHERE l.schema = 'main' AND l.type <> 'shadow' AND l.name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
    ORDER BY s.rowid
"""


def quote_identifier(name: str) -> str:
    """Return the name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def read_tables(connection: apsw.Connection) -> tuple[Table, ...]:
    """Return every table and view in the order of creation, shadow and internal tables left out."""
    listed = connection.execute(_LIST).fetchall()
    return tuple(
        _read(connection, str(name), str(kind), str(sql or "")) for name, kind, sql in listed
    )


def _read(connection: apsw.Connection, name: str, kind: str, sql: str) -> Table:
    is_view = kind == "view"
    source = quote_identifier(name)
    if is_view:
        deadline = time.monotonic() + _VIEW_SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    try:
        columns, rows = _sample(connection, source)
        count = _count(connection, source)
    finally:
        connection.set_progress_handler(None)
    return Table(name, "view" if is_view else "table", sql, count, columns, rows)


def _count(connection: apsw.Connection, source: str) -> int | None:
    """Return the row count; None for what cannot be counted (a broken, slow or large view)."""
    try:
        count = connection.execute(f"SELECT count(*) FROM {source}").fetchall()[0][0]
        return int(count or 0)
    except (apsw.Error, MemoryError):
        return None


def _sample(connection: apsw.Connection, source: str) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    columns: list[str] = []

    def note_columns(cursor: apsw.Cursor, statement: str, bindings: object) -> bool:
        columns.extend(column[0] for column in cursor.get_description())
        return True

    query = f"SELECT * FROM {source} LIMIT {_SAMPLE_ROWS}"
    cursor = connection.cursor()
    cursor.exec_trace = note_columns
    try:
        rows = cursor.execute(query).fetchall()
    except UnicodeDecodeError:
        rows = list(select_decoded(connection, query, columns))
    except (apsw.Error, MemoryError):
        rows = []
    return tuple(columns), tuple(tuple(_cut(cell) for cell in row) for row in rows)


def _cut(cell: Value) -> Value:
    return cell[:_SAMPLE_CHARS] if isinstance(cell, str) else cell

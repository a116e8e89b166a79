"""Observations as text, kept terse: what a policy reads after each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hsql_env.sandbox.types import Execution, Row, Table, Value

CELL_CHARS = 300
SHOWN_ROWS = 50
_PLAIN_NAME = re.compile(r"[^\W\d]\w*\Z")
_RESERVED = frozenset(
    "add all alter and as between by case check collate commit constraint create cross "
    "default deferrable delete distinct drop else escape except exists foreign from full "
    "group having if in index inner insert intersect into is isnull join left limit natural "
    "not notnull null on or order outer primary references right rollback select set table "
    "then to transaction union unique update using values when where with".split()
)


def render_tables(tables: Sequence[Table]) -> str:
    """Return one line a table or view: name, kind, row count."""
    if not tables:
        return "the database has no tables"
    return "\n".join(
        f"{_display_name(table.name)} ({table.kind}, {_count(table.row_count)})" for table in tables
    )


def render_schema(tables: Sequence[Table], names: Sequence[str]) -> str:
    """Return the CREATE statement and sample rows of each named table; unknown names say so."""
    known = {table.name.casefold(): table for table in tables}
    parts = []
    for name in names:
        table = known.get(name.casefold()) or known.get(_unquoted(name).casefold())
        parts.append(_describe(table) if table else f"no such table: {name}")
    return "\n".join(parts)


def render_execution(execution: Execution, limit: int = SHOWN_ROWS) -> str:
    """Return header, rows and the summary of a query that ran, or its error."""
    if execution.failure is not None:
        return f"Error: {execution.failure.message}"
    header = " | ".join(_one_line(name) for name in execution.columns)
    rows = map(_render_row, _shown(execution, limit))
    return "\n".join([header, *rows, render_summary(execution, limit)])


def render_summary(execution: Execution, limit: int = SHOWN_ROWS) -> str:
    """Return the last lines on a query that ran: the true total, warnings. "" for one that failed.

    They have a bounded length and are to be read even where the rows are too long to be.
    """
    if execution.failure is not None:
        return ""
    total = _total(len(_shown(execution, limit)), execution)
    name = execution.text_name
    return f"{total}\n{_text_name_note(name)}" if name else total


def render_cell(value: Value) -> str:
    """Return one cell: exact integers, NULL apart from the text 'NULL', blobs by size."""
    if isinstance(value, str):  # most cells, and a call has hundreds
        if value == "NULL":
            return "'NULL'"
        text = value if len(value) <= CELL_CHARS else _cut(value)
        return text if text.isprintable() else _one_line(text)
    if value is None:
        return "NULL"
    return f"<blob {len(value)} bytes>" if isinstance(value, bytes) else repr(value)


def _shown(execution: Execution, limit: int) -> tuple[Row, ...]:
    return execution.rows[: min(limit, SHOWN_ROWS)]


def _render_row(row: Row) -> str:
    return " | ".join(map(render_cell, row))


def _cut(text: str) -> str:
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + "…"


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _total(shown: int, execution: Execution) -> str:
    total = execution.total_rows
    if not execution.total_exact:
        return f"({shown} of more than {total} rows shown)"
    if shown < total:
        return f"({shown} of {total} rows shown)"
    return f"({total} row{'' if total == 1 else 's'})"


def _text_name_note(name: str) -> str:
    name = _cut(name)
    quoted, text = _quoted_name(name), "'" + name.replace("'", "''") + "'"
    return f"[note: {_one_line(quoted)} is no column; SQLite read it as the text {_one_line(text)}]"


def _count(rows: int | None) -> str:
    if rows is None:
        return "rows not counted"
    return f"{rows} row{'' if rows == 1 else 's'}"


def _describe(table: Table) -> str:
    statement = " ".join(table.sql.split())
    return "\n".join([statement, *map(_render_row, table.sample_rows)])


def _display_name(name: str) -> str:
    """Return the name as it must be written in SQL."""
    if _PLAIN_NAME.match(name) and name.lower() not in _RESERVED:
        return name
    return _quoted_name(name)


def _quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _unquoted(name: str) -> str:
    """Return the name without SQL quotes around it."""
    for opening, closing in ('""', "``", "[]", "''"):
        if len(name) >= 2 and name[0] == opening and name[-1] == closing:
            return name[1:-1].replace(closing * 2, closing)
    return name

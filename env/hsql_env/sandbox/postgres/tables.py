"""Reading what the list and schema tools show of a PostgreSQL database.

Shown are the tables and views that a bare name finds, so those on the search path, and that the
role may read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hsql_env.sandbox.introspect import quote_identifier
from hsql_env.sandbox.postgres.connection import Connection, Deadline, Failed
from hsql_env.sandbox.types import Execution, Limits, Table, Value

_LIMITS = Limits(wall_s=30.0, rows=100_000)
_TABLE_LIMITS = Limits(wall_s=2.0, rows=3)  # of one table's count or sample
_SAMPLE_CHARS = 2_000  # more than any observation shows of a cell

_RELATIONS = """
    SELECT c.oid, c.relname, c.relkind::text,
           CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) END
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT c.relispartition
      AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)'
      AND pg_table_is_visible(c.oid) AND has_table_privilege(c.oid, 'SELECT')
    ORDER BY c.oid
"""
_COLUMNS = """
    SELECT attrelid, attname, format_type(atttypid, atttypmod), attnotnull
    FROM pg_attribute WHERE attnum > 0 AND NOT attisdropped AND attrelid IN ({ids})
    ORDER BY attrelid, attnum
"""
_CONSTRAINTS = """
    SELECT conrelid, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE contype IN ('p', 'u', 'f', 'c') AND conrelid IN ({ids})
    ORDER BY conrelid, array_position(ARRAY['p', 'u', 'f', 'c'], contype::text), oid
"""


def read_tables(connection: Connection, deadline: Deadline) -> tuple[Table, ...]:
    """Return every table and view in the order of creation. Raises `Failed`."""
    relations: list[Any] = list(connection.query(_RELATIONS, _LIMITS, deadline).rows)
    if not relations:
        return ()
    ids = ", ".join(str(relation[0]) for relation in relations)
    lines: defaultdict[int, list[str]] = defaultdict(list)
    columns = connection.query(_COLUMNS.format(ids=ids), _LIMITS, deadline)
    described: list[Any] = list(columns.rows)
    for oid, name, kind, not_null in described:
        lines[oid].append(f"{_shown(name)} {kind}" + (" NOT NULL" if not_null == "true" else ""))
    constraints = connection.query(_CONSTRAINTS.format(ids=ids), _LIMITS, deadline)
    constrained: list[Any] = list(constraints.rows)
    for oid, definition in constrained:
        lines[oid].append(definition)
    return tuple(
        _read(connection, relation, lines[relation[0]], deadline) for relation in relations
    )


def _read(
    connection: Connection, relation: Sequence[Any], lines: Sequence[str], deadline: Deadline
) -> Table:
    _, name, kind, definition = relation
    source = quote_identifier(name)
    count = _try(connection, f"SELECT count(*) FROM {source}", deadline)
    sample = _try(connection, f"SELECT * FROM {source} LIMIT {_TABLE_LIMITS.rows}", deadline)
    rows: list[Any] = list(count.rows)
    return Table(
        name=name,
        kind="view" if kind in ("v", "m") else "table",
        sql=_statement(name, kind, definition, lines),
        row_count=rows[0][0] if rows else None,
        sample_columns=sample.columns,
        sample_rows=tuple(tuple(_cut(cell) for cell in row) for row in sample.rows),
    )


def _statement(name: str, kind: str, definition: str | None, lines: Sequence[str]) -> str:
    if definition is not None:
        what = "MATERIALIZED VIEW" if kind == "m" else "VIEW"
        return f"CREATE {what} {_shown(name)} AS {definition.strip().rstrip(';')}"
    what = "FOREIGN TABLE" if kind == "f" else "TABLE"
    return f"CREATE {what} {_shown(name)} ({', '.join(lines)})"


def _shown(name: str) -> str:
    """Return the name bare where that reads as the same name, else quoted."""
    is_plain = name.isascii() and name.isidentifier() and name == name.lower()
    return name if is_plain else quote_identifier(name)


def _try(connection: Connection, sql: str, deadline: Deadline) -> Execution:
    """Return the outcome; an empty one for a table that is broken or takes too long."""
    try:
        return connection.query(sql, _TABLE_LIMITS, deadline)
    except Failed as error:
        if error.failure.kind == "infrastructure":
            raise
        return replace(Execution(), failure=error.failure)


def _cut(cell: Value) -> Value:
    return cell[:_SAMPLE_CHARS] if isinstance(cell, str) else cell

"""The catalog of a live database: columns with statistics and sample values, and join paths.

Everything is read through the sandbox with bounded work: a large table is described by its first
`SCAN_ROWS` rows, and what takes too long or fails is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from hsql_env.records import Database
from hsql_env.sandbox import Execution, Limits, SandboxPool
from hsql_env.tasks.names import quote_name, quote_value, spoken

SCAN_ROWS = 20_000
MAX_TABLES = 60
MAX_COLUMNS = 80  # of one table
MAX_GUESSES = 40  # inferred join paths tried
SAMPLES = 24
LIMITS = Limits(wall_s=10.0, rows=20_000)

Value = str | int | float


class CatalogError(ValueError):
    """A database whose schema cannot be read; the message names the file and the reason."""


@dataclass(frozen=True)
class Column:
    """One column; counts are over the scanned rows."""

    table: str
    name: str
    declared: str
    primary: bool
    nulls: int
    distinct: int
    integers: int  # values stored as integers
    reals: int
    texts: int
    digits: int  # texts that spell an integer
    low: Value | None
    high: Value | None
    longest: int  # characters of the longest value
    values: tuple[Value, ...]  # up to SAMPLES distinct values, NULL and blobs left out


@dataclass(frozen=True)
class Table:
    """One table or view; `scanned` < `rows` where the statistics are over a prefix."""

    name: str
    kind: Literal["table", "view"]
    rows: int
    scanned: int
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column:
        """Return the column of that name. Raises KeyError where there is none."""
        for column in self.columns:
            if column.name.lower() == name.lower():
                return column
        raise KeyError(f"{self.name}.{name}")


@dataclass(frozen=True)
class JoinPath:
    """An equality that was executed: child.child_column = parent.parent_column, parent unique.

    `loose` counts the scanned child rows that find no parent (NULL or dangling).
    """

    child: str
    child_column: str
    parent: str
    parent_column: str
    kind: Literal["declared", "inferred"]
    rows: int
    loose: int


@dataclass(frozen=True)
class Catalog:
    """What is known of one database."""

    database: Database
    tables: tuple[Table, ...]
    joins: tuple[JoinPath, ...]
    skipped: tuple[str, ...] = field(default=())  # "name: reason"

    def table(self, name: str) -> Table:
        """Return the table of that name. Raises KeyError where there is none."""
        for table in self.tables:
            if table.name.lower() == name.lower():
                return table
        raise KeyError(name)


def read_catalog(database: Database, pool: SandboxPool) -> Catalog:
    """Introspect `database`. Raises CatalogError where its schema cannot be read."""
    path = database.path
    shapes, skipped = _shapes(database, pool)
    counted = _count_rows(path, shapes, pool, skipped)
    tables = _describe(path, counted, pool, skipped)
    catalog = Catalog(database, tables, (), tuple(skipped))
    joins = _declared_joins(catalog, pool) if tables else []
    guesses = _guess_joins(catalog, joins)
    paths = _prove_joins(catalog, joins, "declared", pool)
    paths += _prove_joins(catalog, guesses, "inferred", pool)
    return Catalog(database, tables, tuple(paths), tuple(skipped))


@dataclass(frozen=True)
class _Shape:
    """A table before it is counted: (column, declared type, primary) triples."""

    name: str
    kind: Literal["table", "view"]
    columns: tuple[tuple[str, str, bool], ...]


def _shapes(database: Database, pool: SandboxPool) -> tuple[list[_Shape], list[str]]:
    """Every table and view with its columns; not virtual tables, nor what stands behind them."""
    listing = (
        "SELECT name, type FROM pragma_table_list WHERE schema = 'main' "
        "AND type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
    )
    found = pool.execute(database.path, listing, LIMITS)
    if found.failure is not None:
        raise CatalogError(f"{database.database_id}: no schema: {found.failure.message}")
    names = _rows(found)
    skipped = [f"{name}: more than {MAX_TABLES} tables" for name, _ in names[MAX_TABLES:]]
    queries = [
        f"SELECT name, type, pk > 0 FROM pragma_table_info({quote_value(name)}) ORDER BY cid"
        for name, _ in names[:MAX_TABLES]
    ]
    described = pool.execute_many(database.path, queries, LIMITS)
    shapes = []
    for (name, kind), columns in zip(names, described, strict=False):
        if columns.failure is not None:
            skipped.append(f"{name}: {columns.failure.message}")
        else:
            triples = ((c, declared or "", bool(key)) for c, declared, key in _rows(columns))
            shapes.append(_Shape(name, kind, tuple(triples)))
    return shapes, skipped


def _rows(execution: Execution) -> list[Any]:
    """The rows of one of our own queries, whose column types we know."""
    return list(execution.rows)


def _count_rows(
    path: str, shapes: Sequence[_Shape], pool: SandboxPool, skipped: list[str]
) -> list[tuple[_Shape, int]]:
    queries = [f"SELECT COUNT(*) FROM {quote_name(shape.name)}" for shape in shapes]
    counted = []
    for shape, found in zip(shapes, pool.execute_many(path, queries, LIMITS), strict=True):
        if found.failure is not None:
            skipped.append(f"{shape.name}: {found.failure.message}")
        elif (rows := _rows(found)[0][0]) == 0:
            skipped.append(f"{shape.name}: no rows")
        else:
            counted.append((shape, rows))
    return counted


def _prefix(shape: _Shape, rows: int) -> str:
    """A FROM item over the scanned rows."""
    name = quote_name(shape.name)
    return name if rows <= SCAN_ROWS else f"(SELECT * FROM {name} LIMIT {SCAN_ROWS})"


_STATISTICS = (
    "COUNT({c}), COUNT(DISTINCT {c}), "
    "SUM(typeof({c}) = 'integer'), SUM(typeof({c}) = 'real'), SUM(typeof({c}) = 'text'), "
    "SUM(typeof({c}) = 'text' AND CAST(CAST({c} AS INTEGER) AS TEXT) = {c}), "
    "MIN({c}), MAX({c}), MAX(LENGTH({c}))"
)
_WIDTH = 9  # figures of one column in _STATISTICS


def _describe(
    path: str, counted: Sequence[tuple[_Shape, int]], pool: SandboxPool, skipped: list[str]
) -> tuple[Table, ...]:
    """Statistics of every table in one round trip, samples of every column in another."""
    statistics_of: list[str] = []
    samples_of: list[str] = []
    for shape, rows in counted:
        source = _prefix(shape, rows)
        names = [quote_name(name) for name, _, _ in shape.columns[:MAX_COLUMNS]]
        asked = ", ".join(_STATISTICS.format(c=name) for name in names)
        statistics_of.append(f"SELECT COUNT(*), {asked} FROM {source}")
        samples_of += [
            f"SELECT DISTINCT {name} FROM {source} WHERE {name} IS NOT NULL LIMIT {SAMPLES}"
            for name in names
        ]
    statistics = pool.execute_many(path, statistics_of, LIMITS)
    samples = iter(pool.execute_many(path, samples_of, LIMITS))
    tables = []
    for (shape, rows), found in zip(counted, statistics, strict=True):
        taken = [next(samples) for _ in shape.columns[:MAX_COLUMNS]]
        if found.failure is not None:
            skipped.append(f"{shape.name}: {found.failure.message}")
            continue
        scanned, *figures = _rows(found)[0]
        columns = tuple(
            _column(shape, place, scanned, figures[place * _WIDTH : (place + 1) * _WIDTH], sample)
            for place, sample in enumerate(taken)
        )
        tables.append(Table(shape.name, shape.kind, rows, scanned, columns))
    return tuple(tables)


def _column(
    shape: _Shape, place: int, scanned: int, figures: Sequence[Value | None], sample: Execution
) -> Column:
    name, declared, primary = shape.columns[place]
    present, distinct, integers, reals, texts, digits, longest = (
        int(figures[k] or 0) for k in (0, 1, 2, 3, 4, 5, 8)
    )
    low, high = (value if isinstance(value, Value) else None for value in figures[6:8])
    values = tuple(row[0] for row in sample.rows if isinstance(row[0], Value))
    primary = primary and sum(key for _, _, key in shape.columns) == 1
    return Column(
        shape.name, name, declared, primary, scanned - present, distinct, integers, reals, texts,
        digits, low, high, longest, values,
    )  # fmt: skip


Equality = tuple[str, str, str, str]  # child, its column, parent, its column


def _declared_joins(catalog: Catalog, pool: SandboxPool) -> list[Equality]:
    """Single-column foreign keys as declared; without a target column, the parent's key."""
    queries = [
        f'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list({quote_value(table.name)})'
        for table in catalog.tables
    ]
    joins: list[Equality] = []
    found = pool.execute_many(catalog.database.path, queries, LIMITS)
    for table, execution in zip(catalog.tables, found, strict=True):
        keys = [row[0] for row in execution.rows]
        for key, target, child_column, parent_column in _rows(execution):
            try:
                parent = catalog.table(target)
                column = parent.column(parent_column) if parent_column else _primary(parent)
                child = table.column(child_column)
            except KeyError:
                continue  # points to a table or column that is not there, or was skipped
            if column is not None and keys.count(key) == 1:
                joins.append((table.name, child.name, parent.name, column.name))
    return list(dict.fromkeys(joins))


def _primary(table: Table) -> Column | None:
    return next((column for column in table.columns if column.primary), None)


def is_key_like(column: Column) -> bool:
    """True for a column that identifies rows and measures nothing."""
    last = spoken(column.name).split()[-1:]
    return column.primary or last in (["id"], ["key"], ["code"], ["pk"], ["uuid"])


_COMMON = {"id", "name", "code", "key", "pk", "year", "date", "type", "title", "value", "number"}


def _guess_joins(catalog: Catalog, declared: Sequence[Equality]) -> list[Equality]:
    """Equalities that the names suggest between tables no declared key connects."""
    known = {(child, column) for child, column, _, _ in declared}
    linked = {frozenset((child, parent)) for child, _, parent, _ in declared}
    base = [table for table in catalog.tables if table.kind == "table"]
    guesses: list[Equality] = []
    for child, parent in product(base, base):
        if child.name == parent.name or frozenset((child.name, parent.name)) in linked:
            continue
        unique = [column for column in parent.columns if is_unique(parent, column)]
        for key, column in product(unique, child.columns):
            if (child.name, column.name) not in known and _names_agree(column, parent, key):
                guesses.append((child.name, column.name, parent.name, key.name))
    return guesses[:MAX_GUESSES]


def is_unique(table: Table, column: Column) -> bool:
    """Proven by a full scan: no NULL, no value twice."""
    whole = table.scanned == table.rows
    return whole and column.nulls == 0 and column.distinct == table.rows


def _names_agree(column: Column, parent: Table, key: Column) -> bool:
    """Name evidence: the same telling name, or the parent's name followed by its key's."""
    same_kind = (column.integers > 0) == (key.integers > 0) and column.reals == key.reals == 0
    if not same_kind or column.distinct == 0 or key.distinct < 2:
        return False
    child_words, key_words = spoken(column.name), spoken(key.name)
    if child_words == key_words:
        return key_words not in _COMMON and not column.primary
    plural = spoken(parent.name)
    singular = re.sub(r"(?<=.)s$", "", re.sub(r"ies$", "y", plural))
    return child_words in (f"{singular} {key_words}", f"{plural} {key_words}")


def _prove_joins(
    catalog: Catalog,
    joins: Iterable[Equality],
    kind: Literal["declared", "inferred"],
    pool: SandboxPool,
) -> list[JoinPath]:
    """Keep the equalities whose parent side is unique and whose live join returns rows.

    An inferred one must also find a parent for most of the child's values.
    """
    able = [join for join in joins if _parent_is_unique(catalog, join)]
    queries = []
    for child, column, parent, key in able:
        foreign, source = quote_name(column), quote_name(child)
        queries.append(
            f"SELECT COUNT(*), COUNT(c.{foreign}), COUNT(p.{quote_name(key)}) "
            f"FROM (SELECT {foreign} FROM {source} LIMIT {SCAN_ROWS}) AS c "
            f"LEFT JOIN {quote_name(parent)} AS p ON c.{foreign} = p.{quote_name(key)}"
        )
    paths = []
    found = pool.execute_many(catalog.database.path, queries, LIMITS)
    for join, execution in zip(able, found, strict=True):
        if execution.failure is not None:
            continue
        rows, present, matched = _rows(execution)[0]
        if matched and (kind == "declared" or matched * 2 > present):
            paths.append(JoinPath(*join, kind, matched, rows - matched))
    return paths


def _parent_is_unique(catalog: Catalog, join: Equality) -> bool:
    parent = catalog.table(join[2])
    return is_unique(parent, parent.column(join[3]))

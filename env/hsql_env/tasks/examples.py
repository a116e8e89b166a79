"""The embedded set of small example databases, deterministic from a seed.

Each database is a random draw of two or three related tables from one domain's words. About a third
are messy the way real databases are: spaces in names, NULLs, numbers and dates as text, values
spelled otherwise than people write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import apsw

from hsql_env.tasks import lexicon
from hsql_env.tasks.names import quote_name

Cell = str | int | None
MESSY_SHARE = 0.35
MESSES = ("spaces", "nulls", "text_number", "text_date", "spelling")
TOP_VALUES = (9, 20, 50, 99, 99, 200, 500, 999)  # upper ends of number columns, mostly two digits


@dataclass
class Column:
    """A column while its database is drawn; `kind` is label, category, number or date."""

    name: str
    kind: str
    pool: str = ""
    declared: str = "TEXT"
    cells: list[Cell] = field(default_factory=list)


@dataclass
class Table:
    """A table while its database is drawn; `parent` is the table its foreign key points to."""

    name: str
    rows: int
    columns: list[Column]
    parent: Table | None = None
    parent_ids: list[int] = field(default_factory=list)


def write_examples(directory: Path, count: int, seed: int) -> list[Path]:
    """Write `count` databases into `directory` (made if absent) and return their paths.

    Database i depends on (seed, i) only: a larger count extends a smaller one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(count):
        rng = Random(f"examples:{seed}:{index}")
        domain = rng.choice(lexicon.DOMAINS)
        path = directory / f"{domain.name}_{index:04d}.sqlite"
        path.write_bytes(_image(draw_tables(domain, rng)))
        paths.append(path)
    return paths


def draw_tables(domain: lexicon.Domain, rng: Random) -> list[Table]:
    """Draw one database's tables, parents before children, messed up or not."""
    count = rng.choice((2, 2, 3))
    places = sorted(rng.sample(range(len(domain.entities)), count))
    tables: list[Table] = []
    taken: set[str] = set()
    for place in places:
        parent = rng.choice((tables[0], tables[-1])) if tables else None
        tables.append(_draw_table(domain, domain.entities[place], parent, taken, rng))
    if rng.random() < MESSY_SHARE:
        for mess in rng.sample(MESSES, rng.choice((1, 1, 2))):
            _MESS[mess](tables, rng)
    return tables


def _draw_table(
    domain: lexicon.Domain, name: str, parent: Table | None, taken: set[str], rng: Random
) -> Table:
    rows = rng.randint(6, 10) if parent is None else rng.randint(8, 15)
    table = Table(name, rows, [Column(rng.choice(lexicon.LABELS), "label", domain.names)], parent)
    categories = [*domain.categories, *rng.sample(lexicon.GENERAL_CATEGORIES, 4)]
    numbers = [*domain.numbers, *rng.sample(lexicon.GENERAL_NUMBERS, 5)]
    for word in _fresh(categories, rng.choice((1, 1, 2)), taken, rng):
        table.columns.append(Column(word, "category", lexicon.CATEGORIES[word]))
    for word in _fresh(numbers, rng.choice((1, 2, 2)), taken, rng):
        table.columns.append(Column(word, "number", declared="INTEGER"))
    if rng.random() < 0.3:
        dates = [*domain.dates, *lexicon.GENERAL_DATES]
        table.columns += [Column(word, "date") for word in _fresh(dates, 1, taken, rng)]
    table.columns[1:] = rng.sample(table.columns[1:], len(table.columns) - 1)
    for column in table.columns:
        column.cells = _draw_cells(column, rows, rng)
    if parent is not None:
        table.parent_ids = [rng.randint(1, parent.rows) for _ in range(rows)]
    return table


def _fresh(words: Sequence[str], count: int, taken: set[str], rng: Random) -> list[str]:
    """Up to `count` words not yet used in this database (now and then one is used again)."""
    free = sorted({word for word in words if word not in taken or rng.random() < 0.2})
    chosen = rng.sample(free, min(count, len(free)))
    taken.update(chosen)
    return chosen


def _draw_cells(column: Column, rows: int, rng: Random) -> list[Cell]:
    if column.kind == "label":
        return list(rng.sample(lexicon.NAME_POOLS[column.pool], rows))
    if column.kind == "category":
        palette = rng.sample(lexicon.VALUE_POOLS[column.pool], rng.randint(3, 5))
        return [rng.choice(palette) for _ in range(rows)]
    if column.kind == "date":
        return [_draw_date(rng) for _ in range(rows)]
    top = rng.choice(TOP_VALUES)
    if top > rows and rng.random() < 0.7:
        return list(rng.sample(range(1, top + 1), rows))
    return [rng.randint(1, top) for _ in range(rows)]


def _draw_date(rng: Random) -> str:
    return f"{rng.randint(2019, 2024)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _mess_spaces(tables: list[Table], rng: Random) -> None:
    """Give one column of each table, and now and then a leaf table, a name of two words."""
    for table in tables:
        column = rng.choice(table.columns[1:])
        column.name = f"{rng.choice(lexicon.MODIFIERS)} {column.name}"
    if rng.random() < 0.3:
        tables[-1].name = f"{rng.choice(lexicon.MODIFIERS)} {tables[-1].name}"


def _mess_nulls(tables: list[Table], rng: Random) -> None:
    for column in _columns(tables, "number"):
        for row in rng.sample(range(len(column.cells)), rng.randint(1, 3)):
            column.cells[row] = None


def _mess_text_number(tables: list[Table], rng: Random) -> None:
    """Store numbers as text, of one to three digits so that text order is not number order."""
    for column in _columns(tables, "number")[:2]:
        column.declared = "TEXT"
        top = rng.choice((120, 200, 500))
        column.cells = [
            None if cell is None else str(rng.choice((rng.randint(1, 9), rng.randint(10, top))))
            for cell in column.cells
        ]


def _mess_text_date(tables: list[Table], rng: Random) -> None:
    """Write dates the day-first way; a database without a date column gets one."""
    if not _columns(tables, "date"):
        word = rng.choice(lexicon.GENERAL_DATES)
        tables[-1].columns.append(Column(word, "date"))
        tables[-1].columns[-1].cells = [_draw_date(rng) for _ in range(tables[-1].rows)]
    for column in _columns(tables, "date"):
        column.cells = ["/".join(reversed(str(cell).split("-"))) for cell in column.cells]


def _mess_spelling(tables: list[Table], rng: Random) -> None:
    """Store values in capitals or in small letters, always the same way for one pool."""
    for column in _columns(tables, "category") + _columns(tables, "label"):
        if rng.random() < 0.7:
            column.cells = [respell(column.pool, str(cell)) for cell in column.cells]


_MESS: dict[str, Callable[[list[Table], Random], None]] = {
    "spaces": _mess_spaces,
    "nulls": _mess_nulls,
    "text_number": _mess_text_number,
    "text_date": _mess_text_date,
    "spelling": _mess_spelling,
}


def respell(pool: str, value: str) -> str:
    """The way a messy database spells a value of `pool`."""
    pools = [*lexicon.VALUE_POOLS, *lexicon.NAME_POOLS]
    return value.upper() if pools.index(pool) % 2 == 0 else value.lower()


def _columns(tables: list[Table], kind: str) -> list[Column]:
    return [column for table in tables for column in table.columns if column.kind == kind]


def create_statement(table: Table) -> str:
    """The canonical terse CREATE statement: keys first, then the drawn columns."""
    parts = ["id INTEGER PRIMARY KEY"]
    parts += [f"{quote_name(column.name)} {column.declared}" for column in table.columns]
    if table.parent is not None:
        parts.append(f"{table.parent.name}_id INTEGER REFERENCES {table.parent.name}(id)")
    return f"CREATE TABLE {quote_name(table.name)} ({', '.join(parts)})"


def _image(tables: list[Table]) -> bytes:
    """The database file's bytes, built in memory: no journal, no half-written file."""
    connection = apsw.Connection(":memory:")
    connection.execute("PRAGMA page_size=1024")
    with connection:
        for table in tables:
            connection.execute(create_statement(table))
            columns: list[Sequence[Cell]] = [range(1, table.rows + 1)]
            columns += [column.cells for column in table.columns]
            columns += [table.parent_ids] if table.parent is not None else []
            marks = ", ".join("?" * len(columns))
            statement = f"INSERT INTO {quote_name(table.name)} VALUES ({marks})"
            connection.executemany(statement, list(zip(*columns, strict=True)))
    return connection.serialize("main")

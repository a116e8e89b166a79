"""A task candidate, and the parts of a table that templates draw on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from hsql_env.tasks.catalog import Catalog, Column, JoinPath, Table, Value, is_key_like
from hsql_env.tasks.names import quote_name, quote_value, spoken, spoken_value

ISO_DATE = re.compile(r"(\d{4})[-/]\d{2}[-/]\d{2}")
DAY_FIRST = re.compile(r"\d{2}[-/.]\d{2}[-/.](\d{4})\Z")
LONGEST_VALUE = 32  # characters of a value that a question quotes


@dataclass(frozen=True)
class Candidate:
    """An oracle SQL with what the question, the verifier and the teacher need; nothing executed.

    `swaps` maps a literal of the SQL to another of the same column, `other_key` is a wrong join
    (child column, wrong child column), `order_sql` returns the keys an ORDER BY .. LIMIT k sorts
    by, one row more than k.
    """

    kind: str
    sql: str
    tables: tuple[str, ...]
    returns: tuple[str, ...]  # the answer's columns, spoken
    slots: Mapping[str, str]
    phrasing: float  # in [0, 1): which paraphrase
    variant: str = ""  # which set of paraphrases within the kind
    ordered: bool = False
    listing: bool = False  # the answer is a list, which must not repeat a row
    swaps: Mapping[Value, Value] = field(default_factory=dict)
    other_key: tuple[str, str] | None = None
    loose: bool = False  # the join drops rows, so that its kind matters
    order_sql: str = ""
    probes: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roles:
    """A table's columns by what can be asked of them."""

    table: Table
    labels: tuple[Column, ...]  # unique texts, the most name-like first; else the primary key
    categories: tuple[Column, ...]
    numbers: tuple[Column, ...]
    text_numbers: tuple[Column, ...]
    dates: tuple[Column, ...]
    gappy: tuple[Column, ...]  # some NULLs, some not

    @property
    def sql(self) -> str:
        """The table's name as SQL."""
        return quote_name(self.table.name)

    @property
    def said(self) -> str:
        """The table's name as spoken."""
        return spoken(self.table.name)


@dataclass(frozen=True)
class Link:
    """A join path with the roles of both ends."""

    path: JoinPath
    child: Roles
    parent: Roles

    @property
    def source(self) -> str:
        """The FROM clause's text: `child JOIN parent ON child.key = parent.key`."""
        child, parent = self.child.sql, self.parent.sql
        foreign, key = quote_name(self.path.child_column), quote_name(self.path.parent_column)
        return f"{child} JOIN {parent} ON {child}.{foreign} = {parent}.{key}"

    @property
    def other_key(self) -> tuple[str, str] | None:
        """The foreign key and another column of the child that a careless join might use."""
        for column in self.child.table.columns:
            foreign = column.name == self.path.child_column
            if not foreign and (column.primary or column.integers > 0):
                return self.path.child_column, column.name
        return None


def find_roles(catalog: Catalog) -> tuple[dict[str, Roles], list[Link]]:
    """Sort every table's columns into roles, and give each join path its two ends.

    Names that sound like another one cannot be asked for, and are left out.
    """
    foreign = {(path.child, path.child_column) for path in catalog.joins}
    spoken_tables = Counter(spoken(table.name) for table in catalog.tables)
    roles = {
        table.name: _roles(table, foreign)
        for table in catalog.tables
        if table.rows >= 3 and spoken_tables[spoken(table.name)] == 1
    }
    links = [
        Link(path, roles[path.child], roles[path.parent])
        for path in catalog.joins
        if path.child != path.parent and path.child in roles and path.parent in roles
    ]
    return roles, links


def _roles(table: Table, foreign: set[tuple[str, str]]) -> Roles:
    said = Counter(spoken(column.name) for column in table.columns)
    free = [
        column
        for column in table.columns
        if (table.name, column.name) not in foreign and said[spoken(column.name)] == 1
    ]
    plain = [column for column in free if not is_key_like(column)]
    texts = [column for column in free if _is_text(column) and not column.primary]
    return Roles(
        table,
        _labels(table, texts),
        tuple(column for column in texts if _is_category(table, column)),
        tuple(column for column in plain if _is_number(column) and column.distinct > 2),
        tuple(column for column in plain if _is_text_number(column)),
        tuple(column for column in plain if date_form(column)),
        tuple(column for column in plain if 0 < column.nulls < table.scanned),
    )


def _is_text(column: Column) -> bool:
    text = column.texts > 0 and column.integers == column.reals == 0
    return text and column.digits < column.texts and not date_form(column)


def _is_number(column: Column) -> bool:
    return column.texts == 0 and column.integers + column.reals > 0


def _is_text_number(column: Column) -> bool:
    only = column.integers == column.reals == 0 and column.digits == column.texts > 0
    return only and column.distinct > 2


def _is_category(table: Table, column: Column) -> bool:
    present = table.scanned - column.nulls
    return 2 <= column.distinct <= 60 and column.distinct * 2 <= present and column.longest <= 60


def _labels(table: Table, texts: list[Column]) -> tuple[Column, ...]:
    """Unique short texts, those called a name first; where there is none, the primary key."""
    unique = [
        column
        for column in texts
        if column.nulls == 0 and column.distinct == table.scanned and column.longest <= 60
    ]
    telling = ("name", "title", "label")
    unique.sort(key=lambda column: not spoken(column.name).endswith(telling))
    return tuple(unique or [column for column in table.columns if column.primary])


def date_form(column: Column) -> str:
    """`iso`, `day_first` or "" where the column's texts are not all dates of one form."""
    if column.texts == 0 or not column.values or column.integers + column.reals > 0:
        return ""
    for form, pattern in (("iso", ISO_DATE), ("day_first", DAY_FIRST)):
        if all(pattern.match(str(value)) for value in column.values):
            return form
    return ""


@dataclass(frozen=True)
class Condition:
    """A filter in SQL and in words, for the phrases `with color Red` and `where color is Red`."""

    sql: str
    noun: str
    clause: str
    swaps: Mapping[Value, Value]
    asked: str = ""  # the SQL with the question's spelling, where it differs
    probe: str = ""

    @property
    def slots(self) -> dict[str, str]:
        """The words of a question that names this condition."""
        return {"noun": self.noun, "clause": self.clause}


def name_in(column: Column, qualified: bool) -> str:
    """The column as SQL, with its table where `qualified`."""
    bare = quote_name(column.name)
    return f"{quote_name(column.table)}.{bare}" if qualified else bare


def usable(value: Value) -> bool:
    """True for a value that can stand in a question: short, one line, nothing odd."""
    if isinstance(value, str):
        trimmed = value.strip() == value and 0 < len(value) <= LONGEST_VALUE
        plain = value.isprintable() and "'" not in value and "\ufffd" not in value
        return trimmed and plain
    return len(repr(value)) <= 8 and "e" not in repr(value)


def shouts(column: Column) -> bool:
    """True where every value is one word in capitals or in small letters (codes aside)."""
    values = [str(value) for value in column.values]
    words = all(value.isalpha() and len(value) > 2 for value in values)
    if not words or max(map(len, values), default=0) < 4:
        return False
    return all(map(str.isupper, values)) or all(map(str.islower, values))


def equals(column: Column, rng: Random, qualified: bool = False) -> Condition | None:
    """`column = value` for a sampled value; people write a shouted value with one capital."""
    values = [value for value in column.values if usable(value)]
    if len(values) < 2:
        return None
    value, other = rng.sample(values, 2)
    name, said = name_in(column, qualified), spoken(column.name)
    written = value.capitalize() if isinstance(value, str) and shouts(column) else value
    asked = f"{name} = {quote_value(written)}" if written != value else ""
    bare, source = quote_name(column.name), quote_name(column.table)
    probe = f"SELECT DISTINCT {bare} FROM {source}"
    if column.distinct > 15:
        probe += f" WHERE {bare} LIKE {quote_value(written)}"
    return Condition(
        f"{name} = {quote_value(value)}",
        f"{said} {spoken_value(written)}",
        f"{said} is {spoken_value(written)}",
        {value: other},
        asked,
        probe if isinstance(value, str) else "",
    )


OPERATORS = {
    ">": ("greater than", "more than", "over", "above"),
    "<": ("less than", "below", "under"),
    "=": ("equal to", "exactly"),
}


def compares(column: Column, rng: Random, qualified: bool = False) -> Condition | None:
    """`column > n` (or <, =) for a sampled n inside the column's range; texts are cast."""
    usables = [value for value in column.values if usable(value)]
    numbers = sorted({_as_number(value) for value in usables})
    if len(numbers) < 4:
        return None
    operator = rng.choice((">", ">", "<", "<", "="))
    inside = numbers if operator == "=" else numbers[1:-1]
    value = rng.choice(inside)
    other = rng.choice([number for number in inside if number != value])
    name, said = name_in(column, qualified), spoken(column.name)
    words = rng.choice(OPERATORS[operator])
    cast = _is_text_number(column)
    return Condition(
        f"{f'CAST({name} AS INTEGER)' if cast else name} {operator} {value!r}",
        f"{said} {words} {value}",
        f"{said} is {words} {value}",
        {value: other},
        f"{name} {operator} {value!r}" if cast else "",
        f"SELECT {quote_name(column.name)} FROM {quote_name(column.table)} LIMIT 5" if cast else "",
    )


def _as_number(value: Value) -> int | float:
    return int(value) if isinstance(value, str) else value

"""Template families over one table: each instantiates an oracle SQL from a table's roles.

The SQL style is canonical and terse: no aliases, bare names, quotes only where needed. A template
returns None where the table has not what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from hsql_env.tasks.candidate import (
    Candidate,
    Condition,
    Roles,
    compares,
    date_form,
    equals,
)
from hsql_env.tasks.catalog import Column
from hsql_env.tasks.names import quote_name, quote_value, spoken

T = TypeVar("T")
Template = Callable[[Roles, Random], Candidate | None]

AGGREGATES = {
    "AVG": ("average", "mean"),
    "SUM": ("total", "sum of"),
    "MIN": ("minimum", "smallest"),
    "MAX": ("maximum", "largest"),
}
BEST = {"DESC": ("highest", "greatest"), "ASC": ("lowest", "smallest")}


def pick(rng: Random, options: Sequence[T]) -> T | None:
    """One of the options, or None where there is none."""
    return rng.choice(options) if options else None


def label(table: Roles, rng: Random) -> Column | None:
    """The table's label: mostly the most name-like."""
    if len(table.labels) > 1 and rng.random() < 0.15:
        return rng.choice(table.labels[1:])
    return table.labels[0] if table.labels else None


def asked_differently(sql: str, condition: Condition) -> tuple[str, ...]:
    """The SQL that takes the question's spelling at its word, where that is another SQL."""
    return (sql.replace(condition.sql, condition.asked),) if condition.asked else ()


def probes(condition: Condition) -> tuple[str, ...]:
    """The query that shows how the condition's value is stored."""
    return (condition.probe,) if condition.probe else ()


def _draft(kind: str, table: Roles, sql: str, rng: Random, **slots: str) -> Candidate:
    """A candidate over one table that returns one nameless value, to be refined."""
    words = {"table": table.said, **slots}
    return Candidate(kind, sql, (table.table.name,), ("",), words, rng.random())


def filtered(candidate: Candidate, condition: Condition) -> Candidate:
    """Add what follows from a filter: its words, literals, probe and misspelt attempt."""
    return replace(
        candidate,
        slots={**candidate.slots, **condition.slots},
        swaps=condition.swaps,
        probes=probes(condition),
        attempts=asked_differently(candidate.sql, condition),
    )


def _lookup(table: Roles, rng: Random) -> Candidate | None:
    name = label(table, rng)
    columns = [*table.categories, *table.numbers, *table.text_numbers, *table.dates]
    column = pick(rng, [column for column in columns if column is not name])
    condition = equals(name, rng) if name else None
    if column is None or condition is None:
        return None
    sql = f"SELECT {quote_name(column.name)} FROM {table.sql} WHERE {condition.sql}"
    candidate = filtered(_draft("lookup", table, sql, rng), condition)
    return replace(candidate, returns=(spoken(column.name),))


def _list_filter(table: Roles, rng: Random) -> Candidate | None:
    name = label(table, rng)
    condition = _any_condition(table, rng)
    if name is None or condition is None:
        return None
    columns = [name]
    more = [*table.categories, *table.numbers, *table.dates]
    extra = pick(rng, [c for c in more if c is not name and c.name not in condition.sql])
    if extra is not None and rng.random() < 0.25:
        columns.append(extra)
    shown = ", ".join(quote_name(column.name) for column in columns)
    sql = f"SELECT {shown} FROM {table.sql} WHERE {condition.sql}"
    candidate = filtered(_draft("list_filter", table, sql, rng), condition)
    said = tuple(spoken(column.name) for column in columns)
    return replace(candidate, returns=said, listing=True)


def _any_condition(table: Roles, rng: Random) -> Condition | None:
    """A category filter, or at times a numeric one."""
    if table.numbers and (not table.categories or rng.random() < 0.4):
        return compares(rng.choice(table.numbers), rng)
    column = pick(rng, table.categories)
    return equals(column, rng) if column else None


def _count(kind: str, table: Roles, condition: Condition | None, rng: Random) -> Candidate | None:
    if condition is None:
        return None
    sql = f"SELECT COUNT(*) FROM {table.sql} WHERE {condition.sql}"
    return filtered(_draft(kind, table, sql, rng), condition)


def _count_filter(table: Roles, rng: Random) -> Candidate | None:
    column = pick(rng, table.categories)
    return _count("count_filter", table, equals(column, rng) if column else None, rng)


def _count_num(table: Roles, rng: Random) -> Candidate | None:
    column = pick(rng, table.numbers)
    return _count("count_num", table, compares(column, rng) if column else None, rng)


def _agg(table: Roles, rng: Random) -> Candidate | None:
    number = pick(rng, table.numbers)
    if number is None:
        return None
    function = rng.choice(list(AGGREGATES))
    category = pick(rng, table.categories)
    condition = equals(category, rng) if category and rng.random() < 0.5 else None
    sql = f"SELECT {function}({quote_name(number.name)}) FROM {table.sql}"
    words = {"aggregate": rng.choice(AGGREGATES[function]), "number": spoken(number.name)}
    if condition is None:
        return _draft("agg", table, sql, rng, **words)
    draft = _draft("agg", table, f"{sql} WHERE {condition.sql}", rng, **words)
    return replace(filtered(draft, condition), variant="filtered")


def direction_of(number: Column, rng: Random) -> str:
    """A sort direction under which NULLs come last."""
    return "DESC" if number.nulls else rng.choice(("DESC", "DESC", "ASC"))


def _superlative(table: Roles, rng: Random) -> Candidate | None:
    return _top("superlative", table, pick(rng, table.numbers), 1, rng)


def _topk(table: Roles, rng: Random) -> Candidate | None:
    count = rng.randint(2, min(5, table.table.rows - 1))
    return _top("topk", table, pick(rng, table.numbers), count, rng)


def _top(
    kind: str, table: Roles, number: Column | None, count: int, rng: Random
) -> Candidate | None:
    """The labels of the `count` rows first in the order of `number`."""
    name = label(table, rng)
    if name is None or number is None:
        return None
    columns = [name, number] if kind == "topk" and rng.random() < 0.25 else [name]
    shown = ", ".join(quote_name(column.name) for column in columns)
    key = quote_name(number.name)
    direction = direction_of(number, rng)
    order = f"FROM {table.sql} ORDER BY {key} {direction} LIMIT"
    words = {"best": rng.choice(BEST[direction]), "number": spoken(number.name), "k": str(count)}
    candidate = _draft(kind, table, f"SELECT {shown} {order} {count}", rng, **words)
    return replace(
        candidate,
        returns=tuple(spoken(column.name) for column in columns),
        ordered=count > 1,
        order_sql=f"SELECT {key} {order} {count + 1}",
    )


def _whole(columns: Sequence[Column]) -> list[Column]:
    """The columns without NULLs, whose groups need no explaining."""
    return [column for column in columns if column.nulls == 0]


def _group_count(table: Roles, rng: Random) -> Candidate | None:
    category = pick(rng, _whole(table.categories))
    if category is None:
        return None
    key = quote_name(category.name)
    sql = f"SELECT {key}, COUNT(*) FROM {table.sql} GROUP BY {key}"
    candidate = _draft("group_count", table, sql, rng, category=spoken(category.name))
    count = f"number of {table.said} rows"
    return replace(candidate, returns=(spoken(category.name), count), listing=True)


def _group_top(table: Roles, rng: Random) -> Candidate | None:
    category = pick(rng, _whole(table.categories))
    if category is None:
        return None
    key = quote_name(category.name)
    most, direction = rng.choice((("most", "DESC"), ("most", "DESC"), ("fewest", "ASC")))
    order = f"FROM {table.sql} GROUP BY {key} ORDER BY COUNT(*) {direction} LIMIT"
    words = {"category": spoken(category.name), "most": most}
    candidate = _draft("group_top", table, f"SELECT {key} {order} 1", rng, **words)
    return replace(candidate, returns=(words["category"],), order_sql=f"SELECT COUNT(*) {order} 2")


def _distinct_count(table: Roles, rng: Random) -> Candidate | None:
    category = pick(rng, table.categories)
    if category is None:
        return None
    sql = f"SELECT COUNT(DISTINCT {quote_name(category.name)}) FROM {table.sql}"
    return _draft("distinct_count", table, sql, rng, category=spoken(category.name))


def _date_year(table: Roles, rng: Random) -> Candidate | None:
    date = pick(rng, table.dates)
    if date is None:
        return None
    iso = date_form(date) == "iso"
    years = sorted({str(value)[:4] if iso else str(value)[-4:] for value in date.values})
    if len(years) < 2:
        return None
    year, other = rng.sample(years, 2)
    pattern, swap = (f"{y}%" if iso else f"%{y}" for y in (year, other))
    name, source = quote_name(date.name), table.sql
    condition = Condition(
        f"{name} LIKE {quote_value(pattern)}",
        "",
        "",
        {pattern: swap},
        "" if iso else f"{name} LIKE '{year}%'",
        f"SELECT {name} FROM {source} LIMIT 5",
    )
    candidate = _count_or_list("date_year", table, condition, rng)
    words = {"date": spoken(date.name), "year": year}
    return candidate and replace(candidate, slots={**candidate.slots, **words})


def _count_or_list(kind: str, table: Roles, condition: Condition, rng: Random) -> Candidate | None:
    """Count the rows that meet the condition, or list their labels."""
    name = label(table, rng)
    if name is None or rng.random() < 0.6:
        candidate = _count(kind, table, condition, rng)
        return candidate and replace(candidate, variant="count")
    sql = f"SELECT {quote_name(name.name)} FROM {table.sql} WHERE {condition.sql}"
    candidate = filtered(_draft(kind, table, sql, rng), condition)
    return replace(candidate, variant="list", returns=(spoken(name.name),), listing=True)


def _is_null(table: Roles, rng: Random) -> Candidate | None:
    column = pick(rng, table.gappy)
    if column is None:
        return None
    condition = Condition(f"{quote_name(column.name)} IS NULL", "", "", {})
    candidate = _count_or_list("is_null", table, condition, rng)
    words = {"number": spoken(column.name)}
    return candidate and replace(candidate, slots={**candidate.slots, **words})


def _text_number(table: Roles, rng: Random) -> Candidate | None:
    """A comparison with, or an extreme of, numbers that are stored as text and have to be cast."""
    column = pick(rng, table.text_numbers)
    if column is None:
        return None
    if rng.random() < 0.6:
        candidate = _count("text_number", table, compares(column, rng), rng)
        return candidate and replace(candidate, variant="count")
    function, name = rng.choice(("MIN", "MAX")), quote_name(column.name)
    sql = f"SELECT {function}(CAST({name} AS INTEGER)) FROM {table.sql}"
    words = {"aggregate": rng.choice(AGGREGATES[function]), "number": spoken(column.name)}
    return replace(
        _draft("text_number", table, sql, rng, **words),
        variant="agg",
        attempts=(f"SELECT {function}({name}) FROM {table.sql}",),
        probes=(f"SELECT {name} FROM {table.sql} LIMIT 5",),
    )


def _above_average(table: Roles, rng: Random) -> Candidate | None:
    name, number = label(table, rng), pick(rng, table.numbers)
    if name is None or number is None:
        return None
    operator, side = rng.choice(((">", "above"), (">", "above"), ("<", "below")))
    key = quote_name(number.name)
    sql = (
        f"SELECT {quote_name(name.name)} FROM {table.sql} "
        f"WHERE {key} {operator} (SELECT AVG({key}) FROM {table.sql})"
    )
    candidate = _draft("above_average", table, sql, rng, number=spoken(number.name), side=side)
    return replace(candidate, returns=(spoken(name.name),), listing=True)


@dataclass(frozen=True)
class Family:
    """A template, the role of `Roles` that a table must have for it, and how often it is drawn."""

    template: Template
    needs: str
    weight: float = 1.0


# The families that few tables allow weigh more where they are possible.
FAMILIES: Mapping[str, Family] = {
    "lookup": Family(_lookup, "labels"),
    "list_filter": Family(_list_filter, "labels"),
    "count_filter": Family(_count_filter, "categories"),
    "count_num": Family(_count_num, "numbers"),
    "agg": Family(_agg, "numbers"),
    "superlative": Family(_superlative, "numbers"),
    "topk": Family(_topk, "numbers"),
    "group_count": Family(_group_count, "categories"),
    "group_top": Family(_group_top, "categories"),
    "distinct_count": Family(_distinct_count, "categories"),
    "date_year": Family(_date_year, "dates", 2.0),
    "is_null": Family(_is_null, "gappy", 2.0),
    "text_number": Family(_text_number, "text_numbers", 3.0),
    "above_average": Family(_above_average, "numbers"),
}

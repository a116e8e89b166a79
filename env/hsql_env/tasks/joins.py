"""Template families over a join path: the child's rows with what their parent says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from hsql_env.tasks.candidate import (
    Candidate,
    Condition,
    Link,
    Roles,
    compares,
    equals,
    name_in,
)
from hsql_env.tasks.names import spoken
from hsql_env.tasks.question import article
from hsql_env.tasks.templates import (
    AGGREGATES,
    BEST,
    direction_of,
    filtered,
    label,
    pick,
)

Template = Callable[[Link, Random], Candidate | None]


def _draft(kind: str, link: Link, sql: str, rng: Random, **slots: str) -> Candidate:
    """A candidate over a join that returns one nameless value, to be refined."""
    words = {
        "child": link.child.said,
        "parent": link.parent.said,
        "a_parent": article(link.parent.said),
        **slots,
    }
    return Candidate(
        kind,
        sql,
        (link.child.table.name, link.parent.table.name),
        ("",),
        words,
        rng.random(),
        other_key=link.other_key,
        loose=link.path.loose > 0,
    )


def _parent_condition(table: Roles, rng: Random) -> Condition | None:
    """A filter on the parent: by its label, a category or a number."""
    draw = rng.random()
    if draw < 0.5 and table.labels:
        return equals(table.labels[0], rng, qualified=True)
    if draw < 0.85 and table.categories:
        return equals(rng.choice(table.categories), rng, qualified=True)
    number = pick(rng, table.numbers)
    return compares(number, rng, qualified=True) if number else None


def _join_list(link: Link, rng: Random) -> Candidate | None:
    if rng.random() < 0.4:
        return _parent_of(link, rng)
    name, condition = label(link.child, rng), _parent_condition(link.parent, rng)
    if name is None or condition is None:
        return None
    sql = f"SELECT {name_in(name, True)} FROM {link.source} WHERE {condition.sql}"
    candidate = filtered(_draft("join_list", link, sql, rng), condition)
    return replace(candidate, returns=(spoken(name.name),), listing=True)


def _parent_of(link: Link, rng: Random) -> Candidate | None:
    """Something of the parent of one named child."""
    name = label(link.child, rng)
    columns = [*link.parent.labels[:1], *link.parent.categories, *link.parent.numbers]
    column = pick(rng, columns)
    condition = equals(name, rng, qualified=True) if name else None
    if column is None or condition is None:
        return None
    sql = f"SELECT {name_in(column, True)} FROM {link.source} WHERE {condition.sql}"
    candidate = filtered(_draft("join_list", link, sql, rng), condition)
    return replace(candidate, variant="parent", returns=(spoken(column.name),), listing=True)


def _join_count(link: Link, rng: Random) -> Candidate | None:
    condition = _parent_condition(link.parent, rng)
    if condition is None:
        return None
    sql = f"SELECT COUNT(*) FROM {link.source} WHERE {condition.sql}"
    return filtered(_draft("join_count", link, sql, rng), condition)


def _join_agg(link: Link, rng: Random) -> Candidate | None:
    number, condition = pick(rng, link.child.numbers), _parent_condition(link.parent, rng)
    if number is None or condition is None:
        return None
    function = rng.choice(list(AGGREGATES))
    shown = f"{function}({name_in(number, True)})"
    sql = f"SELECT {shown} FROM {link.source} WHERE {condition.sql}"
    words = {"aggregate": rng.choice(AGGREGATES[function]), "number": spoken(number.name)}
    return filtered(_draft("join_agg", link, sql, rng, **words), condition)


def _join_group(link: Link, rng: Random) -> Candidate | None:
    name = pick(rng, [*link.parent.labels[:1], *link.parent.categories])
    if name is None or name.nulls:
        return None
    key, said = name_in(name, True), spoken(name.name)
    number = pick(rng, link.child.numbers)
    if number is None or rng.random() < 0.6:
        sql = f"SELECT {key}, COUNT(*) FROM {link.source} GROUP BY {key}"
        candidate = _draft("join_group", link, sql, rng, label=said)
        count = f"number of {link.child.said} rows"
        return replace(candidate, variant="count", returns=(said, count), listing=True)
    function = rng.choice(list(AGGREGATES))
    aggregate = rng.choice(AGGREGATES[function])
    shown = f"{function}({name_in(number, True)})"
    sql = f"SELECT {key}, {shown} FROM {link.source} GROUP BY {key}"
    words = {"label": said, "aggregate": aggregate, "number": spoken(number.name)}
    candidate = _draft("join_group", link, sql, rng, **words)
    value = f"{aggregate} {words['number']}"
    return replace(candidate, variant="agg", returns=(said, value), listing=True)


def _join_superlative(link: Link, rng: Random) -> Candidate | None:
    name = label(link.parent, rng)
    if name is None:
        return None
    key, said = name_in(name, True), spoken(name.name)
    number = pick(rng, link.child.numbers)
    if number is None or rng.random() < 0.5:
        order = f"FROM {link.source} GROUP BY {key} ORDER BY COUNT(*) DESC LIMIT"
        candidate = _draft("join_superlative", link, f"SELECT {key} {order} 1", rng)
        variant, order_sql = "count", f"SELECT COUNT(*) {order} 2"
    else:
        sort, direction = name_in(number, True), direction_of(number, rng)
        order = f"FROM {link.source} ORDER BY {sort} {direction} LIMIT"
        words = {"best": rng.choice(BEST[direction]), "number": spoken(number.name)}
        candidate = _draft("join_superlative", link, f"SELECT {key} {order} 1", rng, **words)
        variant, order_sql = "row", f"SELECT {sort} {order} 2"
    return replace(candidate, variant=variant, returns=(said,), order_sql=order_sql)


FAMILIES: Mapping[str, Template] = {
    "join_list": _join_list,
    "join_count": _join_count,
    "join_agg": _join_agg,
    "join_group": _join_group,
    "join_superlative": _join_superlative,
}
# Counts die more often: two parents of small databases often have as many children.
WEIGHTS = (1.0, 2.0, 1.0, 0.8, 1.0)

"""Single-fault mutations of an oracle: edits of its parse tree that a wrong query might have.

Edits that are equivalent by construction are never made, such as LEFT JOIN over a foreign key that
always finds its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlglot import exp

from hsql_env.records import Mutation
from hsql_env.tasks import sqltree
from hsql_env.tasks.catalog import Value

E = TypeVar("E", bound=exp.Expr)
MOST = 4  # mutations of one task


@dataclass(frozen=True)
class Facts:
    """What the tree does not say: see `Candidate` for the fields."""

    swaps: Mapping[Value, Value]
    other_key: tuple[str, str] | None = None
    loose: bool = False


Edits = Iterator[tuple[str, exp.Expr, exp.Expr | None]]  # kind, node, its replacement
Nodes = Sequence[exp.Expr]  # of the whole tree
Editor = Callable[[Nodes, Facts], Edits]

_REVERSED: dict[type[exp.Expr], type[exp.Expr]] = {
    exp.GT: exp.LT,
    exp.LT: exp.GT,
    exp.GTE: exp.LTE,
    exp.LTE: exp.GTE,
    exp.EQ: exp.NEQ,
}
_MOVED: dict[type[exp.Expr], type[exp.Expr]] = {
    exp.GT: exp.GTE,
    exp.LT: exp.LTE,
    exp.GTE: exp.GT,
    exp.LTE: exp.LT,
}
_AGGREGATES: dict[type[exp.Expr], tuple[type[exp.Expr], ...]] = {
    exp.Avg: (exp.Max, exp.Sum),
    exp.Sum: (exp.Avg, exp.Max),
    exp.Min: (exp.Max, exp.Avg),
    exp.Max: (exp.Min, exp.Avg),
}


def mutations(tree: exp.Expr, facts: Facts) -> list[Mutation]:
    """Up to MOST mutations, of as many kinds as possible; `tree` is left as it is."""
    found: dict[str, list[Mutation]] = {}
    nodes = list(tree.walk())
    for edit in _EDITORS:
        for kind, node, by in list(edit(nodes, facts)):
            mutation = Mutation(kind=kind, sql=sqltree.render_edited(tree, [(node, by)]))
            found.setdefault(kind, []).append(mutation)
        if len(found) >= MOST:
            break
    first = [group[0] for group in found.values()]
    more = [mutation for group in found.values() for mutation in group[1:]]
    return (first + more)[:MOST]


def _of(nodes: Nodes, *kinds: type[E]) -> list[E]:
    return [node for node in nodes if isinstance(node, kinds)]


def _comparison(kind: str, table: Mapping[type[exp.Expr], type[exp.Expr]]) -> Editor:
    def edit(nodes: Nodes, facts: Facts) -> Edits:
        for node in _of(nodes, *table):
            if node.find_ancestor(exp.Join):
                continue
            if kind == "boundary" and node.find(exp.Select):
                continue  # an average is hardly ever met exactly
            by = table[type(node)](this=node.this.copy(), expression=node.expression.copy())
            yield kind, node, by

    return edit


def _negated(nodes: Nodes, facts: Facts) -> Edits:
    """LIKE and IS NULL, turned round."""
    for node in _of(nodes, exp.Like, exp.Is):
        yield "direction", node, exp.Not(this=node.copy())


def _literal(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Literal):
        for value, other in facts.swaps.items():
            if node.is_string == isinstance(value, str) and node.name == str(value):
                yield "literal", node, exp.convert(other)


def _aggregate(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, *_AGGREGATES):
        for other in _AGGREGATES[type(node)]:
            yield "aggregate", node, other(this=node.this.copy())


def _filter(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Where):
        yield "filter_dropped", node, None


def _cast(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Cast):
        yield "cast_dropped", node, node.this.copy()


def _distinct(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Distinct):
        inside = isinstance(node.parent, exp.Count)
        by = node.expressions[0].copy() if inside else None
        yield "distinct_dropped", node, by
        if inside and node.parent is not None:
            highest = exp.Max(this=node.expressions[0].copy())
            yield "aggregate", node.parent, highest


def _order(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Ordered):
        by = exp.Ordered(this=node.this.copy(), desc=not node.args.get("desc"))
        by.set("nulls_first", not by.args["desc"])
        yield "order", node, by


def _limit(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Limit):
        more = exp.Literal.number(int(node.expression.name) + 1)
        yield "limit", node, exp.Limit(expression=more)


def _group(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Group):
        if _of(nodes, exp.Limit):
            continue  # its first group is open, and counting one value a group ties them all
        yield "group_dropped", node, None
        for count in _of(nodes, exp.Count):
            distinct = exp.Distinct(expressions=[node.expressions[0].copy()])
            yield "aggregate", count, exp.Count(this=distinct)


def _join(nodes: Nodes, facts: Facts) -> Edits:
    for node in _of(nodes, exp.Join):
        if facts.other_key is not None:
            foreign, other = facts.other_key
            for column in node.find_all(exp.Column):
                if column.name == foreign:
                    table = column.args["table"].copy()
                    wrong = exp.Column(this=sqltree.identifier(other), table=table)
                    yield "join_key", column, wrong
                    break
        if facts.loose and not node.side and not _of(nodes, exp.Where, exp.Limit):
            left = node.copy()
            left.set("side", "LEFT")
            yield "join_kind", node, left


_EDITORS: tuple[Editor, ...] = (
    _cast,
    _join,
    _comparison("direction", _REVERSED),
    _negated,
    _comparison("boundary", _MOVED),
    _literal,
    _aggregate,
    _order,
    _distinct,
    _filter,
    _group,
    _limit,
)

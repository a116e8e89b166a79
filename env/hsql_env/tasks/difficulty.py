"""Structural difficulty of a SQL text, equation (15) of the paper, counted on its parse tree."""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp
from sqlglot.tokens import Token, TokenType

from hsql_env.tasks import sqltree

_TIME_CALLS = frozenset("date time datetime julianday unixepoch strftime timediff".split())
_TIME_NODES = tuple(
    getattr(exp, name)
    for name in (
        "Date", "Time", "Datetime", "TimeToStr", "TsOrDsToDate", "CurrentDate", "CurrentTime",
        "CurrentTimestamp",
    )
)  # fmt: skip
_JSON_NODES = (exp.JSONExtract, exp.JSONExtractScalar, exp.JSONArray, exp.JSONObject)


@dataclass(frozen=True)
class Structure:
    """The counts equation (15) weighs; `depth` is 1 for a SELECT with none inside it."""

    tokens: int
    ctes: int
    joins: int
    selects: int
    windows: int
    set_operations: int
    exists: int
    conditional_aggregates: int
    cases: int
    time_calls: int
    json_calls: int
    depth: int

    @property
    def difficulty(self) -> float:
        """D_str, equation (15), rounded to its three decimals."""
        score = (
            0.012 * self.tokens
            + 1.2 * self.ctes
            + 0.8 * self.joins
            + 1.4 * max(0, self.selects - 1)
            + 2.2 * self.windows
            + 2.0 * self.set_operations
            + 1.5 * self.exists
            + 1.2 * self.conditional_aggregates
            + 0.8 * self.cases
            + 1.0 * self.time_calls
            + 1.0 * self.json_calls
            + 1.2 * self.depth
        )
        return round(score, 3)


def difficulty(sql: str) -> float:
    """D_str of `sql`. Raises sqlglot's SqlglotError where it does not parse."""
    return measure(sql).difficulty


def measure(sql: str, tree: exp.Expr | None = None) -> Structure:
    """Count the structure of `sql`; `tree` is its parse tree where the caller has it.

    A CTE's body counts as inside the statement it belongs to. Comments and a final semicolon are
    no tokens.
    """
    tree = tree or sqltree.parse(sql)
    nodes = list(tree.walk())
    return Structure(
        tokens=sum(map(_words, sqltree.tokens(sql))),
        ctes=_count(nodes, exp.CTE),
        joins=_count(nodes, exp.Join),
        selects=_count(nodes, exp.Select),
        windows=_count(nodes, exp.Window),
        set_operations=_count(nodes, exp.SetOperation),
        exists=_count(nodes, exp.Exists),
        conditional_aggregates=sum(map(_is_conditional, nodes)),
        cases=sum(map(_is_case, nodes)),
        time_calls=sum(map(_is_time, nodes)),
        json_calls=sum(map(_is_json, nodes)),
        depth=max((_depth(node) for node in nodes if isinstance(node, exp.Select)), default=0),
    )


def _words(token: Token) -> int:
    """1, or 2 for a keyword such as GROUP BY, which the tokenizer gives as one."""
    if token.token_type in (TokenType.STRING, TokenType.IDENTIFIER):
        return 1
    return len(token.text.split()) if token.text != ";" else 0


def _count(nodes: list[exp.Expr], kind: type[exp.Expr]) -> int:
    return sum(isinstance(node, kind) for node in nodes)


def _depth(select: exp.Expr) -> int:
    depth, at = 1, select.parent
    while at is not None:
        depth += isinstance(at, exp.Select)
        at = at.parent
    return depth


def _is_case(node: exp.Expr) -> bool:
    """CASE, or IIF, which the parser gives as an If of its own."""
    alone = isinstance(node, exp.If) and not isinstance(node.parent, exp.Case)
    return isinstance(node, exp.Case) or alone


def _is_conditional(node: exp.Expr) -> bool:
    """An aggregate with a FILTER clause, or over a CASE of its own (not a subquery's)."""
    if isinstance(node, exp.Filter):
        return True
    if not isinstance(node, exp.AggFunc) or isinstance(node.parent, exp.Filter):
        return False
    inside = node.walk(prune=lambda part: isinstance(part, exp.Select))
    return any(_is_case(part) for part in inside)


def _is_time(node: exp.Expr) -> bool:
    called = isinstance(node, exp.Anonymous) and node.name.lower() in _TIME_CALLS
    return called or isinstance(node, _TIME_NODES)


def _is_json(node: exp.Expr) -> bool:
    called = isinstance(node, exp.Anonymous) and node.name.lower().startswith("json")
    return called or isinstance(node, _JSON_NODES)

"""Which rows of an ordered query are ties: rows that its ORDER BY leaves in any order.

The query is rewritten to return, as one more column, each row's rank under its own ORDER BY. The
rank is the database's, so collations, expressions and aggregates count as they do in the query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from hsql_env.sandbox import Execution
from hsql_env.sandbox.backend import Dialect

# The parser's names.
_PARSED_AS: Mapping[Dialect, str] = {
    "SQLite": "sqlite",
    "PostgreSQL": "postgres",
    "BigQuery": "bigquery",
}


def find_ties(
    oracle: Execution,
    sql: str,
    execute: Callable[[str], Execution],
    dialect: Dialect = "SQLite",
) -> tuple[int, ...]:
    """Return one number a row of the oracle's result, which the rows of a tie share.

    Returns () where the ties cannot be known, or a LIMIT cuts one: then every row has its place.
    `execute` runs the query for the ranks; it should raise for a failure that is not the query's.
    """
    query = with_rank(sql, len(oracle.columns), dialect)
    if query is None:
        return ()
    ranked = execute(query)
    if not ranked.complete or len(ranked.columns) != len(oracle.columns) + 1:
        return ()
    ranks = tuple(row[-1] for row in ranked.rows if isinstance(row[-1], int))
    if len(ranks) != len(oracle.rows) or any(later < rank for rank, later in pairwise(ranks)):
        return ()
    rows = (row[:-1] for row in ranked.rows)
    agree = Counter(zip(ranks, rows, strict=True)) == Counter(zip(ranks, oracle.rows, strict=True))
    return ranks if agree else ()


def with_rank(sql: str, width: int, dialect: Dialect = "SQLite") -> str | None:
    """Return the query of `width` columns with the rank of each row as one more column.

    None where it has no ORDER BY or one that cannot be read.
    """
    language = _PARSED_AS[dialect]
    try:
        tree = sqlglot.parse_one(sql, dialect=language)
    except (SqlglotError, RecursionError):
        return None
    order = tree.args.get("order")
    if not isinstance(tree, exp.Query) or not isinstance(order, exp.Order):
        return None
    plain = isinstance(tree, exp.Select) and not tree.args.get("distinct")
    terms = [_resolve(term, tree.selects, plain) for term in order.expressions]
    if any(term is None for term in terms):
        return None
    window = exp.Window(
        this=exp.Anonymous(this="dense_rank"), order=exp.Order(expressions=terms), over="OVER"
    )
    if plain:
        return _appended(tree, window, language)
    return _wrapped(tree, window, width, language)


def _resolve(term: exp.Expr, selects: list[exp.Expr], plain: bool) -> exp.Expr | None:
    """Return the ORDER BY term without aliases and positions, which a window does not know.

    A compound or DISTINCT query is ranked from outside, by the columns it returns.
    """
    term = term.copy()
    key = term.this
    while isinstance(key, exp.Collate | exp.Paren):
        key = key.this
    place = _place(key, selects)
    if place is None:
        return term if plain and not isinstance(key, exp.Literal) else None
    if plain and isinstance(selects[place].unalias(), exp.Star):
        return None
    key.replace(selects[place].unalias().copy() if plain else exp.column(f"c{place}"))
    return term


def _place(key: exp.Expr, selects: list[exp.Expr]) -> int | None:
    """Return which of the selected expressions the key stands for, None where it is none."""
    if isinstance(key, exp.Literal) and not key.is_string:
        number = int(key.this) if key.this.isdigit() else 0
        has_star = any(select.is_star for select in selects)
        return number - 1 if 1 <= number <= len(selects) and not has_star else None
    if isinstance(key, exp.Column) and not key.table:
        named = [select.alias.casefold() for select in selects]
        if key.name.casefold() in named:
            return named.index(key.name.casefold())
    bare = [select.unalias() for select in selects]
    return bare.index(key) if key in bare else None


def _appended(tree: exp.Query, window: exp.Window, language: str) -> str:
    ranked = tree.copy()
    ranked.set("expressions", [*ranked.selects, window])
    return ranked.sql(dialect=language)


def _wrapped(tree: exp.Query, window: exp.Window, width: int, language: str) -> str:
    inner = tree.copy()
    limit, offset = inner.args.get("limit"), inner.args.get("offset")
    for part in ("order", "limit", "offset"):
        inner.set(part, None)
    names = ", ".join(f"c{place}" for place in range(width))
    tail = "".join(f" {part.sql(dialect=language)}" for part in (limit, offset) if part)
    return (
        f"WITH ranked({names}) AS ({inner.sql(dialect=language)}) "
        f"SELECT {names}, {window.sql(dialect=language)} FROM ranked "
        f"ORDER BY {width + 1}{tail}"
    )

"""Whether two sets of tasks share SQL, with whitespace, letter case and literals set aside."""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from hsql_env.records import Task
from hsql_env.tasks import sqltree

_LITERALS = frozenset(
    (
        TokenType.NUMBER, TokenType.STRING, TokenType.HEX_STRING, TokenType.BIT_STRING,
        TokenType.NATIONAL_STRING, TokenType.BYTE_STRING,
    )
)  # fmt: skip


def normalised_sql(sql: str) -> str:
    """`sql` as lower-case tokens with one space between, every literal a `?`.

    Comments, quotes around names and a final semicolon are dropped. Text that is no SQL comes back
    in lower case with its whitespace folded.
    """
    try:
        found = sqltree.tokens(sql)
    except SqlglotError:
        return " ".join(sql.lower().split())
    words = ["?" if token.token_type in _LITERALS else token.text.lower() for token in found]
    return " ".join(" ".join(words).rstrip("; ").split())


def overlap(train: Iterable[Task], held_out: Iterable[Task]) -> list[str]:
    """The normalised oracle SQL that both sets have, sorted; empty proves them apart."""
    return sorted(_normalised(train) & _normalised(held_out))


def _normalised(tasks: Iterable[Task]) -> set[str]:
    return {normalised_sql(task.hidden.oracle_sql) for task in tasks}

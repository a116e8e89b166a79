"""SQL text to tokens and parse trees and back, in SQLite's dialect."""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot import exp
from sqlglot.dialects import SQLite
from sqlglot.errors import SqlglotError
from sqlglot.tokens import Token

from hsql_env.tasks.names import quote_name

_DIALECT = SQLite()


def tokens(sql: str) -> list[Token]:
    """The lexical tokens of `sql`, comments left out. Raises SqlglotError."""
    return _DIALECT.tokenize(sql)


def parse(sql: str) -> exp.Expr:
    """The parse tree of one statement. Raises SqlglotError where it is none or several."""
    trees = [tree for tree in _DIALECT.parser().parse(tokens(sql), sql) if tree is not None]
    if len(trees) != 1:
        raise SqlglotError(f"expected one statement, found {len(trees)}: {sql[:80]}")
    return trees[0]


def render(tree: exp.Expr) -> str:
    """The tree as SQL text."""
    return _DIALECT.generate(tree, copy=False)


def identifier(name: str) -> exp.Identifier:
    """The tree node of a name, in quotes where SQLite needs them."""
    return exp.Identifier(this=name, quoted=quote_name(name) != name)


Edit = tuple[exp.Expr, exp.Expr | None]  # a node of the tree, and what stands in its place


def render_edited(tree: exp.Expr, edits: Iterable[Edit]) -> str:
    """The SQL text of the tree with some nodes replaced, or removed where the other is None.

    The tree is edited in place and restored, which is several times faster than copying it.
    """
    undo = []
    for node, by in edits:
        parent, key, index = node.parent, node.arg_key, node.index
        assert parent is not None and key is not None
        parent.set(key, by, index)
        undo.append((parent, key, node, index))
    text = render(tree)
    for parent, key, node, index in reversed(undo):
        parent.set(key, node, index)
    return text

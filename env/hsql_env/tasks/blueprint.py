"""What the scripted teacher needs besides the oracle: queries that fail, and why a person might
write them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sqlglot import exp

from hsql_env.tasks import lexicon, sqltree
from hsql_env.tasks.candidate import Candidate
from hsql_env.tasks.catalog import Catalog
from hsql_env.tasks.names import quote_name

MOST_FAULTS = 3
_ATTRIBUTES = lexicon.attributes()
_ENTITIES = lexicon.entities()

Edits = list[sqltree.Edit]
Fault = Callable[[exp.Expr, Candidate, Catalog, Random], Edits]


def faults(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> list[str]:
    """Up to MOST_FAULTS plausible SQL texts that should fail; the caller executes them."""
    kinds: list[Fault] = [_wrong_table]
    if len(candidate.tables) > 1:
        kinds = rng.sample([_unqualified, _wrong_side], 2)
    texts: list[str] = []
    for kind in [_unquoted, _wrong_column, *kinds, _no_table]:
        edits = kind(tree, candidate, catalog, rng) if len(texts) < MOST_FAULTS else []
        if edits:
            texts.append(sqltree.render_edited(tree, edits))
    return texts


def _columns(tree: exp.Expr) -> list[exp.Column]:
    return list(tree.find_all(exp.Column))


def _is_plain(name: str) -> bool:
    """A name that needs no quotes: in quotes SQLite would take an unknown one for a string."""
    return quote_name(name) == name


def _wrong_column(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """A name that another table has, or that none has but could, at every mention of a column."""
    involved = [catalog.table(name) for name in candidate.tables]
    here = {column.name.lower() for table in involved for column in table.columns}
    elsewhere = {column.name for table in catalog.tables for column in table.columns}
    near = sorted(name for name in elsewhere if name.lower() not in here and _is_plain(name))
    far = [word for word in _ATTRIBUTES if word not in here]
    columns = _columns(tree)
    free = [node for node in columns if not node.find_ancestor(exp.Join)]
    if not free:
        return []
    column = rng.choice(free)
    name = rng.choice(near if near and rng.random() < 0.5 else far)
    return [(node.this, sqltree.identifier(name)) for node in columns if node == column]


def _unqualified(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """A name that both joined tables have, without its table."""
    names = [
        {column.name.lower() for column in catalog.table(name).columns} for name in candidate.tables
    ]
    shared = set.intersection(*names)
    both = [node for node in _columns(tree) if node.name.lower() in shared]
    return [(node, exp.Column(this=node.this.copy())) for node in both[:1]]


def _wrong_side(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """A column looked for in the other joined table."""
    child, parent = candidate.tables
    for node in _columns(tree):
        other = parent if node.table == child else child
        if node.name.lower() not in {c.name.lower() for c in catalog.table(other).columns}:
            return [(node, exp.Column(this=node.this.copy(), table=sqltree.identifier(other)))]
    return []


def _wrong_table(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """The right columns, looked for in another table of the database."""
    others = [table.name for table in catalog.tables if table.name not in candidate.tables]
    return _from(tree, rng.choice(others)) if others else []


def _no_table(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """A table that does not exist."""
    there = {table.name.lower() for table in catalog.tables}
    return _from(tree, rng.choice([word for word in _ENTITIES if word not in there]))


def _from(tree: exp.Expr, name: str) -> Edits:
    clause = tree.find(exp.From)
    return [(clause.this, exp.Table(this=sqltree.identifier(name)))] if clause is not None else []


def _unquoted(tree: exp.Expr, candidate: Candidate, catalog: Catalog, rng: Random) -> Edits:
    """A name that needs quotes, without them."""
    quoted = [node for node in tree.find_all(exp.Identifier) if node.args.get("quoted")]
    return [(node, exp.Identifier(this=node.name, quoted=False)) for node in quoted]

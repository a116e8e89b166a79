"""Single-fault mutations: exact edits, and none that is equivalent by construction."""

import pytest

from hsql_env.tasks import sqltree
from hsql_env.tasks.mutate import Facts, mutations

JOIN = "SELECT child.name FROM child JOIN parent ON child.parent_id = parent.id"


def mutate(sql: str, facts: Facts | None = None) -> list[tuple[str, str]]:
    found = mutations(sqltree.parse(sql), facts or Facts({}))
    return [(mutation.kind, mutation.sql) for mutation in found]


def test_comparison_is_reversed_moved_and_given_another_literal() -> None:
    assert mutate("SELECT COUNT(*) FROM t WHERE n > 5", Facts({5: 7})) == [
        ("direction", "SELECT COUNT(*) FROM t WHERE n < 5"),
        ("boundary", "SELECT COUNT(*) FROM t WHERE n >= 5"),
        ("literal", "SELECT COUNT(*) FROM t WHERE n > 7"),
        ("filter_dropped", "SELECT COUNT(*) FROM t"),
    ]


def test_a_text_and_a_number_that_look_alike_are_not_confused() -> None:
    assert mutate("SELECT a FROM t WHERE b = '5' LIMIT 5", Facts({"5": "it's"}))[:2] == [
        ("direction", "SELECT a FROM t WHERE b <> '5' LIMIT 5"),
        ("literal", "SELECT a FROM t WHERE b = 'it''s' LIMIT 5"),
    ]


def test_order_and_limit() -> None:
    assert mutate("SELECT a FROM t ORDER BY n DESC LIMIT 1") == [
        ("order", "SELECT a FROM t ORDER BY n ASC LIMIT 1"),
        ("limit", "SELECT a FROM t ORDER BY n DESC LIMIT 2"),
    ]


def test_aggregates_are_swapped() -> None:
    assert mutate("SELECT AVG(n) FROM t") == [
        ("aggregate", "SELECT MAX(n) FROM t"),
        ("aggregate", "SELECT SUM(n) FROM t"),
    ]


def test_distinct_is_dropped() -> None:
    assert mutate("SELECT COUNT(DISTINCT c) FROM t") == [
        ("distinct_dropped", "SELECT COUNT(c) FROM t"),
        ("aggregate", "SELECT MAX(c) FROM t"),
    ]
    assert mutate("SELECT DISTINCT c FROM t") == [("distinct_dropped", "SELECT c FROM t")]


def test_cast_comes_first() -> None:
    sql = "SELECT COUNT(*) FROM t WHERE CAST(n AS INTEGER) > 5"
    assert mutate(sql)[0] == ("cast_dropped", "SELECT COUNT(*) FROM t WHERE n > 5")


def test_null_and_like_are_negated() -> None:
    assert mutate("SELECT a FROM t WHERE n IS NULL")[0] == (
        "direction",
        "SELECT a FROM t WHERE NOT n IS NULL",
    )
    assert mutate("SELECT a FROM t WHERE d LIKE '2021%'")[0] == (
        "direction",
        "SELECT a FROM t WHERE NOT d LIKE '2021%'",
    )


def test_wrong_join_key_is_quoted_where_needed() -> None:
    facts = Facts({}, other_key=("parent_id", "other id"))
    assert mutate(JOIN, facts) == [
        ("join_key", 'SELECT child.name FROM child JOIN parent ON child."other id" = parent.id')
    ]


def test_left_join_only_where_the_join_loses_rows() -> None:
    left = JOIN.replace("JOIN", "LEFT JOIN")
    assert mutate(JOIN, Facts({}, loose=True)) == [("join_kind", left)]
    assert mutate(JOIN, Facts({}, loose=False)) == []


@pytest.mark.parametrize(
    "sql",
    [
        f"{JOIN} WHERE parent.name = 'x' ORDER BY child.n DESC LIMIT 3",
        "SELECT c, COUNT(*) FROM t GROUP BY c",
        'SELECT a FROM t WHERE "n m" > (SELECT AVG("n m") FROM t)',
    ],
)
def test_the_tree_is_left_as_it_was(sql: str) -> None:
    tree = sqltree.parse(sql)
    before = tree.copy()
    facts = Facts({"x": "y"}, ("parent_id", "id"), loose=True)
    assert len(mutations(tree, facts)) >= 2
    assert tree == before
    assert sqltree.render(tree) == sql
    assert all(node.parent.args[node.arg_key] is not None for node in tree.walk() if node.parent)

"""Equation (15) against counts made by hand."""

import pytest

from hsql_env.tasks.difficulty import Structure, difficulty, measure

# (SQL, tokens, the other terms of equation (15) written out)
COUNTED = [
    ("SELECT COUNT(*) FROM city", 7, 1.2),
    ("SELECT COUNT(*) FROM city;", 7, 1.2),
    ("SELECT a.x FROM a JOIN b ON a.id = b.id", 16, 0.8 + 1.2),
    # Two SELECTs, the inner one nested: depth 2.
    ("SELECT n FROM t WHERE v > (SELECT AVG(v) FROM t)", 16, 1.4 + 2 * 1.2),
    # Two SELECTs side by side: depth 1.
    ("SELECT a FROM t UNION SELECT b FROM u", 9, 2.0 + 1.4 + 1.2),
    # One CTE, whose body is inside the statement: depth 2.
    ("WITH c AS (SELECT a FROM t) SELECT a FROM c", 13, 1.2 + 1.4 + 2 * 1.2),
    # A window.
    ("SELECT a, RANK() OVER (ORDER BY b) FROM t", 14, 2.2 + 1.2),
    # One conditional aggregate, which holds one CASE.
    ("SELECT SUM(CASE WHEN a > 1 THEN 1 ELSE 0 END) FROM t", 16, 1.2 + 0.8 + 1.2),
    # A conditional aggregate by FILTER, without a CASE.
    ("SELECT COUNT(*) FILTER (WHERE a > 1) FROM t", 14, 1.2 + 1.2),
    # IIF is a CASE; alone it makes no aggregate conditional.
    ("SELECT IIF(a, 1, 2) FROM t", 11, 0.8 + 1.2),
    # NOT EXISTS is an EXISTS with a nested SELECT.
    ("SELECT a FROM t WHERE NOT EXISTS (SELECT 1 FROM u)", 13, 1.5 + 1.4 + 2 * 1.2),
    # Two time functions.
    ("SELECT strftime('%Y', a), julianday(b) FROM t", 14, 2 * 1.0 + 1.2),
    # Two JSON functions, one of them a table.
    ("SELECT json_extract(a, '$.x') FROM t, json_each(t.j)", 16, 2 * 1.0 + 0.8 + 1.2),
]


@pytest.mark.parametrize(("sql", "tokens", "rest"), COUNTED)
def test_equation_15_by_hand(sql: str, tokens: int, rest: float) -> None:
    assert measure(sql).tokens == tokens
    assert difficulty(sql) == pytest.approx(0.012 * tokens + rest, abs=5e-4)


def test_everything_at_once() -> None:
    sql = (
        "WITH a AS (SELECT x, y FROM t), b AS (SELECT x, COUNT(*) AS n FROM a GROUP BY x) "
        "SELECT b.x, SUM(CASE WHEN b.n > 2 THEN 1 ELSE 0 END), "
        "ROW_NUMBER() OVER (ORDER BY b.n DESC) "
        "FROM b JOIN u ON b.x = u.x JOIN v ON u.k = v.k "
        "WHERE u.z IN (SELECT z FROM w WHERE k IN (SELECT k FROM q)) GROUP BY b.x"
    )
    assert measure(sql) == Structure(
        tokens=110,
        ctes=2,
        joins=2,
        selects=5,
        windows=1,
        set_operations=0,
        exists=0,
        conditional_aggregates=1,
        cases=1,
        time_calls=0,
        json_calls=0,
        depth=3,
    )
    # 1.32 tokens + 2.4 CTEs + 1.6 joins + 5.6 SELECTs + 2.2 window + 1.2 + 0.8 + 3.6 depth
    assert difficulty(sql) == 18.72


def test_spacing_comments_and_case_do_not_count() -> None:
    plain = difficulty("SELECT a FROM t WHERE b = 'x y z'")
    assert difficulty("select  a -- note\nfrom t /* more */ where b = 'q'") == plain

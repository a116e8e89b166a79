"""Edge cases 6-11 and 14: what may run, and that nothing else leaves a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import files_in

from hsql_env.sandbox import SandboxPool

ACCEPTED = {
    "SELECT 1": 1,
    "-- note\nSELECT 2": 2,
    "/* a; b */ SELECT 3": 3,
    "SELECT ';'": ";",
    "SELECT 1; -- x": 1,
    "SELECT 1;": 1,
    "SELECT 1 ; ; /* ; */": 1,
    "SELECT 1 /* never closed": 1,
    "  \n with x as (select 5 as n) select n from x": 5,
    "SELECT REPLACE('1,000', ',', '')": "1000",
    "SELECT 'update'": "update",
    'SELECT "Update Date" FROM city WHERE id = 1': "2024-01-02",
    "SELECT count(*) FROM pragma_table_info('city')": 4,
    "SELECT sum(value) FROM json_each('[1, 2]')": 3,
    "SELECT count(*) FROM note WHERE note MATCH 'hello'": 2,
}

REFUSED = {
    "": "empty",
    " ; -- nothing": "empty",
    "SELECT 1; SELECT 2": "multi_statement",
    "SELECT 1; DROP TABLE city": "multi_statement",
    "SELECT 1; nonsense": "multi_statement",
    "WITH x AS (SELECT 1) DELETE FROM city": "not_read_only",
    "INSERT INTO city DEFAULT VALUES": "not_read_only",
    "EXPLAIN DELETE FROM city": "not_read_only",
    "DELETE FROM city; SELECT 1": "not_read_only",
    "VALUES (1)": "not_a_query",
    "PRAGMA query_only = 0": "not_a_query",
    "BEGIN": "not_a_query",
    "SELECT file FROM pragma_database_list": "denied",
    "SELECT load_extension('x')": "denied",
    "SELECT * FROM nosuch": "sql_error",
    "SELECT 1 FROM": "sql_error",
    "SELECT '\0'": "sql_error",
    "SELECT '\ud800'": "sql_error",
}

CREATES_FILES = [
    "ATTACH 'new.db' AS x",
    "ATTACH 'gold.db' AS x",
    "VACUUM INTO 'new.db'",
    "CREATE TEMP TABLE x (a)",
    "PRAGMA query_only=0",
    "SELECT load_extension('new.db')",
    "SELECT writefile('new.db', 'x')",
    "SELECT readfile('gold.db')",
    "SELECT edit('x')",
    "EXPLAIN ATTACH 'new.db' AS x",
]


@pytest.mark.parametrize("sql", ACCEPTED)
def test_accepted(pool: SandboxPool, city_path: str, sql: str) -> None:
    execution = pool.execute(city_path, sql)
    assert execution.failure is None
    assert execution.rows == ((ACCEPTED[sql],),)


@pytest.mark.parametrize("sql", REFUSED)
def test_refused(pool: SandboxPool, city_path: str, sql: str) -> None:
    failure = pool.execute(city_path, sql).failure
    assert failure is not None
    assert failure.kind == REFUSED[sql]
    assert city_path not in failure.message


@pytest.mark.parametrize("sql", CREATES_FILES)
def test_nothing_is_created(pool: SandboxPool, city_path: str, sql: str, tmp_path: Path) -> None:
    folder = Path(city_path).parent
    (tmp_path / "gold.db").write_bytes(b"secret")
    before = Path(city_path).read_bytes(), files_in(folder), files_in(Path.cwd())
    for query in (sql, sql.replace("new.db", str(tmp_path / "new.db"))):
        assert not pool.execute(city_path, query).ok
    after = Path(city_path).read_bytes(), files_in(folder), files_in(Path.cwd())
    assert before == after
    assert [path.name for path in tmp_path.iterdir()] == ["gold.db"]


@pytest.mark.parametrize("sql", ["-- note\nSELECT 1", "/* note */ SELECT 1", "\n -- a\n SELECT 1"])
def test_strict_profile_rejects_leading_comments(
    pool: SandboxPool, city_path: str, sql: str
) -> None:
    failure = pool.execute(city_path, sql, guard="strict").failure
    assert failure is not None
    assert failure.kind == "leading_comment"
    assert pool.execute(city_path, "SELECT '--' -- note", guard="strict").rows == (("--",),)


def test_query_length_is_bounded(pool: SandboxPool, city_path: str) -> None:
    failure = pool.execute(city_path, "SELECT '" + "x" * 100_000 + "'").failure
    assert failure is not None
    assert failure.kind == "too_large"

"""Queries that nobody wrote by hand, and fixtures made for parsers, against the sandbox.

Whatever comes: nothing is written, no path is told, no worker is lost, and the verifier and the
tool judge alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from budget import EXAMPLES, bounded, patient, spread
from conftest import files_in, make_task
from hypothesis import given
from hypothesis import strategies as st
from shared_data import need, read_text

from hsql_env.harness.render import render_execution
from hsql_env.harness.verify import Verifier
from hsql_env.sandbox import Execution, FailureKind, Limits, SandboxPool

pytestmark = patient

TOOL = Limits(wall_s=5.0, memory_mb=128, rows=500, max_rows=5000)
KINDS = frozenset(get_args(FailureKind)) - {"infrastructure"}
# What changes from one run to the next is no answer to verify.
UNSTEADY = ("random", "current_", "'now'", "date(", "time(", "julianday", "changes", "rowid")


@pytest.fixture(autouse=True)
def untouched(city_path: str, pool: SandboxPool) -> Iterator[None]:
    """Check after each test that no file came, went or changed and that the pool is whole."""
    folder = Path(city_path).parent

    def state() -> list[object]:
        files = sorted(folder.rglob("*"))
        return [[(file, file.read_bytes()) for file in files], files_in(Path.cwd())]

    before = state()
    yield
    assert state() == before
    for _ in range(4):
        assert pool.execute(city_path, "SELECT count(*) FROM city").rows == ((3,),)
    assert len(pool.worker_pids()) == 2


def check(pool: SandboxPool, path: str, sqls: Sequence[str]) -> list[Execution]:
    """Run the queries and check what every outcome must be; return the outcomes."""
    done = pool.execute_many(path, sqls, TOOL)
    folder = Path(path).parent
    for sql, execution in zip(sqls, done, strict=True):
        text = render_execution(execution)
        assert str(folder) not in text, sql
        assert str(Path.cwd()) not in text, sql
        if execution.failure is None:
            assert all(len(row) == len(execution.columns) for row in execution.rows), sql
            assert execution.total_rows >= len(execution.rows), sql
        else:
            assert execution.failure.kind in KINDS, (sql, execution.failure)
            assert execution.failure.message, sql
    return done


def check_verdicts(
    pool: SandboxPool, path: str, sqls: Sequence[str], done: Sequence[Execution]
) -> None:
    """Check that a query is its own right answer, and that what fails in the tool is wrong."""
    verifier = Verifier(pool, TOOL)
    for sql, execution in zip(sqls, done, strict=True):
        if execution.complete and not any(word in sql.lower() for word in UNSTEADY):
            for ordered in (False, True):
                task = make_task(sql, row_count=len(execution.rows), ordered=ordered)
                assert verifier.check(path, task.hidden, sql), sql
        elif execution.failure is not None and execution.failure.kind != "timeout":
            empty = make_task("SELECT 1 WHERE 0", row_count=0)
            assert not verifier.check(path, empty.hidden, sql), sql


NAMES = st.sampled_from(
    ["city", "river", "large", "note", '"order"', '"a ""b"', "nosuch", "sqlite_schema", "main.city"]
)
LEAVES = st.sampled_from(
    [
        "id", "name", "people", '"Update Date"', "km", "*", "NULL", "0", "1", "-1", "1.5", "1e999",
        "''", "'a'", "';'", "'--'", '"nosuch"', "x'ff'", "CAST(x'ff41' AS TEXT)", "?", ":a",
        "rowid", "9223372036854775807", "-9223372036854775808", "TRUE", "city.id", "'\ufffd'",
        "'\U0001f600'",
    ]
)  # fmt: skip
FUNCTIONS = st.sampled_from(
    "abs length upper hex quote typeof count sum avg max min total group_concat zeroblob unicode "
    "char printf json json_array json_extract json_type randomblob instr round soundex like glob "
    "load_extension readfile writefile edit fts3_tokenizer sqlite_version nullif iif ifnull "
    "coalesce replace substr trim date strftime changes last_insert_rowid snippet highlight bm25 "
    "matchinfo optimize rtreecheck sqlite_compileoption_get sqlite_source_id sign ln".split()
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(FUNCTIONS, st.lists(inner, max_size=3)).map(
            lambda f: f"{f[0]}({', '.join(f[1])})"
        ),
        st.tuples(
            inner,
            st.sampled_from(
                "+ - * / % || = <> < IS LIKE GLOB MATCH REGEXP AND OR << -> ->> COLLATE".split()
            ),
            inner,
        ).map(" ".join),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"(SELECT {e} FROM city)"),
        inner.map(lambda e: f"EXISTS (SELECT {e})"),
        inner.map(lambda e: f"row_number() OVER (ORDER BY {e})"),
        st.tuples(inner, inner).map(lambda p: f"CASE WHEN {p[0]} THEN {p[1]} END"),
    ),
    max_leaves=6,
)


@st.composite
def queries(draw: st.DrawFn) -> str:
    """A query that mostly parses."""
    sql = f"SELECT {', '.join(draw(st.lists(EXPRESSIONS, min_size=1, max_size=3)))}"
    if draw(st.booleans()):
        sql += f" FROM {draw(NAMES)}"
        if draw(st.booleans()):
            join = draw(st.sampled_from([",", "JOIN", "LEFT JOIN", "NATURAL JOIN"]))
            sql += f" {join} {draw(NAMES)}"
        if draw(st.booleans()):
            sql += f" WHERE {draw(EXPRESSIONS)}"
        if draw(st.booleans()):
            sql += f" GROUP BY {draw(EXPRESSIONS)}"
    if draw(st.booleans()):
        sql += f" {draw(st.sampled_from(['UNION', 'UNION ALL', 'EXCEPT', 'INTERSECT']))} SELECT 1"
    if draw(st.booleans()):
        sql += f" ORDER BY {draw(EXPRESSIONS)}"
        sql += draw(st.sampled_from(["", " DESC", " COLLATE NOCASE", " NULLS LAST"]))
    if draw(st.booleans()):
        sql += f" LIMIT {draw(st.sampled_from(['2', '0', '-1', '2 OFFSET 1']))}"
    return draw(st.sampled_from(["", "WITH x AS (SELECT 1) ", "EXPLAIN ", "/* a */"])) + sql


PIECES = st.sampled_from(
    [
        "SELECT 1", "SELECT * FROM city", ";", "--", "\n", "/*", "*/", "'", '"', "`", "[", "]", "(",
        ")", "\ufeff", "\0", "\x1a", "\ud800", "é", " ", "EXPLAIN", "QUERY PLAN", "WITH x AS (",
        "DELETE FROM city", "INSERT INTO city DEFAULT VALUES", "REPLACE INTO city (id) VALUES (1)",
        "UPDATE city SET id = 9", "RETURNING *", "DROP TABLE city", "CREATE TABLE zz (a)",
        "CREATE TEMP TABLE zz (a)", "ATTACH 'zz.db' AS z", "VACUUM INTO 'zz.db'", "REINDEX",
        "PRAGMA query_only = 0", "PRAGMA writable_schema = 1", "PRAGMA temp_store_directory = '.'",
        "PRAGMA journal_mode = WAL", "BEGIN", "COMMIT", "SAVEPOINT a", "ANALYZE", "DETACH main",
        "ALTER TABLE city RENAME TO zz", "INSERT INTO note (note) VALUES ('optimize')",
        "SELECT file FROM pragma_database_list", "SELECT * FROM pragma_table_info('city')",
        "SELECT load_extension('zz')", "SELECT writefile('zz', 'a')", "SELECT * FROM fsdir('.')",
        "SELECT * FROM dbstat", "SELECT * FROM json_each('[1]')", "SELECT fts5(1)",
        "SELECT * FROM fts5vocab", "SELECT optimize(note) FROM note", "VALUES (1)",
    ]
)  # fmt: skip


@bounded()
@given(sqls=st.lists(queries(), min_size=1, max_size=5))
def test_generated_queries(pool: SandboxPool, city_path: str, sqls: list[str]) -> None:
    check_verdicts(pool, city_path, sqls, check(pool, city_path, sqls))


@bounded()
@given(pieces=st.lists(PIECES, min_size=1, max_size=6), space=st.sampled_from(["", " "]))
def test_pieces_of_statements(
    pool: SandboxPool, city_path: str, pieces: list[str], space: str
) -> None:
    sql = space.join(pieces)
    check_verdicts(pool, city_path, [sql], check(pool, city_path, [sql]))


@bounded()
@given(sql=st.text(max_size=200))
def test_any_text(pool: SandboxPool, city_path: str, sql: str) -> None:
    sqls = [sql, "SELECT " + sql, f"SELECT '{sql}'", f'SELECT "{sql}"', f"SELECT 1 /* {sql} */"]
    check_verdicts(pool, city_path, sqls, check(pool, city_path, sqls))


@bounded()
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_literal_comes_back_as_it_was(pool: SandboxPool, city_path: str, text: str) -> None:
    quoted = "'" + text.replace("'", "''") + "'"
    assert pool.execute(city_path, f"SELECT {quoted}").rows == ((text,),)


BARE = ("identity.sql", "optimizer/simplify.sql", "optimizer/annotate_functions.sql")  # expressions


def statements(name: str) -> list[str]:
    """Return the statements of a fixture file: one a line, or ended by a semicolon."""
    text = read_text(need("sql_fixtures", "sqlglot", name))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if name == "identity.sql":
        return lines
    text = "\n".join(lines)
    return [part.strip() for part in text.split(";") if part.strip()]


@pytest.mark.parametrize(
    "name",
    [
        "identity.sql",
        "pretty.sql",
        "optimizer/optimizer.sql",
        "optimizer/simplify.sql",
        "optimizer/unnest_subqueries.sql",
        "optimizer/annotate_functions.sql",
        "optimizer/qualify_tables.sql",
        "optimizer/qualify_columns_ddl.sql",
    ],
)
def test_parser_fixtures(pool: SandboxPool, city_path: str, name: str) -> None:
    sqls = spread(statements(name), 2 * EXAMPLES)
    if name in BARE:
        sqls += [f"SELECT {sql}" for sql in sqls]
    done = check(pool, city_path, sqls)
    check_verdicts(pool, city_path, sqls, done)
    kinds = {execution.failure.kind for execution in done if execution.failure}
    assert "sql_error" in kinds  # most name tables that are not there

"""The numbered cases that must come out right, through the tool and through the verifier alike.

Here are those that no other test decides for both. The others:
1-5, 15, 16 in the sandbox: test_sandbox.py. 6-10 in the guard: test_guard.py.
13: test_registry.py. 19, 22 cell by cell: test_compare.py. 20 at synthesis: test_synth.py.
21, 23, 25: test_harness.py. 24 as text: test_parse.py. 28: test_service.py.
25-27 against the tokenizer: the tensor half's tests.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import build_database, call, files_in, make_task
from shared_data import need, unpack

from hsql_env.compare import fingerprint
from hsql_env.harness import Episode, EpisodeConfig
from hsql_env.harness.ties import with_rank
from hsql_env.harness.verify import OracleError, Verifier
from hsql_env.registry import DatabaseError, open_database
from hsql_env.sandbox import Execution, Failure, FailureKind, GuardProfile, Limits, SandboxPool

Play = Callable[..., Episode]
Judge = Callable[..., bool]

COUNT = "SELECT count(*) FROM city"
TIGHT = Limits(wall_s=0.5, memory_mb=64)


def observe(play: Play, query: str, config: EpisodeConfig | None = None) -> str:
    """Return what the policy reads after one query."""
    return play(COUNT, call("sql_exec", query=query), config=config).messages[-1].content


@pytest.fixture
def judge(pool: SandboxPool, city_path: str) -> Judge:
    """Return a function from an oracle and an answer to the verifier's word on the answer."""

    def run(
        oracle: str,
        answer: str,
        limits: Limits | None = None,
        guard: GuardProfile = "default",
        path: str = city_path,
        **hidden: object,
    ) -> bool:
        verifier = Verifier(pool, limits) if limits else Verifier(pool)
        return verifier.check(path, make_task(oracle, **hidden).hidden, answer, guard)

    return run


@pytest.fixture
def untouched(city_path: str) -> Iterator[None]:
    """Check that the database, its folder and the working folder are as before."""

    def state() -> tuple[object, ...]:
        file = Path(city_path)
        return file.read_bytes(), files_in(file.parent), files_in(Path.cwd())

    before = state()
    yield
    assert state() == before


HEAVY = {
    "01": (
        "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '1')",
        Limits(wall_s=0.5),
        "Error: the query took longer than 0.5 s",
    ),
    "02": (
        "SELECT replace(hex(zeroblob(200000000)), '0', '00')",
        TIGHT,
        "Error: string or blob too big",
    ),
    "03": (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c",
        TIGHT,
        "Error: the query took longer than 0.5 s",
    ),
    "04": (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 5000) "
        "SELECT group_concat(hex(zeroblob(100000))) FROM c",
        Limits(memory_mb=64),
        "Error: out of memory: the query needs more than its memory limit",
    ),
}


@pytest.mark.parametrize("case", HEAVY)
def test_case_01_to_04_heavy_queries(play: Play, judge: Judge, case: str) -> None:
    query, limits, error = HEAVY[case]
    text = observe(play, query, EpisodeConfig(tool_limits=limits))
    assert text == error
    assert not judge(COUNT, query, limits)
    assert judge(COUNT, "SELECT 3")  # the next one is judged as if nothing had been


def test_case_01_other_episodes_go_on(play: Play) -> None:
    query, limits, error = HEAVY["01"]
    texts: list[str] = []
    config = EpisodeConfig(tool_limits=limits)
    hanging = threading.Thread(target=lambda: texts.append(observe(play, query, config)))
    hanging.start()
    others = [observe(play, f"SELECT {number}") for number in range(5)]
    hanging.join()
    assert texts == [error]
    assert others == [f"{number}\n{number}\n(1 row)" for number in range(5)]


def test_case_02_and_04_sorting_and_temporary_tables_are_bounded(play: Play) -> None:
    config = EpisodeConfig(tool_limits=Limits(memory_mb=48))
    many = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 300000) "
    for query in (
        many + "SELECT hex(zeroblob(200)) || n AS x FROM c ORDER BY x DESC",
        many + "SELECT count(*) FROM (SELECT DISTINCT hex(zeroblob(200)) || n FROM c)",
    ):
        assert observe(play, query, config).startswith("Error: out of memory")


LONG = (
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 20000) "
    "SELECT n, 'a text that makes the whole result larger than a pipe' AS t FROM c"
)


def test_case_05_long_results(play: Play, judge: Judge) -> None:
    text = observe(play, LONG)
    assert len(text.splitlines()) == 52
    assert text.endswith("\n(50 of 20000 rows shown)")
    assert judge(LONG, LONG + " ORDER BY n DESC")
    assert not judge(LONG, LONG.replace("SELECT n,", "SELECT n + (n = 777),"))
    assert not judge(LONG, LONG.replace("20000", "19999"))


def test_case_05_counting_takes_bounded_time(pool: SandboxPool, city_path: str) -> None:
    limits = Limits(rows=2, count_s=0.0)
    execution = pool.execute(city_path, LONG, limits)
    assert [row[0] for row in execution.rows] == [1, 2]
    assert (execution.total_rows, execution.total_exact) == (3, False)
    assert not execution.complete
    assert pool.execute(city_path, "SELECT 1 UNION SELECT 2", limits).complete


@pytest.mark.parametrize("query", ["-- note\n" + COUNT, "/* a; b */" + COUNT])
def test_case_06_leading_comments(play: Play, judge: Judge, query: str) -> None:
    assert observe(play, query) == "count(*)\n3\n(1 row)"
    assert judge(COUNT, query)
    strict = observe(play, query, EpisodeConfig(guard="strict"))
    assert strict == "Error: a query may not start with a comment"
    assert not judge(COUNT, query, guard="strict")


ALIKE = {
    "SELECT ';'": "';'\n;\n(1 row)",
    "SELECT 1; -- x": "1\n1\n(1 row)",
    "SELECT 1;": "1\n1\n(1 row)",
    "SELECT REPLACE('1,0', ',', '') AS x": "x\n10\n(1 row)",
    "SELECT 'update'": "'update'\nupdate\n(1 row)",
    'SELECT "Update Date" FROM city WHERE id = 1': "Update Date\n2024-01-02\n(1 row)",
    "SELECT sum(value) AS x FROM json_each('[1, 2]')": "x\n3\n(1 row)",
    "SELECT count(*) AS x FROM json_tree('{\"a\": [1, 2]}')": "x\n4\n(1 row)",
    "SELECT body FROM note WHERE note MATCH 'sea'": "body\nhello sea\n(1 row)",
    "SELECT name FROM pragma_table_info('river') WHERE cid = 1": "name\ncity_id\n(1 row)",
    "SELECT CAST(x'ff41' AS TEXT) AS x": "x\n\ufffdA\n(1 row)",
    "SELECT 1 AS a, 2 AS a": "a | a\n1 | 2\n(1 row)",
    "SELECT 9007199254740993 AS a, -9223372036854775808 AS b": (
        "a | b\n9007199254740993 | -9223372036854775808\n(1 row)"
    ),
}


@pytest.mark.parametrize("query", ALIKE)
def test_case_07_08_12_14_15_16_tool_and_verifier_alike(
    play: Play, judge: Judge, query: str
) -> None:
    assert observe(play, query) == ALIKE[query]
    assert judge(query, query)
    assert not judge(query, "SELECT 'something else'")


FORBIDDEN = [
    "SELECT 3; SELECT 3",
    "WITH x AS (SELECT 1) DELETE FROM city",
    "WITH x AS (SELECT 1) INSERT INTO city (id) SELECT 9",
    "ATTACH 'new.db' AS x",
    "VACUUM INTO 'new.db'",
    "CREATE TEMP TABLE x (a)",
    "PRAGMA query_only = 0",
    "PRAGMA journal_mode = WAL",
    "SELECT load_extension('new.db')",
    "SELECT writefile('new.db', 'x')",
    "SELECT readfile('/etc/hostname')",
    "SELECT edit('x')",
    "SELECT * FROM fsdir('.')",
    "SELECT file FROM pragma_database_list",
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("query", FORBIDDEN)
def test_case_07_09_10_11_refused_by_both(play: Play, judge: Judge, query: str) -> None:
    assert observe(play, query).startswith("Error: ")
    assert not judge(COUNT, query)
    assert not judge("SELECT name FROM city WHERE 0", query, row_count=0)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT file FROM pragma_database_list",
        "PRAGMA database_list",
        "SELECT * FROM pragma_compile_options",
        "SELECT * FROM nosuch.city",
        "SELECT load_extension('city')",
        "ATTACH 'city.sqlite' AS x",
        "SELECT fts3_tokenizer('simple')",
        "EXPLAIN SELECT * FROM city",
        "EXPLAIN QUERY PLAN SELECT * FROM city, river",
        "SELECT * FROM sqlite_schema",
        "SELECT * FROM pragma_table_list",
        "SELECT * FROM dbstat",
    ],
)
def test_case_11_no_path_is_told(play: Play, city_path: str, query: str) -> None:
    text = observe(play, query)
    folder = Path(city_path).parent
    assert not [part for part in (str(folder), folder.name, Path(city_path).name) if part in text]


def test_case_11_no_path_is_told_of_a_broken_file(pool: SandboxPool, tmp_path: Path) -> None:
    path = build_database(tmp_path / "secret_name.sqlite", "CREATE TABLE t (x); SELECT 1;")
    pool.execute(str(path), "SELECT * FROM t")
    for content in (b"no database at all", b"SQLite format 3\0" + b"\xff" * 5000, None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        failure = pool.execute(str(path), "SELECT * FROM t").failure
        assert failure is not None
        assert failure.kind == "infrastructure"
        assert "secret_name" not in failure.message


def test_case_12_generate_series_where_built_in(pool: SandboxPool, city_path: str) -> None:
    execution = pool.execute(city_path, "SELECT sum(value) FROM generate_series(1, 4)")
    if execution.failure is None:
        assert execution.rows == ((10,),)
    else:
        assert execution.failure.message == "no such table: generate_series"


def test_case_13_wal_through_a_link(tmp_path: Path) -> None:
    file = build_database(tmp_path / "city.sqlite", "PRAGMA journal_mode = WAL; CREATE TABLE t (x)")
    link = tmp_path / "links" / "other.sqlite"
    link.parent.mkdir()
    link.symlink_to(file)
    writer = sqlite3.connect(file)
    writer.execute("INSERT INTO t VALUES (1)")
    writer.commit()
    with pytest.raises(DatabaseError, match=r"in use, city\.sqlite-wal holds changes"):
        open_database(link)
    writer.close()
    assert open_database(link).path == str(file)


def test_case_13_an_empty_wal_file_is_at_rest(tmp_path: Path, pool: SandboxPool) -> None:
    script = "PRAGMA journal_mode = WAL; CREATE TABLE t (x); INSERT INTO t VALUES (1), (2)"
    file = build_database(tmp_path / "city.sqlite", script)
    file.with_name("city.sqlite-wal").touch()
    database = open_database(file)
    assert pool.execute(database.path, "SELECT count(*) FROM t").rows == ((2,),)


BAD_TEXT = """
CREATE TABLE latin (id INTEGER, name TEXT);
INSERT INTO latin VALUES
    (1, CAST(x'436166e9' AS TEXT)), (2, 'Zoo'), (3, CAST(x'ff' AS TEXT)), (4, NULL);
"""


def test_case_14_text_that_is_not_utf8(pool: SandboxPool, judge: Judge, tmp_path: Path) -> None:
    path = str(build_database(tmp_path / "latin.sqlite", BAD_TEXT))
    query = "SELECT name, id FROM latin ORDER BY id DESC"
    execution = pool.execute(path, query)
    assert execution.columns == ("name", "id")
    assert execution.rows == ((None, 4), ("\ufffd", 3), ("Zoo", 2), ("Caf\ufffd", 1))
    again = pool.execute(path, query)
    assert fingerprint(execution, ordered=True) == fingerprint(again, ordered=True)
    tables = pool.tables(path)
    assert isinstance(tables, tuple)
    assert tables[0].sample_rows == ((1, "Caf\ufffd"), (2, "Zoo"), (3, "\ufffd"))
    assert judge(query, query, path=path, ordered=True)
    assert judge(query, "SELECT id, name FROM latin", path=path)
    assert not judge(query, "SELECT id, upper(name) FROM latin", path=path)
    plan = pool.execute(path, "EXPLAIN SELECT * FROM latin WHERE name = CAST(x'ff' AS TEXT)")
    assert plan.failure == Failure("sql_error", "a name or a plan holds text that is not UTF-8")


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_case_14_text_of_any_encoding(pool: SandboxPool, tmp_path: Path, encoding: str) -> None:
    half = {"UTF-8": "ff", "UTF-16le": "00d8", "UTF-16be": "d800"}[encoding]
    script = f"PRAGMA encoding = '{encoding}'; CREATE TABLE t (x, y); INSERT INTO t VALUES "
    path = str(build_database(tmp_path / "x.sqlite", script + f"(CAST(x'{half}' AS TEXT), 'Bodø')"))
    execution = pool.execute(path, f"SELECT CAST(x'{half}' AS TEXT), 'abc €', 7, x'00ff', y FROM t")
    assert execution.rows == (("\ufffd", "abc €", 7, b"\x00\xff", "Bodø"),)
    tables = pool.tables(path)
    assert isinstance(tables, tuple)
    assert tables[0].sample_rows == (("\ufffd", "Bodø"),)


@pytest.mark.parametrize("end", ["/* open", "/* a */ /*/", "-- line", "/* a */", "; -- x", "/* ;"])
def test_case_14_whatever_comment_ends_the_query(
    pool: SandboxPool, city_path: str, end: str
) -> None:
    execution = pool.execute(city_path, f"SELECT CAST(x'ff' AS TEXT) AS \"/*\" {end}")
    assert (execution.failure, execution.rows) == (None, (("\ufffd",),))


def test_case_14_a_column_whose_name_is_not_utf8(pool: SandboxPool, tmp_path: Path) -> None:
    path = build_database(tmp_path / "latin.sqlite", "CREATE TABLE t (cafX TEXT, n INTEGER)")
    path.write_bytes(path.read_bytes().replace(b"cafX", b"caf\xe9"))
    execution = pool.execute(str(path), "SELECT * FROM t")
    assert execution.failure == Failure(
        "sql_error", "a name or a plan holds text that is not UTF-8"
    )
    assert pool.execute(str(path), "SELECT count(n) FROM t").rows == ((0,),)


@pytest.mark.parametrize(
    ("folder", "name", "tables", "rows"),
    [
        ("dbs_oddities", "chinook_wal_mode", 11, 15607),
        ("dbs_oddities", "northwind_cp1252_text", 29, 11564),
        ("dbs_general", "chinook", 11, 15607),
        ("dbs_general", "datasette_fixtures", 29, 1675),
    ],
)
def test_case_13_and_14_real_databases(
    pool: SandboxPool, tmp_path: Path, folder: str, name: str, tables: int, rows: int
) -> None:
    database = open_database(unpack(need(folder, f"{name}.sqlite.xz"), tmp_path))
    found = pool.tables(database.path)
    assert isinstance(found, tuple)
    assert (len(found), sum(table.row_count or 0 for table in found)) == (tables, rows)
    for table in found:
        quoted = '"' + table.name.replace('"', '""') + '"'
        done = pool.execute(database.path, f"SELECT * FROM {quoted}", Limits(rows=10_000))
        assert (done.ok, done.total_rows) == (True, table.row_count)


@pytest.mark.parametrize(
    ("query", "note"),
    [
        (
            'SELECT "nosuch" FROM city',
            "\"nosuch\" is no column; SQLite read it as the text 'nosuch'",
        ),
        (
            'SELECT id FROM city WHERE name = "it\'s" OR name = "x"',
            "\"it's\" is no column; SQLite read it as the text 'it''s'",
        ),
        ('SELECT 1 WHERE "a ""b" = 1', '"a ""b" is no column; SQLite read it as the text \'a "b\''),
    ],
)
def test_case_17_a_double_quoted_name_that_is_no_column(play: Play, query: str, note: str) -> None:
    assert observe(play, query).splitlines()[-1] == f"[note: {note}]"


@pytest.mark.parametrize(
    "query",
    [
        'SELECT "name" FROM city',
        'SELECT id AS "key" FROM city ORDER BY "key"',
        "SELECT '\"nosuch\"'",
        'SELECT x FROM "a ""b"',
        'SELECT c."Update Date" FROM city AS c',
    ],
)
def test_case_17_a_real_column_is_not_warned_of(
    play: Play, pool: SandboxPool, city_path: str, query: str
) -> None:
    assert "[note" not in observe(play, query)
    assert pool.execute(city_path, query).text_name == ""


def test_case_17_the_rule_is_back_after_the_check(pool: SandboxPool, city_path: str) -> None:
    for _ in range(3):
        execution = pool.execute(city_path, 'SELECT "nosuch"')
        assert (execution.rows, execution.text_name) == ((("nosuch",),), "nosuch")


ODD_NAMES = ['a "b', "order", "a b", "it's", "été", "[x]", "`y`", "1st", "a;b", "-- c"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_case_18_odd_table_names(pool: SandboxPool, tmp_path: Path, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    script = f"CREATE TABLE {quoted} (x); INSERT INTO {quoted} VALUES (7)"
    database = open_database(build_database(tmp_path / "odd.sqlite", script))
    episode = Episode(make_task(f"SELECT x FROM {quoted}"), database, pool)
    written = name if name == "été" else quoted
    for turn, expected in (
        (call("sql_list_tables"), f"{written} (table, 1 row)"),
        (call("sql_schema", tables=[name]), f"CREATE TABLE {quoted} (x)\n7"),
        (call("sql_schema", tables=[quoted]), f"CREATE TABLE {quoted} (x)\n7"),
        (call("sql_exec", query=f"SELECT x FROM {written}"), "x\n7\n(1 row)"),
        (call("sql_submit", query=f"SELECT x FROM {written}"), "ACCEPTED"),
    ):
        assert episode.step(turn).messages[-1].content == expected
    assert episode.verdict().result_ok


@pytest.mark.parametrize(
    ("oracle", "answer", "right"),
    [
        ("SELECT 1", "SELECT 1.0", True),
        ("SELECT 1", "SELECT '1'", False),
        ("SELECT 0", "SELECT NULL", False),
        ("SELECT ''", "SELECT NULL", False),
        ("SELECT 0", "SELECT ''", False),
        ("SELECT 1 = 1", "SELECT TRUE", True),
        ("SELECT 'a'", "SELECT CAST('a' AS BLOB)", False),
        ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
        ("SELECT 0.3333", "SELECT 1.0 / 3", False),
        ("SELECT 9e999", "SELECT 1e999", True),
        ("SELECT 9e999", "SELECT -9e999", False),
        ("SELECT 9e999 - 9e999", "SELECT NULL", True),
        ("SELECT 9007199254740993", "SELECT 9007199254740992", False),
        ("SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 2", "VALUES (1), (2), (2)", False),
        ("SELECT 1 UNION ALL SELECT 2", "SELECT 2 UNION ALL SELECT 1", True),
        ("SELECT 1 UNION ALL SELECT 1", "SELECT 1", False),
        (
            "SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 2",
            "SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 2",
            False,
        ),
    ],
)
def test_case_19_cells_and_rows(judge: Judge, oracle: str, answer: str, right: bool) -> None:
    assert judge(oracle, answer) is right


SCORES = """
CREATE TABLE score (name TEXT, team TEXT COLLATE NOCASE, points INTEGER);
INSERT INTO score VALUES ('Ann', 'red', 9), ('Bob', 'Red', 7), ('Cay', 'blue', 7),
    ('Dan', 'green', 7), ('Eve', 'blue', 3);
"""
BY_POINTS = "SELECT name FROM score ORDER BY points DESC"


@pytest.mark.parametrize(
    ("oracle", "answer", "right"),
    [
        (BY_POINTS, BY_POINTS + ", name", True),
        (BY_POINTS, BY_POINTS + ", name DESC", True),
        (BY_POINTS, "SELECT name FROM score ORDER BY points", False),
        (BY_POINTS, "SELECT name FROM score ORDER BY name DESC", False),
        (BY_POINTS, "SELECT name FROM score WHERE points > 3 ORDER BY points DESC", False),
        (BY_POINTS + ", name", BY_POINTS + ", name DESC", False),
        (
            "SELECT name, points FROM score ORDER BY 2 DESC",
            "SELECT points, name FROM score ORDER BY points DESC, name DESC",
            True,
        ),
        (
            "SELECT name, points * 2 AS p FROM score ORDER BY p DESC LIMIT 4",
            "SELECT name, points + points FROM score ORDER BY points DESC, name DESC LIMIT 4",
            True,
        ),
        (
            "SELECT name FROM score ORDER BY team",
            "SELECT name FROM score ORDER BY lower(team), name DESC",
            True,
        ),
        (
            "SELECT points, count(*) FROM score GROUP BY points ORDER BY count(*) DESC",
            "SELECT points, count(*) FROM score GROUP BY points ORDER BY 2 DESC, 1",
            True,
        ),
        (
            "SELECT points, count(*) FROM score GROUP BY points ORDER BY count(*) DESC",
            "SELECT points, count(*) FROM score GROUP BY points ORDER BY 2, 1",
            False,
        ),
        (
            "SELECT DISTINCT lower(team) AS t, points FROM score ORDER BY points DESC",
            "SELECT DISTINCT lower(team) AS t, points FROM score ORDER BY points DESC, t DESC",
            True,
        ),
        (
            "SELECT name, 1 AS k FROM score UNION SELECT 'Zoe', 0 ORDER BY k",
            "SELECT name, 1 AS k FROM score UNION SELECT 'Zoe', 0 ORDER BY k, name DESC",
            True,
        ),
        (
            "SELECT name, 1 AS k FROM score UNION SELECT 'Zoe', 0 ORDER BY k",
            "SELECT name, 1 AS k FROM score UNION SELECT 'Zoe', 0 ORDER BY k DESC, name DESC",
            False,
        ),
        (
            "SELECT * FROM score ORDER BY points DESC",
            "SELECT * FROM score ORDER BY points DESC, name DESC",
            True,
        ),
        (
            "SELECT * FROM score ORDER BY 3 DESC",
            "SELECT * FROM score ORDER BY 3",
            False,
        ),
    ],
)
def test_case_20_ties(judge: Judge, tmp_path: Path, oracle: str, answer: str, right: bool) -> None:
    path = str(build_database(tmp_path / "score.sqlite", SCORES))
    assert judge(oracle, oracle, path=path, ordered=True)
    assert judge(oracle, answer, path=path, ordered=True) is right


@pytest.mark.parametrize("kind", ["infrastructure", "timeout", "memory", "too_large"])
def test_case_20_ties_that_could_not_be_found_are_asked_for_again(
    pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FailureKind
) -> None:
    """A failure of the query for them is nobody's mistake, and is not remembered."""
    path = str(build_database(tmp_path / "score.sqlite", SCORES))
    task = make_task(BY_POINTS, ordered=True).hidden
    failing = [Execution(failure=Failure(kind, "the worker died"))]
    execute = pool.execute

    def fail_once(path: str, sql: str, *more: Any) -> Execution:
        ranks = "DENSE_RANK" in sql.upper()
        return failing.pop() if ranks and failing else execute(path, sql, *more)

    monkeypatch.setattr(pool, "execute", fail_once)
    verifier = Verifier(pool)
    with pytest.raises(OracleError, match=f"^the ties of task t1 could not be found: {kind}$"):
        verifier.check(path, task, BY_POINTS + ", name DESC")
    assert failing == []
    assert verifier.check(path, task, BY_POINTS + ", name DESC")


def test_case_20_a_query_without_a_rank_has_no_ties(
    pool: SandboxPool, judge: Judge, tmp_path: Path
) -> None:
    path = str(build_database(tmp_path / "score.sqlite", SCORES))
    oracle = "SELECT name FROM score ORDER BY row_number() OVER (ORDER BY points DESC, name)"
    ranked = pool.execute(path, with_rank(oracle, 1) or "")
    assert ranked.failure is not None
    assert ranked.failure.kind == "sql_error"
    assert judge(oracle, BY_POINTS + ", name", path=path, ordered=True)
    assert not judge(oracle, BY_POINTS + ", name DESC", path=path, ordered=True)


@pytest.mark.parametrize(
    "query", ["DELETE FROM city", "SELECT nosuch", "SELECT 1; SELECT 2", "", "not sql"]
)
def test_case_21_an_error_against_an_empty_oracle_is_wrong(judge: Judge, query: str) -> None:
    empty = "SELECT name FROM city WHERE 0"
    assert judge(empty, "SELECT name FROM city WHERE id > 9", row_count=0)
    assert not judge(empty, query, row_count=0)


def test_case_22_26_permuted_columns(judge: Judge) -> None:
    base = "WITH t(n) AS (SELECT id FROM city UNION ALL SELECT id + 3 FROM city) SELECT "
    columns = [f"(n * {k + 3}) % 7 % 2" for k in range(26)]
    oracle = base + ", ".join(columns) + " FROM t"
    assert judge(oracle, base + ", ".join(columns[::-1]) + " FROM t ORDER BY n DESC")
    columns[13] = "1 - " + columns[13]
    assert not judge(oracle, base + ", ".join(columns) + " FROM t")


def test_case_23_no_rows(play: Play) -> None:
    assert (
        observe(play, 'SELECT id, "Update Date" FROM city WHERE 0') == "id | Update Date\n(0 rows)"
    )


TRUNCATED = '<tool_call>\n{"name": "sql_exec", "arguments": {"query": "SELECT'
AS_STRING = (
    '<tool_call>\n{"name": "sql_exec", "arguments": "{\\"query\\": \\"SELECT 5\\"}"}\n</tool_call>'
)


def test_case_24_calls_as_policies_write_them(play: Play) -> None:
    literal = call("sql_exec", query="SELECT '</tool_call>' AS x")
    two = call("sql_exec", query="SELECT 1") + "\n" + call("sql_exec", query="SELECT 2")
    episode = play(COUNT, TRUNCATED, literal, two, AS_STRING)
    texts = [message.content for message in episode.messages if message.role == "tool"]
    assert texts[0].startswith("Error: the tool call is not valid JSON")
    assert texts[1:] == [
        "x\n</tool_call>\n(1 row)",
        "1\n1\n(1 row)",
        "2\n2\n(1 row)",
        "5\n5\n(1 row)",
    ]
    assert not episode.over
    assert episode.verdict().violations["invalid_call"] == 1


def test_case_25_the_history_only_grows(play: Play) -> None:
    """Every byte told stays as told, and every note is inside a tool message."""
    config = EpisodeConfig(max_turns=4, observation_chars=10)
    episode = play(COUNT, config=config)
    seen = [message.model_dump_json() for message in episode.messages]
    turns = [call("sql_list_tables"), "no call", call("sql_list_tables"), call("nosuch")]
    for turn in turns:
        result = episode.step(turn)
        now = [message.model_dump_json() for message in episode.messages]
        assert now[: len(seen)] == seen
        assert [message.role for message in result.messages] == ["tool"]
        assert all(f"[note: {note}]" in result.messages[0].content for note in result.notes)
        seen = now
    assert episode.truncated


def test_limits_on_the_statement(pool: SandboxPool, city_path: str) -> None:
    wide = pool.execute(city_path, "SELECT " + ", ".join(["1"] * 2001)).failure
    assert wide is not None
    assert wide.message == "too many columns in result set"
    assert len(pool.execute(city_path, "SELECT " + ", ".join(["1"] * 2000)).columns) == 2000
    compound = pool.execute(city_path, " UNION ALL ".join(["SELECT 1"] * 501)).failure
    assert compound is not None
    assert compound.message == "too many terms in compound SELECT"
    deep = pool.execute(city_path, "SELECT " + "(" * 3000 + "1" + ")" * 3000).failure
    assert deep is not None
    assert deep.kind == "sql_error"


def test_the_database_is_never_changed(pool: SandboxPool, city_path: str) -> None:
    before = hashlib.sha256(Path(city_path).read_bytes()).hexdigest()
    for query in FORBIDDEN:
        assert pool.execute(city_path, query).failure is not None
    assert hashlib.sha256(Path(city_path).read_bytes()).hexdigest() == before

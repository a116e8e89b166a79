"""`hsql-env play`, `exec` and `inspect`, each at least once as a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from conftest import build_database, make_task
from test_compact import WIDE

from hsql_env.cli import main
from hsql_env.commands.play import Quit, Say, ToolCall, read_line
from hsql_env.harness import parse_turn
from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Database, RecordError, read_tasks, write_jsonl
from hsql_env.registry import open_database

ORACLE = "SELECT sum(1) FROM city"


def run_command(
    *arguments: str, typed: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `hsql-env` with this standard input and environment and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "hsql_env", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        input=typed,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )


def run_here(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Do the same inside this process, which spares starting an interpreter."""
    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> list[str]:
    """The arguments that name a tasks file and a databases file."""
    folder = tmp_path_factory.mktemp("play")
    write_jsonl(
        folder / "databases.jsonl",
        [
            Database(database_id="other", path="/nowhere", sha256=""),
            open_database(city_path),
        ],
    )
    write_jsonl(
        folder / "tasks.jsonl",
        [
            make_task(ORACLE),
            make_task("SELECT 'hidden' FROM city WHERE id = 1", task_id="t2"),
            make_task("SELECT hidden_column FROM city", task_id="broken"),
        ],
    )
    tasks, databases = folder / "tasks.jsonl", folder / "databases.jsonl"
    return ["--tasks", str(tasks), "--databases", str(databases)]


def test_a_person_plays_a_task(files: list[str]) -> None:
    typed = (
        'tables\nfly\nschema\nhelp\n\nschema river, "a ""b" nosuch\n'
        "exec DELETE FROM city\nexec SELECT count(*) \\\nFROM city\n"
        "submit SELECT count(*) \\\nFROM city\nnever read\n"
    )
    said = run_command("play", *files, typed=typed)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith(
        "task t1, database city; tools: sql_list_tables, sql_schema, sql_exec, sql_submit\n"
    )
    head, _, rest = said.stdout.partition("\n\nHow many?\n\n")
    assert "Answer the question with one SQLite query." in head
    assert rest.partition("goes on in the next one.\n")[2].startswith(
        "city (table, 3 rows)\nriver (table, 2 rows)\nlarge (view, 2 rows)\n"
        '"a ""b" (table, 1 row)\n"order" (table, 0 rows)\nnote (table, 2 rows)\n'
        "unknown command: fly; try help\nschema NAME ...\ntables "
    )
    assert said.stdout.endswith(
        "CREATE TABLE river (name TEXT, city_id INTEGER REFERENCES city(id), km REAL)\n"
        "Akerselva | 1 | 8.2\nAlna | 1 | 17.0\n"
        'CREATE TABLE "a ""b" (x BLOB)\n<blob 2 bytes>\nno such table: nosuch\n'
        "Error: only read-only queries are allowed, not DELETE\n"
        "count(*)\n3\n(1 row)\nACCEPTED\n"
        "result    right\nprotocol  broken (write_attempt x1)\nreward    0\n"
    )
    assert "sum(1)" not in said.stdout


@pytest.mark.parametrize(
    ("typed", "verdict"),
    [
        ("exec SELECT 3\nsubmit SELECT 3", "result    right\nprotocol  kept\nreward    1\n"),
        (
            "submit SELECT 4\n",
            "result    wrong\nprotocol  kept (submit_not_executed x1)\nreward    0\n",
        ),
        (
            "quit\nsubmit SELECT 3\n",
            "result    none submitted\nprotocol  broken (no_submit x1)\nreward    0\n",
        ),
        (
            "",
            "result    none submitted\nprotocol  broken (no_submit x1)\nreward    0\n",
        ),
    ],
)
def test_verdicts(files: list[str], typed: str, verdict: str) -> None:
    said = run_here("play", *files, typed=typed)
    assert said.returncode == 0
    assert said.stdout.endswith(verdict)


def test_the_turn_budget_ends_the_game(files: list[str]) -> None:
    said = run_here("play", *files, "--max-turns", "2", typed="tables\n" * 5)
    assert said.stdout.count("river (table, 2 rows)") == 2
    assert "[note: 1 turn left]" in said.stdout
    assert "broken (budget x1, no_submit x1)" in said.stdout


def test_a_person_may_play_with_a_short_context(files: list[str]) -> None:
    typed = "".join(f"exec {WIDE.format(turn)}\n" for turn in range(2))
    said = run_here("play", *files, "--context-chars", "5000", typed=typed)
    shown = said.stdout.partition("message 3 is now:\n")[2]
    assert shown.startswith("0 | wide\n[note: compacted, ")
    assert said.stdout.count("is now:") == 1
    refused = run_here("play", *files, "--context-chars", "3999")
    message = "hsql-env: --context-chars must be at least 4000, not 3999\n"
    assert (refused.returncode, refused.stderr) == (1, message)


def test_a_database_that_changed_is_not_played(files: list[str], tmp_path: Path) -> None:
    path = build_database(tmp_path / "city.sqlite", "CREATE TABLE city (id)")
    write_jsonl(tmp_path / "d.jsonl", [open_database(path)])
    path.write_bytes(path.read_bytes() + bytes(4096))
    said = run_here("play", *files[:2], "--databases", str(tmp_path / "d.jsonl"))
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith(f"hsql-env: {path}: not the content that was registered; ")


def test_the_oracle_is_never_shown(files: list[str]) -> None:
    said = run_here("play", *files, "--task-id", "broken", typed="submit SELECT 1\n")
    assert said.returncode == 0
    assert said.stdout.endswith(
        "ACCEPTED\nNo verdict: the harness failed, so this episode does not count.\n"
    )
    assert "hidden_column" not in said.stdout + said.stderr
    wrong = run_here("play", *files, "--task-id", "t2", typed="submit SELECT 1\n")
    assert "hidden" not in wrong.stdout
    assert "result    wrong" in wrong.stdout


def test_data_cannot_control_the_terminal(files: list[str]) -> None:
    said = run_here("play", *files, typed="exec SELECT char(27) || '[2J', char(155)\n")
    assert "\\x1b[2J | \\x9b\n" in said.stdout
    assert "\x1b" not in said.stdout


ASCII = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


def test_a_terminal_without_other_letters(files: list[str], city_path: str) -> None:
    typed = "exec SELECT name FROM city WHERE id = 3\nsubmit SELECT 3\n"
    said = run_command("play", *files, typed=typed, **ASCII)
    assert (said.returncode, said.stderr) == (0, "")
    assert "name\nBod\\xf8\n(1 row)\n" in said.stdout
    assert said.stdout.endswith("reward    1\n")
    sql = "SELECT name FROM city WHERE id = 3"
    reply = run_command("exec", "--database", city_path, sql, **ASCII)
    assert strict_json(reply.stdout)["rows"] == [["Bodø"]]
    wrong = run_command("play", *files, typed="exec SELECT 'ø'\n", **ASCII)
    message = "hsql-env: standard input is not ascii; say what it is in PYTHONIOENCODING\n"
    assert (wrong.returncode, wrong.stderr) == (1, message)


@pytest.mark.parametrize("command", ["play", "exec"])
def test_a_reader_that_leaves_ends_it_quietly(
    files: list[str], city_path: str, command: str
) -> None:
    options = files if command == "play" else ["--database", city_path, "SELECT 1"]
    receiving, sending = os.pipe()
    os.close(receiving)
    with open(sending, "wb") as closed:
        said = subprocess.run(
            [sys.executable, "-m", "hsql_env", command, *options],
            stdin=subprocess.DEVNULL,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert (said.returncode, said.stderr) == (141, b"")


def test_blank_lines_of_a_file_are_skipped(files: list[str], tmp_path: Path) -> None:
    spaced = tmp_path / "tasks.jsonl"
    spaced.write_text("\n" + Path(files[1]).read_text().replace("\n", "\n \r\n") + "\n")
    tasks = read_tasks(spaced)
    assert tasks == read_tasks(files[1])
    assert [task.public.task_id for task in tasks] == ["t1", "t2", "broken"]
    spaced.write_text("\n{\n")
    with pytest.raises(RecordError, match=r"tasks.jsonl:2: record: Invalid JSON"):
        read_tasks(spaced)


def test_play_names_what_is_wrong(files: list[str], tmp_path: Path) -> None:
    said = run_here("play", *files, "--task-id", "t9")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == f"hsql-env: {files[1]}: no task t9; it holds t1, t2, broken\n"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    none = run_here("play", "--tasks", str(empty), *files[2:])
    assert none.stderr == f"hsql-env: {empty}: no tasks; it must hold one a line\n"
    served = run_here("serve", "--tasks", str(empty), *files[2:])
    assert (served.returncode, served.stderr) == (1, none.stderr)
    lost = run_here("play", *files[:2], "--databases", str(empty))
    assert lost.stderr == f"hsql-env: {empty}: no database city, which the task needs\n"


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("tables", ToolCall("sql_list_tables", {})),
        ("  TABLES ", ToolCall("sql_list_tables", {})),
        ("schema a,b  c", ToolCall("sql_schema", {"tables": ["a", "b", "c"]})),
        ('schema "a ""b", "x y"', ToolCall("sql_schema", {"tables": ['"a ""b"', '"x y"']})),
        ("exec SELECT  'a  b'", ToolCall("sql_exec", {"query": "SELECT  'a  b'"})),
        ("submit SELECT 1;", ToolCall("sql_submit", {"query": "SELECT 1;"})),
        ("exec", Say("exec SQL")),
        ("tables x", Say("unknown command: tables; try help")),
        ("quit", Quit()),
    ],
)
def test_typed_lines(line: str, asked: ToolCall | Say | Quit) -> None:
    assert read_line(line) == asked


def test_a_typed_query_reaches_the_parser_unchanged() -> None:
    query = "SELECT '</tool_call>', \"ø\"\nFROM t -- \\ %"
    (parsed,) = parse_turn(tool_call_text("sql_exec", {"query": query})).calls
    assert (parsed.name, parsed.arguments, parsed.error) == ("sql_exec", {"query": query}, "")


def exec_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `hsql-env exec` and return its exit code and reply, which must be strict JSON."""
    said = run_here("exec", *arguments)
    assert said.stderr == ""
    return said.returncode, strict_json(said.stdout)


def strict_json(text: str) -> dict[str, Any]:
    """Return what the text says, without Python's own additions to JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return dict(json.loads(text, parse_constant=refuse))


def test_exec_prints_every_kind_of_value(city_path: str) -> None:
    sql = "SELECT 1 AS a, 9007199254740993 AS a, 0.5, 9e999, -9e999, NULL, '', x'00ff', 'Bodø'"
    said = run_command("exec", "--database", city_path, sql)
    assert said.stderr == ""
    code, reply = said.returncode, strict_json(said.stdout)
    assert (code, reply["ok"], reply["error"], reply["total_rows"]) == (0, True, None, 1)
    assert reply["columns"][:2] == ["a", "a"]
    assert reply["rows"] == [
        [1, 9007199254740993, 0.5, {"float": "inf"}, {"float": "-inf"}, None, "", {"hex": "00ff"},
         "Bodø"]
    ]  # fmt: skip
    assert reply["elapsed_ms"] > 0


def test_exec_names_the_total(city_path: str) -> None:
    code, reply = exec_json("--database", city_path, "--rows", "1", "SELECT id FROM city")
    assert (code, reply["rows"], reply["total_rows"]) == (0, [[1]], 3)
    code, reply = exec_json("--database", city_path, "--rows", "0", "SELECT id FROM city")
    assert (code, reply["rows"], reply["total_rows"]) == (0, [], 3)
    code, reply = exec_json("--database", city_path, "SELECT id FROM city WHERE 0")
    assert (code, reply["columns"], reply["rows"], reply["total_rows"]) == (0, ["id"], [], 0)


ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c"


@pytest.mark.parametrize(
    ("options", "sql", "kind", "message"),
    [
        ([], "SELECT nosuch", "sql_error", "no such column: nosuch"),
        ([], "DROP TABLE city", "not_read_only", "only read-only queries are allowed, not DROP"),
        ([], "SELECT 1; SELECT 2", "multi_statement", "only one statement is allowed per query"),
        ([], "", "empty", "the query is empty"),
        ([], "PRAGMA x", "not_a_query",
         "a query must start with SELECT, WITH or EXPLAIN, not PRAGMA"),
        (["--guard", "strict"], "/* x */ SELECT 1", "leading_comment",
         "a query may not start with a comment"),
        (["--seconds", "0.2"], ENDLESS, "timeout", "the query took longer than 0.2 s"),
    ],
)  # fmt: skip
def test_exec_refuses_and_fails(
    city_path: str, options: list[str], sql: str, kind: str, message: str
) -> None:
    code, reply = exec_json("--database", city_path, *options, sql)
    assert (code, reply["ok"], reply["columns"], reply["rows"]) == (1, False, [], [])
    assert reply["error"] == {"kind": kind, "message": message}


@pytest.mark.parametrize("command", ["exec", "inspect"])
def test_a_bad_database_is_one_line(command: str, tmp_path: Path) -> None:
    def said(path: Path | str) -> str:
        place = ["--database", str(path), "SELECT 1"] if command == "exec" else [str(path)]
        outcome = run_here(command, *place)
        assert (outcome.returncode, outcome.stdout) == (1, "")
        return outcome.stderr

    assert said("mysql://root:secret@host/shop") == (
        "hsql-env: mysql://: no such kind of database; name a SQLite file, or one of "
        "postgresql://, postgres://, bigquery://\n"
    )
    gone, text = tmp_path / "gone.sqlite", tmp_path / "x.sqlite"
    text.write_text("hello")
    assert said(gone) == f"hsql-env: {gone}: No such file or directory\n"
    assert said(tmp_path) == f"hsql-env: {tmp_path}: a folder, not a database file\n"
    assert said(text) == (
        f"hsql-env: {text}: not a SQLite database; remove it or name another file\n"
    )
    assert not gone.exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--seconds", "0"], "--seconds must be above 0, not 0"),
        (["--seconds", "nan"], "--seconds must be above 0, not nan"),
        (["--rows", "-1"], "--rows must be at least 0, not -1"),
    ],
)
def test_exec_checks_its_options(city_path: str, option: list[str], message: str) -> None:
    said = run_here("exec", "--database", city_path, *option, "SELECT 1")
    assert (said.returncode, said.stdout, said.stderr) == (1, "", f"hsql-env: {message}\n")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a declared and an inferred join, a NULL, an infinity and an empty table."""
    script = """
    CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, rating REAL);
    INSERT INTO customers VALUES (1, 'Ann [b]', 9e999), (2, 'Bo' || char(27), NULL), (3, 'NULL', 1);
    CREATE TABLE orders (order_id INTEGER PRIMARY KEY, buyer INTEGER REFERENCES customers(id));
    INSERT INTO orders VALUES (10, 1), (11, 1), (12, NULL);
    CREATE TABLE lines (line INTEGER PRIMARY KEY, order_id INTEGER);
    INSERT INTO lines VALUES (1, 10), (2, 10), (3, 11), (4, 99);
    CREATE TABLE void (x);
    """
    return str(build_database(tmp_path_factory.mktemp("inspect") / "shop.sqlite", script))


def test_inspect_prints_json_for_machines(shop: str) -> None:
    said = run_here("inspect", shop, "--json")
    assert (said.returncode, said.stderr) == (0, "")
    reply = json.loads(said.stdout)
    assert (reply["database"], len(reply["sha256"])) == ("shop", 64)
    tables = {table["name"]: table for table in reply["tables"]}
    assert {name: table["rows"] for name, table in tables.items()} == {
        "customers": 3, "orders": 3, "lines": 4,
    }  # fmt: skip
    key, name, rating = tables["customers"]["columns"]
    assert (key["type"], key["primary_key"], key["distinct"]) == ("INTEGER", True, 3)
    assert (name["samples"], name["null_share"]) == (["Ann [b]", "Bo\x1b", "NULL"], 0.0)
    assert (rating["null_share"], rating["samples"]) == (0.3333, [{"float": "inf"}, 1.0])
    assert tables["orders"]["columns"][1]["null_share"] == 0.3333
    assert reply["joins"] == [
        {
            "child": "orders", "child_column": "buyer",
            "parent": "customers", "parent_column": "id",
            "found": "declared", "matched_rows": 2, "unmatched_rows": 1,
        },
        {
            "child": "lines", "child_column": "order_id",
            "parent": "orders", "parent_column": "order_id",
            "found": "inferred", "matched_rows": 3, "unmatched_rows": 1,
        },
    ]  # fmt: skip
    assert reply["left_out"] == ["void: no rows"]


def test_inspect_reads_files() -> None:
    said = run_here("inspect", "postgresql://reader@/shop")
    assert said.stderr == "hsql-env: inspect reads SQLite files only\n"


def test_inspect_prints_tables_for_people(shop: str) -> None:
    said = run_command("inspect", shop)
    assert (said.returncode, said.stderr) == (0, "")
    assert "customers (table, 3 rows)" in said.stdout
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in said.stdout.splitlines()
        if line.startswith("│")
    ]
    assert ["name", "TEXT", "", "0.0%", "3", "Ann [b], Bo\\x1b, 'NULL'"] in rows
    assert ["rating", "REAL", "", "33.3%", "2", "inf, 1.0"] in rows
    assert ["orders.buyer", "customers.id", "declared", "2", "1"] in rows
    assert ["lines.order_id", "orders.order_id", "inferred", "3", "1"] in rows
    assert said.stdout.endswith("left out: void: no rows\n")
    assert "\x1b" not in said.stdout

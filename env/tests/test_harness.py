"""Observations, the episode's state machine, the verdict; edge cases 8, 10, 15, 21, 24 and 25."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import build_database, call, make_task

from hsql_env.harness import (
    TOOL_NAMES,
    TOOLS,
    Episode,
    EpisodeConfig,
    EpisodeOver,
    InfrastructureError,
)
from hsql_env.harness.render import render_cell
from hsql_env.harness.verify import Verifier
from hsql_env.records import Call, Database
from hsql_env.sandbox import Limits, SandboxPool, Value

Play = Callable[..., Episode]
COUNT = "SELECT count(*) FROM city"


def observe(play: Play, turn: str, **config: object) -> str:
    """Return the observations of one turn of a new episode, joined by a rule."""
    episode = play(COUNT, turn, config=EpisodeConfig(**config) if config else None)  # type: ignore[arg-type]
    return "\n---\n".join(m.content for m in episode.messages if m.role == "tool")


def test_four_tools() -> None:
    assert TOOL_NAMES == ("sql_list_tables", "sql_schema", "sql_exec", "sql_submit")
    assert [tool["function"]["parameters"]["required"] for tool in TOOLS] == [
        [],
        ["tables"],
        ["query"],
        ["query"],
    ]


def test_list_tables(play: Play) -> None:
    assert observe(play, call("sql_list_tables")) == (
        "city (table, 3 rows)\nriver (table, 2 rows)\nlarge (view, 2 rows)\n"
        '"a ""b" (table, 1 row)\n"order" (table, 0 rows)\nnote (table, 2 rows)'
    )


def test_schema(play: Play) -> None:
    turn = call("sql_schema", tables=["RIVER", "nosuch", '"a ""b"', "order"])
    assert observe(play, turn) == (
        "CREATE TABLE river (name TEXT, city_id INTEGER REFERENCES city(id), km REAL)\n"
        "Akerselva | 1 | 8.2\nAlna | 1 | 17.0\n"
        "no such table: nosuch\n"
        'CREATE TABLE "a ""b" (x BLOB)\n<blob 2 bytes>\n'
        'CREATE TABLE "order" (x)'
    )


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (COUNT, "count(*)\n3\n(1 row)"),
        ("SELECT id, name FROM city WHERE 0", "id | name\n(0 rows)"),
        ("SELECT 1 AS a, 2 AS a", "a | a\n1 | 2\n(1 row)"),
        ('SELECT "Update Date" FROM city', "Update Date\n2024-01-02\nNULL\n'NULL'\n(3 rows)"),
        ("SELECT REPLACE('1,0', ',', ''), 'update'", None),
        ("SELECT 9007199254740993, 1.0", "9007199254740993 | 1.0\n9007199254740993 | 1.0\n(1 row)"),
        ("SELECT nosuch FROM city", "Error: no such column: nosuch"),
        ("DELETE FROM city", "Error: only read-only queries are allowed, not DELETE"),
        ("SELECT 1; SELECT 2", "Error: only one statement is allowed per query"),
    ],
)
def test_exec(play: Play, query: str, text: str | None) -> None:
    expected = text or "REPLACE('1,0', ',', '') | 'update'\n10 | update\n(1 row)"
    assert observe(play, call("sql_exec", query=query)) == expected


def test_exec_limit_and_cap(play: Play) -> None:
    many = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 1234) SELECT n FROM c"
    )
    text = observe(play, call("sql_exec", query=many))
    assert text.splitlines()[0] == "n"
    assert text.splitlines()[-2:] == ["50", "(50 of 1234 rows shown)"]
    few = observe(play, call("sql_exec", query=many, limit=2))
    assert few == "n\n1\n2\n(2 of 1234 rows shown)"
    assert observe(play, call("sql_exec", query=many, limit=500)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        ("NULL", "'NULL'"),
        ("", ""),
        (b"\0" * 12, "<blob 12 bytes>"),
        (-(2**63), "-9223372036854775808"),
        (0.1, "0.1"),
        ("x" * 300, "x" * 300),
        ("x" * 301, "x" * 300 + "…"),
        ("a\nb", "a\\nb"),
    ],
)
def test_cells(value: Value, text: str) -> None:
    assert render_cell(value) == text


INVALID = {
    "no tool call here": "Error: the turn has no tool call",
    "<tool_call>\n{broken": "Error: the tool call is not valid JSON",
    call("rm", path="/"): "Error: unknown tool: rm; the tools are sql_list_tables",
    call("sql_exec"): "Error: sql_exec: query must be a string",
    call("sql_exec", query=1): "Error: sql_exec: query must be a string",
    call("sql_exec", query="SELECT 1", limit="5"): "Error: sql_exec: limit must be",
    call("sql_exec", query="SELECT 1", limit=True): "Error: sql_exec: limit must be",
    call("sql_exec", query="SELECT 1", limit=0): "Error: sql_exec: limit must be",
    call("sql_exec", sql="SELECT 1"): "Error: sql_exec has no argument sql",
    call("sql_schema", tables="city"): "Error: sql_schema: tables must be a list",
    call("sql_schema", tables=[]): "Error: sql_schema: tables must hold 1 to 20",
    call("sql_schema", tables=["t"] * 21): "Error: sql_schema: tables must hold 1 to 20",
    call("sql_list_tables", x=1): "Error: sql_list_tables has no argument x",
}


@pytest.mark.parametrize("turn", INVALID)
def test_invalid_call_is_observed_and_the_episode_goes_on(play: Play, turn: str) -> None:
    episode = play(COUNT, turn, call("sql_exec", query=COUNT), call("sql_submit", query=COUNT))
    observation = episode.messages[3]
    assert observation.role == "tool"
    assert observation.content.startswith(INVALID[turn])
    assert episode.calls[0].outcome == "invalid"
    verdict = episode.verdict()
    assert verdict.violations == {"invalid_call": 1}
    assert (verdict.result_ok, verdict.protocol_ok, verdict.reward) == (True, False, 0.0)


def test_perfect_episode(play: Play) -> None:
    episode = play(
        COUNT,
        call("sql_list_tables"),
        call("sql_exec", query=COUNT),
        call("sql_submit", query=COUNT + ";"),
    )
    assert episode.messages[-1].content == "ACCEPTED"
    verdict = episode.verdict()
    assert verdict.reward == 1.0
    assert verdict.strict_ok
    assert verdict.violations == {}
    assert (episode.terminated, episode.truncated, episode.turns) == (True, False, 3)
    assert episode.final_sql == COUNT + ";"
    with pytest.raises(EpisodeOver):
        episode.step(call("sql_list_tables"))


def test_wrong_and_unexecuted_submit(play: Play) -> None:
    verdict = play(COUNT, call("sql_submit", query="SELECT 4")).verdict()
    assert (verdict.result_ok, verdict.protocol_ok, verdict.strict_ok) == (False, True, False)
    assert verdict.reward == 0.0
    assert verdict.violations == {"submit_not_executed": 1}


def test_rejected_submit_goes_on(play: Play) -> None:
    episode = play(COUNT, call("sql_submit", query="SELECT x"))
    assert episode.messages[-1].content == "REJECTED: no such column: x"
    assert not episode.terminated
    episode.step(call("sql_exec", query=COUNT))
    episode.step(call("sql_submit", query=COUNT))
    verdict = episode.verdict()
    assert verdict.reward == 1.0
    assert verdict.violations == {"rejected_submit": 1}
    assert not verdict.strict_ok


def test_calls_after_the_accepted_one_are_not_run(play: Play) -> None:
    submit = call("sql_submit", query=COUNT)
    episode = play(COUNT, submit + submit + call("sql_list_tables"))
    assert [m.content for m in episode.messages[3:]] == [
        "ACCEPTED",
        "Error: the episode has ended",
        "Error: the episode has ended",
    ]
    violations = episode.verdict().violations
    assert violations == {"duplicate_submit": 1, "invalid_call": 2, "submit_not_executed": 1}


@pytest.mark.parametrize(
    ("query", "violation"),
    [
        ("DROP TABLE city", "write_attempt"),
        ("WITH x AS (SELECT 1) DELETE FROM city", "write_attempt"),
        ("ATTACH 'gold.db' AS g", "write_attempt"),
        ("SELECT 1; SELECT 2", "multi_statement"),
    ],
)
def test_forbidden_query_breaks_the_protocol(play: Play, query: str, violation: str) -> None:
    verdict = play(
        COUNT,
        call("sql_exec", query=query),
        call("sql_exec", query=COUNT),
        call("sql_submit", query=COUNT),
    ).verdict()
    assert verdict.result_ok
    assert not verdict.protocol_ok
    assert verdict.violations == {violation: 1}


def test_turn_budget_truncates(play: Play) -> None:
    config = EpisodeConfig(max_turns=2)
    episode = play(COUNT, call("sql_list_tables"), config=config)
    assert episode.messages[-1].content.endswith("\n[note: 1 turn left]")
    result = episode.step("thinking")
    assert (result.terminated, result.truncated) == (False, True)
    verdict = episode.verdict()
    assert verdict.violations == {"budget": 1, "invalid_call": 1, "no_submit": 1}
    assert not verdict.submitted


def test_stopped_episode_is_truncated(play: Play) -> None:
    episode = play(COUNT, call("sql_exec", query=COUNT))
    episode.stop()
    assert episode.truncated
    assert episode.verdict().violations == {"no_submit": 1}
    assert not episode.verdict().protocol_ok


def test_only_a_budget_that_ended_the_episode_is_a_violation(play: Play) -> None:
    quit_at_once = play(COUNT).verdict()
    assert (quit_at_once.violations, quit_at_once.protocol_ok) == ({"no_submit": 1}, False)
    spent = play(COUNT, call("sql_list_tables"), config=EpisodeConfig(max_turns=1))
    spent.stop()  # too late: the episode was over
    assert spent.verdict().violations == {"budget": 1, "no_submit": 1}
    last = play(COUNT, call("sql_submit", query=COUNT), config=EpisodeConfig(max_turns=1))
    assert last.verdict().violations == {"submit_not_executed": 1}


def test_calls_a_turn_are_bounded(play: Play) -> None:
    text = observe(play, call("sql_exec", query=COUNT) * 2, max_calls_per_turn=1)
    assert text == (
        "count(*)\n3\n(1 row)\n---\nError: at most 1 calls are run a turn; the rest was not run"
    )


@pytest.mark.parametrize("surplus", [1, 2, 8992])
def test_one_reply_stands_for_all_the_calls_that_were_not_run(play: Play, surplus: int) -> None:
    turn = call("sql_exec", query=COUNT) * (8 + surplus)
    episode = play(COUNT, turn)
    replies = [m.content for m in episode.messages if m.role == "tool"]
    assert len(replies) == 9
    assert replies[0] == "count(*)\n3\n(1 row)"
    assert replies[8] == "Error: at most 8 calls are run a turn; the rest was not run"
    assert [entry.outcome for entry in episode.calls] == ["ok"] * 8 + ["invalid"]
    assert episode.verdict().violations == {"invalid_call": 1, "no_submit": 1}


def test_calls_after_the_accepted_one_are_bounded_too(play: Play) -> None:
    episode = play(COUNT, call("sql_submit", query=COUNT) * 9000)
    assert len(episode.messages) == 3 + 9
    assert episode.verdict().violations == {
        "duplicate_submit": 8, "invalid_call": 8, "submit_not_executed": 1,
    }  # fmt: skip


def test_an_error_that_repeats_the_policys_words_is_cut(play: Play) -> None:
    episode = play(COUNT, call("x" * 1_000_000), config=EpisodeConfig(observation_chars=30))
    assert episode.messages[-1].content == (
        "Error: unknown tool: xxxxxxxxx…\n[note: cut at 30 of 1000086 characters]"
    )
    assert episode.verdict().activations == {"truncation": 1}


def test_a_fault_of_the_harness_is_never_the_policys(city: Database) -> None:
    closed = SandboxPool(workers=1)
    closed.close()
    episode = Episode(make_task(COUNT), city, closed)
    with pytest.raises(InfrastructureError, match="the sandbox is closed"):
        episode.step(call("sql_exec", query=COUNT))
    assert episode.over
    verdict = episode.verdict()
    assert (verdict.infrastructure, verdict.protocol_ok) == ("the sandbox is closed", False)


def test_a_fault_in_judging_is_a_failure_of_the_harness_for_good(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = play(COUNT, call("sql_exec", query=COUNT), call("sql_submit", query=COUNT))
    faults = [RecursionError("deep inside"), OverflowError("never reached")]
    monkeypatch.setattr(Verifier, "check", lambda *_: (_ for _ in ()).throw(faults.pop(0)))
    verdict = episode.verdict()
    assert verdict.infrastructure == "the harness failed (RecursionError)"
    assert (verdict.result_ok, verdict.protocol_ok, verdict.reward) == (False, False, 0.0)
    assert episode.verdict() == verdict
    assert len(faults) == 1


def test_a_fault_in_reading_a_turn_ends_the_episode(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = play(COUNT)
    monkeypatch.setattr("hsql_env.harness.episode.parse_turn", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        episode.step(call("sql_list_tables"))
    assert episode.over
    assert episode.verdict().infrastructure == "the harness failed (ZeroDivisionError)"


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "\\ud800", "arguments": 5}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "sql_exec", "arguments": {"\\udfff": 1}}',
        '{"name": "sql_exec", "arguments": {"query": "SELECT 1", "limit": NaN}}',
        '{"name": "sql_exec", "arguments": {"query": "SELECT 1", "limit": 1' + "0" * 400 + "}}",
    ],
)
def test_whatever_is_called_can_be_recorded(play: Play, body: str) -> None:
    episode = play(COUNT, f"<tool_call>{body}</tool_call>")
    (entry,) = episode.calls
    assert Call.model_validate_json(entry.model_dump_json()).outcome == entry.outcome
    assert episode.verdict().infrastructure == ""


WIDE = ", ".join(f"'{'x' * 200}' AS c{column}" for column in range(10))


def test_a_long_results_rows_are_cut_and_not_its_total_or_warning(play: Play) -> None:
    many = f"WITH t(n) AS (SELECT value FROM json_each('[{', '.join(map(str, range(60)))}]')) "
    text = observe(play, call("sql_exec", query=f'{many} SELECT n, {WIDE}, "nosuch" FROM t'))
    shown, total, warning, note = text.rsplit("\n", 3)
    assert total == "(50 of 60 rows shown)"
    assert warning == "[note: \"nosuch\" is no column; SQLite read it as the text 'nosuch']"
    assert note == "[note: cut at 6000 of 102241 characters]"
    assert shown.startswith("n | c0 | c1")
    assert shown.endswith("x…")
    assert len(f"{shown}\n{total}\n{warning}") == 6001
    short = observe(play, call("sql_exec", query=f"SELECT {WIDE}"), observation_chars=200)
    assert short.splitlines()[-2:] == ["(1 row)", "[note: cut at 200 of 2083 characters]"]


def test_a_warning_has_a_bounded_length(play: Play) -> None:
    text = observe(play, call("sql_exec", query=f'SELECT 1 AS n WHERE "{"y" * 9000}" = 1'))
    name = "y" * 300 + "…"
    assert text == (
        f"n\n(0 rows)\n[note: \"{name}\" is no column; SQLite read it as the text '{name}']"
    )


def test_notes_are_inside_the_observation_and_history_only_grows(play: Play) -> None:
    config = EpisodeConfig(max_turns=4, observation_chars=20)
    episode = play(COUNT, config=config)
    turns = [call("sql_list_tables"), call("sql_list_tables"), call("sql_exec", query=COUNT)]
    history = list(episode.messages)
    for turn in turns:
        result = episode.step(turn)
        assert episode.messages[: len(history)] == history
        added = episode.messages[len(history) :]
        assert [message.role for message in added] == ["assistant", "tool"]
        assert added[0].content == turn
        assert all(f"[note: {note}]" in added[1].content for note in result.notes)
        history = list(episode.messages)
    first, second, third = (m.content for m in history if m.role == "tool")
    assert (
        first == "city (table, 3 rows)…\n[note: cut at 20 of 131 characters]\n[note: 3 turns left]"
    )
    assert second.endswith("\n[note: same call as in turn 1]")
    assert third == "count(*)\n3\n(1 row)\n[note: 1 turn left]"
    assert episode.verdict().activations == {
        "budget_notice": 2,
        "repeat_notice": 1,
        "truncation": 2,
    }
    assert [entry.duplicate for entry in episode.calls] == [False, True, False]


EMPTY = "SELECT name FROM city WHERE people > 9999"


@pytest.mark.parametrize(
    ("oracle", "row_count", "answer", "right"),
    [
        (EMPTY, 0, "SELECT name FROM city WHERE id < 0", True),
        (EMPTY, 3, "SELECT name FROM city WHERE id < 0", False),
        (EMPTY, 0, "SELECT name FROM city", False),
        (COUNT, 1, "SELECT 3.0", True),
        (COUNT, 1, "SELECT '3'", False),
        ("SELECT 1 AS a, 2 AS a", 1, "SELECT 2, 1", True),
        ("SELECT REPLACE('1,0', ',', '')", 1, "SELECT '10' -- update; delete", True),
        ("SELECT 'x;y'", 1, "/* a; */ SELECT 'x;y';", True),
        ('SELECT "Update Date" FROM city', 3, 'SELECT "Update Date" FROM city ORDER BY 1', True),
    ],
)
def test_verdict(play: Play, oracle: str, row_count: int, answer: str, right: bool) -> None:
    verdict = play(oracle, call("sql_submit", query=answer), row_count=row_count).verdict()
    assert verdict.result_ok is right
    assert verdict.reward == float(right)


def test_error_against_an_empty_oracle_is_wrong(city: Database, pool: SandboxPool) -> None:
    hanging = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 3000000) "
        "SELECT n FROM c WHERE n < 0"
    )
    config = EpisodeConfig(verify_limits=Limits(wall_s=0.05, rows=100))
    episode = Episode(make_task(EMPTY, row_count=0), city, pool, config)
    episode.step(call("sql_submit", query=hanging))
    verdict = episode.verdict()
    assert (verdict.submitted, verdict.result_ok, verdict.infrastructure) == (True, False, "")


def test_order_and_names_where_required(play: Play) -> None:
    ordered = "SELECT name FROM city ORDER BY people DESC"
    backwards = call("sql_submit", query="SELECT name FROM city ORDER BY people")
    assert play(ordered, backwards).verdict().result_ok
    assert not play(ordered, backwards, ordered=True).verdict().result_ok
    alias = call("sql_submit", query=COUNT + " AS n")
    named = "SELECT count(*) AS n FROM city"
    assert not play(named, call("sql_submit", query=COUNT), names_required=True).verdict().result_ok
    assert play(COUNT + " AS x", alias).verdict().result_ok


def test_strict_guard_holds_for_tool_and_submit(play: Play) -> None:
    config = EpisodeConfig(guard="strict")
    commented = "-- note\n" + COUNT
    episode = play(
        COUNT, call("sql_exec", query=commented), call("sql_submit", query=commented), config=config
    )
    assert [m.content for m in episode.messages if m.role == "tool"] == [
        "Error: a query may not start with a comment",
        "REJECTED: a query may not start with a comment",
    ]
    assert play(COUNT, call("sql_submit", query=commented)).verdict().result_ok


def test_broken_oracle_is_infrastructure(play: Play) -> None:
    verdict = play("SELECT nosuch", call("sql_submit", query=COUNT)).verdict()
    assert verdict.infrastructure == "the oracle of task t1 did not run: sql_error"
    assert (verdict.result_ok, verdict.protocol_ok, verdict.reward) == (False, False, 0.0)


def test_timeout_is_observed(play: Play) -> None:
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c"
    config = EpisodeConfig(tool_limits=Limits(wall_s=0.2))
    episode = play(COUNT, call("sql_exec", query=endless), config=config)
    assert episode.messages[-1].content == "Error: the query took longer than 0.2 s"
    assert (episode.calls[0].outcome, episode.calls[0].failure) == ("failed", "timeout")
    assert episode.verdict().activations == {"time_limit": 1}


def test_a_database_that_changes_is_judged_as_it_is(pool: SandboxPool, tmp_path: Path) -> None:
    """The oracle's result is that of the file of this moment, like the answer's."""
    path = build_database(tmp_path / "now.sqlite", "CREATE TABLE t (x); INSERT INTO t VALUES (1)")
    database = Database(database_id="now", path=str(path), sha256="0" * 64)
    verifier = Verifier(pool)

    def play(answer: str) -> bool:
        task = make_task("SELECT sum(x) FROM t")
        episode = Episode(task, database, pool, verifier=verifier)
        episode.step(call("sql_submit", query=answer))
        return episode.verdict().result_ok

    assert [play("SELECT 1"), play("SELECT 3")] == [True, False]
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO t VALUES (2)")
    connection.close()
    assert [play("SELECT 1"), play("SELECT 3")] == [False, True]

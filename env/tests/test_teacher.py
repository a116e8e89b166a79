"""The scripted teacher: its text, its paths, and that every error is followed by a recovery."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from hsql_env.harness.tools import tool_call_text
from hsql_env.records import HiddenTask, Message, PublicTask, Task
from hsql_env.teacher.scripted import Habits, ScriptedTeacher

ORACLE = "SELECT COUNT(*) FROM ship WHERE quay = 'NORTH'"
ATTEMPT = "SELECT COUNT(*) FROM ship WHERE quay = 'north'"
PROBE = "SELECT DISTINCT quay FROM ship"
FAULTS = ["SELECT COUNT(*) FROM ship WHERE key = 'NORTH'", "SELECT COUNT(* FROM ship"]
LISTING = 'crew (table, 9 rows)\nship (table, 4 rows)\n"pier ""A""" (view, 2 rows)'
STRAIGHT = Habits(
    second_error=0, guess=0, reread=0, attempt=0, probe=0, extra_table=0, split_schema=0
)


def make_task(task_id: str = "t", **blueprint: Any) -> Task:
    return Task(
        public=PublicTask(task_id=task_id, database_id="d", question="How many?"),
        hidden=HiddenTask(
            task_id=task_id,
            oracle_sql=ORACLE,
            columns=("COUNT(*)",),
            row_count=1,
            fingerprint="f",
            blueprint={"tables": ["ship"], **blueprint},
        ),
    )


def observe(tool: str, arguments: dict[str, Any]) -> str:
    """A hand-made environment in which exactly the faults fail."""
    if tool == "sql_list_tables":
        return LISTING
    if tool == "sql_schema":
        return "\n".join(f"CREATE TABLE {name} (quay TEXT)" for name in arguments["tables"])
    query = arguments["query"]
    if query == FAULTS[0]:
        return "Error: no such column: key"
    if query == FAULTS[1]:
        return 'Error: near "FROM": syntax error'
    return "quay\nNORTH\n(1 row)" if tool == "sql_exec" else "ACCEPTED"


def play(
    teacher: ScriptedTeacher,
    task: Task,
    seed: int = 0,
    environment: Callable[[str, dict[str, Any]], str] = observe,
) -> list[tuple[str, Any]]:
    """Run one episode and return its calls as (tool, its only argument or None)."""
    first = [Message(role="system", content="s"), Message(role="user", content="How many?")]

    async def episode() -> list[tuple[str, Any]]:
        session = teacher.begin(task.public, seed, first, [])
        calls = []
        messages = first
        while (turn := await session.act(messages)) is not None:
            call = json.loads(turn.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            calls.append((call["name"], next(iter(call["arguments"].values()), None)))
            observation = environment(call["name"], call["arguments"])
            messages = [Message(role="tool", content=observation)]
            if observation == "ACCEPTED":
                break
        return calls

    return asyncio.run(episode())


def test_a_tool_call_is_written_as_qwen3_writes_it() -> None:
    text = tool_call_text("sql_exec", {"query": "SELECT 'é' FROM \"a b\""})
    assert text == (
        '<tool_call>\n{"name": "sql_exec", "arguments": {"query": '
        '"SELECT \'é\' FROM \\"a b\\""}}\n</tool_call>'
    )
    assert tool_call_text("sql_list_tables", {}) == (
        '<tool_call>\n{"name": "sql_list_tables", "arguments": {}}\n</tool_call>'
    )


def test_the_straight_path_executes_the_oracle_and_submits_the_same_text() -> None:
    task = make_task()
    assert play(ScriptedTeacher({"t": task}, 0.0, STRAIGHT), task) == [
        ("sql_list_tables", None),
        ("sql_schema", ["ship"]),
        ("sql_exec", ORACLE),
        ("sql_submit", ORACLE),
    ]


def test_a_spelling_that_differs_is_always_probed_before_the_answer() -> None:
    task = make_task(attempts=[ATTEMPT], probes=[PROBE])
    for rate, expected in ((0, [PROBE, ORACLE]), (1, [ATTEMPT, PROBE, ORACLE])):
        habits = Habits(attempt=rate, extra_table=0)
        calls = play(ScriptedTeacher({"t": task}, 0.0, habits), task)
        assert [query for tool, query in calls if tool == "sql_exec"] == expected


def test_an_error_before_the_schema_is_followed_by_the_schema() -> None:
    task = make_task(faults=FAULTS[:1])
    habits = Habits(guess=1, probe=0, extra_table=0)
    assert play(ScriptedTeacher({"t": task}, 1.0, habits), task)[1:4] == [
        ("sql_exec", FAULTS[0]),
        ("sql_schema", ["ship"]),
        ("sql_exec", ORACLE),
    ]


@pytest.mark.parametrize(
    ("fault", "again"), [(FAULTS[0], [("sql_schema", ["ship"])]), (FAULTS[1], [])]
)
def test_only_a_name_error_sends_it_back_to_the_schema(
    fault: str, again: list[tuple[str, Any]]
) -> None:
    task = make_task(tables=["crew", "ship"], faults=[fault])

    def qualified(tool: str, arguments: dict[str, Any]) -> str:
        return observe(tool, arguments).replace("column: key", "column: ship.key")

    habits = Habits(guess=0, reread=1, probe=0, extra_table=0, split_schema=0)
    calls = play(ScriptedTeacher({"t": task}, 1.0, habits), task, environment=qualified)
    assert calls[2:] == [
        ("sql_exec", fault),
        *again,
        ("sql_exec", ORACLE),
        ("sql_submit", ORACLE),
    ]


def test_an_extra_table_is_one_that_was_listed_without_its_quotes() -> None:
    task = make_task()
    habits = Habits(extra_table=1, probe=0)
    teacher = ScriptedTeacher({"t": task}, 0.0, habits)
    extras = {play(teacher, task, seed)[1][1][1] for seed in range(20)}
    assert extras == {"crew", 'pier "A"'}


def test_tables_are_looked_at_in_two_calls_that_differ() -> None:
    task = make_task(tables=["crew", "ship"])
    teacher = ScriptedTeacher({"t": task}, 0.0, Habits(split_schema=1, extra_table=0, probe=0))
    assert play(teacher, task)[1:3] == [("sql_schema", ["crew"]), ("sql_schema", ["ship"])]


def test_errors_are_a_minority_and_never_repeated() -> None:
    task = make_task(tables=["crew", "ship"], faults=FAULTS)
    teacher = ScriptedTeacher({"t": task})
    with_error = with_two = 0
    for seed in range(1000):
        calls = play(teacher, task, seed)
        failed = [i for i, (_, argument) in enumerate(calls) if argument in FAULTS]
        with_error += bool(failed)
        with_two += len(failed) == 2
        assert len({json.dumps(call) for call in calls}) == len(calls), "a repeated call"
        assert all(calls[i + 1][1] not in FAULTS for i in failed), "an error after an error"
        assert calls[-2:] == [("sql_exec", ORACLE), ("sql_submit", ORACLE)]
    assert 240 <= with_error <= 320
    assert 30 <= with_two <= 90


def test_an_episode_depends_on_the_task_and_the_seed_alone() -> None:
    tasks = {name: make_task(name, faults=FAULTS, probes=[PROBE]) for name in ("t", "u")}
    teacher = ScriptedTeacher(tasks, 0.5)
    first = [play(teacher, tasks["t"], seed) for seed in range(30)]
    assert first == [play(ScriptedTeacher(tasks, 0.5), tasks["t"], seed) for seed in range(30)]
    assert first != [play(teacher, tasks["u"], seed) for seed in range(30)]


def test_it_gives_up_rather_than_repeat_an_oracle_that_fails() -> None:
    task = make_task()

    def broken(tool: str, arguments: dict[str, Any]) -> str:
        return "Error: timed out" if tool == "sql_exec" else observe(tool, arguments)

    calls = play(ScriptedTeacher({"t": task}, 0.0, STRAIGHT), task, environment=broken)
    assert calls[-1] == ("sql_exec", ORACLE)


def test_an_unknown_task_and_a_blueprint_without_tables_are_named() -> None:
    task = make_task()
    with pytest.raises(ValueError, match="task t: not among the teacher's 0"):
        ScriptedTeacher({}).begin(task.public, 0, [], [])
    bad = task.model_copy(update={"hidden": task.hidden.model_copy(update={"blueprint": {}})})
    with pytest.raises(ValueError, match="task t: blueprint: tables: Field required"):
        ScriptedTeacher({"t": bad}).begin(task.public, 0, [], [])

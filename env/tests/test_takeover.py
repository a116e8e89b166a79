"""The take-over: a student's own mistakes, ended by the teacher, in the real service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from conftest import call, make_task

from hsql_env.driver import run_episode
from hsql_env.records import Message, PublicTask, Trajectory, write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess
from hsql_env.teacher.collect import drop_reason
from hsql_env.teacher.scripted import Habits, ScriptedTeacher
from hsql_env.teacher.takeover import TakeOver, correction_problem, first_mistake

ORACLE = "SELECT \"Update Date\" FROM city WHERE name = 'Oslo'"
PROBE = "SELECT DISTINCT name FROM city"
TASKS = {
    "plain": make_task(ORACLE, "plain", blueprint={"tables": ["city"]}),
    "join": make_task(
        "SELECT COUNT(*) FROM river JOIN city ON river.city_id = city.id",
        "join",
        blueprint={"tables": ["river", "city"]},
    ),
    "spelt": make_task(
        ORACLE,
        "spelt",
        blueprint={
            "tables": ["city"],
            "attempts": [ORACLE.replace("Oslo", "OSLO")],
            "probes": [PROBE],
        },
    ),
}


class Student:
    """Plays the given turns, whatever it sees; `closed` counts how often it was freed."""

    name = "student"

    def __init__(self, *turns: str) -> None:
        self._turns = iter(turns)
        self.closed = 0

    def begin(
        self, task: PublicTask, seed: int, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> Student:
        return self

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        return next(self._turns, None)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("takeover")
    database = open_database(city_path)
    write_jsonl(folder / "databases.jsonl", [database])
    write_jsonl(folder / "tasks.jsonl", TASKS.values())
    with ServiceProcess(folder / "tasks.jsonl", folder / "databases.jsonl", workers=1) as service:
        yield service.url


def play(url: str, name: str, student: Student, reread: float = 0.0) -> Trajectory:
    policy = TakeOver(student, ScriptedTeacher(TASKS, habits=Habits(reread=reread)))

    async def episode() -> Trajectory:
        async with AsyncEnvironment(url) as env:
            return (await run_episode(env, TASKS[name].public, policy)).trajectory

    trajectory = asyncio.run(episode())
    assert trajectory.policy == "student+scripted-teacher"
    assert student.closed == 1
    return trajectory


def after_mistake(trajectory: Trajectory) -> list[tuple[str, Any]]:
    """The teacher's calls as (tool, its only argument or None)."""
    mistake = first_mistake(trajectory.messages)
    assert mistake is not None
    own = sum(m.role == "assistant" for m in trajectory.messages[:mistake])
    return [
        (c.tool, next(iter(c.arguments.values()), None)) for c in trajectory.calls if c.turn > own
    ]


LIST = call("sql_list_tables")
WRONG = call("sql_exec", query="SELECT date FROM city")


def test_a_failed_query_is_followed_by_what_was_not_read_and_the_answer(url: str) -> None:
    trajectory = play(url, "plain", Student(LIST, WRONG, "never played"))
    assert after_mistake(trajectory) == [
        ("sql_schema", ["city"]),
        ("sql_exec", ORACLE),
        ("sql_submit", ORACLE),
    ]
    assert trajectory.verdict.reward == 1
    assert drop_reason(trajectory) == ""


def test_tables_that_the_student_has_read_are_not_read_again(url: str) -> None:
    read = call("sql_schema", tables=["city"])
    trajectory = play(url, "join", Student(LIST, read, WRONG))
    assert after_mistake(trajectory)[0] == ("sql_schema", ["river"])
    trajectory = play(url, "plain", Student(LIST, read, WRONG))
    assert [tool for tool, _ in after_mistake(trajectory)] == ["sql_exec", "sql_submit"]
    trajectory = play(url, "plain", Student(LIST, read, WRONG), reread=1.0)
    assert after_mistake(trajectory)[0] == ("sql_schema", ["city"])


def test_an_episode_that_begins_with_nonsense_is_played_from_the_start(url: str) -> None:
    trajectory = play(url, "plain", Student("city city city"))
    assert drop_reason(trajectory) == "protocol"  # the student's fault, which is not imitated
    assert correction_problem(trajectory) == ""
    assert [tool for tool, _ in after_mistake(trajectory)] == [
        "sql_list_tables",
        "sql_schema",
        "sql_exec",
        "sql_submit",
    ]


@pytest.mark.parametrize(
    "mistake",
    [
        call("sql_exec", query="SELECT name FROM city WHERE name = 'OSLO'"),
        call("sql_submit", query="SELECT nam FROM city"),
        call("sql_schema", tables=["town"]),
    ],
    ids=["no rows", "rejected", "no such table"],
)
def test_what_else_shows_a_mistake(url: str, mistake: str) -> None:
    trajectory = play(url, "spelt", Student(LIST, mistake))
    assert after_mistake(trajectory)[-3:] == [
        ("sql_exec", PROBE),
        ("sql_exec", ORACLE),
        ("sql_submit", ORACLE),
    ]
    assert trajectory.verdict.result_ok


def test_a_student_without_mistakes_plays_alone(url: str) -> None:
    query = ORACLE
    turns = LIST, call("sql_exec", query=query), call("sql_submit", query=query)
    trajectory = play(url, "plain", Student(*turns))
    assert first_mistake(trajectory.messages) is None
    assert [c.tool for c in trajectory.calls] == ["sql_list_tables", "sql_exec", "sql_submit"]
    assert trajectory.verdict.reward == 1
    assert correction_problem(trajectory) == "no mistake"


def test_what_teaches_no_recovery(url: str) -> None:
    both = WRONG + "\n" + call("sql_submit", query=ORACLE)
    trajectory = play(url, "plain", Student(LIST, both))
    assert correction_problem(trajectory) == "nothing after the mistake"
    mended = play(url, "plain", Student(LIST, WRONG))
    spoilt = mended.verdict.model_copy(update={"infrastructure": "x"})
    wrong = mended.verdict.model_copy(update={"result_ok": False})
    thought = mended.messages[2].model_copy(update={"content": "a</think>b"})
    messages = (*mended.messages[:2], thought, *mended.messages[3:])
    assert [
        correction_problem(mended.model_copy(update=update))
        for update in ({"verdict": spoilt}, {"verdict": wrong}, {"messages": messages}, {})
    ] == ["infrastructure", "not answered", "think markup", ""]


def test_values_that_look_like_messages_are_no_mistakes() -> None:
    contents = ["name\nError: x\n(1 row)", "name\n(0 rows shown)\n(1 row)", "REJECT"]
    assert first_mistake([Message(role="tool", content=c) for c in contents]) is None
    assert first_mistake([Message(role="assistant", content="Error: x")]) is None


def test_an_unknown_task_is_refused() -> None:
    teacher = ScriptedTeacher({})
    with pytest.raises(ValueError, match="task plain: not among the teacher's 0"):
        teacher.recover(TASKS["plain"].public, 0, [])

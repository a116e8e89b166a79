"""Collection end to end: the scripted teacher in a real service, over a real database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hsql_env.analysis.behaviour import Rate, behaviour
from hsql_env.records import HiddenTask, PublicTask, Task, Trajectory, read_jsonl, write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment
from hsql_env.service.launcher import ServiceProcess
from hsql_env.teacher.collect import Collection, collect, drop_reason
from hsql_env.teacher.scripted import Habits, ScriptedTeacher

SCHEMA = """
CREATE TABLE pier (pier_id INTEGER PRIMARY KEY, quay TEXT);
CREATE TABLE ship (ship_id INTEGER PRIMARY KEY, name TEXT, pier_id INTEGER);
INSERT INTO pier VALUES (1, 'NORTH'), (2, 'SOUTH');
INSERT INTO ship VALUES (1, 'Aurora', 1), (2, 'Calypso', 1), (3, 'Dora', 2);
"""
JOIN = "SELECT COUNT(*) FROM ship JOIN pier ON ship.pier_id = pier.pier_id WHERE pier.quay = "


def make_task(task_id: str, oracle: str, **blueprint: Any) -> Task:
    return Task(
        public=PublicTask(task_id=task_id, database_id="harbour", question=f"Question {task_id}?"),
        hidden=HiddenTask(
            task_id=task_id,
            oracle_sql=oracle,
            columns=("c",),
            row_count=1,
            fingerprint="",
            blueprint=blueprint,
        ),
    )


TASKS = [
    make_task(
        "count",
        "SELECT COUNT(*) FROM ship",
        tables=["ship"],
        faults=["SELECT COUNT(*) FROM ships"],
    ),
    make_task(
        "join",
        JOIN + "'NORTH'",
        tables=["ship", "pier"],
        attempts=[JOIN + "'north'"],
        probes=["SELECT DISTINCT quay FROM pier"],
        faults=[JOIN.replace("COUNT(*)", "COUNT(pier_id)") + "'NORTH'"],
    ),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("harbour")
    with sqlite3.connect(folder / "harbour.sqlite") as connection:
        connection.executescript(SCHEMA)
    connection.close()
    write_jsonl(folder / "databases.jsonl", [open_database(folder / "harbour.sqlite")])
    write_jsonl(folder / "tasks.jsonl", TASKS)
    with ServiceProcess(folder / "tasks.jsonl", folder / "databases.jsonl", workers=1) as process:
        yield process


def run(
    url: str, tasks: Sequence[Task], sink: Path, error_rate: float = 1.0
) -> tuple[Collection, list[tuple[int, int]]]:
    """Collect two rollouts a task; return the collection and the progress that was reported."""
    habits = Habits(guess=0, reread=0, attempt=1, extra_table=0, split_schema=0, probe=0)
    teacher = ScriptedTeacher({t.public.task_id: t for t in tasks}, error_rate, habits)
    public = [task.public for task in tasks]
    progress: list[tuple[int, int]] = []

    async def go() -> Collection:
        async with AsyncEnvironment(url) as env:
            return await collect(
                env,
                public,
                teacher,
                2,
                5,
                3,
                lambda done, total: progress.append((done, total)),
                sink,
            )

    return asyncio.run(go()), progress


def test_teacher_trajectories_with_errors_and_recoveries_verify(
    service: ServiceProcess, tmp_path: Path
) -> None:
    sink = tmp_path / "new" / "teacher.jsonl"
    collection, progress = run(service.url, TASKS, sink)
    assert [(t.task.task_id, t.seed) for t in collection.kept] == [
        ("count", 5000),
        ("count", 5001),
        ("join", 5000),
        ("join", 5001),
    ]
    assert not collection.dropped
    assert progress == [(done, 4) for done in range(5)]
    join = collection.kept[2]
    assert [(call.tool, call.outcome) for call in join.calls] == [
        ("sql_list_tables", "ok"),
        ("sql_schema", "ok"),
        ("sql_exec", "ok"),  # the question's spelling: a count of 0
        ("sql_exec", "ok"),  # the probe
        ("sql_exec", "failed"),  # ambiguous column
        ("sql_exec", "ok"),
        ("sql_submit", "ok"),
    ]
    assert "Error: ambiguous column name: pier_id" in join.messages[11].content
    assert (join.policy, join.final_sql) == ("scripted-teacher", JOIN + "'NORTH'")
    rates = behaviour(collection.kept)
    assert rates["execution_accuracy"] == Rate(4, 4, "trajectories")
    assert rates["execution_error"] == Rate(4, 12, "executions")
    assert rates["immediate_recovery"] == Rate(4, 4, "errors")
    assert rates["one_valid_submit"] == Rate(4, 4, "trajectories")
    assert rates["strict_violation"] == Rate(0, 4, "trajectories")


def test_an_interrupted_collection_goes_on_where_it_was(
    service: ServiceProcess, tmp_path: Path
) -> None:
    sink = tmp_path / "teacher.jsonl"
    whole, _ = run(service.url, TASKS, sink)
    lines = sink.read_text(encoding="utf-8").splitlines(keepends=True)
    sink.write_text("".join(lines[:3]) + lines[3][:40], encoding="utf-8")
    again, progress = run(service.url, TASKS, sink)
    assert again == whole
    assert progress == [(3, 4), (4, 4)]
    assert len(list(read_jsonl(sink, Trajectory))) == 4
    assert run("http://127.0.0.1:9", TASKS, sink) == (whole, [(4, 4)])  # nothing left to ask


def test_what_does_not_verify_is_stored_and_counted_by_reason(
    service: ServiceProcess, tmp_path: Path
) -> None:
    wrong = make_task("count", "SELECT 7", tables=["ship"])
    stuck = make_task("join", "SELECT nosuch", tables=["ship"])
    sink = tmp_path / "teacher.jsonl"
    collection, _ = run(service.url, [wrong, stuck], sink)
    assert (collection.kept, dict(collection.dropped)) == ([], {"wrong result": 2, "no submit": 2})
    stored = list(read_jsonl(sink, Trajectory))
    assert sorted(map(drop_reason, stored)) == ["no submit", "no submit", *["wrong result"] * 2]


def test_episodes_that_the_harness_failed_are_counted_and_tried_again(
    service: ServiceProcess, tmp_path: Path
) -> None:
    sink = tmp_path / "teacher.jsonl"
    failed, progress = run("http://127.0.0.1:9", TASKS, sink)
    assert (failed.kept, dict(failed.dropped)) == ([], {"infrastructure": 4})
    assert progress[-1] == (4, 4)
    assert sink.read_text(encoding="utf-8") == ""
    assert len(run(service.url, TASKS, sink)[0].kept) == 4

"""Shared fixtures: a small database, a pool, a task, and the text of tool calls."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hsql_env.harness import Episode, EpisodeConfig
from hsql_env.records import Database, HiddenTask, PublicTask, Task
from hsql_env.registry import open_database
from hsql_env.sandbox import SandboxPool

CITY_SQL = """
CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, people INTEGER, "Update Date" TEXT);
INSERT INTO city VALUES
    (1, 'Oslo', 700, '2024-01-02'), (2, 'Bergen', 290, NULL), (3, 'Bodø', 52, 'NULL');
CREATE TABLE river (name TEXT, city_id INTEGER REFERENCES city(id), km REAL);
INSERT INTO river VALUES ('Akerselva', 1, 8.2), ('Alna', 1, 17.0);
CREATE VIEW large AS SELECT name FROM city WHERE people > 100;
CREATE TABLE "a ""b" (x BLOB);
INSERT INTO "a ""b" VALUES (x'0102');
CREATE TABLE "order" (x);
CREATE VIRTUAL TABLE note USING fts5(body);
INSERT INTO note VALUES ('hello world'), ('hello sea');
"""


def build_database(path: Path, script: str) -> Path:
    """Write a database file and return its path."""
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.commit()
    connection.close()
    return path


def files_in(folder: Path) -> list[Path]:
    """Return what is in a folder, without the caches that test tools may write meanwhile."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="session")
def city_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a database with odd names, a view, a blob and a full-text table."""
    return str(build_database(tmp_path_factory.mktemp("databases") / "city.sqlite", CITY_SQL))


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    """Two workers, shared by the tests that leave them alive."""
    with SandboxPool(workers=2) as shared:
        yield shared


@pytest.fixture(scope="session")
def city(city_path: str) -> Database:
    """The record of the city database."""
    return open_database(city_path)


def make_task(oracle_sql: str, task_id: str = "t1", row_count: int = 1, **hidden: Any) -> Task:
    """Return a task on the city database."""
    return Task(
        public=PublicTask(task_id=task_id, database_id="city", question="How many?"),
        hidden=HiddenTask(
            task_id=task_id,
            oracle_sql=oracle_sql,
            columns=("x",),
            row_count=row_count,
            fingerprint="",
            **hidden,
        ),
    )


@pytest.fixture
def play(pool: SandboxPool, city: Database) -> Callable[..., Episode]:
    """Return a function that makes an episode and steps it through the given turns."""

    def run(
        oracle_sql: str, *turns: str, config: EpisodeConfig | None = None, **task: Any
    ) -> Episode:
        episode = Episode(make_task(oracle_sql, **task), city, pool, config)
        episode.reset()
        for turn in turns:
            episode.step(turn)
        return episode

    return run


def call(tool: str, **arguments: Any) -> str:
    """Return a tool call as the policy writes it."""
    body = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"

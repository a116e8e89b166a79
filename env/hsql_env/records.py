"""Versioned records of every stage, stored as JSON Lines.

A task has two halves of separate types: `PublicTask` may reach a policy, `HiddenTask` never leaves
the service process. A trajectory holds what the policy saw and wrote, and the verdict on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

RECORD_VERSION = 1

Split = Literal["train", "seen", "unseen"]


class RecordError(ValueError):
    """A record file that cannot be read; the message names the file, the line and the field."""


class Record(BaseModel):
    """Base of all records: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Database(Record):
    """A SQLite file, or a server's database by its address. `path` stays on the server side."""

    database_id: str
    path: str
    sha256: str


class Mutation(Record):
    """A single-fault edit of the oracle that executes and changes the result."""

    kind: str
    sql: str


class PublicTask(Record):
    """What a policy, a trainer and a report may know of a task."""

    task_id: str
    database_id: str
    question: str
    split: Split = "train"
    kind: str = ""  # template family, such as "join_count"
    difficulty: float = 0.0  # D_str, equation (15)
    version: int = RECORD_VERSION


class HiddenTask(Record):
    """The verifier's half: the oracle, its result's shape, and the teacher's blueprint."""

    task_id: str
    oracle_sql: str
    columns: tuple[str, ...]
    row_count: int
    fingerprint: str
    ordered: bool = False  # row order is part of the answer
    names_required: bool = False  # the question names the output columns
    mutations: tuple[Mutation, ...] = ()
    blueprint: dict[str, Any] = Field(default_factory=dict)  # for the scripted bootstrap teacher


class Task(Record):
    """Both halves, as stored in a task file and loaded by the service."""

    public: PublicTask
    hidden: HiddenTask


Role = Literal["system", "user", "assistant", "tool"]


class Message(Record):
    """One chat message. An assistant's content is the policy's raw text, tool calls included."""

    role: Role
    content: str


class Call(Record):
    """One tool call of a transcript and what became of it."""

    turn: int
    tool: str  # "" when the call could not be parsed
    arguments: dict[str, Any] = Field(default_factory=dict)
    outcome: Literal["ok", "failed", "invalid"]
    failure: str = ""  # the failure's kind, such as "sql_error" or "not_read_only"
    sql: str = ""
    duplicate: bool = False


class Verdict(Record):
    """The judgement on one finished episode, equation (2): reward = result * protocol."""

    result_ok: bool
    protocol_ok: bool
    strict_ok: bool  # no violation of any kind
    reward: float
    submitted: bool
    violations: dict[str, int] = Field(default_factory=dict)  # named violation -> count
    activations: dict[str, int] = Field(default_factory=dict)  # middleware step -> times it fired
    infrastructure: str = ""  # non-empty: the harness failed, the episode is not a sample


class Trajectory(Record):
    """A whole episode: every message in order, the calls, the final SQL and the verdict."""

    trajectory_id: str
    task: PublicTask
    policy: str  # who acted, such as "scripted-teacher" or "sft@500"
    seed: int
    messages: tuple[Message, ...]
    calls: tuple[Call, ...]
    turns: int
    final_sql: str
    terminated: bool
    truncated: bool
    verdict: Verdict
    provenance: dict[str, Any] = Field(default_factory=dict)
    version: int = RECORD_VERSION


R = TypeVar("R", bound=Record)


def write_jsonl(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Write records to `path` atomically (a temporary file, then a rename); return their count."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    partial.replace(target)
    return count


def read_jsonl(path: str | os.PathLike[str], kind: type[R]) -> Iterator[R]:
    """Yield the records of a JSON Lines file, in which lines may be blank.

    `RecordError` names the first bad line and field.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                problem = first_problem(error, "record")
                raise RecordError(f"{path}:{number}: {problem}") from None


def read_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Return the tasks of a file that must hold some. Raises `RecordError`."""
    tasks = list(read_jsonl(path, Task))
    if not tasks:
        raise RecordError(f"{path}: no tasks; it must hold one a line")
    return tasks


def first_problem(error: ValidationError, whole: str) -> str:
    """Return the first field that is wrong, and how; `whole` is all of them together."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg'].removeprefix('Value error, ')}"

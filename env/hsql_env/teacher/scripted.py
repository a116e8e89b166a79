"""A scripted bootstrap teacher, which starts a policy from nothing.

NOT a result: it reads the task's hidden half (oracle SQL and blueprint), which no other policy
ever sees. It exists to write trajectories that a small model can imitate, so at every state of an
episode its likeliest next call is the right one: errors are rare and unpredictable, and what
follows an error is always a good recovery.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError

from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Message, PublicTask, Record, Task, first_problem

ERROR = "Error:"  # how the observation of a failed execution begins
LISTED = re.compile(r"^(.+) \((?:table|view)\b", re.MULTILINE)  # a line of sql_list_tables
MISSING = re.compile(r"(?:no such (?:column|table)|ambiguous column name): (.+)")

Observation = str
ToolCall = tuple[str, dict[str, Any]]
Script = Generator[ToolCall, Observation, None]


class Blueprint(Record):
    """What the task's synthesiser tells the teacher besides the oracle.

    `attempts` run but answer wrongly, because the question spells a value unlike the database;
    `probes` show the stored spelling; `faults` fail with an error.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    tables: tuple[str, ...]
    probes: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Habits:
    """How often the teacher leaves the straight path, each a probability in [0, 1]."""

    second_error: float = 0.2  # of the episodes with an error, those with a second one
    guess: float = 0.3  # of the first errors, those made before the schema has been read
    reread: float = 0.3  # one table is looked at again after an error
    attempt: float = 0.5  # the question's own spelling is tried before the stored one is looked up
    probe: float = 0.1  # values are looked at although nothing calls for it
    extra_table: float = 0.08  # one table more than needed is looked at
    split_schema: float = 0.1  # the tables are looked at in two calls


class ScriptedTeacher:
    """A `Policy` that plays each task's blueprint, seeded by (task, seed).

    `error_rate` is the share of episodes with a failing query, where the blueprint has one.
    """

    name = "scripted-teacher"

    def __init__(
        self, tasks: Mapping[str, Task], error_rate: float = 0.28, habits: Habits | None = None
    ) -> None:
        self._tasks = tasks
        self._error_rate = error_rate
        self._habits = habits or Habits()

    def begin(
        self, task: PublicTask, seed: int, messages: Sequence[Message], tools: Sequence[Any]
    ) -> ScriptedSession:
        """Return the session that acts in one episode.

        Raises ValueError where the teacher does not hold the task, or its blueprint is unusable.
        """
        whole = self._whole(task)
        rng = random.Random(f"{task.task_id}/{seed}")
        plan = _plan(_blueprint(whole), rng, self._error_rate, self._habits)
        return ScriptedSession(_script(plan, whole.hidden.oracle_sql, rng, self._habits))

    def recover(
        self, task: PublicTask, seed: int, observations: Sequence[Message]
    ) -> ScriptedSession:
        """Return the session that ends an episode which another policy has played so far.

        `observations` are all messages of the environment up to now. Raises as `begin` does.
        """
        whole = self._whole(task)
        rng = random.Random(f"recover/{task.task_id}/{seed}")
        seen = "\n".join(message.content for message in observations if message.role == "tool")
        script = _recovery(_blueprint(whole), whole.hidden.oracle_sql, seen, rng, self._habits)
        return ScriptedSession(script)

    def _whole(self, task: PublicTask) -> Task:
        whole = self._tasks.get(task.task_id)
        if whole is None:
            raise ValueError(f"task {task.task_id}: not among the teacher's {len(self._tasks)}")
        return whole


class ScriptedSession:
    """One episode of the teacher: each observation is sent into the script for the next call."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._started = False

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        """Return the next turn's text, or None when the script has ended without acceptance."""
        try:
            if self._started:
                tool, arguments = self._script.send(new_messages[-1].content)
            else:
                self._started = True
                tool, arguments = next(self._script)
        except StopIteration:
            return None
        return tool_call_text(tool, arguments)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class _Plan:
    """What one episode will contain, drawn before it starts."""

    tables: tuple[str, ...]
    guess: str = ""  # a failing query before the schema is read
    attempt: str = ""  # a query with the question's own spelling
    probes: tuple[str, ...] = ()
    slip: str = ""  # a failing query right before the right one


def _blueprint(task: Task) -> Blueprint:
    try:
        return Blueprint.model_validate(task.hidden.blueprint)
    except ValidationError as error:
        problem = first_problem(error, "record")
        raise ValueError(f"task {task.public.task_id}: blueprint: {problem}") from None


def _plan(blueprint: Blueprint, rng: random.Random, error_rate: float, habits: Habits) -> _Plan:
    """Draw the episode's detours; faults keep to places that a good recovery follows."""
    misspelt = bool(blueprint.attempts)
    attempt, guess, slip = "", "", ""
    if misspelt and rng.random() < habits.attempt:
        attempt = rng.choice(blueprint.attempts)
    probes = blueprint.probes if misspelt or rng.random() < habits.probe else ()
    if blueprint.faults and rng.random() < error_rate:
        slip, *others = rng.sample(blueprint.faults, len(blueprint.faults))
        if not misspelt:  # a guess would give away the stored spelling before it has been seen
            guess, slip = _place(slip, others, rng, habits)
    return _Plan(blueprint.tables, guess, attempt, probes, slip)


def _place(fault: str, others: list[str], rng: random.Random, habits: Habits) -> tuple[str, str]:
    """Return (guess, slip): the fault in one place, and at times another in the other."""
    second = others[0] if others and rng.random() < habits.second_error else ""
    return (fault, second) if rng.random() < habits.guess else (second, fault)


def _script(plan: _Plan, oracle: str, rng: random.Random, habits: Habits) -> Script:
    """Yield the episode's calls one by one; each yield returns the call's observation."""
    listing = yield "sql_list_tables", {}
    if plan.guess:
        yield _exec(plan.guess)
    looks = _looks(plan.tables, _listed(listing), rng, habits)
    for tables in looks:
        yield "sql_schema", {"tables": tables}
    if plan.attempt:
        yield _exec(plan.attempt)
    for probe in plan.probes:
        yield _exec(probe)
    if plan.slip:
        error = yield _exec(plan.slip)
        table = _table_at_fault(error, plan.tables)
        if table and [table] not in looks and rng.random() < habits.reread:
            yield "sql_schema", {"tables": [table]}
    answer = yield _exec(oracle)
    if not answer.startswith(ERROR):
        yield "sql_submit", {"query": oracle}


def _recovery(
    blueprint: Blueprint, oracle: str, seen: str, rng: random.Random, habits: Habits
) -> Script:
    """Yield the calls that end an episode after a mistake: look at what is unread, then answer."""
    if not LISTED.search(seen):
        yield "sql_list_tables", {}
    unread = [table for table in blueprint.tables if not _shown(table, seen)]
    if unread:
        yield "sql_schema", {"tables": unread}
    elif rng.random() < habits.reread:
        yield "sql_schema", {"tables": list(blueprint.tables)}
    if blueprint.attempts:
        for probe in blueprint.probes:
            yield _exec(probe)
    answer = yield _exec(oracle)
    if not answer.startswith(ERROR):
        yield "sql_submit", {"query": oracle}


def _shown(table: str, seen: str) -> bool:
    """True if an observation shows the table's CREATE statement."""
    name = re.escape(table.replace('"', '""'))
    return re.search(rf'^CREATE [A-Z ]+ ["`\[]?{name}["`\]]?[ (]', seen, re.MULTILINE) is not None


def _exec(sql: str) -> ToolCall:
    return "sql_exec", {"query": sql}


def _listed(listing: Observation) -> list[str]:
    """Return the table names that `sql_list_tables` showed, without the quotes of SQL."""
    return [
        name[1:-1].replace('""', '"') if name.startswith('"') else name
        for name in LISTED.findall(listing)
    ]


def _looks(
    needed: tuple[str, ...], listed: list[str], rng: random.Random, habits: Habits
) -> list[list[str]]:
    """Return the tables of each schema call: as a rule one call with exactly those needed."""
    others = [name for name in listed if name not in needed]
    extra = [rng.choice(others)] if others and rng.random() < habits.extra_table else []
    if len(needed) > 1 and rng.random() < habits.split_schema:
        return [[needed[0]], [*needed[1:], *extra]]
    return [[*needed, *extra]]


def _table_at_fault(error: Observation, tables: tuple[str, ...]) -> str:
    """Return the table that a name error is about; "" where looking again would not help."""
    missing = MISSING.search(error)
    if not missing:
        return ""
    close = difflib.get_close_matches(missing[1].split(".")[0], tables, n=1)
    return close[0] if close else tables[0]

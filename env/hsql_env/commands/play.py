"""`hsql-env play`: a person takes the policy's seat, with the same tools and observations."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hsql_env.commands import CommandError
from hsql_env.harness import TOOLS, Episode, EpisodeConfig, InfrastructureError
from hsql_env.harness.compact import LEAST_CONTEXT_CHARS
from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Database, Task, Verdict, read_jsonl, read_tasks
from hsql_env.registry import check_databases
from hsql_env.sandbox import GuardProfile, SandboxPool

HELP = """\
tables              list the tables and views
schema NAME ...     show CREATE statements and sample rows; quote a name with spaces: "a b"
exec SQL            run a read-only query
submit SQL          submit the final query and end
help                show this again
quit                give up
A line that ends with \\ goes on in the next one."""

_NAME = re.compile(r'"(?:[^"]|"")*"|[^\s,]+')
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHOWN_IDS = 3


@dataclass(frozen=True)
class Play:
    """Play a task yourself in the terminal: the same four tools, and the verdict at the end."""

    tasks: Path
    """JSON Lines file of tasks."""
    databases: Path
    """JSON Lines file of databases."""
    task_id: str = ""
    """The task to play; the file's first unless given."""
    max_turns: int = 24
    context_chars: int | None = None
    """Compact older observations beyond so many characters, as for a policy that asks for it."""
    guard: GuardProfile = "default"


class ToolCall(NamedTuple):
    """A typed line that is a call of one of the tools."""

    tool: str
    arguments: dict[str, Any]


class Say(NamedTuple):
    """A typed line that needs an answer only; it costs no turn."""

    text: str


class Quit(NamedTuple):
    """A typed line that gives up."""


def run(command: Play) -> int:
    """Play one episode on standard input and output.

    Raises `CommandError`, `RecordError`, `DatabaseError`.
    """
    if command.max_turns < 1:
        raise CommandError(f"--max-turns must be at least 1, not {command.max_turns}")
    if command.context_chars is not None and command.context_chars < LEAST_CONTEXT_CHARS:
        raise CommandError(
            f"--context-chars must be at least {LEAST_CONTEXT_CHARS}, not {command.context_chars}"
        )
    task = choose_task(read_tasks(command.tasks), command.task_id, command.tasks)
    database = _find_database(command.databases, task.public.database_id)
    check_databases([database])
    config = EpisodeConfig(max_turns=command.max_turns, guard=command.guard)
    with SandboxPool(workers=1) as pool:
        episode = Episode(task, database, pool, config, context_chars=command.context_chars)
        _play(episode, task)
        verdict = episode.verdict()
    _print(describe_verdict(verdict))
    return 0


def choose_task(tasks: Sequence[Task], task_id: str, source: Path) -> Task:
    """Return the task of that id, the first one for "". Raises `CommandError`."""
    for task in tasks:
        if task_id in ("", task.public.task_id):
            return task
    shown = ", ".join(task.public.task_id for task in tasks[:_SHOWN_IDS])
    more = f" and {len(tasks) - _SHOWN_IDS} more" if tasks[_SHOWN_IDS:] else ""
    raise CommandError(f"{source}: no task {task_id}; it holds {shown}{more}")


def read_line(line: str) -> ToolCall | Say | Quit:
    """Return what a typed line asks for. Never raises."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    word = word.lower()
    if word == "tables" and not rest:
        return ToolCall("sql_list_tables", {})
    if word == "schema":
        names = _NAME.findall(rest)
        return ToolCall("sql_schema", {"tables": names}) if names else Say("schema NAME ...")
    if word in ("exec", "submit"):
        return ToolCall(f"sql_{word}", {"query": rest}) if rest else Say(f"{word} SQL")
    if word in ("quit", "exit"):
        return Quit()
    return Say(HELP if word in ("help", "?") else f"unknown command: {word}; try help")


def describe_verdict(verdict: Verdict) -> str:
    """Return the verdict in words, one line a fact. Nothing in it tells the oracle."""
    if verdict.infrastructure:
        return "No verdict: the harness failed, so this episode does not count."
    result = "right" if verdict.result_ok else "wrong" if verdict.submitted else "none submitted"
    broken = ", ".join(f"{name} x{count}" for name, count in verdict.violations.items())
    protocol = "kept" if verdict.protocol_ok else "broken"
    return "\n".join(
        [
            f"result    {result}",
            f"protocol  {protocol}{f' ({broken})' if broken else ''}",
            f"reward    {verdict.reward:g}",
        ]
    )


def _find_database(path: Path, database_id: str) -> Database:
    for database in read_jsonl(path, Database):
        if database.database_id == database_id:
            return database
    raise CommandError(f"{path}: no database {database_id}, which the task needs")


def _play(episode: Episode, task: Task) -> None:
    """Read lines until the episode is over, or the person gives up or the input ends."""
    system, question = episode.reset()
    names = ", ".join(tool["function"]["name"] for tool in TOOLS)
    _print(f"task {task.public.task_id}, database {task.public.database_id}; tools: {names}")
    _print(f"\n{system.content}\n\n{question.content}\n\n{HELP}")
    for line in _lines(episode):
        asked = read_line(line)
        if isinstance(asked, Quit):
            return
        if isinstance(asked, Say):
            _print(asked.text)
            continue
        try:
            result = episode.step(tool_call_text(asked.tool, asked.arguments))
        except InfrastructureError as error:
            _print(f"the harness failed: {error}")
            return
        for message in result.messages:
            _print(message.content)
        for index, message in result.compacted:
            _print(f"message {index} is now:\n{message.content}")
        if episode.over:
            return


def _lines(episode: Episode) -> Iterator[str]:
    """Yield what is typed, continued lines joined and blank ones left out, to the input's end."""
    typed = ""
    while True:
        prompt = "... " if typed else f"turn {episode.turns + 1}/{episode.config.max_turns}> "
        try:
            line = input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            if typed.strip():
                yield typed
            return
        except UnicodeDecodeError as error:
            raise CommandError(
                f"standard input is not {error.encoding}; say what it is in PYTHONIOENCODING"
            ) from error
        if line.endswith("\\"):
            typed += line[:-1] + "\n"
            continue
        if (typed + line).strip():
            yield typed + line
        typed = ""


def _print(text: str) -> None:
    """Print without letting data control the terminal."""
    print(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text), flush=True)

"""The `hsql-env` command: `serve` and `exec`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hsql_env.harness import EpisodeConfig
from hsql_env.records import Database, RecordError, Task, read_jsonl
from hsql_env.registry import DatabaseError, open_database
from hsql_env.sandbox import Execution, GuardProfile, Limits, SandboxPool, Value


@dataclass(frozen=True)
class Serve:
    """Serve episodes over HTTP until stopped; prints one JSON line with the address when ready."""

    tasks: Path
    """JSON Lines file of tasks."""
    databases: Path
    """JSON Lines file of databases."""
    host: str = "127.0.0.1"
    port: int = 8777
    """0 takes a free port."""
    workers: int = 2
    """Sandbox processes, and so queries in flight."""
    max_turns: int = 24
    observation_chars: int = 6_000
    guard: GuardProfile = "default"
    tool_seconds: float = 60.0
    """Wall limit of a query of the policy."""
    verify_seconds: float = 30.0
    """Wall limit of the verifier's own execution."""
    stop_with_stdin: bool = False
    """End when standard input closes."""


@dataclass(frozen=True)
class Exec:
    """Run one statement through the sandbox; prints JSON, exit code 0 if it ran."""

    sql: tyro.conf.Positional[str]
    database: Path
    guard: GuardProfile = "default"
    seconds: float = 60.0
    """Wall limit."""
    rows: int = 50
    """Most rows to print."""


Command = (
    Annotated[Serve, tyro.conf.subcommand("serve")] | Annotated[Exec, tyro.conf.subcommand("exec")]
)


class CommandError(RuntimeError):
    """A command that cannot go on; the message is what the user reads."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 1 and one line on standard error for bad input."""
    command = tyro.cli(Command, prog="hsql-env", args=arguments)  # type: ignore[call-overload]
    try:
        code = _exec(command) if isinstance(command, Exec) else _serve(command)
    except (CommandError, DatabaseError, RecordError, OSError) as error:
        print(f"hsql-env: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _exec(command: Exec) -> int:
    database = open_database(command.database)
    limits = Limits(wall_s=command.seconds, rows=command.rows)
    with SandboxPool(workers=1) as pool:
        execution = pool.execute(database.path, command.sql, limits, command.guard)
    print(json.dumps(execution_json(execution), ensure_ascii=False))
    return 0 if execution.ok else 1


def execution_json(execution: Execution) -> dict[str, object]:
    """Return an execution as plain JSON values; a blob becomes an object with its hexadecimal."""
    return {
        "ok": execution.ok,
        "columns": list(execution.columns),
        "rows": [[_json_value(cell) for cell in row] for row in execution.rows],
        "total_rows": execution.total_rows,
        "error": asdict(execution.failure) if execution.failure else None,
        "elapsed_ms": round(execution.elapsed_s * 1000, 3),
    }


def _json_value(cell: Value) -> object:
    return {"hex": cell.hex()} if isinstance(cell, bytes) else cell


def _serve(command: Serve) -> int:
    # Here, because the web framework takes longer to import than `exec` takes to run.
    from hsql_env.service.app import ServeError, serve

    config = EpisodeConfig(
        max_turns=command.max_turns,
        observation_chars=command.observation_chars,
        guard=command.guard,
        tool_limits=Limits(wall_s=command.tool_seconds),
        verify_limits=Limits(wall_s=command.verify_seconds, rows=100_000),
    )
    databases = {record.database_id: record for record in read_jsonl(command.databases, Database)}
    tasks = read_jsonl(command.tasks, Task)
    address = command.host, command.port
    try:
        serve(tasks, databases, *address, command.workers, config, command.stop_with_stdin)
    except ServeError as error:
        raise CommandError(str(error)) from error
    return 0

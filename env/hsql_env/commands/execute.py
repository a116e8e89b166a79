"""`hsql-env exec`: one statement through the sandbox, its outcome as JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass

import tyro

from hsql_env.commands import CommandError
from hsql_env.registry import open_database
from hsql_env.sandbox import Execution, GuardProfile, Limits, SandboxPool, Value
from hsql_env.sandbox.backend import is_server


@dataclass(frozen=True)
class Exec:
    """Run one statement through the sandbox; prints JSON, exit code 0 if it ran, 1 if not."""

    sql: tyro.conf.Positional[str]
    database: str
    """A SQLite file, or postgresql://... for a PostgreSQL database."""
    guard: GuardProfile = "default"
    seconds: float = 60.0
    """Wall limit."""
    rows: int = 50
    """Most rows to print."""


def run(command: Exec) -> int:
    """Print the outcome; return the exit code. Raises `CommandError` or `DatabaseError`."""
    if not 0 < command.seconds < math.inf:
        raise CommandError(f"--seconds must be above 0, not {command.seconds:g}")
    if command.rows < 0:
        raise CommandError(f"--rows must be at least 0, not {command.rows}")
    locator = command.database
    if not is_server(locator):
        locator = open_database(locator).path
    limits = Limits(wall_s=command.seconds, rows=command.rows)
    with SandboxPool(workers=1) as pool:
        execution = pool.execute(locator, command.sql, limits, command.guard)
    print_json(execution_json(execution))
    return 0 if execution.ok else 1


def print_json(value: object, indent: int | None = None) -> None:
    """Print a value as JSON; where standard output is not Unicode, in ASCII."""
    is_ascii = not (sys.stdout.encoding or "utf").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=is_ascii, allow_nan=False, indent=indent))


def execution_json(execution: Execution) -> dict[str, object]:
    """Return an execution as plain JSON values; see `cell_json` for the cells."""
    return {
        "ok": execution.ok,
        "columns": list(execution.columns),
        "rows": [[cell_json(cell) for cell in row] for row in execution.rows],
        "total_rows": execution.total_rows,
        "error": asdict(execution.failure) if execution.failure else None,
        "elapsed_ms": round(execution.elapsed_s * 1000, 3),
    }


def cell_json(cell: Value) -> object:
    """Return a cell as a JSON value.

    What JSON has no word for becomes an object: a blob `{"hex": ...}`, an infinity or NaN
    `{"float": ...}`.
    """
    if isinstance(cell, bytes):
        return {"hex": cell.hex()}
    if isinstance(cell, float) and not math.isfinite(cell):
        return {"float": repr(cell)}
    return cell

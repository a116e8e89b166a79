"""Running the four tools on one database: a checked call in, its observation out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hsql_env.harness.render import (
    SHOWN_ROWS,
    render_execution,
    render_schema,
    render_summary,
    render_tables,
)
from hsql_env.sandbox import Failure, GuardProfile, Limits, SandboxPool, Table


class InfrastructureError(RuntimeError):
    """The harness failed, not the policy: the episode is not a sample."""


@dataclass(frozen=True)
class Outcome:
    """What a call gave: the observation's text, and what the transcript keeps of it."""

    text: str
    summary: str = ""  # the end of the text, to be kept where the text is cut
    failure: Failure | None = None
    sql: str = ""
    capped: bool = False  # the result has more rows than were shown
    accepted: bool = False  # a submission that ran


@dataclass(frozen=True)
class Actions:
    """The tools of one episode."""

    pool: SandboxPool
    path: str
    limits: Limits
    guard: GuardProfile

    def run(self, tool: str, arguments: dict[str, Any]) -> Outcome:
        """Run a call that `check_call` accepted. Raises `InfrastructureError`."""
        if tool == "sql_list_tables":
            return self._list_tables()
        if tool == "sql_schema":
            return self._schema(arguments["tables"])
        if tool == "sql_exec":
            return self._exec(arguments["query"], arguments.get("limit") or SHOWN_ROWS)
        return self._submit(arguments["query"])

    def _list_tables(self) -> Outcome:
        tables = self._tables()
        return tables if isinstance(tables, Outcome) else Outcome(render_tables(tables))

    def _schema(self, names: list[str]) -> Outcome:
        tables = self._tables()
        return tables if isinstance(tables, Outcome) else Outcome(render_schema(tables, names))

    def _exec(self, sql: str, limit: int) -> Outcome:
        execution = self.pool.execute(self.path, sql, self.limits, self.guard)
        _raise_infrastructure(execution.failure)
        capped = execution.total_rows > min(limit, SHOWN_ROWS)
        text, summary = render_execution(execution, limit), render_summary(execution, limit)
        return Outcome(text, summary, execution.failure, sql, capped)

    def _submit(self, sql: str) -> Outcome:
        failure = self.pool.execute(self.path, sql, self.limits, self.guard).failure
        _raise_infrastructure(failure)
        if failure is not None:
            return Outcome(f"REJECTED: {failure.message}", failure=failure, sql=sql)
        return Outcome("ACCEPTED", sql=sql, accepted=True)

    def _tables(self) -> tuple[Table, ...] | Outcome:
        tables = self.pool.tables(self.path, self.limits.wall_s)
        if isinstance(tables, Failure):
            _raise_infrastructure(tables)
            return Outcome(f"Error: {tables.message}", failure=tables)
        return tables


def _raise_infrastructure(failure: Failure | None) -> None:
    if failure is not None and failure.kind == "infrastructure":
        raise InfrastructureError(failure.message)

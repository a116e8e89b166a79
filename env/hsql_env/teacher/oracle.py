"""A policy that submits each task's reference query: a test of the environment, not a teacher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Message, PublicTask, Task


class Oracle:
    """A `Policy` that runs the reference query and submits it. It must hold every task it plays."""

    name = "oracle"

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._queries = {task.public.task_id: task.hidden.oracle_sql for task in tasks}

    def begin(
        self, task: PublicTask, seed: int, messages: Sequence[Message], tools: Sequence[Any]
    ) -> OracleSession:
        """Return the session that acts in one episode. KeyError for an unknown task."""
        return OracleSession(self._queries[task.task_id])


class OracleSession:
    """Two turns: the query is executed, then submitted."""

    def __init__(self, sql: str) -> None:
        self._left = [tool_call_text(tool, {"query": sql}) for tool in ("sql_submit", "sql_exec")]

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        """The next turn's text; None after both."""
        return self._left.pop() if self._left else None

    def close(self) -> None:
        """Nothing is held."""

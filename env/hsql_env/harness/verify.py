"""The result half of the reward, equation (13): the submitted SQL's result against the oracle's."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from hsql_env.compare import compare
from hsql_env.harness.ties import find_ties
from hsql_env.records import HiddenTask
from hsql_env.sandbox import Execution, GuardProfile, Limits, SandboxPool
from hsql_env.sandbox.backend import dialect, identity
from hsql_env.sandbox.open import FileIdentity

_KNOWN_ORACLES = 4096
VERIFY_LIMITS = Limits(wall_s=30.0, rows=100_000)


class OracleError(RuntimeError):
    """The verifier itself could not run: the episode is not a sample."""


class Oracle(NamedTuple):
    """An oracle's result; where row order counts, `ties` numbers its rows."""

    result: Execution
    ties: tuple[int, ...]


_Key = tuple[str, FileIdentity, str, str, bool]


class Verifier:
    """Executes submitted and oracle SQL in the sandbox.

    Keeps the oracles' results by task and by the state of the database file (a file that changes in
    the middle of a verdict is not noticed).
    """

    def __init__(self, pool: SandboxPool, limits: Limits = VERIFY_LIMITS) -> None:
        self._pool = pool
        self._limits = limits
        self._lock = threading.Lock()
        self._oracles: OrderedDict[_Key, Oracle] = OrderedDict()

    def check(self, path: str, task: HiddenTask, sql: str, guard: GuardProfile = "default") -> bool:
        """Execute `sql` under the verifier's limits and return whether its result is right.

        A statement that fails, or whose result is too long to compare, is wrong, also where the
        oracle's result is empty. Raises `OracleError` when the oracle or the sandbox fails.
        """
        answer = self._pool.execute(path, sql, self._limits, guard)
        if answer.failure is not None and answer.failure.kind == "infrastructure":
            raise OracleError(answer.failure.message)
        oracle = self._oracle(path, task)
        return answer.complete and compare(
            oracle.result,
            answer,
            ordered=task.ordered,
            ties=oracle.ties,
            names_required=task.names_required,
            allow_empty=task.row_count == 0,
        )

    def _oracle(self, path: str, task: HiddenTask) -> Oracle:
        key = (path, _state(path), task.task_id, task.oracle_sql, task.ordered)
        with self._lock:
            known = self._oracles.get(key)
        if known is not None:
            return known
        result = self._pool.execute(path, task.oracle_sql, self._limits)
        if not result.complete:
            # The failure's kind and not its text, which can quote the hidden SQL.
            reason = result.failure.kind if result.failure else "its result is too long"
            raise OracleError(f"the oracle of task {task.task_id} did not run: {reason}")
        ties: tuple[int, ...] = ()
        if task.ordered:
            ties = find_ties(
                result, task.oracle_sql, lambda sql: self._rank(path, task, sql), dialect(path)
            )
        oracle = Oracle(result, ties)
        with self._lock:
            self._oracles[key] = oracle
            if len(self._oracles) > _KNOWN_ORACLES:
                self._oracles.popitem(last=False)
        return oracle

    def _rank(self, path: str, task: HiddenTask, sql: str) -> Execution:
        """Execute the query for the ties. Raises `OracleError`.

        Only SQL's own word that there is no such query means that no rows are ties: taken from a
        time-out or a lost worker, it would make right answers wrong for as long as it is kept.
        """
        ranked = self._pool.execute(path, sql, self._limits)
        if ranked.failure is not None and ranked.failure.kind != "sql_error":
            kind = ranked.failure.kind
            raise OracleError(f"the ties of task {task.task_id} could not be found: {kind}")
        return ranked


def _state(path: str) -> FileIdentity:
    try:
        return identity(path)
    except OSError as error:  # its text would show the path
        raise OracleError(f"the database file: {error.strerror or 'unreadable'}") from error

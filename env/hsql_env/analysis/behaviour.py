"""How a policy acts: the behaviour metrics of the paper (Table 8), each with its denominator named.

`right_after_error` is ours: immediate recovery also counts a success that answers wrongly.
A metric counts one thing in one trajectory, as (numerator, denominator); a corpus adds them up.
Episodes that the harness failed (`verdict.infrastructure`) are no samples and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hsql_env.records import Call, Trajectory

Count = tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """A share that carries its counts: `numerator` of `denominator` things called `of`."""

    numerator: int
    denominator: int
    of: str

    @property
    def value(self) -> float | None:
        """The share in [0, 1], or None where there was nothing to count."""
        return self.numerator / self.denominator if self.denominator else None

    def as_dict(self) -> dict[str, Any]:
        """The rate as `summary.json` stores it."""
        return {
            "value": self.value,
            "numerator": self.numerator,
            "denominator": self.denominator,
            "of": self.of,
        }


@dataclass(frozen=True)
class Metric:
    """One behaviour metric; `count` gives one trajectory's (numerator, denominator)."""

    label: str
    of: str
    better: str  # "higher" or "lower"
    count: Callable[[Trajectory], Count]


def executions(trajectory: Trajectory) -> list[Call]:
    """The `sql_exec` calls that reached the executor or its guard, malformed calls left out."""
    return [c for c in trajectory.calls if c.tool == "sql_exec" and c.outcome != "invalid"]


def statement(sql: str) -> str:
    """The SQL without surrounding space and trailing semicolons, for telling two texts apart."""
    return sql.strip().rstrip(";").rstrip()


def _accuracy(trajectory: Trajectory) -> Count:
    """Equation (14): a missing answer is a wrong one and stays in the denominator."""
    return int(trajectory.verdict.result_ok), 1


def _invalid(trajectory: Trajectory) -> Count:
    return int(any(call.outcome == "invalid" for call in trajectory.calls)), 1


def _errors(trajectory: Trajectory) -> Count:
    ran = executions(trajectory)
    return sum(call.outcome == "failed" for call in ran), len(ran)


def _recovery(trajectory: Trajectory) -> Count:
    """Failed executions whose next execution succeeds; an error never followed up counts as not."""
    ran = executions(trajectory)
    failed = sum(call.outcome == "failed" for call in ran)
    recovered = sum(a.outcome == "failed" and b.outcome == "ok" for a, b in pairwise(ran))
    return recovered, failed


def _right_after_error(trajectory: Trajectory) -> Count:
    """Of the trajectories with a failed execution, those whose answer is right in the end."""
    failed = any(call.outcome == "failed" for call in executions(trajectory))
    return int(failed and trajectory.verdict.result_ok), int(failed)


def _executed_before_submit(trajectory: Trajectory) -> Count:
    final = statement(trajectory.final_sql)
    ran = {statement(call.sql) for call in executions(trajectory) if call.outcome == "ok"}
    return int(trajectory.verdict.submitted and final in ran), 1


def _one_valid_submit(trajectory: Trajectory) -> Count:
    outcomes = [call.outcome for call in trajectory.calls if call.tool == "sql_submit"]
    return int(outcomes == ["ok"]), 1


def _violation(trajectory: Trajectory) -> Count:
    return int(not trajectory.verdict.strict_ok), 1


def _duplicate(trajectory: Trajectory) -> Count:
    return int(any(call.duplicate for call in trajectory.calls)), 1


METRICS: Mapping[str, Metric] = {
    "execution_accuracy": Metric("Execution accuracy", "trajectories", "higher", _accuracy),
    "invalid_call": Metric("With an invalid call", "trajectories", "lower", _invalid),
    "execution_error": Metric("SQL execution errors", "executions", "lower", _errors),
    "immediate_recovery": Metric("Immediate recovery", "errors", "higher", _recovery),
    "right_after_error": Metric(
        "Right in spite of an error", "trajectories with an error", "higher", _right_after_error
    ),
    "executed_before_submit": Metric(
        "Final SQL executed before submit", "trajectories", "higher", _executed_before_submit
    ),
    "one_valid_submit": Metric(
        "Exactly one submit, and it is valid", "trajectories", "higher", _one_valid_submit
    ),
    "strict_violation": Metric("Strict protocol violations", "trajectories", "lower", _violation),
    "duplicate_call": Metric("With a duplicate call", "trajectories", "lower", _duplicate),
}


def behaviour(trajectories: Iterable[Trajectory]) -> dict[str, Rate]:
    """Every metric over the trajectories that are samples, by name, in the order of `METRICS`."""
    samples = [t for t in trajectories if not t.verdict.infrastructure]
    return {name: _total(metric, samples) for name, metric in METRICS.items()}


def _total(metric: Metric, samples: list[Trajectory]) -> Rate:
    counts = [metric.count(sample) for sample in samples]
    return Rate(sum(n for n, _ in counts), sum(d for _, d in counts), metric.of)

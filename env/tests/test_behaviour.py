"""Behaviour metrics, counted by hand over five small trajectories."""

from __future__ import annotations

from typing import Any

import pytest

from hsql_env.analysis.behaviour import METRICS, Rate, behaviour
from hsql_env.records import Call, PublicTask, Trajectory, Verdict

GOOD = "SELECT 1"
BAD = "SELECT nosuch"


def exec_call(sql: str, outcome: str, **more: Any) -> Call:
    return Call(turn=1, tool="sql_exec", outcome=outcome, sql=sql, **more)  # type: ignore[arg-type]


def submit_call(sql: str, outcome: str) -> Call:
    return Call(turn=1, tool="sql_submit", outcome=outcome, sql=sql)  # type: ignore[arg-type]


def trajectory(
    *calls: Call, final_sql: str = "", result_ok: bool = False, strict_ok: bool = False, **more: Any
) -> Trajectory:
    verdict = Verdict(
        result_ok=result_ok,
        protocol_ok=bool(final_sql),
        strict_ok=strict_ok,
        reward=float(result_ok),
        submitted=bool(final_sql),
        **more,
    )
    return Trajectory(
        trajectory_id="x",
        task=PublicTask(task_id="t", database_id="d", question="?"),
        policy="p",
        seed=0,
        messages=(),
        calls=calls,
        turns=len(calls),
        final_sql=final_sql,
        terminated=bool(final_sql),
        truncated=not final_sql,
        verdict=verdict,
    )


CORPUS = [
    # An error, recovered at once; the semicolon does not make the submitted SQL another one.
    trajectory(
        exec_call(BAD, "failed"),
        exec_call(GOOD + " ;", "ok"),
        submit_call(GOOD, "ok"),
        final_sql=GOOD,
        result_ok=True,
        strict_ok=True,
    ),
    # Two errors in a row, then a success: one of two recovered. Submitted twice.
    trajectory(
        exec_call(BAD, "failed"),
        exec_call(BAD, "failed", duplicate=True),
        exec_call(GOOD, "ok"),
        submit_call(BAD, "failed"),
        submit_call(GOOD, "ok"),
        final_sql=GOOD,
        result_ok=True,
    ),
    # Submits what it never executed.
    trajectory(submit_call(GOOD, "ok"), final_sql=GOOD),
    # The only execution fails; then a turn that cannot be read; no submit.
    trajectory(exec_call(BAD, "failed"), Call(turn=2, tool="", outcome="invalid")),
    # Malformed arguments are an invalid call and no execution; the final SQL had failed before.
    trajectory(
        exec_call("", "invalid"),
        exec_call(BAD, "failed"),
        submit_call(BAD, "ok"),
        final_sql=BAD,
    ),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("execution_accuracy", Rate(2, 5, "trajectories")),
        ("invalid_call", Rate(2, 5, "trajectories")),
        ("execution_error", Rate(5, 7, "executions")),
        ("immediate_recovery", Rate(2, 5, "errors")),
        ("right_after_error", Rate(2, 4, "trajectories with an error")),
        ("executed_before_submit", Rate(2, 5, "trajectories")),
        ("one_valid_submit", Rate(3, 5, "trajectories")),
        ("strict_violation", Rate(4, 5, "trajectories")),
        ("duplicate_call", Rate(1, 5, "trajectories")),
    ],
)
def test_counts_of_the_corpus(name: str, expected: Rate) -> None:
    assert behaviour(CORPUS)[name] == expected


def test_an_episode_that_the_harness_failed_is_no_sample() -> None:
    failed = trajectory(exec_call(BAD, "failed"), infrastructure="worker lost")
    assert behaviour([*CORPUS, failed]) == behaviour(CORPUS)


def test_nothing_to_count_has_no_value() -> None:
    rates = behaviour([])
    assert list(rates) == list(METRICS)
    assert rates["immediate_recovery"].as_dict() == {
        "value": None,
        "numerator": 0,
        "denominator": 0,
        "of": "errors",
    }
    assert Rate(1, 4, "errors").value == 0.25

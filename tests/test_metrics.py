"""Metrics rows, progress lines and the final table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from hsql_jax.metrics import RunLog, final_table, read_metrics


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> tuple[Console, Callable[[], list[str]]]:
    out = io.StringIO()
    return Console(file=out, width=120), lambda: out.getvalue().splitlines()


def test_rows_hold_stage_step_seconds_and_values(tmp_path: Path) -> None:
    clock = Clock()
    log = RunLog(tmp_path, clock=clock)
    clock.now += 1.5
    log.write("sft", 3, {"loss": jnp.float32(0.25), "tokens": 1536})
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()] == [
        {"stage": "sft", "step": 3, "seconds": 1.5, "values": {"loss": 0.25, "tokens": 1536}}
    ]


def test_a_number_that_json_lacks_is_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("sft", 0, {"loss": float("nan"), "norm": float("inf"), "rate": 0.0})
    assert read_metrics(tmp_path)[0]["values"] == {"loss": None, "norm": None, "rate": 0.0}


def test_a_resumed_run_replaces_repeated_steps_and_a_torn_line(tmp_path: Path) -> None:
    first = RunLog(tmp_path)
    for step in range(3):
        first.write("sft", step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "step": 3, "val')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]

    second = RunLog(tmp_path)
    second.write("sft", 2, {"loss": 20.0})
    second.write("rl", 2, {"loss": 7.0})
    kept = [(row["stage"], row["step"], row["values"]["loss"]) for row in read_metrics(tmp_path)]
    assert kept == [("sft", 0, 0.0), ("sft", 1, 1.0), ("sft", 2, 20.0), ("rl", 2, 7.0)]


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_without_a_terminal_a_line_appears_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    clock = Clock()
    console, lines = plain_console()
    log = RunLog(tmp_path, console=console, clock=clock, plain_every_s=10.0)
    with log.stage("sft", total=40, unit="steps") as stage:
        for _ in range(40):
            clock.now += 0.5
            stage.advance(loss=0.125)
    assert lines() == [
        "sft: 20/40 steps, 2/s, 10 s, 10 s left  loss 0.125",
        "sft: 40/40 steps, 2/s, 20 s  loss 0.125",
    ]
    assert log.stage_seconds == {"sft": 20.0}


def test_the_rate_of_a_resumed_stage_counts_its_own_work(tmp_path: Path) -> None:
    clock = Clock()
    console, lines = plain_console()
    log = RunLog(tmp_path, console=console, clock=clock)
    with log.stage("tasks", total=None, unit="tasks", done=1000) as stage:
        clock.now += 2.0
        stage.advance(500)
    assert stage.done == 1500
    assert lines() == ["tasks: 1500 tasks, 250/s, 2 s"]


def test_a_stage_that_is_cut_has_no_time(tmp_path: Path) -> None:
    console, _ = plain_console()
    log = RunLog(tmp_path, console=console)
    with pytest.raises(KeyboardInterrupt), log.stage("rl", total=2, unit="iterations"):
        raise KeyboardInterrupt
    assert log.stage_seconds == {}


def test_on_a_terminal_the_bar_shows_count_rate_and_values(tmp_path: Path) -> None:
    out = io.StringIO()
    log = RunLog(tmp_path, console=Console(file=out, force_terminal=True, width=140))
    with log.stage("sft", total=4, unit="steps") as outer:
        with log.stage("eval", total=1, unit="episodes") as inner:
            inner.advance(note="[seen]")
        outer.advance(4, loss=1.5)
    shown = out.getvalue()
    assert "4/4" in shown
    assert "steps/s" in shown
    assert "loss 1.5" in shown
    assert "note [seen]" in shown


def test_the_final_table_shows_each_stage_split_and_decoding() -> None:
    cell = {"accuracy": 0.5, "tasks": 128, "interval": [0.414, 0.586]}
    summary = {
        "stages": {
            "base": {"seen": {"greedy": cell | {"accuracy": 0.0, "interval": [0.0, 0.029]}}},
            "rl": {
                "unseen": {
                    "greedy": cell,
                    "t0.5": cell | {"accuracy": 0.25},
                    "behaviour": {
                        "invalid_calls": {"value": 0.0123},
                        "immediate_recovery": {"value": None},
                    },
                    "behaviour_t1": {"invalid_calls": {"value": 0.5}},
                }
            },
        }
    }
    console, lines = plain_console()
    console.print(final_table(summary))
    cells = [[part.strip() for part in line.split("│")[1:-1]] for line in lines() if "│" in line]
    assert cells[:2] == [
        ["base", "seen", "0.000 [0.000, 0.029] 128", "-"],
        ["rl", "unseen", "0.500 [0.414, 0.586] 128", "0.250 [0.414, 0.586] 128"],
    ]
    assert cells[2:] == [
        ["invalid calls", "-", "1.2%"],
        ["immediate recovery", "-", "-"],
        ["invalid calls", "-", "50.0%"],
    ]
    assert any("greedy" in line and "T=0.5" in line for line in lines())

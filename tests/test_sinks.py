"""Metrics that leave by TensorBoard's files and Weights & Biases."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from events import read_events

from hsql_jax.errors import UserError
from hsql_jax.metrics import RunLog, read_metrics
from hsql_jax.sinks import LogConfig, check_sinks, open_sinks

# As much of the library as is used; every call becomes a line of calls.jsonl beside the module.
FAKE_WANDB = """
import json, pathlib, types

def note(call, values):
    with pathlib.Path(__file__).with_name("calls.jsonl").open("a") as file:
        file.write(json.dumps([call, values]) + "\\n")

class errors:
    class Error(Exception):
        pass

class Settings(dict):
    pass

class Run:
    def __init__(self, id):
        self.id = id
    def define_metric(self, name, step_metric):
        note("define", {"name": name, "over": step_metric})
    def log(self, values):
        note("log", values)
    def finish(self):
        note("finish", {})

def init(**given):
    if given["project"] == "locked":
        raise errors.Error("no key:\\nlog in first")
    note("init", given)
    return Run(given["id"] or "run7")
"""


@dataclass(frozen=True)
class Config:
    """A run's config."""

    steps: int = 4


def write_run(run_dir: Path, config: LogConfig, steps: range, offset: float) -> None:
    sinks = open_sinks(config, run_dir, Config())
    log = RunLog(run_dir, sinks=sinks)
    for step in steps:
        log.write("sft", step, {"loss": offset + step, "norm": float("nan") if step == 2 else 0.5})
    log.close()


def test_a_resumed_run_continues_tensorboards_curves(tmp_path: Path) -> None:
    write_run(tmp_path, LogConfig(), range(1, 5), 0.0)
    write_run(tmp_path, LogConfig(), range(3, 6), 10.0)
    curves = read_events(tmp_path / "tensorboard" / "sft")
    assert curves["loss"] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert curves["norm"] == [(step, 0.5) for step in (1, 3, 4, 5)]
    assert curves["loss"] == [(r["step"], r["values"]["loss"]) for r in read_metrics(tmp_path)]


def test_stages_do_not_end_each_others_curves(tmp_path: Path) -> None:
    log = RunLog(tmp_path, sinks=open_sinks(LogConfig(), tmp_path, Config()))
    log.write("sft", 5, {"loss": 2.0})
    log.write("rl", 1, {"reward": 0.25})
    log.close()
    assert read_events(tmp_path / "tensorboard" / "sft") == {"loss": [(5, 2.0)]}
    assert read_events(tmp_path / "tensorboard" / "rl") == {"reward": [(1, 0.25)]}


def test_a_killed_run_has_every_point_in_its_file(tmp_path: Path) -> None:
    log = RunLog(tmp_path, sinks=open_sinks(LogConfig(), tmp_path, Config()))
    log.write("sft", 1, {"loss": 2.0})
    assert read_events(tmp_path / "tensorboard" / "sft") == {"loss": [(1, 2.0)]}
    log.close()


def test_nothing_is_written_that_is_not_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, LogConfig(tensorboard=False), range(1, 3), 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a library `wandb` that notes its calls."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return folder


def test_wandb_gets_every_stage_over_its_own_steps(library: Path, tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", LogConfig(tensorboard=False, wandb="sql")
    run_dir.mkdir()
    write_run(run_dir, config, range(1, 3), 0.0)
    (name, given), *rest = calls(library)
    assert (name, given["project"], given["name"], given["id"]) == ("init", "sql", "run", None)
    assert given["config"] == {"steps": 4}
    assert rest == [
        ["define", {"name": "sft/*", "over": "sft/step"}],
        ["log", {"sft/loss": 1.0, "sft/norm": 0.5, "sft/step": 1}],
        ["log", {"sft/loss": 2.0, "sft/step": 2}],
        ["finish", {}],
    ]
    write_run(run_dir, config, range(3, 4), 0.0)
    assert calls(library)[5][1]["id"] == "run7"


def test_wandbs_own_refusal_is_one_line(library: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^log\.wandb locked: no key: log in first$"):
        open_sinks(LogConfig(wandb="locked"), tmp_path, Config())


def test_wandb_is_needed_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_sinks(LogConfig())
    with pytest.raises(UserError, match=r"wandb is not installed; pip install 'hsql-jax\[wandb\]'"):
        check_sinks(LogConfig(wandb="sql"))

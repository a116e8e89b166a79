"""What the README says of the service is what the service has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from hsql_env.cli import Exec, Inspect, OpenEnv, Play, Serve
from hsql_env.service.log import Event
from hsql_env.service.metrics import Metrics
from hsql_env.service.problems import problem_reply
from hsql_env.service.wire import ProblemKind

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_options_and_their_defaults() -> None:
    defaults = {field.name.replace("_", "-"): field.default for field in fields(Serve)}
    rows = re.findall(r"^\| `--([a-z-]+)(?: \w+)?` \| (\S+) \|", README, re.MULTILINE)
    assert len(rows) == 10
    for option, default in rows:
        known = defaults[option]
        assert default == ("none" if known is None else str(known).removesuffix(".0"))
    commands = (Serve, OpenEnv, Play, Exec, Inspect)
    known_options = {f.name.replace("_", "-") for command in commands for f in fields(command)}
    assert {*re.findall(r"--([a-z][a-z-]+)", README)} - known_options == {"help"}


def test_kinds_and_their_statuses() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([0-9]{3})", README, re.MULTILINE))
    kinds: tuple[ProblemKind, ...] = get_args(ProblemKind)
    assert rows == {kind: str(problem_reply(kind, "").status_code) for kind in kinds}


def test_metrics_and_events() -> None:
    names = re.findall(r"^# TYPE (\w+) ", Metrics().text().decode(), re.MULTILINE)
    assert len(names) > 8
    for name in names:
        if not name.endswith("_created"):
            stem, _, last = name.removesuffix("_total").rpartition("_")
            assert name.removesuffix("_total") in README or (stem in README and last in README)
    assert [event for event in get_args(Event) if f"`{event}`" not in README] == []

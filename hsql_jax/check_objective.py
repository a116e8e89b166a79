"""`hsql check-objective FILE.py:FUNCTION`: whether an objective holds to the contract of all."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tyro

from hsql_jax.config import option
from hsql_jax.errors import UserError
from hsql_jax.objectives import Objective, resolve
from hsql_jax.objectives.contract import CHECKS, Broken


@dataclass(frozen=True)
class CheckConfig:
    """Which objective to check."""

    objective: tyro.conf.Positional[str]  # a name such as dapo, or FILE.py:FUNCTION
    json: bool = option(False)  # print the findings as JSON


@dataclass(frozen=True)
class Finding:
    """One check's outcome; `broken` says why it failed, and is empty where it held."""

    check: str
    holds: str  # what the check asks for
    broken: str


def main(config: CheckConfig) -> None:
    """Print each check and its outcome; `UserError`, after that, when one failed."""
    findings = check(resolve(config.objective))
    if config.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        width = max(len(one.check) for one in findings)
        for one in findings:
            outcome = "BROKEN" if one.broken else "ok"
            print(f"{outcome:<6}  {one.check:<{width}}  {one.holds}")
            if one.broken:
                print(f"{'':<{width + 10}}{one.broken}")
    if failed := [finding.check for finding in findings if finding.broken]:
        raise UserError(f"{config.objective}: fails {', '.join(failed)}; see the reasons above")


def check(objective: Objective) -> list[Finding]:
    """The outcome of every check; one that ends with an error of the objective's own fails."""
    findings = []
    for one in CHECKS:
        broken = ""
        try:
            one(objective)
        except Broken as reason:
            broken = str(reason)
        except Exception as error:  # whatever a user's function may raise
            broken = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        holds = (one.__doc__ or "").strip().rstrip(".")
        findings.append(Finding(one.__name__.replace("_", "-"), holds, broken))
    return findings

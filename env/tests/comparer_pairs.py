"""The comparer against recorded verdicts on pairs of a gold query and a model's query.

Prints a table of every disagreement by the rule that makes it. Pairs are named by their line in
the shared file. `python comparer_pairs.py > comparer_pairs.md` writes the committed table.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared_data import FOLDER

from hsql_env.compare import compare
from hsql_env.harness.ties import find_ties
from hsql_env.sandbox import Execution, Limits, SandboxPool

PAIRS = "comparer_pairs/model_predictions_with_verdicts.jsonl"
TABLE = Path(__file__).with_suffix(".md")
LIMITS = Limits(wall_s=30.0, rows=100_000)
VERDICTS = {
    "execution_accuracy": "exact",
    "bird_execution_accuracy": "set",
    "subset_non_empty_execution_accuracy": "subset",
}
UNEXPLAINED = "unexplained"


class Judged(NamedTuple):
    """One pair: our verdict, and the rule behind each disagreement with a recorded one."""

    line: int
    ours: bool
    recorded: dict[str, bool]
    rules: dict[str, str]


def judge_all(folder: Path) -> tuple[list[Judged], list[int]]:
    """Return the judged pairs, and the lines of those whose database is not at hand."""
    judged, missing = [], []
    with SandboxPool(workers=1) as pool:
        for line, record in _records(folder / PAIRS):
            name = record["db_id"]
            database = folder / "spider1_dev" / "database" / name / f"{name}.sqlite"
            if database.exists():
                judged.append(_judge(line, record, str(database), pool))
            else:
                missing.append(line)
    return judged, missing


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield number, json.loads(line)


def _judge(line: int, record: dict[str, Any], database: str, pool: SandboxPool) -> Judged:
    gold_sql = record["gold_sql"][0]
    gold = pool.execute(database, gold_sql, LIMITS)
    answer = pool.execute(database, record["predicted_sql"], LIMITS)
    assert gold.complete
    ordered = "order by" in gold_sql.lower()
    ties = find_ties(gold, gold_sql, lambda sql: pool.execute(database, sql, LIMITS))
    ours = answer.complete and compare(gold, answer, ordered, allow_empty=True, ties=ties)
    recorded = {VERDICTS[key]: record["metrics"][key] == 1 for key in VERDICTS}
    failed_there = record["metrics"]["df_error"] == 1
    rules = {
        name: _rule(gold, answer, ordered, ours, failed_there)
        for name, verdict in recorded.items()
        if verdict != ours
    }
    return Judged(line, ours, recorded, rules)


def _rule(gold: Execution, answer: Execution, ordered: bool, ours: bool, failed_there: bool) -> str:
    """Return the rule by which our verdict differs from a recorded one."""
    if ours:
        return (
            "the recorded run of the answer failed; here it runs" if failed_there else UNEXPLAINED
        )
    if answer.failure is not None:
        return f"the guard: {answer.failure.kind}"
    if len(answer.columns) != len(gold.columns):
        return "the number of columns must be the gold's"
    if set(gold.rows) == set(answer.rows) and Counter(gold.rows) != Counter(answer.rows):
        return "rows are a multiset: repetitions count"
    if Counter(gold.rows) == Counter(answer.rows) and ordered:
        return "row order counts where the gold orders"
    return UNEXPLAINED


def render(judged: list[Judged], missing: list[int]) -> str:
    """Return the table as Markdown."""
    right = sum(pair.ours for pair in judged)
    lines = [
        "# The comparer against recorded verdicts",
        "",
        f"{len(judged)} pairs compared, {len(missing)} left out for want of their database "
        f"(lines {_lines(missing)}). Written by `comparer_pairs.py`; a pair is its line in the "
        "shared file. Recorded verdicts: `exact` (one answer), `set` (rows as a set), `subset` "
        "(the gold's columns are among the answer's).",
        "",
        f"Right by our rules: {right} of {len(judged)}.",
        "",
        "| recorded | ours right, recorded right | both wrong | ours right, recorded wrong "
        "| ours wrong, recorded right |",
        "|---|---|---|---|---|",
    ]
    for name in VERDICTS.values():
        counts = Counter((pair.ours, pair.recorded[name]) for pair in judged)
        cells = [
            counts[pair] for pair in ((True, True), (False, False), (True, False), (False, True))
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| recorded | ours | the rule | pairs | lines |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for pair in judged:
        for name, rule in pair.rules.items():
            groups[name, "right" if pair.ours else "wrong", rule].append(pair.line)
    for (name, ours, rule), found in sorted(groups.items()):
        lines.append(f"| {name} | {ours} | {rule} | {len(found)} | {_lines(found)} |")
    return "\n".join(lines) + "\n"


def _lines(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) or "none"


if __name__ == "__main__":
    print(render(*judge_all(FOLDER)), end="")

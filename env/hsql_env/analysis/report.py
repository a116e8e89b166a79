"""The self-contained HTML report of a run: no script, no font, no address outside the file.

`render_report` reads plain data, so that a report can be made again from a run folder:

    summary  {"stages": {stage: {split: {decoding: {"accuracy", "tasks", "interval": [lo, hi]},
                                         "behaviour": {metric: Rate.as_dict()}}}},
              "changes": [{"before", "after", "split", "decoding", "mean", "low", "high"}],
              "wall_seconds": {stage of the run: seconds} or seconds, "seed": int,
              "data": facts, "overlap": facts}
    facts    {name: number or text, or {name: number}, or {row: {column: number}}}
    series   the rows of metrics.jsonl, {"stage", "step", "values": {name: number}}; names in CURVES
    episodes {stage: trajectories}

A part that the summary lacks is left out of the report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from hsql_env.analysis.behaviour import METRICS
from hsql_env.analysis.charts import Point, bars, interval, line_chart
from hsql_env.analysis.episodes import render_episode
from hsql_env.analysis.markup import Markup, duration, join, label, number, percent, table, tag
from hsql_env.analysis.stats import significance_text
from hsql_env.records import Trajectory

Facts = Mapping[str, Any]

STAGES = {
    "teacher": "Scripted bootstrap teacher, which reads each task's blueprint",
    "warmup": "Warm-up",
    "base": "Base",
    "sft": "SFT",
    "corrections": "Corrections",
    "refine": "SFT with corrections",
    "rl": "SFT + RL",
}
SPLITS = {"unseen": "Unseen databases", "seen": "Seen databases"}
CURVES = {
    "loss": "Loss",
    "reward": "Mean reward",
    "accuracy": "Accuracy",
    "tokens_per_s": "Tokens per second",
}
FOOTNOTE = "95 % intervals: Wilson score for accuracies, bootstrap paired by task for changes."


def render_report(
    summary: Facts,
    series: Sequence[Mapping[str, Any]],
    episodes: Mapping[str, Sequence[Trajectory]],
    title: str = "A SQL agent, trained and measured",
) -> str:
    """Return the report as one HTML page; every text of the input is escaped."""
    stages: Facts = summary.get("stages", {})
    parts = {
        "Accuracy": _accuracy(stages),
        "Changes": _changes(summary.get("changes", ()), summary.get("rl_stopped", "")),
        "Behaviour": _behaviour(stages),
        "Learning": _learning(series),
        "Data": _facts(summary.get("data", {})),
        "Held-out overlap": _overlap(summary.get("overlap", {})),
        "Time": _time(summary.get("wall_seconds", {})),
        "Episodes": _episodes(episodes),
    }
    shown = {name: part for name, part in parts.items() if part}
    body = [
        _header(title, summary, shown),
        tag("main", *(_section(name, part) for name, part in shown.items())),
        tag("footer", FOOTNOTE),
    ]
    return "<!doctype html>\n" + tag("html", _head(title), tag("body", *body), lang="en") + "\n"


def _head(title: str) -> Markup:
    style = files("hsql_env.analysis").joinpath("report.css").read_text(encoding="utf-8")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )


def _header(title: str, summary: Facts, shown: Iterable[str]) -> Markup:
    wall = summary.get("wall_seconds", {})
    total = sum(wall.values()) if isinstance(wall, Mapping) else wall
    facts = [f"seed {summary['seed']}"] if "seed" in summary else []
    facts += [f"{duration(total)} in all"] if total else []
    links = [tag("a", name, href=f"#{_anchor(name)}") for name in shown]
    return tag(
        "header",
        tag("h1", title),
        tag("p", " · ".join(facts), class_="facts") if facts else None,
        _headline(summary.get("stages", {})),
        tag("nav", *links, aria_label="Sections"),
    )


def _headline(stages: Facts) -> Markup | None:
    """One tile a stage: greedy accuracy on the split that says most, the unseen one."""
    split = next((s for s in SPLITS if any(s in stage for stage in stages.values())), "")
    scores = {name: stage.get(split, {}).get("greedy") for name, stage in stages.items()}
    tiles = [_tile(STAGES.get(name, name), score) for name, score in scores.items() if score]
    if not tiles:
        return None
    caption = f"Execution accuracy, greedy, {SPLITS[split].lower()}"
    return tag("div", tag("p", caption), tag("div", *tiles, class_="tiles"), class_="headline")


def _tile(name: str, score: Facts) -> Markup:
    low, high = score["interval"]
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("strong", percent(score["accuracy"])),
        tag("span", f"{percent(low)} to {percent(high)}, {number(score['tasks'])} tasks"),
        class_="tile",
    )


def _section(name: str, part: Markup) -> Markup:
    return tag("section", tag("h2", name), part, id=_anchor(name))


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _accuracy(stages: Facts) -> Markup:
    """The final table: a block a split, a row a stage and decoding, with interval and tasks."""
    blocks = []
    for split in _keys(stages, SPLITS):
        rows = list(_accuracy_rows(stages, split))
        head = ("Stage", "Decoding", "Accuracy", "0 to 100 %", "95 % interval", "Tasks")
        blocks.append(table(head, rows, SPLITS.get(split, label(split))))
    return join(blocks)


def _accuracy_rows(stages: Facts, split: str) -> Iterator[Sequence[object]]:
    for stage, splits in stages.items():
        scores = splits.get(split, {})
        decodings = [name for name, score in scores.items() if "accuracy" in score]
        ordered = sorted(decodings, key=lambda d: (d != "greedy", d))
        for i, decoding in enumerate(ordered):
            score = scores[decoding]
            low, high = score["interval"]
            yield (
                tag("span", STAGES.get(stage, label(stage)), class_="again" if i else None),
                _decoding(decoding),
                tag("strong", percent(score["accuracy"])),
                interval(score["accuracy"], low, high),
                f"{percent(low)} – {percent(high)}",
                number(score["tasks"]),
            )


def _decoding(key: str) -> str:
    """A way of decoding in words: `greedy`, or the temperature of `t1`, `t05` and `t0.5`."""
    match = re.fullmatch(r"t(\d)\.?(\d*)", key)
    return f"T = {match[1]}.{match[2] or 0}" if match else label(key)


def _changes(changes: Iterable[Facts], rl_stopped: str = "") -> Markup | None:
    """Paired changes between two stages on the same tasks, and what they allow to claim.

    `rl_stopped` says why a guard ended RL; the policy evaluated in its place is SFT's.
    """
    rows = [
        (
            f"{STAGES.get(c['before'], c['before'])} → {STAGES.get(c['after'], c['after'])}",
            SPLITS.get(c["split"], c["split"]),
            _decoding(c["decoding"]),
            tag("strong", _points(c["mean"])),
            f"{_points(c['low'])} to {_points(c['high'])}",
            _claim(significance_text(c["mean"], c["low"], c["high"])),
        )
        for c in changes
    ]
    head = ("Stages", "Split", "Decoding", "Change, points", "95 % interval", "Reading")
    if not rows:
        return None
    note = f"RL was stopped: {rl_stopped}. Its rows are the SFT policy's."
    paired = table(head, rows, "Paired by task, bootstrap interval")
    return join([tag("p", note) if rl_stopped else None, paired])


def _claim(words: str) -> Markup:
    kind = {"significant gain": "good", "significant loss": "bad"}.get(words, "plain")
    return tag("span", words, class_=f"badge {kind}")


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _behaviour(stages: Facts) -> Markup | None:
    """Every behaviour metric, a column a stage and split, each with its counts."""
    greedy = _behaviour_table(stages, "behaviour", "Behaviour on held-out tasks, greedy")
    sampled = _behaviour_table(stages, "behaviour_t1", "Behaviour on held-out tasks, T = 1")
    return join([greedy, sampled]) if greedy or sampled else None


def _behaviour_table(stages: Facts, key: str, caption: str) -> Markup | None:
    columns = {
        f"{STAGES.get(stage, label(stage))}, {split}": splits[split][key]
        for split in _keys(stages, SPLITS)
        for stage, splits in stages.items()
        if key in splits.get(split, {})
    }
    rows = [
        (_metric_name(name), metric.of, *(_rate(rates.get(name)) for rates in columns.values()))
        for name, metric in METRICS.items()
    ]
    head = ("Metric", "Share of", *columns)
    return table(head, rows, caption) if columns else None


def _metric_name(name: str) -> Markup:
    metric = METRICS[name]
    arrow = "↑" if metric.better == "higher" else "↓"
    return join([metric.label, " ", tag("abbr", arrow, title=f"{metric.better} is better")])


def _rate(rate: Facts | None) -> Markup:
    if not rate:
        return tag("span", "–")
    counts = f"{number(rate['numerator'])} / {number(rate['denominator'])}"
    return join([tag("strong", percent(rate["value"])), tag("small", counts)])


def _learning(series: Sequence[Mapping[str, Any]]) -> Markup:
    """A row of curves a stage, in the order in which the stages were run."""
    rows = []
    for stage in dict.fromkeys(str(record.get("stage", "")) for record in series):
        mine = [record for record in series if record.get("stage") == stage]
        curves = ((name, _points_of(mine, key)) for key, name in CURVES.items())
        charts = [line_chart(name, points) for name, points in curves if len(points) > 1]
        if charts:
            heading = tag("h3", STAGES.get(stage, label(stage)))
            rows.append(join([heading, tag("div", *charts, class_="grid")]))
    return join(rows)


def _points_of(records: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """The finite (step, value) pairs of one metric, by step; a repeated step keeps its last."""
    values = {float(record["step"]): record["values"].get(key) for record in records}
    return sorted((step, float(value)) for step, value in values.items() if _finite(value))


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _facts(facts: Facts) -> Markup:
    """Plain facts as a list, counts by name as bars, and tables of counts as tables."""
    plain = {k: v for k, v in facts.items() if not isinstance(v, Mapping)}
    counts = {k: v for k, v in facts.items() if isinstance(v, Mapping) and not _nested(v)}
    nested = {k: v for k, v in facts.items() if isinstance(v, Mapping) and _nested(v)}
    cards = [bars({label(k): n for k, n in v.items()}, label(key)) for key, v in counts.items()]
    return join(
        [
            _list(plain) if plain else None,
            tag("div", *cards, class_="grid") if cards else None,
            *(_matrix(label(key), rows) for key, rows in nested.items()),
        ]
    )


def _nested(facts: Facts) -> bool:
    return any(isinstance(value, Mapping) for value in facts.values())


def _list(facts: Facts) -> Markup:
    pairs = []
    for key, value in facts.items():
        kind = None if isinstance(value, int | float) else "words"
        pairs.append(tag("div", tag("dt", label(key)), tag("dd", _show(value), class_=kind)))
    return tag("dl", *pairs)


def _matrix(caption: str, rows: Mapping[str, Facts]) -> Markup:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [
        (label(name), *(_show(row.get(c, "–")) for c in columns)) for name, row in rows.items()
    ]
    return table(("", *map(label, columns)), cells, caption)


def _show(value: object) -> str:
    """A fact as text: numbers briefly, lists by comma, everything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _overlap(overlap: Facts) -> Markup | None:
    if not overlap:
        return None
    note = "SQL is compared with whitespace and literals normalised."
    return join([tag("p", note, class_="facts"), _facts(overlap)])


def _time(wall: Facts | float) -> Markup | None:
    if not isinstance(wall, Mapping) or not wall:
        return None
    seconds = {label(stage): value for stage, value in wall.items()}
    shown = {stage: duration(value) for stage, value in seconds.items()}
    return bars(seconds, "Wall time by stage", shown)


def _episodes(episodes: Mapping[str, Sequence[Trajectory]]) -> Markup:
    parts = []
    for stage, trajectories in episodes.items():
        if trajectories:
            parts.append(tag("h3", STAGES.get(stage, label(stage))))
            parts += [render_episode(trajectory) for trajectory in trajectories]
    return join(parts)


def _keys(stages: Facts, known: Mapping[str, str]) -> list[str]:
    """The splits that any stage has, known ones first."""
    found = {split: None for splits in stages.values() for split in splits}
    return sorted(found, key=_order(known))


def _order(known: Mapping[str, str]) -> Callable[[str], int]:
    """A sort key: the order of `known`, then everything else as it came."""
    places = {key: place for place, key in enumerate(known)}
    return lambda key: places.get(key, len(places))

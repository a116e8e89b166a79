"""What a run shows and keeps: progress on the console, metrics as JSON Lines, the final table."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import ProgressColumn as _ProgressColumn
from rich.table import Table
from rich.text import Text

from hsql_jax.sinks import Sink

METRICS_FILE = "metrics.jsonl"
PLAIN_WIDTH = 120  # columns, where the output is no terminal and has no width of its own


class RunLog:
    """The console and the metrics file of one run, and the `sinks` that get its metrics too.

    With `keep=False` nothing is written: one process of a run has the file. `clock` gives seconds;
    where the console is no terminal a stage prints a line every `plain_every_s` seconds instead of
    a bar.
    """

    def __init__(
        self,
        run_dir: Path,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        plain_every_s: float = 10.0,
        keep: bool = True,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.console = console if console is not None else _console()
        self.stage_seconds: dict[str, float] = {}
        self._clock = clock
        self._plain_every_s = plain_every_s
        self._start = clock()
        self._keep, self._path = keep, run_dir / METRICS_FILE
        self._sinks = sinks
        if keep:
            run_dir.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(self._path)

    def print(self, message: RenderableType) -> None:
        """Show a line, or anything rich can show, above the bars."""
        self.console.print(message)

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one row of metrics; `seconds` is since this log was opened.

        Values are numbers or zero-dimensional arrays. JSON has no NaN or infinity: those are
        written as null, and no sink gets them.
        """
        if not self._keep:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        row = {
            "stage": stage,
            "step": step,
            "seconds": round(self._clock() - self._start, 3),
            "values": numbers,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        finite = {name: value for name, value in numbers.items() if value is not None}
        for sink in self._sinks:
            sink.write(stage, step, finite)

    def close(self) -> None:
        """Close the sinks; without any there is nothing to close."""
        for sink in self._sinks:
            sink.close()

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        """Show the progress of a stage of `total` units, `done` of them by an earlier run.

        The seconds it took are in `stage_seconds[name]` afterwards; a stage that is cut by an
        exception is closed on the console, and has no time.
        """
        display: _Display = (
            _Bar(self.console, name, total, unit, done)
            if self.console.is_terminal
            else _Lines(self.console, name, total, unit, done, self._clock, self._plain_every_s)
        )
        begin = self._clock()
        try:
            yield Stage(display, done, self._clock)
            self.stage_seconds[name] = self._clock() - begin
        finally:
            display.close()


class Stage:
    """The handle that `RunLog.stage` gives: counts units and shows values beside them."""

    def __init__(self, display: _Display, done: int, clock: Callable[[], float]) -> None:
        self.done = self._first = done
        self._display, self._clock = display, clock
        self._begin = clock()

    @property
    def rate(self) -> float:
        """Units a second since the stage began here."""
        seconds = self._clock() - self._begin
        return (self.done - self._first) / seconds if seconds > 0 else 0.0

    def advance(self, units: int = 1, **values: Any) -> None:
        """Count `units` more as done and show `values` (numbers or short texts)."""
        self.done += units
        self._display.update(self.done, _shown(values))


class _Display(Protocol):
    def update(self, done: int, note: str) -> None: ...

    def close(self) -> None: ...


class _Rate(_ProgressColumn):
    """Units a second, over the last moments while running and over the whole once finished."""

    def render(self, task: Task) -> Text:
        whole = (task.completed - task.fields["first"]) / task.elapsed if task.elapsed else 0.0
        speed = whole if task.finished or task.speed is None else task.speed
        return Text(f"{_rate(speed)} {task.fields['unit']}/s")


class _Bar:
    """Progress on a terminal."""

    def __init__(self, console: Console, name: str, total: int | None, unit: str, done: int):
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(
            name, total=total, completed=done, first=done, unit=unit, note=""
        )
        self._progress.start()

    def update(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """Progress in a log file or a pipe: a line now and then, and one at the end."""

    def __init__(
        self,
        console: Console,
        name: str,
        total: int | None,
        unit: str,
        done: int,
        clock: Callable[[], float],
        every_s: float,
    ) -> None:
        self._console, self._name, self._total, self._unit = console, name, total, unit
        self._first, self._done, self._note = done, done, ""
        self._shown = -1  # what the last line said
        self._clock, self._every_s = clock, every_s
        self._begin = self._last = clock()

    def update(self, done: int, note: str) -> None:
        self._done, self._note = done, note
        if self._clock() - self._last >= self._every_s:
            self._last = self._clock()
            self._show()

    def close(self) -> None:
        if self._shown != self._done:
            self._show()

    def _show(self) -> None:
        self._shown = self._done
        seconds = self._clock() - self._begin
        speed = (self._done - self._first) / seconds if seconds > 0 else 0.0
        count = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
        parts = [f"{count} {self._unit}", f"{_rate(speed)}/s", f"{seconds:.0f} s"]
        if self._total is not None and speed > 0 and self._done < self._total:
            parts.append(f"{(self._total - self._done) / speed:.0f} s left")
        line = f"{self._name}: " + ", ".join(parts) + (f"  {self._note}" if self._note else "")
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run in the order written; of a step run twice (a resume), the later row."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # a last line without an end was cut while being written
            row = json.loads(line)
            rows.pop((row["stage"], row["step"]), None)
            rows[row["stage"], row["step"]] = row
    return list(rows.values())


def final_table(summary: Mapping[str, Any]) -> Group:
    """The tables that close a run, of the `stages` of its summary (see `summary.json`).

    First the accuracy of every stage and split with its interval, a column for each way of
    decoding; then the behaviour metrics, greedy and at temperature 1 where there are any. Their
    `value` is None where the denominator is empty.
    """
    splits = [
        (stage, split, values)
        for stage, by_split in summary["stages"].items()
        for split, values in by_split.items()
    ]
    tables = [_accuracy_table(splits)]
    for key, title in (("behaviour", "Behaviour, greedy"), ("behaviour_t1", "Behaviour, T=1")):
        if any(key in values for *_, values in splits):
            tables.append(_behaviour_table(splits, key, title))
    return Group(*tables)


_Splits = Sequence[tuple[str, str, Mapping[str, Any]]]


def _accuracy_table(splits: _Splits) -> Table:
    modes = dict.fromkeys(
        mode for *_, values in splits for mode in values if "accuracy" in values[mode]
    )
    table = Table(title="Execution accuracy, [95 % interval], tasks", title_justify="left")
    table.add_column("stage")
    table.add_column("databases")
    for mode in modes:
        table.add_column(mode if mode == "greedy" else f"T={mode.removeprefix('t')}")
    for stage, split, values in splits:
        table.add_row(stage, split, *(_accuracy(values.get(mode)) for mode in modes))
    return table


def _accuracy(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["interval"]
    return f"{cell['accuracy']:.3f} [{low:.3f}, {high:.3f}] {cell['tasks']}"


def _behaviour_table(splits: _Splits, key: str, title: str) -> Table:
    names = dict.fromkeys(name for *_, values in splits for name in values.get(key, {}))
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    for stage, split, _ in splits:
        table.add_column(f"{stage}\n{split}", justify="right")
    for name in names:
        cells = (values.get(key, {}).get(name, {}).get("value") for *_, values in splits)
        table.add_row(name.replace("_", " "), *("-" if c is None else f"{c:.1%}" for c in cells))
    return table


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def _drop_torn_line(path: Path) -> None:
    """Cut a last line that an interrupted run left without its end, so that rows stay whole."""
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            path.write_bytes(text[: text.rfind(b"\n") + 1])


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _shown(values: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name} {value if isinstance(value, str) else f'{float(value):.4g}'}"
        for name, value in values.items()
    )

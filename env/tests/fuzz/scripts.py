"""Reading sqllogictest scripts: statements, and queries with their recorded results."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hsql_env.sandbox import Row, Value

_HASHED = re.compile(r"(\d+) values hashing to ([0-9a-f]{32})")


@dataclass(frozen=True)
class Step:
    """A statement (`types` is "") or a query, and what is recorded of it."""

    sql: str
    types: str = ""  # one letter a column: T text, I integer, R real
    sort: str = "nosort"
    expected: tuple[str, ...] = ()
    fails: bool = False
    line: int = 0


def read_script(text: str) -> Iterator[Step]:
    """Yield the steps that are meant for SQLite."""
    line = 0
    for block in re.split(r"\n[ \t]*\n", text.replace("\r", "")):
        start, line = line + 1, line + block.count("\n") + 2
        lines = [part for part in block.split("\n") if part and not part.startswith("#")]
        while lines and lines[0].startswith(("skipif", "onlyif")):
            word, engine = lines[0].split()[:2]
            lines = lines[1:] if (word == "onlyif") == (engine == "sqlite") else []
        if not lines or lines[0].startswith(("hash-threshold", "control")):
            continue
        if lines[0].startswith("halt"):
            return
        yield _read_step(lines, start)


def _read_step(lines: list[str], line: int) -> Step:
    kind, *words = lines[0].split()
    if kind == "statement":
        return Step("\n".join(lines[1:]), fails=words[0] == "error", line=line)
    assert kind == "query", lines[0]
    body = lines[1:]
    cut = body.index("----") if "----" in body else len(body)
    sort = words[1] if len(words) > 1 else "nosort"
    return Step("\n".join(body[:cut]), words[0], sort, tuple(body[cut + 1 :]), line=line)


def agrees(step: Step, rows: Sequence[Row]) -> bool:
    """Return whether a query's rows are the recorded ones."""
    written = [
        [_write(cell, kind) for cell, kind in zip(row, step.types, strict=True)] for row in rows
    ]
    if step.sort == "rowsort":
        written.sort()
    values = [value for row in written for value in row]
    if step.sort == "valuesort":
        values.sort()
    hashed = _HASHED.fullmatch(step.expected[0]) if step.expected else None
    if hashed is None:
        return values == list(step.expected)
    digest = hashlib.md5("".join(f"{value}\n" for value in values).encode()).hexdigest()
    return (str(len(values)), digest) == hashed.groups()


def _write(cell: Value, kind: str) -> str:
    """Return the cell as the scripts write it."""
    if cell is None:
        return "NULL"
    if kind == "I":
        return str(_integer(cell))
    if kind == "R":
        return f"{float(cell):.3f}"
    text = cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)
    return "".join(c if " " <= c <= "~" else "@" for c in text) or "(empty)"


def _integer(cell: Value) -> int:
    if isinstance(cell, int | float):
        return int(cell)
    text = cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)
    match = re.match(r"\s*[+-]?\d+", text)
    return int(match.group()) if match else 0

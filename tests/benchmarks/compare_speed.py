"""Processor time of the comparer on large results; asserts generous bounds. Not a test."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from hsql_env.compare import compare, fingerprint
from hsql_env.sandbox import Execution, Row

BOUND_S = 10.0  # generous: a quadratic comparer is past it by orders of magnitude


def relation(rows: list[Row]) -> Execution:
    """Return a complete result."""
    return Execution(tuple(f"c{index}" for index in range(len(rows[0]))), tuple(rows), len(rows))


def make_rows(height: int, width: int, rng: random.Random) -> list[Row]:
    """Return rows of integers, texts and floats in turn."""
    makers: list[Callable[[int], int | str | float]] = [
        lambda row: rng.randrange(10 * height),
        lambda row: f"name {rng.randrange(height)}",
        lambda row: rng.random() * row,
        lambda row: rng.randrange(2),
    ]
    return [tuple(makers[c % len(makers)](row) for c in range(width)) for row in range(height)]


def permute(rows: list[Row], rng: random.Random) -> list[Row]:
    """Return the rows and columns in another order."""
    order = rng.sample(range(len(rows[0])), len(rows[0]))
    turned = [tuple(row[index] for index in order) for row in rows]
    rng.shuffle(turned)
    return turned


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = random.Random(0)
    times = {}
    for height, width in ((50, 26), (1000, 26), (100_000, 5), (100_000, 26)):
        rows = make_rows(height, width, rng)
        shuffled = rng.sample(rows, height)
        permuted = permute(rows, rng)
        wrong = [(*permuted[0][:-1], "wrong"), *permuted[1:]]
        gold = relation(rows)
        cases: dict[str, tuple[Callable[[], object], object]] = {
            "as given": (lambda: compare(gold, relation(list(rows))), True),  # noqa: B023
            "rows shuffled": (lambda: compare(gold, relation(shuffled)), True),  # noqa: B023
            "columns permuted": (lambda: compare(gold, relation(permuted)), True),  # noqa: B023
            "one cell wrong": (lambda: compare(gold, relation(wrong)), False),  # noqa: B023
            "fingerprint": (lambda: len(fingerprint(gold)), 64),  # noqa: B023
        }
        for name, (action, expected) in cases.items():
            start = time.process_time()
            result = action()
            taken = time.process_time() - start
            assert result == expected, name
            assert taken < BOUND_S, name
            times[f"{height} x {width}, {name}"] = taken
            print(f"{height:>7} x {width:<3} {name:<20}{taken * 1e3:>10.2f} ms")
    print("\n" + json.dumps(times))


if __name__ == "__main__":
    main()

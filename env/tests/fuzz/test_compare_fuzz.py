"""The comparer on random results: what must be equal is, what must differ does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from budget import bounded, patient
from hypothesis import given
from hypothesis import strategies as st

from hsql_env.compare import compare, fingerprint
from hsql_env.sandbox import Execution, Row, Value

pytestmark = patient

VALUES: st.SearchStrategy[Value] = st.one_of(
    st.none(),
    st.integers(-2, 2),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.5, -0.0, 1.0, 1e300, float("inf"), 2.0**53]),
    st.floats(allow_nan=False, width=32),
    st.sampled_from(["", "a", "A", "1", "\ufffd", "a b", "é"]),
    st.binary(max_size=3),
)
FEW: st.SearchStrategy[Value] = st.sampled_from([None, 0, 1, "", b""])


def relation(rows: Sequence[Row], names: Sequence[str] = ()) -> Execution:
    """Return a complete result."""
    columns = tuple(names) or tuple(f"c{index}" for index in range(len(rows[0])))
    return Execution(columns, tuple(rows), len(rows))


def tables(cells: st.SearchStrategy[Value], most: int) -> st.SearchStrategy[list[Row]]:
    """Return tables of up to so many rows and columns."""
    return st.integers(1, most).flatmap(
        lambda width: st.lists(st.tuples(*[cells] * width), min_size=1, max_size=most)
    )


def permuted(rows: Sequence[Row], seed: int, shuffle_rows: bool) -> list[Row]:
    """Return the table with its columns, and where asked its rows, in another order."""
    rng = random.Random(seed)
    order = rng.sample(range(len(rows[0])), len(rows[0]))
    turned = [tuple(row[index] for index in order) for row in rows]
    return rng.sample(turned, len(turned)) if shuffle_rows else turned


@bounded()
@given(rows=tables(VALUES, 6) | tables(FEW, 9), seed=st.integers(0, 1000))
def test_a_permutation_is_the_same_answer(rows: list[Row], seed: int) -> None:
    gold = relation(rows)
    for ordered in (False, True):
        answer = relation(permuted(rows, seed, shuffle_rows=not ordered))
        assert compare(gold, gold, ordered)
        assert compare(gold, answer, ordered)
        assert compare(answer, gold, ordered)
        assert fingerprint(gold, ordered) == fingerprint(answer, ordered)


@bounded()
@given(rows=tables(FEW, 4), other=tables(FEW, 4), seed=st.integers(0, 1000))
def test_equal_exactly_when_some_order_of_columns_makes_it_so(
    rows: list[Row], other: list[Row], seed: int
) -> None:
    """Against a search through every order of columns, on results small enough for one."""
    near = permuted(rows, seed, shuffle_rows=True)
    near[0] = (*near[0][:-1], other[0][0])
    for answer in (other, near):
        for ordered in (False, True):
            equal = brute_force(rows, answer, ordered)
            assert compare(relation(rows), relation(answer), ordered) is equal
            same = fingerprint(relation(rows), ordered) == fingerprint(relation(answer), ordered)
            assert same is equal


def brute_force(rows: list[Row], answer: list[Row], ordered: bool) -> bool:
    """Return whether some order of the answer's columns gives the same rows."""

    def extend(taken: list[int]) -> bool:
        if len(taken) == len(rows[0]):
            turned = [tuple(row[index] for index in taken) for row in answer]
            return turned == rows if ordered else Counter(turned) == Counter(rows)
        return any(extend([*taken, index]) for index in range(len(rows[0])) if index not in taken)

    return len(rows) == len(answer) and len(rows[0]) == len(answer[0]) and extend([])


@bounded()
@given(
    rows=tables(FEW, 5),
    blocks=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_only_rows_of_a_tie_may_change_places(
    rows: list[Row], blocks: list[int], seed: int
) -> None:
    ties = sorted(blocks[: len(rows)])
    rng = random.Random(seed)
    within: list[Row] = []
    for tie in sorted(set(ties)):
        members = [row for row, own in zip(rows, ties, strict=True) if own == tie]
        within += rng.sample(members, len(members))
    assert compare(relation(rows), relation(within), ordered=True, ties=ties)
    anyhow = rng.sample(rows, len(rows))
    by_tie = [
        [Counter(row for row, own in zip(table, ties, strict=True) if own == tie) for tie in ties]
        for table in (rows, anyhow)
    ]
    if len(rows[0]) == 1:  # with more columns, another order of them may make it equal
        equal = compare(relation(rows), relation(anyhow), ordered=True, ties=ties)
        assert equal is (by_tie[0] == by_tie[1])


@bounded()
@given(rows=tables(VALUES, 5), seed=st.integers(0, 1000))
def test_one_changed_cell_is_another_answer(rows: list[Row], seed: int) -> None:
    rng = random.Random(seed)
    place, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    changed = [list(row) for row in rows]
    changed[place][column] = "changed"
    answer = relation([tuple(row) for row in changed])
    assert not compare(relation(rows), answer)
    assert not compare(relation(rows), answer, ordered=True)
    assert fingerprint(relation(rows)) != fingerprint(answer)


@bounded()
@given(
    numbers=st.lists(
        st.floats(-1e6, 1e6).filter(lambda number: abs(number) > 1e-3), min_size=1, max_size=8
    ),
    seed=st.integers(0, 1000),
)
def test_noise_is_no_difference_and_more_is(numbers: list[float], seed: int) -> None:
    rng = random.Random(seed)
    rows: list[Row] = [(number, index) for index, number in enumerate(numbers)]
    noisy: list[Row] = [(number * (1 + rng.uniform(-1, 1) * 1e-14), i) for number, i in rows]  # type: ignore[operator]
    assert compare(relation(rows), relation(rng.sample(noisy, len(noisy))))
    off: list[Row] = [(numbers[0] * (1 + 1e-6), 0), *rows[1:]]
    assert not compare(relation(rows), relation(off))

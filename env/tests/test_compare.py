"""Edge cases 15, 19, 21 and 22, and that fingerprints agree with the comparer."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest

from hsql_env.compare import compare, fingerprint, fingerprints
from hsql_env.sandbox import Execution, Row, Value


def relation(rows: Sequence[Row], columns: Sequence[str] | None = None) -> Execution:
    """Return a complete result."""
    names = columns if columns is not None else [f"c{i}" for i in range(len(rows[0]))]
    return Execution(tuple(names), tuple(rows), len(rows))


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1.0, True),
        (1, "1", False),
        (None, 0, False),
        (None, "", False),
        (0, "", False),
        (0, 0.0, True),
        (0.0, -0.0, True),
        ("a", b"a", False),
        ("a", "A", False),
        ("a", "a ", False),
        (0.1 + 0.2, 0.3, True),
        (1234567.0000000002, 1234567, True),
        (1e-12, 0, True),
        (0.3333, 1 / 3, False),
        (2.5, 2.51, False),
        (2**53 + 1, 2**53, False),
        (2**53 + 1, float(2**53), False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (float("nan"), float("nan"), True),
        (float("nan"), None, False),
        (10**400, 1.5, False),
        (10**400, 0.0, False),
        (10**400, float("inf"), False),
        (10**20, 1e20, True),
        (10**20, 1.0000000000001e20, False),
        (1e20, 1.0000000000001e20, True),
        # Whole numbers are exact, and noise is what computing with floats brings.
        (1234567890, 1234567890.6, False),
        (1234567890.0, 1234567890.6, False),
        (1234567890.5, 1234567890.6, True),
        (12345678901, 12345678901.000002, True),
        (12345678901, 12345678901.01, False),
        (3, 3.0000000009, True),
        (3, 3.000000004, False),
        (3.000000005, 3.000000004, True),
        (1000.0000009, 1000, True),
        (100_000.000002, 100_000, False),
        (-2, -2.0000000001, True),
        (1, 0.9999999995, True),
        (0, -1e-10, True),
        (0, 2e-9, False),
        # Below 1 the tolerance is absolute.
        (0.001, 0.0010000009, True),
        (0.001, 0.001000006, False),
    ],
)
def test_cells(left: Value, right: Value, equal: bool) -> None:
    a, b = relation([(left,)]), relation([(right,)])
    assert compare(a, b) is compare(b, a) is equal
    assert compare(a, b, ordered=True) is equal
    turned = relation([("x", left), ("y", 7)]), relation([(7, "y"), (right, "x")])
    assert compare(*turned) is compare(*turned[::-1]) is equal
    if fingerprint(a) == fingerprint(b):
        assert equal


def test_rows_are_a_multiset_unless_ordered() -> None:
    a = relation([(1, "x"), (2, "y"), (2, "y")])
    b = relation([(2, "y"), (1, "x"), (2, "y")])
    assert compare(a, b)
    assert not compare(a, b, ordered=True)
    assert not compare(a, relation([(1, "x"), (1, "x"), (2, "y")]))
    assert not compare(a, relation([(1, "x"), (2, "y")]))
    assert fingerprint(a) == fingerprint(b)
    assert fingerprint(a, ordered=True) != fingerprint(b, ordered=True)


def test_names_count_only_where_required() -> None:
    a = relation([(1, 2)], ["total", "n"])
    assert compare(a, relation([(2, 1)], ["n", "total"]), names_required=True)
    assert not compare(a, relation([(1, 2)], ["n", "total"]), names_required=True)
    assert compare(a, relation([(1, 2)], ["x", "y"]))
    assert not compare(a, relation([(1, 2)], ["x", "y"]), names_required=True)
    assert not compare(a, relation([(1,)], ["total"]))


def test_duplicate_names_keep_both_columns() -> None:
    a = relation([(1, 2)], ["a", "a"])
    assert compare(a, relation([(2, 1)], ["a", "a"]), names_required=True)
    assert not compare(a, relation([(1, 1)], ["a", "a"]), names_required=True)


def test_empty_results_are_equal_only_where_allowed() -> None:
    empty = relation([], ["a"])
    assert not compare(empty, empty)
    assert compare(empty, empty, allow_empty=True)
    assert not compare(empty, relation([], ["a", "b"]), allow_empty=True)
    assert not compare(empty, relation([(1,)]), allow_empty=True)


def test_columns_of_equal_multisets_are_told_apart() -> None:
    a = relation([(1, 2, 3), (2, 3, 1), (3, 1, 2)])
    assert compare(a, relation([(2, 1, 3), (3, 2, 1), (1, 3, 2)]))
    assert not compare(a, relation([(1, 1, 3), (2, 2, 1), (3, 3, 2)]))
    swapped = relation([(1, 2), (2, 1), (3, 3)]), relation([(1, 1), (2, 2), (3, 3)])
    assert not compare(*swapped)


def test_float_noise_does_not_misalign_rows() -> None:
    a = relation([(0.1 + 0.2, "b"), (0.3, "a")])
    assert compare(a, relation([(0.3, "b"), (0.1 + 0.2, "a")]))


def test_26_permuted_columns_take_milliseconds() -> None:
    rng = random.Random(0)
    rows = [tuple(rng.randint(0, 1) for _ in range(26)) for _ in range(20)]
    order = rng.sample(range(26), 26)
    shuffled = [tuple(row[index] for index in order) for row in rng.sample(rows, len(rows))]
    wrong = [(*shuffled[0][:-1], 1 - shuffled[0][-1]), *shuffled[1:]]
    start = time.process_time()
    assert compare(relation(rows), relation(shuffled))
    assert not compare(relation(rows), relation(wrong))
    assert time.process_time() - start < 0.1
    assert fingerprint(relation(rows)) == fingerprint(relation(shuffled))


def test_fingerprints_agree_with_the_comparer() -> None:
    rng = random.Random(1)
    pool: list[Value] = [None, 0, 1, 2.0, 0.5, "", "x", b"x"]
    relations = [
        relation([tuple(rng.choice(pool[:3]) for _ in range(2)) for _ in range(2)])
        for _ in range(40)
    ] + [relation([(value, other)]) for value in pool for other in pool]
    for a in relations:
        for b in relations:
            assert (fingerprint(a) == fingerprint(b)) is compare(a, b)


def test_fingerprint_is_stable() -> None:
    assert fingerprint(relation([(1, "a"), (None, 2.5)])) == (
        "7eec76b69f6e04aba3ca7d60c445b7dfc083571e9bba8956e8ac353b8d7f8717"
    )


def test_four_fingerprints() -> None:
    a = relation([(1, "x"), (2, "y")], ["n", "t"])
    turned = relation([("y", 2), ("x", 1)], ["T", "N"])
    renamed = relation([(1, "x"), (2, "y")], ["n", "u"])
    alike = {
        kind: [fingerprints(a)[kind] == fingerprints(other)[kind] for other in (turned, renamed)]
        for kind in fingerprints(a)
    }
    assert alike == {
        "unordered_values": [True, True],
        "unordered_names": [True, False],
        "ordered_values": [False, True],
        "ordered_names": [False, False],
    }


def test_ties_may_be_permuted_among_themselves_only() -> None:
    gold = relation([("a", 9), ("b", 7), ("c", 7), ("d", 3)])
    ties = (1, 2, 2, 3)
    assert compare(gold, relation([("a", 9), ("c", 7), ("b", 7), ("d", 3)]), True, ties=ties)
    assert compare(gold, relation([(9, "a"), (7, "c"), (7, "b"), (3, "d")]), True, ties=ties)
    assert not compare(gold, relation([("b", 7), ("a", 9), ("c", 7), ("d", 3)]), True, ties=ties)
    assert not compare(gold, relation([("a", 9), ("c", 7), ("b", 7), ("d", 3)]), True)
    with pytest.raises(ValueError, match="ties must hold 4 numbers"):
        compare(gold, relation([("a", 9), ("c", 7), ("b", 7), ("d", 4)]), True, ties=(1,))


def test_columns_that_no_refinement_tells_apart() -> None:
    """Each column and row of a Latin square, or of a one-hot matrix, looks like any other."""
    rng = random.Random(2)
    for size in (8, 26):
        square = [tuple((row + column) % size for column in range(size)) for row in range(size)]
        one_hot = [tuple(int(row == column) for column in range(size)) for row in range(size)]
        for rows in (square, one_hot):
            order = rng.sample(range(size), size)
            turned = [tuple(row[index] for index in order) for row in rng.sample(rows, size)]
            assert compare(relation(rows), relation(turned))
            assert fingerprint(relation(rows)) == fingerprint(relation(turned))
    ring = [tuple(int(column in (row, (row + 1) % 6)) for column in range(6)) for row in range(6)]
    pairs = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]
    triangles = [tuple(int(column in pair) for column in range(6)) for pair in pairs]
    assert not compare(relation(ring), relation(triangles))
    assert fingerprint(relation(ring)) != fingerprint(relation(triangles))


def test_integers_stay_exact_beside_floats() -> None:
    gold = relation([(10**12,), (10**12 + 1,), (10**12 + 0.5,)])
    assert compare(gold, relation([(10**12 + 0.5,), (10**12 + 1.0,), (10**12,)]))
    assert not compare(gold, relation([(10**12,), (10**12,), (10**12 + 0.5,)]))


def test_noise_in_many_floats_is_matched_to_the_nearest() -> None:
    rng = random.Random(3)
    rows = [(rng.random(), rng.choice("ab")) for _ in range(200)]
    noisy = [(name, number * (1 + 1e-13 * rng.random())) for number, name in rows]
    rng.shuffle(noisy)
    assert compare(relation(rows), relation(noisy))
    name, number = noisy[0]
    assert not compare(relation(rows), relation([(name, number * (1 + 1e-6)), *noisy[1:]]))


def test_a_whole_float_is_as_exact_as_an_integer() -> None:
    gold = relation([(1e12, "a"), (2.5, "b")])
    assert compare(gold, relation([("b", 2.5), ("a", 10**12)]))
    assert not compare(gold, relation([("b", 2.5), ("a", 10**12 + 1)]))
    assert not compare(gold, relation([("b", 2.5), ("a", 1e12 + 1)]))


def test_nan_equals_nan_wherever_it_stands() -> None:
    gold = relation([(math.nan, 1), (0.5, 2), (2.5, 3)])
    answer = relation([(3, 2.5), (1, float("nan")), (2, 0.5 + 1e-13)])
    assert compare(gold, answer)
    assert fingerprint(gold) == fingerprint(answer)
    assert not compare(gold, relation([(3, 2.5), (1, None), (2, 0.5)]))


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (0.001, 0.0010000009, True),
        (0.001, 0.001000011, False),
        (2.5, 2.5000000024, True),
        (2.5, 2.5000002, False),
        (9.5, 9.500000009, True),
        (987654.25, 987654.2509, True),
        (1234567890, 1234567890.6, False),
        (1234567890.2, 1234567890.6, True),
        (3, 3.000000002, True),
        (3, 3.00000001, False),
        (1e-10, 0, True),
        (2e-9, 0, False),
        (0.25, -0.25, False),
        (1e20, 1.0000000000001e20, True),
    ],
)
def test_fingerprints_of_numbers_agree_with_the_comparer(
    left: Value, right: Value, equal: bool
) -> None:
    a, b = relation([(left,)]), relation([(right,)])
    assert compare(a, b) is equal
    assert (fingerprint(a) == fingerprint(b)) is equal


def test_fingerprints_of_numbers_agree_away_from_rounding_edges() -> None:
    rng = random.Random(5)
    for _ in range(500):
        number = (10 * rng.randrange(10**5) + 3) * 10.0 ** rng.randrange(-8, 0)
        a, close = relation([(number,)]), number + 0.9e-9 * max(1, number) * rng.uniform(-1, 1)
        far = number + 2e-7 * max(1, number)
        assert compare(a, relation([(close,)]))
        assert fingerprint(a) == fingerprint(relation([(close,)]))
        assert not compare(a, relation([(far,)]))
        assert fingerprint(a) != fingerprint(relation([(far,)]))

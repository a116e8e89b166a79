"""When two results are the same answer, and fingerprints of a result that agree with it.

Cells: 1 equals 1.0 but not '1'; NULL, 0 and '' are distinct. Whole numbers are exact, and none
equals a number that is not whole; other numbers are equal within `TOLERANCE`. A float as near to a
whole number as computing with floats may leave it is that number (`_whole`).

Columns are matched by name where names are required, otherwise by their values, in any order. Rows
are a multiset; where order is required, only rows of one tie may change places.

The rules on rows are one: every row has a block, and rows may be permuted within their block. Row
order not required is one block, row order required a block a row, a tie a block of its rows.

`compare` is n log n in the number of cells as long as the columns' values tell the columns apart;
columns that agree in all but their arrangement are matched by a search of bounded length.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Protocol, cast

from hsql_env.sandbox.types import Row, Value

TOLERANCE = 1e-9  # relative from 1 on, absolute below
_NOISE = 1e-12  # two numbers of one result as close as this are one number
_WHOLE = 1e-6, 1e-13  # absolute and relative: no float further from a whole number is that one
_EXACT_INTEGERS = 2.0**63  # floats from here on have no fraction and no exactness
_DECIMALS = 8  # of a fingerprint's number below 1: steps of ten times the tolerance
_DIGITS = 7  # likewise of one from 1 on, after the first
_SEARCH_CELLS = 5_000_000  # looked at before two results count as different
_CHUNK_ROWS = 64
_PROBED_CELLS = 20_000  # of a result whose fingerprint may look twice at its columns

Columns = list[list[Value]]
Number = int | float
Numbers = set[Number]


class Relation(Protocol):
    """Anything with column names and rows, such as an `Execution`."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> tuple[Row, ...]: ...


def compare(
    gold: Relation,
    answer: Relation,
    ordered: bool = False,
    names_required: bool = False,
    allow_empty: bool = False,
    ties: Sequence[int] = (),
) -> bool:
    """Return whether the two results are the same answer.

    Two empty results are equal only with `allow_empty`. `ties` holds, where row order is required,
    one number a row of `gold`: rows of one number may come in any order among themselves.
    """
    if len(gold.rows) != len(answer.rows) or len(gold.columns) != len(answer.columns):
        return False
    if names_required and _sorted_names(gold) != _sorted_names(answer):
        return False
    if not gold.rows:
        return allow_empty
    in_place = not names_required or [*map(_name, gold.columns)] == [*map(_name, answer.columns)]
    if in_place and gold.rows == answer.rows:
        return True
    if in_place and not ordered and _same_multiset(gold.rows, answer.rows):
        return True
    left, right = _arrange(gold, names_required), _arrange(answer, names_required)
    if _equal_in_place(left.columns, right.columns):
        return True
    blocks = _blocks(gold, ordered, ties)
    if _Matching(left, right, blocks).found():
        return True
    if not _may_agree(left, right):
        return False
    settled = _settle_numbers(left, right)
    return settled is not None and _Matching(*settled, blocks).found()


def _same_multiset(left: Sequence[Hashable], right: Sequence[Hashable]) -> bool:
    """Return whether two that are not empty hold the same things; a quick no to most others."""
    return (
        right[0] in left
        and sum(map(hash, left)) == sum(map(hash, right))
        and _is_permutation(left, right)
    )


def _is_permutation(left: Iterable[Hashable], right: Iterable[Hashable]) -> bool:
    """Return whether two of one length hold the same things."""
    # As plain dictionaries: a counter's own comparison runs in Python.
    return dict.__eq__(Counter(left), Counter(right))


def fingerprint(
    result: Relation, ordered: bool = False, names: bool = False, ties: Sequence[int] = ()
) -> str:
    """Return 64 hexadecimal digits that equal results share, across processes and runs.

    Numbers that are not whole are rounded for it, to at least ten times their tolerance: only
    where that puts an edge between two equal ones can equal results differ in it, and results that
    differ in such numbers by less can share it. So can results whose columns agree in all but their
    arrangement, and regularly so. An integer of 2**63 or more never looks like a float.
    """
    table = _arrange(result, names)
    columns = list(map(_cell_texts, table.columns))
    blocks = _blocks(result, ordered, ties)
    return _digest(_canonical_form(columns, table.labels, blocks))


def fingerprints(result: Relation) -> dict[str, str]:
    """Return the four fingerprints: row order kept or not, column names or values only."""
    return {
        f"{'ordered' if ordered else 'unordered'}_{'names' if names else 'values'}": fingerprint(
            result, ordered, names
        )
        for ordered in (False, True)
        for names in (False, True)
    }


@dataclass(frozen=True)
class _Table:
    """A result by columns; labels are the names where they count, else "" each.

    Columns of the same cells, in whatever order, have the same sum.
    """

    labels: list[str]
    columns: Columns
    sums: list[int]

    def part(self, places: Sequence[int]) -> _Table:
        """Return the columns at these places."""
        return _Table(
            [self.labels[place] for place in places],
            [self.columns[place] for place in places],
            [self.sums[place] for place in places],
        )

    def colours(self) -> list[tuple[str, int]]:
        """Return what columns have in common where they are one."""
        return list(zip(self.labels, self.sums, strict=True))


def _arrange(relation: Relation, named: bool) -> _Table:
    """Return the columns as given, or in the order of their names where names count."""
    labels = [_name(name) if named else "" for name in relation.columns]
    columns: Columns = [[] for _ in labels]
    sums = [0] * len(labels)
    # A few rows at a time: cells that lie anywhere in memory are fetched from there once.
    for start in range(0, len(relation.rows), _CHUNK_ROWS):
        rows = relation.rows[start : start + _CHUNK_ROWS]
        for index, cells in enumerate(zip(*rows, strict=True)):
            columns[index].extend(cells)
            sums[index] += sum(map(hash, cells))
    order = sorted(range(len(labels)), key=labels.__getitem__)
    return _Table(labels, columns, sums).part(order)


def _name(column: str) -> str:
    return column.strip().casefold()


def _sorted_names(relation: Relation) -> list[str]:
    return sorted(map(_name, relation.columns))


def _blocks(relation: Relation, ordered: bool, ties: Sequence[int]) -> list[int]:
    """Return each row's block, within which rows may be permuted."""
    height = len(relation.rows)
    if not ordered:
        return [0] * height
    if not ties:
        return list(range(height))
    if len(ties) != height:
        raise ValueError(f"ties must hold {height} numbers, one a row, not {len(ties)}")
    return list(ties)


# Numbers


def _equal_in_place(gold: Columns, answer: Columns) -> bool:
    """Return whether the results agree cell by cell as they stand."""
    return gold == answer or all(map(_equal_column, gold, answer))


def _equal_column(gold: list[Value], answer: list[Value]) -> bool:
    return gold == answer or all(map(_equal_cell, gold, answer))


def _equal_cell(gold: Value, answer: Value) -> bool:
    if gold == answer:
        return True
    if not (isinstance(gold, int | float) and isinstance(answer, int | float)):
        return False
    return _is_close(_whole(gold), _whole(answer))


def _is_close(a: Number, b: Number, tolerance: float = TOLERANCE) -> bool:
    """Return whether two numbers that went through `_whole` are one."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (a != a and b != b)


def _whole(number: Number) -> Number:
    """Return an integer for a float that is one but for noise, any other number as it is.

    Noise is at most the tolerance, and at most 1e-6 or, where that is more, 1e-13 of the number.
    NaN gives always the same NaN: only the same object equals itself in a container.
    """
    if isinstance(number, int):
        return number
    size = abs(number)
    if size < 1e7 and 1e-6 < size % 1 < 1 - 1e-6:  # most floats
        return number
    if number != number:
        return math.nan
    if size >= _EXACT_INTEGERS:
        return number
    nearest = round(number)
    absolute, relative = _WHOLE
    noise = min(TOLERANCE * max(1.0, size), max(absolute, relative * size))
    return nearest if abs(number - nearest) <= noise else number


def _may_agree(gold: _Table, answer: _Table) -> bool:
    """Return whether the columns that one result has and the other has not may differ by noise.

    A quick no to most wrong answers. Columns that both have stay equal whatever noise is settled.
    """
    odd, others = gold.part(_odd(gold, answer)), answer.part(_odd(answer, gold))
    if not odd.columns:
        return True
    settled = _settle_numbers(odd, others)
    return settled is not None and sorted(settled[0].colours()) == sorted(settled[1].colours())


def _odd(table: _Table, other: _Table) -> list[int]:
    """Return the places of the columns that the other one has not, or has not so often."""
    left = Counter(other.colours())
    places = []
    for place, colour in enumerate(table.colours()):
        if left[colour] < 1:
            places.append(place)
        left[colour] -= 1
    return places


def _settle_numbers(gold: _Table, answer: _Table) -> tuple[_Table, _Table] | None:
    """Return the results with one value for what counts as one number, so that `==` decides.

    None where that changes nothing.
    """
    own, others = _numbers(gold.columns, float), _numbers(answer.columns, float)
    if not own and not others:
        return None
    settled = _merge_noise(own)
    moved = {number: to for number, to in settled.items() if number in others}
    strangers = others - own
    if strangers:
        moved.update(_move(strangers, {settled.get(number, number) for number in own}))
    settled, moved = _changes(settled), _changes(moved)
    if not settled and not moved:
        return None
    return _replace(gold, settled), _replace(answer, moved)


def _move(strangers: Numbers, known: Numbers) -> dict[Number, Number]:
    """Map each of the floats to an integer where it is whole, else to the nearest known float."""
    floats = sorted(number for number in known if isinstance(number, float) and number == number)
    moved: dict[Number, Number] = {}
    for number in strangers:
        whole = _whole(number)
        if isinstance(whole, float) and whole == whole:
            whole = _nearest(whole, floats)
        if whole is not number:
            moved[number] = whole
    return moved


def _numbers(columns: Columns, kind: type[int] | type[float]) -> Numbers:
    """Return the distinct numbers of a kind."""
    found: Numbers = set()
    for column in columns:
        kinds = set(map(type, column))
        if kinds == {kind}:
            found.update(cast("list[Number]", column))
        elif kind in kinds:
            found.update(value for value in column if isinstance(value, kind))
    return found


def _merge_noise(numbers: Numbers) -> dict[Number, Number]:
    """Map floats to the integers that they are but for noise, and to the least float likewise."""
    merged = {number: to for number in numbers if (to := _whole(number)) is not number}
    last: Number = -math.inf
    for number in sorted(number for number in numbers.difference(merged) if number == number):
        if number - last <= _NOISE * (1 + abs(number)) and _is_close(last, number, _NOISE):
            merged[number] = last
        else:
            last = number
    return merged


def _changes(numbers: dict[Number, Number]) -> dict[Number, Number]:
    return {number: to for number, to in numbers.items() if number != to}


def _nearest(number: float, among: list[float]) -> float:
    """Return the nearest of the sorted floats within tolerance, the number where there is none."""
    place = bisect.bisect_left(among, number)
    near = [other for other in among[max(0, place - 1) : place + 1] if _is_close(other, number)]
    return min(near, key=lambda other: abs(other - number), default=number)


def _replace(table: _Table, changed: dict[Number, Number]) -> _Table:
    """Return the table with the changed numbers in place of the old ones."""
    if not changed:
        return table
    lookup = cast("dict[Value, Value]", changed)
    columns = [[lookup.get(value, value) for value in column] for column in table.columns]
    return _Table(table.labels, columns, [sum(map(hash, column)) for column in columns])


# Matching columns


class _Matching:
    """The search for an order of the answer's columns in which every block of rows agrees."""

    def __init__(self, gold: _Table, answer: _Table, blocks: list[int]) -> None:
        self._gold = gold
        self._answer = answer
        self._blocks = blocks
        self._cells_left = _SEARCH_CELLS

    def found(self) -> bool:
        """Return whether there is such an order."""
        gold, answer = self._gold.columns, self._answer.columns
        colours, others = self._colours()
        if sorted(colours) != sorted(others):
            return False
        if colours == others and _same_rows(self._blocks, gold, answer):
            return True
        free: dict[int, list[int]] = defaultdict(list)
        for index, colour in enumerate(others):
            free[colour].append(index)
        order = sorted(range(len(gold)), key=lambda index: len(free[colours[index]]))
        sure = [index for index in order if len(free[colours[index]]) == 1]
        own = [gold[index] for index in sure]
        other = [answer[free[colours[index]][0]] for index in sure]
        if not _same_rows(self._blocks, own, other):
            return False
        names = _Names()
        todo = [(index, free[colours[index]]) for index in order[len(sure) :]]
        return not todo or self._extend(
            todo, names.rows(self._blocks, own), names.rows(self._blocks, other), set()
        )

    def _colours(self) -> tuple[list[int], list[int]]:
        """Return numbers of both results' columns; only columns of one number can be matched.

        A column starts as the multiset of its cells by block. Where that leaves a choice, rows are
        told apart by their cells in columns that are, and columns by the rows, in turns. Equal
        multisets have equal numbers; that unequal ones might too costs time only.
        """
        gold, answer = self._gold.columns, self._answer.columns
        rows, other_rows = self._blocks, self._blocks
        colours = _colour_table(self._gold, rows)
        others = _colour_table(self._answer, other_rows)
        told = 0
        while told < len(set(colours)) < len(gold) and sorted(colours) == sorted(others):
            told = len(set(colours))
            rows = _colour_rows(rows, gold, colours)
            other_rows = _colour_rows(other_rows, answer, others)
            colours = _colour_columns(colours, gold, rows)
            others = _colour_columns(others, answer, other_rows)
        return colours, others

    def _extend(
        self,
        todo: list[tuple[int, list[int]]],
        rows: list[int],
        other_rows: list[int],
        used: set[int],
    ) -> bool:
        """Match the next of the gold columns; `rows` number the cells of those matched so far."""
        if not todo:
            return True
        (index, candidates), rest = todo[0], todo[1:]
        names = _Names()
        rows = names.rows(rows, [self._gold.columns[index]])
        tried: list[int] = []
        for other in candidates:
            column = self._answer.columns[other]
            if other in used or any(column == self._answer.columns[same] for same in tried):
                continue
            tried.append(other)
            self._cells_left -= len(rows)
            if self._cells_left < 0:
                return False
            paired = names.rows(other_rows, [column])
            if _is_permutation(rows, paired) and self._extend(rest, rows, paired, used | {other}):
                return True
        return False


class _Names:
    """Small numbers for hashable things: equal ones share a number."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def rows(self, rows: Sequence[int], columns: Sequence[Sequence[Value]]) -> list[int]:
        """Return one number a row, of its number so far and its cells in the columns."""
        known = self._known
        return [known.setdefault(row, len(known)) for row in zip(rows, *columns, strict=True)]


def _same_rows(blocks: list[int], gold: Columns, answer: Columns) -> bool:
    """Return whether the columns, in the order given, hold the same rows in every block."""
    return _is_permutation(zip(blocks, *gold, strict=True), zip(blocks, *answer, strict=True))


def _colour_table(table: _Table, rows: list[int]) -> list[int]:
    """Return the first colours of a table's columns."""
    colours = list(map(hash, table.colours()))
    if rows.count(rows[0]) < len(rows):
        return _colour_columns(colours, table.columns, rows)
    # The rows tell nothing apart. Numbers that are their own hashes often have one sum.
    sharing = Counter(colours)
    return [
        hash((colour, reduce(xor, map(hash, column)))) if sharing[colour] > 1 else colour
        for colour, column in zip(colours, table.columns, strict=True)
    ]


def _colour_columns(colours: list[int], columns: Columns, rows: list[int]) -> list[int]:
    return [
        hash((colour, sum(map(hash, zip(rows, column, strict=True)))))
        for colour, column in zip(colours, columns, strict=True)
    ]


def _colour_rows(rows: list[int], columns: Columns, colours: list[int]) -> list[int]:
    return [
        hash((row, sum(map(hash, zip(colours, cells, strict=True)))))
        for row, cells in zip(rows, zip(*columns, strict=True), strict=True)
    ]


def _distinct(columns: Sequence[Sequence[str]]) -> int:
    return len({tuple(column) for column in columns})


# Fingerprints


def _cell_texts(column: list[Value]) -> list[str]:
    kinds = set(map(type, column))
    if kinds == {int}:
        return list(map("n{}".format, column))
    if kinds == {str}:
        return list(map("t{}".format, column))
    return list(map(_cell_text, column))


def _cell_text(value: Value) -> str:
    """Return text that equal cells share and different ones do not."""
    if isinstance(value, int):
        return f"n{value}"
    if isinstance(value, str):
        return "t" + value
    if value is None:
        return "-"
    if isinstance(value, bytes):
        return "x" + value.hex()
    number = _whole(value)
    if isinstance(number, int):
        return f"n{number}"
    return f"n{number:.{_DECIMALS}f}" if abs(number) < 1 else f"n{number:.{_DIGITS}e}"


def _canonical_form(columns: list[list[str]], labels: list[str], blocks: list[int]) -> object:
    """Return what two results share exactly when some order of columns and rows makes them one.

    Columns are put in the order of colours that depend on their values only. Columns that still
    share a colour leave that order open; then the colours themselves stand for the result.
    """
    kinds = _distinct(columns)
    colours, rows = _stable_colours(columns, labels, blocks, kinds)
    if len(set(colours)) == kinds:
        order = sorted(range(len(columns)), key=colours.__getitem__)
        cells = zip(blocks, *(columns[index] for index in order), strict=True)
        return len(columns), [labels[index] for index in order], sorted(cells)
    probes = []
    if len(columns) * len(blocks) <= _PROBED_CELLS:
        for index in range(len(columns)):
            marked = [*colours[:index], "marked " + colours[index], *colours[index + 1 :]]
            probes.append(
                _digest(list(map(sorted, _stable_colours(columns, marked, blocks, kinds))))
            )
    return len(columns), sorted(colours), sorted(rows), sorted(probes)


def _stable_colours(
    columns: list[list[str]], labels: Sequence[str], blocks: list[int], kinds: int
) -> tuple[list[str], list[str]]:
    """Return a colour a column and a row, refined in turns until no more are told apart."""
    rows = [str(block) for block in blocks]
    colours = list(labels)
    told = 0
    while True:
        colours = [
            _digest((label, sorted(map(" ".join, zip(rows, column, strict=True)))))
            for label, column in zip(colours, columns, strict=True)
        ]
        if len(set(colours)) in (told, kinds):
            return colours, rows
        told = len(set(colours))
        rows = [
            _digest((row, sorted(zip(colours, cells, strict=True))))
            for row, cells in zip(rows, zip(*columns, strict=True), strict=True)
        ]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()

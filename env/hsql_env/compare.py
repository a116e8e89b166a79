"""When two results are the same answer, and a fingerprint of a result that agrees with it.

Cells: 1 equals 1.0 but not '1'; NULL, 0 and '' are distinct; floats within `TOLERANCE`. Rows are
a multiset unless order is required. Columns are matched by name where names are required;
otherwise by their values, in any order.

Both functions start from the same canonical form: columns in an order that does not depend on the
one given, rows sorted unless ordered, floats rounded. Equal fingerprints therefore mean equal
results. The converse can fail only where a float lies at a rounding edge, which `compare` decides
by tolerance.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from hsql_env.sandbox.types import Row, Value

TOLERANCE = 1e-9  # relative, and absolute near zero
_DIGITS = 9  # significant digits of a rounded float after the first, in agreement with TOLERANCE
_EXACT_INTEGERS = 2.0**63
_REFINEMENTS = 3
_MAX_COLUMN_ORDERS = 720

Cell = tuple[str, int | float | str | bytes]  # its type's tag and its canonical value
Columns = list[list[Cell]]


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
) -> bool:
    """Return whether the two results are the same answer.

    Two empty results are equal only with `allow_empty`. Time is n log n in the number of cells.
    """
    if len(gold.rows) != len(answer.rows) or len(gold.columns) != len(answer.columns):
        return False
    if not gold.rows:
        return allow_empty and (not names_required or _names(gold) == _names(answer))
    if names_required and _names(gold) != _names(answer):
        return False
    expected = _Canonical(gold, ordered, names_required)
    given = _Canonical(answer, ordered, names_required)
    if _equal_rows(expected.rows(expected.start), given.rows(given.start)):
        return True
    target = expected.rows(expected.order)
    return any(
        _equal_rows(target, given.rows(order))
        for order in itertools.islice(given.orders(), _MAX_COLUMN_ORDERS)
    )


def fingerprint(result: Relation, ordered: bool = False, names: bool = False) -> str:
    """Return 64 hexadecimal digits that equal results share, across processes and runs."""
    canonical = _Canonical(result, ordered, names)
    head = [_name(result.columns[index]) for index in canonical.order] if names else []
    width = len(result.columns)
    rows = canonical.rows(canonical.order)
    return hashlib.sha256(repr((width, head, rows)).encode("utf-8", "replace")).hexdigest()


def _name(column: str) -> str:
    return column.strip().casefold()


def _names(relation: Relation) -> list[str]:
    return sorted(map(_name, relation.columns))


def canonical_cell(value: Value) -> Cell:
    """Return a sortable, hashable form in which equal cells are equal."""
    if value is None:
        return ("", 0)
    if value != value:
        return ("nan", 0)
    if isinstance(value, str):
        return ("t", value)
    if isinstance(value, bytes):
        return ("x", value)
    return ("n", _canonical_number(value))


def _canonical_number(number: int | float) -> int | float:
    if isinstance(number, int) or math.isinf(number):
        return number
    nearest = round(number)
    noise = abs(number - nearest)
    if abs(number) < _EXACT_INTEGERS and noise < 1e-6 and noise <= TOLERANCE / 10 * abs(number):
        return nearest
    return float(f"{number:.{_DIGITS}e}")


class _Canonical:
    """A result's columns of canonical cells, and the orders in which they may be taken."""

    def __init__(self, relation: Relation, ordered: bool, named: bool) -> None:
        self._ordered = ordered
        self._columns: Columns = [
            [canonical_cell(row[index]) for row in relation.rows]
            for index in range(len(relation.columns))
        ]
        self._labels = [_name(name) if named else "" for name in relation.columns]
        # As given, or by name where names count.
        self.start = sorted(range(len(self._columns)), key=self._labels.__getitem__)

    @functools.cached_property
    def _colours(self) -> list[str]:
        return _column_colours(self._columns, self._labels, self._ordered)

    @functools.cached_property
    def order(self) -> list[int]:
        """The columns' canonical order."""
        return sorted(range(len(self._columns)), key=self._colours.__getitem__)

    def rows(self, order: Sequence[int]) -> list[tuple[Cell, ...]]:
        """Return the rows with columns in this order, sorted unless row order counts."""
        if not self._columns:
            return []
        rows = list(zip(*(self._columns[index] for index in order), strict=True))
        return rows if self._ordered else sorted(rows, key=_sort_key)

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Yield the column orders that agree with the colours, `order` first."""
        groups = [
            list(group) for _, group in itertools.groupby(self.order, key=self._colours.__getitem__)
        ]
        choices = [self._arrangements(group) for group in groups]
        for parts in itertools.product(*choices):
            yield tuple(itertools.chain.from_iterable(parts))

    def _arrangements(self, group: list[int]) -> list[tuple[int, ...]]:
        """Return the orders of columns of one colour; identical columns need only one."""
        first = self._columns[group[0]]
        if all(self._columns[index] == first for index in group[1:]):
            return [tuple(group)]
        return list(itertools.islice(itertools.permutations(group), _MAX_COLUMN_ORDERS))


def _sort_key(row: tuple[Cell, ...]) -> tuple[tuple[Cell, ...], tuple[float, ...]]:
    """Sort by exact cells first, so that noise in a float cannot misalign two results' rows."""
    exact = tuple(cell for cell in row if not isinstance(cell[1], float))
    return exact, tuple(cell[1] for cell in row if isinstance(cell[1], float))


def _column_colours(columns: Columns, labels: list[str], ordered: bool) -> list[str]:
    """Return one string a column that depends on its values and not on its position.

    Unordered, a column alone is a multiset. Rows are coloured by the columns' colours and columns
    by the rows' in turns, which tells apart columns of equal multisets in different arrangements.
    """
    if ordered:
        return [_digest((label, column)) for label, column in zip(labels, columns, strict=True)]
    height = len(columns[0]) if columns else 0
    rows = [""] * height
    colours = list(labels)
    for _ in range(_REFINEMENTS):
        colours = [
            _digest((label, sorted(zip(map(repr, column), rows, strict=True))))
            for label, column in zip(labels, columns, strict=True)
        ]
        if len(set(colours)) == len(colours):
            break
        rows = [
            _digest(sorted(zip(colours, map(repr, row), strict=True)))
            for row in zip(*columns, strict=True)
        ]
    return colours


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "replace"), digest_size=16).hexdigest()


def _equal_rows(gold: list[tuple[Cell, ...]], answer: list[tuple[Cell, ...]]) -> bool:
    if gold == answer:
        return True
    return all(
        _equal_cells(left, right)
        for a, b in zip(gold, answer, strict=True)
        for left, right in zip(a, b, strict=True)
    )


def _equal_cells(left: Cell, right: Cell) -> bool:
    """Return whether two canonical cells are equal; only a float may differ, within tolerance."""
    if left == right:
        return True
    a, b = left[1], right[1]
    if isinstance(a, str | bytes) or isinstance(b, str | bytes) or left[0] != right[0]:
        return False
    if isinstance(a, int) and isinstance(b, int):
        return False
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

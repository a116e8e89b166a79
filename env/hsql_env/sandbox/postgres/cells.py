"""PostgreSQL's text form of a value -> a cell. Every type without a rule stays text."""

from __future__ import annotations

import math
from collections.abc import Callable

from hsql_env.sandbox.types import Value

# Object ids of built-in types; they never change.
_BOOL, _BYTEA, _INT8, _INT2, _INT4, _OID = 16, 17, 20, 21, 23, 26
_FLOAT4, _FLOAT8, _NUMERIC = 700, 701, 1700


def read_cell(type_id: int, raw: bytes | None) -> Value:
    """Return the cell of a value in PostgreSQL's text form; None is NULL."""
    if raw is None:
        return None
    text = raw.decode(errors="replace")
    reader = _READERS.get(type_id)
    return reader(text) if reader else text


def _bool(text: str) -> Value:
    return "true" if text == "t" else "false"


def _bytea(text: str) -> Value:
    return bytes.fromhex(text.removeprefix("\\x"))


def _numeric(text: str) -> Value:
    """Return an integer where the value is whole and written so, else the nearest float."""
    if text.lstrip("-").isdecimal():
        return int(text) if len(text) <= _MAX_DIGITS else text
    number = float(text)
    is_overflow = math.isinf(number) and "inf" not in text.lower()
    return text if is_overflow else number


_MAX_DIGITS = 4_000  # Python refuses to read longer integers
_READERS: dict[int, Callable[[str], Value]] = {
    _BOOL: _bool,
    _BYTEA: _bytea,
    _INT2: int,
    _INT4: int,
    _INT8: int,
    _OID: int,
    _FLOAT4: float,
    _FLOAT8: float,
    _NUMERIC: _numeric,
}

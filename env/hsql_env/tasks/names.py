"""How identifiers and values are written in SQL and spoken in a question."""

from __future__ import annotations

import re

import apsw

KEYWORDS = frozenset(word.lower() for word in apsw.keywords)
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def quote_name(name: str) -> str:
    """`name` as an SQL identifier: bare where SQLite reads it so, else in double quotes."""
    if _PLAIN.match(name) and name.lower() not in KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_value(value: str | int | float) -> str:
    """`value` as an SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


def spoken(name: str) -> str:
    """An identifier as words: `unit_price`, `UnitPrice` and `unit price` are all `unit price`."""
    words = _BOUNDARY.sub(" ", name.replace("_", " ").replace("-", " "))
    return " ".join(words.lower().split()) or name


def spoken_value(value: str | int | float) -> str:
    """A value as written in a question: in quotes where it is more than one word."""
    if isinstance(value, str) and not re.fullmatch(r"\w+", value):
        return f"'{value}'"
    return str(value)

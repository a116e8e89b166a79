"""Rows of queries whose text is not UTF-8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw

from hsql_env.sandbox.types import Row

_ENCODINGS = {b"a": "utf-8", b"a\0": "utf-16-le", b"\0a": "utf-16-be"}  # by the letter a


def select_decoded(
    connection: apsw.Connection, statement: str, columns: Sequence[str]
) -> Iterator[Row]:
    """Yield the statement's rows, bad bytes of text decoded as replacement characters.

    `statement` is one SELECT or WITH statement and `columns` its column names. The statement runs
    inside another one that fetches text as bytes, next to a flag that says it was text.
    """
    names = [f"c{index}" for index in range(len(columns))]
    cells = ", ".join(
        f"typeof({name}) = 'text', CASE typeof({name}) WHEN 'text' THEN CAST({name} AS BLOB) "
        f"ELSE {name} END"
        for name in names
    )
    inner = _closed(statement.rstrip(" \t\n\f\r;"))
    query = f"WITH undecoded({', '.join(names)}) AS (\n{inner}\n) SELECT {cells} FROM undecoded"
    encoding = _encoding(connection)
    for row in connection.execute(query):
        yield tuple(
            cell.decode(encoding, "replace") if is_text and isinstance(cell, bytes) else cell
            for is_text, cell in zip(row[::2], row[1::2], strict=True)
        )


def _closed(statement: str) -> str:
    """Return the statement with an end to its last comment: without one it would go on for ever."""
    return statement if apsw.complete(f"{statement}\n;") else f"{statement}\n*/"


def _encoding(connection: apsw.Connection) -> str:
    """Return the encoding of the database's text, which is that of text as bytes."""
    letter = connection.execute("SELECT CAST('a' AS BLOB)").fetchall()[0][0]
    assert isinstance(letter, bytes)
    return _ENCODINGS[letter]

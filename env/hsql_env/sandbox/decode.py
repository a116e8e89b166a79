"""Rows of queries whose text is not UTF-8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import apsw

from hsql_env.sandbox.types import Row


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
    inner = statement.rstrip(" \t\n\f\r;")
    query = f"WITH undecoded({', '.join(names)}) AS (\n{inner}\n) SELECT {cells} FROM undecoded"
    for row in connection.execute(query):
        yield tuple(
            cell.decode(errors="replace") if is_text and isinstance(cell, bytes) else cell
            for is_text, cell in zip(row[::2], row[1::2], strict=True)
        )

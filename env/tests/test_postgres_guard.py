"""PostgreSQL's lexical rules, without a server."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsql_env.sandbox import Failure, Limits
from hsql_env.sandbox.backend import identity, is_server
from hsql_env.sandbox.postgres.backend import PostgresBackend
from hsql_env.sandbox.postgres.cells import read_cell
from hsql_env.sandbox.postgres.guard import LexError, check_statement, split_tokens


def kinds(sql: str) -> list[tuple[str, str]]:
    """Return the tokens as pairs of kind and text."""
    return [(token.kind, token.text) for token in split_tokens(sql)]


@pytest.mark.parametrize(
    ("sql", "tokens"),
    [
        ("a$$ $$b$$", [("name", "a$$"), ("string", "$$b$$")]),
        ("\u201c$$ $$b$$", [("name", "\u201c$$"), ("string", "$$b$$")]),
        ("$a$ $b$ $$ $a$", [("string", "$a$ $b$ $$ $a$")]),
        ("e'a\\'b'", [("escape_string", "e'a\\'b'")]),
        ("be'a\\'b", [("name", "be"), ("string", "'a\\'"), ("name", "b")]),
        ("'a\\' b", [("string", "'a\\'"), ("name", "b")]),
        ("U&'x''y'", [("string", "U&'x''y'")]),
        ('"a""b"', [("quoted", 'a"b')]),
        ("+/* x */-", [("symbol", "+"), ("comment", "/* x */"), ("symbol", "-")]),
        ("a--b\n-c", [("name", "a"), ("comment", "--b"), ("symbol", "-"), ("name", "c")]),
    ],
)  # fmt: skip
def test_tokens(sql: str, tokens: list[tuple[str, str]]) -> None:
    assert kinds(sql) == tokens


@given(st.text(alphabet="eEuU&'\"$a1;/*-\\ \n(pg", max_size=40))
def test_tokens_cover_the_text_or_it_is_refused(sql: str) -> None:
    try:
        tokens = list(split_tokens(sql))
    except LexError:
        return
    starts = [token.start for token in tokens]
    assert starts == sorted(set(starts))
    for place, token in enumerate(tokens):
        end = starts[place + 1] if place + 1 < len(starts) else len(sql)
        written = (
            '"' + token.text.replace('"', '""') + '"' if token.kind == "quoted" else token.text
        )
        assert sql[token.start : end].rstrip(" \n") == written.rstrip(" \n")
    check_statement("SELECT " + sql, "default", 100_000)


def test_names_are_denied_where_they_act() -> None:
    def kind(sql: str) -> str:
        found = check_statement(sql, "default", 100_000)
        return found.kind if found else ""

    assert kind("SELECT dblink_exec ('x')") == "denied"
    assert kind("SELECT dblink_exec FROM t") == ""
    assert kind('SELECT "PG_READ_FILE"(1)') == ""  # another function, as quoted names keep case
    assert kind("SELECT lo_orderkey FROM lineorder") == ""
    assert kind("SELECT * FROM pg_stats") == ""
    assert kind("SELECT * FROM pg_stat_statements") == "denied"
    assert kind("SELECT lo_put(1, 2, 'x')") == "denied"
    assert kind("SELECT pg_catalog.pg_relation_filepath('t')") == "denied"
    assert kind("SELECT * FROM pg_get_loaded_modules()") == "denied"
    assert kind("SELECT pg_relation_filenode('t')") == ""
    assert kind("SELECT * FROM foreign_tables, foreign_orders") == ""


def test_too_long_and_not_text() -> None:
    too_large = Failure("too_large", "the query has 12 characters; at most 10")
    assert check_statement("SELECT 12345", "default", 10) == too_large
    refused = check_statement("SELECT '\0'", "default", 100)
    assert refused == Failure("sql_error", "the query holds characters that are not valid text")


def test_cells_that_no_server_sends_often() -> None:
    assert read_cell(25, b"\xff") == "\ufffd"
    assert read_cell(1700, b"1" * 5000) == "1" * 5000
    assert read_cell(1700, b"-12.0") == -12.0
    assert read_cell(17, b"\\x") == b""


def test_locators() -> None:
    assert is_server("postgresql://reader@/shop?host=/run")
    assert is_server("postgres://h/shop")
    assert not is_server("/data/postgresql.sqlite")
    assert identity("postgresql://a") == identity("postgresql://b")
    with pytest.raises(OSError, match="No such file"):
        identity("/nowhere/x.sqlite")


def test_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    expected = Failure(
        "infrastructure", "PostgreSQL needs psycopg: pip install 'hsql-env[postgres]'"
    )
    backend = PostgresBackend()
    assert backend.execute("postgresql://x", "SELECT 1", Limits(), "default").failure == expected
    assert backend.tables("postgresql://x", Limits()) == expected

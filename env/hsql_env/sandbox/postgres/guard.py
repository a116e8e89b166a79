"""What may be sent to a PostgreSQL server: one statement that reads data and nothing else.

A read-only transaction and the role's privileges keep data and files safe. What they leave open is
refused here by name: signalling other sessions, reading their statements, session-wide locks and
settings, and functions that run a string as SQL. Names are found by PostgreSQL's lexical rules, so
one inside a string or a comment is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from hsql_env.sandbox.guard import check_text
from hsql_env.sandbox.types import Failure, GuardProfile

TokenKind = Literal["comment", "string", "escape_string", "quoted", "name", "symbol"]

_LETTER = r"A-Za-z_\x80-\U0010ffff"
_TOKEN = re.compile(
    rf"""
    (?P<blank>[ \t\n\r\f\v]+)
  | (?P<line_comment>--[^\n\r]*)
  | (?P<block_comment>/\*)
  | (?P<escape_string>[eE]'(?:[^'\\]|\\.|'')*(?P<escape_end>')?)
  | (?P<unicode_name>[uU]&")
  | (?P<string>(?:[bBxXnN]|[uU]&)?'(?:[^']|'')*(?P<string_end>')?)
  | (?P<quoted>"(?:[^"]|"")*(?P<quoted_end>")?)
  | (?P<dollar>\$(?:[{_LETTER}][{_LETTER}0-9]*)?\$)
  | (?P<parameter>\$[0-9]+)
  | (?P<name>[{_LETTER}][{_LETTER}0-9$]*)
  | (?P<symbol>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")

# Called as functions; as the name of a column, any of these is fine.
_DENIED_FUNCTIONS = re.compile(
    r"pg_(terminate|cancel)_backend|set_config|current_setting|pg_notify|pg_reload_conf"
    r"|pg_rotate_logfile\w*|pg_switch_wal|pg_create_restore_point|pg_logical_\w+|pg_export_snapshot"
    r"|pg_(try_)?advisory_\w+|pg_read_\w+|pg_ls_\w+|pg_file_\w+|pg_logdir_ls|pg_current_logfile"
    # These tell where the server keeps its files.
    r"|pg_tablespace_location|pg_relation_filepath|pg_get_loaded_modules|pg_show_\w+|pg_hba_file_rules|pg_stat_\w+|pg_stats?_get_\w+"
    r"|pg_(wal|backup|start|stop|promote|replication|create|drop|copy)\w*"
    r"|inet_(server|client)_(addr|port)|dblink\w*|postgres_fdw_\w+"
    r"|lo_(export|import|creat|create|unlink|open|close|put|get|from_bytea|truncate|truncate64"
    r"|lseek|lseek64|tell|tell64)|loread|lowrite"
    # These run a string as SQL, or read every relation of a schema.
    r"|(query|cursor|table|schema|database)_to_xml\w*|ts_stat|ts_rewrite|crosstab\w*|connectby"
    r"|xpath_table"
)
_DENIED_RELATIONS = re.compile(
    r"pg_stat_\w+|pg_statio_\w+|pg_settings|pg_file_settings|pg_hba_file_rules|pg_ident_file\w*"
    r"|pg_prepared_\w+|pg_cursors|pg_locks|pg_foreign_(server|table|data_wrapper)"
    r"|pg_user_mappings?|pg_subscription\w*|pg_replication_\w+|pg_shadow|pg_authid|pg_config"
    r"|pg_backend_memory_contexts|pg_shmem_allocations|user_mapping_options|_pg_user_mappings"
    r"|foreign_(server|table_options|data_wrapper)\w*|_pg_foreign_\w+"
)


class Token(NamedTuple):
    """One token, white space left out; `text` of a quoted name is without its quotes."""

    kind: TokenKind
    text: str
    start: int


class LexError(ValueError):
    """Text that cannot be split into tokens; carries the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def check_statement(sql: str, profile: GuardProfile, max_chars: int) -> Failure | None:
    """Return why the text may not be sent, or None."""
    early = check_text(sql, profile, max_chars)
    if early is not None and early.kind not in ("not_a_query", "not_read_only"):
        return early
    try:
        tokens = [token for token in split_tokens(sql) if token.kind != "comment"]
    except LexError as error:
        return error.failure
    body = _without(tokens, ";")
    first = _without(body, "(")
    if not first:
        return Failure("empty", "the query is empty")
    return (
        check_text(sql[first[0].start :], "default", max_chars)
        or _second_statement(body)
        or _denied_name(body)
    )


def split_tokens(sql: str) -> Iterator[Token]:
    """Yield the tokens. Raises `LexError` for a string, name or comment without an end."""
    place = 0
    previous: TokenKind | None = None
    while place < len(sql):
        match = _TOKEN.match(sql, place)
        assert match is not None
        token, end = _read(sql, match)
        if token is not None:
            if previous == "escape_string" and token.kind == "string":
                # Its escapes may count as the first one's: where it ends is not ours to tell.
                raise LexError(Failure("denied", "an E'' string may not be continued by another"))
            if token.kind != "comment":
                previous = token.kind
            yield token
        place = end


def _read(sql: str, match: re.Match[str]) -> tuple[Token | None, int]:
    """Return the token at a match, None for white space, and where the next one starts."""
    start, end, text = match.start(), match.end(), match[0]
    if match["blank"] is not None:
        return None, end
    if match["line_comment"] is not None:
        return Token("comment", text, start), end
    if match["block_comment"] is not None:
        end = _comment_end(sql, end)
        return Token("comment", sql[start:end], start), end
    if match["unicode_name"] is not None:
        raise LexError(Failure("denied", 'names written as U&"..." are not allowed'))
    if match["parameter"] is not None:
        raise LexError(Failure("sql_error", f"there is no parameter {text}"))
    if match["dollar"] is not None:
        end = sql.find(text, end)
        if end < 0:
            raise _unended("dollar-quoted string")
        return Token("string", sql[start : end + len(text)], start), end + len(text)
    if match["escape_string"] is not None:
        return _ended(Token("escape_string", text, start), match["escape_end"], end)
    if match["string"] is not None:
        return _ended(Token("string", text, start), match["string_end"], end)
    if match["quoted"] is not None:
        name = text[1:-1].replace('""', '"')
        return _ended(Token("quoted", name, start), match["quoted_end"], end)
    kind: TokenKind = "name" if match["name"] is not None else "symbol"
    return Token(kind, text, start), end


def _ended(token: Token, quote: str | None, end: int) -> tuple[Token, int]:
    if quote is None:
        raise _unended("quoted identifier" if token.kind == "quoted" else "quoted string")
    return token, end


def _unended(what: str) -> LexError:
    return LexError(Failure("sql_error", f"unterminated {what}"))


def _comment_end(sql: str, place: int) -> int:
    """Return where a block comment ends; they nest."""
    depth = 1
    for edge in _COMMENT_EDGE.finditer(sql, place):
        depth += 1 if edge[0] == "/*" else -1
        if depth == 0:
            return edge.end()
    raise _unended("/* comment")


def _without(tokens: list[Token], symbol: str) -> list[Token]:
    """Return the tokens after any number of this symbol at the start."""
    place = 0
    while place < len(tokens) and tokens[place][:2] == ("symbol", symbol):
        place += 1
    return tokens[place:]


def _second_statement(tokens: list[Token]) -> Failure | None:
    for place, token in enumerate(tokens):
        if token[:2] == ("symbol", ";") and _without(tokens[place:], ";"):
            return Failure("multi_statement", "only one statement is allowed per query")
    return None


def _denied_name(tokens: list[Token]) -> Failure | None:
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.kind not in ("name", "quoted"):
            continue
        name = token.text.lower() if token.kind == "name" else token.text
        is_call = following is not None and following[:2] == ("symbol", "(")
        if is_call and _DENIED_FUNCTIONS.fullmatch(name):
            return Failure("denied", f"the function {name} is not allowed")
        if _DENIED_RELATIONS.fullmatch(name):
            return Failure("denied", f"the relation {name} is not allowed")
    return None

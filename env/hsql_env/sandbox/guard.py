"""What may run: exactly one read-only statement that starts SELECT, WITH or EXPLAIN.

The text is looked at only up to its first word. Whether there is a second statement and whether
the first is read-only is SQLite's own parser's answer (`StatementCheck`), and what a statement may
touch is an allow-list asked by SQLite while it prepares (`Authorizer`).
"""

from __future__ import annotations

import re

import apsw

from hsql_env.sandbox.types import Failure, FailureKind, GuardProfile

# SQLite's white space and comments; a block comment without an end runs to the end.
_COMMENT = r"--[^\n]*|/\*(?:.*?\*/|.*\Z)"
_BLANK = re.compile(rf"(?:[ \t\n\f\r\ufeff;]|{_COMMENT})*", re.DOTALL)
_TEXT_NAME = re.compile(r'no such column: "(.*)" - should this be a string literal', re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]+")
_QUERY_WORDS = frozenset({"SELECT", "WITH", "EXPLAIN"})
_WRITE_WORDS = frozenset(
    "ALTER ANALYZE ATTACH CREATE DELETE DETACH DROP INSERT MERGE REINDEX REPLACE TRUNCATE UPDATE "
    "VACUUM".split()
)

_ALLOWED_ACTIONS = frozenset(
    {apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}
)
_NEUTRAL_ACTIONS = frozenset({apsw.SQLITE_PRAGMA, apsw.SQLITE_TRANSACTION, apsw.SQLITE_SAVEPOINT})
_DENIED_FUNCTIONS = frozenset(
    {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "sqlite_log", "lsdir"}
)
# Read-only pragmas that describe the schema; data_version is what FTS5 asks of itself.
_ALLOWED_PRAGMAS = frozenset(
    {
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
        "function_list",
        "collation_list",
        "data_version",
    }
)


def check_text(sql: str, profile: GuardProfile, max_chars: int) -> Failure | None:
    """Return why the text may not even be prepared, or None."""
    if len(sql) > max_chars:
        return Failure("too_large", f"the query has {len(sql)} characters; at most {max_chars}")
    if "\0" in sql or not _is_unicode(sql):
        return Failure("sql_error", "the query holds characters that are not valid text")
    lead = _BLANK.match(sql)
    start = lead.end() if lead else 0
    if start == len(sql):
        return Failure("empty", "the query is empty")
    if profile == "strict" and sql[:start].strip(" \t\n\f\r\ufeff;"):
        return Failure("leading_comment", "a query may not start with a comment")
    return _check_first_word(sql, start)


def _is_unicode(sql: str) -> bool:
    try:
        sql.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_first_word(sql: str, start: int) -> Failure | None:
    match = _WORD.match(sql, start)
    word = match.group().upper() if match else sql[start]
    if word in _QUERY_WORDS:
        return None
    if word in _WRITE_WORDS:
        return Failure("not_read_only", f"only read-only queries are allowed, not {word}")
    return Failure("not_a_query", f"a query must start with SELECT, WITH or EXPLAIN, not {word}")


class Refused(Exception):
    """Raised inside a prepare to stop the statement; carries the failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


class StatementCheck:
    """An execution tracer: called after SQLite has parsed a statement and before its first step.

    Keeps the result's column names, which a finished cursor no longer tells.
    """

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self.statement = ""
        self.columns: tuple[str, ...] | None = None
        self.explains = False

    def __call__(self, cursor: apsw.Cursor, statement: str, bindings: object) -> bool:
        """Accept the first statement; raise `Refused` on a write or on a second statement."""
        if self.columns is not None:
            return True  # the blank tail: nothing in it, as checked with the first statement
        tail = _BLANK.match(self.sql, len(statement))
        if tail is None or tail.end() < len(self.sql):
            raise Refused("multi_statement", "only one statement is allowed per query")
        if not cursor.is_readonly:
            raise Refused("not_read_only", "only read-only queries are allowed")
        self.statement = statement
        self.explains = cursor.is_explain > 0
        self.columns = tuple(column[0] for column in cursor.get_description())
        return True


def find_text_name(connection: apsw.Connection, sql: str) -> str:
    """Return the first name in double quotes that SQLite read as text, "" if there is none.

    SQLite does so where no column has the name. The statement is prepared once more under the
    rule of standard SQL, by which that is an error, and not run.
    """
    if '"' not in sql:
        return ""
    cursor = connection.cursor()
    cursor.exec_trace = _prepare_only
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
    try:
        cursor.execute(sql, can_cache=False)
    except apsw.ExecTraceAbort:
        return ""
    except apsw.Error as error:
        match = _TEXT_NAME.search(str(error))
        return match.group(1) if match else ""
    finally:
        connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 1)
        cursor.close(True)
    return ""


def _prepare_only(cursor: apsw.Cursor, statement: str, bindings: object) -> bool:
    return False


class Authorizer:
    """SQLite's authorizer as an allow-list; remembers the first action it denied."""

    def __init__(self) -> None:
        self.denied: Failure | None = None

    def __call__(
        self, action: int, first: str | None, second: str | None, schema: str | None, by: str | None
    ) -> int:
        """Return SQLITE_OK for reading, SQLITE_DENY for everything else."""
        if action == apsw.SQLITE_FUNCTION:
            allowed = (second or "").lower() not in _DENIED_FUNCTIONS
        elif action == apsw.SQLITE_PRAGMA:
            allowed = (first or "").lower() in _ALLOWED_PRAGMAS
        else:
            allowed = action in _ALLOWED_ACTIONS
        if allowed:
            return apsw.SQLITE_OK
        if self.denied is None:
            self.denied = _denial(action, first, second)
        return apsw.SQLITE_DENY


def _denial(action: int, first: str | None, second: str | None) -> Failure:
    if action == apsw.SQLITE_FUNCTION:
        return Failure("denied", f"the function {second} is not allowed")
    if action == apsw.SQLITE_PRAGMA:
        return Failure("denied", f"the pragma {first} is not allowed")
    if action in _NEUTRAL_ACTIONS:
        return Failure("denied", "transactions are not allowed")
    return Failure("not_read_only", "only read-only queries are allowed")

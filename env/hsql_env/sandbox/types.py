"""What goes into the sandbox and what comes out: limits, failures, executions, tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

# A cell as SQLite stores it; text that is not UTF-8 holds replacement characters.
Value = int | float | str | bytes | None
Row = tuple[Value, ...]

GuardProfile = Literal["default", "strict"]

FailureKind = Literal[
    "empty",  # no statement at all
    "multi_statement",
    "not_read_only",
    "leading_comment",  # strict profile only
    "not_a_query",  # does not start with SELECT, WITH or EXPLAIN
    "denied",  # refused by the authorizer
    "sql_error",
    "timeout",
    "memory",
    "too_large",
    "infrastructure",  # the sandbox failed, not the query
]


class _Fast:
    """Pickles a dataclass as a call of its class: the way of frozen ones costs a query's time."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), tuple(map(self.__getattribute__, self.__slots__))


@dataclass(frozen=True, slots=True)
class Limits(_Fast):
    """Bounds on one statement."""

    wall_s: float = 60.0  # seconds; enforced from outside by killing the worker
    rows: int = 50  # rows kept
    max_rows: int = 1_000_000  # rows counted; past it the total is a lower bound
    count_s: float = 5.0  # seconds for counting the rows that are not kept, likewise
    memory_mb: int = 1024  # SQLite's heap, MiB
    result_mb: int = 64  # kept rows, MiB
    sql_chars: int = 100_000


@dataclass(frozen=True, slots=True)
class Failure(_Fast):
    """Why a statement did not run to its end; `message` may be shown to a policy."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Execution(_Fast):
    """The outcome of one statement: at most `Limits.rows` rows, and how many there were."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    total_rows: int = 0
    total_exact: bool = True  # False: counting stopped at `Limits.max_rows` or `count_s`
    text_name: str = ""  # a name in double quotes that is none, so that SQLite read it as text
    failure: Failure | None = None
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the statement ran to its end."""
        return self.failure is None

    @property
    def complete(self) -> bool:
        """Whether every row of the result is in `rows`."""
        return self.ok and self.total_exact and self.total_rows == len(self.rows)


@dataclass(frozen=True, slots=True)
class Table(_Fast):
    """One table or view, with what the list and schema tools show of it."""

    name: str
    kind: Literal["table", "view"]
    sql: str  # the CREATE statement as stored
    row_count: int | None  # None: counting failed or took too long (views only)
    sample_columns: tuple[str, ...]
    sample_rows: tuple[Row, ...]  # the first 3

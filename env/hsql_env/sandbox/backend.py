"""Kinds of database: what a worker process needs of one, and which one a locator names."""

from __future__ import annotations

from typing import Literal, Protocol

from hsql_env.sandbox.open import FileIdentity, file_identity
from hsql_env.sandbox.types import Execution, Failure, GuardProfile, Limits, Table

Dialect = Literal["SQLite", "PostgreSQL", "BigQuery"]

_SCHEMES: dict[str, Dialect] = {
    "postgresql://": "PostgreSQL",
    "postgres://": "PostgreSQL",
    "bigquery://": "BigQuery",
}
_NEVER_CHANGES: FileIdentity = (0, 0, 0)


class Backend(Protocol):
    """One kind of database inside a worker process. No method raises; failures are values.

    A backend need not enforce `Limits.wall_s`: the parent kills the worker process at that limit.
    What the process has set off elsewhere must then end by itself.
    """

    def execute(self, locator: str, sql: str, limits: Limits, guard: GuardProfile) -> Execution:
        """Execute one read-only statement."""
        ...

    def tables(self, locator: str, limits: Limits) -> tuple[Table, ...] | Failure:
        """Describe every table and view."""
        ...


def dialect(locator: str) -> Dialect:
    """Return the kind of database that a locator names: by its scheme, else a SQLite file."""
    for scheme, name in _SCHEMES.items():
        if locator.startswith(scheme):
            return name
    return "SQLite"


def is_server(locator: str) -> bool:
    """Return whether a locator names a database of a server, not a SQLite file."""
    return dialect(locator) != "SQLite"


def unknown_scheme(locator: str) -> str:
    """Return why a locator names no kind of database that there is, "" if it names one."""
    scheme, found, _ = locator.partition("://")
    if not found or "/" in scheme or is_server(locator):
        return ""
    known = ", ".join(_SCHEMES)
    return f"{scheme}://: no such kind of database; name a SQLite file, or one of {known}"


def identity(locator: str) -> FileIdentity:
    """Return what changes when the locator names another database.

    The tables of a server's database are taken not to change while a pool lives. Raises `OSError`
    for a file that cannot be read.
    """
    return _NEVER_CHANGES if is_server(locator) else file_identity(locator)

"""A BigQuery backend, UNTESTED AGAINST THE SERVICE: tried with its client and a stand-in only.

A locator is `bigquery://project/dataset`, with `?max_bytes=N` for another cap on what one statement
may read. A dry run, which costs nothing, tells what kind of statement it is and how much it would
read; only then is it run, and the service is told to refuse to bill more than the cap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

from hsql_env.sandbox.guard import check_text
from hsql_env.sandbox.types import (
    Execution,
    Failure,
    FailureKind,
    GuardProfile,
    Limits,
    Row,
    Table,
    Value,
)

if TYPE_CHECKING:
    from google.cloud import bigquery

MAX_BYTES = 1_000_000_000  # read by one statement, where the locator names no other cap
_SAMPLE_ROWS = 3
_MAX_TABLES = 500
_MIB = 1024 * 1024
# What the service calls a reason -> what it means here; any other is the service's own failure.
_REASONS: dict[str, FailureKind] = {
    "accessDenied": "denied",
    "bytesBilledLimitExceeded": "too_large",
    "invalid": "sql_error",
    "invalidQuery": "sql_error",
    "notFound": "sql_error",
    "resourcesExceeded": "too_large",
    "responseTooLarge": "too_large",
    "stopped": "timeout",
    "timeout": "timeout",
}


class Place(NamedTuple):
    """What a locator names."""

    project: str
    dataset: str
    max_bytes: int


class Failed(Exception):
    """A statement that failed; carries the failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


def default_client(project: str) -> bigquery.Client:
    """Return a client with the credentials of the environment."""
    from google.cloud import bigquery

    return bigquery.Client(project=project)


class BigQueryBackend:
    """One client a project."""

    def __init__(self, make_client: Callable[[str], bigquery.Client] = default_client) -> None:
        self._make_client = make_client
        self._clients: dict[str, bigquery.Client] = {}

    def execute(self, locator: str, sql: str, limits: Limits, guard: GuardProfile) -> Execution:
        """Execute one SELECT statement; never raises."""
        start = time.perf_counter()
        refused = check_text(sql, guard, limits.sql_chars)
        if refused is not None:
            return Execution(failure=refused)
        try:
            place = read_locator(locator)
            done = _run(self._client(place.project), place, sql, limits)
        except Exception as error:
            done = Execution(failure=_failure(error))
        return replace(done, elapsed_s=time.perf_counter() - start)

    def tables(self, locator: str, limits: Limits) -> tuple[Table, ...] | Failure:
        """Describe the dataset's tables and views, which reads none of their rows; never raises."""
        try:
            place = read_locator(locator)
            return tuple(_tables(self._client(place.project), place))
        except Exception as error:
            return _failure(error)

    def _client(self, project: str) -> bigquery.Client:
        if project not in self._clients:
            self._clients[project] = self._make_client(project)
        return self._clients[project]


def read_locator(locator: str) -> Place:
    """Return what the locator names. Raises `Failed`."""
    parts = urlsplit(locator)
    dataset = parts.path.strip("/")
    asked = parse_qs(parts.query).get("max_bytes", [str(MAX_BYTES)])[-1]
    if not parts.netloc or not dataset or "/" in dataset or not asked.isdecimal():
        raise Failed("infrastructure", "the database's locator is not a valid address")
    return Place(parts.netloc, dataset, int(asked))


def _run(client: bigquery.Client, place: Place, sql: str, limits: Limits) -> Execution:
    plan = client.query(sql, job_config=_config(place, limits, dry_run=True))
    _check_plan(str(plan.statement_type or ""), int(plan.total_bytes_processed or 0), place)
    job = client.query(sql, job_config=_config(place, limits, dry_run=False))
    found = job.result(max_results=limits.rows)
    rows: list[Row] = []
    room = limits.result_mb * _MIB
    for row in found:
        cells = tuple(read_cell(value) for value in row.values())
        room -= sum(len(cell) for cell in cells if isinstance(cell, str | bytes)) + 8 * len(cells)
        if room < 0:
            raise Failed("too_large", f"the result is larger than {limits.result_mb} MiB")
        rows.append(cells)
    total = int(found.total_rows or 0)
    return Execution(tuple(field.name for field in found.schema), tuple(rows), total)


def _config(place: Place, limits: Limits, dry_run: bool) -> bigquery.QueryJobConfig:
    from google.cloud import bigquery

    config = bigquery.QueryJobConfig(
        default_dataset=f"{place.project}.{place.dataset}",
        dry_run=dry_run,
        maximum_bytes_billed=place.max_bytes,
        use_legacy_sql=False,
        use_query_cache=not dry_run,
    )
    config.job_timeout_ms = max(1, int(limits.wall_s * 1000))
    return config


def _check_plan(statement: str, read_bytes: int, place: Place) -> None:
    """Raise `Failed` unless the dry run found one SELECT that reads no more than the cap."""
    if statement == "SCRIPT":
        raise Failed("multi_statement", "only one statement is allowed per query")
    if statement != "SELECT":
        raise Failed("not_read_only", "only read-only queries are allowed")
    if read_bytes > place.max_bytes:
        raise Failed(
            "too_large", f"the query would read {read_bytes} bytes; at most {place.max_bytes}"
        )


def read_cell(value: object) -> Value:
    """Return a value of the client as a cell; nested ones as JSON, times as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _tables(client: bigquery.Client, place: Place) -> Iterator[Table]:
    for listed in client.list_tables(f"{place.project}.{place.dataset}", max_results=_MAX_TABLES):
        table = client.get_table(listed.reference)
        is_view = table.table_type != "TABLE"
        sample = () if is_view else _sample(client, table)
        yield Table(
            name=table.table_id,
            kind="view" if is_view else "table",
            sql=_statement(table, is_view),
            row_count=None if is_view else int(table.num_rows or 0),
            sample_columns=tuple(field.name for field in table.schema),
            sample_rows=sample,
        )


def _sample(client: bigquery.Client, table: bigquery.Table) -> tuple[Row, ...]:
    """Return the first rows, which are not billed: they are listed, not queried."""
    rows = client.list_rows(table, max_results=_SAMPLE_ROWS)
    return tuple(tuple(read_cell(value) for value in row.values()) for row in rows)


def _statement(table: bigquery.Table, is_view: bool) -> str:
    if is_view and table.view_query:
        return f"CREATE VIEW `{table.table_id}` AS {table.view_query}"
    columns = ", ".join(_column(field) for field in table.schema)
    return f"CREATE TABLE `{table.table_id}` ({columns})"


def _column(field: bigquery.SchemaField) -> str:
    kind = str(field.field_type)
    if field.fields:
        kind = f"STRUCT<{', '.join(_column(inner) for inner in field.fields)}>"
    if field.mode == "REPEATED":
        kind = f"ARRAY<{kind}>"
    return f"{field.name} {kind}" + (" NOT NULL" if field.mode == "REQUIRED" else "")


def _failure(error: Exception) -> Failure:
    """Return the failure that an exception stands for; never with an address in its text."""
    if isinstance(error, Failed):
        return error.failure
    if isinstance(error, ImportError):
        message = "BigQuery needs its client: pip install 'hsql-env[bigquery]'"
        return Failure("infrastructure", message)
    said = getattr(error, "errors", None)
    first = said[0] if isinstance(said, list) and said and isinstance(said[0], dict) else {}
    reason = str(first.get("reason", ""))
    kind = _REASONS.get(reason)
    if kind is None:
        what = reason or type(error).__name__
        return Failure("infrastructure", f"the database service failed: {what}")
    if kind == "timeout":
        return Failure("timeout", "the query took longer than its time limit")
    return Failure(kind, str(first.get("message", reason)))

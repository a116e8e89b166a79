"""`hsql-env inspect`: what the catalog knows of a database, for people or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from hsql_env.commands import CommandError
from hsql_env.commands.execute import cell_json, print_json
from hsql_env.harness.render import render_cell
from hsql_env.registry import open_database
from hsql_env.sandbox import SandboxPool
from hsql_env.sandbox.backend import is_server
from hsql_env.tasks.catalog import Catalog, CatalogError, Column, JoinPath, Table, read_catalog

_SHOWN_SAMPLES = 4
_SAMPLE_CHARS = 24
_PIPE_WIDTH = 160  # characters of a line where there is no terminal to ask


@dataclass(frozen=True)
class Inspect:
    """Show a database's tables, columns, statistics, sample values and join paths."""

    database: tyro.conf.Positional[str]
    """A SQLite file."""
    json: bool = False
    """Print JSON instead of tables."""


def run(command: Inspect) -> int:
    """Print the catalog; return the exit code. Raises `CommandError` or `DatabaseError`."""
    if is_server(command.database):
        raise CommandError("inspect reads SQLite files only")
    database = open_database(command.database)
    with SandboxPool(workers=1) as pool:
        try:
            catalog = read_catalog(database, pool)
        except CatalogError as error:
            raise CommandError(str(error)) from error
    if command.json:
        print_json(catalog_json(catalog), indent=2)
    else:
        print_catalog(catalog)
    return 0


def catalog_json(catalog: Catalog) -> dict[str, Any]:
    """Return the catalog as plain JSON values."""
    return {
        "database": catalog.database.database_id,
        "sha256": catalog.database.sha256,
        "tables": [_table_json(table) for table in catalog.tables],
        "joins": [_join_json(join) for join in catalog.joins],
        "left_out": list(catalog.skipped),
    }


def _table_json(table: Table) -> dict[str, Any]:
    return {
        "name": table.name,
        "kind": table.kind,
        "rows": table.rows,
        "scanned_rows": table.scanned,
        "columns": [_column_json(table, column) for column in table.columns],
    }


def _column_json(table: Table, column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": column.declared,
        "primary_key": column.primary,
        "null_share": null_share(table, column),
        "distinct": column.distinct,
        "low": cell_json(column.low),
        "high": cell_json(column.high),
        "samples": [cell_json(value) for value in column.values],
    }


def _join_json(join: JoinPath) -> dict[str, Any]:
    return {
        "child": join.child,
        "child_column": join.child_column,
        "parent": join.parent,
        "parent_column": join.parent_column,
        "found": join.kind,
        "matched_rows": join.rows,
        "unmatched_rows": join.loose,
    }


def null_share(table: Table, column: Column) -> float:
    """Return which share of the scanned rows is NULL, to four places."""
    return round(column.nulls / table.scanned, 4) if table.scanned else 0.0


def print_catalog(catalog: Catalog) -> None:
    """Print one grid a table, then the join paths and what was left out."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    for table in catalog.tables:
        console.print(_table_grid(table))
    if catalog.joins:
        console.print(_join_grid(catalog.joins))
    for reason in catalog.skipped:
        console.print(Text(f"left out: {_one_line(reason)}"))


def _table_grid(table: Table) -> Grid:
    scanned = "" if table.scanned == table.rows else f"; figures of the first {table.scanned:,}"
    title = f"{_one_line(table.name)} ({table.kind}, {_rows(table.rows)}{scanned})"
    grid = _grid(title, "column", "type", "key", "NULL", "distinct", "samples")
    for column in table.columns:
        cells = (
            _one_line(column.name),
            column.declared,
            "primary" if column.primary else "",
            f"{null_share(table, column):.1%}",
            f"{column.distinct:,}",
            _samples(column),
        )
        grid.add_row(*map(Text, cells))
    return grid


def _join_grid(joins: Iterable[JoinPath]) -> Grid:
    grid = _grid("join paths", "child", "parent", "found", "matched", "unmatched")
    for join in joins:
        child, parent = (
            f"{join.child}.{join.child_column}",
            f"{join.parent}.{join.parent_column}",
        )
        counts = f"{join.rows:,}", f"{join.loose:,}"
        grid.add_row(*map(Text, (_one_line(child), _one_line(parent), join.kind, *counts)))
    return grid


def _grid(title: str, *columns: str) -> Grid:
    grid = Grid(title=Text(title, style="bold"), title_justify="left")
    for column in columns:
        is_figure = column in ("NULL", "distinct", "matched", "unmatched")
        grid.add_column(column, overflow="fold", justify="right" if is_figure else "left")
    return grid


def _samples(column: Column) -> str:
    shown = [_cut(_one_line(render_cell(value))) for value in column.values[:_SHOWN_SAMPLES]]
    return ", ".join(shown)


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARS else text[: _SAMPLE_CHARS - 1] + "…"


def _one_line(text: str) -> str:
    """Return the text with control characters escaped, so that data cannot move the cursor."""
    return "".join(
        f"\\x{ord(letter):02x}" if ord(letter) < 32 or 127 <= ord(letter) < 160 else letter
        for letter in text
    )


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"

"""The catalog of built and of real databases, read through the sandbox."""

import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from hsql_env.records import Database
from hsql_env.sandbox import SandboxPool
from hsql_env.tasks import catalog as module
from hsql_env.tasks.catalog import Catalog, CatalogError, JoinPath, read_catalog

REAL = Path(os.environ.get("HSQL_SHARED", Path(__file__).parents[3] / "shared")) / (
    "data/dbs_general"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(workers=1) as pool:
        yield pool


def build(path: Path, *statements: str) -> Database:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return Database(database_id=path.stem, path=str(path), sha256="")


def unpack(name: str, folder: Path) -> Database:
    packed = REAL / f"{name}.sqlite.xz"
    if not packed.exists():
        pytest.skip(f"no {packed}: set HSQL_SHARED to the folder that holds data/dbs_general")
    path = folder / f"{name}.sqlite"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return Database(database_id=name, path=str(path), sha256="")


def paths(catalog: Catalog) -> set[tuple[str, str, str, str, str]]:
    return {
        (join.kind, join.child, join.child_column, join.parent, join.parent_column)
        for join in catalog.joins
    }


def test_column_statistics(tmp_path: Path, pool: SandboxPool) -> None:
    database = build(
        tmp_path / "stats.sqlite",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER, r REAL, s TEXT, d TEXT, b BLOB)",
        "INSERT INTO t VALUES (1, 10, 0.5, 'x', '12', x'00'), (2, NULL, 1.5, 'yy', '7', x'01'), "
        "(3, 10, 2.5, 'x', '007', NULL)",
    )
    table = read_catalog(database, pool).table("T")
    assert (table.kind, table.rows, table.scanned) == ("table", 3, 3)
    assert [column.name for column in table.columns if column.primary] == ["id"]
    number = table.column("N")
    assert (number.nulls, number.distinct, number.low, number.high) == (1, 1, 10, 10)
    assert (number.integers, number.reals, number.texts) == (2, 0, 0)
    assert table.column("r").reals == 3
    text = table.column("s")
    assert (text.distinct, text.longest, set(text.values)) == (2, 2, {"x", "yy"})
    assert table.column("d").texts == 3
    assert table.column("d").digits == 2  # '007' does not spell an integer
    assert (table.column("b").nulls, table.column("b").values) == (1, ())


def test_odd_names_views_and_empty_tables(tmp_path: Path, pool: SandboxPool) -> None:
    database = build(
        tmp_path / "odd.sqlite",
        'CREATE TABLE "a ""b" ("x y" INTEGER, "order" TEXT)',
        """INSERT INTO "a ""b" VALUES (1, 'o''k'), (2, 'é')""",
        'CREATE TABLE "order" (ünï INTEGER)',
        'INSERT INTO "order" VALUES (5)',
        'CREATE VIEW "the view" AS SELECT "x y" AS z FROM "a ""b"',
        "CREATE VIEW broken AS SELECT * FROM nowhere",
        "CREATE TABLE empty (a TEXT)",
    )
    catalog = read_catalog(database, pool)
    assert {(table.name, table.kind, table.rows) for table in catalog.tables} == {
        ('a "b', "table", 2),
        ("order", "table", 1),
        ("the view", "view", 2),
    }
    assert set(catalog.table('a "b').column("order").values) == {"o'k", "é"}
    assert catalog.table("order").column("ünï").values == (5,)
    assert catalog.skipped == ("broken: no such table: main.nowhere", "empty: no rows")


def test_declared_joins_are_executed(tmp_path: Path, pool: SandboxPool) -> None:
    database = build(
        tmp_path / "declared.sqlite",
        "CREATE TABLE p (id INTEGER PRIMARY KEY, a INTEGER, b INTEGER, UNIQUE (a, b))",
        "INSERT INTO p VALUES (1, 1, 1), (2, 1, 2), (3, 2, 1)",
        "CREATE TABLE c (id INTEGER PRIMARY KEY, p_id INTEGER REFERENCES p, dup INTEGER "
        "REFERENCES p(a), gone INTEGER REFERENCES missing(id), none INTEGER REFERENCES p(id), "
        "k1 INTEGER, k2 INTEGER, FOREIGN KEY (k1, k2) REFERENCES p(a, b))",
        "INSERT INTO c VALUES (1, 1, 1, 1, 77, 1, 1), (2, 1, 1, 1, 78, 1, 2), "
        "(3, NULL, 1, 1, NULL, 1, 2), (4, 99, 1, 1, 79, 1, 2)",
    )
    # Not unique, not there, no live row, and composite: none of these is a path.
    assert read_catalog(database, pool).joins == (
        JoinPath("c", "p_id", "p", "id", "declared", rows=2, loose=2),
    )


def test_inferred_joins_need_a_name_a_unique_side_and_rows(
    tmp_path: Path, pool: SandboxPool
) -> None:
    database = build(
        tmp_path / "inferred.sqlite",
        "CREATE TABLE cities (id INTEGER, code TEXT, kind TEXT)",
        "INSERT INTO cities VALUES (1, 'A', 'x'), (2, 'B', 'x'), (3, 'C', 'y')",
        "CREATE TABLE shops (id INTEGER, city_id INTEGER, kind TEXT)",
        "INSERT INTO shops VALUES (1, 1, 'x'), (2, 1, 'y'), (3, 2, 'x'), (4, NULL, 'x')",
        "CREATE TABLE trips (trip_id INTEGER, city_id INTEGER)",  # points elsewhere
        "INSERT INTO trips VALUES (1, 100), (2, 200), (3, 300)",
    )
    assert paths(read_catalog(database, pool)) == {("inferred", "shops", "city_id", "cities", "id")}


def test_large_tables_are_read_by_a_prefix(
    tmp_path: Path, pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCAN_ROWS", 10)
    database = build(
        tmp_path / "large.sqlite",
        "CREATE TABLE t AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c "
        "WHERE n < 500) SELECT n FROM c",
    )
    table = read_catalog(database, pool).tables[0]
    assert (table.rows, table.scanned, table.columns[0].high) == (500, 10, 10)
    assert not module.is_unique(table, table.columns[0])  # only a whole scan proves it


def test_a_file_that_is_no_database(tmp_path: Path, pool: SandboxPool) -> None:
    path = tmp_path / "text.sqlite"
    path.write_text("this is not a database, however long it may be" * 50)
    with pytest.raises(CatalogError, match="text: no schema"):
        read_catalog(Database(database_id="text", path=str(path), sha256=""), pool)


def test_chinook_has_its_eleven_joins(tmp_path: Path, pool: SandboxPool) -> None:
    catalog = read_catalog(unpack("chinook", tmp_path), pool)
    assert catalog.table("Track").rows == 3503
    assert len(catalog.joins) == 11
    assert ("declared", "Employee", "ReportsTo", "Employee", "EmployeeId") in paths(catalog)
    assert all(join.kind == "declared" for join in catalog.joins)


def test_flights_joins_are_inferred(tmp_path: Path, pool: SandboxPool) -> None:
    catalog = read_catalog(unpack("nycflights13_jan", tmp_path), pool)
    assert paths(catalog) == {
        ("inferred", "flights", "carrier", "airlines", "carrier"),
        ("inferred", "flights", "tailnum", "planes", "tailnum"),
    }
    assert catalog.table("flights").rows == 27004


def test_virtual_and_shadow_tables_are_left_out(tmp_path: Path, pool: SandboxPool) -> None:
    names = {
        table.name for table in read_catalog(unpack("datasette_fixtures", tmp_path), pool).tables
    }
    assert {"select", "table/with/slashes.csv", "binary_data"} <= names
    assert not {name for name in names if name.startswith("searchable_fts")}

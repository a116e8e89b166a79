"""Database files that may not be used, and what the user is told."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CITY_SQL, build_database

from hsql_env import registry
from hsql_env.records import Database
from hsql_env.registry import (
    DatabaseError,
    check_databases,
    find_databases,
    open_database,
    open_folder,
)
from hsql_env.sandbox import SandboxPool


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A fresh copy of the city database."""
    return build_database(tmp_path / "city.sqlite", CITY_SQL)


def test_an_unknown_kind_of_database_is_refused() -> None:
    record = Database(database_id="shop", path="mysql://root:secret@host/shop", sha256="")
    message = r"^mysql://: no such kind of database; .* postgresql://, postgres://, bigquery://$"
    with pytest.raises(DatabaseError, match=message):
        check_databases([record])


def test_good_file(file: Path) -> None:
    database = open_database(file)
    assert database.database_id == "city"
    assert database.path == str(file.resolve())
    assert database.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert open_database(file, "other").database_id == "other"


def test_find(tmp_path: Path) -> None:
    for name in ("b.sqlite", "a.DB", "sub/c.sqlite3", "sub/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.db").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in find_databases(tmp_path)]
    assert found == ["a.DB", "b.sqlite", "sub/c.sqlite3"]


def test_find_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"no databases; put files ending in \.db, \.sqlite"):
        find_databases(tmp_path)
    with pytest.raises(DatabaseError, match="not a folder"):
        find_databases(tmp_path / "gone")


def test_a_folder_is_opened_whole_with_ids_of_its_own(tmp_path: Path) -> None:
    for name in ("city.db", "a/city.sqlite", "a/town.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        build_database(tmp_path / name, CITY_SQL)
    assert [record.database_id for record in open_folder(tmp_path)] == [
        "a/city.sqlite",
        "town",
        "city.db",
    ]


def test_a_folder_with_bad_files_is_refused_naming_the_first(file: Path) -> None:
    file.with_name("a.db").write_bytes(b"no database")
    file.with_name("b.db").touch()
    with pytest.raises(DatabaseError) as caught:
        open_folder(file.parent)
    assert str(caught.value) == (
        f"{file.with_name('a.db')}: not a SQLite database; remove it or name another file "
        "(1 more of 3 files fail)"
    )


def check_refused(file: Path, reason: str) -> None:
    """Assert that the file is refused with one line that names it."""
    with pytest.raises(DatabaseError, match=reason) as caught:
        open_database(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_not_sqlite(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"PK\x03\x04 not a database")
    check_refused(tmp_path / "x.db", "not a SQLite database")
    (tmp_path / "empty.db").touch()
    check_refused(tmp_path / "empty.db", "not a SQLite database")
    check_refused(tmp_path / "gone.db", "No such file")
    check_refused(tmp_path, "a folder")


@pytest.mark.parametrize("keep", [50, 4096, 9000])
def test_truncated(file: Path, keep: int) -> None:
    os.truncate(file, keep)
    check_refused(file, "truncated")


def test_corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    file.write_bytes(data)
    check_refused(file, "corrupt, .*restore it from a good copy")


def test_locked(file: Path) -> None:
    holder = sqlite3.connect(file)
    holder.execute("BEGIN EXCLUSIVE")
    program = "import sys; from hsql_env.registry import open_database; open_database(sys.argv[1])"
    said = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    holder.close()
    assert said.returncode == 1
    assert f"DatabaseError: {file}: locked by another program" in said.stderr
    open_database(file)


def test_live_wal_is_refused_and_a_closed_one_is_whole(file: Path, pool: SandboxPool) -> None:
    writer = sqlite3.connect(file)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO city (id) VALUES (4)")
    writer.commit()
    check_refused(file, "in use, city.sqlite-wal holds changes")
    writer.close()
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        database = open_database(file)
        assert pool.execute(database.path, "SELECT count(*) FROM city").rows == ((4,),)
    finally:
        file.parent.chmod(stat.S_IRWXU)


def test_unfinished_journal_is_refused(file: Path) -> None:
    journal = file.with_name("city.sqlite-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + b"\0" * 500)
    check_refused(file, "in use, city.sqlite-journal holds changes")
    journal.write_bytes(b"\0" * 512)
    open_database(file)


def test_a_record_holds_while_its_file_is_what_was_registered(file: Path) -> None:
    record = open_database(file)
    server = Database(database_id="shop", path="postgresql://reader@nowhere/shop", sha256="")
    check_databases([record, server, record.model_copy(update={"database_id": "again"})])


def check_stale(record: Database, reason: str) -> None:
    """Assert that the record is refused with one line that names its file."""
    with pytest.raises(DatabaseError, match=reason) as caught:
        check_databases([record])
    assert str(caught.value).startswith(f"{record.path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_changed_since_it_was_registered_is_refused(file: Path) -> None:
    record = open_database(file)
    with sqlite3.connect(file) as writer:
        writer.execute("INSERT INTO city (id) VALUES (4)")
    writer.close()
    check_stale(record, "not the content that was registered; put that file back, or register this")
    check_databases([open_database(file)])
    file.write_text("gone")
    check_stale(record, "not a SQLite database")
    file.unlink()
    check_stale(record, "no such file; put it there, or correct its record")


def test_a_registered_file_in_use_is_refused(file: Path) -> None:
    writer = sqlite3.connect(file)
    writer.execute("PRAGMA journal_mode = WAL")
    record = open_database(file)
    check_databases([record])
    writer.execute("INSERT INTO city (id) VALUES (4)")
    writer.commit()
    check_stale(record, "in use, city.sqlite-wal holds changes not yet in it; close the program")
    writer.close()


def test_many_files_are_each_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = registry._sha256
    other = build_database(file.with_name("b.sqlite"), CITY_SQL)
    records = [open_database(path, f"{path.stem}{i}") for i in range(3) for path in (file, other)]
    monkeypatch.setattr(registry, "_sha256", lambda path: read.append(path) or digest(path))
    check_databases(records)
    assert read == [file.resolve(), other.resolve()]
    for path in (file, other):
        path.write_text("gone")
    with pytest.raises(DatabaseError, match=r"city\.sqlite: not a SQLite .* \(1 more of 2 files"):
        check_databases(records)

"""Finding database files and checking, before anything uses one, that it is whole and at rest.

A registered file is opened immutable, so one that somebody still writes to must not be registered,
and a record is used only while its file is at rest and still what was registered.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import apsw

from hsql_env.records import Database
from hsql_env.sandbox.backend import is_server, unknown_scheme
from hsql_env.sandbox.open import open_readonly

SUFFIXES = frozenset({".sqlite", ".sqlite3", ".db"})

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_FULL_CHECK_BYTES = 64 * 1024 * 1024  # larger files have only the first page of each table read
_WAL_VERSION = 2


class DatabaseError(ValueError):
    """A file or folder that cannot be used; the message says what, where and what to do."""


def find_databases(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the SQLite files under `folder`, by suffix, sorted. Raises `DatabaseError`."""
    root = Path(folder)
    if not root.is_dir():
        raise DatabaseError(f"{root}: not a folder; name one that holds SQLite files")
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    found = [path for path in found if path.is_file()]
    if not found:
        endings = ", ".join(sorted(SUFFIXES))
        raise DatabaseError(f"{root}: no databases; put files ending in {endings} there")
    return found


def open_folder(folder: str | os.PathLike[str]) -> list[Database]:
    """Return the records of the SQLite files under `folder`, sorted by path.

    An id is a file's stem, or its path within the folder where two files share a stem. Raises
    `DatabaseError` where one file cannot be used: to leave it out silently would change what a
    run is made of.
    """
    paths = find_databases(folder)
    stems = Counter(path.stem for path in paths)
    found, problems = [], []
    for path in paths:
        name = path.stem if stems[path.stem] == 1 else path.relative_to(folder).as_posix()
        try:
            found.append(open_database(path, name))
        except DatabaseError as error:
            problems.append(str(error))
    _raise_first(problems, len(paths))
    return found


def check_databases(records: Iterable[Database]) -> None:
    """Raise `DatabaseError` unless every file is at rest and has the content that was registered.

    A file is read once, however many records name it. A server's address is no file and is passed.
    """
    paths: dict[str, set[str]] = {}
    for record in records:
        _check_scheme(record.path)
        if not is_server(record.path):
            paths.setdefault(record.path, set()).add(record.sha256)
    problems = []
    for path, digests in paths.items():
        try:
            _check_snapshot(Path(path), digests)
        except DatabaseError as error:
            problems.append(str(error))
    _raise_first(problems, len(paths))


def _check_scheme(locator: str) -> None:
    problem = unknown_scheme(locator)
    if problem:
        raise DatabaseError(problem)


def _check_snapshot(file: Path, digests: set[str]) -> None:
    """Check what may have happened to a file since it was registered, when it was read whole.

    Whoever locks it now has changed nothing yet, so that no connection is needed to ask.
    """
    if not file.exists():
        raise DatabaseError(f"{file}: no such file; put it there, or correct its record")
    header = _read_header(file)
    _check_size(file, header)
    _check_sides(file)
    if digests != {_sha256(file)}:
        raise DatabaseError(
            f"{file}: not the content that was registered; put that file back, or register this "
            "one with the sha256 that `hsql-env inspect --json` shows"
        )


def _raise_first(problems: list[str], files: int) -> None:
    if problems:
        more = f" ({len(problems) - 1} more of {files} files fail)" if problems[1:] else ""
        raise DatabaseError(problems[0] + more)


def open_database(path: str | os.PathLike[str], database_id: str | None = None) -> Database:
    """Return the record of a checked database file; its id is the file's stem unless given.

    Raises `DatabaseError` for a file that is missing, not SQLite, truncated, corrupt or in use.
    """
    _check_scheme(os.fspath(path))
    file = Path(path)
    header = _read_header(file)
    _check_size(file, header)
    _check_at_rest(file, header)
    _check_content(file)
    return Database(
        database_id=database_id or file.stem, path=str(file.resolve()), sha256=_sha256(file)
    )


def _read_header(file: Path) -> bytes:
    if file.is_dir():
        raise DatabaseError(f"{file}: a folder, not a database file")
    try:
        with file.open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
    except OSError as error:
        raise DatabaseError(f"{file}: {os.strerror(error.errno or 0)}") from error
    if not header.startswith(_MAGIC):
        raise DatabaseError(f"{file}: not a SQLite database; remove it or name another file")
    if len(header) < _HEADER_BYTES:
        raise _truncated(file)
    return header


def _check_size(file: Path, header: bytes) -> None:
    """Compare the file's size with the header's page count, where that is valid."""
    page_size = int.from_bytes(header[16:18], "big")
    page_size = 65536 if page_size == 1 else page_size
    pages = int.from_bytes(header[28:32], "big")
    valid = header[24:28] == header[92:96]  # written by a version that keeps the count
    if valid and file.stat().st_size < pages * page_size:
        raise _truncated(file)


def _truncated(file: Path) -> DatabaseError:
    return DatabaseError(f"{file}: truncated, the file ends too early; copy it again")


def _check_at_rest(file: Path, header: bytes) -> None:
    _check_sides(file)
    if header[18] != _WAL_VERSION:  # a WAL database at rest needs no lock to be read
        _check_unlocked(file)


def _check_sides(file: Path) -> None:
    target = file.resolve()  # SQLite keeps the side files beside what a link points to
    for suffix in ("-wal", "-journal"):
        side = target.with_name(target.name + suffix)
        if _is_live(side):
            raise DatabaseError(
                f"{file}: in use, {side.name} holds changes not yet in it; close the program that "
                f'writes to it, or run: sqlite3 {file.name} "PRAGMA journal_mode=DELETE"'
            )


def _is_live(side: Path) -> bool:
    """Return whether a side file holds changes; a finished journal is empty or zeroed."""
    try:
        with side.open("rb") as stream:
            return any(stream.read(8))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseError(f"{side}: {os.strerror(error.errno or 0)}") from error


def _check_unlocked(file: Path) -> None:
    """Try to read the way another program would, without waiting for a lock."""
    try:
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        finally:
            connection.close()
    except apsw.BusyError as error:
        raise DatabaseError(
            f"{file}: locked by another program; close it or copy the file when it is done"
        ) from error
    except apsw.Error as error:
        raise _corrupt(file, error) from error


def _check_content(file: Path) -> None:
    try:
        connection = open_readonly(file)
        try:
            problem = _first_problem(connection, file.stat().st_size)
        finally:
            connection.close()
    except (apsw.Error, UnicodeDecodeError) as error:
        raise _corrupt(file, error) from error
    if problem:
        raise DatabaseError(f"{file}: corrupt, {problem}; restore it from a good copy")


def _first_problem(connection: apsw.Connection, size: int) -> str:
    if size <= _FULL_CHECK_BYTES:
        said = str(connection.execute("PRAGMA quick_check(1)").fetchall()[0][0])
        return "" if said == "ok" else " ".join(said.split())
    query = "SELECT name FROM sqlite_schema WHERE type = 'table' AND rootpage > 0"
    for (name,) in connection.execute(query).fetchall():
        quoted = '"' + str(name).replace('"', '""') + '"'
        connection.execute(f"SELECT count(*) FROM (SELECT 1 FROM {quoted} LIMIT 1)").fetchall()
    return ""


def _corrupt(file: Path, error: Exception) -> DatabaseError:
    return DatabaseError(f"{file}: corrupt, {error}; restore it from a good copy")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

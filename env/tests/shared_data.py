"""The optional folder of shared data: HSQL_SHARED, or `shared` beside the repository."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("HSQL_SHARED") or Path(__file__).parents[3] / "shared") / "data"


def need(*names: str) -> Path:
    """Return the path of a shared file or folder; skip the test where there is none."""
    path = FOLDER.joinpath(*names)
    if not path.exists():
        pytest.skip(f"no shared data {'/'.join(names)}; set HSQL_SHARED to the folder above data/")
    return path


def read_text(path: Path) -> str:
    """Return a text file's content, unpacked where its name ends in .xz."""
    content = path.read_bytes()
    return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()


def unpack(path: Path, folder: Path) -> Path:
    """Write an .xz file's content into `folder` and return the new file."""
    target = folder / path.stem
    target.write_bytes(lzma.decompress(path.read_bytes()))
    return target

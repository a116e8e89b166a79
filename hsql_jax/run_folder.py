"""Files of a run folder that are whole or absent, whenever the run is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATUS = "status.json"  # whether the run runs, was stopped or interrupted, failed, or is finished


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def mark(run_dir: Path, status: str, **values: Any) -> None:
    """Say in the run folder how the run stands, for launchers and people."""
    write_whole(run_dir / STATUS, json.dumps({"status": status} | values) + "\n")


def mark_ended(run_dir: Path, error: BaseException) -> None:
    """Mark a run that ends with an exception: failed, or interrupted and nothing is wrong."""
    how = "failed" if isinstance(error, Exception) else "interrupted"
    mark(run_dir, how, reason=" ".join(str(error).split())[:500])

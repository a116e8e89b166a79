"""Logs: one JSON object a line on standard error, never a hidden field, a token or a traceback."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

LogLevel = Literal["info", "warning", "off"]
Event = Literal[
    "ready",  # the service answers
    "episode_started",
    "episode_expired",
    "refused",  # a request was the client's mistake or came over a bound
    "infrastructure",  # an episode was spoiled
    "fault",  # an exception that nobody expected
    "server",  # what the HTTP server or the event loop says
    "draining",
    "stopped",
]
_LEVELS: dict[LogLevel, int] = {"info": 0, "warning": 1, "off": 2}
_WARNINGS: frozenset[Event] = frozenset({"infrastructure", "fault", "server", "episode_expired"})
_LINES_A_SECOND = 50  # of one event; what comes on top is only counted
_SHOWN_CHARS = 500
_FRAMES = 4

Write = Callable[[str], object]


class Log:
    """Writes events. Safe to share between threads; a standard error that fails is ignored."""

    def __init__(self, level: LogLevel = "info", write: Write | None = None) -> None:
        """`write` takes a line with its end; the default is standard error, unbuffered."""
        self._level = _LEVELS[level]
        self._write = write or _write_error
        self._lock = threading.Lock()
        self._windows: dict[Event, tuple[int, int, int]] = {}  # second, lines in it, left out

    def __call__(self, event: Event, **fields: object) -> None:
        """Write one line: the time, the event, the fields, and how many lines were left out."""
        if self._level > (event in _WARNINGS):
            return
        now = time.time()
        with self._lock:
            left_out = self._admit(event, int(now))
            if left_out < 0:
                return
            self._write(_line(now, event, fields | ({"left_out": left_out} if left_out else {})))

    def _admit(self, event: Event, second: int) -> int:
        """Return how many lines of this event were left out before this one, -1 to leave it out."""
        start, lines, left_out = self._windows.get(event, (second, 0, 0))
        if second != start:
            start, lines = second, 0
        if lines >= _LINES_A_SECOND:
            self._windows[event] = (start, lines, left_out + 1)
            return -1
        self._windows[event] = (start, lines + 1, 0)
        return left_out


class LogHandler(logging.Handler):
    """Hands what libraries log to a `Log`, exceptions by type and place only."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record as one line."""
        error = record.exc_info[1] if record.exc_info else None
        fields = fault_fields(error) if error is not None else {}
        message, *_ = record.getMessage().splitlines() or [""]  # later lines show objects
        self._log("server", logger=record.name, message=message, **fields)


def fault_fields(error: BaseException) -> dict[str, object]:
    """Return an exception's type and its innermost places. Its text could hold hidden values."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "at": places}


def _line(now: float, event: Event, fields: dict[str, object]) -> str:
    shown = {
        name: value[:_SHOWN_CHARS] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    when = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": when, "event": event, **shown}) + "\n"


def _write_error(line: str) -> None:
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except (OSError, ValueError):
        return

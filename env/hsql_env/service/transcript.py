"""The file that outlives the process: every message of every episode, as soon as it is said."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from hsql_env.records import Message
from hsql_env.service.wire import Finished


class Transcript:
    """Appends one JSON line an event; safe to share between threads.

    A line is in the system's hands when a method returns, so that it outlives the process, though
    not a machine that fails. What a client may not see is in no event.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """None writes nowhere."""
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a line of two writes would be torn

    def started(self, episode_id: str, task_id: str) -> None:
        """An episode began."""
        self._append(episode_id, task=task_id)

    def said(self, episode_id: str, message: Message) -> None:
        """Someone spoke: the policy before its calls are run, the tools before they are heard."""
        self._append(episode_id, role=message.role, content=message.content)

    def finished(self, episode_id: str, end: Finished) -> None:
        """An episode was judged."""
        verdict = end.verdict.model_dump(mode="json")
        self._append(episode_id, verdict=verdict, final_sql=end.final_sql)

    def expired(self, episode_id: str) -> None:
        """An episode ended without verdict: its client was not heard of any more."""
        self._append(episode_id, expired=True)

    def _append(self, episode_id: str, **fields: object) -> None:
        """Raises `OSError`, as where the disk is full."""
        if self._descriptor is None:
            return
        line = (json.dumps({"episode": episode_id, **fields}) + "\n").encode()
        with self._lock:
            while line:
                line = line[os.write(self._descriptor, line) :]


def open_transcript(path: Path) -> int:
    """Return a descriptor that appends to the file, which only its owner may read.

    A last line that was torn, as a machine failed, is ended. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor

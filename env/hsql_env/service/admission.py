"""How much the service takes on at a time, and until when. Used on the event loop only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hsql_env.service.problems import RequestError


class Admission:
    """Counts the steps and finishes in flight, and knows whether the service is draining."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        """`threads` requests run at a time and at most `max_waiting` wait for one."""
        self._threads = threads
        self._max_waiting = max_waiting
        self._in_flight = 0
        self._deadline: float | None = None  # of the drain, monotonic seconds

    @property
    def waiting(self) -> int:
        """Requests that wait for a thread."""
        return max(0, self._in_flight - self._threads)

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return self._in_flight

    @property
    def draining(self) -> bool:
        """Whether no new work is taken."""
        return self._deadline is not None

    @property
    def drained(self) -> bool:
        """Whether a drain is over: nothing runs any more, or its time is up."""
        if self._deadline is None:
            return False
        return self._in_flight == 0 or time.monotonic() > self._deadline

    def drain(self, seconds: float) -> None:
        """Take no new work; what is in flight may end within `seconds`."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def refuse_draining(self) -> None:
        """Raise `RequestError` for new work while the service drains."""
        if self._deadline is not None:
            raise RequestError("draining", "the service is about to end and takes nothing new")

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a place in the queue. Raises `RequestError` when it is full."""
        if self._in_flight >= self._threads + self._max_waiting:
            raise RequestError("busy", f"{self.waiting} requests wait already")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

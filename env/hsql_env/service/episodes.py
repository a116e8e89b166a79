"""The episodes of one service process: start, step, finish, expire. Blocking: call from threads."""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from hsql_env.harness import TOOLS, Episode, EpisodeConfig, InfrastructureError, Verifier
from hsql_env.records import Database, Task
from hsql_env.sandbox import SandboxPool
from hsql_env.service.log import Log
from hsql_env.service.metrics import Metrics
from hsql_env.service.problems import RequestError
from hsql_env.service.transcript import Transcript
from hsql_env.service.wire import Compacted, Finished, Health, Started, Stepped

T = TypeVar("T")
_REMEMBERED = 4096  # finished episodes whose reply can be asked for again, and expired ones
_LOGGED_ID = 8  # characters of an episode's id: enough to follow it, too few to act in it


class _Live:
    """An episode in progress, with the last turn's content and reply for a retry."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.lock = threading.Lock()  # held while a request runs
        self.requests = 0  # that came and are not answered, also those that wait for a thread
        self.touched = time.monotonic()  # when the last one came or was answered
        self.last: tuple[str, Stepped] | None = None


class _Gone(RequestError):
    """The episode is not live: it never was, has expired, or was finished."""

    def __init__(self, message: str) -> None:
        super().__init__("not_found", message)


class EpisodeStore:
    """Every live episode, by an id that cannot be guessed."""

    def __init__(
        self,
        tasks: Iterable[Task],
        databases: Mapping[str, Database],
        pool: SandboxPool,
        config: EpisodeConfig,
        metrics: Metrics,
        log: Log,
        transcript: Transcript = Transcript(),  # noqa: B008 - it writes nowhere
        idle_s: float = 1800.0,
        max_episodes: int = 4096,
    ) -> None:
        """Raises `ValueError` for a task given twice, or whose database is not given."""
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if self._tasks.setdefault(task.public.task_id, task) is not task:
                raise ValueError(f"task {task.public.task_id} is in the tasks file twice")
        self._databases = databases
        self._pool = pool
        self._config = config
        self._metrics = metrics
        self._log = log
        self._transcript = transcript
        self._idle_s = idle_s
        self._max_episodes = max_episodes
        self._verifier = Verifier(pool, config.verify_limits)
        self._lock = threading.Lock()  # of the three below, and of requests and times in them
        self._live: dict[str, _Live] = {}
        self._finished: OrderedDict[str, str] = OrderedDict()  # replies, as JSON: it is smaller
        self._expired: OrderedDict[str, None] = OrderedDict()
        metrics.gauge("hsql_episodes_live", "Episodes in progress", lambda: len(self._live))
        for task in self._tasks.values():
            if task.public.database_id not in databases:
                raise ValueError(
                    f"task {task.public.task_id}: its database {task.public.database_id} "
                    "is not in the databases file"
                )

    def health(self) -> Health:
        """Return the service's size."""
        return Health(
            status="ok",
            tasks=len(self._tasks),
            databases=len(self._databases),
            episodes=len(self._live),
        )

    def start(self, task_id: str, context_chars: int | None = None) -> Started:
        """Begin an episode. Raises `RequestError`."""
        task = self._tasks.get(task_id)
        if task is None:
            raise RequestError("not_found", f"unknown task: {task_id}")
        database = self._databases[task.public.database_id]
        episode_id = uuid.uuid4().hex
        said = partial(self._transcript.said, episode_id)
        episode = Episode(
            task, database, self._pool, self._config, self._verifier, context_chars, said
        )
        with self._lock:
            if len(self._live) >= self._max_episodes:
                raise RequestError("busy", f"{len(self._live)} episodes are live already")
            self._live[episode_id] = _Live(episode)
        try:
            self._transcript.started(episode_id, task_id)
            messages = tuple(episode.reset())
        except OSError:
            with self._lock:
                del self._live[episode_id]
            raise
        self._metrics.started.inc()
        self._log("episode_started", episode=episode_id[:_LOGGED_ID], task=task_id)
        return Started(episode_id=episode_id, messages=messages, tools=TOOLS)

    @contextmanager
    def visit(self, episode_id: str) -> Iterator[None]:
        """Count a request from its arrival to its answer: until then its episode is not idle.

        Around `step` and `finish`, which may have to wait for a thread first.
        """
        with self._lock:
            idle = self._drop_idle([episode_id])
            live = self._live.get(episode_id)
            if live is not None:
                live.requests += 1
        self._note_expired(idle)
        try:
            yield
        finally:
            if live is not None:
                with self._lock:
                    live.requests -= 1
                    live.touched = time.monotonic()

    def step(self, episode_id: str, turn: int, content: str) -> Stepped:
        """Run a turn once, however often it is sent. Raises `RequestError`."""
        with self._hold(episode_id) as live:
            done = live.episode.turns
            if turn == done and live.last is not None and live.last[0] == content:
                return live.last[1]
            if live.episode.over:
                raise _over(live.episode)
            if turn != done + 1:
                raise RequestError("conflict", f"turn {done + 1} is next, not turn {turn}")
            self._metrics.steps.inc()
            try:
                reply = _step(live.episode, content)
            except Exception:
                self._note_spoiled(episode_id, live.episode)
                raise
            live.last = (content, reply)
            return reply

    def finish(self, episode_id: str) -> Finished:
        """End an episode and judge it; asked again, answer the same. Raises `RequestError`."""
        try:
            return self._judge(episode_id)
        except _Gone:
            with self._lock:  # an episode goes from the live ones to these in one step
                known = self._finished.get(episode_id)
            if known is None:
                raise
            return Finished.model_validate_json(known)

    def _judge(self, episode_id: str) -> Finished:
        with self._hold(episode_id) as live:
            was_spoiled = bool(live.episode.infrastructure)
            reply = _finish(live.episode)
            self._transcript.finished(episode_id, reply)
            if not was_spoiled and reply.verdict.infrastructure:
                self._note_spoiled(episode_id, live.episode)
            with self._lock:
                self._live.pop(episode_id, None)
                _remember(self._finished, episode_id, reply.model_dump_json())
        self._metrics.finished.inc()
        return reply

    def expire(self) -> None:
        """Drop the episodes whose client has not been heard of for the idle time."""
        with self._lock:
            idle = self._drop_idle(list(self._live))
        self._note_expired(idle)

    def _drop_idle(self, episode_ids: Iterable[str]) -> list[str]:
        """Drop those of these episodes that are idle, and return them; call with the lock."""
        oldest = time.monotonic() - self._idle_s
        dropped = []
        for episode_id in episode_ids:
            live = self._live.get(episode_id)
            if live is not None and not live.requests and live.touched < oldest:
                del self._live[episode_id]
                _remember(self._expired, episode_id, None)
                dropped.append(episode_id)
        return dropped

    def _note_expired(self, episode_ids: Iterable[str]) -> None:
        for episode_id in episode_ids:
            self._metrics.expired.inc()
            self._transcript.expired(episode_id)
            self._log("episode_expired", episode=episode_id[:_LOGGED_ID], idle_seconds=self._idle_s)

    @contextmanager
    def _hold(self, episode_id: str) -> Iterator[_Live]:
        """Lend a live episode to one request at a time. Raises `RequestError`."""
        live = self._live.get(episode_id)
        if live is None:
            raise self._gone(episode_id)
        if not live.lock.acquire(blocking=False):
            raise RequestError("busy", "the episode is busy with another request")
        try:
            if episode_id not in self._live:  # finished since it was looked up
                raise self._gone(episode_id)
            yield live
        finally:
            live.lock.release()

    def _gone(self, episode_id: str) -> _Gone:
        if episode_id in self._expired:
            return _Gone(f"the episode expired: no request came for {self._idle_s:g} s")
        return _Gone(f"unknown or finished episode: {episode_id}")

    def _note_spoiled(self, episode_id: str, episode: Episode) -> None:
        self._metrics.spoiled.inc()
        self._log(
            "infrastructure",
            episode=episode_id[:_LOGGED_ID],
            task=episode.task.public.task_id,
            message=episode.infrastructure,
        )


def _remember(known: OrderedDict[str, T], key: str, value: T) -> None:
    """Keep a value, and of all values the latest ones only."""
    known[key] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _over(episode: Episode) -> RequestError:
    if episode.infrastructure:
        return RequestError("infrastructure", episode.infrastructure)
    return RequestError("conflict", "the episode has ended")


def _step(episode: Episode, content: str) -> Stepped:
    try:
        result = episode.step(content)
    except InfrastructureError as error:
        raise RequestError("infrastructure", str(error)) from error
    return Stepped(
        messages=result.messages,
        terminated=result.terminated,
        truncated=result.truncated,
        notes=result.notes,
        compacted=tuple(
            Compacted(index=index, content=message.content) for index, message in result.compacted
        ),
    )


def _finish(episode: Episode) -> Finished:
    verdict = episode.verdict()
    return Finished(
        verdict=verdict,
        calls=tuple(episode.calls),
        turns=episode.turns,
        final_sql=episode.final_sql,
        terminated=episode.terminated,
        truncated=episode.truncated,
    )

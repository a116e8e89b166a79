"""The episodes of one service process: start, step, finish. Blocking; called from threads."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from hsql_env.harness import TOOLS, Episode, EpisodeConfig, InfrastructureError, Verifier
from hsql_env.records import Database, Task
from hsql_env.sandbox import SandboxPool
from hsql_env.service.wire import Finished, Health, ProblemKind, Started, Stepped

_REMEMBERED = 4096  # finished episodes whose reply can be asked for again

_STATUS: Mapping[ProblemKind, HTTPStatus] = {
    "not_found": HTTPStatus.NOT_FOUND,
    "conflict": HTTPStatus.CONFLICT,
    "invalid": HTTPStatus.UNPROCESSABLE_ENTITY,
    "infrastructure": HTTPStatus.SERVICE_UNAVAILABLE,
}


class RequestError(Exception):
    """A request that cannot be served, with its kind and the reason."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind
        self.status = _STATUS[kind]


class _Live:
    """An episode in progress, with the last turn's content and reply for a retry."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.lock = threading.Lock()
        self.last: tuple[str, Stepped] | None = None


class EpisodeStore:
    """Every live episode, by an id that cannot be guessed."""

    def __init__(
        self,
        tasks: Iterable[Task],
        databases: Mapping[str, Database],
        pool: SandboxPool,
        config: EpisodeConfig,
    ) -> None:
        """Raises `ValueError` for a task whose database is not among `databases`."""
        self._tasks = {task.public.task_id: task for task in tasks}
        self._databases = databases
        self._pool = pool
        self._config = config
        self._verifier = Verifier(pool, config.verify_limits)
        self._live: dict[str, _Live] = {}
        self._finished: OrderedDict[str, Finished] = OrderedDict()
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

    def start(self, task_id: str) -> Started:
        """Begin an episode. Raises `RequestError`."""
        task = self._tasks.get(task_id)
        if task is None:
            raise RequestError("not_found", f"unknown task: {task_id}")
        database = self._databases[task.public.database_id]
        episode = Episode(task, database, self._pool, self._config, self._verifier)
        episode_id = uuid.uuid4().hex
        self._live[episode_id] = _Live(episode)
        return Started(episode_id=episode_id, messages=tuple(episode.reset()), tools=TOOLS)

    def step(self, episode_id: str, turn: int, content: str) -> Stepped:
        """Run a turn once, however often it is sent. Raises `RequestError`."""
        live = self._find(episode_id)
        with live.lock:
            done = live.episode.turns
            if turn == done and live.last is not None and live.last[0] == content:
                return live.last[1]
            if live.episode.over:
                raise _over(live.episode)
            if turn != done + 1:
                raise RequestError("conflict", f"turn {done + 1} is next, not turn {turn}")
            reply = _step(live.episode, content)
            live.last = (content, reply)
            return reply

    def finish(self, episode_id: str) -> Finished:
        """End an episode and judge it; asked again, answer the same. Raises `RequestError`."""
        known = self._finished.get(episode_id)
        if known is not None:
            return known
        live = self._find(episode_id)
        with live.lock:
            if episode_id in self._finished:
                return self._finished[episode_id]
            reply = _finish(live.episode)
            self._finished[episode_id] = reply
            self._live.pop(episode_id, None)
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)
        return reply

    def _find(self, episode_id: str) -> _Live:
        live = self._live.get(episode_id)
        if live is None:
            raise RequestError("not_found", f"unknown or finished episode: {episode_id}")
        return live


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

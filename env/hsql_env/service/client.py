"""The client of the environment service, async and sync."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
from pydantic import ValidationError

from hsql_env.harness.actions import InfrastructureError
from hsql_env.service.wire import (
    Finished,
    Health,
    Problem,
    ProblemKind,
    Start,
    Started,
    Step,
    Stepped,
    Wire,
)

M = TypeVar("M", bound=Wire)

_ATTEMPTS = 3  # of a request whose connection failed
_RETRY_SECONDS = 0.2
_JSON = {"content-type": "application/json"}


class RequestRefused(RuntimeError):
    """The service refused a request (4xx): the kind and the reason."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind


class AsyncEnvironment:
    """Episodes of one service. Use as an async context manager.

    Requests may be sent again safely: a step is identified by its turn. Every method raises
    `RequestRefused` for a request that the service refuses, and `InfrastructureError` when the
    service or its sandbox failed, or did not answer in `timeout_s` seconds.
    """

    def __init__(self, url: str, timeout_s: float = 1200.0, connections: int = 256) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connections = connections
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def health(self) -> Health:
        """Return the service's size."""
        return await self._ask(Health, "GET", "/healthz")

    async def start(self, task_id: str, seed: int = 0) -> Started:
        """Begin an episode of a task."""
        return await self._ask(Started, "POST", "/episodes", Start(task_id=task_id, seed=seed))

    async def step(self, episode_id: str, turn: int, content: str) -> Stepped:
        """Send the policy's raw text of turn `turn`, counted from 1."""
        body = Step(turn=turn, content=content)
        return await self._ask(Stepped, "POST", f"/episodes/{episode_id}/step", body)

    async def finish(self, episode_id: str) -> Finished:
        """End the episode and return its verdict and calls."""
        return await self._ask(Finished, "DELETE", f"/episodes/{episode_id}")

    def _session(self) -> aiohttp.ClientSession:
        """Return the connections, made in the event loop that uses them."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=60.0)
            self._http = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                headers=_JSON,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http

    async def _ask(self, kind: type[M], method: str, path: str, body: Wire | None = None) -> M:
        data = body.model_dump_json().encode() if body else None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._session().request(method, self._url + path, data=data) as reply:
                    return _read(kind, reply.status, await reply.read())
            except TimeoutError as error:
                raise InfrastructureError(f"{method} {path} timed out") from error
            except aiohttp.ClientError as error:
                if attempt == _ATTEMPTS:
                    message = f"no answer from {self._url}: {error or type(error).__name__}"
                    raise InfrastructureError(message) from error
                await asyncio.sleep(_RETRY_SECONDS * attempt)
        raise AssertionError("unreachable")


class Environment:
    """The same client for callers without an event loop."""

    def __init__(self, url: str, timeout_s: float = 1200.0) -> None:
        self._runner = asyncio.Runner()
        self._async = AsyncEnvironment(url, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._async.close())
        self._runner.close()

    def health(self) -> Health:
        """Return the service's size."""
        return self._runner.run(self._async.health())

    def start(self, task_id: str, seed: int = 0) -> Started:
        """Begin an episode of a task."""
        return self._runner.run(self._async.start(task_id, seed))

    def step(self, episode_id: str, turn: int, content: str) -> Stepped:
        """Send the policy's raw text of turn `turn`, counted from 1."""
        return self._runner.run(self._async.step(episode_id, turn, content))

    def finish(self, episode_id: str) -> Finished:
        """End the episode and return its verdict and calls."""
        return self._runner.run(self._async.finish(episode_id))


def _read(kind: type[M], status: int, content: bytes) -> M:
    try:
        if status == HTTPStatus.OK:
            return kind.model_validate_json(content)
        problem = Problem.model_validate_json(content)
    except ValidationError:
        raise InfrastructureError(f"the service answered {status}") from None
    if problem.kind == "infrastructure":
        raise InfrastructureError(problem.message)
    raise RequestRefused(problem.kind, problem.message)

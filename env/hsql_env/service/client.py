"""The client of the environment service, async and sync."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import aiohttp
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from hsql_env.harness.actions import InfrastructureError
from hsql_env.records import first_problem
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
_BUSY_SECONDS = 1.0  # before a busy service is asked again, where it does not say
_JITTER = 0.25  # of a wait, so that many clients do not come back at once
# A service behind a proxy is also busy or gone when the proxy says so, in a body of its own.
_BUSY_STATUSES = frozenset({429, 502, 503, 504})
_BUSY_KINDS = frozenset({"busy", "draining"})
_UNIX = "unix:"
_JSON = {"content-type": "application/json"}


class RequestRefused(RuntimeError):
    """The service refused a request (4xx): the kind and the reason."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind


class AsyncEnvironment:
    """Episodes of one service. Use as an async context manager.

    Requests may be sent again safely: a step is identified by its turn. They are sent again when
    the connection failed, and when the service has no room for them, after the seconds it asks for.
    Arguments that no request can hold, such as a turn below 1, raise `ValueError`.
    Every method raises `RequestRefused` for a request that the service refuses, which is never sent
    again, and `InfrastructureError` when the service or its sandbox failed, or did not answer in
    `timeout_s` seconds, all waits and attempts together.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 1200.0,
        connections: int = 256,
        token: str | None = None,
    ) -> None:
        """`url` is `http://host:port` or `unix:/path/of/a/socket`."""
        self._url = url.rstrip("/")
        self._base = "http://localhost" if url.startswith(_UNIX) else self._url
        self._timeout_s = timeout_s
        self._connections = connections
        self._headers = _JSON | ({"authorization": f"Bearer {token}"} if token else {})
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

    async def start(self, task_id: str, seed: int = 0, context_chars: int | None = None) -> Started:
        """Begin an episode of a task; beyond `context_chars` older observations are compacted."""
        body = _body(Start, task_id=task_id, seed=seed, context_chars=context_chars)
        return await self._ask(Started, "POST", "/episodes", body)

    async def step(
        self,
        episode_id: str,
        turn: int,
        content: str | None = None,
        tool_calls: Sequence[object] = (),
    ) -> Stepped:
        """Send turn `turn`, counted from 1: the policy's raw text, its tool calls, or both.

        `tool_calls` are those of an OpenAI chat completion, as objects or as dicts.
        """
        body = _body(Step, turn=turn, content=content, tool_calls=tuple(tool_calls))
        return await self._ask(Stepped, "POST", f"/episodes/{episode_id}/step", body)

    async def finish(self, episode_id: str) -> Finished:
        """End the episode and return its verdict and calls."""
        return await self._ask(Finished, "DELETE", f"/episodes/{episode_id}")

    def _session(self) -> aiohttp.ClientSession:
        """Return the connections, made in the event loop that uses them."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=_connector(self._url, self._connections),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http

    async def _ask(self, kind: type[M], method: str, path: str, data: bytes | None = None) -> M:
        deadline = time.monotonic() + self._timeout_s
        failures = 0
        while True:
            try:
                reply = await self._send(method, path, data, deadline - time.monotonic())
                if not isinstance(reply, _Busy):
                    return _read(kind, *reply)
                wait, reason = reply
            except TimeoutError as error:
                raise InfrastructureError(f"{method} {path} timed out") from error
            except aiohttp.ClientError as error:
                failures += 1
                reason = f"no answer from {self._url}: {error or type(error).__name__}"
                if failures == _ATTEMPTS:
                    raise InfrastructureError(reason) from error
                wait = _RETRY_SECONDS * failures
            if time.monotonic() + wait > deadline:
                raise InfrastructureError(f"{reason} (given up after {self._timeout_s:g} s)")
            await asyncio.sleep(wait)

    async def _send(
        self, method: str, path: str, data: bytes | None, seconds: float
    ) -> tuple[int, bytes] | _Busy:
        """Send once; return status and body, or that the service has no room for the request."""
        timeout = aiohttp.ClientTimeout(total=max(seconds, 0.001))
        request = self._session().request(method, self._base + path, data=data, timeout=timeout)
        async with request as reply:
            content = await reply.read()
            if reply.status in _BUSY_STATUSES and (reason := _busy_reason(reply.status, content)):
                asked = retry_after_seconds(reply.headers.get("retry-after"), time.time())
                return _Busy(asked * (1 + random.random() * _JITTER), reason)
            return reply.status, content


class _Busy(NamedTuple):
    """The service has no room: ask again after so many seconds."""

    wait_s: float
    reason: str


class Environment:
    """The same client for callers without an event loop."""

    def __init__(self, url: str, timeout_s: float = 1200.0, token: str | None = None) -> None:
        """As `AsyncEnvironment`'s."""
        self._runner = asyncio.Runner()
        self._async = AsyncEnvironment(url, timeout_s, token=token)

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

    def start(self, task_id: str, seed: int = 0, context_chars: int | None = None) -> Started:
        """Begin an episode of a task; beyond `context_chars` older observations are compacted."""
        return self._runner.run(self._async.start(task_id, seed, context_chars))

    def step(
        self,
        episode_id: str,
        turn: int,
        content: str | None = None,
        tool_calls: Sequence[object] = (),
    ) -> Stepped:
        """Send turn `turn`, as `AsyncEnvironment.step`."""
        return self._runner.run(self._async.step(episode_id, turn, content, tool_calls))

    def finish(self, episode_id: str) -> Finished:
        """End the episode and return its verdict and calls."""
        return self._runner.run(self._async.finish(episode_id))


def _connector(url: str, connections: int) -> aiohttp.BaseConnector:
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX)
        return aiohttp.UnixConnector(path, limit=connections, keepalive_timeout=60.0)
    return aiohttp.TCPConnector(limit=connections, keepalive_timeout=60.0)


def _body(kind: type[Wire], **said: Any) -> bytes:
    """Return the body of a request. Raises `ValueError` naming the argument that is wrong."""
    name = kind.__name__.lower()
    try:
        return kind.model_validate(said, from_attributes=True).model_dump_json().encode()
    except ValidationError as error:
        raise ValueError(first_problem(error, name)) from None
    except PydanticSerializationError:
        raise ValueError(f"{name}: its text holds half a character, which is not valid") from None


def retry_after_seconds(header: str | None, now: float) -> float:
    """Return the seconds that a Retry-After header asks for: a number, or a date after `now`."""
    if header is None:
        return _BUSY_SECONDS
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return _BUSY_SECONDS


def _busy_reason(status: int, content: bytes) -> str:
    """Return why the service has no room, "" when it has answered otherwise."""
    try:
        problem = Problem.model_validate_json(content)
    except ValidationError:
        return f"the service answered {status}"
    return problem.message if problem.kind in _BUSY_KINDS else ""


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

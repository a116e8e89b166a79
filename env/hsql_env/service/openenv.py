"""The environment behind OpenEnv's session protocol, for trainers that speak it.

A WebSocket at `/ws` is a session, with at most one episode at a time. A client sends `reset`,
`step`, `state` and `close` messages and gets `observation`, `state` and `error` messages back. The
adapter is a client of the environment service: it translates, and never sees a task's hidden half.

A failure of the harness is an `error` message, never a reward of 0.

With a token, a session must bring it: as a bearer token, or as the password of the address, which
is all that OpenEnv's own clients can send (`http://any:TOKEN@host:8000`).
"""

from __future__ import annotations

import asyncio
import binascii
import itertools
import json
import os
import signal
import socket
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from aiohttp import WSMsgType, web
from pydantic import Field, ValidationError, model_validator

from hsql_env.harness.actions import InfrastructureError
from hsql_env.harness.tools import tool_call_text
from hsql_env.records import Message, Verdict, first_problem
from hsql_env.service.client import AsyncEnvironment, RequestRefused
from hsql_env.service.config import is_token
from hsql_env.service.wire import Compacted, ContextChars, Wire

W = TypeVar("W", bound=Wire)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CHECK_SECONDS = 0.5
_OPEN_PATH = "/health"  # a probe carries no token, and learns nothing


class Reset(Wire):
    """Begin an episode: of the named task, or the one the seed picks, or the next in turn."""

    task_id: str | None = None
    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)  # the client's name for it
    context_chars: ContextChars | None = None


class Action(Wire):
    """One turn: the policy's raw text, or one tool call."""

    content: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)  # every OpenEnv action has it; unused

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.content is None) == (self.tool is None):
            raise ValueError("an action has either content or tool")
        try:
            self.text().encode()
        except (UnicodeEncodeError, RecursionError):
            raise ValueError("an action must be valid text, and not too deep") from None
        return self

    def text(self) -> str:
        """Return the turn as a policy writes it."""
        if self.content is not None:
            return self.content
        return tool_call_text(str(self.tool), self.arguments)


class Observation(Wire):
    """What the policy reads next; the tools with the first one, the verdict with the last."""

    task_id: str
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    compacted: tuple[Compacted, ...] = ()  # for a session that asked for `context_chars`
    truncated: bool = False  # a budget ended the episode
    verdict: Verdict | None = None


class State(Wire):
    """Where the session stands."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None
    done: bool = False


class SessionError(Exception):
    """A message that cannot be served; `code` is one of OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Played:
    """The session's episode."""

    service_id: str  # the service's id of it
    state: State


class Session:
    """One client's session: at most one episode."""

    def __init__(self, env: AsyncEnvironment, tasks: _Tasks) -> None:
        self._env = env
        self._tasks = tasks
        self._played: _Played | None = None

    async def answer(self, text: str) -> dict[str, Any] | None:
        """Return the reply to one message, None to `close`."""
        try:
            kind, data = _read_message(text)
            return await self._dispatch(kind, data)
        except SessionError as error:
            return _error(error.code, str(error))
        except InfrastructureError as error:
            self._played = None
            return _error("EXECUTION_ERROR", f"the harness failed: {error}")
        except RequestRefused as error:
            return _error("SESSION_ERROR", str(error))

    async def close(self) -> None:
        """Free the episode on the service."""
        played, self._played = self._played, None
        if played is not None and not played.state.done:
            try:
                await self._env.finish(played.service_id)
            except (InfrastructureError, RequestRefused):
                return  # nothing is left to free

    async def _dispatch(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        if kind == "reset":
            return await self._reset(_validated(Reset, data))
        if kind == "step":
            return await self._step(_validated(Action, data))
        if kind == "state":
            state = self._played.state if self._played else State()
            return {"type": "state", "data": state.model_dump(mode="json")}
        if kind == "close":
            return None
        raise SessionError("UNKNOWN_TYPE", f"unknown message type: {kind}")

    async def _reset(self, asked: Reset) -> dict[str, Any]:
        await self.close()
        task_id = asked.task_id or self._tasks.pick(asked.seed)
        started = await self._env.start(task_id, asked.seed or 0, asked.context_chars)
        name = asked.episode_id or started.episode_id
        self._played = _Played(started.episode_id, State(episode_id=name, task_id=task_id))
        first = Observation(task_id=task_id, messages=started.messages, tools=started.tools)
        return _observation(first, None, done=False)

    async def _step(self, action: Action) -> dict[str, Any]:
        played = self._played
        if played is None or played.state.done:
            raise SessionError("SESSION_ERROR", "no episode is in progress; reset first")
        turn = played.state.step_count + 1
        stepped = await self._env.step(played.service_id, turn, action.text())
        task_id = str(played.state.task_id)
        done = stepped.terminated or stepped.truncated
        verdict = await self._verdict(played) if done else None
        played.state = played.state.model_copy(update={"step_count": turn, "done": done})
        seen = Observation(
            task_id=task_id,
            messages=stepped.messages,
            compacted=stepped.compacted,
            truncated=stepped.truncated,
            verdict=verdict,
        )
        return _observation(seen, verdict.reward if verdict else 0.0, done)

    async def _verdict(self, played: _Played) -> Verdict:
        verdict = (await self._env.finish(played.service_id)).verdict
        if verdict.infrastructure:
            raise InfrastructureError("the episode could not be judged")
        return verdict


class _Tasks:
    """Which task an episode is of when the client names none."""

    def __init__(self, task_ids: Sequence[str]) -> None:
        self._task_ids = task_ids
        self._turn = itertools.count()

    def pick(self, seed: int | None) -> str:
        """Return the seed's task, or the next one in the file's order, over all sessions."""
        place = next(self._turn) if seed is None else seed
        return self._task_ids[place % len(self._task_ids)]


def make_app(
    env: AsyncEnvironment, task_ids: Sequence[str], token: str | None = None
) -> web.Application:
    """Return the web application; `task_ids` must not be empty."""
    tasks = _Tasks(task_ids)

    async def sessions(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=30.0)
        await socket.prepare(request)
        session = Session(env, tasks)
        try:
            async for message in socket:
                text = message.data if message.type is WSMsgType.TEXT else ""
                reply = await session.answer(text)
                if reply is None:
                    break
                await socket.send_str(json.dumps(reply))
        finally:
            await session.close()
        return socket

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def metadata(request: web.Request) -> web.Response:
        about = "Real databases behind four SQL tools, and a verdict on the submitted query."
        return web.json_response({"name": "hsql-env", "description": about})

    async def schema(request: web.Request) -> web.Response:
        kinds: dict[str, type[Wire]] = {
            "action": Action,
            "observation": Observation,
            "state": State,
        }
        return web.json_response({name: kind.model_json_schema() for name, kind in kinds.items()})

    app = web.Application(middlewares=[_gate(token)] if token else [])
    app.router.add_get("/ws", sessions)
    app.router.add_get("/health", health)
    app.router.add_get("/metadata", metadata)
    app.router.add_get("/schema", schema)
    return app


def _gate(token: str) -> Any:
    """Return the middleware that lets nobody pass without the token."""

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = _bearer(request.headers.get("authorization", "").encode(errors="replace"))
        if request.path == _OPEN_PATH or is_token(token, header):
            return await handler(request)
        message = "this server wants its token: Authorization: Bearer …, or http://any:TOKEN@host"
        body = {"kind": "unauthorized", "message": message}
        return web.json_response(body, status=401, headers={"www-authenticate": "Bearer"})

    return gate


def _bearer(header: bytes) -> bytes:
    """Return an Authorization header, Basic's password as the bearer token that it stands for."""
    scheme, _, given = header.partition(b" ")
    if scheme.lower() != b"basic":
        return header
    try:
        return b"Bearer " + b64decode(given.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


async def serve(
    env: AsyncEnvironment,
    task_ids: Sequence[str],
    listener: socket.socket,
    token: str | None,
    check: Callable[[], None],
) -> None:
    """Serve sessions on the environment service behind `env` until SIGTERM or SIGINT.

    Sessions must bring the `token` if there is one. Prints one JSON line with the address when
    ready. `check` is called every half second; what it raises ends the adapter.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with env:
        runner = web.AppRunner(make_app(env, task_ids, token), shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            print(json.dumps({"url": _address(runner), "pid": os.getpid()}), flush=True)
            await _until(stopped, check)
        finally:
            await runner.cleanup()


async def _until(stopped: asyncio.Event, check: Callable[[], None]) -> None:
    while not stopped.is_set():
        check()
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _CHECK_SECONDS)


def _address(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _read_message(text: str) -> tuple[str, Mapping[str, Any]]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SessionError("INVALID_JSON", "a message must be a JSON text") from error
    data = message.get("data", {}) if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise SessionError("VALIDATION_ERROR", "a message is an object with type and data")
    return str(message.get("type", "")), data


def _validated(kind: type[W], data: Mapping[str, Any]) -> W:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error, kind.__name__.lower())
        raise SessionError("VALIDATION_ERROR", problem) from error


def _observation(seen: Observation, reward: float | None, done: bool) -> dict[str, Any]:
    data = {"observation": seen.model_dump(mode="json"), "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}

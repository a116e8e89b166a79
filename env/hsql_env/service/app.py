"""The HTTP service. Routes only translate; episodes run in threads, the event loop stays free."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from hsql_env.harness import EpisodeConfig
from hsql_env.records import Database, Task
from hsql_env.sandbox import SandboxPool
from hsql_env.service.episodes import EpisodeStore, RequestError
from hsql_env.service.wire import Finished, Health, Problem, Start, Started, Step, Stepped

T = TypeVar("T")
_STEP_PATH = re.compile(r"/episodes/([^/]+)/step")
_KEEP_ALIVE_SECONDS = 600  # longer than any client waits between two steps
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (404, 409, 422, 503)
}


class ServeError(RuntimeError):
    """The service cannot start; the message says what to do."""


def make_app(store: EpisodeStore, threads: int, on_ready: Callable[[], None]) -> ASGIApp:
    """Return the application around `store`; `on_ready` is called once it can answer."""
    executor = ThreadPoolExecutor(threads, thread_name_prefix="episode")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_ready()
        yield
        executor.shutdown(wait=False, cancel_futures=True)

    async def in_thread(call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)

    app = FastAPI(
        title="hsql-env",
        lifespan=lifespan,
        responses=_PROBLEMS,
        docs_url=None,  # the pages load scripts from elsewhere; /openapi.json is enough
        redoc_url=None,
    )
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)

    @app.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        return _json(store.health())

    @app.post("/episodes", response_model=Started)
    async def start(body: Start) -> Response:
        return _json(store.start(body.task_id))

    @app.post("/episodes/{episode_id}/step", response_model=Stepped)
    async def step(episode_id: str, body: Step) -> Response:
        return _json(await in_thread(store.step, episode_id, body.turn, body.content))

    @app.delete("/episodes/{episode_id}", response_model=Finished)
    async def finish(episode_id: str) -> Response:
        return _json(await in_thread(store.finish, episode_id))

    return _StepShortcut(app, step)


class _StepShortcut:
    """Serves steps, nearly all of the traffic, around the framework's dispatch.

    The framework's own route answers the same, from the same function, and documents it; its
    dispatch costs more time than the rest of the service's share of a step.
    """

    def __init__(self, app: ASGIApp, step: Callable[[str, Step], Awaitable[Response]]) -> None:
        self._app = app
        self._step = step

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        match = _STEP_PATH.fullmatch(scope["path"]) if is_post else None
        if match is None:
            await self._app(scope, receive, send)
            return
        reply = await self._reply(match[1], Request(scope, receive))
        await reply(scope, receive, send)

    async def _reply(self, episode_id: str, request: Request) -> Response:
        try:
            return await self._step(episode_id, Step.model_validate_json(await request.body()))
        except RequestError as error:
            return await _request_error(request, error)
        except ValidationError as error:
            return await _validation_error(request, error)


def _json(body: BaseModel, status: int = 200) -> Response:
    """Serialise once: the models are already validated."""
    return Response(body.model_dump_json(), status, media_type="application/json")


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(Problem(kind=error.kind, message=str(error)), error.status)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return _json(Problem(kind="invalid", message=f"{where}: {first['msg']}"), 422)


def serve(
    tasks: Iterable[Task],
    databases: Mapping[str, Database],
    host: str = "127.0.0.1",
    port: int = 0,
    workers: int = 2,
    config: EpisodeConfig | None = None,
    stop_with_stdin: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; print one JSON line with the address when ready.

    Port 0 takes a free port. With `stop_with_stdin` the service also ends when its standard input
    closes, as it does when the process that started it dies. Raises `ServeError`.
    """
    listener = _listen(host, port)
    with listener, SandboxPool(workers) as pool:
        try:
            store = EpisodeStore(tasks, databases, pool, config or EpisodeConfig())
        except ValueError as error:
            raise ServeError(str(error)) from error
        app = make_app(store, threads=max(8, 4 * workers), on_ready=lambda: _announce(listener))
        server = uvicorn.Server(_uvicorn_config(app))
        if stop_with_stdin:
            threading.Thread(target=_watch_stdin, args=(server,), daemon=True).start()
        # uvicorn raises the signal again after its own clean-up: leave through ours, too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        server.run(sockets=[listener])


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
        ws="none",
        proxy_headers=False,
        server_header=False,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ServeError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "choose another --port, or 0 for any free one"
        ) from error


def _announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(json.dumps({"url": f"http://{shown}:{port}", "pid": os.getpid()}), flush=True)


def _watch_stdin(server: uvicorn.Server) -> None:
    while os.read(0, 4096):
        pass
    server.should_exit = True

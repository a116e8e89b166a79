"""The HTTP routes. They only translate; episodes run in threads, the event loop stays free."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hsql_env.service.admission import Admission
from hsql_env.service.config import ServiceConfig
from hsql_env.service.episodes import EpisodeStore
from hsql_env.service.gate import Gate, fault_reply
from hsql_env.service.log import Log, fault_fields
from hsql_env.service.metrics import METRICS_TYPE, Metrics
from hsql_env.service.problems import PROBLEM_STATUSES, RequestError, problem_reply
from hsql_env.service.wire import (
    Finished,
    Health,
    Problem,
    ProblemKind,
    Ready,
    Start,
    Started,
    Step,
    Stepped,
)

T = TypeVar("T")
Refuse = Callable[[Exception], Response]
_STEP_PATH = re.compile(r"/episodes/([^/]+)/step")
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in PROBLEM_STATUSES
}


@dataclass(frozen=True)
class Parts:
    """What the routes work with."""

    config: ServiceConfig
    store: EpisodeStore
    admission: Admission
    metrics: Metrics
    log: Log


def make_app(parts: Parts, on_ready: Callable[[], None]) -> ASGIApp:
    """Return the whole application; `on_ready` is called once it can answer."""
    store, admission, metrics = parts.store, parts.admission, parts.metrics
    executor = ThreadPoolExecutor(parts.config.threads, thread_name_prefix="episode")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_ready()
        yield
        executor.shutdown(wait=False, cancel_futures=True)

    async def in_thread(call: Callable[..., T], *arguments: object) -> T:
        with admission.slot():
            return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)

    app = FastAPI(
        title="hsql-env",
        lifespan=lifespan,
        responses=_PROBLEMS,
        docs_url=None,  # the pages load scripts from elsewhere; /openapi.json is enough
        redoc_url=None,
        redirect_slashes=False,
    )
    refuse = _refuser(parts)
    for kind in (RequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handler(refuse))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return fault_reply()  # the framework raises the error again, and the gate logs it

    @app.get("/healthz", response_model=Health)
    async def healthz() -> Response:
        return _json(store.health())

    @app.get("/readyz", response_model=Ready)
    async def readyz() -> Response:
        admission.refuse_draining()
        return _json(Ready(status="ready"))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(metrics.text(), headers={"content-type": METRICS_TYPE})

    @app.post("/episodes", response_model=Started)
    async def start(body: Start) -> Response:
        admission.refuse_draining()
        return _json(store.start(body.task_id, body.context_chars))

    @app.post("/episodes/{episode_id}/step", response_model=Stepped)
    async def step(episode_id: str, body: Step) -> Response:
        admission.refuse_draining()
        begun = time.perf_counter()
        with store.visit(episode_id):
            reply = await in_thread(store.step, episode_id, body.turn, body.text())
        metrics.step_seconds.observe(time.perf_counter() - begun)
        return _json(reply)

    @app.delete("/episodes/{episode_id}", response_model=Finished)
    async def finish(episode_id: str) -> Response:
        with store.visit(episode_id):
            return _json(await in_thread(store.finish, episode_id))

    return Gate(
        _StepShortcut(app, step, refuse),
        parts.config.token,
        parts.config.max_body_bytes,
        parts.config.request_s,
        on_fault=lambda error: parts.log("fault", **fault_fields(error)),
        refuse=refuse,
    )


class _StepShortcut:
    """Serves steps, nearly all of the traffic, around the framework's dispatch.

    The framework's own route answers the same, from the same function, and documents it; its
    dispatch costs more time than the rest of the service's share of a step.
    """

    def __init__(
        self, app: ASGIApp, step: Callable[[str, Step], Awaitable[Response]], refuse: Refuse
    ) -> None:
        self._app = app
        self._step = step
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        match = _STEP_PATH.fullmatch(scope["path"]) if is_post else None
        if match is None:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]  # whole, as the gate hands it on
        reply = await self._reply(match[1], body)
        await reply(scope, receive, send)

    async def _reply(self, episode_id: str, body: bytes) -> Response:
        try:
            return await self._step(episode_id, Step.model_validate_json(body))
        except (RequestError, ValidationError) as error:
            return self._refuse(error)


def _refuser(parts: Parts) -> Refuse:
    """Return the function that counts a refusal, logs it and makes its reply."""

    def refuse(error: Exception) -> Response:
        kind, message, status, headers = _problem(error)
        parts.metrics.refused.labels(kind).inc()
        if kind != "infrastructure":  # logged once, where it happened
            parts.log("refused", kind=kind, message=message)
        return problem_reply(kind, message, status, headers)

    return refuse


def _problem(error: Exception) -> tuple[ProblemKind, str, int | None, dict[str, str]]:
    """Return kind, message, status (None: the kind's own) and further headers of a refusal."""
    if isinstance(error, RequestError):
        return error.kind, str(error), None, {}
    if isinstance(error, RequestValidationError | ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return "invalid", f"{where}: {first['msg']}", None, {}
    assert isinstance(error, HTTPException)
    kind: ProblemKind = "not_found" if error.status_code == 404 else "invalid"
    return kind, str(error.detail), error.status_code, dict(error.headers or {})


def _handler(refuse: Refuse) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return refuse(error)

    return handle


def _json(body: BaseModel) -> Response:
    """Serialise once: the models are already validated."""
    return Response(body.model_dump_json(), media_type="application/json")

"""The service's process: sockets, signals, the drain, the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hsql_env.records import Database, Task
from hsql_env.sandbox import SandboxPool
from hsql_env.service.admission import Admission
from hsql_env.service.app import Parts, make_app
from hsql_env.service.config import ServeError, ServiceConfig
from hsql_env.service.episodes import EpisodeStore
from hsql_env.service.listen import listen_tcp, listen_unix, remove_socket
from hsql_env.service.log import Log, LogHandler
from hsql_env.service.metrics import Metrics
from hsql_env.service.problems import problem_body
from hsql_env.service.transcript import Transcript, open_transcript

_KEEP_ALIVE_SECONDS = 600  # longer than any client waits between two steps
_CLOSE_SECONDS = 1  # for the replies on their way when the drain is over
_TICKS = 10  # a second, uvicorn's own


def serve(tasks: Iterable[Task], databases: Mapping[str, Database], config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT; print one JSON line with the address when ready.

    At the first signal the service drains: nothing new is taken, and what runs may end within
    `config.drain_s` seconds. A second signal ends it at once. With `config.stop_with_stdin` it also
    ends when its standard input closes, as it does when the process that started it dies. Raises
    `ServeError` if it cannot start, and `KeyboardInterrupt` after SIGINT.
    """
    log = Log(config.log_level)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # until the server's own
    with ExitStack() as stack:
        sockets = stack.enter_context(_listening(config))
        parts = stack.enter_context(_parts(tasks, databases, config, log))
        app = make_app(parts, on_ready=lambda: _announce(sockets, config, log))
        stack.enter_context(_library_logs(log))
        server = _Server(_uvicorn_config(app, config.request_s), parts)
        if config.stop_with_stdin:
            threading.Thread(target=_watch_stdin, args=(server,), daemon=True).start()
        server.run(sockets=list(sockets))
        log("stopped", left_running=server.left_running)
    if server.interrupted:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn's server, with a drain before its shutdown and a look at idle episodes."""

    def __init__(self, config: uvicorn.Config, parts: Parts) -> None:
        super().__init__(config)
        self._parts = parts
        self.interrupted = False
        self.left_running = 0  # requests that the end of the drain cut off
        self._told = False  # that it drains

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain; at the second signal, end."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        admission = self._parts.admission
        if admission.draining:
            self.should_exit = True
        admission.drain(self._parts.config.drain_s)

    async def on_tick(self, counter: int) -> bool:
        """Do what has its time; return whether to shut down."""
        admission = self._parts.admission
        if counter % _TICKS == 0:
            self._parts.store.expire()
        if admission.draining and not self._told:
            self._told = True
            self._parts.log("draining", in_flight=admission.in_flight)
        self.should_exit = self.should_exit or admission.drained
        self.left_running = admission.in_flight
        return await super().on_tick(counter)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, with a deadline for a request's head, which else may never end.

    What is not HTTP is answered with a `Problem`, like every other error.
    """

    head_s = 60.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._got_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Wait for the rest of the head."""
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Wait no longer."""
        self._got_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection."""
        body = problem_body("invalid", msg)
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _expect_head(self) -> None:
        self._got_head()
        self._deadline = self.loop.call_later(self.head_s, self.transport.close)

    def _got_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _uvicorn_config(app: ASGIApp, head_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("Protocol", (_Protocol,), {"head_s": head_s}),
        access_log=False,
        log_config=None,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ws="none",
        proxy_headers=False,
        server_header=False,
    )


@contextmanager
def _listening(config: ServiceConfig) -> Iterator[Sequence[socket.socket]]:
    """Listen on the TCP port, and on the Unix socket if there is one. Raises `ServeError`."""
    with ExitStack() as stack:
        has_token = config.token is not None
        sockets = [stack.enter_context(listen_tcp(config.host, config.port, has_token))]
        if config.socket is not None:
            sockets.append(stack.enter_context(listen_unix(config.socket)))
            stack.callback(remove_socket, config.socket)
        yield sockets


@contextmanager
def _parts(
    tasks: Iterable[Task], databases: Mapping[str, Database], config: ServiceConfig, log: Log
) -> Iterator[Parts]:
    """Start the workers and make the rest. Raises `ServeError` for a task without database."""
    metrics = Metrics()
    admission = Admission(config.threads, config.max_waiting)
    metrics.gauge("hsql_queue_depth", "Requests that wait", lambda: admission.waiting)
    metrics.gauge("hsql_requests_in_flight", "Run or wait", lambda: admission.in_flight)
    with ExitStack() as stack:
        transcript = stack.enter_context(_transcript(config.transcript))
        pool = stack.enter_context(SandboxPool(config.workers, observer=metrics))
        metrics.gauge("hsql_sandbox_workers", "Worker processes", lambda: len(pool.worker_pids()))
        try:
            store = EpisodeStore(
                tasks,
                databases,
                pool,
                config.episode,
                metrics,
                log,
                transcript,
                config.idle_s,
                config.max_episodes,
            )
        except ValueError as error:
            raise ServeError(str(error)) from error
        yield Parts(config, store, admission, metrics, log)


@contextmanager
def _transcript(path: Path | None) -> Iterator[Transcript]:
    """Open the transcript's file, if there is to be one. Raises `ServeError`."""
    if path is None:
        yield Transcript()
        return
    try:
        descriptor = open_transcript(path)
    except OSError as error:
        raise ServeError(f"the transcript {path} cannot be written: {error.strerror}") from error
    try:
        yield Transcript(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _library_logs(log: Log) -> Iterator[None]:
    """Send what libraries log to `log`."""
    handler = LogHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _announce(sockets: Sequence[socket.socket], config: ServiceConfig, log: Log) -> None:
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    where = {"url": f"http://{shown}:{port}"}
    if config.socket is not None:
        where["socket"] = f"unix:{config.socket.absolute()}"
    print(json.dumps({**where, "pid": os.getpid()}), flush=True)
    log("ready", url=where["url"], token=config.token is not None, workers=config.workers)


def _watch_stdin(server: uvicorn.Server) -> None:
    while os.read(0, 4096):
        pass
    server.should_exit = True

"""What every request passes first: the token, the body's limits; and last: no exception leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hsql_env.service.config import is_token
from hsql_env.service.problems import RequestError, problem_reply

_OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # probes carry no token, and see counts only

_LONG_DIGITS = 18  # of a number that is over any limit


class _Disconnected(Exception):
    """The client went away before its body was there."""


class Gate:
    """ASGI middleware around the whole service.

    The body is read here, once and bounded; the application gets it whole, in one message.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        max_body_bytes: int,
        body_s: float,
        on_fault: Callable[[BaseException], None],
        refuse: Callable[[Exception], Response],
    ) -> None:
        self._app = app
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s
        self._on_fault = on_fault
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is not one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False
        reply: Response | None = None

        async def note(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._serve(scope, receive, note)
        except asyncio.CancelledError:  # the drain's time is up; the request ends here
            reply = problem_reply("infrastructure", "the service ended before the request did")
        except Exception as error:
            self._on_fault(error)
            reply = fault_reply()
        if reply is not None and not answered:
            await reply(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in _OPEN_PATHS:
                self._check_token(_header(scope, b"authorization"))
            body = await self._read(scope, receive)
        except _Disconnected:
            return
        except RequestError as error:
            await self._refuse(error)(scope, receive, send)
            return
        await self._app(scope, _Replay(body, receive), send)

    def _check_token(self, header: bytes) -> None:
        """Raise `RequestError` if the bearer token is missing or wrong."""
        if self._token is not None and not is_token(self._token, header):
            message = "this service wants its token: Authorization: Bearer …"
            raise RequestError("unauthorized", message)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body. Raises `RequestError` for one that is too large or too slow."""
        limit = self._max_body_bytes
        length = _header(scope, b"content-length")
        if length.isdigit() and (len(length) > _LONG_DIGITS or int(length) > limit):
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._body_s):
                return await _read_body(receive, limit)
        except TimeoutError:
            message = f"the body did not arrive in {self._body_s:g} s"
            raise RequestError("invalid", message) from None


def fault_reply() -> Response:
    """Return what a client is told of a fault of ours."""
    return problem_reply("infrastructure", "the service failed at this request", 500)


class _Replay:
    """The receiving half of a request whose body has been read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        """Return the body, then what comes after it."""
        message, self._message = self._message, None
        return message or await self._receive()


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError("too_large", f"the body is larger than {limit} bytes")


def _header(scope: Scope, name: bytes) -> bytes:
    """Return a header's first value, b"" without one. ASGI's header names are in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""

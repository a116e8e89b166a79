"""Requests that cannot be served: one exception, one body."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import Response

from hsql_env.service.wire import Problem, ProblemKind

_STATUS: Mapping[ProblemKind, HTTPStatus] = {
    "not_found": HTTPStatus.NOT_FOUND,
    "conflict": HTTPStatus.CONFLICT,
    "invalid": HTTPStatus.UNPROCESSABLE_ENTITY,
    "too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "draining": HTTPStatus.SERVICE_UNAVAILABLE,
    "infrastructure": HTTPStatus.SERVICE_UNAVAILABLE,
}
_HEADERS: Mapping[ProblemKind, Mapping[str, str]] = {
    "busy": {"retry-after": "1"},
    "draining": {"retry-after": "2"},
    "unauthorized": {"www-authenticate": "Bearer"},
}
_MESSAGE_CHARS = 500  # a message may repeat part of the request
PROBLEM_STATUSES = sorted({*map(int, _STATUS.values()), 405, 500})


class RequestError(Exception):
    """A request that cannot be served, with its kind and the reason."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind


def problem_body(kind: ProblemKind, message: str) -> bytes:
    """Return the JSON of a `Problem`; a long message is cut and bad characters are replaced."""
    cut = message if len(message) <= _MESSAGE_CHARS else message[:_MESSAGE_CHARS] + "…"
    text = cut.encode(errors="replace").decode()
    return Problem(kind=kind, message=text).model_dump_json().encode()


def problem_reply(
    kind: ProblemKind,
    message: str,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the reply for a problem, with the status and the headers of its kind."""
    return Response(
        problem_body(kind, message),
        status or _STATUS[kind],
        {**_HEADERS.get(kind, {}), **(headers or {})},
        "application/json",
    )

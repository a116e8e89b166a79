"""What passes the gate when the application fails, and what of it comes into the log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from hsql_env.service.gate import Gate
from hsql_env.service.log import Log, LogHandler, fault_fields
from hsql_env.service.problems import RequestError, problem_reply

SECRET = "SELECT hidden"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    """An application with a fault in it."""
    raise ValueError(SECRET)


async def broken_late(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that fails after its reply."""
    await problem_reply("conflict", "sent")(scope, receive, send)
    raise ValueError(SECRET)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body as it came in, then wait for the end of the connection."""
    body = (await receive())["body"]
    await problem_reply("conflict", body.decode())(scope, receive, send)
    assert (await receive())["type"] == "http.disconnect"


def ask(
    app: ASGIApp, parts: tuple[bytes, ...] = (b"",), token: str | None = None
) -> tuple[int, str, list[BaseException]]:
    """Return status, message and faults of one request whose body comes in parts."""
    faults: list[BaseException] = []
    sent: list[Any] = []
    messages = [
        {"type": "http.request", "body": part, "more_body": index < len(parts)}
        for index, part in enumerate(parts, 1)
    ] + [{"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    def refuse(error: Exception) -> Any:
        assert isinstance(error, RequestError)
        return problem_reply(error.kind, str(error))

    gate = Gate(app, token, 10, 5.0, faults.append, refuse)
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    asyncio.run(gate(scope, receive, send))
    start, body = sent
    return start["status"], json.loads(body["body"])["message"], faults


def test_a_fault_is_a_problem_without_its_text() -> None:
    status, message, faults = ask(broken)
    assert (status, message) == (500, "the service failed at this request")
    (fault,) = faults
    fields = fault_fields(fault)
    assert fields["error"] == "ValueError"
    assert str(fields["at"]).endswith(" broken']")
    assert SECRET not in str(fields)
    assert "/" not in str(fields)


def test_a_fault_after_the_reply_leaves_it_alone() -> None:
    status, message, faults = ask(broken_late)
    assert (status, message, len(faults)) == (409, "sent", 1)


def test_body_is_handed_on_once_and_whole() -> None:
    assert ask(echo, (b"ab", b"", b"cd")) == (409, "abcd", [])
    assert ask(echo, (b"0123456789",)) == (409, "0123456789", [])
    assert ask(echo, (b"012345678", b"9x")) == (413, "the body is larger than 10 bytes", [])
    status, message, _ = ask(echo, token="t" * 16)
    assert (status, message.split(":")[0]) == (401, "this service wants its token")


def test_lines_of_libraries_show_no_values() -> None:
    lines: list[str] = []
    logger = logging.Logger("some.library")
    logger.addHandler(LogHandler(Log("warning", lines.append)))
    logger.info("not worth a line")
    logger.warning("first\nobject at %s", SECRET)
    try:
        raise KeyError(SECRET)
    except KeyError:
        logger.exception("it failed")
    warned, failed = map(json.loads, lines)
    assert warned.pop("time") <= failed.pop("time")
    assert warned == {"event": "server", "logger": "some.library", "message": "first"}
    assert failed.pop("at")
    assert failed == {
        "event": "server", "logger": "some.library", "message": "it failed", "error": "KeyError"
    }  # fmt: skip
    assert SECRET not in "".join(lines)


@pytest.mark.parametrize(("level", "events"), [("info", 2), ("warning", 1), ("off", 0)])
def test_levels(level: Any, events: int) -> None:
    lines: list[str] = []
    log = Log(level, lines.append)
    log("episode_started", task="t1")
    log("infrastructure", message="x" * 1000)
    assert len(lines) == events
    assert all(len(line) < 700 and line.endswith("}\n") for line in lines)


def test_a_flood_of_one_event_is_counted_and_not_written() -> None:
    lines: list[str] = []
    log = Log("info", lines.append)
    for _ in range(5000):
        log("refused")
    log("draining")
    assert json.loads(lines[-1])["event"] == "draining"
    deadline = time.monotonic() + 10
    while "left_out" not in lines[-1]:
        assert time.monotonic() < deadline
        log("refused")
    counted = sum(json.loads(line).get("left_out", 0) for line in lines)
    written = sum("refused" in line for line in lines)
    assert written < 500
    assert counted + written >= 5000


def test_long_messages_and_bad_characters_do_not_break_a_reply() -> None:
    reply = problem_reply("busy", "\ud800" + "y" * 1000)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert json.loads(bytes(reply.body))["message"] == "?" + "y" * 499 + "…"

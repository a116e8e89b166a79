"""A policy's raw turn -> tool calls. Tolerant of how a turn is written, strict about each call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"
_BLANK = re.compile(r"\s*")
_MENTIONS = 64  # calls looked at for the one that holds a tag: each may take the text's length
_MAX_DEPTH = 4  # no tool takes more than a list in an object
_NOT_TEXT = "the tool call holds characters that are not valid text"
_DECODER = json.JSONDecoder(strict=False)  # line breaks inside a SQL string are fine


@dataclass(frozen=True)
class ParsedCall:
    """One tool call as written; `error` says why it cannot be run, "" when it can."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """The calls of one turn, in order. A turn without any is the policy's mistake."""

    calls: tuple[ParsedCall, ...]


def parse_turn(text: str, most: int | None = None) -> ParsedTurn:
    """Return the calls outside the reasoning block, at most the first `most`. Never raises.

    A call's end is found by decoding its JSON, so `</tool_call>` inside a string is text. The time
    is linear in the text for any fixed `most`; what comes after that many calls is not looked at.
    """
    body = _after_thinking(text)
    calls: list[ParsedCall] = []
    start = body.find(_OPEN)
    while start >= 0 and (most is None or len(calls) < most):
        call, end = _parse_call(body, start + len(_OPEN))
        calls.append(call)
        start = body.find(_OPEN, end)
    return ParsedTurn(tuple(calls))


def _after_thinking(text: str) -> str:
    """Return the text after the reasoning; its opening tag may be part of the prompt."""
    head, close, tail = text.partition(_THINK_CLOSE)
    if text.lstrip().startswith(_THINK_OPEN):
        return tail
    if not close:
        return text
    if _OPEN not in head:
        return tail
    # Reasoning that mentions a call, or a call that mentions the end of reasoning.
    return tail if _OPEN in tail and not _is_inside_call(text, len(head)) else text


def _is_inside_call(text: str, place: int) -> bool:
    """Return whether the place is inside the JSON of one of the first calls."""
    end = 0
    for _ in range(_MENTIONS):
        start = text.find(_OPEN, end, place)
        if start < 0:
            return False
        end = start + len(_OPEN)
        try:
            _, end = _DECODER.raw_decode(text, _after_blank(text, end))
        except (ValueError, RecursionError):
            continue  # a mention of a call, or one that cannot be run
        if end > place:
            return True
    return False


def _parse_call(body: str, start: int) -> tuple[ParsedCall, int]:
    """Return the call that starts at `start` and where its text ends."""
    start = _after_blank(body, start)
    try:
        value, end = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError) as error:
        return ParsedCall(error=f"the tool call is not valid JSON: {_reason(error)}"), _skip(
            body, start
        )
    close = _after_blank(body, end)
    if not body.startswith(_CLOSE, close):
        return ParsedCall(error=f"the tool call does not end with {_CLOSE}"), _skip(body, end)
    return _read_call(value), close + len(_CLOSE)


def _after_blank(body: str, start: int) -> int:
    blank = _BLANK.match(body, start)
    return blank.end() if blank else start


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too large"


def _skip(body: str, start: int) -> int:
    end = body.find(_CLOSE, start)
    return len(body) if end < 0 else end + len(_CLOSE)


def _read_call(value: object) -> ParsedCall:
    if not isinstance(value, dict):
        return ParsedCall(error="a tool call must be a JSON object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ParsedCall(error="a tool call needs a name")
    if not is_unicode(name):
        return ParsedCall(error=_NOT_TEXT)  # and nowhere a name that no record could hold
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decode_arguments(arguments)
    if not isinstance(arguments, dict):
        return ParsedCall(name=name, error="arguments must be a JSON object")
    if _depth(arguments) > _MAX_DEPTH:
        return ParsedCall(name=name, error=f"arguments are nested over {_MAX_DEPTH} levels deep")
    if not is_unicode(json.dumps(arguments, ensure_ascii=False)):
        return ParsedCall(error=_NOT_TEXT)
    return ParsedCall(name, arguments)


def _decode_arguments(text: str) -> object:
    if not text.strip():  # some endpoints' way to write no arguments
        return {}
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _depth(value: object, limit: int = 8) -> int:
    """Return how deep lists and objects are nested, counting no further than `limit`."""
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    if inner is None or limit == 0:
        return 0
    return 1 + max((_depth(part, limit - 1) for part in inner), default=0)


def is_unicode(text: str) -> bool:
    """Return whether the text can be encoded: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

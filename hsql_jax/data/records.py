"""Conversations of a file: our trajectory records, OpenAI-style messages, ShareGPT.

Whatever the format, an assistant's content becomes the policy's raw text as Qwen3 writes it: the
reasoning in a think block, the text, then one `<tool_call>` block a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grain
from pydantic import ValidationError

from hsql_env.harness.tools import TOOLS
from hsql_env.records import Message, Trajectory, first_problem
from hsql_jax.chat import Tools
from hsql_jax.errors import UserError

Format = Literal["auto", "trajectory", "openai", "sharegpt"]

KEYS = {"trajectory": "trajectory_id", "openai": "messages", "sharegpt": "conversations"}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
EMPTY: tuple[Any, ...] = (None, "", [], {})  # fields that say nothing, such as "refusal": null
RESPONSE = ("<tool_response>", "</tool_response>")  # the renderer writes these around every result


@dataclass(frozen=True)
class Conversation:
    """What one record holds: `source` names it as FILE:NUMBER; the rest of it is `metadata`."""

    messages: tuple[Message, ...]
    tools: Tools
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_conversations(path: Path, format: Format = "auto") -> Iterator[Conversation]:
    """Yield the conversations of a file, or of all record files of a folder, in order of name.

    A file is JSON Lines, an ArrayRecord of JSON (`.array_record`) or one JSON list (`.json`). With
    "auto" each file's first record decides. `UserError` names the file, the line (or the number of
    the record, from 1) and the field that is wrong.
    """
    for file in _files(path):
        known = format
        for number, record in _records(file):
            source = f"{file}:{number}"
            try:
                if known == "auto":
                    known = _detect(record)
                messages, tools, metadata = IMPORTERS[known](record)
            except ValidationError as error:
                raise UserError(f"{source}: {first_problem(error, 'record')}") from None
            except ValueError as error:
                raise UserError(f"{source}: {error}") from None
            yield Conversation(messages, tools, source, metadata)


def _files(path: Path) -> list[Path]:
    kinds = (".jsonl", ".json", ".array_record")
    files = sorted(file for file in path.glob("*") if file.suffix in kinds)
    if path.is_file():
        return [path]
    if not files:
        raise UserError(
            f"{path}: no records there; give a file or a folder of {' or '.join(kinds)}"
        )
    return files


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file and their numbers, from 1; blank lines are skipped."""
    if file.suffix == ".json":
        values = _parse(file.read_bytes(), file)
        if not isinstance(values, list):
            raise UserError(f"{file}: expected a list of records; one a line belongs in a .jsonl")
        yield from enumerate(values, 1)
        return
    if file.suffix == ".array_record":
        source = grain.sources.ArrayRecordDataSource(str(file))
        for index in range(len(source)):
            yield index + 1, _parse(source[index], file, index + 1)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield number, _parse(line.rstrip(), file, number)


def _parse(text: bytes, file: Path, number: int | None = None) -> Any:
    """The JSON value of a record, or of a whole file, whose lines count where `number` is None."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}:{error.lineno if number is None else number}"
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}:{number or 1}: not UTF-8 text") from None


def _detect(record: Any) -> Format:
    found: list[Format] = [name for name, key in KEYS.items() if key in _mapping(record, "record")]  # type: ignore[misc]
    if not found:
        raise ValueError(f"a record of no known format: it has none of {', '.join(KEYS.values())}")
    return found[0]


# --- formats --------------------------------------------------------------------------------------

Parts = tuple[tuple[Message, ...], Tools, dict[str, Any]]


def _trajectory(record: Any) -> Parts:
    trajectory = Trajectory.model_validate(record)
    metadata = {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task.task_id,
        "database_id": trajectory.task.database_id,
        "question": trajectory.task.question,
        "sql": trajectory.final_sql,
        "reward": trajectory.verdict.reward,
    }
    return trajectory.messages, TOOLS, metadata


def _openai(record: Any) -> Parts:
    given = _list(_mapping(record, "record"), "messages", "record")
    messages = tuple(_openai_message(m, f"messages[{i}]") for i, m in enumerate(given))
    return messages, _tools(record.get("tools")), _rest(record, "messages", "tools")


def _openai_message(message: Any, where: str) -> Message:
    values = dict(_mapping(message, where))
    role = values.pop("role", None)
    role = "system" if role == "developer" else role
    content = _text(values.pop("content", None), f"{where}.content")
    reasoning = _text(values.pop("reasoning_content", None), f"{where}.reasoning_content")
    calls = _list(values, "tool_calls", where) if values.get("tool_calls") else []
    if role != "assistant" and (calls or reasoning):
        raise ValueError(f"{where}: a {role} message has tool_calls or reasoning_content")
    ignored = {"tool_calls", "tool_call_id", "name"}  # results are told apart by their order
    for key, value in values.items():
        if key not in ignored and value not in EMPTY and (key, value) != ("weight", 1):
            raise ValueError(f"{where}.{key}: not supported; remove it")
    texts = [_call_text(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return _message(role, policy_text(content, reasoning, texts), where)


def _sharegpt(record: Any) -> Parts:
    given = _list(_mapping(record, "record"), "conversations", "record")
    messages = [_sharegpt_message(m, f"conversations[{i}]") for i, m in enumerate(given)]
    if system := _text(record.get("system"), "system"):
        messages.insert(0, Message(role="system", content=system))
    return (
        tuple(messages),
        _tools(record.get("tools")),
        _rest(record, "conversations", "system", "tools"),
    )


def _sharegpt_message(message: Any, where: str) -> Message:
    speaker = _mapping(message, where).get("from")
    value = _text(message.get("value"), f"{where}.value")
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"{where}.from: {speaker!r} is unknown; known are {known}")
    if speaker == "function_call":
        calls = _decoded(value, f"{where}.value")
        calls = calls if isinstance(calls, list) else [calls]
        value = policy_text("", "", [_call_text(call, f"{where}.value") for call in calls])
    if SHAREGPT_ROLES[speaker] == "tool" and value.strip().startswith(RESPONSE[0]):
        value = value.strip().removeprefix(RESPONSE[0]).removesuffix(RESPONSE[1]).strip("\n")
    return _message(SHAREGPT_ROLES[speaker], value, where)


IMPORTERS: Mapping[str, Callable[[Any], Parts]] = {
    "trajectory": _trajectory,
    "openai": _openai,
    "sharegpt": _sharegpt,
}


# --- pieces ---------------------------------------------------------------------------------------


def policy_text(content: str, reasoning: str, calls: Sequence[str]) -> str:
    """The raw text of an assistant's turn, as the Qwen3 chat template joins it."""
    thought = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n" if reasoning else ""
    said = content.lstrip("\n") if reasoning else content
    return thought + "\n".join([*([said] if said else []), *calls])


def _call_text(call: Any, where: str) -> str:
    """One call, in OpenAI's `function` envelope or without it; arguments that are text stay so."""
    call = _mapping(call, where)
    function = _mapping(call.get("function", call), f"{where}.function")
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: a call without a name")
    if isinstance(arguments, str):
        _mapping(_decoded(arguments or "{}", f"{where}.arguments"), f"{where}.arguments")
        body = arguments or "{}"
    else:
        body = json.dumps(_mapping(arguments, f"{where}.arguments"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {body}}}\n</tool_call>'


def _tools(value: Any) -> Tools:
    """The list of tools, which ShareGPT keeps as JSON text; each gets OpenAI's envelope."""
    tools = _decoded(value, "tools") if isinstance(value, str) and value else value
    if not tools:
        return []
    if not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, got {type(tools).__name__}")
    given = [_mapping(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    return [t if "function" in t else {"type": "function", "function": t} for t in given]


def _message(role: Any, content: str, where: str) -> Message:
    try:
        return Message(role=role, content=content)
    except ValidationError as error:
        raise ValueError(f"{where}.{first_problem(error, 'message')}") from None


def _text(value: Any, where: str) -> str:
    """Text, nothing, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise ValueError(f"{where}: expected text, or a list of text parts")


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _list(record: Mapping[str, Any], key: str, where: str) -> list[Any]:
    if not isinstance(record.get(key), list):
        raise ValueError(f"{where}: {key} must be a list")
    return record[key]


def _rest(record: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in used}

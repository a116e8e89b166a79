"""The action contract: four tools, their schemas, and the check of a call's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hsql_env.harness.parse import ParsedCall, is_unicode
from hsql_env.sandbox.backend import dialect

MAX_SCHEMA_TABLES = 20

SYSTEM_PROMPT = (
    "Answer the question with one SQLite query. Explore the database with the tools first: "
    "list the tables, read their schema, try queries. "
    "Only single read-only queries are allowed. Finish by calling sql_submit with the full query."
)


def prompt_for(system_prompt: str, locator: str) -> str:
    """Return the prompt with the dialect of the database it is about."""
    return system_prompt.replace("SQLite", dialect(locator))


def _tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_QUERY = {"type": "string", "description": "One SELECT or WITH statement."}

TOOLS: list[dict[str, Any]] = [
    _tool("sql_list_tables", "List every table and view with its kind and row count.", {}, []),
    _tool(
        "sql_schema",
        "Show the CREATE statement and 3 sample rows of each table.",
        {
            "tables": {
                "type": "array",
                "items": {"type": "string"},
                "description": f"Table names, at most {MAX_SCHEMA_TABLES}.",
            }
        },
        ["tables"],
    ),
    _tool(
        "sql_exec",
        "Run a read-only query and show its rows.",
        {"query": _QUERY, "limit": {"type": "integer", "description": "Most rows to show."}},
        ["query"],
    ),
    _tool("sql_submit", "Submit the final query and end.", {"query": _QUERY}, ["query"]),
]

TOOL_NAMES = tuple(tool["function"]["name"] for tool in TOOLS)


def check_call(call: ParsedCall) -> str:
    """Return why the call cannot be run, "" when it can."""
    if call.error:
        return call.error
    if call.name not in _CHECKS:
        return f"unknown tool: {call.name}; the tools are {', '.join(TOOL_NAMES)}"
    allowed, check = _CHECKS[call.name]
    extra = sorted(set(call.arguments) - allowed)
    if extra:
        return f"{call.name} has no argument {extra[0]}"
    problem = check(call.arguments)
    return f"{call.name}: {problem}" if problem else ""


def _check_nothing(arguments: dict[str, Any]) -> str:
    return ""


def _check_tables(arguments: dict[str, Any]) -> str:
    tables = arguments.get("tables")
    if not isinstance(tables, list) or not all(isinstance(name, str) for name in tables):
        return "tables must be a list of table names"
    if not 1 <= len(tables) <= MAX_SCHEMA_TABLES:
        return f"tables must hold 1 to {MAX_SCHEMA_TABLES} names, not {len(tables)}"
    return ""


def _check_query(arguments: dict[str, Any]) -> str:
    return "" if isinstance(arguments.get("query"), str) else "query must be a string"


def _check_exec(arguments: dict[str, Any]) -> str:
    limit = arguments.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        return "limit must be a whole number of at least 1"
    return _check_query(arguments)


_CHECKS: dict[str, tuple[frozenset[str], Callable[[dict[str, Any]], str]]] = {
    "sql_list_tables": (frozenset(), _check_nothing),
    "sql_schema": (frozenset({"tables"}), _check_tables),
    "sql_exec": (frozenset({"query", "limit"}), _check_exec),
    "sql_submit": (frozenset({"query"}), _check_query),
}


def tool_call_text(tool: str, arguments: Mapping[str, Any] | str) -> str:
    """Return a tool call exactly as Qwen3 emits it.

    Arguments that are JSON text of an object are written as that object, and blank ones as an empty
    one; any other text stays one, and is refused when the call is run.
    """
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments.strip() or "{}", strict=False)
        except (ValueError, RecursionError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    call = {"name": tool, "arguments": arguments}
    body = json.dumps(call, ensure_ascii=False)
    if not is_unicode(body):  # halves of a pair, which only an escape can write
        body = json.dumps(call)
    return f"<tool_call>\n{body}\n</tool_call>"


def turn_text(content: str, calls: Sequence[str]) -> str:
    """Return one text of a turn whose calls came apart from its content.

    The content is text only: markup of calls in it is written in other brackets, and reasoning
    that was cut off is closed, so that the turn reads as these calls and no others.
    """
    content = content.replace("<tool_call>", "[tool_call]").replace("</tool_call>", "[/tool_call]")
    if content.lstrip().startswith("<think>") and "</think>" not in content:
        content += "\n</think>\n"
    return "\n".join([*([content] if content else []), *calls])

"""Synthetic trajectories like those of the harness, for the tensor half's tests."""

from __future__ import annotations

import json
import random

from hsql_env.records import Message

SYSTEM = "You answer questions about a SQLite database. Explore it, then submit one query."
NOUNS = (
    "city river airport museum student course teacher movie actor singer album product supplier "
    "warehouse customer invoice payment doctor patient nurse hotel guest booking train station"
).split()
FIELDS = (
    "name area height rating budget capacity country region founded title genre price stock color"
).split()
VALUES = (
    "France Peru Kenya Norway Chile Ghana Nepal Japan Oslo Lima Jazz Rock Drama red green blue "
    "gold north south active closed Alpha Bravo Delta Echo Kilo Zürich 東京"
).split()


def _tool(name: str, **properties: str) -> dict:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    described = {"name": name, "description": f"Run {name}.", "parameters": schema}
    return {"type": "function", "function": described}


TOOLS = [
    _tool("sql_list_tables"),
    _tool("sql_schema", tables="array"),
    _tool("sql_exec", query="string", limit="integer"),
    _tool("sql_submit", query="string"),
]


def call(name: str, **arguments: object) -> str:
    """An assistant turn of one tool call, as Qwen3 writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def conversation(seed: int) -> list[Message]:
    """One trajectory: list, schema, a failed query, the right one, submit; ends with ACCEPTED."""
    pick = random.Random(seed)
    table, other = pick.sample(NOUNS, 2)
    a, b, c = pick.sample(FIELDS, 3)
    value = pick.choice(VALUES)
    sql = f"SELECT {a}, COUNT(*) FROM {table} WHERE {b} = '{value}' GROUP BY {a}"
    columns = f"id INTEGER PRIMARY KEY, {a} TEXT, {b} TEXT, {c} INTEGER, {other}_id INTEGER"
    rows = [f"{i} | {pick.choice(VALUES)} | {value} | {pick.randrange(999)} | {i}" for i in (1, 2)]
    turns = [
        (call("sql_list_tables"), f"{table} (table, 12 rows)\n{other} (table, 7 rows)"),
        (
            call("sql_schema", tables=[table]),
            "\n".join([f"CREATE TABLE {table} ({columns})", *rows]),
        ),
        (call("sql_exec", query=sql.replace(b, c + "s")), f"Error: no such column: {c}s"),
        (call("sql_exec", query=sql), f"{a} | COUNT(*)\n{pick.choice(VALUES)} | 3\n(1 row)"),
        (call("sql_submit", query=sql), "ACCEPTED"),
    ]
    question = f"How many of the {table} rows have {b} {value} for each {a}?"
    messages = [("system", SYSTEM), ("user", question)]
    for text, observation in turns:
        messages += [("assistant", text), ("tool", observation)]
    return [Message(role=role, content=text) for role, text in messages]  # type: ignore[arg-type]

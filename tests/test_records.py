"""Records of three formats to conversations, and what a bad one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from samples import SYSTEM, TOOLS, call, conversation
from transformers import PreTrainedTokenizerFast

from hsql_env.harness import tools as harness
from hsql_env.records import Message, PublicTask, Trajectory, Verdict
from hsql_jax.chat import ChatRenderer
from hsql_jax.data.records import Conversation, read_conversations
from hsql_jax.errors import UserError

SQL = "SELECT name FROM city WHERE name = 'Zürich'"


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n")
    return path


def trajectory(seed: int = 0) -> Trajectory:
    passed = Verdict(result_ok=True, protocol_ok=True, strict_ok=True, reward=1, submitted=True)
    return Trajectory(
        trajectory_id=f"t{seed}",
        task=PublicTask(task_id="k", database_id="d", question="Which?"),
        policy="p",
        seed=seed,
        messages=tuple(conversation(seed)),
        calls=(),
        turns=5,
        final_sql=SQL,
        terminated=True,
        truncated=False,
        verdict=passed,
    )


def openai() -> dict[str, Any]:
    def calls(*given: tuple[str, object]) -> list[dict]:
        return [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(given)
        ]

    return {
        "id": 7,
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": "Which"}, {"text": " city?"}]},
            {
                "role": "assistant",
                "content": "I look.",
                "refusal": None,
                "tool_calls": calls(
                    ("sql_list_tables", "{}"), ("sql_schema", {"tables": ["city"]})
                ),
            },
            {"role": "tool", "tool_call_id": "c0", "content": "city (table)"},
            {"role": "tool", "tool_call_id": "c1", "content": "CREATE TABLE city (name TEXT)"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": calls(("sql_submit", {"query": SQL})),
            },
            {"role": "tool", "tool_call_id": "c0", "content": "ACCEPTED"},
        ],
    }


def sharegpt() -> dict[str, Any]:
    body = json.dumps({"name": "sql_submit", "arguments": {"query": SQL}})
    return {
        "system": SYSTEM,
        "tools": json.dumps([tool["function"] for tool in TOOLS]),
        "conversations": [
            {"from": "human", "value": "Which city?"},
            {"from": "gpt", "value": call("sql_list_tables")},
            {"from": "tool", "value": "<tool_response>\ncity (table)\n</tool_response>"},
            {"from": "function_call", "value": body},
            {"from": "observation", "value": "ACCEPTED"},
        ],
        "score": 0.5,
    }


def contents(one: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in one.messages]


def test_our_trajectories(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(trajectory(s).model_dump() for s in (0, 1)))
    one, two = read_conversations(path)
    assert one.messages == tuple(conversation(0))
    assert two.messages == tuple(conversation(1))
    assert one.tools == harness.TOOLS
    assert (one.source, two.source) == (f"{path}:1", f"{path}:2")
    assert one.metadata == {
        "trajectory_id": "t0",
        "task_id": "k",
        "database_id": "d",
        "question": "Which?",
        "sql": SQL,
        "reward": 1.0,
    }


def test_openai_messages(tmp_path: Path) -> None:
    (one,) = read_conversations(write(tmp_path / "a.jsonl", openai()))
    first = f"I look.\n{call('sql_list_tables')}\n{call('sql_schema', tables=['city'])}"
    assert contents(one) == [
        ("system", SYSTEM),
        ("user", "Which city?"),
        ("assistant", first),
        ("tool", "city (table)"),
        ("tool", "CREATE TABLE city (name TEXT)"),
        ("assistant", call("sql_submit", query=SQL)),
        ("tool", "ACCEPTED"),
    ]
    assert one.tools == TOOLS
    assert one.metadata == {"id": 7}


def test_openai_messages_render_as_the_official_template_does(
    tmp_path: Path, qwen3: PreTrainedTokenizerFast
) -> None:
    record = openai()
    record["messages"][1]["content"] = "Which city?"  # the template takes text only
    (one,) = read_conversations(write(tmp_path / "a.jsonl", record))
    official = qwen3.apply_chat_template(record["messages"], tools=TOOLS, tokenize=False)
    ids, _ = ChatRenderer(qwen3).render(one.messages, one.tools)
    ours = qwen3.decode(ids).removesuffix("<|im_start|>assistant\n")
    assert ours == official


def test_reasoning_becomes_a_think_block(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "\nThey greet.\n", "content": "Hello"},
    ]
    (one,) = read_conversations(write(tmp_path / "a.jsonl", {"messages": messages}))
    assert contents(one) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "<think>\nThey greet.\n</think>\n\nHello"),
    ]
    assert one.tools == []


def test_sharegpt(tmp_path: Path) -> None:
    (one,) = read_conversations(write(tmp_path / "a.jsonl", sharegpt()))
    assert contents(one) == [
        ("system", SYSTEM),
        ("user", "Which city?"),
        ("assistant", call("sql_list_tables")),
        ("tool", "city (table)"),
        ("assistant", call("sql_submit", query=SQL)),
        ("tool", "ACCEPTED"),
    ]
    assert one.tools == TOOLS
    assert one.metadata == {"score": 0.5}


def test_a_folder_of_three_kinds_of_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", trajectory().model_dump())
    (tmp_path / "c.json").write_text(json.dumps([sharegpt(), sharegpt()], indent=1))
    (tmp_path / "README.md").write_text("no records")
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for seed in range(3):
        writer.write(trajectory(seed).model_dump_json().encode())
    writer.close()
    found = list(read_conversations(tmp_path))
    names = [Path(one.source).name for one in found]
    assert names == [
        *(f"a.array_record:{n}" for n in (1, 2, 3)),
        "b.jsonl:1",
        "c.json:1",
        "c.json:2",
    ]
    assert [one.messages for one in found[:3]] == [tuple(conversation(seed)) for seed in range(3)]
    assert found[4].messages == found[5].messages


BAD_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{1"}}]}
NO_NAME = {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ("[1", "not JSON: Expecting ',' delimiter at column 3"),
        ("[1]", "record: expected an object, got list"),
        ({"text": "a"}, "a record of no known format: it has none of trajectory_id, messages"),
        ({"messages": "a"}, "record: messages must be a list"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: Input should be"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: Input should be"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [BAD_CALL]}, "messages[0].tool_calls[0].arguments: not JSON"),
        ({"messages": [NO_NAME]}, "messages[0].tool_calls[0]: a call without a name"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "messages[0].weight: not supported",
        ),
        ({"messages": [], "tools": {"a": 1}}, "tools: expected a list, got dict"),
        ({"conversations": [{"from": "alien", "value": ""}]}, "conversations[0].from: 'alien' is"),
        ({"conversations": [], "tools": "[1"}, "tools: not JSON"),
        ({"trajectory_id": "t"}, "task: Field required"),
    ],
)
def test_a_bad_record_is_one_line_that_names_it(record: Any, problem: str, tmp_path: Path) -> None:
    text = record if isinstance(record, str) else json.dumps(record)
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{text}\n")
    with pytest.raises(UserError) as caught:
        list(read_conversations(path))
    assert str(caught.value).startswith(f"{path}:2: {problem}")
    assert "\n" not in str(caught.value)


def test_a_format_that_was_named_is_held_to(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", openai(), sharegpt())
    with pytest.raises(UserError, match=r"a\.jsonl:2: record: messages must be a list"):
        list(read_conversations(path))
    with pytest.raises(UserError, match=r"a\.jsonl:1: record: conversations must be a list"):
        list(read_conversations(path, "sharegpt"))


def test_files_that_hold_no_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records there; give a file or a folder of"):
        list(read_conversations(tmp_path / "missing"))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match="expected a list of records"):
        list(read_conversations(tmp_path))
    (tmp_path / "a.json").write_text('[\n{"a": }]')
    with pytest.raises(UserError, match=r"a\.json:2: not JSON: Expecting value at column 7"):
        list(read_conversations(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(b'{"\xff": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:1: not UTF-8 text"):
        list(read_conversations(tmp_path / "b.jsonl"))


def test_messages_are_of_our_type(tmp_path: Path) -> None:
    (one,) = read_conversations(write(tmp_path / "a.jsonl", openai()))
    assert {type(message) for message in one.messages} == {Message}

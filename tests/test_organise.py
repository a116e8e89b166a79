"""Conversations to examples, and the stream that a data config says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from samples import SYSTEM, TOOLS, call, conversation
from test_data import segments
from test_records import openai, sharegpt, trajectory, write
from transformers import PreTrainedTokenizerFast

from hsql_env.records import Message
from hsql_jax.chat import ChatRenderer
from hsql_jax.data import Example
from hsql_jax.data.config import DataConfig, open_stream
from hsql_jax.data.organise import NOTHING, full, make_examples, static, submitted, turns
from hsql_jax.data.records import Conversation, read_conversations
from hsql_jax.errors import UserError

STOP = "<|im_end|>"


@pytest.fixture
def renderer(tiny: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tiny)


def of(*messages: tuple[str, str], tools: object = TOOLS, **metadata: object) -> Conversation:
    given = tuple(Message(role=r, content=c) for r, c in messages)  # type: ignore[arg-type]
    return Conversation(given, tools, "file:1", metadata)  # type: ignore[arg-type]


def sample(seed: int = 0) -> Conversation:
    return Conversation(tuple(conversation(seed)), TOOLS, f"file:{seed}")


def learnt(renderer: ChatRenderer, example: Example) -> str:
    return renderer.decode(np.asarray(example.ids)[np.asarray(example.mask) == 1].tolist())


def own_turns(one: Conversation) -> list[str]:
    return [message.content for message in one.messages if message.role == "assistant"]


def test_full_learns_every_turn_of_the_policy(renderer: ChatRenderer) -> None:
    (example,) = full(renderer, sample())
    ids, mask = renderer.render(sample().messages, TOOLS)
    size = len(example.ids)
    assert list(example.ids) == ids[:size]
    assert list(example.mask) == mask[:size]
    assert not any(mask[size:])
    assert learnt(renderer, example) == STOP.join(own_turns(sample()))


def test_turns_learn_one_turn_each_after_all_that_came_before(renderer: ChatRenderer) -> None:
    examples = turns(renderer, sample())
    (whole,) = full(renderer, sample())
    assert [learnt(renderer, example) for example in examples] == own_turns(sample())
    assert [len(example.ids) for example in examples][-1] == len(whole.ids)
    for example in examples:
        assert list(example.ids) == list(whole.ids[: len(example.ids)])
    joined = sum(np.pad(e.mask, (0, len(whole.ids) - len(e.ids))) for e in examples)
    assert joined.tolist() == list(whole.mask)


def test_static_shows_question_and_schema_and_learns_the_sql(renderer: ChatRenderer) -> None:
    city, hotel = "CREATE TABLE city (name TEXT)", "CREATE TABLE hotel (name TEXT)"
    one = of(
        ("system", SYSTEM),
        ("user", "Which?"),
        ("assistant", call("sql_schema", tables=["city"])),
        ("tool", city),
        ("assistant", call("sql_schema", tables=["hotel"])),
        ("tool", hotel),
        ("assistant", call("sql_schema", tables=["city"])),
        ("tool", city),
        ("assistant", call("sql_submit", query="SELECT name")),
        ("tool", "ACCEPTED"),
    )
    (example,) = static(renderer, one)
    assert learnt(renderer, example) == "SELECT name"
    prompt = f"<|im_start|>user\n{city}\n{hotel}\nWhich?{STOP}\n<|im_start|>assistant\n"
    assert renderer.decode(list(example.ids)) == f"{prompt}SELECT name"
    named = of(*((m.role, m.content) for m in one.messages), question="How?", sql="SELECT area")
    (example,) = static(renderer, named)
    assert learnt(renderer, example) == "SELECT area"
    assert f"\nHow?{STOP}" in renderer.decode(list(example.ids))


def test_what_teaches_nothing_is_counted(renderer: ChatRenderer) -> None:
    silent = of(("user", "Which?"))
    assert [len(example.ids) for example in full(renderer, silent)] == [0]
    assert turns(renderer, silent) == [NOTHING]
    unread = of(("user", "Which?"), ("assistant", call("sql_submit", query="SELECT 1")))
    assert static(renderer, unread) == [NOTHING]


def test_the_last_query_submitted_counts() -> None:
    first, last = (call("sql_submit", query=f"SELECT {n}") for n in (1, 2))
    assert submitted(of(("assistant", first), ("tool", ""), ("assistant", last)).messages) == (
        "SELECT 2"
    )
    assert submitted(of(("user", first)).messages) == ""


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_keep_the_order(workers: int, renderer: ChatRenderer) -> None:
    given = [sample(seed) for seed in range(20)]
    examples = list(make_examples(iter(given), renderer, turns, workers))
    expected = [turn for one in given for turn in own_turns(one)]
    assert [learnt(renderer, example) for example in examples] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_conversation_that_cannot_be_rendered_is_named(
    workers: int, renderer: ChatRenderer
) -> None:
    twice = of(("user", "Hi"), ("assistant", "a"), ("assistant", "b"))
    with pytest.raises(UserError, match=r"^file:1: messages\[2\] \(assistant\): follows an assist"):
        list(make_examples([sample(), twice], renderer, full, workers))


def test_a_config_says_the_stream(tmp_path: Path, renderer: ChatRenderer) -> None:
    records = [trajectory(seed).model_dump() for seed in range(20)]
    path = write(tmp_path / "a.jsonl", *records)
    (longest, *_) = sorted(
        (e for one in read_conversations(path) for e in full(renderer, one)),
        key=lambda example: -len(example.ids),
    )
    row = len(longest.ids) - 1
    dropped = open_stream(DataConfig(path, row_tokens=row, rows=2), renderer, epochs=1)
    cut = open_stream(DataConfig(path, row_tokens=row, rows=2, too_long="cut"), renderer, epochs=1)
    lost = dropped.counts.too_long
    assert lost >= 1
    assert dropped.counts.kept == 20 - lost
    assert (cut.counts.kept, cut.counts.cut, cut.counts.too_long) == (20, lost, 0)
    assert sum(len(ids) for batch in cut for ids in segments(batch)) == cut.counts.tokens
    by_turn = DataConfig(path, organisation="turns", row_tokens=4000, rows=2, workers=0)
    assert open_stream(by_turn, renderer).counts.kept == 20 * 5
    pairs = DataConfig(path, organisation="static", row_tokens=4000, rows=2, packed=False)
    stream = open_stream(pairs, renderer, epochs=1, process_index=1, process_count=2)
    assert stream.counts.kept == 20
    assert sum(len(segments(batch)) for batch in stream if batch.segment_ids.any()) == 10


def test_other_formats_reach_the_batches(tmp_path: Path, renderer: ChatRenderer) -> None:
    for name, record in {"a.jsonl": openai(), "b.jsonl": sharegpt()}.items():
        write(tmp_path / name, record)
    stream = open_stream(DataConfig(tmp_path, row_tokens=4000, rows=1), renderer, epochs=1)
    texts = {renderer.decode(list(ids)) for batch in stream for ids in segments(batch)}
    expected = {
        renderer.decode(list(example.ids))
        for one in read_conversations(tmp_path)
        for example in full(renderer, one)
    }
    assert len(expected) == 2
    assert texts == expected


@pytest.mark.parametrize("field", [{"rows": 0}, {"row_tokens": 0}, {"workers": -1}, {"seed": -1}])
def test_sizes_are_checked(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="rows and their tokens are at least 1"):
        DataConfig(Path("a.jsonl"), **field)  # type: ignore[arg-type]


def test_buckets_are_checked() -> None:
    with pytest.raises(ValueError, match="each is at least 1 and below row_tokens, 64"):
        DataConfig(Path("a.jsonl"), row_tokens=64, buckets=(32, 64))

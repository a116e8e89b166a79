"""Trajectories to supervised examples: what is shown, and what the loss is on."""

from __future__ import annotations

import numpy as np
import pytest
from samples import SYSTEM, TOOLS, call
from transformers import PreTrainedTokenizerFast

from hsql_env.records import Message, PublicTask, Trajectory, Verdict
from hsql_jax.chat import ChatRenderer
from hsql_jax.data import Example
from hsql_jax.sft import correction_example, full_example, static_examples

CITY = "CREATE TABLE city (name TEXT, area INTEGER)\nOslo | 3"
HOTEL = "CREATE TABLE hotel (name TEXT, city_id INTEGER)\nAlpha | 1"
PASS = Verdict(result_ok=True, protocol_ok=True, strict_ok=True, reward=1.0, submitted=True)


@pytest.fixture
def renderer(tiny: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tiny)


def trajectory(question: str, sql: str, *turns: tuple[str, str], database: str = "d") -> Trajectory:
    messages = [("system", SYSTEM), ("user", question)]
    for own, observation in (*turns, (call("sql_submit", query=sql), "ACCEPTED")):
        messages += [("assistant", own), ("tool", observation)]
    return Trajectory(
        trajectory_id=question,
        task=PublicTask(task_id=question, database_id=database, question=question),
        policy="p",
        seed=0,
        messages=tuple(Message(role=r, content=c) for r, c in messages),  # type: ignore[arg-type]
        calls=(),
        turns=1 + len(turns),
        final_sql=sql,
        terminated=True,
        truncated=False,
        verdict=PASS,
    )


def schema(*tables: str) -> tuple[str, str]:
    """A turn that reads tables, and what it shows."""
    return call("sql_schema", tables=["t"]), "\n".join(tables)


def text(renderer: ChatRenderer, example: Example) -> tuple[str, str]:
    """The whole text of an example, and the text that the loss is on."""
    ids, mask = np.asarray(example.ids), np.asarray(example.mask)
    return renderer.decode(ids.tolist()), renderer.decode(ids[mask == 1].tolist())


def test_pairs_of_a_database_share_its_schema(renderer: ChatRenderer) -> None:
    (example,) = static_examples(
        renderer,
        [
            trajectory("How many?", "SELECT COUNT(*) FROM city", schema(CITY)),
            trajectory("Which?", "SELECT name FROM hotel", schema(HOTEL, CITY)),
            trajectory("More?", "SELECT area FROM city", schema(CITY)),
        ],
        length=1_000,
    )
    whole, learnt = text(renderer, example)
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
    turns = [
        (f"{CITY}\nHow many?", "SELECT COUNT(*) FROM city"),
        (f"{HOTEL}\nWhich?", "SELECT name FROM hotel"),
        ("More?", "SELECT area FROM city"),
    ]
    assert whole == "<|im_end|>\n".join(asked.format(*turn) for turn in turns)
    assert learnt == "<|im_end|>".join(sql for _, sql in turns)


def test_a_full_conversation_is_followed_by_one_that_shows_all_again(
    renderer: ChatRenderer,
) -> None:
    pairs = [
        trajectory(f"How many {n}?", "SELECT COUNT(*) FROM city", schema(CITY)) for n in range(9)
    ]
    long = len(static_examples(renderer, pairs[:4], 10_000)[0].ids)
    examples = static_examples(renderer, pairs, long)
    assert [text(renderer, e)[1].count("SELECT") for e in examples] == [4, 4, 1]
    assert [text(renderer, e)[0].count("CREATE TABLE city") for e in examples] == [1, 1, 1]
    assert max(len(e.ids) for e in examples) == long


def test_databases_are_kept_apart_and_unread_schemas_left_out(renderer: ChatRenderer) -> None:
    sql = "SELECT name FROM city"
    examples = static_examples(
        renderer,
        [
            trajectory("One?", sql, schema(CITY), database="a"),
            trajectory("Two?", sql, schema(HOTEL), database="b"),
            trajectory("None?", sql, database="b"),
            trajectory("Three?", sql, schema(CITY), database="a"),
        ],
        length=1_000,
    )
    wholes = [text(renderer, example)[0] for example in examples]
    assert [[q in w for q in ("One?", "Two?", "Three?", "None?")] for w in wholes] == [
        [True, False, True, False],
        [False, True, False, False],
    ]


def test_a_correction_is_learnt_from_the_first_mistake_on(renderer: ChatRenderer) -> None:
    wrong, right = call("sql_exec", query="SELECT nam"), call("sql_exec", query="SELECT name")
    mended = trajectory(
        "Which?",
        "SELECT name",
        schema(CITY),
        (wrong, "Error: no such column: nam"),
        (right, "name\nOslo\n(1 row)"),
    )
    whole, learnt = text(renderer, correction_example(renderer, mended, TOOLS))
    assert learnt == f"{right}<|im_end|>" + call("sql_submit", query="SELECT name")
    full_whole, full_learnt = text(renderer, full_example(renderer, mended, TOOLS))
    assert whole == full_whole
    assert full_learnt.endswith(f"{wrong}<|im_end|>{learnt}")

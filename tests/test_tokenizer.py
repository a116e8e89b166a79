"""The demo's word-level tokenizer: lossless, one token a word, short trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import SYSTEM, TOOLS, call, conversation
from transformers import PreTrainedTokenizerFast

from hsql_jax.chat import CONTROL, MARKUP, ChatRenderer, load_tokenizer
from hsql_jax.tokenizer import frequent_fragments, tool_call_fragments, train_tokenizer


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_round_trips(tiny: PreTrainedTokenizerFast, text: str) -> None:
    assert round_trip(tiny, text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<0x41>",
        "e\u0301\u0301",
        "\x00\x7f",
        "a  b\t\r\n ",
        "👩‍👩‍👧 नमस्ते",
        *CONTROL,
        *MARKUP,
        "rows)rows",
    ],
)
def test_awkward_text_round_trips(tiny: PreTrainedTokenizerFast, text: str) -> None:
    assert round_trip(tiny, text) == text


@pytest.mark.parametrize("word", ["city", "France", "Zürich", "東京"])
@pytest.mark.parametrize(
    "around",
    ["{}", " {} ", "'{}'", '"{}"', "({})", ".{}.", "[{}]", "SELECT {} FROM", " | {}\n", " = '{}'"],
)
def test_a_word_is_one_token_wherever_it_stands(
    tiny: PreTrainedTokenizerFast, word: str, around: str
) -> None:
    assert pieces(tiny, around.format(word)).count(word) == 1


def test_a_foreign_key_is_its_tables_name_and_a_suffix(tmp_path: Path) -> None:
    text = "city_id, net_width, order_item_id"
    tokenizer = load_tokenizer(train_tokenizer([text] * 3, [], tmp_path, 400, 2))
    keys = ["city", "_id", ",", " ", "net_width", ",", " ", "order", "_item", "_id"]
    assert pieces(tokenizer, text) == keys
    text = "order_item, order_item_id, order_items"
    tokenizer = load_tokenizer(train_tokenizer([text] * 3, [], tmp_path, 400, 2))
    parts = ["order_item", ",", " ", "order_item", "_id", ",", " ", "order_items"]
    assert pieces(tokenizer, text) == parts


def test_fragments_do_not_break_words(tmp_path: Path) -> None:
    folder = train_tokenizer(
        ["the bathe ask by asks"] * 3, ["the ", " as", "as", "by"], tmp_path, 400, 2
    )
    tokenizer = load_tokenizer(folder)
    assert pieces(tokenizer, "bathe the asks as") == ["bathe", " ", "the ", "asks", " as"]
    assert pieces(tokenizer, "by baby") == ["by", " ", "b", "a", "b", "y"]


def test_longest_fragment_wins_over_markup(tiny: PreTrainedTokenizerFast) -> None:
    text = call("sql_exec", query="SELECT name FROM city")
    head = '<tool_call>\n{"name": "sql_exec", "arguments": {"query": "'
    tail = '"}}\n</tool_call>'
    assert pieces(tiny, text) == [head, "SELECT ", "name", " FROM ", "city", tail]
    assert pieces(tiny, "<tool_call>{}") == ["<tool_call>", "{", "}"]
    assert pieces(tiny, call("sql_list_tables")) == [call("sql_list_tables")]


def test_frequent_pairs_of_digits_are_one_token(tmp_path: Path) -> None:
    folder = train_tokenizer(["12 | 34 | 7", "2034-12"] * 3, [], tmp_path, 400, 2)
    tokenizer = load_tokenizer(folder)
    assert pieces(tokenizer, "12345") == ["12", "34", "5"]
    assert pieces(tokenizer, "9812") == ["9", "8", "12"]


def test_rare_words_are_characters(tiny: PreTrainedTokenizerFast) -> None:
    assert pieces(tiny, "zyx") == ["z", "y", "x"]
    assert pieces(tiny, "é") == ["<0xC3>", "<0xA9>"]


def test_control_tokens_are_special_and_ids_dense(tiny: PreTrainedTokenizerFast) -> None:
    assert tiny.convert_tokens_to_ids(list(CONTROL)) == [0, 1, 2]
    assert set(CONTROL) < set(tiny.all_special_tokens) | {
        token.content for token in tiny.added_tokens_decoder.values() if token.special
    }
    assert sorted(tiny.get_vocab().values()) == list(range(len(tiny)))


def test_trajectories_are_short(tiny: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tiny)
    lengths = [len(renderer.render(conversation(seed), TOOLS)[0]) for seed in range(200)]
    assert 100 < sum(lengths) / len(lengths) < 140
    assert len(renderer.begin(conversation(0)[:2], TOOLS)) < 20  # the system turn is one token


def test_frequent_fragments_end_at_content_words_and_known_strings() -> None:
    texts = ['{"query": "SELECT name FROM city WHERE id = \'IN\'"}'] * 4
    found = frequent_fragments(texts, ['{"query": "'], min_count=4, limit=10)
    assert sorted(found) == sorted(["SELECT ", " FROM ", " WHERE ", " = '", "'\"}"])
    assert frequent_fragments(texts, [], min_count=9, limit=10) == []
    assert len(frequent_fragments(texts, [], min_count=1, limit=2)) == 2


def test_tool_call_fragments_cover_each_tool() -> None:
    fragments = tool_call_fragments(TOOLS)
    assert '<tool_call>\n{"name": "sql_schema", "arguments": {"tables": ["' in fragments
    assert '"]}}\n</tool_call>' in fragments
    assert call("sql_list_tables") in fragments


def test_training_is_deterministic_and_bounded(tmp_path: Path) -> None:
    texts = [message.content for message in conversation(0)]
    files = [
        train_tokenizer(texts, [SYSTEM], tmp_path / name, 380, 1) / "tokenizer.json"
        for name in ("a", "b")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(load_tokenizer(tmp_path / "a")) == 380
    with pytest.raises(ValueError, match=r"max_vocab=100: the fixed tokens alone are \d+"):
        train_tokenizer(texts, [], tmp_path / "c", 100, 1)
    assert not (tmp_path / "c").exists()

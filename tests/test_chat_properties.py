"""Generated conversations: ids of the official template, turn by turn, and the mask of each turn.

The reference asks the template for the prompt of every turn and never uses the renderer.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hsql_env.records import Message
from hsql_jax.chat import CONTROL, MARKUP, ChatRenderer

MARK = "\ufdd0"  # a character that no text holds: passes through the template, then cuts its text
BLOCK = "<think>\n\n</think>\n\n"
OTHER_CONTROL = ("<|vision_start|>", "<|fim_prefix|>", "<|file_sep|>")
PARTS = ("<", "|>", "<|im_", "im_end|>", "/think>", "assistant", "user\n", "# Tools", "{%", "}}")
BLANKS = (" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028", "\ufeff", "\0")
COMBINING = ("e\u0301", "\u0301", "\u0338", "\u212b", "\u1112\u1161", "\u200d", "👩\u200d👧", "🇫🇷")
WORDS = ("é", "한", "東京", "مرحبا", "😀", "𝔘", "\U00020000", "\U000e0001", "1234", "SELECT 'a'")
PIECES = (*CONTROL, *OTHER_CONTROL, *MARKUP, *PARTS, *BLANKS, *COMBINING, *WORDS)
TEXT = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(codec="utf-8", exclude_characters=MARK)),
    max_size=6,
).map("".join)


def _message(role: str, content: str) -> Message:
    return Message.model_validate({"role": role, "content": content})


def _reads_as_response(text: str) -> bool:
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


# With a leading line break the template's prompt and turn share a token: tests/test_chat.py.
TURN_BODIES = TEXT.map(lambda text: text.replace("</think>", "|").lstrip())
CALL_BODIES = TEXT.map(
    lambda text: f'<tool_call>\n{{"name": "{text}"}}\n</tool_call>'.replace("</think>", "|")
)
QUERIES = TEXT.filter(lambda text: not _reads_as_response(text))  # refused: tests/test_chat.py
REASONING = TEXT.map(lambda text: re.sub("</?think>", "|", text).strip("\n")).filter(bool)


@st.composite
def tool_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """No tool or some, whose descriptions are hostile too."""
    texts = draw(st.lists(TEXT, max_size=2))
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": text}}
        for index, text in enumerate(texts)
    ]


@st.composite
def policy_messages(draw: st.DrawFn, thinking: bool | None) -> Message:
    """One turn, with reasoning now and then where the policy reasons."""
    body = draw(TURN_BODIES | CALL_BODIES)
    if thinking and draw(st.booleans()):
        body = f"<think>\n{draw(REASONING)}\n</think>\n\n{body}"
    return _message("assistant", body)


@st.composite
def conversations(draw: st.DrawFn, thinking: bool | None) -> list[Message]:
    """Up to three policy turns; the last message is anyone's but the system's."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(_message("system", draw(TEXT)))
    for query in draw(st.lists(QUERIES, min_size=1, max_size=2)):
        messages.append(_message("user", query))
    turns = draw(st.integers(0, 3))
    for turn in range(turns):
        messages.append(draw(policy_messages(thinking)))
        roles = st.just("tool") if thinking else st.sampled_from(["tool", "tool", "user"])
        is_last = turn == turns - 1
        for role in draw(st.lists(roles, min_size=0 if is_last else 1, max_size=3)):
            messages.append(_message(role, draw(TEXT if role == "tool" else QUERIES)))
    return messages


def official(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: Any, **options: Any
) -> list[int]:
    """The template's ids, if strings of special tokens are text: all but markup in policy turns.

    A mark behind the first character of each such string is where the template's text is cut.
    """
    marked = [
        {"role": m.role, "content": _mark(tokenizer, m.content, m.role == "assistant")}
        for m in messages
    ]
    functions = [
        tool["function"] | {"description": _mark(tokenizer, tool["function"]["description"])}
        for tool in tools
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    text = tokenizer.apply_chat_template(marked, tools=tools, tokenize=False, **options)
    return _encode(tokenizer, text)


def official_turns(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], **options: Any
) -> tuple[list[int], list[int]]:
    """Ids and mask: what each prompt of the template adds to its history, then the policy's turn.

    The history is without the empty block of earlier prompts: that of the template begins so too.
    """
    ids: list[int] = []
    mask: list[int] = []
    history: list[int] = []
    block = _encode(tokenizer, BLOCK) if options.get("enable_thinking") is False else []
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for end in turns if messages[-1].role == "assistant" else [*turns, len(messages)]:
        prompt = official(tokenizer, messages[:end], add_generation_prompt=True, **options)
        assert prompt[: len(history)] == history
        turn = policy_turn(tokenizer, messages[end]) if end in turns else []
        ids += prompt[len(history) :] + turn
        mask += [0] * len(prompt[len(history) :]) + [1] * len(turn)
        history = prompt[: len(prompt) - len(block)]
        assert prompt == history + block
        history = history + turn
    return ids, mask


def policy_turn(tokenizer: PreTrainedTokenizerFast, message: Message) -> list[int]:
    return _encode(tokenizer, _mark(tokenizer, message.content, is_policy=True) + "<|im_end|>")


def _mark(tokenizer: PreTrainedTokenizerFast, text: str, is_policy: bool = False) -> str:
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    inert = added - set(MARKUP) if is_policy else added
    pattern = "|".join(re.escape(token[1:]) for token in inert)
    return re.sub(f"<(?={pattern})", f"<{MARK}", text)


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    pieces = tokenizer(text.split(MARK), add_special_tokens=False)["input_ids"]
    return [token for piece in pieces for token in piece]


def template_options(thinking: bool | None) -> dict[str, bool]:
    return {} if thinking is None else {"enable_thinking": thinking}


@pytest.mark.parametrize("thinking", [None, True, False])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_turn_equals_the_official_template(
    qwen3: PreTrainedTokenizerFast, thinking: bool | None, data: st.DataObject
) -> None:
    messages, tools = data.draw(conversations(thinking)), data.draw(tool_lists())
    options = template_options(thinking)
    ours = ChatRenderer(qwen3, thinking).render(messages, tools)
    assert ours == official_turns(qwen3, messages, tools=tools, **options)
    if thinking is not False and messages[-1].role != "assistant":
        assert ours[0] == official(qwen3, messages, tools, add_generation_prompt=True, **options)


@pytest.mark.parametrize("thinking", [None, True, False])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_last_turn_differs_by_the_empty_block_alone(
    qwen3: PreTrainedTokenizerFast, thinking: bool | None, data: st.DataObject
) -> None:
    """The template shows it there unless the turn has reasoning; a line break ends the turn."""
    messages = [*data.draw(conversations(thinking)), data.draw(policy_messages(thinking))]
    if messages[-2].role == "assistant":
        del messages[-2]
    options = template_options(thinking)
    ids, mask = ChatRenderer(qwen3, thinking).render(messages, [])
    turn = policy_turn(qwen3, messages[-1])
    assert (ids[-len(turn) :], mask[-len(turn) :]) == (turn, [1] * len(turn))
    prompt = official(qwen3, messages[:-1], [], add_generation_prompt=True)
    shown = [] if "</think>" in messages[-1].content else _encode(qwen3, BLOCK)
    theirs = official(qwen3, messages, [], **options)
    assert theirs == prompt + shown + turn + _encode(qwen3, "\n")


@pytest.mark.parametrize("thinking", [None, True, False])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_turn_s_mask_decodes_to_its_text(
    tiny: PreTrainedTokenizerFast, thinking: bool | None, data: st.DataObject
) -> None:
    """And no content holds a control token; what was rendered is never rendered otherwise."""
    messages, tools = data.draw(conversations(thinking)), data.draw(tool_lists())
    renderer = ChatRenderer(tiny, thinking)
    ids, mask = renderer.render(messages, tools)
    spans = [
        [token for token, _ in group]
        for own, group in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        if own
    ]
    assert [renderer.decode(span) for span in spans] == [
        message.content for message in messages if message.role == "assistant"
    ]
    assert all(span.index(renderer.stop_id) == len(span) - 1 for span in spans)
    control = set(tiny.added_tokens_decoder)
    assert all(not control & set(span[:-1]) for span in spans)
    calm = [m.model_copy(update={"content": "calm"}) for m in messages]
    calm_tools = [{"type": "function", "function": {"description": "calm"}} for _ in tools]
    theirs = renderer.render(calm, calm_tools)[0]
    assert [i for i in ids if i in control] == [i for i in theirs if i in control]
    for end, message in enumerate(messages):
        if message.role == "assistant":
            begun = renderer.render(messages[:end], tools)
            assert begun == (ids[: len(begun[0])], mask[: len(begun[0])])


@st.composite
def faults(draw: st.DrawFn, thinking: bool | None) -> tuple[list[Message], int]:
    """A conversation with one message that cannot be append-only, and the index of that message."""
    messages = draw(conversations(thinking))
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    before_user = [message.role for message in messages].index("user")
    first_turn = turns[0] if turns else len(messages)
    role, at = draw(
        st.one_of(
            st.tuples(st.just("system"), st.integers(1, len(messages))),
            st.tuples(st.just("tool"), st.integers(before_user, first_turn)),
            st.just(("assistant", before_user)),
            *(st.just(("assistant", turn + 1)) for turn in turns),
            *(st.just(("user" if thinking else "reasoning", turn + 1)) for turn in turns),
        )
    )
    if role == "reasoning":
        at -= 1
        reasoned = f"<think>\n{draw(REASONING)}\n</think>\n\n{messages[at].content}"
        return [*messages[:at], _message("assistant", reasoned), *messages[at + 1 :]], at
    return [*messages[:at], _message(role, draw(TURN_BODIES)), *messages[at:]], at


@pytest.mark.parametrize("thinking", [None, True, False])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_one_message_that_cannot_be_append_only_is_refused_by_its_index(
    tiny: PreTrainedTokenizerFast, thinking: bool | None, data: st.DataObject
) -> None:
    messages, at = data.draw(faults(thinking))
    named = rf"\Amessages\[{at}\]( \({messages[at].role}\))?: [^\n]+\Z"
    with pytest.raises(ValueError, match=named):
        ChatRenderer(tiny, thinking).render(messages, [])

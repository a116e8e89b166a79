"""Edge case 24: what a policy may write, and what each of it means."""

from __future__ import annotations

import time

import pytest

from hsql_env.harness import ParsedCall, parse_turn


def wrap(body: str) -> str:
    """Return the text of one tool call."""
    return f"<tool_call>\n{body}\n</tool_call>"


EXEC = '{"name": "sql_exec", "arguments": {"query": "SELECT 1"}}'
LIST = '{"name": "sql_list_tables"}'
PARSED = ParsedCall("sql_exec", {"query": "SELECT 1"})


@pytest.mark.parametrize(
    "text",
    [
        wrap(EXEC),
        f"<think>\nlet me see\n</think>\n\n{wrap(EXEC)}",
        f"<think>a <tool_call> is due</think>{wrap(EXEC)}",
        f"still thinking</think>{wrap(EXEC)}",
        f"I will look.\n{wrap(EXEC)}\n",
        f"<tool_call>{EXEC}</tool_call>",
        wrap('{"name": "sql_exec", "arguments": "{\\"query\\": \\"SELECT 1\\"}"}'),
        # The reasoning's opening tag stood in the prompt.
        f"I write a <tool_call> now.</think>{wrap(EXEC)}",
        f"So: <tool_call>{{ and </tool_call></think>\n\n{wrap(EXEC)}",
        f"A draft: {wrap(LIST)} will do.</think>{wrap(EXEC)}",
    ],
)
def test_one_call(text: str) -> None:
    assert parse_turn(text).calls == (PARSED,)


def test_two_calls_keep_their_order() -> None:
    calls = parse_turn(wrap(EXEC) + "\n" + wrap('{"name": "sql_list_tables"}')).calls
    assert calls == (PARSED, ParsedCall("sql_list_tables", {}))


def test_closing_tag_inside_sql_is_text() -> None:
    body = '{"name": "sql_exec", "arguments": {"query": "SELECT \'</tool_call>\'"}}'
    assert parse_turn(wrap(body) + wrap(EXEC)).calls == (
        ParsedCall("sql_exec", {"query": "SELECT '</tool_call>'"}),
        PARSED,
    )


def test_end_of_reasoning_inside_sql_is_text() -> None:
    body = '{"name": "sql_exec", "arguments": {"query": "SELECT \'</think><tool_call>\'"}}'
    mention = ParsedCall("sql_exec", {"query": "SELECT '</think><tool_call>'"})
    assert parse_turn(wrap(body)).calls == (mention,)
    assert parse_turn(wrap(body) + wrap(EXEC)).calls == (mention, PARSED)
    assert parse_turn(f"<tool_call> it is</think>{wrap(EXEC)}{wrap(body)}").calls == (
        PARSED,
        mention,
    )
    (cut,) = parse_turn('<tool_call>{"name": "sql_exec", "arguments": {"query": "</think>').calls
    assert cut.error.startswith("the tool call is not valid JSON")
    assert parse_turn(f"{wrap(EXEC)}</think>").calls == (PARSED,)


@pytest.mark.parametrize("arguments", ['""', '" \\n"', '"{}"', "{}"])
def test_no_arguments_may_be_blank(arguments: str) -> None:
    body = f'{{"name": "sql_list_tables", "arguments": {arguments}}}'
    assert parse_turn(wrap(body)).calls == (ParsedCall("sql_list_tables", {}),)


@pytest.mark.parametrize("arguments", ["5", "[1]", '{"a": [[[[[[]]]]]]}', "{}", '"x"'])
def test_a_name_that_is_no_text_is_not_kept(arguments: str) -> None:
    (bad,) = parse_turn(wrap(f'{{"name": "\\ud800", "arguments": {arguments}}}')).calls
    assert bad == ParsedCall(error="the tool call holds characters that are not valid text")


def test_line_break_inside_sql_is_kept() -> None:
    body = '{"name": "sql_exec", "arguments": {"query": "SELECT\n1"}}'
    assert parse_turn(wrap(body)).calls == (ParsedCall("sql_exec", {"query": "SELECT\n1"}),)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "sql_exec", "arguments": {"query": "SELECT', "not valid JSON"),
        ('{"name": "sql_exec", "arguments": {"query": SELECT 1}}', "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (EXEC + "}", "does not end with"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', "needs a name"),
        ('{"name": 1}', "needs a name"),
        ('{"name": "sql_exec", "arguments": [1]}', "arguments must be"),
        ('{"name": "sql_exec", "arguments": "SELECT 1"}', "arguments must be"),
        ('{"name": "sql_exec", "arguments": {"query": "\\ud800"}}', "not valid text"),
    ],
)
def test_bad_call_has_a_reason_and_hides_no_other(body: str, reason: str) -> None:
    bad, good = parse_turn(wrap(body) + wrap(EXEC)).calls
    assert reason in bad.error
    assert good == PARSED


def test_unclosed_call_is_an_error() -> None:
    (cut,) = parse_turn("<tool_call>\n" + EXEC).calls
    assert cut.error == "the tool call does not end with </tool_call>"


@pytest.mark.parametrize("text", ["", "no call", f"<think>{wrap(EXEC)}", "</tool_call>"])
def test_no_call(text: str) -> None:
    assert parse_turn(text).calls == ()


@pytest.mark.parametrize("depth", [5, 300, 900])
def test_deeply_nested_arguments_are_an_invalid_call_and_are_not_kept(depth: int) -> None:
    body = '{"name": "sql_exec", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    (call,) = parse_turn(wrap(body)).calls
    assert (call.name, call.arguments) == ("sql_exec", {})
    assert call.error == "arguments are nested over 4 levels deep"


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_no_more_calls_than_asked_for(most: int) -> None:
    assert parse_turn(wrap(EXEC) * 2, most).calls == (PARSED,) * min(most, 2)


@pytest.mark.parametrize(
    "piece",
    [
        wrap(EXEC),
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[</tool_call>",
        '<tool_call>{"name": "',
        '<tool_call>"</tool_call>',
        "<tool_call>{}" + " " * 50,
        "<tool_call>" + "[" * 50,
        "<think>",
        "</think>",
        "<tool_call></think>",
        '<tool_call>["',
    ],
)
@pytest.mark.parametrize("end", ["", "</think><tool_call>"])
def test_time_is_linear_in_the_text(piece: str, end: str) -> None:
    text = piece * (4_000_000 // len(piece)) + end
    started = time.process_time()
    calls = parse_turn(text, 9).calls
    assert time.process_time() - started < 0.5
    assert len(calls) <= 9


def test_many_good_calls_are_read_in_linear_time() -> None:
    started = time.process_time()
    assert parse_turn(wrap(EXEC) * 40_000).calls == (PARSED,) * 40_000
    assert time.process_time() - started < 3

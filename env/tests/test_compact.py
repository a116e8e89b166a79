"""Context compaction: observations make way, the policy's own turns never change."""

from __future__ import annotations

import pytest
from conftest import call, make_task

from hsql_env.harness import Episode
from hsql_env.harness.compact import compact
from hsql_env.records import Database, Message
from hsql_env.sandbox import SandboxPool

LONG = "header\n" + "x" * 2_000
SHORT = f"header\n[note: compacted, {len(LONG) - 6} of {len(LONG)} characters left out]"
# About 2,200 characters a call, and never the same call.
WIDE = "SELECT {}, hex(zeroblob(140)) AS wide UNION ALL " + " UNION ALL ".join(
    f"SELECT {row}, hex(zeroblob(140))" for row in range(7)
)


def conversation(turns: int, long_turn: int | None = None) -> list[Message]:
    """Return a system prompt, a question, and turns with one long observation each."""
    messages = [Message(role="system", content="s" * 3_000), Message(role="user", content="?")]
    for turn in range(turns):
        written = "w" * 3_000 if turn == long_turn else f"turn {turn}"
        messages.append(Message(role="assistant", content=written))
        messages.append(Message(role="tool", content=LONG))
    return messages


def test_what_fits_stays() -> None:
    messages = conversation(3)
    size = sum(len(message.content) for message in messages)
    assert compact(messages, size) == []
    assert [index for index, _ in compact(messages, size - 1)] == [3, 5]


def test_oldest_first_and_no_more_than_needed() -> None:
    changes = compact(conversation(10), 22_000)  # 23,131 characters: to be 15,400 at most
    assert changes == [(index, Message(role="tool", content=SHORT)) for index in (3, 5, 7, 9)]


def test_only_observations_change_and_not_the_last_turns() -> None:
    messages = conversation(4, long_turn=0)
    changes = compact(messages, 100)
    assert [index for index, _ in changes] == [3, 5, 7]
    assert {messages[index].role for index, _ in changes} == {"tool"}


def test_compacting_again_changes_nothing_more() -> None:
    messages = conversation(4)
    for index, message in compact(messages, 100):
        messages[index] = message
    assert compact(messages, 100) == []


def test_a_budget_of_tokens() -> None:
    def words(text: str) -> int:
        return len(text.split())

    observation = Message(role="tool", content="a b c d e f g h i j k l m n o p q r s t " * 20)
    messages = [Message(role="user", content="?")]
    for _ in range(3):
        messages += [Message(role="assistant", content="one two"), observation]
    assert [index for index, _ in compact(messages, 1_000, words)] == [2, 4]
    assert compact(messages, 1_207, words) == []


@pytest.mark.parametrize("budget", [None, 10**6])
def test_an_episode_within_its_budget_has_none(
    pool: SandboxPool, city: Database, budget: int | None
) -> None:
    episode = Episode(make_task("SELECT 1"), city, pool, context_chars=budget)
    assert episode.step(call("sql_exec", query=WIDE.format(0))).compacted == ()
    assert "compaction" not in episode.verdict().activations


def test_an_episode_keeps_its_context_within_the_budget(pool: SandboxPool, city: Database) -> None:
    budget = 9_000
    episode = Episode(make_task("SELECT 1"), city, pool, context_chars=budget)
    context = list(episode.reset())
    written = []
    for turn in range(12):
        written.append(call("sql_exec", query=WIDE.format(turn)))
        result = episode.step(written[-1])
        context += [Message(role="assistant", content=written[-1]), *result.messages]
        for index, message in result.compacted:
            context[index] = message
        assert sum(len(message.content) for message in context) <= budget
        assert context[-1] == result.messages[-1]
    assert [m.content for m in context if m.role == "assistant"] == written
    assert context[:2] == episode.messages[:2]
    # The transcript keeps what was said.
    observed = [m.content for m in episode.messages if m.role == "tool"]
    assert all(len(text) > 2_000 for text in observed)
    assert episode.verdict().activations["compaction"] > 1


def test_a_policy_that_fills_its_budget_itself_is_cut_off(
    pool: SandboxPool, city: Database
) -> None:
    episode = Episode(make_task("SELECT 1"), city, pool, context_chars=5_000)
    result = episode.step("w" * 5_000 + call("sql_list_tables"))
    assert result.truncated
    assert not result.terminated
    assert episode.verdict().violations == {"budget": 1, "no_submit": 1}


def test_a_submit_is_judged_whatever_the_budget(pool: SandboxPool, city: Database) -> None:
    episode = Episode(make_task("SELECT 1"), city, pool, context_chars=5_000)
    result = episode.step("w" * 5_000 + call("sql_submit", query="SELECT 1"))
    assert result.terminated
    assert not result.truncated
    assert episode.verdict().result_ok

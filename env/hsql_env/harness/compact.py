"""Compaction: older observations make way when a conversation nears its budget.

Only observations are shortened, oldest first. What the policy wrote, the system prompt and the
question never change, and neither do the observations of the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hsql_env.records import Message

LEAST_CONTEXT_CHARS = 4_000  # in fewer, the prompt and a question leave no room to work

_KEPT_CHARS = 160  # of a compacted observation: as a rule its header and first row
_SHORT_CHARS = 300  # an observation of so many stays; a compacted one is shorter
_TARGET = 0.7  # of the budget, so that one compaction lasts for some turns

Measure = Callable[[str], int]


def compact(
    messages: Sequence[Message], budget: int, measure: Measure = len
) -> list[tuple[int, Message]]:
    """Return (index, shortened observation) for what must change for `messages` to fit `budget`.

    Nothing where they fit already; otherwise as many of the oldest observations as it takes to come
    down to 70 % of the budget, or all there are. `measure` is the size of a text: characters, or
    the tokens of a policy's own tokenizer.
    """
    size = sum(measure(message.content) for message in messages)
    if size <= budget:
        return []
    changes = []
    for index, message in enumerate(messages[: _last_turn(messages)]):
        if size <= _TARGET * budget:
            break
        if message.role != "tool" or len(message.content) <= _SHORT_CHARS:
            continue
        short = _shortened(message.content)
        size -= measure(message.content) - measure(short)
        changes.append((index, Message(role="tool", content=short)))
    return changes


def _last_turn(messages: Sequence[Message]) -> int:
    """Return the index of the policy's last turn, 0 before its first."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return turns[-1] if turns else 0


def _shortened(text: str) -> str:
    head = text[:_KEPT_CHARS]
    whole_lines, newline, _ = head.rpartition("\n")
    kept = whole_lines if newline else head
    return f"{kept}\n[note: compacted, {len(text) - len(kept)} of {len(text)} characters left out]"

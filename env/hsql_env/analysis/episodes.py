"""Episodes for people to read: which to show, and how they look."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hsql_env.analysis.behaviour import executions
from hsql_env.analysis.markup import Markup, join, tag
from hsql_env.records import Call, Message, Trajectory

SQL_TOKEN = re.compile(
    r"""(?P<string>'(?:[^']|'')*')|(?P<name>"(?:[^"]|"")*")|(?P<number>\b\d+(?:\.\d+)?\b)
    |(?P<keyword>\b(?:select|distinct|from|where|group|order|by|having|limit|offset|join|left|inner
    |outer|cross|on|using|as|and|or|not|in|is|null|like|between|exists|case|when|then|else|end
    |with|recursive|union|all|except|intersect|asc|desc|over|partition|cast)\b)""",
    re.IGNORECASE | re.VERBOSE,
)


def pick_episodes(trajectories: Iterable[Trajectory], count: int = 3) -> list[Trajectory]:
    """Return at most `count` episodes that differ in kind, the most telling first.

    A right answer after a failed query, a right answer straight away, a wrong answer, then others
    in their order. Episodes that the harness failed are left out.
    """
    pool = [t for t in trajectories if not t.verdict.infrastructure]
    first = [next(filter(wanted, pool), None) for wanted in (_recovered, _straight, _wrong)]
    chosen = [t for t in first if t is not None]
    taken = {id(t) for t in chosen}
    return (chosen + [t for t in pool if id(t) not in taken])[:count]


def render_episode(trajectory: Trajectory) -> Markup:
    """Return one collapsible episode: the question, the calls, what came back, the verdict."""
    task = trajectory.task
    facts = f"{task.database_id} · {task.kind or task.split} · {trajectory.turns} turns"
    head = tag(
        "summary",
        _badge(trajectory),
        tag("span", task.question, class_="question"),
        tag("span", facts, class_="facts"),
    )
    return tag("details", head, tag("div", *_turns(trajectory), class_="chat"), class_="episode")


def highlight(sql: str) -> Markup:
    """Return SQL with its keywords, strings, quoted names and numbers marked."""
    parts: list[object] = []
    end = 0
    for match in SQL_TOKEN.finditer(sql):
        parts += [sql[end : match.start()], tag("span", match[0], class_=match.lastgroup)]
        end = match.end()
    return join([*parts, sql[end:]])


def _recovered(trajectory: Trajectory) -> bool:
    failed = any(call.outcome == "failed" for call in executions(trajectory))
    return failed and trajectory.verdict.reward > 0


def _straight(trajectory: Trajectory) -> bool:
    return trajectory.verdict.reward > 0 and not _recovered(trajectory)


def _wrong(trajectory: Trajectory) -> bool:
    return trajectory.verdict.reward <= 0


def _badge(trajectory: Trajectory) -> Markup:
    verdict = trajectory.verdict
    if verdict.infrastructure:
        return tag("span", "! harness failed", class_="badge warn")
    if verdict.reward > 0:
        return tag("span", "✓ correct", class_="badge good")
    if not verdict.submitted:
        return tag("span", "✗ no answer", class_="badge bad")
    if not verdict.result_ok:
        return tag("span", "✗ wrong result", class_="badge bad")
    return tag("span", "! protocol", class_="badge warn")


def _turns(trajectory: Trajectory) -> list[Markup]:
    """Pair each assistant turn with its calls, and each call with its observation."""
    parts: list[Markup] = []
    waiting: list[Call] = []
    turn = 0
    for message in trajectory.messages:
        if message.role == "assistant":
            turn += 1
            waiting = [call for call in trajectory.calls if call.turn == turn]
            parts.append(_assistant(message, waiting))
        elif message.role == "tool":
            failed = bool(waiting) and waiting.pop(0).outcome != "ok"
            kind, name = ("tool error", "error") if failed else ("tool", "result")
            parts.append(_bubble(kind, name, message.content))
    return parts


def _assistant(message: Message, calls: Sequence[Call]) -> Markup:
    readable = bool(calls) and all(call.tool for call in calls)
    if not readable:
        return _bubble("assistant", "turn without a readable call", message.content)
    prose = message.content.split("<tool_call>")[0].strip()
    shown = [tag("p", prose)] if prose else []
    return tag("div", *shown, *map(_call, calls), class_="bubble assistant")


def _call(call: Call) -> Markup:
    name = call.tool + (" (repeated)" if call.duplicate else "")
    sql = call.sql or str(call.arguments.get("query", ""))
    body: Markup | str = highlight(sql)
    if not sql:
        body = ", ".join(_listed(value) for value in call.arguments.values())
    return join([tag("h5", name), tag("pre", tag("code", body)) if body else None])


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _bubble(kind: str, name: str, content: str) -> Markup:
    return tag("div", tag("h5", name), tag("pre", content), class_=f"bubble {kind}")

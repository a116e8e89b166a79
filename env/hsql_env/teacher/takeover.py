"""A student plays until its first visible mistake, then the scripted teacher ends the episode.

A policy that imitates the teacher alone sees recoveries from the teacher's errors only. Its own are
different, and it repeats them. Here the recovery follows the student's own failing call: dataset
aggregation (Ross, Gordon and Bagnell, AISTATS 2011) for tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsql_env.driver import Policy, Session
from hsql_env.records import Message, PublicTask, Trajectory
from hsql_env.teacher.scripted import ScriptedTeacher

MISTAKE = re.compile(r"\A(?:Error:|REJECTED)|^no such table: |^\(0 rows\)", re.MULTILINE)


def first_mistake(messages: Sequence[Message]) -> int | None:
    """Return the index of the first observation that shows a mistake; None where all went well.

    An invalid call, a failed or rejected query, a table that does not exist, or no rows: a task's
    answer has some.
    """
    for index, message in enumerate(messages):
        if message.role == "tool" and MISTAKE.search(message.content):
            return index
    return None


def correction_problem(trajectory: Trajectory) -> str:
    """Return why a trajectory teaches no recovery, "" where it does.

    The student's own violations of the protocol are no reason: they are context, never imitated.
    """
    verdict, mistake = trajectory.verdict, first_mistake(trajectory.messages)
    if verdict.infrastructure:
        return "infrastructure"
    if mistake is None:
        return "no mistake"
    after = trajectory.messages[mistake:]
    if not any(message.role == "assistant" for message in after):
        return "nothing after the mistake"
    if any("</think>" in message.content for message in trajectory.messages):
        return "think markup"  # which a chat without reasoning cannot render again
    return "" if verdict.submitted and verdict.result_ok else "not answered"


@dataclass(frozen=True)
class TakeOver:
    """A `Policy` of two: what follows `first_mistake` is the teacher's."""

    student: Policy
    teacher: ScriptedTeacher

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.student.name}+{self.teacher.name}"

    def begin(
        self,
        task: PublicTask,
        seed: int,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
    ) -> TakeOverSession:
        """Return the session that acts in one episode."""
        session = self.student.begin(task, seed, messages, tools)
        return TakeOverSession(session, self.teacher, task, seed)


class TakeOverSession:
    """One episode: the acting session is the student's, later the teacher's."""

    def __init__(
        self, student: Session, teacher: ScriptedTeacher, task: PublicTask, seed: int
    ) -> None:
        self._acting = student
        self._student, self._teacher = student, teacher
        self._task, self._seed = task, seed
        self._seen: list[Message] = []

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        """Return the next turn's text of whoever acts."""
        self._seen += new_messages
        if self._acting is self._student and first_mistake(new_messages) is not None:
            self._student.close()
            self._acting = self._teacher.recover(self._task, self._seed, self._seen)
        return await self._acting.act(new_messages)

    def close(self) -> None:
        """Free what the acting session holds."""
        self._acting.close()

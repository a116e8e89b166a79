"""One episode: the policy's turns in, observations out, a verdict at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hsql_env.harness.actions import Actions, InfrastructureError, Outcome
from hsql_env.harness.compact import compact
from hsql_env.harness.parse import ParsedCall, parse_turn
from hsql_env.harness.tools import SYSTEM_PROMPT, check_call, prompt_for
from hsql_env.harness.verify import VERIFY_LIMITS, OracleError, Verifier
from hsql_env.records import Call, Database, Message, Role, Task, Verdict
from hsql_env.sandbox import FailureKind, GuardProfile, Limits, SandboxPool

# Any of these makes the protocol factor of equation (2) zero; the rest only break strictness.
PROTOCOL_VIOLATIONS = frozenset(
    {"invalid_call", "write_attempt", "multi_statement", "budget", "no_submit"}
)
_VIOLATIONS: Mapping[FailureKind, str] = {
    "not_read_only": "write_attempt",
    "multi_statement": "multi_statement",
}
_ACTIVATIONS: Mapping[FailureKind, str] = {
    "timeout": "time_limit",
    "memory": "memory_limit",
    "too_large": "size_limit",
    "multi_statement": "multi_statement_block",
    "not_read_only": "guard_block",
    "leading_comment": "guard_block",
    "not_a_query": "guard_block",
    "denied": "guard_block",
}
_TOLD_TURNS_LEFT = (3, 1)  # the policy is told when so many turns are left
_NO_CALL = (ParsedCall(error="the turn has no tool call"),)


@dataclass(frozen=True)
class EpisodeConfig:
    """Budgets and switches of an episode."""

    max_turns: int = 24
    max_calls_per_turn: int = 8
    observation_chars: int = 6_000
    guard: GuardProfile = "default"
    tool_limits: Limits = field(default_factory=Limits)
    verify_limits: Limits = VERIFY_LIMITS
    system_prompt: str = SYSTEM_PROMPT


@dataclass(frozen=True)
class StepResult:
    """What one turn led to. `messages` holds one tool message a call, notes inside."""

    messages: tuple[Message, ...]
    terminated: bool  # the policy submitted
    truncated: bool  # a budget ended the episode
    notes: tuple[str, ...] = ()
    compacted: tuple[tuple[int, Message], ...] = ()  # what now stands at these places


class EpisodeOver(RuntimeError):
    """A step was asked of an episode that has ended."""


class Episode:
    """The state machine of one episode; not to be stepped from two threads at once."""

    def __init__(
        self,
        task: Task,
        database: Database,
        pool: SandboxPool,
        config: EpisodeConfig | None = None,
        verifier: Verifier | None = None,
        context_chars: int | None = None,
        said: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """A `verifier` shared between episodes runs each oracle once.

        `said` is told of every message: of the policy's before its calls are run, of the others
        before they are returned.

        With `context_chars`, older observations are compacted when the conversation's contents are
        longer, and the episode is truncated where that is not enough.
        """
        self.task = task
        self.config = config or EpisodeConfig()
        self.calls: list[Call] = []
        self.messages: list[Message] = []  # as they were said
        self.turns = 0
        self.terminated = False
        self.truncated = False
        self.final_sql = ""
        self._path = database.path
        self._context_chars = context_chars
        self._said = said
        self._context: list[Message] = []  # as a policy that compacts sees them
        self._actions = Actions(pool, database.path, self.config.tool_limits, self.config.guard)
        self._verifier = verifier or Verifier(pool, self.config.verify_limits)
        self._violations: Counter[str] = Counter()
        self._activations: Counter[str] = Counter()
        self._out_of_budget = False
        self._verdict: Verdict | None = None
        self._first_turn: dict[str, int] = {}  # call -> the turn that made it first
        self._executed: set[str] = set()
        self.infrastructure = ""  # why the harness failed, "" while it has not

    def reset(self) -> list[Message]:
        """Return the first messages, system and question."""
        if not self.messages:
            self._say("system", prompt_for(self.config.system_prompt, self._path))
            self._say("user", self.task.public.question)
        return self.messages[:2]

    @property
    def over(self) -> bool:
        """Whether no further step is possible."""
        return self.terminated or self.truncated or bool(self.infrastructure)

    def step(self, content: str) -> StepResult:
        """Run the calls of one turn and return their observations, one message a call.

        Of more than `max_calls_per_turn` calls, the first one too many stands for all the rest: it
        is answered as invalid, so a turn has at most that number of messages and one more. Raises
        `EpisodeOver` after the end and `InfrastructureError` when the sandbox fails, which ends the
        episode, as any other exception does.
        """
        if self.over:
            raise EpisodeOver("the episode has ended")
        self.reset()
        self.turns += 1
        try:
            self._say("assistant", content)
            return self._run(content)
        except Exception as error:
            self.infrastructure = _reason(error)
            raise

    def _run(self, content: str) -> StepResult:
        calls = parse_turn(content, self.config.max_calls_per_turn + 1).calls
        observed = [self._observe(call, number) for number, call in enumerate(calls or _NO_CALL)]
        if not self.terminated and self.turns >= self.config.max_turns:
            self._end_out_of_budget()
        observed[-1][1].extend(self._budget_notes())
        replies = tuple(self._say("tool", _with_notes(*pair)) for pair in observed)
        notes = tuple(note for _, notes in observed for note in notes)
        compacted = () if self.over else self._compact()
        return StepResult(replies, self.terminated, self.truncated, notes, compacted)

    def _say(self, role: Role, content: str) -> Message:
        message = Message(role=role, content=content)
        self.messages.append(message)
        self._said(message)
        return message

    def stop(self) -> None:
        """End an episode that the policy gives up or cannot go on with; no budget of ours did."""
        self.truncated = not self.terminated

    def verdict(self) -> Verdict:
        """Return the judgement, equation (2); asked again, the same.

        An episode not ended by a submit is truncated. Whatever goes wrong in judging is a failure
        of the harness, which the verdict names.
        """
        self.stop()
        if self._verdict is None:
            self._verdict = self._judge()
        return self._verdict

    def _judge(self) -> Verdict:
        result_ok = self.terminated and not self.infrastructure and self._check_result()
        violations = self._final_violations()
        sample = not self.infrastructure
        protocol_ok = sample and PROTOCOL_VIOLATIONS.isdisjoint(violations)
        return Verdict(
            result_ok=result_ok,
            protocol_ok=protocol_ok,
            strict_ok=sample and not violations,
            reward=float(result_ok and protocol_ok),
            submitted=self.terminated,
            violations=violations,
            activations=dict(sorted(self._activations.items())),
            infrastructure=self.infrastructure,
        )

    def _check_result(self) -> bool:
        try:
            return self._verifier.check(
                self._path, self.task.hidden, self.final_sql, self.config.guard
            )
        except Exception as error:
            self.infrastructure = _reason(error)
            return False

    def _final_violations(self) -> dict[str, int]:
        violations = self._violations.copy()
        if not self.terminated:
            violations["no_submit"] += 1
            self._count(violations, "budget" if self._out_of_budget else None)
        elif _plain(self.final_sql) not in self._executed:
            violations["submit_not_executed"] += 1
        return dict(sorted(violations.items()))

    def _observe(self, call: ParsedCall, number: int) -> tuple[str, list[str]]:
        """Run one call; return its observation and the notes on it."""
        problem = self._problem(call, number)
        if problem:
            self._violations["invalid_call"] += 1
            self._record(call, Outcome(problem), invalid=True)
            return self._cut(f"Error: {problem}")  # it may repeat what the policy wrote
        first = self._first_turn.get(key := _call_key(call), 0)
        outcome = self._actions.run(call.name, call.arguments)
        self._first_turn.setdefault(key, self.turns)
        self._record(call, outcome, duplicate=first > 0)
        text, notes = self._cut(outcome.text, outcome.summary)
        if first:
            self._activations["repeat_notice"] += 1
            notes.append(f"same call as in turn {first}")
        return text, notes

    def _problem(self, call: ParsedCall, number: int) -> str:
        """Return why the call is not run, "" when it is."""
        if self.terminated:
            if call.name == "sql_submit":
                self._violations["duplicate_submit"] += 1
            return "the episode has ended"
        most = self.config.max_calls_per_turn
        if number >= most:
            return f"at most {most} calls are run a turn; the rest was not run"
        return check_call(call)

    def _record(
        self, call: ParsedCall, outcome: Outcome, invalid: bool = False, duplicate: bool = False
    ) -> None:
        """Append the call to the transcript and count what it set off."""
        failure = outcome.failure
        if failure is not None:
            self._count(self._violations, _VIOLATIONS.get(failure.kind))
            self._count(self._activations, _ACTIVATIONS.get(failure.kind))
        self._count(self._activations, "row_cap" if outcome.capped else None)
        if outcome.accepted:
            self.terminated = True
            self.final_sql = outcome.sql
        elif call.name == "sql_submit" and not invalid:
            self._violations["rejected_submit"] += 1
        elif call.name == "sql_exec" and failure is None and not invalid:
            self._executed.add(_plain(outcome.sql))
        self.calls.append(
            Call(
                turn=self.turns,
                tool=call.name,
                arguments=call.arguments,
                outcome="invalid" if invalid else "failed" if failure else "ok",
                failure="invalid_call" if invalid else failure.kind if failure else "",
                sql=outcome.sql,
                duplicate=duplicate,
            )
        )

    def _cut(self, text: str, summary: str = "") -> tuple[str, list[str]]:
        """Return the text within the limit, and a note where it is cut.

        Of a text that ends with a summary of it, what comes before the summary is cut.
        """
        limit = self.config.observation_chars
        if len(text) <= limit:
            return text, []
        self._activations["truncation"] += 1
        end = f"\n{summary}" if 0 < len(summary) < limit else ""
        return text[: limit - len(end)] + "…" + end, [f"cut at {limit} of {len(text)} characters"]

    def _compact(self) -> tuple[tuple[int, Message], ...]:
        """Bring the policy's context within its budget, or end the episode."""
        budget = self._context_chars
        if budget is None:
            return ()
        self._context += self.messages[len(self._context) :]
        changes = compact(self._context, budget)
        for index, message in changes:
            self._context[index] = message
        self._count(self._activations, "compaction" if changes else None)
        if sum(len(message.content) for message in self._context) > budget:
            self._end_out_of_budget()
        return tuple(changes)

    def _end_out_of_budget(self) -> None:
        self.truncated = self._out_of_budget = True

    def _budget_notes(self) -> list[str]:
        left = self.config.max_turns - self.turns
        if self.terminated or left not in _TOLD_TURNS_LEFT:
            return []
        self._activations["budget_notice"] += 1
        return [f"{left} turn{'' if left == 1 else 's'} left"]

    @staticmethod
    def _count(counter: Counter[str], name: str | None) -> None:
        if name:
            counter[name] += 1


def _reason(error: Exception) -> str:
    """Return why the harness failed, never empty. A fault of ours is never the policy's."""
    if isinstance(error, InfrastructureError | OracleError) and str(error):
        return str(error)
    return f"the harness failed ({type(error).__name__})"


def _call_key(call: ParsedCall) -> str:
    return json.dumps([call.name, call.arguments], sort_keys=True)


def _plain(sql: str) -> str:
    """Return the statement without outer white space and the final semicolon."""
    return sql.strip().rstrip(";").rstrip()


def _with_notes(text: str, notes: list[str]) -> str:
    """Put notes inside the observation, so that the chat template's history stays append-only."""
    return "\n".join([text, *(f"[note: {note}]" for note in notes)])

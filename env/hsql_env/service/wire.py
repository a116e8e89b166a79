"""What goes over the wire. Hidden fields of a task have no place here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hsql_env.harness.compact import LEAST_CONTEXT_CHARS
from hsql_env.harness.tools import tool_call_text, turn_text
from hsql_env.records import Call, Message, Verdict

ProblemKind = Literal[
    "not_found",  # no such task, episode or address; or the episode expired
    "conflict",  # the turn is not the next one, or the episode has ended
    "invalid",  # the request is not as described in /openapi.json
    "too_large",  # the body is over the limit
    "unauthorized",  # the token is missing or wrong
    "busy",  # a bound is reached: send it again after the seconds in Retry-After
    "draining",  # the service is about to end: likewise
    "infrastructure",  # the service or its sandbox failed, nobody's mistake
]

ContextChars = Annotated[int, Field(ge=LEAST_CONTEXT_CHARS)]  # of a context; compacted beyond it


class Wire(BaseModel):
    """Base of all bodies: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class Start(Wire):
    """Begin an episode of a task. The seed is the policy's; the environment has no chance in it."""

    task_id: str
    seed: int = 0
    context_chars: ContextChars | None = None


class Started(Wire):
    """A new episode: its first messages and the tools, as OpenAI function schemas."""

    episode_id: str
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]]


class FunctionCall(BaseModel):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One of the tool calls of an OpenAI chat completion; its id and type do not matter here."""

    function: FunctionCall


class Step(Wire):
    """One turn of the policy. `turn` counts from 1; the same turn sent again is answered again.

    A policy behind an endpoint that parses tool calls sends `tool_calls` as it got them, with what
    text there is; `content` then holds no calls, whatever is written in it. They are written as
    Qwen3 writes them and parsed like any other turn.
    """

    turn: int = Field(ge=1)
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a turn has content or tool_calls")
        return self

    def text(self) -> str:
        """Return the turn as one text."""
        content = self.content or ""
        if not self.tool_calls:
            return content
        calls = [tool_call_text(c.function.name, c.function.arguments) for c in self.tool_calls]
        return turn_text(content, calls)


class Compacted(Wire):
    """An earlier observation that was shortened."""

    index: int  # in the conversation: the first messages, then each turn and its observations
    content: str


class Stepped(Wire):
    """The observations of a turn, one tool message a call.

    `compacted` is for a policy that asked for a `context_chars`: what it sees from now on at these
    places. A policy that did not ask never gets any.
    """

    messages: tuple[Message, ...]
    terminated: bool
    truncated: bool
    notes: tuple[str, ...] = ()
    compacted: tuple[Compacted, ...] = ()


class Finished(Wire):
    """The judgement on an episode and its transcript's calls."""

    verdict: Verdict
    calls: tuple[Call, ...]
    turns: int
    final_sql: str
    terminated: bool
    truncated: bool


class Health(Wire):
    """The service's size."""

    status: Literal["ok"]
    tasks: int
    databases: int
    episodes: int


class Ready(Wire):
    """The service takes new episodes."""

    status: Literal["ready"]


class Problem(Wire):
    """The body of every error."""

    kind: ProblemKind
    message: str

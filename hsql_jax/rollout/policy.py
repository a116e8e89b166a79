"""The model as a policy: text to the environment, exact token ids and log-probs for training."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hsql_env.records import Message, PublicTask
from hsql_jax.chat import ChatRenderer
from hsql_jax.data import Example
from hsql_jax.rollout.engine import Engine, Slot


@dataclass
class EnginePolicy:
    """A `hsql_env.driver.Policy` that generates with an engine."""

    engine: Engine
    renderer: ChatRenderer
    name: str
    call_tokens: int  # most new tokens of one model call; the session's cap is the engine's length

    def begin(
        self,
        task: PublicTask,
        seed: int,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
    ) -> EngineSession:
        """The policy's side of one episode; its samples depend on (task, seed) alone."""
        return EngineSession(self, tools, zlib.crc32(f"{task.task_id}/{seed}".encode()))


@dataclass
class EngineSession:
    """One episode: every id in order, whether the policy sampled it, and its log-probability."""

    policy: EnginePolicy
    tools: list[dict[str, Any]]
    seed: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    messages: int = 0
    slot: Slot | None = None

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        """The next turn's text, or None when the session's tokens are used up."""
        engine, renderer = self.policy.engine, self.policy.renderer
        if self.slot is None:
            self.slot = await engine.acquire(self.seed)
            ids = renderer.begin(new_messages, self.tools)
        else:
            # A turn that met the call's cap has no end-of-turn token: the context needs one.
            closing = [] if self.ids[-1] == renderer.stop_id else [renderer.stop_id]
            ids = closing + renderer.observe(new_messages, self.messages)
        if len(ids) + 1 > engine.room(self.slot):
            return None
        self.messages += len(new_messages) + 1
        out = await engine.generate(self.slot, ids, self.policy.call_tokens)
        self._append(ids, [0.0] * len(ids), sampled=0)
        self._append(out.ids, out.logprobs, sampled=1)
        return renderer.decode(out.ids)

    def _append(self, ids: list[int], logprobs: list[float], sampled: int) -> None:
        self.ids += ids
        self.mask += [sampled] * len(ids)
        self.logprobs += logprobs

    def close(self) -> None:
        """Give the slot back to the engine."""
        if self.slot is not None:
            self.policy.engine.release(self.slot)
            self.slot = None

    def example(self, advantage: float) -> Example:
        """The episode as a training example: token in, token out, nothing rendered again."""
        return Example(self.ids, self.mask, self.logprobs, advantage)

"""Playing many episodes of the current parameters, called from ordinary (not async) code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from hsql_env.driver import Job, Policy, Rollout, run_episodes
from hsql_env.service.client import AsyncEnvironment
from hsql_jax.chat import ChatRenderer
from hsql_jax.model.config import ModelConfig
from hsql_jax.rollout.engine import Engine, EngineConfig
from hsql_jax.rollout.policy import EnginePolicy, EngineSession


@dataclass(frozen=True)
class Played:
    """One episode: what the environment recorded, and the policy's token ids."""

    rollout: Rollout
    session: EngineSession | None  # None: not the engine's, or the harness failed first


class Player:
    """An engine joined to a running environment service. A context manager.

    It keeps one event loop, one connection pool and one compiled engine for its whole life;
    parameters and temperature come with each call.
    """

    def __init__(
        self,
        url: str,
        model: ModelConfig,
        config: EngineConfig,
        renderer: ChatRenderer,
        call_tokens: int,
        on_failure: Callable[[], None] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`on_failure` is called after an episode that the harness failed; it may raise.

        `mesh` is the engine's.
        """
        self._on_failure = on_failure
        self._url, self._config, self._call_tokens = url, config, call_tokens
        self._renderer = renderer
        self._engine = Engine(model, config, renderer.stop_id, mesh)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def play(
        self,
        params: Any,
        jobs: Sequence[Job],
        temperature: float,
        name: str,
        on_done: Callable[[Rollout], None] | None = None,
        wrap: Callable[[Policy], Policy] = lambda policy: policy,
    ) -> list[Played]:
        """Play every job once with these parameters; the result is in the order of `jobs`.

        `wrap` may put another policy around the engine's.
        """
        return self._runner.run(self._play(params, jobs, temperature, name, on_done, wrap))

    async def _play(
        self,
        params: Any,
        jobs: Sequence[Job],
        temperature: float,
        name: str,
        on_done: Callable[[Rollout], None] | None,
        wrap: Callable[[Policy], Policy],
    ) -> list[Played]:
        policy = wrap(EnginePolicy(self._engine, self._renderer, name, self._call_tokens))

        def finished(rollout: Rollout) -> None:
            if rollout.trajectory.verdict.infrastructure and self._on_failure is not None:
                self._on_failure()
            if on_done is not None:
                on_done(rollout)

        async with AsyncEnvironment(self._url) as env, self._engine.running(params, temperature):
            rollouts = await run_episodes(env, jobs, policy, self._config.slots, finished)
        return [
            Played(r, r.session if isinstance(r.session, EngineSession) else None) for r in rollouts
        ]

"""Playing episodes: the one loop of teacher, training and evaluation. Only the policy differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hsql_env.harness.actions import InfrastructureError
from hsql_env.records import Call, Message, PublicTask, Trajectory, Verdict
from hsql_env.service.client import AsyncEnvironment, RequestRefused
from hsql_env.service.wire import Finished, Stepped

Job = tuple[PublicTask, int]  # a task and the policy's seed for it


class Session(Protocol):
    """A policy's side of one episode; it may keep what it likes, such as sampled token ids."""

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        """Return the next turn's raw text, given the messages that came since the last one.

        None ends the episode: the policy cannot go on, such as when its context is full. Raise
        `InfrastructureError` when the policy's own machinery fails.
        """
        ...

    def close(self) -> None:
        """Free what the session holds. Called at the end of every episode."""
        ...


@runtime_checkable
class CompactingSession(Session, Protocol):
    """A session whose context can be compacted, as `context_chars` asks for."""

    def compact(self, messages: Sequence[Message]) -> None:
        """Take `messages` for the conversation so far: older observations in it are shorter now.

        They end with the last turn; its observations come in the `act` that follows.
        """
        ...


class Policy(Protocol):
    """Anything that plays episodes."""

    @property
    def name(self) -> str:
        """Who acts, as written in trajectories."""
        ...

    def begin(
        self,
        task: PublicTask,
        seed: int,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
    ) -> Session:
        """Return the policy's side of a new episode; `messages` come again in the first `act`."""
        ...


@dataclass(frozen=True)
class Rollout:
    """A played episode and the session that played it; None if the episode never began."""

    trajectory: Trajectory
    session: Session | None


async def run_episode(
    env: AsyncEnvironment,
    task: PublicTask,
    policy: Policy,
    seed: int = 0,
    context_chars: int | None = None,
) -> Rollout:
    """Play one episode. A failure of the harness is a value: `verdict.infrastructure` names it.

    With `context_chars`, older observations are compacted when the conversation is longer, for
    which the policy's sessions must be `CompactingSession`s (`TypeError`). The trajectory holds the
    messages as they were said.
    """
    play = _Play(env, task, policy, seed, context_chars)
    try:
        await play.run()
    except InfrastructureError as error:
        play.spoiled = str(error) or "unknown failure"
        await play.abandon()
    except Exception:
        await play.abandon()
        raise
    finally:
        if play.session is not None:
            play.session.close()
    return Rollout(play.trajectory(), play.session)


async def run_episodes(
    env: AsyncEnvironment,
    jobs: Iterable[Job],
    policy: Policy,
    concurrency: int = 64,
    on_done: Callable[[Rollout], None] | None = None,
    context_chars: int | None = None,
) -> list[Rollout]:
    """Play every job, `concurrency` at a time; return the rollouts in the order of the jobs.

    `on_done` is called after each episode, in the order in which they end. Jobs are taken from the
    iterable only as episodes begin. `context_chars` is that of `run_episode`.
    """
    numbered = enumerate(jobs)
    done: dict[int, Rollout] = {}

    async def play_jobs() -> None:
        for index, (task, seed) in numbered:
            done[index] = await run_episode(env, task, policy, seed, context_chars)
            if on_done is not None:
                on_done(done[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(play_jobs())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [done[index] for index in sorted(done)]


class _Play:
    """One episode in progress."""

    def __init__(
        self,
        env: AsyncEnvironment,
        task: PublicTask,
        policy: Policy,
        seed: int,
        context_chars: int | None,
    ) -> None:
        self.env = env
        self.task = task
        self.policy = policy
        self.seed = seed
        self.context_chars = context_chars
        self.session: Session | None = None
        self.spoiled = ""
        self.episode_id = ""
        self.messages: list[Message] = []  # as they were said
        self.context: list[Message] = []  # as the policy sees them
        self.turns = 0
        self.finished: Finished | None = None

    async def run(self) -> None:
        """Play to the end and fetch the verdict. Raises `InfrastructureError`."""
        started = await self.env.start(self.task.task_id, self.seed, self.context_chars)
        self.episode_id = started.episode_id
        self._add(started.messages)
        self.session = self.policy.begin(self.task, self.seed, started.messages, started.tools)
        try:
            self._check_can_compact(self.session)
            await self._play(self.session, started.messages)
            self.finished = await self.env.finish(self.episode_id)
        except RequestRefused as error:
            if error.kind != "not_found":
                raise
            raise InfrastructureError(f"the service lost the episode: {error}") from error

    async def _play(self, session: Session, new: Sequence[Message]) -> None:
        while (content := await session.act(new)) is not None:
            stepped = await self._step(content)
            if stepped.terminated or stepped.truncated:
                return
            if stepped.compacted:
                self._compact(session, stepped)
            new = stepped.messages

    async def abandon(self) -> None:
        """Free the episode on the service after a failure."""
        if self.episode_id:
            try:
                await self.env.finish(self.episode_id)
            except Exception:
                return  # the first failure is the one to report

    async def _step(self, content: str) -> Stepped:
        self.turns += 1
        self._add([Message(role="assistant", content=content)])
        stepped = await self.env.step(self.episode_id, self.turns, content)
        self._add(stepped.messages)
        return stepped

    def _add(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self.context += messages

    def _check_can_compact(self, session: Session) -> None:
        if self.context_chars is not None and not isinstance(session, CompactingSession):
            raise TypeError(
                f"policy {self.policy.name}: its sessions have no compact(), "
                "which context_chars needs"
            )

    def _compact(self, session: Session, stepped: Stepped) -> None:
        assert isinstance(session, CompactingSession)
        for change in stepped.compacted:
            role = self.context[change.index].role
            self.context[change.index] = Message(role=role, content=change.content)
        session.compact(self.context[: len(self.context) - len(stepped.messages)])

    def trajectory(self) -> Trajectory:
        """Return the record of what happened so far."""
        end = self.finished
        calls: tuple[Call, ...] = end.calls if end else ()
        return Trajectory(
            trajectory_id=f"{self.policy.name}/{self.task.task_id}/{self.seed}",
            task=self.task,
            policy=self.policy.name,
            seed=self.seed,
            messages=tuple(self.messages),
            calls=calls,
            turns=self.turns,
            final_sql=end.final_sql if end else "",
            terminated=end.terminated if end else False,
            truncated=end.truncated if end else False,
            verdict=end.verdict if end and not self.spoiled else _spoiled_verdict(self.spoiled),
        )


def _spoiled_verdict(reason: str) -> Verdict:
    return Verdict(
        result_ok=False,
        protocol_ok=False,
        strict_ok=False,
        reward=0.0,
        submitted=False,
        infrastructure=reason,
    )

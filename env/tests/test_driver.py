"""The episode loop: any policy, many episodes at a time, failures as values."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import call, make_task
from test_compact import WIDE

from hsql_env.driver import Job, Rollout, run_episode, run_episodes
from hsql_env.harness import InfrastructureError
from hsql_env.records import Message, PublicTask, write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment, RequestRefused
from hsql_env.service.launcher import ServiceProcess

COUNT = "SELECT count(*) FROM city"
Act = Callable[[int, Sequence[Message]], str | None]


class Script:
    """A policy that plays a function of the turn's number and the new messages."""

    name = "script"

    def __init__(self, act: Act) -> None:
        self._act = act
        self.sessions: list[ScriptSession] = []

    def begin(
        self, task: PublicTask, seed: int, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> ScriptSession:
        assert len(tools) == 4
        self.sessions.append(ScriptSession(self._act))
        return self.sessions[-1]


class ScriptSession:
    """Keeps the messages that it was given."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.turn = 0
        self.closed = 0
        self.given: list[Sequence[Message]] = []

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        self.turn += 1
        self.given.append(new_messages)
        return self._act(self.turn, new_messages)

    def close(self) -> None:
        self.closed += 1


def solve(turn: int, new: Sequence[Message]) -> str | None:
    """Look, try, submit."""
    turns = [call("sql_list_tables"), call("sql_exec", query=COUNT)]
    return (*turns, call("sql_submit", query=COUNT))[turn - 1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> ServiceProcess:
    """A service that is not started yet."""
    folder = tmp_path_factory.mktemp("driver")
    database = open_database(city_path)
    write_jsonl(folder / "databases.jsonl", [database])
    write_jsonl(folder / "tasks.jsonl", [make_task(COUNT, task_id=f"t{i}") for i in range(40)])
    return ServiceProcess(folder / "tasks.jsonl", folder / "databases.jsonl")


@pytest.fixture(scope="module")
def url(service: ServiceProcess) -> Any:
    """The address of the running service."""
    with service:
        yield service.url


def task(number: int) -> PublicTask:
    """Return the public half of a task of the service."""
    return make_task(COUNT, task_id=f"t{number}").public


def play_one(url: str, act: Act, public: PublicTask | None = None) -> Rollout:
    """Play one episode against the service."""

    async def run() -> Rollout:
        async with AsyncEnvironment(url) as env:
            return await run_episode(env, public or task(1), Script(act), seed=5)

    return asyncio.run(run())


def test_one_episode(url: str) -> None:
    rollout = play_one(url, solve)
    trajectory = rollout.trajectory
    assert trajectory.verdict.reward == 1.0
    assert (trajectory.trajectory_id, trajectory.policy) == ("script/t1/5", "script")
    assert [message.role for message in trajectory.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert (trajectory.turns, trajectory.terminated, trajectory.final_sql) == (3, True, COUNT)
    session = rollout.session
    assert isinstance(session, ScriptSession)
    given = [message for new in session.given for message in new]
    seen = [message for message in trajectory.messages[:-1] if message.role != "assistant"]
    assert given == seen
    assert session.closed == 1


def test_many_episodes_keep_the_jobs_order(url: str) -> None:
    ended: list[str] = []
    drawn: list[int] = []

    def jobs() -> Any:
        for number in range(40):
            drawn.append(number)
            yield task(number), number

    async def run() -> list[Rollout]:
        async with AsyncEnvironment(url) as env:
            return await run_episodes(
                env,
                jobs(),
                Script(solve),
                concurrency=8,
                on_done=lambda rollout: ended.append(rollout.trajectory.task.task_id),
            )

    rollouts = asyncio.run(run())
    assert [rollout.trajectory.task.task_id for rollout in rollouts] == [f"t{i}" for i in range(40)]
    assert all(rollout.trajectory.verdict.reward == 1.0 for rollout in rollouts)
    assert sorted(ended) == sorted(f"t{i}" for i in range(40))
    assert drawn == list(range(40))


def test_policy_that_cannot_go_on_is_truncated(url: str) -> None:
    trajectory = play_one(url, lambda turn, new: None if turn == 2 else solve(turn, new)).trajectory
    assert (trajectory.turns, trajectory.terminated, trajectory.truncated) == (1, False, True)
    assert trajectory.verdict.violations == {"no_submit": 1}
    assert trajectory.verdict.infrastructure == ""


def test_failure_of_the_policys_machinery_is_a_value(url: str) -> None:
    def act(turn: int, new: Sequence[Message]) -> str:
        raise InfrastructureError("the model's server is gone")

    verdict = play_one(url, act).trajectory.verdict
    assert (verdict.infrastructure, verdict.reward) == ("the model's server is gone", 0.0)


def test_a_fault_in_the_policy_is_raised(url: str) -> None:
    def act(turn: int, new: Sequence[Message]) -> str:
        raise KeyError("bug")

    policy = Script(act)

    async def run(jobs: list[Job]) -> None:
        async with AsyncEnvironment(url) as env:
            await run_episodes(env, jobs, policy, concurrency=2)

    with pytest.raises(KeyError, match="bug"):
        asyncio.run(run([(task(1), 0), (task(2), 0)]))
    assert [session.closed for session in policy.sessions] == [1, 1]


class CompactingScript(Script):
    """Keeps the conversation as a model's session would."""

    def begin(self, *start: Any) -> ScriptSession:
        self.sessions.append(CompactingScriptSession(self._act))
        return self.sessions[-1]


class CompactingScriptSession(ScriptSession):
    def __init__(self, act: Act) -> None:
        super().__init__(act)
        self.context: list[Message] = []
        self.sizes: list[int] = []
        self.compactions = 0

    def compact(self, messages: Sequence[Message]) -> None:
        assert [message.role for message in messages] == [m.role for m in self.context]
        self.context = list(messages)
        self.compactions += 1

    async def act(self, new_messages: Sequence[Message]) -> str | None:
        self.context += new_messages
        self.sizes.append(sum(len(message.content) for message in self.context))
        content = await super().act(new_messages)
        self.context.append(Message(role="assistant", content=content or ""))
        return content


def look_around(turn: int, new: Sequence[Message]) -> str | None:
    """Ask for much, turn after turn, then submit."""
    done = turn == 9
    return call("sql_submit", query=COUNT) if done else call("sql_exec", query=WIDE.format(turn))


def test_a_policys_context_is_compacted(url: str) -> None:
    policy = CompactingScript(look_around)

    async def run() -> Rollout:
        async with AsyncEnvironment(url) as env:
            (rollout,) = await run_episodes(env, [(task(1), 5)], policy, context_chars=9_000)
            return rollout

    trajectory = asyncio.run(run()).trajectory
    (session,) = policy.sessions
    assert isinstance(session, CompactingScriptSession)
    assert max(session.sizes) <= 9_000
    assert session.compactions == trajectory.verdict.activations["compaction"] == 3
    assert trajectory.verdict.result_ok
    said = [message.content for message in trajectory.messages[:-1]]  # all but ACCEPTED
    seen = [message.content for message in session.context]
    shorter = [i for i, pair in enumerate(zip(said, seen, strict=True)) if pair[0] != pair[1]]
    assert shorter == [3, 5, 7, 9, 11, 13, 15]
    for place in shorter:
        head, _, note = seen[place].rpartition("\n")
        assert said[place].startswith(head)
        assert note.startswith("[note: compacted, ")


def test_a_policy_that_cannot_compact_is_refused(url: str) -> None:
    async def run() -> Rollout:
        async with AsyncEnvironment(url) as env:
            return await run_episode(env, task(1), Script(solve), context_chars=9_000)

    with pytest.raises(TypeError, match=r"policy script: its sessions have no compact\(\)"):
        asyncio.run(run())


def test_unknown_task_is_raised(url: str) -> None:
    with pytest.raises(RequestRefused, match="unknown task: nosuch"):
        play_one(url, solve, task(1).model_copy(update={"task_id": "nosuch"}))


def test_a_dying_service_spoils_episodes_and_not_the_batch(
    service: ServiceProcess, tmp_path: Path, city_path: str
) -> None:
    database = open_database(city_path)
    write_jsonl(tmp_path / "d.jsonl", [database])
    write_jsonl(tmp_path / "t.jsonl", [make_task(COUNT, task_id=f"t{i}") for i in range(8)])
    with ServiceProcess(tmp_path / "t.jsonl", tmp_path / "d.jsonl") as dying:

        def act(turn: int, new: Sequence[Message]) -> str | None:
            if turn == 2:
                os.kill(dying.pid, signal.SIGKILL)
            return solve(turn, new)

        async def run() -> list[Rollout]:
            async with AsyncEnvironment(dying.url) as env:
                jobs = [(task(number), 0) for number in range(4)]
                return await run_episodes(env, jobs, Script(act), concurrency=1)

        rollouts = asyncio.run(run())
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout.trajectory.verdict.infrastructure.startswith("no answer from http")
        assert rollout.trajectory.verdict.reward == 0.0
    assert [rollout.trajectory.turns for rollout in rollouts] == [2, 0, 0, 0]

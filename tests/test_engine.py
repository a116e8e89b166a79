"""The engine with many sessions at once: batching, turns, limits, waiting, failures."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import MODEL
from test_decode import params, trainer

from hsql_env.records import Message, PublicTask
from hsql_jax.model.decode import Rows, sample
from hsql_jax.rollout.engine import Engine, EngineConfig, Generated, Slot
from hsql_jax.rollout.policy import EnginePolicy
from hsql_jax.sharding import MeshConfig, make_mesh

STOP = 5
LENGTH = 40
CONFIG = EngineConfig(slots=4, rows=2, width=5, chunk=4, lengths=(16, LENGTH))
DEADLINE = 60.0  # seconds; what hangs fails


class Bench:
    """One compiled engine and one event loop for all tests of this file."""

    def __init__(self) -> None:
        self.engine = Engine(MODEL, CONFIG, STOP)
        self.runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Any], temperature: float = 1.0) -> Any:
        async def inside() -> Any:
            async with self.engine.running(params(MODEL), temperature):
                return await asyncio.wait_for(work, DEADLINE)

        return self.runner.run(inside())


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.runner.close()


async def session(
    engine: Engine, seed: int, turns: list[list[int]], limit: int = 6
) -> tuple[list[int], list[float], list[bool]]:
    """All ids of an episode with these observations, their log-probs, and which were sampled."""
    slot = await engine.acquire(seed)
    ids: list[int] = []
    logprobs: list[float] = []
    sampled: list[bool] = []
    for new in turns:
        out = await engine.generate(slot, new, limit)
        ids += new + out.ids
        logprobs += [0.0] * len(new) + out.logprobs
        sampled += [False] * len(new) + [True] * len(out.ids)
        await asyncio.sleep(0.001 * (seed % 5))  # the environment's answer takes its time
    engine.release(slot)
    return ids, logprobs, sampled


def turns_of(seed: int) -> list[list[int]]:
    """A prompt of 3 to 12 tokens, then two observations: fed in one part and in several."""
    rng = np.random.default_rng(seed)
    return [rng.integers(6, 64, size).tolist() for size in (rng.integers(3, 13), 4, 2)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_sampler_logprobs_equal_the_trainers(bench: Bench, temperature: float) -> None:
    """Over three turns of seven concurrent episodes, more than there are slots."""

    async def play() -> list[Any]:
        return await asyncio.gather(*(session(bench.engine, s, turns_of(s)) for s in range(7)))

    for ids, logprobs, sampled in bench.run(play(), temperature):
        padded = np.array(ids + [0] * (LENGTH - len(ids)), np.int32)
        recomputed, logits = trainer(params(MODEL), MODEL, padded, temperature or 1.0)
        chosen = np.flatnonzero(sampled)
        assert len(chosen) >= 3
        np.testing.assert_allclose(
            np.asarray(logprobs)[chosen], np.asarray(recomputed)[chosen - 1], atol=1e-4
        )
        if temperature == 0:
            assert np.array_equal(np.asarray(ids)[chosen], logits.argmax(-1)[chosen - 1])


def test_an_episode_does_not_depend_on_its_company(bench: Bench) -> None:
    async def play(seeds: list[int]) -> list[Any]:
        return await asyncio.gather(*(session(bench.engine, s, turns_of(s)) for s in seeds))

    together = bench.run(play([*range(10, 17)]))
    assert len({tuple(ids) for ids, _, _ in together}) == 7
    for seed, (ids, logprobs, _) in zip(range(10, 17), together, strict=True):
        ((alone, alone_logprobs, _),) = bench.run(play([seed]))
        assert alone == ids
        np.testing.assert_allclose(alone_logprobs, logprobs, atol=1e-5)


def test_each_token_is_drawn_by_its_number_in_the_episode(bench: Bench) -> None:
    """Chunks and turns go on in one stream of random numbers, that of the episode's seed."""
    seed = 4_000_000_000
    ids, _, sampled = bench.run(session(bench.engine, seed, turns_of(8)))
    padded = np.array(ids + [0] * (LENGTH - len(ids)), np.int32)
    _, logits = trainer(params(MODEL), MODEL, padded, 1.0)
    chosen = np.flatnonzero(sampled)
    zeros = np.zeros(len(chosen), np.int32)
    seeds = np.full(len(chosen), seed, np.uint32)
    stream = Rows(zeros, zeros, seeds, np.arange(len(chosen), dtype=np.int32))
    expected, _ = sample(logits[chosen - 1], stream, jnp.float32(1.0))
    assert np.asarray(ids)[chosen].tolist() == expected.tolist()


def test_seeds_and_nothing_else_set_the_samples(bench: Bench) -> None:
    async def play() -> list[Any]:
        return await asyncio.gather(
            *(session(bench.engine, seed, [[7, 8, 9]]) for seed in (1, 2, 1, 3))
        )

    first, second, same, third = (ids for ids, _, _ in bench.run(play()))
    assert first == same
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_reused_keys_and_values_equal_a_fresh_prefill(bench: Bench) -> None:
    """The last turn of a session against one call that feeds all its ids at once, greedily."""
    turns = turns_of(3)

    async def in_turns() -> tuple[list[int], Generated]:
        slot = await bench.engine.acquire(0)
        ids: list[int] = []
        for new in turns[:-1]:
            ids += new + (await bench.engine.generate(slot, new, 5)).ids
        last = await bench.engine.generate(slot, turns[-1], 5)
        bench.engine.release(slot)
        return ids + turns[-1], last

    async def at_once(ids: list[int]) -> Generated:
        slot = await bench.engine.acquire(0)
        out = await bench.engine.generate(slot, ids, 5)
        bench.engine.release(slot)
        return out

    ids, last = bench.run(in_turns(), temperature=0.0)
    fresh = bench.run(at_once(ids), temperature=0.0)
    assert fresh.ids == last.ids
    np.testing.assert_allclose(fresh.logprobs, last.logprobs, atol=1e-5)


# --- limits ------------------------------------------------------------------------------------


def test_a_call_ends_at_its_cap_or_its_stop_token(bench: Bench) -> None:
    async def play(limit: int) -> list[Generated]:
        slots = [await bench.engine.acquire(seed) for seed in range(4)]
        outs = await asyncio.gather(
            *(bench.engine.generate(slot, [8 + slot.seed] * 3, limit) for slot in slots)
        )
        for slot in slots:
            bench.engine.release(slot)
        return outs

    long = bench.run(play(30))
    for limit in (1, 2, 5, 6, 13):
        for out, whole in zip(bench.run(play(limit)), long, strict=True):
            assert out.ids == whole.ids[:limit]
            assert len(out.ids) == len(out.logprobs)
    for out in long:
        assert STOP not in out.ids[:-1]
        assert len(out.ids) == 30 or out.ids[-1] == STOP


def test_a_session_fills_its_room_and_no_more(bench: Bench) -> None:
    """Call caps above the room are cut to it, and the last places hold what they should."""
    engine = bench.engine

    async def play(seed: int) -> tuple[list[int], list[float]]:
        slot = await engine.acquire(seed)
        ids = [*range(8, 19 + seed)]
        logprobs = [0.0] * len(ids)
        new = list(ids)
        while engine.room(slot) > 0:  # a stop token ends a call before the room is full
            out = await engine.generate(slot, new, 1000)
            ids, logprobs, new = ids + out.ids, logprobs + out.logprobs, []
            assert engine.room(slot) == LENGTH - len(ids)
        with pytest.raises(ValueError, match="0 tokens do not fit into the 0 left"):
            await engine.generate(slot, [], 1)
        engine.release(slot)
        return ids, logprobs

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(play(seed) for seed in range(4)))

    for seed, (ids, logprobs) in enumerate(bench.run(all_at_once())):
        assert len(ids) == LENGTH
        recomputed, _ = trainer(params(MODEL), MODEL, np.array(ids, np.int32), 1.0)
        sampled = np.s_[11 + seed :]
        np.testing.assert_allclose(logprobs[sampled], recomputed[:-1][10 + seed :], atol=1e-4)


def test_ids_beyond_the_room_are_refused_and_spoil_nothing(bench: Bench) -> None:
    async def play() -> Generated:
        slot = await bench.engine.acquire(0)
        with pytest.raises(ValueError, match=f"{LENGTH} tokens do not fit into the {LENGTH} left"):
            await bench.engine.generate(slot, [7] * LENGTH, 1)
        out = await bench.engine.generate(slot, [7] * (LENGTH - 1), 5)
        bench.engine.release(slot)
        return out

    assert len(bench.run(play()).ids) == 1


# --- concurrency -------------------------------------------------------------------------------


def test_a_waiting_slot_stops_nobody(bench: Bench) -> None:
    """One episode holds its slot, in the middle of a session, until all others have ended."""

    async def play() -> list[int]:
        others_done = asyncio.Event()
        slow = await bench.engine.acquire(0)
        await bench.engine.generate(slow, [7, 8], 3)

        async def wait_for_environment() -> list[int]:
            await others_done.wait()
            return (await bench.engine.generate(slow, [9], 3)).ids

        waiting = asyncio.create_task(wait_for_environment())
        await asyncio.gather(*(session(bench.engine, s, turns_of(s)) for s in range(1, 9)))
        assert not waiting.done()
        others_done.set()
        ids = await waiting
        bench.engine.release(slow)
        return ids

    async def undisturbed() -> list[int]:
        slot = await bench.engine.acquire(0)
        await bench.engine.generate(slot, [7, 8], 3)
        ids = (await bench.engine.generate(slot, [9], 3)).ids
        bench.engine.release(slot)
        return ids

    assert bench.run(play()) == bench.run(undisturbed())


def test_episodes_generate_together_and_wait_for_a_slot(bench: Bench) -> None:
    bench.engine.peak_active = 0

    async def play() -> int:
        held = [await bench.engine.acquire(seed) for seed in range(CONFIG.slots)]
        fifth = asyncio.create_task(bench.engine.acquire(99))
        await asyncio.gather(*(bench.engine.generate(slot, [7, 8, 9], 6) for slot in held))
        assert not fifth.done()
        bench.engine.release(held[0])
        slot = await fifth
        assert (slot.index, slot.seed, slot.length, slot.drawn) == (held[0].index, 99, 0, 0)
        for one in [slot, *held[1:]]:
            bench.engine.release(one)
        return bench.engine.peak_active

    assert bench.run(play()) >= 3


@pytest.mark.timeout(30)
@pytest.mark.parametrize("broken", ["_extend", "_decode"])
def test_a_failure_of_the_engine_reaches_every_caller(
    bench: Bench, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those being fed, those generating, and those that call afterwards; then it serves again."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    async def play() -> list[Any]:
        slots = [await bench.engine.acquire(seed) for seed in range(4)]
        calls = [
            asyncio.create_task(bench.engine.generate(s, [7, 8], 2 + s.seed)) for s in slots[:3]
        ]
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        late = bench.engine.generate(slots[3], [7], 2)
        results += await asyncio.wait_for(asyncio.gather(late, return_exceptions=True), 5)
        for slot in slots:
            bench.engine.release(slot)
        return results

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, broken, fail)
        results = bench.run(play())
    assert [str(error) for error in results] == ["out of memory"] * 4
    assert bench.run(session(bench.engine, 1, [[7, 8]]))[0][:2] == [7, 8]


# --- the policy that sits in the environment ---------------------------------------------------


class ScriptedEngine:
    """Stands for the engine: answers in order, and keeps what it was fed."""

    def __init__(self, answers: list[list[int]], room: int = 100) -> None:
        self.answers, self.left = answers, room
        self.fed: list[list[int]] = []
        self.released = 0

    async def acquire(self, seed: int) -> Slot:
        return Slot(0, seed=seed)

    def release(self, slot: Slot) -> None:
        self.released += 1

    def room(self, slot: Slot) -> int:
        return self.left

    async def generate(self, slot: Slot, ids: list[int], limit: int) -> Generated:
        answer = self.answers.pop(0)
        self.fed.append(list(ids))
        self.left -= len(ids) + len(answer)
        return Generated(answer, [-0.5] * len(answer))


class PlainRenderer:
    """One token a message; 5 ends a turn."""

    stop_id = STOP

    def begin(self, messages: list[Message], tools: Any) -> list[int]:
        return [100 + i for i in range(len(messages))]

    def observe(self, messages: list[Message], first: int) -> list[int]:
        return [200 + first + i for i in range(len(messages))]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


SYSTEM, USER, TOOL = (Message(role=r, content="x") for r in ("system", "user", "tool"))
TASK = PublicTask(task_id="t1", database_id="d", question="q")


def test_a_session_keeps_every_id_once_and_marks_what_was_sampled() -> None:
    engine = ScriptedEngine([[7, 8, STOP], [9, 10], [11, STOP]])
    policy = EnginePolicy(engine, PlainRenderer(), "policy", call_tokens=3)  # type: ignore[arg-type]
    play = policy.begin(TASK, 0, [SYSTEM, USER], [])

    async def turns() -> list[str | None]:
        return [await play.act(new) for new in ([SYSTEM, USER], [TOOL], [TOOL, TOOL])]

    assert asyncio.run(turns()) == ["7 8 5", "9 10", "11 5"]
    # The second turn met its cap: the context gets the end of turn that was not sampled.
    assert engine.fed == [[100, 101], [203], [STOP, 205, 206]]
    example = play.example(advantage=0.5)
    assert example.ids == [100, 101, 7, 8, STOP, 203, 9, 10, STOP, 205, 206, 11, STOP]
    assert example.mask == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1]
    assert example.logprobs == [-0.5 * bit for bit in example.mask]
    assert example.advantage == 0.5
    play.close()
    play.close()
    assert engine.released == 1


def test_a_session_without_room_gives_up() -> None:
    engine = ScriptedEngine([[7, STOP]], room=5)
    policy = EnginePolicy(engine, PlainRenderer(), "policy", call_tokens=3)  # type: ignore[arg-type]
    play = policy.begin(TASK, 0, [SYSTEM, USER], [])

    async def turns() -> list[str | None]:
        return [await play.act([SYSTEM, USER]), await play.act([TOOL])]

    assert asyncio.run(turns()) == ["7 5", None]
    assert play.ids == [100, 101, 7, STOP]


def test_a_sessions_seed_is_of_its_task_and_seed() -> None:
    policy = EnginePolicy(ScriptedEngine([]), PlainRenderer(), "policy", 3)  # type: ignore[arg-type]
    other = TASK.model_copy(update={"task_id": "t2"})
    seeds = [policy.begin(task, i, [], []).seed for task in (TASK, other) for i in (0, 1)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert policy.begin(TASK, 1, [], []).seed == seeds[1]


def test_an_engine_on_a_mesh_generates_the_same(bench: Bench) -> None:
    """Heads, feed-forward and vocabulary over two devices: the same tokens and log-probs."""
    split = Engine(MODEL, CONFIG, STOP, make_mesh(MeshConfig(tensor=2)))

    async def play(engine: Engine) -> Any:
        async with engine.running(params(MODEL), 0.7):
            work = asyncio.gather(*(session(engine, seed, turns_of(seed)) for seed in range(5)))
            return await asyncio.wait_for(work, DEADLINE)

    one, two = (bench.runner.run(play(engine)) for engine in (bench.engine, split))
    assert [ids for ids, _, _ in one] == [ids for ids, _, _ in two]
    for (_, expected, _), (_, found, _) in zip(one, two, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_parameters_are_held_in_the_compute_dtype(bench: Bench) -> None:
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    engine = Engine(model, CONFIG, STOP)

    async def held() -> set[str]:
        async with engine.running(params(MODEL), 0.0):
            return {str(leaf.dtype) for leaf in jax.tree.leaves(engine._params)}

    assert bench.runner.run(held()) == {"bfloat16"}

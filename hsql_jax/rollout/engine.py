"""The generation engine: slots with continuous batching, shared by many concurrent episodes.

A slot belongs to one episode for its whole life and keeps its keys and values across turns, so
that only new observation tokens are fed. Each round decodes a chunk for all slots that generate,
and feeds slots with news once they fill a batch or nobody generates; a slot that waits for the
environment costs nothing and stops nobody.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsql_jax.model.config import ModelConfig
from hsql_jax.model.decode import (
    Rows,
    cache_shardings,
    decode,
    extend,
    init_cache,
    unstack,
    write_rows,
)
from hsql_jax.model.qwen3 import param_shardings
from hsql_jax.sharding import MeshConfig, make_mesh


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; it compiles twice for each of `lengths`."""

    slots: int = 64  # episodes in progress at the same time
    rows: int = 16  # slots worked on in one call; more rows only outgrow a CPU's caches
    width: int = 32  # new tokens of a slot fed at once; longer inputs take several passes
    chunk: int = 8  # decode steps between two looks at the queue
    lengths: tuple[int, ...] = (192, 288, 384)  # how much of the cache a call reads

    def __post_init__(self) -> None:
        if min(self.slots, self.rows, self.width, self.chunk) < 1:
            raise ValueError(
                f"engine slots = {self.slots}, rows = {self.rows}, width = {self.width}, chunk = "
                f"{self.chunk}: each must be at least 1"
            )
        if list(self.lengths) != sorted(set(self.lengths)) or not self.lengths:
            raise ValueError(f"engine lengths {self.lengths} must rise")

    @property
    def session_tokens(self) -> int:
        """Tokens of a whole session, prompt and observations included."""
        return self.lengths[-1]


@dataclass
class Slot:
    """One sequence in the cache."""

    index: int
    seed: int = 0
    length: int = 0  # tokens in the cache
    drawn: int = 0  # tokens sampled by this episode
    pending: int | None = None  # sampled, not yet in the cache


@dataclass
class Generated:
    """One model call: sampled ids, the stop token included if it came, and their log-probs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    slot: Slot
    ids: list[int]  # still to be fed
    limit: int  # tokens this call may still sample
    done: asyncio.Future[Generated]
    out: Generated = field(default_factory=Generated)


class Engine:
    """Generates for many episodes at once, inside `async with engine.running(params, T)`.

    Parameters, held in the model's compute dtype, and cache are split over the tensor axis of
    `mesh`; by default everything is on this host's first device.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, stop_id: int, mesh: Mesh | None = None
    ) -> None:
        self.config, self.stop_id = config, stop_id
        self._dtype = model.dtype
        mesh = make_mesh(MeshConfig(), jax.local_devices()) if mesh is None else mesh
        self._places = param_shardings(mesh, model)
        self._params: Any = None
        self._temperature = jnp.float32(0.0)
        # One more slot than episodes: padding rows read and write it. Slack behind the longest
        # session takes the junk tail of a buffer.
        slack = max(config.chunk, config.width)
        empty = functools.partial(
            init_cache, model, config.slots + 1, config.session_tokens + slack
        )
        places = cache_shardings(mesh, jax.eval_shape(empty))
        self._cache = jax.jit(empty, out_shardings=places)()
        self._free: asyncio.Queue[Slot] = asyncio.Queue()
        for index in range(config.slots):
            self._free.put_nowait(Slot(index))
        self._inbox: list[_Job] = []  # of the event loop; a round's thread owns the other two
        self._queued: list[_Job] = []
        self._active: list[_Job] = []
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._extend = jax.jit(functools.partial(extend, config=model), static_argnames="used")
        self._decode = jax.jit(
            functools.partial(decode, config=model, stop_id=stop_id),
            static_argnames=("steps", "used"),
        )
        self._write = jax.jit(write_rows, donate_argnums=0, out_shardings=places)
        self.peak_active = 0

    # --- what an episode calls -----------------------------------------------------------------

    async def acquire(self, seed: int) -> Slot:
        """An empty slot, waiting for one if need be; its samples depend on `seed` alone."""
        index = (await self._free.get()).index
        return Slot(index, seed=seed)

    def release(self, slot: Slot) -> None:
        """Give the slot back; its content is forgotten."""
        self._free.put_nowait(slot)

    def room(self, slot: Slot) -> int:
        """Tokens that still fit into the slot's session."""
        return self.config.session_tokens - slot.length - (slot.pending is not None)

    async def generate(self, slot: Slot, ids: Sequence[int], limit: int) -> Generated:
        """Append `ids` to the slot, then sample until the stop token or `limit` tokens.

        Raises `ValueError` when ids and one sampled token do not fit; see `room`. A failure of the
        engine is raised too, in this call and in all later ones.
        """
        if self._failure is not None:
            raise self._failure
        if len(ids) + 1 > self.room(slot):
            raise ValueError(f"{len(ids)} tokens do not fit into the {self.room(slot)} left")
        pending = [] if slot.pending is None else [slot.pending]
        job = _Job(
            slot,
            pending + list(ids),
            min(limit, self.room(slot) - len(ids)),
            asyncio.get_running_loop().create_future(),
        )
        self._inbox.append(job)
        self._wake.set()
        return await job.done

    @asynccontextmanager
    async def running(self, params: Any, temperature: float) -> AsyncIterator[None]:
        """Serves `generate` with these parameters while the block runs; 0 is greedy."""
        held = jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)
        self._params = jax.jit(unstack)(jax.device_put(held, self._places))
        self._temperature = jnp.float32(temperature)
        self._inbox, self._queued, self._active, self._failure = [], [], [], None
        task = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- the rounds ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        held: list[_Job] = []
        try:
            while True:
                while not self._inbox and not self._queued and not self._active:
                    self._wake.clear()
                    await self._wake.wait()
                self._queued, self._inbox = self._queued + self._inbox, []
                held = self._queued + self._active
                # In a thread: the event loop goes on talking to the environment meanwhile.
                for job in await asyncio.to_thread(self._round):
                    if not job.done.cancelled():
                        job.done.set_result(job.out)
        except Exception as error:
            self._failure = error
            for job in held + self._inbox:
                if not job.done.done():
                    job.done.set_exception(error)
            raise

    def _round(self) -> list[_Job]:
        """Feed one batch if it is worth it, decode one chunk; return the jobs that are finished.

        Every call only reads the cache, so all are started before the first is waited for; each
        call's new keys and values are written when its result is in.
        """
        rows = self.config.rows
        pending: list[Callable[[], None]] = []
        # Slots of like length together: each call reads only as much cache as its longest needs.
        self._active.sort(key=lambda job: job.slot.length)
        for start in range(0, len(self._active), rows):
            pending.append(self._chunk(self._active[start : start + rows]))
        fed: list[_Job] = []
        if len(self._queued) >= rows or not self._active:
            fed = self._queued[:rows]
            pending.append(self._feed(fed))
        for finish in pending:
            finish()
        self._queued = [job for job in self._queued if job.ids]
        self._active += [job for job in fed if not job.ids]
        self.peak_active = max(self.peak_active, len(self._active))
        return self._take_finished()

    def _take_finished(self) -> list[_Job]:
        over = [job for job in self._active if job.limit <= 0 or job.out.ids[-1] == self.stop_id]
        self._active = [job for job in self._active if job not in over]
        return over

    def _feed(self, jobs: list[_Job]) -> Callable[[], None]:
        """Start feeding the next part of each job's ids; the result waits and stores it."""
        rows, width = self.config.rows, self.config.width
        tokens = np.zeros((rows, width), np.int32)
        count = np.ones(rows, np.int32)
        for row, job in enumerate(jobs):
            part, job.ids = job.ids[:width], job.ids[width:]
            tokens[row, : len(part)], count[row] = part, len(part)
        slots = self._rows(jobs)
        buffer, *sampled = self._extend(
            self._params,
            cache=self._cache,
            rows=slots,
            tokens_RW=tokens,
            count_R=count,
            temperature=self._temperature,
            used=self._used(jobs),
        )

        def finish() -> None:
            token, logprob = (np.asarray(leaf) for leaf in sampled)
            self._cache = self._write(self._cache, buffer, slots)
            for row, job in enumerate(jobs):
                job.slot.length += int(count[row])
                job.slot.pending = None
                if not job.ids:  # the last part: what was sampled is the answer's first token
                    self._take(job, token[row : row + 1], logprob[row : row + 1])

        return finish

    def _chunk(self, jobs: list[_Job]) -> Callable[[], None]:
        """Start decoding a chunk for each job; the result waits and stores it."""
        token = np.zeros(self.config.rows, np.int32)
        limit = np.zeros(self.config.rows, np.int32)
        for row, job in enumerate(jobs):
            token[row], limit[row] = job.out.ids[-1], job.limit
        slots = self._rows(jobs)
        buffer, sampled = self._decode(
            self._params,
            cache=self._cache,
            rows=slots,
            token_R=token,
            limit_R=limit,
            temperature=self._temperature,
            steps=self.config.chunk,
            used=self._used(jobs),
        )

        def finish() -> None:
            tokens, logprobs, counts = (np.asarray(leaf) for leaf in sampled)
            self._cache = self._write(self._cache, buffer, slots)
            for row, job in enumerate(jobs):
                count = int(counts[row])
                job.slot.length += count  # the pending token and all but the last sampled one
                self._take(job, tokens[row, :count], logprobs[row, :count])

        return finish

    def _used(self, jobs: list[_Job]) -> int:
        return _fit(max(job.slot.length for job in jobs), self.config.lengths)

    def _rows(self, jobs: list[_Job]) -> Rows:
        spare = Slot(self.config.slots)
        padded = [job.slot for job in jobs] + [spare] * (self.config.rows - len(jobs))
        return Rows(
            np.array([slot.index for slot in padded], np.int32),
            np.array([slot.length for slot in padded], np.int32),
            np.array([slot.seed for slot in padded], np.uint32),
            np.array([slot.drawn for slot in padded], np.int32),
        )

    def _take(self, job: _Job, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        job.out.ids += tokens.tolist()
        job.out.logprobs += logprobs.tolist()
        job.limit -= len(tokens)
        job.slot.drawn += len(tokens)
        job.slot.pending = int(tokens[-1])


def _fit(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; the largest when none does."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])

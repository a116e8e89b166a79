"""The cache against the full forward pass, and sampling from a distribution.

Shapes: R rows, W new tokens, n steps of a chunk, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import MODEL

from hsql_jax.losses import token_logprobs
from hsql_jax.model import ModelConfig, forward, head_matrix, init_params
from hsql_jax.model.decode import (
    Rows,
    decode,
    extend,
    init_cache,
    inverse_cdf,
    sample,
    unstack,
    write_rows,
)

UNTIED = dataclasses.replace(MODEL, tied=False, heads=6, kv_heads=3)
R, W, STEPS, LENGTH = 3, 10, 6, 40
SPARE = 4  # a slot for padding rows
NEVER = -1  # a stop token that is never sampled
PROMPTS = [list(range(7, 7 + size)) for size in (9, 4, 1)]


@functools.cache
def params(config: ModelConfig) -> Any:
    """Larger weights than a fresh model's, so that its distributions are far from uniform."""
    return jax.tree.map(lambda leaf: 2.0 * leaf, init_params(config, jax.random.key(0)))


write = jax.jit(write_rows)


@functools.cache
def compiled(config: ModelConfig) -> tuple[Any, Any]:
    feed = jax.jit(functools.partial(extend, config=config), static_argnames="used")
    chunk = jax.jit(functools.partial(decode, config=config), static_argnames=("steps", "used"))
    return feed, chunk


class Run:
    """Rows fed and decoded without an engine; row i works on slot 3 - i."""

    def __init__(self, config: ModelConfig, temperature: float, rows: Sequence[int] = range(R)):
        self.config, self.temperature = config, jnp.float32(temperature)
        self.rows = [*rows]  # which of PROMPTS take part, the others' places are padding
        self.cache = init_cache(config, SPARE + 1, LENGTH)
        self.ids: list[list[int]] = [[] for _ in range(R)]
        self.logprobs: list[list[float]] = [[] for _ in range(R)]
        self.cached = np.zeros(R, np.int32)
        self.drawn = np.zeros(R, np.int32)

    def state(self) -> Rows:
        slots = [3 - i if i in self.rows else SPARE for i in range(R)]
        return Rows(
            np.array(slots, np.int32),
            self.cached.copy(),
            np.arange(100, 100 + R, dtype=np.uint32),
            self.drawn.copy(),
        )

    def feed(self, new: Sequence[list[int]], sampled: bool = True) -> None:
        """Append known tokens; keep what is sampled after them, or not."""
        tokens, count = np.zeros((R, W), np.int32), np.ones(R, np.int32)
        for i in self.rows:
            tokens[i, : len(new[i])], count[i] = new[i], len(new[i])
        state = self.state()
        buffer, token, logprob = compiled(self.config)[0](
            unstack(params(self.config)),
            cache=self.cache,
            rows=state,
            tokens_RW=tokens,
            count_R=count,
            temperature=self.temperature,
            used=LENGTH,
        )
        self.cache = write(self.cache, buffer, state)
        for i in self.rows:
            self.ids[i] += new[i]
            self.cached[i] += len(new[i])
            if sampled:
                self.keep(i, [int(token[i])], [float(logprob[i])])

    def decode(self, limits: Sequence[int], stop: int = NEVER) -> list[int]:
        """Decode a chunk; return how many tokens each row sampled."""
        state = self.state()
        buffer, sampled = compiled(self.config)[1](
            unstack(params(self.config)),
            cache=self.cache,
            rows=state,
            token_R=np.array([ids[-1] if ids else 0 for ids in self.ids], np.int32),
            limit_R=np.array([limits[i] if i in self.rows else 0 for i in range(R)], np.int32),
            stop_id=jnp.int32(stop),
            temperature=self.temperature,
            steps=STEPS,
            used=LENGTH,
        )
        self.cache = write(self.cache, buffer, state)
        counts = np.asarray(sampled[2]).tolist()
        for i in self.rows:
            self.cached[i] += counts[i]
            self.keep(i, sampled[0][i, : counts[i]].tolist(), sampled[1][i, : counts[i]].tolist())
        return counts

    def keep(self, row: int, ids: list[int], logprobs: list[float]) -> None:
        self.ids[row] += ids
        self.logprobs[row] += logprobs
        self.drawn[row] += len(ids)


@functools.partial(jax.jit, static_argnums=1)
def trainer(params: Any, config: ModelConfig, ids: jax.Array, temperature: float) -> Any:
    """As the trainer computes it, for ids [T]: log-probs of the next tokens, and logits [T, V]."""
    tokens = ids[None]
    positions = jnp.arange(tokens.shape[1])[None]
    ones = jnp.ones_like(tokens)
    hidden = forward(params, config, tokens, ones, positions)
    head = head_matrix(params)
    targets = jnp.roll(tokens, -1, axis=1)
    logprobs, _ = token_logprobs(hidden, head, targets, ones, temperature=temperature)
    return logprobs[0], hidden[0] @ head


def recomputed(run: Run, row: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and modes at the row's sampled tokens, by a full forward pass."""
    ids, sampled = run.ids[row], len(run.logprobs[row])
    padded = jnp.asarray(ids + [0] * (LENGTH - len(ids)))
    logprobs, logits = trainer(params(run.config), run.config, padded, temperature)
    window = np.s_[len(ids) - sampled - 1 : len(ids) - 1]
    return np.asarray(logprobs)[window], np.asarray(logits).argmax(-1)[window]


def generated(config: ModelConfig, temperature: float, rows: Sequence[int] = range(R)) -> Run:
    """Prompts of different lengths, then two chunks."""
    run = Run(config, temperature, rows)
    run.feed(PROMPTS)
    run.decode([STEPS] * R)
    run.decode([STEPS] * R)
    return run


@pytest.mark.parametrize("config", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_cached_generation_equals_the_full_forward_pass(
    config: ModelConfig, temperature: float
) -> None:
    run = generated(config, temperature)
    for row in range(R):
        assert len(run.logprobs[row]) == 1 + 2 * STEPS
        logprobs, mode = recomputed(run, row, temperature or 1.0)
        np.testing.assert_allclose(run.logprobs[row], logprobs, atol=1e-5)
        is_mode = mode == run.ids[row][-len(mode) :]
        assert is_mode.all() if temperature == 0 else not is_mode.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_neighbours(temperature: float) -> None:
    together = generated(MODEL, temperature)
    for row in range(R):
        alone = generated(MODEL, temperature, rows=[row])
        assert alone.ids[row] == together.ids[row]
        np.testing.assert_allclose(alone.logprobs[row], together.logprobs[row], atol=1e-6)


def test_feeding_in_parts_equals_feeding_at_once() -> None:
    whole, parts = Run(MODEL, 1.0), Run(MODEL, 1.0)
    whole.feed([[*range(10, 20)]] * R)
    parts.feed([[*range(10, 13)]] * R, sampled=False)
    parts.feed([[*range(13, 20)]] * R)
    whole.decode([STEPS] * R)
    parts.decode([STEPS] * R)
    assert whole.ids == parts.ids
    np.testing.assert_allclose(whole.logprobs, parts.logprobs, atol=1e-5)


def test_a_row_ends_at_its_limit_or_its_stop_token() -> None:
    free = generated(MODEL, 1.0)
    answers = [ids[len(prompt) + 1 :] for ids, prompt in zip(free.ids, PROMPTS, strict=True)]
    stop = answers[1][2]
    run = Run(MODEL, 1.0)
    run.feed(PROMPTS)
    counts = run.decode([0, STEPS, 2], stop)
    assert counts[0] == 0
    assert counts[1] == answers[1].index(stop) + 1  # the stop token is sampled and counts
    assert counts[2] == min(2, ([*answers[2], stop]).index(stop) + 1)
    # What stood still goes on as if the chunk had not been.
    assert run.decode([STEPS, 0, 0])[0] == STEPS
    assert run.ids[0] == free.ids[0][: len(run.ids[0])]


# --- sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 9, 20, 1000])
def test_inverse_cdf_is_the_first_index_past_the_uniform(size: int) -> None:
    rng = np.random.default_rng(size)
    probs = rng.dirichlet(np.full(size, 0.5), 200).astype(np.float32)
    uniform = rng.uniform(size=200).astype(np.float32)
    index = np.asarray(inverse_cdf(jnp.asarray(probs), jnp.asarray(uniform)))
    cumulative = np.cumsum(probs.astype(np.float64), axis=-1)
    rows = np.arange(200)
    total = cumulative[:, -1]
    assert np.all(cumulative[rows, index] / total > uniform - 1e-5)
    assert np.all((cumulative[rows, index] - probs[rows, index]) / total < uniform + 1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1e-7, 0.5, 0.9999999, 1 - 2**-24])
def test_inverse_cdf_never_picks_probability_zero(uniform: float) -> None:
    size = 1000
    rng = np.random.default_rng(0)
    probs = np.zeros((300, size), np.float32)
    for row in probs:  # a few tokens have all the mass; first and last often have none
        kept = rng.choice(size, rng.integers(1, 6), replace=False)
        row[kept] = rng.dirichlet(np.full(len(kept), 0.1))
    index = np.asarray(inverse_cdf(jnp.asarray(probs), jnp.full(300, uniform, jnp.float32)))
    assert np.all(probs[np.arange(300), index] > 0)


def rows_of(count: int) -> Rows:
    zeros = np.zeros(count, np.int32)
    return Rows(zeros, zeros, np.full(count, 3, np.uint32), np.arange(count, dtype=np.int32))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_samples_follow_the_softmax(temperature: float) -> None:
    count, size = 8192, 20
    logits = np.random.default_rng(0).normal(size=size).astype(np.float32)
    tokens, logprobs = sample(
        jnp.broadcast_to(logits, (count, size)), rows_of(count), jnp.float32(temperature)
    )
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    seen = np.bincount(tokens, minlength=size)
    chi_square = np.sum((seen - count * probs) ** 2 / (count * probs))
    assert chi_square < 43.8  # 19 degrees of freedom: one seed in a thousand is above
    np.testing.assert_allclose(logprobs, np.log(probs)[np.asarray(tokens)], atol=1e-5)


def test_temperature_zero_is_greedy_with_logprobs_at_one() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    tokens, logprobs = sample(jnp.asarray(logits), rows_of(50), jnp.float32(0.0))
    assert np.array_equal(tokens, logits.argmax(-1))
    norm = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(logprobs, logits.max(-1) - norm, atol=1e-5)


def test_streams_differ_by_seed_and_by_counter() -> None:
    logits = jnp.zeros((400, 64))
    by_counter, _ = sample(logits, rows_of(400), jnp.float32(1.0))
    by_seed, _ = sample(
        logits,
        rows_of(400)._replace(seed=np.arange(400, dtype=np.uint32), drawn=np.zeros(400, np.int32)),
        jnp.float32(1.0),
    )
    again, _ = sample(logits, rows_of(400), jnp.float32(1.0))
    for tokens in (by_counter, by_seed):
        assert len(np.unique(tokens)) > 55
    assert np.array_equal(again, by_counter)
    assert np.mean(np.asarray(by_seed) == np.asarray(by_counter)) < 0.1

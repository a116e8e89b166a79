"""Chunked log-probabilities against a plain log-softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsql_jax.losses import token_logprobs

N, D, V = 22, 6, 33
CHUNKS = [1, 8, 22, 64]  # 8 leaves a remainder of 6; 64 is more than there are


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(N, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    return hidden, head, rng.integers(0, V, N)


def plain(hidden: np.ndarray, head: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities [N, V] in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def both(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    return token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_the_definition(chunk: int, temperature: float) -> None:
    hidden, head, targets = inputs()
    expected = plain(hidden, head, temperature)
    logprobs, entropy = both(hidden, head, targets, temperature, chunk)
    assert logprobs.shape == entropy.shape == (N,)
    np.testing.assert_allclose(logprobs, expected[np.arange(N), targets], atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1), atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 64])
def test_gradient_is_the_residual_of_the_softmax(chunk: int) -> None:
    """d logprob / d logits = (onehot - p) / T, and nothing comes through the entropy."""
    hidden, head, targets = inputs()
    weight, temperature = np.random.default_rng(1).normal(size=N), 0.7

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logprobs, entropy = both(hidden, head, jnp.asarray(targets), temperature, chunk)
        return jnp.sum(logprobs * weight) + jnp.sum(entropy)

    d_hidden, d_head = jax.grad(total, argnums=(0, 1))(hidden, head)
    residual = np.eye(V)[targets] - np.exp(plain(hidden, head, temperature))
    residual *= weight[:, None] / temperature
    np.testing.assert_allclose(d_hidden, residual @ head.T, atol=1e-5)
    np.testing.assert_allclose(d_head, hidden.T @ residual, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    hidden, head, targets = inputs()
    logprobs, entropy = both(1e4 * hidden, head, targets, 1.0, 8)
    assert np.isfinite(logprobs).all()
    np.testing.assert_allclose(entropy, 0.0, atol=1e-2)


def test_bfloat16_hidden_states_give_float32_results() -> None:
    hidden, head, targets = inputs()
    low = jnp.asarray(hidden, jnp.bfloat16)
    logprobs, _ = both(low, head, targets, 1.0, 8)
    assert logprobs.dtype == jnp.float32
    rounded = plain(
        np.asarray(low, np.float32), np.asarray(jnp.asarray(head, jnp.bfloat16), np.float32), 1.0
    )
    np.testing.assert_allclose(logprobs, rounded[np.arange(N), targets], atol=1e-4)

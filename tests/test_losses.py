"""Chunked log-probabilities against a plain log-softmax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from hsql_jax.losses import token_logprobs
from hsql_jax.sharding import MeshConfig, make_mesh

B, T, D, V = 2, 11, 6, 33
CHUNKS = [1, 8, 22, 64]  # 8 leaves a remainder of 6 tokens; 64 is more than there are
BLOCKS = [5, 11, 64]  # of 33 columns: 5 leaves a remainder, 11 none, 64 is more than there are
ALL = np.ones((B, T), np.float32)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    return hidden, head, rng.integers(0, V, (B, T))


def plain(hidden: np.ndarray, head: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities [B, T, V] in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("temperature", "chunk", "block", "keep"))
def both(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float,
    chunk: int,
    mask: jax.Array = ALL,
    block: int = 11,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array]:
    options = {"temperature": temperature, "chunk": chunk, "block": block, "keep": keep}
    return token_logprobs(hidden, head, targets, mask, **options)


def at(logprobs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The targets' entries [B, T] of [B, T, V]."""
    return np.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize(
    ("chunk", "block", "temperature"),
    [*((chunk, 11, 0.7) for chunk in CHUNKS), *((8, block, 1.0) for block in BLOCKS)],
)
def test_logprobs_and_entropy_equal_the_definition(
    chunk: int, block: int, temperature: float
) -> None:
    hidden, head, targets = inputs()
    expected = plain(hidden, head, temperature)
    logprobs, entropy = both(hidden, head, targets, temperature, chunk, ALL, block)
    assert logprobs.shape == entropy.shape == (B, T)
    np.testing.assert_allclose(logprobs, at(expected, targets), atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1), atol=1e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("chunk", "block"), [(8, 11), (64, 64), (8, 5)])
def test_gradient_is_the_residual_of_the_softmax(chunk: int, block: int, keep: bool) -> None:
    """d logprob / d logits = (onehot - p) / T, and nothing comes through the entropy."""
    hidden, head, targets = inputs()
    weight, temperature = np.random.default_rng(1).normal(size=(B, T)), 0.7

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logprobs, entropy = both(hidden, head, targets, temperature, chunk, ALL, block, keep)
        return jnp.sum(logprobs * weight) + jnp.sum(entropy)

    d_hidden, d_head = jax.grad(total, argnums=(0, 1))(hidden, head)
    residual = np.eye(V)[targets] - np.exp(plain(hidden, head, temperature))
    residual *= weight[..., None] / temperature
    np.testing.assert_allclose(d_hidden, residual @ head.T, atol=1e-5)
    np.testing.assert_allclose(d_head, np.einsum("btd,btv->dv", hidden, residual), atol=1e-5)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_masked_tokens_are_zero_and_change_nothing(chunk: int) -> None:
    """Rows with few, no and scattered loss tokens; values and gradients as with all computed."""
    hidden, head, targets = inputs()
    mask = np.zeros((3, T), np.float32)
    mask[0, [2, 7, 10]] = mask[2, ::2] = 1
    hidden, targets = np.concatenate([hidden, hidden[:1]]), np.concatenate([targets, targets[:1]])

    def total(hidden: jax.Array, head: jax.Array, computed: np.ndarray) -> jax.Array:
        logprobs, _ = both(hidden, head, jnp.asarray(targets), 1.0, chunk, computed)
        return jnp.sum(logprobs * mask)

    logprobs, entropy = both(hidden, head, targets, 1.0, chunk, mask)
    expected = plain(hidden, head, 1.0)
    np.testing.assert_allclose(logprobs, at(expected, targets) * mask, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1) * mask, atol=1e-5)
    grads = jax.grad(total, argnums=(0, 1))
    everything = np.ones_like(mask)
    for lean, full in zip(grads(hidden, head, mask), grads(hidden, head, everything), strict=True):
        np.testing.assert_allclose(lean, full, atol=1e-5)


def test_chunks_without_loss_tokens_are_not_computed() -> None:
    """The logits of a skipped chunk would be not-a-number."""
    hidden, head, targets = inputs()
    mask = np.zeros((B, T), np.float32)
    mask[:, 5] = 1
    broken = np.where(mask[..., None] == 1, hidden, np.nan)
    d_hidden = jax.grad(lambda h: both(h, head, jnp.asarray(targets), 1.0, B, mask)[0].sum())(
        jnp.asarray(broken)
    )
    assert np.isfinite(d_hidden).all()


def test_no_logits_but_a_piece_ever_exist() -> None:
    hidden, head, targets = inputs()
    gradient = jax.grad(lambda h, w: both(h, w, targets, 1.0, 4)[0].sum(), argnums=(0, 1))
    text = str(jax.make_jaxpr(gradient)(hidden, head))
    assert "f32[4,11]" in text  # chunk x block
    for size in (f"{B * T},{V}", f"{B},{T},{V}", f"4,{V}", f"{B * T + 2},11"):
        assert f"[{size}]" not in text


def test_temporary_memory_does_not_grow_with_the_vocabulary() -> None:
    """The compiler's report for one row of 512 tokens; plain logits are 512 x 4 bytes a column."""

    def temporary(columns: int) -> int:
        def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
            targets = jnp.zeros((1, 512), jnp.int32)
            options = {"chunk": 64, "block": 64}
            return token_logprobs(hidden, head, targets, jnp.ones((1, 512)), **options)[0].sum()

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 512, 8), (8, columns))]
        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*shapes).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    head_bytes = 8 * (16_384 - 1024) * 4
    assert temporary(16_384) - temporary(1024) <= 2 * head_bytes  # and not 512 x 4 x 15,360


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=2, context=2, slices=2)], ids=str
)
def test_split_over_a_mesh_equals_one_device(mesh: MeshConfig, keep: bool) -> None:
    """Rows and time with different numbers of loss tokens, some devices with none."""
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(4, 6, 8)).astype(np.float32)
    head = rng.normal(size=(8, 30)).astype(np.float32)
    targets, weight = rng.integers(0, 30, (4, 6)), rng.normal(size=(4, 6))
    mask = np.zeros((4, 6), np.float32)
    mask[0], mask[1, 2:4], mask[3, :1] = 1, 1, 1

    def total(hidden: jax.Array, head: jax.Array, mesh: Mesh | None) -> tuple[jax.Array, list]:
        options = {"chunk": 2, "block": 4, "keep": keep, "mesh": mesh}
        found = token_logprobs(hidden, head, targets, mask, **options)
        return jnp.sum(found[0] * weight), list(found)

    gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
    expected = jax.jit(functools.partial(gradient, mesh=None))(hidden, head)
    split = jax.jit(functools.partial(gradient, mesh=make_mesh(mesh)))(hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split, expected)


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
    np.testing.assert_allclose(logprobs, at(rounded, targets), atol=1e-4)

"""Token log-probabilities without ever holding [B, T, V] logits.

Shapes: B rows, T tokens a row, D model, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 512  # tokens whose logits exist at once


def token_logprobs(
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and the entropy (nats) of each distribution, both [B, T].

    Both are 0 where the mask is 0. Each row's loss tokens are moved to its front, and chunks of
    columns in which no row has any are skipped. The distribution is softmax(logits / temperature),
    the one that was sampled. Chunks are scanned and recomputed in the backward pass, so the largest
    buffer is [max(chunk, B), V] float32. No gradient flows through the entropy.
    """
    B, T, _ = hidden_BTD.shape
    columns = min(max(chunk // B, 1), T)
    order = jnp.argsort(mask_BT == 0, axis=1, stable=True)

    def split(values: jax.Array) -> jax.Array:
        """[B, T, ...] to [chunks, B, columns, ...], loss tokens first."""
        index = order.reshape(B, T, *(1,) * (values.ndim - 2))
        sorted_ = jnp.take_along_axis(values, index, axis=1)
        ends = [(0, 0), (0, -T % columns), *[(0, 0)] * (values.ndim - 2)]
        padded = jnp.pad(sorted_, ends)
        return jnp.moveaxis(padded.reshape(B, -1, columns, *values.shape[2:]), 1, 0)

    def join(values: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        sorted_ = jnp.moveaxis(values, 0, 1).reshape(B, -1)[:, :T]
        return jnp.take_along_axis(sorted_, jnp.argsort(order, axis=1), axis=1)

    def compute(h: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.matmul(h, head_DV.astype(h.dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        norm = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        fixed = jax.lax.stop_gradient(logits)
        mean_logit = jnp.sum(jax.nn.softmax(fixed) * fixed, axis=-1)
        return chosen - norm, jax.lax.stop_gradient(norm) - mean_logit

    def nothing(h: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(target.shape, jnp.float32)
        return zeros, zeros

    # Around the condition: inside it, each chunk's copy of the head would be kept for the gradient.
    @jax.checkpoint
    def step(_: None, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, list[jax.Array]]:
        h, target, loss_token = xs
        both = jax.lax.cond(jnp.any(loss_token), compute, nothing, h, target)
        return None, [jnp.where(loss_token, values, 0.0) for values in both]

    chunks = split(hidden_BTD), split(targets_BT), split(mask_BT != 0)
    _, (logprobs, entropy) = jax.lax.scan(step, None, chunks)
    return join(logprobs), join(entropy)

"""Token log-probabilities without ever holding [B, T, V] logits.

Shapes: N tokens, D model, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 1024  # tokens whose logits exist at once


def token_logprobs(
    hidden_ND: jax.Array,
    head_DV: jax.Array,
    targets_N: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and the entropy (nats) of each distribution, both [N].

    The distribution is softmax(logits / temperature), the one that was sampled. Chunks of tokens
    are scanned and recomputed in the backward pass, so the largest buffer is [chunk, V] float32.
    No gradient flows through the entropy.
    """
    N, D = hidden_ND.shape
    chunk = min(chunk, N)
    padded = -N % chunk
    hidden = jnp.pad(hidden_ND, ((0, padded), (0, 0))).reshape(-1, chunk, D)
    targets = jnp.pad(targets_N, (0, padded)).reshape(-1, chunk)

    @jax.checkpoint
    def step(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, target = xs
        logits = jnp.matmul(h, head_DV.astype(h.dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        norm = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        fixed = jax.lax.stop_gradient(logits)
        mean_logit = jnp.sum(jax.nn.softmax(fixed) * fixed, axis=-1)
        return None, (chosen - norm, jax.lax.stop_gradient(norm) - mean_logit)

    _, (logprobs, entropy) = jax.lax.scan(step, None, (hidden, targets))
    return logprobs.reshape(-1)[:N], entropy.reshape(-1)[:N]

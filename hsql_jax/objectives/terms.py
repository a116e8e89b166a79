"""The terms that objectives are made of, each a pure function with its equation."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from hsql_jax.objectives.base import LossSum, Tokens

KlKind = Literal["k1", "k2", "k3"]

# --- of groups -----------------------------------------------------------------------------------


def group_advantage(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean) / (std + 1e-6), equation (7); zeros when all rewards are equal."""
    return (centred(rewards) / (rewards.std() + 1e-6)).astype(np.float32)


def centred(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean, without the division by the deviation (Dr. GRPO, arXiv 2503.20783)."""
    return (rewards - rewards.mean()).astype(np.float32)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the others = G/(G-1) (r_i - mean) (RLOO, arXiv 2402.14740); G >= 2."""
    return (centred(rewards) * (rewards.size / max(rewards.size - 1, 1))).astype(np.float32)


def mixed_group(correct: np.ndarray) -> bool:
    """0 < #correct < G, equation (11): the only groups with something to learn."""
    return bool(0 < (correct > 0).sum() < correct.size)


def any_group(correct: np.ndarray) -> bool:
    """Every group trains."""
    return True


def ones(rewards: np.ndarray) -> np.ndarray:
    """Supervised trajectories all count the same."""
    return np.ones(rewards.shape, np.float32)


# --- of tokens -----------------------------------------------------------------------------------


def segment_sum(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """At each position [B, T], the sum of `values` over the position's own segment of its row."""
    T = values_BT.shape[1]

    def row(values: jax.Array, segments: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, segments, num_segments=T + 1)[segments]

    return jax.vmap(row)(values_BT, segment_ids_BT)


def trajectory_weights(tokens: Tokens) -> jax.Array:
    """1/N_i at each loss token of trajectory i, so that a trajectory's weights sum to one."""
    lengths = segment_sum(tokens.mask, tokens.segment_ids)
    return tokens.mask / jnp.maximum(lengths, 1.0)


def token_weights(tokens: Tokens) -> jax.Array:
    """1 at each loss token: a mean over all of them."""
    return tokens.mask


def log_ratio(tokens: Tokens) -> jax.Array:
    """log rho = log pi - log pi_old at loss tokens, zero elsewhere."""
    return (tokens.logprobs - tokens.old_logprobs) * tokens.mask


def clipped(ratio: jax.Array, advantages: jax.Array, eps_low: float, eps_high: float) -> jax.Array:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A), the inner term of equation (8)."""
    bounded = jnp.clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    return jnp.minimum(ratio * advantages, bounded * advantages)


def clipped_loss(
    tokens: Tokens, ratio: jax.Array, weights: jax.Array, eps_low: float, eps_high: float
) -> LossSum:
    """Weighted sum of the clipped term, with the share clipped and the distance to pi_old."""
    total = -jnp.sum(clipped(ratio, tokens.advantages, eps_low, eps_high) * weights)
    low = (ratio < 1.0 - eps_low) & (tokens.advantages < 0)
    high = (ratio > 1.0 + eps_high) & (tokens.advantages > 0)
    stats = {
        "clip_low": jnp.sum(low * tokens.mask),
        "clip_high": jnp.sum(high * tokens.mask),
    }
    return LossSum(total, jnp.sum(weights), stats | old_distance(tokens), log_ratio_peak(tokens))


def old_distance(tokens: Tokens) -> dict[str, jax.Array]:
    """The k3 estimate of the divergence from pi_old, for the log."""
    delta = jax.lax.stop_gradient(log_ratio(tokens))
    return {"kl": jnp.sum((jnp.exp(delta) - 1.0 - delta) * tokens.mask)}


def log_ratio_peak(tokens: Tokens) -> dict[str, jax.Array]:
    """The largest distance of a log-probability from pi_old's, for the log."""
    return {"logprob_gap": jnp.max(jnp.abs(jax.lax.stop_gradient(log_ratio(tokens))))}


def sampler_weights(tokens: Tokens, cap: float) -> jax.Array:
    """min(pi_old / pi_sampler, cap): what the engine's own numerics did to the sample, bounded.

    Truncated importance sampling, where pi_old is computed anew by the trainer. No gradient.
    """
    assert tokens.sampler_logprobs is not None, "Objective.recompute brings sampler_logprobs"
    gap = (tokens.old_logprobs - tokens.sampler_logprobs) * tokens.mask
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(gap), cap))


def reference_kl(tokens: Tokens, kind: KlKind) -> jax.Array:
    """An estimate [B, T] of KL(pi || pi_ref) at sampled tokens, with d = log pi - log pi_ref.

    k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. As a loss, k1 has a gradient of zero expectation
    on policy, k2 the divergence's own, k3 that of KL(pi_ref || pi).
    """
    assert tokens.ref_logprobs is not None, "Objective.reference brings ref_logprobs"
    d = (tokens.logprobs - tokens.ref_logprobs) * tokens.mask
    return {"k1": d, "k2": d * d / 2, "k3": jnp.exp(-d) - 1.0 + d}[kind]

"""Policy objectives as compositions of small pure functions.

An `Objective` says which groups of trajectories train (`keep`), what each trajectory is worth
(`advantage`) and what a token contributes (`loss`). Losses return sums and a weight, never means:
micro-batches, packing and devices then add up exactly. Equation numbers are the paper's.

Shapes: B rows, T time, G trajectories of one question. Rows are packed: `segment_ids` tell the
trajectories of a row apart, and everything per trajectory is computed per segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hsql_jax.errors import UserError
from hsql_jax.plugins import load_attribute


class Tokens(NamedTuple):
    """What a loss sees, each [B, T]; only positions with mask 1 may contribute."""

    logprobs: jax.Array  # of the policy that trains; the only input with a gradient
    old_logprobs: jax.Array  # of the policy that sampled
    advantages: jax.Array  # of the token's trajectory
    mask: jax.Array  # 1.0 at assistant tokens, the set T_i
    segment_ids: jax.Array  # 0 is padding


class LossSum(NamedTuple):
    """`total / weight` is the loss. For the log: `stats` sum over loss tokens, `peaks` maximise."""

    total: jax.Array
    weight: jax.Array
    stats: dict[str, jax.Array] = {}
    peaks: dict[str, jax.Array] = {}


class Objective(NamedTuple):
    """One way to turn rewards and log-probabilities into a gradient."""

    keep: Callable[[np.ndarray], bool]  # correctness of one group [G] -> does it train
    advantage: Callable[[np.ndarray], np.ndarray]  # rewards of one group [G] -> advantages [G]
    loss: Callable[[Tokens], LossSum]


# --- terms -------------------------------------------------------------------------------------


def group_advantage(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean) / (std + 1e-6), equation (7); zeros when all rewards are equal."""
    centred = rewards - rewards.mean()
    return (centred / (rewards.std() + 1e-6)).astype(np.float32)


def mixed_group(correct: np.ndarray) -> bool:
    """0 < #correct < G, equation (11): the only groups with something to learn."""
    return bool(0 < (correct > 0).sum() < correct.size)


def any_group(correct: np.ndarray) -> bool:
    """Every group trains."""
    return True


def ones(rewards: np.ndarray) -> np.ndarray:
    """Supervised trajectories all count the same."""
    return np.ones(rewards.shape, np.float32)


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
    delta = jax.lax.stop_gradient(log_ratio(tokens))
    low = (ratio < 1.0 - eps_low) & (tokens.advantages < 0)
    high = (ratio > 1.0 + eps_high) & (tokens.advantages > 0)
    stats = {
        "clip_low": jnp.sum(low * tokens.mask),
        "clip_high": jnp.sum(high * tokens.mask),
        "kl": jnp.sum((jnp.exp(delta) - 1.0 - delta) * tokens.mask),  # k3 estimate to pi_old
    }
    return LossSum(total, jnp.sum(weights), stats, {"logprob_gap": jnp.max(jnp.abs(delta))})


# --- objectives --------------------------------------------------------------------------------


def sft_loss(tokens: Tokens) -> LossSum:
    """-sum_t log pi(a_t | s_t) over assistant tokens, equation (6); the weight is their number."""
    total = -jnp.sum(tokens.logprobs * tokens.mask)
    return LossSum(total, jnp.sum(tokens.mask))


def sft() -> Objective:
    """Full-trajectory supervised fine-tuning, equation (6); also the static pairs of (3)."""
    return Objective(any_group, ones, sft_loss)


def grpo(eps: float = 0.2) -> Objective:
    """GRPO, equation (8): clipped token ratios, mean over a trajectory, mean over trajectories."""

    def loss(tokens: Tokens) -> LossSum:
        ratio = jnp.exp(log_ratio(tokens))
        return clipped_loss(tokens, ratio, trajectory_weights(tokens), eps, eps)

    return Objective(any_group, group_advantage, loss)


def gspo(eps: float = 3e-4) -> Objective:
    """GSPO, equations (9)-(10): one ratio a trajectory, exp(mean log ratio), clipped whole."""

    def loss(tokens: Tokens) -> LossSum:
        weights = trajectory_weights(tokens)
        ratio = jnp.exp(segment_sum(log_ratio(tokens) * weights, tokens.segment_ids))
        return clipped_loss(tokens, ratio, weights, eps, eps)

    return Objective(any_group, group_advantage, loss)


def dapo(eps_low: float = 0.20, eps_high: float = 0.28) -> Objective:
    """DAPO, equations (11)-(12): mixed groups only, asymmetric clip, mean over all loss tokens."""

    def loss(tokens: Tokens) -> LossSum:
        ratio = jnp.exp(log_ratio(tokens))
        return clipped_loss(tokens, ratio, tokens.mask, eps_low, eps_high)

    return Objective(mixed_group, group_advantage, loss)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "sft": sft,
    "grpo": grpo,
    "gspo": gspo,
    "dapo": dapo,
}


def resolve(name: str) -> Objective:
    """An objective by its name, or a user's own from `file.py:factory` or `module:factory`.

    The factory is called without arguments. `UserError` says what could not be found.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]()
    factory = load_attribute(name, known=sorted(OBJECTIVES))
    objective = factory()
    if not isinstance(objective, Objective):
        raise UserError(f"{name}: returned {type(objective).__name__}, not an Objective")
    return objective

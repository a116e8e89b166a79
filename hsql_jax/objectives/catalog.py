"""The objectives that ship, as compositions of `terms`, and how one is found by its name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hsql_jax.errors import UserError
from hsql_jax.objectives.base import LossSum, Objective, Tokens
from hsql_jax.objectives.terms import (
    KlKind,
    any_group,
    centred,
    clipped_loss,
    group_advantage,
    leave_one_out,
    log_ratio,
    log_ratio_peak,
    mixed_group,
    old_distance,
    ones,
    reference_kl,
    sampler_weights,
    segment_sum,
    token_weights,
    trajectory_weights,
)
from hsql_jax.plugins import load_attribute


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
        return clipped_loss(tokens, ratio, token_weights(tokens), eps_low, eps_high)

    return Objective(mixed_group, group_advantage, loss)


def dr_grpo(eps: float = 0.2, budget: int = 4096) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two normalisations, which favour some lengths.

    The advantage is not divided by the deviation, and a trajectory's sum of tokens is divided by
    the constant `budget`, tokens that one may have, instead of its own length.
    """

    def loss(tokens: Tokens) -> LossSum:
        parts = clipped_loss(tokens, jnp.exp(log_ratio(tokens)), tokens.mask, eps, eps)
        return parts._replace(weight=budget * jnp.sum(trajectory_weights(tokens)))

    return Objective(any_group, centred, loss)


def cispo(cap: float = 5.0) -> Objective:
    """CISPO (arXiv 2506.13585): -min(rho, cap) A log pi, the ratio a constant; mean over tokens.

    Where PPO's clipping takes a token's gradient away, here its weight is bounded.
    """

    def loss(tokens: Tokens) -> LossSum:
        ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(tokens)))
        weights = jnp.minimum(ratio, cap) * tokens.mask
        total = -jnp.sum(weights * tokens.advantages * tokens.logprobs)
        stats = {"clip_high": jnp.sum((ratio > cap) * tokens.mask)} | old_distance(tokens)
        return LossSum(total, jnp.sum(tokens.mask), stats, log_ratio_peak(tokens))

    return Objective(mixed_group, group_advantage, loss)


def rloo() -> Objective:
    """RLOO (arXiv 2402.14740): -A_i log pi(y_i), mean over trajectories.

    The baseline is the mean reward of the group's others. There is no ratio: the gradient is exact
    for the first update of an iteration only.
    """

    def loss(tokens: Tokens) -> LossSum:
        total = -jnp.sum(tokens.advantages * tokens.logprobs * tokens.mask)
        weight = jnp.sum(trajectory_weights(tokens))
        return LossSum(total, weight, old_distance(tokens), log_ratio_peak(tokens))

    return Objective(any_group, leave_one_out, loss)


# --- objectives around an objective ------------------------------------------------------------


def with_kl(
    inner: Objective,
    weights: Callable[[Tokens], jax.Array],
    coefficient: float = 1e-3,
    kind: KlKind = "k3",
) -> Objective:
    """`inner` plus `coefficient` times the divergence from the policy at the start.

    `weights` are those of `inner`, of which its weight is the sum: `trajectory_weights` or
    `token_weights`.
    """

    def loss(tokens: Tokens) -> LossSum:
        parts = inner.loss(tokens)
        divergence = reference_kl(tokens, kind)
        stats = {"kl_start": jax.lax.stop_gradient(jnp.sum(divergence * tokens.mask))}
        total = parts.total + coefficient * jnp.sum(divergence * weights(tokens))
        return parts._replace(total=total, stats=parts.stats | stats)

    return inner._replace(loss=loss, reference=True)


def truncated(inner: Objective, cap: float = 2.0) -> Objective:
    """`inner` with every token weighed by min(pi_old / pi_sampler, cap).

    Truncated importance sampling, for an engine whose numerics differ from the trainer's. The
    inner term is linear in A for weights above zero, so they are put on the advantages.
    """

    def loss(tokens: Tokens) -> LossSum:
        weights = sampler_weights(tokens, cap)
        parts = inner.loss(tokens._replace(advantages=tokens.advantages * weights))
        stats = parts.stats | {"truncated": jnp.sum((weights >= cap) * tokens.mask)}
        return parts._replace(stats=stats)

    return inner._replace(loss=loss, recompute=True)


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "sft": sft,
    "grpo": grpo,
    "gspo": gspo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "cispo": cispo,
    "rloo": rloo,
    "grpo_kl": lambda: with_kl(grpo(), trajectory_weights),
    "dapo_tis": lambda: truncated(dapo()),
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

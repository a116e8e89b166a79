"""What every objective must hold to, and the trajectories that it is held to it with.

Each check is a function of an `Objective` that raises `Broken` with the reason. N: tokens of a
trajectory, G: trajectories of a group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hsql_jax.data import Batch, Example, assemble
from hsql_jax.objectives.base import LossSum, Objective, Tokens

CLOSE = 1e-5  # relative, float32


class Broken(Exception):
    """An objective does not hold to a check."""


# --- trajectories to try it with ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Per token [N]: log-probabilities of four policies, and the mask; one advantage."""

    logprobs: np.ndarray
    old: np.ndarray
    sampler: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    advantage: float


def trajectory(seed: int, mask: str, advantage: float, off_policy: float) -> Trajectory:
    """Random log-probabilities that differ by about `off_policy`; the first token has no target."""
    rng = np.random.default_rng(seed)
    size = len(mask)
    logprobs = -rng.uniform(0.1, 3.0, size).astype(np.float32)
    old = (logprobs + off_policy * rng.normal(size=size)).astype(np.float32)
    sampler = (old + 0.5 * rng.normal(size=size)).astype(np.float32)
    reference = (logprobs + 0.5 * rng.normal(size=size)).astype(np.float32)
    return Trajectory(logprobs, old, sampler, reference, np.array([*map(int, mask)]), advantage)


# Ratios on both sides of every usual bound, for either sign of the advantage.
TRAJECTORIES = (
    trajectory(0, "0011101", 1.2, off_policy=0.5),
    trajectory(1, "01101", -0.8, off_policy=0.5),
    trajectory(2, "00111111", 0.5, off_policy=1e-4),
    trajectory(3, "0111", -1.5, off_policy=2e-3),
    trajectory(4, "011", 0.7, off_policy=2e-3),
    trajectory(5, "0001", -0.4, off_policy=1.0),
)
ONE_A_ROW = ((0,), (1,), (2,), (3,), (4,), (5,))
PACKED = ((0, 1), (2, 3), (4, 5))
TIGHT, WIDE = (6, 8), (7, 33)  # shapes [B, T]: the trajectories alone, and with room
LAYOUTS = {
    "wide": (ONE_A_ROW, WIDE),
    "packed": (PACKED, WIDE),
    "packed in another order": (((5, 3, 4), (2,), (1, 0)), WIDE),
    "one row": (((3, 0, 5, 1, 4, 2),), WIDE),
    "tight": (ONE_A_ROW, TIGHT),
}
Rows = Sequence[Sequence[int]]


def lay_out(
    rows: Rows,
    shape: tuple[int, int] = WIDE,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
) -> Tokens:
    """The trajectories of each row as tokens [B, T], packed by the same code as in training."""

    def batch(field: str) -> Batch:
        members = [
            Example(np.zeros(len(t.mask), int), t.mask, getattr(t, field), t.advantage)
            for t in trajectories
        ]
        return assemble([[members[i] for i in row] for row in rows], shape[1], shape[0])

    now, *others = (batch(field) for field in ("logprobs", "old", "sampler", "reference"))
    old, sampler, reference = (other.old_logprobs for other in others)
    return Tokens(
        now.old_logprobs,
        old,
        now.advantages,
        now.loss_mask,
        now.segment_ids,
        sampler,
        reference,
    )


Evaluate = Callable[[Tokens], tuple[LossSum, np.ndarray]]


@functools.lru_cache(maxsize=16)  # every check asks anew, and compiling is most of its time
def evaluator(objective: Objective) -> Evaluate:
    """A function to the sums, and the gradient [B, T] of the total in the log-probabilities."""

    @jax.jit
    def gradient(tokens: Tokens) -> tuple[jax.Array, LossSum]:
        def total(logprobs: jax.Array) -> tuple[jax.Array, LossSum]:
            parts = objective.loss(tokens._replace(logprobs=logprobs))
            return parts.total, parts

        return jax.grad(total, has_aux=True)(tokens.logprobs)

    def evaluate(tokens: Tokens) -> tuple[LossSum, np.ndarray]:
        found, parts = gradient(tokens)
        return jax.tree.map(float, parts), np.asarray(found)

    return evaluate


def by_trajectory(gradient: np.ndarray, rows: Rows) -> dict[int, np.ndarray]:
    """Each trajectory's gradient at the tokens that are targets, [N - 1]."""
    found = {}
    for row, members in enumerate(rows):
        start = 0
        for i in members:
            size = len(TRAJECTORIES[i].mask)
            found[i] = gradient[row, start : start + size - 1]
            start += size
    return found


# --- the checks --------------------------------------------------------------------------------


def groups(objective: Objective) -> None:
    """`keep` gives a bool, `advantage` one finite number a trajectory, whatever the rewards."""
    for rewards in ([0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.25, 1.0, 0.0], [1.0]):
        group = np.array(rewards, np.float32)
        kept = objective.keep((group > 0).astype(np.int32))
        _expect(isinstance(kept, bool), f"keep of {rewards} is {kept!r}, not True or False")
        found = np.asarray(objective.advantage(group))
        _expect(
            found.shape == group.shape and bool(np.all(np.isfinite(found))),
            f"advantage of {rewards} is {found}: give {group.size} finite numbers",
        )


def masked_tokens(objective: Objective) -> None:
    """Tokens outside the mask change nothing and get no gradient."""
    evaluate = evaluator(objective)
    tokens: Any = lay_out(PACKED)
    parts, gradient = evaluate(tokens)
    masked = tokens.mask == 0
    _expect(
        bool(np.all(gradient[masked] == 0)),
        "a token outside the mask has a gradient; multiply by tokens.mask",
    )
    noise = (50 * np.random.default_rng(0).normal(size=masked.shape) * masked).astype(np.float32)
    noisy = tokens._replace(
        logprobs=tokens.logprobs + noise,
        old_logprobs=tokens.old_logprobs - noise,
        sampler_logprobs=tokens.sampler_logprobs + 2 * noise,
        ref_logprobs=tokens.ref_logprobs - 2 * noise,
    )
    changed, changed_gradient = evaluate(noisy)
    _expect(
        changed == parts and np.array_equal(changed_gradient, gradient),
        f"other log-probabilities outside the mask change {parts} to {changed}",
    )


def zero_advantage(objective: Objective) -> None:
    """Without an advantage nothing is learned, and the trajectories still count in the mean."""
    if objective.reference:  # the divergence is learned from, whatever the reward
        return
    if len(set(np.asarray(objective.advantage(np.array([0.0, 1.0, 0.0], np.float32))))) == 1:
        return  # as in supervised training, trajectories are all worth the same
    evaluate = evaluator(objective)
    equal = [dataclasses.replace(t, advantage=0.0) for t in TRAJECTORIES]
    parts, gradient = evaluate(lay_out(PACKED, trajectories=equal))
    _expect(
        parts.total == 0.0 and bool(np.all(gradient == 0)),
        f"with all advantages zero the total is {parts.total}, the gradient up to "
        f"{np.abs(gradient).max():.3g}",
    )
    weight = evaluate(lay_out(PACKED))[0].weight
    _expect(parts.weight == weight, f"advantages change the weight, {weight} to {parts.weight}")


def layouts(objective: Objective) -> None:
    """Padding, packing and the order of rows change nothing."""
    evaluate = evaluator(objective)
    reference, expected = evaluate(lay_out(*LAYOUTS["wide"]))
    wanted = by_trajectory(expected, ONE_A_ROW)
    for name, (rows, shape) in LAYOUTS.items():
        parts, gradient = evaluate(lay_out(rows, shape))
        for what, left, right in _pairs(reference, parts):
            _expect(_close(left, right), f"{what} is {left:.7g} one a row, {right:.7g} {name}")
        for i, found in by_trajectory(gradient, rows).items():
            _expect(
                _close(found, wanted[i]), f"trajectory {i} has another gradient where it is {name}"
            )


def micro_batches(objective: Objective) -> None:
    """Sums over micro-batches add up to those of the whole: no mean inside the loss."""
    evaluate = evaluator(objective)
    parts, gradient = evaluate(lay_out(PACKED))
    for cut in (1, 2):
        split = [(rows, *evaluate(lay_out(rows))) for rows in (PACKED[:cut], PACKED[cut:])]
        found = np.concatenate([one[: len(rows)] for rows, _, one in split])
        _expect(
            _close(found, gradient[: len(PACKED)]),
            "a token's gradient depends on the micro-batch it is in; return sums, not means",
        )
        whole = _named(parts)
        summed = {n: sum(_named(part)[n] for _, part, _ in split) for n in whole}
        for name, value in whole.items():
            _expect(
                _close(summed[name], value),
                f"{name} of two micro-batches adds up to {summed[name]:.7g}, of one it is "
                f"{value:.7g}; return sums, not means",
            )


def padding(objective: Objective) -> None:
    """A batch of padding weighs nothing."""
    parts, gradient = evaluator(objective)(lay_out([]))
    _expect(
        parts.total == parts.weight == 0.0 and bool(np.all(gradient == 0)),
        f"a batch of padding has the total {parts.total} and the weight {parts.weight}",
    )


def finite(objective: Objective) -> None:
    """Far off policy, and where a token's probability was nothing, the gradient is a number."""
    far = [
        dataclasses.replace(t, old=t.logprobs + np.float32(gap), sampler=t.logprobs)
        for t, gap in zip(TRAJECTORIES, (-20, 20, -60, 60, 0, 5), strict=True)
    ]
    parts, gradient = evaluator(objective)(lay_out(PACKED, trajectories=far))
    _expect(
        bool(np.isfinite(parts.total)) and bool(np.all(np.isfinite(gradient))),
        f"log ratios of up to 60 give the total {parts.total}; bound the ratio",
    )


CHECKS: tuple[Callable[[Objective], None], ...] = (
    groups,
    masked_tokens,
    zero_advantage,
    layouts,
    micro_batches,
    padding,
    finite,
)


def _expect(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


def _close(left: Any, right: Any) -> bool:
    return bool(np.allclose(left, right, rtol=CLOSE, atol=1e-7))


def _named(parts: LossSum) -> dict[str, float]:
    sums = {"total": parts.total, "weight": parts.weight}
    return {n: float(v) for n, v in {**sums, **parts.stats}.items()}


def _pairs(left: LossSum, right: LossSum) -> list[tuple[str, float, float]]:
    named = [_named(parts) | parts.peaks for parts in (left, right)]
    return [(name, float(value), float(named[1][name])) for name, value in named[0].items()]

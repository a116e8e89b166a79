"""Intervals for accuracies and for paired changes between two policies on the same tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple


class Change(NamedTuple):
    """A paired mean difference (after - before) with its bootstrap interval."""

    mean: float
    low: float
    high: float


def wilson_interval(successes: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a share, (0, 1) where nothing was counted.

    Unlike the normal approximation it stays inside [0, 1] and has width at 0 and at 1.
    Raises ValueError where `successes` lies outside [0, total].
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes must be between 0 and total, got {successes} of {total}")
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share, scale = successes / total, 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Change:
    """Return the mean of `after - before` over tasks and its percentile bootstrap interval.

    Both sequences hold one score a task, in the same order of tasks, so that the difficulty of
    the tasks cancels. Raises ValueError where the lengths differ or are 0.
    """
    if len(before) != len(after) or not before:
        raise ValueError(
            f"paired scores need equal, non-zero lengths, got {len(before)} and {len(after)}"
        )
    differences = [b - a for a, b in zip(before, after, strict=True)]
    count, rng = len(differences), random.Random(seed)
    means = sorted(sum(rng.choices(differences, k=count)) / count for _ in range(resamples))
    tail = (1 - level) / 2
    low = means[math.floor(tail * (resamples - 1))]
    high = means[math.ceil((1 - tail) * (resamples - 1))]
    return Change(sum(differences) / count, low, high)


def significance_text(mean: float, low: float, high: float) -> str:
    """Say in words what the interval of a change allows to claim."""
    if low <= 0 <= high:
        return "no significant change"
    return "significant gain" if mean > 0 else "significant loss"

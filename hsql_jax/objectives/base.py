"""What an objective is.

It says which groups of trajectories train (`keep`), what each trajectory is worth (`advantage`) and
what a token contributes (`loss`). Losses return sums and a weight, never means: micro-batches,
packing and devices then add up exactly.

Shapes, in this package: B rows, T time, G trajectories of one question. Rows are packed:
`segment_ids` tell the trajectories of a row apart, and everything per trajectory is computed per
segment. Equation numbers without a name are the HarnessSQL paper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np


class Tokens(NamedTuple):
    """What a loss sees, each [B, T]; only positions with mask 1 may contribute."""

    logprobs: jax.Array  # of the policy that trains; the only input with a gradient
    old_logprobs: jax.Array  # of the policy before this iteration's updates
    advantages: jax.Array  # of the token's trajectory
    mask: jax.Array  # 1.0 at assistant tokens, the set T_i
    segment_ids: jax.Array  # 0 is padding
    sampler_logprobs: jax.Array | None = None  # as the engine had them, where old are computed anew
    ref_logprobs: jax.Array | None = None  # of the policy at the start, for `Objective.reference`


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
    reference: bool = False  # the loss reads `ref_logprobs`: a forward pass more an update
    recompute: bool = False  # the loss reads `sampler_logprobs`: the trainer computes the old ones

"""A model and trajectories as small as can be, for tests of the step, checkpoints and rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsql_jax.data import Batch, Example, assemble
from hsql_jax.model import ModelConfig
from hsql_jax.sft import stack

MODEL = ModelConfig(
    vocab_size=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=48, remat="full"
)
ROWS, LENGTH = 8, 24


def examples(count: int, seed: int = 0) -> list[Example]:
    """Sequences of 6 to 12 tokens with two policy turns, an advantage and sampler log-probs."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        size = int(rng.integers(6, 13))
        ids = rng.integers(0, MODEL.vocab_size, size)
        mask = (np.arange(size) >= 2) & (np.arange(size) != 4)
        off_policy = 0.6 * (-1) ** (index // 2)  # on average, of a fresh model's log-probabilities
        logprobs = (off_policy + rng.uniform(-4.6, -3.8, size)).astype(np.float32)
        made.append(Example(ids, mask.astype(int), logprobs, (-1) ** index * (0.5 + index % 3)))
    return made


def batch_of(rows: Sequence[Sequence[Example]], micro_batches: int = 1) -> Batch:
    """A batch of leaves [A, ROWS / A, LENGTH]; missing rows are padding."""
    size = ROWS // micro_batches
    parts = [rows[i * size : (i + 1) * size] for i in range(micro_batches)]
    return stack([assemble(part, LENGTH, size) for part in parts])

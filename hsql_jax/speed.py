"""How fast a step is: tokens, operations counted by hand, the share of the devices' peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.data import Batch
from hsql_jax.model import ModelConfig
from hsql_jax.topology import peak_flops


def forward_flops(
    model: ModelConfig, rows: int, tokens: float, seen: float, heads: float | None = None
) -> float:
    """Operations of a forward pass over `rows` x `tokens`, each seeing `seen` keys on average.

    Matrix products alone, two operations a multiplication; looking up an embedding is none.
    `heads` tokens of a row get logits (default: all).
    """
    D, H, K, Q, F = model.d_model, model.heads, model.kv_heads, model.head_dim, model.d_ff
    layer = D * (H + 2 * K) * Q + H * Q * D + 3 * D * F + 2 * H * Q * seen
    head = D * model.vocab_size * (tokens if heads is None else heads)
    return 2.0 * rows * (tokens * model.layers * layer + head)


def train_flops(model: ModelConfig, tokens: float, seen: float, heads: float) -> float:
    """Operations that an update needs: 6 (tokens · N + heads · D V) + 12 L H Q · tokens · seen.

    N are the weights of all layers' products; `heads` tokens have a loss, the others need no
    logits. The backward pass is twice the forward one; what it computes again is not counted.
    """
    return 3 * forward_flops(model, 1, tokens, seen, heads)


def mesh_peak(mesh: Mesh) -> float | None:
    """Operations a second, bfloat16, of all devices of a mesh; None if their kind is not known."""
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    return None if peak is None else peak * mesh.size


@jax.jit
def count_tokens(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The tokens of a batch, padding not counted, and the keys that all of them together see."""
    real = batch.segment_ids > 0
    return jnp.sum(real, dtype=jnp.float32), jnp.sum(real * (batch.positions + 1.0))


class Meter:
    """The speed of every step of `model` on devices of `peak` operations a second together."""

    def __init__(
        self,
        model: ModelConfig,
        peak: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._peak, self._clock = model, peak, clock
        self._last, self._waited = clock(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = self._clock()
        yield
        self._waited += self._clock() - begun

    def take(self, batch: Batch) -> None:
        """Count the step's tokens, beside its computation."""
        self._counts = count_tokens(batch)

    def lap(self, loss_tokens: float) -> dict[str, float]:
        """The figures of the step that ends now; `loss_tokens` of its tokens have a loss.

        `data_wait` is the share of its seconds that waited for data. `mfu`, the model's operations
        as a share of the devices' bfloat16 peak, is there where that is known.
        """
        now = self._clock()
        seconds, waited = now - self._last, self._waited
        self._last, self._waited = now, 0.0
        tokens, seen = (float(count) for count in self._counts)
        values = {
            "step_s": seconds,
            "data_wait": waited / seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
        }
        if self._peak is not None:
            flops = train_flops(self._model, tokens, seen / tokens, loss_tokens)
            values["mfu"] = flops / (seconds * self._peak)
        return values


@contextmanager
def trace(folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Give a function to call after every step: JAX's profiler records `steps`, from the third on.

    A run that ends before them keeps what was recorded.
    """
    done = 0

    def after_step() -> None:
        nonlocal done
        done += 1
        if steps and done == 2:
            jax.profiler.start_trace(folder)
        if steps and done == 2 + steps:
            jax.profiler.stop_trace()

    try:
        yield after_step
    finally:
        if 2 <= done < 2 + steps:
            jax.profiler.stop_trace()

"""Optimizers and schedules: a config becomes one `optax.GradientTransformation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
import optax.contrib

from hsql_jax.plugins import load_attribute


@dataclass(frozen=True)
class OptimConfig:
    """What an optimizer factory may read. Learning rates are peaks of the schedule."""

    name: str = "adamw"  # adamw, muon, or FILE.py:factory / MODULE:factory
    learning_rate: float = 1e-5
    gain_learning_rate: float | None = None  # norm gains; None: as the rest
    adam_learning_rate: float = 3e-3  # muon: everything that is not a stacked matrix
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0  # matrices only
    momentum_dtype: str | None = None  # of the first moments; None: the parameters'
    clip_norm: float = 1.0  # global gradient norm
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup: float = 0.05  # share of the steps
    final: float = 0.0  # last learning rate as a share of the peak

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup = {self.warmup} is a share of the steps: give 0 <= x < 1")


def schedule(config: OptimConfig, peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak`, then the configured decay over the rest of `steps`."""
    warm = round(config.warmup * steps)
    rest = max(steps - warm, 1)
    decay: optax.Schedule = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final),
        "linear": optax.linear_schedule(peak, config.final * peak, rest),
    }[config.schedule]
    # The first update already moves: step 0 has rate peak / (warm + 1).
    return optax.join_schedules(
        [optax.linear_schedule(peak / (warm + 1), peak, warm), decay], [warm]
    )


def is_gain(path: Any) -> bool:
    """True for the norm gains of the parameter tree (`attn_norm`, `q_norm`, ...)."""
    return bool(path) and str(path[-1].key).endswith("norm")


def _mask(select: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map_with_path(lambda path, _: select(path), params)


def adamw(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """AdamW (Adam when weight_decay is 0), decay on matrices only."""
    return optax.adamw(
        schedule(config, config.learning_rate, steps),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mu_dtype=config.momentum_dtype,
        mask=_mask(lambda path: not is_gain(path)),
    )


def muon(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Muon on the layers' stacked [L, in, out] matrices, Adam on embedding, head and gains."""
    stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def dimensions(params: Any) -> Any:
        return jax.tree.map(lambda leaf: stacked if leaf.ndim == 3 else None, params)

    return optax.contrib.muon(
        schedule(config, config.learning_rate, steps),
        weight_decay=config.weight_decay,
        mu_dtype=config.momentum_dtype,
        adam_learning_rate=schedule(config, config.adam_learning_rate, steps),
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=dimensions,
    )


OPTIMIZERS: dict[str, Callable[[OptimConfig, int], optax.GradientTransformation]] = {
    "adamw": adamw,
    "muon": muon,
}


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Gradient clipping, the named optimizer, and the gains' own learning rate.

    A user's factory has the signature `(OptimConfig, steps) -> optax.GradientTransformation`.
    """
    factory = OPTIMIZERS.get(config.name) or load_attribute(config.name, known=sorted(OPTIMIZERS))
    parts = [optax.clip_by_global_norm(config.clip_norm), factory(config, steps)]
    if config.gain_learning_rate is not None:
        # Muon leaves the gains to its Adam, at that one's rate.
        base = config.adam_learning_rate if config.name == "muon" else config.learning_rate
        ratio = config.gain_learning_rate / base
        parts.append(optax.masked(optax.scale(ratio), _mask(is_gain)))
    return optax.chain(*parts)

"""Optimizers and schedules: a config becomes one `optax.GradientTransformation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from hsql_jax.plugins import load_attribute


@dataclass(frozen=True)
class OptimConfig:
    """What an optimizer factory may read. Learning rates are peaks of the schedule."""

    name: str = "adamw"  # one of OPTIMIZERS, or FILE.py:factory / MODULE:factory
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
    ema: float | None = None  # decay of averaged parameters, which are then evaluated; None: none

    def __post_init__(self) -> None:
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise ValueError(f"ema = {self.ema} is a decay: give 0 < x < 1, such as 0.999")
        if self.ema is not None and self.name == "schedule_free":
            raise ValueError("ema: schedule_free averages parameters itself; leave ema out")
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


def is_matrix(path: Any) -> bool:
    """True for what weight decay pulls on: all but the norm gains."""
    return not is_gain(path)


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
        mask=_mask(is_matrix),
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


def adafactor(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Adafactor: second moments as rows and columns, no first ones, steps relative to the weights.

    The learning rate is a share of an array's root mean square, where the layers of a stack count
    as one array. Decay is as AdamW's: the rate times `weight_decay`.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(config.weight_decay, _mask(is_matrix)),
        optax.scale_by_learning_rate(schedule(config, config.learning_rate, steps)),
    )


def lion(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Lion: the sign of a momentum. Its rate is a third to a tenth of AdamW's, b2 about 0.99."""
    return optax.lion(
        schedule(config, config.learning_rate, steps),
        b1=config.b1,
        b2=config.b2,
        mu_dtype=config.momentum_dtype,
        weight_decay=config.weight_decay,
        mask=_mask(is_matrix),
    )


def schedule_free(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Schedule-free AdamW: the average of the iterates in place of momentum and decay of the rate.

    Meant for `schedule = "constant"`. Evaluate the average, which `eval_params` gives.
    """
    rate = schedule(config, config.learning_rate, steps)
    base = optax.chain(
        optax.scale_by_rms(decay=config.b2, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(config.weight_decay, _mask(is_matrix)),
        optax.scale_by_learning_rate(rate),
        *gain_rate(config),
    )
    return optax.contrib.schedule_free(base, rate, b1=config.b1)


Factory = Callable[[OptimConfig, int], optax.GradientTransformation]
OPTIMIZERS: dict[str, Factory] = {
    "adafactor": adafactor,
    "adamw": adamw,
    "lion": lion,
    "muon": muon,
    "schedule_free": schedule_free,
}


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Gradient clipping, the named optimizer, the gains' own learning rate, the average.

    A user's factory has the signature `(OptimConfig, steps) -> optax.GradientTransformation`.
    """
    factory = OPTIMIZERS.get(config.name) or load_attribute(config.name, known=sorted(OPTIMIZERS))
    parts = [optax.clip_by_global_norm(config.clip_norm), factory(config, steps)]
    if factory is not schedule_free:  # which has it inside
        parts += gain_rate(config)
    if config.ema is not None:
        parts.append(average(config.ema))
    return optax.chain(*parts)


def gain_rate(config: OptimConfig) -> list[optax.GradientTransformation]:
    """What scales the updates of the norm gains to `gain_learning_rate`, if they have their own."""
    if config.gain_learning_rate is None:
        return []
    # Muon leaves the gains to its Adam, at that one's rate.
    base = config.adam_learning_rate if config.name == "muon" else config.learning_rate
    return [optax.masked(optax.scale(config.gain_learning_rate / base), _mask(is_gain))]


# --- averages -------------------------------------------------------------------------------------


class AverageState(NamedTuple):
    """An average of the parameters over the steps, in float32."""

    average: Any


def average(decay: float) -> optax.GradientTransformation:
    """Changes no update, and keeps average := decay * average + (1 - decay) * parameters."""

    def init(params: Any) -> AverageState:
        return AverageState(jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params))

    def update(updates: Any, state: AverageState, params: Any) -> tuple[Any, AverageState]:
        after = optax.apply_updates(params, updates)
        moved = jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), state.average, after)
        return updates, AverageState(moved)

    return optax.GradientTransformation(init, update)


def eval_params(opt_state: Any, params: Any) -> Any:
    """The parameters to evaluate and keep: the average of an optimizer that has one, or `params`.

    An average is that of `OptimConfig.ema` or of `schedule_free`.
    """
    kinds = AverageState, optax.contrib.ScheduleFreeState
    for part in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(part, AverageState):
            return jax.tree.map(lambda a, p: a.astype(p.dtype), part.average, params)
        if isinstance(part, optax.contrib.ScheduleFreeState):
            return optax.contrib.schedule_free_eval_params(part, params)
    return params

"""Schedules, the optimizers' first steps, and the learning rate of each kind of parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hsql_jax.errors import UserError
from hsql_jax.optim import OptimConfig, make_optimizer, schedule

USERS = f"{Path(__file__).parent / 'fixtures' / 'sign_descent.py'}:sign_descent"
PEAK, GAIN_PEAK, ADAM_PEAK = 2e-3, 5e-2, 7e-3
NADAM = 1 + 0.9 / 1.9  # Muon's Adam looks ahead: its first step is longer by b1 / (1 + b1)
GAINS = ("attn_norm", "final_norm")


def tree(seed: int, scale: float = 1.0) -> dict[str, Any]:
    """A tree with the names and ranks of the model's: V 9, D 6, L 2, out 8."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    layers = {"q": normal(2, 6, 8), "down": normal(2, 8, 6), "attn_norm": normal(2, 6)}
    return {"embed": normal(9, 6), "layers": layers, "final_norm": normal(6)}


def flat(updates: Any) -> dict[str, np.ndarray]:
    return {
        str(path[-1].key): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(updates)
    }


def first_update(config: OptimConfig, gradient_scale: float = 0.01) -> dict[str, np.ndarray]:
    tx = make_optimizer(config, steps=10)
    params = tree(0)
    updates, _ = tx.update(tree(1, gradient_scale), tx.init(params), params)
    return flat(updates)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_may_be_of_another_dtype(name: str) -> None:
    """Half the memory of the first moments; the first update is the same but for its rounding."""
    config = constant(name=name, momentum_dtype="bfloat16")
    state = make_optimizer(config, steps=10).init(tree(0))
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    rounded = [leaf for leaf in moments if leaf.dtype == jax.numpy.bfloat16]
    assert sum(leaf.size for leaf in rounded) == sum(leaf.size for leaf in jax.tree.leaves(tree(0)))
    plain = first_update(constant(name=name))
    for key, update in first_update(config).items():
        np.testing.assert_allclose(update, plain[key], rtol=0.02, atol=2e-5)


def constant(**fields: Any) -> OptimConfig:
    fixed: dict[str, Any] = {"learning_rate": PEAK, "schedule": "constant", "warmup": 0.0}
    return OptimConfig(**fixed | fields)


@pytest.mark.parametrize(
    ("kind", "decay"),
    [
        ("constant", lambda share: 1.0),
        ("linear", lambda share: 1.0 - 0.75 * share),
        ("cosine", lambda share: 0.25 + 0.75 * (1 + math.cos(math.pi * share)) / 2),
    ],
)
def test_schedule_warms_up_then_decays(kind: Any, decay: Callable[[float], float]) -> None:
    """13 steps: 3 warm, the first of them not zero, then 10 towards a quarter of the peak."""
    rate = schedule(OptimConfig(schedule=kind, warmup=0.2, final=0.25), PEAK, steps=13)
    expected = [PEAK / 4, PEAK / 2, 3 * PEAK / 4, *(PEAK * decay(i / 10) for i in range(11))]
    assert [float(rate(step)) for step in range(14)] == pytest.approx(expected, rel=1e-5)


def test_schedule_without_warm_up_begins_at_the_peak() -> None:
    rate = schedule(OptimConfig(schedule="linear", warmup=0.0), PEAK, steps=4)
    assert [float(rate(i)) for i in range(5)] == pytest.approx(
        [PEAK, 0.75 * PEAK, 0.5 * PEAK, 0.25 * PEAK, 0.0], abs=1e-9
    )


def test_warm_up_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"warmup = 5 is a share of the steps: give 0 <= x < 1"):
        OptimConfig(warmup=5)


def test_adamw_begins_with_a_step_of_the_learning_rate() -> None:
    """Adam's first step is lr * sign(gradient), whatever the gradient's size."""
    for name, update in first_update(constant()).items():
        np.testing.assert_allclose(update, -PEAK * np.sign(flat(tree(1))[name]), rtol=1e-3)


def test_adamw_takes_its_betas_from_the_config() -> None:
    tx = make_optimizer(constant(b1=0.5, b2=0.8, clip_norm=1e9), steps=10)
    params, first, second = tree(0), tree(1), tree(2)
    _, state = tx.update(first, tx.init(params), params)
    updates, _ = tx.update(second, state, params)
    g1, g2 = flat(first)["q"].astype(np.float64), flat(second)["q"].astype(np.float64)
    mean = (0.25 * g1 + 0.5 * g2) / (1 - 0.25)
    square = (0.16 * g1**2 + 0.2 * g2**2) / (1 - 0.64)
    np.testing.assert_allclose(flat(updates)["q"], -PEAK * mean / np.sqrt(square), rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_pulls_matrices_and_spares_gains(name: str) -> None:
    plain = first_update(constant(name=name, adam_learning_rate=ADAM_PEAK))
    decayed = first_update(constant(name=name, adam_learning_rate=ADAM_PEAK, weight_decay=0.1))
    for key, weight in flat(tree(0)).items():
        decays = key in ("q", "down") or (name == "adamw" and key == "embed")
        expected = -PEAK * 0.1 * weight if decays else np.zeros_like(weight)
        np.testing.assert_allclose(decayed[key] - plain[key], expected, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gains_have_their_own_learning_rate(name: str) -> None:
    shared = first_update(constant(name=name, adam_learning_rate=ADAM_PEAK))
    own = first_update(
        constant(name=name, adam_learning_rate=ADAM_PEAK, gain_learning_rate=GAIN_PEAK)
    )
    for key, update in own.items():
        if key in GAINS:
            size = GAIN_PEAK * (NADAM if name == "muon" else 1.0)
            np.testing.assert_allclose(np.abs(update), size, rtol=1e-3)
        else:
            np.testing.assert_array_equal(update, shared[key])


def test_gradients_are_clipped_by_their_global_norm() -> None:
    """Seen through an optimizer that keeps sizes: Adam's second moment after one step."""
    config = constant(b1=0.0, b2=0.0, clip_norm=0.5)
    tx = make_optimizer(config, steps=10)
    params, gradient = tree(0), tree(1)
    _, state = tx.update(gradient, tx.init(params), params)
    moment = optax.tree_utils.tree_get(state, "mu")
    assert float(optax.tree_utils.tree_norm(moment)) == pytest.approx(0.5, rel=1e-5)


def test_muon_makes_the_update_of_a_matrix_nearly_orthogonal() -> None:
    config = constant(name="muon", adam_learning_rate=ADAM_PEAK)
    tx = make_optimizer(config, steps=10)
    params, gradient = tree(0), tree(1, 0.01)
    gradient["layers"]["q"][:, :, 0] *= 50  # one direction dominates the raw gradient
    updates, _ = tx.update(gradient, tx.init(params), params)
    for layer in range(2):
        raw = np.linalg.svd(gradient["layers"]["q"][layer], compute_uv=False)
        made = np.linalg.svd(np.asarray(updates["layers"]["q"][layer]), compute_uv=False)
        assert raw.max() / raw.min() > 20
        assert made.max() / made.min() < 2
        # It points down the gradient.
        assert (
            np.sum(gradient["layers"]["q"][layer] * np.asarray(updates["layers"]["q"][layer])) < 0
        )


def test_muon_leaves_embedding_and_gains_to_adam() -> None:
    updates = first_update(constant(name="muon", adam_learning_rate=ADAM_PEAK))
    for key in ("embed", *GAINS):
        np.testing.assert_allclose(np.abs(updates[key]), NADAM * ADAM_PEAK, rtol=1e-3)


def test_a_users_factory_reads_the_config() -> None:
    updates = first_update(constant(name=USERS))
    for name, update in updates.items():
        np.testing.assert_allclose(update, -PEAK * np.sign(flat(tree(1))[name]), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lion", "'lion' is none of adamw, muon, nor FILE.py:NAME or MODULE:NAME"),
        (USERS.replace(":sign_descent", ":other"), "has no 'other'"),
    ],
)
def test_unknown_optimizer_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_optimizer(OptimConfig(name=name), steps=10)

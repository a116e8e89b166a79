"""Schedules, each optimizer's own steps, averages, and the contract that every optimizer keeps."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import MODEL, ROWS, batch_of, examples

from hsql_jax.checkpoint import Checkpoints
from hsql_jax.errors import UserError
from hsql_jax.model import init_params, param_shardings
from hsql_jax.objectives import sft
from hsql_jax.optim import OPTIMIZERS, OptimConfig, eval_params, make_optimizer, schedule
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.train import StepFn, TrainState, create_state, make_train_step

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


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
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


def test_lion_steps_by_the_sign_of_its_momentum() -> None:
    tx = make_optimizer(constant(name="lion", b1=0.9, b2=0.5, clip_norm=1e9), steps=10)
    params, first, second = tree(0), tree(1), tree(2)
    _, state = tx.update(first, tx.init(params), params)
    updates, _ = tx.update(second, state, params)
    for name, update in flat(updates).items():
        direction = np.sign(0.9 * 0.5 * flat(first)[name] + 0.1 * flat(second)[name])
        np.testing.assert_allclose(update, -PEAK * direction, rtol=1e-6)


def test_adafactor_keeps_rows_and_columns_and_steps_by_the_size_of_the_weights() -> None:
    """Of squares of rank one nothing is lost: the step is the sign times the weights' RMS."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(2, 128, 130)).astype(np.float32)
    rows, columns = rng.normal(size=(2, 128, 1)), rng.normal(size=(2, 1, 130))
    gradient = (rows * columns).astype(np.float32)
    tx = make_optimizer(constant(name="adafactor", clip_norm=1e9), steps=10)
    state = tx.init({"q": weight})
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 130
    updates, _ = tx.update({"q": gradient}, state, {"q": weight})
    expected = -PEAK * np.sqrt(np.mean(weight**2)) * np.sign(gradient)
    np.testing.assert_allclose(updates["q"], expected, rtol=1e-3)


def test_schedule_free_evaluates_the_average_of_its_iterates() -> None:
    """With one rate throughout, all iterates z of equation (1) weigh the same."""
    tx = make_optimizer(constant(name="schedule_free"), steps=10)
    params = jax.tree.map(jnp.asarray, tree(0))
    state, iterates = tx.init(params), []
    for seed in range(1, 6):
        updates, state = tx.update(tree(seed), state, params)
        params = optax.apply_updates(params, updates)
        iterates.append(flat(optax.tree_utils.tree_get(state, "z")))
    for name, value in flat(eval_params(state, params)).items():
        average = np.mean([iterate[name] for iterate in iterates], axis=0)
        np.testing.assert_allclose(value, average, rtol=1e-5, atol=1e-6)
        assert np.abs(flat(params)[name] - average).max() > 1e-4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_average_follows_the_parameters(dtype: Any) -> None:
    """In float32: at a decay of 0.999, bfloat16 would never move. Updates stay what they were."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree(0))
    plain, tx = (make_optimizer(constant(ema=ema), steps=10) for ema in (None, 0.999))
    plain_state, state = plain.init(params), tx.init(params)
    average = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for seed in range(1, 4):
        expected, plain_state = plain.update(tree(seed), plain_state, params)
        updates, state = tx.update(tree(seed), state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * np.asarray(p), average, params)
    kept = optax.tree_utils.tree_get(state, "average")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), kept, average)
    evaluated = eval_params(state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(evaluated)} == {jnp.dtype(dtype)}
    assert eval_params(plain_state, params) is params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema": 1.0}, r"ema = 1.0 is a decay: give 0 < x < 1"),
        ({"ema": 0.9, "name": "schedule_free"}, "schedule_free averages parameters itself"),
    ],
)
def test_averages_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**fields)


def test_a_users_factory_reads_the_config() -> None:
    updates = first_update(constant(name=USERS))
    for name, update in updates.items():
        np.testing.assert_allclose(update, -PEAK * np.sign(flat(tree(1))[name]), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lbfgs",
            "'lbfgs' is none of adafactor, adamw, lion, muon, schedule_free, nor FILE.py:NAME",
        ),
        (USERS.replace(":sign_descent", ":other"), "has no 'other'"),
    ],
)
def test_unknown_optimizer_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_optimizer(OptimConfig(name=name), steps=10)


# --- the contract of every optimizer ------------------------------------------------------------

EVERY = pytest.mark.parametrize("name", [*OPTIMIZERS, pytest.param(USERS, id="a user's")])
SINGLE, SHARDED = MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)
BATCH = [[example] for example in examples(ROWS)]


@functools.cache
def optimizer(name: str) -> optax.GradientTransformation:
    fields = {"gain_learning_rate": 2 * PEAK, "weight_decay": 0.1, "ema": 0.9}
    if name == "schedule_free":
        del fields["ema"]
    return make_optimizer(constant(name=name, **fields), steps=10)


@functools.cache
def compiled(name: str, mesh: MeshConfig) -> StepFn:
    return make_train_step(MODEL, sft().loss, optimizer(name), make_mesh(mesh))


def fresh(name: str, mesh: MeshConfig) -> TrainState:
    params = init_params(MODEL, jax.random.key(0))
    return create_state(params, MODEL, optimizer(name), make_mesh(mesh))


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@EVERY
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_stay_what_they_are(name: str, dtype: Any) -> None:
    """Of parameters and of the state, which the step donates: each array takes its old place."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree(0))
    gradient = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree(1))
    tx = optimizer(name)

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    after = step(params, state)
    for old, new in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert jnp.isfinite(new).all()
    assert all(
        np.any(old != new)
        for old, new in zip(*map(jax.tree.leaves, (params, after[0])), strict=True)
    )


@EVERY
def test_state_is_split_as_the_parameters(name: str) -> None:
    mesh = make_mesh(SHARDED)
    own = {
        (jax.tree_util.keystr(path), leaf.shape): sharding
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(
                jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
            ),
            jax.tree.leaves(param_shardings(mesh, MODEL)),
            strict=True,
        )
    }
    for path, leaf in jax.tree.leaves_with_path(fresh(name, SHARDED).opt_state):
        where = jax.tree_util.keystr(path)
        wanted = [
            s for (key, shape), s in own.items() if where.endswith(key) and shape == leaf.shape
        ]
        if wanted:
            assert leaf.sharding.is_equivalent_to(wanted[0], leaf.ndim), where
        else:
            assert leaf.sharding.is_fully_replicated, where
            assert leaf.size <= max(MODEL.d_model, 5), where  # counters and the like


@EVERY
def test_micro_batches_and_devices_do_not_change_the_steps(name: str) -> None:
    """Up to rounding, which may turn the sign of a gradient that is all but zero."""
    one, many = fresh(name, SINGLE), fresh(name, SHARDED)
    begin = jax.tree.map(np.array, one.params)
    for _ in range(2):
        one, _ = compiled(name, SINGLE)(one, batch_of(BATCH))
        many, _ = compiled(name, SHARDED)(many, batch_of(BATCH, micro_batches=2))
    for first, a, b in zip(*map(jax.tree.leaves, (begin, one.params, many.params)), strict=True):
        moved, apart = np.abs(np.asarray(a) - first), np.abs(np.asarray(a) - np.asarray(b))
        assert np.mean(apart > 0.02 * moved.max()) < 0.01
        assert moved.max() > 1e-5


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_weight_decay_pulls_matrices_and_spares_gains(name: str) -> None:
    plain = first_update(constant(name=name, adam_learning_rate=ADAM_PEAK))
    decayed = first_update(constant(name=name, adam_learning_rate=ADAM_PEAK, weight_decay=0.1))
    for key, weight in flat(tree(0)).items():
        decays = key in ("q", "down") or (name != "muon" and key == "embed")
        expected = -PEAK * 0.1 * weight if decays else np.zeros_like(weight)
        np.testing.assert_allclose(decayed[key] - plain[key], expected, atol=1e-6)


@EVERY
def test_gains_have_their_own_learning_rate(name: str) -> None:
    config = constant(name=name, adam_learning_rate=ADAM_PEAK)
    shared = first_update(config)
    own = first_update(dataclasses.replace(config, gain_learning_rate=GAIN_PEAK))
    ratio = GAIN_PEAK / (ADAM_PEAK if name == "muon" else PEAK)
    for key, update in own.items():
        expected = shared[key] * ratio if key in GAINS else shared[key]
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6)


@EVERY
def test_resumed_steps_are_bit_exact(name: str, tmp_path: Path) -> None:
    step, batch = compiled(name, SINGLE), batch_of(BATCH)
    state = fresh(name, SINGLE)
    for _ in range(2):
        state, _ = step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        whole, _ = step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(MODEL, optimizer(name), make_mesh(SINGLE))
    resumed, _ = step(restored, batch)
    assert int(resumed.step) == 3
    assert bits(resumed) == bits(whole)


@EVERY
def test_a_step_that_is_not_finite_moves_nothing(name: str) -> None:
    step, batch = compiled(name, SINGLE), batch_of(BATCH)
    bad = dataclasses.replace(batch, loss_mask=batch.loss_mask * np.float32(np.nan))
    state, _ = step(fresh(name, SINGLE), batch)
    before = bits((state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert (float(metrics["skipped"]), int(state.step)) == (1.0, 2)
    assert bits((state.params, state.opt_state)) == before

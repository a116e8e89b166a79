"""One step on any mesh and any split of the batch; the loop; where optimizer state lives."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import MODEL, ROWS, batch_of, examples

from hsql_jax.data import Batch
from hsql_jax.errors import UserError
from hsql_jax.model import forward, head_matrix, init_params, param_shardings
from hsql_jax.objectives import gspo
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.train import (
    Metrics,
    StepFn,
    TrainState,
    create_state,
    make_train_step,
    state_shardings,
    train,
)

SINGLE, SHARDED = MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)
SGD = optax.sgd(1.0)  # the update is the gradient itself
EPSILON = 0.2
ONE_A_ROW = [[example] for example in examples(ROWS)]


@functools.cache
def compiled(config: MeshConfig) -> StepFn:
    """GSPO weighs and clips whole trajectories: the objective most easily broken by a layout."""
    return make_train_step(MODEL, gspo(EPSILON).loss, SGD, make_mesh(config))


@functools.cache
def params() -> Any:
    return init_params(MODEL, jax.random.key(0))


def one_step(batch: Batch, config: MeshConfig = SINGLE) -> tuple[Any, Metrics, TrainState]:
    """The gradient, the metrics and the state after one step."""
    state = create_state(params(), MODEL, SGD, make_mesh(config))
    state, metrics = compiled(config)(state, batch)
    gradient = jax.tree.map(lambda old, new: np.asarray(old) - new, params(), state.params)
    return gradient, {name: float(value) for name, value in metrics.items()}, state


def assert_same(found: tuple[Any, Metrics, Any], expected: tuple[Any, Metrics, Any]) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found[0], expected[0])


@functools.cache
def reference() -> tuple[Any, Metrics, TrainState]:
    return one_step(batch_of(ONE_A_ROW))


def test_metrics_are_those_of_the_definition() -> None:
    """Loss by equation (10), entropy and counts, from plain float64 log-probabilities."""
    gradient, metrics, state = reference()
    batch = jax.tree.map(lambda leaf: leaf[0], batch_of(ONE_A_ROW))
    hidden = jax.jit(forward, static_argnums=1)(
        params(), MODEL, batch.tokens, batch.segment_ids, batch.positions
    )
    logits = np.asarray(hidden @ head_matrix(params()), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logprobs, batch.targets[..., None], -1)[..., 0]
    terms, clipped = [], 0
    for row in range(ROWS):
        mask = batch.loss_mask[row] == 1
        ratio = math.exp(np.mean((chosen - batch.old_logprobs)[row, mask]))
        advantage = float(batch.advantages[row, 0])
        bound = np.clip(ratio, 1 - EPSILON, 1 + EPSILON)
        terms.append(min(ratio * advantage, bound * advantage))
        clipped += int(mask.sum()) * (ratio > 1 + EPSILON and advantage > 0)
    count = batch.loss_mask.sum()
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    assert metrics["loss"] == pytest.approx(-np.mean(terms), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(np.sum(entropy * batch.loss_mask) / count, rel=1e-5)
    assert metrics["clip_high"] == pytest.approx(clipped / count)
    assert 0 < clipped < count
    assert metrics["loss_tokens"] == count
    norm = math.sqrt(sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["update_norm"] == pytest.approx(metrics["grad_norm"])
    assert int(state.step) == 1


@pytest.mark.parametrize(
    "config",
    [SHARDED, MeshConfig(data=2, context=4), MeshConfig(fsdp=2, tensor=2, context=2)],
    ids=["time whole", "time in four", "time in two"],
)
def test_eight_devices_compute_the_step_of_one(config: MeshConfig) -> None:
    sharded = one_step(batch_of(ONE_A_ROW), config)
    assert_same(sharded, reference())
    wanted = jax.tree.leaves(param_shardings(make_mesh(config), MODEL))
    for leaf, sharding in zip(jax.tree.leaves(sharded[2].params), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert len(sharded[2].params["layers"]["gate"].sharding.device_set) == 8


def test_packing_does_not_change_the_step() -> None:
    flat = [row[0] for row in ONE_A_ROW]
    packed = [[flat[5], flat[0]], [flat[3], flat[7]], [], [flat[1], flat[2]], [flat[6]], [flat[4]]]
    assert_same(one_step(batch_of(packed)), reference())


def test_micro_batches_do_not_change_the_step() -> None:
    assert_same(one_step(batch_of(ONE_A_ROW, micro_batches=4)), reference())


def test_micro_batches_of_padding_are_not_computed() -> None:
    """They hold values that would spoil every sum, and the result is that of the full rows."""
    batch = batch_of(ONE_A_ROW[:4], micro_batches=4)
    poison = dataclasses.replace(
        batch,
        old_logprobs=np.where(np.arange(4)[:, None, None] < 2, batch.old_logprobs, np.nan),
        advantages=np.where(np.arange(4)[:, None, None] < 2, batch.advantages, np.nan),
    )
    assert_same(one_step(poison), one_step(batch_of(ONE_A_ROW[:4])))


def test_a_batch_without_loss_tokens_moves_nothing() -> None:
    gradient, metrics, _ = one_step(batch_of([]))
    assert metrics["loss"] == metrics["grad_norm"] == metrics["loss_tokens"] == 0.0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient))


# --- the loop ----------------------------------------------------------------------------------


def counting_step(losses: dict[int, float]) -> StepFn:
    """A step that reports the loss of its number, and the batch it got as the gradient norm."""

    def step(state: TrainState, batch: Any) -> Any:
        loss = losses.get(int(state.step), 1.0)
        metrics = {"loss": jnp.float32(loss), "grad_norm": jnp.float32(batch)}
        metrics["skipped"] = jnp.float32(not math.isfinite(loss))
        return dataclasses.replace(state, step=state.step + 1), metrics

    return step


def test_loop_runs_from_the_states_step_and_shows_it_to_the_source_of_batches() -> None:
    seen: list[tuple[int, Metrics]] = []
    state = train(
        TrainState(step=jnp.int32(3), params=None, opt_state=None),
        counting_step({4: 0.25}),
        lambda state: 10.0 * int(state.step),  # type: ignore[arg-type,return-value]
        steps=6,
        on_step=lambda state, metrics: seen.append((int(state.step), metrics)),
    )
    assert int(state.step) == 6
    assert seen == [
        (4, {"loss": 1.0, "grad_norm": 30.0, "skipped": 0.0}),
        (5, {"loss": 0.25, "grad_norm": 40.0, "skipped": 0.0}),
        (6, {"loss": 1.0, "grad_norm": 50.0, "skipped": 0.0}),
    ]


def loop(losses: dict[int, float], **options: Any) -> list[tuple[int, float]]:
    """What `on_step` saw of steps and skips, until the loop ended or raised."""
    seen: list[tuple[int, float]] = []
    train(
        TrainState(step=jnp.int32(0), params=None, opt_state=None),
        counting_step(losses),
        lambda _: 0.0,  # type: ignore[arg-type,return-value]
        steps=8,
        on_step=lambda state, metrics: seen.append((int(state.step), metrics["skipped"])),
        **options,
    )
    return seen


def test_skipped_steps_are_counted_and_reported() -> None:
    """Two in a row, a good one, two in a row: never three."""
    losses = dict.fromkeys((1, 2, 4, 5), math.nan)
    skips = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert loop(losses, max_skipped=3) == list(enumerate(skips, start=1))


@pytest.mark.parametrize(
    ("value", "options", "at"), [(math.nan, {}, 6), (math.inf, {"max_skipped": 2}, 3)]
)
def test_too_many_skipped_steps_in_a_row_end_the_loop(
    value: float, options: dict[str, int], at: int
) -> None:
    message = (
        rf"step {at} skipped: loss {value}, gradient norm 0.0, the last of {at - 1} in a row; "
        "start again with a lower learning rate"
    )
    with pytest.raises(UserError, match=message):
        loop(dict.fromkeys(range(1, 8), value), **options)


def test_the_loop_stops_when_told() -> None:
    """Asked before each step: what `on_step` saw is whole, and no step follows it."""
    answers = iter([False, False, False, True])
    assert loop({}, should_stop=lambda: next(answers)) == [(1, 0.0), (2, 0.0), (3, 0.0)]


# --- steps that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("config", [SINGLE, SHARDED], ids=["one", "eight"])
def test_a_step_that_is_not_finite_changes_only_the_count(config: MeshConfig) -> None:
    tx = make_optimizer(OptimConfig(learning_rate=1e-2, weight_decay=0.1, ema=0.9), steps=10)
    mesh = make_mesh(config)
    step = make_train_step(MODEL, gspo(EPSILON).loss, tx, mesh)
    good = batch_of(ONE_A_ROW)
    bad = dataclasses.replace(good, advantages=np.full_like(good.advantages, np.nan))
    state, metrics = step(create_state(params(), MODEL, tx, mesh), good)
    before = jax.tree.map(np.array, state)
    state, skipped = step(state, bad)
    assert not math.isfinite(float(skipped["loss"]))
    assert (metrics["skipped"], skipped["skipped"]) == (0.0, 1.0)
    assert (int(state.step), skipped["update_norm"]) == (2, 0.0)
    expected = dataclasses.replace(before, step=np.int32(2))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, state), expected)
    state, metrics = step(state, good)  # and training goes on
    assert (metrics["skipped"], int(state.step)) == (0.0, 3)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before.params, state.params)
    assert all(jax.tree.leaves(moved))


# --- shardings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_moments_are_split_as_their_parameters(name: str) -> None:
    """The counts say that none is missed; tests/test_optim.py has every optimizer."""
    mesh = make_mesh(SHARDED)
    tx = make_optimizer(OptimConfig(name=name, gain_learning_rate=1e-3), steps=10)
    state = create_state(params(), MODEL, tx, mesh)
    wanted = {
        jax.tree_util.keystr(path): sharding
        for path, sharding in jax.tree.leaves_with_path(param_shardings(mesh, MODEL))
    }
    moments = 0
    for path, leaf in jax.tree.leaves_with_path(state.opt_state):
        where = jax.tree_util.keystr(path)
        own = [sharding for key, sharding in wanted.items() if where.endswith(key)]
        if own:
            assert leaf.sharding.is_equivalent_to(own[0], leaf.ndim), where
            moments += 1
        else:  # counters, and Muon's five coefficients
            assert leaf.sharding.is_fully_replicated, where
            assert leaf.ndim == 0 or where.endswith("ns_coeffs"), where
    adam = sum(leaf.ndim != 3 or name == "adamw" for leaf in jax.tree.leaves(params()))
    assert moments == len(wanted) + adam  # Muon keeps one moment, Adam two
    split = state_shardings(mesh, MODEL, tx).params["layers"]["q"]
    assert split.spec == jax.P(None, ("fsdp", "context"), ("tensor",))


def test_too_few_devices_and_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="needs 16 devices, 8 found; lower one of the axes"):
        make_mesh(MeshConfig(data=4, fsdp=4))
    mesh = make_mesh(MeshConfig(fsdp=8))
    with pytest.raises(ValueError, match=r"\['embed'\]: embed = 36 does not divide over 8"):
        param_shardings(mesh, dataclasses.replace(MODEL, d_model=36))

"""Supervised steps: ten equal to torch's, and none that knows how its examples are laid out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from micro import LENGTH, MODEL, examples

from hsql_jax.checkpoint import Checkpoints
from hsql_jax.data import Batch, Example, pack
from hsql_jax.model import init_params
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.train import StepFn, TrainState, create_state, make_train_step, train
from hsql_jax.weights import load_hf

FIXTURES = Path(__file__).parent / "fixtures"
ONE = MeshConfig()
STEPS = 9
TOLERANCE = 1e-5


def rows_of(packed: bool, rows: int = 16, length: int = LENGTH, seed: int = 0) -> Batch:
    """16 examples as one batch [rows, length]; the rows that they do not need are padding."""
    (batch,) = pack(examples(16, seed), length, rows, packed)
    return batch


def in_parts(batch: Batch, parts: int) -> Batch:
    """Leaves [A, B / A, T], as `hsql sft` splits the rows of a step."""
    return jax.tree.map(lambda leaf: leaf.reshape(parts, -1, leaf.shape[-1]), batch)


# --- ten steps -----------------------------------------------------------------------------------


def test_ten_steps_are_those_of_torch() -> None:
    """Forward, masked mean, gradient, clipping, schedule, AdamW; ours packed and in two parts."""
    golden = json.loads((FIXTURES / "golden_steps.json").read_text())
    model, params = load_hf(FIXTURES / "golden" / golden["model"])
    optim = OptimConfig(**golden["optim"])
    tx, mesh = make_optimizer(optim, len(golden["steps"])), make_mesh(ONE)
    step = make_train_step(model, sft().loss, tx, mesh)
    state = create_state(params, model, tx, mesh)
    losses, norms = [], []
    for step_examples in golden["steps"]:
        (batch,) = pack([Example(**example) for example in step_examples], length=24, rows=6)
        state, metrics = step(state, in_parts(batch, 2))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert min(norms) < optim.clip_norm < max(norms)
    np.testing.assert_allclose(losses, golden["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose(norms, golden["grad_norms"], rtol=TOLERANCE)


# --- one step, laid out in many ways -------------------------------------------------------------


@functools.cache
def optimizer() -> optax.GradientTransformation:
    """AdamW behind a transformation whose state is the step's gradient."""
    optim = OptimConfig(learning_rate=1e-2, weight_decay=0.1, warmup=0.2)
    return optax.chain(optax.trace(decay=0.0), make_optimizer(optim, STEPS))


@functools.cache
def compiled(config: MeshConfig) -> StepFn:
    return make_train_step(MODEL, sft().loss, optimizer(), make_mesh(config))


@functools.cache
def params() -> Any:
    return init_params(MODEL, jax.random.key(0))


def fresh(config: MeshConfig) -> TrainState:
    return create_state(params(), MODEL, optimizer(), make_mesh(config))


def loss_and_gradient(batch: Batch, config: MeshConfig = ONE) -> tuple[float, Any]:
    state, metrics = compiled(config)(fresh(config), batch)
    return float(metrics["loss"]), jax.tree.map(np.asarray, state.opt_state[0].trace)


@functools.cache
def reference() -> tuple[float, Any]:
    """On one device, one example a row."""
    return loss_and_gradient(in_parts(rows_of(packed=False), 1))


def assert_invariant(batch: Batch, config: MeshConfig = ONE) -> None:
    """Loss and gradient are the reference's.

    Relative, for a gradient, to the largest magnitude of its leaf: single elements are sums of
    many terms that cancel.
    """
    (loss, gradient), (true_loss, truth) = loss_and_gradient(batch, config), reference()
    assert loss == pytest.approx(true_loss, rel=TOLERANCE)
    deviations = jax.tree.map(
        lambda found, true: np.abs(found - true).max() / np.abs(true).max(), gradient, truth
    )
    assert max(jax.tree.leaves(deviations)) <= TOLERANCE, deviations


LAYOUTS = {
    "packed": in_parts(rows_of(packed=True), 1),
    "more rows, longer": in_parts(rows_of(packed=False, rows=24, length=40), 1),
    "more rows, longer, packed": in_parts(rows_of(packed=True, rows=24, length=40), 1),
    "in two": in_parts(rows_of(packed=False), 2),
    "packed, in four": in_parts(rows_of(packed=True), 4),
}
TWO, FOUR, EIGHT = MeshConfig(tensor=2), MeshConfig(data=2, fsdp=2), MeshConfig(fsdp=4, tensor=2)
MESHES = {
    "2 by fsdp": MeshConfig(fsdp=2),
    "2 by tensor": TWO,
    "2 by context": MeshConfig(context=2),
    "4": FOUR,
    "8": EIGHT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_neither_loss_nor_gradient(layout: str) -> None:
    assert_invariant(LAYOUTS[layout])


@pytest.mark.parametrize("mesh", MESHES)
def test_devices_change_neither_loss_nor_gradient(mesh: str) -> None:
    """With packed rows in two micro-batches at the same time."""
    assert_invariant(in_parts(rows_of(packed=True), 2), MESHES[mesh])


# --- training that moves to other devices --------------------------------------------------------


def losses_until(state: TrainState, config: MeshConfig, end: int) -> tuple[TrainState, list[float]]:
    """Train from where the state is to step `end`; each step has examples of its own."""
    losses: list[float] = []
    state = train(
        state,
        compiled(config),
        lambda state: in_parts(rows_of(packed=True, seed=int(state.step)), 2),
        end,
        lambda _, metrics: losses.append(metrics["loss"]),
    )
    return state, losses


def test_training_moves_from_8_devices_to_4_and_to_2(tmp_path: Path) -> None:
    """From fsdp x tensor over data x fsdp to tensor alone, with the losses of staying on 8."""
    state, begun = losses_until(fresh(EIGHT), EIGHT, STEPS // 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    _, expected = losses_until(state, EIGHT, STEPS)
    losses: list[float] = []
    for config, end in ((FOUR, 2 * STEPS // 3), (TWO, STEPS)):
        with Checkpoints(tmp_path) as checkpoints:
            state, _ = checkpoints.restore(MODEL, optimizer(), make_mesh(config))
            state, more = losses_until(state, config, end)
            checkpoints.save(state, {})
        losses += more
    assert expected[-1] < begun[0]
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)

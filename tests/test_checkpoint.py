"""Checkpoints: every bit comes back, on any mesh, and training goes on as if never stopped."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from micro import LENGTH, MODEL, examples

from hsql_jax.checkpoint import Checkpoints
from hsql_jax.data import BatchStream
from hsql_jax.errors import UserError
from hsql_jax.model import init_params, param_shardings
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.sft import stack
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.train import Metrics, StepFn, TrainState, create_state, make_train_step, train

EIGHT, FOUR, ONE = MeshConfig(2, 2, 2), MeshConfig(fsdp=4), MeshConfig()
STEPS = 6
OPTIM = OptimConfig(learning_rate=1e-2, gain_learning_rate=2e-2, weight_decay=0.1)
EXTRA = {"data": {"position": 7, "names": ["a", "b"]}, "zero_iterations": 0, "succeeded": True}


@functools.cache
def optimizer(name: str = "adamw") -> optax.GradientTransformation:
    return make_optimizer(OptimConfig(**(vars(OPTIM) | {"name": name})), STEPS)


def random_state(name: str, config: MeshConfig, step: int = 3) -> TrainState:
    """A state in which every leaf differs from what a fresh one has."""
    params = init_params(MODEL, jax.random.key(1))
    state = create_state(params, MODEL, optimizer(name), make_mesh(config))
    rng = np.random.default_rng(0)

    def fill(leaf: jax.Array) -> jax.Array:
        values = rng.normal(size=leaf.shape) * 10
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    filled = jax.tree.map(fill, state)
    return dataclasses.replace(filled, step=jax.device_put(np.int32(step), state.step.sharding))


def assert_same_bits(found: Any, expected: Any) -> None:
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("target", [EIGHT, FOUR, ONE], ids=["8", "4", "1"])
def test_state_comes_back_bit_by_bit_on_any_mesh(
    name: str, target: MeshConfig, tmp_path: Path
) -> None:
    saved = random_state(name, EIGHT)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, EXTRA)
    mesh = make_mesh(target)
    with Checkpoints(tmp_path) as checkpoints:
        state, extra = checkpoints.restore(MODEL, optimizer(name), mesh)
    assert extra == EXTRA
    assert_same_bits(state, saved)
    wanted = jax.tree.leaves(param_shardings(mesh, MODEL))
    for leaf, sharding in zip(jax.tree.leaves(state.params), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    devices = {device for leaf in jax.tree.leaves(state) for device in leaf.sharding.device_set}
    assert len(devices) == mesh.size


def test_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "sft") as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(UserError, match=r"sft: no complete checkpoint; run the stage first"):
            checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))


def test_a_checkpoint_cut_short_does_not_count(tmp_path: Path) -> None:
    """A killed save leaves a folder under a temporary name, or one without its last files."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(random_state("adamw", ONE, step=2), {"at": 2})
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 2


def test_the_newest_are_kept_and_a_step_is_saved_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 5):
            checkpoints.save(random_state("adamw", ONE, step), {"at": step})
        checkpoints.save(random_state("adamw", ONE, 5), {"at": "again"})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 5
        state, extra = checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))
    assert (int(state.step), extra) == (5, {"at": 5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5"]


# --- resuming ----------------------------------------------------------------------------------


@functools.cache
def compiled() -> StepFn:
    return make_train_step(MODEL, sft().loss, optimizer(), make_mesh(FOUR))


def run(folder: Path, until: int) -> tuple[TrainState, list[Metrics]]:
    """Train to step `until` from the newest checkpoint, as a stage does; save at every step."""
    stream = BatchStream(examples(13), LENGTH, rows=4, seed=3)  # several epochs in STEPS
    mesh = make_mesh(FOUR)
    seen: list[Metrics] = []
    with Checkpoints(folder) as checkpoints:
        if checkpoints.latest() is None:
            params = init_params(MODEL, jax.random.key(0))
            state = create_state(params, MODEL, optimizer(), mesh)
        else:
            state, extra = checkpoints.restore(MODEL, optimizer(), mesh)
            stream.restore(extra["data"])

        def on_step(state: TrainState, metrics: Metrics) -> None:
            seen.append(metrics)
            checkpoints.save(state, {"data": stream.state()})

        state = train(state, compiled(), lambda _: stack([next(stream)]), until, on_step)
    return state, seen


def test_resumed_training_is_bit_exact_and_learns(tmp_path: Path) -> None:
    whole, losses = run(tmp_path / "whole", STEPS)
    _, first = run(tmp_path / "halves", 3)
    resumed, second = run(tmp_path / "halves", STEPS)
    assert first + second == losses
    assert len(second) == STEPS - 3
    assert_same_bits(resumed, whole)
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.3

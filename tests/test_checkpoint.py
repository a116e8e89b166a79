"""Checkpoints: every bit comes back, on any mesh, and training goes on as if never stopped."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import LENGTH, MODEL, examples

from hsql_jax import __version__
from hsql_jax.checkpoint import Checkpoints, code_version
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
    """A killed save leaves a folder under a temporary name; the next save sweeps it away."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(random_state("adamw", ONE, step=2), {"at": 2})
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 2
        checkpoints.save(random_state("adamw", ONE, step=3), {"at": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


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


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Over a restart too; a score that is no number is none."""
    scores = {1: 0.2, 2: 0.9, 3: float("nan"), 4: None, 5: 0.9, 6: 0.1, 7: 0.3}
    for part in ([1, 2, 3, 4], [5, 6, 7]):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            for step in part:
                checkpoints.save(random_state("adamw", ONE, step), {}, scores[step])
            assert checkpoints.best() == (2 if step == 4 else 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "7"]
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(MODEL, optimizer(), make_mesh(ONE), step=checkpoints.best())
        assert (int(state.step), checkpoints.latest()) == (5, 7)


def test_what_is_being_saved_does_not_change_with_training(tmp_path: Path) -> None:
    """The next steps take the very arrays, by donation, while they are written."""
    big = dataclasses.replace(MODEL, vocab_size=8192, d_model=256)
    mesh = make_mesh(FOUR)
    state = create_state(init_params(big, jax.random.key(0)), big, optimizer(), mesh)
    overwrite = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf * 0 + 7, state), donate_argnums=0
    )
    overwrite(jax.tree.map(jnp.copy, state))  # compiles it
    counters: dict[str, Any] = {"epochs": [1]}
    before = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, counters)
        state = jax.block_until_ready(overwrite(state))
        counters["epochs"].append(2)
        assert not (tmp_path / "0").exists()  # it is still being written
    assert all(np.all(leaf == 7) for leaf in jax.tree.leaves(state.params))
    with Checkpoints(tmp_path) as checkpoints:
        restored, extra = checkpoints.restore(big, optimizer(), mesh)
    assert_same_bits(restored, before)
    assert extra == {"epochs": [1]}


def test_a_checkpoint_says_what_made_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, config="a1") as checkpoints:
        checkpoints.save(random_state("adamw", ONE), EXTRA, score=0.5)
    record = json.loads((tmp_path / "3" / "record" / "record.json").read_text())
    code = code_version()
    assert record == {"extra": EXTRA, "score": 0.5, "config": "a1", "code": code}
    assert code["version"] == __version__
    if (Path(__file__).parents[1] / ".git").exists():
        assert len(code["commit"].removesuffix("-dirty")) == 40
    with Checkpoints(tmp_path, config="b2") as checkpoints:
        with pytest.raises(UserError, match="3: of a run of another config"):
            checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's
def test_a_state_of_another_model_or_optimizer_is_not_taken_for_damage(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(random_state("adamw", ONE), EXTRA)
    wider = dataclasses.replace(MODEL, d_ff=64)
    for model, name in ((wider, "adamw"), (MODEL, "muon"), (MODEL, "lion")):
        with Checkpoints(tmp_path, say=pytest.fail) as checkpoints:
            with pytest.raises(UserError, match="3: not a state of this model and optimizer"):
                checkpoints.restore(model, optimizer(name), make_mesh(ONE))


# --- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        for step in (2, 4):
            checkpoints.save(random_state("adamw", ONE, step), {"at": step})
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def damaged(two: Path, tmp_path: Path, harm: Any) -> Iterator[tuple[Path, str]]:
    """Copies of `two` with one file of step 4 harmed, for each of its files."""
    names = sorted(str(p.relative_to(two / "4")) for p in (two / "4").rglob("*") if p.is_file())
    assert len(names) > 8
    for index, name in enumerate(names):
        folder = tmp_path / str(index)
        shutil.copytree(two, folder)
        harm(folder / "4" / name)
        yield folder, name


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flip", "cut", "missing"])
def test_damage_is_named_and_the_one_before_is_used(two: Path, tmp_path: Path, harm: Any) -> None:
    """Whichever file it is in; marks of Orbax that hold nothing of the state do not matter."""
    unimportant = []
    for folder, name in damaged(two, tmp_path, harm):
        lines: list[str] = []
        with Checkpoints(folder, say=lines.append) as checkpoints:
            state, extra = checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))
            if int(state.step) == 4:
                unimportant.append(Path(name).name)
                assert (extra, lines) == ({"at": 4}, [])
                assert_same_bits(state, random_state("adamw", ONE, 4))
                continue
            assert (int(state.step), extra) == (2, {"at": 2})
            assert_same_bits(state, random_state("adamw", ONE, 2))
            (line,) = lines
            assert line.startswith(f"{folder}: the checkpoint of step 4 is damaged: ")
            assert line.endswith("; using step 2")
            assert Path(name).name in line or Path(name).name == "checksums.json"
    assert set(unimportant) <= {"_CHECKPOINT_METADATA", "commit_success.txt"}


def test_training_goes_on_from_the_one_before(two: Path, tmp_path: Path) -> None:
    """The damaged one is set aside: its step can be saved again, and it counts for nothing."""
    folder = tmp_path / "folder"
    shutil.copytree(two, folder)
    cut(folder / "4" / "state" / "manifest.ocdbt")
    with Checkpoints(folder, say=lambda _: None) as checkpoints:
        checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))
        assert checkpoints.latest() == 2
        for step in (3, 4):
            checkpoints.save(random_state("adamw", ONE, step), {"at": step})
    with Checkpoints(folder, say=pytest.fail) as checkpoints:
        assert checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))[1] == {"at": 4}
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4", "4.damaged"]


def test_no_whole_checkpoint_is_an_error(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(two, folder)
    for step in (2, 4):
        shutil.rmtree(folder / str(step) / "state")
    lines: list[str] = []
    with Checkpoints(folder, say=lines.append) as checkpoints:
        with pytest.raises(UserError, match="no checkpoint is whole; delete the folder to begin"):
            checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))
    assert lines[1] == (
        f"{folder}: the checkpoint of step 2 is damaged: state/checksums.json: "
        "No such file or directory; there is no older one"
    )


# --- what a file system refuses ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's
def test_a_file_that_may_not_grow_fails_the_save_alone(tmp_path: Path) -> None:
    """It comes to light when the next one is saved, or at the end."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(random_state("adamw", ONE, 1), {"at": 1})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            checkpoints.save(random_state("adamw", ONE, 2), {"at": 2})
            message = "step 2 could not be saved: File too large; that of step 1 stays"
            with pytest.raises(UserError, match=message):
                checkpoints.save(random_state("adamw", ONE, 3), {"at": 3})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with Checkpoints(tmp_path, say=pytest.fail) as checkpoints:
        assert checkpoints.restore(MODEL, optimizer(), make_mesh(ONE))[1] == {"at": 1}
        checkpoints.save(random_state("adamw", ONE, 2), {"at": 2})
        assert checkpoints.latest() == 2


def test_a_full_disk_and_a_read_only_one_leave_the_last_checkpoint(tmp_path: Path) -> None:
    """On a tmpfs of 4 MiB in a mount namespace of its own."""
    script = Path(__file__).with_name("checkpoint_process.py")
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], check=False).returncode:
        pytest.skip("no mount namespaces here")
    run = subprocess.run(
        [*unshare, f"{mount} && exec {sys.executable} {script} {tmp_path}"],
        capture_output=True,
        text=True,
        check=True,
    )
    stays = "that of step 1 stays; make it possible to write there, then resume"
    assert run.stdout.splitlines() == [
        "saved 1",
        f"{tmp_path}/sft: the checkpoint of step 2 could not be saved: "
        f"No space left on device; {stays}",
        "['1']",
        f"{tmp_path}/sft: the checkpoint of step 3 could not be saved: "
        f"Read-only file system; {stays}",
        "1 {'at': 1}",
        "saved 4",
        "['1', '4']",
    ]


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "sft").write_text("")
    with pytest.raises(UserError, match=r"sft: .*; checkpoints need a folder to write to"):
        Checkpoints(tmp_path / "sft")


# --- resuming ----------------------------------------------------------------------------------


@functools.cache
def compiled(config: MeshConfig) -> StepFn:
    return make_train_step(MODEL, sft().loss, optimizer(), make_mesh(config))


def run(folder: Path, until: int, config: MeshConfig = FOUR) -> tuple[TrainState, list[Metrics]]:
    """Train to step `until` from the newest checkpoint, as a stage does; save at every step."""
    stream = BatchStream(examples(13), LENGTH, rows=4, seed=3)  # several epochs in STEPS
    mesh = make_mesh(config)
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

        state = train(state, compiled(config), lambda _: stack([next(stream)]), until, on_step)
    return state, seen


def test_resumed_training_is_bit_exact_and_learns(tmp_path: Path) -> None:
    whole, losses = run(tmp_path / "whole", STEPS)
    _, first = run(tmp_path / "halves", 3)
    resumed, second = run(tmp_path / "halves", STEPS)
    assert first + second == losses
    assert len(second) == STEPS - 3
    assert_same_bits(resumed, whole)
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.3


def test_training_resumes_on_other_devices(tmp_path: Path) -> None:
    """8 devices, then 4 that split the time of a row, then 2 that split matrices: one run."""
    whole, losses = run(tmp_path / "whole", STEPS)
    parts = []
    for until, config in (
        (2, EIGHT),
        (4, MeshConfig(fsdp=2, context=2)),
        (6, MeshConfig(tensor=2)),
    ):
        resumed, seen = run(tmp_path / "parts", until, config)
        parts += seen
    assert len(resumed.params["embed"].sharding.device_set) == 2
    for found, expected in zip(parts, losses, strict=True):
        assert found == pytest.approx(expected, rel=2e-4, abs=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), resumed.params, whole.params
    )

"""Orbax checkpoints: train state beside a JSON record, restored onto any mesh.

A checkpoint is written in the background under a temporary name and renamed when it is whole.
TensorStore checks its index, not the arrays: a flipped bit in a weight would come back as another
weight. So each item is committed together with the checksums of its files, and a checkpoint is
used only when they hold.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from hsql_jax import __version__
from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, init_params
from hsql_jax.train import TrainState, state_shardings

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax narrates every save, and its failure

ITEMS = "state", "record"
SUMS = "checksums.json"  # of an item's folder: {file: [bytes, CRC-32]}
RECORD = "record.json"  # extra, score, config, code
BLOCK = 1 << 22  # bytes read at once
UNFINISHED = "*.orbax-checkpoint-tmp*"
# What a file system refuses; TensorStore gives the words only.
REFUSALS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EIO,
)


class Checkpoints:
    """The checkpoints of one stage in one folder: a context manager that waits for what it saves.

    The newest `keep` stay, and the one of the highest score. `config` is the fingerprint of what
    trains: checkpoints of another are refused. `say` prints a line.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        config: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self.directory = directory.resolve()
        self._keep, self._config, self._say = keep, config, say
        self._damaged: list[int] = []
        self._saving: int | None = None  # not known to be on disk yet
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(
                f"{self.directory}: {error.strerror}; checkpoints need a folder to write to"
            ) from error

    def _open(self) -> None:
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        state = _State()
        registry.add("state", ocp.args.StandardSave, state)
        registry.add("state", ocp.args.StandardRestore, state)
        registry.add("record", ocp.args.JsonSave, _Record(RECORD))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Policy(self._kept),
            lightweight_initialize=True,  # damage is for `restore` to find
            # Where no folder can be made, files that wait for it would wait for minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, handler_registry=registry
        )
        self._scores = {step: _score(self.directory / str(step)) for step in self._steps()}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.wait()
        except UserError as error:
            if kind is None:
                raise
            self._say(str(error))  # beside what ends the stage
        finally:
            self._manager.close()

    def wait(self) -> None:
        """Until what was saved is on disk. `UserError` if that failed."""
        with self._explained():
            self._manager.wait_until_finished()
        self._saving = None

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        self.wait()
        return max(self._steps(), default=None)

    def best(self) -> int | None:
        """The complete step with the highest score, the newest of equals; None without scores."""
        self.wait()
        return self._best(self._steps())

    def save(self, state: TrainState, extra: dict[str, Any], score: float | None = None) -> None:
        """Save under `state.step`, in the background; `extra` is JSON (data position, counters).

        Orbax holds its own copy when this returns: the next step may donate the arrays. Raises
        `UserError` when this checkpoint, or the one before it, cannot be written.
        """
        step = int(state.step)
        self.wait()
        if step in self._steps():
            return
        score = score if score is not None and math.isfinite(score) else None
        record = {"extra": extra, "score": score, "config": self._config, "code": code_version()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            record=ocp.args.JsonSave(json.loads(json.dumps(record))),
        )
        self._saving = step
        with self._explained():
            self._make_way()
            self._scores[step] = score
            self._manager.save(step, args=args, force=True)

    def restore(
        self,
        model: ModelConfig,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        step: int | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step`, else of the newest checkpoint that is whole, and its `extra`.

        The state is laid out over `mesh`. Damaged checkpoints are named in a line each. Raises
        `UserError` if none is whole, or if it is of another config, model or optimizer.
        """
        self.wait()
        steps = sorted(self._steps(), reverse=True) if step is None else [step]
        if not steps:
            raise UserError(f"{self.directory}: no complete checkpoint; run the stage first")
        for tried, older in zip(steps, [*steps[1:], None], strict=True):
            damage = _damage(self.directory / str(tried))
            if damage is None:
                return self._read(tried, _target(model, tx, mesh))
            self._damaged.append(tried)
            then = "there is no older one" if older is None else f"using step {older}"
            self._say(
                f"{self.directory}: the checkpoint of step {tried} is damaged: {damage}; {then}"
            )
        raise UserError(
            f"{self.directory}: no checkpoint is whole; delete the folder to begin again"
        )

    def _read(self, step: int, target: TrainState) -> tuple[TrainState, dict[str, Any]]:
        folder = self.directory / str(step)
        record = json.loads((folder / "record" / RECORD).read_text())
        if self._config and record["config"] not in ("", self._config):
            raise UserError(f"{folder}: of a run of another config; continue it with its own")
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            return self._manager.restore(step, args=args).state, record["extra"]
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{folder}: not a state of this model and optimizer; continue it with its own "
                f"config ({str(error).splitlines()[0][:200]})"
            ) from error

    def _steps(self) -> list[int]:
        return [step for step in self._manager.all_steps() if step not in self._damaged]

    def _best(self, steps: Iterable[int]) -> int | None:
        scored = [(score, step) for step in steps if (score := self._scores.get(step)) is not None]
        return max(scored)[1] if scored else None

    def _kept(self, steps: Sequence[int]) -> set[int | None]:
        return {*sorted(steps)[-self._keep :], self._best(steps)}

    def _make_way(self) -> None:
        """Delete what was never finished; rename what is damaged, else its step stays taken."""
        for path in self.directory.glob(UNFINISHED):
            shutil.rmtree(path)
        if self._damaged:
            self._manager.close()
            for step in self._damaged:
                aside = self.directory / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)  # an earlier one of the same step
                (self.directory / str(step)).rename(aside)
            self._damaged = []
            self._open()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the file system refuses into a `UserError`, and leaves no half checkpoint."""
        try:
            yield
        except Exception as error:
            reason = _refusal(error)
            if reason is None:
                raise
            failed, self._saving = self._saving, None
            for path in self.directory.glob(UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            last = max((step for step in self._steps() if step != failed), default=None)
            stays = "there is none before it" if last is None else f"that of step {last} stays"
            raise UserError(
                f"{self.directory}: the checkpoint of step {failed} could not be saved: {reason}; "
                f"{stays}; make it possible to write there, then resume"
            ) from error


class _State(ocp.StandardCheckpointHandler):
    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        _write_sums(Path(directory))


class _Record(ocp.JsonCheckpointHandler):
    def finalize(self, directory: Any) -> None:
        _write_sums(Path(directory))


class _Policy(PreservationPolicy):
    def __init__(self, kept: Callable[[Sequence[int]], set[int | None]]) -> None:
        self._kept = kept

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self._kept([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step in kept for checkpoint in checkpoints]


def _target(model: ModelConfig, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state to restore."""

    def fresh() -> TrainState:
        params = init_params(model, jax.random.key(0))
        return TrainState(step=jax.numpy.int32(0), params=params, opt_state=tx.init(params))

    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(fresh),
        state_shardings(mesh, model, tx),
    )


def _refusal(error: Exception) -> str | None:
    """The words for what a file system refused, None for any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return next((words for code in REFUSALS if (words := os.strerror(code)) in str(error)), None)


# --- what is saved with the arrays ----------------------------------------------------------------


def _write_sums(folder: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    (folder / SUMS).write_text(json.dumps(_sums(folder, names)))


def _sums(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """{file: [bytes, CRC-32]}."""

    def one(name: str) -> list[int]:
        size = crc = 0
        with (folder / name).open("rb") as file:
            while block := file.read(BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return [size, crc]

    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if they are as they were saved."""
    for item in ITEMS:
        try:
            expected = json.loads((checkpoint / item / SUMS).read_text())
            found = _sums(checkpoint / item, expected)
        except OSError as error:
            return f"{item}/{Path(error.filename).name}: {error.strerror}"
        except ValueError as error:
            return f"{item}/{SUMS}: {error}"
        for name, sums in expected.items():
            if found[name] != sums:
                return f"{item}/{name} has {found[name][0]} bytes that are not the {sums[0]} saved"
    return None


def _score(checkpoint: Path) -> float | None:
    try:
        score = json.loads((checkpoint / "record" / RECORD).read_text())["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, int | float) else None


def code_version() -> dict[str, str]:
    """The version of this package and, in a git work tree, its commit (`-dirty` if changed)."""
    return {"version": __version__} | _commit()


@functools.cache
def _commit() -> dict[str, str]:
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return {}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"commit": done.stdout.strip()} if done.returncode == 0 else {}

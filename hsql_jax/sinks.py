"""Where metrics go beside `metrics.jsonl`: TensorBoard's event files, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hsql_jax.config import to_json
from hsql_jax.errors import UserError

TENSORBOARD_FOLDER = "tensorboard"  # of a run folder
WANDB_ID = "wandb_id.txt"  # of a run folder: which run of the project it is


@dataclass(frozen=True)
class LogConfig:
    """Who is told of a run's metrics; its `metrics.jsonl` is always written."""

    tensorboard: bool = True  # event files in the run folder
    wandb: str | None = None  # a Weights & Biases project; WANDB_MODE=offline keeps it here


class Sink(Protocol):
    """Takes the rows of a run's metrics; what is not finite has been left out."""

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(config: LogConfig) -> None:
    """Raise `UserError` where a package that the config asks for is not installed."""
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError("log.wandb: wandb is not installed; pip install 'hsql-jax[wandb]'")


def open_sinks(config: LogConfig, run_dir: Path, run_config: Any) -> list[Sink]:
    """The sinks of the run in `run_dir`, whose dataclass `run_config` they may show."""
    check_sinks(config)
    sinks: list[Sink] = [TensorBoard(run_dir / TENSORBOARD_FOLDER)] if config.tensorboard else []
    return sinks if config.wandb is None else [*sinks, Wandb(config.wandb, run_dir, run_config)]


class TensorBoard:
    """Event files, a folder for each stage.

    A run that is resumed continues the curves: what an earlier one wrote of the first step here or
    of those after it is no longer shown.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if stage not in self._files:
            self._files[stage] = _event_file(self._folder / stage, step)
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        file, now = self._files[stage], time.time()
        file.write_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
        file.flush()  # now: a killed run leaves no gap before the step that it resumes from

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _event_file(folder: Path, step: int) -> Any:
    """A new event file that takes the place of what others in its folder say from `step` on."""
    # Not SummaryWriter: its flush does not wait for the thread that writes.
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    folder.mkdir(parents=True, exist_ok=True)
    # Names hold the second of opening; the step keeps two files of one second apart.
    file = EventsWriter(str(folder / "events"), filename_suffix=f".{step:09}")
    start = SessionLog(status=SessionLog.START)
    file.write_event(Event(wall_time=time.time(), step=step, session_log=start))
    return file


class Wandb:
    """A run of a Weights & Biases project; the key is the library's own affair.

    `run_dir` keeps the run's id, so that resuming continues it. Curves are over each stage's steps.
    Raises `UserError` with the library's words where it cannot start.
    """

    def __init__(self, project: str, run_dir: Path, run_config: Any) -> None:
        import wandb

        file = run_dir / WANDB_ID
        try:
            self._run = wandb.init(
                project=project,
                dir=str(run_dir),
                name=run_dir.name,
                id=file.read_text().strip() if file.exists() else None,
                resume="allow",
                config=json.loads(to_json(run_config)),
                settings=wandb.Settings(console="off"),  # the console is for the progress bar
            )
        except wandb.errors.Error as error:
            raise UserError(f"log.wandb {project}: {' '.join(str(error).split())}") from error
        file.write_text(self._run.id + "\n")
        self._stages: set[str] = set()

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        row = {**values, "step": step}
        self._run.log({f"{stage}/{name}": value for name, value in row.items()})

    def close(self) -> None:
        self._run.finish()

"""What the demo runs: the sizes of its data, its model and its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hsql_jax.config import option
from hsql_jax.evaluate import EvalConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.rl import RlConfig
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.sft import StageConfig


@dataclass(frozen=True)
class TaskConfig:
    """The databases and the tasks synthesised on them."""

    databases: int = 900  # of the embedded set; a folder of the user's is taken whole
    tasks_per_database: int = 9
    unseen_share: float = 0.07  # of the databases, held out whole
    eval_tasks: int = 512  # held-out tasks a split, at most a quarter of all tasks
    error_rate: float = 0.28  # teacher episodes with a failing query

    def __post_init__(self) -> None:
        least = min(self.databases, self.tasks_per_database, self.eval_tasks)
        if least < 1 or not 0 <= self.error_rate <= 1 or not 0 <= self.unseen_share < 1:
            raise ValueError(f"{self}: counts are at least 1, shares from 0 to 1")


@dataclass(frozen=True)
class CorrectionConfig:
    """The policy's own mistakes after `sft`, mended by the teacher, for `refine`."""

    tasks: int = 3000  # training tasks played once, until the first visible mistake
    temperature: float = 1.0
    others: float = 1.0  # other tasks that `refine` repeats, a mended one

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.temperature < 0 or self.others < 0:
            raise ValueError(
                f"corrections: tasks = {self.tasks}, temperature = {self.temperature}, others = "
                f"{self.others}: play at least one task, and nothing below zero"
            )


@dataclass(frozen=True)
class DemoConfig:
    """The whole loop: databases, tasks, teacher, warm-up, SFT, RL, evaluation."""

    model: ModelConfig  # the vocabulary's size is an upper bound; the tokenizer decides
    warmup: StageConfig
    sft: StageConfig
    refine: StageConfig  # SFT goes on, with the policy's own mistakes mended
    rl: RlConfig
    tasks: TaskConfig = field(default_factory=TaskConfig)
    corrections: CorrectionConfig = field(default_factory=CorrectionConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    call_tokens: int = 96  # most new tokens of one model call
    workers: int = 2  # sandbox processes of the environment service
    databases: Path | None = None  # a folder of SQLite files; None: the embedded set
    seed: int = 0
    save_every: int = 200  # optimizer steps between two checkpoints
    run_dir: Path = option(Path("runs/demo"))
    resume: bool = option(False)  # continue the run in `run_dir`, finished stages kept

    def __post_init__(self) -> None:
        for name in ("call_tokens", "workers", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")

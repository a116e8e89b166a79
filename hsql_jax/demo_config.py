"""What the demo runs: the sizes of its data, its model and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hsql_jax.config import option
from hsql_jax.model.config import ModelConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.rollout.engine import EngineConfig


@dataclass(frozen=True)
class TaskConfig:
    """The databases and the tasks synthesised on them."""

    databases: int = 1_100  # of the embedded set; a folder of the user's is taken whole
    tasks_per_database: int = 9
    unseen_share: float = 0.05  # of the databases, held out whole
    eval_tasks: int = 512  # held-out tasks a split, at most a quarter of all tasks
    error_rate: float = 0.28  # teacher episodes with a failing query


@dataclass(frozen=True)
class StageConfig:
    """One supervised stage: warm-up or SFT."""

    steps: int
    rows: int  # packed rows an optimizer step
    row_tokens: int  # tokens of a row; longer examples are dropped and counted
    optim: OptimConfig


@dataclass(frozen=True)
class RlConfig:
    """The DAPO stage. An iteration samples `questions` groups of `group` episodes."""

    optim: OptimConfig
    objective: str = "dapo"
    iterations: int = 12
    questions: int = 16
    group: int = 8  # G of equation (7)
    updates: int = 2  # optimizer steps an iteration, each on its share of the groups
    temperature: float = 1.0


@dataclass(frozen=True)
class EvalConfig:
    """How each stage's policy is evaluated, on seen and on unseen databases."""

    base_tasks: int = 128  # the base fails nearly everything: fewer tasks tell as much
    temperatures: tuple[float, ...] = (0.0, 1.0)  # of every stage; 0 is greedy
    sharpened: tuple[float, ...] = (0.5,)  # of the SFT policy besides: what sharpening alone gives
    resamples: int = 4_000  # of the bootstrap intervals


@dataclass(frozen=True)
class DemoConfig:
    """The whole loop: databases, tasks, teacher, warm-up, SFT, RL, evaluation."""

    model: ModelConfig  # the vocabulary's size is an upper bound; the tokenizer decides
    warmup: StageConfig
    sft: StageConfig
    rl: RlConfig
    tasks: TaskConfig = TaskConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvalConfig = EvalConfig()
    call_tokens: int = 96  # most new tokens of one model call
    workers: int = 2  # sandbox processes of the environment service
    databases: Path | None = None  # a folder of SQLite files; None: the embedded set
    seed: int = 0
    save_every: int = 200  # optimizer steps between two checkpoints
    run_dir: Path = option(Path("runs/demo"))
    resume: bool = option(False)  # continue the run in `run_dir`, finished stages kept

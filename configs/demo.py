"""The demo's sizes: the whole loop in minutes on two CPU cores."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hsql_jax.demo_config import CorrectionConfig, DemoConfig, TaskConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.rl import RlConfig
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.sft import StageConfig


def demo() -> DemoConfig:
    """A Qwen3 of about a million parameters, trained from scratch."""
    optim = OptimConfig(
        name="muon", learning_rate=2e-2, adam_learning_rate=6e-3, b2=0.98, schedule="linear"
    )
    constant = dataclasses.replace(optim, schedule="constant")
    return DemoConfig(
        model=ModelConfig(
            vocab_size=1600,
            d_model=128,
            layers=3,
            heads=4,
            kv_heads=2,
            head_dim=32,
            d_ff=256,
            rope_theta=10_000.0,
            remat="none",
        ),
        warmup=StageConfig(steps=400, rows=2, row_tokens=512, optim=constant),
        sft=StageConfig(steps=1400, rows=4, row_tokens=256, optim=constant),
        refine=StageConfig(steps=1200, rows=4, row_tokens=288, optim=optim),
        rl=RlConfig(
            iterations=6,
            updates=1,
            optim=OptimConfig(
                name="adamw",
                learning_rate=2e-4,
                gain_learning_rate=1e-2,
                b2=0.99,
                schedule="linear",
                warmup=0.2,
            ),
        ),
    )


def own_databases() -> DemoConfig:
    """The default with `--databases`: long rows for real schemas, and a short SFT and RL.

    A few databases are too little to learn from at this size; the run shows that they pass through
    every stage. More databases, tasks and steps are options like any other.
    """
    base = demo()
    stage = dataclasses.replace(base.sft, steps=60, rows=2, row_tokens=1536)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=4000),
        warmup=stage,
        corrections=CorrectionConfig(tasks=24),
        sft=dataclasses.replace(stage, steps=90),
        refine=dataclasses.replace(stage, optim=base.refine.optim),
        rl=dataclasses.replace(base.rl, iterations=2, questions=4),
        tasks=TaskConfig(tasks_per_database=60, unseen_share=0.25, eval_tasks=32),
        engine=EngineConfig(slots=16, rows=16, width=64, lengths=(512, 1536)),
        evaluation=dataclasses.replace(base.evaluation, base_tasks=8),
        run_dir=Path("runs/own"),
    )

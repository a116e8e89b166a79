"""The demo at toy size: every stage does its real work, and none of it takes long."""

from __future__ import annotations

from hsql_jax.demo_config import CorrectionConfig, DemoConfig, TaskConfig
from hsql_jax.evaluate import EvalConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.rl import RlConfig
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.sft import StageConfig


def toy() -> DemoConfig:
    """Twelve embedded databases, a model of two thin layers, a handful of steps a stage."""
    optim = OptimConfig(name="adamw", learning_rate=1e-3)
    return DemoConfig(
        model=ModelConfig(
            vocab_size=1000,
            d_model=32,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            d_ff=64,
            remat="none",
        ),
        warmup=StageConfig(steps=6, rows=4, row_tokens=384, optim=optim),
        sft=StageConfig(steps=6, rows=4, row_tokens=384, optim=optim),
        refine=StageConfig(steps=4, rows=4, row_tokens=512, optim=optim),
        rl=RlConfig(optim=optim, objective="grpo", iterations=2, questions=2, group=2, updates=1),
        tasks=TaskConfig(databases=12, tasks_per_database=8, unseen_share=0.25, eval_tasks=6),
        corrections=CorrectionConfig(tasks=8),
        engine=EngineConfig(slots=8, rows=8, lengths=(128,)),
        evaluation=EvalConfig(base_tasks=4, sharpened=(), resamples=200),
        call_tokens=8,
        save_every=2,
    )

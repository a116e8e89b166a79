"""`hsql rl` at toy size; the tests give the paths."""

from __future__ import annotations

from pathlib import Path

from hsql_jax.evaluate import EvalConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.reinforce import RlRunConfig
from hsql_jax.rl import RlConfig
from hsql_jax.rollout.engine import EngineConfig


def toy() -> RlRunConfig:
    """Three iterations of two updates, a checkpoint after each."""
    return RlRunConfig(
        tasks=Path("none.jsonl"),
        databases=Path("none.jsonl"),
        tokenizer=Path("none"),
        weights="none",
        rl=RlConfig(
            optim=OptimConfig(learning_rate=1e-3),
            objective="dapo_tis",
            iterations=3,
            questions=2,
            group=2,
            rows=4,
            eval_every=2,
            save_every=1,
        ),
        engine=EngineConfig(slots=8, rows=8, lengths=(256,)),
        evaluation=EvalConfig(sharpened=(), resamples=200),
        remat="none",
        call_tokens=8,
        replayed=4,
        eval_tasks=4,
        watched=2,
    )

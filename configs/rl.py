"""Reinforcement learning: on this CPU from the demo's policy, and the paper's.

The paper samples 4 questions x 8 trajectories an iteration, 150 times, makes two updates of each
with Adam at 1e-6, and generates with T 0.6 (its top-p and top-k are not applied: what trains are
the log-probabilities of the distribution sampled). The objective is DAPO; `--rl.objective gspo`,
`grpo` and the others of `hsql_jax/objectives/catalog.py` take its place.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from configs import demo, meshes
from hsql_jax.evaluate import EvalConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.reinforce import RlRunConfig
from hsql_jax.rl import RlConfig
from hsql_jax.rollout.engine import EngineConfig

PAPER = RlConfig(
    optim=OptimConfig(learning_rate=1e-6, b2=0.98, schedule="constant", warmup=0.0),
    iterations=150,
    questions=4,
    group=8,
    updates=2,
    temperature=0.6,
    rows=4,
)


def tiny_cpu() -> RlRunConfig:
    """From the policy of `hsql demo` after SFT, on its tasks."""
    base = demo.demo()
    return RlRunConfig(
        tasks=Path("runs/demo/data/tasks.jsonl"),
        databases=Path("runs/demo/data/databases.jsonl"),
        tokenizer=Path("runs/demo/tokenizer"),
        weights="runs/demo/models/sft",
        rl=dataclasses.replace(base.rl, iterations=60, questions=32, updates=2, eval_every=10),
        engine=base.engine,
        remat="none",
        evaluation=EvalConfig(sharpened=(0.5, 0.7)),
    )


def _paper(name: str, session_tokens: int) -> RlRunConfig:
    return RlRunConfig(
        tasks=Path("data/tasks.jsonl"),
        databases=Path("data/databases.jsonl"),
        tokenizer=Path(f"models/{name}"),
        weights=f"runs/sft-{name}/model",
        rl=PAPER,
        engine=EngineConfig(
            slots=32,
            rows=16,
            width=256,
            chunk=32,
            lengths=tuple(n for n in (4096, 8192, 16_384, 32_768) if n <= session_tokens),
        ),
        dtype="bfloat16",
        meshes=meshes.gpus_4_4(),
        call_tokens=4096,
        workers=16,
        run_dir=Path(f"runs/rl-{name}-{session_tokens // 1024}k"),
    )


def qwen3_8b_8k() -> RlRunConfig:
    """Qwen3-8B, sessions of 8,192 tokens, four GPUs train while four generate."""
    return _paper("Qwen3-8B", 8192)


def qwen3_8b_16k() -> RlRunConfig:
    """Qwen3-8B, sessions of 16,384 tokens."""
    return _paper("Qwen3-8B", 16_384)


def qwen3_8b_32k() -> RlRunConfig:
    """Qwen3-8B, sessions of 32,768 tokens."""
    return _paper("Qwen3-8B", 32_768)


def qwen3_14b_8k() -> RlRunConfig:
    """Qwen3-14B, sessions of 8,192 tokens."""
    return _paper("Qwen3-14B", 8192)


def qwen3_14b_16k() -> RlRunConfig:
    """Qwen3-14B, sessions of 16,384 tokens."""
    return _paper("Qwen3-14B", 16_384)


def qwen3_14b_32k() -> RlRunConfig:
    """Qwen3-14B, sessions of 32,768 tokens."""
    return _paper("Qwen3-14B", 32_768)

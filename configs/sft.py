"""Supervised runs. The paper's: 2,512 trajectories, 16 a batch, 3 epochs, AdamW at 1e-5, cosine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from configs import meshes, models
from hsql_jax.data.config import DataConfig
from hsql_jax.finetune import SftConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.optim import OptimConfig
from hsql_jax.sharding import MeshConfig


def tiny() -> SftConfig:
    """A tiny model on what `hsql demo` has left: minutes on a CPU."""
    return SftConfig(
        data=DataConfig(Path("runs/demo/data/corpus.jsonl"), row_tokens=512, rows=8),
        model=dataclasses.replace(models.tiny(), vocab_size=1600, remat="none"),
        tokenizer=Path("runs/demo/tokenizer"),
        optim=OptimConfig(learning_rate=3e-3, warmup=0.03),
        epochs=1,
    )


def _paper(name: str, model: ModelConfig, mesh: MeshConfig, micro_batches: int) -> SftConfig:
    return SftConfig(
        data=DataConfig(Path("data/trajectories.jsonl"), packed=False),
        optim=OptimConfig(learning_rate=1e-5, warmup=0.05, weight_decay=0.01),
        model=model,
        tokenizer=Path(f"models/{name}"),
        weights=f"Qwen/{name}",
        mesh=mesh,
        micro_batches=micro_batches,
        examples=2512,
        run_dir=Path(f"runs/sft-{name}"),
    )


def qwen3_8b_32k() -> SftConfig:
    """Qwen3-8B at 32,768 tokens on eight GPUs or on v5p-16."""
    return _paper("Qwen3-8B", models.qwen3_8b(), meshes.gpus_8().train, micro_batches=2)


def qwen3_14b_32k() -> SftConfig:
    """Qwen3-14B at 32,768 tokens on eight GPUs or on v5p-16."""
    return _paper("Qwen3-14B", models.qwen3_14b(), meshes.gpus_8().train, micro_batches=2)

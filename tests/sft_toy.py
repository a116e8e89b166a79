"""`hsql sft` at toy size; the tests give the paths."""

from __future__ import annotations

from pathlib import Path

from hsql_jax.data.config import DataConfig
from hsql_jax.finetune import SftConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.optim import OptimConfig


def toy() -> SftConfig:
    """Twelve steps of four rows, a checkpoint every second."""
    return SftConfig(
        data=DataConfig(Path("none.jsonl"), row_tokens=512, rows=4, packed=False, workers=1),
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
        tokenizer=Path("none"),
        optim=OptimConfig(learning_rate=3e-3),
        micro_batches=2,
        save_every=2,
    )

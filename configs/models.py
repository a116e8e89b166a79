"""Qwen3 dense models, the sizes of the public checkpoints: float32 parameters, bfloat16 compute."""

from __future__ import annotations

from hsql_jax.model.config import ModelConfig


def _qwen3(d_model: int, layers: int, heads: int, d_ff: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        d_ff=d_ff,
        tied=tied,
        dtype="bfloat16",
    )


def qwen3_600m() -> ModelConfig:
    """Qwen3-0.6B."""
    return _qwen3(1024, 28, 16, 3072, tied=True)


def qwen3_1700m() -> ModelConfig:
    """Qwen3-1.7B."""
    return _qwen3(2048, 28, 16, 6144, tied=True)


def qwen3_4b() -> ModelConfig:
    """Qwen3-4B."""
    return _qwen3(2560, 36, 32, 9728, tied=True)


def qwen3_8b() -> ModelConfig:
    """Qwen3-8B."""
    return _qwen3(4096, 36, 32, 12_288, tied=False)


def qwen3_14b() -> ModelConfig:
    """Qwen3-14B."""
    return _qwen3(5120, 40, 40, 17_408, tied=False)


def qwen3_32b() -> ModelConfig:
    """Qwen3-32B."""
    return _qwen3(5120, 64, 64, 25_600, tied=False)


def tiny() -> ModelConfig:
    """Small enough to compile in seconds anywhere."""
    return ModelConfig(
        vocab_size=512, d_model=64, layers=2, heads=8, kv_heads=4, head_dim=16, d_ff=128
    )

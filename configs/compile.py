"""What `hsql compile` compiles: a model on a machine, with the batch of one update.

The batch is 16 rows of 32,768 tokens, and a session of the engine is as long; `--tokens 8192` and
the like change the rows.
"""

from __future__ import annotations

import dataclasses

from configs import meshes, models
from hsql_jax.compile import CompileConfig
from hsql_jax.model.config import ModelConfig
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.sharding import Meshes


def tiny() -> CompileConfig:
    """A tiny model on eight virtual CPU devices: every phase in seconds, without an accelerator."""
    return CompileConfig(
        model=models.tiny(),
        meshes=meshes.cpu_8(),
        tokens=128,
        rows=16,
        micro_batches=2,
        engine=EngineConfig(slots=8, rows=4, lengths=(128,)),
    )


def _long(model: ModelConfig, on: Meshes, topology: str, micro_batches: int = 1) -> CompileConfig:
    return CompileConfig(
        model=model,
        meshes=on,
        tokens=32_768,
        rows=16,
        micro_batches=micro_batches,
        engine=EngineConfig(slots=8, rows=4, width=256, chunk=32, lengths=(32_768,)),
        topology=topology,
    )


def _one_a_row(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, packed=False)


def _offload(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, remat="offload")


def qwen3_8b_v5p_16() -> CompileConfig:
    """Qwen3-8B on eight chips."""
    return _long(models.qwen3_8b(), meshes.v5p_16(), "v5p:2x2x2", micro_batches=2)


def qwen3_14b_v5p_16() -> CompileConfig:
    """Qwen3-14B on eight chips."""
    return _long(models.qwen3_14b(), meshes.v5p_16(), "v5p:2x2x2", micro_batches=2)


def qwen3_8b_v6e_16() -> CompileConfig:
    """Qwen3-8B on sixteen chips, the layers' inputs in host memory."""
    return _long(_offload(models.qwen3_8b()), meshes.v6e_16(), "v6e:4x4")


def qwen3_14b_v6e_16() -> CompileConfig:
    """Qwen3-14B on sixteen chips, the layers' inputs in host memory."""
    return _long(_offload(models.qwen3_14b()), meshes.v6e_16(), "v6e:4x4")


def qwen3_8b_v5e_16() -> CompileConfig:
    """Qwen3-8B on sixteen small chips."""
    return _long(models.qwen3_8b(), meshes.v5e_16(), "v5e:4x4")


def qwen3_8b_h100_8() -> CompileConfig:
    """Qwen3-8B on one node of eight GPUs; one trajectory a row, for cuDNN's attention."""
    return _long(_one_a_row(models.qwen3_8b()), meshes.gpus_8(), "h100:8", micro_batches=2)


def qwen3_14b_h100_8() -> CompileConfig:
    """Qwen3-14B on one node of eight GPUs; one trajectory a row, for cuDNN's attention."""
    return _long(_one_a_row(models.qwen3_14b()), meshes.gpus_8(), "h100:8", micro_batches=2)

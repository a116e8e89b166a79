"""Qwen3 as pure functions over one tree of parameters."""

from hsql_jax.model.config import ModelConfig
from hsql_jax.model.qwen3 import forward, head_matrix, init_params, param_shardings, param_specs

__all__ = ["ModelConfig", "forward", "head_matrix", "init_params", "param_shardings", "param_specs"]

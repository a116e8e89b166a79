"""Tokens and tensors: Qwen3, its training and its rollouts, in JAX."""

__version__ = "0.1.0"

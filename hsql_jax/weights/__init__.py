"""Hugging Face models of dense Qwen3, `config.json` and safetensors, to our parameters and back."""

from hsql_jax.weights.files import INDEX, TENSORS
from hsql_jax.weights.layout import hf_views
from hsql_jax.weights.load import load_hf
from hsql_jax.weights.save import save_hf

__all__ = ["INDEX", "TENSORS", "hf_views", "load_hf", "save_hf"]

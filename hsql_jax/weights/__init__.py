"""Hugging Face models of dense Qwen3, `config.json` and safetensors, to our parameters and back.

`converted` has the one-time conversion to an Orbax checkpoint.
"""

from hsql_jax.weights.files import INDEX, TENSORS
from hsql_jax.weights.hub import model_folder
from hsql_jax.weights.layout import hf_views
from hsql_jax.weights.load import load_hf, load_into
from hsql_jax.weights.save import save_hf
from hsql_jax.weights.shards import HOST_BYTES_PER_DEVICE

__all__ = [
    "HOST_BYTES_PER_DEVICE",
    "INDEX",
    "TENSORS",
    "hf_views",
    "load_hf",
    "load_into",
    "model_folder",
    "save_hf",
]

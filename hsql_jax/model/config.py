"""The sizes of a Qwen3 dense model, from our own configs or a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What the backward pass computes again: nothing; all of a layer but its products with weights; all
# of it, from its input; the same, with the inputs in host memory meanwhile.
Remat = Literal["none", "products", "full", "offload"]
AttentionName = Literal["auto", "blocks", "chunked", "cudnn", "splash"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one dense Qwen3 model; a demo of 1 M and an 8B differ only here."""

    vocab_size: int
    d_model: int
    layers: int
    heads: int  # query heads, H
    kv_heads: int  # key/value heads, K; a divisor of `heads`
    head_dim: int
    d_ff: int
    rope_theta: float = 1_000_000.0
    rms_eps: float = 1e-6
    tied: bool = True  # the output head is the embedding
    dtype: str = "float32"  # activations and matrix products
    param_dtype: str = "float32"
    remat: Remat = "full"
    attention: AttentionName = "auto"  # the backend of `hsql_jax.model.attention`
    packed: bool = True  # training rows hold several examples; False: one each, as cudnn needs

    def __post_init__(self) -> None:
        counts = ("vocab_size", "d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}): give at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads}); "
                "grouped-query attention needs whole groups"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd; rotary embedding needs pairs")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
        """Read a Hugging Face Qwen3 `config.json` dictionary.

        `rope_theta` is read at the top level or nested in `rope_parameters`. Raises `ValueError`
        when the architecture is not dense Qwen3 or a feature we do not compute is switched on.
        """
        if hf.get("model_type") != "qwen3":
            raise ValueError(f"model_type is {hf.get('model_type')!r}; only dense 'qwen3' is known")
        if hf.get("attention_bias") or hf.get("use_sliding_window"):
            raise ValueError("attention_bias and sliding windows are not implemented")
        rope = hf.get("rope_parameters") or {}
        scaling = hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        if rope_type != "default":
            raise ValueError(f"rope_type {rope_type!r} is not implemented; use 'default'")
        sizes: dict[str, Any] = {
            "vocab_size": hf["vocab_size"],
            "d_model": hf["hidden_size"],
            "layers": hf["num_hidden_layers"],
            "heads": hf["num_attention_heads"],
            "kv_heads": hf["num_key_value_heads"],
            "head_dim": hf.get("head_dim", 128),
            "d_ff": hf["intermediate_size"],
            "rope_theta": float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0))),
            "rms_eps": hf.get("rms_norm_eps", 1e-6),
            "tied": bool(hf.get("tie_word_embeddings", False)),
        }
        return cls(**(sizes | overrides))

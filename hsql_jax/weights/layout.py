"""Which stored tensors make up each parameter, and `config.json`.

Hugging Face keeps a matrix as [out, in] and every layer apart; ours are [in, out], layers stacked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_specs
from hsql_jax.model.qwen3 import Params, ParamSpec, is_spec
from hsql_jax.weights.files import read_json

EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TOP_NAMES = {"embed": EMBED, "final_norm": "model.norm.weight", "head": HEAD}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Leaf(NamedTuple):
    """One parameter: its shape and the tensors that hold it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]  # one a layer where `stacked`, else one
    stacked: bool  # on a leading axis of layers
    turned: bool  # stored with the axes of a layer reversed

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.reorder(self.shape[self.stacked :])

    @property
    def rows_axis(self) -> int:
        """The axis of the parameter that is the tensors' first."""
        return len(self.shape) - 1 if self.turned else int(self.stacked)

    def reorder(self, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is said of each axis, from a layer's order to the tensor's or back."""
        return axes[::-1] if self.turned else axes

    def view(self, array: np.ndarray | jax.Array, layer: int) -> Any:
        """The tensor of a layer in `array`, the whole parameter."""
        part = array[layer] if self.stacked else array
        return part.T if self.turned else part


def leaves(config: ModelConfig) -> Params:
    """The tree of parameters, a `Leaf` in the place of each."""

    def leaf(path: Any, spec: ParamSpec) -> Leaf:
        *above, name = (part.key for part in path)
        if not above:
            return Leaf(spec.shape, (TOP_NAMES[name],), stacked=False, turned=name != "embed")
        stem = f"{LAYER_NAMES[name]}.weight"
        names = tuple(f"model.layers.{index}.{stem}" for index in range(config.layers))
        return Leaf(spec.shape, names, stacked=True, turned=True)

    return jax.tree.map_with_path(leaf, param_specs(config), is_leaf=is_spec)


def is_leaf(node: Any) -> bool:
    """Stops tree functions at a `Leaf` (itself a tuple)."""
    return isinstance(node, Leaf)


def hf_views(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Every stored tensor as a view, [out, in], of its place in our tree of numpy arrays."""
    places = zip(jax.tree.leaves(leaves(config), is_leaf), jax.tree.leaves(params), strict=True)
    return {
        name: leaf.view(array, layer)
        for leaf, array in places
        for layer, name in enumerate(leaf.names)
    }


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tied,
        "dtype": config.param_dtype,
    }


def read_config(path: Path, dtype: str) -> ModelConfig:
    """The model of a `config.json`; `UserError` when a key is missing or a feature unknown."""
    try:
        return ModelConfig.from_hf(read_json(path), dtype=dtype, param_dtype=dtype)
    except KeyError as error:
        raise UserError(f"{path}: no key {error}; is it the config of a Qwen3 model?") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None

"""Hugging Face folders of dense Qwen3, `config.json` and safetensors, to and from our parameters.

Hugging Face keeps a matrix as [out, in] and every layer apart; ours are [in, out], layers stacked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_specs
from hsql_jax.model.qwen3 import Params, is_spec

TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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


def load_hf(folder: str | Path, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """Config and parameters, numpy arrays on the host, of a Hugging Face folder.

    `dtype` is that of parameters and activations; None keeps the stored one. `UserError` names the
    file, key or tensor that is missing, unexpected or broken.
    """
    folder = Path(folder)
    stored = {key: file for file in _tensor_files(folder) for key in _open(file).offset_keys()}
    if EMBED not in stored:
        raise UserError(f"{folder}: no tensor {EMBED}, but {', '.join(sorted(stored)[:5])} ..")
    dtype = dtype or _dtype(stored[EMBED])
    config = _read_config(folder / "config.json", dtype)
    params = jax.tree.map(
        lambda spec: np.empty(spec.shape, dtype), param_specs(config), is_leaf=is_spec
    )
    views = hf_views(config, params)
    if config.tied:
        stored.pop(HEAD, None)  # some tied files repeat the embedding here
    for problem, keys in {
        "no tensor": views.keys() - stored.keys(),
        "unexpected tensor": stored.keys() - views.keys(),
    }.items():
        if keys:
            raise UserError(f"{folder}: {problem} {min(keys)}; expected are {_listed(views)}")
    for file in sorted(set(stored.values())):
        with _open(file) as tensors:
            for key in tensors.offset_keys():
                if key in views:
                    _copy(tensors, key, views[key], file)
    return config, params


def save_hf(folder: str | Path, config: ModelConfig, params: Params) -> None:
    """Write `config.json` and `model.safetensors`, which `load_hf` reads back bit by bit."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    views = hf_views(config, jax.tree.map(np.asarray, params))
    partial = folder / f"{TENSORS}.partial"
    tensors = {key: np.ascontiguousarray(view) for key, view in views.items()}
    save_file(tensors, partial, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=2) + "\n")
    partial.replace(folder / TENSORS)


def _copy(tensors: Any, key: str, view: np.ndarray, file: Path) -> None:
    shape = tuple(tensors.get_slice(key).get_shape())
    if shape != view.shape:
        raise UserError(f"{file}: {key} has shape {shape}, but config.json makes it {view.shape}")
    view[...] = tensors.get_tensor(key)


def hf_views(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Every stored tensor as a view, [out, in], of its place in our tree of numpy arrays."""
    views = {EMBED: params["embed"], FINAL_NORM: params["final_norm"]}
    if "head" in params:
        views[HEAD] = params["head"].T
    for name, leaf in params["layers"].items():
        for index in range(config.layers):
            views[f"model.layers.{index}.{LAYER_NAMES[name]}.weight"] = leaf[index].T
    return views


def _hf_config(config: ModelConfig) -> dict[str, Any]:
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


def _listed(views: dict[str, np.ndarray]) -> str:
    """The expected set, the layers after the first left out."""
    return ", ".join(key for key in views if ".layers." not in key or ".layers.0." in key)


def _read_config(path: Path, dtype: str) -> ModelConfig:
    try:
        return ModelConfig.from_hf(_read_json(path), dtype=dtype, param_dtype=dtype)
    except KeyError as error:
        raise UserError(f"{path}: no key {error}; is it the config of a Qwen3 model?") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _tensor_files(folder: Path) -> list[Path]:
    if (folder / TENSORS).is_file():
        return [folder / TENSORS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder}: no {TENSORS} and no {INDEX}; give a Hugging Face model folder")
    names = _read_json(folder / INDEX)["weight_map"].values()
    return [folder / name for name in sorted(set(names))]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy the file again") from None


def _dtype(path: Path) -> str:
    name = _open(path).get_slice(EMBED).get_dtype()
    if name not in DTYPES:
        raise UserError(f"{path}: {EMBED} is stored as {name}; known are {', '.join(DTYPES)}")
    return DTYPES[name]

"""Hugging Face folders: bit-exact round trips, sharded sets, and what a wrong folder is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hsql_jax.errors import UserError
from hsql_jax.model import param_specs
from hsql_jax.model.qwen3 import is_spec
from hsql_jax.weights import INDEX, TENSORS, load_hf, save_hf

GOLDEN = Path(__file__).parent / "fixtures" / "golden"


def same_bits(a: Any, b: Any) -> None:
    def leaf(x: np.ndarray, y: np.ndarray) -> None:
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

    jax.tree.map(leaf, a, b)


@pytest.mark.parametrize("case", ["grouped", "untied"])
def test_shapes_are_those_of_the_specs_and_matrices_are_turned(case: str) -> None:
    config, params = load_hf(GOLDEN / case)
    stored = load_file(GOLDEN / case / TENSORS)
    specs = jax.tree.map(lambda spec: spec.shape, param_specs(config), is_leaf=is_spec)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == specs
    assert config.tied == ("head" not in params)
    down = stored["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["down"][1], down.T)
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    if not config.tied:
        np.testing.assert_array_equal(params["head"], stored["lm_head.weight"].T)


@pytest.mark.parametrize("case", ["grouped", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_keeps_every_bit(case: str, dtype: str, tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / case, dtype)
    assert config.dtype == config.param_dtype == dtype
    save_hf(tmp_path, config, jax.tree.map(jax.numpy.asarray, params))
    config_again, again = load_hf(tmp_path)
    assert config_again == config
    same_bits(again, params)
    if dtype == "float32":
        same_bits(load_file(tmp_path / TENSORS), load_file(GOLDEN / case / TENSORS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", TENSORS]


def test_bfloat16_is_rounded_from_float32_and_widened_back(tmp_path: Path) -> None:
    _, wide = load_hf(GOLDEN / "grouped")
    config, narrow = load_hf(GOLDEN / "grouped", "bfloat16")
    save_hf(tmp_path, config, narrow)
    _, widened = load_hf(tmp_path, "float32")
    rounded = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), wide)
    same_bits(widened, rounded)


def sharded(folder: Path, count: int = 3) -> Path:
    """The untied model as `count` files and an index."""
    shutil.copy(GOLDEN / "untied" / "config.json", folder)
    tensors = load_file(GOLDEN / "untied" / TENSORS)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {key: files[i % count] for i, key in enumerate(sorted(tensors))}
    for file in files:
        part = {key: tensors[key] for key, place in weight_map.items() if place == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_sharded_set_equals_the_single_file(tmp_path: Path) -> None:
    config, params = load_hf(sharded(tmp_path))
    whole_config, whole = load_hf(GOLDEN / "untied")
    assert config == whole_config
    same_bits(params, whole)


def test_tied_file_may_repeat_the_embedding(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "grouped" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "grouped" / TENSORS)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / TENSORS
    )
    same_bits(load_hf(tmp_path)[1], load_hf(GOLDEN / "grouped")[1])


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return edit


def edit_config(**change: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | change
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


K_NORM = "model.layers.1.self_attn.k_norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_tensors(lambda t: t.pop(K_NORM)), f"no tensor {K_NORM}; expected are model.embed_"),
        (edit_tensors(lambda t: t.update({BIAS: np.zeros(24)})), f"unexpected tensor {BIAS}"),
        (edit_tensors(lambda t: t.pop("model.embed_tokens.weight")), "no tensor model.embed_tok"),
        (edit_config(intermediate_size=48), r"mlp\.\w+\.weight has shape .*40.* makes it .*48"),
        (edit_config(num_hidden_layers=3), "no tensor model.layers.2.input_layernorm.weight"),
        (edit_config(num_hidden_layers=1), "unexpected tensor model.layers.1.input_layernorm"),
        (edit_config(tie_word_embeddings=True, model_type="llama"), "config.json: model_type is"),
        (edit_config(vocab_size=None), "config.json: no key 'vocab_size'"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / TENSORS).unlink(), f"no {TENSORS}, no {INDEX} and no model-"),
        (lambda f: (f / TENSORS).write_bytes(b"\0" * 20), f"{TENSORS}: cannot be read"),
    ],
)
def test_wrong_folder_gets_one_clear_line(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "untied", tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hf(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors: cannot be read"):
        load_hf(tmp_path)

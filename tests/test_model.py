"""Parity with transformers, what each config field does, packing, remat, initialisation."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from hsql_jax.losses import token_logprobs
from hsql_jax.model import ModelConfig, forward, head_matrix, init_params, param_specs
from hsql_jax.model.config import Remat
from hsql_jax.model.qwen3 import is_spec, matmul
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.weights import hf_views, load_hf

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
CASES = ["grouped", "untied", "single", "far", "eight", "long"]


@functools.partial(jax.jit, static_argnums=1)
def logits_of(
    params: Any, config: ModelConfig, tokens: Any, segments: Any, positions: Any
) -> jax.Array:
    return forward(params, config, tokens, segments, positions) @ head_matrix(params)


@functools.partial(jax.jit, static_argnums=1)
def loss_and_gradient(params: Any, config: ModelConfig, tokens: Any, positions: Any) -> Any:
    """Mean next-token cross-entropy, computed as the trainer does."""

    def loss(params: Any) -> jax.Array:
        hidden = forward(params, config, tokens, jnp.ones_like(tokens), positions)[:, :-1]
        targets = tokens[:, 1:]
        mask = jnp.ones_like(targets)
        return -token_logprobs(hidden, head_matrix(params), targets, mask, chunk=16)[0].mean()

    return jax.value_and_grad(loss)(params)


def golden(case: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(GOLDEN / case / "golden.safetensors", "numpy") as file:
        return {key: file.get_tensor(key) for key in file.offset_keys()}, file.metadata()


def golden_logits(case: str, config: ModelConfig, params: Any) -> np.ndarray:
    saved, _ = golden(case)
    ids = saved["input_ids"]
    return np.asarray(logits_of(params, config, ids, np.ones_like(ids), saved["position_ids"]))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str) -> None:
    config, params = load_hf(GOLDEN / case)
    kept = golden(case)[0]["logits"]  # of the last positions: of "long", 4544 to 4607
    ours = golden_logits(case, config, params)[:, -kept.shape[1] :]
    assert np.abs(ours - kept).max() <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_transformers(case: str) -> None:
    config, params = load_hf(GOLDEN / case)
    saved, metadata = golden(case)
    loss, gradient = loss_and_gradient(params, config, saved["input_ids"], saved["position_ids"])
    assert float(loss) == pytest.approx(float(saved["loss"]), rel=1e-5)
    ours = hf_views(config, jax.tree.map(np.asarray, gradient))
    norms = {name: float(norm) for name, norm in json.loads(metadata["gradient_norms"]).items()}
    assert {name: float(np.linalg.norm(g)) for name, g in ours.items()} == pytest.approx(
        norms, rel=1e-3
    )
    whole = saved["gradient"]
    error = np.linalg.norm(ours[metadata["gradient_of"]] - whole) / np.linalg.norm(whole)
    assert error <= 1e-3


def cut(params: Any, config: ModelConfig) -> Any:
    """The leading part of every parameter that a smaller model has."""
    specs = param_specs(config)
    kept = {name: leaf for name, leaf in params.items() if name in specs}
    return jax.tree.map(
        lambda spec, leaf: leaf[tuple(map(slice, spec.shape))], specs, kept, is_leaf=is_spec
    )


CHANGES: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 24,
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 6,
    "d_ff": 32,
    "rope_theta": 1e4,
    "rms_eps": 1e-4,
    "tied": True,
    "dtype": "bfloat16",
    "param_dtype": "bfloat16",
    "remat": "none",
    "attention": "chunked",
    "packed": False,
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelConfig)])
def test_each_field_of_the_config_changes_the_logits(field: str) -> None:
    case = "grouped" if field == "kv_heads" else "untied"
    config, params = load_hf(GOLDEN / case)
    ids = golden(case)[0]["input_ids"] % CHANGES["vocab_size"]
    positions = golden(case)[0]["position_ids"]

    def logits(config: ModelConfig) -> np.ndarray:
        smaller = jax.tree.map(lambda x: x.astype(config.param_dtype), cut(params, config))
        return np.asarray(logits_of(smaller, config, ids, np.ones_like(ids), positions), np.float32)

    changed = dataclasses.replace(config, **{field: CHANGES[field]})
    assert changed != config
    before, after = logits(config), logits(changed)
    if field == "vocab_size":
        assert after.shape[-1] == CHANGES["vocab_size"]
        np.testing.assert_allclose(after, before[..., : after.shape[-1]], atol=1e-5)
    elif field == "remat":
        np.testing.assert_array_equal(after, before)
    elif field in ("attention", "packed"):
        np.testing.assert_allclose(after, before, atol=1e-5)
    else:
        assert np.abs(after - before).max() > (1e-4 if field == "rms_eps" else 1e-2)


@pytest.mark.parametrize("case", ["grouped", "untied", "single", "far", "eight"])
def test_bfloat16_stays_near_float32(case: str) -> None:
    """The stated deviation: of weights in bfloat16, activations in bfloat16 against float32."""
    config, params = load_hf(GOLDEN / case, "bfloat16")
    narrow = golden_logits(case, config, params).astype(np.float32)
    wide_config = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    wide = golden_logits(case, wide_config, jax.tree.map(lambda x: x.astype(np.float32), params))
    assert 0.001 < np.std(narrow - wide) / np.std(wide) < 0.025  # measured: 0.009 to 0.016
    assert np.abs(narrow - wide).max() < 0.3  # of logits with a deviation of 1.3


def test_query_heads_share_the_key_value_head_of_their_group() -> None:
    """Heads 0, 1 read key/value head 0 and heads 2, 3 read 1: whole groups may change places."""
    config, params = load_hf(GOLDEN / "grouped")
    reference = golden_logits("grouped", config, params)

    def swap(leaf: np.ndarray, axis: int) -> np.ndarray:
        return np.concatenate(np.split(leaf, 2, axis)[::-1], axis)

    layers = params["layers"]
    keys_values = {name: swap(layers[name], 2) for name in ("k", "v")}
    queries = {"q": swap(layers["q"], 2), "o": swap(layers["o"], 1)}
    groups = golden_logits("grouped", config, params | {"layers": layers | keys_values | queries})
    assert np.abs(groups - reference).max() < 1e-4
    mixed = golden_logits("grouped", config, params | {"layers": layers | keys_values})
    assert np.abs(mixed - reference).max() > 0.1


def test_config_is_read_from_either_form_of_hugging_face() -> None:
    hf = json.loads((GOLDEN / "single" / "config.json").read_text())
    expected = ModelConfig(
        vocab_size=64, d_model=28, layers=2, heads=4, kv_heads=4, head_dim=16, d_ff=40,
        rope_theta=1e4, rms_eps=1e-5, tied=True,
    )  # fmt: skip
    assert ModelConfig.from_hf(hf) == expected
    old = {key: value for key, value in hf.items() if key not in ("rope_parameters", "head_dim")}
    read = ModelConfig.from_hf(old | {"rope_theta": 5e5, "tie_word_embeddings": False})
    assert read == dataclasses.replace(expected, rope_theta=5e5, tied=False, head_dim=128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_moe"}, "only dense 'qwen3'"),
        ({"use_sliding_window": True}, "sliding windows are not implemented"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_key_value_heads": 3}, r"heads \(4\) is not a multiple of kv_heads \(3\)"),
        ({"head_dim": 7}, r"head_dim \(7\) is odd"),
    ],
)
def test_config_that_we_do_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    hf = json.loads((GOLDEN / "single" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf | change)


def test_packed_sequences_are_computed_as_if_alone() -> None:
    config, params = load_hf(GOLDEN / "grouped")
    ids = golden("grouped")[0]["input_ids"]
    first, second = ids[0, :9], ids[1, :8]
    row = np.concatenate([first, second, [7, 7, 7]])[None]  # three places of padding
    segments = np.repeat([1, 2, 0], [9, 8, 3])[None]
    positions = np.concatenate([np.arange(9), np.arange(8), np.zeros(3, int)])[None]
    packed = np.asarray(logits_of(params, config, row, segments, positions))[0]
    alone = golden("grouped")[0]["logits"]
    np.testing.assert_allclose(packed[:9], alone[0, :9], atol=1e-4)
    np.testing.assert_allclose(packed[9:17], alone[1, :8], atol=1e-4)
    assert np.isfinite(packed[17:]).all()


@pytest.mark.parametrize("remat", ["products", "none"])
def test_remat_changes_no_gradient(remat: Remat) -> None:
    config, params = load_hf(GOLDEN / "grouped")
    saved, _ = golden("grouped")
    tokens, positions = saved["input_ids"], saved["position_ids"]
    assert config.remat == "full"
    loss, recomputed = loss_and_gradient(params, config, tokens, positions)
    plain = dataclasses.replace(config, remat=remat)
    plain_loss, kept = loss_and_gradient(params, plain, tokens, positions)
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), recomputed, kept)


def kept_numbers(remat: Remat) -> float:
    """What the backward pass finds kept of a token and a layer, by the compiler's report."""

    def temporary(layers: int) -> int:
        config = ModelConfig(
            vocab_size=8, d_model=32, layers=layers, heads=4, kv_heads=2, head_dim=8, d_ff=96,
            remat=remat,
        )  # fmt: skip
        tokens = jnp.zeros((1, 256), jnp.int32)
        shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        loss = jax.grad(lambda params: forward(params, config, tokens, tokens + 1, tokens).sum())
        memory = jax.jit(loss).lower(shapes).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    return (temporary(32) - temporary(16)) / (16 * 256 * 4)


def test_each_remat_policy_keeps_more_than_the_one_before() -> None:
    assert kept_numbers("full") == pytest.approx(32, rel=0.1)  # the layer's input
    products = 32 + 16 + 16 + 32 + 96 + 96  # q, k, v, o, gate, up; nothing needs what down gives
    assert kept_numbers("products") == pytest.approx(32 + products, rel=0.1)
    assert kept_numbers("none") > 1.5 * (32 + products)


def test_offloaded_layer_inputs_go_to_the_host() -> None:
    """A CPU has no second memory to run this in: the traced program is what can be looked at."""
    config, params = load_hf(GOLDEN / "grouped")
    config = dataclasses.replace(config, remat="offload")
    tokens = jnp.zeros((1, 8), jnp.int32)

    def total(params: Any) -> jax.Array:
        return forward(params, config, tokens, tokens + 1, tokens).sum()

    text = str(jax.make_jaxpr(jax.grad(total))(params))
    assert "pinned_host" in text or "<host>" in text


def test_gradients_of_weights_are_not_rounded_to_the_activations_dtype() -> None:
    """Two halves of a batch, apart and together: in bfloat16 their sum would differ by 2^-9."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 8)), jnp.bfloat16)
    weight, d_out = rng.normal(size=(8, 8)).astype(np.float32), jnp.ones((64, 8), jnp.bfloat16)
    out, pull = jax.vjp(matmul, x, jnp.asarray(weight))
    d_x, d_weight = pull(d_out)
    assert (out.dtype, d_x.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = np.asarray(x, np.float64).T @ np.ones((64, 8))
    np.testing.assert_allclose(d_weight, exact, rtol=1e-5)


def test_eight_devices_that_share_each_row_compute_the_states_of_one() -> None:
    config, params = load_hf(GOLDEN / "grouped")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 128))
    segments = np.repeat([[1, 2, 3, 0]], [20, 50, 48, 10], axis=1).repeat(2, axis=0)
    positions = np.concatenate([np.arange(n) for n in (20, 50, 48, 10)])[None].repeat(2, axis=0)
    states = jax.jit(forward, static_argnums=(1, 5))
    alone = states(params, config, tokens, segments, positions, None)
    for mesh in (MeshConfig(data=2, context=4), MeshConfig(fsdp=2, tensor=2, context=2)):
        shared = states(params, config, tokens, segments, positions, make_mesh(mesh))
        np.testing.assert_allclose(shared, alone, atol=1e-5)


def test_init_depends_on_the_key_alone() -> None:
    config = ModelConfig(
        vocab_size=64, d_model=32, layers=8, heads=4, kv_heads=2, head_dim=16, d_ff=48, tied=False
    )
    params = init_params(config, jax.random.key(0))
    again = init_params(config, jax.random.key(0))
    other = init_params(config, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert not np.array_equal(params["embed"], other["embed"])
    layers = params["layers"]
    assert not np.array_equal(layers["gate"], layers["up"])
    assert not np.array_equal(layers["q"][0], layers["q"][1])
    assert np.all(np.asarray(layers["attn_norm"]) == 1.0)
    # Scales: 1/sqrt(fan-in), and the branches' last matrices smaller by sqrt(2 L).
    assert float(layers["q"].std()) == pytest.approx(32**-0.5, rel=0.05)
    assert float(layers["down"].std()) == pytest.approx(48**-0.5 / 4, rel=0.05)
    assert float(params["head"].std()) == pytest.approx(32**-0.5, rel=0.05)

"""Qwen3 (dense): parameters from one spec tree, and a pure forward pass.

Shapes: B batch, T time, N = B*T, D model, H query heads, K key/value heads, Q head size,
F feed-forward, V vocabulary, L layers. Layers are stacked on a leading L and scanned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from hsql_jax.model.attention import attention
from hsql_jax.model.config import ModelConfig
from hsql_jax.sharding import constrain, layout

Params = dict[str, Any]

LAYER_INPUT, PRODUCT = "layer_input", "product"  # what a policy may keep
POLICIES: dict[str, Any] = {
    "products": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class ParamSpec(NamedTuple):
    """One parameter: its shape, its logical axes, and the scale of its normal initialiser."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None  # None: ones (norm gains)


def param_specs(config: ModelConfig) -> Params:
    """The tree from which initialisation, sharding and weight loading all derive."""
    D, F, L, V = config.d_model, config.d_ff, config.layers, config.vocab_size
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    out_scale = (2 * L) ** -0.5  # residual branches start small, whatever the depth

    def matrix(rows: int, cols: int, axes: tuple[str, str], scale: float = 1.0) -> ParamSpec:
        return ParamSpec((L, rows, cols), ("layers", *axes), scale * rows**-0.5)

    def gain(size: int, axis: str | None) -> ParamSpec:
        return ParamSpec((L, size), ("layers", axis), None)

    specs: Params = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), D**-0.5),
        "layers": {
            "attn_norm": gain(D, "embed"),
            "q": matrix(D, heads, ("embed", "heads")),
            "k": matrix(D, kv_heads, ("embed", "kv_heads")),
            "v": matrix(D, kv_heads, ("embed", "kv_heads")),
            "q_norm": gain(config.head_dim, None),
            "k_norm": gain(config.head_dim, None),
            "o": matrix(heads, D, ("heads", "embed"), out_scale),
            "mlp_norm": gain(D, "embed"),
            "gate": matrix(D, F, ("embed", "mlp")),
            "up": matrix(D, F, ("embed", "mlp")),
            "down": matrix(F, D, ("mlp", "embed"), out_scale),
        },
        "final_norm": ParamSpec((D,), ("embed",), None),
    }
    if not config.tied:
        specs["head"] = ParamSpec((D, V), ("embed", "vocab"), D**-0.5)
    return specs


def is_spec(leaf: Any) -> bool:
    """Stops tree functions at a `ParamSpec` (itself a tuple)."""
    return isinstance(leaf, ParamSpec)


def param_shardings(mesh: Mesh, config: ModelConfig) -> Params:
    """A sharding for each parameter; `ValueError` names a dimension that does not divide."""

    def leaf(path: Any, spec: ParamSpec) -> NamedSharding:
        try:
            return layout(mesh, spec.shape, spec.axes)
        except ValueError as error:
            raise ValueError(f"{jax.tree_util.keystr(path)}: {error}") from None

    return jax.tree.map_with_path(leaf, param_specs(config), is_leaf=is_spec)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters; each leaf has its own key, so the values do not depend on tree order."""
    specs = param_specs(config)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(specs, is_spec)]
    order = {name: index for index, name in enumerate(sorted(paths))}

    def init(path: Any, spec: ParamSpec) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, config.param_dtype)
        leaf_key = jax.random.fold_in(key, order[jax.tree_util.keystr(path)])
        return spec.scale * jax.random.normal(leaf_key, spec.shape, config.param_dtype)

    return jax.tree.map_with_path(init, specs, is_leaf=is_spec)


def head_matrix(params: Params) -> jax.Array:
    """The output projection [D, V]; the transposed embedding when tied."""
    return params["head"] if "head" in params else params["embed"].T


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    segment_ids_BT: jax.Array,
    positions_BT: jax.Array,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Final hidden states [B, T, D] of packed rows; `head_matrix` turns them into logits.

    `segment_ids` separate the sequences of a row (0 is padding) and `positions` restart in each.
    With a `mesh`, the rows and their time stay split over it from layer to layer. Where time is
    split, give each of the batch's devices one row at a time (as micro-batches): of several, which
    are flattened together with their time, XLA gathers the time.
    """
    x_BTD = params["embed"][tokens_BT].astype(config.dtype)
    x_BTD = constrain(x_BTD, mesh, "batch", "time", None)
    cos_sin = rope_table(positions_BT, config.head_dim, config.rope_theta)

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, LAYER_INPUT)
        with jax.named_scope("attention"):
            q, k, v = project_qkv(x, weights, config, cos_sin)
            mixed = attention(
                q,
                k,
                v,
                segment_ids_BT,
                backend=config.attention,
                packed=config.packed,
                mesh=mesh,
            )
            x = x + project_out(mixed, weights)
        with jax.named_scope("mlp"):
            x = x + mlp(x, weights, config)
        return constrain(x, mesh, "batch", "time", None), None

    if config.remat != "none":
        layer = jax.checkpoint(layer, policy=POLICIES[config.remat])
    x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
    return rms_norm(x_BTD, params["final_norm"], config.rms_eps)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32, cast back before the gain."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)


def rope_table(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, 1, Q/2] of rotary position embedding, in float32."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BTHQ: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the two halves of each head (Qwen3's layout: i pairs with i + Q/2)."""
    cos, sin = cos_sin
    left, right = jnp.split(x_BTHQ.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x_BTHQ.dtype)


def project_qkv(
    x_BTD: jax.Array, weights: Params, config: ModelConfig, cos_sin: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, H, Q], keys and values [B, T, K, Q]; q and k normed per head, then rotated."""
    B, T, _ = x_BTD.shape
    flat_ND = rms_norm(x_BTD, weights["attn_norm"], config.rms_eps).reshape(B * T, -1)

    def heads(name: str, count: int) -> jax.Array:
        return matmul(flat_ND, weights[name]).reshape(B, T, count, config.head_dim)

    q = rms_norm(heads("q", config.heads), weights["q_norm"], config.rms_eps)
    k = rms_norm(heads("k", config.kv_heads), weights["k_norm"], config.rms_eps)
    return apply_rope(q, cos_sin), apply_rope(k, cos_sin), heads("v", config.kv_heads)


def project_out(attended_BTHQ: jax.Array, weights: Params) -> jax.Array:
    """Heads back to the residual stream [B, T, D]."""
    B, T, H, Q = attended_BTHQ.shape
    return matmul(attended_BTHQ.reshape(B * T, H * Q), weights["o"]).reshape(B, T, -1)


def mlp(x_BTD: jax.Array, weights: Params, config: ModelConfig) -> jax.Array:
    """SwiGLU feed-forward on flattened [B*T, D], which CPU and GPU matmuls prefer."""
    B, T, D = x_BTD.shape
    flat_ND = rms_norm(x_BTD, weights["mlp_norm"], config.rms_eps).reshape(B * T, D)
    gate, up = matmul(flat_ND, weights["gate"]), matmul(flat_ND, weights["up"])
    return matmul(jax.nn.silu(gate) * up, weights["down"]).reshape(B, T, D)


def matmul(x_NI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """Activations times a weight, in the activations' dtype; the weight's gradient is float32.

    The gradient of a plain product with a cast weight would be rounded to the activations' dtype
    before it is summed over devices and micro-batches.
    """
    return checkpoint_name(_matmul(x_NI, weight_IO), PRODUCT)


@jax.custom_vjp
def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight.astype(x.dtype)


def _matmul_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    return _matmul(x, weight), (x, weight)


def _matmul_backward(saved: tuple[Any, ...], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    d_weight = jnp.matmul(x.T, d_out, preferred_element_type=jnp.float32)
    return d_out @ weight.astype(d_out.dtype).T, d_weight.astype(weight.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)

"""Cached generation: extend slots with known tokens, then sample tokens one by one.

Shapes: S slots (rows of the cache), R rows worked on, C cache length, W new tokens of a row,
n steps of a chunk, K key/value heads, G query heads a key/value head, Q head size, V vocabulary.

`extend` and `decode` only read the cache; the new keys and values live in a small buffer that
`write_rows` stores afterwards, as a computation of its own on a donated cache. In one computation
with the reads XLA would copy the whole cache first. Keys are stored [K, Q, C] and values
[K, C, Q], the layouts in which both products of attention read memory in order. Layers are
unrolled: a scan would copy its slice of the cache at every step.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hsql_jax.model.attention import MASKED
from hsql_jax.model.config import ModelConfig
from hsql_jax.model.qwen3 import (
    Params,
    head_matrix,
    mlp,
    project_out,
    project_qkv,
    rms_norm,
    rope_table,
)
from hsql_jax.sharding import layout

Array = Any  # numpy from the host, jax inside a step


class LayerCache(NamedTuple):
    """Keys [S, K, Q, C] and values [S, K, C, Q] of one layer; junk past a slot's length."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]  # one a layer


class Rows(NamedTuple):
    """What the host knows of the rows it asks to work on, each [R]."""

    slot: Array  # which row of the cache, int32
    length: Array  # tokens of the slot already in the cache, int32
    seed: Array  # the episode's sampling seed, uint32
    drawn: Array  # tokens this episode has sampled so far, int32: the counter of its stream


class Sampled(NamedTuple):
    """Tokens sampled in a chunk."""

    tokens: jax.Array  # [R, n] int32
    logprobs: jax.Array  # [R, n] float32, of the distribution that was sampled
    counts: jax.Array  # [R] int32: how many of the n are real


def init_cache(config: ModelConfig, slots: int, length: int) -> Cache:
    """An empty cache for `slots` sequences of at most `length` tokens."""
    K, Q = config.kv_heads, config.head_dim
    k = jnp.zeros((slots, K, Q, length), config.dtype)
    v = jnp.zeros((slots, K, length, Q), config.dtype)
    return tuple(LayerCache(jnp.copy(k), jnp.copy(v)) for _ in range(config.layers))


def cache_shardings(mesh: Mesh, cache: Cache) -> Cache:
    """Shardings of a cache or of a buffer: key/value heads split over the mesh's tensor axis."""
    return jax.tree.map(
        lambda leaf: layout(mesh, leaf.shape, (None, "kv_heads", None, None)), cache
    )


def sample(logits_RV: jax.Array, rows: Rows, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token a row and its log-probability under softmax(logits / temperature).

    Temperature 0 is greedy; its log-probabilities are those at temperature 1. Each row draws one
    uniform number from its own (seed, counter) stream and inverts the cumulative distribution, so
    a row's tokens do not depend on which other rows stand beside it.
    """
    logprobs = jax.nn.log_softmax(logits_RV / jnp.where(temperature > 0, temperature, 1.0))

    def uniform(seed: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), count))

    drawn = inverse_cdf(jnp.exp(logprobs), jax.vmap(uniform)(rows.seed, rows.drawn))
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits_RV, axis=-1)).astype(jnp.int32)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def inverse_cdf(probs_RV: jax.Array, uniform_R: jax.Array) -> jax.Array:
    """The index at which each row's cumulative probability passes `uniform` (in [0, 1)).

    Two levels, blocks of about sqrt(V) and then inside one block: cheap, and more exact in
    float32 than one running sum over a large vocabulary. Never an index of probability zero.
    """
    R, V = probs_RV.shape
    size = math.isqrt(V - 1) + 1
    blocks = jnp.pad(probs_RV, ((0, 0), (0, -V % size))).reshape(R, -1, size)

    def pick(mass_RX: jax.Array, target_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        cumulative = jnp.cumsum(mass_RX, axis=-1)
        target = jnp.minimum(target_R, cumulative[:, -1] * (1.0 - 1e-6))
        index = jnp.sum(cumulative <= target[:, None], axis=-1, keepdims=True)
        before = jnp.take_along_axis(cumulative - mass_RX, index, axis=-1)[:, 0]
        return index, target - before

    sums = blocks.sum(axis=-1)
    block, rest = pick(sums, uniform_R * sums.sum(axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    index, _ = pick(inside, jnp.maximum(rest, 0.0))
    return (block * size + index)[:, 0]


def cached_attention(
    q_RWHQ: jax.Array,
    parts: tuple[LayerCache, ...],
    visible: tuple[jax.Array, ...],
) -> jax.Array:
    """Attention of W queries over several stretches of keys, each [R, W, length] visible or not."""
    R, W, H, Q = q_RWHQ.shape
    K = parts[0].k.shape[1]
    q = q_RWHQ.reshape(R, W, K, H // K, Q).transpose(0, 2, 3, 1, 4).reshape(R, K, -1, Q)

    def score(part: LayerCache, seen_RWC: jax.Array) -> jax.Array:
        raw = jnp.einsum("rkmq,rkqc->rkmc", q, part.k, preferred_element_type=jnp.float32)
        raw = raw.reshape(R, K, H // K, W, -1) * Q**-0.5
        return jnp.where(seen_RWC[:, None, None], raw, MASKED).reshape(R, K, (H // K) * W, -1)

    scores = [score(part, seen) for part, seen in zip(parts, visible, strict=True)]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    bounds = np.cumsum([part.k.shape[-1] for part in parts])[:-1]
    split = jnp.split(weights, bounds, axis=-1)
    mixed = [jnp.einsum("rkmc,rkcq->rkmq", w, p.v) for w, p in zip(split, parts, strict=True)]
    out = functools.reduce(jnp.add, mixed)
    return out.reshape(R, K, H // K, W, Q).transpose(0, 3, 1, 2, 4).reshape(R, W, H, Q)


def unstack(params: Params) -> Params:
    """The parameters with every layer's apart: a loop would copy its slice at every step."""
    layers = params["layers"]
    count = layers["q"].shape[0]
    apart = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count))
    return params | {"layers": apart}


def cached_layers(
    params: Params,
    config: ModelConfig,
    tokens_RW: jax.Array,
    positions_RW: jax.Array,
    old: Cache,
    new: Cache,
    visible: tuple[jax.Array, jax.Array],
    offset: jax.Array | int,
) -> tuple[jax.Array, Cache]:
    """All layers over W new tokens a row; their keys and values enter `new` at `offset`.

    The parameters are those of `unstack`.

    A query sees the cache `old` and the buffer `new` under the two masks of `visible`. Returns
    the final hidden states [R, W, D] and the updated buffer.
    """
    x = params["embed"][tokens_RW].astype(config.dtype)
    cos_sin = rope_table(positions_RW, config.head_dim, config.rope_theta)
    buffers = []
    for index, weights in enumerate(params["layers"]):
        q, k, v = project_qkv(x, weights, config, cos_sin)
        buffer = LayerCache(
            jax.lax.dynamic_update_slice_in_dim(
                new[index].k, k.transpose(0, 2, 3, 1), offset, axis=3
            ),
            jax.lax.dynamic_update_slice_in_dim(
                new[index].v, v.transpose(0, 2, 1, 3), offset, axis=2
            ),
        )
        attended = cached_attention(q, (old[index], buffer), visible)
        x = x + project_out(attended, weights)
        x = x + mlp(x, weights, config)
        buffers.append(buffer)
    return rms_norm(x, params["final_norm"], config.rms_eps), tuple(buffers)


def read_rows(cache: Cache, rows: Rows, used: int) -> Cache:
    """The first `used` positions of the rows' slots."""
    return tuple(
        LayerCache(
            layer.k[..., :used].at[rows.slot].get(mode="clip"),
            layer.v[..., :used, :].at[rows.slot].get(mode="clip"),
        )
        for layer in cache
    )


def empty_buffer(old: Cache, steps: int) -> Cache:
    """A buffer of `steps` positions shaped like `old`."""
    return tuple(
        LayerCache(
            jnp.zeros((*layer.k.shape[:3], steps), layer.k.dtype),
            jnp.zeros((*layer.v.shape[:2], steps, layer.v.shape[3]), layer.v.dtype),
        )
        for layer in old
    )


def write_rows(cache: Cache, new: Cache, rows: Rows) -> Cache:
    """Store each row's buffer behind its length, row after row and in place.

    The caller sees to it that a buffer fits: `dynamic_update_slice` would shift it otherwise. (A
    scatter does the same in one operation and is a hundred times slower on a CPU.)
    """

    def write(row: jax.Array, cache: Cache) -> Cache:
        slot, at = rows.slot[row], rows.length[row]
        return tuple(
            LayerCache(
                jax.lax.dynamic_update_slice(layer.k, fresh.k[row][None], (slot, 0, 0, at)),
                jax.lax.dynamic_update_slice(layer.v, fresh.v[row][None], (slot, 0, at, 0)),
            )
            for layer, fresh in zip(cache, new, strict=True)
        )

    return jax.lax.fori_loop(0, rows.slot.shape[0], write, cache)


def extend(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    rows: Rows,
    tokens_RW: jax.Array,
    count_R: jax.Array,
    temperature: jax.Array,
    *,
    used: int,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Feed `count` tokens to each row and sample the token that follows: (buffer, token, logprob).

    A padding row names a slot that nobody reads.
    """
    R, W = tokens_RW.shape
    old = read_rows(cache, rows, used)
    steps = jnp.arange(W)
    old_visible = jnp.arange(used)[None, None, :] < rows.length[:, None, None]
    visible = (
        jnp.broadcast_to(old_visible, (R, W, used)),
        jnp.broadcast_to(steps[:, None] >= steps[None, :], (R, W, W)),
    )
    positions = rows.length[:, None] + steps[None, :]
    hidden, new = cached_layers(
        params, config, tokens_RW, positions, old, empty_buffer(old, W), visible, offset=0
    )
    last = jnp.take_along_axis(hidden, (count_R - 1)[:, None, None], axis=1)[:, 0]
    token, logprob = sample(logits_of(params, last), rows, temperature)
    return new, token, logprob


def decode(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    rows: Rows,
    token_R: jax.Array,
    limit_R: jax.Array,
    stop_id: int,
    temperature: jax.Array,
    *,
    steps: int,
    used: int,
) -> tuple[Cache, Sampled]:
    """Sample up to `steps` tokens a row after `token`, each row until `stop_id` or its `limit`.

    Returns the buffer for `write_rows` and the tokens. `used` bounds every row's length, so that
    only that much of the cache is read. A row with limit 0 does nothing. The loop ends early when
    every row has stopped.
    """
    R = token_R.shape[0]
    old = read_rows(cache, rows, used)
    old_visible = (jnp.arange(used)[None, :] < rows.length[:, None])[:, None, :]
    out = Sampled(
        jnp.zeros((R, steps), jnp.int32),
        jnp.zeros((R, steps), jnp.float32),
        jnp.zeros((R,), jnp.int32),
    )

    def body(carry: Any) -> Any:
        i, token, buffer, out, live = carry
        new_visible = jnp.broadcast_to(jnp.arange(steps) <= i, (R, 1, steps))
        hidden, buffer = cached_layers(
            params,
            config,
            token[:, None],
            (rows.length + i)[:, None],
            old,
            buffer,
            (old_visible, new_visible),
            offset=i,
        )
        stream = rows._replace(drawn=rows.drawn + i)
        token, logprob = sample(logits_of(params, hidden[:, 0]), stream, temperature)
        out = Sampled(
            out.tokens.at[:, i].set(token),
            out.logprobs.at[:, i].set(logprob),
            out.counts + live,
        )
        live = live & (token != stop_id) & (out.counts < limit_R)
        return i + 1, token, buffer, out, live

    def going(carry: Any) -> jax.Array:
        return (carry[0] < steps) & jnp.any(carry[4])

    start = (jnp.int32(0), token_R, empty_buffer(old, steps), out, limit_R > 0)
    _, _, buffer, out, _ = jax.lax.while_loop(going, body, start)
    return buffer, out


def logits_of(params: Params, hidden_RD: jax.Array) -> jax.Array:
    """Float32 logits [R, V]."""
    head = head_matrix(params).astype(hidden_RD.dtype)
    return jnp.matmul(hidden_RD, head, preferred_element_type=jnp.float32)

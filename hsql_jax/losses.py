"""Token log-probabilities without ever holding [B, T, V] logits.

Shapes: B rows, T tokens a row, N = B*T, C tokens of a chunk, D model, V vocabulary, W columns of a
block of it. On a mesh, all but `token_logprobs` see one device's part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hsql_jax.sharding import RULES, platform_of, spec_of

PIECE = 4096  # tokens and columns whose logits exist at once on a device
CPU_PIECE = 512  # likewise, so that they stay in a core's cache
TOKENS, HIDDEN, HEAD = ("batch", "time"), ("batch", "time", None), ("embed", "vocab")
INPUTS = HIDDEN, HEAD, TOKENS, TOKENS, ()  # the last one is the temperature
KEPT = TOKENS, ("tokens", "vocab")  # normalisers, and logits in the order of the chunks

Two = tuple[jax.Array, jax.Array]


class _Plan(NamedTuple):
    """What the forward and the backward pass share."""

    chunk: int
    block: int
    keep: bool
    mesh: Mesh | None

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes of a logical one, none without a mesh."""
        return RULES[logical] if self.mesh else ()

    def run(self, function: Callable[..., Any], ins: Any, outs: Any, *arguments: jax.Array) -> Any:
        """Call on every device with its parts; `ins` and `outs` are logical axes."""
        function = functools.partial(function, self)
        if self.mesh is not None:
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=tuple(map(spec_of, ins)),
                out_specs=tuple(map(spec_of, outs)),
                check_vma=False,
            )
        return function(*arguments)


def token_logprobs(
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    chunk: int | None = None,
    block: int | None = None,
    keep: bool = False,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and the entropy (nats) of each distribution, both [B, T].

    Both are 0 where the mask is 0. The distribution is softmax(logits / temperature), the one that
    was sampled. No gradient flows through the entropy.

    Tokens with loss are taken together, `chunk` at a time, and the rest is not computed; the
    vocabulary is taken `block` columns at a time (None: what suits the platform). The backward pass
    computes the logits again, so none larger than [chunk, block] ever exist, unless it is told to
    `keep` them. The head is gathered and its gradient, summed in float32, reduced over the mesh
    block by block, each once.
    """
    piece = piece_size(mesh)
    plan = _Plan(chunk or piece, block or piece, keep, mesh)
    inputs = hidden_BTD, head_DV, targets_BT, mask_BT != 0, jnp.float32(temperature)
    return _logprobs(plan, *inputs)


def piece_size(mesh: Mesh | None) -> int:
    """Tokens and columns of a piece where the mesh is."""
    return CPU_PIECE if platform_of(mesh) == "cpu" else PIECE


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    plan: _Plan,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    used: jax.Array,
    temperature: jax.Array,
) -> Two:
    return _forward(plan, hidden, head, targets, used, temperature)[0]


def _forward(plan: _Plan, *inputs: jax.Array) -> tuple[Two, tuple[jax.Array, ...]]:
    logprobs, entropy, *kept = plan.run(_local_logprobs, INPUTS, (TOKENS, TOKENS, *KEPT), *inputs)
    return (logprobs, entropy), (*inputs, *kept)


def _backward(
    plan: _Plan, saved: tuple[jax.Array, ...], cotangents: Two
) -> tuple[jax.Array, jax.Array, None, None, None]:
    ins, outs = (*INPUTS, *KEPT, TOKENS), (HIDDEN, HEAD)
    d_hidden, d_head = plan.run(_local_gradients, ins, outs, *saved, cotangents[0])
    return d_hidden, d_head, None, None, None


_logprobs.defvjp(_forward, _backward)


def _local_logprobs(
    plan: _Plan,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    used: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    chunks, blocks = _Chunks(plan, used), _Blocks(plan, head, hidden.dtype, temperature)
    rows, places = chunks.take(hidden), chunks.take(targets)

    def block_step(block: jax.Array, carry: Any) -> Any:
        weights = blocks.weights(block)

        def chunk_step(chunk: jax.Array, carry: Any) -> Any:
            sums, kept = carry
            peak, total, mean, found = chunks.read(sums, chunk)
            logits = blocks.logits(chunks.read(rows, chunk), weights)
            if plan.keep:
                kept = chunks.write(kept, chunk, logits, blocks.start(block))
            logits = jnp.where(blocks.new(block), logits, -jnp.inf)
            hit = blocks.hits(block, chunks.read(places, chunk))
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
            shares, fade = jnp.exp(logits - higher[:, None]), jnp.exp(peak - higher)
            new = (
                higher,
                fade * total + jnp.sum(shares, axis=-1),
                fade * mean + jnp.sum(jnp.where(shares > 0, shares * logits, 0.0), axis=-1),
                found + jnp.sum(jnp.where(hit, logits, 0.0), axis=-1),
            )
            return chunks.write(sums, chunk, new), kept

        return chunks.loop(chunk_step, carry)

    zeros = jnp.zeros(chunks.padded, jnp.float32)
    kept = jnp.zeros((chunks.padded, head.shape[1]) if plan.keep else (0, 0), jnp.float32)
    start = (jnp.full(chunks.padded, -jnp.inf), zeros, zeros, zeros), kept
    (peak, total, mean, found), kept = blocks.loop(block_step, start)
    vocab = plan.axes("vocab")
    highest = _max(peak, vocab)
    scale = jnp.where(peak > -jnp.inf, jnp.exp(peak - highest), 0.0)
    total, mean, found = (_sum(x, vocab) for x in (scale * total, scale * mean, found))
    norm = jnp.where(total > 0, highest + jnp.log(total), 0.0)
    sums = found - norm, norm - mean / jnp.maximum(total, 1e-30), norm
    logprobs, entropy, norms = (chunks.restore(each, used.shape) for each in sums)
    return logprobs, entropy, norms, kept


def _local_gradients(
    plan: _Plan,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    used: jax.Array,
    temperature: jax.Array,
    norms: jax.Array,
    kept: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """d logprob / d logits = (onehot - softmax) / temperature, one piece after the other."""
    chunks, blocks = _Chunks(plan, used), _Blocks(plan, head, hidden.dtype, temperature)
    rows, places, norms = (chunks.take(each) for each in (hidden, targets, norms))
    scale = chunks.take(jnp.where(used, cotangent, 0.0) / temperature)
    width = hidden.shape[-1]

    def block_step(block: jax.Array, sums: Any) -> Any:
        d_rows, d_head = sums
        weights = blocks.weights(block)

        def chunk_step(chunk: jax.Array, sums: Any) -> Any:
            d_rows, d_weights = sums
            own = chunks.read(rows, chunk)
            if plan.keep:
                logits = blocks.columns(chunks.read(kept, chunk), block)
            else:
                logits = blocks.logits(own, weights)
            shares = jnp.exp(logits - chunks.read(norms, chunk)[:, None])
            shares = jnp.where(blocks.new(block), shares, 0.0)
            hit = blocks.hits(block, chunks.read(places, chunk))
            d_logits = ((hit - shares) * chunks.read(scale, chunk)[:, None]).astype(own.dtype)
            new = chunks.read(d_rows, chunk) + _product(d_logits, weights.T)
            return chunks.write(d_rows, chunk, new), d_weights + _product(own.T, d_logits)

        start = d_rows, jnp.zeros(weights.shape, jnp.float32)
        d_rows, d_weights = chunks.loop(chunk_step, start)
        return d_rows, blocks.add(d_head, block, _scatter_rows(plan, d_weights))

    start = jnp.zeros((chunks.padded, width), jnp.float32), jnp.zeros(head.shape, jnp.float32)
    d_rows, d_head = blocks.loop(block_step, start)
    d_hidden = chunks.restore(_sum(d_rows, plan.axes("vocab")).astype(hidden.dtype), hidden.shape)
    return d_hidden, d_head.astype(head.dtype)


class _Chunks:
    """One device's N tokens, those with loss first, in chunks of C.

    Only the chunks that hold any are visited.
    """

    def __init__(self, plan: _Plan, used: jax.Array) -> None:
        self._size = min(plan.chunk, used.size)
        self.padded = -(-used.size // self._size) * self._size
        self._used = used.reshape(-1)
        self._order = jnp.argsort(~self._used, stable=True)
        # All devices take as many: there are collectives between them.
        most = _max(jnp.sum(used), plan.axes("batch") + plan.axes("time"))
        self._count = -(-most // self._size)

    def take(self, values: jax.Array) -> jax.Array:
        """Values [B, T, ...] in the order of the chunks, zeros where a token has no loss."""
        flat = values.reshape(self._used.size, *values.shape[2:])
        mask = self._used.reshape(-1, *(1,) * (flat.ndim - 1))
        ordered = jnp.where(mask, flat, 0)[self._order]
        return jnp.pad(ordered, [(0, self.padded - flat.shape[0]), *[(0, 0)] * (flat.ndim - 1)])

    def restore(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `take`."""
        flat = values[jnp.argsort(self._order)]
        mask = self._used.reshape(-1, *(1,) * (flat.ndim - 1))
        return jnp.where(mask, flat, 0).reshape(shape)

    def read(self, values: Any, index: jax.Array) -> Any:
        """A chunk of each of `values`."""
        start = index * self._size
        part = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=self._size
        )
        return jax.tree.map(part, values)

    def write(self, values: Any, index: jax.Array, chunk: Any, column: jax.Array | int = 0) -> Any:
        """Each of `values` with a chunk replaced, from `column` on."""
        start = index * self._size, column

        def put(value: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(value, new, start[: value.ndim])

        return jax.tree.map(put, values, chunk)

    def loop(self, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """Fold `step(index, carry)` over the chunks."""
        return jax.lax.fori_loop(0, self._count, step, start)


class _Blocks:
    """One device's columns of the head in blocks of W; the last one may overlap the one before."""

    def __init__(self, plan: _Plan, head: jax.Array, dtype: Any, temperature: jax.Array) -> None:
        self._plan, self._head, self._dtype, self._temperature = plan, head, dtype, temperature
        self._columns = head.shape[1]
        self._size = min(plan.block, self._columns)
        part = jax.lax.axis_index(plan.axes("vocab")) if plan.mesh else 0
        self._first = part * self._columns  # of this device, in the whole vocabulary

    def start(self, index: jax.Array) -> jax.Array:
        """The first column."""
        return jnp.minimum(index * self._size, self._columns - self._size)

    def new(self, index: jax.Array) -> jax.Array:
        """Which [W] columns were in no earlier block."""
        return self.start(index) + jnp.arange(self._size) >= index * self._size

    def weights(self, index: jax.Array) -> jax.Array:
        """A block [D, W] of the head, all of its rows, in the dtype of the products."""
        start = self.start(index)
        part = jax.lax.dynamic_slice_in_dim(self._head, start, self._size, axis=1)
        part, axes = part.astype(self._dtype), self._plan.axes("embed")
        return jax.lax.all_gather(part, axes, axis=0, tiled=True) if axes else part

    def logits(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """Logits [C, W] of a block in float32."""
        return _product(rows, weights) / self._temperature

    def columns(self, values: jax.Array, index: jax.Array) -> jax.Array:
        """The block's columns of [C, V]."""
        return jax.lax.dynamic_slice_in_dim(values, self.start(index), self._size, axis=1)

    def hits(self, index: jax.Array, targets: jax.Array) -> jax.Array:
        """Where [C, W] a column is the token's target."""
        column = self._first + self.start(index) + jnp.arange(self._size)
        return (column == targets[:, None]) & self.new(index)

    def add(self, total: jax.Array, index: jax.Array, part: jax.Array) -> jax.Array:
        """`total` with `part` added in the block's columns."""
        start = self.start(index)
        old = jax.lax.dynamic_slice_in_dim(total, start, self._size, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=1)

    def loop(self, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """Fold `step(index, carry)` over the blocks."""
        return jax.lax.fori_loop(0, -(-self._columns // self._size), step, start)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _scatter_rows(plan: _Plan, d_weights: jax.Array) -> jax.Array:
    """This device's rows of the sum over all devices' tokens."""
    axes = plan.axes("embed")
    if not axes:
        return d_weights
    d_weights = jax.lax.psum_scatter(d_weights, axes, scatter_dimension=0, tiled=True)
    return _sum(
        d_weights,
        tuple(axis for axis in plan.axes("batch") + plan.axes("time") if axis not in axes),
    )


def _sum(values: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(values, axes) if axes else values


def _max(values: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmax(values, axes) if axes else values

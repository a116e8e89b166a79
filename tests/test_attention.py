"""Every attention backend against the definition; what each refuses; what "auto" chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hsql_jax.model.attention import BACKENDS, attention, choose, splash
from hsql_jax.model.attention.base import Case
from hsql_jax.model.config import AttentionName
from hsql_jax.sharding import MeshConfig, make_mesh

B, H, K, Q = 2, 4, 2, 128
T = 256


class Variant(NamedTuple):
    """A backend as the contract runs it: on one device or on a mesh of eight."""

    backend: str
    mesh: MeshConfig = MeshConfig()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in self.mesh.shape.items() if size > 1]
        return "-".join([self.backend, *sizes])


CONTEXT = MeshConfig(context=4, data=2)
MIXED = MeshConfig(context=2, tensor=2, fsdp=2)
INTERPRETED = (("interpret", True),)
VARIANTS = [
    Variant("blocks"),
    Variant("blocks", MeshConfig(data=2, tensor=4)),  # more devices for heads than K
    Variant("chunked"),
    Variant("chunked", CONTEXT),
    Variant("chunked", MIXED),
    Variant("splash", options=INTERPRETED),
    Variant("splash", MIXED, INTERPRETED),
]
every_backend = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def inputs(length: int = T) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, and the weights of a sum over outputs."""
    rng = np.random.default_rng(0)
    shapes = [(B, length, heads, Q) for heads in (H, K, K, H)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def segments(length: int, *rows: tuple[int, ...]) -> np.ndarray:
    """Segment ids from the places where segments end, 0 after the last."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, ends in enumerate(rows):
        for segment, (start, stop) in enumerate(pairwise((0, *ends)), 1):
            ids[row, start:stop] = segment
    return ids


# Ends inside a block, at a block's edge, at a device's edge, across blocks; padding behind.
PACKED = segments(T, (10, 64, 128, 200, T), (70, 71, 129, 192))


def definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, weight: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The output, and the gradients of sum(weight * output), in float64 with all T*T scores."""
    q, k, v, weight = (leaf.astype(np.float64) for leaf in (q, k, v, weight))
    length = q.shape[1]
    k_H, v_H = (np.repeat(leaf, H // K, axis=2) for leaf in (k, v))
    scores = np.einsum("bthq,bshq->bhts", q, k_H) / np.sqrt(Q)
    seen = (ids[:, :, None] == ids[:, None]) & np.tri(length, dtype=bool)
    scores = np.where(seen[:, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    d_shares = np.einsum("bthq,bshq->bhts", weight, v_H)
    d_scores = shares * (d_shares - (shares * d_shares).sum(-1, keepdims=True)) / np.sqrt(Q)

    def of_groups(d_heads: np.ndarray) -> np.ndarray:
        return d_heads.reshape(B, length, K, H // K, Q).sum(axis=3)

    return (
        np.einsum("bhts,bshq->bthq", shares, v_H),
        np.einsum("bhts,bshq->bthq", d_scores, k_H),
        of_groups(np.einsum("bhts,bthq->bshq", d_scores, q)),
        of_groups(np.einsum("bhts,bthq->bshq", shares, weight)),
    )


@functools.cache
def compiled(variant: Variant) -> Callable[..., tuple[np.ndarray, ...]]:
    """What `definition` returns, by a backend."""
    mesh = None if variant.mesh == MeshConfig() else make_mesh(variant.mesh)
    run = functools.partial(BACKENDS[variant.backend].run, mesh=mesh, **dict(variant.options))

    @jax.jit
    def both(q: Any, k: Any, v: Any, weight: Any, ids: Any) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(lambda q, k, v: run(q, k, v, ids), q, k, v)
        return out, *backward(weight)

    return lambda *arrays: tuple(map(np.asarray, both(*arrays)))


def assert_same(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for name, leaf, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ids", [np.ones((B, T), np.int32), PACKED], ids=["whole", "packed"])
@every_backend
def test_equals_the_definition(variant: Variant, ids: np.ndarray) -> None:
    assert_same(compiled(variant)(*inputs(), ids), definition(*inputs(), ids))


@pytest.mark.parametrize("length", [1, 64, 65, 200])
@pytest.mark.parametrize("backend", ["blocks", "chunked"])
def test_lengths_need_not_fill_blocks(backend: str, length: int) -> None:
    ids = segments(length, (length // 3, length), (length // 2,))
    found = compiled(Variant(backend))(*inputs(length), ids)
    assert_same(found, definition(*inputs(length), ids))


def test_a_devices_share_of_the_time_need_not_fill_blocks() -> None:
    length = 4 * 70
    ids = segments(length, (69, 71, length), (140,))
    found = compiled(Variant("chunked", CONTEXT))(*inputs(length), ids)
    assert_same(found, definition(*inputs(length), ids))


@pytest.mark.parametrize("copies", [splash.COPIES, 4], ids=["fused", "two kernels"])
def test_splash_takes_the_largest_blocks_that_divide_the_row(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 5 * 128  # no larger multiple of 128 divides it, so there are five blocks
    monkeypatch.setattr(splash, "COPIES", copies)
    monkeypatch.setattr(splash, "_kernel", splash._kernel.__wrapped__)
    ids = segments(length, (130, 300, length), (600,))
    run = compiled.__wrapped__(Variant("splash", options=INTERPRETED))
    assert_same(run(*inputs(length), ids), definition(*inputs(length), ids))


@every_backend
def test_an_output_depends_on_its_own_segments_past_alone(variant: Variant) -> None:
    """Gradients are exactly zero at every key and value that the query may not see."""
    q, k, v, weight = inputs()
    for place in (0, 9, 10, 63, 64, 127, 128, T - 1):
        selected = np.zeros_like(weight)
        selected[0, place] = weight[0, place]
        _, _, dk, dv = compiled(variant)(q, k, v, selected, PACKED)
        visible = (np.arange(T) <= place) & (PACKED[0] == PACKED[0, place])
        for gradient in (dk, dv):
            assert np.all(gradient[0, ~visible] == 0)
            assert np.all(gradient[1] == 0)
        assert np.all(np.abs(dv[0, visible]).max(axis=(1, 2)) > 0)


@every_backend
def test_a_group_of_query_heads_reads_one_key_value_head(variant: Variant) -> None:
    q, k, v, weight = inputs()
    weight[:, :, H // K :] = 0  # the first group only
    _, _, dk, dv = compiled(variant)(q, k, v, weight, PACKED)
    for gradient in (dk, dv):
        assert np.abs(gradient[:, :, 0]).max() > 0
        assert np.all(gradient[:, :, 1] == 0)


@every_backend
def test_padding_gives_finite_outputs_and_gradients(variant: Variant) -> None:
    ids = PACKED.copy()
    ids[0] = 0  # a row of nothing else
    for leaf in compiled(variant)(*inputs(), ids):
        assert np.isfinite(leaf).all()


# --- memory ------------------------------------------------------------------------------------


def test_chunked_takes_memory_in_proportion_to_the_row() -> None:
    """Forward and backward, next to nothing but copies of what goes in and comes out."""

    def temporary(length: int) -> int:
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 64), "float32") for heads in (4, 2, 2, 4)]
        ids = jax.ShapeDtypeStruct((1, length), "int32")

        def gradients(q: Any, k: Any, v: Any, weight: Any, ids: Any) -> Any:
            run = functools.partial(attention, segment_ids_BT=ids, backend="chunked")
            return jax.vjp(run, q, k, v)[1](weight)

        lowered = jax.jit(gradients).lower(*shapes, ids)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(8192), temporary(32768)
    assert long < 4.1 * short
    assert long < 32768 * (4 + 2 + 2 + 4) * 64 * 4 * 2  # twice its arguments


# --- cuDNN ---------------------------------------------------------------------------------------

SINGLE = segments(T, (T,), (200,))


def test_cudnn_equals_the_definition() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("cuDNN needs an NVIDIA GPU")
    arrays = [jnp.asarray(leaf, jnp.bfloat16) for leaf in inputs()]
    rounded = [np.asarray(leaf, np.float32) for leaf in arrays]
    real = SINGLE[..., None, None] > 0
    arrays[3], rounded[3] = arrays[3] * real, rounded[3] * real  # nothing is asked of padding
    found = compiled(Variant("cudnn"))(*arrays, SINGLE)
    for leaf, wanted in zip(found[1:], definition(*rounded, SINGLE)[1:], strict=True):
        np.testing.assert_allclose(leaf.astype(np.float32), wanted, atol=0.05)


def test_a_row_that_breaks_cudnns_promise_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA's attention in its place, which reads the same lengths."""
    reference = jax.nn.dot_product_attention

    def stand_in(*arrays: Any, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return reference(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, weight = inputs()
    real = SINGLE[..., None, None] > 0
    run = jax.jit(functools.partial(BACKENDS["cudnn"].run, mesh=None))
    expected = definition(q, k, v, weight, SINGLE)[0]
    np.testing.assert_allclose(run(q, k, v, SINGLE), expected * real, atol=1e-5)
    late = np.roll(SINGLE, 1, axis=1)  # padding before the segment
    for broken in (PACKED[0], late[1]):
        out = np.asarray(run(q, k, v, np.stack([SINGLE[1], broken])))
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1]).all()


# --- choice --------------------------------------------------------------------------------------

CASES = {
    "cpu": Case("cpu", 256, 32, "float32", packed=True, context=1),
    "gpu": Case("gpu", 32768, 128, "bfloat16", packed=False, context=1),
    "tpu": Case("tpu", 32768, 128, "bfloat16", packed=True, context=4),
}


@pytest.mark.parametrize(
    ("platform", "changes", "backend"),
    [
        ("cpu", {}, "blocks"),
        ("cpu", {"length": 1024}, "chunked"),
        ("cpu", {"context": 2}, "chunked"),
        ("gpu", {}, "cudnn"),
        ("gpu", {"packed": True}, "chunked"),
        ("tpu", {}, "splash"),
        ("tpu", {"head_dim": 64}, "chunked"),
    ],
)
def test_auto_is_the_platforms_fastest_that_can(
    platform: str, changes: dict[str, Any], backend: str
) -> None:
    assert choose("auto", CASES[platform]._replace(**changes)) == backend


@pytest.mark.parametrize(
    ("backend", "platform", "changes", "message"),
    [
        ("blocks", "cpu", {"context": 2}, "'blocks': it cannot split a row's time"),
        ("blocks", "cpu", {"length": 4096}, "rows of 4096 tokens are longer than 512; use chunked"),
        (
            "cudnn",
            "cpu",
            {},
            "'cudnn': it runs on NVIDIA GPUs, not on 'cpu'; use blocks or ch",
        ),
        (
            "cudnn",
            "gpu",
            {"packed": True},
            "cannot keep several segments of a row apart .*; use",
        ),
        ("cudnn", "gpu", {"context": 2}, "cannot split a row's time over devices; use chunked"),
        ("cudnn", "gpu", {"dtype": "float32"}, "dtype float32 is neither of bfloat16, float16"),
        ("cudnn", "gpu", {"head_dim": 132}, "head size 132 is not a multiple of 8 up to 128"),
        ("splash", "gpu", {}, "'splash': it runs on TPUs, not on 'gpu'; use chunked or cudnn"),
        ("splash", "tpu", {"head_dim": 64}, "head size 64 is not a multiple of 128; use chunked"),
        ("splash", "tpu", {"length": 640}, "640 tokens on 4 devices .* not multiples of 128"),
        ("flash", "tpu", {}, "'flash' is not known; use auto, blocks, chunked, cudnn, splash"),
    ],
)
def test_what_a_backend_cannot_honour_is_refused(
    backend: str, platform: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(backend, CASES[platform]._replace(**changes))


def test_sizes_that_do_not_divide_over_the_mesh_are_named() -> None:
    def run(mesh: MeshConfig, heads: int, kv_heads: int) -> None:
        q, kv = jnp.zeros((2, 30, heads, 8)), jnp.zeros((2, 30, kv_heads, 8))
        attention(q, kv, kv, jnp.ones((2, 30), jnp.int32), mesh=make_mesh(mesh))

    with pytest.raises(ValueError, match="time = 30 does not divide over 4 devices"):
        run(MeshConfig(context=4), 4, 2)
    with pytest.raises(ValueError, match="heads = 6 does not divide over 4 devices"):
        run(MeshConfig(tensor=4), 6, 2)


def test_config_names_every_backend() -> None:
    assert get_args(AttentionName) == ("auto", *BACKENDS)

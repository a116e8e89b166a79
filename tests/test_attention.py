"""Blocked attention against the definition: causality, segments, groups, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax
import numpy as np
import pytest

from hsql_jax.model.attention import MAX_BLOCKS, MIN_BLOCK, attention

B, H, K, Q = 2, 4, 2, 8
T = 2 * MIN_BLOCK + 9  # three blocks, the last one short


def inputs(length: int = T, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, length, n, Q)).astype(np.float32) for n in (H, K, K))
    return q, k, v


def segments(*rows: tuple[int, ...]) -> np.ndarray:
    """Segment ids from the places where segments end, 0 after the last."""
    ids = np.zeros((len(rows), T), np.int32)
    for row, ends in enumerate(rows):
        for segment, (start, stop) in enumerate(pairwise((0, *ends)), 1):
            ids[row, start:stop] = segment
    return ids


# Ends inside a block, at a block's edge, across two blocks, and padding behind.
PACKED = segments((10, MIN_BLOCK, 100, T), (70, 71, 2 * MIN_BLOCK + 1))


def naive(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray, times: Sequence[int]
) -> np.ndarray:
    """The definition at the given times, one query after the other, in float64."""
    out = np.zeros((q.shape[0], len(times), H, Q))
    for b, i, h in np.ndindex(*out.shape[:3]):
        t = times[i]
        seen = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
        scores = k[b, seen, h // (H // K)].astype(np.float64) @ q[b, t, h] / np.sqrt(Q)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, h // (H // K)] / weights.sum()
    return out


compiled = jax.jit(attention)


@jax.jit
def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, weight: jax.Array
) -> tuple[jax.Array, ...]:
    """Of sum(weight * attention) with respect to q, k and v."""
    return jax.vjp(lambda q, k, v: attention(q, k, v, ids), q, k, v)[1](weight)


def at_place(place: int) -> np.ndarray:
    """A weight that selects the output of row 0 at one place."""
    weight = np.zeros((B, T, H, Q), np.float32)
    weight[0, place] = np.random.default_rng(9).normal(size=(H, Q))
    return weight


@pytest.mark.parametrize(
    "segment_ids", [np.ones((B, T), np.int32), PACKED], ids=["whole", "packed"]
)
def test_equals_the_definition(segment_ids: np.ndarray) -> None:
    q, k, v = inputs()
    expected = naive(q, k, v, segment_ids, range(T))
    np.testing.assert_allclose(compiled(q, k, v, segment_ids), expected, atol=1e-5)


def test_long_rows_use_larger_blocks() -> None:
    length = MAX_BLOCKS * MIN_BLOCK + 40
    q, k, v = inputs(length)
    ids = np.ones((B, length), np.int32)
    ids[0, 500:] = 2
    times = [0, MIN_BLOCK, MIN_BLOCK + 3, 499, 500, 777, length - 1]
    out = np.asarray(compiled(q, k, v, ids))[:, times]
    np.testing.assert_allclose(out, naive(q, k, v, ids, times), atol=1e-5)


@pytest.mark.parametrize("place", [0, 9, 10, MIN_BLOCK - 1, MIN_BLOCK, 99, T - 1])
def test_an_output_depends_on_its_own_segments_past_alone(place: int) -> None:
    """Gradients are exactly zero at every key and value that the query may not see."""
    q, k, v = inputs()
    _, dk, dv = gradients(q, k, v, PACKED, at_place(place))
    visible = (np.arange(T) <= place) & (PACKED[0] == PACKED[0, place])
    for gradient in (dk, dv):
        size = np.abs(np.asarray(gradient)).max(axis=(2, 3))
        assert np.all(size[0, ~visible] == 0)
        assert np.all(size[1] == 0)
    assert np.all(np.abs(np.asarray(dv[0])).max(axis=(1, 2))[visible] > 0)


def test_a_group_of_query_heads_reads_one_key_value_head() -> None:
    q, k, v = inputs()
    weight = at_place(T - 1)
    weight[:, :, H // K :] = 0  # the first group only
    _, dk, dv = gradients(q, k, v, PACKED, weight)
    for gradient in (np.asarray(dk), np.asarray(dv)):
        assert np.abs(gradient[:, :, 0]).max() > 0
        assert np.all(gradient[:, :, 1] == 0)


def test_gradients_equal_finite_differences_of_the_definition() -> None:
    q, k, v = inputs()
    times = [5, 80, T - 1]
    weight = np.zeros((B, T, H, Q), np.float32)
    weight[:, times] = np.random.default_rng(1).normal(size=(B, len(times), H, Q))
    found = gradients(q, k, v, PACKED, weight)
    rng = np.random.default_rng(2)
    step = 1e-4
    for index, gradient in enumerate(found):
        tangent = rng.normal(size=gradient.shape)

        def moved(sign: float, index: int = index, tangent: np.ndarray = tangent) -> float:
            arrays = [leaf.astype(np.float64) for leaf in (q, k, v)]
            arrays[index] += sign * step * tangent
            out = naive(arrays[0], arrays[1], arrays[2], PACKED, times)
            return float(np.sum(out * weight[:, times]))

        expected = (moved(1) - moved(-1)) / (2 * step)
        assert float(np.sum(np.asarray(gradient) * tangent)) == pytest.approx(expected, rel=1e-4)


def test_padding_gives_finite_outputs_and_gradients() -> None:
    """Row 1 is padding behind its segments; whole rows of padding exist too."""
    q, k, v = inputs()
    ids = PACKED.copy()
    ids[0] = 0
    assert np.isfinite(compiled(q, k, v, ids)).all()
    for gradient in gradients(q, k, v, ids, np.ones((B, T, H, Q), np.float32)):
        assert np.isfinite(gradient).all()

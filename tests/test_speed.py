"""The operations of an update, counted by hand, and what a step's speed says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hsql_jax.data import Batch, Example, assemble
from hsql_jax.model import ModelConfig
from hsql_jax.speed import Meter, count_tokens, trace, train_flops
from hsql_jax.topology import peak_flops

MODEL = ModelConfig(
    vocab_size=10, d_model=4, layers=2, heads=2, kv_heads=1, head_dim=2, d_ff=8, packed=True
)
# Weights of a layer: queries 4·4, keys and values 4·2 each, output 4·4, feed-forward 3·4·8: 144.
# Five tokens, of which three have a loss, see 1 + 2 + 3 and 1 + 2 keys.
UPDATE = 6 * (5 * 2 * 144 + 3 * 4 * 10) + 12 * 2 * 2 * 2 * 9


def batch() -> Batch:
    rows = [[Example([1, 2, 3], [0, 1, 1]), Example([4, 5], [0, 1])]]
    return assemble(rows, length=8, count=2)


def test_operations_of_an_update() -> None:
    assert UPDATE == 10_224
    assert train_flops(MODEL, tokens=5, seen=9 / 5, heads=3) == pytest.approx(UPDATE)


def test_padding_is_no_token() -> None:
    assert np.array(count_tokens(batch())).tolist() == [5.0, 9.0]


def test_a_step_says_its_speed_and_its_share_of_the_peak() -> None:
    now = [100.0]
    meter = Meter(MODEL, peak=20_448.0, clock=lambda: now[0])
    with meter.waiting():
        now[0] += 0.5
    meter.take(batch())
    now[0] += 1.5
    assert meter.lap(loss_tokens=3) == pytest.approx(
        {"step_s": 2.0, "data_wait": 0.25, "tokens": 5, "tokens_per_s": 2.5, "mfu": 0.25}
    )


def test_where_the_peak_is_not_known_there_is_no_share() -> None:
    now = [0.0]
    meter = Meter(MODEL, peak=None, clock=lambda: now[0])
    meter.take(batch())
    now[0] = 1.0
    assert "mfu" not in meter.lap(loss_tokens=3)


@pytest.mark.parametrize(("steps", "traces"), [(0, 0), (1, 1), (50, 1)])
def test_a_trace_is_kept_though_the_run_ends_before_it(
    tmp_path: Path, steps: int, traces: int
) -> None:
    with trace(tmp_path, steps) as traced:
        for _ in range(4):
            traced()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == traces


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),  # a slower part
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_the_device_itself(kind: str, peak: float | None) -> None:
    assert peak_flops(kind) == peak

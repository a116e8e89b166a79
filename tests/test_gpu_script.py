"""The GPU benchmark without a GPU: every measurement runs at toy sizes and gives sane figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "gpu.py"
TRAINING = ["training 64 2 full auto", "training 128 1 products chunked"]


def run(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("gpu") / "gpu.json")


def test_report_says_when_and_on_what(report: dict[str, Any]) -> None:
    assert report["date"].endswith("+00:00")
    assert (report["device"], report["platform"]) == ("cpu", "cpu")
    assert report["versions"]["jax"] == jax.__version__
    assert report["sizes"]["model"]["layers"] == 2
    assert report["bounds"]["of"] == "measurement"
    assert list(report["measurements"]) == [
        "device",
        *TRAINING,
        "decode",
        "attention contract",
        "attention 128",
    ]


@pytest.mark.parametrize("name", TRAINING)
def test_training(report: dict[str, Any], name: str) -> None:
    found = report["measurements"][name]
    tokens, rows = map(int, name.split()[1:3])
    per_layer = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 96
    pairs = tokens * tokens / 2  # of a query and a key that it sees
    flops = 6 * rows * (tokens * (2 * per_layer + 64 * 128) + 2 * 2 * 4 * 16 * pairs)
    assert found["flops"] == pytest.approx(flops)
    assert found["tokens/s"] == pytest.approx(rows * tokens / found["step s"])
    rate = report["bounds"]["flops"]
    assert found["MFU"] == pytest.approx(flops / found["step s"] / rate)
    assert 0 < found["MFU"] < 1
    assert found["losses"][0] == pytest.approx(math.log(128), rel=0.25)
    assert found["losses"][-1] < found["losses"][0]
    assert found["attention"] == ("blocks" if tokens == 64 else "chunked")


def test_decode(report: dict[str, Any]) -> None:
    found = report["measurements"]["decode"]
    assert found["whole s"] > found["prompt s"] > 0
    per_layer = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = 2 * per_layer + 64 + 64 * 128
    values = 4 * 2 * 2 * 2 * 16 * (8 + 64 / 2)  # sequences, k and v, layers, heads, head, filled
    assert found["bytes a step"] == 2 * (weights + values)
    assert found["of the bound"] == pytest.approx(found["tokens/s"] / found["bound tokens/s"])


def test_attention_keeps_its_contract(report: dict[str, Any]) -> None:
    found = report["measurements"]["attention contract"]
    for backend in ("blocks", "chunked"):
        for rows in ("whole", "padded", "packed"):
            assert found[backend][rows]["holds"], (backend, rows)
            assert 0 < found[backend][rows]["error"] < 0.03
    assert "GPU" in found["cudnn"]["whole"]["refused"]


def test_attention_times(report: dict[str, Any]) -> None:
    found = report["measurements"]["attention 128"]
    for backend in ("blocks", "chunked"):
        assert found[backend]["forward s"] > 0
        flops = 2 * 128 * 128 * 4 * 16
        assert found[backend]["both flops/s"] == pytest.approx(3 * flops / found[backend]["both s"])
    assert "GPU" in found["cudnn"]["refused"]


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    found = run(tmp_path / "gpu.json", "--budget", "10")["measurements"]
    assert "flops" in found.pop("device")
    assert all(entry["error"].startswith("not begun") for entry in found.values())

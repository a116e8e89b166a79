"""Full-size programs through the accelerators' own compilers: `make aot`, not part of `make test`.

Needs no accelerator, but the extra `tpu` or `cuda` (of which the cases run whose compiler is
installed) and minutes a case. Writes the reports of configs/reports/ and their table.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import configs.compile as recipes
from hsql_jax.compile import CompileConfig, PhaseName, compile_phase, to_json
from hsql_jax.errors import UserError
from hsql_jax.model import attention
from hsql_jax.model.attention.base import Backend
from hsql_jax.topology import GIB, Topology, find_topology

FOLDER = Path(recipes.__file__).parent / "reports"
HEADROOM = 0.1  # of a device's memory, that must be left

RECIPES = [
    "qwen3_8b_v5p_16",
    "qwen3_14b_v5p_16",
    "qwen3_8b_v6e_16",
    "qwen3_14b_v6e_16",
    "qwen3_8b_h100_8",
    "qwen3_14b_h100_8",
]
# The most GiB that a train step on one 32,768-token row a device may take.
LARGEST = {
    "qwen3_8b_v5p_16": 38.0,
    "qwen3_14b_v5p_16": 59.5,
    "qwen3_8b_h100_8": 32.5,
    "qwen3_14b_h100_8": 51.3,
}


def topology(config: CompileConfig) -> Topology:
    try:
        return find_topology(config.topology)
    except UserError as error:
        pytest.skip(str(error))


def compiled(recipe: str, name: str, phases: tuple[PhaseName, ...], **changes: Any) -> list[Any]:
    """The phases' reports, kept in configs/reports/NAME.json."""
    config = dataclasses.replace(getattr(recipes, recipe)(), phases=phases, **changes)
    devices = topology(config)
    report = [compile_phase(phase, config, devices) for phase in phases]
    (FOLDER / f"{name}.json").write_text(to_json(config, report) + "\n")
    return report


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    write_table()


@pytest.mark.parametrize("tokens", [8192, 16_384, 32_768])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_of_16_rows_fits(recipe: str, tokens: int) -> None:
    [phase] = compiled(recipe, f"{recipe}-{tokens}", ("sft",), tokens=tokens)
    assert phase.fits
    assert phase.headroom >= HEADROOM


@pytest.mark.parametrize("recipe", LARGEST)
def test_an_update_takes_less_with_layer_inputs_on_the_host(recipe: str) -> None:
    model = dataclasses.replace(getattr(recipes, recipe)().model, remat="offload")
    [phase] = compiled(recipe, f"{recipe}-32768-offload", ("sft",), model=model)
    assert phase.memory["peak"] <= LARGEST[recipe] * GIB


@pytest.mark.parametrize(("recipe", "most"), LARGEST.items())
def test_one_row_a_device_takes_no_more_than(recipe: str, most: float) -> None:
    rows = getattr(recipes, recipe)().meshes.train.devices
    name = f"{recipe}-32768-one"
    [phase] = compiled(recipe, name, ("sft",), rows=rows, micro_batches=1)
    assert phase.memory["peak"] <= most * GIB


@pytest.mark.parametrize("recipe", ["qwen3_8b_v5p_16", "qwen3_8b_v6e_16", "qwen3_8b_h100_8"])
def test_every_phase_fits(recipe: str) -> None:
    for phase in compiled(recipe, f"{recipe}-phases", ("rl", "prefill", "decode")):
        assert phase.headroom >= HEADROOM, phase.phase


def test_small_chips_are_refused_at_32k() -> None:
    [phase] = compiled("qwen3_8b_v5e_16", "qwen3_8b_v5e_16-32768", ("sft",))
    assert not phase.fits


def test_attention_that_keeps_every_score_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, _: Any) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthq,bshq->bhts", q, k, preferred_element_type=jnp.float32)
        seen = jnp.tril(ids[:, None, :, None] == ids[:, None, None, :])
        weights = jax.nn.softmax(jnp.where(seen, scores, attention.MASKED))
        return jnp.einsum("bhts,bshq->bthq", weights.astype(v.dtype), v)

    monkeypatch.setitem(attention.BACKENDS, "chunked", Backend(lambda _: None, run))
    config = recipes.qwen3_8b_v5p_16()
    model = dataclasses.replace(config.model, attention="chunked")
    [phase] = compiled("qwen3_8b_v5p_16", "qwen3_8b_v5p_16-all-scores", ("sft",), model=model)
    assert not phase.fits


# --- the table ------------------------------------------------------------------------------------

HEADER = """# Compiled ahead of time

Written by `make aot`, which compiles the trainer's own train step and the engine's two programs for
machines that need not be there. Each file here is one report of `hsql compile --json`. Memory is of
one device. Times are rooflines, of the slowest of three: operations at half the chip's peak, memory
traffic (every operand and result once an operation, so an upper bound), and the collectives over
all of a chip's links; copies to host memory are not among them. They are no measurements.

`-one` is one row a device instead of 16 an update; `-offload` keeps the layers' inputs in host
memory, as the v6e recipes always do; `-all-scores` is an attention that keeps them; `-phases` has
the other three programs. Everywhere: bfloat16 compute, float32 parameters, gradients and moments.

| report | devices | phase | rows x tokens | peak GiB | of GiB | headroom | TFLOP | sent GiB | s |
|---|---|---|---|---|---|---|---|---|---|
"""


def write_table() -> None:
    rows = []
    for file in sorted(FOLDER.glob("*.json"), key=lambda path: (len(path.stem), path.stem)):
        record = json.loads(file.read_text())
        rows += [row(file.stem, record, phase) for phase in record["phases"]]
    (FOLDER / "README.md").write_text(HEADER + "\n".join(rows) + "\n")


def row(name: str, record: dict[str, Any], phase: dict[str, Any]) -> str:
    sent = sum(kind["bytes_sent"] for kind in phase["collectives"].values())
    engine = record["engine"]
    work = {
        "prefill": f"{engine['rows']} x {engine['width']} after {engine['lengths'][-1]}",
        "decode": f"{engine['rows']} x {engine['chunk']} after {engine['lengths'][-1]}",
    }
    cells = [
        name,
        f"{phase['devices']} of {record['topology']}",
        phase["phase"],
        work.get(phase["phase"], f"{record['rows']} x {record['tokens']}"),
        f"{phase['memory']['peak'] / GIB:.1f}",
        f"{phase['capacity'] / GIB:.2f}",
        f"{phase['headroom']:.0%}" if phase["fits"] else "**refused**",
        f"{phase['flops'] / 1e12:,.1f}",
        f"{sent / GIB:.3g}" if phase["fits"] else "-",
        f"{phase['seconds']['expected']:.3g}" if phase["fits"] else "-",
    ]
    return "| " + " | ".join(cells) + " |"

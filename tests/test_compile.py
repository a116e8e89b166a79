"""`hsql compile` on virtual CPU devices: the report's figures, and every way to be refused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import configs.compile as recipes
from configs import models
from hsql_jax import topology
from hsql_jax.cli import main
from hsql_jax.compile import (
    CompileConfig,
    Phase,
    check,
    compile_phase,
    memory_classes,
    needed_bytes,
    show,
)
from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, forward, head_matrix, init_params, param_specs
from hsql_jax.model.qwen3 import is_spec
from hsql_jax.sharding import MeshConfig, Meshes
from hsql_jax.speed import forward_flops
from hsql_jax.topology import find_topology

TINY = recipes.tiny()


@functools.cache
def report(name: str) -> Phase:
    return compile_phase(name, TINY, find_topology("cpu:8"))


def parameters(model: ModelConfig) -> int:
    specs = jax.tree.leaves(param_specs(model), is_leaf=is_spec)
    return sum(math.prod(spec.shape) for spec in specs)


def test_the_train_step_is_reported() -> None:
    phase = report("sft")
    assert phase.fits
    assert phase.devices == 8
    memory = phase.memory
    # Split over fsdp = 2 and tensor = 2; the small norm gains over less.
    shard = 4 * parameters(TINY.model) / 4
    assert memory["parameters"] == pytest.approx(shard, rel=0.02)
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], abs=64)  # and counters
    assert memory["batch"] == 7 * 4 * 16 * 128 / 4  # seven leaves, rows over data = fsdp = 2
    own = sum(memory[name] for name in ("parameters", "optimizer", "batch"))
    assert own <= memory["arguments"] <= own + 64
    assert memory["arguments"] + memory["temporaries"] <= memory["peak"]
    assert phase.headroom == pytest.approx(1 - memory["peak"] / phase.capacity)
    model = TINY.model
    assert phase.flops == 4 * forward_flops(model, 16, 128, 64) / 8
    assert {"all-gather", "all-reduce"} <= set(phase.collectives)
    # Each layer's parameters are gathered over fsdp at least twice in each of two micro-batches.
    layers = 4 * (parameters(model) - 2 * model.vocab_size * model.d_model) / 2 / 2
    assert phase.collectives["all-gather"]["bytes_sent"] > 4 * layers / 2
    assert phase.seconds["expected"] == max(phase.seconds.values())
    assert phase.seconds["compute"] == phase.flops / (0.5 * 0.1e12)


def test_decoding_is_reported() -> None:
    phase, engine, model = report("decode"), TINY.engine, TINY.model
    assert phase.devices == 2
    slot = 2 * model.kv_heads * model.head_dim * (128 + 32) * 4 * model.layers
    assert phase.memory["cache"] == (engine.slots + 1) * slot / 2
    assert phase.memory["parameters"] == pytest.approx(4 * parameters(model) / 2, rel=0.02)
    assert phase.flops == forward_flops(model, engine.rows, engine.chunk, 128) / 2
    # Attention's and the feed-forward's sums of each layer, in each of the chunk's steps.
    assert phase.collectives["all-reduce"]["times"] >= 2 * model.layers * engine.chunk


def test_operations_are_those_that_the_compiler_counts() -> None:
    """Of one layer without a loop, where XLA's own count is right; attention sees half the row."""
    model = dataclasses.replace(TINY.model, layers=1, remat="none", d_model=256, d_ff=512)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    row = jax.ShapeDtypeStruct((4, 512), jnp.int32)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        return forward(params, model, tokens, tokens, tokens) @ head_matrix(params)

    counted = jax.jit(logits).lower(shapes, row).compile().cost_analysis()["flops"]
    assert forward_flops(model, 4, 512, 256) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("600m", 596_049_920),
        ("1700m", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
        ("14b", 14_768_307_200),
        ("32b", 32_762_123_264),
    ],
)
def test_models_have_the_parameters_of_the_public_checkpoints(name: str, count: int) -> None:
    assert parameters(getattr(models, f"qwen3_{name}")()) == count


RECIPES = dict(inspect.getmembers(recipes, inspect.isfunction))


@pytest.mark.parametrize(
    "name", [n for n, f in RECIPES.items() if f.__module__ == recipes.__name__ and n[0] != "_"]
)
def test_every_recipe_divides_on_its_machine(name: str) -> None:
    config: CompileConfig = RECIPES[name]()
    sizes = config.topology.partition(":")[2].split("x")
    check(config, math.prod(map(int, sizes)))


# --- the command line -----------------------------------------------------------------------------


def test_the_report_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--json", "--phases", "decode"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["topology"], record["tokens"], record["rows"]) == ("cpu:8", 128, 16)
    [phase] = record["phases"]
    assert phase["memory"] == report("decode").memory
    console = Console(width=120, record=True, file=io.StringIO())
    show(TINY, [report("sft"), report("decode")], console)
    text = console.export_text()
    for line in (
        "parameters, GiB",
        "cache, GiB",
        "peak, GiB",
        "headroom",
        "all-gather",
        "expected",
    ):
        assert line in text


def test_what_does_not_fit_is_reported_and_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = topology.CHIPS["cpu"]._replace(memory=2**20)
    monkeypatch.setitem(topology.CHIPS, "cpu", small)
    assert main(["compile", "--json", "--phases", "decode"]) == 2
    out, err = capsys.readouterr()
    [phase] = json.loads(out)["phases"]
    assert phase["fits"] is False
    assert phase["headroom"] == pytest.approx(1 - phase["memory"]["peak"] / 2**20)
    assert phase["headroom"] < 0
    assert err.startswith("hsql: error: cpu:8: decode needs 0.0 GiB of the 0.00 GiB of a device; ")


def test_a_compilers_refusal_is_a_report_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def lower(self, *_: Any, **__: Any) -> Any:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
                "space hbm. Used 28.10G of 15.75G hbm. Exceeded hbm capacity by 12.35G."
            )

    monkeypatch.setattr("hsql_jax.compile.make_train_step", lambda *_: Refusing())
    phase = compile_phase("sft", TINY, find_topology("cpu:8"))
    assert not phase.fits
    assert phase.memory == {"peak": 28.1 * 2**30}


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Ran out of memory in memory space hbm. Used 28.10G of 15.75G hbm.", 28.10 * 2**30),
        (
            "memory required for HLO temporaries (22.88G) exceeds available HBM (15.75G)",
            22.88 * 2**30,
        ),
        ("Used 512.00M of 256.00M vmem", 2**29),
    ],
)
def test_what_a_compiler_says_that_it_needed(message: str, size: float) -> None:
    assert needed_bytes(f"RESOURCE_EXHAUSTED: XLA:TPU. {message}") == size


def test_a_refusal_without_a_size_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^the compiler ran out of memory: RESOURCE_EXHAUSTED: -$"):
        needed_bytes("RESOURCE_EXHAUSTED: -\nmore")


def test_other_failures_of_a_compiler_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def lower(self, *_: Any, **__: Any) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: Used 28.10G of 15.75G hbm")

    monkeypatch.setattr("hsql_jax.compile.make_train_step", lambda *_: Failing())
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_phase("sft", TINY, find_topology("cpu:8"))


def test_the_peak_is_the_compilers_own_where_it_is_right() -> None:
    class Stats:
        argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 10, 9, 8
        temp_size_in_bytes, peak_memory_in_bytes = 7, 15

    assert memory_classes(Stats, {}, "tpu")["peak"] == 15
    assert memory_classes(Stats, {}, "cpu")["peak"] == 18


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--topology", "v5p"], "topology 'v5p': give CHIP:SIZE, such as v5p:2x2x2, "),
        (["--topology", "b200:8"], "topology 'b200:8': give CHIP:SIZE, "),
        (["--topology", "v5p:2x0"], "topology 'v5p:2x0': give CHIP:SIZE, "),
        (["--topology", "cpu:4"], "mesh data=2 x fsdp=2 x tensor=2 x context=1 x slices=1 is 8 de"),
        (["--meshes.train.tensor", "8", "--topology", "cpu:32"], "topology cpu:32: "),
        (
            ["--rows", "4"],
            "batch = 2 does not divide over data x fsdp = 4; data x fsdp may be 1, 2",
        ),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"hsql: error: {line}")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tokens": 0}, "rows = 16, tokens = 0, micro_batches = 2: rows are a multiple"),
        ({"micro_batches": 3}, "rows = 16, tokens = 128, micro_batches = 3: rows are a multiple"),
        ({"utilisation": 0.0}, "utilisation = 0.0: give a share, 0 < x <= 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(("name", "extra"), [("v5p:2x2x2", "tpu"), ("h100:8", "cuda")])
def test_a_compiler_that_is_missing_names_the_extra(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError("support not installed")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", absent)
    with pytest.raises(UserError, match=rf"pip install 'hsql-jax\[{extra}\]'"):
        find_topology(name)


def test_disjoint_meshes_share_out_the_devices() -> None:
    apart = Meshes(MeshConfig(fsdp=4), MeshConfig(tensor=4), disjoint=True)
    check(dataclasses.replace(TINY, meshes=apart), 8)
    with pytest.raises(UserError, match=r"is 4 devices where there are 12; .*fsdp = 12"):
        check(dataclasses.replace(TINY, meshes=apart), 16)

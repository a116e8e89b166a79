"""`hsql compile`: the real programs, compiled ahead of time for devices that need not be there.

Each phase is lowered from shapes alone, compiled by the chip's own compiler, and reported: memory
per device, operations, traffic, and the time that these allow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from hsql_jax.config import option
from hsql_jax.data import Batch
from hsql_jax.errors import UserError
from hsql_jax.hlo import Traffic, traffic
from hsql_jax.losses import piece_size
from hsql_jax.model import ModelConfig, init_params, param_shardings
from hsql_jax.model.decode import Cache, Rows, cache_shardings, decode, extend, init_cache
from hsql_jax.objectives import resolve
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.rollout.engine import EngineConfig
from hsql_jax.sharding import (
    Meshes,
    batch_sharding,
    check_devices,
    check_sizes,
    make_meshes,
    model_sizes,
    replicated,
    shards,
)
from hsql_jax.speed import forward_flops
from hsql_jax.topology import GIB, Topology, find_topology
from hsql_jax.train import TrainState, make_train_step, state_shardings

PhaseName = Literal["sft", "rl", "prefill", "decode"]
PHASES: tuple[PhaseName, ...] = ("sft", "rl", "prefill", "decode")
TOTALS = ("arguments", "outputs", "temporaries", "peak")  # of memory, beside its classes


@dataclass(frozen=True)
class CompileConfig:
    """What to compile: a model, its meshes, the batch of an update, and the engine's sizes."""

    model: ModelConfig
    meshes: Meshes
    tokens: int  # T, of a row
    rows: int  # of an update, over all its micro-batches
    micro_batches: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    objective: str = "dapo"  # of the phase `rl`
    utilisation: float = 0.5  # share of the peak operations that matrix products are taken to reach
    phases: tuple[PhaseName, ...] = PHASES
    topology: str = option("cpu:8")  # CHIP:SIZE, see hsql_jax/topology.py
    json: bool = option(False)  # print the report as JSON

    def __post_init__(self) -> None:
        if min(self.tokens, self.rows, self.micro_batches) < 1 or self.rows % self.micro_batches:
            raise ValueError(
                f"rows = {self.rows}, tokens = {self.tokens}, micro_batches = "
                f"{self.micro_batches}: rows are a multiple of micro_batches, all at least 1"
            )
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation = {self.utilisation}: give a share, 0 < x <= 1")


@dataclass(frozen=True)
class Program:
    """One phase before it is compiled: a jitted function, its arguments' shapes, its operations."""

    devices: int
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    classes: dict[str, Any]  # what of the arguments `memory` reports by name
    flops: float  # of one run, on all devices together
    loops: tuple[int, ...]  # how often the loops run whose count is not in the program, inwards


@dataclass(frozen=True)
class Phase:
    """The report of one phase; memory and traffic are of one device, in bytes.

    Where the program does not fit, `memory` holds what is known and the rest is empty.
    """

    phase: str
    fits: bool
    devices: int
    memory: dict[str, float]
    capacity: float
    headroom: float  # share of the capacity that is left
    flops: float  # a device, recomputation included
    memory_traffic: float = 0.0
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0


def main(config: CompileConfig) -> None:
    """Compile every phase and print the report.

    Raises `UserError` for sizes that do not divide, and, after the report, for a phase that does
    not fit.
    """
    topology = find_topology(config.topology)
    check(config, len(topology.devices))
    report = [compile_phase(name, config, topology) for name in config.phases]
    if config.json:
        print(to_json(config, report))
    else:
        show(config, report, Console())
    for phase in report:
        if not phase.fits:
            raise UserError(
                f"{config.topology}: {phase.phase} needs {phase.memory['peak'] / GIB:.1f} GiB of "
                f"the {phase.capacity / GIB:.2f} GiB of a device; lower --tokens, or split over "
                "more devices (fsdp, context)"
            )


def check(config: CompileConfig, devices: int) -> None:
    """`UserError`, in one line with the sizes that would work, unless everything divides."""
    meshes, sizes = config.meshes, model_sizes(config.model)
    check_devices(meshes.train, devices - meshes.rollout.devices * meshes.disjoint)
    if meshes.devices > devices:
        raise UserError(
            f"rollout mesh: tensor = {meshes.rollout.tensor} is more than {devices} devices"
        )
    batch = {"batch": config.rows // config.micro_batches, "time": config.tokens}
    check_sizes(meshes.train, sizes | batch)
    check_sizes(meshes.rollout, sizes)


def compile_phase(name: str, config: CompileConfig, topology: Topology) -> Phase:
    """Lower and compile one phase, and read its report from the executable."""
    build = {"sft": _train, "rl": _train, "prefill": _prefill, "decode": _decode}[name]
    program = build(name, config, make_meshes(config.meshes, topology.devices))
    chip, flops = topology.chip, program.flops / program.devices
    begin = time.monotonic()
    try:
        lowered = program.function.lower(*program.arguments, **program.keywords)
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        memory = {"peak": needed_bytes(str(error))}
        left = 1 - memory["peak"] / chip.memory
        return Phase(name, False, program.devices, memory, chip.memory, left, flops)
    took = time.monotonic() - begin
    memory = memory_classes(compiled.memory_analysis(), program.classes, chip.platform)
    moved = traffic(compiled.as_text(), program.devices, program.loops)
    sent = sum(kind.bytes_sent for kind in moved.collectives.values())
    seconds = {
        "compute": flops / (chip.flops * config.utilisation),
        "memory": moved.memory_bytes / chip.bandwidth,
        "collectives": sent / chip.links,
    }
    return Phase(
        phase=name,
        fits=memory["peak"] <= chip.memory,
        devices=program.devices,
        memory=memory,
        capacity=chip.memory,
        headroom=1 - memory["peak"] / chip.memory,
        flops=flops,
        memory_traffic=moved.memory_bytes,
        collectives=_collectives(moved),
        seconds=seconds | {"expected": max(seconds.values())},
        compile_seconds=took,
    )


def _collectives(moved: Traffic) -> dict[str, dict[str, float]]:
    return {kind: value._asdict() for kind, value in moved.collectives.items()}


def needed_bytes(message: str) -> float:
    """What a compiler that ran out of memory says it needed: the first size of its message.

    It may be of the temporaries alone. Raises `UserError` for a message without a size.
    """
    found = re.search(r"([\d.]+)([KMGT])i?B?\b", message)
    if found is None:
        raise UserError(f"the compiler ran out of memory: {message.splitlines()[0]}")
    return float(found[1]) * 1024 ** (" KMGT".index(found[2]))


def memory_classes(stats: Any, classes: dict[str, Any], platform: str) -> dict[str, float]:
    """Bytes of one device: each class of arguments, then the compiler's totals and its peak.

    Outputs that reuse the memory of donated arguments are not counted twice. A temporary may lie
    where another, or an output, has been: the peak is less than the sum. On a CPU it is the sum.
    """
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes
    return {name: float(_device_bytes(tree)) for name, tree in classes.items()} | {
        "arguments": float(stats.argument_size_in_bytes),
        "outputs": float(outputs),
        "temporaries": float(stats.temp_size_in_bytes),
        "peak": float(total if platform == "cpu" else stats.peak_memory_in_bytes),
    }


def _device_bytes(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


# --- the programs ---------------------------------------------------------------------------------


def _placed(shapes: Any, shardings: Any) -> Any:
    """Shapes and dtypes with their shardings; one sharding stands for a whole tree."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _train(name: str, config: CompileConfig, meshes: tuple[Mesh, Mesh]) -> Program:
    """The train step of the trainer itself, with supervised learning's loss or the objective's."""
    model, mesh = config.model, meshes[0]
    tx = make_optimizer(config.optim, steps=1000)
    objective = resolve("sft" if name == "sft" else config.objective)

    def fresh() -> TrainState:
        params = init_params(model, jax.random.key(0))
        return TrainState(step=jnp.int32(0), params=params, opt_state=tx.init(params))

    state = _placed(jax.eval_shape(fresh), state_shardings(mesh, model, tx))
    shape = (config.micro_batches, config.rows // config.micro_batches, config.tokens)
    integers = {"tokens", "targets", "segment_ids", "positions"}
    unread = {"sampler_logprobs"} if not objective.recompute else set()
    unread |= {"ref_logprobs"} if not objective.reference else set()
    names = [item.name for item in dataclasses.fields(Batch) if item.name not in unread]
    leaves = {name: jnp.int32 if name in integers else jnp.float32 for name in names}
    batch = Batch(**{name: jax.ShapeDtypeStruct(shape, kind) for name, kind in leaves.items()})
    batch = _placed(batch, batch_sharding(mesh))
    forward = forward_flops(model, config.rows, config.tokens, config.tokens / 2)
    # The loss visits its tokens in chunks, as many as there are tokens with a loss: here all.
    own = math.prod(shape[1:]) // (shards(mesh, "batch") * shards(mesh, "time"))
    chunks = -(-own // piece_size(mesh))
    return Program(
        devices=mesh.size,
        function=make_train_step(model, objective.loss, tx, mesh),
        arguments=(state, batch),
        keywords={},
        classes={"parameters": state.params, "optimizer": state.opt_state, "batch": batch},
        flops=forward * (3 if model.remat in ("none", "products") else 4),
        loops=(config.micro_batches, chunks),
    )


def _prefill(_: str, config: CompileConfig, meshes: tuple[Mesh, Mesh]) -> Program:
    """The engine's feeding of `width` tokens to `rows` slots whose sessions are full."""
    engine, mesh = config.engine, meshes[1]
    arrays = _engine_arrays(config, mesh)
    classes = {"parameters": arrays["params"], "cache": arrays["cache"]}
    shapes = {
        "tokens_RW": jax.ShapeDtypeStruct((engine.rows, engine.width), jnp.int32),
        "count_R": jax.ShapeDtypeStruct((engine.rows,), jnp.int32),
    }
    seen = engine.session_tokens + engine.width / 2
    return Program(
        devices=mesh.size,
        function=jax.jit(functools.partial(extend, config=config.model), static_argnames="used"),
        arguments=(arrays.pop("params"),),
        keywords=arrays | _placed(shapes, replicated(mesh)) | {"used": engine.session_tokens},
        classes=classes,
        flops=forward_flops(config.model, engine.rows, engine.width, seen, heads=1),
        loops=(),
    )


def _decode(_: str, config: CompileConfig, meshes: tuple[Mesh, Mesh]) -> Program:
    """The engine's sampling of `chunk` tokens in `rows` slots whose sessions are full."""
    engine, mesh = config.engine, meshes[1]
    arrays = _engine_arrays(config, mesh)
    classes = {"parameters": arrays["params"], "cache": arrays["cache"]}
    row = jax.ShapeDtypeStruct((engine.rows,), jnp.int32)
    shapes = {"token_R": row, "limit_R": row}
    static = {"steps": engine.chunk, "used": engine.session_tokens}
    return Program(
        devices=mesh.size,
        function=jax.jit(
            functools.partial(decode, config=config.model, stop_id=0),
            static_argnames=("steps", "used"),
        ),
        arguments=(arrays.pop("params"),),
        keywords=arrays | _placed(shapes, replicated(mesh)) | static,
        classes=classes,
        flops=forward_flops(config.model, engine.rows, engine.chunk, engine.session_tokens),
        loops=(engine.chunk,),
    )


def _engine_arrays(config: CompileConfig, mesh: Mesh) -> dict[str, Any]:
    """What the engine hands to both of its programs, laid out as it does."""
    engine = config.engine
    model = dataclasses.replace(config.model, param_dtype=config.model.dtype)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    length = engine.session_tokens + max(engine.chunk, engine.width)
    cache: Cache = jax.eval_shape(lambda: init_cache(model, engine.slots + 1, length))
    kinds = (jnp.int32, jnp.int32, jnp.uint32, jnp.int32)
    rows = Rows(*(jax.ShapeDtypeStruct((engine.rows,), kind) for kind in kinds))
    placed = _placed(params, param_shardings(mesh, model))
    layer = jax.tree.map(_of_one_layer, placed["layers"])
    return {
        "params": placed | {"layers": (layer,) * model.layers},
        "cache": _placed(cache, cache_shardings(mesh, cache)),
        "rows": _placed(rows, replicated(mesh)),
        "temperature": _placed(jax.ShapeDtypeStruct((), jnp.float32), replicated(mesh)),
    }


def _of_one_layer(stack: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(stack.sharding.mesh, jax.P(*stack.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


# --- the report -----------------------------------------------------------------------------------


def to_json(config: CompileConfig, report: Sequence[Phase]) -> str:
    """The report and what it is of, as one JSON object; an unknown size is null."""
    record = {
        "topology": config.topology,
        "jax": jax.__version__,
        "mesh": config.meshes.train.shape,
        "rollout_mesh": config.meshes.rollout.shape,
        "disjoint": config.meshes.disjoint,
        "tokens": config.tokens,
        "rows": config.rows,
        "micro_batches": config.micro_batches,
        "utilisation": config.utilisation,
        "model": dataclasses.asdict(config.model),
        "engine": dataclasses.asdict(config.engine),
        "phases": [dataclasses.asdict(phase) for phase in report],
    }
    return json.dumps(record, indent=2)


Cell = Callable[[Phase], str]


def show(config: CompileConfig, report: Sequence[Phase], console: Console) -> None:
    """The report as a table, one column a phase."""
    table = Table(title=f"{config.topology}, {config.rows} x {config.tokens} tokens, per device")
    table.add_column("")
    for phase in report:
        table.add_column(phase.phase, justify="right")
    for label, cell in _lines(report):
        table.add_row(label, *map(cell, report))
    console.print(table)


def _lines(report: Sequence[Phase]) -> list[tuple[str, Cell]]:
    def gib(name: str) -> Cell:
        return lambda phase: _number(phase.memory.get(name), GIB)

    def seconds(name: str) -> Cell:
        return lambda phase: _number(phase.seconds.get(name), 1)

    def collective(kind: str) -> Cell:
        def cell(phase: Phase) -> str:
            found = phase.collectives.get(kind)
            return f"{found['times']:.0f}, {found['bytes_sent'] / GIB:.3g}" if found else "-"

        return cell

    names = dict.fromkeys(name for phase in report for name in phase.memory)
    totals = [name for name in names if name in TOTALS]
    classes = [name for name in names if name not in TOTALS] + totals
    kinds = list(dict.fromkeys(kind for phase in report for kind in phase.collectives))
    return [
        ("devices", lambda phase: str(phase.devices)),
        *((f"{name}, GiB", gib(name)) for name in classes),
        ("capacity, GiB", lambda phase: _number(phase.capacity, GIB)),
        ("headroom", lambda phase: f"{phase.headroom:.0%}"),
        ("operations, TFLOP", lambda phase: _number(phase.flops, 1e12)),
        ("memory traffic, GiB", lambda phase: _number(phase.memory_traffic or None, GIB)),
        *((f"{kind}, times and GiB sent", collective(kind)) for kind in kinds),
        *(
            (f"{name}, s", seconds(name))
            for name in ("compute", "memory", "collectives", "expected")
        ),
    ]


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.4g}"

"""One NVIDIA GPU in under eight minutes: training, generation and attention, each to its bounds.

    python -m venv .venv
    .venv/bin/pip install -e env -e '.[cuda]'
    .venv/bin/python tests/benchmarks/gpu.py --out gpu.json

- training: model operations a second (MFU: attention counted causally, recomputation not counted)
  of the supervised step at 8,192 and 32,768 tokens a row, for a model of Qwen3-8B's widths with as
  many layers as fit with float32 parameters and Adam moments;
- decode: tokens a second of the engine with the whole 8B shape in bfloat16, against reading the
  weights and the cache once a step at the device's bandwidth;
- attention: every backend that does not refuse, against the definition, then timed.

Weights and tokens are random. The JSON file is written anew after each measurement; one that fails
leaves its error there and the rest go on, and none is begun with less than a minute of the budget
left. Without a GPU the same program runs at toy sizes, to see that it works. Not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hsql_jax.compile import memory_classes, needed_bytes
from hsql_jax.data import Example, assemble
from hsql_jax.model import ModelConfig, init_params
from hsql_jax.model.attention import BACKENDS, attention, choose
from hsql_jax.model.attention.base import Case
from hsql_jax.objectives import sft
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.rollout.engine import Engine, EngineConfig
from hsql_jax.sft import stack
from hsql_jax.sharding import MeshConfig, make_mesh, platform_of
from hsql_jax.speed import forward_flops
from hsql_jax.train import TrainState, create_state, make_train_step

MIB = 2**20
RESERVE_S = 60.0  # nothing is begun with less of the budget left
TOLERANCE = 0.03  # of attention in bfloat16, as a share of the largest value
# bfloat16 operations and bytes a second by NVIDIA's data sheets (dense, SXM parts).
DATA_SHEETS = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.04e12),
}
QWEN3_8B = ModelConfig(
    vocab_size=151_936,
    d_model=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    d_ff=12_288,
    tied=False,
    dtype="bfloat16",
    packed=False,
)


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: ModelConfig  # decode uses all of it, training as many of `layers` as fit
    layers: tuple[int, ...]  # to try, in this order
    training: tuple[tuple[int, int, str, str], ...]  # tokens a row, rows, remat, attention
    steps: int  # timed
    sequences: int
    prompt: int
    new: int  # tokens of a sequence
    chunk: int  # decode steps in one call
    contract: int  # tokens a row where backends are compared with the definition
    lengths: tuple[int, ...]  # tokens a row where they are timed
    side: int  # of the square matrices that measure the device


FULL = Sizes(
    model=QWEN3_8B,
    layers=(24, 16, 8),
    training=(
        (8192, 4, "full", "auto"),
        (32_768, 1, "full", "auto"),
        (8192, 4, "full", "chunked"),
        (8192, 1, "products", "auto"),
    ),
    steps=3,
    sequences=64,
    prompt=256,
    new=512,
    chunk=32,
    contract=512,
    lengths=(8192, 32_768),
    side=8192,
)
DRY = Sizes(
    model=replace(
        QWEN3_8B, vocab_size=128, d_model=64, layers=2, heads=4, kv_heads=2, head_dim=16, d_ff=96
    ),
    layers=(2,),
    training=((64, 2, "full", "auto"), (128, 1, "products", "chunked")),
    steps=2,
    sequences=4,
    prompt=8,
    new=64,
    chunk=8,
    contract=64,
    lengths=(128,),
    side=256,
)


@dataclass(frozen=True)
class Device:
    """What the device can do: by its data sheet, or as measured where there is none."""

    flops: float
    bandwidth: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=450.0, help="seconds")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    begun = time.monotonic()
    sizes = FULL if platform_of(None) == "gpu" else DRY
    report: dict[str, Any] = describe(sizes) | {"budget_s": args.budget, "measurements": {}}
    rates = guarded(lambda: measure_rates(sizes))
    known = next((v for k, v in DATA_SHEETS.items() if k in report["device"]), None)
    measured = rates.get("flops", math.nan), rates.get("bandwidth", math.nan)
    device = Device(*(known or measured))
    report |= {"bounds": asdict(device) | {"of": "data sheet" if known else "measurement"}}
    report["measurements"]["device"] = rates
    for name, action in measurements(sizes, device).items():
        left = args.budget - (time.monotonic() - begun)
        found = guarded(action) if left > RESERVE_S else {"error": f"not begun: {left:.0f} s left"}
        report["measurements"][name] = found
        report["seconds"] = time.monotonic() - begun
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{report['seconds']:6.0f} s  {name}: {json.dumps(found)}", flush=True)
        gc.collect()
        jax.clear_caches()


def describe(sizes: Sizes) -> dict[str, Any]:
    """When, on what, with what, of which sizes."""
    names = ("jax", "jaxlib", "hsql-jax")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "platform": platform_of(None),
        "versions": {name: importlib.metadata.version(name) for name in names}
        | {
            "python": platform.python_version(),
            "runtime": jax.devices()[0].client.platform_version,
        },
        "sizes": asdict(sizes),
    }


def guarded(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The action's figures, or the error in their place; both with the seconds it took."""
    begun = time.monotonic()
    try:
        found = action()
    except Exception as error:  # whatever it is, the other measurements are still wanted
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    return found | {"seconds": time.monotonic() - begun}


def measurements(sizes: Sizes, device: Device) -> dict[str, Callable[[], dict[str, Any]]]:
    """Everything but the device's own rates, the most wanted first."""
    first, second, *rest = (
        (" ".join(map(str, ("training", *case))), partial(measure_training, sizes, device, *case))
        for case in sizes.training
    )
    return dict(
        [
            first,
            second,
            ("decode", partial(measure_decode, sizes, device)),
            ("attention contract", partial(check_attention, sizes)),
            *(
                (f"attention {tokens}", partial(time_attention, sizes, tokens))
                for tokens in sizes.lengths
            ),
            *rest,
        ]
    )


def seconds_of(action: Callable[[], Any], times: int) -> float:
    """The median seconds of a call, after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        jax.block_until_ready(action())
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))


def measure_rates(sizes: Sizes) -> dict[str, Any]:
    """Operations a second of one large product, and bytes a second of one pass over memory."""
    square = jnp.ones((sizes.side, sizes.side), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    product = seconds_of(lambda: multiply(square, square), 10)
    long = jnp.ones((16 * sizes.side, sizes.side), jnp.bfloat16)
    add = jax.jit(lambda x: x + 1)
    one_pass = seconds_of(lambda: add(long), 10)
    return {"flops": 2 * sizes.side**3 / product, "bandwidth": 2 * long.nbytes / one_pass}


# --- training -------------------------------------------------------------------------------------


def measure_training(
    sizes: Sizes, device: Device, tokens: int, rows: int, remat: Any, backend: Any
) -> dict[str, Any]:
    """The supervised step, with the most layers of `sizes.layers` that fit."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    tx = make_optimizer(OptimConfig(schedule="constant", warmup=0.0), 1)
    rng = np.random.default_rng(0)
    whole = [
        [Example(ids, np.ones_like(ids))]
        for ids in rng.integers(0, sizes.model.vocab_size, (rows, tokens))
    ]
    batch = stack([assemble(whole, tokens, rows)])
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    refused = {}
    for layers in sizes.layers:
        model = replace(sizes.model, layers=layers, remat=remat, attention=backend)
        step: Any = make_train_step(model, sft().loss, tx, mesh)
        begun = time.perf_counter()
        try:
            compiled = step.lower(shapes_of_state(model, tx), batch).compile()
        except jax.errors.JaxRuntimeError as error:
            if needed_bytes(str(error)) is None:
                raise
            refused[layers] = str(error)[:200]
            continue
        compile_s = time.perf_counter() - begun
        memory = memory_classes(compiled.memory_analysis(), {}, platform_of(None))
        if memory["peak"] <= limit:
            break
        refused[layers] = f"needs {memory['peak'] / MIB:.0f} of {limit / MIB:.0f} MiB"
    else:
        raise MemoryError(f"no number of layers fits: {refused}")

    params = jax.jit(lambda: init_params(model, jax.random.key(0)))()
    state = create_state(params, model, tx, mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    del params
    losses = []

    def one_step() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))

    step_s = seconds_of(one_step, sizes.steps)
    flops = 3 * forward_flops(model, rows, tokens, tokens / 2)
    return {
        "layers": layers,
        "parameters": parameters,
        "refused layers": refused,
        "rows": rows,
        "tokens": tokens,
        "remat": remat,
        "attention": chosen(model, tokens),
        "compile s": compile_s,
        "step s": step_s,
        "tokens/s": rows * tokens / step_s,
        "flops": flops,
        "MFU": flops / step_s / device.flops,
        "peak MiB": memory["peak"] / MIB,
        "losses": losses,
    }


def shapes_of_state(model: ModelConfig, tx: Any) -> TrainState:
    """A fresh state that takes no memory."""

    def fresh() -> TrainState:
        params = init_params(model, jax.random.key(0))
        return TrainState(step=jnp.int32(0), params=params, opt_state=tx.init(params))

    shapes: TrainState = jax.eval_shape(fresh)
    return shapes


def chosen(model: ModelConfig, tokens: int) -> str:
    """The attention backend that the model gets here."""
    case = Case(platform_of(None), tokens, model.head_dim, model.dtype, model.packed, context=1)
    return choose(model.attention, case)


# --- decode ---------------------------------------------------------------------------------------


def measure_decode(sizes: Sizes, device: Device) -> dict[str, Any]:
    """Tokens a second of the engine, sampling, once the prompts are in the cache."""
    model = replace(sizes.model, param_dtype=sizes.model.dtype)
    params = jax.jit(lambda: init_params(model, jax.random.key(0)))()
    config = EngineConfig(
        slots=sizes.sequences,
        rows=sizes.sequences,
        width=sizes.prompt,
        chunk=sizes.chunk,
        lengths=(sizes.prompt + sizes.new,),
    )
    prompt, whole = asyncio.run(generate(sizes, Engine(model, config, stop_id=-1), params))
    # A step reads every weight but the embedding, and the cache as far as it is filled on average.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["embed"].nbytes
    values = 2 * model.layers * model.kv_heads * model.head_dim * (sizes.prompt + sizes.new / 2)
    read = weights + sizes.sequences * values * jnp.dtype(model.dtype).itemsize
    rate = sizes.sequences * (sizes.new - 1) / (whole - prompt)
    bound = sizes.sequences * device.bandwidth / read
    return {
        "layers": model.layers,
        "prompt s": prompt,
        "whole s": whole,
        "tokens/s": rate,
        "bytes a step": read,
        "bound tokens/s": bound,
        "of the bound": rate / bound,
    }


async def generate(sizes: Sizes, engine: Engine, params: Any) -> tuple[float, float]:
    """Seconds until every sequence has one new token, and until it has all of them."""
    ids = np.random.default_rng(0).integers(0, sizes.model.vocab_size, sizes.prompt).tolist()

    async def one(seed: int, new: int) -> int:
        slot = await engine.acquire(seed)
        made = await engine.generate(slot, ids, new)
        engine.release(slot)
        return len(made.ids)

    async def timed(new: int) -> float:
        begun = time.perf_counter()
        made = await asyncio.gather(*(one(seed, new) for seed in range(sizes.sequences)))
        assert made == [new] * sizes.sequences, made
        return time.perf_counter() - begun

    async with engine.running(params, 1.0):
        await timed(sizes.chunk + 1)  # compiles
        prompt = min([await timed(1) for _ in range(2)])
        whole = min([await timed(sizes.new) for _ in range(2)])
    return prompt, whole


# --- attention ------------------------------------------------------------------------------------


def check_attention(sizes: Sizes) -> dict[str, Any]:
    """Each backend's largest error in output and gradients, as a share of the largest value.

    Rows are whole, padded at the end, and packed with two segments.
    """
    T = sizes.contract
    ids = {name: np.ones((2, T), np.int32) for name in ("whole", "padded", "packed")}
    ids["padded"][1, T // 2 + 3 :] = 0
    ids["packed"][:, T // 3 :] = 2
    arrays = queries(sizes.model, 2, T)

    def errors(backend: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, segments in ids.items():
            packed = name == "packed"
            if refusal := refuses(sizes, backend, T, packed):
                found[name] = {"refused": refusal}
                continue
            wide = [leaf.astype(jnp.float32) for leaf in arrays]
            with jax.default_matmul_precision("highest"):
                expected = output_and_gradients(define, wide, segments)
            by = partial(attention, backend=backend, packed=packed)
            shares = [
                float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
                for a, b in zip(output_and_gradients(by, arrays, segments), expected, strict=True)
            ]
            found[name] = {"error": max(shares), "holds": max(shares) < TOLERANCE}
        return found

    return {name: guarded(partial(errors, name)) for name in BACKENDS}


def define(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Attention by its definition, with all scores at once."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(leaf, groups, axis=2) for leaf in (k, v))
    scores = jnp.einsum("bthq,bshq->bhts", q, k) * q.shape[-1] ** -0.5
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = same & jnp.tril(jnp.ones(same.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshq->bthq", weights, v)


def output_and_gradients(
    run: Callable[..., jax.Array], arrays: Any, segment_ids: np.ndarray
) -> list[jax.Array]:
    """The output at real tokens, and the gradients of a weighted sum over them."""
    real = (segment_ids > 0)[:, :, None, None]

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> list[jax.Array]:
        out, backward = jax.vjp(lambda *x: run(*x, jnp.asarray(segment_ids)), q, k, v)
        return [jnp.where(real, out, 0), *backward(jnp.where(real, weight, 0).astype(out.dtype))]

    return both(*arrays)


def queries(model: ModelConfig, rows: int, tokens: int) -> list[jax.Array]:
    """Random queries, keys, values, and a weight for each output."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (model.heads, model.kv_heads, model.kv_heads, model.heads)
    return [
        jax.random.normal(key, (rows, tokens, count, model.head_dim), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    ]


def refuses(sizes: Sizes, backend: str, tokens: int, packed: bool) -> str | None:
    """Why the backend does not take such rows; None where it does."""
    case = Case(platform_of(None), tokens, sizes.model.head_dim, "bfloat16", packed, context=1)
    return BACKENDS[backend].refuses(case)


def time_attention(sizes: Sizes, tokens: int) -> dict[str, Any]:
    """Each backend on one row of one segment: forward, and forward with backward."""
    *arrays, weight = queries(sizes.model, 1, tokens)
    segments = jnp.ones((1, tokens), jnp.int32)
    flops = 2 * tokens**2 * sizes.model.heads * sizes.model.head_dim  # forward, causal

    def times(backend: str) -> dict[str, Any]:
        if refusal := refuses(sizes, backend, tokens, packed=False):
            return {"refused": refusal}

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(q, k, v, segments, backend=backend, packed=False)

        def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, backward = jax.vjp(run, q, k, v)
            return out, backward(weight)

        programs: list[Any] = [jax.jit(f).lower(*arrays).compile() for f in (run, both)]
        forward, compiled = programs
        forward_s = seconds_of(lambda: forward(*arrays), 5)
        both_s = seconds_of(lambda: compiled(*arrays), 5)
        return {
            "forward s": forward_s,
            "both s": both_s,
            "forward flops/s": flops / forward_s,
            "both flops/s": 3 * flops / both_s,
            "temporary MiB": compiled.memory_analysis().temp_size_in_bytes / MIB,
        }

    return {name: guarded(partial(times, name)) for name in BACKENDS}


if __name__ == "__main__":
    main()

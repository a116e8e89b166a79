"""Speed and host memory of loading a Hugging Face folder onto a mesh of 8 virtual CPU devices.

Writes a random checkpoint of 2 GB (bfloat16, shaped as a Qwen3-1.7B of 14 layers), then loads it in
child processes, in turns with reading it once through a small buffer into one fresh array. Asserts
the bound on memory and reports the ratio of times, best against best. Not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hsql_jax.model import ModelConfig
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.weights import TENSORS, load_hf
from hsql_jax.weights.files import write_tensors
from hsql_jax.weights.layout import hf_config, is_leaf, leaves

MODEL = ModelConfig(
    vocab_size=151_936, d_model=2048, layers=14, heads=16, kv_heads=8, head_dim=128, d_ff=6144,
    param_dtype="bfloat16", dtype="bfloat16",
)  # fmt: skip
MESHES = {"fsdp=8": MeshConfig(fsdp=8), "fsdp=4, tensor=2": MeshConfig(fsdp=4, tensor=2)}
COPY = "read and copy"
MEMORY_BOUND = 256 << 20  # bytes above those of the arrays
TIME_TARGET = 1.5  # times as long as reading and copying


def write_checkpoint(folder: Path) -> None:
    """Write the folder; any bits are a number, or not one, which loading does not mind."""
    rng = np.random.default_rng(0)
    flat = jax.tree.leaves(leaves(MODEL), is_leaf)
    shapes = {name: leaf.stored_shape for leaf in flat for name in leaf.names}
    dtype = jnp.dtype(MODEL.param_dtype)
    tensors = (rng.integers(0, 1 << 16, shape, np.uint16).view(dtype) for shape in shapes.values())
    write_tensors(folder / TENSORS, shapes, dtype, tensors)
    (folder / "config.json").write_text(json.dumps(hf_config(MODEL)))


def rss_anon(pid: int | str = "self") -> int:
    """Bytes of anonymous memory; mapped files are not in it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def read_and_copy(file: Path) -> int:
    """Read a file through 16 MB into one array; return its bytes."""
    buffer = memoryview(bytearray(16 << 20))
    whole = np.empty(file.stat().st_size, np.uint8)
    done = 0
    with file.open("rb", buffering=0) as content:
        while count := content.readinto(buffer):
            whole[done : done + count] = buffer[:count]
            done += count
    return done


def child(kind: str, folder: Path) -> None:
    """One measurement: prints its seconds, the arrays' bytes, and the memory before."""
    if kind == COPY:
        before, start, cpu = rss_anon(), time.perf_counter(), time.process_time()
        held = read_and_copy(folder / TENSORS)
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        mesh = make_mesh(MESHES[kind])
        before, start, cpu = rss_anon(), time.perf_counter(), time.process_time()
        _, params = load_hf(folder, mesh=mesh)
        jax.block_until_ready(params)
        held = sum(
            s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards
        )
    times = {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    print(json.dumps(times | {"held": held, "before": before}))


def measure(kind: str, folder: Path) -> dict[str, float]:
    """Run a child; its seconds, and the peak of its memory above before and the arrays, bytes."""
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, rss_anon(process.pid))
            time.sleep(0.005)
        assert process.returncode == 0
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
    above = peak - result.pop("before") - result.pop("held")
    return result | {"above": above}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.folder)
        return
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in (COPY, *MESHES)}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        size = (Path(name) / TENSORS).stat().st_size
        for _ in range(arguments.rounds):
            for kind, results in runs.items():
                results.append(measure(kind, Path(name)))
    best = {kind: min(run["s"] for run in results) for kind, results in runs.items()}
    print(f"{size / 1e9:.2f} GB, {arguments.rounds} rounds; target {TIME_TARGET} times the copy")
    for kind, results in runs.items():
        above = max(run["above"] for run in results)
        print(
            f"{kind:<18}{best[kind]:>7.2f} s best  {best[kind] / best[COPY]:>5.2f} times"
            f"  {min(run['cpu_s'] for run in results):>6.2f} CPU-s"
            f"  {above / 2**20:>7.0f} MB above the arrays"
        )
        assert kind == COPY or above <= MEMORY_BOUND, kind
    print("\n" + json.dumps(runs))


if __name__ == "__main__":
    main()

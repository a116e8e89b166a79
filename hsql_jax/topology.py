"""Accelerators that can be compiled for without being there, and what they can do."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from hsql_jax.errors import UserError

GIB = 2**30


class Chip(NamedTuple):
    """What one device can do; rates are peaks, bytes and operations a second."""

    platform: str  # JAX's; the extra of the same name installs its compiler
    memory: float  # bytes a program may use
    flops: float  # bfloat16, dense
    bandwidth: float  # of the main memory
    links: float  # sent over all its links to neighbours together


# TPU: the system architecture pages of cloud.google.com/tpu/docs, with the memory that the compiler
# leaves to a program. GPU: NVIDIA's data sheets of the SXM parts, NVLink in one direction. CPU:
# nominal figures, for tests.
CHIPS: dict[str, Chip] = {
    "v5e": Chip("tpu", 15.75 * GIB, 197e12, 819e9, 200e9),
    "v5p": Chip("tpu", 95.0 * GIB, 459e12, 2765e9, 600e9),
    "v6e": Chip("tpu", 31.25 * GIB, 918e12, 1640e9, 400e9),
    "h100": Chip("cuda", 80e9, 989e12, 3352e9, 450e9),
    "cpu": Chip("cpu", 8 * GIB, 0.1e12, 20e9, 10e9),
}

# The same chips by the names of devices that are there; an H200 is an H100 with more memory.
KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h100",
}

# An H100 as XLA describes it to its compiler, for a machine without one.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 85899345920
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 patch: 0 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Topology(NamedTuple):
    """Devices to compile for."""

    name: str  # CHIP:SIZE, such as v5p:2x2x2
    chip: Chip
    devices: Sequence[Any]


def peak_flops(kind: str) -> float | None:
    """Operations a second, bfloat16, of a device of JAX's `device_kind`; None if not known."""
    return CHIPS[KINDS[kind]].flops if kind in KINDS else None


def find_topology(name: str) -> Topology:
    """The topology CHIP:SIZE: `v5p:2x2x2`, `v6e:4x4`, `h100:8`, `h100:4x8` (nodes x GPUs), `cpu:8`.

    Raises `UserError` for another form, an unknown chip, a size that the chip does not come in,
    and a compiler that is not installed.
    """
    kind, _, size = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise UserError(
            f"topology {name!r}: give CHIP:SIZE, such as v5p:2x2x2, v6e:4x4, h100:8 or cpu:8; "
            f"chips are {', '.join(CHIPS)}"
        )
    chip, sizes = CHIPS[kind], [int(part) for part in size.split("x")]
    find = {"tpu": _tpu, "cuda": _gpu, "cpu": _cpu}[chip.platform]
    try:
        devices = find(kind, sizes)
    except (RuntimeError, ImportError, NotImplementedError, KeyError) as error:
        raise UserError(_explain(name, chip.platform, error)) from error
    return Topology(name, chip, devices)


def _tpu(kind: str, sizes: list[int]) -> Sequence[Any]:
    # libtpu asks the cloud's metadata server and its hosts unless it is told what it would learn.
    # No chip is taken: other processes may have the library open too.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{kind}-{math.prod(sizes)}")
    jax.config.update("jax_platforms", "cpu")
    name = f"{kind}:{'x'.join(map(str, sizes))}"
    return topologies.get_topology_desc(name, platform="tpu").devices


def _gpu(kind: str, sizes: list[int]) -> Sequence[Any]:
    nodes, gpus = (1, *sizes)[-2:]
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(
        kind, "cuda", topology=f"1x{nodes}x{gpus}", target_config=H100
    ).devices


def _cpu(_: str, sizes: list[int]) -> Sequence[Any]:
    jax.config.update("jax_platforms", "cpu")
    count = math.prod(sizes)
    if jax.config.jax_num_cpu_devices < count:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", count)  # refused once the CPU is in use
    return jax.devices("cpu")[:count]


def _explain(name: str, platform: str, error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else repr(error)
    if platform != "cpu" and "INVALID_ARGUMENT" not in text:
        return (
            f"topology {name}: no {platform} compiler is installed; pip install "
            f"'hsql-jax[{platform}]' ({text})"
        )
    return f"topology {name}: {text}"

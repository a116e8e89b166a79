"""What the benchmarks with contenders share: processes, a model, and ways to measure.

A contender is a process of its own, with an interpreter of its own, that is asked by JSON lines.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

MIB = 2**20
# For all alike: large pages for what is allocated anew in every step, and no look at a network.
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class ModelSizes:
    """A small Qwen3 with tied embeddings."""

    layers: int = 8
    d_model: int = 256
    d_ff: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 8192


# --- inside a contender --------------------------------------------------------------------------


def answers() -> TextIO:
    """Where to write answers: what libraries print must not fall among them."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def cpu_seconds() -> float:
    """Processor seconds of this process until now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def give_back_memory() -> int:
    """Free what is not in use; the anonymous bytes then left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes()


@contextmanager
def peak_of(read: Callable[[], int]) -> Iterator[list[int]]:
    """Values of `read`, taken all the time while the block runs."""
    values, done = [read()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            values.append(read())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield values
    finally:
        done.set()
        thread.join()


def tunix_model(folder: Path, sizes: ModelSizes, remat: str) -> Any:
    """google-tunix's Qwen3 with the weights of a Hugging Face folder."""
    from tunix.models.qwen3 import model, params  # type: ignore[import-not-found]

    config = model.ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocab,
        embed_dim=sizes.d_model,
        hidden_dim=sizes.d_ff,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=model.RematConfig[remat],
    )
    return params.create_model_from_safe_tensors(str(folder), config)


# --- the process that asks -----------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """A contender's process."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to one request; `SystemExit` when the process has ended."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(f"{self.name}: ended with code {self.process.wait()}; see its error above")
        return json.loads(line)


@contextmanager
def child(name: str, command: Sequence[str]) -> Iterator[Child]:
    """Start a contender, and end it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    try:
        yield Child(name, process)
    finally:
        process.kill()
        process.wait()


def write_model(folder: Path, sizes: ModelSizes) -> None:
    """Write random weights as a Hugging Face folder."""
    import jax

    from hsql_jax.model import ModelConfig, init_params
    from hsql_jax.weights import save_hf

    config = ModelConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.d_model,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        d_ff=sizes.d_ff,
    )
    save_hf(folder, config, init_params(config, jax.random.key(0)))

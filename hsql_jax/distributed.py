"""Several processes as one run: start, agree, place each one's rows, and never hang in silence."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from hsql_jax.errors import UserError


@dataclass(frozen=True)
class ClusterConfig:
    """How this process finds the others; one process alone by default."""

    auto: bool = False  # as Slurm, Open MPI, Kubernetes or the TPU's own runtime tell
    coordinator: str | None = None  # HOST:PORT of process 0, where no launcher tells
    processes: int = 1
    process: int = 0  # 0 .. processes - 1
    start_seconds: int = 300  # how long the others may take to appear
    stall_seconds: float = 1800.0  # a step without an end for so long is a hang; 0: never

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"process = {self.process} of processes = {self.processes}: give 0 <= process < "
                "processes"
            )
        if self.processes > 1 and not (self.auto or self.coordinator):
            raise ValueError(
                f"processes = {self.processes}: name where process 0 listens, coordinator = "
                "HOST:PORT, or set auto under a launcher"
            )


def start(config: ClusterConfig) -> None:
    """Join the other processes; call it before anything asks for devices.

    When they do not appear in time JAX may end the process itself, so what it waits for is printed
    first. Raises `UserError` where JAX lets it.
    """
    if not (config.auto or config.coordinator):
        return
    named: dict[str, Any] = {
        "coordinator_address": config.coordinator,
        "num_processes": config.processes,
        "process_id": config.process,
    }
    where = "the launcher's coordinator" if config.auto else config.coordinator
    who = "a process" if config.auto else f"process {config.process} of {config.processes}"
    print(f"{who}: joining {where}, for {config.start_seconds} s at most", file=sys.stderr)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # read on CPUs alone
    try:
        jax.distributed.initialize(
            **({} if config.auto else named), initialization_timeout=config.start_seconds
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{who} could not join {where} within {config.start_seconds} s: {error}"
        ) from error


def is_first() -> bool:
    """Whether this process writes what a run has once: logs, reports, the config."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set anywhere. All processes must call it, and get one answer."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def first_does(action: Callable[[], None]) -> None:
    """Let the first process do what a run does once; all of them end when it fails."""
    failed: UserError | None = None
    if is_first():
        try:
            action()
        except UserError as error:
            failed = error
    if any_process(failed is not None):
        raise failed or UserError("the first process has stopped; its message says why")


def global_arrays(local: Any, sharding: NamedSharding) -> Any:
    """A tree of global arrays from each process's own part of them (numpy)."""
    if jax.process_count() == 1:
        return local
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), local)


@contextmanager
def watchdog(seconds: float) -> Iterator[Callable[[], None]]:
    """Give a function to call after every step; the process ends when it is not called for so long.

    Every thread's stack goes to standard error first, and the exit status is 1: a launcher then
    restarts the run from its checkpoint, where a hung collective would hold the machines for ever.
    0 seconds: no limit.
    """

    def beat() -> None:
        if seconds > 0:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)

    beat()
    try:
        yield beat
    finally:
        faulthandler.cancel_dump_traceback_later()

"""The environment service as a part of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hsql_env.service.launcher import ServiceProcess, ServiceProcessError
from hsql_jax.errors import UserError


@contextmanager
def environment(tasks: Path, databases: Path, workers: int) -> Iterator[ServiceProcess]:
    """The service over two files of records, for the time of the block.

    `UserError` where it does not start, or dies and that is noticed (`ServiceProcess.check`).
    """
    try:
        with ServiceProcess(tasks, databases, workers=workers) as service:
            yield service
    except ServiceProcessError as error:
        raise UserError(f"{error}; run again with --resume") from error

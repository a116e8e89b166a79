"""`hsql-env openenv`: the environment for trainers that speak OpenEnv's session protocol."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hsql_env.commands import CommandError
from hsql_env.harness import InfrastructureError
from hsql_env.records import read_tasks
from hsql_env.service.launcher import ServiceProcess, ServiceProcessError

if TYPE_CHECKING:
    from hsql_env.service.client import AsyncEnvironment

_REACH_SECONDS = 10.0  # for a running service to answer at the start


@dataclass(frozen=True)
class OpenEnv:
    """Serve OpenEnv sessions until stopped; prints one JSON line with the address when ready."""

    tasks: Path
    """JSON Lines file of tasks."""
    databases: Path | None = None
    """JSON Lines file of databases; the environment service is then started here, too."""
    service: str = ""
    """Address of a running environment service, in place of --databases."""
    service_token_file: Path | None = None
    """File of the token that --service wants; else HSQL_TOKEN of the environment holds it."""
    host: str = "127.0.0.1"
    """Any address but a loopback one needs a token."""
    port: int = 8000
    """0 takes a free port."""
    token_file: Path | None = None
    """File of the token that sessions must bring, as a bearer token or the address's password."""
    workers: int = 2
    """Sandbox processes of the service that is started here."""


def run(command: OpenEnv) -> int:
    """Serve until SIGTERM or SIGINT. Raises `CommandError`, `RecordError`, `OSError`."""
    # Here, because it takes longer to import than `exec` takes to run.
    from hsql_env.service.config import ServeError, read_token
    from hsql_env.service.listen import listen_tcp
    from hsql_env.service.openenv import serve

    if (command.databases is None) == (not command.service):
        raise CommandError("name either --databases or --service")
    if command.databases is not None and command.service_token_file is not None:
        raise CommandError("--service-token-file is for --service")
    task_ids = [task.public.task_id for task in read_tasks(command.tasks)]
    try:
        own = read_token(command.token_file)
        theirs = read_token(command.service_token_file, os.environ)
        place = command.host, command.port
        with (
            listen_tcp(*place, own is not None, "--token-file") as listener,
            _service(command, theirs) as (env, check),
        ):
            asyncio.run(serve(env, task_ids, listener, own, check))
    except (ServeError, ServiceProcessError) as error:
        raise CommandError(str(error)) from error
    return 0


@contextmanager
def _service(
    command: OpenEnv, token: str | None
) -> Iterator[tuple[AsyncEnvironment, Callable[[], None]]]:
    """Start the environment service, or reach the running one, which wants the token.

    Gives its client, and a check that raises once the service that was started here has died.
    """
    from hsql_env.service.client import AsyncEnvironment

    if command.databases is None:
        asyncio.run(_reach(AsyncEnvironment(command.service, timeout_s=_REACH_SECONDS)))
        yield AsyncEnvironment(command.service, token=token), lambda: None
        return
    own = secrets.token_hex(32)  # nobody is to go around the adapter
    files = command.tasks, command.databases
    with ServiceProcess(*files, command.workers, token=own) as process:
        yield AsyncEnvironment(process.url, token=own), process.check


async def _reach(env: AsyncEnvironment) -> None:
    """Raise `CommandError` unless the service answers."""
    from hsql_env.service.client import RequestRefused

    try:
        async with env:
            await env.health()
    except (InfrastructureError, RequestRefused) as error:
        raise CommandError(
            f"--service is not the address of a running environment service: {error}"
        ) from error

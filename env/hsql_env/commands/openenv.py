"""`hsql-env openenv`: the environment for trainers that speak OpenEnv's session protocol."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hsql_env.commands import CommandError
from hsql_env.records import Task, read_jsonl
from hsql_env.service.launcher import ServiceProcess, ServiceProcessError


@dataclass(frozen=True)
class OpenEnv:
    """Serve OpenEnv sessions until stopped; prints one JSON line with the address when ready."""

    tasks: Path
    """JSON Lines file of tasks."""
    databases: Path | None = None
    """JSON Lines file of databases; the environment service is then started here, too."""
    service: str = ""
    """Address of a running environment service, in place of --databases."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port."""
    workers: int = 2
    """Sandbox processes of the service that is started here."""


def run(command: OpenEnv) -> int:
    """Serve until SIGTERM or SIGINT. Raises `CommandError`, `RecordError`, `OSError`."""
    # Here, because it takes longer to import than `exec` takes to run.
    from hsql_env.service.openenv import serve

    if (command.databases is None) == (not command.service):
        raise CommandError("name either --databases or --service")
    task_ids = [task.public.task_id for task in read_jsonl(command.tasks, Task)]
    if not task_ids:
        raise CommandError(f"{command.tasks}: no tasks")
    with ExitStack() as stack:
        url = command.service
        if command.databases is not None:
            process = ServiceProcess(command.tasks, command.databases, command.workers)
            try:
                url = stack.enter_context(process).url
            except ServiceProcessError as error:
                raise CommandError(str(error)) from error
        serve(url, task_ids, command.host, command.port)
    return 0

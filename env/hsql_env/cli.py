"""The `hsql-env` command: `serve`, `openenv`, `play`, `exec` and `inspect`."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hsql_env.commands import CommandError, execute, inspect, openenv, play
from hsql_env.commands.execute import Exec
from hsql_env.commands.inspect import Inspect
from hsql_env.commands.openenv import OpenEnv
from hsql_env.commands.play import Play
from hsql_env.harness import EpisodeConfig
from hsql_env.records import Database, RecordError, read_jsonl, read_tasks
from hsql_env.registry import DatabaseError, check_databases
from hsql_env.sandbox import GuardProfile, Limits
from hsql_env.sandbox.pool import SandboxError

if TYPE_CHECKING:
    from hsql_env.service.config import ServiceConfig


@dataclass(frozen=True)
class Serve:
    """Serve episodes over HTTP until stopped; prints one JSON line with the address when ready."""

    tasks: Path
    """JSON Lines file of tasks."""
    databases: Path
    """JSON Lines file of databases."""
    host: str = "127.0.0.1"
    """Any address but a loopback one needs a token."""
    port: int = 8777
    """0 takes a free port."""
    socket: Path | None = None
    """A Unix socket to listen on beside the port; clients name it unix:PATH."""
    token_file: Path | None = None
    """File of the token that requests must carry; else HSQL_TOKEN of the environment holds it."""
    workers: int = 2
    """Sandbox processes, and so queries in flight."""
    max_turns: int = 24
    observation_chars: int = 6_000
    guard: GuardProfile = "default"
    tool_seconds: float = 60.0
    """Wall limit of a query of the policy."""
    verify_seconds: float = 30.0
    """Wall limit of the verifier's own execution."""
    idle_seconds: float = 1800.0
    """An episode expires when no request of it came for so long."""
    max_episodes: int = 4096
    """Live episodes; one more is answered busy."""
    max_waiting: int = 1024
    """Steps and verdicts that wait; one more is answered busy."""
    max_body_bytes: int = 1_048_576
    """Largest body of a request."""
    request_seconds: float = 60.0
    """A request's head must come in so long, and then its body."""
    drain_seconds: float = 20.0
    """What runs at SIGTERM may take so long to end."""
    transcript: Path | None = None
    """JSON Lines file to append every message and verdict to, before anything acts on it."""
    log_level: Literal["info", "warning", "off"] = "info"
    """Least level of the JSON lines on standard error."""
    stop_with_stdin: bool = False
    """End when standard input closes."""


Command = (
    Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[OpenEnv, tyro.conf.subcommand("openenv")]
    | Annotated[Play, tyro.conf.subcommand("play")]
    | Annotated[Exec, tyro.conf.subcommand("exec")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 1 and one line on standard error for bad input."""
    command = tyro.cli(Command, prog="hsql-env", args=arguments)  # type: ignore[call-overload]
    _escape_what_cannot_be_printed()
    try:
        code = _run(command)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        code = 128 + signal.SIGPIPE
    except (CommandError, DatabaseError, RecordError, SandboxError, OSError) as error:
        print(f"hsql-env: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _escape_what_cannot_be_printed() -> None:
    """Print letters that the terminal's encoding lacks as escapes, such as \\xf8."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(command: Serve | OpenEnv | Play | Exec | Inspect) -> int:
    match command:
        case Serve():
            return _serve(command)
        case OpenEnv():
            return openenv.run(command)
        case Play():
            return play.run(command)
        case Exec():
            return execute.run(command)
        case Inspect():
            return inspect.run(command)


def _serve(command: Serve) -> int:
    # Here, because the web framework takes longer to import than `exec` takes to run.
    from hsql_env.service.config import ServeError
    from hsql_env.service.server import serve

    try:
        config = _service_config(command)
        tasks = read_tasks(command.tasks)
        databases = {
            record.database_id: record for record in read_jsonl(command.databases, Database)
        }
        check_databases(databases.values())
        serve(tasks, databases, config)
    except ServeError as error:
        raise CommandError(str(error)) from error
    return 0


def _service_config(command: Serve) -> ServiceConfig:
    from hsql_env.service.config import ServiceConfig, read_token

    return ServiceConfig(
        host=command.host,
        port=command.port,
        socket=command.socket,
        token=read_token(command.token_file, os.environ),
        workers=command.workers,
        idle_s=command.idle_seconds,
        max_episodes=command.max_episodes,
        max_waiting=command.max_waiting,
        max_body_bytes=command.max_body_bytes,
        request_s=command.request_seconds,
        drain_s=command.drain_seconds,
        transcript=command.transcript,
        log_level=command.log_level,
        stop_with_stdin=command.stop_with_stdin,
        episode=EpisodeConfig(
            max_turns=command.max_turns,
            observation_chars=command.observation_chars,
            guard=command.guard,
            tool_limits=Limits(wall_s=command.tool_seconds),
            verify_limits=Limits(wall_s=command.verify_seconds, rows=100_000),
        ),
    )

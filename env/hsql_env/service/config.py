"""What a service is started with."""

from __future__ import annotations

import hmac
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from hsql_env.harness import EpisodeConfig
from hsql_env.service.log import LogLevel

TOKEN_VARIABLE = "HSQL_TOKEN"
_MOST_WALL_S = 86_400  # a day; the system call that waits takes no more than 24
_TOKEN = re.compile(r"[!-~]{16,4096}")


class ServeError(RuntimeError):
    """The service cannot start; the message says what to do."""


@dataclass(frozen=True)
class ServiceConfig:
    """Where a service listens, and its bounds."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    socket: Path | None = None  # a Unix socket beside the TCP port
    token: str | None = field(default=None, repr=False)
    workers: int = 2  # sandbox processes, and so queries in flight
    idle_s: float = 1800.0  # an episode without a request for so long expires
    max_episodes: int = 4096  # live ones
    max_waiting: int = 1024  # steps and finishes that wait for a thread
    max_body_bytes: int = 1 << 20
    request_s: float = 60.0  # in which a request's head, and then its body, must have come
    drain_s: float = 20.0  # for what is in flight at SIGTERM
    log_level: LogLevel = "info"
    transcript: Path | None = None  # a file to append every episode's messages to
    stop_with_stdin: bool = False  # end when standard input closes
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)

    def __post_init__(self) -> None:
        """Raises `ServeError` for a bound that leaves nothing to serve with."""
        least = {"workers": 1, "max_episodes": 1, "max_waiting": 0, "max_body_bytes": 1024}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ServeError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if not self.idle_s > 0:
            raise ServeError(f"the idle seconds must be more than 0, not {self.idle_s:g}")
        if not self.request_s > 0:
            raise ServeError(f"the request seconds must be more than 0, not {self.request_s:g}")
        limits = {"tool": self.episode.tool_limits, "verify": self.episode.verify_limits}
        for name, limit in limits.items():
            if not 0 < limit.wall_s <= _MOST_WALL_S:
                raise ServeError(
                    f"the {name} seconds must be more than 0 and at most {_MOST_WALL_S}, "
                    f"not {limit.wall_s:g}"
                )
        if not self.drain_s >= 0:
            raise ServeError(f"the drain seconds must be at least 0, not {self.drain_s:g}")

    @property
    def threads(self) -> int:
        """How many requests run at a time: more would only wait for a worker, and less fairly."""
        return self.workers


def is_token(expected: str, header: bytes) -> bool:
    """Return whether an Authorization header holds the bearer token; compares in constant time."""
    scheme, _, given = header.partition(b" ")
    right = hmac.compare_digest(given.strip(), expected.encode())
    return scheme.lower() == b"bearer" and right


def read_token(
    file: Path | None, environment: MutableMapping[str, str] | None = None
) -> str | None:
    """Return the token of the file, or else of `HSQL_TOKEN`, which no child process is to inherit.

    None without either. Raises `ServeError` for one that is not 16 or more printable characters
    without spaces, and never shows it; `OSError` if the file cannot be read.
    """
    variable = None if environment is None else environment.pop(TOKEN_VARIABLE, None)
    if file is None and variable is None:
        return None
    source = f"the environment variable {TOKEN_VARIABLE}" if file is None else str(file)
    try:
        text = variable if file is None else file.read_text(encoding="ascii")
    except UnicodeDecodeError:
        text = ""
    token = (text or "").strip()
    if not _TOKEN.fullmatch(token):
        raise ServeError(
            f"{source} holds no token: it must be 16 or more printable ASCII characters "
            "without spaces"
        )
    return token

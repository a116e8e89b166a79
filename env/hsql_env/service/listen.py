"""The sockets that a service listens on."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from hsql_env.service.config import TOKEN_VARIABLE, ServeError

_BACKLOG = 1024
_TOKEN_FROM = f"--token-file or {TOKEN_VARIABLE}"


def listen_tcp(
    host: str, port: int, has_token: bool, token_from: str = _TOKEN_FROM
) -> socket.socket:
    """Return a listening socket. Raises `ServeError`, also for an open address without a token.

    `token_from` is how a user gives one.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if not has_token and not is_loopback(str(address[0])):
            raise ServeError(
                f"{host or 'the empty host'} is not a loopback address: give a token with "
                f"{token_from}, or listen on 127.0.0.1"
            )
        return socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        known = isinstance(error, OSError) and not isinstance(error, socket.gaierror)
        reason = os.strerror(number) if known and number else str(error)
        raise ServeError(
            f"cannot listen on {host}:{port}: {reason}; "
            "choose another --port, or 0 for any free one"
        ) from error


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listen_unix(path: Path) -> socket.socket:
    """Return a socket listening at `path`, open to its owner only. Raises `ServeError`.

    A socket file that a dead service left is replaced; one that answers is not.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before `listen`: until then nobody can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ServeError(f"cannot listen on {path}: {reason}; choose another --socket") from error
    except ServeError:
        listener.close()
        raise
    return listener


def remove_socket(path: Path) -> None:
    """Remove the socket file of a service that ends."""
    with suppress(OSError):
        path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ServeError(f"cannot listen on {path}: it is another kind of file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            remove_socket(path)
            return
    raise ServeError(f"cannot listen on {path}: another service answers there")

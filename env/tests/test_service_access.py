"""Who may reach the service, over what, and how it ends: token, Unix socket, drain."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CITY_SQL, build_database, call
from serving import COUNT, HANGING, Files, Served, in_background, wait_for, write_files
from test_sandbox import wait_until_dead
from test_service import children_of

from hsql_env.harness import EpisodeConfig
from hsql_env.sandbox import Limits
from hsql_env.service.client import Environment, RequestRefused
from hsql_env.service.config import ServeError, ServiceConfig, read_token
from hsql_env.service.launcher import ServiceProcess
from hsql_env.service.listen import is_loopback, listen_tcp, listen_unix

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> Files:
    """A tasks file and a databases file."""
    return write_files(tmp_path_factory.mktemp("access"), city_path)


@pytest.fixture(scope="module")
def locked(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with a token from a file; the environment's is not the one."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "token").write_text(TOKEN + "\n")
    options = "--token-file", str(folder / "token"), "--socket", str(folder / "s")
    other = {"HSQL_TOKEN": "another-token-another-token"}
    with Served(files, folder / "log", *options, environment=other) as served:
        yield served


def play(url: str, token: str | None = None) -> float:
    """Play one episode and return its reward."""
    with Environment(url, token=token) as env:
        episode_id = env.start("t1").episode_id
        env.step(episode_id, 1, call("sql_submit", query=COUNT))
        return env.finish(episode_id).verdict.reward


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer another-token-another-token",
        "Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/episodes"),
        ("POST", "/episodes/x/step"),
        ("DELETE", "/episodes/x"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/nosuch"),
    ],
)
def test_no_request_without_the_token(
    locked: Served, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header}
    reply = locked.ask(method, path, None, headers)
    assert (reply.status, reply.kind) == (401, "unauthorized")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_token_opens_and_is_never_shown(locked: Served) -> None:
    assert play(locked.url, TOKEN) == 1.0
    for token in (None, TOKEN + "x"):
        with pytest.raises(RequestRefused, match="wants its token") as caught:
            play(locked.url, token)
        assert caught.value.kind == "unauthorized"
    assert locked.ask("GET", "/metrics", None, {"authorization": f"bearer {TOKEN}"}).status == 200
    assert locked.ask("GET", "/healthz").json["status"] == "ok"
    assert locked.ask("GET", "/readyz").json == {"status": "ready"}
    assert TOKEN not in locked.text()
    assert TOKEN not in json.dumps(locked.announced)
    for pid in children_of(locked.process.pid):
        assert b"HSQL_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_launcher_hands_the_child_its_token(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSQL_TOKEN", "the-parents-own-token-not-ours")
    with ServiceProcess(*files, token=TOKEN) as service:
        assert play(service.url, TOKEN) == 1.0
        with pytest.raises(RequestRefused, match="wants its token"):
            play(service.url)
    with ServiceProcess(*files) as service:
        assert play(service.url) == 1.0


def refused_start(files: Files, *options: str) -> str:
    """Return the one line that a service says which does not start."""
    arguments = ["serve", "--tasks", str(files[0]), "--databases", str(files[1]), "--port", "0"]
    said = subprocess.run(
        [sys.executable, "-m", "hsql_env", *arguments, *options],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (said.returncode, said.stdout) == (1, "")
    (line,) = said.stderr.splitlines()
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_open_address_needs_a_token(files: Files, host: str) -> None:
    assert refused_start(files, "--host", host) == (
        f"hsql-env: {host or 'the empty host'} is not a loopback address: give a token with "
        "--token-file or HSQL_TOKEN, or listen on 127.0.0.1"
    )


def test_bad_start_says_one_line(files: Files, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short")
    assert refused_start(files, "--token-file", str(file)) == (
        f"hsql-env: {file} holds no token: it must be 16 or more printable ASCII characters "
        "without spaces"
    )
    line = refused_start(files, "--token-file", str(tmp_path / "gone"))
    assert "No such file or directory" in line
    file.write_text("not a socket")
    assert refused_start(files, "--socket", str(file)) == (
        f"hsql-env: cannot listen on {file}: it is another kind of file"
    )
    assert refused_start(files, "--workers", "0") == "hsql-env: workers must be at least 1, not 0"


def test_a_database_that_changed_is_refused_at_the_start(tmp_path: Path) -> None:
    path = build_database(tmp_path / "city.sqlite", CITY_SQL)
    stale = write_files(tmp_path, str(path))
    with sqlite3.connect(path) as writer:
        writer.execute("DELETE FROM city")
    writer.close()
    assert refused_start(stale) == (
        f"hsql-env: {path}: not the content that was registered; put that file back, or register "
        "this one with the sha256 that `hsql-env inspect --json` shows"
    )


def test_places_that_cannot_be_listened_on(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"^cannot listen on x+\.invalid:0: "):
        listen_tcp("x" * 64 + ".invalid", 0, has_token=False)
    with pytest.raises(ServeError, match=r"cannot listen on 127\.0\.0\.1:99999: "):
        listen_tcp("127.0.0.1", 99999, has_token=False)
    long = tmp_path / ("x" * 200)
    with pytest.raises(ServeError, match=r"AF_UNIX path too long; choose another --socket$"):
        listen_unix(long)
    with pytest.raises(ServeError, match=r"No such file or directory; choose another --socket$"):
        listen_unix(tmp_path / "gone" / "s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idle_s": math.nan}, "the idle seconds must be more than 0, not nan"),
        ({"idle_s": 0.0}, "the idle seconds must be more than 0, not 0"),
        ({"drain_s": -1.0}, "the drain seconds must be at least 0, not -1"),
        ({"max_episodes": 0}, "max_episodes must be at least 1, not 0"),
        ({"max_waiting": -1}, "max_waiting must be at least 0, not -1"),
        ({"max_body_bytes": 10}, "max_body_bytes must be at least 1024, not 10"),
    ],
)
def test_bounds_that_leave_nothing_to_serve_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError) as caught:
        ServiceConfig(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
@pytest.mark.parametrize("name", ["tool", "verify"])
def test_a_wall_limit_is_a_time(name: str, seconds: str) -> None:
    limits = Limits(wall_s=float(seconds))
    field = "tool_limits" if name == "tool" else "verify_limits"
    with pytest.raises(ServeError) as caught:
        ServiceConfig(episode=EpisodeConfig(**{field: limits}))
    shown = seconds.replace("1e9", "1e+09")
    assert str(caught.value) == (
        f"the {name} seconds must be more than 0 and at most 86400, not {shown}"
    )


def test_a_service_without_a_wall_limit_does_not_start(files: Files) -> None:
    for name in ("tool", "verify"):
        assert refused_start(files, f"--{name}-seconds=-1") == (
            f"hsql-env: the {name} seconds must be more than 0 and at most 86400, not -1"
        )


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("text", ["", "short", "with a space in the middle", "é" * 20, "\n" * 20])
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(ServeError, match="HSQL_TOKEN holds no token") as caught:
        read_token(None, {"HSQL_TOKEN": text})
    assert text.strip() == "" or text not in str(caught.value)


def test_token_leaves_the_environment(tmp_path: Path) -> None:
    environment = {"HSQL_TOKEN": TOKEN, "HOME": "/"}
    assert read_token(None, environment) == TOKEN
    assert environment == {"HOME": "/"}
    assert read_token(None, environment) is None
    assert TOKEN not in repr(ServiceConfig(token=TOKEN))


def test_unix_socket_beside_tcp(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "service.sock"
    with socket.socket(socket.AF_UNIX) as left:  # as a service that was killed leaves it
        left.bind(str(path))
    with Served(files, tmp_path / "log", "--socket", str(path)) as served:
        assert served.announced["socket"] == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert play(f"unix:{path}") == 1.0
        assert play(served.url) == 1.0
        assert refused_start(files, "--socket", str(path)) == (
            f"hsql-env: cannot listen on {path}: another service answers there"
        )
        assert play(f"unix:{path}") == 1.0
        assert served.stop() == 0
    assert not path.exists()


def test_unix_socket_wants_the_token_too(locked: Served) -> None:
    with pytest.raises(RequestRefused, match="wants its token"):
        play(locked.announced["socket"])
    assert play(locked.announced["socket"], TOKEN) == 1.0


def test_ipv6_loopback(files: Files, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with Served(files, tmp_path / "log", "--host", "::1") as served:
        assert served.url.startswith("http://[::1]:")
        assert play(served.url) == 1.0


def test_drain_lets_running_steps_end(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--tool-seconds", "3") as served:
        running, other = served.start(), served.start()
        turn = call("sql_exec", query=HANGING)
        thread, replies = in_background(served.step, running, 1, turn)
        wait_for(lambda: served.metrics()["hsql_requests_in_flight"] == 1)
        served.signal()
        wait_for(lambda: served.ask("GET", "/readyz").status == 503)
        for reply in (
            served.ask("GET", "/readyz"),
            served.ask("POST", "/episodes", {"task_id": "t1"}),
            served.step(other, 1, call("sql_exec", query=COUNT)),
        ):
            assert (reply.status, reply.kind) == (503, "draining")
            assert reply.headers["retry-after"] == "2"
        assert served.ask("GET", "/healthz").status == 200
        assert served.ask("DELETE", f"/episodes/{other}").json["verdict"]["reward"] == 0.0
        assert served.process.wait(10) == 0
        thread.join()
        (observation,) = replies[0].json["messages"]
        assert observation["content"] == "Error: the query took longer than 3 s"
        assert served.events("draining", "stopped", "server", "fault") == [
            {"event": "draining", "in_flight": 1},
            {"event": "stopped", "left_running": 0},
        ]


@pytest.mark.parametrize(("options", "signals"), [(["--drain-seconds", "0.2"], 1), ([], 2)])
def test_drain_ends_at_its_limit_or_at_the_second_signal(
    files: Files, tmp_path: Path, options: list[str], signals: int
) -> None:
    with Served(files, tmp_path / "log", *options) as served:
        step = served.step, served.start(), 1, call("sql_exec", query=HANGING)
        thread, replies = in_background(*step)
        wait_for(lambda: served.metrics()["hsql_requests_in_flight"] == 1)
        processes = [served.process.pid, *children_of(served.process.pid)]
        begun = time.monotonic()
        for _ in range(signals):
            served.signal()
            time.sleep(0.3)
        assert served.process.wait(10) == 0
        assert time.monotonic() - begun < 10
        thread.join()
        assert (replies[0].status, replies[0].json) == (
            503,
            {"kind": "infrastructure", "message": "the service ended before the request did"},
        )
        assert served.events("stopped") == [{"event": "stopped", "left_running": 1}]
    assert wait_until_dead(processes)


def test_idle_service_ends_at_once(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log") as served:
        served.start()
        begun = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - begun < 8
    with Served(files, tmp_path / "log") as served:
        served.signal(signal.SIGINT)
        assert served.process.wait(10) == 130

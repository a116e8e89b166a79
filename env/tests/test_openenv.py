"""The OpenEnv adapter as a real process, spoken to in its protocol and by its own client."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import build_database, call, make_task
from test_compact import WIDE
from test_sandbox import wait_until_dead

from hsql_env.harness import TOOLS
from hsql_env.records import write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import Environment
from hsql_env.service.launcher import ServiceProcess

COUNT = "SELECT count(*) FROM city"
TOKEN = "the-token-of-the-adapter"
SERVICE_TOKEN = "the-token-of-the-service"


@contextmanager
def adapter(*options: str) -> Iterator[tuple[str, int]]:
    """Run `hsql-env openenv`; give its address and process id."""
    command = [sys.executable, "-m", "hsql_env", "openenv", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                assert selector.select(30), "the adapter said nothing"
            ready = json.loads(process.stdout.readline())
            assert ready["pid"] == process.pid
            yield ready["url"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0


def run_openenv(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `hsql-env openenv`, which is to refuse, and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "hsql_env", "openenv", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> tuple[str, str]:
    """A tasks file and a databases file."""
    folder = tmp_path_factory.mktemp("openenv")
    database = open_database(city_path)
    write_jsonl(folder / "databases.jsonl", [database])
    tasks = [make_task("SELECT 2 + 1", task_id=f"t{i}") for i in range(3)]
    tasks.append(make_task("SELECT hidden_column", task_id="broken"))
    write_jsonl(folder / "tasks.jsonl", tasks)
    return str(folder / "tasks.jsonl"), str(folder / "databases.jsonl")


@pytest.fixture(scope="module")
def service(files: tuple[str, str]) -> Iterator[ServiceProcess]:
    """The environment service behind the adapter."""
    with ServiceProcess(*files, workers=1, options=["--max-turns", "3"]) as running:
        yield running


@pytest.fixture(scope="module")
def url(files: tuple[str, str], service: ServiceProcess) -> Iterator[str]:
    """The address of an adapter."""
    with adapter("--tasks", files[0], "--service", service.url) as (address, _):
        yield address


Ask = Callable[..., Awaitable[dict[str, Any]]]


def converse(url: str, talk: Callable[[Ask], Awaitable[None]]) -> None:
    """Open a session and talk in it."""

    async def run() -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(url + "/ws") as socket:

            async def ask(kind: str, data: dict[str, Any] | str | None = None) -> dict[str, Any]:
                """`data` is an object, or the JSON text of one."""
                text = data if isinstance(data, str) else json.dumps(data or {})
                await socket.send_str(f'{{"type": "{kind}", "data": {text}}}')
                reply = await socket.receive_json(timeout=30)
                assert set(reply) == {"type", "data"}
                return dict(reply)

            await talk(ask)

    asyncio.run(run())


def test_an_episode_in_a_session(url: str) -> None:
    async def talk(ask: Ask) -> None:
        assert (await ask("state"))["data"] == {
            "episode_id": None, "step_count": 0, "task_id": None, "done": False,
        }  # fmt: skip
        first = await ask("reset", {"task_id": "t1", "episode_id": "mine"})
        assert first["type"] == "observation"
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        seen = first["data"]["observation"]
        assert [message["role"] for message in seen["messages"]] == ["system", "user"]
        assert (seen["task_id"], seen["tools"], seen["verdict"]) == ("t1", TOOLS, None)

        step = await ask("step", {"tool": "sql_exec", "arguments": {"query": COUNT}})
        assert step["data"] == {
            "observation": {
                "task_id": "t1",
                "messages": [{"role": "tool", "content": "count(*)\n3\n(1 row)"}],
                "tools": [],
                "compacted": [],
                "truncated": False,
                "verdict": None,
            },
            "reward": 0.0,
            "done": False,
        }
        last = await ask("step", {"content": call("sql_submit", query=COUNT), "metadata": {}})
        assert (last["data"]["reward"], last["data"]["done"]) == (1.0, True)
        verdict = last["data"]["observation"]["verdict"]
        assert (verdict["result_ok"], verdict["strict_ok"]) == (True, True)
        assert (await ask("state"))["data"] == {
            "episode_id": "mine", "step_count": 2, "task_id": "t1", "done": True,
        }  # fmt: skip
        over = await ask("step", {"content": "more"})
        assert over == {
            "type": "error",
            "data": {"code": "SESSION_ERROR", "message": "no episode is in progress; reset first"},
        }
        again = await ask("reset", {"task_id": "t2"})
        assert again["data"]["observation"]["task_id"] == "t2"
        assert (await ask("state"))["data"]["step_count"] == 0

    converse(url, talk)


def test_a_budget_ends_the_episode(url: str) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "t0"})
        for done in (False, False, True):
            step = (await ask("step", {"tool": "sql_list_tables"}))["data"]
            assert step["done"] is done
        assert (step["reward"], step["observation"]["truncated"]) == (0.0, True)
        assert step["observation"]["verdict"]["violations"]["no_submit"] == 1

    converse(url, talk)


def test_a_session_may_ask_for_compaction(url: str) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "t0", "context_chars": 5_000})
        seen = []
        for turn in range(2):
            data = {"tool": "sql_exec", "arguments": {"query": WIDE.format(turn)}}
            seen.append((await ask("step", data))["data"]["observation"])
        assert seen[0]["compacted"] == []
        (change,) = seen[1]["compacted"]
        assert change["index"] == 3
        head, _, note = change["content"].rpartition("\n")
        assert seen[0]["messages"][0]["content"].startswith(head)
        assert note.startswith("[note: compacted, ")

    converse(url, talk)


def test_a_failure_of_the_harness_is_no_reward(url: str) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "broken"})
        reply = await ask("step", {"tool": "sql_submit", "arguments": {"query": COUNT}})
        assert reply == {
            "type": "error",
            "data": {
                "code": "EXECUTION_ERROR",
                "message": "the harness failed: the episode could not be judged",
            },
        }
        assert (await ask("step", {"content": ""}))["data"]["code"] == "SESSION_ERROR"

    converse(url, talk)


def test_tasks_are_chosen_by_seed_or_in_turn(url: str) -> None:
    async def talk(ask: Ask) -> None:
        async def chosen(**data: Any) -> str:
            return str((await ask("reset", data))["data"]["observation"]["task_id"])

        assert [await chosen(seed=seed) for seed in (0, 1, 6, 6)] == ["t0", "t1", "t2", "t2"]
        in_turn = [await chosen() for _ in range(4)]
        assert sorted(in_turn) == ["broken", "t0", "t1", "t2"]

    converse(url, talk)


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        ("{", "INVALID_JSON", "a message must be a JSON text"),
        ("[" * 100_000, "INVALID_JSON", "a message must be a JSON text"),
        ('{"type": "reset", "data": {"context_chars": 10}}', "VALIDATION_ERROR",
         "context_chars: Input should be greater than or equal to 4000"),
        ("[]", "VALIDATION_ERROR", "a message is an object with type and data"),
        ('{"type": "step", "data": 3}', "VALIDATION_ERROR",
         "a message is an object with type and data"),
        ('{"type": "fly"}', "UNKNOWN_TYPE", "unknown message type: fly"),
        ('{"type": "step", "data": {"content": "x"}}', "SESSION_ERROR",
         "no episode is in progress; reset first"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR",
         "action: an action has either content or tool"),
        ('{"type": "step", "data": {"content": "x", "tool": "y"}}', "VALIDATION_ERROR",
         "action: an action has either content or tool"),
        ('{"type": "step", "data": {"text": "x"}}', "VALIDATION_ERROR",
         "text: Extra inputs are not permitted"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR",
         "seed: Input should be greater than or equal to 0"),
        ('{"type": "reset", "data": {"task_id": "nosuch"}}', "SESSION_ERROR",
         "unknown task: nosuch"),
    ],
)  # fmt: skip
def test_bad_messages_leave_the_session_alive(url: str, message: str, code: str, text: str) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(url + "/ws") as socket:
            await socket.send_str(message)
            reply = await socket.receive_json(timeout=30)
            assert reply == {"type": "error", "data": {"code": code, "message": text}}
            await socket.send_json({"type": "state"})
            assert (await socket.receive_json(timeout=30))["type"] == "state"
            await socket.send_json({"type": "close"})
            assert (await socket.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        {"tool": "sql_exec", "arguments": {"query": "\ud800"}},
        {"tool": "sql_exec", "arguments": {"\ud800": 1}},
        {"tool": "\ud800"},
    ],
)
def test_half_a_character_in_a_call_is_an_invalid_call(url: str, data: dict[str, Any]) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "t0"})
        (reply,) = (await ask("step", data))["data"]["observation"]["messages"]
        expected = "Error: the tool call holds characters that are not valid text"
        assert reply["content"].startswith(expected)
        step = await ask("step", {"tool": "sql_exec", "arguments": {"query": COUNT}})
        assert step["data"]["observation"]["messages"][0]["content"].startswith("count(*)\n3\n")

    converse(url, talk)


def test_half_a_character_of_text_is_refused_and_the_episode_goes_on(url: str) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "t0"})
        reply = await ask("step", {"content": "\ud800"})
        assert (reply["type"], reply["data"]["code"]) == ("error", "VALIDATION_ERROR")
        step = await ask("step", {"tool": "sql_exec", "arguments": {"query": COUNT}})
        assert step["data"]["observation"]["messages"][0]["content"] == "count(*)\n3\n(1 row)"

    converse(url, talk)


def test_arguments_too_deep_are_refused_and_the_session_goes_on(url: str) -> None:
    async def talk(ask: Ask) -> None:
        for depth in (500, 900, 960, 980, 990):
            deep = '{"tool": "x", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
            reply = await ask("step", deep)
            assert reply["data"]["code"] in ("SESSION_ERROR", "VALIDATION_ERROR", "INVALID_JSON")
        assert (await ask("state"))["type"] == "state"

    converse(url, talk)


def authorization(text: str) -> dict[str, str]:
    """Return the header of HTTP's Basic scheme for this text."""
    return {"authorization": "Basic " + b64encode(text.encode()).decode()}


def test_sessions_must_bring_the_token(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service behind the adapter has one of its own, which opens nothing here."""

    async def status(url: str, path: str, headers: dict[str, str]) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.get(url + path, headers=headers) as reply,
        ):
            return reply.status

    async def play(url: str) -> float:
        async with aiohttp.ClientSession() as http, http.ws_connect(url + "/ws") as socket:
            await socket.send_json({"type": "reset", "data": {"task_id": "t0"}})
            await socket.receive_json(timeout=30)
            action = {"tool": "sql_submit", "arguments": {"query": COUNT}}
            await socket.send_json({"type": "step", "data": action})
            return float((await socket.receive_json(timeout=30))["data"]["reward"])

    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("HSQL_TOKEN", SERVICE_TOKEN)
    options = "--tasks", files[0], "--token-file", str(tmp_path / "token"), "--host", "0.0.0.0"
    with (
        ServiceProcess(*files, workers=1, token=SERVICE_TOKEN) as behind,
        adapter(*options, "--service", behind.url) as (url, _),
    ):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert asyncio.run(status(url, "/health", {})) == 200
        for headers in (
            {},
            {"authorization": f"Bearer {SERVICE_TOKEN}"},
            {"authorization": f"Basic {TOKEN}"},
            authorization(f"{TOKEN}:"),
            authorization(f"any:{TOKEN}x"),
        ):
            for path in ("/ws", "/metadata", "/schema", "/nosuch"):
                assert asyncio.run(status(url, path, headers)) == 401
        for headers in ({"authorization": f"Bearer {TOKEN}"}, authorization(f"any:{TOKEN}")):
            assert asyncio.run(status(url, "/schema", headers)) == 200
        assert asyncio.run(play(url.replace("http://", f"http://any:{TOKEN}@"))) == 1.0


def test_the_service_behind_wants_the_token_of_a_file(
    files: tuple[str, str], tmp_path: Path
) -> None:
    async def talk(ask: Ask) -> None:
        assert (await ask("reset", {"task_id": "t0"}))["type"] == expected

    (tmp_path / "token").write_text(SERVICE_TOKEN)
    with ServiceProcess(*files, workers=1, token=SERVICE_TOKEN) as behind:
        options = "--tasks", files[0], "--service", behind.url
        expected = "observation"
        with adapter(*options, "--service-token-file", str(tmp_path / "token")) as (url, _):
            converse(url, talk)
        expected = "error"
        with adapter(*options) as (url, _):
            converse(url, talk)


def test_a_session_that_ends_frees_its_episode(url: str, service: ServiceProcess) -> None:
    async def talk(ask: Ask) -> None:
        await ask("reset", {"task_id": "t0"})
        await ask("reset", {"task_id": "t1"})
        with_one = await asyncio.to_thread(episodes)
        assert with_one == before + 1

    def episodes() -> int:
        with Environment(service.url) as env:
            return env.health().episodes

    before = episodes()
    converse(url, talk)
    for _ in range(100):
        if episodes() == before:
            return
        asyncio.run(asyncio.sleep(0.02))
    pytest.fail("the episode of a closed session is still alive")


def test_pages_about_the_environment(url: str) -> None:
    async def get(path: str) -> Any:
        async with aiohttp.ClientSession() as http, http.get(url + path) as reply:
            assert reply.status == 200
            return await reply.json()

    assert asyncio.run(get("/health")) == {"status": "healthy"}
    assert asyncio.run(get("/metadata"))["name"] == "hsql-env"
    schema = asyncio.run(get("/schema"))
    assert set(schema) == {"action", "observation", "state"}
    assert set(schema["action"]["properties"]) == {"content", "tool", "arguments", "metadata"}


def test_the_adapter_starts_the_service_and_ends_it(files: tuple[str, str]) -> None:
    with adapter("--tasks", files[0], "--databases", files[1], "--workers", "1") as (url, pid):

        async def talk(ask: Ask) -> None:
            await ask("reset", {"task_id": "t0"})
            reply = await ask("step", {"tool": "sql_submit", "arguments": {"query": COUNT}})
            assert reply["data"]["reward"] == 1.0

        converse(url, talk)
        children = children_of(pid)
        assert len(children) == 1
    assert wait_until_dead(children)


def test_the_end_of_the_service_it_started_is_the_adapters(files: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "hsql_env", "openenv", "--port", "0", "--tasks", files[0]]
    command += ["--databases", files[1], "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        (child,) = children_of(process.pid)
        os.kill(child, signal.SIGKILL)
        rest, complaint = process.communicate(timeout=20)
    assert (process.returncode, rest) == (1, "")
    assert complaint == "hsql-env: the service died (exit code -9): it said nothing\n"


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def test_a_running_service_must_answer(files: tuple[str, str]) -> None:
    for address, reason in (
        ("http://127.0.0.1:9", "no answer from http://127.0.0.1:9: Cannot connect to host"),
        ("nowhere", "no answer from nowhere: nowhere/healthz"),
    ):
        said = run_openenv("--tasks", files[0], "--port", "0", "--service", address)
        assert (said.returncode, said.stdout) == (1, "")
        start = f"hsql-env: --service is not the address of a running environment service: {reason}"
        assert said.stderr.startswith(start)
        assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name either --databases or --service"),
        (["--service", "http://127.0.0.1:9", "--databases", "x"],
         "name either --databases or --service"),
        (["--service", "http://127.0.0.1:9", "--host", "0.0.0.0"], "0.0.0.0 is not a loopback "
         "address: give a token with --token-file, or listen on 127.0.0.1"),
        (["--databases", "x", "--service-token-file", "x"],
         "--service-token-file is for --service"),
        (["--databases", "gone.jsonl"], "the service did not start (exit code 1): hsql-env: "
         "[Errno 2] No such file or directory: 'gone.jsonl'"),
    ],
)  # fmt: skip
def test_bad_arguments(files: tuple[str, str], options: list[str], message: str) -> None:
    said = run_openenv("--tasks", files[0], *options)
    assert (said.returncode, said.stdout, said.stderr) == (1, "", f"hsql-env: {message}\n")


def test_a_database_that_changed_is_refused(files: tuple[str, str], tmp_path: Path) -> None:
    record = open_database(build_database(tmp_path / "city.sqlite", "CREATE TABLE city (id)"))
    write_jsonl(tmp_path / "d.jsonl", [record.model_copy(update={"sha256": "0" * 64})])
    said = run_openenv("--tasks", files[0], "--databases", str(tmp_path / "d.jsonl"))
    assert (said.returncode, said.stdout) == (1, "")
    assert f"{record.path}: not the content that was registered; put that file back" in said.stderr


def test_openenvs_own_client(url: str) -> None:
    """Where it is installed: it brings dozens of packages, so it is no dependency of the tests."""
    openenv = pytest.importorskip(
        "openenv.core.generic_client", reason="openenv-core is not installed"
    )
    with openenv.GenericEnvClient(base_url=url).sync() as env:
        first = env.reset(task_id="t2", seed=3)
        assert (first.reward, first.done) == (None, False)
        assert first.observation["messages"][1]["content"] == "How many?"
        step = env.step({"tool": "sql_exec", "arguments": {"query": COUNT}})
        assert (step.reward, step.done) == (0.0, False)
        assert step.observation["messages"][0]["content"] == "count(*)\n3\n(1 row)"
        assert env.state()["step_count"] == 1
        with pytest.raises(RuntimeError, match=r"either content or tool \(code: VALIDATION_ERROR"):
            env.step({})
        last = env.step({"content": call("sql_submit", query=COUNT)})
        assert (last.reward, last.done) == (1.0, True)
        assert last.observation["verdict"]["protocol_ok"] is True

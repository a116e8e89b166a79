"""The service as a real process: wire, idempotence, typed failures, its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import call, make_task
from test_sandbox import wait_until_dead

from hsql_env.harness import TOOLS, InfrastructureError
from hsql_env.records import write_jsonl
from hsql_env.registry import open_database
from hsql_env.service.client import AsyncEnvironment, Environment, RequestRefused
from hsql_env.service.launcher import ServiceProcess, ServiceProcessError

COUNT = "SELECT count(*) FROM city"
ORACLE = "SELECT count(id) FROM city"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> tuple[Path, Path]:
    """A tasks file and a databases file."""
    folder = tmp_path_factory.mktemp("service")
    database = open_database(city_path)
    write_jsonl(folder / "databases.jsonl", [database])
    write_jsonl(folder / "tasks.jsonl", [make_task(ORACLE, task_id=f"t{i}") for i in range(20)])
    return folder / "tasks.jsonl", folder / "databases.jsonl"


@pytest.fixture(scope="module")
def service(files: tuple[Path, Path]) -> Iterator[ServiceProcess]:
    """A running service."""
    with ServiceProcess(*files, workers=2, options=["--max-turns", "4"]) as running:
        yield running


@pytest.fixture
def env(service: ServiceProcess) -> Iterator[Environment]:
    """A client of the running service."""
    with Environment(service.url) as client:
        yield client


def test_episode_over_the_wire(env: Environment) -> None:
    started = env.start("t1", seed=7)
    assert [message.role for message in started.messages] == ["system", "user"]
    assert started.tools == TOOLS
    first = env.step(started.episode_id, 1, call("sql_exec", query=COUNT))
    assert [message.content for message in first.messages] == [
        "count(*)\n3\n(1 row)\n[note: 3 turns left]"
    ]
    assert first.notes == ("3 turns left",)
    last = env.step(started.episode_id, 2, call("sql_submit", query=COUNT))
    assert (last.terminated, last.truncated) == (True, False)
    finished = env.finish(started.episode_id)
    assert finished.verdict.reward == 1.0
    assert finished.verdict.strict_ok
    assert [entry.tool for entry in finished.calls] == ["sql_exec", "sql_submit"]
    assert (finished.turns, finished.final_sql) == (2, COUNT)


def test_steps_and_finish_are_idempotent(env: Environment) -> None:
    episode_id = env.start("t1").episode_id
    turn = call("sql_list_tables")
    first = env.step(episode_id, 1, turn)
    assert env.step(episode_id, 1, turn) == first
    with pytest.raises(RequestRefused, match="turn 2 is next, not turn 1"):
        env.step(episode_id, 1, "something else")
    with pytest.raises(RequestRefused, match="turn 2 is next, not turn 3"):
        env.step(episode_id, 3, turn)
    submit = call("sql_submit", query=COUNT)
    second = env.step(episode_id, 2, submit)
    assert env.step(episode_id, 2, submit) == second
    with pytest.raises(RequestRefused, match="the episode has ended"):
        env.step(episode_id, 3, turn)
    finished = env.finish(episode_id)
    assert env.finish(episode_id) == finished
    assert finished.turns == 2
    with pytest.raises(RequestRefused, match="unknown or finished episode") as caught:
        env.step(episode_id, 3, turn)
    assert caught.value.kind == "not_found"


def test_structured_tool_calls(env: Environment, service: ServiceProcess) -> None:
    """They come to the same as the raw text, a wrong one too."""

    def step(episode_id: str, turn: int, **body: object) -> tuple[int, Any]:
        path = f"{service.url}/episodes/{episode_id}/step"
        status, text = request(path, "POST", {"turn": turn, **body})
        return status, json.loads(text)

    def tool_call(name: str, arguments: str) -> dict[str, object]:
        return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}

    episode_id = env.start("t1").episode_id
    query = json.dumps({"query": COUNT})
    both = [tool_call("sql_list_tables", "{}"), tool_call("sql_exec", query)]
    status, reply = step(episode_id, 1, content="First:", tool_calls=both)
    assert status == 200
    assert [message["content"][:8] for message in reply["messages"]] == ["city (ta", "count(*)"]
    broken = '{"query": "</tool_call><tool_call>'
    wrong = [tool_call("sql_exec", broken), tool_call("sql_exec", "3")]
    _, reply = step(episode_id, 2, content=None, tool_calls=wrong)
    assert [message["content"].split("\n")[0] for message in reply["messages"]] == [
        "Error: arguments must be a JSON object"
    ] * 2
    status, reply = step(episode_id, 3)
    assert (status, reply["kind"]) == (422, "invalid")
    assert "a turn has content or tool_calls" in reply["message"]
    _, reply = step(episode_id, 3, tool_calls=[tool_call("sql_submit", query)])
    assert reply["terminated"]
    assert [c.tool for c in env.finish(episode_id).calls] == [
        "sql_list_tables", "sql_exec", "sql_exec", "sql_exec", "sql_submit"
    ]  # fmt: skip


def test_beside_structured_calls_content_is_text(env: Environment, service: ServiceProcess) -> None:
    contents = [
        "<think>cut off",
        "<think>a <tool_call> is due</think>Now:",
        "I make a <tool_call> now.",
        "no end of </think> a <tool_call>",
        call("sql_submit", query=COUNT),
    ]
    made = {"function": {"name": "sql_list_tables", "arguments": ""}}
    odd = {"function": {"name": "sql_exec", "arguments": '{"query": "\\ud800"}'}}
    for content in contents:
        episode_id = env.start("t1").episode_id
        body = {"turn": 1, "content": content, "tool_calls": [made, odd]}
        status, text = request(f"{service.url}/episodes/{episode_id}/step", "POST", body)
        assert status == 200
        listed, refused = (message["content"] for message in json.loads(text)["messages"])
        assert listed.startswith("city (table, 3 rows)")
        assert refused.startswith("Error: the tool call holds characters that are not valid text")
        finished = env.finish(episode_id)
        assert [entry.outcome for entry in finished.calls] == ["ok", "invalid"]
        assert finished.verdict.violations == {"invalid_call": 1, "no_submit": 1}


def test_an_odd_name_does_not_spoil_the_verdict(env: Environment) -> None:
    episode_id = env.start("t1").episode_id
    env.step(episode_id, 1, '<tool_call>{"name": "\\ud800", "arguments": 5}</tool_call>')
    finished = env.finish(episode_id)
    assert finished.verdict.violations == {"invalid_call": 1, "no_submit": 1}
    assert [(entry.tool, entry.outcome) for entry in finished.calls] == [("", "invalid")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turn": -1, "content": "x"}, "turn: Input should be greater than or equal to 1"),
        ({"turn": 1, "content": 5}, "content: Input should be a valid string"),
        ({"turn": 1}, "step: a turn has content or tool_calls"),
        ({"turn": 1, "content": "\ud800"},
         "step: its text holds half a character, which is not valid"),
        ({"turn": 1, "tool_calls": [{"name": "x"}]}, "tool_calls.0.function: Field required"),
        ({"turn": 1, "tool_calls": ["x"]},
         "tool_calls.0: Input should be a valid dictionary or object to extract fields from"),
    ],
)  # fmt: skip
def test_what_a_client_cannot_send(
    env: Environment, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$") as raised:
        env.step("any", **arguments)
    assert type(raised.value) is ValueError
    with pytest.raises(ValueError, match=r"^context_chars: Input should be greater than or equal"):
        env.start("t1", context_chars=1)


def test_clients_send_structured_tool_calls(env: Environment, service: ServiceProcess) -> None:
    """As the objects or the dicts that a chat completion's message holds."""

    def as_dict(name: str, arguments: dict[str, Any]) -> dict[str, object]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": "1", "type": "function", "function": function}

    def as_object(name: str, arguments: dict[str, Any]) -> SimpleNamespace:
        function = SimpleNamespace(name=name, arguments=json.dumps(arguments))
        return SimpleNamespace(id="1", type="function", function=function)

    episode_id = env.start("t1").episode_id
    both = [as_dict("sql_list_tables", {}), as_object("sql_exec", {"query": COUNT})]
    reply = env.step(episode_id, 1, "First:", both)
    assert [message.content[:8] for message in reply.messages] == ["city (ta", "count(*)"]
    assert env.step(episode_id, 1, "First:", both) == reply

    async def submit() -> bool:
        async with AsyncEnvironment(service.url) as other:
            calls = [as_object("sql_submit", {"query": COUNT})]
            return (await other.step(episode_id, 2, tool_calls=calls)).terminated

    assert asyncio.run(submit())
    finished = env.finish(episode_id)
    assert [c.tool for c in finished.calls] == ["sql_list_tables", "sql_exec", "sql_submit"]
    assert finished.verdict.reward == 1.0


def test_compaction_over_the_wire(env: Environment) -> None:
    """What a client with a context budget holds is what the service counts."""
    started = env.start("t1", context_chars=6_000)
    context = [message.content for message in started.messages]
    compacted = 0
    for turn in range(1, 4):
        written = call("sql_exec", query=f"SELECT {turn}, hex(zeroblob(140)) FROM note, city, note")
        stepped = env.step(started.episode_id, turn, written)
        context += [written, *(message.content for message in stepped.messages)]
        for change in stepped.compacted:
            context[change.index] = change.content
        compacted += bool(stepped.compacted)
        assert env.step(started.episode_id, turn, written) == stepped
        assert sum(map(len, context)) <= 6_000
    assert compacted == env.finish(started.episode_id).verdict.activations["compaction"] == 2
    assert "compacted" in context[3]


def test_unknown_task_is_refused(env: Environment) -> None:
    with pytest.raises(RequestRefused, match="unknown task: nosuch") as caught:
        env.start("nosuch")
    assert caught.value.kind == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/episodes", {"task_id": "nosuch"}, 404, "not_found"),
        ("POST", "/episodes", {"task": "t1"}, 422, "invalid"),
        ("POST", "/episodes", None, 422, "invalid"),
        ("POST", "/episodes/x/step", {"turn": 1, "content": ""}, 404, "not_found"),
        ("POST", "/episodes/x/step", {"turn": 0, "content": ""}, 422, "invalid"),
        ("POST", "/episodes/x/step", {"turn": 1, "content": "", "more": 1}, 422, "invalid"),
        ("DELETE", "/episodes/x", None, 404, "not_found"),
    ],
)
def test_bad_requests(
    service: ServiceProcess,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    status: int,
    kind: str,
) -> None:
    answered, reply = request(service.url + path, method, body)
    assert (answered, json.loads(reply)["kind"]) == (status, kind)
    assert json.loads(reply)["message"]


def request(url: str, method: str = "GET", body: object = None) -> tuple[int, str]:
    """Return the status and the text of a plain HTTP request."""
    data = json.dumps(body).encode() if body is not None else None
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers, method=method), timeout=10
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_openapi(service: ServiceProcess, env: Environment) -> None:
    health = env.health()
    assert (health.status, health.tasks, health.databases) == ("ok", 20, 1)
    paths = json.loads(request(service.url + "/openapi.json")[1])["paths"]
    assert set(paths) == {
        "/healthz",
        "/readyz",
        "/metrics",
        "/episodes",
        "/episodes/{episode_id}",
        "/episodes/{episode_id}/step",
    }


def test_no_hidden_field_or_path_is_sent(service: ServiceProcess, city_path: str) -> None:
    turns = [
        call("sql_list_tables") + call("sql_schema", tables=["city", "large"]),
        call("sql_exec", query="SELECT file FROM pragma_database_list"),
        call("sql_exec", query="SELECT * FROM sqlite_schema"),
        call("sql_submit", query=COUNT),
    ]
    _, text = request(f"{service.url}/episodes", "POST", {"task_id": "t2"})
    episode = f"{service.url}/episodes/{json.loads(text)['episode_id']}"
    for number, turn in enumerate(turns, 1):
        text += request(f"{episode}/step", "POST", {"turn": number, "content": turn})[1]
    text += request(episode, "DELETE")[1]
    assert '"reward":1.0' in text
    for secret in (ORACLE, "oracle", "blueprint", str(Path(city_path).parent), "city.sqlite"):
        assert secret not in text


def test_a_hanging_query_does_not_stop_other_episodes(files: tuple[Path, Path]) -> None:
    hanging = "SELECT instr(hex(zeroblob(50000000)), hex(zeroblob(20000000)) || '1')"

    async def run(url: str) -> tuple[str, int]:
        async with AsyncEnvironment(url) as env:
            slow = (await env.start("t1")).episode_id
            step = asyncio.create_task(env.step(slow, 1, call("sql_exec", query=hanging)))
            await asyncio.sleep(0.1)
            others = 0
            for number in range(20):
                episode_id = (await env.start(f"t{number}")).episode_id
                await env.step(episode_id, 1, call("sql_submit", query=COUNT))
                others += int((await env.finish(episode_id)).verdict.result_ok)
            assert not step.done()
            return (await step).messages[0].content, others

    with ServiceProcess(*files, workers=2, options=["--tool-seconds", "2"]) as service:
        text, others = asyncio.run(run(service.url))
    assert text == "Error: the query took longer than 2 s"
    assert others == 20


def test_service_that_dies_is_an_infrastructure_failure(files: tuple[Path, Path]) -> None:
    with ServiceProcess(*files) as service, Environment(service.url) as env:
        episode_id = env.start("t1").episode_id
        children = children_of(service.pid)
        assert children
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="no answer from http"):
            env.step(episode_id, 1, "x")
        assert wait_until_dead([service.pid, *children])
        with pytest.raises(ServiceProcessError, match="the service died"):
            service.check()


def test_stopping_leaves_no_process(files: tuple[Path, Path]) -> None:
    service = ServiceProcess(*files)
    with service, Environment(service.url) as env:
        env.step(env.start("t1").episode_id, 1, call("sql_exec", query=COUNT))
        processes = [service.pid, *children_of(service.pid)]
    assert len(processes) >= 3
    assert wait_until_dead(processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_service_dies_with_its_launcher(files: tuple[Path, Path], number: int) -> None:
    program = (
        "import sys, threading\n"
        "from hsql_env.service.launcher import ServiceProcess\n"
        "with ServiceProcess(*sys.argv[1:]) as service:\n"
        "    print(service.pid, flush=True)\n"
        "    threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, files)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        processes = [pid, *children_of(pid)]
        launcher.send_signal(number)
    assert len(processes) >= 3
    assert wait_until_dead(processes)


def children_of(pid: int) -> list[int]:
    """Return every descendant of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *children_of(child)]
    return found


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `hsql-env` and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "hsql_env", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_port_in_use(files: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = run_command(
            "serve", "--tasks", str(files[0]), "--databases", str(files[1]), "--port", port
        )
    assert said.returncode == 1
    assert said.stdout == ""
    assert said.stderr == (
        f"hsql-env: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another --port, or 0 for any free one\n"
    )


def test_bad_task_file_stops_the_service(files: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "tasks.jsonl"
    broken.write_text('{"public": {}}\n')
    with pytest.raises(
        ServiceProcessError, match=r"tasks\.jsonl:1: public\.task_id: Field required"
    ):
        ServiceProcess(broken, files[1]).start()
    orphan = make_task(ORACLE).model_copy(deep=True)
    lost = orphan.public.model_copy(update={"database_id": "lost"})
    write_jsonl(broken, [orphan.model_copy(update={"public": lost})])
    with pytest.raises(ServiceProcessError, match="task t1: its database lost is not in the"):
        ServiceProcess(broken, files[1]).start()
    with pytest.raises(ServiceProcessError, match="No such file"):
        ServiceProcess(tmp_path / "gone.jsonl", files[1]).start()
    write_jsonl(broken, [make_task(ORACLE), make_task(COUNT)])
    with pytest.raises(ServiceProcessError, match="task t1 is in the tasks file twice"):
        ServiceProcess(broken, files[1]).start()
    broken.write_bytes(b'{"public": "\xff"}\n')
    with pytest.raises(ServiceProcessError, match=r"tasks\.jsonl:1: record: Invalid JSON: invalid"):
        ServiceProcess(broken, files[1]).start()


def test_exec_prints_json(city_path: str) -> None:
    said = run_command(
        "exec", "--database", city_path, "SELECT name, x'00ff' AS b FROM city LIMIT 1"
    )
    reply = json.loads(said.stdout)
    assert said.returncode == 0
    assert reply.pop("elapsed_ms") >= 0
    assert reply == {
        "ok": True,
        "columns": ["name", "b"],
        "rows": [["Oslo", {"hex": "00ff"}]],
        "total_rows": 1,
        "error": None,
    }


def test_exec_refuses(city_path: str) -> None:
    said = run_command("exec", "--database", city_path, "--guard", "strict", "-- x\nSELECT 1")
    assert said.returncode == 1
    assert json.loads(said.stdout)["error"] == {
        "kind": "leading_comment",
        "message": "a query may not start with a comment",
    }


def test_exec_on_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    file = tmp_path / "x.sqlite"
    file.write_text("hello")
    said = run_command("exec", "--database", str(file), "SELECT 1")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == (
        f"hsql-env: {file}: not a SQLite database; remove it or name another file\n"
    )

"""The service's bounds as seen from outside: lifetimes, sizes, queues, errors, metrics, logs."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from conftest import call, make_task
from serving import COUNT, HANGING, Files, Served, in_background, wait_for, write_files

from hsql_env.driver import run_episode
from hsql_env.harness import EpisodeConfig, InfrastructureError
from hsql_env.records import Database
from hsql_env.sandbox import SandboxPool
from hsql_env.service.client import (
    AsyncEnvironment,
    Environment,
    RequestRefused,
    retry_after_seconds,
)
from hsql_env.service.episodes import EpisodeStore
from hsql_env.service.log import Log
from hsql_env.service.metrics import Metrics
from hsql_env.service.problems import RequestError

BODY_LIMIT = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, city_path: str) -> Files:
    """A tasks file and a databases file."""
    return write_files(tmp_path_factory.mktemp("bounds"), city_path)


@pytest.fixture(scope="module")
def shared(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service for the tests that leave it as it was."""
    log = tmp_path_factory.mktemp("shared") / "log"
    with Served(files, log, "--max-body-bytes", str(BODY_LIMIT)) as served:
        yield served


def test_idle_episode_expires_and_says_so(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--idle-seconds", "1.5") as served:
        left, judged = served.start(), served.start()
        verdict = served.ask("DELETE", f"/episodes/{judged}").json
        wait_for(lambda: served.ask("GET", "/healthz").json["episodes"] == 0)
        for reply in (
            served.step(left, 1, call("sql_list_tables")),
            served.ask("DELETE", f"/episodes/{left}"),
        ):
            assert (reply.status, reply.json) == (
                404,
                {
                    "kind": "not_found",
                    "message": "the episode expired: no request came for 1.5 s",
                },
            )
        assert served.ask("DELETE", f"/episodes/{judged}").json == verdict
        assert served.metrics()["hsql_episodes_expired_total"] == 1
        assert served.events("episode_expired") == [
            {"event": "episode_expired", "episode": left[:8], "idle_seconds": 1.5}
        ]


def test_driver_names_the_loss_of_an_expired_episode(files: Files, tmp_path: Path) -> None:
    class Slow:
        name = "slow"

        def begin(self, *begun: object) -> Slow:
            return self

        async def act(self, new: object) -> str:
            await asyncio.sleep(1.5)
            return call("sql_list_tables")

        def close(self) -> None:
            pass

    async def run(url: str) -> str:
        async with AsyncEnvironment(url) as env:
            rollout = await run_episode(env, make_task(COUNT).public, Slow())
            return rollout.trajectory.verdict.infrastructure

    with Served(files, tmp_path / "log", "--idle-seconds", "0.2") as served:
        assert asyncio.run(run(served.url)) == (
            "the service lost the episode: the episode expired: no request came for 0.2 s"
        )


def test_running_query_keeps_its_episode_alive(files: Files, tmp_path: Path) -> None:
    options = "--idle-seconds", "0.4", "--tool-seconds", "1.5"
    with Served(files, tmp_path / "log", *options) as served:
        episode_id = served.start()
        reply = served.step(episode_id, 1, call("sql_exec", query=HANGING))
        assert reply.json["messages"][0]["content"] == "Error: the query took longer than 1.5 s"
        assert served.step(episode_id, 2, call("sql_exec", query=COUNT)).status == 200


def test_a_request_in_the_queue_keeps_its_episode_alive(files: Files, tmp_path: Path) -> None:
    """One worker and eight threads: the ninth step waits for a thread for many idle times."""
    options = "--workers", "1", "--tool-seconds", "0.5", "--idle-seconds", "0.4"

    async def run(url: str) -> list[str]:
        turns = [call("sql_exec", query=HANGING)] * 8 + [call("sql_exec", query=COUNT)]
        async with AsyncEnvironment(url) as env:

            async def play(turn: str) -> str:
                episode_id = (await env.start("t1")).episode_id
                return (await env.step(episode_id, 1, turn)).messages[0].content

            return await asyncio.gather(*map(play, turns))

    with Served(files, tmp_path / "log", *options) as served:
        texts = asyncio.run(run(served.url))
        assert texts[:8] == ["Error: the query took longer than 0.5 s"] * 8
        assert texts[8] == "count(*)\n3\n(1 row)"


@pytest.fixture
def store(pool: SandboxPool, city: Database) -> EpisodeStore:
    """The episodes of a service without the service around them."""
    parts = [make_task(COUNT)], {"city": city}, pool, EpisodeConfig(), Metrics(), Log("off")
    return EpisodeStore(*parts, idle_s=0.2)


def test_idle_time_counts_from_the_last_answer_to_the_next_arrival(store: EpisodeStore) -> None:
    episode_id = store.start("t1").episode_id
    with store.visit(episode_id):
        time.sleep(0.3)
        store.expire()
        assert store.step(episode_id, 1, call("sql_list_tables")).notes == ()
    time.sleep(0.1)
    store.expire()
    with store.visit(episode_id):
        store.step(episode_id, 2, call("sql_exec", query=COUNT))
    time.sleep(0.3)
    with store.visit(episode_id):  # it came too late, though nobody had looked
        with pytest.raises(RequestError, match=r"the episode expired: no request came for 0\.2 s"):
            store.step(episode_id, 3, call("sql_exec", query=COUNT))
    assert store.health().episodes == 0


def test_finish_sent_again_as_the_first_one_completes(
    store: EpisodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode_id = store.start("t1").episode_id
    hold, first = store._hold, []

    def hold_too_late(episode_id: str) -> object:
        monkeypatch.setattr(store, "_hold", hold)
        first.append(store.finish(episode_id))
        return hold(episode_id)

    monkeypatch.setattr(store, "_hold", hold_too_late)
    assert store.finish(episode_id) == first[0]
    assert store.finish(episode_id) == first[0]
    with pytest.raises(RequestError, match="unknown or finished episode: nosuch"):
        store.finish("nosuch")


def sized_step(size: int) -> bytes:
    """Return the body of a step that is so many bytes long."""
    frame = len(json.dumps({"turn": 1, "content": ""}))
    return json.dumps({"turn": 1, "content": "x" * (size - frame)}).encode()


@pytest.mark.parametrize("path", ["/episodes", "/episodes/x/step", "/nosuch", "/healthz"])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit(shared: Served, path: str, chunked: bool) -> None:
    body = sized_step(BODY_LIMIT + 1)
    with closing(http.client.HTTPConnection(urlsplit(shared.url).netloc, timeout=10)) as client:
        for _ in range(2):  # the connection stays usable
            client.request("POST", path, iter([body[:100], body[100:]]) if chunked else body)
            reply = client.getresponse()
            assert (reply.status, json.loads(reply.read())) == (
                413,
                {"kind": "too_large", "message": f"the body is larger than {BODY_LIMIT} bytes"},
            )


def test_body_at_the_limit(shared: Served) -> None:
    path = f"/episodes/{shared.start()}/step"
    assert shared.ask("POST", path, sized_step(BODY_LIMIT)).status == 200


def test_client_hears_that_its_body_was_too_large(shared: Served) -> None:
    with Environment(shared.url) as env:
        episode_id = env.start("t1").episode_id
        for _ in range(2):
            with pytest.raises(RequestRefused, match="larger than 4096 bytes") as caught:
                env.step(episode_id, 1, "x" * 3_000_000)
            assert caught.value.kind == "too_large"
        assert env.step(episode_id, 1, call("sql_exec", query=COUNT)).messages


def test_announced_body_that_is_never_sent_is_refused_at_once(shared: Served) -> None:
    host, port = urlsplit(shared.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"POST /episodes HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_live_episodes_are_bounded(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--max-episodes", "2") as served:
        first = served.start()
        served.start()
        refused = served.ask("POST", "/episodes", {"task_id": "t1"})
        assert (refused.status, refused.json) == (
            429,
            {"kind": "busy", "message": "2 episodes are live already"},
        )
        assert refused.headers["retry-after"] == "1"
        with Environment(served.url, timeout_s=0.5) as env:
            with pytest.raises(InfrastructureError, match=r"live already \(given up after 0\.5 s"):
                env.start("t1")
        with Environment(served.url) as env:
            timer = threading.Timer(0.3, served.ask, ("DELETE", f"/episodes/{first}"))
            timer.start()
            begun = time.monotonic()
            assert env.start("t2").episode_id  # it waited as it was told, and was let in
            assert 0.9 < time.monotonic() - begun < 10
            timer.join()


def test_waiting_steps_are_bounded_and_the_client_comes_back(files: Files, tmp_path: Path) -> None:
    options = "--workers", "1", "--max-waiting", "7", "--tool-seconds", "0.3"

    async def run(served: Served) -> list[str]:
        async with AsyncEnvironment(served.url) as env:
            episodes = [(await env.start("t1")).episode_id for _ in range(9)]
            turn = call("sql_exec", query=HANGING)
            steps = [asyncio.create_task(env.step(key, 1, turn)) for key in episodes[:8]]
            await asyncio.sleep(0.2)
            refused = await asyncio.to_thread(served.step, episodes[8], 1, turn)
            assert (refused.status, refused.kind) == (429, "busy")
            assert refused.headers["retry-after"] == "1"
            steps.append(asyncio.create_task(env.step(episodes[8], 1, turn)))
            return [(await step).messages[0].content for step in steps]

    with Served(files, tmp_path / "log", *options) as served:
        texts = asyncio.run(run(served))
        assert texts == ["Error: the query took longer than 0.3 s"] * 9
        metrics = served.metrics()
    assert metrics['hsql_sandbox_failures_total{kind="timeout"}'] == 9
    assert metrics["hsql_sandbox_workers_replaced_total"] == 9
    assert metrics['hsql_requests_refused_total{kind="busy"}'] >= 2
    assert metrics["hsql_steps_total"] == 9


def test_one_request_at_a_time_for_an_episode(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--tool-seconds", "3") as served:
        episode_id = served.start()
        turn = call("sql_exec", query=HANGING)
        thread, replies = in_background(served.step, episode_id, 1, turn)
        wait_for(lambda: served.metrics()["hsql_requests_in_flight"] == 1)
        for again in (
            served.step(episode_id, 1, turn),
            served.ask("DELETE", f"/episodes/{episode_id}"),
        ):
            assert (again.status, again.json["message"]) == (
                429,
                "the episode is busy with another request",
            )
        with Environment(served.url) as env:
            stepped = env.step(episode_id, 1, turn)
        thread.join()
        assert json.loads(replies[0].text) == stepped.model_dump(mode="json")
        assert served.metrics()["hsql_steps_total"] == 1


def test_refusals_are_not_sent_again(shared: Served) -> None:
    before = shared.metrics()['hsql_requests_refused_total{kind="not_found"}']
    with Environment(shared.url) as env:
        with pytest.raises(RequestRefused, match="unknown task: nosuch"):
            env.start("nosuch")
    assert shared.metrics()['hsql_requests_refused_total{kind="not_found"}'] == before + 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 1.0),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("-5", 1.0),
        ("soon", 1.0),
        ("", 1.0),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert retry_after_seconds(header, now=1000.0) == seconds


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/nosuch", None, 404, "not_found"),
        ("GET", "/", None, 404, "not_found"),
        ("GET", "/docs", None, 404, "not_found"),
        ("POST", "/episodes/", {"task_id": "t1"}, 404, "not_found"),
        ("POST", "/episodes//step", {"turn": 1, "content": ""}, 404, "not_found"),
        ("GET", "/episodes", None, 405, "invalid"),
        ("PUT", "/episodes/x/step", None, 405, "invalid"),
        ("OPTIONS", "/healthz", None, 405, "invalid"),
        ("POST", "/episodes", b"\xff\xfe", 422, "invalid"),
        ("POST", "/episodes", b"{", 422, "invalid"),
        ("POST", "/episodes", b"[" * 3000, 400, "invalid"),
        ("POST", "/episodes", b'{"task_id": "\\ud800"}', 404, "not_found"),
        ("POST", "/episodes", b'{"\\ud800": 1}', 422, "invalid"),
        ("POST", "/episodes", b'{"task_id": "t1", "seed": 1e400}', 422, "invalid"),
        ("POST", "/episodes/x/step", b"\xff\xfe", 422, "invalid"),
        ("POST", "/episodes/x/step", b"[" * 3000, 422, "invalid"),
        ("POST", "/episodes/x/step", b'{"turn": 1, "content": "\\ud800"}', 422, "invalid"),
        ("POST", "/episodes/x/step", b'{"turn": 1, "\\ud800": ""}', 422, "invalid"),
        ("POST", "/episodes/x/step", b'{"turn": ' + b"9" * 4000 + b"}", 422, "invalid"),
        ("POST", "/episodes", {"task_id": "n" * 3000}, 404, "not_found"),
    ],
)
def test_every_error_is_a_problem(
    shared: Served, method: str, path: str, body: object, status: int, kind: str
) -> None:
    reply = shared.ask(method, path, body)
    assert (reply.status, reply.kind) == (status, kind)
    assert set(reply.json) == {"kind", "message"}
    assert 0 < len(reply.json["message"]) <= 501
    assert reply.headers["content-type"] == "application/json"
    assert shared.events("fault", "server") == []


@pytest.mark.parametrize(
    "text",
    [b"hello\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx\r\n\r\n", b"\0" * 99],
)
def test_what_is_not_http_is_a_problem_too(shared: Served, text: bytes) -> None:
    host, port = urlsplit(shared.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(text)
        reply = b""
        while piece := raw.recv(4096):
            reply += piece
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["kind"] == "invalid"


def test_clients_that_hang_up_leave_no_trace(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log", "--tool-seconds", "0.5") as served:
        host, port = urlsplit(served.url).netloc.split(":")
        episode_id = served.start()
        step = json.dumps({"turn": 1, "content": call("sql_exec", query=HANGING)}).encode()
        head = f"POST /episodes/{episode_id}/step HTTP/1.1\r\nhost: x\r\n"
        for sent in (b"", step[:5], step):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(f"{head}content-length: {len(step)}\r\n\r\n".encode() + sent)
                time.sleep(0.1)
        wait_for(lambda: served.metrics()["hsql_requests_in_flight"] == 0)
        with Environment(served.url) as env:
            again = env.step(episode_id, 1, call("sql_exec", query=HANGING))
        assert again.messages[0].content == "Error: the query took longer than 0.5 s"
        assert served.metrics()["hsql_steps_total"] == 1
        assert served.events("fault", "server") == []


def test_requests_that_never_end_are_ended(files: Files, tmp_path: Path) -> None:
    heads = (b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: ")
    with Served(files, tmp_path / "log", "--request-seconds", "0.5") as served:
        host, port = urlsplit(served.url).netloc.split(":")
        for sent in heads:
            for before in (b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"):
                if not sent and before:
                    continue  # a connection that has asked something may stay idle
                with socket.create_connection((host, int(port)), timeout=5) as raw:
                    raw.sendall(before + sent)
                    begun = time.monotonic()
                    while raw.recv(4096):
                        pass
                    assert 0.3 < time.monotonic() - begun < 3
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(b"POST /episodes HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            reply = raw.recv(4096)
            while b"the body did not arrive in 0.5 s" not in reply:
                reply += (piece := raw.recv(4096))
                assert piece
        assert reply.startswith(b"HTTP/1.1 422 ")
        with closing(http.client.HTTPConnection(urlsplit(served.url).netloc)) as client:
            for pause in (1.0, 0.0):  # a used connection outlives the limit, and a long step too
                client.request("GET", "/healthz")
                assert client.getresponse().read()
                time.sleep(pause)
        episode_id = served.start()
        numbers = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 6000000) "
        reply_of_a_long_step = served.step(
            episode_id, 1, call("sql_exec", query=numbers + "SELECT max(n) AS n FROM c")
        )
        (observation,) = reply_of_a_long_step.json["messages"]
        assert observation["content"] == "n\n6000000\n(1 row)"
        assert served.events("fault", "server") == []


def test_metrics_and_log_of_an_episode(files: Files, tmp_path: Path) -> None:
    with Served(files, tmp_path / "log") as served:
        reply = served.ask("GET", "/metrics")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "# TYPE hsql_step_seconds histogram" in reply.text
        episode_id = served.start("t3")
        served.start("t4")
        served.step(episode_id, 1, call("sql_exec", query="SELECT nosuch FROM city"))
        served.step(episode_id, 2, call("sql_submit", query=COUNT))
        served.ask("DELETE", f"/episodes/{episode_id}")
        served.ask("POST", "/episodes", {"task_id": "nosuch"})
        metrics = served.metrics()
        assert served.stop() == 0
        address = {"url": served.url, "token": False, "workers": 2}
    wanted = {
        "hsql_episodes_live": 1,
        "hsql_episodes_started_total": 2,
        "hsql_episodes_finished_total": 1,
        "hsql_episodes_expired_total": 0,
        "hsql_episodes_spoiled_total": 0,
        "hsql_steps_total": 2,
        "hsql_step_seconds_count": 2,
        'hsql_step_seconds_bucket{le="+Inf"}': 2,
        "hsql_queue_depth": 0,
        "hsql_requests_in_flight": 0,
        'hsql_requests_refused_total{kind="not_found"}': 1,
        "hsql_sandbox_executions_total": 4,  # two of the policy, the verifier's two
        'hsql_sandbox_failures_total{kind="sql_error"}': 1,
        'hsql_sandbox_failures_total{kind="timeout"}': 0,
        "hsql_sandbox_workers": 2,
        "hsql_sandbox_workers_replaced_total": 0,
    }
    assert {name: metrics.get(name) for name in wanted} == wanted
    assert 0 < metrics["hsql_step_seconds_sum"] < 10
    lines = [json.loads(line) for line in served.text().splitlines()]
    assert all(line.pop("time") for line in lines)
    second = lines[2].pop("episode")
    assert lines == [
        {"event": "ready", **address},
        {"event": "episode_started", "episode": episode_id[:8], "task": "t3"},
        {"event": "episode_started", "task": "t4"},
        {"event": "refused", "kind": "not_found", "message": "unknown task: nosuch"},
        {"event": "draining", "in_flight": 0},
        {"event": "stopped", "left_running": 0},
    ]
    assert len(second) == 8


def test_a_storm_of_requests_loses_no_episode(files: Files, tmp_path: Path) -> None:
    turns = [call("sql_exec", query=COUNT), call("sql_submit", query=COUNT), "nothing", ""]
    statuses: Counter[int] = Counter()
    known: list[str] = ["nosuch"]

    async def one(client: aiohttp.ClientSession, chance: random.Random) -> None:
        what = chance.choice(["start", "step", "step", "step", "finish", "wrong"])
        path, episode = "/episodes", f"/episodes/{chance.choice(known)}"
        if what == "start":
            reply = client.post(path, json={"task_id": f"t{chance.randrange(20)}"})
        elif what == "step":
            body = {"turn": chance.randrange(1, 4), "content": chance.choice(turns)}
            reply = client.post(episode + "/step", json=body)
        elif what == "finish":
            reply = client.delete(episode)
        else:
            reply = client.post(path, data=b"{")
        async with reply as answer:
            statuses[answer.status] += 1
            text = await answer.json()
        if what == "start" and answer.status == 200:
            known.append(text["episode_id"])
        assert ("kind" in text) == (answer.status != 200)

    async def many(client: aiohttp.ClientSession, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            await one(client, chance)

    async def storm(url: str) -> None:
        async with aiohttp.ClientSession(url) as client, asyncio.TaskGroup() as group:
            for seed in range(24):
                group.create_task(many(client, seed))

    options = "--idle-seconds", "0.5", "--max-episodes", "12", "--max-waiting", "4"
    with Served(files, tmp_path / "log", *options) as served:
        asyncio.run(storm(served.url))
        assert sum(statuses.values()) == 960
        assert {200, 404, 409, 422} <= set(statuses) <= {200, 404, 409, 422, 429}
        wait_for(lambda: served.metrics()["hsql_episodes_live"] == 0)
        metrics = served.metrics()
        ended = metrics["hsql_episodes_finished_total"] + metrics["hsql_episodes_expired_total"]
        assert metrics["hsql_episodes_started_total"] == ended == len(known) - 1
        assert metrics["hsql_requests_in_flight"] == 0
        assert served.events("fault", "server", "infrastructure") == []
        assert served.stop() == 0

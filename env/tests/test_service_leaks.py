"""Nothing that a client can get holds a hidden field or a path of the server."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator

import pytest
from conftest import CITY_SQL, build_database, call
from serving import HANGING, Served, in_background, wait_for

from hsql_env.records import HiddenTask, Mutation, PublicTask, Task, write_jsonl
from hsql_env.registry import open_database

FOLDER = "hidden_folder_of_databases"
FILE = "hidden_file_name.sqlite"
PREFIXES = {"city": "", "bad": "bad_", "gone": "gone_"}
SECRETS = (
    "canary_alias",  # in every oracle
    "canary_mutation",
    "canary_fingerprint",
    "canary_blueprint",
    "canary_column",
    "canary_of_a_broken_oracle",
    "oracle_sql",
    "fingerprint",
    "blueprint",
    FOLDER,
    FILE,
    "hsql_env/",
    "site-packages",
    "Traceback",
)
ORACLES = {
    "count": ("SELECT count(*) AS canary_alias FROM city", 1),
    "names": ("SELECT name AS canary_alias FROM city ORDER BY people", 3),
    "broken": ("SELECT canary_of_a_broken_oracle FROM city AS canary_alias", 1),
    "unparsed": ("SELEC canary_of_a_broken_oracle -- canary_alias", 1),
    "endless": (
        "WITH RECURSIVE canary_alias(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM canary_alias) "
        "SELECT max(n) FROM canary_alias",
        1,
    ),
}
QUERIES = (
    "SELECT count(*) FROM city",
    "SELECT name FROM city",
    "SELECT file FROM pragma_database_list",
    "SELECT * FROM sqlite_schema",
    "SELECT * FROM pragma_function_list LIMIT 5",
    "PRAGMA database_list",
    "ATTACH 'gold.db' AS x",
    "SELECT readfile('/proc/self/maps')",
    "SELECT load_extension('/x')",
    "SELECT nosuch FROM city",
    "SELECT 1; SELECT 2",
    "VACUUM INTO 'x'",
    "SELECT CAST(x'ff' AS TEXT)",
    "",
)


def make(task_id: str, database_id: str) -> Task:
    """Return a task with a canary in every hidden field."""
    sql, rows = ORACLES[task_id.partition("-")[0]]
    return Task(
        public=PublicTask(task_id=task_id, database_id=database_id, question="How many?"),
        hidden=HiddenTask(
            task_id=task_id,
            oracle_sql=sql,
            columns=("canary_column",),
            row_count=rows,
            fingerprint="canary_fingerprint",
            mutations=(Mutation(kind="canary_mutation", sql="SELECT canary_mutation"),),
            blueprint={"canary_blueprint": "canary_blueprint"},
        ),
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service over tasks with canaries; while it runs, one database is spoiled and one lost."""
    folder = tmp_path_factory.mktemp(FOLDER)
    paths = {key: folder / (prefix + FILE) for key, prefix in PREFIXES.items()}
    write_jsonl(
        folder / "d.jsonl",
        [open_database(build_database(path, CITY_SQL), key) for key, path in paths.items()],
    )
    tasks = [make(name, "city") for name in ORACLES]
    tasks += [make(f"count-{database}", database) for database in ("bad", "gone")]
    write_jsonl(folder / "t.jsonl", tasks)
    options = "--verify-seconds", "0.3", "--tool-seconds", "0.5", "--max-turns", "8"
    limits = "--idle-seconds", "3", "--max-body-bytes", "20000"
    log = tmp_path_factory.mktemp("log") / "log"
    files = folder / "t.jsonl", folder / "d.jsonl"
    with Served(files, log, *options, *limits) as service:
        paths["bad"].write_bytes(b"no database " * 1000)
        paths["gone"].unlink()
        yield service


def turns(chance: random.Random) -> Iterator[str]:
    """Yield the turns of one episode: exploring, breaking the rules, submitting."""
    for _ in range(5):
        tool = chance.choice(["sql_exec", "sql_exec", "sql_submit", "sql_schema", "x" * 3000])
        arguments = {"tables": ["city", "note", "sqlite_schema", "../x"]}
        if tool != "sql_schema":
            arguments = {"query": chance.choice(QUERIES)}  # type: ignore[dict-item]
        yield call(tool, **arguments) * chance.choice([1, 1, 2, 12])
    yield chance.choice(["<tool_call>{", call("sql_submit", query=QUERIES[0])])


def play(served: Served, task_id: str, chance: random.Random) -> Iterator[str]:
    """Play an episode; yield everything that the service answers."""
    started = served.ask("POST", "/episodes", {"task_id": task_id})
    yield str(started)
    episode_id = started.json["episode_id"]
    for number, turn in enumerate([call("sql_list_tables"), *turns(chance)], 1):
        yield str(served.step(episode_id, number, turn))
        yield str(served.step(episode_id, chance.choice([number, number + 5]), "x"))
    yield str(served.ask("DELETE", f"/episodes/{episode_id}"))
    yield str(served.step(episode_id, 1, "x"))


def odd_requests(served: Served) -> Iterator[str]:
    """Yield the answers to requests for what is not there, or not right."""
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/",
        "/../t.jsonl",
        "/%2e%2e/d",
    ):
        yield str(served.ask("GET", path))
    for body in (b"{", b"\xff", b"[]", b"x" * 30_000, b'{"task_id": 1}', b'{"oracle": 1}'):
        yield str(served.ask("POST", "/episodes", body))
        yield str(served.ask("POST", "/episodes/x/step", body))
    yield str(served.ask("PATCH", "/episodes"))
    yield str(served.ask("DELETE", "/episodes/x"))


def test_no_byte_holds_a_secret(served: Served) -> None:
    chance = random.Random(0)
    seen = list(odd_requests(served))
    verdicts = []
    for name in (*ORACLES, "count-bad", "count-gone"):
        for _ in range(6):
            answers = list(play(served, name, chance))
            verdicts += [answer for answer in answers if '"verdict"' in answer]
            seen += answers
    left = served.start("count")
    wait_for(lambda: served.ask("GET", "/healthz").json["episodes"] == 0)
    seen.append(str(served.step(left, 1, "x")))
    seen += odd_requests(served)
    hanging = call("sql_exec", query=HANGING)
    thread, replies = in_background(served.step, served.start("count"), 1, hanging)
    wait_for(lambda: served.metrics()["hsql_requests_in_flight"] == 1)
    served.signal(signal.SIGTERM)
    wait_for(lambda: served.ask("GET", "/readyz").status == 503)
    seen.append(str(served.ask("POST", "/episodes", {"task_id": "count"})))
    thread.join()
    seen.append(str(replies))
    assert served.process.wait(10) == 0
    seen += [json.dumps(served.announced), served.text()]

    everything = "\n".join(seen)
    assert [secret for secret in SECRETS if secret in everything] == []
    # The episodes went where something could have leaked: right and wrong answers, broken and
    # endless oracles, databases that cannot be read, and a line of the log for each of these.
    assert len(verdicts) == 42
    for expected in (
        '"result_ok":true',
        '"result_ok":false',
        "the oracle of task broken did not run: sql_error",
        "the oracle of task unparsed did not run: not_a_query",
        "the oracle of task endless did not run: timeout",
        "the database cannot be read",
        "the database file: No such file or directory",
        "the episode expired",
        "only read-only queries are allowed",
        "the pragma database_list is not allowed",
        '"event": "infrastructure"',
        '"event": "refused"',
        '"event": "stopped"',
    ):
        assert expected in everything, expected

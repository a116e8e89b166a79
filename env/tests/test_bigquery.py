"""The BigQuery backend with the real client, and a stand-in for the service on loopback.

The stand-in answers with what the service documents; nothing here was tried against the service.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hsql_env.harness.tools import SYSTEM_PROMPT, prompt_for
from hsql_env.sandbox import Failure, Limits
from hsql_env.sandbox.bigquery import BigQueryBackend, Failed, Place, read_cell, read_locator

LOCATOR = "bigquery://shop/sales?max_bytes=1000"
FIELDS = [
    {"name": "n", "type": "INTEGER", "mode": "REQUIRED"},
    {"name": "tags", "type": "STRING", "mode": "REPEATED"},
    {"name": "at", "type": "DATE", "mode": "NULLABLE"},
]
ROWS = [
    {"f": [{"v": "9007199254740993"}, {"v": [{"v": "a"}, {"v": "b"}]}, {"v": "2024-02-03"}]},
    {"f": [{"v": "2"}, {"v": []}, {"v": None}]},
]
PLANS = {  # a word of the statement -> its type and the bytes that it would read
    "DELETE": ("DELETE", 0),
    "one": ("SCRIPT", 0),
    "huge": ("SELECT", 1001),
}


class StandIn(BaseHTTPRequestHandler):
    """Answers the requests that the client makes for a query and for a dataset's tables."""

    queries: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.queries.append(job["configuration"])
        sql = job["configuration"]["query"]["query"]
        if "nosuch" in sql:
            self.fail(400, "invalidQuery", "Unrecognized name: nosuch at [1:8]")
            return
        if "forbidden" in sql:
            self.fail(403, "accessDenied", "Access Denied: Table shop:sales.forbidden")
            return
        kind, size = next((plan for word, plan in PLANS.items() if word in sql), ("SELECT", 10))
        numbers = {"statementType": kind, "totalBytesProcessed": str(size)}
        job |= {"status": {"state": "DONE"}, "statistics": {"query": numbers}}
        self.reply(job)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        reference = {"projectId": "shop", "datasetId": "sales", "tableId": "bill"}
        if "/queries/" in path:
            job = {"projectId": "shop", "jobId": path.rpartition("/")[2]}
            schema = {"fields": FIELDS}
            self.reply({"jobReference": job, "jobComplete": True, "schema": schema,
                        "totalRows": "7", "rows": ROWS})  # fmt: skip
        elif path.endswith("/data"):
            self.reply({"totalRows": "7", "rows": ROWS})
        elif path.endswith("/tables"):
            self.reply({"tables": [{"tableReference": reference, "type": "TABLE"}]})
        elif path.endswith("/tables/bill"):
            self.reply({"tableReference": reference, "type": "TABLE", "numRows": "7",
                        "schema": {"fields": FIELDS}})  # fmt: skip
        else:
            self.fail(404, "notFound", f"no page {path}")

    def fail(self, status: int, reason: str, message: str) -> None:
        error = {"code": status, "message": message, "errors": [
            {"reason": reason, "message": message}]}  # fmt: skip
        self.reply({"error": error}, status)

    def reply(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[BigQueryBackend]:
    """A backend whose client speaks to the stand-in."""
    bigquery = pytest.importorskip(
        "google.cloud.bigquery", reason="google-cloud-bigquery is not installed"
    )
    from google.auth.credentials import AnonymousCredentials

    StandIn.queries.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield BigQueryBackend(
            lambda project: bigquery.Client(
                project, AnonymousCredentials(), client_options={"api_endpoint": endpoint}
            )
        )
        server.shutdown()


def test_a_query_is_planned_then_run_under_the_cap(backend: BigQueryBackend) -> None:
    done = backend.execute(LOCATOR, "SELECT n FROM bill", Limits(wall_s=5, rows=2), "default")
    assert done.failure is None
    assert done.columns == ("n", "tags", "at")
    assert done.rows == ((9007199254740993, '["a", "b"]', "2024-02-03"), (2, "[]", None))
    assert (done.total_rows, done.complete) == (7, False)
    plan, job = StandIn.queries
    assert (plan["dryRun"], job.get("dryRun", False)) == (True, False)
    for sent in (plan, job):
        assert sent["jobTimeoutMs"] == "5000"
        assert sent["query"]["maximumBytesBilled"] == "1000"
        assert sent["query"]["useLegacySql"] is False
        assert sent["query"]["defaultDataset"] == {"projectId": "shop", "datasetId": "sales"}


@pytest.mark.parametrize(
    ("sql", "kind", "message", "sent"),
    [
        ("WITH x AS (SELECT 1) DELETE FROM t", "not_read_only",
         "only read-only queries are allowed", 1),
        ("SELECT 'one'; SELECT 2", "multi_statement", "only one statement is allowed per query", 1),
        ("SELECT * FROM huge", "too_large", "the query would read 1001 bytes; at most 1000", 1),
        ("SELECT nosuch", "sql_error", "Unrecognized name: nosuch at [1:8]", 1),
        ("SELECT * FROM forbidden", "denied", "Access Denied: Table shop:sales.forbidden", 1),
        ("DROP TABLE bill", "not_read_only", "only read-only queries are allowed, not DROP", 0),
        ("", "empty", "the query is empty", 0),
    ],
)  # fmt: skip
def test_what_is_refused(
    backend: BigQueryBackend, sql: str, kind: str, message: str, sent: int
) -> None:
    failure = backend.execute(LOCATOR, sql, Limits(), "default").failure
    assert failure == Failure(kind, message)  # type: ignore[arg-type]
    assert len(StandIn.queries) == sent


def test_tables_are_described_without_a_query(backend: BigQueryBackend) -> None:
    tables = backend.tables(LOCATOR, Limits())
    assert not isinstance(tables, Failure)
    (bill,) = tables
    assert (bill.name, bill.kind, bill.row_count) == ("bill", "table", 7)
    assert bill.sql == "CREATE TABLE `bill` (n INTEGER NOT NULL, tags ARRAY<STRING>, at DATE)"
    assert bill.sample_rows[1] == (2, "[]", None)
    assert StandIn.queries == []


def test_locators() -> None:
    assert read_locator(LOCATOR) == Place("shop", "sales", 1000)
    assert read_locator("bigquery://shop/sales").max_bytes == 1_000_000_000
    for bad in ("bigquery://shop", "bigquery:///sales", LOCATOR + "GB"):
        with pytest.raises(Failed, match="not a valid address"):
            read_locator(bad)
    assert prompt_for(SYSTEM_PROMPT, LOCATOR).startswith("Answer the question with one BigQuery ")


def test_cells() -> None:
    assert [read_cell(value) for value in (True, Decimal("12"), Decimal("0.5"), b"x", None)] == [
        "true", 12, 0.5, b"x", None,
    ]  # fmt: skip
    assert read_cell({"a": [Decimal("1.5")]}) == '{"a": ["1.5"]}'


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    message = "BigQuery needs its client: pip install 'hsql-env[bigquery]'"
    expected = Failure("infrastructure", message)
    assert BigQueryBackend().execute(LOCATOR, "SELECT 1", Limits(), "default").failure == expected
    assert BigQueryBackend().tables(LOCATOR, Limits()) == expected

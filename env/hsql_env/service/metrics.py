"""What the service counts, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hsql_env.sandbox import Execution, Failure
from hsql_env.service.wire import ProblemKind

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one service, in a registry of their own; observes its sandbox pool."""

    def __init__(self) -> None:
        registry = CollectorRegistry(auto_describe=True)
        self._registry = registry
        self.started = Counter("hsql_episodes_started", "Episodes begun", registry=registry)
        self.finished = Counter("hsql_episodes_finished", "Episodes judged", registry=registry)
        self.expired = Counter("hsql_episodes_expired", "Episodes abandoned", registry=registry)
        self.spoiled = Counter(
            "hsql_episodes_spoiled", "Episodes that the harness failed", registry=registry
        )
        self.steps = Counter("hsql_steps", "Turns run, retries not counted", registry=registry)
        self.step_seconds = Histogram(
            "hsql_step_seconds",
            "Seconds from a step's arrival to its reply, the wait in the queue included",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.refused = Counter(
            "hsql_requests_refused", "Requests answered with a problem", ["kind"], registry=registry
        )
        self.executions = Counter(
            "hsql_sandbox_executions", "Statements run, the verifier's too", registry=registry
        )
        self.failures = Counter(
            "hsql_sandbox_failures",
            "Statements that failed, by kind",
            ["kind"],
            registry=registry,
        )
        self.replacements = Counter(
            "hsql_sandbox_workers_replaced", "Workers killed or dead", registry=registry
        )
        for kind in get_args(ProblemKind):
            self.refused.labels(kind)
        for kind in ("timeout", "memory", "infrastructure"):
            self.failures.labels(kind)  # shown as 0 before the first

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a value that is read when the metrics are."""
        Gauge(name, text, registry=self._registry).set_function(value)

    def executed(self, executions: Sequence[Execution]) -> None:
        """Count statements and the kinds of their failures."""
        self.executions.inc(len(executions))
        for execution in executions:
            if execution.failure is not None:
                self.failed(execution.failure)

    def failed(self, failure: Failure) -> None:
        """Count a failure."""
        self.failures.labels(failure.kind).inc()

    def replaced(self) -> None:
        """Count a worker that a successor replaces."""
        self.replacements.inc()

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

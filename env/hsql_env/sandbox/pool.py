"""A pool of worker processes: a killable process for every query in flight."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import select
import signal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from types import ModuleType, TracebackType
from typing import Protocol, Self

from hsql_env.sandbox import worker as worker_module
from hsql_env.sandbox.backend import identity
from hsql_env.sandbox.open import FileIdentity
from hsql_env.sandbox.types import Execution, Failure, FailureKind, GuardProfile, Limits, Table
from hsql_env.sandbox.worker import ExecuteRequest, TablesRequest

_START_SECONDS = 30.0
_KNOWN_DATABASES = 4096  # databases whose tables stay in memory
_ATTEMPTS = 2  # a worker that dies under a request, or as it starts, gets one successor
_start_lock = threading.Lock()


class SandboxError(RuntimeError):
    """The sandbox itself failed: no worker could be started, or the pool is closed."""


class PoolObserver(Protocol):
    """Who is told of what happens in a pool; called from the threads that use it."""

    def executed(self, executions: Sequence[Execution]) -> None:
        """Statements came to these outcomes."""
        ...

    def failed(self, failure: Failure) -> None:
        """The tables of a database could not be read."""
        ...

    def replaced(self) -> None:
        """A worker was killed or died; its successor starts when it is needed."""
        ...


class _WorkerDied(Exception):
    """The worker's process ended before it replied."""


class _Worker:
    """One worker process and the parent's end of its pipe.

    The process is held by a descriptor of its own. What `multiprocessing` knows of it comes from
    its fork server: when that is killed, every live worker counts as ended there.
    """

    def __init__(self) -> None:
        """Start the process. Raises `OSError` or `EOFError`, as where its fork server dies."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([worker_module.__name__])
        self._pipe, theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=worker_module.serve, args=(theirs,), daemon=True, name="hsql-sandbox"
        )
        with _start_lock, _without_main_module():
            self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self._descriptor = os.pidfd_open(self.pid)  # a number alone may become another process's
        self._poller = select.poll()  # `Connection.poll` builds a selector a call
        self._poller.register(self._pipe.fileno(), select.POLLIN)
        self._ready = False

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._ended(0)

    def send(self, request: ExecuteRequest | TablesRequest) -> None:
        """Hand the worker a request. Raises `_WorkerDied`, or `SandboxError` if it never starts."""
        self._wait_ready()
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise _WorkerDied from error

    def receive(self, seconds: float) -> object:
        """Return the next reply. Raises `TimeoutError` after `seconds`, or `_WorkerDied`."""
        try:
            if not self._poller.poll(seconds * 1000):
                raise TimeoutError
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise _WorkerDied from error

    def kill(self) -> None:
        """End the process at once and wait for its end; call it once.

        The pipe is left to its last user: another thread may be waiting on it this moment.
        """
        with suppress(ProcessLookupError):  # it ended by itself
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        self._ended(_START_SECONDS)
        os.close(self._descriptor)

    def _ended(self, seconds: float) -> bool:
        """Wait for the process's end; a poller of each call's own, as threads may not share one."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def _wait_ready(self) -> None:
        if self._ready:
            return
        try:
            self.receive(_START_SECONDS)
        except TimeoutError:
            message = f"a worker process was not ready in {_START_SECONDS:g} s"
            raise SandboxError(message) from None
        self._ready = True


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide `__main__` while a process starts: a worker must not import the program that uses it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Idle:
    """The free workers, each to whoever has waited longest.

    In a queue of the standard library a thread that comes by may pass those that wait, for as long
    as the pool is busy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the two below, of which one is always empty
        self._free: deque[_Worker | None] = deque()  # None stands for a worker to be started
        self._waiting: deque[queue.SimpleQueue[_Worker | None]] = deque()

    def put(self, worker: _Worker | None) -> None:
        """Give a worker back, or a place for one."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(worker)
            else:
                self._free.append(worker)

    def get(self, seconds: float) -> _Worker | None:
        """Return a free worker or place; raises `queue.Empty` after `seconds`."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            own: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
            self._waiting.append(own)
        try:
            return own.get(timeout=seconds)
        except queue.Empty:
            with self._lock:
                if own in self._waiting:
                    self._waiting.remove(own)
                    raise
            return own.get()  # it came at the last moment


class SandboxPool:
    """Executes statements in worker processes; blocking, safe to share between threads.

    The wall limit is enforced from outside: a worker past it is killed with SIGKILL and replaced.
    No method raises for what a statement does; failures are values.
    """

    def __init__(
        self, workers: int = 2, queue_s: float = 600.0, observer: PoolObserver | None = None
    ) -> None:
        """Start `workers` processes; a call waits at most `queue_s` seconds for a free one."""
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._observer = observer
        self._queue_s = queue_s
        self._closed = False
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[str, FileIdentity], tuple[Table, ...]] = OrderedDict()
        self._all: set[_Worker] = set()
        self._idle = _Idle()
        try:
            for _ in range(workers):
                self._idle.put(self._start())
        except BaseException:
            self.close()
            raise

    def execute(
        self,
        path: str,
        sql: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        guard: GuardProfile = "default",
    ) -> Execution:
        """Execute one statement on the database file at `path`."""
        return self.execute_many(path, (sql,), limits, guard)[0]

    def execute_many(
        self,
        path: str,
        sqls: Sequence[str],
        limits: Limits = Limits(),  # noqa: B008 - frozen
        guard: GuardProfile = "default",
    ) -> list[Execution]:
        """Execute statements in order, each under its own limits; one outcome a statement.

        They share one round trip. A statement that is killed or kills its worker does not affect
        the ones after it.
        """
        executions = self._execute(path, sqls, limits, guard)
        if self._observer is not None:
            self._observer.executed(executions)
        return executions

    def _execute(
        self, path: str, sqls: Sequence[str], limits: Limits, guard: GuardProfile
    ) -> list[Execution]:
        done: list[Execution] = []
        died = 0
        while len(done) < len(sqls):
            before = len(done)
            try:
                with self._borrow() as worker:
                    self._drain(worker, path, tuple(sqls[before:]), limits, guard, done)
            except SandboxError as error:
                return done + [_failed("infrastructure", str(error))] * (len(sqls) - len(done))
            except TimeoutError:
                message = f"the query took longer than {limits.wall_s:g} s"
                late = Failure("timeout", message)
                done.append(Execution(failure=late, elapsed_s=limits.wall_s))
            except _WorkerDied:
                died = died + 1 if len(done) == before else 1
                if died >= _ATTEMPTS:
                    done.append(_failed("infrastructure", "the query's worker process died"))
                    died = 0
        return done

    def tables(
        self, path: str, wall_s: float = 60.0, memory_mb: int = 1024
    ) -> tuple[Table, ...] | Failure:
        """Return every table and view of the database, kept in memory by file identity."""
        tables = self._read_tables(path, Limits(wall_s=wall_s, memory_mb=memory_mb))
        if isinstance(tables, Failure) and self._observer is not None:
            self._observer.failed(tables)
        return tables

    def _read_tables(self, path: str, limits: Limits) -> tuple[Table, ...] | Failure:
        try:
            key = (path, identity(path))
        except OSError:
            return Failure("infrastructure", "the database file: No such file or directory")
        with self._lock:
            known = self._tables.get(key)
        if known is not None:
            return known
        tables = self._ask_tables(path, limits)
        if not isinstance(tables, Failure):
            self._remember(key, tables)
        return tables

    def _ask_tables(self, path: str, limits: Limits) -> tuple[Table, ...] | Failure:
        for _ in range(_ATTEMPTS):
            try:
                with self._borrow() as worker:
                    worker.send(TablesRequest(path, limits))
                    tables = worker.receive(limits.wall_s)
            except SandboxError as error:
                return Failure("infrastructure", str(error))
            except TimeoutError:
                message = f"reading the tables took longer than {limits.wall_s:g} s"
                return Failure("timeout", message)
            except _WorkerDied:
                continue
            assert isinstance(tables, tuple | Failure)
            return tables
        return Failure("infrastructure", "the worker process died reading the tables")

    def worker_pids(self) -> tuple[int, ...]:
        """Return the process ids of the workers that run; one that died is replaced when needed."""
        with self._lock:
            return tuple(worker.pid for worker in self._all if worker.alive)

    def close(self) -> None:
        """Kill every worker. Calls in flight return an infrastructure failure."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._all)
        self._idle.put(None)
        for worker in workers:
            self._end(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drain(
        self,
        worker: _Worker,
        path: str,
        sqls: tuple[str, ...],
        limits: Limits,
        guard: GuardProfile,
        done: list[Execution],
    ) -> None:
        worker.send(ExecuteRequest(path, sqls, limits, guard))
        for _ in sqls:
            reply = worker.receive(limits.wall_s)
            assert isinstance(reply, Execution)
            done.append(reply)

    @contextmanager
    def _borrow(self) -> Iterator[_Worker]:
        """Lend an idle worker; one that was not given back in order is replaced."""
        worker = self._take()
        healthy = False
        try:
            yield worker
            healthy = True
        finally:
            if not healthy:
                self._replace(worker)
            self._idle.put(worker if healthy else None)

    def _take(self) -> _Worker:
        try:
            worker = self._idle.get(self._queue_s)
        except queue.Empty:
            raise SandboxError(f"no worker was free for {self._queue_s:g} s") from None
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if worker is not None and not worker.alive:  # while it was idle: no query's attempt
                self._replace(worker)
                worker = None
            return worker or self._start()
        except BaseException:
            self._idle.put(None)  # the place stays, and the next waiter is woken
            raise

    def _start(self) -> _Worker:
        worker = _start_worker()
        with self._lock:
            self._all.add(worker)
            closed = self._closed
        if closed:  # in the meantime, after `close` took its list
            self._end(worker)
            raise SandboxError("the sandbox is closed")
        return worker

    def _replace(self, worker: _Worker) -> None:
        self._end(worker)
        if self._observer is not None and not self._closed:
            self._observer.replaced()

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            if worker not in self._all:  # another thread ends it
                return
            self._all.remove(worker)
        worker.kill()

    def _remember(self, key: tuple[str, FileIdentity], tables: tuple[Table, ...]) -> None:
        with self._lock:
            self._tables[key] = tables
            if len(self._tables) > _KNOWN_DATABASES:
                self._tables.popitem(last=False)


def _start_worker() -> _Worker:
    """Start a worker, once more where its fork server died meanwhile. Raises `SandboxError`."""
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            return _Worker()
        except (OSError, EOFError) as error:
            reason = str(error) or type(error).__name__
    raise SandboxError(f"no worker process could be started: {reason}")


def _failed(kind: FailureKind, message: str) -> Execution:
    return Execution(failure=Failure(kind, message))

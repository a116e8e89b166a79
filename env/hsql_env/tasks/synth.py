"""Task synthesis, SQL first: draw oracles from a catalog, verify them, write their questions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from math import ceil
from multiprocessing.connection import wait
from random import Random

from hsql_env.records import Database, Task
from hsql_env.sandbox import SandboxPool
from hsql_env.tasks import joins, templates
from hsql_env.tasks.candidate import Candidate, Link, Roles, find_roles
from hsql_env.tasks.catalog import Catalog, CatalogError, read_catalog
from hsql_env.tasks.verify import check_mutations, check_results, make_tasks

JOIN_DRAWS = 0.45  # share of joins among the candidates drawn
JOIN_SHARE = 0.36  # share of joins among the tasks emitted, where there are enough
SURVIVAL = 0.72  # expected share of drawn candidates that survive
ROUNDS = 4  # of drawing what is still missing


def synthesise(
    catalog: Catalog, pool: SandboxPool, rng: Random, count: int
) -> tuple[list[Task], Counter[str]]:
    """Make up to `count` verified tasks over one database.

    Returns them with a count of everything that was drawn ("drawn") and of why candidates died,
    by layer. The same catalog and `rng` give the same tasks.
    """
    deaths: Counter[str] = Counter()
    roles, links = find_roles(catalog)
    tasks: dict[str, Task] = {}  # by question
    seen: set[str] = set()
    for _ in range(ROUNDS):
        missing = count - len(tasks)
        if missing <= 0 or not roles:
            break
        wanted = ceil(missing / SURVIVAL)
        drawn = _draw(list(roles.values()), links, rng, wanted, seen)
        deaths["drawn"] += len(drawn)
        executed = check_results(drawn, catalog.database, pool, deaths)
        tested = check_mutations(executed, catalog.database, pool, deaths)
        for task in make_tasks(tested, catalog, pool, rng, deaths):
            if task.public.question in tasks:
                deaths["consistency: question asked twice"] += 1
            tasks.setdefault(task.public.question, task)
    return _choose(list(tasks.values()), count), deaths


def _draw(
    tables: Sequence[Roles], links: Sequence[Link], rng: Random, count: int, seen: set[str]
) -> list[Candidate]:
    """Draw up to `count` candidates with SQL not in `seen`, which grows by theirs."""
    eligible = {
        name: [table for table in tables if getattr(table, family.needs)]
        for name, family in templates.FAMILIES.items()
    }
    names = [name for name, able in eligible.items() if able]
    weights = [templates.FAMILIES[name].weight for name in names]
    drawn: list[Candidate] = []
    for _ in range(8 * count):
        candidate: Candidate | None = None
        if links and (not names or rng.random() < JOIN_DRAWS):
            name = rng.choices(list(joins.FAMILIES), joins.WEIGHTS)[0]
            candidate = joins.FAMILIES[name](rng.choice(links), rng)
        elif names:
            name = rng.choices(names, weights)[0]
            candidate = templates.FAMILIES[name].template(rng.choice(eligible[name]), rng)
        if candidate is not None and candidate.sql not in seen:
            seen.add(candidate.sql)
            drawn.append(candidate)
        if len(drawn) == count:
            break
    return drawn


def is_join(task: Task) -> bool:
    """True for a task whose oracle joins tables."""
    return task.public.kind in joins.FAMILIES


def _choose(tasks: Sequence[Task], count: int) -> list[Task]:
    """The first `count` tasks, joins first up to their share; in the order they were made."""
    joined = [task for task in tasks if is_join(task)]
    others = [task for task in tasks if not is_join(task)]
    share = ceil(JOIN_SHARE * count)
    best = (joined[:share] + others + joined[share:])[:count]
    chosen = {task.public.task_id for task in best}
    return [task for task in tasks if task.public.task_id in chosen]


@dataclass
class Yield:
    """What one database gave: how many tasks, and why other candidates died."""

    tasks: int = 0
    joins: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    problem: str = ""  # why the whole database gave nothing
    skipped: tuple[str, ...] = ()  # tables left out, with the reason


@dataclass
class Report:
    """What a synthesis run gave, by database, and how long it took."""

    databases: dict[str, Yield] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def emitted(self) -> int:
        """Tasks made over all databases."""
        return sum(entry.tasks for entry in self.databases.values())

    @property
    def deaths(self) -> Counter[str]:
        """Candidates drawn and died, by reason, over all databases."""
        return sum((entry.deaths for entry in self.databases.values()), Counter())

    def survival(self) -> dict[str, float]:
        """The share of candidates that pass each layer, of those that reach it."""
        deaths = self.deaths
        left = deaths.pop("drawn", 0)
        shares = {}
        for layer in ("execution", "consistency: columns", "result", "mutation", "replay"):
            lost = sum(n for reason, n in deaths.items() if reason.startswith(layer))
            shares[layer.split(":")[0]] = (left - lost) / left if left else 0.0
            left -= lost
        return shares


Progress = Callable[[int, int, int], None]  # databases done, databases in all, tasks so far


def synthesise_all(
    databases: Sequence[Database],
    per_database: int,
    seed: int,
    processes: int,
    on_progress: Progress | None = None,
) -> tuple[list[Task], Report]:
    """Make up to `per_database` tasks over each database, in `processes` processes.

    The tasks depend on (seed, database) only, and come in the order of the databases.
    """
    started = time.monotonic()
    found: dict[int, tuple[list[Task], Yield]] = {}
    tasks_so_far = 0
    for index, outcome in _spread(databases, per_database, seed, processes):
        found[index] = outcome
        tasks_so_far += len(outcome[0])
        if on_progress is not None:
            on_progress(len(found), len(databases), tasks_so_far)
    report = Report(
        {database.database_id: found[index][1] for index, database in enumerate(databases)},
        time.monotonic() - started,
    )
    return [task for index in range(len(databases)) for task in found[index][0]], report


def _spread(
    databases: Sequence[Database], per_database: int, seed: int, processes: int
) -> Iterator[tuple[int, tuple[list[Task], Yield]]]:
    """Yield each database's outcome as it comes, with its index."""
    if processes <= 1:
        with SandboxPool(workers=1) as pool:
            for index, database in enumerate(databases):
                yield index, _one(database, per_database, seed, pool)
        return
    size = max(1, min(4, len(databases) // (4 * processes)))  # small, so that Ctrl-C is prompt
    context = multiprocessing.get_context("forkserver")
    executor = ProcessPoolExecutor(processes, context, initializer=_follow_parent)
    try:
        futures: dict[Future[list[tuple[list[Task], Yield]]], int] = {}
        for start in range(0, len(databases), size):
            part = databases[start : start + size]
            futures[executor.submit(_part, part, per_database, seed)] = start
        for future in as_completed(futures):
            for offset, outcome in enumerate(future.result()):
                yield futures[future] + offset, outcome
    finally:
        executor.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _part(
    databases: Sequence[Database], per_database: int, seed: int
) -> list[tuple[list[Task], Yield]]:
    """One process's job: several databases with one sandbox worker."""
    with SandboxPool(workers=1) as pool:
        return [_one(database, per_database, seed, pool) for database in databases]


def _one(
    database: Database, per_database: int, seed: int, pool: SandboxPool
) -> tuple[list[Task], Yield]:
    rng = Random(f"synth:{seed}:{database.database_id}")
    try:
        catalog = read_catalog(database, pool)
    except CatalogError as error:
        return [], Yield(problem=str(error))
    tasks, deaths = synthesise(catalog, pool, rng, per_database)
    problem = "" if tasks else _why_none(deaths)
    entry = Yield(len(tasks), sum(map(is_join, tasks)), deaths, problem, catalog.skipped)
    return tasks, entry


def _why_none(deaths: Counter[str]) -> str:
    """Return why a database gave no task."""
    reasons = [f"{count} {reason}" for reason, count in deaths.most_common(4) if reason != "drawn"]
    if not reasons:
        return "no table with enough rows and usable columns"
    return f"of {deaths['drawn']} candidates died: {', '.join(reasons)}"

"""Held-out tasks: whole databases (unseen), and questions on training databases (seen)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hsql_env.records import Split, Task
from hsql_env.tasks.overlap import normalised_sql


@dataclass(frozen=True)
class Splits:
    """The three sets; `dropped` counts training tasks that shared SQL with a held-out one."""

    train: tuple[Task, ...]
    seen: tuple[Task, ...]
    unseen: tuple[Task, ...]
    dropped: int


def split_tasks(
    tasks_by_database: Mapping[str, Sequence[Task]],
    seed: int,
    unseen_databases: int,
    seen_count: int,
    unseen_count: int,
) -> Splits:
    """Hold out `unseen_databases` databases, and `seen_count` questions on the others.

    Held-out tasks differ from each other in their normalised SQL as far as the supply allows; the
    training tasks that share normalised SQL with any of them are dropped. Raises ValueError where
    nothing would be left to train on.
    """
    rng = Random(f"splits:{seed}")
    names = sorted(name for name, tasks in tasks_by_database.items() if tasks)
    if unseen_databases >= len(names):
        raise ValueError(
            f"cannot hold out {unseen_databases} of {len(names)} databases with tasks: "
            "ask for fewer unseen databases or give more databases"
        )
    apart = set(rng.sample(names, unseen_databases))
    pools = {
        away: [
            task for name in names if (name in apart) == away for task in tasks_by_database[name]
        ]
        for away in (True, False)
    }
    form = functools.cache(normalised_sql)
    unseen = _distinct_sample(pools[True], unseen_count, rng, form)
    seen = _distinct_sample(pools[False], seen_count, rng, form)
    taken = {task.public.task_id for task in seen}
    forbidden = {form(task.hidden.oracle_sql) for task in (*seen, *unseen)}
    rest = [task for task in pools[False] if task.public.task_id not in taken]
    train = [task for task in rest if form(task.hidden.oracle_sql) not in forbidden]
    return Splits(
        _labelled(train, "train"),
        _labelled(seen, "seen"),
        _labelled(unseen, "unseen"),
        len(rest) - len(train),
    )


def _distinct_sample(
    tasks: Sequence[Task], count: int, rng: Random, form: Callable[[str], str]
) -> list[Task]:
    """`count` tasks at random, those with SQL of their own first."""
    first: list[Task] = []
    again: list[Task] = []
    known: set[str] = set()
    for task in rng.sample(list(tasks), len(tasks)):
        sql = form(task.hidden.oracle_sql)
        (again if sql in known else first).append(task)
        known.add(sql)
    return (first + again)[:count]


def _labelled(tasks: Sequence[Task], split: Split) -> tuple[Task, ...]:
    return tuple(
        task.model_copy(update={"public": task.public.model_copy(update={"split": split})})
        for task in tasks
    )

"""The checks between a candidate and a task: results, mutations, and the oracle's own episode.

Each check takes what is left, executes everything it needs in one round trip to the sandbox, and
counts why candidates die.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from sqlglot import exp

from hsql_env.compare import compare, fingerprint
from hsql_env.harness.episode import Episode, InfrastructureError
from hsql_env.records import Database, HiddenTask, Mutation, PublicTask, Task
from hsql_env.sandbox import Execution, Limits, SandboxPool
from hsql_env.tasks import sqltree
from hsql_env.tasks.blueprint import faults
from hsql_env.tasks.candidate import Candidate
from hsql_env.tasks.catalog import Catalog
from hsql_env.tasks.difficulty import measure
from hsql_env.tasks.mutate import Facts, mutations
from hsql_env.tasks.question import write_question

MAX_ROWS = 50  # of an answer
LEAST_MUTATIONS = 2
# One row more than an answer may have, so that a longer result is never taken for an equal one.
LIMITS = Limits(wall_s=10.0, rows=MAX_ROWS + 1, max_rows=10 * MAX_ROWS)


@dataclass(frozen=True)
class Executed:
    """A candidate whose oracle ran and whose result is worth asking for."""

    candidate: Candidate
    result: Execution


def check_results(
    candidates: Sequence[Candidate], database: Database, pool: SandboxPool, deaths: Counter[str]
) -> list[Executed]:
    """Execute the oracles; keep those with a sound result and no tie at their LIMIT."""
    sqls = [candidate.sql for candidate in candidates]
    ordered = [candidate for candidate in candidates if candidate.order_sql]
    sqls += [candidate.order_sql for candidate in ordered]
    done = pool.execute_many(database.path, sqls, LIMITS)
    keys = {
        candidate.order_sql: execution
        for candidate, execution in zip(ordered, done[len(candidates) :], strict=True)
    }
    alive = []
    for candidate, result in zip(candidates, done, strict=False):
        problem = result_problem(candidate, result)
        if not problem and candidate.order_sql:
            problem = order_problem(candidate, keys[candidate.order_sql])
        if problem:
            deaths[problem] += 1
        else:
            alive.append(Executed(candidate, result))
    return alive


def result_problem(candidate: Candidate, result: Execution) -> str:
    """Why the result is no answer to ask for, or ""."""
    if result.failure is not None:
        return f"execution: {result.failure.kind}"
    if len(result.columns) != len(candidate.returns):
        return "consistency: columns"
    if not result.rows:
        return "result: empty"
    if result.total_rows > MAX_ROWS:
        return "result: too many rows"
    if all(value is None for row in result.rows for value in row):
        return "result: all NULL"
    if result.rows == ((0,),):
        return "result: zero"
    if candidate.listing and len(set(result.rows)) < len(result.rows):
        return "result: repeated rows"
    if len(result.rows) > 1 and len(set(result.rows)) == 1:
        return "result: all rows equal"
    if any(isinstance(value, bytes) for row in result.rows for value in row):
        return "result: blob"
    return ""


def order_problem(candidate: Candidate, keys: Execution) -> str:
    """A tie among the sorted keys, which would leave the answer open; or ""."""
    if keys.failure is not None:
        return f"execution: {keys.failure.kind}"
    values = [row[0] for row in keys.rows]
    if None in values:
        return "result: NULL in the order"
    return "result: tie" if len(set(values)) < len(values) else ""


@dataclass(frozen=True)
class Tested(Executed):
    """A candidate whose every mutation ran and changed the answer."""

    tree: exp.Expr
    mutations: tuple[Mutation, ...]


def check_mutations(
    executed: Sequence[Executed], database: Database, pool: SandboxPool, deaths: Counter[str]
) -> list[Tested]:
    """Keep the candidates that every single-fault mutation of their SQL gives another answer."""
    tested = [_mutate(item) for item in executed]
    sqls = [mutation.sql for item in tested for mutation in item.mutations]
    outcomes = iter(pool.execute_many(database.path, sqls, LIMITS))
    alive = []
    for item in tested:
        problem = mutation_problem(item, [next(outcomes) for _ in item.mutations])
        if problem:
            deaths[problem] += 1
        else:
            alive.append(item)
    return alive


def _mutate(item: Executed) -> Tested:
    candidate = item.candidate
    tree = sqltree.parse(candidate.sql)
    facts = Facts(candidate.swaps, candidate.other_key, candidate.loose)
    return Tested(candidate, item.result, tree, tuple(mutations(tree, facts)))


def mutation_problem(item: Tested, outcomes: Sequence[Execution]) -> str:
    """Why the mutations do not prove the question sharp, or ""."""
    if len(outcomes) < LEAST_MUTATIONS:
        return "mutation: too few"
    for mutation, outcome in zip(item.mutations, outcomes, strict=True):
        if outcome.failure is not None:
            return f"mutation: {mutation.kind} fails"
        if compare(item.result, outcome, item.candidate.ordered):
            return f"mutation: {mutation.kind} changes nothing"
    return ""


def make_tasks(
    tested: Sequence[Tested],
    catalog: Catalog,
    pool: SandboxPool,
    rng: Random,
    deaths: Counter[str],
) -> list[Task]:
    """Prove the queries of the teacher's blueprint, write the question, replay the oracle."""
    errors = [faults(item.tree, item.candidate, catalog, rng) for item in tested]
    queries = [
        [*wrong, *item.candidate.attempts, *item.candidate.probes]
        for item, wrong in zip(tested, errors, strict=True)
    ]
    flat = [sql for sqls in queries for sql in sqls]
    outcomes = iter(pool.execute_many(catalog.database.path, flat, LIMITS))
    tasks = []
    for item, wrong, sqls in zip(tested, errors, queries, strict=True):
        results = {sql: next(outcomes) for sql in sqls}
        task = _assemble(item, wrong, results, catalog.database)
        problem = replay(task, catalog.database, pool)
        if problem:
            deaths[problem] += 1
        else:
            tasks.append(task)
    return tasks


def _assemble(
    item: Tested, errors: Sequence[str], results: dict[str, Execution], database: Database
) -> Task:
    candidate, result = item.candidate, item.result
    wrong = [
        sql
        for sql in candidate.attempts
        if results[sql].ok and not compare(result, results[sql], candidate.ordered)
    ]
    question = write_question(candidate)
    digest = hashlib.sha256(f"{candidate.sql}\n{question}".encode()).hexdigest()[:10]
    task_id = f"{database.database_id}-{digest}"
    public = PublicTask(
        task_id=task_id,
        database_id=database.database_id,
        question=question,
        kind=candidate.kind,
        difficulty=measure(candidate.sql, item.tree).difficulty,
    )
    hidden = HiddenTask(
        task_id=task_id,
        oracle_sql=candidate.sql,
        columns=result.columns,
        row_count=len(result.rows),
        fingerprint=fingerprint(result, candidate.ordered),
        ordered=candidate.ordered,
        mutations=item.mutations,
        blueprint={
            "tables": list(candidate.tables),
            "probes": [sql for sql in candidate.probes if results[sql].rows],
            "attempts": wrong,
            "faults": [sql for sql in errors if _is_sql_error(results[sql])],
        },
    )
    return Task(public=public, hidden=hidden)


def _is_sql_error(outcome: Execution) -> bool:
    return outcome.failure is not None and outcome.failure.kind == "sql_error"


def replay(task: Task, database: Database, pool: SandboxPool, submit: str = "") -> str:
    """Run and submit the oracle in an episode; return why it does not get the whole reward, or "".

    It must also keep the protocol strictly, as every demonstration does. `submit` is the SQL to
    submit in the oracle's place.
    """
    episode = Episode(task, database, pool)
    episode.reset()
    try:
        for tool in ("sql_exec", "sql_submit"):
            call = {"name": tool, "arguments": {"query": submit or task.hidden.oracle_sql}}
            episode.step(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    except InfrastructureError:
        return "replay: infrastructure"
    verdict = episode.verdict()
    if verdict.infrastructure:
        return "replay: infrastructure"
    return "" if verdict.reward == 1.0 and verdict.strict_ok else "replay: reward is not 1"

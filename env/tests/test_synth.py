"""Synthesis end to end: known tasks, an independent re-verification, determinism, splits."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from hsql_env.compare import compare, fingerprint
from hsql_env.records import Database, Task
from hsql_env.sandbox import Limits, SandboxPool
from hsql_env.tasks.catalog import read_catalog
from hsql_env.tasks.examples import write_examples
from hsql_env.tasks.names import quote_name, spoken
from hsql_env.tasks.overlap import normalised_sql, overlap
from hsql_env.tasks.question import PHRASES
from hsql_env.tasks.splits import split_tasks
from hsql_env.tasks.synth import Report, is_join, synthesise, synthesise_all
from hsql_env.tasks.verify import replay

LIMITS = Limits(wall_s=10.0, rows=1000)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(workers=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> list[Database]:
    paths = write_examples(tmp_path_factory.mktemp("examples"), 24, seed=5)
    return [Database(database_id=path.stem, path=str(path), sha256="") for path in paths]


@pytest.fixture(scope="module")
def made(databases: list[Database]) -> tuple[list[Task], Report]:
    return synthesise_all(databases, per_database=8, seed=0, processes=1)


def build(path: Path, *statements: str) -> Database:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return Database(database_id=path.stem, path=str(path), sha256="")


def test_enough_tasks_of_every_kind(made: tuple[list[Task], Report]) -> None:
    tasks, report = made
    assert len(tasks) == 24 * 8
    assert sum(map(is_join, tasks)) / len(tasks) >= 0.30
    kinds = {task.public.kind for task in tasks}
    assert kinds == {key.split("/")[0] for key in PHRASES}
    assert len({task.public.task_id for task in tasks}) == len(tasks)
    by_database = Counter(task.public.database_id for task in tasks)
    assert {name: entry.tasks for name, entry in report.databases.items()} == by_database


def test_the_report_accounts_for_every_candidate(made: tuple[list[Task], Report]) -> None:
    _, report = made
    deaths = report.deaths
    died = sum(count for reason, count in deaths.items() if reason != "drawn")
    assert deaths["drawn"] - died >= report.emitted == 24 * 8
    survival = report.survival()
    assert list(survival) == ["execution", "consistency", "result", "mutation", "replay"]
    assert survival["execution"] == survival["replay"] == 1.0
    assert 0.8 < survival["result"] < 1.0
    assert 0.6 < survival["mutation"] < 1.0


def test_every_task_holds_in_fresh_processes(
    made: tuple[list[Task], Report], databases: list[Database]
) -> None:
    paths = {database.database_id: database.path for database in databases}
    with SandboxPool(workers=1) as fresh:
        for task in made[0]:
            hidden = task.hidden
            path = paths[task.public.database_id]
            sqls = [hidden.oracle_sql, *(mutation.sql for mutation in hidden.mutations)]
            oracle, *mutants = fresh.execute_many(path, sqls, LIMITS)
            assert oracle.ok
            assert (oracle.columns, oracle.total_rows) == (hidden.columns, hidden.row_count)
            assert fingerprint(oracle, hidden.ordered) == hidden.fingerprint
            assert 2 <= len(mutants) <= 4
            assert all(mutant.ok for mutant in mutants)
            assert not any(compare(oracle, mutant, hidden.ordered) for mutant in mutants)


def test_a_task_whose_oracle_is_replaced_by_a_mutant_does_not_pass(
    made: tuple[list[Task], Report], databases: list[Database], pool: SandboxPool
) -> None:
    """The submitted SQL stays the right one; the verifier's half is the mutant."""
    by_name = {database.database_id: database for database in databases}
    for task in made[0][::3]:
        database = by_name[task.public.database_id]
        assert replay(task, database, pool) == ""
        for mutation in task.hidden.mutations:
            assert replay(task, database, pool, submit=mutation.sql) == "replay: reward is not 1"


def test_blueprints_do_what_they_say(
    made: tuple[list[Task], Report], databases: list[Database], pool: SandboxPool
) -> None:
    paths = {database.database_id: database.path for database in databases}
    faults: list[int] = []
    attempts = 0
    for task in made[0]:
        plan, path = task.hidden.blueprint, paths[task.public.database_id]
        assert all(quote_name(table) in task.hidden.oracle_sql for table in plan["tables"])
        for outcome in pool.execute_many(path, plan["faults"], LIMITS):
            assert outcome.failure is not None
            assert outcome.failure.kind == "sql_error"
        oracle = pool.execute(path, task.hidden.oracle_sql, LIMITS)
        for outcome in pool.execute_many(path, plan["attempts"], LIMITS):
            assert outcome.ok
            assert not compare(oracle, outcome, task.hidden.ordered)
        assert all(outcome.rows for outcome in pool.execute_many(path, plan["probes"], LIMITS))
        faults.append(len(plan["faults"]))
        attempts += len(plan["attempts"])
    assert sum(count >= 2 for count in faults) / len(faults) > 0.95
    assert attempts > 5


def test_same_seed_same_tasks_in_one_process_or_two(
    made: tuple[list[Task], Report], databases: list[Database]
) -> None:
    seen: list[tuple[int, int, int]] = []
    again, _ = synthesise_all(
        databases, 8, seed=0, processes=2, on_progress=lambda *state: seen.append(state)
    )
    assert again == made[0]
    assert seen[-1] == (24, 24, 192)
    assert [done for done, _, _ in seen] == list(range(1, 25))
    other, _ = synthesise_all(databases[:3], 8, seed=1, processes=1)
    assert other != made[0][:24]


MESSY = (
    'CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT, "home town" TEXT)',
    "INSERT INTO team VALUES (1, 'Lions', 'PARIS'), (2, 'Bears', 'ROME'), (3, 'Hawks', 'PARIS'), "
    "(4, 'Foxes', 'ROME'), (5, 'Wolves', 'OSLO'), (6, 'Crows', 'OSLO'), (7, 'Owls', 'PARIS')",
    'CREATE TABLE "order" (id INTEGER PRIMARY KEY, label TEXT, "unit price" TEXT, signed TEXT, '
    "team_id INTEGER REFERENCES team(id))",
    "INSERT INTO \"order\" VALUES (1, 'Ada', '9', '01/02/2020', 1), (2, 'Bob', '10', "
    "'11/02/2021', 1), (3, 'Cid', '100', '01/12/2020', 2), (4, 'Dot', '21', '09/02/2021', 3), "
    "(5, 'Eve', '8', '01/02/2020', 3), (6, 'Fay', '35', '05/06/2021', 3), "
    "(7, 'Gus', '77', '03/03/2020', 2), (8, 'Hal', '6', '04/04/2021', 4)",
)


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory, pool: SandboxPool) -> list[Task]:
    database = build(tmp_path_factory.mktemp("messy") / "messy.sqlite", *MESSY)
    tasks, _ = synthesise(read_catalog(database, pool), pool, random.Random(0), 60)
    return tasks


def find(tasks: list[Task], sql: str) -> Task:
    return next(task for task in tasks if task.hidden.oracle_sql == sql)


def test_other_spelling_in_the_question(messy: list[Task]) -> None:
    task = find(messy, "SELECT COUNT(*) FROM team WHERE \"home town\" = 'PARIS'")
    assert task.public.question in {
        "How many team rows have home town Paris?",
        "Count the team rows where home town is Paris.",
        "What is the number of team rows with home town Paris?",
    }
    plan = task.hidden.blueprint
    assert plan["attempts"] == ["SELECT COUNT(*) FROM team WHERE \"home town\" = 'Paris'"]
    assert plan["probes"] == ['SELECT DISTINCT "home town" FROM team']
    assert "SELECT COUNT(*) FROM team WHERE home town = 'PARIS'" in plan["faults"]


def test_numbers_as_text_are_cast(messy: list[Task]) -> None:
    task = find(messy, 'SELECT MAX(CAST("unit price" AS INTEGER)) FROM "order"')
    assert task.hidden.blueprint["attempts"] == ['SELECT MAX("unit price") FROM "order"']
    assert [mutation.kind for mutation in task.hidden.mutations] == [
        "cast_dropped",
        "aggregate",
        "aggregate",
    ]
    compared = [task for task in messy if "CAST" in task.hidden.oracle_sql.partition("WHERE")[2]]
    assert compared
    assert all(task.public.kind == "text_number" for task in compared)


def test_day_first_dates(messy: list[Task]) -> None:
    dated = [task for task in messy if task.public.kind == "date_year"]
    assert {task.hidden.oracle_sql.partition("WHERE ")[2] for task in dated} <= {
        "signed LIKE '%2020'",
        "signed LIKE '%2021'",
    }
    assert dated[0].hidden.blueprint["attempts"][0].endswith(("LIKE '2020%'", "LIKE '2021%'"))


def test_quoted_names_in_joins(messy: list[Task]) -> None:
    source = 'FROM "order" JOIN team ON "order".team_id = team.id'
    joined = [task for task in messy if is_join(task)]
    assert len(joined) >= 20
    assert all(source in task.hidden.oracle_sql for task in joined)
    assert all('"' not in task.public.question for task in messy)


def test_a_tie_at_the_limit_makes_no_task(tmp_path: Path, pool: SandboxPool) -> None:
    database = build(
        tmp_path / "ties.sqlite",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, n INTEGER)",
        "INSERT INTO t VALUES (1, 'a', 9), (2, 'b', 9), (3, 'c', 1), (4, 'd', 1), (5, 'e', 5), "
        "(6, 'f', 5), (7, 'g', 3), (8, 'h', 3)",
    )
    tasks, deaths = synthesise(read_catalog(database, pool), pool, random.Random(0), 100)
    assert deaths["result: tie"] >= 4
    assert not [task for task in tasks if "LIMIT" in task.hidden.oracle_sql]


def test_a_database_without_usable_tables_is_reported(tmp_path: Path) -> None:
    empty = build(tmp_path / "empty.sqlite", "CREATE TABLE t (a TEXT)")
    text = tmp_path / "text.sqlite"
    text.write_text("no database " * 500)
    broken = Database(database_id="text", path=str(text), sha256="")
    tasks, report = synthesise_all([empty, broken], 5, seed=0, processes=1)
    assert tasks == []
    assert report.databases["empty"].problem == "no table with enough rows and usable columns"
    assert report.databases["text"].problem.startswith("text: no schema")


KNOWN = [
    (
        "Find the grade for the publisher with name Lucas.",
        "SELECT grade FROM publisher WHERE name = 'Lucas'",
    ),
    (
        "List the title of every author whose publisher has grade Novice.",
        "SELECT author.title FROM author JOIN publisher ON author.publisher_id = publisher.id "
        "WHERE publisher.grade = 'Novice'",
    ),
    (
        "Count the author rows by publisher name. Show the name and number of author rows.",
        "SELECT publisher.name, COUNT(*) FROM author JOIN publisher "
        "ON author.publisher_id = publisher.id GROUP BY publisher.name",
    ),
    (
        "Find the epoch for the author with title Elena.",
        "SELECT epoch FROM author WHERE title = 'Elena'",
    ),
]


def test_known_tasks(made: tuple[list[Task], Report]) -> None:
    first = [(task.public.question, task.hidden.oracle_sql) for task in made[0][:4]]
    assert first == KNOWN


def test_normalised_sql() -> None:
    assert normalised_sql("select  A\nFROM \"T\" where b = 'x  y' AND c>=1.5 ; -- z") == (
        "select a from t where b = ? and c >= ?"
    )
    assert normalised_sql("SELECT a FROM t GROUP   BY a") == normalised_sql(
        "select a from t group by a;"
    )
    assert normalised_sql("SELECT 'open") == "select 'open"


def test_spoken_names() -> None:
    names = ["unit_price", "UnitPrice", "unit price", "CustomerID", "us-employment", "dep_time"]
    assert [spoken(name) for name in names] == [
        "unit price",
        "unit price",
        "unit price",
        "customer id",
        "us employment",
        "dep time",
    ]


def test_splits_share_no_sql(made: tuple[list[Task], Report]) -> None:
    by_database: dict[str, list[Task]] = {}
    for task in made[0]:
        by_database.setdefault(task.public.database_id, []).append(task)
    splits = split_tasks(by_database, 3, unseen_databases=4, seen_count=20, unseen_count=16)
    assert (len(splits.seen), len(splits.unseen)) == (20, 16)
    assert len(splits.train) == 20 * 8 - 20 - splits.dropped
    for name in ("train", "seen", "unseen"):
        assert {task.public.split for task in getattr(splits, name)} == {name}
    assert overlap(splits.train, (*splits.seen, *splits.unseen)) == []
    trained = {task.public.database_id for task in splits.train}
    assert not trained & {task.public.database_id for task in splits.unseen}
    assert {task.public.database_id for task in splits.seen} <= trained
    for held_out in (splits.seen, splits.unseen):
        texts = {normalised_sql(task.hidden.oracle_sql) for task in held_out}
        assert len(texts) == len(held_out)
    assert split_tasks(by_database, 3, 4, 20, 16) == splits
    assert overlap(splits.train, splits.train[:1]) == [
        normalised_sql(splits.train[0].hidden.oracle_sql)
    ]


def test_too_few_databases_to_hold_out(made: tuple[list[Task], Report]) -> None:
    with pytest.raises(ValueError, match="cannot hold out 2 of 1 databases"):
        split_tasks({"a": made[0][:2], "b": []}, 0, 2, 1, 1)

"""The embedded databases: deterministic, canonical, messy as stated."""

import re
from pathlib import Path
from random import Random

import apsw
import pytest

from hsql_env.tasks import lexicon
from hsql_env.tasks.examples import (
    MESSES,
    Table,
    create_statement,
    draw_tables,
    respell,
    write_examples,
)
from hsql_env.tasks.names import KEYWORDS


def draw(count: int, seed: int = 0) -> list[list[Table]]:
    drawn = []
    for index in range(count):
        rng = Random(f"{seed}:{index}")
        drawn.append(draw_tables(rng.choice(lexicon.DOMAINS), rng))
    return drawn


def schema(path: Path) -> list[str]:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    return [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema ORDER BY rowid")]


def test_known_databases(tmp_path: Path) -> None:
    paths = write_examples(tmp_path, 6, seed=3)
    assert [path.name for path in paths[3:]] == [
        "music_0003.sqlite",
        "sports_0004.sqlite",
        "education_0005.sqlite",
    ]
    assert schema(paths[4]) == [
        "CREATE TABLE stadium (id INTEGER PRIMARY KEY, name TEXT, origin TEXT, region TEXT, "
        "amount INTEGER, goals INTEGER)",
        "CREATE TABLE medal (id INTEGER PRIMARY KEY, name TEXT, capacity INTEGER, status TEXT, "
        "stadium_id INTEGER REFERENCES stadium(id))",
    ]
    assert schema(paths[5])[1] == (
        'CREATE TABLE "local course" (id INTEGER PRIMARY KEY, name TEXT, "minor pages" INTEGER, '
        "origin TEXT, faculty_id INTEGER REFERENCES faculty(id))"
    )


def test_same_seed_same_bytes_and_more_extends_less(tmp_path: Path) -> None:
    few = write_examples(tmp_path / "few", 5, seed=1)
    many = write_examples(tmp_path / "many", 9, seed=1)
    other = write_examples(tmp_path / "other", 5, seed=2)
    assert [path.name for path in few] == [path.name for path in many[:5]]
    assert [path.read_bytes() for path in few] == [path.read_bytes() for path in many[:5]]
    assert [path.read_bytes() for path in few] != [path.read_bytes() for path in other]


def test_lexicon_is_large_and_safe() -> None:
    entities, attributes = lexicon.entities(), lexicon.attributes()
    assert len(set(entities)) == len(entities) >= 80
    assert len(attributes) >= 80
    assert not set(entities) & set(attributes)
    assert not set(lexicon.MODIFIERS) & {*entities, *attributes}
    words = (*entities, *attributes, *lexicon.MODIFIERS)
    assert all(re.fullmatch(r"[a-z]+", word) and word not in KEYWORDS for word in words)


def test_value_pools() -> None:
    assert len(lexicon.VALUE_POOLS) >= 20
    assert set(lexicon.CATEGORIES.values()) == set(lexicon.VALUE_POOLS)
    assert all(len(set(pool)) == 12 for pool in lexicon.VALUE_POOLS.values())
    assert all(len(set(pool)) == 24 for pool in lexicon.NAME_POOLS.values())
    pools = (*lexicon.VALUE_POOLS.values(), *lexicon.NAME_POOLS.values())
    assert all(re.fullmatch(r"[A-Z][a-z]+", value) for pool in pools for value in pool)


def test_shape_of_the_databases() -> None:
    for tables in draw(200):
        assert 2 <= len(tables) <= 3
        assert tables[0].parent is None
        for table in tables:
            assert 6 <= table.rows <= 15
            label = table.columns[0].cells
            assert len(set(label)) == len(label) == table.rows
            names = [column.name for column in table.columns]
            assert len(set(names)) == len(names)
            if table.parent is not None:
                assert set(table.parent_ids) <= set(range(1, table.parent.rows + 1))


def test_create_statements_are_canonical() -> None:
    name = r'(?:[a-z]+|"[a-z]+ [a-z]+")'
    key = r"(?:, [a-z]+_id INTEGER REFERENCES [a-z]+\(id\))?"
    columns = rf"(?:, {name} (?:TEXT|INTEGER)){{3,6}}"
    form = re.compile(rf"CREATE TABLE {name} \(id INTEGER PRIMARY KEY{columns}{key}\)")
    statements = [create_statement(table) for tables in draw(300) for table in tables]
    assert [text for text in statements if not form.fullmatch(text)] == []


def _signs(tables: list[Table]) -> set[str]:
    """Which messes show in a database."""
    columns = [column for table in tables for column in table.columns]
    cells = {column.kind: [c for x in columns if x.kind == column.kind for c in x.cells]
             for column in columns}  # fmt: skip
    texts = [str(cell) for cell in cells["label"] + cells.get("category", [])]
    signs = {
        "spaces": any(" " in column.name for column in columns),
        "nulls": any(cell is None for cell in cells["number"]),
        "text_number": any(isinstance(cell, str) for cell in cells["number"]),
        "text_date": any("/" in str(cell) for cell in cells.get("date", [])),
        "spelling": any(text.isupper() or text.islower() for text in texts),
    }
    return {sign for sign, shown in signs.items() if shown}


def test_about_a_third_are_messy_in_one_or_two_ways() -> None:
    signs = [_signs(tables) for tables in draw(600)]
    messy = [found for found in signs if found]
    assert 0.30 < len(messy) / len(signs) < 0.40
    assert max(map(len, messy)) == 2
    for mess in MESSES:
        assert sum(mess in found for found in messy) > 20


@pytest.mark.parametrize(("pool", "spelt"), [("color", "RED"), ("country", "red")])
def test_a_pool_is_always_respelt_the_same_way(pool: str, spelt: str) -> None:
    assert respell(pool, "Red") == spelt

"""Configs from files, from the command line, and in run folders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hsql_jax.config import (
    claim_run_folder,
    fingerprint,
    from_json,
    load_config,
    option,
    override,
    to_json,
)
from hsql_jax.errors import UserError


@dataclass(frozen=True)
class Optim:
    rate: float = 1e-3
    steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}: give at least 1")


@dataclass(frozen=True)
class Toy:
    optim: Optim = Optim()
    temperatures: tuple[float, ...] = (1.0, 0.5)
    databases: Path | None = None
    run_dir: Path = option(Path("runs/toy"))
    resume: bool = option(False)


CONFIG_FILE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Own:
    width: int = 8

def small() -> Own:
    return Own()

def large() -> Own:
    return Own(width=64)

def number() -> int:
    return 3

def _private() -> Own:
    return Own(1)
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CONFIG_FILE)
    return path


def test_a_function_of_a_users_file_gives_the_config(config_file: Path) -> None:
    assert load_config(f"{config_file}:large").width == 64


def test_a_relative_file_is_looked_for_in_the_working_directory_first(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_file.parent)
    assert load_config("own.py:small").width == 8


def test_the_projects_configs_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/demo.py:demo").run_dir == Path("runs/demo")
    own = load_config("configs/demo.py:own_databases")
    assert (own.run_dir, own.tasks.tasks_per_database) == (Path("runs/own"), 60)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own.py:medium", r"no function 'medium'; it has: large, number, small$"),
        ("own.py:_private", r"no function '_private'"),
        ("own.py:number", r"own.py:number: returned a int, not a dataclass"),
        ("absent.py:small", r"config file absent.py not found in .*; check the path"),
        ("own.py", r"'own.py': give FILE.py:FUNCTION"),
        ("broken.py:small", r"broken.py, line 2: invalid syntax"),
        ("refuses.py:bad", r"refuses.py:bad, line 2: width is 0"),
        ("notes.txt:small", r"notes.txt is not a Python file"),
    ],
)
def test_a_config_that_cannot_be_loaded_says_why(
    spec: str, message: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_file.parent)
    Path("broken.py").write_text("x = 1\ny == = 2\n")
    Path("refuses.py").write_text("def bad():\n    raise ValueError('width is 0')\n")
    Path("notes.txt").write_text("")
    with pytest.raises(UserError, match=message):
        load_config(spec)


def test_command_line_options_replace_fields_with_their_types() -> None:
    arguments = "--optim.rate 0.5 --temperatures 0.7 --databases data/dbs --resume".split()
    expected = Toy(
        optim=Optim(rate=0.5), temperatures=(0.7,), databases=Path("data/dbs"), resume=True
    )
    assert override(Toy(), arguments, "toy") == expected


def test_fields_without_an_option_keep_the_configs_values() -> None:
    config = Toy(optim=Optim(steps=7), databases=Path("dbs"))
    assert override(config, [], "toy") == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optim.stepz 3", r"^toy: no option --optim\.stepz; the nearest is --optim\.steps "),
        ("--optim.rate 1 --run_di=x", r"no option --run_di; the nearest is --run-dir "),
        ("--seed 1", r"no option --seed; the nearest is --resume "),
        ("--resume True", r"'True' belongs to no option; a switch takes no value"),
    ],
)
def test_an_unknown_option_names_the_nearest(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(Toy(), arguments.split(), "toy")


def test_a_value_of_a_wrong_type_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        override(Toy(), ["--optim.steps", "many"], "toy")
    assert ending.value.code == 2
    assert "Error parsing --optim.steps: invalid literal for int()" in capsys.readouterr().err


def test_a_value_that_the_dataclass_refuses_ends_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ending:
        override(Toy(), ["--optim.steps", "0"], "toy")
    assert ending.value.code == 2
    assert "steps = 0: give at least 1" in capsys.readouterr().err


def test_json_round_trip_keeps_every_type() -> None:
    config = Toy(optim=Optim(rate=3e-4), temperatures=(0.1, 0.25), databases=Path("dbs"))
    assert from_json(Toy, to_json(config)) == config
    demo = load_config("configs/demo.py:demo")
    assert from_json(type(demo), to_json(demo)) == demo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"optim": {"steps": 3, "rat": 1}}', r"no field optim\.rat; the nearest is optim\.rate"),
        ('{"database": "x"}', r"no field database; the nearest is databases"),
        ('{"optim": {"steps": "x"}}', r"field optim\.steps: Input should be a valid integer"),
        ('{"optim": ', r"not JSON: Expecting value: line 1"),
    ],
)
def test_json_that_is_not_the_config_names_the_field(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(Toy, text)


def test_the_fingerprint_follows_what_is_computed_and_not_how_the_run_is_started() -> None:
    base = fingerprint(Toy())
    assert len(base) == 64
    assert fingerprint(replace(Toy(), run_dir=Path("elsewhere"), resume=True)) == base
    assert fingerprint(replace(Toy(), optim=Optim(steps=11))) != base
    assert fingerprint(from_json(Toy, to_json(Toy()))) == base


def test_a_new_run_folder_holds_the_resolved_config(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    claim_run_folder(folder, Toy(), resume=False)
    assert from_json(Toy, (folder / "config.json").read_text()) == Toy()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_run_folder_is_continued_only_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    claim_run_folder(folder, Toy(), resume=False)
    with pytest.raises(UserError, match=r"already holds this run: add --resume"):
        claim_run_folder(folder, Toy(), resume=False)
    claim_run_folder(folder, replace(Toy(), resume=True), resume=True)


def test_a_run_folder_of_another_config_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    claim_run_folder(folder, Toy(), resume=False)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"of another config \(optim\.steps 10 -> 11\): choose"):
        claim_run_folder(folder, Toy(optim=Optim(steps=11)), resume=True)
    assert (folder / "config.json").read_bytes() == before


def test_a_folder_of_something_else_or_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty and holds no config\.json"):
        claim_run_folder(tmp_path, Toy(), resume=False)
    with pytest.raises(UserError, match=r"thesis\.txt is a file"):
        claim_run_folder(tmp_path / "thesis.txt", Toy(), resume=False)

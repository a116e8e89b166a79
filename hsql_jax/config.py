"""Configs: frozen dataclasses from plain functions, overridden on the command line, kept in runs.

A config function lives in a Python file (`configs/demo.py:demo`), takes no arguments and returns a
frozen dataclass. A run folder keeps the resolved config, and a later run that would mix its results
with those of another config is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from hsql_jax.errors import UserError
from hsql_jax.plugins import import_file

C = TypeVar("C")

CONFIG_FILE = "config.json"
_PROJECT = Path(__file__).parent.parent


def option(default: Any) -> Any:
    """A field of how a run is started (its folder, resuming it), not of what the run computes.

    Options are kept out of `fingerprint`: a run that is resumed stays the same run.
    """
    return dataclasses.field(default=default, metadata={"option": True})


# --- from a file ----------------------------------------------------------------------------------


def load_config(spec: str) -> Any:
    """The config that `FILE.py:FUNCTION` returns.

    FILE is looked for in the working directory, then beside the package, so that
    `configs/demo.py:demo` works from any folder. Raises `UserError` for a spec of another form, a
    file that is missing or does not parse, an unknown function (naming those there are), and a
    function that returns no dataclass.
    """
    file, colon, name = spec.rpartition(":")
    if not (file and colon and name):
        raise UserError(f"config {spec!r}: give FILE.py:FUNCTION, such as configs/demo.py:demo")
    path = _find(file)
    functions = _config_functions(import_file(path))
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise UserError(f"config {path}: no function {name!r}; it has: {known}")
    try:
        config = functions[name]()
    except (TypeError, ValueError) as error:  # a dataclass refuses a field or its value
        raise UserError(f"config {spec}, line {_line(path, error)}: {error}") from error
    if not dataclasses.is_dataclass(config):
        raise UserError(f"config {spec}: returned a {type(config).__name__}, not a dataclass")
    return config


def _find(file: str) -> Path:
    places = dict.fromkeys((Path.cwd(), _PROJECT))
    for place in places:
        if (place / file).is_file():
            return place / file
    looked = " or ".join(map(str, places))
    raise UserError(f"config file {file} not found in {looked}; check the path")


def _line(path: Path, error: Exception) -> int:
    """The line of the file that was running when the error came, 1 if none was."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 1 for f in reversed(frames) if f.filename == str(path)), 1)


def _config_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """The public functions that the file itself defines, by name."""
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


# --- from the command line ------------------------------------------------------------------------


def override(config: C, arguments: Sequence[str], prog: str, description: str = "") -> C:
    """`config` with the fields that `arguments` names replaced (`--rl.steps 20`).

    `--help` prints every field with its present value and leaves with status 0; a value of a wrong
    type leaves with status 2. Raises `UserError` for an unknown option, naming the nearest.
    """
    import tyro

    result, unknown = tyro.cli(
        type(config),
        default=config,
        args=list(arguments),
        prog=prog,
        description=description,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if unknown:
        given = unknown[0].partition("=")[0]
        if not given.startswith("-"):
            raise UserError(f"{prog}: {given!r} belongs to no option; a switch takes no value")
        near = _nearest(given.replace("_", "-"), _options(config))
        raise UserError(f"{prog}: no option {given}; the nearest is {near} (see --help)")
    return result


def _options(config: Any, prefix: str = "--") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{name}.")
        else:
            yield name


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


# --- to and from JSON -----------------------------------------------------------------------------


def to_json(config: Any) -> str:
    """The config as indented JSON that `from_json` reads back; paths become strings."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=os.fspath) + "\n"


def from_json(kind: type[C], text: str) -> C:
    """The inverse of `to_json`. Raises `UserError` naming the unknown, missing or wrong field."""
    from pydantic import TypeAdapter, ValidationError

    try:
        values = json.loads(text)
        _refuse_unknown(kind, values)
        return TypeAdapter(kind).validate_python(values)
    except json.JSONDecodeError as error:
        raise UserError(f"config is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"config field {where}: {first['msg']}") from error


def _refuse_unknown(kind: Any, values: Any, prefix: str = "") -> None:
    if not (dataclasses.is_dataclass(kind) and isinstance(values, Mapping)):
        return
    known = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            near = _nearest(key, known)
            raise UserError(f"config has no field {prefix}{key}; the nearest is {prefix}{near}")
        _refuse_unknown(known[key], value, f"{prefix}{key}.")


def fingerprint(config: Any) -> str:
    """SHA-256, in hex, of what the config computes: all but the fields made by `option`."""
    text = json.dumps(_identity(config), sort_keys=True, default=os.fspath)
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(config: Any) -> dict[str, Any]:
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not field.metadata.get("option", False)
    }
    return {
        name: _identity(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


# --- run folders ----------------------------------------------------------------------------------


def claim_run_folder(folder: Path, config: Any, resume: bool) -> None:
    """Make `folder` the run folder of `config`, or find it to be that already.

    A new or empty folder gets `config.json`. Raises `UserError` when the folder holds the run of
    another config (naming the first fields that differ), the same run without `resume`, or files
    of something else.
    """
    file = folder / CONFIG_FILE
    if file.is_file():
        _check_same_run(folder, config, _stored(type(config), file))
        if not resume:
            raise UserError(
                f"{folder} already holds this run: add --resume to continue it, "
                "or choose another folder with --run-dir"
            )
        return
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder with --run-dir")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no {CONFIG_FILE}; choose another with --run-dir"
        )
    partial = folder / f"{CONFIG_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(to_json(config))
        partial.replace(file)  # whole or absent, whenever the run is cut
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another with --run-dir") from error


def _stored(kind: type[C], file: Path) -> C:
    try:
        return from_json(kind, file.read_text())
    except UserError as error:
        raise UserError(f"{file}: {error}; choose another folder with --run-dir") from error


def _check_same_run(folder: Path, config: Any, stored: Any) -> None:
    if fingerprint(config) == fingerprint(stored):
        return
    new, old = _flat(_identity(config)), _flat(_identity(stored))
    changes = [f"{k} {old.get(k)} -> {new.get(k)}" for k in new if new[k] != old.get(k)]
    changes += [f"{k} {old[k]} -> absent" for k in old if k not in new]
    shown = "; ".join(changes[:4]) + ("; ..." if len(changes) > 4 else "")
    raise UserError(
        f"{folder} holds a run of another config ({shown}): "
        "choose another folder with --run-dir, or run with the config it has"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat

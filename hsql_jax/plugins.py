"""Python files and modules that a user names: configs, objectives, optimizers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hsql_jax.errors import UserError


def import_file(path: Path) -> ModuleType:
    """The module of a Python file. Raises `UserError` for one that is none or does not parse."""
    name = f"hsql_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their types up here
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
    return module


def load_attribute(name: str, known: list[str]) -> Any:
    """The attribute that `FILE.py:NAME` or `MODULE:NAME` names; `known` are the names without one.

    Raises `UserError` that says what could not be found.
    """
    source, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(f"{name!r} is none of {', '.join(known)}, nor FILE.py:NAME or MODULE:NAME")
    try:
        is_file = source.endswith(".py")
        module = import_file(Path(source)) if is_file else importlib.import_module(source)
    except (ImportError, FileNotFoundError) as error:
        raise UserError(f"{name}: cannot load {source!r}: {error}") from None
    if not hasattr(module, attribute):
        raise UserError(f"{name}: {source} has no {attribute!r}")
    return getattr(module, attribute)

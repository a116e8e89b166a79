"""The text half imports where no tensor library is installed."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

ABSENT = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "transformers", "torch",
          "tensorstore", "safetensors", "hsql_jax", "matplotlib", "pandas"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import numpy
    raise SystemExit("the hook does not work")
except ModuleNotFoundError:
    pass

import hsql_env

names = [module.name for module in pkgutil.walk_packages(hsql_env.__path__, "hsql_env.")]
for name in names:
    importlib.import_module(name)
print(*sorted(names))
"""


def test_every_module_imports_without_tensor_libraries() -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert said.returncode == 0, said.stderr
    assert {"hsql_env.driver", "hsql_env.harness.episode", "hsql_env.sandbox.pool"} <= set(
        said.stdout.split()
    )

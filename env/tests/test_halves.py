"""The text half stands alone: none of its modules loads a tensor library."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
import hsql_env

names = [m.name for m in pkgutil.walk_packages(hsql_env.__path__, "hsql_env.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names), sorted({"flax", "hsql_jax", "jax", "numpy", "transformers"} & set(sys.modules)))
"""


def test_no_module_of_the_text_half_loads_a_tensor_library() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True
    )
    count, loaded = result.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert int(count) > 10

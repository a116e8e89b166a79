"""Saves where there is no room and where nothing may be written; prints what came of each.

Run as `checkpoint_process.py FOLDER`, in a mount namespace where FOLDER is a small tmpfs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
from micro import MODEL

from hsql_jax.checkpoint import Checkpoints
from hsql_jax.errors import UserError
from hsql_jax.model import init_params
from hsql_jax.optim import OptimConfig, make_optimizer
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.train import TrainState, create_state

ROOM = 64 << 10  # bytes: the save begins, and ends in the middle
MESH, TX = make_mesh(MeshConfig()), make_optimizer(OptimConfig(), 1)


def state(step: int) -> TrainState:
    params = init_params(MODEL, jax.random.key(step))
    made = create_state(params, MODEL, TX, MESH)
    return made.replace(step=made.step + step)  # type: ignore[attr-defined]


def save(folder: Path, step: int) -> None:
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(state(step), {"at": step})
    except UserError as error:
        print(error)
    else:
        print(f"saved {step}")


def main(mount: Path) -> None:
    folder, ballast = mount / "sft", mount / "ballast"
    save(folder, 1)
    ballast.write_bytes(bytes(shutil.disk_usage(mount).free - ROOM))
    save(folder, 2)
    print(sorted(path.name for path in folder.iterdir()))
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    save(folder, 3)
    with Checkpoints(folder) as checkpoints:
        restored, extra = checkpoints.restore(MODEL, TX, MESH)
    print(int(restored.step), extra)
    subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
    save(folder, 4)
    print(sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One process of two: loads a folder over their mesh, checks its shards, writes the model again.

    weights_process.py RANK PORT SOURCE TARGET

Writes RANK.json beside TARGET: the bytes that it read from files and those that its devices hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

import hsql_jax.weights.load as load
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.weights import load_hf, save_hf


def main(rank: int, port: int, source: Path, target: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    _, whole = load_hf(source)
    read, sizes = load._read, []

    def counted(*arguments: object) -> np.ndarray:
        part = read(*arguments)
        sizes.append(part.nbytes)
        return part

    load._read = counted
    config, params = load_hf(source, mesh=make_mesh(MeshConfig(fsdp=4)))
    held = 0
    for leaf, expected in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        distinct = {str(shard.index): shard for shard in leaf.addressable_shards}
        for shard in distinct.values():
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()
        held += sum(shard.data.nbytes for shard in distinct.values())
    save_hf(target, config, params)
    counts = {"read": sum(sizes), "held": held}
    target.with_name(f"{rank}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))

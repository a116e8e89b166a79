"""Meshes of common machines. TPU names are Google's: v5p counts two cores a chip, the others chips.

Rows are split over `slices x data x fsdp`: as many sequences are in a micro-batch at least.
"""

from __future__ import annotations

from hsql_jax.sharding import MeshConfig, Meshes


def one_gpu() -> Meshes:
    """One device for everything."""
    return Meshes()


def gpus_8() -> Meshes:
    """One node of eight 80 GB GPUs, generation on the same ones."""
    return Meshes(MeshConfig(fsdp=8), MeshConfig(tensor=8))


def gpus_4_4() -> Meshes:
    """One node of eight GPUs: four train while four generate."""
    return Meshes(MeshConfig(fsdp=4), MeshConfig(tensor=4), disjoint=True)


def gpus_4x8() -> Meshes:
    """Four nodes of eight GPUs: sharded inside a node, replicated across them."""
    return Meshes(MeshConfig(fsdp=8, slices=4), MeshConfig(tensor=8))


def v5e_16() -> Meshes:
    """v5e:4x4, 16 chips."""
    return Meshes(MeshConfig(fsdp=16), MeshConfig(tensor=8))


def v5p_16() -> Meshes:
    """v5p:2x2x2, 8 chips."""
    return Meshes(MeshConfig(fsdp=8), MeshConfig(tensor=8))


def v5p_64() -> Meshes:
    """v5p:2x4x4, 32 chips; two neighbours share a sequence."""
    return Meshes(MeshConfig(fsdp=16, context=2), MeshConfig(tensor=8))


def v6e_16() -> Meshes:
    """v6e:4x4, 16 chips."""
    return Meshes(MeshConfig(fsdp=16), MeshConfig(tensor=8))


def v6e_64() -> Meshes:
    """v6e:8x8, 64 chips; four neighbours share a sequence."""
    return Meshes(MeshConfig(fsdp=16, context=4), MeshConfig(tensor=8))


def cpu_8() -> Meshes:
    """Eight virtual devices: every kind of split, for tests."""
    return Meshes(MeshConfig(fsdp=2, tensor=2, data=2), MeshConfig(tensor=2))

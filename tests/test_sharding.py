"""Meshes: what is refused before anything is compiled, and which sizes the one line names."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from configs import meshes, models
from hsql_jax.errors import UserError
from hsql_jax.sharding import (
    MeshConfig,
    Meshes,
    check_devices,
    check_sizes,
    make_meshes,
    model_sizes,
)

QWEN3_14B = models.qwen3_14b()


@pytest.mark.parametrize(
    ("mesh", "changes", "line"),
    [
        (
            MeshConfig(tensor=3),
            {},
            "kv_heads = 8 does not divide over tensor = 3; tensor may be 1, 2, 4, 8",
        ),
        (
            MeshConfig(tensor=16),
            {},
            "kv_heads = 8 does not divide over tensor = 16; tensor may be 1, 2, 4, 8",
        ),
        (
            MeshConfig(tensor=4),
            {"heads": 6, "kv_heads": 4},
            "heads = 6 does not divide over tensor = 4; tensor may be 1, 2",
        ),
        (
            MeshConfig(tensor=8),
            {"vocab": 151_939},
            "vocab = 151939 does not divide over tensor = 8; tensor may be 1",
        ),
        (
            MeshConfig(fsdp=3, context=2),
            {"batch": 3},
            "embed = 5120 does not divide over fsdp x context = 6; fsdp x context may be "
            "1, 2, 4, 5, 8, 10, 16, 20, 32, ...",
        ),
        (
            MeshConfig(data=2, fsdp=8, slices=2),
            {},
            "batch = 16 does not divide over slice x data x fsdp = 32; slice x data x fsdp may be "
            "1, 2, 4, 8, 16",
        ),
        (
            MeshConfig(context=4),
            {"time": 1022},
            "time = 1022 does not divide over context = 4; context may be 1, 2, 7, 14, 73, 146, "
            "511, 1022",
        ),
    ],
)
def test_sizes_that_do_not_divide_name_those_that_would(
    mesh: MeshConfig, changes: dict[str, int], line: str
) -> None:
    sizes = model_sizes(QWEN3_14B) | {"batch": 16, "time": 32_768} | changes
    with pytest.raises(UserError) as refused:
        check_sizes(mesh, sizes)
    assert str(refused.value) == line


def test_sizes_that_divide_pass() -> None:
    sizes = model_sizes(QWEN3_14B) | {"batch": 16, "time": 32_768}
    check_sizes(MeshConfig(fsdp=4, tensor=8, context=2, data=2, slices=2), sizes)


@pytest.mark.parametrize(
    ("mesh", "advice"),
    [
        (
            MeshConfig(fsdp=2, tensor=2),
            "data = 2 or fsdp = 4 or tensor = 4 or context = 2 or slice",
        ),
        (MeshConfig(fsdp=16), "fsdp = 8 would"),
        (MeshConfig(fsdp=3, tensor=5), "give sizes whose product is 8"),
    ],
)
def test_a_wrong_product_names_the_axes_that_would_fit(mesh: MeshConfig, advice: str) -> None:
    check_devices(MeshConfig(fsdp=4, tensor=2), 8)
    with pytest.raises(UserError, match=f"is {mesh.devices} devices where there are 8; {advice}"):
        check_devices(mesh, 8)


def test_axes_below_one_and_unsupported_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh fsdp = 0: give at least 1"):
        MeshConfig(fsdp=0)
    with pytest.raises(ValueError, match=r"rollout mesh fsdp = 2: .* tensor alone; fsdp may be 1"):
        Meshes(rollout=MeshConfig(fsdp=2))


def test_training_and_generation_share_devices_or_do_not() -> None:
    apart, together = meshes.gpus_4_4(), dataclasses.replace(meshes.gpus_4_4(), disjoint=False)
    assert (apart.devices, together.devices) == (8, 4)
    train, rollout = make_meshes(apart)
    assert [*train.devices.flat, *rollout.devices.flat] == jax.devices()
    assert train.shape["fsdp"] == rollout.shape["tensor"] == 4
    train, rollout = make_meshes(together)
    assert set(train.devices.flat) == set(rollout.devices.flat)
    with pytest.raises(ValueError, match=r"tensor=4 .* needs 4 devices, 3 found"):
        make_meshes(apart, jax.devices()[:7])


@pytest.mark.parametrize(
    ("name", "devices"),
    {
        "one_gpu": 1,
        "gpus_8": 8,
        "gpus_4_4": 8,
        "gpus_4x8": 32,
        "v5e_16": 16,
        "v5p_16": 8,
        "v5p_64": 32,
        "v6e_16": 16,
        "v6e_64": 64,
        "cpu_8": 8,
    }.items(),
)
def test_every_mesh_of_the_configs_takes_every_model(name: str, devices: int) -> None:
    mesh: Meshes = getattr(meshes, name)()
    assert mesh.devices == devices
    batch = {"batch": 32, "time": 32_768}
    for model in ("600m", "1700m", "4b", "8b", "14b", "32b"):
        sizes = model_sizes(getattr(models, f"qwen3_{model}")())
        check_sizes(mesh.train, sizes | batch)
        check_sizes(mesh.rollout, sizes)

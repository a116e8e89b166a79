"""Hugging Face models: every bit comes and goes, onto any mesh; what a wrong folder is told."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hsql_jax.errors import UserError
from hsql_jax.model import ModelConfig, param_shardings, param_specs
from hsql_jax.model.qwen3 import is_spec
from hsql_jax.sharding import MeshConfig, make_mesh
from hsql_jax.weights import INDEX, TENSORS, load, load_hf, save, save_hf, shards
from hsql_jax.weights.converted import convert, load_converted

GOLDEN = Path(__file__).parent / "fixtures" / "golden"


def same_bits(a: Any, b: Any) -> None:
    def leaf(x: Any, y: Any) -> None:
        found, expected = np.asarray(x), np.asarray(y)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()

    jax.tree.map(leaf, a, b)


@pytest.mark.parametrize("case", ["grouped", "untied"])
def test_shapes_are_those_of_the_specs_and_matrices_are_turned(case: str) -> None:
    config, params = load_hf(GOLDEN / case)
    stored = load_file(GOLDEN / case / TENSORS)
    specs = jax.tree.map(lambda spec: spec.shape, param_specs(config), is_leaf=is_spec)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == specs
    assert config.tied == ("head" not in params)
    down = stored["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(params["layers"]["down"][1], down.T)
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    if not config.tied:
        np.testing.assert_array_equal(params["head"], stored["lm_head.weight"].T)


@pytest.mark.parametrize("case", ["grouped", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_keeps_every_bit(case: str, dtype: str, tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / case, dtype)
    assert config.dtype == config.param_dtype == dtype
    save_hf(tmp_path, config, jax.tree.map(jax.numpy.asarray, params))
    config_again, again = load_hf(tmp_path)
    assert config_again == config
    same_bits(again, params)
    if dtype == "float32":
        same_bits(load_file(tmp_path / TENSORS), load_file(GOLDEN / case / TENSORS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", TENSORS]


def test_bfloat16_is_rounded_from_float32_and_widened_back(tmp_path: Path) -> None:
    _, wide = load_hf(GOLDEN / "grouped")
    config, narrow = load_hf(GOLDEN / "grouped", "bfloat16")
    save_hf(tmp_path, config, narrow)
    _, widened = load_hf(tmp_path, "float32")
    rounded = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), wide)
    same_bits(widened, rounded)


def sharded(folder: Path, count: int = 3) -> Path:
    """The untied model as `count` files and an index."""
    shutil.copy(GOLDEN / "untied" / "config.json", folder)
    tensors = load_file(GOLDEN / "untied" / TENSORS)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {key: files[i % count] for i, key in enumerate(sorted(tensors))}
    for file in files:
        part = {key: tensors[key] for key, place in weight_map.items() if place == file}
        save_file(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_sharded_set_equals_the_single_file(tmp_path: Path) -> None:
    config, params = load_hf(sharded(tmp_path))
    whole_config, whole = load_hf(GOLDEN / "untied")
    assert config == whole_config
    same_bits(params, whole)


def test_tied_file_may_repeat_the_embedding(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "grouped" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "grouped" / TENSORS)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / TENSORS
    )
    same_bits(load_hf(tmp_path)[1], load_hf(GOLDEN / "grouped")[1])


def edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return edit


def edit_config(**change: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | change
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


K_NORM = "model.layers.1.self_attn.k_norm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_tensors(lambda t: t.pop(K_NORM)), f"no tensor {K_NORM}; expected are model.embed_"),
        (edit_tensors(lambda t: t.update({BIAS: np.zeros(24)})), f"unexpected tensor {BIAS}"),
        (edit_tensors(lambda t: t.pop("model.embed_tokens.weight")), "no tensor model.embed_tok"),
        (edit_config(intermediate_size=48), r"mlp\.\w+\.weight has shape .*40.* makes it .*48"),
        (edit_config(num_hidden_layers=3), "no tensor model.layers.2.input_layernorm.weight"),
        (edit_config(num_hidden_layers=1), "unexpected tensor model.layers.1.input_layernorm"),
        (edit_config(tie_word_embeddings=True, model_type="llama"), "config.json: model_type is"),
        (edit_config(vocab_size=None), "config.json: no key 'vocab_size'"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / TENSORS).unlink(), f"no {TENSORS}, no {INDEX} and no model-"),
        (lambda f: (f / TENSORS).write_bytes(b"\0" * 20), f"{TENSORS}: cannot be read"),
    ],
)
def test_wrong_folder_gets_one_clear_line(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "untied", tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hf(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors: cannot be read"):
        load_hf(tmp_path)


# --- onto a mesh ----------------------------------------------------------------------------------

MESHES = [
    MeshConfig(fsdp=4),
    MeshConfig(fsdp=4, tensor=2),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=8),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix is filled in many chunks, which do not all divide it."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 300)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every part that is read from now on."""
    sizes: list[int] = []
    read = load._read

    def counted(*arguments: Any) -> np.ndarray:
        part = read(*arguments)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(load, "_read", counted)
    return sizes


def random_bits(folder: Path) -> Path:
    """The untied model in bfloat16 with any bits at all, of numbers and of NaNs."""
    config, params = load_hf(GOLDEN / "untied", "bfloat16")
    rng = np.random.default_rng(0)

    def fill(leaf: np.ndarray) -> np.ndarray:
        return rng.integers(0, 1 << 16, leaf.shape, np.uint16).view(leaf.dtype)

    save_hf(folder, config, jax.tree.map(fill, params))
    return folder


@pytest.mark.parametrize("mesh_config", MESHES, ids=str)
def test_shards_equal_the_slices_of_the_whole(
    mesh_config: MeshConfig, small_chunks: None, tmp_path: Path
) -> None:
    mesh = make_mesh(mesh_config)
    source = random_bits(tmp_path)
    config, whole = load_hf(source)
    loaded_config, params = load_hf(source, mesh=mesh)
    assert loaded_config == config
    same_bits(params, whole)
    shardings = param_shardings(mesh, config)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_are_cast_as_the_whole_is(dtype: str, small_chunks: None) -> None:
    for case in ("grouped", "untied"):
        _, params = load_hf(GOLDEN / case, dtype, make_mesh(MeshConfig(fsdp=2, tensor=4)))
        same_bits(params, load_hf(GOLDEN / case, dtype)[1])


def test_what_devices_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_reads(monkeypatch)
    _, whole = load_hf(GOLDEN / "untied")
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    assert sum(sizes) == total
    for mesh_config in (MeshConfig(data=8), MeshConfig(data=2, fsdp=4)):
        sizes.clear()
        _, params = load_hf(GOLDEN / "untied", mesh=make_mesh(mesh_config))
        distinct = {
            (number, str(shard.index)): shard.data.nbytes
            for number, leaf in enumerate(jax.tree.leaves(params))
            for shard in leaf.addressable_shards
        }
        assert sum(sizes) == sum(distinct.values()) == total


def test_chunks_cover_a_shard_and_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2 << 20)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = (5, 1000, 1300)  # 2.6 MB a layer
    target = shards.Target(shape, jnp.dtype("bfloat16"), sharding, (0, 2), lambda _: np.empty(0))
    assert target.chunk == (1, 1000, 650)
    assert list(target.starts()) == [(layer, 0, at) for layer in range(5) for at in (0, 650)]
    odd = shards.Target((1001, 3000), jnp.dtype("float32"), sharding, (0,), lambda _: np.empty(0))
    assert odd.chunk == (166, 3000)
    assert [at for at, _ in odd.starts()] == [0, 166, 332, 498, 664, 830, 835]


def test_loading_holds_no_more_than_its_constant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of what numpy allocates: JAX's arrays are not in it. The model is 12 times the bound."""
    config = ModelConfig(
        vocab_size=8192, d_model=512, layers=2, heads=4, kv_heads=2, head_dim=64, d_ff=2048
    )
    key = jax.random.key(0)
    specs = param_specs(config)
    save_hf(
        tmp_path,
        config,
        jax.tree.map(lambda spec: jax.random.normal(key, spec.shape), specs, is_leaf=is_spec),
    )
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64 << 10)
    mesh = make_mesh(MeshConfig(fsdp=8))
    load_hf(tmp_path, mesh=mesh)  # compiles
    tracemalloc.start()
    try:
        load_hf(tmp_path, mesh=mesh)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    bound = 8 * (shards.READS_AHEAD + 2) * shards.CHUNK_BYTES
    assert (tmp_path / TENSORS).stat().st_size > 12 * bound
    assert peak < bound + (1 << 20)


def test_mesh_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"untied: .*embed = 28 does not divide over 8 devices"):
        load_hf(GOLDEN / "untied", mesh=make_mesh(MeshConfig(fsdp=8)))


def test_two_processes_read_their_own_slices_and_the_first_one_writes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source = random_bits(tmp_path / "source")
    script = Path(__file__).with_name("weights_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port), source, tmp_path / "target"],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    outputs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    _, whole = load_hf(source)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    norms = 2 * whole["layers"]["q_norm"].nbytes  # q_norm and k_norm are whole in both
    assert [output["read"] for output in outputs] == [output["held"] for output in outputs]
    assert sum(output["read"] for output in outputs) == total + norms
    same_bits(load_hf(tmp_path / "target")[1], whole)


# --- kinds of folders -----------------------------------------------------------------------------


def test_shards_need_no_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    same_bits(load_hf(tmp_path)[1], load_hf(GOLDEN / "untied")[1])


def test_a_tensor_that_two_files_have_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    first = tmp_path / "model-00001-of-00003.safetensors"
    shutil.copy(first, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"is in model-00001-of-00002.* and in model-00001-of-0000"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [("float64", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16",) * 2],
)
def test_any_stored_dtype_is_read(stored: str, expected: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "grouped" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "grouped" / TENSORS)
    cast = {name: tensor.astype(jnp.dtype(stored)) for name, tensor in tensors.items()}
    save_file(cast, tmp_path / TENSORS)
    for mesh in (None, make_mesh(MeshConfig(fsdp=2))):
        config, params = load_hf(tmp_path, mesh=mesh)
        assert config.dtype == config.param_dtype == expected
        embed = cast["model.embed_tokens.weight"].astype(jnp.dtype(expected))
        same_bits(params["embed"], embed)


def test_a_dtype_that_we_do_not_read_is_named(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "grouped" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "grouped" / TENSORS)
    save_file({name: t.astype(np.int8) for name, t in tensors.items()}, tmp_path / TENSORS)
    with pytest.raises(UserError, match="is stored as I8; known are F64, F32, BF16, F16"):
        load_hf(tmp_path)


# --- writing --------------------------------------------------------------------------------------


def test_large_models_become_several_files_and_an_index(tmp_path: Path) -> None:
    source = random_bits(tmp_path / "source")
    config, params = load_hf(source, mesh=make_mesh(MeshConfig(fsdp=4, tensor=2)))
    save_hf(tmp_path / "target", config, params, file_bytes=9000)
    index = json.loads((tmp_path / "target" / INDEX).read_text())
    stored = load_file(source / TENSORS)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(4)]
    names = sorted(path.name for path in (tmp_path / "target").iterdir())
    assert names == sorted([*files, INDEX, "config.json"])
    read: dict[str, np.ndarray] = {}
    for file in files:
        content = load_file(tmp_path / "target" / file)
        assert sum(tensor.nbytes for tensor in content.values()) <= 9000
        assert all(index["weight_map"][name] == file for name in content)
        read |= content
    same_bits(read, stored)
    same_bits(load_hf(tmp_path / "target")[1], load_hf(source)[1])


def test_a_write_that_fails_leaves_the_old_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, params = load_hf(GOLDEN / "untied")
    save_hf(tmp_path, config, params)
    write, calls = save.write_tensors, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no space left on device")
        write(*arguments)

    monkeypatch.setattr(save, "write_tensors", failing)
    other = jax.tree.map(np.zeros_like, params)
    for folder in (tmp_path, tmp_path / "new"):
        calls.clear()
        with pytest.raises(OSError, match="no space left"):
            save_hf(folder, config, other, file_bytes=20_000)
    same_bits(load_hf(tmp_path)[1], params)
    with pytest.raises(UserError, match=f"no {TENSORS}, no {INDEX}"):
        load_hf(tmp_path / "new")


def test_a_model_replaces_one_of_other_files(tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / "untied")
    save_hf(tmp_path, config, jax.tree.map(np.zeros_like, params), file_bytes=20_000)
    save_hf(tmp_path, config, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", TENSORS]
    same_bits(load_hf(tmp_path)[1], params)


def test_parameters_of_another_dtype_than_their_config_are_not_written(tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / "untied")
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), params)
    with pytest.raises(ValueError, match=r"float16.* under a config of float32"):
        save_hf(tmp_path, config, half)


# --- hub ids and conversion -----------------------------------------------------------------------


def test_hub_ids_are_found_in_the_cache_and_named_when_offline(tmp_path: Path) -> None:
    revision = "0" * 40
    model = tmp_path / "hub" / "models--Some--Model-0.1B"
    shutil.copytree(GOLDEN / "untied", model / "snapshots" / revision)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    program = (
        "from hsql_jax.weights import load_hf\n"
        "print(load_hf('Some/Model-0.1B')[0].heads)\n"
        "load_hf('Some/Other')"
    )
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout == "3\n"
    error = run.stderr.splitlines()[-1]
    assert error.startswith(
        f"hsql_jax.errors.UserError: Some/Other: no such folder, not in the cache {tmp_path}/hub,"
    )
    for file in ("config.json", TENSORS, INDEX, "tokenizer.json", "tokenizer_config.json"):
        assert file in error


@pytest.mark.parametrize("mesh_config", MESHES[1:], ids=str)
def test_converted_models_come_back_bit_by_bit_on_another_mesh(
    mesh_config: MeshConfig, tmp_path: Path
) -> None:
    source = random_bits(tmp_path / "source")
    config, whole = load_hf(source)
    assert convert(source, tmp_path / "target", make_mesh(MeshConfig(fsdp=2))) == config
    mesh = make_mesh(mesh_config)
    loaded_config, params = load_converted(tmp_path / "target", mesh)
    assert loaded_config == config
    same_bits(params, whole)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == param_shardings(mesh, config)


def test_conversion_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    one = make_mesh(MeshConfig())
    with pytest.raises(UserError, match=r"no model\.json; convert a model to this path first"):
        load_converted(tmp_path, one)
    assert convert(GOLDEN / "untied", tmp_path, one, "bfloat16").param_dtype == "bfloat16"
    with pytest.raises(UserError, match="holds a model already"):
        convert(GOLDEN / "untied", tmp_path, one)
    with pytest.raises(UserError, match="embed = 28 does not divide over 8"):
        load_converted(tmp_path, make_mesh(MeshConfig(fsdp=8)))

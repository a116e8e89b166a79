"""Fixtures of the tensor half's tests."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest
from samples import SYSTEM, TOOLS, conversation
from transformers import PreTrainedTokenizerFast

from hsql_jax.chat import load_tokenizer, template_fragments
from hsql_jax.tokenizer import frequent_fragments, tool_call_fragments, train_tokenizer

jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, for the tests of sharding
# Tests compile much and compute little; LLVM's optimizations would be most of their time.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of shared data: HSQL_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("HSQL_SHARED") or Path(__file__).parents[2] / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared data in {folder}; set HSQL_SHARED")
    return folder


@pytest.fixture(scope="session")
def qwen3(shared: Path) -> PreTrainedTokenizerFast:
    """The official Qwen3 tokenizer with its chat template."""
    folder = shared / "data" / "qwen3_tokenizer"
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    return tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a word-level tokenizer trained on 200 sample trajectories."""
    texts = [message.content for seed in range(200) for message in conversation(seed)[1:]]
    known = template_fragments(SYSTEM, TOOLS) + tool_call_fragments(TOOLS)
    fragments = known + frequent_fragments(texts, known, min_count=10, limit=200)
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(texts, fragments, folder, max_vocab=1000, min_count=3)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(tiny_folder)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where child processes of all tests, of all workers, keep what JAX compiled."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder

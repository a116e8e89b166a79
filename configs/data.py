"""What `hsql data inspect` shows: the teacher's trajectories that the demo trains on."""

from __future__ import annotations

from pathlib import Path

from hsql_jax.data.config import DataConfig
from hsql_jax.inspect_data import InspectConfig


def demo_corpus() -> InspectConfig:
    """The first batch of the corpus of `hsql demo`, in the rows of its SFT."""
    return InspectConfig(
        data=DataConfig(path=Path("runs/demo/data/corpus.jsonl"), row_tokens=256, rows=4),
        tokenizer=Path("runs/demo/tokenizer"),
    )

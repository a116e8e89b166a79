"""What data to train on and how, and the stream of batches that it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hsql_jax.chat import ChatRenderer
from hsql_jax.data.organise import ORGANISATIONS, Organisation, make_examples
from hsql_jax.data.packing import BatchStream, TooLong
from hsql_jax.data.records import Format, read_conversations


@dataclass(frozen=True)
class DataConfig:
    """Records and their way into batches."""

    path: Path  # a file of records, or a folder of such files
    format: Format = "auto"  # auto: each file's first record tells
    organisation: Organisation = "full"  # conversations, single turns, or question -> SQL
    row_tokens: int = 32_768  # tokens of a row
    rows: int = 16  # rows of a step, over all processes
    too_long: TooLong = "drop"  # longer examples; cut: at the end of a turn. Both are counted
    packed: bool = True  # several examples a row, each a segment
    buckets: tuple[int, ...] = ()  # shorter rows for what fits in them, a batch each
    seed: int = 0  # of the order
    workers: int = 2  # threads that tokenise, then assemble batches ahead; 0: none

    def __post_init__(self) -> None:
        if min(self.rows, self.row_tokens) < 1 or min(self.workers, self.seed) < 0:
            raise ValueError(
                f"data: rows = {self.rows}, row_tokens = {self.row_tokens}, workers = "
                f"{self.workers}, seed = {self.seed}: rows and their tokens are at least 1, "
                "workers and seed at least 0"
            )
        if not all(1 <= bucket < self.row_tokens for bucket in self.buckets):
            raise ValueError(
                f"data: buckets = {self.buckets}: each is at least 1 and below row_tokens, "
                f"{self.row_tokens}"
            )


def open_stream(
    config: DataConfig,
    renderer: ChatRenderer,
    epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> BatchStream:
    """Read, tokenise and pack the data of a config; every process reads all of it.

    Raises `UserError` for a record that cannot be read, and where no example fits.
    """
    conversations = read_conversations(config.path, config.format)
    organise = ORGANISATIONS[config.organisation]
    return BatchStream(
        make_examples(conversations, renderer, organise, config.workers),
        config.row_tokens,
        config.rows,
        config.seed,
        epochs=epochs,
        packed=config.packed,
        too_long=config.too_long,
        buckets=config.buckets,
        workers=config.workers,
        process_index=process_index,
        process_count=process_count,
    )

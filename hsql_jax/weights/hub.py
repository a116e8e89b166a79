"""Where a model is: a folder, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from hsql_jax.errors import UserError
from hsql_jax.weights.files import INDEX, SHARDS, TENSORS

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILES = ["config.json", TENSORS, INDEX, SHARDS, "tokenizer*", "vocab.json", "merges.txt"]


def model_folder(source: str | Path) -> Path:
    """The folder `source`, or the snapshot of the hub id `source` in the local cache.

    What the cache lacks is downloaded, unless `HF_HUB_OFFLINE` is set; `HF_HOME` moves the cache.
    `UserError` says which files to bring where the hub cannot be reached or does not know the id.
    """
    folder = Path(source)
    if folder.is_dir() or not HUB_ID.fullmatch(str(source)):
        return folder
    try:
        return Path(snapshot_download(str(source), allow_patterns=FILES))
    except OSError as error:  # no network, no such id, not allowed: all are kinds of it
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{source}: no such folder, not in the cache {constants.HF_HUB_CACHE}, and not to be "
            f"had from the hub ({reason}); bring a folder of config.json, {TENSORS} (or {SHARDS} "
            f"and {INDEX}), tokenizer.json and tokenizer_config.json, and give its path"
        ) from None

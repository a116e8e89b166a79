"""Records to packed batches: conversations, the examples made of them, rows of one fixed shape."""

from hsql_jax.data.packing import (
    Batch,
    BatchStream,
    Counts,
    Example,
    assemble,
    first_fit,
    pack,
    select,
    trim,
)

__all__ = [
    "Batch",
    "BatchStream",
    "Counts",
    "Example",
    "assemble",
    "first_fit",
    "pack",
    "select",
    "trim",
]

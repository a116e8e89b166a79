"""Token sequences to packed batches of one fixed shape, for supervised and reinforcement learning.

Letters: B rows, T tokens a row, N tokens of an example. A row holds whole examples, one segment
each; what is left over is segment 0. Padding is known by its segment, never by a token's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import grain
import numpy as np

from hsql_jax.errors import UserError

Array = Any  # numpy on the host, jax inside a step


@dataclass(frozen=True)
class Example:
    """One sequence: `ids` [N] and `mask` [N], true on the policy's tokens.

    Reinforcement learning adds the sequence's `advantage` and the sampler's `logprobs` [N] of
    `ids`, read only where `mask` is true.
    """

    ids: Sequence[int] | np.ndarray
    mask: Sequence[int] | np.ndarray
    logprobs: Sequence[float] | np.ndarray | None = None
    advantage: float = 0.0

    def __post_init__(self) -> None:
        other = len(self.ids) if self.logprobs is None else len(self.logprobs)
        if not len(self.ids) == len(self.mask) == other:
            raise ValueError(f"ids {len(self.ids)}, mask {len(self.mask)}, logprobs {other} differ")


@flax.struct.dataclass
class Batch:
    """A packed batch; every array is [B, T]. Per-token values belong to the *target* at t."""

    tokens: Array  # int32
    targets: Array  # int32, the next token of the same segment
    loss_mask: Array  # float32, 1 where the target is a policy token
    segment_ids: Array  # int32, 1.. in a row, 0 is padding
    positions: Array  # int32, from 0 in each segment
    advantages: Array  # float32, one value a segment; 0 in supervised learning
    old_logprobs: Array  # float32, of the target under the sampler; 0 in supervised learning


@dataclass(frozen=True)
class Counts:
    """What became of the examples, and the tokens of those kept."""

    kept: int
    too_long: int
    without_policy_tokens: int
    tokens: int
    policy_tokens: int


def select(examples: Iterable[Example], length: int) -> tuple[list[Example], Counts]:
    """Keep the examples that fit in `length` tokens and have a target to learn; count the rest."""
    kept: list[Example] = []
    too_long = without = policy_tokens = 0
    for example in examples:
        targets = int(np.sum(example.mask[1:]))
        if len(example.ids) > length:
            too_long += 1
        elif targets == 0:
            without += 1
        else:
            kept.append(example)
            policy_tokens += targets
    tokens = sum(len(example.ids) for example in kept)
    return kept, Counts(len(kept), too_long, without, tokens, policy_tokens)


def trim(example: Example) -> Example:
    """Drop what follows the last policy token: it is neither a target nor context of one."""
    end = int(np.max(np.flatnonzero(example.mask), initial=-1)) + 1
    logprobs = None if example.logprobs is None else example.logprobs[:end]
    return Example(example.ids[:end], example.mask[:end], logprobs, example.advantage)


def first_fit(lengths: Sequence[int], capacity: int, packed: bool = True) -> list[list[int]]:
    """Return bins of indices: each length, longest first, goes to the first bin with room.

    Bins are ordered by their first member's place in `lengths`; with `packed=False` each has one
    member only. Raises ValueError for a length above `capacity`.
    """
    room = np.full(len(lengths), capacity)
    bins: list[list[int]] = []
    for index in np.argsort(-np.asarray(lengths, int), kind="stable"):
        size = lengths[index]
        if size > capacity:
            raise ValueError(f"example {index} has {size} tokens, a row holds {capacity}")
        place = int(np.argmax(room[: len(bins) + 1] >= size))
        if place == len(bins):
            bins.append([])
        bins[place].append(int(index))
        room[place] -= size if packed else capacity
    return sorted(sorted(members) for members in bins)


def assemble(rows: Sequence[Sequence[Example]], length: int, count: int) -> Batch:
    """Lay out rows of examples as one Batch of [count, length]; missing rows are padding."""
    shape = (count, length)
    tokens, targets, segment_ids, positions = np.zeros((4, *shape), np.int32)
    loss_mask, advantages, old_logprobs = np.zeros((3, *shape), np.float32)
    for row, examples in enumerate(rows):
        start = 0
        for segment, example in enumerate(examples, 1):
            size = len(example.ids)
            here, ahead = np.s_[row, start : start + size], np.s_[row, start : start + size - 1]
            tokens[here] = example.ids
            segment_ids[here] = segment
            positions[here] = np.arange(size)
            targets[ahead] = example.ids[1:]
            loss_mask[ahead] = example.mask[1:]
            advantages[ahead] = example.advantage
            if example.logprobs is not None:
                old_logprobs[ahead] = example.logprobs[1:]
            start += size
    return Batch(tokens, targets, loss_mask, segment_ids, positions, advantages, old_logprobs)


def pack(examples: Sequence[Example], length: int, rows: int, packed: bool = True) -> list[Batch]:
    """Pack all examples, each once, into batches of [rows, length]; the last may hold padding rows.

    Raises ValueError for an example longer than `length`: call `select` before.
    """
    bins = first_fit([len(example.ids) for example in examples], length, packed)
    filled = [[examples[i] for i in members] for members in bins]
    return [assemble(filled[i : i + rows], length, rows) for i in range(0, len(filled), rows)]


class BatchStream(Iterator[Batch]):
    """Packed batches for training, each example once an epoch, deterministic and resumable.

    Which examples share a row is fixed by `seed`; rows are shuffled anew each epoch. `epochs=None`
    repeats without end, `packed=False` gives each example a row of its own. `counts` tells what
    was dropped, `fill` the share of row tokens in use.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        length: int,
        rows: int,
        seed: int,
        epochs: int | None = None,
        packed: bool = True,
    ) -> None:
        kept, self.counts = select(examples, length)
        if not kept:
            raise UserError(
                f"no example to train on: {self.counts.too_long} are longer than a row of {length} "
                f"tokens, {self.counts.without_policy_tokens} have nothing to learn; "
                "give longer rows (row_tokens)"
            )
        order = np.random.default_rng(seed).permutation(len(kept))
        bins = first_fit([len(kept[i].ids) for i in order], length, packed)
        filled = [[kept[order[i]] for i in members] for members in bins]
        epoch = grain.MapDataset.source(filled).shuffle(seed)
        batches = epoch.batch(rows, batch_fn=lambda group: assemble(group, length, rows))
        self.steps_per_epoch = len(batches)
        self.fill = self.counts.tokens / (len(batches) * rows * length)
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(batches.repeat(epochs).to_iter_dataset(options))
        self._data = {"rows": len(filled), "tokens": self.counts.tokens, "seed": seed}

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Return the position as a JSON value: what `restore` continues after."""
        return {"data": self._data, "grain": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position; ValueError where it is of other examples, another length or seed."""
        if state["data"] != self._data:
            raise ValueError(f"data position of {state['data']}, but this data is {self._data}")
        self._iterator.set_state(state["grain"])

"""Token sequences to packed batches of one fixed shape, for supervised and reinforcement learning.

Letters: B rows, T tokens a row, N tokens of an example. A row holds whole examples, one segment
each; what is left over is segment 0. Padding is known by its segment, never by a token's value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.struct
import grain
import numpy as np

from hsql_jax.errors import UserError

Array = Any  # numpy on the host, jax inside a step
TooLong = Literal["drop", "cut"]


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
    sampler_logprobs: Array | None = None  # the sampler's, where the old ones are computed anew
    ref_logprobs: Array | None = None  # under the policy at the start, where an objective asks


@dataclass(frozen=True)
class Counts:
    """What became of the examples, and the tokens of those kept."""

    kept: int
    too_long: int  # dropped
    without_policy_tokens: int
    tokens: int
    policy_tokens: int
    cut: int = 0  # of those kept, how many end early
    tokens_cut: int = 0  # what these lost


def select(
    examples: Iterable[Example], length: int, too_long: TooLong = "drop"
) -> tuple[list[Example], Counts]:
    """Keep the examples that fit in `length` tokens and have a target to learn; count the rest.

    With `too_long="cut"` a longer example is kept up to the last policy turn that fits whole.
    """
    kept: list[Example] = []
    dropped = without = policy_tokens = cut = tokens_cut = 0
    for example in examples:
        fits = len(example.ids) <= length
        whole = example if fits or too_long == "drop" else cut_at_turn(example, length)
        targets = int(np.sum(whole.mask[1:]))
        if len(whole.ids) > length or (targets == 0 and not fits):
            dropped += 1
        elif targets == 0:
            without += 1
        else:
            kept.append(whole)
            policy_tokens += targets
            cut += not fits
            tokens_cut += len(example.ids) - len(whole.ids)
    tokens = sum(len(example.ids) for example in kept)
    counts = Counts(len(kept), dropped, without, tokens, policy_tokens, cut, tokens_cut)
    return kept, counts


def cut_at_turn(example: Example, length: int) -> Example:
    """The longest start of at most `length` tokens that ends with a policy turn, maybe empty."""
    own = np.asarray(example.mask, bool)
    ends = np.flatnonzero(own & ~np.append(own[1:], False)) + 1
    return _until(example, int(np.max(ends[ends <= length], initial=0)))


def trim(example: Example) -> Example:
    """Drop what follows the last policy token: it is neither a target nor context of one."""
    return _until(example, int(np.max(np.flatnonzero(example.mask), initial=-1)) + 1)


def _until(example: Example, end: int) -> Example:
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
    repeats without end, `packed=False` gives each example a row of its own. `workers` threads
    assemble the batches ahead. `counts` tells what was dropped, `fill` the share of row tokens in
    use. With `buckets`, shorter lengths than `length`, a row takes the shortest that holds its
    examples, and every batch has rows of one length: [B, T] of as many shapes as there are lengths.

    A global batch has `rows` rows, of which process `process_index` of `process_count` gets its
    share, in order: the shares of all processes, one after the other, are the batch of a single
    process. Raises ValueError where `rows` cannot be shared so and for a bucket above `length`,
    `UserError` without examples.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        length: int,
        rows: int,
        seed: int,
        epochs: int | None = None,
        packed: bool = True,
        too_long: TooLong = "drop",
        buckets: Sequence[int] = (),
        workers: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if rows % process_count or not 0 <= process_index < process_count:
            raise ValueError(
                f"process {process_index} of {process_count} cannot take its share of {rows} rows: "
                f"rows must be a multiple of {process_count}"
            )
        if not all(1 <= bucket <= length for bucket in buckets):
            raise ValueError(f"buckets {buckets}: each is from 1 to the length of a row, {length}")
        kept, self.counts = select(examples, length, too_long)
        if not kept:
            raise UserError(f"no example to train on: {_why_none(self.counts, length)}")
        order = np.random.default_rng(seed).permutation(len(kept))
        bins = first_fit([len(kept[i].ids) for i in order], length, packed)
        filled = [[kept[order[i]] for i in members] for members in bins]
        share = rows // process_count
        own = slice(process_index * share, (process_index + 1) * share)

        def batches_of(size: int, members: Sequence[list[Example]]) -> grain.MapDataset[Batch]:
            shuffled = grain.MapDataset.source(members).shuffle(seed)
            return shuffled.batch(rows, batch_fn=lambda group: assemble(group[own], size, share))

        lengths = sorted({*buckets, length})
        grouped = by_length(filled, lengths)
        groups = [batches_of(size, members) for size, members in grouped.items()]
        concatenate = grain.MapDataset.concatenate
        epoch = groups[0] if len(groups) == 1 else concatenate(groups).shuffle(seed)
        self.steps_per_epoch = len(epoch)
        places = sum(size * len(group) for size, group in zip(grouped, groups, strict=True)) * rows
        self.fill = self.counts.tokens / places
        options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
        self._iterator = iter(epoch.repeat(epochs).to_iter_dataset(options))
        self._data = {
            "rows": len(filled),
            "tokens": self.counts.tokens,
            "seed": seed,
            "rows_a_batch": rows,
            "row_tokens": lengths,
            "crc32": _checksum(kept),
        }

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the examples, over all processes, padding not counted."""
        return self.counts.tokens

    @property
    def policy_tokens_per_epoch(self) -> int:
        """Tokens that the loss is on, over all processes."""
        return self.counts.policy_tokens

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Return the position as a JSON value: what `restore` continues after.

        It counts global batches, so any number of processes and workers may continue from it.
        """
        return {"data": self._data, "grain": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position; ValueError where it is of other examples, rows, length or seed."""
        if state["data"] != self._data:
            raise ValueError(f"data position of {state['data']}, but this data is {self._data}")
        self._iterator.set_state(state["grain"])


def _why_none(counts: Counts, length: int) -> str:
    """What became of the examples where none is left."""
    reasons = []
    if counts.too_long:
        reasons.append(
            f"{counts.too_long} are longer than a row of {length} tokens; give longer rows "
            "(row_tokens)"
        )
    if counts.without_policy_tokens:
        reasons.append(f"{counts.without_policy_tokens} have no turn of the policy to learn")
    return ", ".join(reasons) or "the data has no records"


def by_length(
    rows: Iterable[list[Example]], lengths: Sequence[int]
) -> dict[int, list[list[Example]]]:
    """The rows by the shortest of the ascending `lengths` that holds them, in order."""
    grouped: dict[int, list[list[Example]]] = {size: [] for size in lengths}
    for row in rows:
        need = sum(len(example.ids) for example in row)
        grouped[next(size for size in lengths if size >= need)].append(row)
    return {size: members for size, members in grouped.items() if members}


def _checksum(examples: Iterable[Example]) -> int:
    """CRC-32 over the examples' ids and masks, in order."""
    value = 0
    for example in examples:
        value = zlib.crc32(np.asarray(example.ids, np.int32).tobytes(), value)
        value = zlib.crc32(np.asarray(example.mask, np.uint8).tobytes(), value)
    return value

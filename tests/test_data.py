"""Packing and the resumable stream of batches."""

from __future__ import annotations

import json
import threading

import jax
import numpy as np
import pytest

from hsql_jax.data import Batch, BatchStream, Counts, Example, first_fit, pack, select, trim
from hsql_jax.data.packing import cut_at_turn


def example(first: int, size: int, **more: object) -> Example:
    """Ids first, first+1, ..; the policy's tokens are the odd places."""
    return Example(list(range(first, first + size)), [i % 2 for i in range(size)], **more)  # type: ignore[arg-type]


def many(count: int, seed: int = 0, low: int = 3, high: int = 30) -> list[Example]:
    sizes = np.random.default_rng(seed).integers(low, high, count)
    return [example(100 * (i + 1), int(size)) for i, size in enumerate(sizes)]


def segments(batch: Batch) -> list[tuple[int, ...]]:
    """The ids of every segment, in order."""
    found = []
    for tokens, ids in zip(np.asarray(batch.tokens), np.asarray(batch.segment_ids), strict=True):
        found += [tuple(tokens[ids == segment].tolist()) for segment in range(1, ids.max() + 1)]
    return found


def same(a: Batch, b: Batch) -> bool:
    names = a.__dataclass_fields__
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def test_layout_of_one_row() -> None:
    first = example(10, 4, logprobs=[-9.0, -1.0, -9.0, -2.0], advantage=0.5)
    second = example(20, 3, logprobs=[-9.0, -3.0, -9.0], advantage=-1.5)
    (batch,) = pack([first, second], length=9, rows=1)
    expected = {
        "tokens": [10, 11, 12, 13, 20, 21, 22, 0, 0],
        "targets": [11, 12, 13, 0, 21, 22, 0, 0, 0],
        "loss_mask": [1, 0, 1, 0, 1, 0, 0, 0, 0],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 0],
        "advantages": [0.5, 0.5, 0.5, 0, -1.5, -1.5, 0, 0, 0],
        "old_logprobs": [-1, -9, -2, 0, -3, -9, 0, 0, 0],
    }
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == [values], name
    assert batch.tokens.dtype == batch.positions.dtype == np.int32
    assert batch.loss_mask.dtype == batch.old_logprobs.dtype == np.float32


def test_pack_loses_nothing_and_pads_the_last_batch() -> None:
    examples = many(57)
    batches = pack(examples, length=32, rows=4)
    assert {batch.tokens.shape for batch in batches} == {(4, 32)}
    found = sorted(ids for batch in batches for ids in segments(batch))
    assert found == sorted(tuple(one.ids) for one in examples)
    supervised = sum(float(batch.loss_mask.sum()) for batch in batches)
    assert supervised == sum(sum(one.mask[1:]) for one in examples)


def test_a_real_token_may_equal_zero() -> None:
    (batch,) = pack([Example([0, 0, 0], [0, 1, 1])], length=4, rows=1)
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0]]


def test_first_fit() -> None:
    assert first_fit([5, 4, 3, 2, 6], 10) == [[0, 2, 3], [1, 4]]
    assert first_fit([5, 4, 3], 10, packed=False) == [[0], [1], [2]]
    assert first_fit([], 10) == []
    with pytest.raises(ValueError, match="example 1 has 11 tokens, a row holds 10"):
        first_fit([5, 11], 10)


def test_select_counts_what_it_drops() -> None:
    examples = [example(1, 8), example(1, 9), Example([1, 2], [1, 0]), example(1, 3)]
    kept, counts = select(examples, length=8)
    assert kept == [examples[0], examples[3]]
    assert counts == Counts(kept=2, too_long=1, without_policy_tokens=1, tokens=11, policy_tokens=5)


def test_trim_ends_at_the_last_policy_token() -> None:
    whole = Example([1, 2, 3, 4], [0, 1, 0, 0], [0.0, -1.0, 0.0, 0.0], advantage=2.0)
    assert trim(whole) == Example([1, 2], [0, 1], [0.0, -1.0], advantage=2.0)
    assert trim(Example([1, 2], [0, 0])).ids == []


def test_a_long_example_is_cut_where_a_turn_of_the_policy_ends() -> None:
    mask = [0, 1, 1, 0, 0, 1, 0, 1]
    logprobs = [-float(i) for i in range(8)]
    whole = Example(list(range(8)), mask, logprobs, advantage=2.0)
    for length, end in [(8, 8), (7, 6), (6, 6), (5, 3), (3, 3), (2, 0)]:
        cut = cut_at_turn(whole, length)
        assert cut == Example(list(range(end)), mask[:end], logprobs[:end], 2.0), length


def test_select_cuts_by_config_and_counts_what_was_lost() -> None:
    long = Example([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 1, 1])
    late = Example([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1])  # no turn ends in a row of 4
    kept, counts = select([long, late, example(7, 3)], length=4, too_long="cut")
    assert kept == [Example([1, 2], [0, 1]), example(7, 3)]
    assert counts == Counts(
        kept=2, too_long=1, without_policy_tokens=0, tokens=5, policy_tokens=2, cut=1, tokens_cut=4
    )
    stream = BatchStream([long, late], 4, 1, seed=0, epochs=1, too_long="cut")
    assert [segments(batch) for batch in stream] == [[(1, 2)]]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="ids 2, mask 1, logprobs 2 differ"):
        Example([1, 2], [1])


def test_every_epoch_sees_each_example_once_in_another_order() -> None:
    examples = many(101)
    stream = BatchStream(examples, length=32, rows=4, seed=7, epochs=2)
    batches = list(stream)
    assert len(batches) == 2 * stream.steps_per_epoch
    half = stream.steps_per_epoch
    everything = sorted(tuple(one.ids) for one in examples)
    for epoch in (batches[:half], batches[half:]):
        assert sorted(ids for batch in epoch for ids in segments(batch)) == everything
    assert not all(same(a, b) for a, b in zip(batches[:half], batches[half:], strict=True))
    used = sum(int((batch.segment_ids > 0).sum()) for batch in batches[:half])
    assert stream.fill == used / (half * 4 * 32)


def test_order_is_decided_by_the_seed() -> None:
    a, b, c = (list(BatchStream(many(40), 32, 2, seed, epochs=1)) for seed in (1, 1, 2))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert not all(same(x, y) for x, y in zip(a, c, strict=False))


@pytest.mark.parametrize("stop", [0, 3, 11, 25])
def test_resume_is_exact_in_the_middle_of_an_epoch(stop: int) -> None:
    stream = BatchStream(many(60), 32, 2, seed=3)
    for _ in range(stop):
        next(stream)
    state = json.loads(json.dumps(stream.state()))
    expected = [next(stream) for _ in range(30)]
    fresh = BatchStream(many(60), 32, 2, seed=3)
    fresh.restore(state)
    assert all(same(next(fresh), batch) for batch in expected)


def test_a_position_of_other_data_is_refused() -> None:
    state = BatchStream(many(60), 32, 2, seed=3).state()
    others = [
        BatchStream(many(61), 32, 2, seed=3),
        BatchStream(many(60), 32, 2, seed=4),
        BatchStream(many(60), 32, 4, seed=3),  # the same rows, but other batches
        BatchStream(many(60)[::-1], 32, 2, seed=3),
        BatchStream([Example(e.ids, [0, *e.mask[:-1]]) for e in many(60)], 32, 2, seed=3),
    ]
    for other in others:
        with pytest.raises(ValueError, match="but this data is"):
            other.restore(state)


def test_too_long_examples_are_counted_not_cut() -> None:
    stream = BatchStream([*many(10), example(9000, 33)], length=32, rows=2, seed=0, epochs=1)
    assert stream.counts.kept == 10
    assert stream.counts.too_long == 1
    assert all(ids[0] != 9000 for batch in stream for ids in segments(batch))
    with pytest.raises(
        ValueError, match="no example to train on: 3 are longer than a row of 2 tokens"
    ):
        BatchStream(many(3), length=2, rows=1, seed=0)
    silent = Example([1, 2], [0, 0])
    with pytest.raises(ValueError, match=r"train on: 1 have no turn of the policy to learn$"):
        BatchStream([silent], length=2, rows=1, seed=0)
    with pytest.raises(ValueError, match=r"train on: the data has no records$"):
        BatchStream([], length=2, rows=1, seed=0)


def test_rows_are_well_filled() -> None:
    stream = BatchStream(many(2000, low=60, high=290), length=1024, rows=8, seed=0)
    assert stream.fill > 0.97


@pytest.mark.parametrize(("stop", "workers"), [(0, 2), (11, 2), (25, 1)])
def test_resume_is_exact_with_workers(stop: int, workers: int) -> None:
    plain = BatchStream(many(60), 32, 2, seed=3)
    ahead = BatchStream(many(60), 32, 2, seed=3, workers=workers)
    for _ in range(stop):
        assert same(next(ahead), next(plain))
    state = json.loads(json.dumps(ahead.state()))
    assert state == plain.state()  # what is made ahead is no part of the position
    fresh = BatchStream(many(60), 32, 2, seed=3, workers=workers)
    next(fresh)  # its threads are at work when it is restored
    fresh.restore(state)
    for _ in range(30):
        batch = next(plain)
        assert same(next(fresh), batch)
        assert same(next(ahead), batch)


def test_workers_assemble_the_next_batches_while_one_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hsql_jax.data import packing

    made, whole = threading.Semaphore(0), packing.assemble

    def counted(*arguments: object) -> Batch:
        made.release()
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "assemble", counted)
    stream = BatchStream(many(60), 32, 2, seed=3, workers=2)
    next(stream)
    assert all(made.acquire(timeout=10) for _ in range(5))  # one taken, four ahead


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_shares_of_all_processes_are_the_batch_of_one(processes: int) -> None:
    whole = BatchStream(many(61), 32, 4, seed=3, epochs=2)
    shares = [
        BatchStream(
            many(61), 32, 4, 3, epochs=2, process_index=index, process_count=processes, workers=1
        )
        for index in range(processes)
    ]
    assert {(s.fill, s.steps_per_epoch, s.tokens_per_epoch) for s in shares} == {
        (whole.fill, whole.steps_per_epoch, whole.tokens_per_epoch)
    }
    batches = list(whole)  # the last of an epoch has padding rows
    assert any((batch.segment_ids == 0).all(axis=1).any() for batch in batches)
    for batch, *parts in zip(batches, *shares, strict=True):
        assert {part.tokens.shape for part in parts} == {(4 // processes, 32)}
        assert same(batch, jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))
    assert shares[-1].state() == whole.state()


def test_rows_that_processes_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be a multiple of 3"):
        BatchStream(many(9), 32, 4, seed=0, process_index=0, process_count=3)
    with pytest.raises(ValueError, match="process 2 of 2"):
        BatchStream(many(9), 32, 4, seed=0, process_index=2, process_count=2)


def test_tokens_of_an_epoch_are_those_of_its_batches() -> None:
    stream = BatchStream(many(50), 32, 4, seed=1, epochs=1)
    batches = list(stream)
    assert stream.tokens_per_epoch == sum(int((b.segment_ids > 0).sum()) for b in batches)
    assert stream.policy_tokens_per_epoch == sum(int(b.loss_mask.sum()) for b in batches)


def test_buckets_give_a_row_the_shortest_length_that_holds_it() -> None:
    examples, lengths = many(101), (8, 16, 32)
    stream = BatchStream(examples, 32, 4, seed=7, epochs=2, packed=False, buckets=(16, 8))
    batches = list(stream)
    half = stream.steps_per_epoch
    everything = sorted(tuple(one.ids) for one in examples)
    orders = []
    for epoch in (batches[:half], batches[half:]):
        orders.append([batch.tokens.shape for batch in epoch])
        assert set(orders[-1]) == {(4, size) for size in lengths}
        assert sorted(ids for batch in epoch for ids in segments(batch)) == everything
    for batch in batches:
        size = batch.tokens.shape[1]
        shorter = max([0, *(other for other in lengths if other < size)])
        assert all(shorter < len(ids) <= size for ids in segments(batch))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1] != sorted(orders[1])  # lengths alternate, otherwise each epoch
    used = sum(len(ids) for ids in everything)
    assert stream.fill == used / sum(batch.tokens.size for batch in batches[:half])
    assert stream.fill > BatchStream(examples, 32, 4, seed=7, packed=False).fill + 0.15


def test_resume_and_shares_with_buckets() -> None:
    def stream(**more: int) -> BatchStream:
        return BatchStream(many(60), 32, 2, 3, packed=False, buckets=(8, 16), workers=1, **more)

    whole, shares = stream(), [stream(process_index=i, process_count=2) for i in (0, 1)]
    for _ in range(37):
        next(whole)
    for share in shares:
        share.restore(json.loads(json.dumps(whole.state())))
    for _ in range(40):
        parts = [next(share) for share in shares]
        assert same(next(whole), jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))
    with pytest.raises(ValueError, match="but this data is"):
        BatchStream(many(60), 32, 2, 3, packed=False, buckets=(16,)).restore(whole.state())
    with pytest.raises(ValueError, match="each is from 1 to the length of a row, 32"):
        BatchStream(many(60), 32, 2, 3, buckets=(64,))


@pytest.mark.parametrize("sigma", [0.35, 0.5, 0.7])
def test_long_trajectories_fill_their_rows(sigma: float) -> None:
    """Lengths as the paper reports them: 2,512 of 11.8K tokens on average, rows of 32K."""
    row = 32_768
    mean = np.log(11_794) - sigma**2 / 2
    sizes = np.random.default_rng(0).lognormal(mean, sigma, size=2_512)
    sizes = np.minimum(sizes, row).astype(int)
    assert abs(sizes.mean() - 11_794) < 700  # those at the cap lower it
    ids = np.ones(row, np.int32)
    examples = [Example(ids[:n], ids[:n]) for n in sizes]
    stream = BatchStream(examples, row, rows=16, seed=0)
    assert stream.tokens_per_epoch == sizes.sum()
    assert stream.fill >= 0.95
    alone = BatchStream(examples, row, 16, seed=0, packed=False, buckets=range(4096, row, 4096))
    assert alone.fill >= 0.8  # one trajectory a row

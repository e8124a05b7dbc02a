"""DistributedSampler: the workers' samples."""

from __future__ import annotations

import itertools
import pickle

import kvstore_plugin as mykv
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon

_LENGTHS = st.integers(0, 200)
_SIZES = st.integers(1, 9)
_SEEDS = st.integers(0, 2**40)


def _shares(length, size, epoch=0, **options):
    """The indices of each worker."""
    shares = []
    for rank in range(size):
        sampler = mykv.DistributedSampler(length, rank=rank, size=size, **options)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    return shares


def _all(lists):
    return list(itertools.chain.from_iterable(lists))


def _in_turns(shares):
    """The indices in the order in which workers that go in step take them."""
    return [index for turn in zip(*shares) for index in turn]


@given(_LENGTHS, _SIZES, st.booleans(), _SEEDS)
def test_all_workers_get_equally_many_and_every_index_occurs(length, size, shuffle, seed):
    shares = _shares(length, size, shuffle=shuffle, seed=seed)
    assert {len(share) for share in shares} == {-(-length // size)}
    counts = np.bincount(_all(shares), minlength=length)
    assert len(counts) == length
    if length:
        assert counts.min() >= 1 and counts.max() - counts.min() <= 1
        assert counts.sum() - length < size


@given(_LENGTHS, _SIZES, st.booleans(), _SEEDS)
def test_drop_last_repeats_nothing_and_drops_fewer_than_there_are_workers(length, size, shuffle, seed):
    if 0 < length < size:
        with pytest.raises(ValueError, match=f"drops all {length} samples, since there are {size} workers"):
            mykv.DistributedSampler(length, drop_last=True, rank=0, size=size)
        return
    shares = _shares(length, size, shuffle=shuffle, seed=seed, drop_last=True)
    assert {len(share) for share in shares} == {length // size}
    indices = _all(shares)
    assert len(set(indices)) == len(indices) and set(indices) <= set(range(length))


@given(_LENGTHS, _SIZES, st.booleans(), _SEEDS)
def test_uneven_shares_hold_every_index_exactly_once(length, size, shuffle, seed):
    shares = _shares(length, size, shuffle=shuffle, seed=seed, even=False)
    assert sorted(_all(shares)) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 200), _SIZES, _SEEDS, st.integers(0, 50))
def test_workers_together_go_through_the_order_of_one_worker(length, size, seed, epoch):
    (alone,) = _shares(length, 1, epoch, seed=seed)
    together = _in_turns(_shares(length, size, epoch, seed=seed))
    assert together[:length] == alone
    assert together[length:] == (alone * size)[: len(together) - length]


def test_without_shuffle_the_indices_are_in_their_own_order():
    assert _in_turns(_shares(7, 3, shuffle=False)) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_orders_depend_on_seed_and_epoch_and_on_nothing_else():
    orders = {(seed, epoch): tuple(_shares(100, 1, epoch, seed=seed)[0]) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    np.random.seed(3)
    assert _shares(100, 1, 2, seed=1) == [list(orders[1, 2])]
    # So that a worker with another release of numpy does not go through the data in another order.
    assert _shares(12, 1, 3, seed=5) == [[8, 7, 4, 3, 1, 6, 10, 9, 2, 5, 0, 11]]


def test_an_epoch_begins_with_the_next_iteration():
    sampler = mykv.DistributedSampler(50, rank=0, size=2)
    under_way = iter(sampler)
    first = [next(under_way)]
    sampler.set_epoch(1)
    first += under_way
    assert first == _shares(50, 2, 0)[0]
    assert list(sampler) == _shares(50, 2, 1)[0] == list(pickle.loads(pickle.dumps(sampler)))


def _epochs(sampler, sets_epoch=False, stops_early=False):
    for epoch in range(3):
        if sets_epoch:
            sampler.set_epoch(epoch)
        batches = gluon.data.BatchSampler(sampler, 4, "keep")
        list(itertools.islice(batches, 2 if stops_early else None))


@pytest.mark.parametrize(
    ("warnings", "options", "use"),
    [
        (1, {}, {}),
        (1, {"drop_last": True}, {}),
        (0, {}, {"sets_epoch": True}),
        (0, {}, {"stops_early": True}),
        (0, {"shuffle": False}, {}),
        (0, {"even": False}, {}),
        (0, {"rank": 1}, {}),
    ],
)
def test_another_epoch_without_set_epoch_is_told_once(caplog, warnings, options, use):
    sampler = mykv.DistributedSampler(**{"length": 20, "rank": 0, "size": 2, **options})
    _epochs(sampler, **use)
    assert caplog.text.count("begins another epoch without set_epoch()") == warnings


def test_set_epoch_once_does_not_excuse_later_epochs(caplog):
    sampler = mykv.DistributedSampler(20, rank=0, size=2)
    sampler.set_epoch(0)
    list(sampler)
    assert "set_epoch" not in caplog.text
    list(sampler)
    assert caplog.text.count("without set_epoch()") == 1


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"length": -1}, ValueError, "length must be at least 0, not -1"),
        ({"length": 2.5}, TypeError, "length must be an int, not float"),
        ({"length": [1, 2]}, TypeError, r"length must be an int, not list: pass len\(dataset\)"),
        ({"seed": -1}, ValueError, "seed must be at least 0, not -1"),
        ({"rank": None}, ValueError, "rank and size must be given both or not at all"),
        ({"rank": 2}, ValueError, "rank must be below size, 2, not 2"),
        ({"size": 0}, ValueError, "size must be at least 1, not 0"),
        ({"drop_last": True, "even": False}, ValueError, "drop_last=True and even=False exclude each other"),
        ({"process_set": mykv.ProcessSet([0])}, ValueError, "must not be given together with a process_set"),
    ],
)
def test_wrong_arguments(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        mykv.DistributedSampler(**{"length": 10, "rank": 0, "size": 2, **arguments})


def test_a_wrong_epoch():
    with pytest.raises(ValueError, match="epoch must be at least 0, not -1"):
        mykv.DistributedSampler(10, rank=0, size=2).set_epoch(-1)


@pytest.mark.ranks(1, 3)
def test_rank_and_size_are_those_of_this_process(rank, size, gather):
    sampler = mykv.DistributedSampler(10, seed=4)
    assert gather(list(sampler)) == _shares(10, size, seed=4)


@pytest.mark.ranks(3)
def test_the_members_of_a_process_set_share_the_data_among_themselves(rank, gather):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    if pair.included():
        sampler = mykv.DistributedSampler(11, process_set=pair)
        shares = [list(sampler), _shares(11, 2)[pair.rank()]]
    else:
        with pytest.raises(ValueError, match="Rank 1 is not in"):
            mykv.DistributedSampler(11, process_set=pair)
        shares = [0, 0]
    for mine, expected in gather(shares):
        assert mine == expected
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("last_batch", ["keep", "discard"])
def test_a_data_loader_makes_equally_many_batches_on_all_workers(rank, size, gather, last_batch):
    dataset = gluon.data.SimpleDataset(list(range(23)))
    sampler = mykv.DistributedSampler(len(dataset))
    loader = gluon.data.DataLoader(dataset, batch_size=5, sampler=sampler, last_batch=last_batch)
    batches = [batch.asnumpy().tolist() for batch in loader]
    assert [len(batch) for batch in batches] == ([5, 5, 2] if last_batch == "keep" else [5, 5])
    if last_batch == "keep":
        assert set(_all(_all(gather(batches)))) == set(range(23))

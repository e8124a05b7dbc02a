"""Who owns which elements of the parameters: all of them, once, and equal shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_plugin.sharded_optimizer.partition import Size, divide

_GROUP = 16 << 20

_BERT_LAYER = [(768 * 768, 4), (768, 4)] * 4 + [(768, 4)] * 2 + [(768 * 3072, 4), (3072, 4), (3072 * 768, 4), (768, 4)]
_MODELS = {
    "bert-base": [(30522 * 768, 4), (512 * 768, 4), (2 * 768, 4), *(_BERT_LAYER * 12), (768 * 768, 4), (768, 4)],
    "one huge embedding": [(100_000_000, 4)] + [(1000, 4)] * 40 + [(256 * 256, 4)] * 8,
    "float16": [(1_000_000, 2), (10, 2), (5_000_000, 2), (64, 4)] * 3,
}


def _resnet50():
    sizes, channels_in = [(64 * 3 * 49, 4), (64, 4), (64, 4)], 64
    for blocks, channels in zip((3, 4, 6, 3), (256, 512, 1024, 2048)):
        for block in range(blocks):
            inner = channels // 4
            sizes += [(inner * channels_in, 4), (inner, 4), (inner, 4), (inner * inner * 9, 4), (inner, 4), (inner, 4)]
            sizes += [(channels * inner, 4), (channels, 4), (channels, 4)]
            if block == 0:
                sizes += [(channels * channels_in, 4), (channels, 4), (channels, 4)]
            channels_in = channels
    return [*sizes, (2048 * 1000, 4), (1000, 4)]


_MODELS["resnet50"] = _resnet50()


def _divide(sizes, workers, elementwise, group_bytes):
    return divide([Size(*size) for size in sizes], workers, elementwise, group_bytes)


def _loads(sizes, divided, workers):
    loads = [0] * workers
    for (_, width), shards in zip(sizes, divided):
        for shard in shards:
            loads[shard.owner] += shard.count * width
    return loads


def _check(sizes, divided, workers, elementwise):
    assert len(divided) == len(sizes)
    for (count, _), shards in zip(sizes, divided):
        end = 0
        for shard in shards:
            assert shard.begin == end and shard.count > 0 and 0 <= shard.owner < workers
            end += shard.count
        assert end == count
        assert len({shard.owner for shard in shards}) == len(shards)
        assert elementwise or len(shards) == (count > 0)


@given(
    st.lists(st.tuples(st.integers(0, 3_000_000), st.sampled_from([1, 2, 4, 8])), max_size=40),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([1, 1 << 20, _GROUP]),
)
@settings(max_examples=300, deadline=None)
def test_each_element_has_one_owner(sizes, workers, elementwise, group_bytes):
    _check(sizes, _divide(sizes, workers, elementwise, group_bytes), workers, elementwise)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", sorted(_MODELS))
def test_shares_are_equal(model, workers):
    sizes = _MODELS[model]
    loads = _loads(sizes, _divide(sizes, workers, True, _GROUP), workers)
    assert max(loads) <= 1.15 * sum(loads) / workers


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("model", ["bert-base", "resnet50"])
def test_shares_of_whole_parameters_are_equal_too(model, workers):
    sizes = _MODELS[model]
    loads = _loads(sizes, _divide(sizes, workers, False, _GROUP), workers)
    assert max(loads) <= 1.15 * sum(loads) / workers


def test_small_parameters_are_not_cut():
    divided = _divide([(1000, 4)] * 8, 4, True, _GROUP)
    assert all(len(shards) == 1 for shards in divided)
    assert _loads([(1000, 4)] * 8, divided, 4) == [8000] * 4


@pytest.mark.parametrize("begin", [-2000, 2000])
def test_pieces_below_16_kib_stay_with_their_neighbour(begin):
    """The middle lies 8000 bytes before the end of the first parameter, or after the begin of the second."""
    sizes = [(160_000 + begin, 4), (160_000 - begin, 4)]
    divided = _divide(sizes, 2, True, _GROUP)
    assert divided == [((owner, 0, count),) for owner, (count, _) in enumerate(sizes)]
    divided = _divide([(160_000 + 10 * begin, 4), (160_000 - 10 * begin, 4)], 2, True, _GROUP)
    assert sorted(len(shards) for shards in divided) == [1, 2]  # these pieces are larger


def test_rows_are_not_cut_unless_they_are_long():
    (shards,) = divide([Size(1000 * 300, 4, 300)], 3, True, _GROUP)
    assert len(shards) == 3 and all(shard.begin % 300 == 0 for shard in shards)
    (shards,) = divide([Size(2 * 10_000_000, 4, 10_000_000)], 3, True, 1 << 30)
    assert len(shards) == 3


def test_cuts_lie_on_cache_lines():
    for shards in _divide(_MODELS["resnet50"], 3, True, _GROUP):
        assert all(shard.begin * 4 % 64 == 0 for shard in shards)

"""How gradients are divided into operations: which share a bucket, and who sums which elements of a bucket."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from harness.support import mx
from kvstore_plugin.gradients import bucket_plan, bucket_sizes
from kvstore_plugin.gradients.bucket_plan import BucketMember, Reduction
from kvstore_plugin.sharded_optimizer.partition import Shard
from mxnet import gluon

_KIB, _MIB = 1 << 10, 1 << 20


def _member(label, elements=1, dtype="float32", devices=(0,), group=None, priority=0):
    parameter = gluon.Parameter(label, shape=(elements,), dtype=dtype)
    parameter.initialize(mx.init.Zero(), [mx.cpu(number) for number in devices])
    return BucketMember(label, f"gradients/{label}", parameter, priority, group, 0)


def _reduction(bucket_bytes=16 * _MIB, num_groups=0, mean=True, divisor=1.0, size=4):
    core = SimpleNamespace(push_allreduce=print, push_group=print)
    return Reduction(SimpleNamespace(size=lambda: size, _core=core), mean, "", bucket_bytes, num_groups, None, divisor)


def _labels(members, **options):
    memory = SimpleNamespace(in_place=lambda parameters: {})
    operations = bucket_plan.planned("trainer", _reduction(**options), memory, members)
    return [[member.label for member in operation.members] for operation in operations]


@pytest.mark.parametrize(
    ("hosts", "ranks", "nbytes"),
    [(1, 1, 16 * _MIB), (1, 4096, 16 * _MIB), (2, 2, _MIB), (2, 64, _MIB), (2, 128, 2 * _MIB), (8, 4096, 16 * _MIB)],
)
def test_buckets_grow_with_the_ranks_between_hosts(hosts, ranks, nbytes):
    """Each rank's piece has 16 KiB, as far as a bucket has 1 to 16 MiB."""
    assert bucket_sizes.default_bucket_bytes(hosts, ranks) == nbytes


def test_the_scale_is_of_the_ranks_or_of_the_divisor():
    assert _reduction(size=4, divisor=2.0).scale == 0.25
    assert _reduction(mean=False, divisor=2.0).scale == 0.5


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({"bucket_bytes": 0, "num_groups": 0}, [["a"], ["b"]]),
        ({"bucket_bytes": 100, "num_groups": 0}, [["a", "b"]]),
        ({"bucket_bytes": 0, "num_groups": 1}, [["a", "b"]]),
    ],
    ids=str,
)
def test_gradients_share_copied_buckets_if_buckets_or_groups_are_wanted(options, buckets):
    group = 0 if options["num_groups"] else None
    assert _labels([_member("a", group=group), _member("b", group=group)], **options) == buckets


@pytest.mark.parametrize(("bucket_bytes", "nbytes"), [(16 * _MIB, 512 * _KIB), (4 * _KIB, 4 * _KIB)])
def test_a_pack_is_as_large_as_a_bucket_and_512_kib_at_most(bucket_bytes, nbytes):
    half = nbytes // 8  # elements
    members = [_member("a", half), _member("b", half), _member("c"), _member("d", 2 * half + 1), _member("e")]
    assert _labels(members, bucket_bytes=bucket_bytes) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_copied_buckets_follow_the_order_of_the_network():
    members = [_member(label, 16, priority=priority) for label, priority in (("c", -3), ("a", -1), ("b", -2))]
    assert _labels(members, bucket_bytes=128) == [["a", "b"], ["c"]]


def test_a_pack_has_gradients_of_the_same_dtype_device_and_group():
    members = [
        _member("a"),
        _member("double", dtype="float64"),
        _member("elsewhere", devices=(1,)),
        _member("in two places", devices=(0, 1)),
        _member("b"),
        _member("in two places too", devices=(0, 1)),
        _member("double too", dtype="float64"),
    ]
    buckets = [["a", "b"], ["double", "double too"], ["elsewhere"], ["in two places"], ["in two places too"]]
    assert _labels(members) == buckets
    members = [_member("a", 100, group=0), _member("b", 100, group=1), _member("c", 100, group=0)]
    assert _labels(members, bucket_bytes=100, num_groups=2) == [["a", "c"], ["b"]]


@pytest.mark.parametrize("bucket_bytes", [0, _MIB])
def test_gradients_that_are_copied_alone_come_in_the_order_of_the_network(bucket_bytes):
    members = [_member("b", priority=-1), _member("a", priority=0)]
    operations = bucket_plan.copied("trainer", _reduction(bucket_bytes), members)
    assert [operation.name for operation in operations] == ["gradients/a", "gradients/b"]


def _shards(members, used, dtype="float32"):
    """The shards of a bucket of `used` bytes that holds members: offset in bytes, and owner and count of each shard."""
    shards, listed = {}, []
    for key, (begin, owned) in enumerate(members):
        at = 0
        shards[key] = []
        for owner, count in owned:
            shards[key].append(Shard(owner, at, count))
            at += count
        listed.append((BucketMember("", "", None, 0, None, key), begin, None))
    itemsize = np.dtype(dtype).itemsize
    optimizer = SimpleNamespace(shards_of=shards.__getitem__)
    return bucket_plan._shards(optimizer, itemsize, listed, used // itemsize)


def test_the_owner_of_a_shard_sums_its_elements_of_the_bucket():
    assert _shards([(0, [(0, 10), (1, 6)])], 64) == [(0, 10, 0), (10, 6, 1)]
    assert _shards([(0, [(0, 10), (1, 6)])], 128, "float64") == [(0, 10, 0), (10, 6, 1)]


def test_shards_of_a_bucket_have_no_gaps():
    """The bucket begins with the first shard, and alignment between gradients belongs to the shard before it."""
    assert _shards([(64, [(2, 3)]), (128, [(1, 3)]), (192, [(1, 20), (0, 5)])], 320) == [
        (0, 32, 2),
        (32, 36, 1),
        (68, 12, 0),
    ]


def test_shards_do_not_depend_on_the_order_of_the_members():
    members = [(0, [(0, 16)]), (64, [(1, 16)]), (128, [(0, 16)])]
    assert _shards(members[::-1], 192) == _shards(members, 192) == [(0, 16, 0), (16, 16, 1), (32, 16, 0)]

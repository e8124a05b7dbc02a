"""Assigns gradients to buckets, by one rule for buckets in shared memory and for buckets that are copied.

Gradients of one dtype on one device fill a bucket in order, until it is full. The user gives the size (`bucket_bytes`),
or a number of groups (`num_groups`): then a bucket holds a group, whatever its size.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable, Sequence

# Copying several small gradients in one operation saves the overhead of further operations. Larger buckets overlap
# copying and reducing less: with 4 MiB a step of ResNet-50's gradients was slower than with gradients that are copied
# alone.
LARGEST_COPIED_BUCKET = 512 << 10  # bytes

# On one host few operations are the cheapest. Between hosts the network is the bottleneck and must not idle: gradients
# that the next forward pass needs first should not wait behind many others. Training of ResNet-18 over 1 Gbit/s took
# 1.22 times as long as its communication alone with 16 MiB, 1.17 with 4 MiB and 1.13 with 1 MiB. Each rank gets its
# piece of a bucket in separate messages, which should not be tiny.
_BUCKET_BYTES_ON_ONE_HOST = 16 << 20
_LEAST_BUCKET_BYTES = 1 << 20
_BYTES_FOR_EACH_RANK = 16 << 10


def default_bucket_bytes(hosts: int, ranks: int) -> int:
    """The default size of a bucket in bytes."""
    if hosts == 1:
        return _BUCKET_BYTES_ON_ONE_HOST
    return min(_BUCKET_BYTES_ON_ONE_HOST, max(_LEAST_BUCKET_BYTES, _BYTES_FOR_EACH_RANK * ranks))


def number_groups(members: Sequence[Any], num_groups: int, each_alone: bool = False) -> None:
    """Divide BucketMembers, in their order, into numbered groups of about the same number of gradients.

    Parameters
    ----------
    members : sequence of BucketMember
    num_groups : int
        0: there are no groups.
    each_alone : bool, optional
        Whether each gradient is a separate group.
    """
    if each_alone:
        for number, member in enumerate(members):
            member.group = number
        return
    trainable = sum(member.parameter.grad_req != "null" for member in members)
    before = 0
    for member in members if num_groups else ():
        member.group = min(before * num_groups // max(trainable, 1), num_groups - 1)
        before += member.parameter.grad_req != "null"


class BucketFiller:
    """Fills one bucket after another, separately for each kind of gradients."""

    def __init__(self) -> None:
        self._filling: dict[Hashable, tuple[Any, float]] = {}  # by kind: the last bucket, and the bytes left in it

    def bucket_for(self, kind: Hashable, nbytes: int, make: Callable[[], tuple[Any, float]]) -> Any:
        """The bucket that a gradient of a kind and size goes into.

        Parameters
        ----------
        kind : hashable
            Group, dtype and device.
        nbytes : int
            The gradient's size.
        make : callable
            Returns a new bucket and its size. Called if the last bucket of the kind has no room.
        """
        bucket, left = self._filling.get(kind, (None, -1))
        if nbytes > left:
            bucket, left = make()
        self._filling[kind] = bucket, left - nbytes
        return bucket

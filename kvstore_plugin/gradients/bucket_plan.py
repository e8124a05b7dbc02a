"""Divides the gradients of a trainer into operations.

One operation reduces each bucket: in place, if its gradients are in shared memory, or by copying them in and out. Each
rank makes a plan for its own arrays. If the plans of the ranks differ (for example, if layers were initialized in
different orders), each gradient is copied and reduced by a separate operation.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from ..collectives.gradient_compression import counts_elements
from ..compat import arrays
from ..compat.mxnet import NDArray, Parameter
from ..coordination import operation
from ..sharded_optimizer.optimizer import Member, ShardedUpdate, StoreOptimizer
from ..world import process
from ..world.process_set import ProcessSet
from .bucket_memory import Bucket, GradientMemory
from .bucket_sizes import LARGEST_COPIED_BUCKET, BucketFiller
from .squares import Squares

# Only these dtypes are compressed between hosts.
_COMPRESSED_DTYPES = ("float32", "float64")


class BucketMember:
    """One parameter of a trainer.

    Attributes
    ----------
    label, name : str
        The parameter's name in messages, and the name of the operation that reduces its gradient alone.
    group : int or None
        Number of the group that the gradient is reduced with.
    key : int
        The parameter's index in the optimizer.
    """

    def __init__(self, label: str, name: str, parameter: Parameter, priority: int, group: int | None, key: int) -> None:
        self.label = label
        self.name = name
        self.parameter = parameter
        self.priority = priority
        self.group = group
        self.key = key


class Reduction(NamedTuple):
    """How gradients are reduced. The same on all ranks."""

    process_set: ProcessSet
    mean: bool  # True: means over the ranks; False: sums
    compression: str  # dtype or compressor between hosts; empty: uncompressed
    bucket_bytes: int  # the size of a bucket; 0: no gradient is in place
    num_groups: int  # number of groups of gradients; 0: buckets have the size bucket_bytes instead
    store_optimizer: StoreOptimizer | None = None  # updates weights: each worker updates its shards
    divisor: float = 1.0  # sums are divided by it; not used for means
    hook: Callable[[Any], None] | None = None  # reduces each GradientBucket instead of this package

    @property
    def scale(self) -> float:
        """The factor of the sum over ranks."""
        return 1.0 / (self.process_set.size() if self.mean else self.divisor)

    @property
    def counts_elements(self) -> bool:
        """Whether the compressor sends a fixed number of elements of each array."""
        return counts_elements(self.compression)

    @property
    def has_buckets(self) -> bool:
        """Whether one operation reduces several gradients."""
        return bool(self.bucket_bytes or self.num_groups)

    @property
    def wire(self) -> str:
        """Dtype of sparse rows between hosts; empty: their own dtype.

        Compressors are not used: they keep an error for each position of an array, but each step has different rows.
        """
        return self.compression if self.compression in ("float16", "bfloat16") else ""

    def wire_of(self, dtype: Any) -> str:
        """The core's text for the compression of a gradient of this dtype between hosts; empty: uncompressed."""
        return self.compression if self.compression and np.dtype(dtype).name in _COMPRESSED_DTYPES else ""


class Operation(NamedTuple):
    """One operation of a step: its name, its gradients and their layout, and how it is pushed."""

    name: str
    members: Sequence[BucketMember]
    layout: str  # describes the places in the bucket; empty if the gradients are copied
    push: Callable[[str], None]  # takes the label of the step; a function of the core, or one that notes its start
    priority: int  # the highest priority of its gradients
    update: ShardedUpdate | None = None  # the update after the sum, with an optimizer on the store
    push_in_place: Callable[[str, str], None] | None = None  # for gradients in place: takes another name and `turn_of`
    hooked: Any = None  # with a hook: the HookedOperation whose method push() is `push`
    renewed: Any = None  # with `update`: makes the same operation for the parameters' present weights

    def refuse(self, core: Any, reason: str) -> None:
        """Refuse this rank's turn of the operation, in the core of its process set."""
        if self.hooked is not None:
            self.hooked.refuse(reason)
        elif self.update is None:
            core.refuse(self.name, reason)
        else:
            ShardedUpdate.refuse(core, self.name, reason)

    def __str__(self) -> str:
        devices = len(self.members[0].parameter._grad)
        return f"{self.name} {self.layout}: {', '.join(member.label for member in self.members)}, devices: {devices}"


class Comparison:
    """An operation that compares the ranks' labels, which must be equal. It may also sum one number over the ranks.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks of the operation.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._buffer: Any = None

    def push(
        self,
        started: list[Any],
        name: str,
        written: Sequence[NDArray],
        priority: int,
        label: str,
        turn_of: str = "",
        squares: Squares | None = None,
    ) -> None:
        """Make arrays wait for the comparison, and carry its error if the labels differ. Returns at once.

        Parameters
        ----------
        started : list
            Gets an element when the operation has started, as in `operation.start`.
        name : str
            The name of the operation.
        written : sequence of NDArray
            The arrays that wait. Their values do not change.
        priority : int
            Operations with a higher priority run first.
        label : str
        turn_of : str, optional
            The comparison takes the last turn of this name; by default it takes the next turn of its own name.
        squares : Squares, optional
            The number to sum over the ranks.
        """
        if squares is not None:
            buffer, content, written = squares.buffer, ("float64", "of squares"), [*written, squares.array]
        else:
            if self._buffer is None or not self._buffer.attached:
                self._buffer = self._process_set._core.allocate(1)
            buffer, content = self._buffer, ("uint8", "of nothing")
        prepared = process.core.PreparedBucket(name, buffer, 0, 1, *content, arrays.handles(written), priority=priority)
        operation.start(started, functools.partial(prepared.push, label, turn_of))

    def __reduce__(self) -> tuple:
        return Comparison, (self._process_set,)


def planned(
    scope: str, reduction: Reduction, memory: GradientMemory, active: Sequence[BucketMember]
) -> list[Operation]:
    """The operations for the current layout of this rank's gradients."""
    operations = _bucket_operations(scope, reduction, memory, active)
    covered = {id(member) for operation in operations for member in operation.members}
    rest = [member for member in active if id(member) not in covered]
    return operations + [_copied(scope, reduction, members) for members in _copied_buckets(reduction, rest)]


def copied(scope: str, reduction: Reduction, active: Sequence[BucketMember]) -> list[Operation]:
    """An operation for each gradient, by copying: for ranks whose plans differ."""
    return [_copied(scope, reduction, [member]) for member in sorted(active, key=lambda member: -member.priority)]


def _bucket_operations(
    scope: str, reduction: Reduction, memory: GradientMemory, active: Sequence[BucketMember]
) -> list[Operation]:
    """One operation for each bucket that holds only gradients of this trainer."""
    members = {member.parameter: member for member in sorted(active, key=lambda member: -member.priority)}
    operations = []
    for number, (bucket, places) in enumerate(memory.in_place(members).items()):
        placed = [(members[place.parameter()], place.begin, place.view) for place in places]
        # Only up to the end of the last gradient, since the size of the unused memory may differ between ranks.
        count = max(place.end for place in places) // bucket.dtype.itemsize
        operations.append(_in_place(f"{scope}/bucket{number}", reduction, bucket, placed, count))
    return operations


def _in_place(name: str, reduction: Reduction, bucket: Bucket, placed: Sequence[tuple], count: int) -> Operation:
    # Offsets matter, not only names: two ranks may have put the same gradients into a bucket in different orders.
    text = "; ".join(f"{member.label} at {begin} {view.shape}" for member, begin, view in placed)
    layout = f"of {len(placed)} gradients, layout {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    handles = arrays.handles([view for _, _, view in placed])
    priority = max(member.priority for member, _, _ in placed)
    wire = reduction.wire_of(bucket.dtype)
    members = [member for member, _, _ in placed]
    update = None
    options: dict[str, Any] = {"wire": wire} if wire else {}
    if reduction.store_optimizer is not None:
        update = _update(reduction.store_optimizer, name, members, priority, in_place=True)
        options["shards"] = _shards(reduction.store_optimizer, bucket.dtype.itemsize, placed, count)
        handles += update.weights

    def prepare(name: str) -> Any:
        return bucket.prepare(name, count, layout, handles, "sum", reduction.scale, priority, **options)

    again = functools.lru_cache(maxsize=8)(prepare)  # a hook may use several names, one for each of its operations
    push = push_bucket = prepare(name).push
    if update is not None:

        def push(label: str) -> None:
            update.begin(functools.partial(push_bucket, label))

    def push_as(name: str, turn_of: str = "") -> None:
        again(name).push("", turn_of)

    renewed = functools.partial(_in_place, name, reduction, bucket, placed, count)
    return Operation(name, members, layout, push, priority, update, push_as, renewed=renewed)


def _shards(
    store_optimizer: StoreOptimizer, itemsize: int, placed: Sequence[tuple], count: int
) -> list[tuple[int, int, int]]:
    """The shards of a bucket: those of its gradients; a gap between gradients belongs to the shard before the gap."""
    pieces = [
        (begin // itemsize + shard.begin, shard.owner)
        for member, begin, _ in sorted(placed, key=lambda place: place[1])
        for shard in store_optimizer.shards_of(member.key)
    ]
    runs = [piece for i, piece in enumerate(pieces) if i == 0 or piece[1] != pieces[i - 1][1]]
    begins = [0, *(begin for begin, _ in runs[1:])]
    ends = [*begins[1:], count]
    return [(begin, end - begin, owner) for begin, end, (_, owner) in zip(begins, ends, runs)]


def _update(
    store_optimizer: StoreOptimizer, name: str, members: Sequence[BucketMember], priority: int, in_place: bool
) -> ShardedUpdate:
    updated = [Member(member.key, member.parameter._grad[0], member.parameter._data) for member in members]
    return ShardedUpdate(store_optimizer, name, updated, priority, in_place)


def _copied(scope: str, reduction: Reduction, members: Sequence[BucketMember]) -> Operation:
    process_set, scale = reduction.process_set, reduction.scale
    wire = reduction.wire_of(members[0].parameter._grad[0].dtype) if reduction.compression else ""
    compressed = {"wire": wire} if wire else {}
    priority = max(member.priority for member in members)
    name = members[0].name if len(members) == 1 else f"{scope}/packed/{members[0].label}"
    if reduction.store_optimizer is not None:
        update = _update(reduction.store_optimizer, name, members, priority, in_place=False)

        def push_to_owners(label: str) -> None:
            update.reduce([arrays.total(member.parameter._grad) for member in members], scale, wire, label)

        renewed = functools.partial(_copied, scope, reduction, members)
        return Operation(name, members, "", push_to_owners, priority, update, renewed=renewed)
    if len(members) == 1:
        handles = arrays.handles(members[0].parameter._grad)

        push = functools.partial(
            process_set._core.push_allreduce, name, handles, handles, "sum", scale, priority, **compressed
        )
        return Operation(name, members, "", push, priority)
    handles = arrays.handles([member.parameter._grad[0] for member in members])
    push_all = functools.partial(
        process_set._core.push_group, name, handles, handles, "sum", scale, priority, **compressed
    )
    return Operation(name, members, "", push_all, priority)


def _copied_buckets(reduction: Reduction, members: Sequence[BucketMember]) -> list[list[BucketMember]]:
    """Divide the gradients that are copied into buckets, in the order of the network."""
    if not reduction.has_buckets:
        return [[member] for member in members]
    buckets: list[list[BucketMember]] = []
    filler = BucketFiller()

    def begin(size: float) -> tuple[list[BucketMember], float]:
        buckets.append([])
        return buckets[-1], size

    for member in sorted(members, key=lambda member: -member.priority):
        gradient = member.parameter._grad[0]
        if len(member.parameter._grad) > 1 or gradient.size == 0:
            buckets.append([member])
            continue
        dtype = np.dtype(gradient.dtype)
        size = min(reduction.bucket_bytes, LARGEST_COPIED_BUCKET) if member.group is None else math.inf
        kind = (member.group, dtype, str(gradient.context))
        filler.bucket_for(kind, gradient.size * dtype.itemsize, functools.partial(begin, size)).append(member)
    return buckets

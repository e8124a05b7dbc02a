"""How the gradients of a trainer are divided into operations.

Those that lie in shared memory are reduced there, a bucket by one operation. The others are copied in and out: packed,
several by one operation, or alone. Each rank proposes what suits its own arrays. Where the proposals differ (layers
were initialized in another order, say), all ranks follow that of rank 0: a bucket that lies alike everywhere is still
reduced in place, and the gradients of any other are copied.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from . import agreement, arrays, process
from .adoption import Bucket, GradientMemory
from .mxnet_compat import Parameter
from .process_set import ProcessSet

# Only these travel in 16 bits between hosts.
_COMPRESSED_DTYPES = ("float32", "float64")

# Packs save the cost of an operation for each small gradient. Larger ones come later into their copies' overlap: those
# of 4 MiB took a step of ResNet-50's gradients longer than gradients that are copied alone.
_LARGEST_PACKED = 512 << 10  # bytes


class Slot:
    """One parameter of a trainer.

    Attributes
    ----------
    label, name : str
        What the parameter is called in messages, and its gradient's own operation.
    group : int or None
        Number of the group that it is reduced with.
    """

    def __init__(self, label: str, name: str, parameter: Parameter, priority: int, group: int | None) -> None:
        self.label = label
        self.name = name
        self.parameter = parameter
        self.priority = priority
        self.group = group


class Reduction(NamedTuple):
    """What becomes of a gradient, equal on all ranks."""

    process_set: ProcessSet
    mean: bool  # or sum
    wire: str  # type between hosts, empty for the gradient's own
    bucket_bytes: int  # 0: nothing is packed
    num_groups: int  # 0: gradients are packed by bucket_bytes

    @property
    def scale(self) -> float:
        """What the sum over ranks is multiplied by."""
        return 1.0 / self.process_set.size() if self.mean else 1.0

    @property
    def packs(self) -> bool:
        """Whether one operation reduces several gradients."""
        return bool(self.bucket_bytes or self.num_groups)

    def wire_of(self, dtype: Any) -> str:
        """Type in which a gradient of this one travels between hosts; empty for its own."""
        return self.wire if self.wire and np.dtype(dtype).name in _COMPRESSED_DTYPES else ""


class Operation(NamedTuple):
    """One operation of a step: its name, the gradients that it reduces and where they lie, and how it is pushed."""

    name: str
    slots: Sequence[Slot]
    layout: str  # empty where they are copied
    push: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.name} {self.layout}: {', '.join(slot.label for slot in self.slots)}"


def propose(scope: str, reduction: Reduction, memory: GradientMemory, active: Sequence[Slot]) -> list[Operation]:
    """The operations that suit the gradients of this rank as they lie now."""
    operations = _bucket_operations(scope, reduction, memory, active)
    covered = {id(slot) for operation in operations for slot in operation.slots}
    rest = [slot for slot in active if id(slot) not in covered]
    return operations + [_copied(scope, reduction, slots) for slots in _packed(reduction, rest)]


# The operations that all ranks follow: the numbers of the slots of each, and the name of the bucket if it is in place.
Plan = Sequence[Sequence[Any]]


def agree(reduction: Reduction, carrier: str, active: Sequence[Slot], proposed: Sequence[Operation]) -> Plan:
    """Rank 0's proposal, as far as it can be followed on all ranks. Collective.

    Parameters
    ----------
    reduction : Reduction
        With the ranks that take part.
    carrier : str
        The name that the exchanges go under.
    active : sequence of Slot
        Those with gradients, the same on all ranks.
    proposed : sequence of Operation
        This rank's own operations.
    """
    process_set = reduction.process_set
    _, replicas = agreement.extremes(process_set, carrier, [len(slot.parameter._grad) for slot in active])
    number = {id(slot): i for i, slot in enumerate(active)}
    plan = []
    for operation in proposed:
        members = [number[id(slot)] for slot in operation.slots]
        single = [i for i in members if replicas[i] == 1]  # several devices of a rank are summed on the way
        in_place = bool(operation.layout) and len(single) == len(members)
        plan += [[operation.name if in_place else "", single]] if single else []
        plan += [["", [i]] for i in members if replicas[i] > 1]
    plan = json.loads(agreement.of_first(process_set, carrier, json.dumps(plan)))
    own = {operation.name: agreement.digest([str(operation)]) for operation in proposed if operation.layout}
    least, most = agreement.extremes(process_set, carrier, [own.get(name, 0) for name, _ in plan])
    return [[name if low == high else "", members] for (name, members), low, high in zip(plan, least, most)]


def follow(
    scope: str, reduction: Reduction, plan: Plan, active: Sequence[Slot], proposed: Sequence[Operation]
) -> list[Operation]:
    """The operations of an agreed plan, on the arrays of this rank."""
    own = {operation.name: operation for operation in proposed}
    return [own[name] if name else _copied(scope, reduction, [active[i] for i in members]) for name, members in plan]


def _bucket_operations(
    scope: str, reduction: Reduction, memory: GradientMemory, active: Sequence[Slot]
) -> list[Operation]:
    """One operation for each bucket that holds gradients."""
    if not memory.attached():
        return []
    slots = {id(slot.parameter): slot for slot in active}
    operations = []
    for number, bucket in enumerate(memory.buckets):
        members = [
            (slots[id(parameter)], begin, view) for parameter, begin, view in bucket.live() if id(parameter) in slots
        ]
        if members:
            operations.append(_in_place(f"{scope}/bucket{number}", reduction, bucket, members))
    return operations


def _in_place(name: str, reduction: Reduction, bucket: Bucket, members: Sequence[tuple]) -> Operation:
    # Places matter, not only names: two ranks could have put the same gradients into a bucket in another order.
    places = "; ".join(f"{slot.label} at {begin} {view.shape}" for slot, begin, view in members)
    layout = f"of {len(members)} gradients, layout {hashlib.blake2b(places.encode(), digest_size=8).hexdigest()}"
    handles = arrays.handles([view for _, _, view in members])
    count = bucket.used // bucket.dtype.itemsize
    priority = max(slot.priority for slot, _, _ in members)
    wire = reduction.wire_of(bucket.dtype)
    compressed = {"wire": wire} if wire else {}
    prepared = process.core.PreparedBucket(
        name,
        bucket.buffer,
        0,
        count,
        bucket.dtype.name,
        layout,
        handles,
        "sum",
        reduction.scale,
        priority,
        **compressed,
    )
    return Operation(name, [slot for slot, _, _ in members], layout, prepared.push)


def _copied(scope: str, reduction: Reduction, slots: Sequence[Slot]) -> Operation:
    process_set, scale = reduction.process_set, reduction.scale
    wire = reduction.wire_of(slots[0].parameter._grad[0].dtype) if reduction.wire else ""
    compressed = {"wire": wire} if wire else {}
    priority = max(slot.priority for slot in slots)
    if len(slots) == 1:
        name = slots[0].name
        handles = arrays.handles(slots[0].parameter._grad)

        def push() -> None:
            process_set.core.push_allreduce(name, handles, handles, "sum", scale, priority, **compressed)

        return Operation(name, slots, "", push)
    name = f"{scope}/packed/{slots[0].label}"
    handles = arrays.handles([slot.parameter._grad[0] for slot in slots])

    def push_all() -> None:
        process_set.core.push_group(name, handles, handles, "sum", scale, priority, **compressed)

    return Operation(name, slots, "", push_all)


def _packed(reduction: Reduction, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The gradients that are copied, divided into operations, in the order of the network."""
    if not reduction.packs:
        return [[slot] for slot in slots]
    packs: list[list[Slot]] = []
    filling: dict[Any, tuple] = {}  # by group and dtype: a pack and its size in bytes
    most = min(reduction.bucket_bytes, _LARGEST_PACKED)
    for slot in sorted(slots, key=lambda slot: -slot.priority):
        gradient = slot.parameter._grad[0]
        if len(slot.parameter._grad) > 1 or gradient.size == 0:
            packs.append([slot])
            continue
        dtype = np.dtype(gradient.dtype)
        nbytes = gradient.size * dtype.itemsize
        pack, used = filling.get((slot.group, dtype), (None, 0))
        if pack is None or (slot.group is None and used + nbytes > most):
            pack, used = [], 0
            packs.append(pack)
        pack.append(slot)
        filling[slot.group, dtype] = (pack, used + nbytes)
    return packs

"""How the gradients of one trainer become their mean over the workers.

The trainer knows nothing of it but this one class. Gradients that lie in shared memory (adoption.py) are reduced there,
a bucket by one operation; each of the others is an operation of its own, which copies it in and out.

When the trainer is made, the ranks agree which parameters have gradients, and in the first step how these lie in
buckets, so that an ordinary step exchanges nothing but gradients. A rank where this has changed (grad_req, a frozen
layer, cast) must find out whether it has changed on the others too, although these, if it has not, do not know that
anybody asks. So it sends its question under the name of the first operation that was agreed on: if all ranks ask, they
get an answer; if one pushes gradients instead, the core sees that the two do not fit, and all of them get an error. The
stale flags of a step travel in the same way.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from typing import Any, Callable, NamedTuple, Sequence

from . import agreement, arrays, initialization, process
from .adoption import Bucket, GradientMemory
from .mxnet_compat import DeferredInitializationError, MXNetError, Parameter, fill_with_zeros
from .parameters import Named

_grad_of = operator.attrgetter("_grad")
_log = logging.getLogger("kvstore_plugin")


class _Slot:
    """One parameter of the trainer."""

    def __init__(self, label: str, name: str, parameter: Parameter, priority: int) -> None:
        self.label = label
        self.name = name
        self.parameter = parameter
        self.priority = priority


class _Operation(NamedTuple):
    """One operation of a step: its name, the gradients that it reduces and where they lie, and how it is pushed."""

    name: str
    slots: Sequence[_Slot]
    layout: str
    push: Callable[[], None]


class Gradients:
    """The gradients of one trainer.

    Parameters
    ----------
    scope : str
        Begins the names of all operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Those near the network's input get a higher priority:
        the next forward pass needs them first.
    bucket_bytes : int
        Largest size of a bucket of several gradients, in bytes; 0 for none.
    when_moved : callable
        Called without arguments when parameters have got other gradient arrays, before these are looked at.

    Raises
    ------
    RuntimeError
        The ranks have other parameters, or other ones that have gradients. Collective: all ranks get it.
    """

    def __init__(self, scope: str, named: Sequence[Named], bucket_bytes: int, when_moved: Callable[[], None]) -> None:
        self._scope = scope
        self._when_moved = when_moved
        self._carrier = f"{scope}/parameters"
        self._slots = [
            _Slot(label, f"{scope}/gradients/{label}", parameter, -position) for label, parameter, position in named
        ]
        self._parameters = [slot.parameter for slot in self._slots]
        self._seen: list[Any] = []  # their gradient arrays as they were when last looked at
        self._memory = GradientMemory(bucket_bytes)
        self._operations: list[_Operation] = []  # what the ranks agreed on last; empty before the first step
        self._proposed: list[str] = []  # what this rank proposed for it
        self._uses_buckets = True  # all ranks had proposed the same
        labels = [slot.label for slot in self._slots]
        agreement.check_names(self._carrier, labels, f"parameters of {scope}")
        trainable = [slot.label for slot in self._slots if slot.parameter.grad_req != "null"]
        agreement.check_names(self._carrier, trainable, f"parameters with gradients of {scope}")
        # In the order of the network, in which they are initialized too, so that layouts agree between ranks.
        for slot in sorted(self._slots, key=lambda slot: -slot.priority):
            self._memory.own(slot.parameter)
        if self._memory.late and process.rank() == 0:
            _log.warning(
                "%d of the %d parameters of %s were there before a backward ran, so their gradients are reduced by "
                "copying, which is slower: make the DistributedTrainer before the first backward.",
                len(self._memory.late),
                len(self._slots),
                scope,
            )

    def _moved(self) -> bool:
        """Whether a parameter has other gradient arrays than at the last step: cast, reset_ctx, grad_req, first use."""
        if not self._operations or not self._memory.attached():
            return True
        return not all(map(operator.is_, map(_grad_of, self._parameters), self._seen))

    def allreduce(self, ignore_stale: bool = False) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Returns at once, unless `ignore_stale` is set, or it is the first step, or the set of gradients has changed.

        Parameters
        ----------
        ignore_stale : bool
            A gradient that no backward has written since the last update counts as zeros; where that is so on all
            workers the parameter is left alone, elsewhere it counts as fresh afterwards, on all workers.

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError in their gradients.
        MXNetError
            The ranks do not take this step alike.
        ValueError
            A gradient is sparse or lies on a GPU.
        """
        if self._moved():
            self._when_moved()
            self._look_again()
        operations = self._operations
        if ignore_stale:
            used = {id(slot) for slot in self._share_freshness()}
            operations = [one for one in operations if any(id(slot) in used for slot in one.slots)]
        for operation in operations:
            operation.push()

    def share_freshness(self) -> None:
        """Let a parameter that some worker has used since the last update count as fresh on all workers."""
        self._share_freshness(clear=False)

    def _look_again(self) -> None:
        """Take note of the gradient arrays as they are now, and let the ranks agree if they lie in another way."""
        self._refuse_deferred()
        active = [slot for slot in self._slots if slot.parameter._grad is not None]
        try:
            for slot in active:
                arrays.as_list(slot.parameter._grad, f"gradient of {slot.label}")
        except ValueError as error:
            self._refuse(str(error))
            raise
        operations = self._with_the_rest(self._bucket_operations(active), active)
        proposed = [f"{one.name} {one.layout}: {', '.join(slot.label for slot in one.slots)}" for one in operations]
        if proposed != self._proposed or not proposed:
            self._agree([slot.label for slot in active], proposed)
            self._proposed = proposed
        self._operations = operations if self._uses_buckets else self._with_the_rest([], active)
        self._seen = [parameter._grad for parameter in self._parameters]

    def _agree(self, labels: Sequence[str], proposed: Sequence[str]) -> None:
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda carrier: agreement.check_names(carrier, labels, what))
        self._uses_buckets = self._ask(lambda carrier: agreement.is_same(carrier, proposed))
        if not self._uses_buckets and process.rank() == 0:
            _log.warning(
                "The workers have initialized the parameters of %s in different orders, so their gradients are reduced "
                "by copying, which is slower.",
                self._scope,
            )

    def _bucket_operations(self, active: Sequence[_Slot]) -> list[_Operation]:
        """One operation for each bucket that holds gradients."""
        if not self._memory.attached():
            return []
        slots = {id(slot.parameter): slot for slot in active}
        operations = []
        for number, bucket in enumerate(self._memory.buckets):
            members = [
                (slots[id(parameter)], begin, view)
                for parameter, begin, view in bucket.live()
                if id(parameter) in slots
            ]
            if members:
                operations.append(_bucket_operation(f"{self._scope}/bucket{number}", bucket, members))
        return operations

    def _with_the_rest(self, buckets: Sequence[_Operation], active: Sequence[_Slot]) -> list[_Operation]:
        """The bucket operations, and one for each gradient that is in none of them."""
        covered = {id(slot) for operation in buckets for slot in operation.slots}
        return [*buckets, *(_single_operation(slot) for slot in active if id(slot) not in covered)]

    def _refuse_deferred(self) -> None:
        """Raise an error, here and on the other ranks, if a parameter that needs a gradient has no values yet."""
        deferred = [slot for slot in self._slots if slot.parameter._grad is None and slot.parameter.grad_req != "null"]
        if not deferred:
            return
        sentence = (
            f"Parameter {deferred[0].label} ({deferred[0].parameter.name}) has no values yet on rank {process.rank()}: "
            "its initialization was deferred to the first forward pass, which has not used it; pass a batch through "
            "the network before step(), or give its layer the size of its input (in_units, in_channels)."
        )
        self._refuse(sentence)
        for slot in deferred:  # those that have values wait for this rank's
            initialization.refuse(slot.parameter, sentence)
        raise DeferredInitializationError(sentence)

    def _share_freshness(self, clear: bool = True) -> list[_Slot]:
        """Slots that are fresh on some worker; with `clear`, zeros replace what is stale there on this one."""
        active = [slot for operation in self._operations for slot in operation.slots]
        if not active:
            return []
        flags = [any(weight._fresh_grad for weight in slot.parameter._data) for slot in active]
        _, fresh = self._ask(lambda carrier: agreement.extremes(carrier, flags))
        used = [slot for slot, flag in zip(active, fresh) if flag]
        for slot in used:
            for weight, gradient in zip(slot.parameter._data, slot.parameter._grad):
                if not weight._fresh_grad:
                    if clear:
                        fill_with_zeros(gradient)
                    weight._fresh_grad = True
        return used

    def _names(self) -> list[str]:
        """Names of the operations that the other ranks expect next from this one."""
        return [operation.name for operation in self._operations] or [self._carrier]

    def _ask(self, exchange: Any) -> Any:
        """Run an exchange under the name of the first operation that the others would push if they did not ask."""
        carrier, *others = self._names()
        try:
            return exchange(carrier)
        except RuntimeError as error:
            sentence = f"The ranks do not take this step of {self._scope} alike: {error}"
            for name in others:
                process.core.refuse(name, sentence)
            raise MXNetError(sentence) from error

    def _refuse(self, reason: str) -> None:
        for name in self._names():
            process.core.refuse(name, reason)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_operations": [], "_proposed": []}


def _single_operation(slot: _Slot) -> _Operation:
    handles = arrays.handles(slot.parameter._grad)
    scale = 1.0 / process.size()

    def push() -> None:
        process.core.push_allreduce(slot.name, handles, handles, "sum", scale, slot.priority)

    return _Operation(slot.name, [slot], "copied", push)


def _bucket_operation(name: str, bucket: Bucket, members: Sequence[tuple]) -> _Operation:
    # Places matter, not only names: two ranks could have put the same gradients into a bucket in another order.
    places = "; ".join(f"{slot.label} at {begin} {view.shape}" for slot, begin, view in members)
    layout = f"of {len(members)} gradients, layout {hashlib.blake2b(places.encode(), digest_size=8).hexdigest()}"
    handles = arrays.handles([view for _, _, view in members])
    count = bucket.used // bucket.dtype.itemsize
    scale = 1.0 / process.size()
    priority = max(slot.priority for slot, _, _ in members)

    prepared = process.core.PreparedBucket(
        name, bucket.buffer, 0, count, bucket.dtype.name, layout, handles, "sum", scale, priority
    )
    return _Operation(name, [slot for slot, _, _ in members], layout, prepared.push)

"""How the gradients of one trainer become their mean over the ranks of a process set.

The trainer knows nothing of it but this one class. How gradients are divided into operations is in plan.py, and how
they come to lie in shared memory in adoption.py.

When the trainer is made, the ranks agree which parameters have gradients, and in the first step how these lie in
buckets, so that an ordinary step exchanges nothing but gradients. A rank where this has changed (grad_req, a frozen
layer, cast) must find out whether it has changed on the others too, although these, if it has not, do not know that
anybody asks. So it sends its question under the name of the first operation that was agreed on: if all ranks ask, they
get an answer; if one pushes gradients instead, the core sees that the two do not fit, and all of them get an error. The
stale flags of a step travel in the same way.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, Sequence

from . import agreement, arrays, initialization, plan, process
from . import process_set as process_sets
from .adoption import GradientMemory
from .mxnet_compat import DeferredInitializationError, MXNetError, fill_with_zeros
from .parameters import Named
from .plan import Operation, Plan, Reduction, Slot

_grad_of = operator.attrgetter("_grad")
_log = logging.getLogger("kvstore_plugin")


class Gradients:
    """The gradients of one trainer that are reduced over one process set.

    Parameters
    ----------
    meeting : str
        The name under which the ranks find out whether they have the same arguments.
    scope : str
        Begins the names of all other operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Those near the network's input get a higher priority:
        the next forward pass needs them first.
    reduction : Reduction
        What becomes of them. Of the ranks' values of bucket_bytes, that of the set's rank 0 counts.
    when_moved : callable
        Called without arguments when parameters have got other gradient arrays, before these are looked at.
    label : str
        What else must be the same on all ranks, as a text for the error where it is not.

    Raises
    ------
    RuntimeError
        The ranks have other parameters, or other ones that have gradients, or other arguments. Collective: all ranks
        get it.
    """

    def __init__(
        self,
        meeting: str,
        scope: str,
        named: Sequence[Named],
        reduction: Reduction,
        when_moved: Callable[[], None],
        label: str = "",
    ) -> None:
        self._scope = scope
        self._when_moved = when_moved
        self._process_set = reduction.process_set
        self._carrier = f"{scope}/parameters"
        self._slots = [
            Slot(name, f"{scope}/gradients/{name}", parameter, -position, None) for name, parameter, position in named
        ]
        self._parameters = [slot.parameter for slot in self._slots]
        self._seen: list[Any] = []  # their gradient arrays as they were when last looked at
        self._factor: float | None = None  # of the last step
        self._operations: list[Operation] = []  # what the ranks agreed on last; empty before the first step
        self._proposed: list[str] = []  # what this rank proposed for it
        self._plan: Plan | None = None  # what the ranks follow; None where all had proposed the same
        labels = [slot.label for slot in self._slots]
        agreement.check_names(self._process_set, meeting, labels, f"parameters of {scope}", label)
        trainable = [slot.label for slot in self._slots if slot.parameter.grad_req != "null"]
        agreement.check_names(self._process_set, self._carrier, trainable, f"parameters with gradients of {scope}")
        is_first = self._process_set.rank() == 0
        proposed = [reduction.bucket_bytes if is_first else -1]
        _, (bucket_bytes,) = agreement.extremes(self._process_set, self._carrier, proposed)
        self._reduction = reduction._replace(bucket_bytes=int(bucket_bytes))
        self._memory = GradientMemory(self._process_set, self._reduction.bucket_bytes)
        # In the order of the network, in which they are initialized too, so that layouts agree between ranks.
        in_order = sorted(self._slots, key=lambda slot: -slot.priority)
        _divide(in_order, reduction.num_groups)
        self._memory.own([(slot.parameter, slot.group) for slot in in_order])
        if self._memory.late and is_first:
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

    def allreduce(self, ignore_stale: bool = False, factor: float | None = None) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Returns at once, unless `ignore_stale` is set, or it is the first step, or the set of gradients has changed.

        Parameters
        ----------
        ignore_stale : bool
            A gradient that no backward has written since the last update counts as zeros; where that is so on all
            workers the parameter is left alone, elsewhere it counts as fresh afterwards, on all workers.
        factor : float, optional
            What the update will multiply gradients by. Where it is another one than in the last step, the ranks compare
            theirs, and wait for that: with different factors their weights would drift apart.

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError in their gradients.
        MXNetError
            The ranks do not take this step alike.
        ValueError
            A gradient is sparse or lies on a GPU, or the process set was removed.
        """
        if self._moved():
            self._when_moved()
            self._look_again()
        if factor is not None and factor != self._factor:
            self._agree_on(factor)
        operations = self._operations
        if ignore_stale:
            used = {id(slot) for slot in self._share_freshness()}
            operations = [one for one in operations if any(id(slot) in used for slot in one.slots)]
        for operation in operations:
            operation.push()

    def _agree_on(self, factor: float) -> None:
        label = f"a step with gradients times {factor!r}"
        try:
            self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, [], label))
        except MXNetError as error:
            raise MXNetError(
                f"{error}. If their batches differ in size, let step() be given the same one on all workers, as with a "
                "DistributedSampler or last_batch='discard'."
            ) from None
        self._factor = factor

    def share_freshness(self) -> None:
        """Let a parameter that some worker has used since the last update count as fresh on all workers."""
        self._share_freshness(clear=False)

    def refuse(self, reason: str) -> None:
        """Take no part in a step, and let the other ranks' part in it fail with the reason."""
        for name in self._names():
            self._process_set.core.refuse(name, reason)

    def _look_again(self) -> None:
        """Take note of the gradient arrays as they are now, and let the ranks agree if they lie in another way."""
        process.rank()  # raises after shutdown()
        process_sets.check(self._process_set)  # it may have been removed
        self._refuse_deferred()
        active = [slot for slot in self._slots if slot.parameter._grad is not None]
        try:
            for slot in active:
                arrays.as_list(slot.parameter._grad, f"gradient of {slot.label}")
        except ValueError as error:
            self.refuse(str(error))
            raise
        operations = plan.propose(self._scope, self._reduction, self._memory, active)
        proposed = [str(operation) for operation in operations]
        if proposed != self._proposed or not proposed:
            self._agree(active, operations)
            self._proposed = proposed
        if self._plan is not None:
            operations = plan.follow(self._scope, self._reduction, self._plan, active, operations)
        self._operations = operations
        self._seen = [parameter._grad for parameter in self._parameters]

    def _agree(self, active: Sequence[Slot], proposed: Sequence[Operation]) -> None:
        labels = [slot.label for slot in active]
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda carrier: agreement.check_names(self._process_set, carrier, labels, what))
        texts = [str(operation) for operation in proposed]
        self._plan = None
        if self._ask(lambda carrier: agreement.is_same(self._process_set, carrier, texts)):
            return
        self._plan = self._ask(lambda carrier: plan.agree(self._reduction, carrier, active, proposed))
        copied = sum(len(members) for name, members in self._plan if not name)
        if copied and self._process_set.rank() == 0:
            _log.warning(
                "The workers have initialized the parameters of %s in different orders, or not all on cpu(0), so %d "
                "gradients are reduced by copying, which is slower.",
                self._scope,
                copied,
            )

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
        self.refuse(sentence)
        for slot in deferred:  # those that have values wait for this rank's
            initialization.refuse(slot.parameter, sentence)
        raise DeferredInitializationError(sentence)

    def _share_freshness(self, clear: bool = True) -> list[Slot]:
        """Slots that are fresh on some worker; with `clear`, zeros replace what is stale there on this one."""
        active = [slot for operation in self._operations for slot in operation.slots]
        if not active:
            return []
        flags = [any(weight._fresh_grad for weight in slot.parameter._data) for slot in active]
        _, fresh = self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, flags))
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
                self._process_set.core.refuse(name, sentence)
            raise MXNetError(sentence) from error

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_operations": [], "_proposed": [], "_plan": None, "_factor": None}


def _divide(slots: Sequence[Slot], num_groups: int) -> None:
    """Give the slots the numbers of their groups: as many gradients in each, in their order."""
    if not num_groups:
        return
    trainable = sum(slot.parameter.grad_req != "null" for slot in slots)
    before = 0
    for slot in slots:
        slot.group = min(before * num_groups // max(trainable, 1), num_groups - 1)
        before += slot.parameter.grad_req != "null"

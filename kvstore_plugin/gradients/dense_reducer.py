"""How the gradients of one trainer become their mean over the ranks of a process set.

The class `DenseReducer` is the trainer's interface to it. bucket_plan.py divides gradients into operations, and
bucket_memory.py places gradients in shared memory.

When the trainer is made, the ranks agree which parameters have gradients. In the first step they agree how the
gradients lie in buckets. So an ordinary step exchanges nothing but gradients. A rank whose gradients have changed
(grad_req, a frozen layer, cast) must ask the other ranks, which may not expect a question. So it asks under the name of
the first operation that was agreed on. If all ranks ask, they get an answer. If a rank pushes gradients instead, the
core sees that the two calls do not match, and all ranks get an error. The stale flags of a step travel in the same way.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import MXNetError, NDArray, fill_with_zeros
from ..coordination import agreement
from ..coordination import operation as turns
from ..parameters import deferred_init, load_tracking, placement
from ..parameters.naming import Named
from ..sharded_optimizer.optimizer import ShardedUpdate
from ..world import process
from ..world import process_set as process_sets
from . import bucket_plan
from .bucket_memory import GradientMemory
from .bucket_plan import Operation, Reduction, Slot
from .fence import Fence, SumsCheck

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")
_log = logging.getLogger("kvstore_plugin")


class DenseReducer:
    """The gradients of one trainer that are reduced over one process set.

    Parameters
    ----------
    meeting : str
        The name under which the ranks find out whether they have the same arguments.
    scope : str
        Begins the names of all other operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Parameters near the network's input get a higher
        priority: the next forward pass needs them first.
    reduction : Reduction
        How gradients are reduced. It must be the same on all ranks, which `options` checks.
    when_moved : callable
        Called without arguments when parameters have got other gradient arrays, before the new arrays are read.
    options : sequence of str
        Further lines that must be the same on all ranks, as the error shows them.
    keys : dict of int, optional
        The key of each parameter in the optimizer on the store, by the parameter's id().

    Raises
    ------
    RuntimeError
        The ranks differ in their parameters, in the parameters with gradients, or in their arguments. Collective: all
        ranks get the error.
    """

    def __init__(
        self,
        meeting: str,
        scope: str,
        named: Sequence[Named],
        reduction: Reduction,
        when_moved: Callable[[], None],
        options: Sequence[str] = (),
        keys: Mapping[int, int] | None = None,
    ) -> None:
        self._scope = scope
        self._when_moved = when_moved
        self._process_set = reduction.process_set
        self._carrier = f"{scope}/parameters"
        self._slots = [
            Slot(
                name, f"{scope}/gradients/{name}", parameter, -position, None, (keys or {}).get(id(parameter), position)
            )
            for name, parameter, position in named
        ]
        self._parameters = [slot.parameter for slot in self._slots]
        self._seen: list[Any] = []  # the parameters' gradient arrays at the last look
        self._seen_weights: list[Any] = []  # with an optimizer on the store
        self._to_update: list[tuple[Operation, set[int] | None]] = []  # operations of this step, and keys; None: all
        # How often each parameter had been initialized when all ranks last had values.
        self._times = [deferred_init.times(parameter) for parameter in self._parameters]
        self.have_values: Sequence[Any] = ()  # parameters that had values on all ranks when the trainer was made
        self._sums = SumsCheck()
        self._compares = False  # whether update() follows the last allreduce()
        self._is_due = False  # the comparison in that update() has not been made yet
        self._operations: list[Operation] = []  # what the ranks agreed on last; empty before the first step
        self._fences: list[Fence] = []  # a fence for each operation
        self._fence = Fence(self._parameters)  # a fence for all parameters
        self._proposed: list[str] = []  # the operations that this rank proposed last
        self._copies_all = False  # the ranks' proposals differ
        labels = [slot.label for slot in self._slots]
        agreement.check_options(self._process_set, meeting, options, scope)
        agreement.check_names(self._process_set, meeting, labels, f"parameters of {scope}")
        trainable = [slot.label for slot in self._slots if slot.parameter.grad_req != "null"]
        agreement.check_names(self._process_set, self._carrier, trainable, f"parameters with gradients of {scope}")
        self._reduction = reduction
        self._comparison = bucket_plan.Comparison(self._process_set)
        self._memory = GradientMemory(self._process_set, reduction.bucket_bytes)
        self._place_gradients()

    def _place_gradients(self) -> None:
        """Let the gradients lie in shared memory from now on, or from their initialization."""
        # In the order of the network, as parameters are initialized, so that layouts agree between ranks.
        in_order = sorted(self._slots, key=lambda slot: -slot.priority)
        if self._reduction.counts_elements:  # the compressor counts per array, so each array needs its own operation
            for number, slot in enumerate(in_order):
                slot.group = number
        else:
            _divide(in_order, self._reduction.num_groups)
        try:
            self._memory.own([(slot.parameter, slot.group) for slot in in_order])
        except Exception as error:
            self._process_set.core.refuse(self._carrier, str(error))
            raise
        if self._memory.late and self._process_set.rank() == 0:
            _log.warning(
                "%d of the %d parameters of %s were there before a backward ran, so their gradients are reduced by "
                "copying, which is slower: make the DistributedTrainer before the first backward.",
                len(self._memory.late),
                len(self._slots),
                self._scope,
            )

    def release(self) -> None:
        """Give up the shared memory, when the process set has ended."""
        self._memory.release()
        self._operations = []

    def _moved(self) -> bool:
        """Whether a parameter has other arrays than in the last step: after cast, reset_ctx, grad_req or first use."""
        if not self._operations or not self._memory.attached():
            return True
        if not all(map(operator.is_, map(_data_of, self._parameters), self._seen_weights)):
            return True
        return not all(map(operator.is_, map(_grad_of, self._parameters), self._seen))

    def allreduce(self, ignore_stale: bool = False, label: str = "", compares: bool = False) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Returns at once, unless `ignore_stale` is set, or it is the first step, or the set of gradients has changed.

        Parameters
        ----------
        ignore_stale : bool
            A stale gradient (no backward has written it since the last update) counts as zeros. A parameter that is
            stale on all workers is left alone. A parameter that is fresh on some worker is fresh on all afterwards.
        label : str
            What else must be equal in the step on all ranks.
        compares : bool
            Whether update() follows, which calls compare().

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError that names the parameter.
        MXNetError
            The ranks' steps differ.
        ValueError
            A gradient is sparse, or lies on a GPU without a CUDA runtime that the core can use, or the process set was
            removed.
        """
        self._leave_out_comparison("update() was not called there after allreduce_grads()")
        self._compares = compares
        if self._moved():
            self._when_moved()
            self._look_again()
        if load_tracking.any_of(self._parameters):
            loaded = load_tracking.label(self._parameters)
            self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, [], loaded))
            load_tracking.forget(self._parameters)
        operations = self._operations
        if ignore_stale:
            used = {id(slot) for slot in self._share_freshness()}
            operations = [one for one in operations if any(id(slot) in used for slot in one.slots)]
            keys = {slot.key for one in operations for slot in one.slots if id(slot) in used}
        self._is_due = compares
        if compares:
            self._sums.begin()
        self._to_update = [(one, keys if ignore_stale else None) for one in operations if one.update is not None]
        for number, operation in enumerate(operations):
            try:
                operation.push(label)
            except BaseException as error:
                pushed = isinstance(error, MXNetError)  # NaiveEngine has run it
                self._break_off(operations[: number + pushed], operations[number + pushed :], str(error))
                raise

    def update(self) -> None:
        """Let the optimizer on the store update the parameters from the sums of allreduce(). Returns at once."""
        while self._to_update:
            operation, keys = self._to_update.pop(0)
            try:
                operation.update.apply(keys)
            except BaseException as error:
                self.refuse_update(f"the update has failed there: {error}")
                raise

    def fence(self) -> None:
        """Call this after the updates: no array of a failed step can be read before all updates have run."""
        if self._process_set.size() > 1:
            for fence in [self._fence] if self._compares else self._fences:  # compare() is one operation on all arrays
                fence.push()

    def refuse_update(self, reason: str) -> None:
        """Refuse the weights of updates that allreduce() has begun and update() has not made, so no rank waits."""
        begun, self._to_update = self._to_update, []
        for operation, _ in begun:
            operation.update.refuse_weights(reason)

    def _leave_out_comparison(self, reason: str) -> None:
        """Refuse the comparison of the last allreduce(), if it is still due."""
        if self._is_due:
            self.refuse_comparison(reason)

    def _refuse_comparison_of(self, reason: str) -> None:
        """Refuse the comparison of a refused step, if the last step had a comparison: the other ranks will make it."""
        self._is_due = self._compares and bool(self._operations)
        self._leave_out_comparison(reason)

    def _break_off(self, pushed: Sequence[Operation], others: Sequence[Operation], reason: str) -> None:
        """Refuse the rest of a step after some of its operations were pushed."""
        self._to_update = [(one, None) for one in pushed if one.update is not None]
        self.refuse_update(reason)
        for operation in others:
            self._refuse(operation, reason)
        self._refuse_comparison_of(reason)

    def _refuse(self, operation: Operation, reason: str) -> None:
        if operation.update is None:
            self._process_set.core.refuse(operation.name, reason)
        else:
            ShardedUpdate.refuse(self._process_set.core, operation.name, reason)

    def compare(self, label: str) -> None:
        """Let an update fail on all ranks, before it changes a weight, if the ranks' updates differ.

        Returns at once. The comparison has the turn of the preceding allreduce(). A rank that leaves the comparison out
        refuses it later. Without a preceding allreduce() it has the name of the first operation.

        Parameters
        ----------
        label : str
            What must be equal in the updates of all ranks.

        Raises
        ------
        MXNetError
            The preceding allreduce() has failed, and this rank knows it.
        """
        failure = self._sums.failure()
        if failure is not None:
            self.refuse_comparison(failure)
            raise MXNetError(failure)
        if self._operations:
            gradients = [gradient for parameter in self._parameters for gradient in parameter._grad or ()]
            name, priority = self._operations[0].name, self._operations[0].slots[0].priority
            own, turn_of = (f"{name}/update", name) if self._is_due else (name, "")
            try:
                self._comparison.push(own, gradients, priority, label, turn_of)
            except MXNetError:
                raise  # the turn is taken: MXNet's NaiveEngine has run the operation
            except BaseException as error:
                self.refuse_comparison(f"update() has failed there: {error}")
                raise
            finally:
                self._is_due = False

    def refuse_comparison(self, reason: str) -> None:
        """Refuse the turn of `compare`: the other ranks' update fails with the reason."""
        if not self._operations:
            return
        name = self._operations[0].name
        if self._is_due:
            self._process_set.core.refuse(f"{name}/update", reason, turn_of=name)
        else:
            self._process_set.core.refuse(name, reason)
        self._is_due = False

    def share_freshness(self) -> None:
        """Mark a parameter as fresh on all workers if some worker has used it since the last update."""
        self._share_freshness(clear=False)

    def awaited_by(self) -> list[int]:
        """The ranks that have begun a step or an update that this rank has not begun."""
        core, names = self._process_set.core, self._names()
        come = core.waiting_for_this(names)
        if self._is_due:
            come += core.waiting_for_this([f"{names[0]}/update"], turn_of=names[0])
        return sorted({rank for ranks in come for rank in ranks})

    def refuse_awaited(self, reason: str) -> None:
        """Refuse what the other ranks wait for: an update, or the next step."""
        if self._is_due:
            self.refuse_comparison(reason)
        else:
            self.refuse(reason)

    def has_begun(self) -> bool:
        """Whether the other ranks may push a step without this rank. In the first step they cannot: all ranks meet."""
        return bool(self._operations)

    def refuse(self, reason: str) -> None:
        """Refuse a step: it fails on the other ranks with the reason."""
        self._leave_out_comparison(reason)
        self._give_back(reason)
        self._refuse_step(reason)

    def _refuse_step(self, reason: str) -> None:
        if not self._operations:
            self._process_set.core.refuse(self._carrier, reason)
        for operation in self._operations:
            self._refuse(operation, reason)
        self._refuse_comparison_of(reason)

    def _look_again(self) -> None:
        """Read the gradient arrays anew. If their layout has changed, the ranks agree on operations again."""
        process.rank()  # raises after shutdown()
        process_sets.check(self._process_set)  # it may have been removed
        self._check_values()
        active = [slot for slot in self._slots if slot.parameter._grad is not None]
        try:
            for slot in active:
                arrays.as_list(slot.parameter._grad, f"gradient of {slot.label}")
            placement.check_devices((slot.label, slot.parameter) for slot in active)
        except ValueError as error:
            self._refuse_step(str(error))
            raise
        store_optimizer = self._reduction.store_optimizer
        new = [] if store_optimizer is None else store_optimizer.assign(_weights(active))
        operations = bucket_plan.propose(self._scope, self._reduction, self._memory, active)
        proposed = [str(operation) for operation in operations]
        if proposed != self._proposed or not proposed:
            try:
                self._agree(active, operations)
            except Exception:
                if new:
                    store_optimizer.release(new)  # the other ranks have not given these keys owners
                raise
            self._proposed = proposed
        if self._copies_all:
            operations = bucket_plan.copied(self._scope, self._reduction, active)
        self._operations = operations
        self._fences = [Fence(slot.parameter for slot in one.slots) for one in operations]
        self._seen = [parameter._grad for parameter in self._parameters]
        self._seen_weights = [] if store_optimizer is None else [parameter._data for parameter in self._parameters]

    def _agree(self, active: Sequence[Slot], proposed: Sequence[Operation]) -> None:
        labels = [slot.label for slot in active]
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda carrier: agreement.check_names(self._process_set, carrier, labels, what))
        own = agreement.digest([str(operation) for operation in proposed])
        label = f"a step with gradients on devices: {len(active[0].parameter._grad) if active else 0}"
        (least,), (most,) = self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, [own], label))
        knew, self._copies_all = self._copies_all, bool(least != most)
        if self._copies_all and not knew and self._process_set.rank() == 0:
            _log.warning(
                "The workers have initialized the parameters of %s in different orders, or on CPUs and GPUs, so all "
                "gradients are reduced by copying, which is slower.",
                self._scope,
            )

    def _give_back(self, reason: str) -> None:
        """Before the first step, defer again the parameters that some rank has no values of, on all ranks alike."""
        if not self._operations:
            deferred_init.give_back(self._parameters, self._times, self.have_values, reason)

    def _check_values(self) -> None:
        """Raise an error on all ranks if a parameter has values on some ranks only, or needs a gradient without values.

        All ranks meet for this check in the first step and after parameters were initialized, which all ranks do.
        """
        times = [deferred_init.times(parameter) for parameter in self._parameters]
        lacks = any(one._grad is None and one.grad_req != "null" for one in self._parameters)
        if self._operations and not lacks and times == self._times:
            return
        named = [(slot.label, slot.parameter) for slot in self._slots]
        call = f"a step of {self._scope}, whose parameters were just initialized"

        def exchange(numbers: list[int]) -> np.ndarray:
            try:
                return self._ask(lambda carrier: turns.exchange(self._process_set, carrier, call, call, numbers))
            except MXNetError as error:
                self._give_back(str(error))
                raise

        are_new = [now != then for now, then in zip(times, self._times)]
        deferred_init.check_values(self._process_set, named, are_new, exchange)
        self._times = times

    def _share_freshness(self, clear: bool = True) -> list[Slot]:
        """Slots that are fresh on some worker; with `clear`, zeros replace their stale gradients on this worker."""
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
        """Names of the operations that the other ranks expect next from this rank."""
        return [operation.name for operation in self._operations] or [self._carrier]

    def _ask(self, exchange: Any) -> Any:
        """Run an exchange under the name of the first operation, which the other ranks push if they do not ask."""
        try:
            return exchange(self._names()[0])
        except RuntimeError as error:
            sentence = f"The ranks do not take this step of {self._scope} alike: {error}"
            # The turn of the first operation is taken. Other ranks may wait for its weights and the later operations.
            self._break_off(self._operations[:1], self._operations[1:], sentence)
            raise MXNetError(sentence) from error

    def __getstate__(self) -> dict:
        return {
            **self.__dict__,
            "_operations": [],
            "_fences": [],
            "_proposed": [],
            "_copies_all": False,
            "_to_update": [],
            "_is_due": False,
        }


def _weights(slots: Sequence[Slot]) -> list[tuple[int, NDArray]]:
    """Keys and weights in the order of the network, which is also the order of their gradients in buckets."""
    return [(slot.key, slot.parameter._data[0]) for slot in sorted(slots, key=lambda slot: -slot.priority)]


def _divide(slots: Sequence[Slot], num_groups: int) -> None:
    """Number the groups of the slots: each group has as many gradients as the others, in the slots' order."""
    if not num_groups:
        return
    trainable = sum(slot.parameter.grad_req != "null" for slot in slots)
    before = 0
    for slot in slots:
        slot.group = min(before * num_groups // max(trainable, 1), num_groups - 1)
        before += slot.parameter.grad_req != "null"

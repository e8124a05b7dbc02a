"""How the gradients of one trainer become their mean over the ranks of a process set.

The class `DenseReducer` is the trainer's interface to it. bucket_plan.py divides gradients into operations, and
bucket_memory.py puts gradients into shared memory.

When the trainer is made, the ranks agree which parameters have gradients. In the first step they agree how the
gradients are in buckets. So an ordinary step exchanges nothing but gradients. A rank whose gradients have changed
(grad_req, a frozen layer, cast) must ask the other ranks, which may not expect a question. So it asks under the name of
the first operation that was agreed on. If all ranks ask, they get an answer. If a rank pushes gradients instead, the
core sees that the two calls do not match, and all ranks get an error. The stale flags of a step travel in the same way.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import operator
import weakref
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import MXNetError, NDArray, Parameter, fill_with_zeros
from ..coordination import agreement
from ..parameters import load_tracking, placement, trainer_state
from ..parameters.naming import Named, described_within
from ..world import process
from ..world.process_set import ProcessSet
from . import bucket_plan, equal_batches
from .bucket_memory import GradientMemory
from .bucket_plan import Operation, Reduction, Slot
from .communication_hook import HookedOperation
from .fence import Fence, SumsCheck
from .reducer import Comparing, SharedReducer
from .squares import Piece, Squares, share_of

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")
_priority_of = operator.attrgetter("priority")
_log = logging.getLogger("kvstore_plugin")

_LAYOUTS_DIFFER = "gradients lie in other places on another worker"

living: weakref.WeakSet[DenseReducer] = weakref.WeakSet()  # for the statistics


class DenseReducer(SharedReducer):
    """Reduces the dense gradients of one trainer over one process set.

    Parameters
    ----------
    scope : str
        Begins the names of all operations.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Parameters near the network's input get a higher
        priority: the next forward pass needs them first.
    reduction, when_moved
        As for `SharedReducer`.
    keys : dict of int
        The key of each parameter in the optimizer on the store, by the parameter's id().
    memory : GradientMemory, optional
        Memory that owns the gradients already; by default own_gradients() makes it.

    Attributes
    ----------
    factor_of_sums : callable or None
        For the statistics of a trainer that sums gradients: says what its updates multiply the sums by.
    """

    factor_of_sums: Callable[[], str | None] | None = None

    def __init__(
        self,
        scope: str,
        named: Sequence[Named],
        reduction: Reduction,
        when_moved: Callable[[], None],
        keys: Mapping[int, int],
        memory: GradientMemory | None = None,
    ) -> None:
        super().__init__(scope, [(one.name, one.value) for one in named], reduction, when_moved)
        self._carrier = f"{scope}/parameters"
        self._slots = [
            Slot(name, f"{scope}/gradients/{name}", parameter, -position, None, keys[id(parameter)])
            for name, parameter, position in named
        ]
        self._seen: list[Any] = []  # the parameters' gradient arrays at the last look
        self._seen_weights: list[Any] = []  # with an optimizer on the store
        self._to_update: list[tuple[Operation, set[int] | None]] = []  # operations of this step, and keys; None: all
        self._sums = SumsCheck()
        self._compares = Comparing.NOTHING  # after the last allreduce()
        self._operations: list[Operation] = []  # what the ranks agreed on last; empty before the first step
        self._fences: list[Fence] = []  # a fence for each operation, if there are other ranks
        self._fence = Fence(self._parameters, scope)  # behind update(): compare() is one operation on all arrays
        self._world: tuple[int, int | None] = (0, None)  # the init() and the addition of the set at the last look
        self._copies_all = False  # the ranks' proposals differ
        self._hook_counts: dict[str, int] = {}  # how many operations the hook starts, by the name of the bucket
        self._when_updated: dict[Any, Callable[[], None]] = {}  # what hooks do when the weights of a step are updated
        self._memory = memory or GradientMemory(self._process_set, reduction.bucket_bytes)
        self._equal_batches: equal_batches.EqualBatches | None = None  # None after the first steps
        living.add(self)

    def meet(self, meeting: str, options: Sequence[str]) -> None:
        """Compare the parameters with the other ranks before the first step, which compares them otherwise. Waits.

        Parameters
        ----------
        meeting : str
            The name under which the ranks find out whether they have the same arguments.
        options : sequence of str
            Further lines that must be the same on all ranks, as the error shows them.

        Raises
        ------
        RuntimeError
            The ranks differ in their parameters, in the parameters with gradients, or in `options`. All ranks get the
            error.
        """
        agreement.check_options(self._process_set, meeting, options, self._scope)
        _check_slots(self._process_set, meeting, self._slots, f"parameters of {self._scope}")
        trainable = [slot for slot in self._slots if slot.parameter.grad_req != "null"]
        what = f"parameters with gradients of {self._scope}"
        _check_slots(self._process_set, self._carrier, trainable, what)

    def own_gradients(self) -> None:
        """Let the gradients be in shared memory from now on, or from their initialization."""
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
            self._process_set._core.refuse(self._carrier, str(error))
            raise
        self._memory.warn_of_copies(self._scope, len(self._slots))

    def watch_batches(self) -> None:
        """Warn once if all workers train on the same batches, as far as the first steps show it."""
        self._equal_batches = equal_batches.of(self._reduction)

    def described(self) -> dict[str, Any]:
        """How the gradients are reduced, for the statistics; see training/statistics.py."""
        slots = sorted(self._slots, key=lambda slot: -slot.priority)
        reasons = self._memory.reasons_for_copies([one.parameter for one in slots if one.parameter._grad is not None])
        if self._copies_all:
            reasons = [why or _LAYOUTS_DIFFER for why in reasons]
        copied = collections.Counter(why for why in reasons if why is not None)
        return {
            "name": self._scope,
            "process_set": self._process_set,
            "adopted": reasons.count(None),
            "copied": dict(copied),
            "bucket_bytes": [_bytes_of(operation) for operation in self._operations],
            "sums_times": None if self.factor_of_sums is None else self.factor_of_sums(),
        }

    def release(self) -> None:
        self._memory.release()
        self._operations = []

    def _moved(self) -> bool:
        """Whether a parameter has other arrays than in the last step: after cast, reset_ctx, grad_req or first use."""
        if not self._operations or self._world != (process.generation, self._process_set.process_set_id):
            return True
        if not all(map(operator.is_, map(_data_of, self._parameters), self._seen_weights)):
            return True
        return not all(map(operator.is_, map(_grad_of, self._parameters), self._seen))

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        self._compares = compares
        self._when_updated.clear()
        if self._moved():
            self._look_again()
        if load_tracking.any_of(self._parameters):
            self.meet_loaded()
        operations = self._operations
        if ignore_stale:
            used = {id(slot) for slot in self.share_freshness(clear=True)}
            operations = [one for one in operations if any(id(slot) in used for slot in one.slots)]
            keys = {slot.key for one in operations for slot in one.slots if id(slot) in used}
        self.is_due = compares is not Comparing.NOTHING and bool(self._operations)
        if compares is Comparing.UPDATE:
            self._sums.begin()
        if self._reduction.store_optimizer is not None:
            self._to_update = [(one, keys if ignore_stale else None) for one in operations]
        pushed = set(map(id, operations))
        self.fences = self._fences
        if self._fences and compares is Comparing.UPDATE:
            self.fences = [self._fence]
            self._fence.ends_step = bool(pushed)
        for fence, operation in zip(self._fences, self._operations):
            fence.ends_step = id(operation) in pushed
        watch, self._equal_batches = self._equal_batches, None
        if watch is None or ignore_stale:
            self._push_all(operations, label)
        else:
            watch.before(operations)
            self._push_all(operations, label)
            self._equal_batches = watch.after()

    def meet_loaded(self) -> None:
        """Wait until all ranks have loaded parameters or states, in place of the next step's first operation.

        Raises
        ------
        MXNetError
            Another rank has not. All ranks get the error, the other ranks in their gradients.
        """
        loaded = load_tracking.label(self._parameters)
        self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, [], loaded))
        load_tracking.forget(self._parameters)

    def compress(self, compression: str) -> None:
        """Send gradients with another type or compressor between hosts from the next step on."""
        if compression != self._reduction.compression:
            self._reduction = self._reduction._replace(compression=compression)
            # All ranks compare their operations again in the next step.
            self._seen = [()] * len(self._parameters)  # sentinel: no list of gradient arrays

    def _push_all(self, operations: Sequence[Operation], label: str) -> None:
        # The core counts a step, and times its sums and updates, by these marks of the operations that this thread
        # pushes: "some" belong to a step, and before the "last" backward writes the gradients near the input.
        mark, last = process.core.set_step_part, max(operations, key=_priority_of, default=None)
        mark("some")
        try:
            for number, operation in enumerate(operations):
                if operation is last and operation.hooked is None:
                    mark("last")
                try:
                    operation.push(label)
                except BaseException as error:
                    # NaiveEngine has run it, and a bucket with a hook takes its turn in any case.
                    begun = operation.update is not None and operation.update.is_begun()
                    pushed = isinstance(error, MXNetError) or operation.hooked is not None or begun
                    reason = str(error) if operation.hooked is None else operation.hooked.reason(error)
                    self._refuse_rest(operations[: number + pushed], operations[number + pushed :], reason)
                    raise
            # Behind all hooks: where the last of them fails, no gradient is used on any worker.
            for operation in operations if self._reduction.hook is not None else ():
                if operation is last:
                    mark("last")
                try:
                    operation.hooked.end()
                except BaseException as error:
                    self._refuse_rest(operations, [], str(error))
                    raise
        finally:
            mark("")

    def update(self) -> None:
        if not self._to_update:
            return
        mark = process.core.set_step_part  # for the statistics, as in _push_all()
        try:
            # What schedules are asked by in this step, where that depends on the order of updates.
            begun = [(one.update, keys) for one, keys in self._to_update]
            reached = self._reduction.store_optimizer.counts_reached(begun)
            mark("weights")
            while self._to_update:
                operation, keys = self._to_update[0]
                operation.update.apply(keys, reached)
                self._to_update.pop(0)
        except BaseException as error:  # of a signal handler too, which Python runs between any two lines
            self.refuse_update(f"the update has failed on that rank: {error}")
            raise
        finally:
            mark("")

    def pieces(self, only_fresh: bool) -> list[Piece]:
        if self._reduction.store_optimizer is not None:
            return [Piece(gradient, 0, gradient.size) for gradient in self.to_scale(only_fresh)]
        in_order = sorted(self._operations, key=_priority_of)
        rank, size = self._process_set.rank(), self._process_set.size()
        shares = (share_of([one._grad[0] for one in _counted([made], only_fresh)], rank, size) for made in in_order)
        return [piece for share in shares for piece in share]

    def to_scale(self, only_fresh: bool) -> list[NDArray]:
        if self._reduction.store_optimizer is not None:
            in_order = sorted(self._to_update, key=lambda one: one[0].priority)
            return [gradient for one, keys in in_order for gradient in one.update.own_gradients(keys)]
        return [gradient for parameter in _counted(self._operations, only_fresh) for gradient in parameter._grad]

    def updated(self) -> None:
        while self._when_updated:
            self._when_updated.popitem()[1]()

    def refuse_update(self, reason: str) -> None:
        begun, self._to_update = self._to_update, []
        for operation, _ in begun:
            if operation.update.is_begun():
                operation.update.refuse_weights(reason)

    def drop_updates(self) -> None:
        for operation, _ in self._to_update:
            operation.update.drop()
        self._to_update = []

    def _refuse_comparison_of(self, reason: str) -> None:
        """Refuse the comparison of a refused step, if the last step had a comparison: the other ranks will make it."""
        self.is_due = self._compares is not Comparing.NOTHING and bool(self._operations)
        self.leave_out_comparison(reason)

    def _refuse_rest(self, pushed: Sequence[Operation], others: Sequence[Operation], reason: str) -> None:
        """Refuse the rest of a step after some of its operations were pushed."""
        self._to_update = [(one, None) for one in pushed if one.update is not None]
        self.refuse_update(reason)
        for operation in pushed:
            if operation.hooked is not None:
                operation.hooked.refuse_rest(reason)
        for operation in others:
            operation.refuse(self._process_set._core, reason)
        self._refuse_comparison_of(reason)

    def compare(self, label: str) -> None:
        failure = self._sums.failure() if self._compares is Comparing.UPDATE else None
        if failure is not None:
            self.refuse_comparison(failure)
            _clear_errors(self._parameters)
            raise MXNetError(failure)
        if self._operations:
            super().compare(label)

    def carry(self, squares: Squares, add_up: Callable[[int], None]) -> None:
        super().carry(squares, add_up)
        if self._compares is Comparing.NOTHING:
            self._compares = Comparing.STEP  # also of the next step, if this rank refuses it

    def _compared(self) -> tuple[list[NDArray], int]:
        gradients = [gradient for parameter in self._parameters for gradient in parameter._grad or ()]
        return gradients, self._operations[0].slots[0].priority

    def refuse_comparison(self, reason: str) -> None:
        if self._operations:
            super().refuse_comparison(reason)

    def has_begun(self) -> bool:
        return bool(self._operations)  # in the first step all ranks meet, so no rank can push it alone

    _has_met = has_begun

    def refuse(self, reason: str) -> None:
        self.leave_out_comparison(reason)
        self.give_back(reason)
        self._refuse_step(reason)

    def _refuse_step(self, reason: str) -> None:
        if not self._operations:
            self._process_set._core.refuse(self._carrier, reason)
        for operation in self._operations:
            operation.refuse(self._process_set._core, reason)
        self._refuse_comparison_of(reason)

    def _look_again(self) -> None:
        """Read the gradient arrays again. If their layout has changed, the ranks agree on operations again."""
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
        try:
            self._agree(active, operations)  # even if this rank proposes what it has proposed before: another may not
        except Exception:
            if new:
                store_optimizer.release(new)  # the other ranks have not given these keys owners
            raise
        # The compressor may need an operation for each gradient, where buckets hold several.
        is_alone = self._reduction.counts_elements and any(slot.group is None for slot in self._slots)
        if self._copies_all or is_alone:
            operations = bucket_plan.copied(self._scope, self._reduction, active)
        if self._reduction.hook is not None:
            more = self._hook_counts, self._when_updated
            hooked = [HookedOperation(self._reduction, one, number, *more) for number, one in enumerate(operations)]
            operations = [one._replace(push=hook.push, hooked=hook) for one, hook in zip(operations, hooked)]
        self._operations = operations
        are_several = self._process_set.size() > 1
        self._fences = [Fence((one.parameter for one in made.slots), self._scope) for made in operations if are_several]
        self._world = process.generation, self._process_set.process_set_id
        self._seen = [parameter._grad for parameter in self._parameters]
        self._seen_weights = [] if store_optimizer is None else [parameter._data for parameter in self._parameters]

    def _agree(self, active: Sequence[Slot], proposed: Sequence[Operation]) -> None:
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda carrier: _check_slots(self._process_set, carrier, active, what))
        own = [agreement.digest([str(operation) for operation in proposed]), agreement.digest(_shapes(active))]
        label = f"a step with gradients on devices: {len(active[0].parameter._grad) if active else 0}"
        least, most = self._ask(lambda carrier: agreement.extremes(self._process_set, carrier, own, label))
        self._hook_counts.clear()  # on all ranks
        knew, (self._copies_all, fails) = self._copies_all, (least != most).tolist()
        # Other shapes give an error that names the parameter, and their layout has no other reason.
        if self._copies_all and not knew and not fails and self._process_set.rank() == 0:
            _log.warning(
                "All gradients of %s are reduced by copying, which is slower, since they lie in other places on some "
                "workers. Either parameters were initialized in different orders, or some on CPUs and some on GPUs; or "
                "some worker cannot move a gradient: kvstore_plugin.statistics()['trainers'] says there why.",
                self._scope,
            )

    def share_freshness(self, clear: bool = False) -> list[Slot]:
        """Slots that are fresh on some worker; with `clear`, zeros replace their stale gradients on this worker."""
        active = [slot for operation in self._operations for slot in operation.slots]
        if not active:
            return []
        flags = [trainer_state.is_fresh(slot.parameter) for slot in active]
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
        return [operation.name for operation in self._operations] or [self._carrier]

    def _ask(self, exchange: Callable[[str], Any]) -> Any:
        try:
            return super()._ask(exchange)
        except RuntimeError as error:
            sentence = f"The ranks do not take the same step of {self._scope}: {error}"
            # The turn of the first operation is taken. Other ranks may wait for its weights and the later operations.
            if self._operations and self._operations[0].hooked is not None:
                self._operations[0].hooked.begin_again()
            self._refuse_rest(self._operations[:1], self._operations[1:], sentence)
            raise MXNetError(sentence) from error

    def __getstate__(self) -> dict:
        return {
            **super().__getstate__(),
            "_operations": [],
            "_fences": [],
            "fences": [],
            "_copies_all": False,
            "_hook_counts": {},
            "_when_updated": {},
            "_to_update": [],
            "_equal_batches": None,
        }


def _counted(operations: Sequence[Operation], only_fresh: bool) -> list[Parameter]:
    """Parameters of operations, in an order that is the same on all ranks; with `only_fresh` those in use."""
    active = [slot.parameter for operation in operations for slot in operation.slots]
    return [one for one in active if not only_fresh or trainer_state.is_fresh(one)]


def _clear_errors(parameters: Sequence[Parameter]) -> None:
    """Read the gradients: an unread error would stay in them, and fail all later sums."""
    for parameter in parameters:
        for gradient in parameter._grad or ():
            with contextlib.suppress(MXNetError):
                gradient.wait_to_read()


def _bytes_of(operation: Operation) -> int:
    """Bytes of the gradients that an operation reduces, on one device."""
    gradients = [slot.parameter._grad[0] for slot in operation.slots if slot.parameter._grad is not None]
    return sum(gradient.size * np.dtype(gradient.dtype).itemsize for gradient in gradients)


def _shapes(slots: Sequence[Slot]) -> list[str]:
    """Shapes and dtypes of the gradients, on one device."""
    gradients = [(slot.label, slot.parameter._grad[0]) for slot in slots]
    return [f"{label} {gradient.shape} {np.dtype(gradient.dtype).name}" for label, gradient in gradients]


def _weights(slots: Sequence[Slot]) -> list[tuple[int, NDArray]]:
    """Keys and weights in the order of the network, which is also the order of their gradients in buckets."""
    return [(slot.key, slot.parameter._data[0]) for slot in sorted(slots, key=lambda slot: -slot.priority)]


def _check_slots(process_set: ProcessSet, carrier: str, slots: Sequence[Slot], what: str) -> None:
    """Raise a RuntimeError on all ranks unless they have the same slots, by their labels."""
    shown = [described_within(slot.label, slot.parameter) for slot in slots]
    agreement.check_names(process_set, carrier, [slot.label for slot in slots], what, shown=shown)


def _divide(slots: Sequence[Slot], num_groups: int) -> None:
    """Number the groups of the slots: each group has as many gradients as the others, in the slots' order."""
    if not num_groups:
        return
    trainable = sum(slot.parameter.grad_req != "null" for slot in slots)
    before = 0
    for slot in slots:
        slot.group = min(before * num_groups // max(trainable, 1), num_groups - 1)
        before += slot.parameter.grad_req != "null"

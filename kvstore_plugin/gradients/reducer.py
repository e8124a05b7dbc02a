"""How the gradients of one trainer become their mean over the ranks of a process set.

The trainer knows nothing of it but this one class. How gradients are divided into operations is in bucket_plan.py, and
how they come to lie in shared memory in bucket_memory.py.

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
from .bucket_plan import Operation, Plan, Reduction, Slot
from .fence import Fence, SumsCheck

_data_of = operator.attrgetter("_data")
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
        What becomes of them, the same on all ranks, which `label` sees to.
    when_moved : callable
        Called without arguments when parameters have got other gradient arrays, before these are looked at.
    options : sequence of str
        What else must be the same on all ranks, as the error shows it where it is not.
    keys : dict of int, optional
        What the optimizer on the store calls each parameter, by id().

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
        self._seen: list[Any] = []  # their gradient arrays as they were when last looked at
        self._seen_weights: list[Any] = []  # with an optimizer on the store
        self._to_update: list[tuple[Operation, set[int] | None]] = []  # operations of this step, and keys; None: all
        # How often parameters had been initialized when all ranks last had values.
        self._times = [deferred_init.times(parameter) for parameter in self._parameters]
        self.have_values: Sequence[Any] = ()  # parameters that had values on all ranks when the trainer was made
        self._sums = SumsCheck()
        self._compares = False  # whether update() follows the last allreduce()
        self._is_due = False  # it has not come yet
        self._operations: list[Operation] = []  # what the ranks agreed on last; empty before the first step
        self._fences: list[Fence] = []  # one for each of them
        self._fence = Fence(self._parameters)  # for all together
        self._proposed: list[str] = []  # what this rank proposed for it
        self._plan: Plan | None = None  # what the ranks follow; None where all had proposed the same
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
        # In the order of the network, in which they are initialized too, so that layouts agree between ranks.
        in_order = sorted(self._slots, key=lambda slot: -slot.priority)
        if self._reduction.counts_elements:  # of each array, so that each has an operation of its own
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
        """Give up the shared memory, when the process set has come to its end."""
        self._memory.release()
        self._operations = []

    def _moved(self) -> bool:
        """Whether a parameter has other gradient arrays than at the last step: cast, reset_ctx, grad_req, first use."""
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
            A gradient that no backward has written since the last update counts as zeros; where that is so on all
            workers the parameter is left alone, elsewhere it counts as fresh afterwards, on all workers.
        label : str
            What the step of all ranks must have in common besides.
        compares : bool
            Whether update() follows, and compare() in it.

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError that names it.
        MXNetError
            The ranks do not take this step alike.
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
        """Let the optimizer on the store update the parameters from what allreduce() has brought. Returns at once."""
        while self._to_update:
            operation, keys = self._to_update.pop(0)
            try:
                operation.update.apply(keys)
            except BaseException as error:
                self.refuse_update(f"the update has failed there: {error}")
                raise

    def fence(self) -> None:
        """Call this after the updates: no array of a step that fails can be read before all of them have run."""
        if self._process_set.size() > 1:
            for fence in [self._fence] if self._compares else self._fences:  # compare() is one operation on all arrays
                fence.push()

    def refuse_update(self, reason: str) -> None:
        """Let the others not wait for the weights of updates that allreduce() has begun and update() has not done."""
        begun, self._to_update = self._to_update, []
        for operation, _ in begun:
            operation.update.refuse_weights(reason)

    def _leave_out_comparison(self, reason: str) -> None:
        """Refuse the comparison that was to follow, if it is still due."""
        if self._is_due:
            self.refuse_comparison(reason)

    def _refuse_comparison_of(self, reason: str) -> None:
        """Refuse what is to follow a step that was refused, if it is to, as after the last one."""
        self._is_due = self._compares and bool(self._operations)
        self._leave_out_comparison(reason)

    def _break_off(self, pushed: Sequence[Operation], others: Sequence[Operation], reason: str) -> None:
        """Refuse what is left of a step of which some operations are pushed."""
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
        """Let an update fail on all ranks, before it has changed a weight, where not all make it alike.

        Returns at once. It has the turn of the allreduce() before; a rank that leaves it out refuses it later. Without
        an allreduce() before it goes under the name of the first operation.

        Parameters
        ----------
        label : str
            What the updates of all ranks must have in common.

        Raises
        ------
        MXNetError
            The allreduce() before has failed, and this rank has seen it.
        """
        failure = self._sums.failure()
        if failure is not None:
            self.refuse_comparison(f"update() cannot be made there: {failure}")
            raise MXNetError(f"update() cannot be made: {failure}")
        if self._operations:
            gradients = [gradient for parameter in self._parameters for gradient in parameter._grad or ()]
            name, priority = self._operations[0].name, self._operations[0].slots[0].priority
            own, turn_of = (f"{name}/update", name) if self._is_due else (name, "")
            try:
                self._comparison.push(own, gradients, priority, label, turn_of)
            except MXNetError:
                raise  # the operation has its turn: MXNet's NaiveEngine has run it
            except BaseException as error:
                self.refuse_comparison(f"update() has failed there: {error}")
                raise
            finally:
                self._is_due = False

    def refuse_comparison(self, reason: str) -> None:
        """Take no part in `compare`, and let the other ranks' update fail with the reason."""
        if not self._operations:
            return
        name = self._operations[0].name
        if self._is_due:
            self._process_set.core.refuse(f"{name}/update", reason, turn_of=name)
        else:
            self._process_set.core.refuse(name, reason)
        self._is_due = False

    def share_freshness(self) -> None:
        """Let a parameter that some worker has used since the last update count as fresh on all workers."""
        self._share_freshness(clear=False)

    def awaited_by(self) -> list[int]:
        """The ranks that have begun a step, or an update, that this one has not called for."""
        core, names = self._process_set.core, self._names()
        come = core.waiting_for_this(names)
        if self._is_due:
            come += core.waiting_for_this([f"{names[0]}/update"], turn_of=names[0])
        return sorted({rank for ranks in come for rank in ranks})

    def refuse_awaited(self, reason: str) -> None:
        """Take no part in what the others wait for: an update, or the next step."""
        if self._is_due:
            self.refuse_comparison(reason)
        else:
            self.refuse(reason)

    def has_begun(self) -> bool:
        """Whether the other ranks may push a step that this one does not take part in; in the first one all meet."""
        return bool(self._operations)

    def refuse(self, reason: str) -> None:
        """Take no part in a step, and let the other ranks' part in it fail with the reason."""
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
        """Take note of the gradient arrays as they are now, and let the ranks agree if they lie in another way."""
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
                    store_optimizer.release(new)  # other ranks have not given them owners
                raise
            self._proposed = proposed
        if self._plan is not None:
            operations = bucket_plan.follow(self._scope, self._reduction, self._plan, active, operations)
        self._operations = operations
        self._fences = [Fence(slot.parameter for slot in one.slots) for one in operations]
        self._seen = [parameter._grad for parameter in self._parameters]
        self._seen_weights = [] if store_optimizer is None else [parameter._data for parameter in self._parameters]

    def _agree(self, active: Sequence[Slot], proposed: Sequence[Operation]) -> None:
        labels = [slot.label for slot in active]
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda carrier: agreement.check_names(self._process_set, carrier, labels, what))
        texts = [str(operation) for operation in proposed]
        self._plan = None
        if self._ask(lambda carrier: agreement.is_same(self._process_set, carrier, texts)):
            return
        self._plan = self._ask(lambda carrier: bucket_plan.agree(self._reduction, carrier, active, proposed))
        copied = sum(len(members) for name, members in self._plan if not name)
        if copied and self._process_set.rank() == 0:
            _log.warning(
                "The workers have initialized the parameters of %s in different orders, or on CPUs and GPUs, so %d "
                "gradients are reduced by copying, which is slower.",
                self._scope,
                copied,
            )

    def _give_back(self, reason: str) -> None:
        """Before the first step has begun, let parameters wait that some rank had no values of, on all ranks alike."""
        if not self._operations:
            deferred_init.give_back(self._parameters, self._times, self.have_values, reason)

    def _check_values(self) -> None:
        """Raise an error on all ranks if a parameter has values on some only, or none where it needs a gradient.

        All ranks meet for that in the first step, and after parameters were initialized, which happens on all ranks.
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
        try:
            return exchange(self._names()[0])
        except RuntimeError as error:
            sentence = f"The ranks do not take this step of {self._scope} alike: {error}"
            # The first one's turn is over; its weights, and the other operations, are what other ranks may wait for.
            self._break_off(self._operations[:1], self._operations[1:], sentence)
            raise MXNetError(sentence) from error

    def __getstate__(self) -> dict:
        return {
            **self.__dict__,
            "_operations": [],
            "_fences": [],
            "_proposed": [],
            "_plan": None,
            "_to_update": [],
            "_is_due": False,
        }


def _weights(slots: Sequence[Slot]) -> list[tuple[int, NDArray]]:
    """Keys and weights, in the order of the network, in which their gradients come to lie in buckets too."""
    return [(slot.key, slot.parameter._data[0]) for slot in sorted(slots, key=lambda slot: -slot.priority)]


def _divide(slots: Sequence[Slot], num_groups: int) -> None:
    """Give the slots the numbers of their groups: as many gradients in each, in their order."""
    if not num_groups:
        return
    trainable = sum(slot.parameter.grad_req != "null" for slot in slots)
    before = 0
    for slot in slots:
        slot.group = min(before * num_groups // max(trainable, 1), num_groups - 1)
        before += slot.parameter.grad_req != "null"

"""The plan of the operations that reduce a trainer's dense gradients, on which the ranks of a process set agree.

When the trainer is created, the ranks agree which parameters have gradients. In the first step they agree on the layout
of the buckets. So an ordinary step exchanges only gradients. A rank whose gradients have changed (grad_req, a frozen
layer, cast) must ask the other ranks, which may not expect a question. So it asks under the name of the first agreed
operation. If all ranks ask, they get an answer. If another rank pushes gradients instead, the core detects that the two
calls do not match, and all ranks get an error.

bucket_plan.py divides gradients into operations, and bucket_memory.py puts gradients into shared memory.
"""

from __future__ import annotations

import collections
import functools
import logging
from typing import Any, Callable, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import NDArray
from ..coordination import agreement
from ..coordination.operation import Turn, exchange
from ..parameters import placement
from ..parameters.naming import described_within
from ..world import process
from ..world.process_set import ProcessSet
from . import bucket_plan
from .bucket_memory import GradientMemory
from .bucket_plan import BucketMember, Operation
from .bucket_sizes import number_groups
from .communication_hook import HookedOperation
from .fence import Fence
from .reducer import RefuseNext, SharedReducer, Task

_log = logging.getLogger("kvstore_plugin")

_LAYOUTS_DIFFER = "places in shared memory differ between workers"
_HAS_CHANGED = "a step after a change of parameters, by grad_req, initialize(), cast(), reset_ctx() or the like"


class PlannedReducer(SharedReducer):
    """Agrees on the operations. `DenseReducer`, a subclass, pushes them in each step.

    Parameters
    ----------
    task, memory
        As for `DenseReducer`.

    Attributes
    ----------
    factor_of_sums : callable or None
        For the statistics of a trainer that sums gradients: returns the factor by which its updates multiply the sums.
    """

    factor_of_sums: Callable[[], str | None] | None = None

    def __init__(self, task: Task, memory: GradientMemory | None = None) -> None:
        super().__init__(task)
        self._exchange_name = f"{task.scope}/parameters"
        self._members = [
            BucketMember(name, f"{task.scope}/gradients/{name}", parameter, -position, None, task.keys[id(parameter)])
            for name, parameter, position in task.named
        ]
        self._memory = memory or GradientMemory(self._process_set, task.reduction.bucket_bytes)
        self._operations: list[Operation] = []  # the last agreed plan; empty before the first step
        # The turn after the last exchange, and how to refuse it, until this rank does what the exchange has decided.
        self._pending: tuple[Turn, RefuseNext] | None = None
        self._fences: list[Fence] = []  # a fence for each operation, if there are other ranks
        self._copies_all = False  # whether all gradients are copied, since the ranks' plans differ
        self._seen: list[Any] = []  # the parameters' gradient arrays at the last check
        self._seen_weights: list[Any] = []  # the parameters' arrays then
        self._world: tuple[int, int | None] = (0, None)  # identifies init() and the set's addition at the last check
        self._hook_counts: dict[str, int] = {}  # number of operations that the hook starts, by bucket name
        self._when_updated: dict[Any, Callable[[], None]] = {}  # to be called after a step's updates

    def meet(self, meeting: str, options: Sequence[str]) -> None:
        """Compare the parameters with the other ranks, before the first step. Waits for the other ranks.

        Parameters
        ----------
        meeting : str
            The name of the exchange in which ranks compare their arguments.
        options : sequence of str
            Further lines that must be the same on all ranks; shown in the error.

        Raises
        ------
        RuntimeError
            The ranks differ in their parameters, in the parameters with gradients, or in `options`. All ranks get the
            error.
        """
        agreement.check_options(self._process_set, meeting, options, self._scope)
        _check_members(self._process_set, meeting, self._members, f"parameters of {self._scope}")
        trainable = [member for member in self._members if member.parameter.grad_req != "null"]
        what = f"parameters with gradients of {self._scope}"
        _check_members(self._process_set, self._exchange_name, trainable, what)
        self._take_order(meeting)

    def _take_order(self, meeting: str) -> None:
        """Take the order of the network from the set's first rank.

        The keys of a dict are the same on all ranks, but they may have been inserted in another order. The buckets, the
        order in which a hook gets them, and the order of a global norm's terms follow from it.
        """
        label = f"the order of the parameters of {self._scope}"
        positions, *_ = exchange(self._process_set, meeting, label, label, [item.position for item in self._named])
        self._named = [item._replace(position=int(at)) for item, at in zip(self._named, positions)]
        for member, item in zip(self._members, self._named):
            member.priority = -item.position

    def compress(self, compression: str) -> None:
        """Use this dtype or compressor for gradients between hosts, beginning with the next step."""
        if compression != self._reduction.compression:
            self._reduction = self._reduction._replace(compression=compression)
            # All ranks compare their operations again in the next step.
            self._seen = [()] * len(self._parameters)  # sentinel: no list of gradient arrays

    def own_gradients(self) -> None:
        """Move the gradients into shared memory, now or when they are initialized."""
        # In the order of the network, in which parameters are initialized, so that all ranks have the same layout.
        in_order = sorted(self._members, key=lambda member: -member.priority)
        # A compressor that sends a fixed number of elements of each array needs a separate operation for each array.
        number_groups(in_order, self._reduction.num_groups, each_alone=self._reduction.counts_elements)
        try:
            self._memory.own([(member.parameter, member.group) for member in in_order])
            self._memory.warn_of_copies(self._scope, len(self._members))  # a handler of logging may raise
        except Exception as error:
            self._process_set._core.refuse(self._exchange_name, str(error))
            raise

    def described(self) -> dict[str, Any]:
        """For the statistics: how the gradients are reduced; see training/statistics.py."""
        members = sorted(self._members, key=lambda member: -member.priority)
        reasons = self._memory.reasons_for_copies(
            [member.parameter for member in members if member.parameter._grad is not None]
        )
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

    def _look_again(self) -> None:
        """Read the gradient arrays again, and agree on operations with the other ranks again."""
        self._check_values()
        active = [member for member in self._members if member.parameter._grad is not None]
        for member in active:
            arrays.as_list(member.parameter._grad, f"gradient of {member.label}")
        placement.check_devices((member.label, member.parameter) for member in active)
        what = f"parameters with gradients of {self._scope}"
        self._ask(lambda exchange_name: _check_members(self._process_set, exchange_name, active, what, _HAS_CHANGED))
        store_optimizer = self._reduction.store_optimizer
        new = [] if store_optimizer is None else store_optimizer.assign(_weights(active))
        plan = bucket_plan.planned(self._scope, self._reduction, self._memory, active)
        knew_copies = self._copies_all
        try:
            # Even if the plan is unchanged: another rank's may have changed.
            plans_differ, shapes_differ = self._compare_plans(active, plan)
        except Exception:
            if new and self._exchange_has_failed:
                store_optimizer.release(new)  # the other ranks have released them too
            raise
        self._take_plan(active, plan, plans_differ)
        # No warning if the shapes differ: then the layouts differ too, and an error names the parameter.
        if plans_differ and not knew_copies and not shapes_differ and self._process_set.rank() == 0:
            self._warn_of_copies()

    def _compare_plans(self, active: Sequence[BucketMember], plan: Sequence[Operation]) -> tuple[bool, bool]:
        """Whether the ranks' plans differ, and whether the shapes of their gradients differ."""
        own = [agreement.digest([str(operation) for operation in plan]), agreement.digest(_shapes(active))]
        label = f"a step with gradients on devices: {len(active[0].parameter._grad) if active else 0}"
        least, most = self._ask(
            lambda exchange_name: agreement.extremes(self._process_set, exchange_name, own, label),
            functools.partial(self._refuse_new_plan, active, plan),
        )
        plans_differ, shapes_differ = (least != most).tolist()
        return plans_differ, shapes_differ

    def _take_plan(self, active: Sequence[BucketMember], plan: Sequence[Operation], plans_differ: bool) -> None:
        """Set the operations of the next steps after the ranks have compared their plans."""
        operations = plan
        # The compressor may need an operation for each gradient, although buckets hold several.
        is_alone = self._reduction.counts_elements and any(member.group is None for member in self._members)
        if plans_differ or is_alone:
            operations = bucket_plan.copied(self._scope, self._reduction, active)
        self._hook_counts.clear()  # on all ranks
        if self._reduction.hook is not None:
            more = self._hook_counts, self._when_updated
            hooked = [HookedOperation(self._reduction, one, number, *more) for number, one in enumerate(operations)]
            operations = [one._replace(push=hook.push, hooked=hook) for one, hook in zip(operations, hooked)]
        are_several = self._process_set.size() > 1
        self._fences = [
            Fence((member.parameter for member in made.members), self._scope) for made in operations if are_several
        ]
        self._copies_all = plans_differ
        self._world = process.generation, self._process_set.process_set_id
        self._seen = [parameter._grad for parameter in self._parameters]
        self._seen_weights = [parameter._data for parameter in self._parameters]
        self._operations, self._pending = operations, None

    def _refuse_new_plan(
        self, active: Sequence[BucketMember], plan: Sequence[Operation], reason: str, met: np.ndarray
    ) -> None:
        """Refuse the first step of a plan that this rank has not taken. `met`: what the ranks have exchanged."""
        self._take_plan(active, plan, bool(np.ptp(met[:, 0])))
        self.refuse_operations(reason)

    def _follow_weights(self) -> None:
        """After a reset_ctx() that concerns this rank alone: the same operations, with the new weights.

        It must not plan again: a new plan could differ from the plan on which the ranks have agreed.
        """
        self._when_moved()
        if self._reduction.store_optimizer is not None:
            for operation in self._operations:
                if operation.update.is_begun():
                    operation.update.refuse_weights("the update was interrupted on that rank")
            self._operations = [operation.renewed() for operation in self._operations]
        self._seen_weights = [parameter._data for parameter in self._parameters]

    def _warn_of_copies(self) -> None:
        _log.warning(
            "All gradients of %s are reduced by copying, which is slower, since their places in shared memory "
            "differ between workers. Either parameters were initialized in different orders, or some on CPUs and "
            "some on GPUs; or a worker cannot move a gradient: kvstore_plugin.statistics()['trainers'] on that "
            "worker says why.",
            self._scope,
        )

    def refuse_operations(self, reason: str) -> None:
        """Refuse the operations that the other ranks start in this step."""
        raise NotImplementedError

    def _names(self) -> list[str]:
        return [operation.name for operation in self._operations] or [self._exchange_name]

    def _arrays_to_compare(self) -> tuple[list[NDArray], int]:
        gradients = [gradient for parameter in self._parameters for gradient in parameter._grad or ()]
        return gradients, self._operations[0].members[0].priority

    def _has_gradients(self) -> bool:
        return bool(self._operations)

    def has_begun(self) -> bool:
        return bool(self._operations)  # in the first step all ranks wait for each other before any push

    _has_met = has_begun

    def __getstate__(self) -> dict:
        return {
            **super().__getstate__(),
            "_operations": [],
            "_pending": None,
            "_fences": [],
            "fences": [],
            "_copies_all": False,
            "_hook_counts": {},
            "_when_updated": {},
        }


def _bytes_of(operation: Operation) -> int:
    """Bytes of the gradients that an operation reduces, on one device."""
    gradients = [member.parameter._grad[0] for member in operation.members if member.parameter._grad is not None]
    return sum(gradient.size * np.dtype(gradient.dtype).itemsize for gradient in gradients)


def _shapes(members: Sequence[BucketMember]) -> list[str]:
    """Shapes and dtypes of the gradients, on one device."""
    gradients = [(member.label, member.parameter._grad[0]) for member in members]
    return [f"{label} {gradient.shape} {np.dtype(gradient.dtype).name}" for label, gradient in gradients]


def _weights(members: Sequence[BucketMember]) -> list[tuple[int, NDArray]]:
    """Keys and weights in the order of the network, which is also the order of their gradients in buckets."""
    return [(member.key, member.parameter._data[0]) for member in sorted(members, key=lambda member: -member.priority)]


def _check_members(
    process_set: ProcessSet, exchange_name: str, members: Sequence[BucketMember], what: str, label: str = ""
) -> None:
    """Raise a RuntimeError on all ranks unless they have the same members, by their labels."""
    shown = [described_within(member.label, member.parameter) for member in members]
    agreement.check_names(process_set, exchange_name, [member.label for member in members], what, label, shown)

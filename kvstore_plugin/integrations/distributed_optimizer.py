"""DistributedOptimizer: wraps an optimizer of MXNet, and averages gradients over all workers before it uses them.

It is a proxy of the wrapped optimizer: all attributes are read from and written to the wrapped optimizer, except the
two methods that MXNet calls for an update.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
from typing import Any, ContextManager, Iterator, NamedTuple, Sequence

from ..compat import arrays, errors, patches
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.arguments import check_is_added, positive_number, whole_number
from ..compat.mxnet import MXNetError, NDArray, gluon, mx
from ..coordination import operation, operation_names
from ..parameters import naming
from ..world import process
from ..world.process_set import ProcessSet, global_process_set

# Attributes of the wrapper. All other attributes belong to the wrapped optimizer.
_OWN = frozenset(["update", "update_multi_precision", "_optimizer", "_mean"])


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer so that it updates from gradients averaged over all workers.

    For ``Module.fit(optimizer=..., kvstore=None)``, for ``gluon.Trainer(params, optimizer, kvstore=None)``, and
    wherever else MXNet takes an optimizer; with Gluon, `DistributedTrainer` is faster. Broadcast the parameters first
    (`broadcast_parameters`). Gradients are averaged in place, over the workers, not over the devices of a worker. The
    first update waits for the other workers; later updates return at once. If a program has several such optimizers,
    their first updates must have the same order on all workers. All workers must update each index equally often, in
    any order.

    Attributes are read from and written to the wrapped optimizer. So `rescale_grad` must have the value for a single
    worker: 1 divided by this worker's batch size.

    Parameters
    ----------
    optimizer : mx.optimizer.Optimizer
        The optimizer to wrap.
    gradient_predivide_factor : float, optional
        Finite and above 0. As for `DistributedTrainer`, it does not change the mean.
    num_groups : int, optional
        The number of groups in which the gradients of one update() are reduced. Groups have equally many gradients, in
        the order of their indices, and one operation reduces each group. With 0, or if update() gets a single index,
        one operation reduces each gradient. With groups, all workers must give update() the same lists of indices, in
        any order.
    process_set : ProcessSet, optional
        The workers that train together. A worker outside the set updates from its own gradients.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or `optimizer` is a DistributedOptimizer itself.

    Examples
    --------
    >>> mykv.broadcast_parameters(net.collect_params())
    >>> optimizer = mykv.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    >>> trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels)
    >>> loss.backward()
    >>> trainer.step(len(images))
    """

    averages_gradients = True  # the store rejects such an optimizer, since the store sums gradients

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        process.require()
        first_use = _first_use(process_set)
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                "The optimizer is a DistributedOptimizer already and would average gradients twice. Pass the optimizer "
                "that it wraps."
            )
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise TypeError(f"The optimizer must be an mx.optimizer.Optimizer, not {type(optimizer).__name__}.")
        positive_number("gradient_predivide_factor", gradient_predivide_factor)
        num_groups = whole_number("num_groups", num_groups, 0)
        check_is_added(process_set)
        self._optimizer = optimizer
        self._mean = _Mean(process_set, num_groups, first_use)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over the workers, in place, and update the weights from them. Returns at once.

        Parameters
        ----------
        index : int or str, or a list of them
            MXNet's index of the weight. Gradients of different workers are matched by this index.
        weight, grad : NDArray, or a list of them
            Weights and gradients; dense.
        state : object, or a list of them
            States of the wrapped optimizer, from its create_state().

        Raises
        ------
        TypeError, ValueError
            A gradient is sparse, or is on a GPU without a CUDA runtime that the core can use, or the process set was
            removed. On the other workers the gradient carries an MXNetError.
        """
        self._mean.replace(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Like update(), with the float32 master weights of create_state_multi_precision()."""
        self._mean.replace(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_optimizer"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._optimizer, name)

    def __dir__(self) -> list[str]:
        return dir(self._optimizer)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    def __reduce__(self) -> tuple:
        return _rebuilt, (self._optimizer, self._mean)

    def __deepcopy__(self, memo: dict) -> DistributedOptimizer:
        mean = _Mean(self._mean.process_set, self._mean.num_groups, _first_use(self._mean.process_set, is_copy=True))
        return _rebuilt(copy.deepcopy(self._optimizer, memo), mean)


def note_order(optimizer: Any, trainer: gluon.Trainer, params: Any) -> None:
    """Let a DistributedOptimizer compare the order in which the workers' gluon.Trainers number `params`."""
    if isinstance(optimizer, DistributedOptimizer):
        optimizer._mean.order = naming.order_of(trainer._params, params)


def refusing_rest(trainer: gluon.Trainer, ignore_stale: bool) -> ContextManager[None]:
    """Context manager of a Trainer's updates with a DistributedOptimizer; a no-op with other optimizers.

    An exception, such as MXNet's warning about a stale gradient, refuses the gradients that were not averaged: these
    updates fail on the other workers, which would otherwise average them with those of this worker's next step. Not
    with groups, whose names depend on lists that MXNet has not made yet.
    """
    optimizer = trainer._optimizer
    if not isinstance(optimizer, DistributedOptimizer) or ignore_stale:
        return contextlib.nullcontext()
    return optimizer._mean.refusing_rest(trainer._params)


def averaging_like(before: Any, loaded: Any) -> Any:
    """The loaded optimizer, or a wrapper of it if it has replaced a DistributedOptimizer and does not average."""
    if not isinstance(before, DistributedOptimizer) or isinstance(loaded, DistributedOptimizer):
        return loaded
    return _rebuilt(loaded, before._mean)  # the same names: other workers may have loaded nothing


def check_not_averaging(optimizer: Any, whose: str) -> None:
    """Raise a ValueError if `optimizer` is a DistributedOptimizer. `whose`: the caller, which uses the store 'mykv'."""
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            f"{whose} has a DistributedOptimizer, which averages gradients, and the store 'mykv', which would sum them "
            "again. Use kvstore=None, or pass the optimizer that the DistributedOptimizer wraps."
        )


class _Mean:
    """Replaces gradients by their mean over a process set.

    Parameters
    ----------
    process_set : ProcessSet
        The workers.
    num_groups : int
        As for `DistributedOptimizer`.
    first_use : FirstUse
    """

    def __init__(self, process_set: ProcessSet, num_groups: int, first_use: operation_names.FirstUse) -> None:
        self.process_set = process_set
        self.num_groups = num_groups
        self.order = naming.Order()  # the order of a gluon.Trainer's parameters
        self._other_orders = ""  # the error, if the members' orders differ
        # Results of the core, with the indices of gradients that were averaged or refused, in one update() or, within
        # refusing_rest(), in all.
        self._taken: list[tuple[Any, list]] = []
        self._keeps_taken = False
        self._first_use = first_use

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_first_use"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._first_use = _first_use(self.process_set, is_copy=True)

    def renumber(self, number: int) -> None:
        """Change the number in the names of all operations; the new number must be the same on all workers."""
        self._first_use.renamed(number)

    def replace(self, index: Any, gradient: Any) -> None:
        """Replace the gradient of an index, or the gradients of a list of indices."""
        if not self.process_set.included():
            process.rank()  # raises after shutdown()
            check_is_added(self.process_set)  # raises an error if the set was removed
            return
        if self._first_use.is_due():
            self._meet()
        if self._other_orders:
            raise RuntimeError(self._other_orders)
        if not isinstance(index, (list, tuple)):
            index, gradient = [index], [gradient]
        if not self._keeps_taken:
            self._taken = []
        groups = self._groups([_plain(one) for one in index])
        try:
            gradients = _checked(index, gradient)
        except (TypeError, ValueError) as error:
            self._refuse(groups, str(error))
            raise
        self._push(groups, gradients)

    @contextlib.contextmanager
    def refusing_rest(self, params: Sequence[Any]) -> Iterator[None]:
        """Context manager that refuses those gradients of Parameters that it has not averaged before an exception."""
        self._taken, self._keeps_taken = [], True
        try:
            yield
        except BaseException as error:
            if self.process_set.included() and not self.num_groups:
                if self._first_use.is_due():
                    self._meet()
                trained = [number for number, one in enumerate(params) for _ in one._grad or ()]
                left = collections.Counter(trained) - collections.Counter(
                    index for _, indices in self._taken for index in indices
                )
                reason = f"the update has failed on that rank: {errors.reason_of(error)}"
                self._refuse([_Group([index], []) for index in left.elements()], reason)
            raise
        finally:
            self._keeps_taken = False

    def _meet(self) -> None:
        orders = self._first_use.meet(self.order)
        if orders is not None:
            self._other_orders = naming.NUMBERED_DIFFERENTLY if naming.orders_differ(orders) else ""

    def _groups(self, indices: list) -> list[_Group]:
        """Divide the indices into groups; one operation reduces each group."""
        if not self.num_groups:
            return [_Group([one], [position]) for position, one in enumerate(indices)]
        positions = sorted(
            range(len(indices)), key=lambda position: (isinstance(indices[position], str), indices[position])
        )
        groups = [_Group([], []) for _ in range(self.num_groups)]
        for number, position in enumerate(positions):
            group = groups[number * self.num_groups // len(positions)]
            group.indices.append(indices[position])
            group.positions.append(position)
        return [group for group in groups if group.positions]

    def _push(self, groups: list[_Group], gradients: Sequence[NDArray]) -> None:
        core = self.process_set._core
        scale = 1.0 / self.process_set.size()
        for number, group in enumerate(groups):
            name, priority = self._name(group), _priority(group.indices[0])
            handles = arrays.handles([gradients[position] for position in group.positions])
            push, label = core.push_allreduce, ""
            if self.num_groups:
                push, label = core.push_group, f"of indices {', '.join(str(one) for one in group.indices)}"
            function = functools.partial(push, name, handles, handles, "sum", scale, priority, label)
            refuse = functools.partial(self._refuse, groups[number:])
            what = f"The gradient of index {group.indices[0]!r} cannot be reduced"
            try:
                with operation.refusing(refuse, what, self._taken):
                    operation.start_and_note(self._taken, function, group.indices)
            except MXNetError as error:
                if not isinstance(error, ArgumentValueError):  # NaiveEngine has run the operation
                    self._taken.append((None, group.indices))
                raise

    def _refuse(self, groups: list[_Group], reason: str) -> None:
        for group in groups:
            function = functools.partial(self.process_set._core.refuse, self._name(group), reason)
            operation.start_and_note(self._taken, function, group.indices)

    def _name(self, group: _Group) -> str:
        return f"{self._first_use.shown}/{group.indices[0]!r}"


def _first_use(process_set: Any, is_copy: bool = False) -> operation_names.FirstUse:
    call = "the first update() of a DistributedOptimizer"
    return operation_names.FirstUse(process_set, "optimizer", call, is_copy)


class _Group(NamedTuple):
    """Indices of gradients that one operation reduces, and their positions in the lists of update()."""

    indices: list
    positions: list


def _checked(index: Sequence[Any], gradients: Any) -> Sequence[NDArray]:
    """The gradients of a list of indices.

    Raises
    ------
    TypeError, ValueError
        There are more or fewer gradients than indices, or a gradient is not dense, or is on a GPU without a CUDA
        runtime that the core can use.
    """
    if not isinstance(gradients, (list, tuple)):
        raise ArgumentTypeError(f"A list of indices needs a list of gradients, not {type(gradients).__name__}.")
    if len(index) != len(gradients):
        raise ArgumentValueError(f"There are {len(index)} indices but {len(gradients)} gradients.")
    for one, gradient in zip(index, gradients):
        if not isinstance(gradient, NDArray):
            raise ArgumentTypeError(f"The gradient of index {one!r} must be an NDArray, not {type(gradient).__name__}.")
        arrays.as_list(gradient, f"gradient of index {one!r}")
    return gradients


def _plain(index: Any) -> int | str:
    """The index as a plain int or str, so that workers agree even if their types of index differ."""
    if type(index) is int or type(index) is str:
        return index
    if isinstance(index, bytes):
        return index.decode()
    return str(index) if isinstance(index, str) else operator.index(index)


def _priority(index: int | str) -> int:
    """Lower indices come first: they are nearer to the network's input, where the next forward pass begins."""
    return -index if isinstance(index, int) and 0 <= index < 2**31 else 0


def _rebuilt(optimizer: Any, mean: _Mean) -> DistributedOptimizer:
    patches.install()  # unpickled in another process, where init() may not have run yet
    rebuilt = DistributedOptimizer.__new__(DistributedOptimizer)
    rebuilt._optimizer, rebuilt._mean = optimizer, mean
    return rebuilt

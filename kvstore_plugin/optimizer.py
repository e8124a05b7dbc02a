"""DistributedOptimizer: an optimizer of MXNet that averages gradients over all workers before it uses them.

It stands where the wrapped optimizer would: whatever is read from it or written to it is the wrapped one's, but for the
two methods by which MXNet asks for an update.
"""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any, Sequence

from . import arrays, parameters, process
from .arguments import check_is_added, check_predivide_factor, whole_number
from .kvstore import MyKV
from .mxnet_compat import MXNetError, gluon, mx
from .process_set import ProcessSet, global_process_set

# All other attributes are the wrapped optimizer's.
_OWN = frozenset(["update", "update_multi_precision", "_optimizer", "_mean"])


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer so that it updates from gradients averaged over all workers.

    For ``Module.fit(optimizer=..., kvstore=None)``, for ``gluon.Trainer(params, optimizer, kvstore=None)``, and
    wherever else MXNet takes an optimizer; with Gluon, `DistributedTrainer` is the faster way. Give all workers the
    same parameters first (`broadcast_parameters`). Gradients are averaged in place, over the workers and not over the
    devices of one, and the calls return at once. All workers must create their optimizers in the same order, and update
    each index equally often, in whatever order.

    Attributes are those of the wrapped optimizer, also where they are written. So `rescale_grad` is that of one worker:
    one divided by its own batch size.

    Parameters
    ----------
    optimizer : mx.optimizer.Optimizer
        The one to wrap.
    gradient_predivide_factor : float, optional
        Finite and above 0. As for `DistributedTrainer`, the result is the mean whatever it is.
    num_groups : int, optional
        The gradients that one call of update() is given are reduced in so many groups, as many gradients in each, in
        the order of their indices: those of a group by one operation. 0, and where an index is given alone: each by
        itself. With groups, all workers must give update() the same lists of indices, in whatever order.
    process_set : ProcessSet, optional
        The workers that train together. A worker outside of it updates from its own gradients.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or `optimizer` is a DistributedOptimizer itself.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        process.require()
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("The optimizer is a DistributedOptimizer already, and would average gradients twice.")
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise TypeError(f"The optimizer must be an mx.optimizer.Optimizer, not {type(optimizer).__name__}.")
        check_predivide_factor(gradient_predivide_factor)
        num_groups = whole_number("num_groups", num_groups, 0)
        check_is_added(process_set)
        self._optimizer = optimizer
        self._mean = _Mean(process_set, num_groups, parameters.numbered(process_set, "optimizer"))

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over the workers, in place, and update the weights from them. Returns at once.

        Parameters
        ----------
        index : int or str, or a list of them
            What MXNet knows the weights by, and what the workers are matched by.
        weight, grad : NDArray, or a list of them
            Weights and gradients; dense ones.
        state : object, or a list of them
            States of the wrapped optimizer, from its create_state().

        Raises
        ------
        TypeError, ValueError
            A gradient is sparse, or lies on a GPU, or the process set was removed. The other workers get an MXNetError
            in the gradient.
        """
        self._mean.replace(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As update(), with the master copies in float32 that create_state_multi_precision() has made."""
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
        mean = _Mean(self._mean.process_set, self._mean.num_groups, None)
        return _rebuilt(copy.deepcopy(self._optimizer, memo), mean)


class _Mean:
    """Replaces gradients by their mean over a process set.

    Parameters
    ----------
    process_set : ProcessSet
        The workers.
    num_groups : int
        As for `DistributedOptimizer`.
    scope : str or None
        Begins the names of all operations. None in a copy, which counts among the optimizers of the set once it is
        used: workers may make copies that they never use.
    """

    def __init__(self, process_set: ProcessSet, num_groups: int, scope: str | None) -> None:
        self.process_set = process_set
        self.num_groups = num_groups
        self._scope = scope

    def replace(self, index: Any, gradient: Any) -> None:
        """Replace the gradient of an index, or those of a list of them."""
        if not self.process_set.included():
            check_is_added(self.process_set)  # it may have been removed
            return
        if self._scope is None:
            self._scope = parameters.numbered(self.process_set, "optimizer")
        if isinstance(index, (list, tuple)):
            groups = self._groups(list(zip(map(_plain, index), gradient)))
        else:
            groups = [[(_plain(index), gradient)]]
        try:
            for group in groups:
                for one, array in group:
                    arrays.as_list(array, f"gradient of index {one!r}")
        except (TypeError, ValueError) as error:
            self._refuse(groups, str(error))
            raise
        self._push(groups)

    def _groups(self, members: list[tuple]) -> list[list[tuple]]:
        """Pairs of an index and its gradient, divided into those that one operation reduces."""
        if not self.num_groups:
            return [[member] for member in members]
        members.sort(key=lambda member: (isinstance(member[0], str), member[0]))
        groups: list[list[tuple]] = [[] for _ in range(self.num_groups)]
        for place, member in enumerate(members):
            groups[place * self.num_groups // len(members)].append(member)
        return [group for group in groups if group]

    def _push(self, groups: Sequence[list[tuple]]) -> None:
        core = self.process_set.core
        scale = 1.0 / self.process_set.size()
        for number, group in enumerate(groups):
            handles = arrays.handles([array for _, array in group])
            try:
                if len(group) == 1 and not self.num_groups:
                    core.push_allreduce(self._name(group), handles, handles, "sum", scale, _priority(group))
                else:
                    label = f"of indices {', '.join(str(one) for one, _ in group)}"
                    core.push_group(self._name(group), handles, handles, "sum", scale, _priority(group), label=label)
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError) as error:
                sentence = f"The gradient of index {group[0][0]!r} cannot be reduced: {error}."
                self._refuse(groups[number:], sentence)
                raise ValueError(sentence) from error

    def _refuse(self, groups: Sequence[list[tuple]], reason: str) -> None:
        for group in groups:
            self.process_set.core.refuse(self._name(group), reason)

    def _name(self, group: list[tuple]) -> str:
        return f"{self._scope}/{group[0][0]!r}"


def _plain(index: Any) -> int | str:
    """The index as a plain int or str, so that workers that use other types of them agree."""
    if type(index) is int or type(index) is str:
        return index
    if isinstance(index, bytes):
        return index.decode()
    return str(index) if isinstance(index, str) else operator.index(index)


def _priority(group: list[tuple]) -> int:
    """Lower indices first: in a network they are nearer to its input, where the next forward pass begins."""
    first = group[0][0]
    return -first if isinstance(first, int) and 0 <= first < 2**31 else 0


def _rebuilt(optimizer: Any, mean: _Mean) -> DistributedOptimizer:
    rebuilt = DistributedOptimizer.__new__(DistributedOptimizer)
    rebuilt._optimizer, rebuilt._mean = optimizer, mean
    return rebuilt


def _refusing(original: Any) -> Any:
    """gluon.Trainer.__init__, which refuses what would reduce gradients twice."""

    @functools.wraps(original)
    def __init__(
        self: Any,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        kvstore: Any = "device",
        *more: Any,
        **named: Any,
    ) -> None:
        is_ours = isinstance(kvstore, MyKV) or (isinstance(kvstore, str) and kvstore.lower() == "mykv")
        if is_ours and isinstance(optimizer, DistributedOptimizer):
            raise ValueError(
                "A DistributedOptimizer averages gradients over the workers, and the store 'mykv' would sum them once "
                "more: give gluon.Trainer kvstore=None, or the optimizer that is wrapped."
            )
        original(self, params, optimizer, optimizer_params, kvstore, *more, **named)

    __init__.refuses_distributed_optimizers = True
    return __init__


if not getattr(gluon.Trainer.__init__, "refuses_distributed_optimizers", False):
    gluon.Trainer.__init__ = _refusing(gluon.Trainer.__init__)

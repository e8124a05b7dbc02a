"""Makes BatchNorm's running means and variances equal on all workers: sync_aux_params, and a trainer's averaging.

These values come from the batches of each worker and device, not from gradients, so they drift apart in training.
Training does not use them, so the drift matters only in evaluation and in saved files.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Sequence

from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import MXNetError, NDArray, Parameter, gluon
from ..coordination import agreement, operation
from ..coordination.operation import Turn
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .naming import Named, arrays_of, described, named_values

# Endings of the names of these values in MXNet's BatchNorm and in symbolic networks.
_SUFFIXES = ("running_mean", "running_var", "moving_mean", "moving_var")


class _State(NamedTuple):
    """One auxiliary value, with its arrays on the devices of this process."""

    name: str
    replicas: list[NDArray]


def sync_aux_params(params: Any, root_rank: int | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Make the running means and variances of BatchNorm equal on all workers and devices. Collective; waits.

    Call it before saving and, if workers evaluate shares of one data set, before evaluation.

    Parameters
    ----------
    params : Block, ParameterDict, dict or list of Parameter or NDArray
        Parameters created with ``differentiable=False``, which training changes without gradients, are synchronized. So
        are the running means and variances of BatchNorm in a SymbolBlock. All other Parameters, including frozen
        Parameters, do not change. NDArrays, such as the `aux_params` of ``Module.get_params()``, are all synchronized.
        Values are matched between ranks as in `broadcast_parameters`.
    root_rank : int, optional
        The global rank of the worker whose values, on its first device, all workers get. By default all workers get the
        mean over all devices of all workers; for variances, the mean of the devices' variances.
    process_set : ProcessSet, optional
        The workers that call this function.

    Raises
    ------
    TypeError, ValueError
        Errors of this rank's arguments: a value has not been initialized (before the first forward pass), is sparse, or
        is on a GPU without a CUDA runtime that the core can use; or `root_rank` is not in the process set. Then the
        other ranks get an MXNetError that names this rank. Or this rank is not in the process set.
    MXNetError
        The ranks pass different sets of values (names, shapes, dtypes), or different root_ranks; a rank waits in
        another call, has left the job, or passes an array that carries an error.

    Examples
    --------
    >>> mykv.sync_aux_params(net.collect_params())  # the running means and variances of BatchNorm
    >>> if mykv.rank() == 0:
    ...     net.save_parameters("net.params")
    """
    process.require()
    with operation.waiting(process_set, "sync_aux_params") as turn:
        root = None if root_rank is None else process_set._position_of(root_rank)
        states = auxiliary_states(params)
        devices = _devices(states)
        how = "mean" if root is None else f"values of rank {root_rank}"
        # Wait here, not after meet(): if a value comes from a step that another rank has not taken, that rank detects
        # the deadlock while it waits in meet(). After meet() no rank would detect it.
        _wait_for(states)
        count = min(len(states), 1) if root is None else len(states)
        turns = turn.agreed([operation.gathering(process_set, None, "sync_aux_params") for _ in range(count)])
        met = turn.meet(f"sync_aux_params to the {how}", [agreement.digest(_signatures(states)), len(states), devices])
        other = agreement.first_that_differs(met[:, :2])
        if other is not None:
            turn.agreed([])  # no rank takes these turns
            raise MXNetError(_difference(met, other, process_set, states))
        if root is not None:
            _broadcast(turns, states, root)
        elif states:
            with turns[0] as averaging:
                _average(functools.partial(averaging.push, turn.core.push_group), states, int(met[:, 2].sum()))
    _wait_for(states)


def _wait_for(states: list[_State]) -> None:
    for state in states:
        for array in state.replicas:
            array.wait_to_read()


class Averaging:
    """Averages the auxiliary values of a trainer over the workers of a process set, with each push().

    Parameters
    ----------
    process_set : ProcessSet
    scope : str
        The prefix of the operation's name.
    named : sequence of Named
        The trainer's parameters, the same on all workers; some of them are auxiliary.
    """

    def __init__(self, process_set: ProcessSet, scope: str, named: Sequence[Named]) -> None:
        self._process_set = process_set
        self._name = f"{scope}/aux"
        self._named = [item for item in named if is_auxiliary(item.value)]

    def push(self) -> None:
        """Average the initialized values over all devices of all workers. Returns at once.

        The same values must be initialized on all workers; otherwise the workers get an MXNetError.
        """
        states = [_State(name, value._data) for name, value, _ in self._named if value._data is not None]
        if states:
            label = f"{len(states)} auxiliary values"
            push = functools.partial(self._process_set._core.push_group, self._name, label=label)
            _average(push, states, self._process_set.size() * len(states[0].replicas))
        else:
            self.refuse("no auxiliary value is initialized on that rank")

    def refuse(self, reason: str) -> None:
        """Make the operation fail on the other workers, with the reason."""
        if self._named:
            self._process_set._core.refuse(self._name, reason)


def is_auxiliary(parameter: Any) -> bool:
    """Whether a Parameter's values come from the data in forward passes, not from gradients.

    A SymbolBlock creates such values as differentiable Parameters with grad_req 'null', like the Parameters of a frozen
    layer. So this function recognizes them by their names, as MXNet's initializers do.
    """
    if not isinstance(parameter, Parameter):
        return False
    return not parameter._differentiable or (parameter.grad_req == "null" and parameter.name.endswith(_SUFFIXES))


def auxiliary_states(params: Any) -> list[_State]:
    """The auxiliary values in the argument of `sync_aux_params`, in the same order on all ranks.

    Raises
    ------
    TypeError, ValueError
        `params` is not what `sync_aux_params` accepts; or a value is missing, is sparse, or is on a GPU without a CUDA
        runtime that the core can use.
    """
    if isinstance(params, gluon.Block):
        params = params.collect_params()
    states = []
    for name, value, _ in named_values(params):
        if isinstance(value, Parameter) and not is_auxiliary(value):
            continue
        replicas = arrays_of(value)
        if replicas is None:
            raise ArgumentValueError(f"{described(name, value)} has no values yet: run a forward pass first.")
        states.append(_State(name, list(arrays.as_list(replicas, f"value of {name}"))))
    return states


def _devices(states: list[_State]) -> int:
    """Number of devices of each value; 1 without values."""
    numbers = {len(state.replicas) for state in states}
    if len(numbers) > 1:
        raise ArgumentValueError(
            f"All auxiliary values must be on the same number of devices, but they are on {sorted(numbers)}."
        )
    return numbers.pop() if numbers else 1


def _signatures(states: list[_State]) -> list[str]:
    return [f"{state.name} {state.replicas[0].shape} {arrays.dtype_name(state.replicas[0].dtype)}" for state in states]


def _difference(met: Any, other: int, process_set: ProcessSet, states: list[_State]) -> str:
    here = ", ".join(_signatures(states)[:3]) + (", ..." if len(states) > 3 else "")
    return (
        f"sync_aux_params needs the same auxiliary values on all ranks, but there are {met[0, 1]} on rank "
        f"{process_set.ranks[0]} and {met[other, 1]} on rank {process_set.ranks[other]}, with other names, shapes or "
        f"dtypes. On this rank, {process.rank()}, they are: {here or 'none'}."
    )


def _average(push: Callable, states: list[_State], devices: int) -> None:
    """Replace all values by their mean over all devices. `push`: the core's push_group() with its name."""
    firsts = [state.replicas[0] for state in states]
    with arrays.not_recorded():
        sums = [arrays.total(state.replicas) for state in states]
        push(arrays.handles(sums), arrays.handles(firsts), "sum", 1 / devices)
        for first, state in zip(firsts, states):
            for array in state.replicas[1:]:
                first.copyto(array)


def _broadcast(turns: Sequence[Turn], states: list[_State], root: int) -> None:
    for turn, state in zip(turns, states):
        with turn:
            turn.push(turn.core.push_broadcast, state.replicas[0].handle.value, arrays.handles(state.replicas), root)

"""Broadcasts parameters, so that all ranks have equal values."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from ..collectives.row_sparse import is_row_sparse
from ..compat import arrays
from ..compat.mxnet import NAME_KEYED_DICTS, NDArray, Parameter
from ..coordination import agreement, operation, operation_names
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from . import deferred_init, load_tracking
from .deferred_init import Broadcast
from .naming import (
    WHY_ORDERS_DIFFER,
    Named,
    WrongParameters,
    arrays_of,
    described,
    described_within,
    named_values,
    sorted_by_counters,
)

# The state of a parameter on a rank before a broadcast.
_HAS_VALUES, _HAS_VALUES_AND_LASTING, _WITHOUT_VALUES, _WAITS, _WAITS_LASTING = range(5)


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Send the values of `root_rank` to all ranks. Collective; returns when the values have arrived.

    Parameters whose initialization is deferred are broadcast when they are initialized, inside the first forward pass.
    If the initialization is deferred on some ranks only, the other ranks do not wait here: MXNet's engine makes readers
    of the values wait.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter or NDArray, or a pair of such dicts
        ``Block.collect_params()``, the result of ``Module.get_params()`` or one of its halves. Values are matched
        between ranks by key, or by position if the keys are Parameter.name (ParameterDict), which may differ between
        processes. Row_sparse arrays are sent whole, and hold all rows afterwards.
    root_rank : int, optional
        The global rank whose values are sent.
    prefix : str, optional
        Prepended to the keys in error messages.
    process_set : ProcessSet, optional
        The ranks that call this function.

    Raises
    ------
    TypeError, ValueError
        `params` holds something else, a csr array, or an array on a GPU without a CUDA runtime that the core can use;
        `root_rank` or this process is not in the set.
    RuntimeError
        The ranks hold different sets of parameters, or order them differently.
    MXNetError
        Shapes or dtypes differ between the ranks, an array carries an error on some rank, or a rank waits in another
        call or has left the job.

    Examples
    --------
    >>> net = gluon.nn.Dense(10, in_units=64)
    >>> net.initialize(mx.init.Xavier())  # random values that differ between workers
    >>> mykv.broadcast_parameters(net.collect_params(), root_rank=0)  # a trainer does this itself
    """
    process.require()
    try:
        process_sets.check(process_set)
    except TypeError as error:  # not a process set: other ranks may wait in the set of all ranks
        operation.waiting(global_process_set, "broadcast_parameters").leave_out(str(error), None)
        raise
    with operation.waiting(process_set, "broadcast_parameters") as turn:
        root = process_set._position_of(root_rank)
        named = list(_named_values(params, "" if prefix is None else str(prefix)))
        scope, _ = operation_names.numbered_alike(
            turn, process_set, "broadcast", f"broadcast_parameters from rank {root_rank}"
        )
    exchange_name = f"{scope}/parameters"
    shown = [described_within(item.name, item.value) for item in named]
    agreement.check_names(
        process_set, exchange_name, [item.name for item in named], f"parameters of {scope}", shown=shown
    )
    if not named:
        return
    arriving = []
    compared = _compared(process_set, exchange_name, named)
    for (_, value, position), name, lowest, highest in compared:
        broadcast = Broadcast(process_set, f"{scope}/{name}", root, -position)
        held = arrays_of(value)
        if held is not None:
            broadcast.push(held)
            if highest < _WITHOUT_VALUES:
                arriving += held
        elif lowest < _WAITS:  # otherwise an earlier broadcast is pending on all ranks and will make the values equal
            deferred_init.wait_for(value, broadcast)
    for array in arriving:
        array.wait_to_read()
    load_tracking.forget([item.value for item in named if isinstance(item.value, Parameter)])
    if all(highest < _WITHOUT_VALUES for *_, highest in compared):  # no later broadcast follows
        process_set._core.forget(f"{scope}/")


def _compared(process_set: ProcessSet, exchange_name: str, named: Sequence[Named]) -> list[tuple[Named, str, int, int]]:
    """The parameters with the names of their operations, and the extremes of their states over the ranks. Collective.

    Errors show the names. If ranks number parameters, as in 'parameter 3', the name includes the Parameter's own name,
    or, if ranks have named it differently, its name on the set's first rank.

    Parameters with values on all ranks come first: with MXNet's NaiveEngine a broadcast waits for all ranks before the
    next begins, and a rank without values begins it in its first forward pass.
    """
    own = [getattr(value, "name", name) if name.startswith("parameter ") else name for name, value, _ in named]
    numbers = [*(_state(item.value, process_set) for item in named), *(agreement.digest([name]) for name in own)]
    numbers += [agreement.digest(sorted(own)), int(sorted_by_counters(own))]
    least, most = agreement.extremes(process_set, exchange_name, numbers)
    count = len(named)
    alike = least[count:-2] == most[count:-2]
    if not alike.all() and (least[-2] == most[-2] or most[-1]):
        raise RuntimeError(
            f"The workers order the parameters differently: rank {process.rank()} begins with {', '.join(own[:3])}. "
            f"{WHY_ORDERS_DIFFER} Pass net.collect_params(), or the list of its values."
        )
    if not alike.all():
        shown = "\0".join(name if same else f"{name} on rank {process.rank()}" for name, same in zip(own, alike))
        first = agreement.bytes_of_rank(process_set, exchange_name, np.frombuffer(shown.encode(), dtype=np.uint8), 0)
        own = first.tobytes().decode().split("\0")
    names = [name if given == name else f"{name} ({given})" for (name, _, _), given in zip(named, own)]
    compared = zip(named, names, least[:count].tolist(), most[:count].tolist())
    return sorted(compared, key=lambda one: one[-1] >= _WITHOUT_VALUES)


def keep_equal(
    process_set: ProcessSet, named: Sequence[Named], scope: str, root: int, names: Any, are_equal: bool = False
) -> list[Parameter]:
    """Broadcast a trainer's parameters, now and whenever they are initialized later. Collective.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    named : sequence of Named
        Parameters, the same on all ranks.
    scope : str
        The prefix of all operations' names.
    root : int
        The rank within the set whose values are sent.
    names : KeptNames
        The names of the scope, in use for the parameters' lifetime.
    are_equal : bool
        Whether existing values are already equal on all ranks; then they are not sent.

    Returns
    -------
    list of Parameter
        The parameters that have values on all ranks.
    """
    if not named:
        return []
    load_tracking.forget([item.value for item in named])
    compared = _compared(process_set, f"{scope}/parameters", named)
    for (_, parameter, position), name, lowest, highest in compared:
        broadcast = Broadcast(process_set, f"{scope}/values/{name}", root, -position, lasting=names)
        everywhere = lowest if lowest == highest else None
        if parameter._data is not None and not are_equal:
            broadcast.push(parameter._data, *load_tracking.watched_broadcasts(parameter, [broadcast.name]))
        if everywhere not in (_HAS_VALUES_AND_LASTING, _WAITS_LASTING):
            broadcast.covered = everywhere == _WAITS
            deferred_init.wait_for(parameter, broadcast)
    return [one.value for one, _, _, highest in compared if highest < _WITHOUT_VALUES]


def broadcast_again(process_set: ProcessSet, named: Sequence[Named], scope: str, root: int) -> None:
    """Overwrite a trainer's parameters, on every device, with the values that the root has now. Returns at once.

    Parameters
    ----------
    process_set, named, scope, root
        As for `keep_equal`.
    """
    for name, parameter, position in named:
        broadcast = Broadcast(process_set, f"{scope}/again/{name}", root, -position)
        if parameter._data is not None:
            broadcast.push(parameter._data)
        else:
            # The parameter needs no gradient and has no values yet: if it needed a gradient, step() would have raised.
            broadcast.refuse(f"{described(name, parameter)} has no values yet on rank {process.rank()}.")


def refuse_again(process_set: ProcessSet, named: Sequence[Named], scope: str, root: int, reason: str) -> None:
    """Refuse this rank's turns in the other ranks' `broadcast_again`, with the reason."""
    for name, _, position in named:
        Broadcast(process_set, f"{scope}/again/{name}", root, -position).refuse(reason)


def _named_values(params: Any, prefix: str) -> Iterator[Named]:
    """Names and values for broadcast_parameters, checked to be Parameters or arrays that can be broadcast."""
    pair = isinstance(params, (list, tuple)) and any(isinstance(half, (Mapping, *NAME_KEYED_DICTS)) for half in params)
    if pair and len(params) != 2:
        raise WrongParameters(
            f"params must be a pair of dicts, as of Module.get_params(), but it has {len(params)} items."
        )
    for half, part in zip(("arg:", "aux:"), params) if pair else (("", params),):
        for name, value, position in named_values(part):
            held = arrays_of(value)
            if held is not None:
                arrays.as_list(held, f"value of {name}", dense=not is_row_sparse(held))
            yield Named(f"{prefix}{half}{name}", value, position)


def _state(value: Any, process_set: ProcessSet) -> int:
    """The state of a parameter. Broadcasts over other process sets do not count: they do not make this set equal."""
    if isinstance(value, NDArray):
        return _HAS_VALUES
    lasting = deferred_init.has_lasting(value, process_set)
    if value._data is not None:
        return _HAS_VALUES_AND_LASTING if lasting else _HAS_VALUES
    return _WAITS_LASTING if lasting else _WAITS if deferred_init.waits(value, process_set) else _WITHOUT_VALUES

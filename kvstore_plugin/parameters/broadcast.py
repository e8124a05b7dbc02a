"""Equal values on all ranks: the broadcast of parameters, and the names by which ranks match them."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from ..collectives.row_sparse import is_row_sparse
from ..compat import arrays
from ..compat.mxnet import NAME_KEYED_DICTS, NDArray, Parameter, contexts, gluon, set_current_device
from ..coordination import agreement, operation, operation_names
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from . import deferred_init, load_tracking
from .deferred_init import Broadcast
from .naming import described, described_within

# What a rank knows of a parameter before a broadcast.
_HAS_VALUES, _HAS_VALUES_AND_LASTING, _WITHOUT_VALUES, _WAITS, _WAITS_LASTING = range(5)


class Named(NamedTuple):
    """A parameter or an array, and how the ranks know it."""

    name: str
    value: Any
    position: int  # in the network, from its input


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Give all ranks the values that `root_rank` has. Collective; returns when they have arrived.

    Parameters whose initialization is deferred are broadcast when they are initialized, inside the first forward pass.
    Where that is so on some ranks only, the others do not wait; MXNet's engine lets the reader of the values wait.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter or NDArray, or a pair of such dicts
        ``Block.collect_params()``, the result of ``Module.get_params()`` or one of its halves. Matched between ranks
        by key, and by position where the keys are Parameter.name (ParameterDict), which may differ between processes.
        Those that are row_sparse travel whole, and hold all rows afterwards.
    root_rank : int, optional
        The rank whose values count, as a global rank.
    prefix : str, optional
        Put before the keys; only error messages show it.
    process_set : ProcessSet, optional
        The ranks that take part.

    Raises
    ------
    TypeError, ValueError
        `params` holds something else, a csr array, or an array on a GPU without a CUDA runtime that the core can use;
        `root_rank` is not in the set; this process is not.
    RuntimeError
        The ranks hold other sets of parameters.
    MXNetError
        Shapes or dtypes differ between the ranks, or an array carries an error on some rank.
    """
    process.require()
    try:
        process_sets.check(process_set)
    except TypeError as error:  # no set: the others may be in the call for all ranks
        operation.waiting(global_process_set, "broadcast_parameters").leave_out(str(error), None)
        raise
    with operation.waiting(process_set, "broadcast_parameters") as turn:
        root = process_set.position_of(root_rank)
        named = list(_named_values(params, "" if prefix is None else str(prefix)))
        scope = operation_names.numbered_alike(
            turn, process_set, "broadcast", f"broadcast_parameters from rank {root_rank}"
        )
    carrier = f"{scope}/parameters"
    agreement.check_names(process_set, carrier, [one.name for one in named], f"parameters of {scope}")
    if not named:
        return
    arriving = []
    least, most = agreement.extremes(process_set, carrier, [_state(one.value) for one in named])
    for (name, value, position), lowest, highest in zip(named, least, most):
        broadcast = Broadcast(process_set, f"{scope}/{name}", root, -position)
        if isinstance(value, NDArray) or value._data is not None:
            broadcast.push(_arrays(value))
            if highest < _WITHOUT_VALUES:
                arriving += _arrays(value)
        elif lowest < _WAITS:  # else one waits on every rank, after which all values are equal
            deferred_init.wait_for(value, broadcast)
    load_tracking.forget([one.value for one in named if isinstance(one.value, Parameter)])
    for array in arriving:
        array.wait_to_read()
    if (most < _WITHOUT_VALUES).all():  # nothing comes later
        process_set.core.forget(f"{scope}/")


def keep_equal(
    process_set: ProcessSet, named: Sequence[Named], scope: str, root: int, names: Any, are_equal: bool = False
) -> list[Parameter]:
    """Broadcast a trainer's parameters, now and whenever they are initialized later. Collective.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that take part.
    named : sequence of Named
        Parameters, the same on all ranks.
    scope : str
        Begins the names of all operations.
    root : int
        The rank within the set whose values count.
    names : KeptNames
        Those of the scope, which the parameters use for as long as they live.
    are_equal : bool
        Those that have values now are equal already, and stay as they are.

    Returns
    -------
    list of Parameter
        Those that have values on all ranks.
    """
    if not named:
        return []
    load_tracking.forget([one.value for one in named])
    least, most = agreement.extremes(process_set, f"{scope}/parameters", [_state(one.value) for one in named])
    for (name, parameter, position), lowest, highest in zip(named, least, most):
        broadcast = Broadcast(process_set, f"{scope}/values/{name}", root, -position, lasting=names)
        everywhere = lowest if lowest == highest else None
        if parameter._data is not None and not are_equal:
            broadcast.push(parameter._data)
        if everywhere not in (_HAS_VALUES_AND_LASTING, _WAITS_LASTING):
            broadcast.covered = everywhere == _WAITS
            deferred_init.wait_for(parameter, broadcast)
    return [one.value for one, highest in zip(named, most) if highest < _WITHOUT_VALUES]


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
        else:  # without a gradient, since step() refuses the others, and never used in a forward pass
            broadcast.refuse(f"{described(name, parameter)} has no values yet on rank {process.rank()}.")


class WrongParameters(TypeError, ValueError):
    """`params` is nothing that holds parameters: a TypeError, and the ValueError that Horovod and BytePS raise."""


def named_parameters(params: Any) -> list[Named]:
    """What is in `params`, each object once, with names and in an order that are the same on all ranks.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple
        Keys of a dict are the names, and their alphabet is the order. A list and a ParameterDict give positions, the
        latter because its keys begin with a counter of the process, by which they even sort differently.

    Returns
    -------
    list of Named

    Raises
    ------
    TypeError
        `params` is something else; it is a ValueError too.
    """
    if isinstance(params, Mapping):
        position = {key: number for number, key in enumerate(params)}
        named = [Named(str(key), params[key], position[key]) for key in sorted(params)]
    elif isinstance(params, (list, tuple, *NAME_KEYED_DICTS)):
        values = params if isinstance(params, (list, tuple)) else params.values()
        named = [Named(f"parameter {number}", value, number) for number, value in enumerate(values)]
    else:
        what = "net.collect_params(), and not the network itself" if isinstance(params, gluon.Block) else ""
        what = what or f"a dict or a list of Parameters, such as net.collect_params(), not {type(params).__name__}"
        raise WrongParameters(f"params must be {what}.")
    unique: dict[int, Named] = {}
    for one in named:
        unique.setdefault(id(one.value), one)
    return list(unique.values())


def check_devices(named: Iterable[tuple[str, Parameter]]) -> None:
    """Refuse parameters of one trainer with replicas that are not on the same devices in the same order.

    Where each has a single one, a network may be spread over devices.

    Parameters
    ----------
    named : iterable of (str, Parameter)
        Names for the error, and parameters; those that are not initialized are on no devices yet.

    Raises
    ------
    ValueError
        Names two that differ, and their devices.
    """
    first: tuple[str, Parameter, list] | None = None
    for name, parameter in named:
        try:
            devices = contexts(parameter)
        except RuntimeError:  # not initialized
            continue
        if first is None:
            first = (name, parameter, devices)
        elif devices != first[2] and (len(devices) > 1 or len(first[2]) > 1):
            places = [", ".join(str(device) for device in one) for one in (first[2], devices)]
            raise ValueError(
                "Parameters with replicas must all be on the same devices in the same order, but "
                f"{described_within(*first[:2])} is on {places[0]} and {described_within(name, parameter)} on "
                f"{places[1]}."
            )


def places(params: Sequence[Parameter]) -> list[set[Parameter]]:
    """The Parameters that have values, divided by the device of the first replica; one set where that is the same."""
    divided: dict[Any, set[Parameter]] = {}
    for parameter in params:
        if parameter._data is not None:
            divided.setdefault(parameter._data[0].context, set()).add(parameter)
    return list(divided.values())


def device_ids(params: Sequence[Parameter]) -> list[int]:
    """Numbers of the devices that Parameters have replicas on; an optimizer counts updates for each."""
    return sorted({array.context.device_id for parameter in params for array in parameter._data or ()})


def stale_gradient(params: Iterable[Parameter]) -> str | None:
    """MXNet's warning of a gradient that no backward has written since the last step, if there is one."""
    trained = [parameter for parameter in params if parameter.grad_req != "null"]
    if any(parameter._data is None for parameter in trained):
        return None  # which is an error of its own
    for parameter in trained:
        if not all(weight._fresh_grad for weight in parameter._data):
            return (
                f"The gradient of parameter {parameter.name} on rank {process.rank()} is stale, since it has not been "
                "updated by backward since the last step: a mistake in the network, or, if it is meant to use some of "
                "its parameters only, a case for step(..., ignore_stale_grad=True)."
            )
    return None


def count_update(trainer: gluon.Trainer) -> None:
    """Count an update that failed, as the workers do that have begun it: schedules and Adam must stay in step."""
    for device_id in device_ids(trainer._params):
        set_current_device(trainer._optimizer, device_id)
        for number, parameter in enumerate(trainer._params):
            if parameter.grad_req != "null":
                trainer._optimizer._update_count(number)


def _named_values(params: Any, prefix: str) -> Iterator[Named]:
    """Names and values for broadcast_parameters, checked to be Parameters or arrays that can be broadcast."""
    pair = isinstance(params, (list, tuple)) and any(isinstance(half, (Mapping, *NAME_KEYED_DICTS)) for half in params)
    if pair and len(params) != 2:
        raise WrongParameters(f"params must be a pair of dicts, as of Module.get_params(), not {len(params)} of them.")
    for half, part in zip(("arg:", "aux:"), params) if pair else (("", params),):
        for name, value, position in named_parameters(part):
            if not isinstance(value, (Parameter, NDArray)):
                raise WrongParameters(
                    f"params must hold Parameters or NDArrays, but {name} is a {type(value).__name__}."
                )
            if isinstance(value, NDArray) or value._data is not None:
                held = _arrays(value)
                arrays.as_list(held, f"value of {name}", dense=not is_row_sparse(held))
            yield Named(f"{prefix}{half}{name}", value, position)


def _arrays(value: Any) -> list[NDArray]:
    return [value] if isinstance(value, NDArray) else value._data


def _state(value: Any) -> int:
    if isinstance(value, NDArray):
        return _HAS_VALUES
    lasting = deferred_init.has_lasting(value)
    if value._data is not None:
        return _HAS_VALUES_AND_LASTING if lasting else _HAS_VALUES
    return _WAITS_LASTING if lasting else _WAITS if deferred_init.waits(value) else _WITHOUT_VALUES

"""Equal values on all ranks: broadcast of parameters, now or the moment they are initialized.

A network usually gets its parameters in the first forward pass, when the shapes are known. MXNet gives a Parameter its
values in one method, which is replaced here, once and on the class, by one that also asks a weak registry whether this
Parameter waits for a broadcast. Nothing is added to the Parameter itself, so copies and pickles of it are plain ones.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Iterator, Mapping, NamedTuple

from . import agreement, arrays, process
from .mxnet_compat import NAME_KEYED_DICTS, NDArray, Parameter

_numbers = itertools.count()


class Named(NamedTuple):
    """A parameter or an array, and how the ranks know it."""

    name: str
    value: Any
    position: int  # in the network, from its input


class _Broadcast:
    """A broadcast to come: the name that the ranks match it by, the rank whose values count, and its priority."""

    def __init__(self, name: str, root_rank: int, priority: int) -> None:
        self.name = name
        self.root_rank = root_rank
        self.priority = priority

    def push(self, values: list[NDArray]) -> None:
        """Send `values`, one array per device, or overwrite them with the root's."""
        process.core.push_broadcast(
            self.name, values[0].handle.value, arrays.handles(values), self.root_rank, self.priority
        )


# What happens when a Parameter is initialized: the first entry that there is.
_once: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # asked for by broadcast_parameters
_always: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # asked for by a trainer, which stays
_refused: weakref.WeakSet = weakref.WeakSet()  # this rank has told the others that it has no values


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Give all ranks the values that `root_rank` has. Collective; returns when they have arrived.

    Parameters whose initialization is deferred are broadcast when they are initialized, inside the first forward pass.
    If that is so on some ranks only, the others go on without waiting, and MXNet's engine lets the values wait.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter or NDArray, or a pair of such dicts
        ``Block.collect_params()``, the result of ``Module.get_params()`` or one of its halves. Matched between ranks
        by key, and by position where the keys are Parameter.name (ParameterDict), which may differ between processes.
    root_rank : int, optional
        The rank whose values count.
    prefix : str, optional
        Put before the keys; only error messages show it.

    Raises
    ------
    TypeError, ValueError
        `params` holds something else, a sparse array, or an array on a GPU; `root_rank` is no rank.
    RuntimeError
        The ranks hold other sets of parameters.
    MXNetError
        Shapes or dtypes differ between the ranks, or an array carries an error on some rank.
    """
    process.require()
    scope = f"broadcast{next(_numbers)}"
    carrier = f"{scope}/parameters"
    try:
        check_root(root_rank)
        named = list(_named_values(params, "" if prefix is None else str(prefix)))
    except (TypeError, ValueError) as error:
        process.core.refuse(carrier, str(error))
        raise
    agreement.check_names(carrier, [one.name for one in named], f"parameters of {scope}")
    if not named:
        return
    deferred = [isinstance(one.value, Parameter) and one.value._data is None for one in named]
    elsewhere = agreement.largest(carrier, deferred)
    arriving = []
    for number, (name, value, position) in enumerate(named):
        broadcast = _Broadcast(f"{scope}/{name}", root_rank, -position)
        if deferred[number]:
            _once[value] = broadcast
        else:
            broadcast.push(_arrays(value))
            if not elsewhere[number]:
                arriving += _arrays(value)
    for array in arriving:
        array.wait_to_read()


def broadcast_now_and_later(parameter: Parameter, name: str, root_rank: int, priority: int) -> None:
    """Broadcast the values of a trainer's Parameter, and again whenever it is initialized anew.

    Returns at once. A Parameter that waits for broadcast_parameters already is not broadcast twice: that one goes
    first, and this one only after a later initialization.

    Parameters
    ----------
    parameter : Parameter
        Initialized or not.
    name : str
        What the ranks are matched by.
    root_rank : int
        The rank whose values count.
    priority : int
        Operations with a higher one run first.
    """
    _always[parameter] = _Broadcast(name, root_rank, priority)
    if parameter._data is not None:
        _always[parameter].push(parameter._data)


def refuse_values(parameter: Parameter, reason: str) -> None:
    """Tell the other ranks, which wait for a broadcast of this Parameter's values, why this rank does not take part."""
    broadcast = _once.get(parameter) or _always.get(parameter)
    if broadcast is not None and parameter not in _refused:
        _refused.add(parameter)
        _once.pop(parameter, None)
        process.core.refuse(broadcast.name, reason)


def check_root(root_rank: Any) -> None:
    """Raise what is wrong with a value of the argument `root_rank`.

    Raises
    ------
    TypeError, ValueError
        It is no int, or no rank.
    """
    if not isinstance(root_rank, int):
        raise TypeError(f"root_rank must be an int, not {type(root_rank).__name__}.")
    if not 0 <= root_rank < process.size():
        raise ValueError(f"root_rank must be a rank, from 0 to {process.size() - 1}, not {root_rank}.")


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
        `params` is something else.
    """
    if isinstance(params, Mapping):
        position = {key: number for number, key in enumerate(params)}
        named = [Named(str(key), params[key], position[key]) for key in sorted(params)]
    elif isinstance(params, (list, tuple, *NAME_KEYED_DICTS)):
        values = params if isinstance(params, (list, tuple)) else params.values()
        named = [Named(f"parameter {number}", value, number) for number, value in enumerate(values)]
    else:
        raise TypeError(f"params must be a dict or a list of Parameters, not {type(params).__name__}.")
    unique: dict[int, Named] = {}
    for one in named:
        unique.setdefault(id(one.value), one)
    return list(unique.values())


def _named_values(params: Any, prefix: str) -> Iterator[Named]:
    """Names and values for broadcast_parameters, checked to be Parameters or arrays."""
    pair = isinstance(params, (list, tuple)) and any(isinstance(half, (Mapping, *NAME_KEYED_DICTS)) for half in params)
    for half, part in zip(("arg:", "aux:"), params) if pair else (("", params),):
        if pair and len(params) != 2:
            raise TypeError(f"params must be a pair of dicts, as of Module.get_params(), not {len(params)} of them.")
        for name, value, position in named_parameters(part):
            if not isinstance(value, (Parameter, NDArray)):
                raise TypeError(f"params must hold Parameters or NDArrays, but {name} is a {type(value).__name__}.")
            if isinstance(value, NDArray) or value._data is not None:
                arrays.as_list(_arrays(value), f"value of {name}")
            yield Named(f"{prefix}{half}{name}", value, position)


def _arrays(value: Any) -> list[NDArray]:
    return [value] if isinstance(value, NDArray) else value._data


def _broadcasting(original: Any) -> Any:
    """Parameter._init_impl, followed by the broadcast that waits for it."""

    @functools.wraps(original)
    def _init_impl(self: Parameter, *args: Any, **kwargs: Any) -> None:
        # reset_ctx comes here too, with the values that the Parameter has already: they agree, and not all ranks need
        # to move. Initialization and load_parameters come here without any.
        without_values = self._data is None
        original(self, *args, **kwargs)
        if without_values and process.is_initialized():
            _refused.discard(self)
            broadcast = _once.pop(self, None) or _always.get(self)
            if broadcast is not None:
                broadcast.push(self._data)

    _init_impl.broadcasts = True
    return _init_impl


if not getattr(Parameter._init_impl, "broadcasts", False):
    Parameter._init_impl = _broadcasting(Parameter._init_impl)

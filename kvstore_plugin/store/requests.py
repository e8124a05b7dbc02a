"""Checks the arguments of the store's methods and divides them into one call for each key.

A Trainer calls this code for every parameter in every step, so a call with one key and one array has a fast path.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..collectives.row_sparse import is_row_sparse
from ..compat import arrays
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import NDArray
from ..coordination import operation

# Methods with one value for each key, not one for each device.
_OF_ONE_VALUE = ("broadcast", "init")


class Call(NamedTuple):
    """A call for one key.

    Attributes
    ----------
    key : int or str
        The user's key.
    name : str
        The name of the operation.
    inputs : sequence of NDArray
        The inputs, one array for each device; for pull, the outputs.
    outputs : sequence of NDArray
        The outputs, one array for each device; the inputs themselves if there is no `out`.
    """

    key: int | str
    name: str
    inputs: Sequence[NDArray]
    outputs: Sequence[NDArray]


def checked(scope: str, method: str, key: Any, value: Any, out: Any, priority: Any) -> list[Call]:
    """One call for each key.

    Parameters
    ----------
    scope : str
        Prefix of the names of all keys of the store.
    method : str
        The method of the store.
    key, value, out, priority
        The arguments of the method.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.
    """
    operation.checked_priority(priority)
    if type(key) is int or type(key) is str:
        if (out is None or out is value) and arrays.is_dense_array(value):
            only = (value,)
            return [Call(key, f"{scope}/{key!r}", only, only)]
        return [_call(scope, method, key, value, out)]
    return _several(scope, method, key, value, out)


def names(scope: str, key: Any) -> list[str]:
    """Names of the keys in `key`, each once. Elements that are not keys are skipped."""
    keys = key if isinstance(key, (list, tuple)) else [key]
    return list(dict.fromkeys(f"{scope}/{_plain(k)!r}" for k in keys if isinstance(k, (int, str))))


def _call(scope: str, method: str, key: int | str, value: Any, out: Any) -> Call:
    is_sparse = method == "pull" or is_row_sparse(value)
    inputs = arrays.as_list(value, f"{'out' if method == 'pull' else 'value'} of key {key!r}", dense=not is_sparse)
    if len(inputs) > 1 and method in _OF_ONE_VALUE:
        raise ArgumentValueError(
            f"The value of key {key!r} must be a single NDArray, but it is a list of {len(inputs)}."
        )
    if out is None or out is value:
        outputs = inputs
        if len(inputs) > 1:
            arrays.check_alike(inputs, f"arrays in the value of key {key!r}")
    else:
        outputs = arrays.as_list(out, f"out of key {key!r}", dense=not is_sparse)
        if len(inputs) > 1:
            arrays.check_alike(inputs, f"arrays in the value of key {key!r}")
        what = f"value and out of key {key!r}"
        arrays.check_alike([inputs[0], *outputs], what, floats_convert=method == "pushpull")
    return Call(key, f"{scope}/{key!r}", inputs, outputs)


def row_ids(given: Any, calls: Sequence[Call]) -> list[NDArray]:
    """The row numbers for each array of calls of row_sparse_pull(), in the order of the arrays.

    Parameters
    ----------
    given : NDArray, list of NDArray or list of lists of NDArray
        One array of row numbers for all outputs, a list with one for each output, or such a list for each key.
    calls : sequence of Call

    Raises
    ------
    TypeError, ValueError
        `given` has another form.
    """
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if any(isinstance(one, (list, tuple)) for one in listed):
        if len(listed) != len(calls):
            raise ArgumentValueError(f"There are {len(calls)} keys but {len(listed)} lists of row_ids.")
        nested = [row_ids(one, [call]) for one, call in zip(listed, calls)]
        return [numbers for of_key in nested for numbers in of_key]
    for one in listed:
        if not isinstance(one, NDArray):
            raise ArgumentTypeError(f"row_ids must be an NDArray or a list of them, not {type(one).__name__}.")
    count = sum(len(call.inputs) for call in calls)
    if len(listed) not in (1, count):
        raise ArgumentValueError(f"There are {count} arrays in `out` but {len(listed)} row_ids.")
    return listed * count if len(listed) == 1 else listed


def with_inputs_as_they_are(listed: list[Call]) -> list[Call]:
    """Calls of pushpull() whose inputs are copied if an earlier call of the list would overwrite them.

    So an array may occur under several keys, as in MXNet's own stores: all inputs are read before the first output is
    written.
    """
    written: set[int] = set()
    result = []
    for call in listed:
        if any(id(array) in written for array in call.inputs):
            inputs = [arrays.duplicate(array) if id(array) in written else array for array in call.inputs]
            call = call._replace(inputs=inputs)
        written.update(map(id, call.outputs))
        result.append(call)
    return result


def _several(scope: str, method: str, key: Any, value: Any, out: Any) -> list[Call]:
    if isinstance(key, (int, str)):  # such as True or an IntEnum
        return [_call(scope, method, _plain(key), value, out)]
    if not isinstance(key, (list, tuple)):
        raise ArgumentTypeError(f"A key must be an int, a str or a list of them, not {type(key).__name__}.")
    for one in key:
        if not isinstance(one, (int, str)):
            raise ArgumentTypeError(f"A list of keys must hold ints or strs, not {type(one).__name__}.")
    outs = [None] * len(key) if out is None else out
    for what, given in (("outs" if method == "pull" else "values", value), ("outs", outs)):
        if not isinstance(given, (list, tuple)):
            raise ArgumentTypeError(f"A list of keys needs a list of {what}, not {type(given).__name__}.")
        if len(given) != len(key):
            raise ArgumentValueError(f"There are {len(key)} keys but {len(given)} {what}.")
    calls = [_call(scope, method, _plain(k), v, o) for k, v, o in zip(key, value, outs)]
    return calls if len({call.name for call in calls}) == len(calls) else _grouped(method, calls)


def _grouped(method: str, calls: list[Call]) -> list[Call]:
    """Merge calls with equal keys: their arrays are the devices of one value, as in MXNet's own stores."""
    if method in _OF_ONE_VALUE:
        raise ArgumentValueError(f"A list of keys for {method} must not hold a key twice.")
    groups: dict[str, Call] = {}
    for call in calls:
        group = groups.setdefault(call.name, Call(call.key, call.name, [], []))
        group.inputs.extend(call.inputs)
        group.outputs.extend(call.outputs)
    for group in groups.values():
        arrays.check_alike([*group.inputs, *group.outputs], f"values of key {group.key!r}")
    return list(groups.values())


def _plain(key: int | str) -> int | str:
    """The key as a plain int or str, so that ranks agree even if some use subclasses of int or str."""
    return int(key) if isinstance(key, int) else str(key)

"""Names of parameters, for matching between ranks and for messages."""

from __future__ import annotations

import re
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ..compat.mxnet import NAME_KEYED_DICTS, NDArray, Parameter, gluon
from ..coordination import agreement


class Named(NamedTuple):
    """A parameter or an array, with the name by which ranks match it."""

    name: str
    value: Any
    position: int  # position in the network, counted from its input


class WrongParameters(TypeError, ValueError):
    """`params` does not hold parameters: a TypeError, and the ValueError that Horovod and BytePS raise."""


def described(name: str, value: Any) -> str:
    """A Parameter or an array, by its name on all ranks and in this process, at the beginning of a message."""
    own = getattr(value, "name", name)
    # Where ranks match parameters by position, the name is, for example, 'parameter 3'.
    start = "" if name.startswith("parameter ") else "parameter "
    return f"{start}{name}".replace("p", "P", 1) + ("" if own == name else f" ({own})")


def described_within(name: str, value: Any) -> str:
    """As `described`, for the middle of a message."""
    text = described(name, value)
    return text[0].lower() + text[1:]


def named_parameters(params: Any) -> list[Named]:
    """The values in `params`, each object once, with the same names and order on all ranks.

    Parameters
    ----------
    params : ParameterDict, dict, list or tuple
        The keys of a dict are the names, in alphabetical order. The names in a list and a ParameterDict are positions:
        a ParameterDict's keys begin with a counter of the process, so the keys and even their order may differ between
        ranks. If a plain dict has such keys, the names are positions in the order of the keys, with counters compared
        as numbers.

    Returns
    -------
    list of Named

    Raises
    ------
    TypeError
        `params` is something else; the error is a ValueError too.
    """
    if isinstance(params, Mapping):
        position = {key: number for number, key in enumerate(params)}
        if params and NAME_KEYED_DICTS and all(key == getattr(value, "name", None) for key, value in params.items()):
            ordered = sorted(params, key=_with_numbers)
            named = [Named(f"parameter {number}", params[key], position[key]) for number, key in enumerate(ordered)]
        else:
            named = [Named(str(key), params[key], position[key]) for key in sorted(params)]
    elif isinstance(params, (list, tuple, *NAME_KEYED_DICTS)):
        values = params if isinstance(params, (list, tuple)) else params.values()
        named = [Named(f"parameter {number}", value, number) for number, value in enumerate(values)]
    else:
        what = "net.collect_params(), and not the network itself" if isinstance(params, gluon.Block) else ""
        what = what or f"a dict or a list of Parameters, such as net.collect_params(), not {type(params).__name__}"
        raise WrongParameters(f"params must be {what}.")
    unique: dict[int, Named] = {}
    for item in named:
        unique.setdefault(id(item.value), item)
    return list(unique.values())


def _with_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key for a name, which compares counters as numbers: 'dense9_' comes before 'dense10_'."""
    return [(int(number or 0), text) for number, text in re.findall(r"(\d*)(\D*)", name)]


def sorted_by_counters(names: Sequence[str]) -> bool:
    """Whether names are in alphabetical order, and this order differs from the order with counters as numbers.

    If such names differ between ranks, their order may differ too.
    """
    return list(names) == sorted(names) and list(names) != sorted(names, key=_with_numbers)


class Order(NamedTuple):
    """The order in which a gluon.Trainer numbers parameters, as numbers that workers compare.

    In MXNet 1.x names begin with a counter of the process. If a worker has created more layers than the others, its
    names may sort differently, such as 'dense9' and 'dense10'. A list made from a set has a different order in each
    process. In both cases the workers would mismatch parameters, without an error if the shapes are equal.
    """

    order: int = 0  # a hash of the positions that a Trainer gives the values of a dict
    sequence: int = 0  # a hash of a list's names in the Trainer's order, or of a dict's sorted keys
    names: int = 0  # a hash of the sorted names or keys
    sorts_counters: int = 0  # 1 if a list is sorted by counters


def order_of(numbered: Sequence[Parameter], params: Any) -> Order:
    """The order in which a gluon.Trainer has numbered `params`."""
    if not hasattr(params, "keys"):
        names = [parameter.name for parameter in numbered]
        return Order(0, agreement.digest(names), agreement.digest(sorted(names)), int(sorted_by_counters(names)))
    numbers = {id(parameter): number for number, parameter in enumerate(numbered)}
    order = [str(numbers[id(parameter)]) for parameter in params.values()]
    names = agreement.digest(sorted(params.keys()))
    return Order(agreement.digest(order), names, names)


WHY_ORDERS_DIFFER = (
    "The order of a list made from a set, or sorted by names with process counters, differs between processes."
)

NUMBERED_DIFFERENTLY = (
    f"The workers number the parameters of a gluon.Trainer differently. {WHY_ORDERS_DIFFER} A gluon.Trainer sorts a "
    "dict by such names. Pass list(net.collect_params().values()), or use DistributedTrainer."
)


def orders_differ(orders: np.ndarray) -> bool:
    """Whether workers with these orders, a row for each, number parameters differently."""
    order, sequence, names, _ = (orders != orders[0]).any(axis=0)
    some_sort_counters = orders[:, Order._fields.index("sorts_counters")].any()
    return bool(sequence and (order or not names or some_sort_counters))


def named_values(params: Any) -> list[Named]:
    """As `named_parameters`, checked to be Parameters and arrays.

    Raises
    ------
    TypeError
        As for `named_parameters`; also, `params` holds something else.
    """
    named = named_parameters(params)
    for name, value, _ in named:
        if not isinstance(value, (Parameter, NDArray)):
            raise WrongParameters(f"params must hold Parameters or NDArrays, but {name} is a {type(value).__name__}.")
    return named


def arrays_of(value: Parameter | NDArray) -> list[NDArray] | None:
    """The arrays of a Parameter, one for each device, or an array as a list; None for a Parameter without values."""
    return [value] if isinstance(value, NDArray) else value._data

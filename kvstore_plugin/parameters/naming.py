"""Names of parameters, for matching between ranks and for messages."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from ..compat.mxnet import NAME_KEYED_DICTS, NDArray, Parameter, gluon


class Named(NamedTuple):
    """A parameter or an array, with the name by which ranks match it."""

    name: str
    value: Any
    position: int  # in the network, from its input


class WrongParameters(TypeError, ValueError):
    """`params` does not hold parameters: a TypeError, and the ValueError that Horovod and BytePS raise."""


def described(name: str, value: Any) -> str:
    """A Parameter or an array, by its name on all ranks and in this process, at the beginning of a message."""
    own = getattr(value, "name", name)
    # If ranks number parameters, the name is 'parameter 3'.
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
        a ParameterDict's keys begin with a counter of the process, so they and even their order differ between ranks.

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

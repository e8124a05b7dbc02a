"""What parameters are called: how ranks match them, and how messages name them."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from ..compat.mxnet import NAME_KEYED_DICTS, gluon


class Named(NamedTuple):
    """A parameter or an array, and how the ranks know it."""

    name: str
    value: Any
    position: int  # in the network, from its input


class WrongParameters(TypeError, ValueError):
    """`params` is nothing that holds parameters: a TypeError, and the ValueError that Horovod and BytePS raise."""


def described(name: str, value: Any) -> str:
    """A Parameter or an array, named as ranks know it and as this process does, at the beginning of a sentence."""
    own = getattr(value, "name", name)
    # Where ranks count parameters, the name is 'parameter 3'.
    start = "" if name.startswith("parameter ") else "parameter "
    return f"{start}{name}".replace("p", "P", 1) + ("" if own == name else f" ({own})")


def described_within(name: str, value: Any) -> str:
    """The same, further on in a sentence."""
    text = described(name, value)
    return text[0].lower() + text[1:]


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

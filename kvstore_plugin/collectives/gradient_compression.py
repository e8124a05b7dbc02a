"""Checks the user's parameters of compression between hosts, and translates them into the core's text.

The parameters have the names of MXNet's `set_gradient_compression`, ``{'type': '2bit', 'threshold': 0.5}``, and of
BytePS, ``{'compressor': 'topk', 'k': 0.01}``. The compressors themselves are in csrc/compress/.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from typing import Any, Callable, Mapping, NamedTuple


class GradientCompression(NamedTuple):
    """One compressor with all its parameters.

    Attributes
    ----------
    parameters : dict
        'type' and all other parameters. Parameters that the user left out have their defaults.
    wire : str
        The text from which the core creates the compressor; empty: no compression. Equal texts mean equal compressors.
    """

    parameters: dict
    wire: str

    def __repr__(self) -> str:
        return repr(self.parameters)


class _Parameter(NamedTuple):
    default: Any
    read: Callable[[str, Any], Any]  # (name in errors, user's value) -> checked value; raises an error for a wrong one


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, not {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # a whole number or a fraction too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {value!r}.")
    return number


def _positive(what: str, value: Any) -> float:
    number = _number(what, value)
    if number <= 0:
        raise ValueError(f"{what} must be above 0, not {value!r}.")
    return number


def _flag(what: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    raise TypeError(f"{what} must be True or False, not {value!r}.")


def _feedback(what: str, value: Any) -> bool:
    if isinstance(value, str) and value == "vanilla":  # BytePS's name for error feedback
        return True
    return _flag(what, value)


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def read(what: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise TypeError(f"{what} must be a whole number, not {value!r}.")
        if not least <= number <= most:
            raise ValueError(f"{what} must be between {least} and {most}, not {value!r}.")
        return number

    return read


_seed = _whole(0, 2**63 - 1)


def _few(what: str, value: Any) -> int | float:
    """A number of elements, or a fraction of all elements."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a whole number from 1 or a fraction between 0 and 1, not {value!r}.")
    if isinstance(value, numbers.Integral) and 1 <= value <= 2**31:
        return int(value)
    if not isinstance(value, numbers.Integral) and 0 < value < 1:
        return float(value)
    raise ValueError(f"{what} must be a whole number from 1 to 2**31 or a fraction between 0 and 1, not {value!r}.")


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def read(what: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{what} must be {' or '.join(map(repr, choices))}, not {value!r}.")
        return str(value)

    return read


_EF = {"ef": _Parameter(True, _feedback)}
_FEW = {"k": _Parameter(0.01, _few)}
_SEED = {"seed": _Parameter(0, _seed)}
_LEVELS = {"linear": (127, 32767), "natural": (7, 32)}  # by partition: the default and the maximum of k

# For each type, its parameters.
_COMPRESSORS: Mapping[str, Mapping[str, _Parameter]] = {
    "2bit": {"threshold": _Parameter(0.5, _positive), **_EF},
    "1bit": {"threshold": _Parameter(0.5, _number), **_EF},
    "onebit": {"scaling": _Parameter(True, _flag), **_EF},
    "topk": {**_FEW, **_EF},
    "randomk": {**_FEW, **_SEED, **_EF},
    "dithering": {
        "partition": _Parameter("linear", _one_of("linear", "natural")),
        "normalize": _Parameter("max", _one_of("max", "l2")),
        "k": _Parameter(None, _whole(1, 32767)),
        **_SEED,
        **_EF,
    },
}
# Types without parameters, and the dtype to which the core converts gradients; empty: no conversion.
_CASTS = {"none": "", "fp16": "float16", "bf16": "bfloat16"}

_TYPES = [*_CASTS, *_COMPRESSORS]
_KEYS = {name for known in _COMPRESSORS.values() for name in known}


def counts_elements(wire: str) -> bool:
    """Whether a compressor, given by the core's text, sends a fixed number of elements of each array."""
    return re.match(r"(topk|randomk) k=\d+ ", wire) is not None


def gradient_compression(params: Any) -> GradientCompression:
    """The compressor that a user's dictionary names.

    Parameters
    ----------
    params : dict
        For example ``{'type': 'topk', 'k': 0.01}``; see `MyKV.set_gradient_compression` for all. Items with None or an
        empty string are ignored. 'fp16' may be True instead of a type; in addition to a type it has no effect, since
        gradients are summed in their own type within a host. With 'compressor' instead of 'type', parameters of other
        compressors have no effect.

    Raises
    ------
    TypeError, ValueError
        `params` is not a dictionary, names no compressor, or has an unknown parameter or a wrong value.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"compression_params must be a dict such as {{'type': '2bit'}}, not {params!r}.")
    given = {name: value for name, value in params.items() if value is not None and str(value)}
    if "type" in given and "compressor" in given:
        raise ValueError("compression_params must not have both 'type' and 'compressor', which mean the same.")
    momentum = given.pop("momentum", False)
    if momentum is not False:
        raise ValueError(
            f"compression_params must not have 'momentum' (here {momentum!r}), since compressors of mykv have none. "
            "Give the momentum to the optimizer."
        )
    is_half = _flag("The parameter 'fp16' of compression_params", given.pop("fp16", False))
    kind = given.pop("type", given.pop("compressor", None))
    if "compressor" in params:  # BytePS's examples pass all keys, and each compressor takes the keys that it knows
        known = _COMPRESSORS.get(kind, {}) if isinstance(kind, str) else {}
        given = {name: value for name, value in given.items() if name in known or name not in _KEYS}
    if kind is None and (is_half or "compressor" in params):
        kind = "fp16" if is_half else "none"
    if kind is None:
        raise ValueError(
            f"compression_params must have a 'type', but they are {params!r}. The types are {_listed(_TYPES)}."
        )
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"The type in compression_params must be one of {_listed(_TYPES)}, not {kind!r}.")
    known = _COMPRESSORS.get(kind, {})
    for name in given:
        if name not in known:
            has = f"its parameters are {_listed(known)}" if known else "it has no parameters"
            raise ValueError(f"The compression {kind!r} has no parameter {name!r}: {has}.")
    if kind in _CASTS:
        return GradientCompression({"type": kind}, _CASTS[kind])
    values = {
        name: one.read(f"The parameter {name!r} of the compression {kind!r}", given[name])
        if name in given
        else one.default
        for name, one in known.items()
    }
    if kind == "dithering":
        default, most = _LEVELS[values["partition"]]
        values["k"] = default if values["k"] is None else values["k"]
        if values["k"] > most:
            raise ValueError(
                f"The parameter 'k' of the compression 'dithering' must be at most {most} with the partition "
                f"{values['partition']!r}, not {values['k']}."
            )
    return GradientCompression({"type": kind, **values}, " ".join([kind, *(f"{k}={v}" for k, v in values.items())]))


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)

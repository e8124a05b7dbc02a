"""Checks of the arguments that the trainer and the optimizer share."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from ..world import process_set as process_sets
from ..world.process_set import ProcessSet


def check_is_added(process_set: Any) -> None:
    """Raise an error if the argument `process_set` is wrong; this process need not be a member.

    Raises
    ------
    TypeError, ValueError
        `process_set` is not a ProcessSet, or was not added by add_process_set().
    """
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        process_sets.check(process_set)


def positive_number(name: str, value: Any) -> float:
    """The value of an argument as a float, finite and above 0.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    value : number

    Raises
    ------
    TypeError, ValueError
        The value is not a number, or not finite and above 0.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and above 0, not {value}.")
    return float(value)


def whole_number(name: str, value: Any, least: int) -> int:
    """The value of an argument as an int.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    value : int
        Its value, of any type of whole numbers.
    least : int
        The smallest allowed value.

    Raises
    ------
    TypeError, ValueError
        The value is not a whole number, or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}.")
    return number

"""Errors about arguments of operations: Python's usual errors that are also MXNetErrors.

Scripts for Horovod and for MXNet's own stores catch MXNetError, or RuntimeError, around operations.
"""

from __future__ import annotations

from ..world import process_set
from .mxnet import MXNetError


class ArgumentTypeError(MXNetError, TypeError):
    """An argument of an operation has a wrong type."""


class ArgumentValueError(MXNetError, ValueError):
    """An argument of an operation has a wrong value, shape or dtype."""


class ArgumentIndexError(MXNetError, IndexError):
    """An argument of an operation holds a row number that is out of range."""


process_set.error_types = process_set.ErrorTypes(ArgumentTypeError, ArgumentValueError)

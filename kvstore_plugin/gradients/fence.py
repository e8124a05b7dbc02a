"""Fences behind the updates of a step, so that a step that fails changes no weight, in whatever order arrays are read.

All arrays that an operation has failed on share one error in MXNet's engine, and so do those that are computed from
them. When one of them raises the error, the engine clears it for all: an update that has not run by then would run with
a gradient that was not summed (ThreadedEngine::ThrowException). A fence is an operation on the gradients and weights of
some parameters that does nothing. It comes after their updates, and reading one of these arrays waits for it.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable, Sequence

from ..compat import arrays, mxnet
from ..compat.mxnet import Parameter
from ..world import process

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")


class Fence:
    """A fence behind the updates of some parameters, as often as it is pushed.

    Parameters
    ----------
    parameters : iterable of Parameter
        Few enough that the next forward pass, which waits for all of them, is not held up.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = list(parameters)
        self._seen: list[Any] = []
        self._fence: Any = None

    def push(self) -> None:
        """Let who reads an array of these parameters wait for all operations on them. Returns at once."""
        if mxnet.engine_blocks():
            return
        seen = [*map(_data_of, self._parameters), *map(_grad_of, self._parameters)]
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen = seen
            trained = [one for one in self._parameters if one._grad is not None]
            held = [array for one in trained for array in (*one._data, *one._grad)]
            self._fence = process.core.Fence(arrays.handles(held)) if held else None
        if self._fence is not None:
            self._fence.push()

    def __reduce__(self) -> tuple:
        return Fence, (self._parameters,)


class SumsCheck:
    """Tells whether update() may use what allreduce_grads() has summed, where the two are called one after the other.

    Reading a gradient that was not summed raises the error once. An update after that would take it as it is.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def begin(self) -> None:
        """Call this before the gradients are summed."""
        self._before = process.core.failed_operations()

    def failure(self) -> str | None:
        """Why the gradients may be no sums; None where no operation has failed since begin()."""
        before, self._before = self._before, None
        if before is None or process.core.failed_operations() == before:
            return None
        return (
            "an operation has failed since allreduce_grads(), so gradients may not be summed. Call backward and "
            "allreduce_grads() again before update()."
        )


def in_groups(parameters: Sequence[Parameter], most: int) -> list[Fence]:
    """Fences for at most so many parameters each."""
    return [Fence(parameters[begin : begin + most]) for begin in range(0, len(parameters), most)]

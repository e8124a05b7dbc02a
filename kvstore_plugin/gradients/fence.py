"""Fences behind the updates of a step, so that a failed step changes no weight, in whatever order arrays are read.

In MXNet's engine all arrays of a failed operation share one error, and so do all arrays computed from them. When one
array raises the error, the engine clears it for all (ThreadedEngine::ThrowException). An update that has not run by
then would run with a gradient that was not summed. A fence is an operation without effect on the gradients and weights
of some parameters. It comes after their updates, and reading one of these arrays waits for the fence.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable, Sequence

from ..compat import arrays, mxnet
from ..compat.mxnet import NDArray, Parameter
from ..world import process

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")


class Fence:
    """A fence behind the updates of some parameters, which can be pushed in every step.

    Parameters
    ----------
    parameters : iterable of Parameter
        Should be few: the next forward pass waits for all of them.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = list(parameters)
        self._seen: list[Any] = []
        self._fence: Any = None

    def push(self, ends_step: bool = False, also: Sequence[NDArray] = ()) -> None:
        """Reading an array of these parameters now waits for all operations on all of them. Returns at once.

        With `ends_step`, these are updates after a step's sums, and the statistics count their time. `also` holds more
        arrays, for which the same is true.
        """
        if mxnet.engine_blocks():
            return
        seen = [*map(_data_of, self._parameters), *map(_grad_of, self._parameters), *also]
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen = seen
            trained = [one for one in self._parameters if one._grad is not None]
            held = [array for one in trained for array in (*one._data, *one._grad)]
            held += also if held else ()
            self._fence = process.core.Fence(arrays.handles(held)) if held else None
        if self._fence is not None:
            self._fence.push(ends_step)

    def __reduce__(self) -> tuple:
        return Fence, (self._parameters,)


class SumsCheck:
    """Tells whether update() may use the sums of allreduce_grads(), where the user calls the two methods separately.

    Reading a gradient that was not summed raises the error once. A later update would use this gradient as it is.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def begin(self) -> None:
        """Call this before the gradients are summed."""
        self._before = process.core.failed_operations()

    def failure(self) -> str | None:
        """Why update() cannot be made, as the error says it; None if no operation has failed since begin()."""
        before, self._before = self._before, None
        if before is None or process.core.failed_operations() == before:
            return None
        return (
            "An operation has failed since allreduce_grads(), so gradients may not be summed and update() is refused. "
            "Call backward and allreduce_grads() again before update()."
        )

"""Fences after the updates of a step: a failed step changes no weight, whatever the order in which arrays are read.

In MXNet's engine all arrays of a failed operation share one error, and so do all arrays computed from them. When one
array raises the error, the engine clears it for all (ThreadedEngine::ThrowException). An update that has not run by
then would run with a gradient that was not summed. A fence is a no-op on the gradients and weights of some parameters.
It comes after their updates, and reading one of these arrays waits for the fence.

A fence also tells whether updates have failed on this rank alone, for example for lack of memory: the sums carry no
error, but the weights do. The other ranks have updated their weights, so the next step must fail on all ranks.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable, Sequence

from ..compat import arrays, mxnet
from ..compat.mxnet import NDArray, Parameter
from ..parameters import load_tracking
from ..world import process

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")


class Fence:
    """A fence after the updates of some parameters, which can be pushed in every step.

    Parameters
    ----------
    parameters : iterable of Parameter
        Preferably few: the next forward pass waits for all of them.
    scope : str
        The prefix of the names of the operations that sum the gradients: their failures explain failed updates.
    compares_weights : bool
        If the workers' updates differ, the weights carry the error, not the gradients.
    ends_step : bool
        The updates come after the sums of a step, and the statistics count their time. An attribute, which may change.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        scope: str = "",
        compares_weights: bool = False,
        ends_step: bool = False,
    ) -> None:
        self.ends_step = ends_step
        self._engine_blocks = mxnet.engine_blocks()
        self._parameters = list(parameters)
        self._scope = scope
        self._compares_weights = compares_weights
        self._seen: list[Any] = []
        self._fence: Any = None

    def begin(self, also: Sequence[NDArray] = ()) -> None:
        """Call this before updates that each rank makes by itself, to detect that they fail on this rank alone.

        `also` as for push(). Returns at once.
        """
        self._look_again(also)
        if self._fence is not None:
            self._fence.begin()

    def push(self, also: Sequence[NDArray] = (), broken: bool = False) -> None:
        """Make a read of any array of these parameters wait for all operations on all these arrays. Returns at once.

        `also`: more such arrays. `broken`: an exception has interrupted the updates since begin().
        """
        if broken and self._engine_blocks:  # NaiveEngine raises errors of sums earlier, so an update has failed
            load_tracking.note_failure(self._parameters)
        self._look_again(also)
        if self._fence is not None:
            self._fence.push(self.ends_step, broken)

    def _look_again(self, also: Sequence[NDArray]) -> None:
        """Recreate the operation if the parameters have new arrays."""
        if self._engine_blocks:
            return
        seen = [*map(_data_of, self._parameters), *map(_grad_of, self._parameters), *also]
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen = seen
            trained = [parameter for parameter in self._parameters if parameter._grad is not None]
            held = [array for parameter in trained for array in (*parameter._data, *parameter._grad)]
            self._fence = None
            if held:
                before = (
                    held if self._compares_weights else [array for parameter in trained for array in parameter._grad]
                )
                key = load_tracking.watched(trained)
                of_sums = arrays.handles([*before, *also])
                self._fence = process.core.Fence(arrays.handles([*held, *also]), of_sums, key, self._scope)

    def __reduce__(self) -> tuple:
        return Fence, (self._parameters, self._scope, self._compares_weights, self.ends_step)


class SumsCheck:
    """Decides whether update() may use the sums of allreduce_grads(), if the user calls the two methods separately.

    Reading a gradient that was not summed raises the error once. A later update would use this gradient as it is.

    Parameters
    ----------
    scope : str
        The prefix of the names of the operations that sum the gradients. Other operations may fail.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._before: int | None = None

    def begin(self) -> None:
        """Call this before the gradients are summed."""
        self._before = process.core.failed_in_steps(self._scope)

    def failure(self) -> str | None:
        """The error message if update() must fail; None if no sum has failed since begin()."""
        before, self._before = self._before, None
        if before is None or process.core.failed_in_steps(self._scope) == before:
            return None
        return (
            "An operation has failed since allreduce_grads(), so gradients may not be summed and update() is refused. "
            "Call backward and allreduce_grads() again before update()."
        )

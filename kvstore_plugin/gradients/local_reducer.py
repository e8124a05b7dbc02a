"""The gradients of local parameters, which no other worker trains: they are summed over this process's devices only."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from ..collectives import row_sparse
from ..compat import arrays
from ..compat.mxnet import Parameter
from .reducer import Reducer


class LocalReducer(Reducer):
    """Sums the gradients of parameters that belong to no process set over this worker's devices.

    Parameters
    ----------
    parameters : sequence of Parameter
        The local parameters.
    when_moved : callable
        Called without arguments when parameters have got other gradient arrays.
    """

    def __init__(self, parameters: Sequence[Parameter], when_moved: Callable[[], None]) -> None:
        self._parameters = list(parameters)
        self._when_moved = when_moved
        self._seen: list[Any] = []

    def allreduce(self, ignore_stale: bool, label: str, compares: bool) -> None:
        gradients = [parameter._grad for parameter in self._parameters]
        if len(gradients) != len(self._seen) or any(new is not old for new, old in zip(gradients, self._seen)):
            self._when_moved()
            self._seen = gradients
        for replicas in gradients:
            if replicas is None or len(replicas) == 1:
                continue
            if row_sparse.is_row_sparse(replicas):
                row_sparse.sum_over_devices(replicas, "gradient of a parameter")
            else:
                total = arrays.total(replicas)
                for gradient in replicas:
                    arrays.copy(total, gradient)

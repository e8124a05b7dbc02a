"""Sums the gradients of local parameters, which no other worker trains, over this process's devices."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from ..collectives import row_sparse
from ..compat import arrays
from ..compat.mxnet import NDArray, Parameter
from ..parameters import trainer_state
from .reducer import Comparing, Reducer
from .squares import Piece


class LocalReducer(Reducer):
    """Sums, over this worker's devices, the gradients of parameters that belong to no process set.

    Parameters
    ----------
    parameters : sequence of Parameter
        The local parameters.
    when_moved : callable
        Called without arguments when parameters have new arrays.
    """

    def __init__(self, parameters: Sequence[Parameter], when_moved: Callable[[], None]) -> None:
        self._parameters = list(parameters)
        self._when_moved = when_moved
        self._seen: list[Any] = []
        self._counted: list[NDArray] = []  # row_sparse gradients in the norm of this step

    def pieces(self, only_fresh: bool) -> list[Piece]:
        gradients = [
            parameter._grad[0] for parameter in self._parameters if _is_fresh(parameter) and not _has_rows(parameter)
        ]
        return [Piece(gradient, 0, gradient.size) for gradient in gradients]

    def to_scale(self, only_fresh: bool) -> list[NDArray]:
        dense = [parameter for parameter in self._parameters if _is_fresh(parameter) and not _has_rows(parameter)]
        return [gradient for one in dense for gradient in one._grad]

    def has_rows(self) -> bool:
        return any(map(_has_rows, self._parameters))

    def squares_of_rows(self, only_fresh: bool) -> float:
        sparse = [parameter for parameter in self._parameters if _is_fresh(parameter) and _has_rows(parameter)]
        self._counted = [gradient for parameter in sparse for gradient in parameter._grad]
        return sum(row_sparse.squares(parameter._grad[0]) for parameter in sparse)

    def scale_rows(self, factor: float) -> None:
        for gradient in self._counted:
            row_sparse.scale(gradient, factor)

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        gradients = [parameter._grad for parameter in self._parameters]
        seen = [*gradients, *(parameter._data for parameter in self._parameters)]
        if len(seen) != len(self._seen) or any(new is not old for new, old in zip(seen, self._seen)):
            self._when_moved()
            self._seen = seen
        for replicas in gradients:
            if replicas is None or len(replicas) == 1:
                continue
            if row_sparse.is_row_sparse(replicas):
                row_sparse.sum_over_devices(replicas, "gradient of a parameter")
            else:
                total = arrays.total(replicas)
                for gradient in replicas:
                    arrays.copy(total, gradient)


def _is_fresh(parameter: Parameter) -> bool:
    """Whether a gradient will be used in the update; never on a worker that has ended its loop in join()."""
    return parameter._grad is not None and trainer_state.is_fresh(parameter)


def _has_rows(parameter: Parameter) -> bool:
    return parameter._grad_stype != "default"

"""The gradients of local parameters, which no other worker trains: they are summed over this process's devices only."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from ..collectives import row_sparse
from ..compat.mxnet import Parameter, sum_over_devices


class LocalReducer:
    """Replaces `DenseReducer` for parameters that belong to no process set.

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

    def allreduce(self, ignore_stale: bool = False, label: str = "", compares: bool = False) -> None:
        """Replace each gradient on several devices by the sum over them."""
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
                sum_over_devices(replicas)

    def fence(self) -> None:
        """No-op: no failure of another worker reaches these parameters."""

    def compare(self, label: str) -> None:
        """No-op: no other worker updates these parameters."""

    def refuse_comparison(self, reason: str) -> None:
        """No-op: no other worker waits."""

    def has_begun(self) -> bool:
        """False: no other worker takes part."""
        return False

    def share_freshness(self) -> None:
        """No-op: no other worker has these parameters."""

    def awaited_by(self) -> list[int]:
        """No ranks: no other worker waits."""
        return []

    def refuse_awaited(self, reason: str) -> None:
        """No-op: no other worker waits."""

    def refuse(self, reason: str) -> None:
        """No-op: no other worker waits."""

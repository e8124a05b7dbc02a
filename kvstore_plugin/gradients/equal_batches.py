"""Warns if all workers train on the same batches, without asking the other workers.

If all workers have the same gradient, its mean over the workers is the same gradient. So the first worker compares some
elements of its gradients before and after the sums of one step. It uses the second step, in which all workers have the
same weights, even if weights are first broadcast in the first step. MXNet's engine copies these elements after backward
and again after the sums. The worker compares the copies in a later step, when the core has counted more steps, so no
step waits for the copies. It reads their memory directly, since a wait would clear an error that other arrays share.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import MXNetError, NDArray, engine_blocks, mx
from ..world import process, training_warnings
from ..world.process_set import global_process_set
from .bucket_plan import Operation, Reduction

_STEP = 2  # counted from 1
_LATER = 3  # steps that must have ended: the previous step, the step itself, and one that has used its weights
_ELEMENTS = 1024  # compared elements of a gradient
_ENDS = 4  # compared gradients at each end of the network
_DTYPES = ("float16", "float32", "float64")

_told = False


class EqualBatches:
    """The check of one step's gradients, on a trainer's first worker."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._step = 0
        self._taken: list[_Taken] = []
        self._gradients: list[NDArray] = []
        self._counted = (0, 0)

    def before(self, operations: Sequence[Operation]) -> None:
        """To be called in each step before the operations are pushed."""
        self._step += 1
        if self._step == _STEP:
            self._gradients = _samples(operations)
            self._taken = [_Taken(array.dtype, copy, None) for array, copy in _copied(self._gradients)]

    def after(self) -> EqualBatches | None:
        """To be called after the operations were pushed. Returns this check, or None once the check has ended."""
        if self._step < _STEP:
            return self
        counted = self._core_counts()
        if self._step == _STEP:
            both = zip(self._taken, _copied(self._gradients))
            self._taken = [one._replace(after=copy) for one, (_, copy) in both]
            self._gradients, self._counted = [], counted
            return self if self._taken else None
        if counted[0] < self._counted[0] + _LATER:
            return self  # the sums of the checked step may not have ended
        if counted[1] == self._counted[1] and self._are_equal():
            _warn()
        return None

    def _core_counts(self) -> tuple[int, int]:
        """Steps whose gradients are summed, and operations that have failed."""
        return self._reduction.process_set._core.statistics()["steps"], process.core.failed_operations()

    def _are_equal(self) -> bool:
        size = self._reduction.process_set.size()
        factor, is_zero = size * self._reduction.scale, True
        for one in self._taken:
            before, after = one.values()
            # The sum of equal numbers is rounded in float32, once for each worker, and the result in its own dtype.
            tolerance = 2 * np.finfo(one.dtype).eps + 2 * size * np.finfo(np.float32).eps
            if not np.isfinite(after).all() or not np.allclose(after, factor * before, rtol=tolerance, atol=0):
                return False
            is_zero = is_zero and not before.any()
        return not is_zero


class _Taken(NamedTuple):
    """Copies of elements of a gradient before and after its sum."""

    dtype: Any
    before: NDArray
    after: NDArray | None

    def values(self) -> list[np.ndarray]:
        nbytes = self.before.size * np.dtype(self.dtype).itemsize
        both = [arrays.memory_of(one, nbytes).view(self.dtype) for one in (self.before, self.after)]
        return [one.astype(np.float64) for one in both]


def of(reduction: Reduction) -> EqualBatches | None:
    """The check for a trainer; None if there are no other workers, or if the check could be wrong.

    Members of a process set may have the same batches on purpose, if a network is divided among them. A compressor
    changes a gradient even if all workers have the same gradient, and a hook may change a gradient in any way.
    """
    process_set = reduction.process_set
    is_judge = process_set is global_process_set and process_set.size() > 1 and process_set.rank() == 0
    if not is_judge or _told or reduction.compression or reduction.hook is not None or engine_blocks():
        return None
    return EqualBatches(reduction)


def _samples(operations: Sequence[Operation]) -> list[NDArray]:
    """Gradients whose sums this worker gets: up to _ENDS from the model's first layers, and up to _ENDS from its last.

    With the optimizer on the store, only this worker's shards. Empty if a parameter is on several devices.
    """
    gradients: list[NDArray] = []
    for operation in operations:
        if any(len(member.parameter._grad) > 1 for member in operation.members):
            return []  # the sum includes several devices
        if operation.update is None:
            gradients += [member.parameter._grad[0] for member in operation.members]
        elif operation.layout:  # the sums of this worker's shards
            gradients += operation.update.own_gradients()
    known = [gradient for gradient in gradients if gradient.size and arrays.dtype_name(gradient.dtype) in _DTYPES]
    return known if len(known) <= 2 * _ENDS else known[:_ENDS] + known[-_ENDS:]


def _copied(gradients: Sequence[NDArray]) -> list[tuple[NDArray, NDArray]]:
    """The gradients, each with a copy of some elements in host memory; empty if copying fails."""
    copied = []
    try:
        with arrays.not_recorded(), mx.util.np_shape(True):
            for gradient in gradients:
                count = min(gradient.size, _ELEMENTS)
                target = mx.nd.empty((count,), ctx=mx.cpu(), dtype=gradient.dtype)
                arrays.elements(gradient, 0, count).as_nd_ndarray().reshape((-1,)).copyto(target)
                copied.append((gradient, target))
    except (MXNetError, MemoryError):
        return []
    return copied


def _warn() -> None:
    global _told
    if _told:
        return
    _told = True
    training_warnings.warn(
        "All %d workers had the same gradients in a step, so they train on the same batches, and do the work of one. "
        "Give each worker its own share of the data, as kvstore_plugin.DistributedSampler does. Where all workers are "
        "meant to have the same batches, ignore this warning.",
        process.size(),
    )

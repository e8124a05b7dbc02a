"""The sum of squares of gradients: first this worker's share, then the sum over the workers of a process set.

On CPUs the core adds up the squares (``csrc/mxnet/gradient_norm.cpp``, ``csrc/kernels/kernels.cpp``).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import NDArray, mx, view_of_memory
from ..sharded_optimizer.partition import grouped
from ..world import process
from ..world.process_set import ProcessSet

# Gradients are combined up to this size per engine operation.
BYTES_AT_ONCE = 4 << 20


class Piece(NamedTuple):
    """Elements [begin, begin + count) of a dense gradient."""

    gradient: NDArray
    begin: int
    count: int


def share_of(gradients: Sequence[NDArray], rank: int, size: int) -> list[Piece]:
    """The elements of gradients that belong to rank `rank`, if they are divided equally among `size` ranks."""
    total = sum(gradient.size for gradient in gradients)
    first, last = total * rank // size, total * (rank + 1) // size
    pieces, begin = [], 0
    for gradient in gradients:
        start, stop = max(first - begin, 0), min(last - begin, gradient.size)
        if start < stop:
            pieces.append(Piece(gradient, start, stop - start))
        begin += gradient.size
    return pieces


class Squares:
    """A number in memory that the ranks of a process set can sum in place.

    Parameters
    ----------
    process_set : ProcessSet or None
        None: the number is not summed over workers.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        self._process_set = process_set
        self._made: tuple[Any, NDArray] | None = None

    @property
    def buffer(self) -> Any:
        """The memory of the number in the host's segment; None without a process set."""
        return self._memory()[0]

    @property
    def array(self) -> NDArray:
        """The number, of float64 and shape (1,), in `buffer` if it is not None. A new array after another init()."""
        return self._memory()[1]

    def _memory(self) -> tuple[Any, NDArray]:
        if self._made is None or not getattr(self._made[0], "attached", True):
            if self._process_set is None:
                self._made = None, mx.nd.zeros(1, dtype="float64")
            else:
                buffer = self._process_set._core.allocate(8)
                self._made = buffer, view_of_memory(np.frombuffer(buffer, dtype=np.float64, count=1), None)
        return self._made

    def add_up(self, pieces: Sequence[Piece], more: float, priority: int) -> None:
        """Set the number to `more` plus the sum of squares of the pieces. Returns at once.

        MXNet's engine reads the first pieces while it still reduces later gradients.

        Raises
        ------
        RuntimeError
            A gradient does not consist of floating-point numbers. Then the number is undefined.
        """
        squares = self.array.handle.value
        here = [piece for piece in pieces if not arrays.on_gpu(piece.gradient)]
        groups = grouped(here, lambda one: one.count * arrays.item_size(one.gradient), BYTES_AT_ONCE) or [[]]
        for number, group in enumerate(groups):
            read = [(piece.gradient.handle.value, piece.begin, piece.count) for piece in group]
            process.core.push_sum_of_squares(read, squares, more if number == 0 else None, priority)
        with arrays.not_recorded():
            for gradient, begin, count in pieces:
                if arrays.on_gpu(gradient):
                    self.array[:] += _sum_of_squares(arrays.elements(gradient, begin, count))

    def __reduce__(self) -> tuple:
        return Squares, (self._process_set,)


def _sum_of_squares(gradient: NDArray) -> NDArray:
    """The sum of squares of an array on a GPU, by MXNet's operators; float64, on the CPU."""
    return gradient.as_nd_ndarray().astype("float32").square().sum().as_in_context(mx.cpu()).astype("float64")

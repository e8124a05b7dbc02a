"""Divides the elements of the parameters among the workers, for an optimizer that each worker runs on its share.

The division depends only on its arguments, so all workers make the same division without communication.

For an optimizer that works element by element, parameters are laid out in a line. The line is cut into groups of a few
megabytes, and each group into as many pieces of equal length as there are workers. So all workers have work when a
group of gradients is ready, few parameters are cut, and all workers share a large parameter. If parameters must stay
whole, each goes to the worker with the least load, the largest first (Graham, Bounds on multiprocessing timing
anomalies, 1969).
"""

from __future__ import annotations

import bisect
import math
from typing import Any, Callable, Iterable, NamedTuple, Sequence

# Cuts are aligned to this number of bytes: a cache line, which two workers should not both write, and a SIMD vector.
_ALIGNMENT = 64

# Rows of up to this number of bytes are not cut: a row_sparse gradient consists of whole rows, and each worker updates
# the rows of its piece. Pieces that differ by one such row take about the same time.
_LARGEST_ROW = 64 << 10

# A cut that would leave a smaller piece of a parameter moves to the parameter's nearer end. Pieces that differ by this
# number of bytes take about the same time.
_SMALLEST_PIECE = 16 << 10


class Shard(NamedTuple):
    """Elements [begin, begin + count) of a parameter, flattened, and the rank that updates them."""

    owner: int
    begin: int
    count: int


class Size(NamedTuple):
    """The size of a parameter."""

    count: int  # elements
    width: int  # bytes of an element
    row: int = 1  # elements of a row

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.width

    @property
    def unit(self) -> int:
        """A parameter is cut at multiples of this number of bytes."""
        row = self.row * self.width
        aligned = row * _ALIGNMENT // math.gcd(row, _ALIGNMENT)
        return aligned if aligned <= _LARGEST_ROW else row if row <= _LARGEST_ROW else max(_ALIGNMENT, self.width)


def divide(sizes: Sequence[Size], workers: int, elementwise: bool, group_bytes: int) -> list[tuple[Shard, ...]]:
    """The shards of each parameter, in the order of their elements. No worker owns two shards of a parameter.

    Parameters
    ----------
    sizes : sequence of Size
        The sizes of the parameters.
    workers : int
        Number of workers that share the parameters.
    elementwise : bool
        Whether a parameter may be cut.
    group_bytes : int
        Bytes of a group; the gradients of a group's parameters should be ready at about the same time.
    """
    if elementwise:
        groups = grouped(sizes, lambda size: size.nbytes, group_bytes)
        return [shards for group in groups for shards in _cut(group, workers)]
    return _whole(sizes, workers)


def grouped(items: Iterable[Any], bytes_of: Callable[[Any], int], most: int) -> list[list[Any]]:
    """Divide items, in their order, into groups of at most `most` bytes; a larger item is its own group."""
    groups: list[list[Any]] = []
    used = 0
    for item in items:
        nbytes = bytes_of(item)
        if not groups or used + nbytes > most:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += nbytes
    return groups


def _cut(group: Sequence[Size], workers: int) -> list[tuple[Shard, ...]]:
    """The parameters of one group, laid out in a line of bytes that is cut into equal pieces."""
    starts = [0]
    for size in group:
        starts.append(starts[-1] + size.nbytes)
    cuts = [0]
    for worker in range(1, workers):
        wanted = starts[-1] * worker // workers
        number = min(bisect.bisect_right(starts, wanted), len(group)) - 1
        cuts.append(max(cuts[-1], _cut_at(wanted, starts[number], starts[number + 1], group[number].unit)))
    cuts.append(starts[-1])
    divided = []
    for start, (count, width, _) in zip(starts, group):
        pieces = [
            Shard(
                owner,
                max(begin - start, 0) // width,
                (min(end - start, count * width) - max(begin - start, 0)) // width,
            )
            for owner, (begin, end) in enumerate(zip(cuts, cuts[1:]))
        ]
        divided.append(tuple(piece for piece in pieces if piece.count > 0))
    return divided


def _cut_at(wanted: int, start: int, end: int, unit: int) -> int:
    """The position to cut a parameter at bytes [start, end) of the line; `start` or `end` if it stays whole."""
    at = start + (wanted - start) // unit * unit
    if min(at - start, end - at) < _SMALLEST_PIECE:
        return start if wanted - start < end - wanted else end
    return at


def _whole(sizes: Sequence[Size], workers: int) -> list[tuple[Shard, ...]]:
    loads = [0] * workers
    divided: list[tuple[Shard, ...]] = [()] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i].nbytes, i)):
        owner = min(range(workers), key=lambda worker: (loads[worker], worker))
        loads[owner] += sizes[number].nbytes
        divided[number] = (Shard(owner, 0, sizes[number].count),) if sizes[number].count else ()
    return divided

"""Allreduce of adopted memory beside the same loads and stores without synchronization: ``python -m benchmarks.limit``.

Two ranks. The limit is the fastest of the plain kernels in workers/limit.cpp.
"""

from __future__ import annotations

from . import cases, peers
from .command_line import numbers, parser, show
from .results import Results
from .runner import Item, run

NBYTES = 64 * cases.MB


def plan(nbytes: int = NBYTES) -> list[Item]:
    """The limit, the core on its own memory, and DistributedTrainer with one gradient of that size."""
    return [
        Item(peers.LIMIT, 2, [cases.limit(nbytes)]),
        Item(peers.CORE, 2, [cases.in_place(nbytes)]),
        Item(peers.MYKV, 2, [cases.gradients(f"1x{nbytes}", "own")]),
    ]


def main() -> None:
    """Measure all three."""
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", default="64MB")
    given = arguments.parse_args()
    results = Results()
    for nbytes in numbers(given.sizes):
        run(plan(nbytes), results, given.rounds)
    show(results)


if __name__ == "__main__":
    main()

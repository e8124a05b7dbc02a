"""Measures allreduce of adopted memory, and the same loads and stores without synchronization: ``python -m
benchmarks.limit``.

Two ranks. The limit is the fastest of the plain kernels in workers/limit.cpp. `many_plan` has more ranks than cores.
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


def many_plan(ranks: tuple[int, ...], nbytes: int, limited: tuple[int, ...]) -> list[Item]:
    """A barrier for each number of processes, and for some of them the limit for arrays of `nbytes` bytes."""
    loops = {**cases.limit(nbytes), "iterations": 6}
    return [Item(peers.LIMIT, size, [cases.barrier(), *([loops] if size in limited else [])]) for size in ranks]


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

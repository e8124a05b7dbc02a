"""How time grows with the ranks of one host and with the number of arrays: ``python -m benchmarks.scaling``.

Ranks run the core alone, without MXNet; there are more of them than cores. Arrays have 4 KB each. Plain loops over the
same number of arrays, and a barrier of the same number of processes, are shown too.
"""

from __future__ import annotations

from . import cases, limit, peers
from .command_line import measure, numbers, parser, show
from .results import Results
from .runner import Item, run

RANKS = (1, 2, 4, 8, 16, 32)
CPU_RANKS = (2, 4, 8, 16, 32, 64)
ARRAYS = (10, 100, 1000, 10000)
SMALL, LARGE = 4 * cases.KB, 4 * cases.MB


def ranks_plan(ranks: tuple[int, ...] | list[int] = RANKS) -> list[Item]:
    """A small and a large allreduce in place over each number of ranks, and the processor time of small ones."""
    each = [{**cases.in_place(SMALL), "iterations": 60}, {**cases.in_place(LARGE), "iterations": 30}]
    plan = [Item(peers.CORE, size, [*each, *([_cpu()] if size in CPU_RANKS else [])]) for size in ranks]
    return [*plan, *(Item(peers.CORE, size, [_cpu()]) for size in CPU_RANKS if size > max(ranks))]


def _cpu() -> cases.Case:
    return cases.back_to_back(SMALL)


def limits_plan() -> list[Item]:
    """Lower bounds of the machine: for the loads and stores of the large allreduce, and for sleeping and waking."""
    return limit.many_plan(CPU_RANKS, LARGE, RANKS)


def array_cases(flavour: str) -> list[cases.Case]:
    """allreduce_grads() of each number of arrays."""
    return [cases.gradients(f"{count}x{SMALL}", flavour, iterations=4) for count in ARRAYS]


def main() -> None:
    """Measure both."""
    given = parser(__doc__, ranks=",".join(map(str, RANKS))).parse_args()
    results = Results()
    run([*ranks_plan(numbers(given.ranks)), *limits_plan()], results, given.rounds)
    show(results)
    given.ranks = "2"
    own, stock = array_cases("own"), array_cases("stock")
    measure(given, {"mykv": own + stock, "horovod": own, "dist_sync": own})


if __name__ == "__main__":
    main()

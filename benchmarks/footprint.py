"""Measures mykv's cost other than time on the wire: ``python -m benchmarks.footprint``.

The share of a core of a rank that waits and of one that is idle, Python's time in step() of ResNet-50's 193 parameters,
and the memory of processes that reduce, compared with that of processes that do not.
"""

from __future__ import annotations

from . import cases, peers
from .command_line import measure, parser, show
from .results import Results
from .runner import Item, run

MODELS = ("resnet50", "bert")


def cpu_and_python() -> list[cases.Case]:
    """The cases in one process."""
    return [cases.late(), cases.idle(), cases.python_time("resnet50", "own")]


def memory_plan() -> list[Item]:
    """Each model in separate processes, with mykv and without, four times: memory varies by 20 MB."""
    both = [Item(setup, 2, [cases.memory(model, "own")]) for model in MODELS for setup in (peers.MYKV, peers.ALONE)]
    return both * 4


def main() -> None:
    """Measure all of it."""
    given = parser(__doc__).parse_args()
    each = cpu_and_python()
    measure(given, {"mykv": each, "horovod": each, "dist_sync": each, "mpi": each[:1]})
    results = Results()
    run(memory_plan(), results, 1)
    show(results)


if __name__ == "__main__":
    main()

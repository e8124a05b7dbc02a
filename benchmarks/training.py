"""Time of a training step compared with compute alone, and its parts: ``python -m benchmarks.training``.

ResNet-18 on 64 x 64 pixels, 8 images per worker. 'step' is the distributed network, 'alone' a second one in the same
processes that trains without a store; they take turns.
"""

from __future__ import annotations

from . import cases, peers
from .command_line import measure, parser, show
from .results import Results
from .runner import Item, run


def main() -> None:
    """Measure training steps of every peer that has a trainer, and mykv with other numbers of threads and buckets."""
    given = parser(__doc__).parse_args()
    each = [cases.training("own"), cases.breakdown("own")]
    measure(given, dict.fromkeys(("mykv", "horovod", "dist_sync"), each))
    results = Results()
    variants = [peers.ALONE, peers.TWO_THREADS, peers.ONE_BUCKET]
    run([Item(setup, 2, cases.shortened(each, given.iterations)) for setup in variants], results, given.rounds)
    show(results)


if __name__ == "__main__":
    main()

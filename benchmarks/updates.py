"""step() with gradients ready, with updates on the store and on the workers: ``python -m benchmarks.updates``.

The reference is a single process without communication.
"""

from __future__ import annotations

from . import cases, peers
from .command_line import parser, show
from .results import Results
from .runner import Item, run

OPTIMIZERS = ("sgd", "adam")


def plan(wanted: list[str]) -> list[Item]:
    """The cases of each peer, and of the single process, which has as many threads as a rank."""
    own = [cases.update(optimizer, "own") for optimizer in OPTIMIZERS]
    ours = own + [cases.update(optimizer, flavour) for optimizer in OPTIMIZERS for flavour in ("store", "stock store")]
    items = [Item(peers.MYKV, 2, ours), Item(peers.MYKV_BOUND, 2, list(ours)), Item(peers.ALONE, 1, own)]
    items.append(Item(peers.ALONE_BOUND, 1, own, rounds=3))
    if "horovod" in wanted:
        items += [Item(setup, 2, own) for setup in (peers.SETUPS["horovod"][0], peers.HOROVOD_NO_CYCLE)]
    if "dist_sync" in wanted:
        # Each in its own processes: a second Trainer would get values of the first one's keys from the servers.
        items += [Item(peers.SETUPS["dist_sync"][0], 2, [case]) for case in own]
    return items


def main() -> None:
    """Measure all of it."""
    given = parser(__doc__).parse_args()
    results = Results()
    run(plan(peers.chosen(given.peers)), results, given.rounds)
    show(results)


if __name__ == "__main__":
    main()

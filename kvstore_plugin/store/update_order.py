"""Updates that wait come in the same order on all workers; where not, an error on all of them.

Some optimizers (LARS and LBSGD of MXNet 1.9.1) read norms of the gradient as numbers while they update. So push() waits
there until all workers have pushed the key, and workers that push keys in different orders would wait for each other
for ever. Before such an update they therefore meet, and show each other which key it is for.

A push of a sparse gradient does not come here: it meets under its key, since the others may have a dense one.
"""

from __future__ import annotations

from ..coordination import operation
from ..world.process_set import ProcessSet
from .requests import Call


def meet(process_set: ProcessSet, scope: str, call: Call) -> None:
    """Wait for the other workers, which are about to update the same key.

    Parameters
    ----------
    process_set : ProcessSet
    scope : str
        Of the store.
    call : Call
        What is pushed.

    Raises
    ------
    MXNetError
        A worker is about to update another key, has refused or left, or has brought its gradient without coming here.
    """
    core = process_set.core
    update = f"the update of key {call.key!r}"

    def look() -> None:
        others = core.waiting_for_this([call.name])[0]
        if others:
            core.give_up(
                _name(scope),
                f"rank {process_set.ranks[core.rank()]} has an optimizer that waits for gradients, and rank "
                f"{others[0]} does something else with key {call.key!r}: are the optimizers the same on all workers?",
            )

    operation.exchange(process_set, _name(scope), update, update, look=look)


def refuse(process_set: ProcessSet, scope: str, reason: str) -> None:
    """Take no part in the next meeting, and let it fail on the other workers, with the reason."""
    process_set.core.refuse(_name(scope), reason)


def _name(scope: str) -> str:
    return f"{scope}/order of updates"

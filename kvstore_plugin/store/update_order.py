"""Checks that all workers make blocking updates in the same order; if not, all workers get an error.

Some optimizers (LARS and LBSGD of MXNet 1.9.1) read norms of the gradient as numbers while they update. With these,
push() waits until all workers have pushed the key, and workers that push keys in different orders would deadlock. So
before such an update all workers exchange their keys and compare them. The check for circular waits
(coordination/circular_wait.py) does not suffice: it takes seconds, skips programs with other threads, and does not know
keys.

A push of a row_sparse gradient does not use this exchange. It compares the gradients under the name of the key, since
other workers may push a dense gradient for this key.
"""

from __future__ import annotations

import functools
from typing import Sequence

from ..coordination import operation
from ..world.process_set import ProcessSet
from .requests import Call


def meet(process_set: ProcessSet, scope: str, call: Call) -> None:
    """Wait until all other workers are about to update the same key.

    Parameters
    ----------
    process_set : ProcessSet
    scope : str
        The store's scope.
    call : Call
        The call that updates.

    Raises
    ------
    MXNetError
        A worker is about to update another key, has refused or left, or has pushed its gradient without this exchange.
    """
    update = f"the update of key {call.key!r}"
    operation.exchange(
        process_set, _name(scope), update, update, look=functools.partial(look, process_set, [call], _name(scope))
    )


def look(process_set: ProcessSet, listed: Sequence[Call], name: str) -> None:
    """While this worker waits in an exchange before it updates keys: give it up if others wait for a sum of a key."""
    core = process_set._core
    for call in listed:
        others = core.waiting_for_this([call.name])[0]
        if others:
            core.give_up(
                name,
                f"rank {process_set.ranks[core.rank()]} updates key {call.key!r} with an optimizer, but rank "
                f"{others[0]} does something else with that key. Set the same optimizer on all workers.",
                code="deadlock",
                ranks=others,
            )
            return


def refuse(process_set: ProcessSet, scope: str, reason: str) -> None:
    """Refuse the next exchange of keys: meet() fails on the other workers with the reason."""
    process_set._core.refuse(_name(scope), reason)


def _name(scope: str) -> str:
    return f"{scope}/order of updates"

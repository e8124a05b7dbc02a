"""Trainers and stores that are kept from one init() to the next, perhaps with other ranks (docs/elastic.md).

A trainer is attached to the workers again at its first use after an init(). The workers may have trained separately in
between, so all workers get the state of rank 0.
"""

from __future__ import annotations

from typing import Any, Callable

STATES_ARE_LOST = (
    "The optimizer states of {whose} are divided over the workers of an earlier init(), and this init() has other "
    "ranks. Save the states before shutdown(), and load them after init()."
)

WORKER_WAS_LOST = (
    "This trainer is from before a worker was lost and has no elastic=True, so its weights may differ between the "
    "workers. Create it with elastic=True and put it into the ElasticState, or create it again in a reset callback."
)

_broadcast: Callable[[Any], None] | None = None


def use(broadcast: Callable[[Any], None]) -> None:
    """Register the implementation of broadcast_states(), which imports trainers, and trainers import this module."""
    global _broadcast
    _broadcast = broadcast


def broadcast_states(trainer: Any) -> None:
    """Send the training state of rank 0 to all workers of a trainer. Collective; waits."""
    _broadcast(trainer)

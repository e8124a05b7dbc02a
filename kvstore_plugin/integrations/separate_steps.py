"""Detects a gluon.Trainer without a store in a job of several workers."""

from __future__ import annotations

import weakref

from ..compat.mxnet import gluon
from ..world import process, training_warnings

# A program that sums gradients itself rarely makes this many steps without an operation of this package.
_STEPS = 10

_seen: weakref.WeakKeyDictionary[gluon.Trainer, tuple[int, tuple[int, int]]] = weakref.WeakKeyDictionary()
_told = False


def note(trainer: gluon.Trainer) -> None:
    """Count a step of a Trainer without the store; warn once if many such steps exchange nothing."""
    global _told
    if _told or not process.is_initialized() or process.size() == 1 or process.rank() != 0:
        return
    steps, before = _seen.get(trainer, (0, (-1, -1)))
    if steps % _STEPS == 0:
        # Python may be many steps ahead of the engine, so pushed operations count too.
        operations = process.core.pushed_operations(), process.operations()
        # If the workers have trained together by another trainer, this trainer trains alone on purpose.
        if operations == before and not process.core.statistics()["steps"]:
            store = trainer._kvstore_params["kvstore"]
            _told = True
            training_warnings.warn(
                "A gluon.Trainer with the store %r has made %d steps in which the %d workers have exchanged nothing, "
                "so each of them trains its own weights. Use a DistributedTrainer, or "
                "gluon.Trainer(..., kvstore='mykv').",
                getattr(store, "type", store),
                _STEPS,
                process.size(),
            )
        before = operations
    _seen[trainer] = (steps + 1, before)

"""Detects scripts written for Horovod, and warns about differences.

Such a script imports this package by ``import kvstore_plugin as hvd``, or by a module ``horovod.mxnet`` that re-exports
it. If a call differs from Horovod's so that training would change silently, this module logs a warning.
"""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Any

from ..world import training_warnings
from ..world.process_set import ProcessSet

_told: set[str] = set()  # warnings that this process has given


def tell_of_means(trainer: Any, process_set: ProcessSet, frame: FrameType | None) -> None:
    """Warn once, in a script for Horovod, that gradients after allreduce_grads() are means here.

    Parameters
    ----------
    trainer : DistributedTrainer
    process_set : ProcessSet
        The trainer's workers. The first worker warns. With a single worker there is no warning: sums are means.
    frame : frame
        The caller's frame. The frames of its callers are checked too, since programs wrap trainers in classes.
    """
    if "means" in _told or not process_set.included() or process_set.size() == 1 or process_set.rank() != 0:
        return
    if not _is_for_horovod(trainer, frame):
        return
    _told.add("means")
    training_warnings.warn(
        "Gradients after allreduce_grads() are means over the %d workers, but sums in Horovod, so a script for Horovod "
        "clips at a different norm. Make the DistributedTrainer with gradients_after_allreduce='sum' for sums as in "
        "Horovod, or with 'mean' to keep means without this warning.",
        process_set.size(),
    )


def _is_for_horovod(trainer: Any, frame: FrameType | None) -> bool:
    """Whether the trainer's class comes from a module named horovod.mxnet, or a module that the script calls `hvd`."""
    if _offers(sys.modules.get("horovod.mxnet"), trainer):
        return True
    while frame is not None:
        if _offers(frame.f_globals.get("hvd"), trainer):
            return True
        frame = frame.f_back
    return False


def _offers(module: Any, trainer: Any) -> bool:
    offered = vars(module).get("DistributedTrainer") if isinstance(module, ModuleType) else None
    return isinstance(offered, type) and isinstance(trainer, offered)

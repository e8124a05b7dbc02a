"""Scripts that were written for Horovod: how they are known, and what they must be told.

They reach this package by its name, ``import kvstore_plugin as hvd``, or by a module ``horovod.mxnet`` that hands on
what is here. Where a call means something else than in Horovod, and training would change silently, a warning says so.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType, ModuleType
from typing import Any

from ..world.process_set import ProcessSet

_log = logging.getLogger("kvstore_plugin")

_told: set[str] = set()  # what this process was warned of


def tell_of_means(trainer: Any, process_set: ProcessSet, frame: FrameType | None) -> None:
    """Warn, once, that gradients after allreduce_grads() are means here, if a script for Horovod calls it.

    Parameters
    ----------
    trainer : DistributedTrainer
    process_set : ProcessSet
        Its workers, of which the first one warns. Of a single worker sums are means.
    frame : frame
        Of the caller. Its callers are looked at too, since programs wrap trainers in classes of their own.
    """
    if "means" in _told or not process_set.included() or process_set.size() == 1 or process_set.rank() != 0:
        return
    if not _is_for_horovod(trainer, frame):
        return
    _told.add("means")
    _log.warning(
        "Gradients after allreduce_grads() are means over the %d workers here, and sums in Horovod, so a script for "
        "Horovod that clips them clips at another norm. Make the DistributedTrainer with "
        "gradients_after_allreduce='sum' for sums, as in Horovod, or with 'mean' for means, without this warning.",
        process_set.size(),
    )


def _is_for_horovod(trainer: Any, frame: FrameType | None) -> bool:
    """Whether a module named horovod.mxnet offers the trainer's class, or one named `hvd` in the script does."""
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

"""Lets a process fork while operators that are written in Python are under way.

Before a fork MXNet waits for its engine, and for the threads of such operators (mx.operator.CustomOp). The thread that
forks holds Python's lock meanwhile. The operators need the lock too, and so do their threads when they free an
operator. So both are waited for before, without the lock.
"""

from __future__ import annotations

import os

from ..world import core as core_loader
from ..world import training_warnings
from . import draining, mxnet

_process: int | None = None  # the one that waits


def wait_before_forks() -> None:
    """From now on, before each fork of this process, wait until MXNet's engine and its threads of operators are idle.

    Other forks wait for the engine too, in MXNet.
    """
    global _process
    if _process is None:
        os.register_at_fork(before=_wait)
    _process = os.getpid()


def _wait() -> None:
    if _process != os.getpid():
        return
    if draining.wait(mxnet.wait_for_all, None):
        training_warnings.warn(
            "Operations had failed when this process was to fork, and waiting for them has made MXNet forget their "
            "errors. Their results are missing, although reading them raises no error any more."
        )
    core_loader.load().join_operator_threads()

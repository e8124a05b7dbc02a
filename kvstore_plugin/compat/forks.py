"""Makes forks safe while Python operators of MXNet are under way.

Before a fork MXNet waits for its engine, and for the threads of such operators (mx.operator.CustomOp). The forking
thread holds the GIL during this wait. But the operators, and their threads when they free an operator, need the GIL. So
this module waits for the engine and the threads before MXNet does, without the GIL.
"""

from __future__ import annotations

import os

from ..world import core as core_loader
from ..world import training_warnings
from . import draining, mxnet

_process: int | None = None  # id of the process that waits before its forks


def wait_before_forks() -> None:
    """Make each later fork of this process wait until MXNet's engine and its operator threads are idle."""
    global _process
    if _process is None:
        os.register_at_fork(before=_wait)
    _process = os.getpid()


def _wait() -> None:
    if _process != os.getpid():
        return
    if draining.wait(mxnet.wait_for_all, None):
        training_warnings.warn(
            "Operations failed before this process forked. mykv had to wait for them, so MXNet has dropped their "
            "errors: their results are missing, but reading them no longer raises an error."
        )
    core_loader.load().join_operator_threads()

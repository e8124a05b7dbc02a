"""Makes forks safe while Python operators of MXNet are under way.

Before a fork MXNet waits for its engine, and for the threads of such operators (mx.operator.CustomOp). The forking
thread holds the GIL during this wait. But the operators, and their threads when they free an operator, need the GIL. So
this module waits for the engine and the threads before MXNet does, without the GIL.

Python calls the functions of os.register_at_fork() in most forks, but not in those of subprocess, which waits here by
a replacement of the function that forks.
"""

from __future__ import annotations

import _posixsubprocess
import functools
import os
import subprocess
import sys
from typing import Any, Callable, Sequence

from ..world import core as core_loader
from ..world import training_warnings
from . import draining, mxnet

_process: int | None = None  # id of the process that waits before its forks


def wait_before_forks() -> None:
    """Make each later fork of this process wait until MXNet's engine and its operator threads are idle."""
    global _process
    if _process is None:
        os.register_at_fork(before=_wait)
        for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            if hasattr(module, name):  # since Python 3.11 subprocess has its own name for the function
                setattr(module, name, _waiting_first(getattr(module, name)))
    _process = os.getpid()


def _waiting_first(fork_exec: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(fork_exec)
    def waits_and_forks(*arguments: Any) -> int:
        if _runs_fork_handlers(arguments):
            _wait()
        return fork_exec(*arguments)

    return waits_and_forks


def _runs_fork_handlers(arguments: Sequence[Any]) -> bool:
    """Whether fork_exec() calls fork(), as always before Python 3.10, and not vfork(), which runs no handlers."""
    if sys.version_info < (3, 10) or not subprocess._USE_VFORK:
        return True
    return any(one not in (None, -1) for one in arguments[16:20])  # another user or group


def _wait() -> None:
    if _process != os.getpid():
        return
    if draining.wait(mxnet.wait_for_all, None):
        training_warnings.warn(
            "Operations failed before this process forked. mykv had to wait for them, so MXNet has dropped their "
            "errors: their results are missing, but reading them no longer raises an error."
        )
    core_loader.load().join_operator_threads()

"""Ends this worker if its launcher ends first, because it was killed or lost its terminal.

The launcher, such as Open MPI's prterun or Hydra's proxy, ends the workers of its host when the job ends. If the
launcher itself is killed, its workers would continue to train, and nothing would read their output. A thread waits for
the end of the launcher's process, by a pidfd. PR_SET_PDEATHSIG does not suffice: that signal comes when the starting
thread ends, and launchers may start workers from short-lived threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from . import launched
from .process_watch import pidfd

_ORDERLY_S = 1.0  # seconds in which a launcher that ends the job may still end this worker itself
_HANDLERS_S = 5.0  # time for a SIGTERM handler

_begun = False


def begin() -> None:
    """Watch the launcher from now on; a no-op without a launcher, in the second call, and without pidfds."""
    global _begun
    if _begun:
        return
    _begun = True
    launcher = launched.launcher()
    if launcher is None:
        return
    try:
        descriptor = pidfd(launcher)
    except TimeoutError:  # raised by a signal handler of the script
        raise
    except OSError:  # the launcher has ended, or the kernel has no pidfds
        return
    arguments = (launcher, descriptor, os.getpid())
    threading.Thread(target=_watch, args=arguments, name="kvstore_plugin-launcher", daemon=True).start()


def _watch(launcher: int, descriptor: int, process: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(None)[0][1] & select.POLLIN:
        return  # other code has closed the descriptor
    time.sleep(_ORDERLY_S)
    with contextlib.suppress(OSError):
        text = f"mykv: the launcher (process {launcher}) has ended before its worker {process}, which ends now.\n"
        os.write(2, text.encode())
    os.kill(process, signal.SIGTERM)
    time.sleep(_HANDLERS_S)
    os.kill(process, signal.SIGKILL)

"""Logs a warning when operations wait long for other ranks.

The core finds out which rank waits for which (``csrc/runtime/stall_watch.cpp``). The thread here asks the core and logs
its reports. The thread waits in the core, without the GIL, so that a waiting main thread does not delay the warnings.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from . import settings

_log = logging.getLogger("kvstore_plugin")
# The thread may be asking other hosts, which takes a few seconds if a host does not answer.
_JOIN_S = 10.0

_thread: threading.Thread | None = None


def begin(core: Any) -> None:
    """Watch the operations of this process, unless it is the only rank or both limits are off."""
    global _thread
    limits = settings.value("MYKV_STALL_WARN_S"), settings.value("MYKV_STALL_ABORT_S")
    if core.size() == 1 or not any(limits):
        return
    core.begin_stall_watch()
    _thread = threading.Thread(target=_watch, args=(core, *limits), name="kvstore_plugin-stalls", daemon=True)
    _thread.start()


def end(core: Any) -> None:
    """Stop watching. Needed before Python exits, since a thread in the core would never return."""
    global _thread
    if _thread is not None:
        core.end_stall_watch()
        _thread.join(_JOIN_S)
        _thread = None


def _watch(core: Any, warn: float, abort: float) -> None:
    while True:
        reports = core.next_stalls(warn, abort)
        if reports is None:
            return
        for _, sentence in reports:
            _log.warning("%s", sentence)

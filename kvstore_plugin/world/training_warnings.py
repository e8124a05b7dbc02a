"""Warnings about the correctness of training, which reach the terminal even if logging goes only to a file.

Scripts often send the root logger to a file, which users do not read during training.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

_log = logging.getLogger("kvstore_plugin")
_STANDARD = ("logging", "logging.handlers")  # handlers of other modules may show messages in their own ways
_told: set[str] = set()


def warn(text: str, *arguments: Any) -> None:
    """Log a warning, and write it to stderr too, once, if no handler of logging shows it there."""
    _log.warning(text, *arguments, stacklevel=2)
    if not _log.isEnabledFor(logging.WARNING) or _is_shown() or sys.stderr is None:
        return
    record = logging.LogRecord(_log.name, logging.WARNING, "", 0, text, arguments, None)
    _log.filter(record)  # puts the rank before the text
    sentence = record.getMessage()
    if sentence in _told:
        return
    _told.add(sentence)
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(sentence, file=sys.stderr, flush=True)


def _is_shown() -> bool:
    """Whether a handler shows warnings of this logger on stdout or stderr."""
    handlers = []
    logger: logging.Logger | None = _log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    # Without handlers logging writes warnings to stderr.
    return not handlers or any(handler.level <= logging.WARNING and _shows(handler) for handler in handlers)


def _shows(handler: logging.Handler) -> bool:
    if type(handler).__module__ not in _STANDARD:
        return True
    stream = getattr(handler, "stream", None)
    if isinstance(handler, logging.FileHandler) or stream is None:
        return False
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)

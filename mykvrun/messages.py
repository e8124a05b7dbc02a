"""mykvrun's own messages to the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from .sinks import raw, write_all


def say(text: str, *lines: str) -> None:
    """Write a message, and lines below it, to stderr, unless its reader has gone."""
    write(sys.stderr, "\n  ".join([f"mykvrun: {text}", *lines]))


def write(stream: TextIO | None, text: str) -> None:
    """Write a text and a newline, unless its reader has gone."""
    if stream is not None:
        with contextlib.suppress(OSError):
            write_all(raw(stream), f"{text}\n".encode(errors="replace"))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal."""
    return stream is not None and stream.isatty()

"""Destinations of output. A sink that has failed does not stop mykvrun from reading, so that workers do not block."""

from __future__ import annotations

import errno
import io
import select
import time
from pathlib import Path
from typing import BinaryIO, Callable, TextIO

_LOOK_S = 0.1
_UNREAD_S = 1.0

is_ending = False  # whether a signal ends the job: then writes do not wait for a stalled reader

Loss = Callable[[str, OSError], None]  # called with the sink's name and the error


class Sink:
    """A file, pipe or terminal.

    Parameters
    ----------
    file : BinaryIO or None
        Unbuffered; None: output is dropped.
    name : str
        The name for the user.
    on_loss : callable
        Called with the first error. A full disk may have room again, so later writes are still tried.
    """

    def __init__(self, file: BinaryIO | None, name: str, on_loss: Loss) -> None:
        self._file, self._name, self._on_loss = file, name, on_loss
        self._is_told = False

    @classmethod
    def of_stream(cls, stream: TextIO | None, name: str, on_loss: Loss) -> Sink:
        """A sink for sys.stdout or sys.stderr, bypassing its buffer, which would keep failed writes."""
        return cls(None if stream is None else raw(stream), name, on_loss)

    @classmethod
    def of_path(cls, path: Path, on_loss: Loss) -> Sink:
        """A sink for a new file, whose folder is created too."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path.open("wb", buffering=0), str(path), on_loss)
        except OSError as error:
            on_loss(str(path), error)
            return cls(None, str(path), on_loss)

    def write(self, data: bytes) -> None:
        """Write all of the data; after an error the rest is lost."""
        if self._file is None:
            return
        try:
            write_all(self._file, data)
        except Unread:
            self._file = None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                self._file = None
            if not self._is_told:
                self._is_told = True
                self._on_loss(self._name, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def raw(stream: TextIO) -> BinaryIO:
    """The raw file of a stream."""
    stream.flush()
    return getattr(stream.buffer, "raw", stream.buffer)  # type: ignore[no-any-return]


class Unread(OSError):
    """The reader of a pipe is stalled while the job ends."""


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write to an unbuffered file until all is written.

    Raises
    ------
    Unread
        A signal ends the job, and the reader was stalled for a second.
    OSError
        Writing has failed.
    """
    left, waited = memoryview(data), 0.0
    while left:
        begin = time.monotonic()
        if not _takes_some(file):
            waited = waited + time.monotonic() - begin if is_ending else 0.0
            if waited > _UNREAD_S:
                raise Unread(errno.EAGAIN, "its reader does not read")
            continue
        waited = 0.0
        # Write up to PIPE_BUF bytes, which a writable pipe accepts without blocking. write() returns None if another
        # program has set the file to non-blocking.
        left = left[file.write(left[: select.PIPE_BUF]) or 0 :]


def _takes_some(file: BinaryIO) -> bool:
    """Wait briefly until a file is writable."""
    try:
        return bool(select.select([], [file], [], _LOOK_S)[1])
    except io.UnsupportedOperation:  # not a system file: sys.stdout was replaced
        return True

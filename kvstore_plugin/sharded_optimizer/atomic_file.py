"""Atomic writes: a file is written whole or not at all.

The content goes to a temporary file in the same directory, which is synchronized to the disk and then takes the name of
the old file (rename(2), POSIX.1-2017: any other process sees the old file or the new file).

If the file system supports it, a temporary file has no name until it is complete. The writing process locks it
(flock(2)) as long as it has a temporary name. So the next process that writes the same file recognizes files that a
killed process has left, which are not locked, and removes them.

The module tempfile does not serve here: only the owner may read its files, whatever the umask says, and a killed
process leaves them behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from typing import BinaryIO, Callable


def write(path: str | os.PathLike, fill: Callable[[BinaryIO], None]) -> None:
    """Replace a file with the output of `fill`, or leave it unchanged.

    Parameters
    ----------
    path : str or PathLike
        Of an existing or a new file; a symbolic link is followed. Permissions of an existing file stay the same.
    fill : callable
        Given the open binary file, writes the whole content to it.

    Raises
    ------
    OSError
        The file cannot be written: no such directory, no permission, no space, a limit of the process. The error names
        the file and the reason, and the file is unchanged.
    """
    try:
        target = os.path.realpath(os.fspath(path))
        if os.path.lexists(target) and not stat.S_ISREG(os.stat(target).st_mode):
            raise OSError(None, "it is not a regular file")
        _replace(target, fill)
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(
            error.errno, f"the file could not be written and keeps its old content: {reason}", os.fspath(path)
        ) from error


def _replace(target: str, fill: Callable[[BinaryIO], None]) -> None:
    directory, name = os.path.split(target)
    _remove_leftovers(directory, name)
    try:
        mode = stat.S_IMODE(os.stat(target).st_mode) & 0o777
    except FileNotFoundError:
        mode = None
    permissions = 0o666 if mode is None else mode & 0o600
    temporary = os.path.join(directory, f".{name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = _nameless(directory, permissions)
    is_nameless = descriptor is not None
    if is_nameless:
        _lock(descriptor)
    else:
        descriptor = _named(temporary, permissions)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            if is_nameless:
                # linkat(2) cannot replace a file: the new file gets a temporary name, and os.replace() renames it.
                os.link(f"/proc/self/fd/{file.fileno()}", temporary, src_dir_fd=file.fileno(), follow_symlinks=True)
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The new name is on disk only after an fsync of its directory, which some file systems do not support.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _named(temporary: str, permissions: int) -> int:
    """A new locked file with the name `temporary`; retried if another process removed the file before the lock."""
    while True:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, permissions)
        _lock(descriptor)
        if os.path.lexists(temporary):
            return descriptor
        os.close(descriptor)


def _remove_leftovers(directory: str, name: str) -> None:
    """Remove temporary files of killed processes: these files are not locked."""
    pattern = re.compile(re.escape(f".{name[:200]}.") + r"\d+\.[0-9a-f]{8}\.tmp")
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory or "."):
            if not pattern.fullmatch(entry):
                continue
            with contextlib.suppress(OSError):
                path = os.path.join(directory, entry)
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(descriptor)


def _nameless(directory: str, permissions: int) -> int | None:
    """A file without a name, which the kernel deletes if this process is killed.

    None if the file system does not support such files (NFS), or /proc is missing.
    """
    if not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(directory, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, permissions)
    except OSError:
        return None

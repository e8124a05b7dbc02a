"""Selects the ranks whose output is shown.

Of other ranks only errors are shown: tracebacks, and lines of stderr about an error.
"""

from __future__ import annotations

import re

from .digest import goes_on
from .errors import LaunchError

_RANGES = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")
_ERROR = re.compile(
    rb"mykv on rank \d+: |error|exception|fatal|critical|abort|terminate called|segmentation fault|killed|"
    rb"out of memory",
    re.IGNORECASE,
)
_TRACEBACK = b"Traceback (most recent call last):"  # may follow a progress bar
# Lines that are not errors, although they may contain such words: progress bars, and log lines of these levels.
_IS_NO_ERROR = re.compile(rb"\r.|\b(?:DEBUG|INFO)\b")


def parse_ranks(text: str, workers: int | None) -> frozenset[int]:
    """The ranks in ``0,3,8-11``.

    Raises
    ------
    LaunchError
        The text is not such a list, or names a rank that the job does not have.
    """
    if not _RANGES.fullmatch(text):
        raise LaunchError(f"--ranks {text} is not a list of ranks, such as 0,3 or 0-3.")
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    if not ranks:
        raise LaunchError(f"--ranks {text} names no rank: write the lower rank first, such as 0-3.")
    if workers is not None and max(ranks) >= workers:
        raise LaunchError(f"--ranks {text}: the job has only the ranks 0 to {workers - 1}.")
    return frozenset(ranks)


class ShownRanks:
    """Decides which lines are shown.

    Parameters
    ----------
    ranks : set of int, optional
        The ranks whose whole output is shown; None: all ranks.
    """

    def __init__(self, ranks: frozenset[int] | None = None) -> None:
        self._ranks = ranks
        self._tracebacks: dict[int, list[bytes]] = {}  # the open traceback of each rank
        self._in_error: set[int] = set()  # ranks whose last line was shown

    def shows(self, rank: int | None) -> bool:
        """Whether the whole output of this rank, or of the launcher (None), is shown."""
        return self._ranks is None or rank is None or rank in self._ranks

    def takes(self, rank: int | None, line: bytes, stream: str) -> bool:
        """Whether a line is shown. Call it with each line of stderr, in order."""
        if rank is None or self.shows(rank):
            return True
        if stream != "stderr":
            return False
        is_error = self._is_error(rank, line)
        (self._in_error.add if is_error else self._in_error.discard)(rank)
        return is_error

    def _is_error(self, rank: int, line: bytes) -> bool:
        open_traceback = self._tracebacks.get(rank)
        if open_traceback and goes_on(open_traceback, line):
            open_traceback.append(line.rstrip())
            return True
        self._tracebacks.pop(rank, None)
        if line.rstrip().endswith(_TRACEBACK):
            self._tracebacks[rank] = [_TRACEBACK]
            return True
        is_continued = rank in self._in_error and line[:1] in b" \t"
        return is_continued or bool(_ERROR.search(line) and not _IS_NO_ERROR.search(line))

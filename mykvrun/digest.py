"""Filters the workers' and the launcher's messages, so that the first failure stands out.

If several workers write the same traceback, it is shown once, with one line for each other worker. If several workers
write the same warning of mykv, only the first is shown. A worker whose error names another worker gets one line too, if
another worker's traceback was already shown. Launchers' texts about a failure are left out, since mykvrun names the
failed worker.
"""

from __future__ import annotations

import re
from typing import Iterator, NamedTuple, Tuple

Line = Tuple["int | None", bytes]  # the rank, None for the launcher, and the line with its end

_TRACEBACK = re.compile(rb"(?:  [+|] )*(?:Exception Group )?Traceback \(most recent call last\):\s*")
# The line between the tracebacks of an exception and of its cause.
_CHAIN = re.compile(rb"(?:During handling of the above exception|The above exception was the direct cause)")
_RANK = re.compile(rb"\brank [0-9]+|\b0x[0-9a-f]+")  # parts that differ between the workers' tracebacks
_WARNING = re.compile(rb"mykv on rank [0-9]+: (?P<text>.+)")
# An error of mykv about other workers: usually a consequence of their failure.
_OF_OTHERS = re.compile(rb"[\w.]*(?:MXNetError|WorkersLost): .*\branks? [0-9]+")
_FRAME = re.compile(rb'\s+File "(?P<path>[^"]+)", line (?P<line>[0-9]+)')
_LIBRARIES = re.compile(rb"/site-packages/|/kvstore_plugin/|<frozen ")
_MOST_HELD = 400  # lines
_MOST_LETTERS = 200

# Open MPI's texts are between two lines of hyphens. A progress bar may precede the hyphens of the first line.
_HYPHENS = re.compile(rb"(?P<before>(?:.*[^-])?)-{74}\s*")
_TELLS_FAILURE = re.compile(
    rb"MPI_ABORT was invoked on rank|"
    rb"noticed that process rank|detected that one or more processes exited with non-zero|"
    rb"has exited due to process rank|Primary job +terminated normally, but"
)
_MOST_OF_NOTICE = 40  # lines
# Lines of Hydra, the launcher of MPICH and Intel MPI, and of their libraries.
_OF_HYDRA = re.compile(
    rb"={70,}\s*|=   .*\s*|YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\s*|"
    rb"This typically refers to a problem with your application\.\s*|Please see the FAQ page for debugging .*\s*"
)
_ABORT = re.compile(rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort\(.*\s*")


class _Seen(NamedTuple):
    """A rank's traceback, possibly incomplete, with its lines in the form for comparison."""

    rank: int
    lines: list[bytes]


class Digest:
    """Takes the lines of a job, and returns the lines to show."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._open: dict[int, _Seen] = {}  # the traceback that a rank is writing
        self._held: dict[int, list[bytes]] = {}  # a rank's traceback that so far equals a shown traceback
        self._notices: dict[int | None, list[bytes]] = {}
        self._warned: dict[bytes, int] = {}
        self._had_notice: set[int | None] = set()
        self._behind: int | None = None  # the rank whose unfinished line precedes the last line of hyphens

    def take(self, rank: int | None, line: bytes, stream: str) -> list[Line]:
        """The lines to show after a line of a rank, or of the launcher (None)."""
        if stream != "stderr":  # Hydra writes its texts to stdout
            return [] if rank is None and _OF_HYDRA.fullmatch(line) else [(rank, line)]
        return [shown for left in self._without_notices(rank, line) for shown in self._without_repetitions(*left)]

    def end(self) -> list[Line]:
        """The lines to show at the end of the output."""
        notices, self._notices = self._notices, {}
        left = [(rank, line) for rank, lines in notices.items() for line in lines]
        shown = [line for each in left for line in self._without_repetitions(*each)]
        return shown + [line for rank in sorted(self._held) for line in self._released(rank)]

    def _without_notices(self, rank: int | None, line: bytes) -> Iterator[Line]:
        """Leave out the launcher's texts about a failure; a rank's MPI library may write such texts too."""
        hyphens = _HYPHENS.fullmatch(line)
        if rank is None and self._behind in self._notices:  # the text is the launcher's
            self._notices[rank] = self._notices.pop(self._behind)
        self._behind = rank if hyphens and hyphens["before"] else None
        notice = self._notices.get(rank)
        if notice is None and hyphens:
            if hyphens["before"]:
                yield rank, hyphens["before"] + b"\n"
            self._notices[rank] = [line[len(hyphens["before"]) :]]
        elif notice is not None:
            notice.append(line)
            if hyphens or len(notice) > _MOST_OF_NOTICE:
                del self._notices[rank]
                if hyphens and any(map(_TELLS_FAILURE.search, notice)):
                    self._had_notice.add(rank)
                else:
                    yield from ((rank, each) for each in notice)
        elif not (_ABORT if rank is not None else _OF_HYDRA).fullmatch(line):
            is_gap = rank is None and rank in self._had_notice and not line.strip(b"\0 \t\r\n")
            self._had_notice.discard(rank)
            if not is_gap:
                yield rank, line

    def _without_repetitions(self, rank: int | None, line: bytes) -> Iterator[Line]:
        warning = None if rank is None else _WARNING.search(line)
        if warning is not None:  # another thread may write it in the middle of a traceback
            if self._warned.setdefault(warning["text"].strip(), rank) == rank:
                yield rank, line
        elif rank is None:
            yield rank, line
        elif rank in self._held:
            yield from self._after_held(rank, line)
        elif rank in self._open and goes_on(self._open[rank].lines, line):
            self._open[rank].lines.append(_compared(line))
            yield rank, line
        else:
            self._open.pop(rank, None)
            yield from self._first(rank, line)

    def _first(self, rank: int, line: bytes) -> Iterator[Line]:
        """Handle a line that does not belong to an open traceback."""
        if _TRACEBACK.fullmatch(line):
            if any(seen.rank != rank for seen in self._seen):
                self._held[rank] = [line]
                return
            self._begin(rank, line)
        yield rank, line

    def _begin(self, rank: int, line: bytes) -> None:
        self._open[rank] = _Seen(rank, [_compared(line)])
        self._seen = [*self._seen[-20:], self._open[rank]]

    def _after_held(self, rank: int, line: bytes) -> Iterator[Line]:
        held = self._held[rank]
        if not goes_on([_compared(each) for each in held], line):
            yield from self._released(rank)
            yield from self._without_repetitions(rank, line)
            return
        held.append(line)
        if not (self._begins_as_another(held) or _may_tell_of_others(held)) or len(held) > _MOST_HELD:
            yield from self._released(rank)

    def _begins_as_another(self, held: list[bytes]) -> bool:
        """Whether the held lines equal the beginning of a shown traceback, which may be incomplete."""
        lines = [_compared(line) for line in held]
        return any(seen.lines[: len(lines)] == lines[: len(seen.lines)] for seen in self._seen)

    def _released(self, rank: int) -> Iterator[Line]:
        """The lines to show of a held traceback: one if it equals another or is about other workers, otherwise all."""
        held = self._held.pop(rank)
        lines = [_compared(line) for line in held]
        same = next((seen for seen in reversed(self._seen) if seen.lines == lines), None)
        exceptions = _exceptions(held)
        last = (exceptions or [b""])[-1].strip()
        text = last[:_MOST_LETTERS].decode(errors="ignore").encode()
        if same is not None:
            yield None, b"mykvrun: rank %d has written the same traceback as rank %d: %s\n" % (rank, same.rank, text)
        elif exceptions and _may_tell_of_others(held):
            yield (
                None,
                b"mykvrun: rank %d has failed too%s: %s\n" % (rank, _place(held), last),
            )  # not shortened: mykvrun would repeat a shortened line at the end
        else:
            self._begin(rank, held[0])
            self._open[rank].lines[:] = lines
            yield from ((rank, line) for line in held)


def _compared(line: bytes) -> bytes:
    return _RANK.sub(b"rank", line.rstrip())


def _exceptions(lines: list[bytes]) -> list[bytes]:
    """The lines that name the exceptions of a traceback and of the tracebacks that are chained to it."""
    texts = [line for line in lines if line[:1] not in b" \t\r\n"]
    return [line for line in texts if not _TRACEBACK.fullmatch(line) and not _CHAIN.match(line)]


def _may_tell_of_others(lines: list[bytes]) -> bool:
    """Whether all exceptions of a traceback, which may not be complete, are errors of mykv about other workers."""
    return all(map(_OF_OTHERS.match, _exceptions(lines)))


def _place(lines: list[bytes]) -> bytes:
    """The innermost line of the program in a traceback, as " at train.py:7"."""
    frames = [frame for frame in map(_FRAME.match, lines) if frame and not _LIBRARIES.search(frame["path"])]
    return b" at %s:%s" % (frames[-1]["path"].rpartition(b"/")[2], frames[-1]["line"]) if frames else b""


def goes_on(lines: list[bytes], line: bytes) -> bool:
    """Whether a line belongs to the traceback that these lines begin.

    The first line without an indentation is the exception. Later lines belong to it only if they introduce another
    traceback, are indented, like the stack of an MXNetError, or are empty.
    """
    text = line.rstrip()
    if not text or text[:1] in b" \t" or _CHAIN.match(text):
        return True
    if _TRACEBACK.fullmatch(line):
        return any(_CHAIN.match(each) for each in lines[-2:])
    has_exception = any(each and each[:1] not in b" \t" for each in lines[_last_beginning(lines) + 1 :])
    return not has_exception


def _last_beginning(lines: list[bytes]) -> int:
    return max((index for index, line in enumerate(lines) if _TRACEBACK.fullmatch(line)), default=0)

"""The workers' output: mykvrun shows it as it arrives, and keeps the last lines for the end of the job."""

from __future__ import annotations

import collections
import functools
import re
import time
from typing import BinaryIO, Iterable, Iterator, NamedTuple

from .digest import Digest
from .rank_files import RankFiles
from .shown_ranks import ShownRanks
from .sinks import Sink

_KEPT_LINES = 20

# Launchers' messages about the worker that ended first.
_FAILED_RANK = (
    re.compile(r"Process name: \[[^\]]*?[@,]1,(?P<rank>[0-9]+)\]"),  # Open MPI 5: a status
    re.compile(r"Process name: \[\[[0-9]+,1\],(?P<rank>[0-9]+)\]"),  # Open MPI 4: a status
    re.compile(r"process rank (?P<rank>[0-9]+) with PID [0-9]+ on node (?P<host>\S+)"),  # Open MPI: a signal, an abort
    re.compile(r"\(rank (?P<rank>[0-9]+) in comm "),  # MPICH, Intel MPI: an abort
    re.compile(r"=\s+RANK (?P<rank>[0-9]+) PID [0-9]+ RUNNING AT (?P<host>\S+)"),  # Intel MPI
    re.compile(r"srun: error: (?P<host>[^:\s]+): task (?P<rank>[0-9]+): (?P<killed>Killed|Terminated)?"),  # Slurm
)
# Launchers' messages about a job that cannot start and would fail again.
_MISTAKE = re.compile(
    r"unable to find the specified executable|unable to launch the specified application|"
    r"unrecognized option|not enough slots available|"  # Open MPI
    r"execvp error on file|unrecognized argument|"  # MPICH, Intel MPI
    r"srun: error: .*execve\(\):|srun: unrecognized option"  # Slurm
)
# Open MPI's text about a process that left the others; the word "improperly" follows.
_LEFT_OTHERS = re.compile(r"process rank [0-9]+ with PID [0-9]+ on node \S+ exiting\b")


# The line before and after a text of Open MPI. The hyphens may follow a progress bar, which has no newline at its end.
_LINE_OF_HYPHENS = re.compile(r"(?P<before>(?:.*[^-])?)-{74}")


class FailedWorker(NamedTuple):
    """The worker that ended first: its rank, and its host if the launcher names it ('' otherwise)."""

    rank: int
    host: str
    left_others: bool = False  # its process ended with status 0, and other workers had initialized MPI
    is_uncertain: bool = False  # srun may have killed it because of another worker: it reports workers in any order


class Marks(NamedTuple):
    """How a launcher marks a rank's output."""

    mark: re.Pattern[bytes]  # its first group is the rank
    beginning: re.Pattern[bytes]  # matches the beginning of a mark at the end of the data
    in_lines: bool  # marks also occur within a line: each piece of output is marked
    lasts: bool  # a mark covers all lines up to the next mark


def _marks(*atoms: bytes, in_lines: bool, lasts: bool = False) -> Marks:
    """Marks of several atoms. Each atom is a pattern that also matches every prefix of its text, such as [0-9]+."""
    beginning = functools.reduce(lambda inner, atom: atom + b"(?:" + inner + b")?", reversed(atoms))
    mark = b"".join(atoms)
    return Marks(re.compile(mark if in_lines else b"(?m)^" + mark), re.compile(beginning + rb"\Z"), in_lines, lasts)


_END = (rb"\]", b"<", b"s", b"t", b"d", b"[a-z]+", b">", b":")
# "[prterun-host-123@1,3]<stderr>: text" of Open MPI 5, with its option tag-fullname: workers do not write such a word.
# The mark may follow another worker's unfinished line. Without its option raw, Open MPI passes on whole lines. With raw
# it passes on pieces; depending on the release, it marks each line of a piece, or only the piece.
_OPEN_MPI_5 = (rb"\[", rb"[A-Za-z0-9_.-]+", b"@", b"[0-9]+", b",", b"([0-9]+)", *_END, b" ")
OPEN_MPI_LINES = _marks(*_OPEN_MPI_5, in_lines=True)
OPEN_MPI_PIECES = _marks(*_OPEN_MPI_5, in_lines=True, lasts=True)
# "[1,3]<stderr>:text" of Open MPI 4.
OPEN_MPI_4 = _marks(rb"\[", b"[0-9]+", b",", b"([0-9]+)", *_END, in_lines=True)
# "3: text" of srun.
SRUN = _marks(b" *", b"([0-9]+)", b":", b" ", in_lines=False)


def hydra_marks(word: str) -> Marks:
    """Marks of MPICH and Intel MPI: a unique word, the rank, and a colon."""
    return _marks(*(re.escape(letter).encode() for letter in word), b"([0-9]+)", b":", in_lines=True)


class Output:
    """Shows and keeps the workers' output.

    Parameters
    ----------
    marks : Marks, optional
        How the launcher marks each rank's output; None if it does not.
    prefix : bool
        Whether each line of a rank begins with ``[3] ``.
    timestamps : bool
        Whether each line begins with the time.
    is_elastic : bool
        Whether the job continues when a worker dies.
    files : RankFiles, optional
        Gets each rank's output.
    ranks : ShownRanks, optional
        Chooses the ranks to show.
    shows_all : bool
        Whether all of stderr is shown; see `Digest`.
    """

    def __init__(
        self,
        marks: Marks | None = None,
        *,
        prefix: bool = False,
        timestamps: bool = False,
        is_elastic: bool = False,
        files: RankFiles | None = None,
        ranks: ShownRanks | None = None,
        shows_all: bool = False,
    ) -> None:
        self.marks, self._prefix, self.is_elastic = marks, prefix, is_elastic
        self._timestamps, self._files = timestamps, files
        self.ranks = ranks or ShownRanks()
        self._digest = None if shows_all or marks is None else Digest()
        self._in_sight: collections.deque[bytes] = collections.deque(maxlen=_KEPT_LINES)  # last lines of stderr
        self._last: dict[int, collections.deque[str]] = {}
        self._had_text = False  # a text of Open MPI has begun
        self._in_notice: set[int] = set()  # ranks for which Open MPI writes a text between two lines of hyphens
        self.failed: FailedWorker | None = None
        self.tells_mistake = False  # the launcher has reported why the job cannot start

    @property
    def changes_lines(self) -> bool:
        """Whether each line is shown with a prefix."""
        return self._prefix or self._timestamps

    def take(self, rank: int | None, line: bytes, stream: str) -> bytes:
        """Keep a line of a rank, or of the launcher (None), and return the text to show."""
        # Open MPI's texts end with a NUL after their last line; workers' output may come between this line and the NUL.
        self._had_text = self._had_text or (stream == "stderr" and b"-" * 74 in line)
        if self._had_text and stream == "stderr" and line.startswith(b"\0"):
            line = line.lstrip(b"\0")
            if not line.strip(b"\r\n"):
                return b""
        self._look_for_failure(rank, line.decode(errors="replace"))
        if rank is not None:
            self._remember(rank, line)
            if self._files:
                self._files.write(rank, line, stream)
        lines = self._digest.take(rank, line, stream) if self._digest else [(rank, line)]
        return self._shown(lines, stream)

    def end(self, stream: str) -> bytes:
        """The text to show when a stream has ended."""
        return self._shown(self._digest.end(), stream) if self._digest and stream == "stderr" else b""

    def _shown(self, lines: Iterable[tuple[int | None, bytes]], stream: str) -> bytes:
        before = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamps else b""
        shown = []
        for rank, line in lines:
            if not self.ranks.takes(rank, line, stream):
                continue
            shown.append(before + (b"[%d] " % rank if self._prefix and rank is not None else b"") + line)
            if stream == "stderr":
                self._in_sight.append(line)
        return b"".join(shown)

    def _remember(self, rank: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # what a terminal shows
        hyphens = _LINE_OF_HYPHENS.fullmatch(text)
        own = hyphens["before"] if hyphens else text
        if own.strip(" \t") and rank not in self._in_notice:
            self._last.setdefault(rank, collections.deque(maxlen=_KEPT_LINES)).append(own)
        if hyphens:
            self._in_notice ^= {rank}

    def _look_for_failure(self, rank: int | None, text: str) -> None:
        is_launchers = rank is None or (self.marks is not None and self.marks.lasts)
        if self.failed or not (is_launchers or text.startswith("Abort(")):
            return
        self.tells_mistake = self.tells_mistake or (rank is None and bool(_MISTAKE.search(text)))
        found = next(filter(None, (pattern.search(text) for pattern in _FAILED_RANK)), None)
        if found:
            # MPICH's library writes the notice of an abort, in which the rank may be that of another communicator.
            of_world = int(found["rank"]) if is_launchers else rank
            assert of_world is not None
            named = found.groupdict()
            left = bool(_LEFT_OTHERS.search(text))
            self.failed = FailedWorker(of_world, named.get("host") or "", left, bool(named.get("killed")))

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank has written, at most 20."""
        return list(self._last.get(rank, ()))

    def shows_end_of(self, rank: int) -> bool:
        """Whether the last line of a rank is among the last lines of stderr that were shown."""
        lines = self.last_lines(rank)
        return bool(lines) and any(lines[-1] in line.decode(errors="replace") for line in self._in_sight)

    def close(self) -> None:
        """Close the files of the ranks."""
        if self._files:
            self._files.close()


class Stream:
    """Splits a launcher's stdout or stderr into pieces.

    Parameters
    ----------
    output : Output
    name : str
        ``"stdout"`` or ``"stderr"``.
    moves : bool
        Whether a line with a carriage return is shown before it ends: a progress bar in a terminal.
    """

    def __init__(self, output: Output, name: str, moves: bool) -> None:
        self._output, self._name, self._moves = output, name, moves and not output.changes_lines
        self._unread = b""  # data that may be the beginning of a mark
        self._rank: int | None = None  # the rank whose line the next piece continues
        self._open: dict[int | None, bytes] = {}  # lines that have not ended
        self._shown: dict[int | None, int] = {}  # shown length of these lines

    def take(self, data: bytes) -> bytes:
        """The text to show after more data was read; empty data means the end."""
        is_end = not data
        data, self._unread = self._unread + data, b""
        if not is_end:
            data, self._unread = self._divided(data)
        shown = b"".join(self._piece(rank, text) for rank, text in self._pieces(data))
        if is_end and self._open:
            ends = [self._line(rank, self._open[rank]) for rank in sorted(self._open, key=str)]
            shown += b"\n".join(filter(None, ends))
            shown += b"\n" if self._name == "stderr" and any(ends) else b""  # mykvrun's own line may follow
        if is_end:
            shown += self._output.end(self._name)
        return shown

    def _divided(self, data: bytes) -> tuple[bytes, bytes]:
        """Split data into a part to process and a rest, in which a mark may begin."""
        marks = self._output.marks
        if marks is None:
            return data, b""
        if marks.in_lines:
            beginning = marks.beginning.search(data)
            end = beginning.start() if beginning else len(data)
        else:
            end = data.rfind(b"\n") + 1
        return data[:end], data[end:]

    def _pieces(self, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Pieces of output with their ranks; None for pieces of the launcher."""
        marks = self._output.marks
        start = 0
        for mark in marks.mark.finditer(data) if marks else ():
            yield from self._of_rank(data[start : mark.start()])
            self._rank, start = int(mark[1]), mark.end()
        yield from self._of_rank(data[start:])

    def _of_rank(self, text: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Process the text between two marks: the rest of a rank's line, and lines of the launcher."""
        lasts = self._output.marks is None or self._output.marks.lasts
        end = len(text) if lasts or b"\n" not in text else text.index(b"\n") + 1
        if end:
            yield self._rank, text[:end]
        if not lasts and text[:end].endswith(b"\n"):
            self._rank = None
        if text[end:]:
            yield None, text[end:]

    def _piece(self, rank: int | None, text: bytes) -> bytes:
        *lines, rest = _lines(self._open.pop(rank, b"") + text)
        shown = b"".join(self._line(rank, line) for line in lines)
        if rest:
            self._open[rank] = rest
            is_unread = self._output.marks is None and not self._output.changes_lines
            if is_unread or (self._moves and b"\r" in rest and self._output.ranks.shows(rank)):
                shown += rest[self._shown.get(rank, 0) :]
                self._shown[rank] = len(rest)
        return shown

    def _line(self, rank: int | None, line: bytes) -> bytes:
        seen = self._shown.pop(rank, 0)
        shown = self._output.take(rank, line, self._name)
        return line[seen:] if seen else shown


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; bytes.splitlines() would also cut at a carriage return."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + [data.rpartition(b"\n")[2]]


def relay(source: BinaryIO, sink: Sink, stream: Stream) -> None:
    """Read a launcher's output until its end, and write to ``sink`` what ``stream`` returns for it."""
    while True:
        some = source.read1(65536)  # type: ignore[attr-defined]
        sink.write(stream.take(some))
        if not some:
            return

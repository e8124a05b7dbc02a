"""What workers write: passed on as it comes, and remembered for the end of the job."""

from __future__ import annotations

import collections
import re
from typing import BinaryIO, NamedTuple

_KEPT_LINES = 20

# "[1,3]<stderr>: text" of Open MPI, "[3] text" of Hydra, "3: text" of srun.
_TAGS = re.compile(rb"\[[0-9]+,([0-9]+)\]<(?:stdout|stderr|stddiag)>: ?|\[([0-9]+)\] |([0-9]+): ")

# What launchers say of the worker that ended first.
_FAILED_RANK = (
    re.compile(r"Process name: \[[^\]]*?[@,]1,(?P<rank>[0-9]+)\]"),  # Open MPI: a status
    re.compile(r"process rank (?P<rank>[0-9]+) with PID [0-9]+ on node (?P<host>\S+)"),  # Open MPI: a signal, an abort
    re.compile(r"\(rank (?P<rank>[0-9]+) in comm "),  # MPICH, Intel MPI: an abort
    re.compile(r"=\s+RANK (?P<rank>[0-9]+) PID [0-9]+ RUNNING AT (?P<host>\S+)"),  # Intel MPI
    re.compile(r"srun: error: (?P<host>[^:\s]+): task (?P<rank>[0-9]+): "),  # Slurm
)


class FailedWorker(NamedTuple):
    """The worker that ended first: its rank, and its host where the launcher says it ('' else)."""

    rank: int
    host: str


class Output:
    """Reads both streams of a launcher line by line.

    Parameters
    ----------
    tagged : bool
        Whether the launcher marks each line with its rank.
    prefix : bool
        Whether a tag is replaced by ``[3] ``; otherwise it is taken away.
    is_elastic : bool, optional
        Whether the job goes on when a worker dies.
    """

    def __init__(self, tagged: bool, prefix: bool, is_elastic: bool = False) -> None:
        self.is_tagged, self._prefix, self.is_elastic = tagged, prefix, is_elastic
        self._last: dict[int, collections.deque[str]] = {}
        self._in_notice: set[int] = set()  # ranks for which Open MPI writes a text between two lines of hyphens
        self.failed: FailedWorker | None = None

    def take(self, line: bytes) -> bytes:
        """Remember a line, look whether the launcher names a worker that has ended, and return the line to be shown."""
        tag = _TAGS.match(line) if self.is_tagged else None
        if not tag:
            self._look_for_failure(line.decode(errors="replace"))
            return line
        rank, raw = int(tag[1] or tag[2] or tag[3]), line[tag.end() :]
        untagged = raw.lstrip(b"\0")  # Open MPI ends the notice of an abort with a NUL, before the worker's next line
        if untagged != raw and not untagged.strip(b"\r\n"):
            return b""
        text = untagged.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]  # as a terminal shows progress bars
        if text.startswith("-" * 60):
            self._in_notice ^= {rank}
        elif text.strip(" \t") and rank not in self._in_notice:
            self._last.setdefault(rank, collections.deque(maxlen=_KEPT_LINES)).append(text)
        return b"[%d] %s" % (rank, untagged) if self._prefix else untagged

    def _look_for_failure(self, text: str) -> None:
        found = next(filter(None, (pattern.search(text) for pattern in _FAILED_RANK)), None)
        if found and self.failed is None:
            self.failed = FailedWorker(int(found["rank"]), found.groupdict().get("host") or "")

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank has written, at most 20."""
        return list(self._last.get(rank, ()))


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; bytes.splitlines() would also cut at a carriage return."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + [data.rpartition(b"\n")[2]]


def relay(source: BinaryIO, sink: BinaryIO, output: Output) -> None:
    """Copy a stream to another until its end. Lines that have tags are shown as ``output`` returns them.

    Where the launcher sets no tags every byte is passed on at once, also of a line that has not ended.
    """
    rest = b""
    while True:
        some = source.read1(65536)  # type: ignore[attr-defined]
        *lines, rest = _lines(rest + some)
        if not some:
            lines = [rest]
        shown = [output.take(line) for line in lines]
        sink.write(b"".join(shown) if output.is_tagged else some)
        sink.flush()
        if not some:
            return

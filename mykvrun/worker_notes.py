"""Notes of workers for mykvrun: small files in a folder of mykvrun, given in the variable MYKVRUN_FOLDER.

============= ======================================================================================================
file          a worker writes it
============= ======================================================================================================
joined.RANK   at the end of init()
end.RANK      before it ends: a line of JSON, ``{"status": 3, "how": "sys.exit(3)", "time": 4321.5}``
============= ======================================================================================================

mykvrun returns the status of the earliest end that is not 0, and names its worker: ``rank 1 ended with sys.exit(3)``.

For callers of these functions (kvstore_plugin/world/):

- Call tell_end() where nothing can stop the worker's end any more (an exit handler, the excepthook, before MPI_Abort),
  and before other workers can learn of this end: mykvrun considers the earliest end to be the cause. A worker that
  fails because another worker has ended calls tell_end() too, at a later time.
- The first note of each kind stays. So a worker may call tell_end() at several places.
- No function raises or waits. Without the folder (mpirun without mykvrun, workers of other hosts) and in a forked
  child each does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

VARIABLE = "MYKVRUN_FOLDER"
JOINED, END = "joined", "end"
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_MOST_LETTERS = 500  # longer reasons are cut after this number of characters

_process = os.getpid()


class End(NamedTuple):
    """The end of a worker: exit status, description, and time (seconds of the host's monotonic clock)."""

    rank: int
    status: int
    how: str
    time: float


def tell_joined() -> None:
    """Record that this worker's init() has succeeded."""
    _write(JOINED, "")


def tell_end(status: int, how: str) -> None:
    """Record that this worker is about to end.

    Parameters
    ----------
    status : int
        The exit status as in a shell: 0 to 255, for a signal 128 plus its number.
    how : str
        Text after "ended with": ``sys.exit(3)``, ``KeyError: 'label'``, ``SIGTERM``. Only the first line is kept.
    """
    first_line = (how.strip().splitlines() or [""])[0][:_MOST_LETTERS]
    _write(END, json.dumps({"status": status & 0xFF, "how": first_line, "time": time.monotonic()}) + "\n")


def _write(kind: str, text: str) -> None:
    folder = os.environ.get(VARIABLE)
    rank = rank_in(os.environ)
    if not folder or rank is None or os.getpid() != _process:
        return
    # Write atomically, since mykvrun may read the file at any time.
    unfinished = f"{folder}/.{kind}.{rank}.{_process}"
    with contextlib.suppress(OSError, UnicodeError):
        Path(unfinished).write_text(text, encoding="utf-8", errors="replace")
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, f"{folder}/{kind}.{rank}")
        os.unlink(unfinished)


def rank_in(environment: os._Environ[str] | dict[str, str]) -> int | None:
    """The rank that a launcher has given the process with this environment; None without a launcher."""
    texts = (environment.get(name, "") for name in _RANK_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal() and text.isascii()), None)


def ranks_with(folder: Path, kind: str) -> set[int]:
    """The ranks with a note of this kind."""
    return {int(path.suffix[1:]) for path in folder.glob(f"{kind}.*") if path.suffix[1:].isdecimal()}


def ends(folder: Path) -> list[End]:
    """The ends of workers that have left a note, the earliest first."""
    found = []
    for rank in ranks_with(folder, END):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            note = json.loads((folder / f"{END}.{rank}").read_text(encoding="utf-8"))
            found.append(End(rank, int(note["status"]), str(note["how"]), float(note["time"])))
    return sorted(found, key=lambda end: end.time)

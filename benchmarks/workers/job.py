"""The job of one measured process, and its reports.

The job is a JSON file: {"meeting": path, "results": folder, "cases": [case, ...], "options": {...}}. A case names its
kind, a function that yields (series, numbers); each rank appends one JSON line per series to its own file, since
launchers mix the output of ranks. Numbers of equal index on all ranks belong to the same iteration.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable, List, Tuple

from .meeting import Meeting

Series = Iterable[Tuple[str, List[float]]]


class Job:
    """The job of this process, read from the file named on the command line."""

    def __init__(self) -> None:
        with open(sys.argv[2], encoding="utf-8") as file:
            self._job = json.load(file)
        self.options: dict[str, Any] = self._job["options"]
        self.size: int = self._job["size"]

    def run(self, rank: int, kinds: dict[str, Callable[[dict[str, Any], Meeting], Series]]) -> None:
        """Measure every case, as `rank`."""
        meeting = Meeting(self._job["meeting"], rank, self.size)
        with open(Path(self._job["results"], f"{rank}.jsonl"), "w", encoding="utf-8") as out:
            for case in self._job["cases"]:
                gc.collect()
                for series, numbers in kinds[case["kind"]](case, meeting):
                    print(json.dumps({"case": case["id"], "series": series, "numbers": numbers}), file=out, flush=True)


def timed(case: dict[str, Any], meeting: Meeting, prepare: Callable[[], Any], work: Callable[[], Any]) -> list[float]:
    """Seconds that `work` takes in each of case['iterations'], after `prepare`, all ranks starting at one moment."""
    times = []
    for iteration in range(case["warmup"] + case["iterations"]):
        meeting.start()  # so that no rank prepares, and uses memory, while others still work
        prepare()
        begin = meeting.start()
        work()
        end = time.perf_counter()
        if iteration >= case["warmup"]:
            times.append(end - begin)
    return times


def launched_rank() -> int:
    """The rank that mpirun gave this process, for processes that do not start MPI themselves."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0

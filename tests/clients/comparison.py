"""One client's cases: each is trained by one process and by two workers, and both must come to the same.

A client is a script of Cases. Started without arguments but a folder, ``python gluonts_client.py DIRECTORY``, it trains
each case both ways, each in processes of its own, and writes what came out to DIRECTORY/outcomes.json. In those
processes the script runs again, with the name of the case, which leaves each worker's losses in a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

WORKERS = 2
_HERE = Path(__file__).resolve().parent
_TIMEOUT = 900.0  # seconds for one training


class Failed(Exception):
    """A case did not come to what it should; the text says why."""


@dataclasses.dataclass
class Curve:
    """What a training came to.

    Attributes
    ----------
    losses : list of float
        After each step or epoch, of this worker or, from `Case.curves`, the mean over the workers.
    weights : str
        A digest of the bits of all weights at the end, or what else must be equal on all workers.
    """

    losses: list[float]
    weights: str


@dataclasses.dataclass
class Case:
    """One training that is compared.

    Attributes
    ----------
    name : str
        What the table shows.
    train : callable
        Trains in this process, as one of hvd.size() workers, and returns the Curve of this worker.
    allowed : float
        Largest relative difference of a loss.
    error : str
        A regular expression: all of two workers must fail with such an error. Empty: the training must succeed.
    """

    name: str
    train: Callable[[], Curve] | None
    allowed: float = 1e-4
    error: str = ""

    def curves(self, workers: int, directory: Path) -> list[Curve]:
        """The Curve of each of so many workers."""
        command = [sys.executable, os.path.abspath(sys.argv[0]), str(directory), self.name]
        launch(workers, command, directory / "log")
        return [Curve(**json.loads((directory / f"{rank}.json").read_text())) for rank in range(workers)]


def launch(workers: int, command: Sequence[str], log: Path, check: bool = True) -> str:
    """Run a command in so many processes, with the horovod that stands in, and return what it printed.

    Raises
    ------
    Failed
        It ended with an error, or not in time.
    """
    as_horovod = _HERE.parents[1] / "kvstore_plugin/as_horovod"
    path = [str(_HERE), str(as_horovod), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread for each, so that both ways add up in the same order, and little memory for many processes.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if workers > 1:
        is_open_mpi = "Open MPI" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
        more = ["--oversubscribe", "--bind-to", "none", "--tag-output"] if is_open_mpi else []
        command = ["mpirun", *more, "-n", str(workers), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command,
                stdout=file,
                stderr=file,
                env=env,
                cwd=log.parent,
                timeout=_TIMEOUT,  # not in the source tree
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    text = log.read_text(errors="replace")
    if check and status != 0:
        ended = f"with status {status}" if status is not None else f"not within {_TIMEOUT:.0f} s"
        raise Failed(f"{workers} worker(s) ended {ended}; {log} ends with:\n{text[-1500:]}")
    return text


def digest(net: Any) -> str:
    """Of the bits of all parameters of a network, also running statistics, by their names within it."""
    found = hashlib.sha256()
    for _, parameter in sorted(net._collect_params_with_prefix().items()):
        found.update(parameter.data(parameter.list_ctx()[0]).asnumpy().tobytes())
    return found.hexdigest()


def _outcome(case: Case, directory: Path) -> dict[str, Any]:
    begun = time.monotonic()
    outcome = {"case": case.name, "passed": False, "text": ""}
    try:
        outcome.update(_refused(case, directory) if case.error else _compared(case, directory), passed=True)
    except Failed as error:
        outcome["text"] = str(error)
    return {**outcome, "seconds": time.monotonic() - begun}


def _refused(case: Case, directory: Path) -> dict[str, Any]:
    command = [sys.executable, os.path.abspath(sys.argv[0]), str(directory), case.name]
    text = launch(WORKERS, command, directory / "log", check=False)
    found = re.findall(case.error, text)
    if not found:
        raise Failed(f"There is no error {case.error!r}; {directory / 'log'} ends with:\n{text[-1500:]}")
    return {"text": f"refused: {found[0]}"}


def _compared(case: Case, directory: Path) -> dict[str, Any]:
    (one,) = case.curves(1, directory / "one")
    workers = case.curves(WORKERS, directory / "workers")
    if len({worker.weights for worker in workers}) > 1:
        raise Failed("The workers end with different weights.")
    mean = [sum(losses) / len(losses) for losses in zip(*(worker.losses for worker in workers))]
    if not mean or len(mean) != len(one.losses) or any(len(worker.losses) != len(mean) for worker in workers):
        raise Failed(f"{len(one.losses)} losses in one process, {[len(worker.losses) for worker in workers]} in two.")
    difference = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one.losses, mean))
    shown = {"steps": len(mean), "first": mean[0], "last": mean[-1], "last_of_one": one.losses[-1]}
    if not difference <= case.allowed:  # also where it is NaN
        raise Failed(f"Losses differ by {difference:.1e}, more than {case.allowed:.0e}: {one.losses}, {mean}.")
    few = max(1, len(mean) // 5)
    if not sum(mean[-few:]) < 0.95 * sum(mean[:few]):
        raise Failed(f"The loss does not fall: {mean}.")
    return {**shown, "difference": difference, "allowed": case.allowed}


def main(cases: Sequence[Case]) -> None:
    """Do what the command line says: all cases, or the part of one worker in one of them."""
    directory = Path(sys.argv[1]).resolve()
    if len(sys.argv) == 2:
        outcomes = [_outcome(case, directory / re.sub(r"\W+", "-", case.name)) for case in cases]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "outcomes.json").write_text(json.dumps(outcomes))
        return
    import kvstore_plugin as hvd  # here, since the controller needs neither MXNet nor MPI

    hvd.init()
    (case,) = (case for case in cases if case.name == sys.argv[2])
    curve = case.train()
    (directory / f"{hvd.rank()}.json").write_text(json.dumps(dataclasses.asdict(curve)))

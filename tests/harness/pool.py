"""The controller's end of a pool: one mpirun, whose ranks run the tests that `Pool.run` names.

Messages are pickled tuples over one Unix socket per rank:
  rank -> controller   ("hello", rank, pid)  ("gather", value)  ("done", reports)  ("output", out, err)
  controller -> rank   ("run", node id)      ("gathered", values)  ("output",)     ("exit",)
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from . import launcher
from .processes import Launch, send_signal

_START_LIMIT = 60.0  # seconds for all ranks to say hello; a bare Python under mpirun takes under 1 s
_EXIT_LIMIT = 15.0  # seconds for all ranks to leave when asked, MPI_Finalize included
_GRACE = 5.0  # seconds for the other ranks to finish a test once one rank has failed it
_DUMP_LIMIT = 1.0  # seconds for a hung rank to hand over its output
_STACKS_LIMIT = 10.0  # seconds for it to write its stacks on a busy machine
_LOG_TAIL = 8000  # characters of mpirun's own output that a failure shows
_LAST_FRAME = "in <module>\n"
_FRAMES_OF_PYTEST = ("/_pytest/", "/pluggy/", "harness/rank.py")


@dataclasses.dataclass
class Outcome:
    """The outcome of one test in the ranks of a pool."""

    reports: dict[int, list[dict]] = dataclasses.field(default_factory=dict)  # rank -> serialized pytest reports
    died: list[int] = dataclasses.field(default_factory=list)  # ranks whose process ended, in that order
    hung: list[int] = dataclasses.field(default_factory=list)  # ranks that did not finish in time
    output: dict[int, str] = dataclasses.field(default_factory=dict)  # rank -> output of a dead or hung rank
    seconds: float = 0.0
    log: str = ""  # output of mpirun itself

    @property
    def broken(self) -> bool:
        """Whether the ranks may be out of step."""
        failed = any(report["outcome"] == "failed" for reports in self.reports.values() for report in reports)
        return bool(self.died or self.hung) or failed


class Pool:
    """Ranks under one mpirun, waiting for tests.

    Parameters
    ----------
    size : int
        Number of ranks; 1 starts Python without mpirun.
    env : dict
        Variables to add to the environment of the ranks.
    pytest_arguments : list of str
        Command line for pytest in each rank.
    show_output : bool
        Let the ranks write to this terminal (``pytest -s``) instead of into a log file.
    """

    def __init__(self, size: int, env: dict[str, str], pytest_arguments: list[str], show_output: bool) -> None:
        self.size = size
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._log = (self._directory / "log").open("wb")
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._launch = None
        worker = str(Path(__file__).with_name("rank.py"))
        program = [sys.executable, worker, str(self._directory), *pytest_arguments]
        out = None if show_output else self._log
        try:
            with Listener(str(self._directory / "socket"), "AF_UNIX", backlog=size) as listener:
                self._launch = Launch(
                    program if size == 1 else launcher.command(size, program),
                    launcher.environment(self._directory, env),
                    stdout=out,
                    stderr=out,
                )
                self._accept(listener)
        except BaseException:
            self.kill()
            raise

    def _accept(self, listener: Listener) -> None:
        sock = listener._listener._socket  # multiprocessing has no accept with a time limit
        sock.settimeout(0.2)
        deadline = time.monotonic() + _START_LIMIT
        while len(self._connections) < self.size:
            try:
                connection = listener.accept()
            except OSError:  # timed out: check whether to continue waiting
                code = self._launch.process.poll()
                if code is not None or time.monotonic() > deadline:
                    state = "did not start in time" if code is None else f"ended with exit code {code}"
                    raise RuntimeError(f"The pool of {self.size} ranks {state}:\n{self._log_tail()}") from None
                continue
            _, rank, pid = connection.recv()
            self._connections[rank] = connection
            self._pids[rank] = pid

    def run(self, node_id: str, timeout: float) -> Outcome:
        """Run one test in all ranks and wait at most `timeout` seconds for the outcome."""
        outcome = Outcome()
        start = time.monotonic()
        deadline = start + timeout
        gathered: dict[int, object] = {}
        busy = dict(self._connections)
        for rank in self._connections:
            self._send(rank, ("run", node_id))
        while busy:
            ready = wait(list(busy.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, connection in busy.items() if connection in ready]:
                kind, payload = self._receive(rank)
                if kind == "gather":
                    gathered[rank] = payload
                    if len(gathered) == self.size:
                        values = [gathered[k] for k in range(self.size)]
                        gathered.clear()
                        for peer in self._connections:
                            self._send(peer, ("gathered", values))
                    continue
                del busy[rank]
                if kind == "done":
                    outcome.reports[rank] = payload
                else:
                    outcome.died.append(rank)
            if outcome.broken:
                deadline = min(deadline, time.monotonic() + _GRACE)
        if busy:
            outcome.hung = sorted(busy)
            self._dump(outcome)
        outcome.seconds = time.monotonic() - start
        if outcome.broken:
            if outcome.died:
                self._await_exit()
            outcome.log = self._log_tail()
            for rank in outcome.died:
                outcome.output[rank] = self._stacks(rank)
        return outcome

    def close(self) -> None:
        """Shut down the ranks; kill processes that have not ended in time."""
        for rank in self._connections:
            self._send(rank, ("exit",))
        with contextlib.suppress(Exception):
            self._launch.process.wait(_EXIT_LIMIT)
        self.kill()

    def kill(self) -> None:
        """End all ranks at once and remove what belonged to the pool."""
        if self._launch is not None:
            self._launch.kill()
        for connection in self._connections.values():
            connection.close()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, rank: int, message: tuple) -> None:
        with contextlib.suppress(OSError):  # a dead rank is noticed while waiting for its answer
            self._connections[rank].send(message)

    def _receive(self, rank: int) -> tuple:
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            return "died", None

    def _dump(self, outcome: Outcome) -> None:
        """Get the Python stacks and the captured output of the ranks that hang."""
        for rank in outcome.hung:
            # faulthandler writes from the signal handler itself, so that a rank stuck in C code shows its stack too.
            send_signal(self._pids[rank], signal.SIGUSR1)
            self._send(rank, ("output",))
        deadline = time.monotonic() + _DUMP_LIMIT
        captured = {}
        while len(captured) < len(outcome.hung):
            left = {rank: self._connections[rank] for rank in outcome.hung if rank not in captured}
            ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, connection in left.items() if connection in ready]:
                kind, *payload = self._receive(rank)
                if kind == "output":
                    captured[rank] = "".join(payload)
                elif kind in ("died", "done"):
                    captured[rank] = ""
        self._await_stacks(outcome.hung)
        for rank in outcome.hung:
            outcome.output[rank] = captured.get(rank, "") + "\n" + self._stacks(rank)

    def _await_stacks(self, ranks: list[int]) -> None:
        """Wait until the stacks of all `ranks` are whole: the main thread's, which ends with its module, comes last."""
        deadline = time.monotonic() + _STACKS_LIMIT
        files = [self._directory / f"stacks.{rank}" for rank in ranks]
        while time.monotonic() < deadline:
            if all(file.read_text(errors="replace").endswith(_LAST_FRAME) for file in files):
                return
            time.sleep(0.1)

    def _stacks(self, rank: int) -> str:
        """The Python stacks that a rank has written, without the frames of pytest below the test."""
        try:
            lines = (self._directory / f"stacks.{rank}").read_text(errors="replace").splitlines(keepends=True)
        except OSError:
            return ""
        return "".join(line for line in lines if not any(place in line for place in _FRAMES_OF_PYTEST))

    def _await_exit(self) -> None:
        with contextlib.suppress(Exception):
            self._launch.process.wait(_DUMP_LIMIT)

    def _log_tail(self) -> str:
        self._log.flush()
        return (self._directory / "log").read_text(errors="replace")[-_LOG_TAIL:]

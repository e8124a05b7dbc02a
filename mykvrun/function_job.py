"""Runs a function as a job, for notebooks and tests: mykvrun starts the workers, and files pass function and results.

The files are in a folder created by the caller: ``function`` has the function and its arguments, and each worker
(function_worker.py) writes ``result.RANK``.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.machinery
import os
import pickle
import re
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from .hosts import is_this_host, parse_hosts, read_hostfile

FUNCTION, RESULT = "function", "result"
_END_S = 30.0  # seconds from SIGTERM to SIGKILL
_FAILED_FIRST = re.compile(r"mykvrun: rank (\d+)\b.* failed first")


class Result(NamedTuple):
    """A worker's result."""

    value: Any
    error: BaseException | None  # raised by the function; None if it cannot be pickled
    traceback: str  # "": the function has returned
    time: float


class WorkerTraceback(Exception):
    """The traceback of a worker, as the cause of its exception in the caller."""


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int | None = None,
    hosts: str | None = None,
    *,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call a function in several workers, started by mykvrun, and return the results in the order of ranks.

    The workers' output appears here, with the rank before each line. Ctrl-C ends the workers, and so does the end of
    this process. This process is not a worker.

    Parameters
    ----------
    function : callable
        It calls `init` or creates a trainer, like a script. It may be a lambda, or defined in a notebook.
    args, kwargs : optional
        Its arguments. The workers get copies.
    workers : int, optional
        Number of workers; by default 2, or the hosts' slots.
    hosts : str, optional
        Hosts and the number of workers on each, as ``"node1:4,node2:4"``.
    hostfile : str, optional
        The same in a file, with lines such as ``node1 slots=4``.
    env : dict, optional
        Variables for the workers, in addition to those of this process.
    options : list of str, optional
        More options of mykvrun, such as ``["--threads", "4", "--max-restarts", "3"]``.
    folder : path, optional
        Folder for function and results while the job runs, shared by all hosts. By default a temporary
        folder; if there are other hosts, it is created in the current folder.

    Returns
    -------
    list
        The function's results on rank 0, rank 1 and so on.

    Raises
    ------
    Exception
        The exception of the worker that failed first. Its cause is the worker's traceback, with the rank.
    RuntimeError
        The job has failed in another way: a worker was killed, or mykvrun cannot start it.
    ImportError
        cloudpickle is not installed.

    Examples
    --------
    >>> def train(scale):
    ...     mykv.init()
    ...     return float(mykv.allreduce(mx.nd.ones(1), average=False).asscalar()) * scale
    >>> mykv.run(train, args=(10,), workers=2)
    [20.0, 20.0]
    """
    words = ["-H", hosts] if hosts else ["--hostfile", hostfile] if hostfile else []
    workers = workers if workers or words else 2
    words += ["-n", str(workers)] if workers else []
    for name, value in (env or {}).items():
        words += ["-x", f"{name}={value}"]
    named = parse_hosts(hosts) if hosts else read_hostfile(hostfile) if hostfile else []
    is_local = all(is_this_host(host.name) for host in named)
    parent = folder if folder is not None else None if is_local else os.getcwd()
    with tempfile.TemporaryDirectory(prefix="mykv-run-", dir=parent) as made:
        path = Path(made)
        (path / FUNCTION).write_bytes(pickle.dumps((sys.path, _pickled((function, tuple(args), dict(kwargs or {}))))))
        status, said = _run_job([*words, "--tag-output", *options], path)
        results = {int(file.suffix[1:]): pickle.loads(file.read_bytes()) for file in path.glob(f"{RESULT}.*[0-9]")}
    if status != 0:
        _raise(said, {rank: result for rank, result in results.items() if result.traceback})
    missing = sorted(set(range(workers or max(results, default=0) + 1)) - set(results))
    if missing:
        raise RuntimeError(f"mykv.run: rank {missing[0]} ended before the function returned.")
    return [results[rank].value for rank in sorted(results)]


def _pickled(what: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> bytes:
    """Pickle a function and its arguments; with its code, if workers cannot import its module."""
    try:
        import cloudpickle
    except ImportError:
        raise ImportError("mykv.run needs cloudpickle: pip install cloudpickle") from None
    module = sys.modules.get(getattr(what[0], "__module__", None) or "")
    with _by_value(cloudpickle, module):
        return cloudpickle.dumps(what)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _by_value(cloudpickle: ModuleType, module: ModuleType | None) -> Iterator[None]:
    name = module.__name__ if module else "__main__"
    found = name == "__main__" or importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
    if found:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _run_job(options: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run mykvrun until its end, pass on its output, and return its status and its own lines."""
    reading, writing = os.pipe()  # mykvrun notices that `writing` closes when this process ends
    command = [sys.executable, "-m", "mykvrun", "--caller", str(reading), *options]
    command += ["--", sys.executable, "-m", "mykvrun.function_worker", str(folder)]
    pipe = subprocess.PIPE
    try:
        # In its own session, so that Ctrl-C in a terminal or a notebook reaches only this process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[reading],
            start_new_session=True,
            env=_environment(),
        )
        os.close(reading)
        with process:
            lines = _Lines(process)
            try:
                lines.show_until_end()
                return process.wait(), lines.own
            except BaseException:
                process.terminate()
                lines.show_until_end(time.monotonic() + _END_S)
                raise
            finally:
                if process.poll() is None:
                    process.kill()  # mykvrun's guard ends the workers
    finally:
        os.close(writing)


def _environment() -> dict[str, str]:
    """This process's environment, in which Python finds this package even if it is not installed."""
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class _Lines:
    """Copies a process's output to sys.stdout and sys.stderr: in a notebook, these are not files to inherit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout and process.stderr
        self.own: list[str] = []  # lines of mykvrun itself
        self._selector = selectors.DefaultSelector()
        self._rest = ""
        for file, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(file, selectors.EVENT_READ, (name, decoder))

    def show_until_end(self, deadline: float | None = None) -> None:
        """Pass on output until both streams have ended, or until the deadline."""
        while self._selector.get_map():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                name, decoder = key.data
                data = os.read(key.fd, 65536)
                if not data:
                    self._selector.unregister(key.fileobj)
                self._show(name, decoder.decode(data, not data))

    def _show(self, name: str, text: str) -> None:
        if name == "stderr":
            *lines, self._rest = (self._rest + text).split("\n")
            self.own += [line for line in lines if line.startswith("mykvrun: ")]
        stream = getattr(sys, name)
        if stream is not None and text:
            stream.write(text)
            stream.flush()


def _raise(said: list[str], failed: dict[int, Result]) -> None:
    """Raise the exception of the worker that has failed first."""
    last = said[-1][len("mykvrun: ") :] if said else "mykvrun has ended without a message."
    named = next(filter(None, map(_FAILED_FIRST.match, reversed(said))), None)
    rank = int(named[1]) if named else min(failed, key=lambda rank: failed[rank].time, default=-1)
    if rank not in failed:
        raise RuntimeError(f"mykv.run: {last}")
    cause = WorkerTraceback(f'\nrank {rank}:\n"""\n{failed[rank].traceback}"""')
    error = failed[rank].error
    if error is None:
        error = RuntimeError(f"mykv.run: rank {rank} failed: {failed[rank].traceback.rstrip().splitlines()[-1]}")
    raise error from cause

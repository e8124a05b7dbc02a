"""Starts one group of measured processes, waits for it with a time limit, and leaves no process behind.

mpirun puts its ranks into process groups of their own, and a killed mpirun orphans them. So every process has a token
in its environment, which its descendants inherit, and processes with the token that remain at the end are killed by id.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from . import environments
from .network import Network
from .peers import Setup
from .workers.meeting import Meeting

WORKER = str(Path(__file__).resolve().parent / "run_worker.py")
_TOKEN = "MYKV_BENCH_LAUNCH"
_GRACE_S = 3.0  # time for mpirun to end its ranks
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "DMLC_")
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class LaunchError(RuntimeError):
    """The processes failed or took too long; the message ends with their last lines of output."""


def launch(
    setup: Setup, ranks: int, cases: list[dict[str, Any]], limit_s: float, network: Network | None = None
) -> list[list[dict[str, Any]]]:
    """Run `cases` in `ranks` processes, on this machine or on each host of a network.

    Returns
    -------
    list of list of dict
        For each rank its lines: {'case': id, 'series': name, 'numbers': [...]}.

    Raises
    ------
    LaunchError
    """
    with tempfile.TemporaryDirectory(prefix="mykv-bench-") as folder:
        place = Path(folder)
        meeting = place / "meeting"
        meeting.write_bytes(bytes(Meeting.nbytes(ranks)))
        job = {"meeting": str(meeting), "results": folder, "size": ranks, "cases": cases, "options": setup.options}
        if setup.backend == "limit":
            job["options"] = {"library": environments.limit_library(), "nbytes": max(case["nbytes"] for case in cases)}
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        commands = [(command_line(setup, ranks, str(place / "job.json"), network), {})]
        if setup.backend == "dist_sync":
            commands = _parameter_server(setup, ranks, commands[0][0], network)
        _run(setup, commands, place / "output", limit_s)
        return [_lines(place / f"{rank}.jsonl") for rank in range(ranks)]


def run_program(setup: Setup, command: list[str], limit_s: float) -> str:
    """Run one command in the environment of a setup and return its output.

    Raises
    ------
    LaunchError
    """
    with tempfile.TemporaryDirectory(prefix="mykv-bench-") as folder:
        output = Path(folder, "output")
        _run(setup, [(command, {})], output, limit_s)
        return output.read_text(encoding="utf-8", errors="replace")


def command_line(setup: Setup, ranks: int, job: str, network: Network | None = None) -> list[str]:
    """The command that starts the measured processes; for dist_sync, one process."""
    worker = [setup.python(), WORKER, setup.backend, job]
    if setup.backend in ("dist_sync", "limit"):
        return worker
    if network is not None:
        per_host = [ranks // network.hosts] * network.hosts
        return network.mpirun(environments.mpirun(setup.python()), per_host, worker)
    return [environments.mpirun(setup.python()), "-n", str(ranks), *setup.launcher_options(ranks), *worker]


def described(setup: Setup, ranks: int) -> str:
    """The command with its environment, as typed in a shell."""
    words = [f"{name}={value}" for name, value in setup.env.items()]
    words += [shlex.quote(os.path.basename(word)) for word in command_line(setup, ranks, "JOB.json")]
    return " ".join(words)


def environment(setup: Setup) -> dict[str, str]:
    """This environment without another launcher's variables, and with the setup's variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    if setup.peer in ("horovod", "intel mpi"):
        clean.pop("PYTHONPATH", None)
    if setup.peer == "intel mpi":  # mpirun looks for its other programs on PATH
        clean["PATH"] = f"{Path(setup.python()).parent}{os.pathsep}{clean['PATH']}"
    return {**clean, **_AS_ROOT, "OMP_NUM_THREADS": "1", **setup.env}


def _parameter_server(setup: Setup, ranks: int, worker: list[str], network: Network | None = None) -> list[Any]:
    """Scheduler, servers and workers, as MXNet's tools/launch.py would start them; servers and workers on all hosts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = setup.servers or ranks
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(ranks),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": "127.0.0.1",
    }
    roles = ["scheduler"] + ["server"] * servers + ["worker"] * ranks
    if network is None:
        return [(worker, {**common, "DMLC_ROLE": role}) for role in roles]
    common["DMLC_PS_ROOT_URI"] = network.address(1)
    commands = []
    for number, role in enumerate(roles):
        host = 1 + (max(0, number - 1) % network.hosts)
        here = {**common, "DMLC_ROLE": role, "DMLC_NODE_HOST": network.address(host)}
        commands.append((network.inside(host, worker), here))
    return commands


def _run(setup: Setup, commands: list[Any], output: Path, limit_s: float) -> None:
    token = uuid.uuid4().hex
    base = {**environment(setup), _TOKEN: token}
    with open(output, "wb") as out:
        started = [
            subprocess.Popen(
                words,
                env={**base, **extra},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=str(output.parent),
            )
            for words, extra in commands
        ]
        try:
            problem = _wait(started, limit_s)
        finally:
            _end(started, token)
    if problem:
        words = output.read_text(encoding="utf-8", errors="replace").strip()[-3000:]
        raise LaunchError(f"{setup.title}: {problem}. Last output:\n{words}")


def _wait(started: list[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Wait for all. Returns the error, or None."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in started]
        failed = [code for code in codes if code]
        if failed:
            return f"a process ended with exit code {failed[0]}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            return f"it has not ended within {limit_s:.0f} s"
        time.sleep(0.05)


def _end(started: list[subprocess.Popen[bytes]], token: str) -> None:
    for process in started:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    while _members(token):
        if time.monotonic() > deadline:
            for pid in _members(token):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in started:
            process.poll()
        time.sleep(0.05)
    for process in started:
        process.wait()


def _members(token: str) -> list[int]:
    """Running processes with our token; a zombie has no environment."""
    wanted, found = f"{_TOKEN}={token}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]

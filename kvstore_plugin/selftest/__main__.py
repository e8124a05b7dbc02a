"""``python -m kvstore_plugin.selftest``: reports installed software, and tests it; gives advice about problems.

Run it first on a new machine, alone and under mpirun; rank 0 prints. It has to work on a broken installation, so it
catches failures to import MXNet, mpi4py or the core, and a time limit ends deadlocks.

Exit code 0: all checks passed, although something may be slow. 1: something is wrong, and advice is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

import numpy as np

from mykvrun.progress import Progress

from .. import _load_core
from ..world import core as core_loader
from ..world import gpu_libraries, launch_checks, log_prefix, process, settings, version
from . import gpu as selftest_gpu

_LIMIT = 120.0  # seconds for everything after the launch
_HEAD_START = 10.0  # seconds that other ranks wait before they exit, so that rank 0 can report first
_LATENCY_BYTES, _LATENCY_TURNS = 4 << 10, 200
_BANDWIDTH_BYTES, _BANDWIDTH_TURNS = 64 << 20, 5
_DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
_CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "asimd")
# Launchers' variables for a process's rank, among all processes and on its host.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class Findings(logging.Handler):
    """The findings of this rank: facts to print, mistakes, and causes of slowness."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.facts: dict[str, str] = {}
        self.host_and_cores: tuple[str, list[int]] = ("", [])  # host name, cores that this rank may use
        self.wrong: list[str] = []
        self.slow: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record a warning of the package, for example of a narrow binding, as a cause of slowness."""
        self.slow.append(record.getMessage())

    @contextlib.contextmanager
    def catching(self, what: str) -> Iterator[None]:
        """Record an exception as a mistake (in `wrong`)."""
        try:
            yield
        except Exception as error:
            self.wrong.append(f"{what}: {error}" if str(error) else f"{what}: {type(error).__name__}")


class _Stages:
    """The current stage of the self-test, shown as progress on rank 0 and named when the time limit ends."""

    def __init__(self) -> None:
        self.now = ""
        self._progress = Progress(6, "self-test", "stage") if _launcher_rank(_RANK) == 0 else None

    def begin(self, what: str) -> None:
        """End the last stage and begin the next."""
        if self._progress is not None:
            self._progress.advance(int(bool(self.now)))
            self._progress.tell(what)
        self.now = what

    def end(self) -> None:
        """Stop showing progress."""
        if self._progress is not None:
            self._progress.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m kvstore_plugin.selftest",
        description="Says what was built and what works here, with one line of advice for each thing that is wrong. "
        "Run it alone, and with the launcher and number of workers of a job: mykvrun -n 2 --check.",
    )
    parser.add_argument("--gpu", action="store_true", help="test arrays on GPUs too")
    return parser.parse_args()


def main() -> int:
    """Run the self-test.

    Returns
    -------
    int
        Exit code, the same on all ranks.
    """
    with_gpu = _arguments().gpu
    stages = _Stages()
    stages.begin("the installation")
    watch = threading.Timer(_LIMIT, _time_out, [stages])
    watch.daemon = True
    watch.start()
    found = Findings()
    log = logging.getLogger("kvstore_plugin")
    log.addHandler(found)
    log.propagate = False
    log_prefix.remove()  # the report names the ranks
    look_at_installation(found)
    look_at_machine(found)
    with found.catching("libraries for GPUs"):
        found.wrong += gpu_libraries.unusable()
    if with_gpu:
        selftest_gpu.look(found)
    if found.wrong:  # MPI may not start, so the ranks cannot exchange their findings
        return _report_alone(found, stages)

    stages.begin("the start of MPI and the meeting of the ranks (init)")
    with found.catching("init"):
        process.init()
    if found.wrong:
        return _report_alone(found, stages)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    stages.begin("the exchange of findings (mpi4py)")
    everyone, hosts = comm.gather(found.facts), comm.gather(found.host_and_cores)
    stages.begin("the sums")
    check_sums(found)
    if with_gpu:
        stages.begin("the tests of GPUs")
        selftest_gpu.check(found)
    stages.begin("the measurements")
    speed = measure() if not found.wrong else {}
    stages.begin("the exchange of findings (mpi4py)")
    wrong, slow = comm.gather(found.wrong), comm.gather(found.slow)
    code = 0
    if comm.rank == 0:
        found.wrong, found.slow = _by_rank(wrong), _by_rank(slow)
        compare(found, everyone, hosts)
        look_at_hosts(found, hosts)
        found.facts.update(speed)
        stages.end()
        _print(found)
        code = int(bool(found.wrong))
    return comm.bcast(code)


def look_at_installation(found: Findings) -> None:
    """Report versions of all software, and whether it can be loaded."""
    facts = found.facts
    facts["kvstore_plugin"] = version.VERSION
    facts["Python"] = platform.python_version()
    facts["numpy"] = np.__version__
    facts["MXNet"] = "cannot be imported"
    with found.catching("MXNet"):
        from ..compat.mxnet import mx

        facts["MXNet"] = mx.__version__
    facts["kvstore_plugin._core"] = "cannot be loaded"
    with found.catching("kvstore_plugin._core"):
        core = core_loader.load()
        info = core.build_info()
        loaded = core.mpi_library_version()
        facts["kvstore_plugin._core"] = f"compiled by {info['compiler']}"
        facts["MPI built against"] = info["mpi"]
        facts["core chosen"] = _load_core.find()[1] or "the only core, compiled for one MPI on installation"
        facts["MPI loaded"] = launch_checks.first_line(loaded)
        facts["kernels"] = f"{core.kernel_path()} (built: {', '.join(info['kernels'])})"
        launch_checks.check_library(info["mpi"], loaded, info["mpi_abi"])
    facts["mpi4py"] = "cannot be imported"
    with found.catching("mpi4py"):
        try:
            import mpi4py
        except ImportError:
            raise ImportError("it is missing: pip install mpi4py") from None
        facts["mpi4py"] = mpi4py.__version__


def look_at_machine(found: Findings) -> None:
    """Report CPU, cores and shared memory of this rank's host."""
    features = _cpu_features()
    known = [name for name in _CPU_FEATURES if name in features]
    cores = sorted(os.sched_getaffinity(0))
    found.host_and_cores = (socket.gethostname(), cores)
    found.facts["CPU"] = f"{platform.machine()}, {os.cpu_count()} cores, {' '.join(known) or 'no SIMD features known'}"
    found.facts["cores for this rank"] = str(len(cores))
    if "avx2" in features and found.facts.get("kernels", "").startswith("generic"):
        found.slow.append("The CPU has AVX2, but the core uses its generic kernels: build mykv with g++ 9 or newer.")
    try:
        os.close(os.memfd_create("mykv-selftest"))
        found.facts["shared memory"] = "memfd works"
    except (AttributeError, OSError) as error:  # Python's libc lacks memfd_create, or a sandbox forbids it
        found.facts["shared memory"] = f"memfd does not work ({error})"
        found.wrong.append(f"memfd_create fails ({error}): allow it in the sandbox, or use Linux 3.17 or newer.")


def check_sums(found: Findings) -> None:
    """Test allreduce and broadcast of small arrays of every dtype, then one sum through MXNet's engine."""
    core, rank, size = process.core, process.rank(), process.size()
    for dtype in _DTYPES:
        with found.catching(f"sum of {dtype}"):
            pattern = np.arange(1000) % 5
            mine = (pattern + rank % 3).astype(dtype)
            expected = sum((pattern + other % 3).astype(dtype).astype("int64") for other in range(size))
            if dtype == "bool":  # for bool the sum is 'or'
                expected = expected > 0
            result = np.empty_like(mine)
            process.wait(core.submit_allreduce(f"selftest/sum/{dtype}", [mine], [result]))
            with np.errstate(over="ignore"):
                right = np.array_equal(result, expected.astype(dtype))
            if not right:
                found.wrong.append(f"The sum of {dtype} over {size} ranks is wrong: build mykv again, and report this.")
    with found.catching("broadcast"):
        value = np.full(1000, rank, dtype="int32")
        process.wait(core.submit_broadcast("selftest/broadcast", value, [value], size - 1))
        if not (value == size - 1).all():
            found.wrong.append("The broadcast gives wrong values: build mykv again, and report this.")
    with found.catching("sum through MXNet's engine"):
        from ..compat.mxnet import mx

        array = mx.nd.full((1000,), rank + 1)
        mx.kv.create("mykv").pushpull("selftest", array)
        if not (array.asnumpy() == size * (size + 1) / 2).all():
            found.wrong.append("The sum through MXNet's engine is wrong: report this with the release of MXNet.")


def measure() -> dict[str, str]:
    """Median times of an allreduce in place: of 4 KB, and of 64 MB."""
    if process.size() == 1:
        return {"allreduce": "not measured alone: mpirun -n 2 python -m kvstore_plugin.selftest"}
    seconds = {}
    for count, turns in ((_LATENCY_BYTES, _LATENCY_TURNS), (_BANDWIDTH_BYTES, _BANDWIDTH_TURNS)):
        array = np.zeros(count // 4, dtype="float32")
        times = [_timed(lambda array=array: _sum(array)) for _ in range(turns + 1)]
        seconds[count] = statistics.median(times[1:])  # the first includes page faults of new memory
    small, large = seconds[_LATENCY_BYTES], seconds[_BANDWIDTH_BYTES]
    return {
        "allreduce of 4 KB": f"{small * 1e6:.0f} us",
        "allreduce of 64 MB": f"{large * 1e3:.1f} ms ({_BANDWIDTH_BYTES / large / 1e9:.2f} GB/s)",
    }


def _sum(array: np.ndarray) -> None:
    process.wait(process.core.submit_allreduce(f"selftest/speed/{array.nbytes}", [array], [array]))


def _timed(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(found: Findings, everyone: list[dict[str, str]], hosts: list[tuple[str, list[int]]]) -> None:
    """Check that all ranks run the same software."""
    for what in ("kvstore_plugin", "MXNet", "MPI built against", "MPI loaded", "kvstore_plugin._core"):
        for rank, facts in enumerate(everyone):
            if facts[what] != everyone[0][what]:
                found.wrong.append(
                    f"{what} is {everyone[0][what]!r} on rank 0 and {facts[what]!r} on rank {rank} "
                    f"({hosts[rank][0]}): install the same on all hosts."
                )
                break


def look_at_hosts(found: Findings, hosts: list[tuple[str, list[int]]]) -> None:
    """Report hosts and transports, and check that each rank has a core."""
    groups = process.core.host_ranks()
    for number, ranks in enumerate(groups):
        found.facts[f"host {number}"] = f"{hosts[ranks[0]][0]}, ranks {_ranges(ranks)}"
    residents: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(hosts):
        residents.setdefault(host, []).append(rank)
    for host, ranks in residents.items():
        cores = len({core for rank in ranks for core in hosts[rank][1]})
        if len(ranks) > cores:
            found.slow.append(
                f"{len(ranks)} ranks share {cores} cores on {host}: start at most one rank per core (mpirun -n), or "
                "allow them more cores (--bind-to none, a larger allocation)."
            )
        if sum(hosts[group[0]][0] == host for group in groups) > 1:
            found.slow.append(_split_host(host))
    for name, reason in process.core.transports().items():
        found.facts[f"transport {name}"] = reason or "in use"


def _split_host(host: str) -> str:
    virtual = settings.core_options().get("virtual_hosts", 1)
    if virtual > 1:
        return f"MYKV_VIRTUAL_HOSTS={virtual} treats {host} as several hosts, which is for tests: unset it."
    return (
        f"Ranks on {host} cannot share memory and talk over MPI: run them in one container and as one user, or let "
        "the containers share their network namespace."
    )


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``'0-2 5'``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _by_rank(lists: list[list[str]]) -> list[str]:
    """Each message once, with the ranks that report it."""
    ranks: dict[str, list[int]] = {}
    for rank, sentences in enumerate(lists):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(rank)
    size = len(lists)
    return [text if len(who) == size else f"{text} (ranks {_ranges(who)})" for text, who in ranks.items()]


def _launcher_rank(variables: tuple[str, ...]) -> int:
    ranks = (launch_checks.count_of(os.environ.get(name, "")) for name in variables)
    return next((rank for rank in ranks if rank is not None), 0)


def _report_alone(found: Findings, stages: _Stages) -> int:
    """Report without communication: rank 0 prints all, the first rank of each other host one line per mistake."""
    stages.end()
    if _launcher_rank(_RANK) == 0:
        _print(found)
        return 1
    if _launcher_rank(_LOCAL_RANK) == 0:
        for sentence in found.wrong:
            print(f"rank {_launcher_rank(_RANK)} on {socket.gethostname()}: {sentence}", file=sys.stderr, flush=True)
    # Launchers kill the whole job at the first failure: this rank must not exit before the report of rank 0.
    time.sleep(_HEAD_START)
    return 1


def _time_out(stages: _Stages) -> None:
    print(
        f"rank {_launcher_rank(_RANK)} on {socket.gethostname()}: {stages.now} took longer than {_LIMIT:.0f} s: "
        "another rank has failed or cannot be reached; try two ranks on one host first, then two hosts.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _print(found: Findings) -> None:
    for name, value in found.facts.items():
        print(f"{name:22} {value}")
    for title, sentences in (("WRONG", found.wrong), ("SLOW", found.slow)):
        for sentence in sentences:
            print(f"{title:22} {sentence}")
    count = len(found.wrong)
    print(f"{count} thing{'s' * (count > 1)} wrong." if count else "All that was checked works.", flush=True)


if __name__ == "__main__":
    sys.exit(main())

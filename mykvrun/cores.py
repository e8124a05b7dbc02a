"""The cores of this host that a job may use.

The package loky counts cores too, but does not say how many the job had before a launcher bound its ranks.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores, not hardware threads, that this process may use on this host; respects a CPU quota of its container."""
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota() or len(cores)))


def is_bound() -> bool:
    """Whether this process may use fewer of the host's processors than are online."""
    return len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def processors_of_job() -> int:
    """Processors (hardware threads) that the job may use on this host, before a launcher bound its ranks.

    That is the largest affinity of this process and its ancestors, such as the launcher and the shell that called it.
    Ancestors outside of the container or batch job may use more processors, so its cpuset is the limit.
    """
    widest = len(os.sched_getaffinity(0))
    pid = os.getpid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])  # the name in brackets may contain spaces
            widest = max(widest, len(os.sched_getaffinity(pid)) if pid > 0 else 0)
        except (OSError, ValueError):
            break
    return min(widest, _cpuset() or widest)


def _siblings(cpu: int) -> str:
    """Hardware threads of a processor's core, or only the processor if the kernel does not list them."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _control_group() -> Path | None:
    """The folder of this process's control group (version 2); None without one."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((Path("/sys/fs/cgroup") / line[3:].lstrip("/") for line in groups if line.startswith("0::")), None)


def _quota() -> int:
    """Cores allowed by the limit of this control group or its parents, rounded down; 0 without a limit."""
    allowed = []
    folder = _control_group()
    for path in (folder, *folder.parents) if folder is not None else ():
        try:
            limit, period = (path / "cpu.max").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue
        if limit != "max":
            allowed.append(max(1, int(limit) // int(period)))
    return min(allowed, default=0)


def _cpuset() -> int:
    """Number of processors in the cpuset of this control group; 0 without a cpuset."""
    try:
        text = (_control_group() / "cpuset.cpus.effective").read_text(encoding="utf-8")
        bounds = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    except (OSError, TypeError, ValueError):
        return 0
    return sum(part[-1] - part[0] + 1 for part in bounds)

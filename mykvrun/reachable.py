"""Finds the hosts that answer, and restricts the job to them."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import replace
from typing import Sequence

from .errors import LaunchError
from .hosts import Host, is_this_host
from .job import Job
from .messages import say

_WAIT_S = 15.0
# ssh accepts these options as single words. A launcher cannot use a host that asks for a password either.
_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=10")


class TooFewHosts(LaunchError):
    """Too few hosts answer now; more may answer later."""


def on_hosts_that_answer(job: Job, least: int) -> Job:
    """The job on the hosts that answer, with as many workers as they have slots for. Reports the other hosts.

    Raises
    ------
    TooFewHosts
        The hosts that answer have slots for fewer than ``least`` workers.
    """
    silent = _silent_hosts(job)
    if not silent:
        return job
    names = ", ".join(host.name for host in silent)
    hosts = [host for host in job.hosts if host not in silent]
    slots = sum(host.slots for host in hosts)
    if slots < least:
        few = f"The other hosts have slots for {slots} worker{'s' * (slots != 1)}, but --min-workers is {least}."
        raise TooFewHosts(f"no answer from {names}. {few}")
    fewer = replace(job, hosts=hosts, workers=min(job.workers or slots, slots))
    say(f"no answer from {names}. {fewer.workers} of {job.workers} workers start on the other hosts.")
    return fewer


def _silent_hosts(job: Job) -> list[Host]:
    """Hosts on which ssh cannot run a command within 15 s."""
    asked = [(host, _ask(job.ssh(), host.name)) for host in job.hosts if not is_this_host(host.name)]
    silent = []
    for host, process in asked:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(_WAIT_S) if process else None
        if status is None and process:
            process.kill()
            process.wait()
        if status != 0:
            silent.append(host)
    return silent


def _ask(ssh: Sequence[str], name: str) -> subprocess.Popen[bytes] | None:
    nothing = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        return subprocess.Popen([*ssh, *_OPTIONS, name, "true"], stdin=nothing, stdout=nothing, stderr=nothing)
    return None

"""A job: its workers, hosts, cores and variables."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Iterable, Mapping

from .cores import is_bound, usable_cores
from .errors import LaunchError
from .hosts import Host, is_this_host

# Variables with these prefixes, and these variables, are passed to workers of other hosts.
_PREFIXES = ("MYKV_", "MXNET_", "DMLC_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NCCL_", "CUDA_")
_NAMES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHASHSEED")
# Options of mpirun for the placement and binding of workers.
_BINDING = ("bind-to", "map-by", "rank-by", "rankfile", "cpu-set", "cpu-list", "binding", "cpu-bind")


@dataclass
class Job:
    """A job to start.

    Attributes
    ----------
    program : list of str
        The command of each worker.
    workers : int or None
        Number of workers; None if only the hosts, or Slurm, determine it.
    hosts : list of Host
        Hosts; empty: this host, or those of Slurm's allocation.
    cores_per_worker : int or None
        Cores that each worker is bound to; None: its share of this host's cores, if all workers run on this host.
    threads : int or None
        OMP_NUM_THREADS of each worker; None: from the user's environment, otherwise the number of its cores.
    variables : dict
        Variables that are set for all workers. None: the value in this environment.
    tcp_only : bool
        Whether MPI uses TCP between hosts, and no faster network.
    reading : str
        How mykvrun reads the workers' output: "" not at all, "lines", or "pieces" as they arrive.
    mark : str
        A unique word, which some launchers put before each piece of output.
    """

    program: list[str]
    workers: int | None = None
    hosts: list[Host] = field(default_factory=list)
    cores_per_worker: int | None = None
    threads: int | None = None
    variables: dict[str, str | None] = field(default_factory=dict)
    elastic: bool = False
    tag_output: bool = False
    ssh_port: int | None = None
    ssh_key: str | None = None
    interfaces: str | None = None
    tcp_only: bool = False
    reading: str = ""
    mark: str = ""
    mpi_arguments: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = sum(host.slots for host in self.hosts)
        if self.workers is None and self.hosts:
            self.workers = slots
        if self.hosts and self.workers is not None and self.workers > slots:
            raise LaunchError(
                f"{self.workers} workers do not fit on the hosts, which have {slots} slot{'s' * (slots != 1)}: give "
                "them more slots."
            )
        if self.program[0].endswith(".py"):
            self.program = [sys.executable, *self.program]

    @property
    def is_local(self) -> bool:
        """Whether all workers run on this host."""
        return all(is_this_host(host.name) for host in self.hosts)

    @property
    def binds_itself(self) -> bool:
        """Whether the user's own options for the launcher bind the workers; launchers accept such options once."""
        return any(word.lstrip("-").partition("=")[0] in _BINDING for word in self.mpi_arguments)

    def ssh(self) -> list[str]:
        """The command that reaches another host, without the host's name."""
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        return ["ssh", *port, *(["-i", self.ssh_key] if self.ssh_key else [])]

    def most_on_a_host(self) -> int:
        """The largest number of workers that a host gets."""
        left, most = self.workers or 1, 0
        for host in self.hosts:
            here = min(left, host.slots)
            left, most = left - here, max(most, here)
        return most or self.workers or 1

    def bound_cores(self) -> int | None:
        """Cores that each worker is bound to, or None if workers are not bound.

        Without ``cores_per_worker``, workers are bound only if all of them run on this host, each gets at least one
        core, and this process may use the whole host.
        """
        if self.cores_per_worker:
            return self.cores_per_worker
        share = usable_cores() // self.most_on_a_host()
        return share if self.is_local and share >= 1 and not is_bound() else None

    def outnumbers_cores(self) -> bool:
        """Whether the workers of a host need more cores than this host has."""
        return self.most_on_a_host() * (self.cores_per_worker or 1) > usable_cores()

    def share_of_cores(self) -> int:
        """Cores of this host per worker, assumed for all hosts; at least 1."""
        return self.cores_per_worker or max(1, usable_cores() // self.most_on_a_host())

    def environment(self, cores: int | None, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables for workers in addition to those of ``base``. ``cores``: cores per worker, None if unknown."""
        threads = self.threads or (None if "OMP_NUM_THREADS" in base else cores)
        added = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        added.update((name, value) for name, value in self.variables.items() if value is not None)
        return added

    def forwarded(self, added: Iterable[str], base: Mapping[str, str] = os.environ) -> list[str]:
        """Sorted names of the variables passed to workers of other hosts; ``added``: names from `environment`."""
        names = {name for name in base if name.startswith(_PREFIXES) or name in _NAMES}
        return sorted({*names, *added, *self.variables})

"""The peers, and their settings: as installed, and candidates for the best.

The settings come from a peer's own documentation on speed. A peer's first setup is as installed; the best of the others
is measured for each case, see tuning.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from . import environments

# Open MPI binds ranks, and so MXNet's threads, to cores unless told otherwise. Horovod's documentation and ours
# recommend `--bind-to none`; ranks that outnumber the cores need `--oversubscribe`. MXNet's tools/launch.py starts as
# many servers as workers.
UNBOUND = ("--oversubscribe", "--bind-to", "none")
BOUND = ("--bind-to", "core")
DEFAULT = ()

AS_INSTALLED = "as installed"


@dataclass(frozen=True)
class Setup:
    """One way to run one peer.

    Attributes
    ----------
    peer : str
        Name in tables and plots.
    name : str
        Name of the settings.
    backend : str
        Module in benchmarks/workers.
    mpirun : tuple of str
        Options of mpirun.
    env : dict
        Environment variables.
    options : dict
        Options that the worker passes on to its peer.
    servers : int
        Server processes of a parameter server; 0 is one for each worker.
    suits : str
        Prefix of the ids of cases for which these settings can matter.
    """

    peer: str
    name: str
    backend: str
    mpirun: tuple[str, ...] = UNBOUND
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    servers: int = 0
    suits: str = ""

    def launcher_options(self, ranks: int) -> tuple[str, ...]:
        """Options of mpirun, which rejects defaults and binding if ranks outnumber cores."""
        return self.mpirun if ranks <= len(os.sched_getaffinity(0)) else UNBOUND

    @property
    def title(self) -> str:
        """Peer and settings."""
        return f"{self.peer}, {self.name}"

    def python(self) -> str:
        """The interpreter in which this peer is installed."""
        made = {"horovod": environments.horovod_python, "intel mpi": environments.intel_python}
        return made.get(self.peer, environments.our_python)()


_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_NO_CYCLE = {"HOROVOD_CYCLE_TIME": "0", **_YIELD}

MYKV = Setup("mykv", AS_INSTALLED, "mykv")
MYKV_BOUND = Setup("mykv", "bound", "mykv", mpirun=BOUND)
CORE = Setup("mykv core", AS_INSTALLED, "core")
ALONE = Setup("alone", AS_INSTALLED, "alone")
ALONE_BOUND = Setup("alone", "bound", "alone", mpirun=BOUND)
# The fastest MPI on one host, for the sizes that are measured with it.
INTEL_MPI = Setup("intel mpi", AS_INSTALLED, "mpi", mpirun=DEFAULT)
LIMIT = Setup("limit", AS_INSTALLED, "limit")
# Threads of MXNet's operators; with two, the ranks of this benchmark need twice the available cores.
TWO_THREADS = Setup("mykv", "2 OpenMP threads", "mykv", env={"OMP_NUM_THREADS": "2"})
ONE_BUCKET = Setup("mykv", "one bucket", "mykv", options={"bucket_bytes": 1 << 30})
HOROVOD_NO_CYCLE = Setup("horovod", "cycle time 0, yield", "horovod_peer", env=_NO_CYCLE)
MPI_YIELD = Setup("mpi", "not bound, yield", "mpi", env=_YIELD)


def _grouped(groups: int) -> Setup:
    name = f"cycle time 0, yield, {groups} group{'s' * (groups > 1)}"
    return Setup("horovod", name, "horovod_peer", env=_NO_CYCLE, options={"num_groups": groups}, suits="gradients")


SETUPS: dict[str, list[Setup]] = {
    "mykv": [MYKV, MYKV_BOUND],
    "horovod": [
        Setup("horovod", AS_INSTALLED, "horovod_peer"),
        HOROVOD_NO_CYCLE,
        Setup("horovod", "cycle time 0, yield, bound", "horovod_peer", mpirun=BOUND, env=_NO_CYCLE),
        _grouped(1),
        _grouped(8),
    ],
    "dist_sync": [
        Setup("dist_sync", AS_INSTALLED, "dist_sync"),
        Setup("dist_sync", "1 server", "dist_sync", servers=1),
    ],
    "mpi": [
        Setup("mpi", AS_INSTALLED, "mpi", mpirun=DEFAULT),
        Setup("mpi", "not bound", "mpi"),
        MPI_YIELD,
        Setup("mpi", "yield", "mpi", mpirun=DEFAULT, env=_YIELD),
    ],
}

PEERS = ("horovod", "dist_sync", "mpi")


def chosen(names: str) -> list[str]:
    """Peers from a comma-separated list: 'all', 'none', or names; mykv itself is always first.

    Raises
    ------
    ValueError
        There is no peer of that name.
    """
    wanted = {"all": list(PEERS), "none": []}.get(names.strip(), [name for name in names.split(",") if name])
    for name in wanted:
        if name not in SETUPS:
            raise ValueError(f"There is no peer '{name}': choose among {', '.join(PEERS)}, all and none.")
    return ["mykv", *(name for name in PEERS if name in wanted)]

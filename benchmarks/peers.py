"""Who is measured, and each peer's settings: as installed, and the candidates for its best.

The settings are those that a peer's own documentation offers for speed. The first setup of a peer is how it runs as
installed; which of the others is best is measured for every piece of work, see tuning.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from . import environments

# Open MPI binds ranks to cores unless told otherwise, MXNet's threads with them. Horovod's documentation and ours say
# `--bind-to none`; ranks that outnumber the cores need `--oversubscribe`. MXNet's tools/launch.py starts as many servers
# as workers.
UNBOUND = ("--oversubscribe", "--bind-to", "none")
BOUND = ("--bind-to", "core")

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
        What the worker passes on to its peer.
    servers : int
        Server processes of a parameter server; 0 is one for each worker.
    """

    peer: str
    name: str
    backend: str
    mpirun: Tuple[str, ...] = UNBOUND
    env: Dict[str, str] = field(default_factory=dict)
    options: Dict[str, Any] = field(default_factory=dict)
    servers: int = 0

    @property
    def title(self) -> str:
        """Peer and settings."""
        return f"{self.peer}, {self.name}"

    def python(self) -> str:
        """The interpreter that has this peer."""
        return environments.horovod_python() if self.peer == "horovod" else environments.our_python()


_YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_NO_CYCLE = {"HOROVOD_CYCLE_TIME": "0", **_YIELD}

MYKV = Setup("mykv", AS_INSTALLED, "mykv")
CORE = Setup("mykv core", AS_INSTALLED, "core")
ALONE = Setup("alone", AS_INSTALLED, "alone")
HOROVOD_NO_CYCLE = Setup("horovod", "cycle time 0, yield", "horovod_peer", env=_NO_CYCLE)
MPI_YIELD = Setup("mpi", "not bound, yield", "mpi", env=_YIELD)

SETUPS: Dict[str, List[Setup]] = {
    "mykv": [MYKV],
    "horovod": [
        Setup("horovod", AS_INSTALLED, "horovod_peer"),
        HOROVOD_NO_CYCLE,
        Setup("horovod", "cycle time 0, yield, bound", "horovod_peer", mpirun=BOUND, env=_NO_CYCLE),
        Setup("horovod", "cycle time 0, yield, 1 group", "horovod_peer", env=_NO_CYCLE, options={"num_groups": 1}),
        Setup("horovod", "cycle time 0, yield, 8 groups", "horovod_peer", env=_NO_CYCLE, options={"num_groups": 8}),
    ],
    "dist_sync": [
        Setup("dist_sync", AS_INSTALLED, "dist_sync"),
        Setup("dist_sync", "1 server", "dist_sync", servers=1),
    ],
    "mpi": [
        Setup("mpi", AS_INSTALLED, "mpi", mpirun=BOUND),
        Setup("mpi", "not bound", "mpi"),
        MPI_YIELD,
    ],
}

PEERS = ("horovod", "dist_sync", "mpi")


def chosen(names: str) -> List[str]:
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

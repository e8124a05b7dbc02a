"""Room for more workers than a job began with: free slots of the launcher, and hosts that a hostfile lists.

Only rank 0 checks for room, in its commits. It passes the whole list of hosts to the launcher, which knows the slots in
use.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import NamedTuple

from mykvrun.errors import LaunchError
from mykvrun.hosts import read_hostfile

_log = logging.getLogger("kvstore_plugin")

_EVERY_S = 1.0


class Growth(NamedTuple):
    """The number and location of workers to start.

    Attributes
    ----------
    count : int
    hosts : str
        Hosts for the launcher, as ``name:slots,...``; "" for the hosts that the launcher already has.
    machine : str
        The machine of all new workers; "" if they may be on several.
    """

    count: int
    hosts: str
    machine: str


class Room:
    """Finds room for more workers of a job.

    Parameters
    ----------
    most : int
        The maximum number of workers.
    hostfile : str, optional
        A file in the format of ``mykvrun --hostfile``: ``name slots=4`` in each line. The file may be missing, and may
        change while the job runs. If None, the room is the slots that the launcher had free when the job began.
    """

    def __init__(self, most: int, hostfile: str | None) -> None:
        self.most = most
        self._path = None if hostfile is None else os.path.abspath(hostfile)
        self._looked = -_EVERY_S
        self._tried: dict[str, int] = {}
        self._told = ""  # the last warning, which is not repeated
        self._failed: dict[str, int] = {}  # the slots of each host when workers could last not be started

    def growth(self, size: int) -> Growth | None:
        """The workers that a job of `size` workers can start now.

        None if there is no room, or if the last check was less than a second ago.
        """
        if size >= self.most or time.monotonic() - self._looked < _EVERY_S:
            return None
        self._looked = time.monotonic()
        slots = self._slots()
        count = min(self.most, sum(slots.values())) - size
        if count <= 0 or slots == self._failed:
            return None
        self._tried = slots
        if self._path is None:
            return Growth(count, "", "")
        this = socket.gethostname()
        is_here = {host.split(".")[0] for host in slots} <= {this.split(".")[0], "localhost"}
        hosts = ",".join(f"{host}:{number}" for host, number in slots.items())
        return Growth(count, hosts, this if is_here else "")

    def failed(self) -> None:
        """Called when workers could not be started: growth() returns None until the hostfile lists other slots."""
        self._failed = self._tried

    def _slots(self) -> dict[str, int]:
        if self._path is None:
            from mpi4py import MPI

            return {"": MPI.COMM_WORLD.Get_attr(MPI.UNIVERSE_SIZE) or 0}
        if not os.path.exists(self._path):
            return self._warn(f"The hostfile {self._path} does not exist yet: workers are added once it does.")
        try:
            slots = {host.name: host.slots for host in read_hostfile(self._path)}
        except LaunchError as error:
            return self._warn(f"No workers are added. {error}")
        self._told = ""
        return slots

    def _warn(self, text: str) -> dict[str, int]:
        if text != self._told:
            _log.warning("%s", text)
        self._told = text
        return {}

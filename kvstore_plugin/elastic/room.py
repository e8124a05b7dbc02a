"""Room for more workers than a job began with: free slots of the launcher, and hosts that a hostfile lists.

Only rank 0 looks, in its commits. The launcher knows which of the listed slots are taken, so it gets the whole list.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from typing import NamedTuple

_log = logging.getLogger("kvstore_plugin")

_EVERY_S = 1.0
_LINE = re.compile(r"(?P<host>[^\s:=#]+)(?:\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?")


class Growth(NamedTuple):
    """How many workers to start, and where.

    Attributes
    ----------
    count : int
    hosts : str
        Hosts to tell the launcher of, as ``name:slots,...``; "" for the hosts that it knows.
    machine : str
        The machine of all of them; "" where they may be on several.
    """

    count: int
    hosts: str
    machine: str


class Room:
    """Where a job finds room for more workers.

    Parameters
    ----------
    most : int
        The number of workers that the job may have.
    hostfile : str, optional
        A file in the form of Open MPI's hostfiles: ``name slots=4`` in each line. It may be missing, and changes while
        the job runs. Without a file the room is what the launcher had free when the job began.
    """

    def __init__(self, most: int, hostfile: str | None) -> None:
        self.most = most
        self._path = None if hostfile is None else os.path.abspath(hostfile)
        self._looked = -_EVERY_S
        self._tried: dict[str, int] = {}
        self._failed: dict[str, int] = {}  # slots for which the launcher, or a new worker, has failed

    def growth(self, size: int) -> Growth | None:
        """The workers that a job of `size` workers can start now; None without room. Looks once a second at most."""
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
        """Do not try again before the hostfile lists other slots."""
        self._failed = self._tried

    def _slots(self) -> dict[str, int]:
        if self._path is None:
            from mpi4py import MPI

            return {"": MPI.COMM_WORLD.Get_attr(MPI.UNIVERSE_SIZE) or 0}
        try:
            with open(self._path) as file:
                return slots_of(file.read())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning("mykv cannot read the hostfile %s, so no workers are added: %s", self._path, error)
            return {}


def slots_of(text: str) -> dict[str, int]:
    """The hosts of a hostfile, each with its number of slots (1 where the line has none).

    Raises
    ------
    ValueError
        A line has another form.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not of the form 'name slots=4': {line!r}")
        slots[match["host"]] = slots.get(match["host"], 0) + int(match["slots"] or 1)
    return slots

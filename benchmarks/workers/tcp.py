"""Plain TCP between two hosts, the lower bound of an exchange: round trips, and two bulk transfers at once.

Rank 0 listens on the address in options['address'].
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np

from .job import Job, Series, launched_rank, timed
from .meeting import Meeting

_PORT = 45123


class Pair:
    """The connection of this process to the other process."""

    def __init__(self, rank: int, address: str, meeting: Meeting) -> None:
        self.rank = rank
        if rank == 0:
            with socket.create_server((address, _PORT)) as listener:
                meeting.start()
                self.socket, _ = listener.accept()
        else:
            meeting.start()
            self.socket = socket.create_connection((address, _PORT), timeout=20)
            self.socket.settimeout(None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, into: memoryview) -> None:
        """Fill a buffer."""
        while into.nbytes:
            got = self.socket.recv_into(into)
            if got == 0:
                raise ConnectionError("The other process has gone.")
            into = into[got:]


def round_trip(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of a round trip of 'nbytes' bytes."""
    pair = Pair(RANK, JOB.options["address"], meeting)
    data = bytearray(case["nbytes"])

    def work() -> None:
        if pair.rank == 0:
            pair.socket.sendall(data)
        pair.receive(memoryview(data))
        if pair.rank != 0:
            pair.socket.sendall(data)

    yield "time", timed(case, meeting, lambda: None, work)
    pair.socket.close()


def exchange(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds in which both processes send each other 'nbytes' bytes."""
    pair = Pair(RANK, JOB.options["address"], meeting)
    out, back = np.ones(case["nbytes"], np.uint8), np.empty(case["nbytes"], np.uint8)

    def work() -> None:
        sender = threading.Thread(target=pair.socket.sendall, args=(out,))
        sender.start()
        pair.receive(memoryview(back))
        sender.join()

    yield "time", timed(case, meeting, lambda: None, work)
    pair.socket.close()


if __name__ == "__main__":
    JOB = Job()
    RANK = launched_rank()
    JOB.run(RANK, {"round trip": round_trip, "exchange": exchange})

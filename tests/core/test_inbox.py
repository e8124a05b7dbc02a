"""Messages between hosts whose sender was stopped or is dead."""

from __future__ import annotations

import time

import numpy as np
import pytest

_LARGE = 4 << 20  # bytes, more than any MPI sends without asking
_TAG = 7


@pytest.mark.ranks(3, env={"MYKV_TEST_POOL": "hosts", "OMPI_MCA_smsc": "^cma"})
def test_a_large_message_whose_sender_sleeps_holds_nobody_up(rank, gather):
    from compiled import testing
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    inbox = testing.Inbox(comm.py2f(), _TAG) if rank == 0 else None
    taken = []

    def look_until(holds) -> None:
        deadline = time.monotonic() + 20
        while not holds() and time.monotonic() < deadline:
            message = inbox.take()
            if message is not None:
                taken.append((message[1], len(message[0]), message[0][:1]))
        assert holds(), taken

    if rank == 1:
        requests = [comm.Isend(np.full(_LARGE, 1, "uint8"), 0, _TAG), comm.Isend(np.full(3, 2, "uint8"), 0, _TAG)]
    gather("rank 1 has sent, and does not look after it")
    if rank == 2:
        comm.Send(np.full(5, 3, "uint8"), 0, _TAG)
    if rank == 0:
        look_until(lambda: (2, 5, b"\3") in taken)  # in a wait for rank 1 this would never end
    gather("rank 0 has the message of rank 2")
    if rank == 1:
        MPI.Request.Waitall(requests)
    if rank == 0:
        look_until(lambda: len(taken) == 3)
        assert [one for one in taken if one[0] == 1] == [(1, _LARGE, b"\1"), (1, 3, b"\2")]
    gather("all is received")
    comm.Free()

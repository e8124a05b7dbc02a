"""Several hosts with a network between them: where ranks are, all operations, training, a dead worker, a dead link.

Hosts are network namespaces with names and addresses of their own. Where these cannot be had (no root, no iproute2,
another MPI), the same programs run on virtual hosts, as far as these can be divided likewise.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest
from harness.processes import send_signal
from harness.several_hosts import Hosts

_PROGRAMS = Path(__file__).parents[1] / "programs"
_END_S = 10.0  # from the death of a worker to the end of the job
_LAUNCHER = {"mpirun", "prterun", "prted", "bash", "sh", "ip", "unshare", "enter", "agent"}
_DOWN_S = 2.0  # that a link is down


@pytest.fixture(scope="module")
def hosts():
    """Up to three hosts."""
    with Hosts(3) as hosts:
        yield hosts


def _places(per_host, by_node) -> list[list[int]]:
    if not by_node:
        return [list(range(sum(per_host[:k]), sum(per_host[: k + 1]))) for k in range(len(per_host))]
    places: list[list[int]] = [[] for _ in per_host]
    rank = 0
    for turn in range(max(per_host)):
        for host, ranks in enumerate(per_host):
            if turn < ranks:
                places[host].append(rank)
                rank += 1
    return places


_LAYOUTS = {
    "one host": ([2], False),
    "2 hosts of one rank": ([1, 1], False),
    "2 hosts of 2": ([2, 2], False),
    "unequal hosts": ([3, 1], False),
    "3 hosts, ranks dealt out": ([2, 2, 1], True),
}


@pytest.mark.parametrize("per_host, by_node", _LAYOUTS.values(), ids=_LAYOUTS)
def test_every_operation_of_the_core_wherever_the_ranks_are(mpirun, hosts, per_host, by_node):
    given = {"hosts": _places(per_host, by_node), "options": hosts.options(per_host), "late": per_host == [1, 1]}
    program = _PROGRAMS / "core_operations.py"
    result = hosts.start(mpirun, per_host, program, json.dumps(given), by_node=by_node).wait(90)
    assert result.code == 0, result.text
    assert all(f"fine {rank}" in result.stdout for rank in range(sum(per_host))), result.text


def _train(mpirun, hosts, per_host, locked=(), link=None, by_node=False):
    given = json.dumps({"locked": list(locked), "link": link})
    env = {"MYKV_COMPRESS_BYTES": "1000"}
    return hosts.start(mpirun, per_host, _PROGRAMS / "training.py", given, by_node=by_node, env=env)


def _assert_fine(result, ranks: int, hosts: int) -> None:
    assert result.code == 0, result.text
    assert all(f"fine {rank} {hosts}\n" in result.stdout for rank in range(ranks)), result.text


def test_training_where_one_host_may_not_share_memory(mpirun, hosts):
    """Its ranks are hosts of their own, of which one line tells."""
    result = _train(mpirun, hosts, [2, 2], locked=[2, 3]).wait(150)
    _assert_fine(result, 4, 3)
    assert result.text.count("memfd_create") == 1, result.text


@pytest.mark.long
def test_a_link_that_goes_down_and_up_again_changes_no_result(mpirun, hosts, tmp_path):
    """In a training on hosts of unequal size, whose ranks are no neighbours."""
    hosts.require_network()
    ready, down = tmp_path / "ready", tmp_path / "down"
    running = _train(mpirun, hosts, [2, 1], link=[str(ready), str(down)], by_node=True)
    deadline = time.monotonic() + 90
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ready.exists(), "\n".join(running.read())
    hosts.network.set_link(2, up=False)
    try:
        down.touch()
        time.sleep(_DOWN_S)
    finally:
        hosts.network.set_link(2, up=True)
    result = running.wait(150)
    _assert_fine(result, 3, 2)
    stood = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("stood")]
    assert len(stood) == 3 and max(stood) > _DOWN_S / 2, result.text


_ENDLESS = """
import json, os, sys
from compiled import core
import numpy as np
from mpi4py import MPI

core.init(MPI.COMM_WORLD.py2f(), json.loads(sys.argv[1]))
array = np.ones(1 << 18)
for turn in range(10**9):
    core.submit_allreduce("x", [array], [array], scale=1 / core.size()).wait()
    if turn == 3:
        print("going", core.rank(), os.getpid(), flush=True)
"""


@pytest.mark.alone
def test_a_worker_killed_on_the_other_host_ends_the_job_and_leaves_no_process(mpirun, hosts):
    """All workers end. Of a hundred such jobs the launcher of Open MPI 5.0.11 hangs in six after that."""
    running = hosts.start(mpirun, [2, 2], _ENDLESS, json.dumps(hosts.options([2, 2])))
    for rank in range(4):
        running.wait_for(f"going {rank} ")
    pid = int(running.read()[0].split("going 3 ")[1].split()[0])
    begin = time.monotonic()
    send_signal(pid, signal.SIGKILL)
    while set(_names(running)) - _LAUNCHER and time.monotonic() - begin < _END_S:
        time.sleep(0.05)
    assert not set(_names(running)) - _LAUNCHER, running.read()
    while running.members() and time.monotonic() - begin < _END_S:
        time.sleep(0.05)
    if running.members():
        pytest.skip(f"the launcher of Open MPI hangs, after all workers have ended: {_names(running)}")
    assert running.wait(120).code != 0, running.read()


def _names(running) -> list[str]:
    """Names of the living processes of a launch."""
    found = []
    for pid in running.members():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found

"""Jobs to which workers are added: they go on from a commit, and end with more workers and with equal weights."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from harness.several_hosts import Hosts
from kvstore_plugin.elastic.room import Room

_WORKER = Path(__file__).parents[1] / "programs" / "respawn.py"
_LIMIT_S = 240.0
_END = r"^end (\d) of (\d) (\w+) steps 12 sizes 12 \[([\d, ]+)\] updates (\d+) weights (\w+)$"

open_mpi = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")


def _plan(tmp_path, **plan) -> str:
    return json.dumps({"folder": str(tmp_path), "hostfile": str(tmp_path / "hosts"), **plan})


@pytest.fixture
def job(mpirun, tmp_path):
    """Run a plan of respawn.py on some workers."""

    def run(workers: int, env=None, **plan):
        options = ("--with-ft", "ulfm")
        return mpirun.start(workers, _WORKER, _plan(tmp_path, **plan), options=options, env=env).wait(_LIMIT_S)

    return run


def _weights(result, workers: int, sizes: str) -> str:
    """The weights that all workers have at the end."""
    ends = re.findall(_END, result.stdout, re.MULTILINE)
    assert sorted(end[0] for end in ends) == [str(rank) for rank in range(workers)], result.text
    assert {end[1] for end in ends} == {str(workers)} and {end[3] for end in ends} == {sizes}, result.text
    assert len({end[5] for end in ends}) == 1, result.text
    return ends[0][5]


def _slots(count: int) -> str:
    return f"{socket.gethostname()} slots={count}\n"


@open_mpi
@pytest.mark.parametrize("kind, hosts", [("store", 1), long("plain", 2), long("deferred", 1), long("local", 2)])
def test_workers_are_added_when_the_hostfile_lists_more(job, kind, hosts):
    """The weights have the bits of a job that does not grow."""
    env = {"MYKV_VIRTUAL_HOSTS": str(hosts)}
    alone = _weights(job(2, env, kind=kind, grow_to=2), 2, "2")
    grown = job(2, env, kind=kind, grow_to=4, pause=0.3, writes={"3": _slots(4)})
    assert _weights(grown, 4, "2, 4") == alone
    assert grown.stderr.count("mykv adds a worker, since there is room.") == 2, grown.text  # one after the other


@open_mpi
@pytest.mark.parametrize(
    "deaths, sizes",
    [
        long([["forward", 8, 1, "first"], ["forward", 10, 2, "new"]], "2, 4"),
        long([["commit", 3, 1, "first"]], "2, 4"),  # beside the growth
        long([["restore", 1, 1, "first"]], "2, 3, 4"),  # with the added workers; the next commit adds one
    ],
)
def test_workers_that_die_before_and_after_a_growth_are_replaced(job, deaths, sizes):
    grown = job(2, kind="plain", grow_to=4, pause=0.4, writes={"2": _slots(4)}, deaths=deaths)
    assert len(re.findall(r"^dies ", grown.stdout, re.MULTILINE)) == len(deaths), grown.text
    weights = _weights(grown, 4, sizes)
    if "3" not in sizes:
        assert weights == _weights(job(2, kind="plain", grow_to=2), 2, "2")


@open_mpi
@pytest.mark.long
def test_training_goes_on_where_the_added_workers_fail(job):
    """They are tried once, until the hostfile changes."""
    failed = job(2, grow_to=4, pause=0.3, writes={"1": _slots(3)}, deaths=[["begin", -1, 0, "every new"]])
    _weights(failed, 2, "2")
    assert failed.stdout.count("dies begin") == 1, failed.text
    assert failed.stderr.count("mykv could not add workers: training goes on without them.") == 1, failed.text


@open_mpi
def test_without_a_hostfile_the_launchers_free_slots_are_taken(mpirun, tmp_path):
    def command(program: list[str]) -> list[str]:
        few = ["--host", f"{socket.gethostname()}:3", "--bind-to", "none", "--with-ft", "ulfm"]
        return [launcher.mpirun_path(), "-n", "1", *few, *program]

    plan = json.dumps({"folder": str(tmp_path), "grow_to": 2, "pause": 0.1})
    grown = mpirun.start(1, _WORKER, plan, command=command).wait(_LIMIT_S)
    _weights(grown, 2, "1, 2")


@open_mpi
@pytest.mark.long
def test_a_host_that_the_job_did_not_know_takes_part(mpirun, tmp_path):
    with Hosts(2) as hosts:
        hosts.require_network()
        first, second = (hosts.network.address(number) for number in (1, 2))
        text = f"{first} slots=2  # the first two workers\n{second} slots=2\n"
        plan = _plan(tmp_path, grow_to=4, pause=0.4, writes={"2": text})
        grown = hosts.start(mpirun, [2], _WORKER, plan, options=("--with-ft", "ulfm")).wait(_LIMIT_S)
    _weights(grown, 4, "2, 4")
    assert "mykv adds 2 workers, since there is room." in grown.stderr, grown.text


def test_what_is_asked_for_wrongly_is_an_error(mpirun):
    script = """
    import kvstore_plugin as mykv
    for more in ({"grow_to": 1}, {"grow_to": "4"}, {"hostfile": "hosts"}):
        try:
            mykv.run_elastic(print, None, **more)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}\\n", end="")
    """
    said = mpirun(2, script).stdout
    assert said.count("ValueError: grow_to must be at least the 2 workers of the job, not 1.") == 2, said
    assert said.count("TypeError: grow_to must be an integer, not '4'.") == 2, said
    assert said.count("ValueError: run_elastic(hostfile=...) needs grow_to=") == 2, said


def test_room(tmp_path, monkeypatch, caplog):
    """Looked at once a second, tried once for what the file lists, and never beyond the number that is asked for."""
    monkeypatch.setattr("kvstore_plugin.elastic.room._EVERY_S", 0.0)
    file = tmp_path / "hosts"
    room = Room(6, str(file))
    assert room.growth(2) is None and room.growth(2) is None
    assert caplog.text.count("does not exist yet: workers are added once it does") == 1
    file.write_text("node1 slots=2")
    assert room.growth(2) is None
    file.write_text("node1 slots=2\nnode2 slots=2")
    assert room.growth(2) == (2, "node1:2,node2:2", "")
    room.failed()
    assert room.growth(2) is None
    file.write_text("node1 slots=2\nnode2 slots=8")
    assert room.growth(2) == (4, "node1:2,node2:8", "")
    assert room.growth(6) is None
    file.write_text("node1.cluster slots=4")
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    assert room.growth(2) == (2, "node1.cluster:4", "node1")
    file.write_text("node1 slots")
    assert room.growth(2) is None and room.growth(2) is None
    assert caplog.text.count("line 1: 'node1 slots' is not HOST slots=WORKERS.") == 1
    monkeypatch.setattr("kvstore_plugin.elastic.room._EVERY_S", 60.0)
    file.write_text("node1 slots=3")
    assert room.growth(2) is None

"""Jobs whose workers are killed, and replaced: they end with as many workers as they began, and with equal weights."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import launcher
from harness.marks import long
from harness.several_hosts import Hosts
from kvstore_plugin.elastic import members
from kvstore_plugin.world import new_workers

_WORKER = Path(__file__).parents[1] / "programs" / "respawn.py"
_LIMIT_S = 240.0
_END = r"^end (\d) of (\d) (\w+) steps 12 sizes 12 \[(\d)\] updates (\d+) weights (\w+)$"

pytestmark = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")


@pytest.fixture
def job(mpirun, tmp_path):
    """Run a plan of respawn.py on some workers."""

    def run(workers: int, plan: dict, **env: str):
        plan = {"folder": str(tmp_path), **plan}
        return mpirun.start(workers, _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"), env=env).wait(_LIMIT_S)

    return run


def _weights(result, workers: int, deaths: int, new: int) -> str:
    """The weights that all workers have at the end; the workers must be those that a job with so many deaths has."""
    assert len(re.findall(r"^dies ", result.stdout, re.MULTILINE)) == deaths, result.text
    ends = re.findall(_END, result.stdout, re.MULTILINE)
    assert sorted(end[0] for end in ends) == [str(rank) for rank in range(workers)], result.text
    assert {end[1] for end in ends} == {end[3] for end in ends} == {str(workers)}, result.text
    assert sum(end[2] == "new" for end in ends) == new, result.text
    assert len({end[5] for end in ends}) == 1, result.text
    return ends[0][5]


_FIRST_THEN_NEXT = [["backward", 5, 1, "first"], ["forward", 8, 0, "first"]]


@pytest.mark.parametrize(
    "kind, hosts, deaths, new",
    [
        pytest.param("plain", 1, _FIRST_THEN_NEXT, 2, marks=pytest.mark.smoke),
        long("store", 2, _FIRST_THEN_NEXT, 2),
        long("deferred", 1, [["backward", 0, 0, "first"], ["forward", 0, 2, "new"]], 1),
        long("local", 2, _FIRST_THEN_NEXT, 2),
        long("plain", 1, [["backward", 4, 1, "first"], ["backward", 4, 2, "first"]], 2),
        long("store", 1, [["commit", 5, 1, "first"], ["commit", 9, 2, "new"]], 1),
        long("plain", 1, [["forward", 4, 1, "first"], ["restore", 1, 2, "first"]], 2),
        long("plain", 1, [["forward", 3, 0, "first"], ["forward", 5, 1, "first"], ["forward", 7, 2, "first"]], 3),
    ],
)
def test_workers_are_replaced_and_no_step_counts_twice(job, kind, hosts, deaths, new, tmp_path):
    """The weights have the bits of a job in which nobody dies, and are those of the same steps in one process.

    A new worker begins alone, on one host.
    """
    env = {"MYKV_VIRTUAL_HOSTS": str(hosts)}
    undisturbed = _weights(job(3, {"kind": kind}, **env), 3, 0, 0)
    plan = {"kind": kind, "deaths": deaths, "saves": str(tmp_path / "replaced.npy")}
    assert _weights(job(3, plan, **env), 3, len(deaths), new) == undisturbed
    if kind in ("plain", "store"):
        assert job(1, {"kind": "alone", "saves": str(tmp_path / "alone.npy")}).code == 0
        replaced, alone = (np.load(tmp_path / f"{name}.npy") for name in ("replaced", "alone"))
        np.testing.assert_allclose(replaced, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_new_worker_gets_a_slot_where_the_launcher_has_no_free_one(mpirun, tmp_path):
    """Open MPI's launcher keeps the slot of a dead worker taken."""

    def command(program: list[str]) -> list[str]:
        full = ["--host", f"{socket.gethostname()}:2", "--bind-to", "none", "--with-ft", "ulfm"]
        return [launcher.mpirun_path(), "-n", "2", *full, *program]

    plan = {"folder": str(tmp_path), "deaths": [["forward", 4, 1, "first"], ["forward", 7, 1, "new"]]}
    _weights(mpirun.start(2, _WORKER, json.dumps(plan), command=command).wait(_LIMIT_S), 2, 2, 1)


@pytest.mark.long
def test_workers_that_mykvrun_has_bound_to_cores_are_replaced(tmp_path):
    """Open MPI's launcher keeps the cores of a dead worker taken."""
    plan = {"folder": str(tmp_path), "deaths": [["forward", 4, 1, "first"]]}
    line = [sys.executable, "-m", "kvstore_plugin.run", "--elastic", "-n", "2", str(_WORKER), json.dumps(plan)]
    env = launcher.environment(tmp_path)
    result = subprocess.run(line, env=env, timeout=_LIMIT_S, capture_output=True, text=True, cwd=tmp_path)
    assert len(re.findall(r"^end \d of 2 \w+ .* \[2\] ", result.stdout, re.MULTILINE)) == 2, result
    assert result.returncode == 0 or ("a worker" in result.stderr and "may still have" in result.stderr), result


@pytest.mark.long
def test_over_several_machines_workers_are_replaced_once(mpirun, tmp_path):
    """Open MPI cannot do it twice: training then goes on with fewer workers."""
    plan = {"folder": str(tmp_path), "deaths": [["forward", 4, 3, "first"], ["forward", 8, 1, "first"]]}
    with Hosts(2) as hosts:
        hosts.require_network()
        started = hosts.start(mpirun, [2, 2], _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"))
        result = started.wait(_LIMIT_S)
    ends = re.findall(r"^end (\d) of (\d) (\w+) .* \[3, 4\] .* (\w+)$", result.stdout, re.MULTILINE)
    assert len(ends) == 3 and {end[1] for end in ends} == {"3"} and len({end[3] for end in ends}) == 1, result.text
    assert "only once in a job, so no more workers join it" in result.stderr, result.text


@pytest.mark.parametrize(
    "part, named",
    [("value", "'score' of the ElasticState"), ("scheduler", "'scheduler' of the optimizer of 'trainer'")],
)
def test_a_state_that_pickle_does_not_take_is_an_error_at_the_beginning(job, part, named):
    result = job(2, {"unpicklable": part})
    said = f"TypeError: A new worker of run_elastic.. could not get {named}.*pickle.* on rank 1"
    assert re.search(said, result.stderr), result.text
    assert "at 1" not in result.stdout, result.text


@pytest.mark.long
def test_a_new_worker_prints_no_report_before_it_has_joined(job):
    result = job(2, {"deaths": [["forward", 4, 1, "first"]]}, MYKV_REPORT="1")
    _weights(result, 2, 1, 1)
    assert set(re.findall(r"steps, on rank 0 of (\d)", result.stderr)) == {"2"}, result.text


@pytest.mark.long
def test_a_new_worker_that_dies_before_it_has_joined_is_replaced_a_few_times_only(job):
    deaths = [["forward", 4, 1, "first"], ["begin", -1, 0, "every new"]]
    result = job(2, {"deaths": deaths})
    assert result.stdout.count("dies begin") == 5, result.text
    assert "Dead workers were replaced 5 times without a commit in between" in result.stderr, result.text


def test_replacements_that_fail_one_after_another_are_counted(monkeypatch):
    """The workers that live are stand-ins here."""
    monkeypatch.setattr(members, "all_agree", lambda comm, mine: (mine, comm))
    these, tried = members.Members(False), []
    these.respawn, these.memory = True, members.Memory(("a machine",))

    def replaced(comm, machines, one_by_one):
        tried.append(machines)
        assert len(tried) < 20
        return None, comm

    monkeypatch.setattr(these, "_missing", lambda comm: (comm, ["a machine"], True))
    monkeypatch.setattr(these, "_replaced", replaced)
    with pytest.raises(RuntimeError, match="replaced 5 times without a commit in between"):
        these.complete(None)
    assert len(tried) == members.MOST_ROUNDS


@pytest.mark.long
def test_a_worker_that_dies_always_at_the_same_step_ends_the_job(job):
    result = job(2, {"deaths": [["forward", 4, 1, "any"]]})
    assert result.stdout.count("dies forward") == 6, result.text
    assert "Dead workers were replaced 5 times without a commit in between" in result.stderr, result.text


@pytest.mark.long
def test_a_new_worker_that_does_not_reach_run_elastic_in_time_is_named(job):
    plan = {"deaths": [["forward", 4, 1, "first"]], "waits": "new"}
    result = job(2, plan, MYKV_RESPAWN_WAIT_S="10")
    named = r"1 of 1 new workers \(process \d+\) have not reached run_elastic\(\) within 10 s"
    assert re.search(named, result.stderr), result.text


@pytest.mark.long
def test_workers_that_exit_with_a_status_are_replaced(job):
    result = job(3, {"deaths": [["forward", 4, 1, "first"], ["forward", 7, 2, "new"]], "ends": "os._exit(1)"})
    _weights(result, 3, 2, 1)


@pytest.mark.parametrize("fails", [1, long(2)])
def test_an_exception_of_a_script_ends_a_job_with_new_workers(job, fails):
    """Rank 0 is a first worker here, and rank 1 a new one. mpirun's status may be 0 after a death (docs/elastic.md)."""
    result = job(2, {"deaths": [["forward", 4, 0, "first"]], "fails": fails})
    assert "TypeError: planted" in result.stderr and "MPI_ABORT was invoked" in result.stderr, result.text


def test_a_job_that_cannot_outlive_its_workers_is_told_what_it_needs(mpirun):
    script = """
    import kvstore_plugin as mykv
    try:
        mykv.run_elastic(print, None, respawn=True)
    except RuntimeError as error:
        print(error)
    """
    result = mpirun(1, script, timeout=_LIMIT_S)
    assert "run_elastic(respawn=True) needs a job that continues after a process has died" in result.stdout, result.text


@pytest.mark.parametrize(
    "line, parsed",
    [
        (["train.py", "-c", "5"], ([], "script", "train.py", ["-c", "5"])),
        (["-u", "-X", "dev", "train.py"], (["-u", "-X", "dev"], "script", "train.py", [])),
        (["-m", "package.train", "--epochs", "3"], ([], "module", "package.train", ["--epochs", "3"])),
        (["-um", "train"], (["-u"], "module", "train", [])),
        (["-W", "error", "-c", "print(1)", "a"], (["-W", "error"], "code", "print(1)", ["a"])),
        (["-Xpycache_prefix=/data/pyc", "train.py"], (["-Xpycache_prefix=/data/pyc"], "script", "train.py", [])),
        (["-uWignore:::numpy.m", "train.py"], (["-uWignore:::numpy.m"], "script", "train.py", [])),
        (["-uW", "ignore:::numpy.m", "train.py"], (["-uW", "ignore:::numpy.m"], "script", "train.py", [])),
        (["-umpackage.train", "-c", "3"], (["-u"], "module", "package.train", ["-c", "3"])),
        (["-cprint(1)", "a"], ([], "code", "print(1)", ["a"])),
    ],
)
def test_what_a_python_runs_is_found_in_its_command_line(line, parsed):
    assert new_workers._parsed(line) == parsed


def test_a_worker_is_started_elsewhere_where_its_machine_takes_none(mpirun):
    """MPI_Comm_spawn is a stand-in here, since with Open MPI a known host takes any number of new workers."""
    script = """
    from mpi4py import MPI
    from kvstore_plugin.world import new_workers

    class Comm:
        def __init__(self, error):
            self.error, self.tried = error, []

        def Spawn(self, command, arguments, count, info, root):
            self.tried.append(info.Get("PMIX_HOST"))
            if self.tried[-1] is not None:
                raise MPI.Exception(self.error)
            return self

        def Set_errhandler(self, handler):
            pass

    for error in (MPI.ERR_SPAWN, MPI.ERR_PROC_FAILED):
        comm = Comm(error)
        print(new_workers.started(comm, 1, "node9:1", is_known=True) is not None, comm.tried, flush=True)
    """
    result = mpirun(1, script, timeout=_LIMIT_S)
    # After a death all living workers try again on that machine.
    assert result.stdout.splitlines() == ["True ['node9:1', None]", "False ['node9:1']"], result.text


def _new_worker(folder, mpi: str, **plan) -> subprocess.CompletedProcess:
    """Run new_worker.py with a module in the place of mpi4py.MPI; it finds it by the PYTHONPATH of a living worker."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text("class rc: pass")
    (folder / "mpi4py" / "MPI.py").write_text(f"THREAD_MULTIPLE, Exception, ERRORS_RETURN = 3, OSError, None\n{mpi}")
    world = Path(new_workers.__file__).parent
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "MXNET_A": "2"}
    plan = {"environment": environment, "process_watch": str(world / "process_watch.py"), "wait": 1, **plan}
    line = [sys.executable, str(world / "new_worker.py"), json.dumps(plan), "argument"]
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(line, env=env, timeout=30, capture_output=True, text=True)


def test_a_new_worker_that_mpi_never_starts_ends(tmp_path):
    """As after MPI_Comm_spawn has failed in the living workers: mpirun would wait for the process."""
    done = _new_worker(tmp_path, "import time\ndef Init_thread(level): time.sleep(60)")
    assert done.returncode == -signal.SIGALRM


_ALONE = """
def Init_thread(level): pass
class Comm:
    Get_parent = classmethod(lambda cls: cls())
    Get_remote_size = lambda self: 0
    Set_errhandler = lambda self, handler: None
"""


def test_a_new_worker_gets_variables_that_its_machine_lacks(tmp_path):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "import os, sys, mpi4py\nprint(os.environ['OMP_NUM_THREADS'], os.environ['MXNET_A'], sys.argv[1:])"
    )
    done = _new_worker(tmp_path, _ALONE, kind="script", what=str(script))
    assert done.stdout == "3 2 ['argument']\n", done.stderr


def test_a_new_worker_imports_what_lies_beside_its_script_also_by_a_link(tmp_path):
    """As Python does: the folder of the file comes first, not that of the link."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "beside.py").write_text("name = 'found'")
    (scripts / "train.py").write_text("import beside\nprint(beside.name, __file__)")
    link = tmp_path / "link.py"
    link.symlink_to(scripts / "train.py")
    done = _new_worker(tmp_path, _ALONE, kind="script", what=str(link))
    assert done.stdout == f"found {link}\n", done.stderr


def test_nothing_ends_a_new_worker_any_more_that_has_joined(mpirun):
    """The living workers are stand-ins here. A new worker that waits for them too long ends."""
    script = """
    import time
    from mpi4py import MPI
    from kvstore_plugin.world import new_workers

    class Request:
        test = lambda self: (True, None)

    class Living:
        Get_remote_size = lambda self: 1
        send = lambda self, message, rank, tag: None
        Merge = lambda self, high: self
        Set_errhandler = lambda self, handler: None
        irecv = lambda self, source, tag: Request()

    class Stub:
        Exception, ERRORS_RETURN = MPI.Exception, MPI.ERRORS_RETURN
        Comm = type("Comm", (), {"Get_parent": staticmethod(Living)})

    import mpi4py
    mpi4py.MPI = Stub
    new_workers.join()
    time.sleep(2)
    print("goes on", flush=True)
    """
    result = mpirun(1, script, timeout=_LIMIT_S, env={"MYKV_RESPAWN_WAIT_S": "0.4"})
    assert result.code == 0 and result.stdout == "goes on\n", result.text

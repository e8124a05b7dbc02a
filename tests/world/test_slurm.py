"""Jobs in a real Slurm of this machine, which the tests start for themselves: a controller and one node.

They need root, munge, Slurm and its PMIx (Debian: slurm-wlm, munge, libpmix-dev).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from harness import launcher

pytestmark = pytest.mark.long

_CONFIGURATION = """\
    ClusterName=trial
    SlurmctldHost={host}
    SlurmctldPort={ports[0]}
    SlurmdPort={ports[1]}
    SlurmUser=root
    AuthInfo=socket={folder}/munge.socket
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/spool
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/slurmd.pid
    SlurmctldLogFile={folder}/slurmctld.log
    SlurmdLogFile={folder}/slurmd.log
    ProctrackType=proctrack/pgid
    TaskPlugin=task/none
    SelectType=select/cons_tres
    SelectTypeParameters=CR_CPU
    NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
    PartitionName=all Nodes=ALL Default=YES State=UP
"""


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of Slurm's commands."""
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder, 0o755)
    missing = [name for name in ("munged", "slurmctld", "slurmd", "salloc") if not shutil.which(name)]
    if missing or os.geteuid() != 0 or not launcher.is_open_mpi():
        pytest.skip(f"needs root, Open MPI and Slurm; missing: {', '.join(missing) or 'none'}")
    host = socket.gethostname()
    text = _CONFIGURATION.format(host=host, folder=folder, ports=_free_ports(2))
    (folder / "slurm.conf").write_text(textwrap.dedent(text))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    munge = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    env = {**launcher.environment(folder), "SLURM_CONF": str(folder / "slurm.conf")}
    commands = [["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *munge]]
    commands += [["slurmctld", "-D"], ["slurmd", "-D", "-N", host]]
    quiet = subprocess.DEVNULL
    daemons = [subprocess.Popen(one, env=env, stdin=quiet, stdout=quiet, stderr=quiet) for one in commands]
    try:
        end = time.monotonic() + 30
        while "idle" not in (told := _run(env, 10, "sinfo")).stdout:
            if time.monotonic() > end:
                logs = [path.read_text(errors="replace")[-600:] for path in folder.glob("slurm*.log")]
                pytest.skip(f"Slurm does not start: {told.stdout} {told.stderr} {logs}")
            time.sleep(0.2)
        yield env
    finally:
        for one in reversed(daemons):
            one.send_signal(signal.SIGTERM)
        for one in daemons:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()


def _run(env, timeout, *command):
    done = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = done.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        done.terminate()  # salloc then ends the allocation with all its processes
        stdout, stderr = done.communicate(timeout=60)
    return subprocess.CompletedProcess(command, done.returncode, stdout, stderr)


def _job(env, tmp_path, script, *options):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    launch = [sys.executable, "-m", "mykvrun", *options, sys.executable, str(path)]
    return _run(env, 120, "salloc", "--ntasks=2", "--immediate=60", *launch)


_BEGIN = """
    import os, signal, sys
    import kvstore_plugin as mykv
    from harness.support import mx

    mykv.init()
"""


def test_an_allocation_trains_on_its_workers(slurm, tmp_path):
    total = "print(mykv.rank(), mykv.allreduce(mx.nd.ones(3) * (1 + mykv.rank()), average=False)[0].asscalar())"
    done = _job(slurm, tmp_path, f"{_BEGIN}    {total}\n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["0 3.0", "1 3.0"], done.stdout
    assert "Sorry" not in done.stderr, done.stderr  # PMIx, about munge


@pytest.mark.parametrize(
    "end, status, said",
    [
        ("raise KeyError('label')", 1, "ended with KeyError: 'label'. It failed first"),
        ("sys.exit(3)", 3, "ended with sys.exit(3). It failed first"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, "failed first"),
    ],
)
def test_the_worker_that_failed_is_named(slurm, tmp_path, end, status, said):
    done = _job(
        slurm, tmp_path, f"{_BEGIN}    mykv.barrier()\n    if mykv.rank() == 1:\n        {end}\n    mykv.barrier()\n"
    )
    assert done.returncode == status if status else done.returncode != 0, done.stderr
    assert re.search(rf"mykvrun: rank 1( on \S+)? {re.escape(said)}", done.stderr), done.stderr

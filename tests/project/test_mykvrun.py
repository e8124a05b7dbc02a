"""mykvrun: one line starts a job, and says at its end which worker failed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from harness import launcher

from mykvrun import commands, hosts, main
from mykvrun.command_line import parse
from mykvrun.errors import LaunchError
from mykvrun.hosts import Host
from mykvrun.job import Job
from mykvrun.mpi import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mykvrun.output import FailedWorker, Output

_OPEN_MPI = Mpi(OPEN_MPI, 5, "/mpi/bin/mpirun")
_MPICH = Mpi(MPICH, 0, "/mpi/bin/mpirun")
_INTEL = Mpi(INTEL_MPI, 0, "/mpi/bin/mpirun")

_SUM = """
import sys
import kvstore_plugin as mykv
import mxnet as mx

mykv.init()
print("sum", mykv.allreduce(mx.nd.ones(2), average=False).asnumpy().tolist(), flush=True)
if "fail" in sys.argv and mykv.rank() == 1:
    raise ValueError("this worker is broken")
if "wait" in sys.argv:
    while True:
        mykv.barrier()
"""


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch, request):
    """The commands do not depend on the machine, unless a test starts a job."""
    if "script" not in request.fixturenames:
        for name in ("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("mykvrun.job.usable_cores", lambda: 4)
        monkeypatch.setattr("mykvrun.job.is_bound", lambda: False)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def script(tmp_path):
    """A program that sums over all workers; ``fail`` as an argument breaks rank 1, ``wait`` never ends."""
    (tmp_path / "train.py").write_text(_SUM)
    return str(tmp_path / "train.py")


def _start(tmp_path, *arguments, **options):
    command = [sys.executable, "-m", "mykvrun", *arguments]
    return subprocess.Popen(
        command,
        env=launcher.environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def _run(tmp_path, *arguments):
    process = _start(tmp_path, *arguments)
    try:
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def test_a_script_runs_on_as_many_workers_as_asked_for(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "3", script)
    assert code == 0, stderr
    assert stdout.splitlines() == ["sum [3.0, 3.0]"] * 3


def test_options_of_horovodrun_ranks_before_lines_and_a_timeline(tmp_path, script):
    options = [
        "-np",
        "2",
        "-H",
        "localhost:2",
        "--fusion-threshold-mb",
        "32",
        "--timeline-filename",
        str(tmp_path / "t.json"),
    ]
    code, stdout, stderr = _run(tmp_path, *options, "--tag-output", sys.executable, script)
    assert code == 0, stderr
    if launcher.is_open_mpi():  # Hydra marks pieces of lines
        assert sorted(stdout.splitlines()) == ["[0] sum [2.0, 2.0]", "[1] sum [2.0, 2.0]"]
    assert "--fusion-threshold-mb: no effect" in stderr
    assert '"size": 2' in (tmp_path / "t.json").read_text()


def test_the_worker_that_failed_is_named_with_its_last_lines(tmp_path, script):
    code, _, stderr = _run(tmp_path, "-n", "2", script, "fail")
    assert code == 1
    if launcher.is_open_mpi():
        assert "\nmykvrun: rank 1" in stderr and "\0" not in stderr
    end = stderr.partition("mykvrun: rank 1")[2]
    assert "failed first, and the job ended with status 1" in end
    if launcher.is_open_mpi():
        # What the worker has written to stdout may come later: the launcher passes on two streams.
        assert "  ValueError: this worker is broken" in end.splitlines()[-2:]
        assert "MPI_ABORT" not in end


def test_the_death_of_a_worker_of_an_elastic_job_is_not_taken_for_the_failure_of_another(capsys):
    """Ranks of new workers begin at 0 again."""
    output = Output(tagged=True, prefix=False, is_elastic=True)
    output.take(b"[1,0]<stdout>: still here\n")
    output.take(b"prterun noticed that process rank 0 with PID 77 on node n1 exited on\n")
    main._say_who_failed(137, output)
    said = capsys.readouterr().err
    assert "a worker on n1 died, and the job ended with signal 9. The others may have finished" in said
    assert "still here" not in said


@pytest.mark.parametrize("at_once", [False, True])
def test_the_nul_of_open_mpi_is_dropped_wherever_it_falls(at_once):
    """It ends the notice of an abort, and comes alone or before what the worker writes next."""
    output = Output(tagged=True, prefix=False)
    hyphens = b"-" * 74
    lines = [hyphens, b"MPI_ABORT was invoked on rank 1", hyphens, *([] if at_once else [b"\0"])]
    lines += [(b"\0" if at_once else b"") + b"Traceback", b"ValueError: broken"]
    shown = b"".join(output.take(b"[1,1]<stderr>: " + line + b"\n") for line in lines)
    assert b"\0" not in shown and shown.endswith(hyphens + b"\nTraceback\nValueError: broken\n")
    assert output.last_lines(1) == ["Traceback", "ValueError: broken"]


def test_sigterm_ends_all_workers(tmp_path, script):
    process = _start(tmp_path, "-n", "2", script, "wait")
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("sum")
        workers = _children_of(process.pid)
        assert len(workers) >= 3
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode != 0
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in workers):
            assert time.monotonic() < deadline, "workers live on"
            time.sleep(0.1)
    finally:
        process.kill()


def _children_of(pid):
    """A process's children and theirs."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        children = [int(word) for word in file.read().split()]
    return [one for child in children for one in (child, *_children_of(child))]


def test_a_dry_run_prints_a_command_that_a_shell_takes(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--dry-run", script)
    assert code == 0, stderr
    again = subprocess.run(
        stdout, shell=True, env=launcher.environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert again.stdout.count("sum [2.0, 2.0]") == 2, again.stderr


@pytest.mark.parametrize(("options", "value"), [(["--report"], "1"), (["--report-every", "20"], "20")])
def test_a_report_is_asked_for(tmp_path, script, options, value):
    code, stdout, stderr = _run(tmp_path, "-n", "2", *options, "--dry-run", script)
    assert code == 0 and f"MYKV_REPORT={value} " in stdout, stderr


def test_within_slurm_srun_starts_the_job(tmp_path, script):
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $@ with $OMP_NUM_THREADS threads"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {**launcher.environment(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    del env["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "mykvrun", "-n", "4", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plugin = "pmix" if launcher.is_open_mpi() else "pmi2"
    assert done.stdout.startswith(f"srun --mpi={plugin} --kill-on-bad-exit=1 --ntasks=4 --cpus-per-task=3")
    assert done.stdout.rstrip().endswith(f"{sys.executable} {script} with 3 threads")


def test_a_launcher_that_cannot_be_started_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("MPIRUN", "/nowhere/mpirun")
    assert main.main(["-n", "2", "python", "x.py"]) == 2
    assert capsys.readouterr().err == "mykvrun: /nowhere/mpirun cannot be started: No such file or directory.\n"


def test_a_mistyped_program_is_one_sentence(tmp_path, monkeypatch, capsys):
    said = "The program {!r} was not found, or may not be executed. No worker has been started."
    monkeypatch.setattr(
        main, "find_mpi", lambda: _OPEN_MPI._replace(mpirun=shutil.which("true"))
    )  # a launcher that starts nothing
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no program")
    (tmp_path / "train.sh").write_text("#!/bin/sh")
    (tmp_path / "train.sh").chmod(0o755)
    for wrong in ("pyhton", "./pyhton", "notes.txt", str(tmp_path)):
        assert main.main(["-n", "1", wrong, "x.py"]) == 2
        assert capsys.readouterr().err == f"mykvrun: {said.format(wrong)}\n"
    assert main.main(["-n", "1", "--dry-run", "pyhton", "x.py"]) == 0
    # Programs of this host, and those that the launcher may find elsewhere.
    for options in (["./train.sh"], ["train.sh"], ["train.py"], ["-x", f"PATH={tmp_path}", "train.sh"]):
        assert main.main(["-n", "1", *options]) == 0
    for options in (["-H", "node1:1"], ["--mpi-args=--wdir /elsewhere"]):
        assert main.main(["-n", "1", *options, "pyhton"]) == 0
    assert "not found" not in capsys.readouterr().err


@pytest.mark.parametrize(("mpi", "tags"), [(_OPEN_MPI, True), (_MPICH, False), (_INTEL, False)])
def test_ranks_are_marked_only_where_whole_lines_are(mpi, tags, monkeypatch):
    """With PYTHONUNBUFFERED=1, print("a", 1) writes pieces, and Hydra marks each of them."""
    started = []
    monkeypatch.setattr(main, "find_mpi", lambda: mpi)
    monkeypatch.setattr(main, "_start", lambda command, output, mark: started.append((command, output)) or 0)
    assert main.main(["-n", "1", "true"]) == 0
    ((command, output),) = started
    assert output.is_tagged == tags
    assert ("tag" in command.arguments, "-prepend-rank" in command.arguments) == (tags, False)


def test_workers_that_train_alone_without_mykv_are_told(tmp_path):
    (tmp_path / "alone.py").write_text("print('trained')")
    code, stdout, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "alone.py"))
    assert code == 0 and stdout.splitlines() == ["trained"] * 2
    assert "no worker has called init() of mykv" in stderr
    (tmp_path / "together.py").write_text("import mykv; mykv.init(); print(mykv.size())")
    code, stdout, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "together.py"))
    assert code == 0 and stdout.splitlines() == ["2"] * 2
    assert "no worker" not in stderr


def test_hosts_and_hostfiles(tmp_path):
    assert hosts.parse_hosts("a:4,b") == [Host("a", 4), Host("b", 1)]
    for wrong in ("a:", "a:0", "a:x", ",", "a:2,a:2", "a b:3"):
        with pytest.raises(LaunchError):
            hosts.parse_hosts(wrong)
    file = tmp_path / "hosts"
    file.write_text("# three hosts\nnode1 slots=4\n\nnode2:2  # small\nnode3\nnode4.cluster  slots = 2 max-slots=8\n")
    assert hosts.read_hostfile(str(file)) == [*map(Host, ("node1", "node2", "node3", "node4.cluster"), (4, 2, 1, 2))]
    for wrong in ("", "a slots=x", "a slots=0", "no/de", "a slot=4", "a slots=4 b", "a slots", "a:0", "a b", "a\na:2"):
        file.write_text(wrong)
        with pytest.raises(LaunchError, match="hostfile"):
            hosts.read_hostfile(str(file))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.read_hostfile(str(tmp_path / "none"))


def _words(job, mpi=_OPEN_MPI):
    return " ".join(commands.mpirun_command(job, mpi).arguments)


def test_workers_share_the_cores_or_are_not_bound():
    assert "--map-by slot:PE=2" in _words(Job(["a"], 2))
    assert commands.mpirun_command(Job(["a"], 2), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "2"}
    assert "--oversubscribe --bind-to none" in _words(Job(["a"], 5))
    assert commands.mpirun_command(Job(["a"], 5), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "1"}
    assert "--bind-to none" in _words(Job(["a"], hosts=[Host("other", 2)]))
    assert "--map-by slot:PE=3" in _words(Job(["a"], hosts=[Host("other", 1)], cores_per_worker=3))
    assert "-bind-to core:2" in _words(Job(["a"], 2), _MPICH)
    assert commands.mpirun_command(Job(["a"], 2), _INTEL).variables["I_MPI_PIN_DOMAIN"] == "2"
    assert commands.mpirun_command(Job(["a"], 9), _INTEL).variables["I_MPI_PIN"] == "0"


def test_threads_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert commands.mpirun_command(Job(["a"], 2), _OPEN_MPI).variables == {}
    assert commands.mpirun_command(Job(["a"], 2, threads=3), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "3"}


def test_variables_reach_other_hosts(monkeypatch):
    monkeypatch.setenv("MYKV_STALL_WARN_S", "5")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    job = Job(["a"], hosts=[Host("n1", 2), Host("n2", 2)], variables={"MINE": "1", "HOME": None})
    words = _words(job)
    for name in ("MYKV_STALL_WARN_S", "PYTHONPATH", "MINE", "HOME", "OMP_NUM_THREADS"):
        assert f"-x {name} " in words
    assert commands.mpirun_command(job, _OPEN_MPI).variables["MINE"] == "1"
    assert "-hosts n1:2,n2:2" in _words(job, _MPICH) and "MYKV_STALL_WARN_S" in _words(job, _MPICH)
    assert "-hosts n1,n2 -ppn 2" in _words(job, _INTEL)


def test_elastic_root_and_ssh(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = _words(Job(["a"], hosts=[Host("n1", 2)], elastic=True, ssh_port=2222, interfaces="eth1"))
    for wanted in ("--allow-run-as-root", "--with-ft ulfm", "plm_ssh_agent ssh -p 2222", "btl_tcp_if_include eth1"):
        assert wanted in words


@pytest.mark.parametrize(
    "job, mpi, said",
    [
        (Job(["a"], 2, elastic=True), _MPICH, "--elastic needs Open MPI 5"),
        (Job(["a"], 2, elastic=True), _OPEN_MPI._replace(major=4), "this is Open MPI 4"),
        (Job(["a"], hosts=[Host("a", 1), Host("b", 2)]), _INTEL, "the same number of workers"),
        (Job(["a"], 2, ssh_port=3), _MPICH, "ssh/config"),
        (Job(["a"]), _OPEN_MPI, "number of workers is missing"),
    ],
)
def test_what_an_mpi_cannot_do_is_one_sentence(job, mpi, said):
    with pytest.raises(LaunchError, match=said):
        commands.mpirun_command(job, mpi)


@pytest.mark.parametrize(
    "line, said",
    [
        ("-n 3 -H a:2 python x", "do not fit"),
        ("--min-np 2 -np 4 python x", "Use --elastic"),
        ("-H a:2 --hostfile f python x", "Give one of them"),
    ],
)
def test_options_that_do_not_go_together(line, said, capsys):
    assert main.main(line.split()) == 2
    assert said in capsys.readouterr().err


def test_options_after_the_program_are_the_programs():
    request = parse(["-n", "2", "python", "train.py", "-n", "9", "--epochs", "3"])
    assert request.job.program == ["python", "train.py", "-n", "9", "--epochs", "3"]
    assert request.job.workers == 2


_OPEN_MPI_SIGNAL = """\
[1,0]<stdout>: a
[1,1]<stderr>: bar 1%\rbar 2%
[1,1]<stderr>: the end
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 2738 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
_OPEN_MPI_STATUS = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-2072@1,11]
   Exit code:    3
"""


@pytest.mark.parametrize(
    "text, failed",
    [
        (_OPEN_MPI_SIGNAL, FailedWorker(1, "vm")),
        (_OPEN_MPI_STATUS, FailedWorker(11, "")),
        ("[1] Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort", FailedWorker(1, "")),
        ("=   RANK 3 PID 123 RUNNING AT node2\n", FailedWorker(3, "node2")),
        ("srun: error: node7: task 5: Exited with exit code 1\n", FailedWorker(5, "node7")),
        ("all is well\n", None),
    ],
)
def test_what_launchers_say_of_the_failed_worker(text, failed):
    output = Output(tagged=text.startswith("[1,"), prefix=True)
    shown = b"".join(output.take(line + b"\n") for line in text.encode().split(b"\n"))
    assert output.failed == failed
    if text is _OPEN_MPI_SIGNAL:
        assert output.last_lines(1) == ["bar 2%", "the end"]
        assert shown.startswith(b"[0] a\n[1] bar 1%\rbar 2%\n[1] the end\n----")

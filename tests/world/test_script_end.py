"""A script that ends before init(), in it, after shutdown() or with a status: no worker waits, all learn why.

No MXNet: the folder `world` of the package alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import time

import pytest
from harness.marks import long
from harness.world_alone import HEAD
from kvstore_plugin.world import script_end

from mykvrun import worker_notes

_LIMIT = 15.0  # seconds from the end of rank 1 to the end of the job

_HEAD = f"""{HEAD}
def end(how):
    if rank == 1:
        print("now", flush=True)
        how()

def fail():
    raise KeyError("label")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def exits_0(): sys.exit(0)
def exits_3(): sys.exit(3)
def ends_at_once(): os._exit(0)
"""


@pytest.fixture
def job(mpirun):
    """Run a body after `_HEAD` in so many ranks; the result, which came in time after rank 1 has said "now"."""

    def run(body: str, ranks: int = 3, first: str = ""):
        running = mpirun.start(ranks, first + _HEAD + textwrap.dedent(body))
        running.wait_for("now", timeout=120)
        begin = time.monotonic()
        result = running.wait(timeout=180)
        assert time.monotonic() - begin < _LIMIT, result.text
        assert running.members() == []
        return result

    return run


@pytest.mark.parametrize("how", ["fail", "exits_0", long("exits_3"), long("interrupt")])
def test_an_end_between_shutdown_and_init_ends_the_job_and_is_named(job, how):
    result = job(f"mykv.init(); allreduce('x'); mykv.shutdown(); end({how}); mykv.init()")
    assert result.code != 0 and "rank 1" in result.stderr, result.text
    waits = "init() waits for rank 1, which has ended"
    said = {"fail": "KeyError: 'label'", "interrupt": "KeyboardInterrupt"}.get(how, waits)
    assert said in result.stderr, result.text


@pytest.mark.parametrize("how", ["fail", long("exits_0"), long("interrupt")])
def test_an_end_before_init_after_the_start_of_mpi_ends_the_job_and_is_named(job, how):
    result = job(f"end({how}); mykv.init()", first="from mpi4py import MPI")
    assert result.code != 0 and "rank 1" in result.stderr, result.text


@pytest.mark.parametrize("how", ["ends_at_once", long("exits_0"), long("exits_3")])
@pytest.mark.parametrize("pause", [0, long(3)])
def test_an_end_before_init_ends_the_job_and_is_named(job, how, pause):
    """With the pause, the others come to init() when rank 1 has ended; the launcher says nothing then."""
    result = job(f"end({how}); time.sleep({pause}); mykv.init()")
    assert result.code != 0, result.text
    assert "rank 1" in result.stderr or how == "exits_3", result.text  # of a status, mpirun names a process


_LATE = """
def late(*_):
    raise EOFError("late")

if rank == 1:
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    print("now", flush=True)
else:
    time.sleep(2.5)
"""


def test_an_exception_of_a_signal_handler_in_init_ends_the_job(job):
    result = job(_LATE + "mykv.init(); allreduce('x')")
    assert result.code != 0 and "EOFError: late" in result.stderr, result.text


def test_an_init_that_was_broken_off_says_so_and_ends_the_job_even_if_the_script_catches_the_exception(job):
    body = """
    try:
        mykv.init()
    except EOFError:
        pass
    try:
        mykv.init()
    except RuntimeError as error:
        print(error, flush=True)
    """
    result = job(_LATE + textwrap.dedent(body))
    assert result.code != 0 and "init() was interrupted by EOFError on this rank" in result.stdout, result.text
    assert "mykv on rank 1: init() was interrupted by EOFError" in result.stderr, result.text


@pytest.mark.parametrize("call", [1, long(3), 7])
def test_a_call_of_mpi_that_fails_in_init_on_one_rank_ends_the_job(job, call):
    """The other ranks know nothing of it, and wait in init()."""
    body = f"""
    from compiled import testing
    from mpi4py import MPI
    if rank == 1:
        print("now", flush=True)
        testing.plant("mpi", {call})
    for _ in range(2):
        try:
            mykv.init()
        except RuntimeError as error:
            print("rank", rank, error, flush=True)
    """
    result = job(body, ranks=2)
    assert result.code != 0 and "rank 1 MPI failed in " in result.stdout, result.text
    assert "rank 1 init() was interrupted by Error on this rank" in result.stdout, result.text
    assert "mykv on rank 1: init() was interrupted by Error" in result.stderr, result.text


def test_a_worker_that_goes_on_alone_after_shutdown_is_no_failure(job):
    result = job(
        """
        mykv.init(); allreduce('x'); mykv.shutdown()
        end(exits_0)
        time.sleep(9 if rank == 2 else 4)  # rank 0 waits in init() for long: not for rank 1
        if rank != 1:
            mykv.init([0, 2])
            allreduce('x')
            print("both", mykv.size(), flush=True)
        """
    )
    assert result.code == 0 and result.stdout.count("both 2") == 2, result.text


@pytest.mark.parametrize(
    "how, said",
    [
        ("exits_3", "rank 1 ended with sys.exit(3)"),
        ("fail", "rank 1 ended with KeyError: 'label'"),
        long("interrupt", "rank 1 ended with KeyboardInterrupt"),
        long("lambda: sys.exit('no data')", "rank 1 ended with sys.exit('no data')"),
        ("catches", "rank 1 has left: its script has ended"),
    ],
)
def test_the_others_learn_how_a_worker_has_ended(job, how, said):
    body = """
    def catches():
        try:
            sys.exit(3)
        except SystemExit:
            pass
        sys.exit()

    mykv.init()
    if rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of mpirun, which ends the job
        try:
            allreduce("never")
        except RuntimeError as error:
            os.write(1, f"got: {error}\\n".encode())
        os._exit(0)
    time.sleep(0.5)
    """
    result = job(textwrap.dedent(body) + f"end({how})\n", ranks=2)
    assert f"got: never: {said}" in result.stdout, result.text


@pytest.mark.parametrize(
    "how, status, said",
    [
        ("exits_3", 3, "sys.exit(3)"),
        long("lambda: sys.exit('no data')", 1, "sys.exit('no data')"),
        long("fail", 1, "KeyError: 'label'"),
        long("interrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_mykvrun_names_the_worker_that_ended_first_and_returns_its_status(tmp_path, how, status, said):
    script = tmp_path / "script.py"
    script.write_text(f"{_HEAD}\nmykv.init(); end({how}); allreduce('x')")
    command = [sys.executable, "-m", "mykvrun", "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == status, done.stderr
    assert re.search(rf"mykvrun: rank 1( on \S+)? ended with {re.escape(said)}", done.stderr), done.stderr


# What rank 1 does, the status of mykvrun, and how it names rank 1.
_DEATHS = [
    ("os._exit(3)", 3, r"rank 1( on \S+)? failed first, and the job ended with status 3"),
    ("die(signal.SIGTERM)", 143, r"rank 1( on \S+)? failed first, and the job ended with signal 15 \(SIGTERM\)"),
    ("die(signal.SIGHUP)", 129, r"rank 1( on \S+)? failed first, and the job ended with signal 1 \(SIGHUP\)"),
    ("die(signal.SIGINT)", 130, r"rank 1( on \S+)? ended with KeyboardInterrupt"),
    ("thread(sys.exit)", 1, r"rank 1( on \S+)? ended with sys.exit\(1\)"),
    ("thread(os._exit)", 1, r"rank 1( on \S+)? failed first, and the job ended with status 1"),
]


_HOST = "köln-東京"


def _on_a_host_with_a_name_of_another_language() -> list[str]:
    """The beginning of a command; empty where this user cannot name a host."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        return []
    program = f"""
import ctypes, os, sys
name = {_HOST!r}.encode()
ctypes.CDLL(None).sethostname(name, len(name))
os.execv(sys.argv[1], sys.argv[1:])
"""
    return ["unshare", "--uts", sys.executable, "-c", program]


def test_mykvrun_names_the_worker_that_has_died_in_any_way_and_returns_its_status(tmp_path):
    """`thread(end)`: an exception of a thread, after which the script ends itself."""
    body = """
    def die(number):
        os.kill(os.getpid(), number)
        time.sleep(60)

    def thread(end):
        failing = threading.Thread(target=lambda: {}["label"])
        failing.start()
        failing.join()
        end(1)

    mykv.init()
    allreduce("x")
    if rank == 1:
        exec(sys.argv[1])
    allreduce("y")
    """
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    command = [sys.executable, "-m", "mykvrun", "-n", "2", sys.executable, str(script)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    names_host = _on_a_host_with_a_name_of_another_language()
    first = {"die(signal.SIGTERM)": names_host}
    jobs = [
        (subprocess.Popen([*first.get(how, []), *command, how], **streams), how, *expected)
        for how, *expected in _DEATHS
    ]
    texts = [job.communicate(timeout=180)[0] for job, *_ in jobs]
    for (job, how, status, named), text in zip(jobs, texts):
        assert job.returncode == status and re.search(f"mykvrun: {named}", text), f"{how}: {job.returncode}\n{text}"
        assert "thread" not in how or "KeyError: 'label'" in text, text
        assert how not in first or not names_host or f"rank 1 on {_HOST} failed" in text, text


def test_init_in_a_child_of_a_worker_says_what_it_is_and_how_it_works_alone(mpirun, tmp_path):
    """By subprocess, or by multiprocessing's "spawn", which runs the script once more in the child."""
    child = tmp_path / "child.py"
    child.write_text(_HEAD + "mykv.init()\nprint('alone', mykv.size())")
    body = f"""
    import multiprocessing
    mykv.init()
    if rank == 1:
        spawned = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
        spawned.start()
        spawned.join(30)
        print("spawned", spawned.exitcode)
        run = lambda **more: subprocess.run(
            [sys.executable, {str(child)!r}], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, **more)
        print(run().stdout.decode())
        begins = ('PMI', 'OMPI_', 'PRTE_', 'SLURM_', 'MPI_LOCAL', 'HYDI_')
        env = {{name: value for name, value in os.environ.items() if not name.startswith(begins)}}
        print(run(env=env).stdout.decode())
    allreduce("x")
    """
    result = mpirun(2, _HEAD + textwrap.dedent(body), timeout=180)
    assert result.code == 0 and "was started by a worker" in result.stdout and "alone 1" in result.stdout, result.text
    assert "spawned 1" in result.stdout and "was started by a worker" in result.stderr, result.text


def test_a_forked_child_knows_the_numbers_of_its_rank(mpirun):
    body = """
    mykv.init()
    numbers = [f() for f in (mykv.rank, mykv.size, mykv.local_rank, mykv.local_size, mykv.cross_rank, mykv.cross_size)]
    if os.fork() == 0:
        same = numbers == [
            f() for f in (mykv.rank, mykv.size, mykv.local_rank, mykv.local_size, mykv.cross_rank, mykv.cross_size)
        ]
        os.write(1, f"child {same} {mykv.is_initialized()}\\n".encode())
        try:
            allreduce("x")
        except RuntimeError as error:
            os.write(1, f"{error}\\n".encode())
        os._exit(0)
    os.wait()
    """
    result = mpirun(2, _HEAD + textwrap.dedent(body), timeout=180)
    assert result.stdout.count("child True False") == 2, result.text
    assert result.stdout.count("does not work in a forked child") == 2, result.text


def test_the_traceback_of_the_cause_is_the_only_one(job):
    result = job("mykv.init(); end(fail); allreduce('x')")
    assert result.stderr.count("Traceback") == 1 and "KeyError: 'label'" in result.stderr, result.text


def test_an_exception_is_noted_although_it_cannot_be_shown(monkeypatch):
    """For lack of memory, or by a mistake in a hook of the program. Without the note its end looks like a death."""

    def broken(*_):
        raise MemoryError

    monkeypatch.setenv(worker_notes.VARIABLE, "")
    monkeypatch.setattr(script_end, "_failure", None)
    with pytest.raises(MemoryError):
        script_end._noting_exception(broken)(KeyError, KeyError("label"), None)
    assert script_end.failure().text == "ended with KeyError: 'label'"

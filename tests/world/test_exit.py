"""A rank that ends, in any way and in the middle of a step: the job ends within 10 s, and says why once."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from harness.marks import long
from harness.processes import send_signal

_LIMIT = 10.0  # seconds from the failure to the end of the job

_HEAD = """
import os, signal, sys, threading, time
import kvstore_plugin as mykv
import mxnet as mx
from mxnet import autograd
if mx.__version__.startswith("2."):
    mx.npx.set_np()
make = mx.np if mx.__version__.startswith("2.") else mx.nd
store = mx.kv.create("mykv")
rank, size = store.rank, store.size

def sum_of(key, shape=(1000,)):
    array = make.ones(shape)
    store.pushpull(key, array)
    return array

assert (sum_of("warm").asnumpy() == size).all()

def step_of(net, trainer):
    with autograd.record():
        loss = (net(make.ones((4, 6))) ** 2).sum()
    loss.backward()
    trainer.step(4)

def training():
    net = mx.gluon.nn.Dense(3)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
    step_of(net, trainer)
    return net, trainer
"""

# MPI's and mpirun's own notes, and MXNet's lines about its memory, are no output of ours.
_NOTES = ("storage.cc", "prterun", "mpirun", "MPI_ABORT", "Process name", "Exit code", "---", "PMIX", "OMPI", "PRTE")


@pytest.fixture
def job(mpirun):
    """Run a body after `_HEAD` in so many ranks; returns (result, seconds since the rank printed 'now')."""

    def run(body: str, ranks: int = 2, after=None, **options):
        running = mpirun.start(ranks, _HEAD + textwrap.dedent(body), **options)
        running.wait_for("now")
        begin = time.monotonic()
        if after:
            after(running)
        result = running.wait(timeout=90)
        seconds = time.monotonic() - begin
        assert running.members() == []
        return result, seconds

    return run


def _lines_of_ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not any(note in line for note in _NOTES)]


@pytest.mark.parametrize("failing", [long(0), 1])
def test_exception_in_the_middle_of_a_step(job, failing):
    result, seconds = job(
        f"""
        net, trainer = training()
        for turn in range(10**9):
            if rank == {failing} and turn == 5:
                print("now", flush=True)
                raise ValueError("boom")
            step_of(net, trainer)
            if turn % 3 == 0:
                mx.nd.waitall()
        """
    )
    assert seconds < _LIMIT
    assert result.code != 0, result.text
    assert "ValueError: boom" in result.stderr, result.text
    assert result.stderr.count("Traceback") == 1, result.text


def test_exception_while_the_other_waits_for_a_sum(job):
    result, seconds = job(
        """
        if rank == 1:
            time.sleep(0.5)
            print("now", flush=True)
            raise ValueError("boom")
        sum_of("never").asnumpy()
        """
    )
    assert seconds < _LIMIT
    assert result.code != 0
    assert "ValueError: boom" in result.stderr, result.text
    assert result.stderr.count("Traceback") == 1, result.text
    after = result.stderr[result.stderr.index("ValueError: boom") + len("ValueError: boom") :]
    assert "kvstore_plugin" not in after and 'File "' not in after, result.text


@pytest.mark.long
def test_exception_with_operations_of_its_own_under_way(job):
    result, seconds = job(
        """
        arrays = [sum_of(key, (1 << 20,)) for key in range(20)] if rank == 1 else []
        if rank == 1:
            print("now", flush=True)
            raise ValueError("boom")
        time.sleep(60)
        """
    )
    assert seconds < _LIMIT and result.code != 0
    assert "ValueError: boom" in result.stderr and result.stderr.count("Traceback") == 1, result.text


@pytest.mark.long
def test_exception_in_all_ranks(job):
    result, seconds = job("print('now', flush=True)\nraise ValueError('boom')")
    assert seconds < _LIMIT and result.code != 0
    assert "ValueError: boom" in result.stderr, result.text


@pytest.mark.long
def test_exception_on_two_hosts(job):
    result, seconds = job(
        """
        if rank == 3:
            print("now", flush=True)
            raise ValueError("boom")
        sum_of("never").asnumpy()
        """,
        ranks=4,
        env={"MYKV_VIRTUAL_HOSTS": "2"},
    )
    assert seconds < _LIMIT and result.code != 0
    assert "ValueError: boom" in result.stderr, result.text
    assert result.stderr.count("Traceback") == 1, result.text


def test_exception_with_a_thread_of_the_users_still_running(job):
    result, seconds = job(
        """
        if rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            print("now", flush=True)
            raise ValueError("boom")
        sum_of("never").asnumpy()
        """
    )
    assert seconds < _LIMIT and result.code != 0
    assert "ValueError: boom" in result.stderr, result.text


@pytest.mark.parametrize("code", [0, long(3)])
def test_exit_of_one_rank_is_an_error_naming_it_on_the_other(job, code):
    result, seconds = job(
        f"""
        if rank == 1:
            print("now", flush=True)
            sys.exit({code})
        try:
            sum_of("never").asnumpy()
        except mx.MXNetError as error:
            print("rank 0 got:", error, flush=True)
        """
    )
    assert seconds < _LIMIT
    if code == 0:
        assert result.code == 0, result.text
        said = "'never': rank 1 has left: its script has ended; all workers must make this call, and the same number"
        assert "rank 0 got:" in result.stdout and said in result.stdout.split("rank 0 got:")[1], result.text
    else:
        assert result.code == code, result.text


@pytest.mark.long
def test_exit_of_one_rank_in_the_middle_of_training(job):
    result, seconds = job(
        """
        net, trainer = training()
        for turn in range(10**9):
            if rank == 1 and turn == 5:
                print("now", flush=True)
                sys.exit(0)
            step_of(net, trainer)
            if turn % 3 == 0:
                mx.nd.waitall()
        """
    )
    assert seconds < _LIMIT
    assert result.code != 0, result.text
    assert "rank 1" in result.stderr and "MXNetError" in result.stderr, result.text


def test_end_without_waiting_for_results(job):
    result, seconds = job(
        """
        arrays = [sum_of(key, (1 << 20,)) for key in range(20)]
        print("now", flush=True)
        """
    )
    assert (result.code, _lines_of_ours(result.stderr)) == (0, []), result.text
    assert seconds < _LIMIT


@pytest.mark.long
def test_end_of_ranks_far_apart_in_time(job):
    result, seconds = job(
        """
        kept = sum_of("both")
        kept.wait_to_read()
        if rank == 1:
            time.sleep(3)
        print("now", flush=True)
        """
    )
    assert (result.code, _lines_of_ours(result.stderr)) == (0, []), result.text
    assert seconds < _LIMIT


@pytest.mark.long
def test_end_with_a_sum_that_the_other_never_asks_for(job):
    result, seconds = job(
        """
        if rank == 0:
            array = sum_of("never")
        print("now", flush=True)
        """
    )
    assert seconds < _LIMIT, result.text


@pytest.mark.parametrize(
    "begin, end",
    [
        long("mpi4py.rc.initialize = False", ""),
        long("mpi4py.rc.finalize = False", ""),
        ("mpi4py.rc(initialize=False, finalize=False); from mpi4py import MPI", ""),
        long("mpi4py.rc.initialize = False; from mpi4py import MPI; MPI.Init_thread()", "MPI.Finalize()"),
    ],
    ids=["initialize", "finalize", "both", "MPI of the script"],
)
def test_a_worker_saves_after_another_has_ended_whatever_mpi4py_is_told(mpirun, tmp_path, begin, end):
    """Open MPI ends all processes of a job when one of them exits that has initialized MPI and not finalized it."""
    result = mpirun(
        2,
        f"""
        import atexit, os, sys, time
        import mpi4py
        {begin}
        import kvstore_plugin as mykv
        import mxnet as mx
        mykv.init()
        assert (mykv.allreduce(mx.nd.ones(3), average=False).asnumpy() == 2).all()
        folder = sys.argv[1]
        if mykv.rank() == 0:
            open(os.path.join(folder, "first"), "w").close()
        else:
            while not os.path.exists(os.path.join(folder, "first")):
                time.sleep(0.01)
            time.sleep(3)
            open(os.path.join(folder, "saved"), "w").close()
        {end}
        """,
        str(tmp_path),
    )
    assert result.code == 0, result.text
    assert (tmp_path / "saved").exists(), result.text


@pytest.mark.long
def test_end_after_shutdown(job):
    result, seconds = job("print('now', flush=True)\nmykv.shutdown()")
    assert (result.code, _lines_of_ours(result.stderr)) == (0, []), result.text
    assert seconds < _LIMIT


def test_end_in_a_single_process(job):
    result, seconds = job("sum_of('last')\nprint('now', flush=True)", ranks=0)
    (line,) = _lines_of_ours(result.stderr)
    assert result.code == 0 and "No launcher started this program" in line, result.text
    assert seconds < _LIMIT


@pytest.mark.long
def test_exception_in_a_single_process(job):
    result, seconds = job("print('now', flush=True)\nraise ValueError('boom')", ranks=0)
    assert seconds < _LIMIT and result.code == 1
    assert result.stderr.rstrip().endswith("ValueError: boom"), result.text


def test_exit_handler_of_the_user_may_use_the_store(job):
    result, seconds = job(
        """
        import atexit
        atexit.register(lambda: print("last sum", int(sum_of("at exit").asnumpy()[0]), flush=True))
        print("now", flush=True)
        """
    )
    assert result.code == 0 and result.stdout.count("last sum 2") == 2, result.text
    assert seconds < _LIMIT


def test_handled_exception_does_not_end_the_job(job):
    result, _ = job(
        """
        if rank == 1:
            try:
                raise ValueError("boom")
            except ValueError:
                sys.excepthook(*sys.exc_info())
            time.sleep(1)
        print("now", flush=True)
        print("sum", int(sum_of("after").asnumpy()[0]), flush=True)
        time.sleep(6)
        print("end", flush=True)
        """
    )
    assert result.code == 0 and result.stdout.count("sum 2") == 2 and result.stdout.count("end") == 2, result.text


_WAITING = """
net, trainer = training()
print("now", flush=True)
for turn in range(10**9):
    if rank == 1:
        time.sleep(0.2)
    step_of(net, trainer)
    if turn % 3 == 0:
        mx.nd.waitall()
"""


def test_ctrl_c(job):
    result, seconds = job(_WAITING, after=lambda running: running.send_signal(signal.SIGINT))
    assert seconds < _LIMIT
    assert result.code != 0, result.text


def _ranks_of(running) -> list[int]:
    """Ids of the Python processes of a launch, mpirun left out."""
    return [
        pid
        for pid in running.members()
        if b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != running.pid
    ]


@pytest.mark.parametrize("number", [long(signal.SIGINT), long(signal.SIGTERM), signal.SIGKILL])
def test_signal_to_one_rank(job, number):
    result, seconds = job(_WAITING, after=lambda running: send_signal(_ranks_of(running)[-1], number))
    assert seconds < _LIMIT
    assert result.code != 0, result.text
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in result.stderr, result.text
        assert result.stderr.count("Traceback") == 1, result.text


def test_ctrl_c_while_waiting_for_the_others_in_init_of_a_trainer(job):
    body = """
    if rank == 0:
        print("now", os.getpid(), flush=True)
        net = mx.gluon.nn.Dense(3, in_units=6)
        net.initialize()
        mykv.DistributedTrainer(net.collect_params(), "sgd")  # waits for rank 1, which never comes
    time.sleep(600)
    """

    def interrupt(running):
        time.sleep(1)
        send_signal(int(running.read()[0].split("now ")[1].split()[0]), signal.SIGINT)

    result, seconds = job(body, after=interrupt)
    assert seconds < _LIMIT and result.code != 0
    assert "KeyboardInterrupt" in result.stderr, result.text


def test_death_without_the_exit_of_python(job):
    result, seconds = job(
        """
        if rank == 1:
            print("now", flush=True)
            os._exit(5)
        sum_of("never").asnumpy()
        """
    )
    assert seconds < _LIMIT
    assert result.code != 0, result.text


_FORKING = """
net, trainer = training()

def status_of(how):
    sums = [sum_of(f"{how.__name__} {number}", (100_000,)) for number in range(4)]  # under way in the parent
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        how()
        sys.exit(0)
    for _ in range(2000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hangs"
    assert all((one.asnumpy() == size).all() for one in sums)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else status

def exits_0(): sys.exit()
def exits_3(): sys.exit(3)
def exits_with_a_text(): sys.exit("bye")
def raises(): raise ValueError("planted")
def ends_at_once(): os._exit(3)
def uses_the_store():
    try:
        sum_of("child")
    except RuntimeError:
        sys.exit(3)

ways = (exits_0, exits_3, exits_with_a_text, raises, ends_at_once, uses_the_store)
assert [status_of(how) for how in ways] == [0, 3, 1, 1, 3, 3]
import subprocess
assert subprocess.run([sys.executable, "-c", "import sys; sys.exit(3)"]).returncode == 3
step_of(net, trainer)
mx.nd.waitall()
print("done", flush=True)
"""


@pytest.mark.parametrize("first", [long(""), "from mpi4py import MPI"])
def test_forked_children_end_as_they_like_and_the_parent_goes_on(mpirun, first):
    """Also where the script itself has imported mpi4py, which then finalizes MPI, in the child too."""
    result = mpirun(2, first + _HEAD + _FORKING, timeout=90)
    assert result.code == 0 and result.stdout.count("done") == 2, result.text


_NO_MPI_IN_FORKS = """
#include <mpi.h>
#include <pthread.h>
#include <unistd.h>

static int forked;
static void note(void) { forked = 1; }
__attribute__((constructor)) static void begin(void) { pthread_atfork(0, 0, note); }
int MPI_Comm_free(MPI_Comm* comm) {
  if (forked) _exit(66);
  return PMPI_Comm_free(comm);
}
"""


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_forked_child_that_drops_a_process_set_leaves_mpi_alone(mpirun, tmp_path, hosts):
    """Its lock may be held by a thread that the child does not have."""
    source, library = tmp_path / "watch.c", tmp_path / "watch.so"
    source.write_text(_NO_MPI_IN_FORKS)
    compiler = os.environ.get("MPICC", "mpicc")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    script = f"""
    import gc, os
    import numpy as np
    from mpi4py import MPI
    from compiled import core

    core.init(MPI.COMM_WORLD.py2f(), {{"virtual_hosts": {hosts}}})
    group = core.make_group(MPI.COMM_WORLD.py2f(), [0, 1], {{"virtual_hosts": {hosts}}})
    array = np.ones(10)
    assert group.submit_allreduce("sum", [array], [array]).wait(30)
    child = os.fork()
    if child == 0:
        del group
        gc.collect()
        os._exit(0)
    print("child", os.waitpid(child, 0)[1], flush=True)
    assert group.submit_allreduce("sum", [array], [array]).wait(30)
    core.shutdown()
    """
    result = mpirun(2, textwrap.dedent(script), timeout=60, env={"LD_PRELOAD": str(library)})
    assert result.code == 0 and result.stdout.count("child 0") == 2, result.text


def test_exception_in_a_thread_ends_that_thread_only(job):
    result, _ = job(
        """
        if rank == 1:
            thread = threading.Thread(target=lambda: 1 // 0)
            thread.start()
            thread.join()
        print("sum", int(sum_of("after").asnumpy()[0]), flush=True)
        print("now", flush=True)
        """
    )
    assert result.code == 0 and result.stdout.count("sum 2") == 2 and "ZeroDivisionError" in result.stderr, result.text


def test_shutdown_with_operations_that_the_other_never_asks_for(job):
    """After MYKV_EXIT_WAIT_S it gives them up and says so, and the process ends as any other.

    Twice, and it is the same thread that waits.
    """
    result, seconds = job(
        """
        for turn in range(2):
            mykv.init()
            array = sum_of(f"only {rank} {turn}", (100_000,))
            if turn == 1:
                print("now", flush=True)
            mykv.shutdown()
            assert [one.name for one in threading.enumerate()].count("kvstore_plugin-drain") == 1
        """,
        env={"MYKV_EXIT_WAIT_S": "1"},
    )
    assert seconds < _LIMIT
    assert result.code == 0, result.text
    assert result.stderr.count("it called shutdown()") == 4, result.text
    for one in ("only 0 0", "only 1 0", "only 0 1", "only 1 1"):
        assert f"'{one}'" in result.stderr, result.text


def test_shutdown_tells_of_an_operation_that_failed_before_it_unless_its_error_was_raised(job):
    """Rank 1 leaves, which ends an operation of rank 0. Rank 0 shuts down later; in the second round it has read it."""
    result, _ = job(
        """
        for turn in range(2):
            mykv.init()
            mykv.barrier()
            if rank == 0:
                array = sum_of(f"only {turn}", (100_000,))
                time.sleep(2)
                if turn == 1:
                    try:
                        array.asnumpy()
                    except Exception as error:
                        print("read", flush=True)
            mykv.shutdown()
        print("now", flush=True)
        """,
        env={"MYKV_EXIT_WAIT_S": "1"},
    )
    assert result.code == 0 and result.stdout.count("read") == 1, result.text
    assert result.stderr.count("shutdown() has dropped their errors") == 1 and "'only 0'" in result.stderr, result.text


def test_end_where_python_starts_no_thread_any_more(job):
    """As Python 3.12 does while it exits. Both ranks have operations that the other never asks for."""
    result, seconds = job(
        """
        import atexit

        def refuse(*_):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        atexit.register(lambda: setattr(threading.Thread, "start", refuse))  # runs before the handlers of mykv
        array = sum_of(f"only {rank}", (100_000,))
        print("now", flush=True)
        """,
        env={"MYKV_EXIT_WAIT_S": "1"},
    )
    assert seconds < _LIMIT
    assert (result.code, _lines_of_ours(result.stderr)) == (0, []), result.text


def test_segmentation_fault_while_mxnets_engine_is_waited_for(job):
    """MXNet 1.9 would make exit(-1) of it, in the signal's handler, and wait for its engine there."""
    result, seconds = job(
        """
        if rank == 0:
            time.sleep(60)  # the other one waits for it
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGSEGV)).start()
        print("now", flush=True)
        sum_of("waits").wait_to_read()
        """
    )
    assert seconds < _LIMIT, result.text
    assert "rank 1 " in result.stderr and "signal 11" in result.stderr, result.text

"""A rank that is stopped, or dies, while it keeps its host's table locked; and messages whose sender was stopped.

No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time

import pytest
from harness import launcher

_BEGIN = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from compiled import core, testing

hosts, who, warn, abort = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": hosts})
rank, size = core.rank(), core.size()

def say(*words):
    os.write(1, (" ".join(str(one).replace("\\n", " ") for one in words) + "\\n").encode())

def watch():
    while True:
        for over, text in core.next_stalls(warn, abort) or []:
            say("watch", rank, text)

core.begin_stall_watch()
threading.Thread(target=watch, daemon=True).start()

class Sum:
    # One of each kind: small, in parts, in shared memory.
    def __init__(self, name, kind):
        self.kind = kind
        if kind == "bucket":
            self.buffer = core.allocate(4 << 20)
            self.array = np.frombuffer(self.buffer, "float32")
        else:
            self.array = np.empty(10 if kind == "small" else 1 << 19, "float32")
        self.array[:] = rank + 1
        if kind == "bucket":
            self.work = core.submit_bucket(name, self.buffer, 0, self.array.size, "float32")
        else:
            self.work = core.submit_allreduce(name, [self.array], [self.array])

    def check(self):
        assert self.work.wait(40), "no end"
        assert (self.array == size * (size + 1) / 2).all()

KINDS = ("small", "parts", "bucket")
for kind in KINDS:
    Sum("first " + kind, kind).check()
MPI.COMM_WORLD.Barrier()  # a rank whose own sums are done may keep the lock that another needs to end its sums

def run(kind, name):
    try:
        Sum(name, kind).check()
        say("sum", rank, kind)
    except core.Error as error:
        say("error", rank, kind, error)

def start(name):
    threads = [threading.Thread(target=run, args=(kind, name + " " + kind)) for kind in KINDS]
    for one in threads:
        one.start()
    return threads
"""

_STOP = """
if rank != who:
    time.sleep(0.2)
    early = start("early")  # these wait for the rank while it is stopped, or for the lock
    say("asked", rank, core.waiting_for_this(["late"]))  # ends without an error, though the table cannot be read
    deadline = time.monotonic() + 60
    while not os.path.exists(sys.argv[5]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for one in early:
        one.join()
else:
    say("now", os.getpid())
    try:
        testing.signal_under_lock(core.world(), signal.SIGSTOP)
    except core.Error as error:
        say("error", rank, "lock", error)
    for one in start("early"):
        one.join()
run("small", "late")
say("end", rank)
core.shutdown()
"""

_NAMED = "kept locked by rank {}, which does not respond (is it stopped?)"


def _errors(text: str) -> dict[tuple[int, str], str]:
    return {(int(rank), kind): said for rank, kind, said in re.findall(r"^error (\d) (\w+) (.*)$", text, re.MULTILINE)}


def _until(running, holds, seconds: float = 40.0) -> str:
    deadline = time.monotonic() + seconds
    while not holds(running.read()[0]):
        assert time.monotonic() < deadline, "\n--- stderr\n".join(running.read())
        time.sleep(0.02)
    return running.read()[0]


def _start_stopped(mpirun, tmp_path, ranks: int, hosts: int, who: int, warn: float, abort: float):
    flag = tmp_path / "flag"
    running = mpirun.start(ranks, _BEGIN + _STOP, str(hosts), str(who), str(warn), str(abort), str(flag))
    running.wait_for("now ")
    return running, int(re.search(r"now (\d+)", running.read()[0]).group(1)), flag


def test_a_rank_that_stopped_with_the_table_locked_is_named_and_goes_on(mpirun, tmp_path):
    running, pid, flag = _start_stopped(mpirun, tmp_path, 3, 1, 1, 0.5, 0)
    text = _until(running, lambda out: _NAMED.format(1) in out)
    assert not re.search(r"^watch [12]", text, re.MULTILINE), text  # the lowest of the others speaks
    flag.touch()
    os.kill(pid, signal.SIGCONT)
    result = running.wait(120)
    assert result.code == 0 and not _errors(result.stdout), result.text
    assert len(re.findall(r"^asked \d \[\[\]\]$", result.stdout, re.MULTILINE)) == 2, result.text
    assert len(re.findall(r"^sum \d \w+$", result.stdout, re.MULTILINE)) == 12, result.text


@pytest.mark.parametrize("ranks, hosts, who", [(3, 1, 0), (4, 2, 1)])
def test_after_the_second_limit_all_give_the_table_up_also_the_rank_that_wakes(mpirun, tmp_path, ranks, hosts, who):
    running, pid, flag = _start_stopped(mpirun, tmp_path, ranks, hosts, who, 0.3, 1)
    others = {(rank, kind) for rank in range(ranks) if rank != who for kind in ("small", "parts", "bucket")}
    errors = _errors(_until(running, lambda out: set(_errors(out)) >= others))
    neighbours = [rank for rank in range(ranks) if rank != who and rank * hosts // ranks == who * hosts // ranks]
    for rank in neighbours:
        for kind in ("small", "parts", "bucket"):
            assert re.search(r"given up after .*" + re.escape(_NAMED.format(who)), errors[rank, kind]), errors
            assert "MYKV_STALL_ABORT_S is 1.0 s" in errors[rank, kind], errors
    flag.touch()
    os.kill(pid, signal.SIGCONT)
    result = running.wait(120)
    assert result.code == 0 and "sum " not in result.stdout, result.text
    assert set(re.findall(r"^end (\d)$", result.stdout, re.MULTILINE)) == {str(rank) for rank in range(ranks)}
    late = _errors(result.stdout)
    for kind in ("lock", "small", "parts", "bucket"):
        assert _NAMED.format(who) in late[who, kind], result.text


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")
def test_a_rank_that_dies_with_the_table_locked_is_named(mpirun):
    """The others sleep, and notice it themselves, whether they ask for anything more or not."""
    body = """
    if rank != who:
        for one in start("early"):
            one.join()
        run("small", "late")
        say("end", rank)
    else:
        time.sleep(1)
        testing.signal_under_lock(core.world(), signal.SIGKILL)
    time.sleep(60)  # mpirun would end the others
    """
    who = 2
    running = mpirun.start(3, _BEGIN + textwrap.dedent(body), "1", str(who), "0", "0", options=("--with-ft", "ulfm"))
    others = [rank for rank in range(3) if rank != who]
    text = _until(running, lambda out: all(f"end {rank}" in out for rank in others))
    running.kill()
    errors = _errors(text)
    assert len(errors) == 6 and "sum " not in text, text
    for said in errors.values():
        assert f"rank {who} died while it changed mykv's shared table" in said, text


def test_who_gives_an_operation_up_does_not_wait_for_a_stopped_rank(mpirun):
    """The stall watch does, which must stay able to end the wait of others."""
    body = """
    if rank != who:
        early = Sum("early", "small")
        MPI.COMM_WORLD.Barrier()
        time.sleep(0.5)
        try:
            core.give_up("early", "a reason")
        except core.Error as error:
            say("error", rank, "small", error)
    else:
        MPI.COMM_WORLD.Barrier()
        say("now", os.getpid())
        testing.signal_under_lock(core.world(), signal.SIGSTOP)
        early = Sum("early", "small")
    early.check()
    say("sum", rank)
    core.shutdown()
    """
    running = mpirun.start(2, _BEGIN + textwrap.dedent(body), "1", "1", "0", "0")
    text = _until(running, lambda out: "error 0" in out)
    os.kill(int(re.search(r"now (\d+)", text).group(1)), signal.SIGCONT)
    result = running.wait(120)
    assert _NAMED.format(1) in _errors(text)[0, "small"], text
    assert result.code == 0 and len(re.findall(r"^sum \d", result.stdout, re.MULTILINE)) == 2, result.text


_LEAVE = """
if rank == who:
    say("now", os.getpid())
    try:
        testing.signal_under_lock(core.world(), signal.SIGSTOP)
    except core.Error as error:
        say("error", rank, "lock", error)
    run("small", "late")
else:
    time.sleep(0.3)
    say("leaving")
    core.shutdown()
    say("left", rank)
"""


def test_a_rank_that_leaves_waits_for_the_lock_for_some_seconds(mpirun):
    running = mpirun.start(2, _BEGIN + _LEAVE, "1", "1", "0", "0")
    running.wait_for("leaving")
    time.sleep(1)
    assert "left 0" not in running.read()[0]
    os.kill(int(re.search(r"now (\d+)", running.read()[0]).group(1)), signal.SIGCONT)
    result = running.wait(120)
    assert result.code == 0 and "left 0" in result.stdout, result.text
    [(late, said)] = _errors(result.stdout).items()
    assert late == (1, "small") and "rank 0 has left" in said and "shared table" not in said, result.text


def test_a_rank_that_leaves_does_not_wait_for_ever_for_a_stopped_one(mpirun):
    running = mpirun.start(2, _BEGIN + _LEAVE, "1", "1", "0", "0")
    running.wait_for("left 0")
    os.kill(int(re.search(r"now (\d+)", running.read()[0]).group(1)), signal.SIGCONT)
    result = running.wait(120)
    assert result.code == 0, result.text
    assert re.search(r"^error 1 lock .*rank 0 has left: it shut mykv down", result.stdout, re.MULTILINE), result.text


_LATER = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec* now) {
  const long failed = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
  return (int)failed;
}
"""


def test_a_clock_that_is_set_back_does_not_stretch_the_wait_for_the_lock(mpirun, tmp_path):
    """The processes see a clock that is an hour ahead of the kernel's, as after a step back."""
    source, library = tmp_path / "later.c", tmp_path / "later.so"
    source.write_text(_LATER)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    body = """
    if rank == who:
        say("now", os.getpid())
        testing.signal_under_lock(core.world(), signal.SIGSTOP)
    else:
        time.sleep(0.3)
        core.shutdown()
        say("left", rank)
    """
    running = mpirun.start(2, _BEGIN + textwrap.dedent(body), "1", "1", "0", "0", env={"LD_PRELOAD": str(library)})
    running.wait_for("left 0")
    running.kill()

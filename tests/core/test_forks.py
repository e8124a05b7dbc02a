"""A fork of a rank that calls the core gets an error, whatever locks threads of the rank held when it was made.

No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

from standin import gpu_support

# Forks this process while its threads run, then ends the threads.
_FORK = """
import os, signal

def fork(times, in_the_fork):
    global on
    for _ in range(times):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(in_the_fork())
            except BaseException as error:
                os.write(2, repr(error).encode())
                os._exit(9)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"the fork has ended with {status:#x}"
    on = False
    for thread in threads:
        thread.join()
"""

_BODY = """
import threading
import numpy as np
from mpi4py import MPI
from compiled import core

core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": 1})
core.begin_stall_watch()
buffer = core.reserve(1 << 20)
on = True

def sums(name):
    x, y = np.ones(100, "float32"), np.empty(100, "float32")
    while on:
        for work in [core.submit_allreduce(f"{name} {k}", [x], [y]) for k in range(8)]:
            work.wait()

def asks():
    while on:
        core.statistics(), core.waiting(), core.waiting_for_this(["x"]), core.allocate(100), core.forget("nothing")

def stops_timelines():
    while on:
        core.stop_timeline()

side = core.make_group(MPI.COMM_WORLD.py2f(), [0], {"virtual_hosts": 1})
threads = [threading.Thread(target=sums, args=(k,)) for k in range(2)]
threads += [threading.Thread(target=ask) for ask in (asks, stops_timelines, stops_timelines)]
for thread in threads:
    thread.start()
left = core.submit_allreduce("left", [np.ones(3)], [np.ones(3)])
calls = [
    lambda: core.submit_allreduce("x", [np.ones(3)], [np.ones(3)]).wait(5),
    lambda: core.statistics(),
    lambda: core.waiting(),
    lambda: core.waiting_for_this(["x"]),
    lambda: core.give_up("x", "a reason"),
    lambda: core.allocate(100),
    lambda: buffer.commit(1 << 20),
    lambda: left.wait(5),
]
harmless = [
    lambda: core.refuse("x", "a reason"),
    lambda: core.forget("x"),
    lambda: core.next_stalls(1.0, 0.0),
    lambda: core.end_stall_watch(),
    lambda: left.done(),
    lambda: core.rank() + core.size(),
    lambda: core.leave("it ends"),
    lambda: core.shutdown(),
]

def in_the_fork():
    global side
    side = None
    for k, call in enumerate(calls):
        try:
            call()
            return 10 + k
        except core.Error as error:
            if "fork" not in str(error):
                return 30 + k
    for call in harmless:
        call()
    return 0

fork(60, in_the_fork)
side = None
core.shutdown()
print("end", flush=True)
"""


def test_a_fork_gets_an_error_from_each_call_and_waits_for_no_lock(mpirun):
    result = mpirun(1, _FORK + _BODY, timeout=120)
    assert result.code == 0 and "end" in result.stdout, result.text


_EVENTS = """
import os, threading
from compiled import testing

assert testing.load_cuda([os.environ["MYKV_CUDA_LIBRARY"]]) == ""
held = [testing.GpuEvent() for _ in range(100)]
on = True

def churn():
    while on:
        testing.gpu_events(1000)

def in_the_fork():
    held.pop()
    return 0

threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads:
    thread.start()
fork(100, in_the_fork)
"""


def test_a_fork_drops_events_of_gpus_without_a_lock(mpirun):
    result = mpirun(1, _FORK + _EVENTS, timeout=120, env=gpu_support.environment(devices=1))
    assert result.code == 0, result.text

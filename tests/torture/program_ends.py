"""A short training in which one rank ends: ``program_ends VICTIM KIND PHASE DELAY WITH_MXNET``.

The victim reports the phase, and ends DELAY seconds after it, or at once.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from typing import Any, Callable

from harness.world_alone import HEAD

from .job import say

# Of the victim, in the order of the program. In "init", "making", "steps" and "second init" the others come later.
PHASES = (
    "import",
    "before init",
    "before init with MPI",
    "init",
    "joined",
    "making",
    "first step",
    "steps",
    "saving",
    "after shutdown",
    "second init",
    "exit",
)
_STEPS = 20
_OTHERS_LATER_S = 1.5  # than a victim that ends in init()
_LATEST_S = 0.5  # after the beginning of init()


def _raise(error: BaseException) -> None:
    raise error


def _kill(number: int) -> None:
    if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV):
        signal.signal(number, signal.SIG_DFL)  # whoever started the job may ignore it, as nohup does
    os.kill(os.getpid(), number)
    time.sleep(60)


def _by_alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: _raise(TimeoutError("late")))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


def _in_thread(function: Callable[[], Any]) -> None:
    threading.Thread(target=function, daemon=True).start()
    time.sleep(60)


KINDS: dict[str, Callable[[], Any]] = {
    "exception": lambda: _raise(KeyError("label")),
    "out of memory": lambda: _raise(MemoryError()),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(text)": lambda: sys.exit("no data"),
    "SystemExit": lambda: _raise(SystemExit(3)),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "alarm": _by_alarm,
    "thread": lambda: _in_thread(lambda: os._exit(4)),
    "thread interrupts": lambda: _in_thread(_thread.interrupt_main),
    "SIGINT": lambda: _kill(signal.SIGINT),
    "SIGTERM": lambda: _kill(signal.SIGTERM),
    "SIGHUP": lambda: _kill(signal.SIGHUP),
    "SIGKILL": lambda: _kill(signal.SIGKILL),
    "SIGSEGV": lambda: _kill(signal.SIGSEGV),
}


class _Program:
    def __init__(self, victim: int, kind: str, phase: str, delay: float, with_mxnet: bool) -> None:
        self._victim, self._kind, self._phase = victim, kind, phase
        self._delay, self._with_mxnet = delay, with_mxnet
        self._is_victim = False
        self._names: dict[str, Any] = {}

    def run(self) -> None:
        from mykvrun import worker_notes

        self._is_victim = worker_notes.rank_in(os.environ) == self._victim
        self._at("import")
        if self._phase == "before init with MPI":
            from mpi4py import MPI  # noqa: F401
        if self._with_mxnet:
            import kvstore_plugin as mykv
        else:
            exec(HEAD, self._names)
            mykv = self._names["mykv"]
        self._at("before init")
        self._at("before init with MPI")
        self._soon("init")
        mykv.init()
        self._at("joined")
        self._soon("making")
        self._step("making")
        self._at("first step")
        for step in range(_STEPS):
            if step == _STEPS // 2:
                self._soon("steps")
            self._step("step")
        if mykv.rank() == self._victim:
            self._at("saving")
        self._step("saved")
        mykv.shutdown()
        self._at("after shutdown")
        self._soon("second init")
        mykv.init()
        self._step("last")
        if self._phase == "exit":
            atexit.register(self._at, "exit")
        say("done")

    def _step(self, name: str) -> None:
        if self._with_mxnet:
            import kvstore_plugin as mykv
            import mxnet as mx

            mykv.allreduce(mx.nd.ones(3), name=name).asnumpy()
        else:
            self._names["allreduce"](name)

    def _at(self, phase: str) -> None:
        if self._is_victim and phase == self._phase:
            self._end()

    def _soon(self, phase: str) -> None:
        """End in a later phase, by a signal handler."""
        if phase != self._phase:
            return
        if self._is_victim:
            signal.signal(signal.SIGUSR2, lambda *_: self._end())
            timer = threading.Timer(self._delay * _LATEST_S, os.kill, (os.getpid(), signal.SIGUSR2))
            timer.daemon = True
            timer.start()
        else:
            time.sleep(_OTHERS_LATER_S)

    def _end(self) -> None:
        say(f"ending {time.monotonic()}")
        KINDS[self._kind]()


if __name__ == "__main__":
    _Program(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5] == "True").run()

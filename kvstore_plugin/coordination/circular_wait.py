"""Detects circular waits: workers that wait for each other in operations in MXNet's engine get an error.

A rank in `asnumpy()` or `waitall()` waits in MXNet's engine, where no code of this package runs. So each rank has a
thread that checks once a second whether the script is in such a wait. After some seconds the thread reports to the
other ranks for which ranks each of its operations waits. Once all ranks have reported, they compute the same result: a
set of ranks in which every operation waits for another rank of the set can never continue.

If another thread of a rank's script may continue, a deadlock is not certain. Then the rank reports its operations
shortly before the stall watch would warn about them, and all ranks only log a warning that shows all reports.

A rank that continues withdraws its report. All ranks report twice, so that no decision depends on stale reports.
Programs whose ranks do not wait for several seconds exchange nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from typing import Any, Callable, Sequence

import numpy as np

from ..compat.mxnet import mx
from ..world import process, settings
from ..world.process_set import joined
from . import deadlock_check

_log = logging.getLogger("kvstore_plugin")

_SCOPE = "world/circle"  # csrc/runtime/stall_watch.cpp leaves these operations out of its messages
_LOOK_EVERY_S = 1.0
_PATIENCE_S = 4.0  # a rank reports when its script has waited this long
_PATIENCE_WITH_GPU_S = 60.0  # longer, since a thread that waits for a GPU sleeps like a thread that waits for ranks
_POLL_S = 0.2
_BYTES = 2048  # size of a rank's report
_MOST_LETTERS = 200  # the user's call in a report is cut after this number of characters
_WARN_BEFORE = 0.8  # slow operations are reported after this fraction of MYKV_STALL_WARN_S
_END_S = 5.0  # longest wait until all ranks have given up their operations
_JOIN_S = 10.0

# Functions that wait in the engine or in the core. The keys are the last parts of their files' paths.
_WAITS = {
    os.path.join("mxnet", "ndarray", "ndarray.py"): {"asnumpy", "wait_to_read", "wait_to_write", "waitall"},
    os.path.join("mxnet", "ndarray", "utils.py"): {"save"},
    os.path.join("world", "process.py"): {"wait"},
}
_TRAINER = re.compile(r"(?:[^/]+/)??(?:set\d+\.)?(?:gluon\.T|t)rainer\d+(?=/)")  # at the beginning of a name
_STORE = re.compile(r"(?:set\d+\.)?kv\d+(?=/)")
_STATES = re.compile(r"(?:set\d+\.)?broadcast_states\d+/")
_CHECKPOINT = re.compile(r"(?P<owner>.+?)/checkpoint(?:/|\Z)")
# Broadcasts of a parameter, which deferred initialization starts on each rank at another time.
_VALUES = re.compile(r"(?:[^/]+/)*?(?:set\d+\.)?(?:trainer\d+/values|broadcast\d+)/(?!parameters\Z)(?P<parameter>.+)")
_CUSTOM = os.path.join("mxnet", "operator.py"), os.path.join("compat", "recorded.py")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Functions that the thread calls in each look. They must raise nothing, and not wait for other ranks.
looks: list[Callable[[], None]] = []

_thread: threading.Thread | None = None
_ended = threading.Event()


class _Left(Exception):
    """Raised if this rank leaves the job or another rank has left it."""


class _Watch(process.Follower):
    def joined(self, core: Any) -> None:
        global _thread
        if core.size() == 1:
            return
        _ended.clear()
        _thread = threading.Thread(target=_run, args=(core,), name="kvstore_plugin-circular-waits", daemon=True)
        _thread.start()

    def leaving(self) -> None:
        """Stop the thread before Python exits: a thread inside the core would never return."""
        global _thread
        if _thread is not None:
            _ended.set()
            _thread.join(_JOIN_S)
            _thread = None


process.follow(_Watch())


def _run(core: Any) -> None:
    stands, slow = _Stands(), _SlowOperations()
    try:
        while not _ended.wait(_LOOK_EVERY_S):
            _look()
            state = _state(stands) if stands.look() >= _patience() else None
            has_gone_on: Callable[[], bool] = stands.has_gone_on
            if state is None:
                state, has_gone_on = slow.state(), slow.have_gone_on
            if state is None:
                continue
            met = _tell(core, f"{_SCOPE}/first", state, has_gone_on)
            if met is None:
                continue
            # All ranks were blocked when they reported; check whether they still are.
            told_at = time.monotonic()
            state = _state(stands) if stands.look() else None
            now = _tell(core, f"{_SCOPE}/second", state or slow.state(), lambda: False)
            if now is None:
                continue
            if _end_circle(core, now, told_at):
                _meet_after_end(core)
            else:
                slow.warn(now)
    except (_Left, RuntimeError, ValueError):  # the core was shut down, or its table is unusable
        pass


def _look() -> None:
    for look in looks:
        look()


def _patience() -> float:
    return _PATIENCE_WITH_GPU_S if mx.context.num_gpus() else _PATIENCE_S


class _Stands:
    """Measures how long the main thread has been in one wait."""

    def __init__(self) -> None:
        self._place: Any = None
        self._since = 0.0

    def look(self) -> float:
        """Seconds of the main thread in its current wait; 0: it does not wait."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame is not None and not _is_wait(frame.f_code) and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back  # skips functions that this package's wait calls to check for signals and deadlocks
        place = (id(frame), id(frame.f_back)) if frame is not None and _is_wait(frame.f_code) else None
        if place is None or place != self._place:
            self._place, self._since = place, time.monotonic()
            return 0.0
        return time.monotonic() - self._since

    def has_gone_on(self) -> bool:
        return self.look() == 0


class _SlowOperations:
    """Operations that have waited long in a script in which another thread may continue. They only cause a warning.

    Ranks report them shortly before the stall watch warns, since a rank's stall watch knows only its own operations.
    """

    def __init__(self) -> None:
        self._least = self._begin = _WARN_BEFORE * settings.value("MYKV_STALL_WARN_S")
        self._looked = 0.0
        self._longest = 0.0

    def have_gone_on(self) -> bool:
        """Whether all long waits have ended."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:  # with several hosts each look queries all hosts
            self._looked = now
            self._longest = max((seconds for _, seconds, _ in _waiting(self._begin)), default=0.0)
            if self._longest == 0.0:
                self._least = self._begin
        return self._longest == 0.0

    def state(self) -> dict[str, Any] | None:
        """This rank's report; None if no operation has waited long enough since the last warning."""
        if not self._begin or deadlock_check.has_no_other_thread(threading.main_thread()) or self.have_gone_on():
            return None
        return _told(self._least, is_certain=False) if self._longest >= self._least else None

    def warn(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Log the reports of ranks that wait for each other, unless a thread continues."""
        circle = in_circle([None if state is None else state["waits"] for state in states])
        self._least = 2 * max(self._longest, self._begin)
        if circle and self._begin:
            _log.warning("%s.", _text(circle, states, ", unless another thread of a script continues"))


def _is_wait(code: Any) -> bool:
    return any(code.co_filename.endswith(path) and code.co_name in names for path, names in _WAITS.items())


def _state(stands: _Stands) -> dict[str, Any] | None:
    """This rank's report: the ranks its operations wait for, and the script's line. None if the rank may continue."""
    if not deadlock_check.has_no_other_thread(threading.main_thread()) or _runs_custom_operator() or not _is_idle():
        return None
    return _told(0.0, is_certain=True)


def _waiting(least_seconds: float) -> list[tuple[str, float, list[int]]]:
    """This rank's operations in a long wait: name, seconds, and the ranks they wait for."""
    return [
        (name, seconds, sorted(missing))
        for process_set in joined()
        for name, seconds, missing, _ in process_set._core.waiting("", least_seconds)
        if not name.startswith(_SCOPE)
    ]


def _told(least_seconds: float, is_certain: bool) -> dict[str, Any] | None:
    waits = [(name, missing) for name, _, missing in _waiting(least_seconds)]
    if not waits:
        return None
    thread, frame = _standing()
    # If the script is inside a call of this package, report this call's operation: the script's line belongs to it.
    name, first = next((one for one in waits if deadlock_check.call_of(thread, one[0])), waits[0])
    return {
        "name": name,
        "call": deadlock_check.call_of(thread, name)[:_MOST_LETTERS],
        "waits": [list(one) for one in sorted({tuple(ranks) for _, ranks in waits})],
        "first": first,
        "where": _place_in_script(frame),
        "is_certain": is_certain,
    }


def _runs_custom_operator() -> bool:
    """Whether a thread of MXNet's engine runs a Python operator that does not wait for other ranks."""
    for innermost in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(innermost):
            if _is_wait(frame.f_code):
                break
            if frame.f_code.co_filename.endswith(_CUSTOM):
                return True
    return False


def _is_idle() -> bool:
    """Whether the other threads of this process sleep: at most one is runnable or in disk wait in five samples."""
    own = str(threading.get_native_id())
    busy = 0
    for _ in range(5):
        for thread in os.listdir("/proc/self/task"):
            # Suppressed: the thread has ended.
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
                busy += thread != own and file.read().rsplit(")", 1)[1].split()[0] in "RD"
        time.sleep(0.05)
    return busy <= 1


def _standing() -> tuple[int | None, Any]:
    """The waiting thread (the main thread if there are several or none) and its frame."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    for thread, innermost in sorted(frames.items(), key=lambda item: item[0] != main):
        if any(_is_wait(frame.f_code) for frame, _ in traceback.walk_stack(innermost)):
            return thread, innermost
    return main, frames.get(main or 0)


def _place_in_script(frame: Any) -> str:
    """The innermost line of a thread outside of MXNet and this package."""
    inside = (os.path.dirname(os.path.abspath(mx.__file__)) + os.sep, _PACKAGE)
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith(inside) and os.path.exists(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _tell(
    core: Any, name: str, state: dict[str, Any] | None, goes_on: Callable[[], bool]
) -> list[dict[str, Any] | None] | None:
    """All ranks' reports; None if a rank continued before all ranks had reported."""
    text = json.dumps(state).encode()
    if len(text) > _BYTES:
        text = b"null"
    rows = np.zeros((core.size(), _BYTES // 8), dtype=np.int64)
    rows.view(np.uint8)[core.rank(), : len(text)] = np.frombuffer(text, dtype=np.uint8)
    while True:
        result = np.empty_like(rows)
        work = core.submit_allreduce(name, [rows], [result], label=name)
        try:
            _wait(core, name, work, goes_on)
        except RuntimeError as error:
            code, ranks = getattr(error, "code", ""), getattr(error, "ranks", ())
            if code != "given_up":
                raise _Left from None
            if core.rank() in ranks and not goes_on():
                continue  # the call was given up before this rank arrived: take the next turn
            return None
        return [json.loads(bytes(row).rstrip(b"\0").decode()) for row in result.view(np.uint8)]


def _wait(core: Any, name: str, work: Any, goes_on: Callable[[], bool]) -> None:
    while not work.wait(_POLL_S):
        if _ended.is_set():
            process.keep(work)
            raise _Left
        _look()
        if goes_on():
            missing = sorted({rank for one in core.waiting(name) for rank in one[2]})
            if missing:
                core.give_up(name, f"rank {core.rank()} continues", code="given_up", ranks=missing)


def _meet_after_end(core: Any) -> None:
    """Wait until all ranks of a circle have given up their operations, even if the script ends meanwhile.

    If this rank left earlier, the errors on the other ranks would say that it has left, and would not show the reports.
    """
    numbers, sums = np.zeros(1), np.zeros(1)
    name = f"{_SCOPE}/end"
    work = core.submit_allreduce(name, [numbers], [sums], label=name)
    began = time.monotonic()
    while not work.wait(_POLL_S):
        if time.monotonic() - began > _END_S:
            process.keep(work)
            break


def _end_circle(core: Any, states: Sequence[dict[str, Any] | None], told_at: float) -> bool:
    """Give up the operations in which the ranks of a circle waited when they reported. Returns whether there is a
    circle.

    Another rank may have given up the operation in which this rank waited. Then this rank has continued, and its newer
    operations belong to no circle: the other ranks will start these operations after they have received their errors.

    An operation that was given up has failed for all ranks, including a rank that has not arrived yet: that rank
    gets the error when it arrives. Otherwise its call would be matched with a later call of the other ranks.
    """
    circle = in_circle([state["waits"] if state is not None and state["is_certain"] else None for state in states])
    if not circle:
        return False
    text = _text(circle, states)
    if core.rank() not in circle or not settings.value("MYKV_STALL_ABORT_S"):
        _log.warning("%s.", text)  # only the ranks of the circle get an error, and only if the setting allows it
        return True
    for process_set in joined():
        for name, _, missing, _ in process_set._core.waiting("", time.monotonic() - told_at):
            if not name.startswith(_SCOPE) and set(missing).intersection(circle):
                since = time.monotonic() - told_at
                process_set._core.give_up(name, text, code="deadlock", ranks=circle, least_seconds=since)
    return True


def _text(circle: Sequence[int], states: Sequence[Any], unless: str = "") -> str:
    halves = "; ".join(_half(rank, states[rank]) for rank in circle[:8])
    more = f"; {len(circle) - 8} more ranks too" if len(circle) > 8 else ""
    advice = _advice([states[rank]["name"] for rank in circle])
    return f"{halves}{more}: they wait for each other{unless}. {advice}"


def in_circle(waits: Sequence[Sequence[Sequence[int]] | None]) -> list[int]:
    """The ranks that can never continue.

    Parameters
    ----------
    waits : sequence
        For each rank the ranks that each of its operations waits for; None for a rank that may continue by itself.

    Returns
    -------
    list of int
        The largest set of ranks in which each operation waits for a rank of the set.
    """
    stuck = {rank for rank, one in enumerate(waits) if one}
    while True:
        free = {rank for rank in stuck if not all(stuck.intersection(missing) for missing in waits[rank])}
        if not free:
            return sorted(stuck)
        stuck -= free


def _half(rank: int, state: dict[str, Any]) -> str:
    others = state["first"]
    whom = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others[:8]))}"
    where = f" at {state['where']}" if state["where"] else ""
    return f"rank {rank} waits in {_called(state['name'], state['call'])} for {whom}{where}"


def _called(name: str, call: str) -> str:
    """Describes the user's call that starts an operation. `call`: the call in which the script waits, or empty."""
    checkpoint, trainer, values = _CHECKPOINT.match(name), _TRAINER.match(name), _VALUES.match(name)
    if checkpoint:
        owner = checkpoint["owner"]
        if _TRAINER.match(f"{owner}/"):
            call = call.replace("_optimizer_states(", "_states(")  # the method that the script calls
        return f"{call or 'save_states() or load_states()'} of {owner}"
    if values:
        return f"the broadcast of {values['parameter']}"
    if trainer:
        return f"step() of {trainer[0]}"
    scope, _, rest = name.partition("/")
    if rest == "waiting":
        call = call or "a call that waits for all workers"
    if call:
        return f"{call}()" if call.isidentifier() else call
    if rest.startswith("call/"):
        return f"the operation {rest[5:]!r}"
    if rest == "unnamed":
        return "an operation without a name"
    if rest.startswith("backward of "):
        return f"the {rest}"
    if _STATES.match(name):
        return "broadcast_states()"
    if rest.startswith("first use of "):
        return f"the {rest}"
    if _STORE.match(name):
        return f"a push or pull of key {rest} of {scope}"
    return f"{rest}()" if scope == "world" and rest.isidentifier() else name


def _advice(names: Sequence[str]) -> str:
    """The remedy for ranks that wait for each other in the operations with these names."""
    if any(map(_CHECKPOINT.match, names)):
        return deadlock_check.SAVE_TOGETHER
    values = [_VALUES.match(name) for name in names]
    if any(values):
        parameters = sorted({one["parameter"] for one in values if one})
        return (
            f"No forward pass has used {parameters[0]} on all workers. Pass a batch through its layer on all workers "
            "before step() (zeros where a worker has no data), or give the layer the size of its input (in_units, "
            "in_channels)"
        )
    trainers = [_TRAINER.match(name) for name in names]
    if all(trainers) and len({one[0] for one in trainers if one}) > 1:
        return deadlock_check.TRAINERS_DIFFER[0].upper() + deadlock_check.TRAINERS_DIFFER[1:]
    stores = [_STORE.match(name) for name in names]
    if all(stores) and len({one[0] for one in stores if one}) > 1:
        return (
            "Stores are numbered in the order in which each worker creates them. Create the same stores on all "
            "workers, in the same order"
        )
    return f"Make the same calls on all workers, none under `if rank == 0:`, and {deadlock_check.EQUAL_BATCHES}"

"""Finds out how this process's script ends, by an exception or by sys.exit(), to tell the other ranks and the launcher.

The import of the package installs the hooks: a rank that fails before init(), in it, or after shutdown() leaves other
ranks waiting, as a rank that fails during training does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import sys
import threading
import time
from typing import Any, Callable, NamedTuple, NoReturn

from mykvrun import worker_notes

# A rank that failed ends the whole job after this many seconds, even if threads of the user keep its interpreter alive.
_ABORT_AFTER_S = 5.0
# A rank that fails because another rank has failed gives that rank this long to end the job itself.
_FIRST_S = 2.0
_MOST_CHARACTERS = 160  # an exception's first line is cut after this number of characters
_INTERRUPTED = 130  # the status of a program that Ctrl-C has ended
_ENDED = "ended with "  # prefix of a departure's reason, which the core reports as "rank 1 ended with ..."
_OF_OTHER = re.compile(r"rank \d+ ended with (?:sys\.exit\((?:(?P<status>\d+)\))?|(?P<kind>\w+))")


class _Hooks(NamedTuple):
    would_wait: Callable[[], bool]
    abort: Callable[[int], None]


class End(NamedTuple):
    """How a script ends."""

    text: str  # "ended with KeyError: 'label'"
    status: int
    follows: bool = False  # the exception came from another rank, which failed first


_failure: End | None = None  # an uncaught exception
_exit: End | None = None  # sys.exit() with a status other than 0
_is_forked = False
_hooks: _Hooks | None = None  # None until install()


def install(would_wait: Callable[[], bool], at_exit: Callable[[], None], abort: Callable[[int], None]) -> None:
    """Start to record how the script ends.

    Parameters
    ----------
    would_wait : callable
        Whether other ranks would wait for this process if it ended now.
    at_exit : callable
        Called when Python exits, after the exit handlers that the program registers later.
    abort : callable
        Ends the job with a status.
    """
    global _hooks
    if _hooks is None:
        _hooks = _Hooks(would_wait, abort)
        sys.exit = _noting_status(sys.exit)
        atexit.register(at_exit)
    if not getattr(sys.excepthook, "_is_of_mykv", False):  # a program may have replaced it since
        sys.excepthook = _noting_exception(sys.excepthook)


def forget_in_child() -> None:
    """In a forked child, forget how its script ends: this concerns no other rank."""
    global _is_forked, _failure, _exit
    _is_forked, _failure, _exit = True, None, None


def failure() -> End | None:
    """The exception that ends this script, if any."""
    return _failure


def failed_exit() -> End | None:
    """The call of sys.exit() with a status other than 0 that ends this script, if any."""
    return _exit


def tell_launcher(end: End | None) -> None:
    """Tell mykvrun how the script ends, if it fails. Call this before other ranks can learn of the failure."""
    if end is not None:
        worker_notes.tell_end(end.status, end.text[len(_ENDED) :])


def end_job(end: End) -> None:
    """End the job. If another rank has failed first, that rank gets time to end the job itself."""
    if end.follows:
        time.sleep(_FIRST_S)
    assert _hooks
    _hooks.abort(end.status)


class _Exit(SystemExit):
    """The SystemExit that sys.exit() raises. If the script catches it, the deletion of this object clears `_exit`."""

    def __del__(self) -> None:
        global _exit
        # If a function is still running, the script has caught this exception: Python deletes an exception that ends
        # the script later, when all functions have returned.
        if sys._getframe().f_back is not None:
            _exit = None

    def __reduce__(self) -> Any:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def _noting_status(original: Any) -> Any:
    @functools.wraps(original)
    def sys_exit(status: Any = None, /) -> NoReturn:
        global _exit
        number = status if isinstance(status, int) else int(status is not None)
        if _is_forked:
            # The core ends a forked child with this status before mpi4py finalizes MPI, which would hang.
            _set_fork_status(number & 0xFF)
            original(status)
        try:
            original(status)
        except SystemExit as error:
            if type(error) is not SystemExit or threading.current_thread() is not threading.main_thread():
                raise
            arguments = error.args
        _exit = End(f"{_ENDED}sys.exit({_short(repr(status))})", number & 0xFF) if number & 0xFF else None
        raise _Exit(*arguments) from None

    return sys_exit


def _noting_exception(previous: Any) -> Any:
    """An excepthook that notes that this rank fails, after `previous` has shown why."""

    def excepthook(kind: Any, value: Any, traceback: Any) -> None:
        try:
            if previous is sys.__excepthook__ and not _is_forked and not _is_interactive() and is_of_another(value):
                print(
                    f"mykv on rank {worker_notes.rank_in(os.environ)}: {kind.__name__}: {_line_of_other(value)}",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                previous(kind, value, traceback)
        finally:  # even if showing the exception fails, for lack of memory or in a hook of the program
            _note_failure(kind, value)

    excepthook._is_of_mykv = True  # type: ignore[attr-defined]
    return excepthook


def _note_failure(kind: Any, value: Any) -> None:
    global _failure
    if _is_forked:
        _set_fork_status(1)
    elif ((_hooks and _hooks.would_wait()) or worker_notes.VARIABLE in os.environ) and not _is_interactive():
        _failure = _end_by(kind, value)
        watch = threading.Timer(_ABORT_AFTER_S, _abort_if_ending)
        watch.daemon = True
        watch.start()


def is_of_another(error: BaseException) -> bool:
    """Whether an error says that the script of another rank has ended with an exception, which ends the job."""
    other = _OF_OTHER.search(_line_of_other(error))
    return other is not None and other["kind"] is not None


def _line_of_other(value: Any) -> str:
    """The line of an exception's text that says how another rank has ended, or ""."""
    with contextlib.suppress(Exception):  # str() may run code of the program
        return next((line for line in str(value).splitlines() if _OF_OTHER.search(line)), "")
    return ""


def _is_interactive() -> bool:
    """Whether the user continues after a traceback."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def _set_fork_status(status: int) -> None:
    core = sys.modules.get("kvstore_plugin._core")
    if core is not None:
        core.set_fork_status(status)


def _end_by(kind: Any, value: Any) -> End:
    text = ""
    with contextlib.suppress(Exception):  # str() of an exception may run code of the program
        text = str(value)
    status = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
    other = _OF_OTHER.search(text)
    if other is not None:
        status = int(other["status"] or 1) if other["kind"] != "KeyboardInterrupt" else _INTERRUPTED
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]  # MXNet's errors begin with C++ frames
    return End(f"{_ENDED}{kind.__name__}{': ' * bool(line)}{_short(line)}", status, other is not None)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def _abort_if_ending() -> None:
    """End the job if the main thread is over; otherwise the program called sys.excepthook itself and continues."""
    global _failure
    if threading.main_thread().is_alive() or _failure is None:
        _failure = None
    elif _hooks and _hooks.would_wait():
        tell_launcher(_failure)
        _hooks.abort(_failure.status)

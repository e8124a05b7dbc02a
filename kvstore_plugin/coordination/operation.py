"""One rank's part in a collective operation: the rank starts the operation, or tells the other ranks why it cannot.

Operations are matched by name, and under one name by the order of the calls (turns). So a rank with wrong arguments
must take its turn too, with the reason (a refusal). Otherwise the other ranks would wait for this rank, and all later
turns would be mismatched.

Blocking calls (allgather, barrier, add_process_set and the like) all take their turns under one name of the process
set. So ranks in different blocking calls are matched, and get an error that shows both labels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from ..compat import errors
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import MXNetError
from ..world import process
from ..world.process_set import ProcessSet, check, global_process_set
from . import deadlock_check, hook_operations

# For some names, a function that is called on all ranks of the process set when a turn under the name has failed.
when_failed: dict[str, Callable[[], None]] = {}

_NEVER = object()  # sentinel: no function returns it

# Priorities are sent as 32 bits.
_LARGEST_PRIORITY = 2**31 - 1


class Limit(NamedTuple):
    """How long a rank waits for missing ranks, the name of that setting, and the advice about missing ranks."""

    seconds: float
    setting: str
    advice: str


class Turn:
    """Context manager in which an operation is checked and started; an exception before the start becomes a refusal.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks of the operation.
    name : str
        The name by which the operation is matched; begins with the scope of the set.
    call : str
        The call as shown to other ranks in a refusal, for example ``"allreduce 'x'"``.
    turn_of : str, optional
        The operation takes the last turn of this name; by default it takes the next turn of its own name.

    Attributes
    ----------
    started : list
        Empty: the turn is open. Otherwise it holds a work of the core, or None: the turn was pushed or refused.

    Raises
    ------
    ValueError
        This process is not in the process set. Other ranks are not told, since none waits for this rank.
    RuntimeError
        kvstore_plugin is not initialized.
    """

    __slots__ = ("_agreed", "_is_late", "_options", "_result", "call", "core", "met", "name", "process_set", "started")

    def __init__(self, process_set: Any, name: str, call: str, turn_of: str = "") -> None:
        self.process_set = process_set
        self.core = process_set._core
        self.core.rank()
        self.name, self.call = name, call
        self._options = {"turn_of": turn_of} if turn_of else {}
        self.started: list[Any] = []
        self._agreed: Sequence[Turn] = ()
        self._is_late = False  # whether a thread waits for the end of this turn's meet(), and refuses what follows
        self.met: Any = None  # result of the meet() in which the ranks agreed on this turn
        self._result: Any = None  # of this turn's own meet()

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        reason = f"{self.call}: {str(error) or kind.__name__}"
        if not self.started:
            process.refusals += 1
            self._refuse(reason)
            self._tell()
        elif self._agreed:
            self._is_late = _refuse_after(self.started[0], self.name, self._agreed, reason)

    def _refuse(self, reason: str) -> None:
        self.started.append(None)
        self._post_refusal(reason)

    def _post_refusal(self, reason: str) -> None:
        self.core.refuse(self.name, reason, **self._options)

    def _after_failed_meeting(self, reason: str) -> None:
        """For a turn after a `meet`: an exception had ended the wait on this rank, and now the meet has failed."""

    def agreed(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Register, before `meet`, the turns that all ranks take after a successful `meet`, and return them.

        An exception within this context, even from a signal handler, refuses the turns that this rank has not taken.
        """
        self._agreed = turns
        return turns

    def push(self, function: Callable, *arguments: Any, **options: Any) -> None:
        """Start the operation with a function of the core that takes the name first.

        Raises
        ------
        ValueError
            The core rejects the arrays.
        MXNetError
            The operation has failed at once: NaiveEngine runs operations when they are pushed.
        """
        try:
            start(self.started, functools.partial(function, self.name, *arguments, **self._options, **options))
        except MXNetError:
            self.started.append(None)
            raise
        except (RuntimeError, ValueError) as error:
            if self.started:
                raise  # the operation has started, so a signal handler has raised this error
            raise ArgumentValueError(f"{error}.") from error

    def leave_out(self, reason: str, result: Any) -> Any:
        """Take the turn without work, and return `result`; ranks with work get an error with the reason."""
        self._refuse(f"{self.call}: {reason}")
        return result

    def submit(self, function: Callable, *arguments: Any, **options: Any) -> Any:
        """Start the operation with a function of the core for numpy arrays, and return its work."""
        start(self.started, functools.partial(function, self.name, *arguments, **self._options, **options))
        return self.started[0]

    def broadcast(self, root: int, mine: np.ndarray | None, received: np.ndarray | None) -> Any:
        """Start to copy `mine` of the set's rank `root` into `received` on the other ranks, and return the work."""
        is_root = self.core.rank() == root
        return self.submit(self.core.submit_broadcast, mine if is_root else None, [] if is_root else [received], root)

    def meet(
        self,
        label: str,
        numbers: Sequence[int] = (),
        limit: Limit | None = None,
        look: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Wait for the other ranks, and exchange some numbers with them.

        In a long wait a rank checks whether other ranks wait for it in another call; then all ranks get an error.

        Parameters
        ----------
        label : str
            The call, with all values that must be equal on all ranks.
        numbers : sequence of int, optional
            Of 64 bits; the same number of them on all ranks with this label.
        limit : Limit, optional
            The call is given up after this time if a rank is missing.
        look : callable, optional
            Called without arguments at intervals during the wait; may give up the call.

        Returns
        -------
        ndarray of int64, shape (size, len(numbers))
            Row r holds the numbers that rank r of the process set has passed.

        Raises
        ------
        MXNetError
            A rank is in another blocking call or in a step, has refused its turn, has not arrived in time, or has left
            the job.
        """
        deadlock_check.note_waiting_call(self)
        rows = np.zeros((self.core.size(), len(numbers)), dtype=np.int64)
        rows[self.core.rank()] = numbers
        self._result = result = np.empty_like(rows)
        for one in self._agreed:
            one.met = result
        self.submit(self.core.submit_allreduce, [rows], [result], label=label)
        return self._wait(limit, look)

    def resume(self, limit: Limit | None = None, look: Callable[[], None] | None = None) -> np.ndarray:
        """Continue a `meet` whose wait an exception has interrupted; arguments, result and errors as there."""
        deadlock_check.note_waiting_call(self)
        return self._wait(limit, look)

    def is_taken(self) -> bool:
        """Whether this rank has started the operation or has refused the turn."""
        return bool(self.started)

    def is_refused(self) -> bool:
        """Whether this rank has refused the turn of a `meet` or `submit`."""
        return self.started == [None]

    def fails_for_all(self) -> bool:
        """Whether this turn of a `meet` was refused here or has failed, so that no rank gets a result.

        Not after an exception of a signal handler in the wait: the other ranks may get the result and go on.
        """
        if self.is_refused():
            return True
        if not self.started or self._is_late or not self.started[0].done():
            return False
        try:
            self.started[0].wait(0)
        except RuntimeError:
            return True
        return False

    def _wait(self, limit: Limit | None, look: Callable[[], None] | None) -> np.ndarray:
        work = self.started[0]
        refusals: list[Callable[[], None]] = []  # each refuses an operation in which other ranks wait in a deadlock
        try:
            if limit is not None:
                process.wait(work, lambda: self._give_up(limit), limit.seconds)
            else:
                process.wait(work, lambda: self._look(look, refusals))
        except RuntimeError as error:
            if not self.fails_for_all():
                raise  # a signal handler has raised it
            failure = self._with_call(error)
            for refuse in refusals:
                with contextlib.suppress(RuntimeError, ValueError):  # the core was shut down, the set was removed
                    refuse()
            self._tell()
            if limit is None:
                deadlock_check.failed(failure)
            raise failure from None
        if late_refusals:
            settle_refusals(self.name)
        return self._result

    def _with_call(self, error: RuntimeError) -> MXNetError:
        """The MXNetError for an error of `meet`, which names the call where the core has named the operation."""
        if isinstance(error, MXNetError):
            return error
        text = str(error)
        for shown in ("a call that waits", self.name):
            rest = text[len(shown) :]
            if text.startswith(shown) and rest.startswith((":", " was refused", " of process set")):
                text = self.call + rest
        return errors.of_core(error, text)

    def _look(self, look: Callable[[], None] | None, refusals: list[Callable[[], None]]) -> None:
        if look is not None:
            look()
        # Called again in each check, since the core gives up only a call that has an entry in the host's table.
        found = deadlock_check.look(self)
        if found is not None:
            refusals[:] = [found]

    def _give_up(self, limit: Limit) -> None:
        missing = sorted({rank for one in self.core.waiting(self.name) for rank in one[2]})
        if missing:
            # The core ends the call on all ranks, unless the call succeeds at this moment.
            self.core.give_up(
                self.name,
                f"{self.call} was given up by rank {process.rank()} after {limit.seconds:g} s ({limit.setting}), since "
                f"these ranks had not called it: {missing}. {limit.advice}",
                code="given_up",
                ranks=missing,
            )

    def _tell(self) -> None:
        if self.name in when_failed:
            when_failed[self.name]()


def start(started: list, function: Callable[[], Any]) -> None:
    """Call a function of the core without arguments and append its result, with no signal handler in between.

    Python runs signal handlers between bytecode instructions, and this is a single instruction. So after an exception
    `started` has changed if and only if the function has completed.
    """
    started.extend(itertools.islice(iter(function, _NEVER), 1))


def start_and_note(started: list, function: Callable[[], Any], what: Any) -> None:
    """Like `start`, but append the pair of the result and `what`."""
    started.extend(itertools.islice(zip(iter(function, _NEVER), [what]), 1))


def must_refuse(started: list, error: BaseException) -> bool:
    """Whether this rank must refuse an operation that `start` should have started before this error.

    After an MXNetError it must not: NaiveEngine has run the operation, and the other ranks get the error.
    """
    return not started and not isinstance(error, MXNetError)


def _refuse_after(meeting: Any, name: str, turns: Sequence[Turn], reason: str) -> bool:
    """Refuse the open turns if the preceding meeting succeeds; otherwise no rank takes them.

    Returns whether a thread waits for the end of the meeting.
    """
    turns = [turn for turn in turns if not turn.started]
    for turn in turns:
        turn.started.append(None)

    def refuse() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the core was shut down, or the set was removed
            try:
                while not meeting.wait(0.2):
                    pass
            except RuntimeError:
                for turn in turns if is_late else ():
                    turn._after_failed_meeting(reason)
                return
            for turn in turns:
                turn._post_refusal(reason)

    is_late = not meeting.done()
    if not is_late:
        refuse()
        return False
    # The exception has interrupted the wait in the meeting. Other ranks may arrive later, so a thread waits for them.
    thread = threading.Thread(target=refuse, name="kvstore_plugin-refusals", daemon=True)
    late_refusals.append((thread, meeting, name))
    thread.start()
    return True


late_refusals: list[tuple[threading.Thread, Any, str]] = []  # with the meeting that the thread waits for, and its name


def settle_refusals(name: str) -> None:
    """Wait for threads that refuse turns: those whose meeting has ended, or has this name.

    To be called after a later meeting of the name, or before the turns after it are taken. Other ranks may never come
    to a meeting of another name.
    """
    for late in list(late_refusals):
        thread, meeting, of = late
        if of == name or meeting.done():
            thread.join()
            with contextlib.suppress(ValueError):  # another thread has removed it
                late_refusals.remove(late)


def exchange(
    process_set: Any,
    name: str,
    call: str,
    label: str = "",
    numbers: Sequence[int] = (),
    limit: Limit | None = None,
    look: Callable[[], None] | None = None,
) -> np.ndarray:
    """Wait for the other ranks, and exchange some numbers with them: a turn and its `meet` in one call.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    name : str
        The name by which the exchange is matched.
    call : str
        The call of this rank, for errors.
    label : str, optional
        Must be the same on all ranks; otherwise the error shows the labels of two ranks.
    numbers, limit, look
        As for `Turn.meet`. A late rank skips a call that was given up, and joins the next call.

    Returns
    -------
    ndarray of int64, shape (size, len(numbers))
        Row r holds the numbers that rank r of the process set has passed.

    Raises
    ------
    MXNetError
        As for `Turn.meet`.
    """
    following = getattr(_thread, "following", None)
    while True:
        turn = Turn(process_set, name, call)
        if following is not None:
            turn.agreed(following.begin(turn))
        with turn:
            try:
                met = turn.meet(label, numbers, limit, look)
            except MXNetError as error:
                if errors.code_of(error) != "given_up" or process.rank() not in error.ranks:
                    raise  # otherwise the call was given up before this rank arrived: take the next turn
                continue
        return met


_thread = threading.local()  # `following`: the Following of the current exchange


class Following:
    """Context manager around an `exchange` after which all ranks take a certain turn.

    After an exception of a signal handler within the exchange, this rank refuses the turn if the exchange succeeds.

    Parameters
    ----------
    make : callable
        Makes the Turn.
    """

    def __init__(self, make: Callable[[], Turn]) -> None:
        self._make = make
        self._begun: tuple[Turn, list[Turn]] | None = None  # the last exchange, and the turn after it

    def begin(self, exchange: Turn) -> list[Turn]:
        """The turns that follow the exchange, which begins."""
        turns = [self._make()]
        self._begun = exchange, turns
        return turns

    def is_taken(self) -> bool:
        """After an exception: whether this rank has taken or refused the turn, or no rank takes it any more."""
        return self.has_failed() or bool(self._begun and self._begun[1][0].is_taken())

    def has_failed(self) -> bool:
        """Whether the exchange was refused here or has failed, so that no rank gets a result."""
        return bool(self._begun and self._begun[0].fails_for_all())

    def __enter__(self) -> Following:
        _thread.following = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        _thread.following = None


class refusing:
    """Context manager in which a rank starts an operation of the core. An exception before that refuses the turn.

    A class, since a generator-based context manager would cost 3 us more in every pushpull.

    Parameters
    ----------
    refuse : callable
        Given the reason, refuses the turn.
    what : str, optional
        Subject of the error. If given, an ArgumentValueError is raised if the core rejects the arrays.
    started : list, optional
        The list for `start`, which may have elements from earlier operations.
    """

    __slots__ = ("_before", "_refuse", "_started", "_what")

    def __init__(self, refuse: Callable[[str], None], what: str = "", started: list | None = None) -> None:
        self._refuse = refuse
        self._what = what
        self._started: list[Any] = [] if started is None else started
        self._before = len(self._started)

    def __enter__(self) -> list[Any]:
        """For `start`: after it no exception refuses the turn, not even that of a signal handler."""
        return self._started

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # After an MXNetError no turn is refused: NaiveEngine has run the operation, and the other ranks get the error.
        if error is None or len(self._started) > self._before or isinstance(error, MXNetError):
            return
        rejected = self._what and isinstance(error, (RuntimeError, ValueError, MemoryError))
        reason = f"{self._what}: {error}." if rejected else errors.reason_of(error)
        self._refuse(reason)
        if rejected:
            raise ArgumentValueError(reason) from error


def named(process_set: Any, name: Any, call: str) -> Turn:
    """The turn in an operation, with or without a name from the user.

    Raises
    ------
    TypeError, ValueError
        This process cannot use `process_set`; if it has a wrong type, a turn in the set of all ranks is refused. Or
        `name` is neither a str nor an int nor None; then the next turn without a name is refused.
    """
    if not isinstance(process_set, ProcessSet):
        with named(global_process_set, name, call):  # ranks that pass no process set wait in this set
            check(process_set)
    check(process_set)
    if hook_operations.running() is not None:
        return _in_hook(hook_operations.running(), process_set, name, call)
    if name is None:
        return Turn(process_set, f"{process_set._scope}/unnamed", call)
    if isinstance(name, (str, int)):
        return Turn(process_set, f"{process_set._scope}/call/{name}", described(call, name))
    with named(process_set, None, call):
        raise ArgumentTypeError(f"The name of an operation must be a str, not {type(name).__name__}.")


def _in_hook(hook: hook_operations.HookOperations, process_set: Any, name: Any, call: str) -> Turn:
    """The turn in an operation that a communication hook starts. `name` appears only in messages."""
    if process_set is not hook.process_set:
        raise ArgumentValueError(
            f"{call}() in a communication hook must be over the process set of its bucket, {hook.process_set!r}, not "
            f"over {process_set!r}. Pass process_set=bucket.process_set."
        )
    return Turn(process_set, hook.next_of_hook(), described(call, name), hook.bucket)


def waiting(process_set: Any, call: str) -> Turn:
    """The turn in a blocking call.

    Raises
    ------
    ValueError
        This process cannot use `process_set`, or this thread runs a communication hook.
    """
    if not isinstance(process_set, ProcessSet):
        with waiting(global_process_set, call):  # ranks that pass no process set wait in this set
            check(process_set)
    check(process_set)
    if hook_operations.running() is not None:
        raise ArgumentValueError(
            f"{call} waits for the other workers, which a communication hook must not do. In a hook use allreduce_(), "
            "grouped_allreduce_(), broadcast_(), reducescatter(), or a form of them that returns new arrays."
        )
    return Turn(process_set, deadlock_check.waiting_name(process_set), call)


def gathering(process_set: Any, name: Any, call: str) -> Turn:
    """The turn in an operation on which the ranks have agreed in a blocking call."""
    return Turn(*gathered(process_set, name, call))


def gathered(process_set: Any, name: Any, call: str) -> tuple[Any, str, str]:
    """The arguments of the Turn that `gathering` returns."""
    scope = process_set._scope
    return process_set, f"{scope}/{call if name is None else f'call/{name}'}", described(call, name)


def checked_priority(priority: Any) -> int:
    """The argument `priority` as an int, after a check.

    Raises
    ------
    TypeError, ValueError
        `priority` is not an int, or has more than 32 bits.
    """
    try:
        number = operator.index(priority)
    except TypeError:
        raise ArgumentTypeError(f"priority must be an int, not {type(priority).__name__}.") from None
    if not -_LARGEST_PRIORITY <= number <= _LARGEST_PRIORITY:
        raise ArgumentValueError(
            f"priority must be between -{_LARGEST_PRIORITY} and {_LARGEST_PRIORITY}, not {number}."
        )
    return number


def described(call: str, name: Any) -> str:
    """A call as shown in labels and errors, with its name if it has one."""
    return call if name is None else f"{call} {str(name)!r}"


def wait(work: Any) -> None:
    """Wait for work of the core.

    Raises
    ------
    MXNetError
        The work has failed.
    """
    try:
        process.wait(work)
    except MXNetError:
        raise
    except RuntimeError as error:
        raise errors.of_core(error) from None

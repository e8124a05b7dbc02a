"""The names of a SyncBatchNorm's calls, and what a worker tells the others about calls that it does not make.

All workers call a layer equally often between two steps of a trainer that trains it. So a call's name has the number of
the step and the call's number in that step. After a step all workers count from 0 again: a call that one worker has
left out, because it could not read a batch for example, spoils no later step.

No worker knows how many calls the others make. So a worker notes its steps in which it may have made fewer. Their
names that it will not use are that of the call after its last call, and, if the step has failed, those of backward
passes that it has not begun. A thread looks once a second whether other workers wait under such a name. Only then the
worker refuses the operation, which gives the others an error.

An operator takes its number when it runs, since MXNet runs no Python code in the call of a static graph (static_alloc).
The program may then be some steps ahead. So a step ends for a layer not in step(), but in the order of MXNet's engine:
at a mark behind the operators that step() has found. The operators of a layer must run in the order of the calls, as
they do if each writes the running means. Where the engine does not know this, marks on the means keep the order:
between arrays, since initialize(force_reinit=True) creates a new one, and after graphs with static_shape
(batch_norm_graphs.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
import weakref
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Sequence

from ..compat import engine_marks, forks
from ..compat.mxnet import MXNetError, NDArray, autograd
from ..coordination import circular_wait, operation_names
from ..world import process
from ..world.process_set import ProcessSet

_FORGET_EVERY = 128  # calls of a layer; then the core drops the counts of its names, which are used only once
_MOST_SHORT = 64  # noted steps of a layer; older ones are dropped


class Number(NamedTuple):
    """The number of a call: the number of the step, and the number of the call in it."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"{self.step}.{self.call}"


@dataclass
class _Short:
    """A step of the program in which this worker may have made fewer calls than others."""

    step: int
    calls: int  # calls that this worker has made, or refused
    backward: set[int]  # calls whose backward passes this worker has neither begun nor refused, if the step has failed
    reason: str


class _Step(NamedTuple):
    """A step that the program has taken."""

    number: int
    in_evaluation: int  # calls since the last step that were recorded in evaluation mode
    refusal: str  # why the step has failed on this worker; empty: it has not failed
    is_stale: bool  # whether the program has called no backward pass of the layer since the last step
    is_before_use: bool  # whether this worker has not called the layer in training yet
    era: int


class Calls:
    """State shared by the calls of a layer.

    Parameters
    ----------
    layer : SyncBatchNorm
    process_set : ProcessSet
    first_use : FirstUse
    """

    def __init__(self, layer: Any, process_set: ProcessSet, first_use: operation_names.FirstUse) -> None:
        self.process_set = process_set
        self.key = uuid.uuid4().hex  # in graphs; they may be exported, and imported in another process
        # The layer's own dict. Not the layer: its graph may outlive it, until a garbage collection on each worker.
        self.parameters: dict[str, Any] = layer._reg_params
        self._means: NDArray | None = None  # the running means of the last call
        self._first_use = first_use
        self._lock = threading.Lock()  # held while _next, _short or _refused change
        self._taken = 0
        self._era = 0  # the number of resets
        self.reset()
        of_key[self.key] = self

    def reset(self) -> None:
        """Begin to count again. To be called on all workers."""
        self._era += 1
        self._steps = 0  # steps of the program
        self._in_evaluation = 0
        self._ended: Any = None  # the mark of the last step
        self._next = Number(0, 0)  # the number of the next operator that runs
        self._most = 0  # calls in one step
        self._running = 0  # the step of the last operator that has run
        self._short: list[_Short] = []
        self._refused: list[Number] = []  # calls whose backward passes were refused

    def note(self) -> None:
        """Register a call, before its operator runs."""
        if autograd.is_training():
            try:
                self.scope()
            except Exception:
                raise
            except BaseException as error:  # MXNet calls this in a callback, and crashes if it gets such an exception
                _interruptions.append(error)
                raise RuntimeError(type(error).__name__) from error
        else:
            self._in_evaluation += autograd.is_recording()

    def means(self) -> NDArray | None:
        """The layer's array of running means; None if it has no values."""
        arrays = self.parameters["running_mean"]._data
        return arrays[0] if arrays else None

    def follow(self) -> None:
        """Make the operators of later calls run after those of all earlier calls, on another array of running means."""
        means = self.means()
        if means is None:
            return
        last, self._means = self._means, means
        if last is not None and last is not means:
            forks.wait_before_forks()  # a mark needs the GIL
            engine_marks.follow(means, last)

    def separate(self) -> None:
        """Make the operators of later calls run after those of a graph whose writes the engine does not know."""
        forks.wait_before_forks()
        engine_marks.push(self._means, lambda: None)

    def take(self) -> Number:
        """Take the number of a call, in its operator. The operators of a layer run in the order of the calls."""
        scope = self.scope()
        with self._lock:
            number = self._next
            self._next = Number(number.step, number.call + 1)
        self._running = number.step
        self._taken += 1
        if self._taken % _FORGET_EVERY == 0:
            self.process_set._core.forget(f"{scope}/")
        return number

    def scope(self) -> str:
        """The prefix of the operations' names, the same on all workers. Waits for them all once after each init().

        A worker may arrive here some steps later than the others, if it has left out its first calls. The numbers of
        the steps go on, so its calls are not matched with those of earlier steps.
        """
        if self._first_use.is_due():
            self._first_use.name()
            with self._lock:
                self._next = Number(self._next.step, 0)
            forks.wait_before_forks()
        return self._first_use.shown

    def runs_backward(self, number: Number) -> None:
        """Register that a backward pass begins, perhaps after a step that has failed without it."""
        with self._lock:
            for one in self._short:
                if one.step == number.step:
                    one.backward.discard(number.call)
            is_refused = number in self._refused
        if is_refused:
            raise MXNetError(f"{self._name('backward', number)} was refused in this rank's failed step.")

    def has_run(self) -> None:
        """Register that all workers have made the forward pass that has begun here: none waits in an earlier step."""
        if self._short or self._refused:
            with self._lock:
                self._short = [one for one in self._short if one.step >= self._running]
                self._refused = [one for one in self._refused if one.step >= self._running - 1]

    def end_step(self, refusal: str, mark: Any) -> None:
        """Register a step of the program. The calls of the next step begin when the operators of this step have run."""
        if mark is not None and mark is self._ended:
            return
        step = _Step(
            self._steps, self._in_evaluation, refusal, self._is_stale(), self._first_use.is_due(), self._era
        )  # fmt: skip
        self._steps, self._in_evaluation, self._ended = self._steps + 1, 0, mark
        self.follow()
        if self._means is None:  # then no operator can have run
            self._end(step)
        else:
            forks.wait_before_forks()
            engine_marks.push(self._means, functools.partial(self._end, step))

    def _end(self, step: _Step) -> None:
        with self._lock:
            if step.era != self._era:
                return
            made, self._next = self._next.call, Number(step.number + 1, 0)
            is_less, self._most = made < self._most, max(made, self._most)
            if is_less or step.is_before_use or step.in_evaluation or step.refusal:
                backward = set(range(made)) if step.refusal and step.is_stale else set()
                self._short.append(_Short(step.number, made, backward, self._told(made, step)))
                del self._short[:-_MOST_SHORT]

    def _is_stale(self) -> bool:
        """Whether the program has called no backward pass of the layer since the last step, as its gradients tell."""
        weights = [one._data for one in self.parameters.values() if one.grad_req != "null" and one._data]
        return bool(weights) and not any(one[0]._fresh_grad for one in weights)

    def _told(self, made: int, step: _Step) -> str:
        """The reason for a missing forward pass, after the calls that were made."""
        shown = self._first_use.shown
        if step.refusal:
            return f"that rank's step failed after {made} calls of {shown} in training: {step.refusal}"
        if step.in_evaluation and not made:
            mode = "evaluation mode in this step (autograd.record(train_mode=False)), and not in training"
            return f"{shown} was called on that rank in {mode}"
        return f"that rank took its step after {made} calls of {shown} in training"

    def look(self) -> None:
        """Refuse operations in which other workers wait for this worker, which will not start them."""
        if not self._short or self._first_use.is_due():  # before the first use, the name may be that of another layer
            return
        with self._lock:
            noted = [(one, "forward", one.calls) for one in self._short]
            noted += [(one, "backward", call) for one in self._short for call in one.backward]
        core = self.process_set._core
        names = [self._name(kind, Number(one.step, call)) for one, kind, call in noted]
        for name, ranks, (one, kind, call) in zip(names, core.waiting_for_this(names), noted):
            if ranks and self._refuses(one, kind, call):
                core.refuse(name, one.reason)

    def _refuses(self, one: _Short, kind: str, call: int) -> bool:
        """Register that an operation is refused; False if this is a backward pass that has begun meanwhile."""
        with self._lock:
            if kind == "forward":
                one.calls += 1  # another worker may make more calls
            elif call in one.backward:
                one.backward.remove(call)
                self._refused.append(Number(one.step, call))
            else:
                return False
        return True

    def is_within(self, workers: ProcessSet) -> bool:
        """Whether all workers of the layer are among these workers."""
        ranks = self.process_set.ranks
        return self.process_set is workers or (ranks is not None and set(ranks) <= set(workers.ranks or ()))

    def _name(self, kind: str, number: Number) -> str:
        return f"{self._first_use.shown}/{kind}/{number}"


of_key: weakref.WeakValueDictionary[str, Calls] = weakref.WeakValueDictionary()


def end_step(params: Sequence[Any], process_set: ProcessSet, refusal: str = "", mark: Any = None) -> None:
    """End the calls of a step of a trainer. Called once in each step on each worker, even if the step fails.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's parameters. Only layers with such a parameter count this step.
    process_set : ProcessSet
        The workers that take the trainer's steps together.
    refusal : str, optional
        Why the step has failed on this worker.
    mark : object, optional
        Stands for the step: a second call with the same object, after an exception in the first, only ends the calls
        that the first has not ended.
    """
    if not of_key:
        return
    trained = set(map(id, params))
    for calls in list(of_key.values()):
        # Checked here, without a call of a method: a process may have many layers of other trainers.
        is_trained = not trained.isdisjoint(map(id, calls.parameters.values()))
        if is_trained and calls.is_within(process_set):
            calls.end_step(refusal, mark)


def begin_again() -> None:
    """Reset the call counts of all layers. To be called on all workers."""
    for calls in list(of_key.values()):
        calls.reset()


@contextlib.contextmanager
def raising_interruption() -> Iterator[None]:
    """For the call of an operator or graph: raise the exception, such as Ctrl-C, that has interrupted Calls.note()."""
    try:
        yield
    except MXNetError:
        if _interruptions:
            raise _interruptions.pop() from None
        raise


_interruptions: list[BaseException] = []


def _look() -> None:
    for calls in list(of_key.values()):
        with contextlib.suppress(RuntimeError, ValueError):  # the core was shut down, or the process set was removed
            calls.look()


class _Joining(process.Follower):
    def joined(self, core: Any) -> None:
        begin_again()  # before this init() the workers may have taken different numbers of steps


process.follow(_Joining())
circular_wait.looks.append(_look)

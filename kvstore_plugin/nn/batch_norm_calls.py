"""The names of a SyncBatchNorm's calls, and what a worker tells the others about calls that it does not make.

All workers call a layer equally often between two steps of a trainer that trains it. So a call's name has the number of
the step and the call's number in that step. After a step all workers count from 0 again: a call that one worker has
left out, because it could not read a batch for example, spoils no later step.

No worker knows how many calls the others make. So after a step a worker notes the names that it will not use: that of
the call after its last call, and, if the step has failed, those of backward passes that it has not begun. A thread
looks once a second whether other workers wait under such a name. Only then the worker refuses the operation, which
gives the others an error.

An operator takes its number when it runs, since MXNet runs no Python code in the call of a static graph (static_alloc).
The program may then be some steps ahead. So a step ends for a layer not in step(), but in the order of MXNet's engine:
at a mark behind the operators that step() has found.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from typing import Any, NamedTuple, Sequence

from ..compat import engine_marks, forks
from ..compat.mxnet import MXNetError, autograd
from ..coordination import circular_wait, operation_names
from ..world import process
from ..world.process_set import ProcessSet

_FORGET_EVERY = 128  # calls of a layer; then the core drops the counts of its names, which are used only once
_MOST_ABSENT = 64  # noted names of a layer; older ones are dropped


class Number(NamedTuple):
    """The number of a call: the number of the step, and the number of the call in it."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"{self.step}.{self.call}"


class _Absent(NamedTuple):
    """A name under which this worker will start no operation."""

    kind: str
    number: Number
    reason: str
    is_certain: bool = False  # whether the step has failed on this worker


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
        self.key = f"sync_batch_norm_{next(_made)}"  # unique in this process
        self.layer = weakref.ref(layer)
        self._first_use = first_use
        self._lock = threading.Lock()  # held while _next changes
        self._taken = 0
        self._era = 0  # the number of resets
        self.reset()
        of_key[self.key] = self

    def reset(self) -> None:
        """Begin to count again. To be called on all workers."""
        self._era += 1
        self._steps = 0  # steps of the program
        self._in_evaluation = 0
        self._next = Number(0, 0)  # the number of the next operator that runs
        self._most = 0  # calls in one step
        self._running = 0  # the step of the last operator that has run
        self._absent: list[_Absent] = []
        self._refused: list[Number] = []  # calls whose backward passes were refused

    def next_number(self) -> Number:
        """The number of the next operator that runs."""
        return self._next

    def note(self) -> None:
        """Register a call, before its operator runs."""
        if autograd.is_training():
            self.scope()
        else:
            self._in_evaluation += autograd.is_recording()

    def take(self) -> Number:
        """Take the number of a call, in its operator. The operators of a layer run one after another."""
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
        for one in self._absent[:] if self._absent else ():
            if one.kind == "backward" and one.number == number:
                self._drop(one)
        if number in self._refused:
            raise MXNetError(f"{self._name('backward', number)} was refused in this rank's failed step.")

    def has_run(self) -> None:
        """Register that all workers have made the forward pass that has begun here: none waits in an earlier step."""
        for one in self._absent[:] if self._absent else ():
            if one.number.step < self._running:
                self._drop(one)
        if self._refused:
            self._refused = [one for one in self._refused if one.step >= self._running - 1]

    def will_not_make(self, kind: str, number: Number, reason: str, is_certain: bool = False) -> None:
        """Note that this worker will never start this operation. Other workers get the reason if they wait for it."""
        self._absent.append(_Absent(kind, number, reason, is_certain))
        if len(self._absent) > _MOST_ABSENT:
            del self._absent[0]

    def end_step(self, refusal: str) -> None:
        """Register a step of the program. The calls of the next step begin when the operators of this step have run."""
        step = _Step(
            self._steps, self._in_evaluation, refusal, self._is_stale(), self._first_use.is_due(), self._era
        )  # fmt: skip
        self._steps, self._in_evaluation = self._steps + 1, 0
        layer = self.layer()
        if layer is None or not layer.running_mean._data:  # then no operator can have run
            self._end(step)
        else:
            forks.wait_before_forks()  # the mark needs the GIL
            # In a graph with static_shape the engine takes the operator for a mere reader of the statistics.
            engine_marks.push(layer.running_mean._data[0], functools.partial(self._end, step))

    def _end(self, step: _Step) -> None:
        with self._lock:
            if step.era != self._era:
                return
            missing, self._next = Number(step.number, self._next.call), Number(step.number + 1, 0)
        is_less, self._most = missing.call < self._most, max(missing.call, self._most)
        if not (is_less or step.is_before_use or step.in_evaluation or step.refusal):
            return
        reason = self._told(missing, step)
        self.will_not_make("forward", missing, reason, bool(step.refusal))
        for call in range(missing.call) if step.refusal and step.is_stale else ():
            self.will_not_make("backward", Number(missing.step, call), reason, True)

    def _is_stale(self) -> bool:
        """Whether the program has called no backward pass of the layer since the last step, as its gradients tell."""
        layer = self.layer()
        if layer is None:
            return False
        weights = [one._data for one in (layer.gamma, layer.beta) if one.grad_req != "null" and one._data]
        return bool(weights) and not any(one[0]._fresh_grad for one in weights)

    def _told(self, missing: Number, step: _Step) -> str:
        """The reason for a missing forward pass."""
        shown, made = self._first_use.shown, missing.call
        if step.refusal:
            return f"that rank's step failed after {made} calls of {shown} in training: {step.refusal}"
        if step.in_evaluation and not made:
            mode = "evaluation mode in this step (autograd.record(train_mode=False)), and not in training"
            return f"{shown} was called on that rank in {mode}"
        return f"that rank took its step after {made} calls of {shown} in training"

    def look(self, is_leaving: bool = False) -> None:
        """Refuse operations in which other workers wait for this worker, which will not start them.

        `is_leaving`: refuse operations of failed steps even if no worker waits yet.
        """
        absent = self._absent[:]
        if not absent or self._first_use.is_due():  # before the first use, the name may be that of another layer
            return
        core = self.process_set._core
        come = core.waiting_for_this([self._name(one.kind, one.number) for one in absent])
        for one, ranks in zip(absent, come):
            if ranks or (is_leaving and one.is_certain):
                self._drop(one)
                if one.kind == "backward":
                    self._refused.append(one.number)
                core.refuse(self._name(one.kind, one.number), one.reason)
                if one.kind == "forward":
                    following = Number(one.number.step, one.number.call + 1)
                    self.will_not_make(one.kind, following, one.reason)

    def is_of(self, trained: set[int], workers: ProcessSet) -> bool:
        """Whether a trainer with these parameters and workers trains the layer on all workers of the layer."""
        layer = self.layer()
        if layer is None:
            return False
        own = (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
        if not any(id(one) in trained for one in own):
            return False
        ranks = self.process_set.ranks
        return self.process_set is workers or (ranks is not None and set(ranks) <= set(workers.ranks or ()))

    def _name(self, kind: str, number: Number) -> str:
        return f"{self._first_use.shown}/{kind}/{number}"

    def _drop(self, one: _Absent) -> None:
        with contextlib.suppress(ValueError):  # another thread has dropped it
            self._absent.remove(one)


of_key: weakref.WeakValueDictionary[str, Calls] = weakref.WeakValueDictionary()
_made = itertools.count()


def end_step(params: Sequence[Any], process_set: ProcessSet, refusal: str = "") -> None:
    """End the calls of a step of a trainer. Called once in each step on each worker, even if the step fails.

    Parameters
    ----------
    params : sequence of Parameter
        The trainer's parameters. Only layers with such a parameter count this step.
    process_set : ProcessSet
        The workers that take the trainer's steps together.
    refusal : str, optional
        Why the step has failed on this worker.
    """
    if not of_key:
        return
    trained = set(map(id, params))
    for calls in list(of_key.values()):
        if calls.is_of(trained, process_set):
            calls.end_step(refusal)


def begin_again() -> None:
    """Reset the call counts of all layers. To be called on all workers."""
    for calls in list(of_key.values()):
        calls.reset()


def _look(is_leaving: bool = False) -> None:
    for calls in list(of_key.values()):
        with contextlib.suppress(RuntimeError, ValueError):  # the core was shut down, or the process set was removed
            calls.look(is_leaving)


class _Leaving(process.Follower):
    def leaving(self) -> None:
        _look(is_leaving=True)


process.follow(_Leaving())
circular_wait.looks.append(_look)

"""Broadcast of a Parameter's values the moment it is initialized: in the first forward pass, when shapes are known.

MXNet gives a Parameter its values in one method, which is replaced here, on the class, by one that also looks
into a weak registry what waits for this Parameter. Nothing is added to the Parameter itself, so copies and pickles of
it are plain ones.

Ranks may differ in when they initialize a Parameter (one has loaded it from a file, another defers it), so each rank
takes each turn under each name exactly once, whatever it does first. Only where all ranks know that another broadcast
of the same initialization comes first is one left out.

A rank that has initialized a Parameter waits for those that have not, in whatever reads the values. In a step they find
that out together, from what all of them tell. Then those without values refuse their turn, those with values take them
back, and on all ranks the Parameter waits for its next use. No rank decides that from what it alone knows: ranks that
did not do the same would wait for turns that others never take.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np

from ..collectives.sparse_values import push_broadcast
from ..compat import patches
from ..compat.mxnet import DeferredInitializationError, MXNetError, NDArray, Parameter, autograd
from ..world import process
from ..world.process_set import ProcessSet
from . import load_tracking
from .naming import described


class Broadcast:
    """A broadcast of one Parameter.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that take part.
    name : str
        What the ranks match it by.
    root : int
        The rank within the set whose values count.
    priority : int
        Operations with a higher one run first.
    lasting : KeptNames, optional
        It is wanted at every initialization, not at the next only, so these names stay in use.
    """

    def __init__(self, process_set: ProcessSet, name: str, root: int, priority: int, lasting: Any = None) -> None:
        self.process_set = process_set
        self.name = name
        self.root = root
        self.priority = priority
        self.lasting = lasting
        self.covered = False  # at the next initialization another one comes first on all ranks, which is enough

    def push(self, values: list[NDArray]) -> None:
        """Send `values`, one array per device, or overwrite them with the root's."""
        push_broadcast(self.process_set, self.name, values[0], values, self.root, self.priority)

    def refuse(self, reason: str) -> None:
        """Take this rank's turn with a refusal."""
        self.process_set.core.refuse(self.name, reason)


_waiting: weakref.WeakKeyDictionary[Parameter, list[Broadcast]] = weakref.WeakKeyDictionary()
_times: weakref.WeakKeyDictionary[Parameter, int] = weakref.WeakKeyDictionary()
_withdrawn: weakref.WeakKeyDictionary[Parameter, _Held] = weakref.WeakKeyDictionary()
# How Parameters were initialized that had been deferred: what MXNet keeps until then.
_deferred_as: weakref.WeakKeyDictionary[Parameter, tuple] = weakref.WeakKeyDictionary()


def wait_for(parameter: Parameter, broadcast: Broadcast) -> None:
    """Let `broadcast` happen when the Parameter is initialized next."""
    _waiting.setdefault(parameter, []).append(broadcast)


def forget(names: str) -> None:
    """Drop the broadcasts whose names begin so."""
    for waiting in _waiting.values():
        waiting[:] = [broadcast for broadcast in waiting if not broadcast.name.startswith(names)]


def waits(parameter: Parameter) -> bool:
    """Whether some broadcast happens when the Parameter is initialized next."""
    return bool(_waiting.get(parameter))


def has_lasting(parameter: Parameter) -> bool:
    """Whether some broadcast happens at every initialization of the Parameter."""
    return any(broadcast.lasting for broadcast in _waiting.get(parameter, ()))


def times(parameter: Parameter) -> int:
    """How often the Parameter was initialized with a broadcast that happens at every initialization."""
    return _times.get(parameter, 0)


def check_values(
    process_set: ProcessSet,
    named: Sequence[tuple[str, Parameter]],
    are_new: Sequence[bool],
    exchange: Callable[[list[int]], np.ndarray],
) -> None:
    """Raise an error on all ranks if a Parameter has no values on some of them and needs a gradient there.

    Afterwards those that have values on some ranks only wait on all ranks for their next use, and so do those that were
    new on some rank: their broadcasts have failed, or may have, since MXNet lets operations fail that share a workspace
    with one that has.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that take part.
    named : sequence of (str, Parameter)
        Names for the error, and Parameters, the same on all ranks.
    are_new : sequence of bool
        Whether each was initialized since this has last succeeded.
    exchange : callable
        Returns the numbers of all ranks, a row for each, where this rank's are given.

    Raises
    ------
    DeferredInitializationError
        One has no values on this rank.
    MXNetError
        One has none on another rank, which the sentence names.
    """
    count = len(named)
    lacks = np.array([parameter._data is None for _, parameter in named], dtype=bool)
    needs = lacks & np.array([parameter.grad_req != "null" for _, parameter in named], dtype=bool)
    met = exchange([*lacks, *needs, *are_new]).astype(bool)
    of_ranks, needed, new = met[:, :count], met[:, count : 2 * count].any(axis=0), met[:, 2 * count :].any(axis=0)
    divided = of_ranks.any(axis=0) & ~of_ranks.all(axis=0)
    wrong = needed  # those without a gradient may wait for their use on some ranks longer than on others
    if not wrong.any():
        for _, parameter in named:
            _deferred_as.pop(parameter, None)  # it may hold values
        return
    mine = np.flatnonzero(wrong & lacks)
    number = int(mine[0] if mine.size else np.flatnonzero(wrong)[0])
    rank = process.rank() if mine.size else process_set.ranks[int(np.flatnonzero(of_ranks[:, number])[0])]
    sentence = (
        f"{described(*named[number])} has no values yet on rank {rank}: its initialization was deferred to the first "
        "forward pass, which has not used it. Pass a batch through the network before step(), of zeros where a worker "
        "has no data, or give its layer the size of its input (in_units, in_channels)."
    )
    for at in np.flatnonzero(divided | new):
        parameter = named[at][1]
        if not lacks[at]:
            _withdraw(parameter, bool(are_new[at]))
        elif divided[at]:
            _refuse(parameter, sentence)
    raise (DeferredInitializationError if mine.size else MXNetError)(sentence)


def give_back(parameters: Sequence[Parameter], before: Sequence[int], known: Iterable[Parameter], reason: str) -> None:
    """Let Parameters wait for their next use, where a rank refuses the first step, so that no rank is told more.

    Parameters
    ----------
    parameters : sequence of Parameter
        The same on all ranks.
    before : sequence of int
        The `times` of each when the ranks met last.
    known : iterable of Parameter
        Those that all ranks had values of then, which keep them; the same on all ranks.
    reason : str
        For ranks that wait for the values.
    """
    kept = {id(parameter) for parameter in known}
    for parameter, then in zip(parameters, before):
        if id(parameter) in kept or not has_lasting(parameter):
            continue
        if parameter._data is None:
            _refuse(parameter, reason)
        else:
            _withdraw(parameter, times(parameter) != then)


def _refuse(parameter: Parameter, reason: str) -> None:
    """Take this rank's turn in the broadcasts of a Parameter that has no values, since other ranks wait for it."""
    waiting = _waiting.get(parameter, [])
    for broadcast in waiting:
        if not broadcast.covered and broadcast.process_set.included():
            broadcast.refuse(reason)
        broadcast.covered = False
    waiting[:] = [broadcast for broadcast in waiting if broadcast.lasting]


class _Held(NamedTuple):
    """What a Parameter has had: its arrays, and what these depend on."""

    data: list[NDArray]
    grad: list[NDArray] | None
    grad_req: str
    dtype: Any


def _withdraw(parameter: Parameter, is_new: bool) -> None:
    """Let a Parameter that has values wait for its next use, as those of other ranks do.

    A new one is initialized again then, as it was, since that may have failed unseen. Values that were there before, or
    were loaded, are kept. So are the arrays: a network that is hybridized with static_alloc goes on writing to them.
    """
    data = parameter._data
    _withdrawn[parameter] = _Held(data, parameter._grad, parameter.grad_req, parameter.dtype)
    parameter._data = parameter._grad = None
    kept = (None, [array.context for array in data], None, data[0])
    is_made = is_new and not load_tracking.was_loaded(parameter)
    parameter._deferred_init = _deferred_as.get(parameter, kept) if is_made else kept


def _has_taken_back(parameter: Parameter, values: NDArray, devices: Any) -> bool:
    """Give a Parameter the arrays again that it had before, with these values; False where it needs others."""
    held = _withdrawn.pop(parameter, None)
    if held is None or (held.grad_req, held.dtype) != (parameter.grad_req, parameter.dtype):
        return False
    if [array.context for array in held.data] != list(devices) or held.data[0].shape != values.shape:
        return False
    parameter._data, parameter._grad = held.data, held.grad
    if values is not held.data[0]:
        with autograd.pause():
            for array in held.data:
                array[:] = values
    return True


def _initialized(parameter: Parameter) -> None:
    waiting = _waiting.get(parameter, [])
    left = []
    if has_lasting(parameter):
        _times[parameter] = times(parameter) + 1
    for broadcast in waiting:
        is_there = broadcast.process_set.included()  # and was not removed
        if is_there and not broadcast.covered:
            broadcast.push(parameter._data)
        if broadcast.lasting or not is_there:
            left.append(broadcast)
        if is_there:
            broadcast.covered = False
    waiting[:] = left


@patches.replaces(
    "gluon.Parameter._init_impl",
    when=patches.AT_INIT,
    why="Initialization may be deferred to the first forward pass, after the trainer was made.",
    does="Broadcasts the values when they are there.",
    undone_by="`shutdown()`",
)
def _init_impl(original: Callable, self: Parameter, data: NDArray, devices: Any) -> None:
    # Initialization and load_parameters come here without values. reset_ctx comes with those that it moves to another
    # device, where no other rank need follow.
    without_values = self._data is None
    if not (without_values and _has_taken_back(self, data, devices)):
        original(self, data, devices)
    if without_values and process.is_initialized():
        _initialized(self)


@patches.replaces(
    "gluon.Parameter._finish_deferred_init",
    when=patches.AT_INIT,
    why="Values that not all workers have made are discarded, and made again in the next forward pass.",
    does="Keeps how the Parameter is initialized.",
    undone_by="a Parameter that was not deferred",
)
def _finish_deferred_init(original: Callable, self: Parameter) -> None:
    if self._deferred_init:
        _deferred_as[self] = self._deferred_init
    original(self)


@patches.replaces(
    "gluon.Parameter.data",
    when=patches.AT_INIT,
    why="Blocks of MXNet 2.0 finish deferred initialization before their first forward pass only.",
    does="Initializes a Parameter whose values were discarded.",
    undone_by="a Parameter whose values were not discarded",
)
def _data(original: Callable, self: Parameter, *args: Any, **kwargs: Any) -> NDArray:
    if self._data is None and self in _withdrawn:
        self._finish_deferred_init()
    return original(self, *args, **kwargs)

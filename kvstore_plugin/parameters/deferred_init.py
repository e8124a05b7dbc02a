"""Broadcast of a Parameter's values when it is initialized: in the first forward pass, when shapes are known.

MXNet sets a Parameter's values in one method. This file replaces the method on the class: the replacement looks up the
Parameter's pending broadcasts in a weak registry. The Parameter itself has no new attributes, so its copies and pickles
are plain Parameters.

Ranks may initialize a Parameter at different times (a rank has loaded it from a file, another rank defers it), so each
rank takes each turn under each name exactly once, in any order. A rank leaves out a broadcast only if all ranks know
that another broadcast of the same initialization comes first.

If only some ranks have initialized a Parameter, operations on these ranks that read its values wait for the other
ranks. In a step all ranks exchange which Parameters have values. Then ranks without values refuse their turn, and ranks
with values withdraw the values, so on all ranks the Parameter is deferred until its next use. No rank decides this from
its own state alone: otherwise some ranks would wait for turns that other ranks never take.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np

from ..collectives.sparse_values import push_broadcast
from ..compat import arrays, patches
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
        The ranks of the broadcast.
    name : str
        The name by which the broadcast is matched.
    root : int
        The rank within the set whose values are sent.
    priority : int
        Operations with a higher priority run first.
    lasting : KeptNames, optional
        If given, the broadcast happens at every initialization, not only at the next, so these names stay in use.
    """

    def __init__(self, process_set: ProcessSet, name: str, root: int, priority: int, lasting: Any = None) -> None:
        self.process_set = process_set
        self.name = name
        self.root = root
        self.priority = priority
        self.lasting = lasting
        self.covered = False  # skipped at the next initialization, where another broadcast precedes it on all ranks

    def push(self, values: list[NDArray], key: int = 0) -> None:
        """Send `values`, one array per device, on the root; on other ranks overwrite them with the root's values.

        `key`: the number by which the core records a failure.
        """
        push_broadcast(self.process_set, self.name, values[0], values, self.root, self.priority, key=key)

    def refuse(self, reason: str) -> None:
        """Take this rank's turn with a refusal."""
        self.process_set._core.refuse(self.name, reason)


_waiting: weakref.WeakKeyDictionary[Parameter, list[Broadcast]] = weakref.WeakKeyDictionary()
_times: weakref.WeakKeyDictionary[Parameter, int] = weakref.WeakKeyDictionary()
_withdrawn: weakref.WeakKeyDictionary[Parameter, _Held] = weakref.WeakKeyDictionary()
# Parameters whose initialization was deferred: the _deferred_init that MXNet keeps until the initialization.
_deferred_as: weakref.WeakKeyDictionary[Parameter, tuple] = weakref.WeakKeyDictionary()
# Parameters whose broadcast may still fail, since not all ranks are known to have values. Each has a copy of the values
# that set_data() or load_parameters() has written after the broadcast began, or None. The copy is needed since the
# engine skips this write if the broadcast fails.
_unconfirmed_values: weakref.WeakKeyDictionary[Parameter, NDArray | None] = weakref.WeakKeyDictionary()


def wait_for(parameter: Parameter, broadcast: Broadcast) -> None:
    """Run `broadcast` when the Parameter is initialized next."""
    _waiting.setdefault(parameter, []).append(broadcast)
    if broadcast.lasting:
        _unconfirmed_values[parameter] = None


def forget(names: str) -> None:
    """Drop the broadcasts whose names begin with `names`."""
    for waiting in _waiting.values():
        waiting[:] = [broadcast for broadcast in waiting if not broadcast.name.startswith(names)]


def drop_values(parameter: Parameter) -> None:
    """Remove a Parameter's values, and the values kept for its next initialization."""
    parameter._data = parameter._grad = None
    _withdrawn.pop(parameter, None)
    _deferred_as.pop(parameter, None)


def waits(parameter: Parameter, process_set: ProcessSet) -> bool:
    """Whether a broadcast over this process set happens when the Parameter is initialized next."""
    return any(broadcast.process_set is process_set for broadcast in _waiting.get(parameter, ()))


def has_lasting(parameter: Parameter, process_set: ProcessSet | None = None) -> bool:
    """Whether a broadcast, over this process set if given, happens at every initialization of the Parameter."""
    return any(
        broadcast.lasting and process_set in (None, broadcast.process_set) for broadcast in _waiting.get(parameter, ())
    )


def times(parameter: Parameter) -> int:
    """How often the Parameter has been initialized with a lasting broadcast, which every initialization repeats."""
    return _times.get(parameter, 0)


def check_values(
    process_set: ProcessSet,
    named: Sequence[tuple[str, Parameter]],
    are_new: Sequence[bool],
    exchange: Callable[[list[int]], np.ndarray],
) -> None:
    """Raise an error on all ranks if a Parameter has no values on a rank and needs a gradient there.

    After an error, Parameters with values on only some ranks are deferred on all ranks until their next use. So are
    Parameters that were new on a rank: their broadcasts may have failed, since in MXNet an operation
    fails if it shares a workspace with a failed operation.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    named : sequence of (str, Parameter)
        Names for the error, and Parameters, the same on all ranks.
    are_new : sequence of bool
        For each Parameter, whether it was initialized since this check last succeeded.
    exchange : callable
        Given this rank's numbers, returns the numbers of all ranks, a row for each rank.

    Raises
    ------
    DeferredInitializationError
        A Parameter has no values on this rank.
    MXNetError
        A Parameter has no values on another rank, which the error names.
    """
    count = len(named)
    lacks = np.array([parameter._data is None for _, parameter in named], dtype=bool)
    needs = lacks & np.array([parameter.grad_req != "null" for _, parameter in named], dtype=bool)
    met = exchange([*lacks, *needs, *are_new]).astype(bool)
    of_ranks, needed, new = met[:, :count], met[:, count : 2 * count].any(axis=0), met[:, 2 * count :].any(axis=0)
    divided = of_ranks.any(axis=0) & ~of_ranks.all(axis=0)
    wrong = needed  # Parameters without a gradient may stay deferred longer on some ranks than on others
    if not wrong.any():
        for _, parameter in named:
            _deferred_as.pop(parameter, None)  # frees values that it may hold
            _unconfirmed_values.pop(parameter, None)
        return
    mine = np.flatnonzero(wrong & lacks)
    number = int(mine[0] if mine.size else np.flatnonzero(wrong)[0])
    rank = process.rank() if mine.size else process_set.ranks[int(np.flatnonzero(of_ranks[:, number])[0])]
    sentence = without_values(*named[number], rank)
    for at in np.flatnonzero(divided | new):
        parameter = named[at][1]
        if not lacks[at]:
            _withdraw(parameter, bool(are_new[at]))
        elif divided[at]:
            _refuse(parameter, sentence)
    raise (DeferredInitializationError if mine.size else MXNetError)(sentence)


def without_values(name: str, parameter: Parameter, rank: int) -> str:
    """The message about a Parameter without values on a rank in a step."""
    return (
        f"{described(name, parameter)} has no values yet on rank {rank}, since no forward pass has used it. Pass a "
        "batch through the network before step() (zeros where a worker has no data), or give its layer the size of its "
        "input (in_units, in_channels)."
    )


def redefer(parameters: Sequence[Parameter], before: Sequence[int], known: Iterable[Parameter], reason: str) -> None:
    """After a rank has refused the first step: defer Parameters until their next use, without an exchange.

    Parameters
    ----------
    parameters : sequence of Parameter
        The same on all ranks.
    before : sequence of int
        For each Parameter its `times` when the ranks last compared which Parameters have values.
    known : iterable of Parameter
        Parameters that had values on all ranks at that time, and keep them; the same on all ranks.
    reason : str
        The reason for ranks that wait for the values.
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
    """Refuse this rank's turns in the broadcasts of a Parameter without values, since other ranks wait for them."""
    waiting = _waiting.get(parameter, [])
    for broadcast in waiting:
        if not broadcast.covered and broadcast.process_set.included():
            broadcast.refuse(reason)
        broadcast.covered = False
    waiting[:] = [broadcast for broadcast in waiting if broadcast.lasting]


class _Held(NamedTuple):
    """A Parameter's withdrawn arrays, and the attributes that they depend on."""

    data: list[NDArray]
    grad: list[NDArray] | None
    grad_req: str
    dtype: Any


def _withdraw(parameter: Parameter, is_new: bool) -> None:
    """Defer a Parameter that has values until its next use, as on the ranks without values.

    A new Parameter is then initialized again in the same way, since its broadcast may have failed unnoticed. Older
    values, and values set or loaded meanwhile, are kept. The arrays are kept too: a network hybridized with
    static_alloc still writes to them.
    """
    data = parameter._data
    _withdrawn[parameter] = _Held(data, parameter._grad, parameter.grad_req, parameter.dtype)
    parameter._data = parameter._grad = None
    devices = [array.context for array in data]
    written = _unconfirmed_values.get(parameter)
    if written is not None:
        parameter._deferred_init = (None, devices, None, arrays.with_dtype_of(data[0], written))
        return
    kept = (None, devices, None, data[0])
    parameter._deferred_init = _deferred_as.get(parameter, kept) if is_new else kept


def _restore_withdrawn(parameter: Parameter, values: NDArray, devices: Any) -> bool:
    """Restore a Parameter's withdrawn arrays, with these values; False if it needs other arrays."""
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
        _unconfirmed_values[parameter] = None
    keys = load_tracking.watched_broadcasts(parameter, [broadcast.name for broadcast in waiting])
    for broadcast, key in zip(waiting, keys):
        is_there = broadcast.process_set.included()  # included() returns None if the set was removed
        if is_there and not broadcast.covered:
            broadcast.push(parameter._data, key)
        if broadcast.lasting or not is_there:
            left.append(broadcast)
        if is_there:
            broadcast.covered = False
    waiting[:] = left


@patches.replaces(
    "gluon.Parameter._init_impl",
    when=patches.AT_INIT,
    why="Initialization may be deferred to the first forward pass, after the trainer was created.",
    does="Broadcasts the values when they are there.",
    undone_by="`shutdown()`",
)
def _init_impl(original: Callable, self: Parameter, data: NDArray, devices: Any) -> None:
    # Initialization and load_parameters call this while the Parameter has no values. reset_ctx calls it with values,
    # to move them to another device, which does not concern other ranks.
    without_values = self._data is None
    if not (without_values and _restore_withdrawn(self, data, devices)):
        original(self, data, devices)
    if without_values and process.is_initialized():
        _initialized(self)


@patches.replaces(
    "gluon.Parameter.set_data",
    when=patches.AT_INIT,
    why="The engine skips this write if a broadcast before it fails, since another worker has no values yet.",
    does="Keeps a copy of the values until all workers are known to have values.",
    undone_by="a Parameter of which all workers had values in a step",
)
def _set_data(original: Callable, self: Parameter, data: Any) -> None:
    # Values from numpy need no copy here: MXNet waits for the broadcast before it writes them.
    is_early = self._data is not None and self in _unconfirmed_values and isinstance(data, NDArray)
    original(self, data)
    if is_early:
        with arrays.not_recorded():
            _unconfirmed_values[self] = data.copy()


@patches.replaces(
    "gluon.Parameter._finish_deferred_init",
    when=patches.AT_INIT,
    why="Values that only some workers have initialized are discarded, and initialized again in the next forward pass.",
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

"""Broadcast of a Parameter's values the moment it is initialized: in the first forward pass, when shapes are known.

MXNet gives a Parameter its values in one method, which is replaced here, once and on the class, by one that also looks
into a weak registry what waits for this Parameter. Nothing is added to the Parameter itself, so copies and pickles of
it are plain ones.

Ranks may differ in when they initialize a Parameter (one has loaded it from a file, another defers it), so each rank
takes each turn under each name exactly once, whatever it does first. Only where all ranks know that another broadcast
of the same initialization comes first is one left out.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, NoReturn, Sequence

from . import process
from .mxnet_compat import DeferredInitializationError, NDArray, Parameter
from .naming import described
from .process_set import ProcessSet
from .sparse_values import push_broadcast


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
_refused: weakref.WeakSet[Parameter] = weakref.WeakSet()  # the others know that this rank has no values


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


def refuse(parameter: Parameter, reason: str) -> None:
    """Tell the other ranks, which may wait for the values, why this rank takes no part in their broadcast.

    It is told once. If all ranks did so, the next initialization finds them in step again.
    """
    if parameter in _refused:
        return
    _refused.add(parameter)
    waiting = _waiting.get(parameter, [])
    for broadcast in waiting:
        if not broadcast.covered:
            broadcast.refuse(reason)
        broadcast.covered = False
    waiting[:] = [broadcast for broadcast in waiting if broadcast.lasting]


def refuse_deferred(deferred: Sequence[Any], tell: Callable[[str], None]) -> NoReturn:
    """Raise an error for parameters that need a gradient and have no values yet, here and on the other ranks.

    Parameters
    ----------
    deferred : sequence of objects with the attributes `label` and `parameter`
        At least one.
    tell : callable
        Lets the other ranks' part in the step fail with the sentence that it is given.

    Raises
    ------
    DeferredInitializationError
    """
    first = deferred[0]
    sentence = (
        f"{described(first.label, first.parameter)} has no values yet on rank {process.rank()}: its "
        "initialization was deferred to the first forward pass, which has not used it; pass a batch through the "
        "network before step(), or give its layer the size of its input (in_units, in_channels)."
    )
    tell(sentence)
    for one in deferred:  # those that have values wait for this rank's
        refuse(one.parameter, sentence)
    raise DeferredInitializationError(sentence)


def _initialized(parameter: Parameter) -> None:
    _refused.discard(parameter)
    waiting = _waiting.get(parameter, [])
    left = []
    for broadcast in waiting:
        is_there = broadcast.process_set.included()  # and was not removed
        if is_there and not broadcast.covered:
            broadcast.push(parameter._data)
        if broadcast.lasting or not is_there:
            left.append(broadcast)
        if is_there:
            broadcast.covered = False
    waiting[:] = left


def _broadcasting(original: Any) -> Any:
    """Parameter._init_impl, followed by what waits for it."""

    @functools.wraps(original)
    def _init_impl(self: Parameter, *args: Any, **kwargs: Any) -> None:
        # Initialization and load_parameters come here without values. reset_ctx comes with those that it moves to
        # another device, where no other rank need follow.
        without_values = self._data is None
        original(self, *args, **kwargs)
        if without_values and process.is_initialized():
            _initialized(self)

    _init_impl.broadcasts = True
    return _init_impl


if not getattr(Parameter._init_impl, "broadcasts", False):
    Parameter._init_impl = _broadcasting(Parameter._init_impl)

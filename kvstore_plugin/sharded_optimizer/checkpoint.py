"""Saving and loading the states of an optimizer on the store, where each worker has the states of its shards.

The first worker writes and reads the file. The file holds whole states, not shards, so any number of workers can load
it, or a Trainer without a store. States are sent one array at a time, and only the first worker holds all states.

No worker replaces its states before all workers know that every part of the call has succeeded.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Hashable, Iterator, Sequence

import numpy as np

from ..collectives.objects import allgather_object, broadcast_object
from ..compat import arrays, errors
from ..compat.mxnet import MXNetError, NDArray
from ..compat.state_tree import Leaf, described_array, filled, leaves, made_array, mapped
from ..coordination import agreement, deadlock_check, operation
from ..world import settings
from . import state_file, traits
from .atomic_file import write as write_whole
from .optimizer import StoreOptimizer
from .partition import Shard

_ROOT = 0  # rank, within the process set, of the worker that reads and writes the file

_ADVICE = (
    "With the optimizer on the store, as a stock Trainer has it by default, its save_states() and load_states() make "
    "this call: all workers must, not one under `if rank == 0:`."
)


def save(
    store_optimizer: StoreOptimizer, scope: str, fname: str, dump_optimizer: bool, new: Sequence[Hashable] = ()
) -> None:
    """Write the states of all shards to a file. Collective; the set's first worker writes.

    Parameters
    ----------
    store_optimizer : StoreOptimizer
    scope : str
        The prefix of the operations' names.
    fname : str
        Only the first worker's value is used.
    dump_optimizer : bool
        Whether the optimizer is written too, with its settings, scheduler and counts of updates.
    new : sequence, optional
        Keys whose owners were assigned for this call. If the workers' keys differ, these owners are removed.

    Raises
    ------
    OSError
        On the first worker: the file cannot be written, and is unchanged.
    MXNetError
        On the other workers if the first worker gets such an error. On all workers if some have not called this within
        MYKV_CHECKPOINT_WAIT_S, or if the workers' parameters or arguments differ.
    """
    exchange = _Exchange(store_optimizer, scope, f"save_optimizer_states({fname!r})", new)
    exchange.meet(lambda: f"save_optimizer_states, dump_optimizer={bool(dump_optimizer)}", fname)
    states = exchange.gather()
    content = state_file.Content(states, store_optimizer.optimizer if dump_optimizer else None)
    with exchange.end() as turn:
        if exchange.is_root:
            write_whole(fname, lambda file: state_file.write(file, content))
        turn.meet("end of save_optimizer_states")
    exchange.forget()


def load(store_optimizer: StoreOptimizer, scope: str, fname: str, new: Sequence[Hashable] = ()) -> None:
    """Load the states, and the optimizer if the file has it. Collective; the set's first worker reads.

    Parameters
    ----------
    store_optimizer : StoreOptimizer
        Its keys must have owners.
    scope, fname
        As for `save`.

    Raises
    ------
    OSError, ValueError
        On the first worker: the file cannot be read, is damaged, or belongs to another network or optimizer.
    MXNetError
        On the other workers if the first worker gets such an error. On all workers if some have not called this within
        MYKV_CHECKPOINT_WAIT_S, or if the workers' parameters or arguments differ. All states are unchanged.
    """
    exchange = _Exchange(store_optimizer, scope, f"load_optimizer_states({fname!r})", new)
    exchange.meet(lambda: "load_optimizer_states", fname)
    content = None

    def read() -> tuple[dict[Hashable, Any], Any]:
        nonlocal content
        content = state_file.read(fname)
        described = {key: mapped(state, described_array) for key, state in content.states.items()}
        _check(store_optimizer, described, content.optimizer, os.fspath(fname))
        return described, content.optimizer

    described, optimizer = exchange.from_root(read)
    states = exchange.scatter(described, content.states if content is not None else {})
    with exchange.end() as turn:
        turn.meet("end of load_optimizer_states")
    exchange.forget()
    store_optimizer.replace(states, optimizer)


def limit() -> operation.Limit:
    """How long a worker waits for the others' calls."""
    return operation.Limit(settings.value("MYKV_CHECKPOINT_WAIT_S"), "MYKV_CHECKPOINT_WAIT_S", _ADVICE)


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Context manager that adds advice to an error because some workers have not made the call."""
    try:
        yield
    except MXNetError as error:
        if errors.code_of(error) in ("left", "departed", "deadlock"):
            error.args = (f"{error}. {_ADVICE}",)
        raise


class _Exchange:
    """One call of save() or load(): its workers, and the transfers of arrays between shards and the first worker."""

    def __init__(self, store_optimizer: StoreOptimizer, scope: str, call: str, new: Sequence[Hashable]) -> None:
        self._optimizer = store_optimizer
        self._new = new
        self._process_set = store_optimizer.process_set
        self._scope = scope
        self._rank = self._process_set.rank()
        self._names = ""  # the prefix of the operations' names, set by meet()
        self.is_root = self._rank == _ROOT
        self.call = call

    def meet(self, label: Callable[[], str], fname: Any) -> None:
        """Wait for the other workers, and check that all divide the same parameters."""
        try:
            self._meet(label, fname)
        except MXNetError:  # raised on all workers
            self._optimizer.release(self._new)
            raise

    def _meet(self, label: Callable[[], str], fname: Any) -> None:
        """`meet`, without the end after an error.

        A wrong argument of one worker is an error on all workers: `label` and `fname` are evaluated inside an
        operation.Turn, which sends an exception to the other workers.
        """
        name = deadlock_check.meeting_name(self._scope)
        with operation.Turn(self._process_set, name, self.call):
            os.fspath(fname)
            text = label()
        texts = [
            f"{key!r} {self._optimizer.shape_of(key)} {self._optimizer.shards_of(key)}" for key in self._optimizer.keys
        ]
        numbers = [agreement.digest(texts), len(texts), self._optimizer.checkpoints]
        with advising():
            met = operation.exchange(self._process_set, name, self.call, text, numbers, limit())
        # The workers agree on new names for each call: a worker that left an earlier call by an exception has started
        # fewer operations with that call's names than the others.
        self._optimizer.checkpoints = int(met[:, 2].max()) + 1
        self._names = f"{name}/{self._optimizer.checkpoints}/"
        other = agreement.first_that_differs(met[:, :2])
        if other is not None:
            ranks = self._process_set.ranks
            raise MXNetError(
                f"{self.call}: the parameters in the store are not the same on all workers: rank {ranks[0]} has "
                f"{met[0, 1]}, and rank {ranks[other]} has {met[other, 1]}, with other names or shapes."
            )

    def end(self) -> operation.Turn:
        """The context manager for the end of the call, in which the workers wait for each other."""
        return operation.Turn(self._process_set, f"{self._names}end", self.call)

    def forget(self) -> None:
        """Drop the core's counts for the names of this call, which has succeeded on all workers."""
        self._process_set._core.forget(self._names)

    def from_root(self, make: Callable[[], Any]) -> Any:
        """Run `make` on the first worker, and return its result on all workers; if it fails, all raise an error."""
        sent: Any = None
        failure: Exception | None = None
        if self.is_root:
            try:
                sent = (make(), None)
            except Exception as error:
                failure = error
                sent = (None, f"{type(error).__name__}: {error}")
        root = self._process_set.ranks[_ROOT]
        made, reason = broadcast_object(sent, root, None, self._process_set)
        if failure is not None:
            raise failure
        if reason is not None:
            raise MXNetError(f"{self.call} has failed on rank {root}: {reason}")
        return made

    def gather(self) -> dict[Hashable, Any]:
        """The whole states by key on the first worker, an empty dict on other workers."""
        try:
            mine = {key: mapped(state, described_array) for key, state in self._optimizer.updater.states.items()}
            for state in self._optimizer.updater.states.values():
                for array in leaves(state, NDArray):
                    array.wait_to_read()
            sent = (mine, None)
        except Exception as error:
            sent = (None, f"{type(error).__name__}: {error}")
        described = allgather_object(sent, None, self._process_set)
        for rank, (_, reason) in zip(self._process_set.ranks, described):
            if reason is not None:
                raise MXNetError(f"{self.call} has failed on rank {rank}: {reason}")
        whole = {}
        # No array is sent before all workers have checked that all states can be assembled.
        for key in self._optimizer.keys:
            shards = self._optimizer.shards_of(key)
            parts = [described[shard.owner][0].get(key, _ABSENT) for shard in shards]
            if parts and not all(part is _ABSENT for part in parts):
                whole[key] = self._joined(key, shards, parts)
        states = {}
        for key, skeleton in whole.items():
            own = iter(leaves(self._optimizer.updater.states.get(key), NDArray))
            is_owner = self._optimizer.own_shard(key) is not None
            made = []
            for leaf in leaves(skeleton, Leaf):
                mine = arrays.memory(next(own)) if is_owner else None
                made.append(self._collect(key, leaf, mine))
            if self.is_root:
                states[key] = filled(skeleton, made)
        return states

    def scatter(self, described: dict[Hashable, Any], whole: dict[Hashable, Any]) -> dict[Hashable, Any]:
        """This worker's states, from the first worker's whole states."""
        states = {}
        for key, skeleton in described.items():
            own = self._optimizer.own_shard(key)
            arrays_of = iter(leaves(whole.get(key), NDArray))
            made = []
            for leaf in leaves(skeleton, Leaf):
                source = arrays.memory(next(arrays_of)) if self.is_root else None
                made.append(self._distribute(key, leaf, source))
            if own is not None:
                states[key] = filled(skeleton, made)
        return states

    def _joined(self, key: Hashable, shards: Sequence[Shard], parts: Sequence[Any]) -> Any:
        """The description of a whole state from the descriptions of its shards' states."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if all(isinstance(part, Leaf) for part in parts):
            if all(part.size == shard.count for part, shard in zip(parts, shards)):
                return first._replace(shape=self._optimizer.shape_of(key))
        elif all(type(part) is type(first) is not Leaf for part in parts):
            if not isinstance(first, (tuple, list)):
                return first
            if all(len(part) == len(first) for part in parts):
                return type(first)(self._joined(key, shards, one) for one in zip(*parts))
        raise MXNetError(
            f"{self.call}: the states of key {key!r} have different structures on ranks "
            f"{', '.join(str(self._process_set.ranks[shard.owner]) for shard in shards)}."
        )

    def _collect(self, key: Hashable, leaf: Leaf, mine: np.ndarray | None) -> NDArray | None:
        """A whole array of a state on the first worker, None on others. `mine`: the bytes of this worker's shard."""
        made = made_array(leaf) if self.is_root else None
        target = arrays.memory(made) if made is not None else None
        for shard, begin, end in self._ranges(key, leaf):
            if shard.owner == _ROOT:
                if target is not None:
                    target[begin:end] = mine
            else:
                received = target[begin:end] if target is not None else None
                self._send(shard.owner, mine, received, end - begin)
        return made

    def _distribute(self, key: Hashable, leaf: Leaf, source: np.ndarray | None) -> NDArray | None:
        """This worker's part of an array of a state, from the first worker's bytes; None if it has no shard."""
        made = None
        for shard, begin, end in self._ranges(key, leaf):
            target = None
            if shard.owner == self._rank:
                whole = end - begin == leaf.size * arrays.item_size(leaf)
                made = made_array(leaf if whole else leaf._replace(shape=(shard.count,)))
                target = arrays.memory(made)
            if shard.owner == _ROOT:
                if target is not None:
                    target[:] = source[begin:end]
            else:
                self._send(_ROOT, None if source is None else source[begin:end], target, end - begin)
        return made

    def _ranges(self, key: Hashable, leaf: Leaf) -> Iterator[tuple[Shard, int, int]]:
        """The shards of a key, and the bytes of the array that belong to each."""
        shards, width = self._optimizer.shards_of(key), arrays.item_size(leaf)
        for shard in shards:
            if len(shards) == 1:
                yield shard, 0, leaf.size * width  # the array's shape may differ from the weight's
            else:
                yield shard, shard.begin * width, (shard.begin + shard.count) * width

    def _send(self, sender: int, source: np.ndarray | None, target: np.ndarray | None, nbytes: int) -> None:
        """Broadcast bytes from one worker; workers that do not need them receive them into a temporary array."""
        if nbytes == 0:
            return
        if self._rank == sender:
            source = np.ascontiguousarray(source)
        elif target is None:
            target = np.empty(nbytes, dtype=np.uint8)
        with operation.Turn(self._process_set, f"{self._names}states", self.call) as turn:
            work = turn.broadcast(sender, source, target)
        operation.wait(work)


class _Absent:
    """Sentinel: a worker has no state for a key."""


_ABSENT = _Absent()


def _check(store_optimizer: StoreOptimizer, described: dict[Hashable, Any], optimizer: Any, fname: str) -> None:
    """Raise a ValueError unless these states fit the parameters in the store."""
    current = store_optimizer.optimizer
    if optimizer is not None and type(optimizer) is not type(current):
        raise ValueError(
            f"{fname!r} holds the states of {type(optimizer).__name__}, but the optimizer is {type(current).__name__}."
        )
    if optimizer is not None:
        traits.check(optimizer)
    known = set(store_optimizer.keys)
    if not known and described:
        raise ValueError(f"{fname!r} cannot be loaded: no parameter in the store has values yet.")
    for key, skeleton in described.items():
        if key not in known:
            raise ValueError(
                f"{fname!r} holds states of key {key!r}, but none of the {len(known)} parameters with values in the "
                "store has that key: the file belongs to another network."
            )
        shape = tuple(store_optimizer.shape_of(key))
        for leaf in leaves(skeleton, Leaf):
            if not _fits(leaf.shape, shape, len(store_optimizer.shards_of(key)) > 1):
                raise ValueError(
                    f"{fname!r} holds a state of shape {tuple(leaf.shape)} for key {key!r}, whose weight has the shape "
                    f"{shape}: the file belongs to another network."
                )
    if known and not described:
        counts = getattr(optimizer, "_index_update_count", {})
        if optimizer is None or counts:
            raise ValueError(
                f"{fname!r} holds no states, but the store has {len(known)} parameters: the file belongs to another "
                "network."
            )


def _fits(state: Sequence[int], weight: Sequence[int], divided: bool) -> bool:
    """Whether a state's shape fits a weight's; for an undivided weight also a number per row, or a single number."""
    if tuple(state) == tuple(weight):
        return True
    if divided:
        return False
    return tuple(state) == (1,) or (
        len(state) == len(weight) and all(one in (1, other) for one, other in zip(state, weight))
    )

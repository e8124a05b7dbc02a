"""Broadcast and allgather of Python objects, pickled. Both calls wait until all ranks call them."""

from __future__ import annotations

import pickle
from typing import Any, Sequence

import numpy as np

from ..coordination import operation
from ..world.process_set import ProcessSet, global_process_set


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the object of one rank, the root, to all ranks. Waits until all ranks call it.

    Parameters
    ----------
    obj : object
        Any object that pickle supports, or cloudpickle if it is installed (such as lambdas); it must fit into memory
        twice. Ignored on ranks other than the root.
    root_rank : int, optional
        The global rank of the root, which must be in the process set.
    name : str, optional
        Shown in errors; the same on all ranks. Blocking calls are matched by their order in the process set.
    process_set : ProcessSet, optional
        The ranks that call this function.

    Returns
    -------
    object
        `obj` itself on the root, a copy elsewhere.

    Raises
    ------
    TypeError, ValueError
        `root_rank` is not a rank, or not in the process set; then the call on the other ranks raises an MXNetError that
        names this rank. Or this rank is not in the process set.
    Exception
        On the root, an error of pickle. Then the call on the other ranks raises an MXNetError with the error's text.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        Ranks differ in root or name; or a rank waits in another call, has rejected its arguments, or has left the job.

    Examples
    --------
    >>> options = {"epochs": 5, "seed": 42} if mykv.rank() == 0 else None
    >>> mykv.broadcast_object(options, root_rank=0)
    {'epochs': 5, 'seed': 42}
    """
    with operation.waiting(process_set, operation.described("broadcast_object", name)) as turn:
        root = process_set._position_of(root_rank)
        is_root = turn.core.rank() == root
        mine = pickled(obj) if is_root else b""
        (sending,) = turn.agreed([operation.gathering(process_set, name, "object")])
        sizes = turn.meet(f"{turn.call} from rank {root_rank}", [len(mine)])[:, 0]
        received = _Broadcast(sending, root, mine, int(sizes[root])).wait()
    return obj if is_root else pickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list:
    """Send the objects of all ranks to all ranks. Waits until all ranks call it.

    Parameters
    ----------
    obj : object
        This rank's object; as for `broadcast_object`.
    name, process_set
        As for `broadcast_object`.

    Returns
    -------
    list of object
        The objects in the order of ranks. For this rank, a copy of `obj`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MXNetError
        As for `broadcast_object`.
    Exception
        An error of pickle. Then the call on the other ranks raises an MXNetError with the error's text.

    Examples
    --------
    >>> mykv.allgather_object({"rank": mykv.rank()})
    [{'rank': 0}, {'rank': 1}]
    """
    with operation.waiting(process_set, operation.described("allgather_object", name)) as turn:
        mine = pickled(obj)
        sendings = turn.agreed([operation.gathering(process_set, name, "object") for _ in range(turn.core.size())])
        sizes = turn.meet(turn.call, [len(mine)])[:, 0].tolist()
        received = _from_all(sendings, mine, sizes)
    return [pickle.loads(array) for array in received]


class _Broadcast:
    """A broadcast of `size` bytes from `root`, a rank within the process set. Only the root's bytes `mine` are used."""

    def __init__(self, turn: operation.Turn, root: int, mine: bytes, size: int) -> None:
        self._work = None
        with turn:
            is_root = turn.core.rank() == root
            self._bytes = np.frombuffer(mine, dtype=np.uint8) if is_root else np.empty(size, dtype=np.uint8)
            if turn.core.size() > 1:
                self._work = turn.broadcast(root, self._bytes, self._bytes)

    def wait(self) -> memoryview:
        if self._work is not None:
            operation.wait(self._work)
        return memoryview(self._bytes)


def _from_all(sendings: Sequence[operation.Turn], mine: bytes, sizes: Sequence[int]) -> list[memoryview]:
    """The bytes of all ranks. A function, since Python 3.13 leaves a loop in a `with` statement without __exit__() if a
    trace function raises an exception."""
    under_way = [_Broadcast(turn, root, mine, size) for root, (turn, size) in enumerate(zip(sendings, sizes))]
    return [one.wait() for one in under_way]


def pickled(obj: Any) -> bytes:
    """An object as bytes, by pickle, or by cloudpickle if it is installed."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            import cloudpickle
        except ImportError:
            pass
        else:
            return cloudpickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        raise

"""check_in_step: checks that all workers still have the same parameters.

Workers whose parameters differ would continue to train, with gradients that belong to other weights, and only a bad
result would show it. Causes are mistakes in a script, such as loading a file on one worker only, or faulty memory.
For each parameter, each worker sends a digest of the parameter's bits, of 8 bytes.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, Iterable, Sequence

import numpy as np

from ..collectives.row_sparse import is_row_sparse
from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.arguments import whole_number
from ..compat.mxnet import MXNetError, NDArray, Parameter
from ..coordination import agreement, operation
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from .aux_params import is_auxiliary
from .naming import Named, arrays_of, described, named_values

# Special values in place of a digest; a digest is above 0.
_WITHOUT_VALUES, _DEVICES_DIFFER = 0, -1

# For the first Parameter of calls with `every`: the number of these calls, by the scope of the process set. Each set
# counts separately, since sets may share ranks.
_calls: weakref.WeakKeyDictionary[Parameter, dict[str, int]] = weakref.WeakKeyDictionary()


def begin_again() -> None:
    """Reset the counts of calls. To be called on all workers."""
    _calls.clear()


def check_in_step(
    params: Any, every: int = 1, auxiliary: bool = False, process_set: ProcessSet = global_process_set
) -> None:
    """Raise an error on all workers unless their parameters are the same, bit by bit. Collective; waits.

    All workers must call it at the same place of the loop with the same arguments. A check waits for all earlier
    updates, and hashes all parameters. For ResNet-50 (102 MB) the hash takes about 0.2 s of one core; a call that
    `every` skips takes 0.2 ms.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter or NDArray
        As for `DistributedTrainer`; without values that differ between workers on purpose. Missing rows of a row_sparse
        array count as zeros.
    every : int, optional
        Only the first call and then every n-th call checks. The calls are counted by the process set and the first
        Parameter in `params`, so for arrays `every` must be 1.
    auxiliary : bool, optional
        Check the running means and variances of BatchNorm too, which differ between the workers unless
        `sync_aux_params` was called since the last step.
    process_set : ProcessSet, optional
        The workers that call this function.

    Raises
    ------
    TypeError, ValueError
        Errors of this rank's arguments: an argument is wrong, an array is csr or is on a GPU without a CUDA runtime
        that the core can use, or this rank is not in the process set. The other ranks get an MXNetError that names this
        rank.
    MXNetError
        A parameter differs between workers, or between the devices of a worker: the error names the first such
        parameter in the order of the network, and the ranks that differ from the majority. Or the workers pass
        different sets of parameters, or a worker waits in another call, has left the job, or passes a parameter that
        carries an error.

    Examples
    --------
    >>> for images, labels in loader:
    ...     with autograd.record():
    ...         loss = loss_of(net(images), labels)
    ...     loss.backward()
    ...     trainer.step(len(images))
    ...     mykv.check_in_step(net.collect_params(), every=10)
    """
    process.require()
    with operation.waiting(process_set, "check_in_step") as turn:
        every = whole_number("every", every, 1)
        named = [one for one in named_values(params) if auxiliary or not is_auxiliary(one.value)]
        if not _is_due(named, every, process_set):
            return
        numbers = [agreement.digest([item.name for item in named])]
        numbers += digests_of(item.value for item in named)
        met = turn.meet(f"check_in_step of {len(named)} parameters, every={every}", numbers)
    names, digests = met[:, 0], met[:, 1:]
    if (names != names[0]).any():
        mine = ", ".join(one.name for one in named[:5])
        raise MXNetError(
            f"check_in_step was given {len(named)} parameters on each rank, but with other names on "
            f"{_ranks(process_set, names != names[0])} than on rank {process_set.ranks[0]}; on this rank, "
            f"{process.rank()}, they begin with {mine}."
        )
    difference = difference_between(named, digests, process_set)
    if difference is not None:
        wrong = _out_of_step(digests)
        averages = all(is_auxiliary(named[number].value) for number in wrong)
        averages = averages and (digests[:, wrong] != _WITHOUT_VALUES).all()
        cure = "sync_aux_params(net)" if averages else "broadcast_parameters()"
        raise MXNetError(
            f"{difference} In all, {len(wrong)} of {len(named)} parameters are out of step; {cure} would make them "
            "equal."
        )


def digests_of(values: Iterable[Any]) -> list[int]:
    """A hash of the bits of each Parameter or NDArray, to be compared by `difference_between`.

    Raises
    ------
    MXNetError
        An array carries an error.
    """
    return [_digest_of(value) for value in values]


def difference_between(named: Sequence[Named], digests: np.ndarray, process_set: ProcessSet) -> str | None:
    """Describes the first parameter, in the order of the network, whose digests differ. None if all are equal.

    Parameters
    ----------
    named : sequence of Named
    digests : ndarray of int64, shape (size, len(named))
        Row r holds what `digests_of` has returned on rank r of the process set.
    process_set : ProcessSet
    """
    wrong = _out_of_step(digests)
    if not wrong.size:
        return None
    first = min(wrong, key=lambda number: named[number].position)
    return _difference(named[first], digests[:, first], process_set)


def _out_of_step(digests: np.ndarray) -> np.ndarray:
    return np.flatnonzero((digests != digests[0]).any(axis=0) | (digests == _DEVICES_DIFFER).any(axis=0))


def _is_due(named: Sequence[Named], every: int, process_set: ProcessSet) -> bool:
    if every == 1 or not named:
        return True
    first = named[0].value
    if not isinstance(first, Parameter):
        raise ArgumentValueError(
            f"every={every} works for Parameters, but params holds arrays. Leave every out, and call check_in_step in "
            f"every {every}th step only."
        )
    calls = _calls.setdefault(first, {})
    number = calls.get(process_set._scope, 0)
    calls[process_set._scope] = number + 1
    return number % every == 0


def _difference(one: Named, digests: np.ndarray, process_set: ProcessSet) -> str:
    name = described(one.name, one.value)
    if (digests == _DEVICES_DIFFER).any():
        return f"{name} differs between the devices of {_ranks(process_set, digests == _DEVICES_DIFFER)}."
    if (digests == _WITHOUT_VALUES).any():
        return (
            f"{name} has no values yet on {_ranks(process_set, digests == _WITHOUT_VALUES)}, but has values on other "
            "ranks."
        )
    kinds, first, counts = np.unique(digests, return_index=True, return_counts=True)
    # The majority's value is taken to be right; in a tie, the value of the lowest rank.
    right = kinds[np.lexsort((first, -counts))[0]]
    return (
        f"{name} has other values on {_ranks(process_set, digests != right)} than on "
        f"{_ranks(process_set, digests == right)}."
    )


def _ranks(process_set: ProcessSet, chosen: np.ndarray) -> str:
    ranks = [process_set.ranks[position] for position in np.flatnonzero(chosen)]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {process_sets.shown(ranks)}"


def _digest_of(value: Any) -> int:
    held = arrays_of(value)
    if held is None:
        return _WITHOUT_VALUES
    replicas = arrays.as_list(held, "value of a parameter", dense=not is_row_sparse(held))
    digests = {digest(array if array.stype == "default" else array.tostype("default")) for array in replicas}
    return digests.pop() if len(digests) == 1 else _DEVICES_DIFFER


def digest(array: NDArray) -> int:
    """A hash of shape, dtype and bits of an array, above 0 and below 2**57.

    All bytes are hashed, in their order. Arrays that differ have the same hash with a probability of about 2**-56.

    Raises
    ------
    MXNetError
        The array carries an error.
    """
    hashed = hashlib.blake2b(f"{array.shape} {arrays.dtype_name(array.dtype)}".encode(), digest_size=7)
    hashed.update(arrays.memory_of_weight(array))
    return 1 + int.from_bytes(hashed.digest(), "big")

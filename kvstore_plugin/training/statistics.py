"""Statistics of this worker's operations and waits: the counters of the core, with names and units.

The counters are always on (csrc/runtime/requests.h, csrc/table/entry.h, csrc/mxnet/step_clock.h). Reading the counters
sends no message and waits for no other worker. The ranks of a host record in shared memory which rank came last. Hosts
announce the arrival of their ranks by messages, from which rank 0 learns which host came last. So rank 0 knows how late
every rank was.
"""

from __future__ import annotations

import re
import time
import weakref
from typing import Any

from ..gradients import dense_reducer
from ..world import process
from ..world.process_set import ProcessSet, global_process_set

# How arrays are exchanged: the core's names, and the names in the dict of statistics().
_WAYS = {"in_place": "in place", "copied": "copied", "through_host": "through host memory", "nccl": "NCCL"}

_Counters = dict  # all counters of the core at one moment, as one flat dict of numbers

_began: _Counters = {}  # the counters of the process when the core was started
_baselines: weakref.WeakKeyDictionary[Any, _Counters] = weakref.WeakKeyDictionary()  # at the last reset, by set


def statistics(process_set: ProcessSet = global_process_set, reset: bool = False) -> dict[str, Any]:
    """Statistics since init() or the last reset: this worker's operations, and the workers that others waited for.

    The call returns at once: it is not collective, sends nothing, and costs a few microseconds. The counters are always
    on.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The operations of this set only.
    reset : bool, optional
        Restart counting for this set.

    Returns
    -------
    dict
        With these keys. All times are in seconds, all sizes in bytes; a share is between 0 and 1, and None without
        data.

        ``seconds``: float
            Length of the counted time.
        ``steps``: int
            Steps of trainers whose gradients were summed: of `DistributedTrainer`, and of gluon.Trainer with the store
            'mykv'. Steps of Module, LocalTrainer, and of a trainer with row_sparse gradients only, count as operations.
        ``operations``, ``bytes``: int
            Operations of this worker that have a result, including barriers and broadcasts, and the size of their
            arrays.
        ``roads``: dict of str to dict
            The same numbers, ``operations`` and ``bytes``, for ``'in place'`` (buckets in shared memory), ``'copied'``
            (into shared memory and back), ``'through host memory'`` (from GPUs) and ``'NCCL'``.
        ``failed``: int
            Operations on MXNet's arrays that have failed in this process, since it began.
        ``waited``: float
            How long operations of this worker waited until all workers had arrived; the sum over operations, which
            may wait at the same time.
        ``waited_in_steps``: float
            The same for the operation of each step whose gradients backward writes last. Backward has ended on this
            worker when this operation begins, so this is time lost to slower workers.
        ``communication``: float
            How long sums of steps were in progress on this worker, including waits. ``communication``, ``overlapped``
            and ``update`` count the operations of all process sets.
        ``overlapped``: float or None
            The share of ``communication`` that passed before backward had written the last gradients.
        ``update``: float
            How long the updates of the weights took: from the sums until the weights were new. With an optimizer on the
            store this includes sending the weights. 0 if a worker trains alone.
        ``late``: list of dict
            The workers that came last, the worker that others waited for longest first: ``rank``; ``machine``, its
            name; ``steps``, how often it came last to a step; ``step_share``, the share of these steps in all steps;
            ``step_wait``, how long the other workers waited for it in such a step, on average; ``operations``,
            ``operation_share`` and ``operation_wait``, the same for all operations. In an operation of several hosts
            the time that messages take is part of the wait.
        ``late_among``: str
            The workers in ``late``: ``'all workers'``, or ``'workers of this host'`` on ranks other than 0 if there are
            several hosts.
        ``trainers``: list of dict
            Each `DistributedTrainer` of the set, and each gluon.Trainer with the store: ``name``; ``adopted``, how many
            gradients are in buckets; ``copied``, how many are not, a dict with a number for each reason;
            ``bucket_bytes``, the sizes of its operations; ``sums_times``, None for a DistributedTrainer. gluon.Trainer
            sums gradients over the workers, and ``sums_times`` is the factor of the sums in its last step: ``'batch
            size 64 (gradients times 0.015625)'``. The results are means if that is the batch size of all workers
            together.

    Raises
    ------
    RuntimeError
        init() was not called.
    ValueError
        This worker is not in the process set.

    Examples
    --------
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels)
    >>> loss.backward()
    >>> trainer.step(len(images))
    >>> numbers = mykv.statistics()
    >>> print(f"waited {numbers['waited']:.3f} s in {numbers['operations']} operations")
    """
    core = process_set._core
    now = read(core)
    counted = since(now, _baselines.get(core, _began))
    if reset:
        _baselines[core] = now
    return shown(counted, core, process_set)


def read(core: Any) -> _Counters:
    """All counters of a process set, whose object in the core is `core`, and of the process."""
    given = core.statistics()
    counters: _Counters = {name: given[name] for name in ("steps", "waited_ns", "step_waited_ns")}
    for way, (operations, nbytes) in given["ways"].items():
        counters["operations", way], counters["bytes", way] = operations, nbytes
    for rank, *numbers in given["late"]:
        counters.update({("late", rank, number): value for number, value in enumerate(numbers)})
    counters.update(_of_process())
    return counters


def _of_process() -> _Counters:
    return {**process.core.step_times(), "time": time.monotonic(), "failed": process.core.failed_operations()}


def began() -> _Counters:
    """The counters when the core was started."""
    return dict(_began)


def since(now: _Counters, earlier: _Counters) -> _Counters:
    """The difference of the counters between two moments."""
    return {name: value - earlier.get(name, 0) for name, value in now.items()}


def shown(counted: _Counters, core: Any, process_set: ProcessSet) -> dict[str, Any]:
    """The dict of `statistics`."""
    roads = {
        name: {"operations": counted["operations", way], "bytes": counted["bytes", way]} for way, name in _WAYS.items()
    }
    summing = counted["summing_ns"]
    knows_all = len(core.host_ranks()) == 1 or core.rank() == 0
    return {
        "seconds": counted["time"],
        "steps": counted["steps"],
        "operations": sum(road["operations"] for road in roads.values()),
        "bytes": sum(road["bytes"] for road in roads.values()),
        "roads": roads,
        "failed": counted["failed"],
        "waited": counted["waited_ns"] / 1e9,
        "waited_in_steps": counted["step_waited_ns"] / 1e9,
        "communication": summing / 1e9,
        "overlapped": counted["overlapped_ns"] / summing if summing else None,
        "update": counted["updating_ns"] / 1e9,
        "late": _late(counted),
        "late_among": "all workers" if knows_all else "workers of this host",
        "trainers": _trainers(process_set),
    }


def _late(counted: _Counters) -> list[dict[str, Any]]:
    of_rank: dict[int, list[int]] = {}
    for name, value in counted.items():
        if isinstance(name, tuple) and name[0] == "late":
            of_rank.setdefault(name[1], [0] * 4)[name[2]] = value
    all_operations, _, all_steps, _ = (sum(column) for column in zip([0] * 4, *of_rank.values()))
    late = [
        {
            "rank": rank,
            "machine": process.machine_of(rank),
            "steps": steps,
            "step_share": steps / all_steps if all_steps else None,
            "step_wait": steps_ns / steps / 1e9 if steps else 0.0,
            "operations": operations,
            "operation_share": operations / all_operations,
            "operation_wait": operations_ns / operations / 1e9,
        }
        for rank, (operations, operations_ns, steps, steps_ns) in of_rank.items()
        if operations
    ]
    return sorted(late, key=lambda one: (-one["steps"] * one["step_wait"], -one["operations"] * one["operation_wait"]))


def _trainers(process_set: ProcessSet) -> list[dict[str, Any]]:
    described = [reducer.described() for reducer in list(dense_reducer.living)]
    mine = [one for one in described if one.pop("process_set") is process_set and one["bucket_bytes"]]
    return sorted(mine, key=lambda one: _in_order_made(one["name"]))


def _in_order_made(name: str) -> list[Any]:
    """Sort key of a trainer's name: trainer9 before trainer10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


class _Begin(process.Follower):
    def joined(self, core: Any) -> None:
        _baselines.clear()
        _began.clear()
        _began.update(_of_process())


process.follow(_Begin())

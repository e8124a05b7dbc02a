"""Shares of the optimizer's states as bytes: another worker keeps a copy, and after a loss they are redistributed.

A worker's share is the states of its shards. With the optimizer on the store no other worker has these states. So in
each commit every worker gives a copy of its share to another worker, its keeper. On a single host the keeper is the
next rank. With several hosts the keeper is on another host, unless a host has more than half of all workers. So the
states survive the loss of a whole host.
"""

from __future__ import annotations

import pickle
from typing import Any, Hashable, Mapping, Sequence

import numpy as np

from ..collectives.gather import alltoall
from ..compat import arrays
from ..compat.mxnet import NDArray, mx
from ..compat.state_tree import Leaf, described_array, leaves, made_array, mapped
from ..coordination import agreement
from ..sharded_optimizer.optimizer import StoreOptimizer
from ..sharded_optimizer.partition import Shard
from ..world.process_set import global_process_set

# In bytes. MXNet 1.9 counts the elements of an array with 32 bits.
_LARGEST_PIECE = 1 << 30


def pack(states: Mapping[Hashable, Any]) -> np.ndarray:
    """A share as bytes: the length of the description in 8 bytes, the description, and the arrays in order."""
    described = pickle.dumps({key: mapped(state, described_array) for key, state in states.items()})
    parts = [np.array([len(described)], dtype=np.int64).view(np.uint8), np.frombuffer(described, dtype=np.uint8)]
    parts += [arrays.memory(array) for state in states.values() for array in leaves(state, NDArray)]
    return np.concatenate(parts)


def keepers(hosts: Sequence[Sequence[int]]) -> list[int]:
    """The keeper of each worker's share. Each worker keeps one copy.

    Workers are listed host by host. If the largest host has n workers, a worker's keeper is n positions after it in
    this list. So the keeper is on another host, unless the worker's host has more than half of all workers. On a single
    host the keeper is the next rank.

    Parameters
    ----------
    hosts : sequence of sequence of int
        The ranks of each host.
    """
    order = [rank for ranks in hosts for rank in ranks]
    largest = max(len(ranks) for ranks in hosts)
    distance = largest if largest < len(order) else 1
    kept_by = [0] * len(order)
    for position, rank in enumerate(order):
        kept_by[rank] = order[(position + distance) % len(order)]
    return kept_by


def pass_on(share: np.ndarray, sizes: Sequence[int], keeper: int) -> np.ndarray:
    """Send this worker's share to its keeper, and return the share that this worker keeps. Collective.

    Parameters
    ----------
    share : ndarray of uint8
    sizes : sequence of int
        Bytes of each worker's share.
    keeper : int
    """
    received = []
    for begin in range(0, max(sizes), _LARGEST_PIECE):
        piece = share[begin : begin + _LARGEST_PIECE]
        splits = [0] * len(sizes)
        splits[keeper] = len(piece)
        with mx.util.np_shape(True):
            got, _ = alltoall(mx.nd.from_numpy(np.ascontiguousarray(piece)), splits)
            received.append(got.asnumpy())
    return received[0] if len(received) == 1 else np.concatenate(received)


def divide_anew(
    store_optimizer: StoreOptimizer,
    shards: Mapping[Hashable, Sequence[Shard]],
    providers: Sequence[int],
    held: Mapping[int, np.ndarray],
) -> None:
    """Send each worker the states of its new shards, from the shares of the old division. Collective.

    Parameters
    ----------
    store_optimizer : StoreOptimizer
        Its keys have owners among the remaining workers.
    shards : mapping of key to sequence of Shard
        The old division: the shards of each key before the loss.
    providers : sequence of int
        For each worker of the old division: the new rank of the worker that has this worker's share.
    held : mapping of int to ndarray of uint8
        Shares that this worker has, by rank in the old division.
    """
    states: dict[Hashable, Any] = {}
    for old, provider in enumerate(providers):
        share = agreement.bytes_of_rank(global_process_set, "world/recovery of states", held.get(old), provider)
        for key, (state, pieces) in unpack(share).items():
            mine = store_optimizer.own_shard(key)
            part = next((shard for shard in shards[key] if shard.owner == old), None)
            if mine is None or part is None:
                continue
            if key not in states:
                states[key] = mapped(state, lambda leaf, key=key: _made(store_optimizer, key, leaf, shards[key]), Leaf)
            for leaf, piece, array in zip(leaves(state, Leaf), pieces, leaves(states[key], NDArray)):
                _fill(
                    array, piece, arrays.item_size(leaf), part, mine, len(shards[key]) == 1 and leaf.size != part.count
                )
    store_optimizer.replace(states, None)


def _made(store_optimizer: StoreOptimizer, key: Hashable, leaf: Leaf, before: Sequence[Shard]) -> NDArray:
    """An array for this worker's new shard; `leaf` describes the array of an old shard."""
    mine, whole = store_optimizer.own_shard(key), sum(shard.count for shard in before)
    if len(before) == 1 and (leaf.size != whole or mine.count == whole):
        return made_array(leaf)
    return made_array(leaf._replace(shape=store_optimizer.shape_of(key) if mine.count == whole else (mine.count,)))


def _fill(array: NDArray, piece: np.ndarray, width: int, part: Shard, mine: Shard, as_it_is: bool) -> None:
    """Copy the elements of `mine` that are in `part` to `array`; `piece` has the bytes of `part`."""
    target = arrays.memory(array)
    if as_it_is:  # the state has one number for the whole weight, or for each row, so it is not divided
        target[:] = piece
        return
    begin, end = max(part.begin, mine.begin), min(part.begin + part.count, mine.begin + mine.count)
    if begin < end:
        target[(begin - mine.begin) * width : (end - mine.begin) * width] = piece[
            (begin - part.begin) * width : (end - part.begin) * width
        ]


def unpack(share: np.ndarray) -> dict[Hashable, tuple[Any, list[np.ndarray]]]:
    """Each state of `pack`: its description, and the bytes of its arrays in order."""
    length = int(share[:8].view(np.int64)[0])
    described = pickle.loads(share[8 : 8 + length].tobytes())
    begin = 8 + length
    unpacked = {}
    for key, state in described.items():
        pieces = []
        for leaf in leaves(state, Leaf):
            nbytes = leaf.size * arrays.item_size(leaf)
            pieces.append(share[begin : begin + nbytes])
            begin += nbytes
        unpacked[key] = (state, pieces)
    return unpacked

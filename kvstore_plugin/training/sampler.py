"""DistributedSampler: selects this worker's samples of a data set in an epoch.

The workers do not communicate: each computes the same order of all samples from the seed and the epoch, and rank r
takes the r-th, the (r + size)-th sample and so on. So the n-th batches of all workers together are the n-th batch of a
single worker with a batch that is `size` times as large.
"""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np

from ..compat.arguments import whole_number
from ..compat.mxnet import gluon
from ..world import process, training_warnings
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set


class DistributedSampler(gluon.data.Sampler):
    """Divides the samples of a data set among the workers: as the `sampler` of a gluon.data.DataLoader.

    In training all workers must make the same number of steps. So by default all workers get the same number of
    samples; if needed, some samples are taken twice. All workers must pass the same arguments, except `rank`.

    Parameters
    ----------
    length : int
        Number of samples in the data set, ``len(dataset)``.
    shuffle : bool, optional
        True: a random order, a new one in each epoch (see `set_epoch`). False: the order of the data set.
    seed : int, optional
        Seed of the random orders; at least 0.
    drop_last : bool, optional
        True: drop the last samples of the order if they do not suffice for all workers. False: repeat the first
        samples.
    even : bool, optional
        False: give each sample to exactly one worker, once, so that some workers get one more sample than others. For
        evaluation, in which workers do not wait for each other. In training the workers would make different numbers of
        steps.
    rank, size : int, optional
        This worker and the number of workers, instead of those of `process_set`. Give both or neither.
    process_set : ProcessSet, optional
        The workers that share the data. kvstore_plugin is initialized if needed.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, this worker is not in `process_set`, or `drop_last` would drop all samples.

    Notes
    -----
    In training, a complete second iteration over a shuffled order without a call of `set_epoch` is a mistake: the first
    worker logs one warning. With ``shuffle=False`` or ``even=False`` it logs no warning.

    Examples
    --------
    >>> sampler = mykv.DistributedSampler(len(dataset), seed=1)
    >>> loader = gluon.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)  # another order in each epoch
    ...     for images, labels in loader:
    ...         scores = net(images)  # continue as in DistributedTrainer's example
    """

    # Defaults in the class, since samplers from older pickles lack these attributes.
    _was_used = False  # an iteration has reached its end since the last set_epoch()
    _is_told = False

    def __init__(
        self,
        length: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        even: bool = True,
        rank: int | None = None,
        size: int | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if hasattr(length, "__len__"):
            raise TypeError(f"length must be an int, not {type(length).__name__}: pass len(dataset).")
        self._length = whole_number("length", length, 0)
        self._shuffle = bool(shuffle)
        self._seed = whole_number("seed", seed, 0)
        self._epoch = 0
        self._rank, self._size = _rank_and_size(rank, size, process_set)
        self._drop_last, self._even = bool(drop_last), bool(even)
        if self._drop_last and not self._even:
            raise ValueError(
                "drop_last=True and even=False exclude each other: drop_last=True drops samples, even=False keeps all "
                "samples."
            )
        if self._drop_last and 0 < self._length < self._size:
            raise ValueError(f"drop_last=True drops all {length} samples, since there are {self._size} workers.")

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next iteration on. Call it before each epoch on all workers.

        Parameters
        ----------
        epoch : int
            At least 0. Without a call the epoch is 0, so that each epoch has the same order.

        Examples
        --------
        >>> sampler = mykv.DistributedSampler(len(dataset), seed=1)
        >>> sampler.set_epoch(1)  # the order differs from that of epoch 0
        >>> len(list(sampler))  # of 1797 samples, one is used twice
        899
        """
        self._epoch = whole_number("epoch", epoch, 0)
        self._was_used = False

    def __iter__(self) -> Iterator[int]:
        if self._was_used and not self._is_told and self._rank == 0 and self._shuffle and self._even:
            self._is_told = True
            training_warnings.warn(
                "A DistributedSampler begins another epoch without set_epoch(), so the order of the samples is the "
                "same as in the previous epoch. Call sampler.set_epoch(epoch) before each epoch on all workers. For a "
                "data set that is only evaluated, shuffle=False gives one order without this warning."
            )
        return self._noting_end(self._order()[self._rank :: self._size].tolist())

    def _noting_end(self, indices: list[int]) -> Iterator[int]:
        """Yield the indices, and note their end. An iteration that stops early (after a batch, to get its shapes) does
        not count as an epoch."""
        epoch = self._epoch
        yield from indices
        self._was_used = self._epoch == epoch

    def __len__(self) -> int:
        if not self._even:
            return len(range(self._rank, self._length, self._size))
        return self._length // self._size if self._drop_last else -(-self._length // self._size)

    def _order(self) -> np.ndarray:
        """The order in which the workers take samples in turn; with `even`, extended or cut to a multiple of `size`."""
        order = np.arange(self._length)
        if self._shuffle:
            # The numbers of a RandomState are the same in all releases of numpy, unlike those of a Generator.
            bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
            np.random.RandomState(bits).shuffle(order)
        # np.resize repeats the order from its beginning, or cuts its end.
        return np.resize(order, len(self) * self._size) if self._even else order


def _rank_and_size(rank: Any, size: Any, process_set: Any) -> tuple[int, int]:
    if (rank is None) != (size is None):
        raise ValueError("rank and size must be given both or not at all.")
    if rank is None:
        if process_set is global_process_set:
            process.require()
        process_sets.check(process_set)
        return process_set.rank(), process_set.size()
    if process_set is not global_process_set:
        raise ValueError("rank and size must not be given together with a process_set, which has its own.")
    size = whole_number("size", size, 1)
    rank = whole_number("rank", rank, 0)
    if rank >= size:
        raise ValueError(f"rank must be below size, {size}, not {rank}.")
    return rank, size

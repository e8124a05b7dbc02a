"""What all workers of a trainer multiply gradients by: the same number, or their weights would drift apart.

Each worker divides by the size of its own batch, and gradients are averaged over the workers. Where all batches have
one size, that is the mean over all samples. Where workers have unequal numbers of devices, with a batch of one size on
each, the worker with more devices passes a larger number to step(); the mean over all samples, and with it over all
devices, is then the sum of gradients divided by the sum of all batches.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from .mxnet_compat import MXNetError

# Factors for batches of one size on each device, computed on different workers, differ by roundings.
_ROUNDING = 1e-12

# What ranks that compare their factors show to ranks that do something else.
LABEL = (
    "a step with gradients times another number than before (all workers must give step() batches of one size, as with "
    "a DistributedSampler or last_batch='discard')"
)


def numbers(factor: float, device_count: int) -> list[int]:
    """What a worker tells the others.

    Parameters
    ----------
    factor : float
        What it would multiply gradients by itself.
    device_count : int
        Number of devices that its gradients lie on.
    """
    return [int(np.float64(factor).view(np.int64)), device_count]


def common(met: np.ndarray, ranks: Sequence[int], scope: str) -> float:
    """What all multiply the mean over the workers by. The same bits on all workers.

    Parameters
    ----------
    met : ndarray of int64, shape (size, 2)
        The numbers of all workers.
    ranks : sequence of int
        Their global ranks.
    scope : str
        Of the trainer, for the error.

    Raises
    ------
    MXNetError
        Neither all batches nor those of all devices have one size.
    """
    factors, devices = met[:, 0].copy().view(np.float64), met[:, 1]
    if (factors == factors[0]).all():
        return float(factors[0])
    of_a_device = factors * devices
    if np.abs(of_a_device - of_a_device[0]).max() <= _ROUNDING * np.abs(of_a_device[0]):
        return float(of_a_device[0] * len(devices) / devices.sum())
    other = int(np.flatnonzero(factors != factors[0])[0])
    which = f" on {devices[0]} and {devices[other]} devices" if (devices != devices[0]).any() else ""
    raise MXNetError(
        f"The ranks do not take this step of {scope} alike: rank {ranks[0]} has a step with gradients times "
        f"{float(factors[0])!r}, rank {ranks[other]} with gradients times {float(factors[other])!r}{which}. If their "
        "batches differ in size, let step() be given the same one on all workers, as with a DistributedSampler or "
        "last_batch='discard', or one that is the same for each device."
    )

"""What all workers of a trainer multiply gradients by: the same number, or their weights would drift apart.

Each worker divides by the size of its own batch, and gradients are averaged over the workers. Where all batches have
one size, that is the mean over all samples. Where workers have unequal numbers of devices, with a batch of one size on
each, the worker with more devices passes a larger number to step(); the mean over all samples, and with it over all
devices, is then the sum of gradients divided by the sum of all batches.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np

from .mxnet_compat import MXNetError, NDArray

# Factors for batches of one size on each device, computed on different workers, differ by roundings.
_ROUNDING = 1e-12

# What ranks that compare their factors show to ranks that do something else.
LABEL = "a comparison of batch sizes, as in update()"

# Ends an option of a label; errors show only those that differ.
BETWEEN = "\x1e"


def label(factor: float | NDArray, scale: float, learning_rate: float | None) -> str:
    """What all operations of a step carry, so that those of steps that do not fit fail, on all workers.

    So nobody waits to compare, and after the error all workers have done the same: no update has taken place, and all
    have counted one.

    Parameters
    ----------
    factor : float
        What all workers multiply gradients by.
    scale : float
        What that would be for a batch of one, the same on all workers; otherwise 0.
    learning_rate : float or None
        None where it follows a schedule.
    """
    text = f"a step with {shown(factor, scale)}"
    return text if learning_rate is None else f"{text}{BETWEEN}learning rate {learning_rate!r}"


def of_batch(scale: float, batch_size: Any) -> float | NDArray:
    """What MXNet's Trainer multiplies gradients by for a batch of this size.

    Parameters
    ----------
    scale : float
        The factor for a batch of one.
    batch_size : number, or NDArray of one element
        An NDArray is not waited for: its factor is one too.
    """
    factor = scale / batch_size
    return factor if isinstance(factor, NDArray) else float(factor)


class Before:
    """The factor of a step that is an NDArray. The next step's label shows it: to read it at once would be to wait."""

    def __init__(self) -> None:
        self._factor: NDArray | None = None
        self._scale = 0.0

    def note(self, factor: float | NDArray, scale: float) -> None:
        """Remember the factor of a step, with the factor for a batch of one, if the next label is to show it."""
        self._factor, self._scale = (factor if isinstance(factor, NDArray) else None), scale

    def label(self) -> str:
        """What the label of the next step ends with; empty where the factor was a number."""
        if self._factor is None:
            return ""
        factor, self._factor = self._factor, None
        return f"{BETWEEN}the step before with {shown(_value(factor), self._scale)}"


def value_of(factor: float | NDArray) -> float:
    """A factor, or a learning rate, as a number. Waits for an NDArray.

    Raises
    ------
    ValueError, MXNetError
        An NDArray has several elements, or carries an error.
    """
    return float(factor.asnumpy().item() if isinstance(factor, NDArray) else factor)


def _value(factor: float | NDArray) -> float:
    try:
        return value_of(factor)
    except (ValueError, MXNetError):
        return math.nan  # the update fails in the same way, and says why


def learning_rate_of(optimizer: Any) -> float | None:
    """The learning rate of an optimizer; None where it follows a schedule. Waits for one in an NDArray."""
    return value_of(optimizer.lr) if optimizer.lr_scheduler is None else None


def scale_of(trainer: Any) -> float:
    """What a Trainer multiplies gradients by for a batch of one; 0 with AMP, which changes it as it scales losses."""
    return 0.0 if getattr(trainer, "_amp_loss_scaler", None) is not None else value_of(trainer._scale)


def shown(factor: float | NDArray, scale: float) -> str:
    """A factor as errors show it, with the size of the batch where that can be told."""
    if isinstance(factor, NDArray):
        return "gradients times an NDArray"
    factor = float(factor)
    size = scale / factor if factor and math.isfinite(factor) else 0.0
    whole = round(size)
    text = f"gradients times {factor!r}"
    return f"batch size {whole} ({text})" if whole >= 1 and abs(size - whole) <= 1e-9 * whole else text


def numbers(factor: float | NDArray, device_count: int) -> list[int]:
    """What a worker tells the others. Waits for an NDArray.

    Parameters
    ----------
    factor : float
        What it would multiply gradients by itself.
    device_count : int
        Number of devices that its gradients lie on.
    """
    return [int(np.float64(_value(factor)).view(np.int64)), device_count]


def have_as_many_devices(met: np.ndarray) -> bool:
    """Whether the numbers of all workers tell of equally many devices."""
    return bool((met[:, 1] == met[0, 1]).all())


def common(met: np.ndarray, ranks: Sequence[int], scope: str, scale: float) -> float:
    """What all multiply the mean over the workers by. The same bits on all workers.

    Parameters
    ----------
    met : ndarray of int64, shape (size, 2)
        The numbers of all workers.
    ranks : sequence of int
        Their global ranks.
    scope : str
        Of the trainer, for the error.
    scale : float
        As for `label`.

    Raises
    ------
    MXNetError
        Neither all batches nor those of all devices have one size.
    """
    factors, devices = met[:, 0].copy().view(np.float64), met[:, 1]
    if (met[:, 0] == met[0, 0]).all() or (factors == factors[0]).all():  # NaN is not equal to itself
        return float(factors[0])
    of_a_device = factors * devices
    if np.abs(of_a_device - of_a_device[0]).max() <= _ROUNDING * np.abs(of_a_device[0]):
        return float(of_a_device[0] * len(devices) / devices.sum())
    other = int(np.flatnonzero(factors != factors[0])[0])
    which = f" on {devices[0]} and {devices[other]} devices" if (devices != devices[0]).any() else ""
    raise MXNetError(
        f"The ranks do not take this step of {scope} alike: rank {ranks[0]} has a step with "
        f"{shown(factors[0], scale)}, rank {ranks[other]} with {shown(factors[other], scale)}{which}. If their batches "
        "differ in size, let step() be given the same one on all workers, as with a DistributedSampler or "
        "last_batch='discard', or one that is the same for each device."
    )

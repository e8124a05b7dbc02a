"""The label of a step: all workers must multiply gradients by the same number, or their weights would drift apart.

Each worker divides by the size of its own batch, and gradients are averaged over the workers. The result is the mean
over all samples only if all batches have the same size. The core compares the workers' labels
(``csrc/table/host_table.cpp``; between hosts ``csrc/agreement/agreement.cpp``).
"""

from __future__ import annotations

import math
from typing import Any

from ..compat.mxnet import NDArray

# Separates the options of a label; errors show only the options that differ.
BETWEEN = "\x1e"


def label(
    factor: float,
    scale: float,
    learning_rate: float | None,
    what: str = "a step",
    progress: tuple[int, float | None] | None = None,
) -> str:
    """The label of all operations of a step: operations with different labels fail on all workers.

    So no worker waits for a comparison. After the error all workers are in the same state: no worker has updated, and
    all workers have counted an update.

    Parameters
    ----------
    factor : float
        The number by which this worker multiplies gradients.
    scale : float
        The factor for a batch of one sample, if it is the same on all workers; otherwise 0.
    learning_rate : float or None
        None if the learning rate follows a schedule.
    what : str, optional
        Description of the operation.
    progress : (int, float or None), optional
        If the result depends on the number of updates (`traits.progress_of`): the updates so far, and the schedule's
        rate for the last update.
    """
    text = f"{what} with {shown(factor, scale)}"
    if learning_rate is not None:
        text += f"{BETWEEN}learning rate {learning_rate!r}"
    if progress is not None:
        count, rate = progress
        at = "" if rate is None else f", the last at the learning rate {rate!r} of a schedule"
        text += f"{BETWEEN}{count} updates before{at}"
    return text


def of_batch(scale: float, batch_size: Any) -> float:
    """The factor of gradients in MXNet's Trainer for a batch of this size.

    Parameters
    ----------
    scale : float
        The factor for a batch of one sample.
    batch_size : number, or NDArray of one element
        The call waits for an NDArray, since the workers compare the number before they update.

    Raises
    ------
    ValueError, MXNetError
        An NDArray has several elements, or carries an error.
    """
    factor = scale / batch_size
    return value_of(factor) if isinstance(factor, NDArray) else float(factor)


def value_of(factor: float | NDArray) -> float:
    """A factor, or a learning rate, as a number. Waits for an NDArray.

    Raises
    ------
    ValueError, MXNetError
        An NDArray has several elements, or carries an error.
    """
    return float(factor.asnumpy().item() if isinstance(factor, NDArray) else factor)


def learning_rate_of(optimizer: Any) -> float | None:
    """The learning rate of an optimizer; None if it follows a schedule or is not a number. Waits for an NDArray."""
    if optimizer.lr_scheduler is not None:
        return None
    rate = optimizer.lr
    if type(rate) is float:
        return rate
    try:
        return value_of(getattr(rate, "tensor", rate))  # Keras-MXNet's optimizers hold a variable of Keras
    except TypeError:
        return None


def scale_of(trainer: Any) -> float:
    """The factor of a Trainer for a batch of one sample; 0 with AMP, which changes the factor to scale losses."""
    if vars(trainer).get("_amp_loss_scaler") is not None:
        return 0.0
    scale = trainer._scale
    return scale if type(scale) is float else value_of(scale)


def shown(factor: float, scale: float) -> str:
    """A factor as shown in errors, with the batch size if `scale` is known."""
    factor = float(factor)
    size = scale / factor if factor and math.isfinite(factor) else 0.0
    whole = round(size)
    text = f"gradients times {factor!r}"
    return f"batch size {whole} ({text})" if whole >= 1 and abs(size - whole) <= 1e-9 * whole else text

"""State that a trainer's step depends on: freshness of gradients, and counts of updates."""

from __future__ import annotations

from typing import Iterable

from ..compat import mxnet
from ..compat.mxnet import Parameter, gluon, set_current_device
from . import placement


def is_fresh(parameter: Parameter) -> bool:
    """Whether a backward pass has written a gradient of the parameter, on any device, since the last step."""
    return any(weight._fresh_grad for weight in parameter._data)


def mark_stale(params: Iterable[Parameter]) -> None:
    """Mark all gradients as stale after an update on the store, as MXNet does after its own updates."""
    for parameter in params:
        for weight in parameter._data or () if parameter.grad_req != "null" else ():
            weight._fresh_grad = False


def updates_counted(trainer: gluon.Trainer) -> int:
    """Number of array updates that the trainer's optimizer has counted."""
    return sum(trainer._optimizer._index_update_count.values())


def count_update(trainer: gluon.Trainer) -> None:
    """Count a failed update, as other workers have: schedules and Adam need equal counts on all workers."""
    trained = [number for number, parameter in enumerate(trainer._params) if parameter.grad_req != "null"]
    for device_id in placement.device_ids(trainer._params):
        set_current_device(trainer._optimizer, device_id)
        trainer._optimizer._update_count(trained)


def continue_counts(trainer: gluon.Trainer) -> None:
    """Give a trainer's devices its counts of updates, after its optimizer was loaded or its parameters have moved."""
    devices = {device.device_id for device in mxnet.trainer_contexts(trainer) or ()}
    devices.update(placement.device_ids(trainer._params))
    held = [trainer._optimizer, *(updater.optimizer for updater in trainer._updaters)]
    for optimizer in {id(one): one for one in held}.values():
        mxnet.continue_counts(optimizer, devices)

"""Knows which of MXNet's optimizers can update a share of the parameters on each worker, and where these may be cut.

Most optimizers work element by element, so a parameter may be cut anywhere. Others need norms of a whole parameter or
of a whole row. Some cannot be divided at all, since they keep state that all parameters share.
"""

from __future__ import annotations

import numbers
from typing import Any

from ..compat.mxnet import mx
from ..world import training_warnings

# Names of MXNet's classes in lower case, of both releases; each release lacks some.
_ELEMENTWISE = (
    "sgd",
    "ccsgd",
    "nag",
    "signum",
    "ftml",
    "dcasgd",
    "adam",
    "adamw",
    "adabelief",
    "adamax",
    "adagrad",
    "adadelta",
    "rmsprop",
    "ftrl",
    "test",
)
_REFUSED = {
    "nadam": "multiplies one momentum schedule by a factor for each parameter that it updates",
    "sgld": "adds noise from the random generator of the worker that updates",
}


def _of_mxnet() -> dict[str, type]:
    """MXNet's own classes by name. MXNet's registry may instead hold a program's class under the same name."""
    found: dict[str, type] = {}
    waiting = [mx.optimizer.Optimizer]
    while waiting:
        for kind in type.__subclasses__(waiting.pop()):
            if kind.__module__.startswith("mxnet.optimizer."):
                found[kind.__name__.lower()] = kind
                waiting.append(kind)
    return found


_own = _of_mxnet()


def _classes(names: Any) -> dict[type, str]:
    return {_own[name]: name for name in names if name in _own}


# Optimizers that change only the rows of a row_sparse gradient in a dense weight, unless their lazy_update is False.
_LAZY = ("sgd", "ccsgd", "adam", "adagrad", "groupadagrad")

# Optimizers that convert norms to Python numbers in an update: each update waits for the gradient, and so for the other
# workers.
_READING = ("lars", "lbsgd")

# Optimizers that use the number of updates to correct states, as Adam corrects a bias, or for a momentum schedule.
_CORRECTING = ("adam", "adamw", "adamax", "nadam", "ftml", "lamb", "lans", "adabelief")

_elementwise = _classes(_ELEMENTWISE)
_lazy = _classes(_LAZY)
_reading = _classes(_READING)
_refused = _classes(_REFUSED)
_correcting = tuple(_classes(_CORRECTING))
_noisy = _classes(("sgld",))


def is_elementwise(optimizer: Any) -> bool:
    """Whether the new value of an element depends only on that element of weight, gradient and states.

    False for a class that is not MXNet's own: a user's class, even if it derives from an elementwise optimizer or is
    registered under such a name.
    """
    return type(optimizer) in _elementwise


def leaves_other_rows(optimizer: Any) -> bool:
    """Whether an update from a row_sparse gradient changes only the rows of the gradient; False if unknown."""
    return type(optimizer) in _lazy and getattr(optimizer, "lazy_update", True)


def reads_gradients(optimizer: Any) -> bool:
    """Whether an update waits for the gradient. A user's class that waits in its own code is not recognized."""
    return isinstance(optimizer, tuple(_reading))


def corrects_by_count(optimizer: Any) -> bool:
    """Whether the optimizer corrects its states by the number of updates, so that a reset must include this number.

    False for a user's class that derives from no such optimizer.
    """
    return isinstance(optimizer, _correcting)


# MXNet's own schedules: functions of the number of updates, so an extra call has no effect.
_SCHEDULES = (
    mx.lr_scheduler.FactorScheduler,
    mx.lr_scheduler.MultiFactorScheduler,
    mx.lr_scheduler.PolyScheduler,
    mx.lr_scheduler.CosineScheduler,
)


def progress_of(optimizer: Any) -> tuple[int, float | None] | None:
    """The progress that the next update depends on besides gradients, states and settings; must be equal on all
    workers.

    Returns
    -------
    tuple or None
        The number of updates that the optimizer has counted, and the rate that one of MXNet's schedules gives for this
        number. The rate is None for a user's schedule, which is not called since it may count its calls. The result is
        None if updates do not depend on the count: the optimizer has no schedule and no correction by the count.
    """
    scheduler = optimizer.lr_scheduler
    if scheduler is None:
        return (optimizer.num_update, None) if isinstance(optimizer, _correcting) else None
    count = optimizer.num_update
    if type(scheduler) not in _SCHEDULES:
        return count, None
    return count, float(scheduler(count))


def warn_of_noise(optimizer: Any, workers: int) -> None:
    """Log a warning if each of several workers would update its weights with its own random noise."""
    if workers > 1 and isinstance(optimizer, tuple(_noisy)):
        training_warnings.warn(
            "%s adds random noise in the update of each worker, so the weights of the workers stay equal only if all "
            "draw the same numbers. Give mx.random.seed() the same number on all workers before each step, and call "
            "check_in_step() now and then.",
            type(optimizer).__name__,
        )


# Attributes that are not settings: counters, values that depend on the batch, values that are compared elsewhere, and
# attributes that do not change results.
_NO_SETTINGS = {"num_update", "begin_num_update", "num_steps", "rescale_grad", "lr", "sym_info"}
_NO_SETTINGS |= {"aggregate_num", "allow_np_array"}
# Settings of every optimizer. Other attributes of a user's class are not compared: they may differ on purpose.
_COMMON_SETTINGS = {"wd", "clip_gradient", "multi_precision"}


def settings(optimizer: Any) -> list[str]:
    """The class of an optimizer and its settings, each as a canonical text."""
    is_mxnets = type(optimizer).__module__.startswith("mxnet.")
    shown = [f"optimizer {type(optimizer).__name__}"]
    for name, value in sorted(vars(optimizer).items()):
        if name.startswith("_") or name in _NO_SETTINGS or not (is_mxnets or name in _COMMON_SETTINGS):
            continue
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            shown.append(f"{name}={float(value)!r}")
        elif value is None or isinstance(value, (bool, str)):
            shown.append(f"{name}={value!r}")
    if optimizer.lr_scheduler is not None:
        shown.append(f"scheduler {type(optimizer.lr_scheduler).__name__}")
    return shown


def check(optimizer: Any) -> None:
    """Reject an optimizer whose result would change if each worker updates a share of the parameters.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer.
    ValueError
        The optimizer cannot be divided.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise TypeError(f"The optimizer must be an mxnet.optimizer.Optimizer, not {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    if getattr(type(optimizer), "averages_gradients", False):
        raise ValueError(
            f"The store cannot update with a {name}, since both would reduce the gradients. Give the store the "
            f"optimizer that the {name} wraps."
        )
    for kind in type(optimizer).__mro__:
        if kind in _refused:
            raise ValueError(
                f"{name} {_REFUSED[_refused[kind]]}, so it cannot update a share of the parameters on each worker: use "
                "update_on_kvstore=False."
            )
    if getattr(optimizer, "batch_scale", 1) != 1:
        raise ValueError(
            f"{name} with batch_scale={optimizer.batch_scale} adds up gradients outside of its states, so it cannot "
            "update a share of the parameters on each worker: use update_on_kvstore=False."
        )

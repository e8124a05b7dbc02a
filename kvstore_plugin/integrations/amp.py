"""MXNet's automatic mixed precision (AMP) with several workers: all workers skip a step, or none.

AMP multiplies the loss by a scale, so that small gradients in 16 bits do not vanish. A Trainer checks for infinite and
NaN gradients between their reduction and the update; if there are any, it skips the update and halves the scale. An
infinite or NaN gradient of one worker makes the sum over the workers infinite or NaN, so all workers make the same
decision. This file handles the exceptions:

- The optimizer runs in the store or in a DistributedOptimizer: weights are updated before AMP checks, or gradients are
  reduced after AMP's check. Such a gluon.Trainer raises an error when it is passed to AMP.
- The optimizer of a DistributedTrainer is divided over the workers (`update_on_kvstore=True`), so no worker has all
  averaged gradients. The workers add up squares, as in the global norm: the sum is finite if all gradients are.
- A DistributedTrainer has parameters that are not reduced over all its workers: the workers exchange the results of
  their checks.

AMP in bfloat16 loses accumulated gradients (grad_req 'add'), even with one worker. This file only warns of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Iterable, Iterator

from ..compat import patches
from ..compat.mxnet import MXNetError, Parameter, all_finite, autograd, gluon, mx
from ..coordination import operation
from ..gradients.parameter_groups import TrainerWorkers
from ..store.names import is_ours
from ..world import training_warnings
from .distributed_optimizer import DistributedOptimizer


def warn_of_added_gradients(parameters: Iterable[Parameter]) -> None:
    """Log a warning, once in a process, if MXNet's AMP loses the gradients of Parameters with grad_req 'add'."""
    if not _is_on() or not any(parameter.grad_req == "add" for parameter in parameters):
        return
    if _loses_added_gradients() and not _loses_added_gradients.has_warned:
        _loses_added_gradients.has_warned = True
        training_warnings.warn(
            "MXNet's AMP loses gradients with grad_req 'add' here: it adds them to a copy, and the array that the "
            "trainer reads stays as it is. Use grad_req 'write', or leave AMP out."
        )


def _is_on() -> bool:
    """Whether the program has called amp.init()."""
    modules = (sys.modules.get(name) for name in ("mxnet.contrib.amp.amp", "mxnet.amp.amp"))
    return any(getattr(module, "_amp_initialized", False) for module in modules)


@functools.lru_cache(maxsize=None)
def _loses_added_gradients() -> bool:
    """Whether AMP loses the gradient of a layer with grad_req 'add', tested with a small layer."""
    with contextlib.suppress(MXNetError):  # no layers of this type on a CPU, so no gradients are lost
        one, weight = mx.nd.ones((1, 1)), mx.nd.ones((1, 1))
        weight.attach_grad("add")
        with autograd.record():
            result = mx.nd.FullyConnected(one, weight, num_hidden=1, no_bias=True)
        result.backward()
        return float(weight.grad.asscalar()) == 0.0
    return False


_loses_added_gradients.has_warned = False


def skips_step(trainer: gluon.Trainer, workers: TrainerWorkers) -> bool:
    """Whether a gradient on some worker is infinite or NaN. Adapts AMP's scale. Collective; waits for all workers.

    Parameters
    ----------
    trainer : gluon.Trainer
        A trainer that was passed to AMP.
    workers : TrainerWorkers
        The workers that skip a step together.
    """
    name = f"{workers.scope}/overflow"
    with operation.Turn(workers.process_set, name, "AMP's check for overflow") as turn:
        # A gradient that carries an error raises it here: this refuses the turn, for which the other workers wait.
        overflows = not all_finite([parameter._grad[0] for parameter in trainer._params if parameter._grad is not None])
        met = turn.meet("", [overflows])
    return skips_after(trainer, bool(met.any()))


def skips_after(trainer: gluon.Trainer, overflows: bool) -> bool:
    """Whether AMP skips a step. `overflows`: the result of all workers' checks. Adapts AMP's scale."""
    # The scaler reads the first gradient of each parameter, so a substitute for a parameter can carry this result.
    return trainer._amp_loss_scaler.has_overflow([_Finding(overflows)])


@contextlib.contextmanager
def without_scaler(trainer: gluon.Trainer) -> Iterator[None]:
    """Context manager in which the trainer's update does not check for overflow."""
    scaler = vars(trainer).pop("_amp_loss_scaler")
    try:
        yield
    finally:
        vars(trainer)["_amp_loss_scaler"] = scaler


class _Finding:
    """Substitute for a parameter, with a gradient that is infinite or zero."""

    def __init__(self, overflows: bool) -> None:
        value = [float("inf") if overflows else 0.0]
        self._grad = [mx.np.array(value) if mx.util.is_np_array() else mx.nd.array(value)]


def _check(trainer: gluon.Trainer) -> None:
    """Raise a ValueError unless all workers can skip a step together after an overflow on one worker."""
    check = getattr(trainer, "_check_mixed_precision", None)
    if check is not None:
        check()
    if isinstance(trainer._optimizer, DistributedOptimizer):
        raise ValueError(
            "AMP does not work with a DistributedOptimizer: AMP looks for overflow before the gradients are averaged, "
            "so a worker would skip a step alone. Use a DistributedTrainer, or a gluon.Trainer with the store 'mykv' "
            "and update_on_kvstore=False."
        )
    on_store = trainer._kvstore_params["update_on_kvstore"] or trainer._update_on_kvstore
    if on_store and is_ours(trainer._kvstore_params["kvstore"]):
        raise ValueError(ON_STORE)


ON_STORE = (
    "AMP does not work with a gluon.Trainer that has update_on_kvstore=True: AMP looks for overflow in the gradients "
    "after the store has updated the weights. Use DistributedTrainer, or update_on_kvstore=False."
)


def update_on_workers(trainer: gluon.Trainer) -> None:
    """Keep a Trainer with AMP from choosing update_on_kvstore=True by default."""
    if vars(trainer).get("_amp_loss_scaler") is not None and trainer._kvstore_params["update_on_kvstore"] is None:
        trainer._kvstore_params["update_on_kvstore"] = False


class _CheckedScaler:
    """Descriptor for AMP's scaler in a Trainer. Setting it raises an error if the trainer cannot work with AMP."""

    def __get__(self, trainer: Any, owner: Any) -> Any:
        if trainer is None:
            return self
        try:
            return vars(trainer)["_amp_loss_scaler"]
        except KeyError:
            raise AttributeError("_amp_loss_scaler") from None

    def __set__(self, trainer: Any, scaler: Any) -> None:
        if scaler is not None:
            _check(trainer)
        vars(trainer)["_amp_loss_scaler"] = scaler

    def __delete__(self, trainer: Any) -> None:
        del vars(trainer)["_amp_loss_scaler"]


@patches.replaces(
    "gluon.Trainer._amp_loss_scaler",
    when=patches.AT_INIT,
    makes=True,
    why="AMP sets this attribute and knows nothing of other workers.",
    does="Raises a ValueError where AMP cannot work with the trainer.",
    undone_by="a trainer without AMP",
)
def _checked_scaler(original: None) -> _CheckedScaler:
    return _CheckedScaler()

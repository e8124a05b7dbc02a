"""MXNet's automatic mixed precision (AMP) beside several workers: all of them skip a step, or none does.

AMP multiplies the loss by a scale, so that small gradients in 16 bits do not vanish, and a Trainer looks for infinite
and NaN gradients between their reduction and the update: if there are any, it leaves the update out and halves the
scale. An infinite or NaN gradient of one worker makes the sum over the workers infinite or NaN, so all workers see the
same and do the same. This file deals with the cases in which that is not so:

- The optimizer runs in the store or in a DistributedOptimizer: there the weights are updated before AMP has looked, or
  gradients are reduced after that. These are refused where AMP is given the trainer.
- A DistributedTrainer has parameters that are not reduced over all its workers: the workers tell each other what they
  have found.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

from ..compat.mxnet import all_finite, gluon, mx
from ..coordination import agreement
from ..gradients.parameter_groups import Company
from ..store.kvstore import MyKV
from .distributed_optimizer import DistributedOptimizer


def skips_step(trainer: gluon.Trainer, company: Company) -> bool:
    """Whether a gradient on some worker is infinite or NaN; AMP's scale follows on all of them. Collective; waits.

    Parameters
    ----------
    trainer : gluon.Trainer
        One that AMP was given.
    company : Company
        The workers that skip a step together.
    """
    overflows = not all_finite([parameter._grad[0] for parameter in trainer._params if parameter._grad is not None])
    _, (overflows,) = agreement.extremes(company.process_set, f"{company.scope}/overflow", [overflows])
    # The scaler reads nothing but the first gradient of each parameter, so it is shown one that says what all found.
    return trainer._amp_loss_scaler.has_overflow([_Finding(bool(overflows))])


@contextlib.contextmanager
def without_scaler(trainer: gluon.Trainer) -> Iterator[None]:
    """Let the trainer update without looking for overflow itself."""
    scaler = vars(trainer).pop("_amp_loss_scaler")
    try:
        yield
    finally:
        vars(trainer)["_amp_loss_scaler"] = scaler


class _Finding:
    """Stands for a parameter whose gradient is infinite, or zero."""

    def __init__(self, overflows: bool) -> None:
        value = [float("inf") if overflows else 0.0]
        self._grad = [mx.np.array(value) if mx.util.is_np_array() else mx.nd.array(value)]


def _check(trainer: gluon.Trainer) -> None:
    """Raise a ValueError if a worker's overflow cannot be made to skip the step on all workers."""
    check = getattr(trainer, "_check_mixed_precision", None)
    if check is not None:
        check()
    if isinstance(trainer._optimizer, DistributedOptimizer):
        raise ValueError(
            "AMP looks for overflow before a DistributedOptimizer averages gradients, so a worker would skip a step "
            "alone: use a DistributedTrainer, or a gluon.Trainer with the store 'mykv' and update_on_kvstore=False."
        )
    if _uses_store(trainer) and (trainer._kvstore_params["update_on_kvstore"] or trainer._update_on_kvstore):
        raise ValueError(ON_STORE)


ON_STORE = (
    "AMP does not work with update_on_kvstore=True, since it looks for overflow in the gradients after the step, when "
    "the store has updated the weights already: make the trainer with update_on_kvstore=False."
)


def _uses_store(trainer: gluon.Trainer) -> bool:
    store = trainer._kvstore_params["kvstore"]
    return isinstance(store, MyKV) or (isinstance(store, str) and store.lower() == "mykv")


class _CheckedScaler:
    """The attribute in which AMP leaves its scaler; whoever sets it learns at once if the trainer cannot do with it."""

    checks_mixed_precision = True

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


def _choosing(original: Any) -> Any:
    """Trainer._init_kvstore, which with AMP does not choose by itself to update on the store."""

    @functools.wraps(original)
    def _init_kvstore(self: gluon.Trainer) -> None:
        has_scaler = vars(self).get("_amp_loss_scaler") is not None
        if has_scaler and _uses_store(self) and self._kvstore_params["update_on_kvstore"] is None:
            self._kvstore_params["update_on_kvstore"] = False
        original(self)

    return _init_kvstore


if not getattr(vars(gluon.Trainer).get("_amp_loss_scaler"), "checks_mixed_precision", False):
    gluon.Trainer._amp_loss_scaler = _CheckedScaler()
    gluon.Trainer._init_kvstore = _choosing(gluon.Trainer._init_kvstore)

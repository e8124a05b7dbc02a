"""How the gradients of one trainer become their mean over the workers.

The trainer knows nothing of it but this one class, so that another way (gradients in shared buckets) can take its
place. Today every gradient is one operation, named alike on all ranks.

The ranks agreed which parameters have gradients when the trainer was made, so that an ordinary step exchanges nothing
but gradients. A rank where this has changed (grad_req, a frozen layer) must find out whether it has changed on the
others too, although these, if it has not, do not know that anybody asks. So it sends its question under the name of
the first gradient that was agreed on: if all ranks ask, they get an answer; if one pushes a gradient instead, the core
sees that the two do not fit, and all of them get an error. The stale flags of a step travel in the same way.
"""

from __future__ import annotations

from typing import Any, Sequence

from . import agreement, arrays, initialization, process
from .mxnet_compat import DeferredInitializationError, MXNetError, Parameter, fill_with_zeros
from .parameters import Named


class _Slot:
    """One parameter of the trainer, and its gradient arrays as they were seen last."""

    def __init__(self, label: str, name: str, parameter: Parameter, priority: int) -> None:
        self.label = label
        self.name = name
        self.parameter = parameter
        self.priority = priority
        self.seen: Any = self  # the list parameter._grad, None for no gradient; `self` is neither
        self.handles: list[int] = []

    def __getstate__(self) -> dict:
        # Addresses of arrays mean nothing in a copy.
        return {**self.__dict__, "seen": self, "handles": []}


class Gradients:
    """The gradients of one trainer.

    Parameters
    ----------
    scope : str
        Begins the names of all operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Those near the network's input get a higher priority:
        the next forward pass needs them first.

    Raises
    ------
    RuntimeError
        The ranks have other parameters, or other ones that have gradients. Collective: all ranks get it.
    """

    def __init__(self, scope: str, named: Sequence[Named]) -> None:
        self._scope = scope
        self._carrier = f"{scope}/parameters"
        self._slots = [
            _Slot(label, f"{scope}/gradients/{label}", parameter, -position) for label, parameter, position in named
        ]
        self._active: list[_Slot] = []  # those that have a gradient
        self._agreed = [slot.name for slot in self._slots if slot.parameter.grad_req != "null"]
        agreement.check_names(self._carrier, [slot.label for slot in self._slots], f"parameters of {scope}")
        self._check_trainable(self._carrier, self._agreed)

    def moved(self) -> bool:
        """Whether a parameter has other gradient arrays than at the last step: cast, reset_ctx, grad_req, first use."""
        return any(slot.parameter._grad is not slot.seen for slot in self._slots)

    def allreduce(self, ignore_stale: bool = False) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Returns at once, unless `ignore_stale` is set or the set of gradients has changed.

        Parameters
        ----------
        ignore_stale : bool
            A gradient that no backward has written since the last update counts as zeros; where that is so on all
            workers it is left alone, elsewhere it counts as fresh afterwards, on all workers.

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError in their gradients.
        MXNetError
            The ranks do not take this step alike.
        ValueError
            A gradient is sparse or lies on a GPU.
        """
        if self.moved() or not self._agreed:
            self._look_again()
        active = self._share_freshness() if ignore_stale else self._active
        push, scale = process.core.push_allreduce, 1.0 / process.size()
        for slot in active:
            push(slot.name, slot.handles, slot.handles, "sum", scale, slot.priority)

    def share_freshness(self) -> None:
        """Let a parameter that some worker has used since the last update count as fresh on all workers."""
        self._share_freshness(clear=False)

    def _look_again(self) -> None:
        """Take note of the gradient arrays as they are now, and let the ranks agree if other parameters have some."""
        self._refuse_deferred()
        active = [slot for slot in self._slots if slot.parameter._grad is not None]
        try:
            for slot in active:
                arrays.as_list(slot.parameter._grad, f"gradient of {slot.label}")
        except ValueError as error:
            self._refuse(self._agreed, str(error))
            raise
        names = [slot.name for slot in active]
        if names != self._agreed or not names:
            self._ask(lambda carrier: self._check_trainable(carrier, names))
        for slot in active:
            slot.handles = arrays.handles(slot.parameter._grad)
        for slot in self._slots:
            slot.seen = slot.parameter._grad
        self._active, self._agreed = active, names

    def _refuse_deferred(self) -> None:
        """Raise an error, here and on the other ranks, if a parameter that needs a gradient has no values yet."""
        deferred = [slot for slot in self._slots if slot.parameter._grad is None and slot.parameter.grad_req != "null"]
        if not deferred:
            return
        sentence = (
            f"Parameter {deferred[0].label} ({deferred[0].parameter.name}) has no values yet on rank {process.rank()}: "
            "its initialization was deferred to the first forward pass, which has not used it; pass a batch through "
            "the network before step(), or give its layer the size of its input (in_units, in_channels)."
        )
        self._refuse(self._agreed, sentence)
        for slot in deferred:  # those that have values wait for this rank's
            initialization.refuse(slot.parameter, sentence)
        raise DeferredInitializationError(sentence)

    def _check_trainable(self, carrier: str, names: Sequence[str]) -> None:
        labels = [name[len(self._scope) + len("/gradients/") :] for name in names]
        agreement.check_names(carrier, labels, f"parameters with gradients of {self._scope}")

    def _share_freshness(self, clear: bool = True) -> list[_Slot]:
        """Slots that are fresh on some worker; with `clear`, zeros replace what is stale there on this one."""
        if not self._active:
            return []
        flags = [any(weight._fresh_grad for weight in slot.parameter._data) for slot in self._active]
        _, fresh = self._ask(lambda carrier: agreement.extremes(carrier, flags))
        used = [slot for slot, flag in zip(self._active, fresh) if flag]
        for slot in used:
            for weight, gradient in zip(slot.parameter._data, slot.parameter._grad):
                if not weight._fresh_grad:
                    if clear:
                        fill_with_zeros(gradient)
                    weight._fresh_grad = True
        return used

    def _ask(self, exchange: Any) -> Any:
        """Run an exchange under the name of the first gradient that the others would push if they did not ask."""
        carrier = self._agreed[0] if self._agreed else self._carrier
        try:
            return exchange(carrier)
        except RuntimeError as error:
            sentence = f"The ranks do not take this step of {self._scope} alike: {error}"
            self._refuse([name for name in self._agreed if name != carrier], sentence)
            raise MXNetError(sentence) from error

    def _refuse(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            process.core.refuse(name, reason)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_active": []}

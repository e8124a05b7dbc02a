"""The devices of parameters."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import Parameter, contexts
from .naming import described_within


def check_devices(named: Iterable[tuple[str, Parameter]]) -> None:
    """Reject parameters of one trainer whose replicas are not on the same devices in the same order.

    If each parameter has a single replica, a network may use several devices.

    Parameters
    ----------
    named : iterable of (str, Parameter)
        Names for the error, and parameters; parameters that are not initialized are on no devices yet.

    Raises
    ------
    ValueError
        Two parameters differ; the error names them and their devices.
    """
    first: tuple[str, Parameter, list] | None = None
    for name, parameter in named:
        try:
            devices = contexts(parameter)
        except RuntimeError:  # not initialized
            continue
        if first is None:
            first = (name, parameter, devices)
        elif devices != first[2] and (len(devices) > 1 or len(first[2]) > 1):
            texts = [", ".join(str(device) for device in one) for one in (first[2], devices)]
            raise ArgumentValueError(
                "Parameters with replicas must all be on the same devices in the same order, but "
                f"{described_within(*first[:2])} is on {texts[0]} and {described_within(name, parameter)} on "
                f"{texts[1]}."
            )


def by_device(params: Sequence[Parameter]) -> list[set[Parameter]]:
    """The Parameters with values, grouped by the device of the first replica: a set for each device."""
    divided: dict[Any, set[Parameter]] = {}
    for parameter in params:
        if parameter._data is not None:
            divided.setdefault(parameter._data[0].context, set()).add(parameter)
    return list(divided.values())


def device_ids(params: Sequence[Parameter]) -> list[int]:
    """Numbers of the devices on which Parameters have replicas; an optimizer counts updates for each device."""
    # Gets the devices from Parameters, not from arrays: reading an array's context needs a call into MXNet's library.
    initialized = [parameter for parameter in params if parameter._data is not None]
    return sorted({device.device_id for parameter in initialized for device in contexts(parameter)})

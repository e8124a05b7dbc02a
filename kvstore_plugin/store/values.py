"""What a store keeps between calls: for each key its home, the array that holds the key's value on this worker.

All workers' homes of a key hold the same bits after every operation, so that pull() needs no communication. Where
broadcast() has filled an array of the caller's, in Gluon the parameter's own weight, that array is the home: nothing is
held twice, and an optimizer on the store updates the weight where it lies. An array that holds a value for init(), or
the sum that push() leaves without an optimizer, is the store's own. All of them are dense.
"""

from __future__ import annotations

from typing import Any

from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import NDArray, SparseNDArray
from . import requests
from .requests import Call


class _Home:
    """Where the value of one key is."""

    __slots__ = ("array", "devices", "is_lent", "key")

    def __init__(self, key: int | str, array: NDArray, is_lent: bool, devices: list[Any] | None) -> None:
        self.key = key
        self.array = array
        self.is_lent = is_lent  # the caller of broadcast() holds it too
        self.devices = devices  # those of the key's lists of arrays; None before the first list


class StoredValues:
    """The values of one store, by the names of its keys. None of this waits or communicates."""

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}

    def lend(self, call: Call) -> None:
        """Let the first array that a broadcast fills be the home of its key from now on; of a row_sparse one a copy."""
        home, is_sparse = call.outputs[0], isinstance(call.outputs[0], SparseNDArray)
        if is_sparse:
            home = arrays.empty(home.shape, home)
            arrays.copy(call.outputs[0], home)
        devices = call.devices if len(call.outputs) > 1 else None
        self._homes[call.name] = _Home(call.key, home, not is_sparse, devices)

    def create(self, call: Call) -> NDArray:
        """Make an array of the store's own, without values, for a key that init() was called with."""
        value = call.inputs[0]
        self._homes[call.name] = _Home(call.key, arrays.empty(value.shape, value), False, None)
        return self._homes[call.name].array

    def home(self, call: Call) -> NDArray:
        """The array that holds the value of a call's key, which fits the arrays of the call; floats are converted.

        Raises
        ------
        ValueError
            The key was never initialized; or the arrays have another shape or dtype, or are a list that lies on other
            devices than another list for this key.
        """
        home = self._homes.get(call.name)
        if home is None:
            raise ArgumentValueError(
                f"Key {call.key!r} was never initialized in this store: call init(key, value) or broadcast(key, "
                "value, out) on all ranks first."
            )
        array, first = home.array, call.inputs[0]
        is_alike = first.dtype == array.dtype or arrays.kind(first) == arrays.kind(array) == "float"
        if first.shape != array.shape or not is_alike:
            raise ArgumentValueError(
                f"Key {call.key!r} holds an array {array.shape} {arrays.dtype_name(array.dtype)}, but it is used with "
                f"one {first.shape} {arrays.dtype_name(first.dtype)}."
            )
        if len(call.inputs) > 1 or len(call.outputs) > 1:
            self.check_devices(call)
        return array

    def check_devices(self, call: Call) -> None:
        """Refuse a call with lists of arrays on other devices than those of the key's lists before.

        Raises
        ------
        ValueError
            Names both.
        """
        home = self._homes.get(call.name)
        if home is None:
            return
        if home.devices is None:
            home.devices = call.devices
        else:
            requests.check_devices(call.key, "arrays are", call.devices, "those before were", home.devices)

    def all(self) -> list[tuple[int | str, NDArray]]:
        """All keys with their homes, in an order that is the same on all workers that have the same keys."""
        homes = sorted(self._homes.values(), key=lambda home: (isinstance(home.key, str), home.key))
        return [(home.key, home.array) for home in homes]

    def own(self, call: Call) -> NDArray:
        """The array of the store's own that a sum may overwrite; in place of a lent home, which keeps its values."""
        home = self._homes[call.name]
        if home.is_lent:
            home.array, home.is_lent = arrays.empty(home.array.shape, home.array), False
        return home.array

"""The state of a store between calls: each key's home, the array that holds its value on this worker.

The homes of a key hold the same bits on all workers after every operation, so pull() needs no communication. After
broadcast() the home is the caller's array, in Gluon the parameter's weight: no value is stored twice, and an optimizer
on the store updates the weight in place. The store owns the home after init(), and after a push() without an optimizer.
All homes are dense.
"""

from __future__ import annotations

from typing import Iterable

from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import NDArray, SparseNDArray
from ..world import process
from .requests import Call


class _Home:
    """The home of one key."""

    __slots__ = ("array", "is_lent", "key", "made_by")

    def __init__(self, key: int | str, array: NDArray, is_lent: bool, made_by: tuple[int, int]) -> None:
        self.key = key
        self.array = array
        self.is_lent = is_lent  # the caller of broadcast() holds the array too
        self.made_by = made_by  # process.generation, and which of the key's calls has made it


class StoredValues:
    """The values of one store, by the names of its keys. No method waits or communicates."""

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}
        self._calls: dict[str, int] = {}  # calls of init() and broadcast() since the last mykv.init(), by name
        self._generation = process.generation

    def count(self, names: Iterable[str]) -> None:
        """Count a call of init() or broadcast(), before its checks: on a worker where it fails, it counts too."""
        if self._generation != process.generation:  # new workers begin to count
            self._generation = process.generation
            self._calls.clear()
        for name in names:
            self._calls[name] = self._calls.get(name, 0) + 1

    def lend(self, call: Call) -> None:
        """Make the first output of a broadcast the home of its key; for a row_sparse output, a dense copy of it."""
        home, is_sparse = call.outputs[0], isinstance(call.outputs[0], SparseNDArray)
        if is_sparse:
            home = arrays.empty(home.shape, home)
            arrays.copy(call.outputs[0], home)
        self._homes[call.name] = _Home(call.key, home, not is_sparse, self._last_call(call))

    def create(self, call: Call) -> NDArray:
        """Create an uninitialized array, owned by the store, as the home of a key of init()."""
        value = call.inputs[0]
        self._homes[call.name] = _Home(call.key, arrays.empty(value.shape, value), False, self._last_call(call))
        return self._homes[call.name].array

    def home(self, call: Call) -> NDArray:
        """The home of a call's key, checked against the arrays of the call; floats are converted.

        Raises
        ------
        ValueError
            The key was never initialized, or the arrays have another shape or dtype.
        """
        home = self._homes.get(call.name)
        if home is None:
            raise ArgumentValueError(
                f"Key {call.key!r} was never initialized in this store. Call init(key, value) or broadcast(key, value, "
                "out) on all ranks first."
            )
        array, first = home.array, call.inputs[0]
        is_alike = first.dtype == array.dtype or arrays.kind(first) == arrays.kind(array) == "float"
        if first.shape != array.shape or not is_alike:
            raise ArgumentValueError(
                f"Key {call.key!r} holds an array {array.shape} {arrays.dtype_name(array.dtype)}, but is used with an "
                f"array {first.shape} {arrays.dtype_name(first.dtype)}. Use arrays like the key's, or another key."
            )
        return array

    def all(self) -> list[tuple[str, int | str, NDArray]]:
        """All names and keys with their homes, in an order that is the same on all workers that have the same keys."""
        homes = sorted(self._homes.items(), key=lambda one: (isinstance(one[1].key, str), one[1].key))
        return [(name, home.key, home.array) for name, home in homes]

    def described(self) -> dict[str, str]:
        """A text for each key's home, by the key's name: equal on workers where the same call has made alike homes."""
        texts = {}
        for name, home in self._homes.items():
            generation, number = home.made_by
            number = number if generation == process.generation else 0
            array = f"an array {home.array.shape} {arrays.dtype_name(home.array.dtype)}"
            texts[name] = f"{array} from call {number} of init() or broadcast()"
        return texts

    def _last_call(self, call: Call) -> tuple[int, int]:
        return self._generation, self._calls.get(call.name, 0)

    def own(self, call: Call) -> NDArray:
        """The home of a call's key, for a sum to overwrite; a new array if the caller of broadcast() holds the home."""
        home = self._homes[call.name]
        if home.is_lent:
            home.array, home.is_lent = arrays.empty(home.array.shape, home.array), False
        return home.array

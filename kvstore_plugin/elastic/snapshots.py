"""Snapshots to restore: copies of parameters and of a trainer's state at one moment.

MXNet's engine copies the arrays into reused arrays, so a snapshot costs memory traffic but no allocation. The caller
must wait for the copies: an array's error must be raised before the snapshot is used.
"""

from __future__ import annotations

import copy
from typing import Any, Hashable, Iterable

from ..compat import arrays
from ..compat.mxnet import NDArray, Parameter, mx
from ..compat.state_tree import leaves, mapped
from ..parameters import deferred_init, trainer_state

# Attributes of an optimizer that are not copied with it: names of parameters never change, and the scheduler is copied
# separately.
_OF_THE_WORKER = {"param_dict", "idx2name", "sym_info", "lr_scheduler"}

# Attributes of a DistributedTrainer that are copied in addition to its optimizer: counters, flags, and the scale, which
# AMP changes.
_OF_THE_TRAINER = ("_scale", "_amp_original_scale", "_steps", "_ignores_stale", "_warmup_until")


class Parameters:
    """A copy of the values of Parameters; for a Parameter without values, its deferred initialization."""

    def __init__(self) -> None:
        self._kept: dict[Parameter, NDArray] = {}
        self._deferred: dict[Parameter, tuple] = {}

    def take(self, parameters: Iterable[Parameter]) -> list[NDArray]:
        """Copy the values. Returns the copies, for which the caller must wait."""
        before, self._kept, self._deferred = self._kept, {}, {}
        for parameter in parameters:
            if parameter._data is None:
                self._deferred[parameter] = (parameter._deferred_init, parameter._shape)
            else:
                self._kept[parameter] = _copied(parameter._data[0], before.get(parameter))
        return list(self._kept.values())

    @property
    def kept(self) -> dict[Parameter, NDArray]:
        """The values of each Parameter that had values."""
        return self._kept

    def adopt(self, parameters: Iterable[Parameter], values: Iterable[NDArray | None]) -> None:
        """Take over the copy of another worker: its values, in the order of the Parameters."""
        self._kept, self._deferred = {}, {}
        for parameter, value in zip(parameters, values):
            if value is None:
                self._deferred[parameter] = (parameter._deferred_init, parameter._shape)
            else:
                self._kept[parameter] = value.copyto(parameter._data[0].context)

    def restore(self) -> None:
        """Restore the values. A Parameter that had no values is initialized again in the next forward pass."""
        for parameter, kept in self._kept.items():
            for value in parameter._data:
                arrays.copy(kept, value)
        for parameter, (deferred, shape) in self._deferred.items():
            deferred_init.drop_values(parameter)
            parameter._deferred_init, parameter._shape = deferred, shape


class Training:
    """A copy of one DistributedTrainer's state, and of the states, counters and settings of its optimizer."""

    def __init__(self) -> None:
        self._states: list[dict[Hashable, Any]] = []  # the states of each updater
        self._optimizer: dict[str, Any] = {}
        self._scheduler: tuple[Any, dict | None] = (None, None)
        self._trainer: dict[str, Any] = {}
        self._scaler: dict[str, Any] | None = None
        self._more: dict[str, NDArray] = {}
        self.shards: dict[Hashable, tuple] = {}  # with the optimizer on the store: each key's shards and their owners

    def take(self, trainer: Any) -> list[NDArray]:
        """Copy the trainer's state. Returns the copies, for which the caller must wait."""
        updaters = _updaters(trainer)
        before = self._states if len(self._states) == len(updaters) else [{} for _ in updaters]
        self._states = [
            {key: _copied_state(state, old.get(key)) for key, state in updater.states.items()}
            for updater, old in zip(updaters, before)
        ]
        optimizer = updaters[0].optimizer
        self._optimizer = copy.deepcopy(
            {name: value for name, value in vars(optimizer).items() if name not in _OF_THE_WORKER}
        )
        scheduler = optimizer.lr_scheduler
        self._scheduler = scheduler, _variables(scheduler)
        self._trainer = {name: vars(trainer)[name] for name in _OF_THE_TRAINER if name in vars(trainer)}
        self._scaler = _variables(getattr(trainer, "_amp_loss_scaler", None))
        store_optimizer = trainer._store_optimizer
        if store_optimizer is not None:
            self.shards = {key: store_optimizer.shards_of(key) for key in store_optimizer.keys}
        self._more = {name: _copied(array, self._more.get(name)) for name, array in trainer._more_arrays().items()}
        states = [state for states in self._states for state in states.values()]
        return [*leaves(states, NDArray), *self._more.values()]

    @property
    def states(self) -> dict[Hashable, Any]:
        """The states of the first device; with the optimizer on the store, the states of this worker's shards."""
        return self._states[0]

    def trees(self, trainer: Any) -> tuple:
        """The arrays of this copy for another worker, as a state (state_tree.py).

        States of an optimizer on the store are not included: see shard_replicas.py.
        """
        states = [] if trainer._store_optimizer is not None else [list(state.values()) for state in self._states]
        return states, list(self._more.values())

    def description(self) -> dict[str, Any]:
        """Everything in this copy except arrays, for another worker; can be pickled."""
        return {
            "keys": [list(states) for states in self._states],
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "trainer": self._trainer,
            "scaler": self._scaler,
            "more": list(self._more),
            "shards": self.shards,
        }

    def adopt(self, trainer: Any, trees: tuple, description: dict[str, Any]) -> None:
        """Take over the copy of another worker, from its `trees` and `description`."""
        states, more = trees
        updaters = _updaters(trainer)
        given = zip(states, description["keys"]) if states else ()
        self._states = [dict(zip(keys, values)) for values, keys in given] or [{} for _ in updaters]
        self._optimizer, self._trainer = description["optimizer"], description["trainer"]
        scheduler, variables = description["scheduler"]
        own = updaters[0].optimizer.lr_scheduler
        self._scheduler = (own if type(own) is type(scheduler) else scheduler), variables
        self._scaler = description["scaler"]
        self._more = dict(zip(description["more"], more))
        self.shards = description["shards"]

    def restore(self, trainer: Any) -> None:
        """Restore the trainer from the copy. States of an optimizer on the store are not restored here."""
        updaters = _updaters(trainer)
        if trainer._store_optimizer is None:
            for updater, states in zip(updaters, self._states):
                updater.states = {key: mapped(state, lambda array: array.copy()) for key, state in states.items()}
                updater.states_synced = dict.fromkeys(updater.states, True)
        optimizer = updaters[0].optimizer
        for name in [name for name in vars(optimizer) if name not in _OF_THE_WORKER]:
            del vars(optimizer)[name]
        vars(optimizer).update(copy.deepcopy(self._optimizer))
        trainer_state.continue_counts(trainer)  # the copy may come from a worker with another device
        optimizer.lr_scheduler = _with_variables(*self._scheduler)
        vars(trainer).update(self._trainer)
        trainer._restore_arrays({name: array.copy() for name, array in self._more.items()})
        _with_variables(getattr(trainer, "_amp_loss_scaler", None), self._scaler)


def devices_of(parameter: Parameter) -> list[Any]:
    """The devices on which a Parameter without values is to be initialized."""
    return list(parameter._deferred_init[1]) if parameter._deferred_init else [mx.cpu()]


def _updaters(trainer: Any) -> list[Any]:
    return trainer._updaters if trainer._store_optimizer is None else [trainer._store_optimizer.updater]


def _copied(source: NDArray, target: NDArray | None) -> NDArray:
    fits = type(target) is type(source) and target.shape == source.shape and target.dtype == source.dtype
    if not fits or target.context != source.context:
        return source.copy()
    arrays.copy(source, target)
    return target


def _copied_state(state: Any, before: Any) -> Any:
    old = iter(leaves(before, NDArray))
    return mapped(state, lambda array: _copied(array, next(old, None)))


def _variables(owner: Any) -> dict | None:
    return None if owner is None else copy.deepcopy(vars(owner))


def _with_variables(owner: Any, variables: dict | None) -> Any:
    if owner is not None and variables is not None:
        vars(owner).clear()
        vars(owner).update(copy.deepcopy(variables))
    return owner

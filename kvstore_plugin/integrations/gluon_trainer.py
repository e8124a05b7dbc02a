"""What gluon.Trainer lacks with the store 'mykv', so that a checkpoint can be loaded at any time."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator

from ..compat.mxnet import MXNetError, gluon
from ..coordination import deadlock_check, step_label
from ..gradients import fence
from ..nn import sync_batch_norm
from ..parameters import broadcast, load_tracking
from ..parameters.broadcast import stale_gradient
from ..sharded_optimizer import traits
from ..store.kvstore import MyKV

# Of Trainers that have given their parameters to a store of ours, what they know of it.
_attached: weakref.WeakKeyDictionary[gluon.Trainer, dict[str, Any]] = weakref.WeakKeyDictionary()

# How many parameters a fence behind their updates has: the next forward pass waits for all of them.
_FENCED_TOGETHER = 16

_fences: weakref.WeakKeyDictionary[gluon.Trainer, list[fence.Fence]] = weakref.WeakKeyDictionary()

# Of Trainers whose allreduce_grads() was called outside of step().
_sums: weakref.WeakKeyDictionary[gluon.Trainer, fence.SumsCheck] = weakref.WeakKeyDictionary()

# Trainers that are in step().
_stepping: weakref.WeakSet[gluon.Trainer] = weakref.WeakSet()


def was_attached(trainer: gluon.Trainer) -> bool:
    """Whether a Trainer has given its parameters to a store of ours, at whatever time."""
    return trainer in _attached


def attach_again(trainer: gluon.Trainer) -> None:
    """Undo what set_data() and load_parameters() do to a Trainer that updates on the store: it forgets its store.

    In its next step it would broadcast the parameters again. That is not needed where all workers have the same.
    """
    vars(trainer).update(_attached[trainer], _kv_initialized=True, _params_to_init=[])


def _keeping(original: Callable) -> Callable:
    """Trainer._init_kvstore, which keeps the store that it makes.

    After set_data() and load_parameters() it is called once more, and with the store's name it would make another
    store, whose operations would wait for those of workers that go on with the first one.
    """

    @functools.wraps(original)
    def _init_kvstore(self: gluon.Trainer) -> None:
        if self in _attached:
            _meet(self, _attached[self]["_kvstore"])
        original(self)
        if isinstance(self._kvstore, MyKV):
            self._kvstore_params["kvstore"] = self._kvstore
            names = ("_kvstore", "_update_on_kvstore", "_distributed")
            _attached[self] = {name: vars(self)[name] for name in names}
            deadlock_check.made(self, _awaited_by, _refuse)

    _init_kvstore.keeps = True
    return _init_kvstore


def _noticing(original: Callable) -> Callable:
    """Trainer._allreduce_grads, which lets the workers notice where only some have loaded parameters or states."""

    @functools.wraps(original)
    def _allreduce_grads(self: gluon.Trainer) -> None:
        if not isinstance(self._kvstore, MyKV):
            original(self)
            return
        deadlock_check.stepped(self, _awaited_by, _refuse)
        with _refusing(self):
            sync_batch_norm.end_step()
            label = _label(self)
            has_loaded = load_tracking.any_of(self._params)
        try:
            if has_loaded:
                _meet(self, self._kvstore)
            if self not in _stepping:
                _sums.setdefault(self, fence.SumsCheck()).begin()
            # A step that breaks off between two keys has summed some gradients, from which the others update.
            with self._kvstore.labelled(label, _keys(self)), load_tracking.noting_failures(self._params):
                original(self)
        except BaseException:
            if not self._update_on_kvstore:  # the others see it in their updates, which they have counted
                broadcast.count_update(self)
            raise

    _allreduce_grads.keeps = True
    return _allreduce_grads


def _label(trainer: gluon.Trainer) -> str:
    """What the workers' Trainers must have in common in a step, so that their weights stay equal; see factors.py.

    An optimizer on the store has a label of its own. It is the same kind of label in each step, whatever became of the
    steps before, of which workers may know unequally much.
    """
    optimizer = trainer._optimizer
    rate = step_label.learning_rate_of(optimizer)
    label = step_label.label(step_label.value_of(optimizer.rescale_grad), step_label.scale_of(trainer), rate)
    return step_label.BETWEEN.join([label, *traits.settings(optimizer)])


def _meet(trainer: gluon.Trainer, store: MyKV) -> None:
    """Find out whether all workers have loaded what this one has, in place of the next step's first operation."""
    keys = _keys(trainer)
    if keys:
        store.meet(keys, load_tracking.label(trainer._params))
    load_tracking.forget(trainer._params)


def _is_ours(store: Any) -> bool:
    """Whether a Trainer was given a store of ours, or its name."""
    return isinstance(store, MyKV) or (isinstance(store, str) and store.lower() == "mykv")


def _awaited_by(trainer: gluon.Trainer) -> list[int]:
    """The ranks that have begun a step that this one has not called for."""
    return _store_of(trainer).awaited_by(_keys(trainer))


def _refuse(trainer: gluon.Trainer, reason: str) -> None:
    """Let a step of the other workers fail, which have counted it as an update."""
    _store_of(trainer).refuse(_keys(trainer), reason)
    broadcast.count_update(trainer)
    sync_batch_norm.end_step()


@contextlib.contextmanager
def _refusing(trainer: gluon.Trainer) -> Iterator[None]:
    """Let the other workers' step fail with an exception that comes before this worker's part in it."""
    try:
        yield
    except BaseException as error:
        _refuse(trainer, str(error) or type(error).__name__)
        raise


def _store_of(trainer: gluon.Trainer) -> MyKV:
    """The store of a Trainer, which MXNet forgets in load_parameters(); a copy of a Trainer has only its own."""
    return _attached.get(trainer, vars(trainer))["_kvstore"]


def _keys(trainer: gluon.Trainer) -> list[int]:
    return [number for number, one in enumerate(trainer._params) if one.grad_req != "null"]


def _checking(original: Callable) -> Callable:
    """Trainer.step, which fails on all workers where one cannot take it, before any has updated.

    So it is with a batch size that is no number, and with a stale gradient.
    """

    @functools.wraps(original)
    def step(self: gluon.Trainer, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        if not _is_ours(self._kvstore_params["kvstore"]):
            original(self, batch_size, ignore_stale_grad)
            return
        wrong = None
        try:
            self._check_and_rescale_grad(self._scale / batch_size)
        except Exception as error:
            wrong = error  # there is no store yet to tell the others by
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        with _refusing(self):
            if wrong is not None:
                raise wrong
            stale = None if ignore_stale_grad else stale_gradient(self._params)
            if stale is not None:
                raise UserWarning(stale)
        _stepping.add(self)
        try:
            original(self, batch_size, ignore_stale_grad)
        finally:
            _stepping.discard(self)

    step.keeps = True
    return step


def _updating(original: Callable) -> Callable:
    """Trainer._update, a failure of which the other workers do not see."""

    @functools.wraps(original)
    def _update(self: gluon.Trainer, ignore_stale_grad: bool = False) -> None:
        with load_tracking.noting_failures(self._params if self in _attached else ()):
            failure = _sums[self].failure() if self in _sums and self not in _stepping else None
            if failure is not None:
                broadcast.count_update(self)  # as workers do that have not looked, and update from what was summed
                load_tracking.note_failure(self._params)
                raise MXNetError(f"update() cannot be made: {failure}")
            original(self, ignore_stale_grad)
        if isinstance(self._kvstore, MyKV) and self._kvstore.num_workers > 1:
            if self not in _fences:
                _fences[self] = fence.in_groups(self._params, _FENCED_TOGETHER)
            for one in _fences[self]:
                one.push()

    _update.keeps = True
    return _update


def _loading_alone(original: Callable) -> Callable:
    """Trainer.load_states, which sets up the store only if that is where the states are.

    Setting it up broadcasts the first worker's parameters, to which the others come in their first step.
    """

    @functools.wraps(original)
    def load_states(self: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._kv_initialized or self._kvstore_params["update_on_kvstore"] is not False:
            original(self, *args, **kwargs)
            return
        waiting, self._params_to_init, self._kv_initialized = self._params_to_init, [], True
        try:
            original(self, *args, **kwargs)
        finally:
            self._params_to_init, self._kv_initialized = waiting, False

    load_states.keeps = True
    return load_states


for _name, _wrapped in (
    ("_init_kvstore", _keeping),
    ("_allreduce_grads", _noticing),
    ("load_states", _loading_alone),
    ("step", _checking),
    ("_update", _updating),
):
    if not getattr(getattr(gluon.Trainer, _name), "keeps", False):
        setattr(gluon.Trainer, _name, _wrapped(getattr(gluon.Trainer, _name)))

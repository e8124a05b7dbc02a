"""Patches of gluon.Trainer for the store 'mykv': checkpoints at any time, and errors on all workers."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator

from ..compat import patches
from ..compat.mxnet import MXNetError, gluon, trainer_contexts
from ..coordination import deadlock_check, step_label, step_marks
from ..gradients import fence
from ..nn import sync_batch_norm
from ..parameters import load_tracking, trainer_state
from ..sharded_optimizer import traits
from ..store.kvstore import MyKV, created, is_ours
from . import amp

_ANOTHER_STORE = "another store than 'mykv'"

_BY_NAME = "A Trainer that was given the name 'mykv' has run no code of this package before this call. "

# Parameters per fence behind their updates. Few, because the next forward pass waits for all of them.
_FENCED_TOGETHER = 16


class _Record:
    """What is known of a Trainer with the store 'mykv'."""

    def __init__(self) -> None:
        self.of_store: dict[str, Any] = {}  # its attributes of the store, once it has given the store its parameters
        self.fences: list[fence.Fence] = []
        self.sums = fence.SumsCheck()  # for allreduce_grads() outside of step()
        self.is_stepping = False


_records: weakref.WeakKeyDictionary[gluon.Trainer, _Record] = weakref.WeakKeyDictionary()


def _record(trainer: gluon.Trainer) -> _Record:
    return _records.setdefault(trainer, _Record())


def was_attached(trainer: gluon.Trainer) -> bool:
    """Whether a Trainer has ever given its parameters to a store 'mykv'."""
    return trainer in _records and bool(_records[trainer].of_store)


def attach_again(trainer: gluon.Trainer) -> None:
    """Restore the store of a Trainer that updates on the store, after set_data() or load_parameters() removed it.

    Otherwise its next step would broadcast the parameters again, which is not needed if they are equal on all workers.
    """
    vars(trainer).update(_records[trainer].of_store, _kv_initialized=True, _params_to_init=[])


@patches.replaces(
    "gluon.trainer._create_kvstore",
    why="MXNet drops the name of a store where a process has one device: each worker would train alone.",
    does="Creates the store 'mykv' where its name is given.",
    undone_by=_ANOTHER_STORE,
)
def _create_kvstore(original: Callable, kvstore: Any, *args: Any, **kwargs: Any) -> Any:
    return original(created(kvstore), *args, **kwargs)


@patches.replaces(
    "gluon.Trainer._init_kvstore",
    why=_BY_NAME
    + "After `set_data()` and `load_parameters()` MXNet calls it again and would make another store. The other "
    "workers keep theirs, so operations of the new store would never finish.",
    does="Keeps the store. Raises an error for sparse parameters. Updates on the workers where AMP is on.",
    undone_by=_ANOTHER_STORE,
)
def _init_kvstore(original: Callable, self: gluon.Trainer) -> None:
    if was_attached(self):
        _meet(self, _store_of(self))
    if is_ours(self._kvstore_params["kvstore"]):
        amp.update_on_workers(self)
        if self._contains_sparse_weight or self._contains_sparse_grad:
            # MXNet's own error gives no remedy, and MXNet has no error for a store's name with sparse values.
            raise ValueError(
                "gluon.Trainer cannot train sparse parameters with the store 'mykv': use "
                "kvstore_plugin.DistributedTrainer(params, optimizer, optimizer_params) in its place, without kvstore."
            )
    original(self)
    if isinstance(self._kvstore, MyKV):
        self._kvstore_params["kvstore"] = self._kvstore
        names = ("_kvstore", "_update_on_kvstore", "_distributed")
        _record(self).of_store = {name: vars(self)[name] for name in names}
        deadlock_check.made(self, _awaited_by, _refuse)


@patches.replaces(
    "gluon.Trainer._allreduce_grads",
    when=patches.AT_INIT,
    why="Where only some workers have loaded parameters or states, or settings differ, weights would drift apart.",
    does="Gives the sums of a step a label, so that workers that differ get an error.",
    undone_by=_ANOTHER_STORE,
)
def _allreduce_grads(original: Callable, self: gluon.Trainer) -> None:
    if not isinstance(self._kvstore, MyKV):
        original(self)
        return
    deadlock_check.stepped(self, _awaited_by, _refuse)
    record = _record(self)
    with _refusing(self):
        sync_batch_norm.end_step()
        label = _label(self)
        has_loaded = load_tracking.any_of(self._params)
    try:
        if has_loaded:
            _meet(self, self._kvstore)
        if not record.is_stepping:
            record.sums.begin()
        # If the step breaks off between two keys, the other workers update from the gradients that are summed already.
        labelled = self._kvstore.labelled(label, _keys(self))
        # MXNet pushes the gradients first that backward writes last.
        with labelled, load_tracking.noting_failures(self._params), step_marks.part("last"):
            original(self)
    except BaseException:
        if not self._update_on_kvstore:  # the other workers get the error in their updates, which they have counted
            trainer_state.count_update(self)
        raise


@patches.replaces(
    "gluon.Trainer.step",
    why=_BY_NAME + "A worker that cannot take a step would leave the others waiting.",
    does="Fails on all workers, before any updates, where a batch size is no number or a gradient is stale.",
    undone_by=_ANOTHER_STORE,
)
def _step(original: Callable, self: gluon.Trainer, batch_size: Any, ignore_stale_grad: bool = False) -> None:
    if not is_ours(self._kvstore_params["kvstore"]):
        original(self, batch_size, ignore_stale_grad)
        return
    wrong = None
    try:
        self._check_and_rescale_grad(self._scale / batch_size)
    except Exception as error:
        wrong = error  # raised below: without a store it cannot be told to the other workers yet
    if not self._kv_initialized:
        self._init_kvstore()
    if self._params_to_init:
        self._init_params()
    with _refusing(self):
        if wrong is not None:
            raise wrong
        stale = None if ignore_stale_grad else trainer_state.stale_gradient(self._params)
        if stale is not None:
            raise UserWarning(stale)
    record = _record(self)
    record.is_stepping = True
    try:
        original(self, batch_size, ignore_stale_grad)
    finally:
        record.is_stepping = False


@patches.replaces(
    "gluon.Trainer._update",
    when=patches.AT_INIT,
    why="The other workers do not notice an update that fails on this worker.",
    does="Notes the failure, for an error on all workers in the next step. Lets the next forward pass wait for all "
    "updates.",
    undone_by=_ANOTHER_STORE,
)
def _update(original: Callable, self: gluon.Trainer, ignore_stale_grad: bool = False) -> None:
    if self not in _records and not isinstance(self._kvstore, MyKV):
        original(self, ignore_stale_grad)
        return
    record = _record(self)
    is_shared = isinstance(self._kvstore, MyKV) and self._kvstore.num_workers > 1
    if is_shared and not record.fences:
        record.fences = fence.in_groups(self._params, _FENCED_TOGETHER)
    with load_tracking.noting_failures(self._params if was_attached(self) else ()):
        failure = None if record.is_stepping else record.sums.failure()
        if failure is not None:
            trainer_state.count_update(self)  # workers that have not seen the error update from the sums, and count
            load_tracking.note_failure(self._params)
            raise MXNetError(failure)
        if is_shared and not self._update_on_kvstore:
            for one in record.fences:
                one.begin()
        try:
            original(self, ignore_stale_grad)
        except MXNetError:  # of a sum, so that all workers have it; or of an update, which only a fence can tell
            for one in record.fences if is_shared else ():
                one.push(ends_step=True, broken=True)
            raise
    for one in record.fences if is_shared else ():
        one.push(ends_step=True)


@patches.replaces(
    "gluon.Trainer.load_states",
    why=_BY_NAME
    + "MXNet's function sets up the store with a broadcast, which the other workers join in their first step only. "
    "Where only some workers load states, weights would drift apart.",
    does="Sets up the store only if the states are there. Notes that states were loaded.",
    undone_by="a Trainer that updates on its store",
)
def _load_states(original: Callable, self: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    if self._kv_initialized or self._kvstore_params["update_on_kvstore"] is not False:
        original(self, *args, **kwargs)
    else:
        waiting, self._params_to_init, self._kv_initialized = self._params_to_init, [], True
        try:
            original(self, *args, **kwargs)
        finally:
            self._params_to_init, self._kv_initialized = waiting, False
    if not self._update_on_kvstore:  # the store's call is collective
        load_tracking.note(self._params)


def _label(trainer: gluon.Trainer) -> str:
    """The label of a step: what must be equal in all workers' Trainers, so that their weights stay equal.

    See coordination/step_label.py. An optimizer on the store adds its own label. The label does not depend on the
    outcome of earlier steps, since workers may know different outcomes.
    """
    optimizer = trainer._optimizer
    rate = step_label.learning_rate_of(optimizer)
    label = step_label.label(step_label.value_of(optimizer.rescale_grad), step_label.scale_of(trainer), rate)
    devices = f"devices: {len(trainer_contexts(trainer))}"
    if trainer._update_on_kvstore:
        return devices
    return step_label.BETWEEN.join([label, devices, *traits.settings(optimizer)])


def _meet(trainer: gluon.Trainer, store: MyKV) -> None:
    """Compare what the workers have loaded, in place of the next step's first operation."""
    keys = _keys(trainer)
    if keys:
        store.meet(keys, load_tracking.label(trainer._params))
    load_tracking.forget(trainer._params)


def _awaited_by(trainer: gluon.Trainer) -> list[int]:
    """The ranks that have begun a step that this rank has not begun."""
    return _store_of(trainer).awaited_by(_keys(trainer))


def _refuse(trainer: gluon.Trainer, reason: str) -> None:
    """Refuse a step of the other workers, and count an update, as the other workers do."""
    _store_of(trainer).refuse(_keys(trainer), reason)
    trainer_state.count_update(trainer)
    sync_batch_norm.end_step()


@contextlib.contextmanager
def _refusing(trainer: gluon.Trainer) -> Iterator[None]:
    """Refuse the other workers' step with the reason, if an exception occurs before this worker's part in it."""
    try:
        yield
    except BaseException as error:
        _refuse(trainer, str(error) or type(error).__name__)
        raise


def _store_of(trainer: gluon.Trainer) -> MyKV:
    """The store of a Trainer. MXNet forgets it in load_parameters(); a copied Trainer has only its attribute."""
    return (_record(trainer).of_store or vars(trainer))["_kvstore"]


def _keys(trainer: gluon.Trainer) -> list[int]:
    return [number for number, one in enumerate(trainer._params) if one.grad_req != "null"]

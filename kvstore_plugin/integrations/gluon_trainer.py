"""Patches of gluon.Trainer for the store 'mykv': gradients in shared memory, and errors on all workers.

MXNet's Trainer calls the store once for each parameter. This module reduces the Trainer's gradients like those of a
DistributedTrainer (gradients/dense_reducer.py): in place if they are in shared memory, and several by one operation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Any, Callable, Iterator

import numpy as np

from ..compat import arrays, errors, patches
from ..compat.mxnet import DeferredInitializationError, MXNetError, gluon
from ..coordination import agreement, deadlock_check, operation, step_label
from ..coordination.operation_names import FirstUse, KeptNames
from ..gradients import step_guard
from ..gradients.bucket_memory import GradientMemory
from ..gradients.bucket_plan import Reduction
from ..gradients.bucket_sizes import default_bucket_bytes
from ..gradients.dense_reducer import DenseReducer
from ..gradients.reducer import UPDATE_REFUSED, Comparing, Task
from ..gradients.step_guard import StepGuard, Told
from ..nn import batch_norm_calls
from ..parameters import deferred_init, load_tracking, resumption, trainer_state
from ..parameters.naming import NUMBERED_DIFFERENTLY, Order, named_parameters, order_of, orders_differ
from ..sharded_optimizer import traits
from ..store.kvstore import MyKV, store_named
from ..store.names import check_spelling, created, is_ours
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from . import amp, separate_steps
from .distributed_optimizer import averaging_like, check_not_averaging, note_order, refusing_rest

_ANOTHER_STORE = "another store than 'mykv'"
_RECORD = "_record_of_mykv"  # the attribute of a Trainer that holds its _Record
_SUMS = "allreduce_grads()"  # what the workers compare outside of step()
_CALL = "the first step of a gluon.Trainer"
_SAME_ORDER = "Make all Trainers, and take their first steps, in the same order on all workers."
_EARLIER = "A Trainer may be older than the import of this package. "


class _Record:
    """The state of a Trainer with the store 'mykv'."""

    def __init__(self) -> None:
        self.of_store: dict[str, Any] = {}  # the Trainer's attributes for the store; empty before it has the store
        self.memory: GradientMemory | None = None  # the memory of the Trainer's gradients
        self.reducer: DenseReducer | None = None
        self.first_use: FirstUse | None = None  # counted at creation, since first steps may have any order
        self.kept: KeptNames | None = None  # set in the first step
        self.order = Order()
        self.has_met = False  # whether _meet() has succeeded
        self.scope: str | None = None  # the prefix of the names of the reducer's operations
        self.generation = 0  # process.generation when the reducer was created
        self.losses = 0  # process.losses when the reducer was created
        self.is_stepping = False
        self.told = Told.ALL
        self.mark: Any = None  # stands for the current step, see batch_norm_calls.end_step()
        self.refuses_update = False  # allreduce_grads() has failed here, so the next update() raises an error
        self.ignores_stale = False  # whether the current step ignores stale gradients

    def __getstate__(self) -> dict:
        """The state of a copied Trainer: it has other Parameters and reduces their gradients separately."""
        return {**vars(_Record()), "of_store": self.of_store}


def _record(trainer: gluon.Trainer) -> _Record:
    # Records are attributes of Trainers: a global registry would keep Trainers alive, since in MXNet 1.9 a record's
    # Parameters refer to their Trainer.
    record = vars(trainer).get(_RECORD)
    return vars(trainer).setdefault(_RECORD, _Record()) if record is None else record


def was_attached(trainer: gluon.Trainer) -> bool:
    """Whether a Trainer's parameters were ever in a store 'mykv'."""
    return _RECORD in vars(trainer) and bool(_record(trainer).of_store)


def attach_again(trainer: gluon.Trainer) -> None:
    """Restore the store of a Trainer that updates on the store, after set_data() or load_parameters() removed it."""
    vars(trainer).update(_record(trainer).of_store, _kv_initialized=True, _params_to_init=[])


@patches.replaces(
    "gluon.trainer._create_kvstore",
    why=_EARLIER + "MXNet drops the name of a store where a process has one device: each worker would train alone.",
    does="Creates the store 'mykv' where its name is given.",
    undone_by=_ANOTHER_STORE,
)
def _create_kvstore(original: Callable, kvstore: Any, *args: Any, **kwargs: Any) -> Any:
    return original(created(kvstore), *args, **kwargs)


@patches.replaces(
    "gluon.Trainer.__init__",
    why="Gradients can move to memory that the workers share best before the first backward. A DistributedOptimizer "
    "averages gradients, and the store would sum them once more.",
    does="Calls `init()`, if the program has not, and gives the Parameters gradients in shared memory. Raises an error "
    "for a DistributedOptimizer. Takes update_on_kvstore=True for each optimizer, where MXNet 2.0 refuses those with "
    "`aggregate_num` above 1.",
    undone_by=_ANOTHER_STORE,
)
def _init(
    original: Callable,
    self: gluon.Trainer,
    params: Any,
    optimizer: Any,
    optimizer_params: Any = None,
    kvstore: Any = "device",
    compression_params: Any = None,
    update_on_kvstore: Any = None,
) -> None:
    check_spelling(kvstore)
    if not is_ours(kvstore):
        original(self, params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore)
        note_order(optimizer, self, params)
        return
    check_not_averaging(optimizer, "gluon.Trainer")
    # MXNet 2.0 rejects update_on_kvstore=True for an optimizer that takes several parameters in one call.
    told = None if update_on_kvstore else update_on_kvstore
    original(self, params, optimizer, optimizer_params, kvstore, compression_params, told)
    if update_on_kvstore:
        self._kvstore_params["update_on_kvstore"] = update_on_kvstore
    process.require()
    _record(self).order = order_of(self._params, params)
    if not self._contains_sparse_weight and not self._contains_sparse_grad:
        _own_gradients(self, _process_set_of(self))
    _record(self).first_use = _first_use(self)


@patches.replaces(
    "gluon.Trainer._reset_kvstore",
    when=patches.AT_INIT,
    why="`set_data()` on one worker of a Trainer that updates on the store would let its weights differ.",
    does="Notes that values may change, for an error in the next step if they have.",
    undone_by=_ANOTHER_STORE,
)
def _reset_kvstore(original: Callable, self: gluon.Trainer) -> None:
    if was_attached(self) and self._kv_initialized:
        load_tracking.note_changes(self._params)
    original(self)


@patches.replaces(
    "gluon.Trainer._init_kvstore",
    why=_EARLIER
    + "After `set_data()` and `load_parameters()` MXNet calls it again and would make another store. The other "
    "workers keep theirs, so operations of the new store would never finish.",
    does="Keeps the store, without another exchange of values. Raises an error for sparse parameters. Updates on the "
    "workers where AMP is on.",
    undone_by=_ANOTHER_STORE,
)
def _init_kvstore(original: Callable, self: gluon.Trainer) -> None:
    if was_attached(self):
        # This worker alone may have changed a value, and may have changed it back. The step compares the values.
        _resume(self, _record(self))
        attach_again(self)
        return
    if is_ours(self._kvstore_params["kvstore"]):
        amp.update_on_workers(self)
        if self._contains_sparse_weight or self._contains_sparse_grad:
            # MXNet's own error gives no remedy, and MXNet has no error for a store's name with sparse values.
            raise ValueError(
                "gluon.Trainer cannot train sparse parameters with the store 'mykv': use "
                "kvstore_plugin.DistributedTrainer(params, optimizer, optimizer_params) in its place, without kvstore."
            )
        if _record(self).kept is not None and not isinstance(self._kvstore_params["kvstore"], MyKV):
            # The Trainer gives the store its name. A count of stores would not be the same on all workers, since
            # threads may take the first steps of several Trainers at the same time.
            self._kvstore_params["kvstore"] = store_named(f"{_record(self).scope}/store", global_process_set)
    original(self)
    if isinstance(self._kvstore, MyKV):
        self._kvstore_params["kvstore"] = self._kvstore
        names = ("_kvstore", "_update_on_kvstore", "_distributed")
        _record(self).of_store = {name: vars(self)[name] for name in names}
        if not self._update_on_kvstore:
            traits.warn_of_noise(self._optimizer, self._kvstore.size)
        _reducer_of(self)  # created here, in the same order on all workers: its operations' names contain a count
        deadlock_check.register(self, _awaited_by, _refuse_awaited)


def _meet(trainer: gluon.Trainer) -> None:
    """Wait for the other workers' first step.

    Raises an error on all workers if a Parameter has no values on one of them, or their orders of Parameters differ.
    MXNet creates the store from the values. So without this exchange, a worker without values could not tell the other
    workers that it cannot take the step.
    """
    process_set = _process_set_of(trainer)
    if _record(trainer).has_met or not process_set.included():
        return
    params = trainer._params
    record = _record(trainer)
    if record.first_use is None:  # the Trainer is a copy, or older than the import of this package
        record.first_use = _first_use(trainer, is_copy=True)
    missing = next((number for number, one in enumerate(params) if one._data is None), len(params))
    held = agreement.digest([f"{parameter.shape} {arrays.dtype_name(parameter.dtype)}" for parameter in params])
    # Threads that are daemons may step Trainers too, but most of them do other work.
    is_alone = deadlock_check.has_no_other_thread(threading.main_thread())
    is_in_thread = not is_alone or threading.current_thread() is not threading.main_thread()
    told = [len(params), missing, held, *record.order, is_in_thread]
    numbers, met = record.first_use.meet_in(
        lambda: operation.waiting(process_set, f"{_CALL} with {len(params)} parameters"), told
    )
    name = record.first_use.shown
    if _are_in_threads(process_set, met[:, -1]) and agreement.first_that_differs(numbers[:, np.newaxis]) is not None:
        # On each worker a thread has come first here. Each Trainer has the number of its creation, so it can meet its
        # own counterparts.
        met = operation.exchange(process_set, f"{name}/first step", _CALL, _CALL, told)
    else:
        _check_numbers(process_set, numbers, met[:, 0])
    first, holds = met[:, 1:3].T
    if orders_differ(met[:, 3:-1]):
        raise RuntimeError(
            f"{NUMBERED_DIFFERENTLY} Rank {process.rank()} begins with {', '.join(one.name for one in params[:3])}."
        )
    if first.min() < len(params):
        rank = process.rank() if missing < len(params) else process_set.ranks[int(first.argmin())]
        number = missing if missing < len(params) else int(first.min())
        name, parameter, _ = named_parameters(params)[number]
        sentence = deferred_init.without_values(name, parameter, rank)
        raise (DeferredInitializationError if missing < len(params) else MXNetError)(sentence)
    if (holds != held).any():
        shown = ", ".join(f"{one.name} {one.shape} {arrays.dtype_name(one.dtype)}" for one in params[:5])
        raise RuntimeError(
            f"The workers' gluon.Trainers hold parameters of different shapes or dtypes; that of rank {process.rank()} "
            f"begins with {shown}. Build the same network on all workers. If there are several Trainers: "
            f"{_SAME_ORDER[0].lower()}{_SAME_ORDER[1:]}"
        )
    record.has_met, record.scope, record.kept = True, record.scope or name, KeptNames(process_set, name)


def _are_in_threads(process_set: ProcessSet, flags: np.ndarray) -> bool:
    """Whether several threads of a worker may have taken first steps, in this first step or in an earlier one.

    `flags`: whether each worker's script has several threads now. The result is the same on all workers.
    """
    here = process.generation, process_set.process_set_id
    if flags.any():
        _with_threads.add(here)
    return here in _with_threads


_with_threads: set[tuple[int, int | None]] = set()  # the process sets of each init()


def _first_use(trainer: gluon.Trainer, is_copy: bool = False) -> FirstUse:
    return FirstUse(_process_set_of(trainer), "gluon.Trainer", _CALL, is_copy)


def _check_numbers(process_set: ProcessSet, numbers: np.ndarray, sizes: np.ndarray) -> None:
    """Raise a RuntimeError on all workers if they take the first steps of different Trainers."""
    other = agreement.first_that_differs(np.stack([numbers, sizes], axis=1))
    if other is None:
        return
    first, second = (
        f"rank {process_set.ranks[position]} that of number {numbers[position]}, with {sizes[position]} parameters"
        for position in (0, other)
    )
    raise RuntimeError(
        "The workers take the first steps of different gluon.Trainers, counted from 0 as they were made: "
        f"{first}, and {second}. {_SAME_ORDER}"
    )


@patches.replaces(
    "gluon.Trainer.allreduce_grads",
    when=patches.AT_INIT,
    why="A worker without values of a Parameter cannot make its store, and would leave the others waiting.",
    does="Fails on all workers in the first step.",
    undone_by=_ANOTHER_STORE,
)
def _public_allreduce_grads(original: Callable, self: gluon.Trainer) -> None:
    if is_ours(self._kvstore_params["kvstore"]):
        _meet(self)
    original(self)


@patches.replaces(
    "gluon.Trainer._allreduce_grads",
    when=patches.AT_INIT,
    why="MXNet calls the store for each parameter alone. Where only some workers have loaded parameters or states, or "
    "settings differ, weights would drift apart.",
    does="Reduces gradients in shared memory, several by one operation. Workers that differ get an error.",
    undone_by=_ANOTHER_STORE,
)
def _allreduce_grads(original: Callable, self: gluon.Trainer) -> None:
    if not isinstance(self._kvstore, MyKV):
        original(self)
        return
    record = _record(self)
    _resume(self, record)
    deadlock_check.note_step(self, _awaited_by, _refuse_awaited)
    record.refuses_update = False
    if record.reducer is not None and not record.reducer.compared:
        _settle(self, record)
    reducer = record.reducer or _reducer_of(self)
    turns = reducer.turns
    if not record.is_stepping:
        record.mark = object()
    try:
        try:
            batch_norm_calls.end_step(self._params, self._kvstore._process_set, "", record.mark)
            record.told = Told.ALL  # the rest is refused below
            label = _label(self, "a step" if record.is_stepping else _SUMS)
            for parameter in self._params:
                if parameter.grad_req != "null":
                    parameter.list_grad()  # raises an error for a Parameter without values
        except BaseException as error:
            if record.told is Told.ALL:
                _refuse_and_count(self, reducer.refuse, errors.reason_of(error))
            raise
        with StepGuard(self, [reducer]):
            try:
                reducer.compress(self._kvstore._wire)
                reducer.allreduce(
                    record.ignores_stale, label, Comparing.NOTHING if record.is_stepping else Comparing.UPDATE
                )
            except BaseException as error:
                step_guard.refuse_unbegun([reducer], [turns], errors.reason_of(error))
                if record.is_stepping and (reducer.is_begun or reducer.is_begun_in_part):
                    load_tracking.note_error(error, self)
                raise
            if self._update_on_kvstore:
                with step_guard.updates(self, ()):
                    reducer.update()
            elif record.is_stepping:
                record.told = Told.SUMS
    except BaseException:
        record.refuses_update = not record.is_stepping
        raise


def _settle(trainer: gluon.Trainer, record: _Record) -> None:
    """After an allreduce_grads() without an update(): count an update if the other workers have counted it."""
    if not record.reducer.is_left_out_by_all():
        trainer_state.count_update(trainer)


@patches.replaces(
    "gluon.Trainer.step",
    why=_EARLIER + "A worker that cannot take a step would leave the others waiting.",
    does="Fails on all workers, before any updates, where a batch size is not a number or a gradient is stale. With "
    "another store, warns where the workers exchange nothing.",
    undone_by=_ANOTHER_STORE,
)
def _step(original: Callable, self: gluon.Trainer, batch_size: Any, ignore_stale_grad: bool = False) -> None:
    store = self._kvstore_params["kvstore"]
    if not isinstance(store, MyKV) and not is_ours(store):
        original(self, batch_size, ignore_stale_grad)
        separate_steps.note(self)
        return
    record = _record(self)
    _resume(self, record)
    if not record.has_met:
        _meet(self)
    wrong, record.mark = None, object()
    try:
        self._check_and_rescale_grad(self._scale / batch_size)
        ignore_stale_grad = bool(ignore_stale_grad)
    except Exception as error:
        wrong = error  # raised below, since this worker needs the store to tell the other workers
    if not self._kv_initialized:
        self._init_kvstore()
    if self._params_to_init:
        self._init_params()
    record.refuses_update = False
    if record.reducer is not None and not record.reducer.compared:
        _settle(self, record)
    try:
        if wrong is not None:
            raise wrong
        if not ignore_stale_grad:
            step_guard.check_fresh(self._params)
    except BaseException as error:
        _refuse(self, error)
        raise
    record.is_stepping, record.ignores_stale, record.told = True, ignore_stale_grad, Told.NOTHING
    try:
        original(self, batch_size, ignore_stale_grad)  # calls _allreduce_grads() and _update(), perhaps the user's own
    except BaseException as error:
        if record.told is Told.NOTHING:
            _refuse(self, error)
        elif record.told is Told.SUMS:
            load_tracking.note_error(error, self)
        raise
    finally:
        record.is_stepping = record.ignores_stale = False


@patches.replaces(
    "gluon.Trainer.update",
    why="MXNet fails before the workers compare their updates, so the other workers would update without this one.",
    does="Fails on all workers, before any updates, where a batch size is not a number.",
    undone_by=_ANOTHER_STORE,
)
def _public_update(original: Callable, self: gluon.Trainer, batch_size: Any, ignore_stale_grad: bool = False) -> None:
    record = _record(self) if isinstance(self._kvstore, MyKV) else None
    if record is not None and record.reducer is not None and not self._update_on_kvstore and not record.refuses_update:
        try:
            self._scale / batch_size
            ignore_stale_grad = bool(ignore_stale_grad)
        except Exception as error:
            with StepGuard(self, [record.reducer]):
                record.reducer.refuse_comparison(f"its argument of update() cannot be used: {error}")
                raise
    original(self, batch_size, ignore_stale_grad)


@patches.replaces(
    "gluon.Trainer._update",
    when=patches.AT_INIT,
    why="The other workers do not notice an update that fails on this worker.",
    does="Notes the failure, for an error on all workers in the next step. Lets the next forward pass wait for all "
    "updates.",
    undone_by=_ANOTHER_STORE,
)
def _update(original: Callable, self: gluon.Trainer, ignore_stale_grad: bool = False) -> None:
    if not isinstance(self._kvstore, MyKV) and not was_attached(self):
        with refusing_rest(self, ignore_stale_grad):
            original(self, ignore_stale_grad)
        return
    record = _record(self)
    _resume(self, record)
    reducer = record.reducer
    updates_here = reducer is not None and not self._update_on_kvstore
    if updates_here and not record.is_stepping:
        if record.refuses_update:
            record.refuses_update = False
            raise MXNetError(UPDATE_REFUSED)
        _compare(self, reducer, ignore_stale_grad)
    with step_guard.updates(self if record.of_store else None, [reducer] if updates_here else ()):
        original(self, ignore_stale_grad)
    record.told = Told.ALL
    if not updates_here and self._update_on_kvstore:  # MXNet does not mark gradients as stale here
        trainer_state.mark_stale(self._params)


def _compare(trainer: gluon.Trainer, reducer: DenseReducer, ignore_stale: bool) -> None:
    """Make update() outside of step() fail on all workers if updates differ, or a gradient is stale on some worker."""
    with StepGuard(trainer, [reducer]):
        try:
            label = _label(trainer, "an update")
            if not ignore_stale:
                step_guard.check_fresh(trainer._params)
        except BaseException as error:
            reducer.refuse_comparison(errors.reason_of(error))
            raise
        try:
            reducer.compare(label)
        except BaseException as error:
            load_tracking.note_error(error, trainer)
            raise
        if ignore_stale:
            reducer.await_comparison()  # the workers share freshness only if no worker has refused the update
            reducer.share_freshness()


@patches.replaces(
    "gluon.Trainer.load_states",
    when=patches.AT_INIT,
    why="MXNet's function sets up the store with a broadcast, which the other workers join in their first step only. "
    "Where only some workers load states, weights would drift apart.",
    does="Sets up the store only if the states are there. Notes that states were loaded. Goes on with the counts of "
    "updates, whatever device the file has them for. Keeps a DistributedOptimizer around a loaded plain optimizer.",
    undone_by="a Trainer that updates on its store",
)
def _load_states(original: Callable, self: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    before = self._optimizer
    with _states_without_store(self):
        original(self, *args, **kwargs)
    loaded = averaging_like(before, self._optimizer)
    if loaded is not self._optimizer:
        self._optimizer = loaded
        for updater in [self._kvstore._updater] if self._update_on_kvstore else self._updaters:
            updater.optimizer = loaded
    if not self._update_on_kvstore:  # if it updates on the store, all workers have loaded the states together
        load_tracking.note_states(self)
        trainer_state.continue_counts(self)


@patches.replaces(
    "gluon.Trainer.save_states",
    when=patches.AT_INIT,
    why="MXNet's function sets up the store with a broadcast, which the other workers join in their first step only.",
    does="Sets up the store only if the states are there: one worker alone may save them before the first step.",
    undone_by="a Trainer that updates on its store",
)
def _save_states(original: Callable, self: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    with _states_without_store(self):
        original(self, *args, **kwargs)


@contextlib.contextmanager
def _states_without_store(trainer: gluon.Trainer) -> Iterator[None]:
    """Context manager in which a Trainer that updates on the workers does not set up its store."""
    amp.update_on_workers(trainer)
    on_store = trainer._kvstore_params["update_on_kvstore"]
    if on_store is None:  # MXNet's default
        on_store = os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1") != "0"
    if trainer._kv_initialized or on_store:
        yield
        return
    waiting, trainer._params_to_init, trainer._kv_initialized = trainer._params_to_init, [], True
    try:
        yield
    finally:
        trainer._params_to_init, trainer._kv_initialized = waiting, False


def _label(trainer: gluon.Trainer, what: str) -> str:
    """The label of a step or an update: all values that must be equal on all workers, so that their weights stay equal.

    See coordination/step_label.py. The label does not depend on the outcome of earlier steps, since workers may know
    different outcomes. So the label of sums outside of step() has no factor: it would be that of the last update.
    """
    devices = f"devices: {len(trainer._updaters)}"
    if what == _SUMS and not trainer._update_on_kvstore:
        return step_label.BETWEEN.join([what, devices])
    if trainer._update_on_kvstore:
        on_store = _store_of(trainer)._optimizer
        return step_label.BETWEEN.join([on_store.label(traits.progress_of(on_store.optimizer)), devices])
    optimizer = trainer._optimizer
    progress, settings = traits.progress_of(optimizer), traits.settings(optimizer)
    factor, rate = step_label.value_of(optimizer.rescale_grad), step_label.learning_rate_of(optimizer)
    label = step_label.label(factor, step_label.scale_of(trainer), rate, what, progress)
    return step_label.BETWEEN.join([label, devices, *settings])


def _process_set_of(trainer: gluon.Trainer) -> ProcessSet:
    """The process set of a Trainer's present or future store."""
    store = trainer._kvstore_params["kvstore"]
    return store._process_set if isinstance(store, MyKV) else global_process_set


def _own_gradients(trainer: gluon.Trainer, process_set: ProcessSet) -> GradientMemory:
    """Move the gradients of a Trainer to memory that the workers of a process set share."""
    core = process_set._core
    record = _record(trainer)
    record.memory = GradientMemory(process_set, default_bucket_bytes(len(core.host_ranks()), core.size()))
    record.memory.own([(parameter, None) for parameter in trainer._params])
    record.memory.warn_of_copies("a gluon.Trainer", len(trainer._params))
    return record.memory


def _reducer_of(trainer: gluon.Trainer) -> DenseReducer:
    """The reducer of a Trainer with a store."""
    record, store = _record(trainer), _store_of(trainer)
    if record.reducer is None:
        memory = record.memory or _own_gradients(trainer, store._process_set)
        store._serves_trainer = store._serves_trainer or bool(trainer._update_on_kvstore)
        reduction = Reduction(
            store._process_set,
            mean=False,
            compression=store._wire,
            bucket_bytes=memory.bucket_bytes,
            num_groups=0,
            store_optimizer=store._optimizer if trainer._update_on_kvstore else None,
        )
        keys = {id(parameter): key for key, parameter in enumerate(trainer._params)}
        named = named_parameters(trainer._params)
        when_moved = functools.partial(amp.warn_of_added_gradients, trainer._params)
        # All workers arrive here in the first steps of their Trainers.
        record.scope = record.scope or store._next_scope("trainer")  # new if load_states() has set up the store
        record.reducer = DenseReducer(Task(record.scope, named, reduction, when_moved, keys), memory)
        record.reducer.watch_batches()
        record.reducer.factor_of_sums = functools.partial(_factor_of_sums, weakref.ref(trainer))
        record.generation, record.losses = process.generation, process.losses
    return record.reducer


def _factor_of_sums(reference: weakref.ref) -> str | None:
    """For the statistics: the factor of the sums in a Trainer's last update; None if unknown."""
    trainer = reference()
    factor = None if trainer is None else trainer._optimizer.rescale_grad
    if not isinstance(factor, (int, float)):
        return None  # reading an array would wait
    return step_label.shown(factor, step_label.scale_of(trainer))


def _resume(trainer: gluon.Trainer, record: _Record) -> None:
    """Attach a Trainer with a store to the workers of a new init(), at its first use after init(). Collective."""
    if record.reducer is None or record.generation == process.generation:
        return
    if record.losses != process.losses:
        raise RuntimeError(resumption.WORKER_WAS_LOST)
    _store_of(trainer)._resume()
    if record.memory is not None:
        record.memory.release()
    kept, record.memory, record.reducer = record.reducer, None, None
    try:
        _reducer_of(trainer)
        resumption.broadcast_states(trainer)
    except BaseException:
        record.reducer, record.generation = kept, 0  # the next use tries again
        raise


def _awaited_by(trainer: gluon.Trainer) -> list[int]:
    """The ranks that have begun a step that this rank has not begun."""
    return _reducer_of(trainer).awaited_by()


def _refuse(trainer: gluon.Trainer, error: BaseException) -> None:
    """Refuse a step that only the other workers have begun, and count an update, as they do."""
    _refuse_and_count(trainer, _reducer_of(trainer).refuse, errors.reason_of(error))
    record = _record(trainer)
    record.told = Told.ALL
    batch_norm_calls.end_step(trainer._params, _process_set_of(trainer), errors.reason_of(error), record.mark)


def _refuse_awaited(trainer: gluon.Trainer, reason: str) -> None:
    """Refuse the step or update that the other workers wait for, and have counted."""
    is_step = bool(_reducer_of(trainer).compared)  # otherwise an update() after the sums
    _refuse_and_count(trainer, _reducer_of(trainer).refuse_awaited, reason)
    if is_step:
        batch_norm_calls.end_step(trainer._params, _process_set_of(trainer), reason)


def _refuse_and_count(trainer: gluon.Trainer, refuse: Callable[[str], None], reason: str) -> None:
    refuse(reason)
    if _reducer_of(trainer).has_begun():
        trainer_state.count_update(trainer)


def _store_of(trainer: gluon.Trainer) -> MyKV:
    """The store of a Trainer. MXNet drops a Trainer's store in load_parameters() and in copies; the record keeps it."""
    return (_record(trainer).of_store or vars(trainer))["_kvstore"]

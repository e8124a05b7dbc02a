"""The store 'mykv': MXNet's KVStore interface over the compiled core.

Calls of the ranks are matched by key. A rank that finds a wrong argument raises an error and refuses the operation of
this key, so that the other ranks get an error instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator, Sequence

from ..collectives import gather
from ..collectives.gradient_compression import gradient_compression
from ..collectives.row_sparse import is_row_sparse
from ..collectives.sparse_values import assign, push_broadcast, summed
from ..compat import arrays, errors
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import HAS_GPUS, KVStoreBase, MXNetError, NDArray, SparseNDArray, mx
from ..coordination import deadlock_check, operation, operation_names
from ..coordination.step_label import BETWEEN
from ..parameters import resumption
from ..sharded_optimizer import checkpoint, traits
from ..sharded_optimizer.optimizer import Member, ShardedUpdate, StoreOptimizer
from ..sharded_optimizer.row_update import RowUpdate
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from . import requests, update_order
from .equal_keys import EqualKeys
from .requests import Call
from .values import StoredValues


@KVStoreBase.register
class MyKV(KVStoreBase):
    """Store for synchronous data-parallel training, created by ``mx.kv.create('mykv')`` or ``MyKV(process_set=...)``.

    Creating the first store initializes MPI and joins the other ranks, if kvstore_plugin.init() was not called before.
    Each store has its own keys; all ranks must create their stores in the same order. 3 and '3' are different keys.
    In a process that mpirun has not started, the store is rank 0 of 1.

    Calls return at once, and MXNet's engine orders their results: reads and writes of an array wait for them as for any
    operator. An error that another rank caused is raised as MXNetError where the array is read.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The ranks that use the store, all by default. The store counts ranks and workers within the set.

    Raises
    ------
    TypeError, ValueError
        `process_set` is not a ProcessSet, was not added, or does not include this process.

    Examples
    --------
    >>> store = mx.kv.create("mykv")
    >>> store.type, store.num_workers, store.size
    ('mykv', 2, 2)
    >>> store.rank == mykv.rank(), store.local_rank == mykv.local_rank(), store.local_size == mykv.local_size()
    (True, True, True)
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        process.require()
        # Count before the check: even if the check fails on one rank only, the next store then has the same number on
        # all ranks.
        scope = operation_names.numbered(operation_names.counted_in(process_set), "kv")
        process_sets.check(process_set)
        self._begin(scope, process_set)

    def _begin(self, scope: str, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._scope = scope
        self._values = StoredValues()
        self._keys = EqualKeys(process_set, scope)
        self._counts: dict[str, int] = {}  # counters of _next_scope(), by kind
        self._wire = ""  # compression of sums between hosts, in the core's form
        self._optimizer: StoreOptimizer | None = None
        self._function: Callable[[Any, NDArray, NDArray], None] | None = None  # given to _set_updater()
        self._updates: dict[str, ShardedUpdate] = {}  # by key name
        self._optimizers = 0  # calls of set_optimizer(), also failed ones
        self._functions = 0  # calls of _set_updater(), also failed ones
        self._function_label = ""  # must be the same in the sums of all workers
        self._serves_trainer = False  # whether a gluon.Trainer updates on this store
        self._generation = process.generation
        _stores[scope] = self
        weakref.finalize(self, _forget, scope, process_set, process.generation).atexit = False

    def __repr__(self) -> str:
        return f"<MyKV {self._scope}>"

    @property
    def type(self) -> str:
        """Name of this kind of store: 'mykv'."""
        return "mykv"

    @property
    def rank(self) -> int:
        """Number of this worker among the store's workers, from 0."""
        return self._process_set.rank()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._process_set.size()

    @property
    def size(self) -> int:
        """Number of workers, as `num_workers`."""
        return self._process_set.size()

    @property
    def local_rank(self) -> int:
        """Number of this worker among the workers of its host, from 0."""
        return self._process_set._core.local_rank()

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self._process_set._core.local_size()

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy the bits of rank 0's `value` into `out` on every rank.

        The first array of `out` becomes the value in the store: push() and an optimizer on the store change this array,
        and pull() copies from it.

        Parameters
        ----------
        key : int, str, or list of them
            The ranks' calls are matched by key.
        value : NDArray, or list of NDArray for a list of keys
            Any shape; the dtypes of this release of MXNet. On ranks other than 0 only its shape and dtype are used. It
            is not changed, unless it is also in `out`.
        out : NDArray or list of NDArray (several devices), or a list of these for a list of keys; optional
            The arrays that receive the result; `value` by default.
        priority : int, optional
            Operations with a higher priority run first.

        Raises
        ------
        TypeError, ValueError
            Errors of this rank's arguments: wrong types, shapes or dtypes in `out` that differ from `value`, lists of
            different lengths. The other ranks get an MXNetError in `out` with the reason.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> weight = mx.nd.array([[1.0, 2.0]]) * (mykv.rank() + 1)
        >>> store.broadcast("weight", weight, out=weight)
        >>> weight.asnumpy().tolist()  # the values of rank 0
        [[1.0, 2.0]]
        """
        listed, taken = None, []  # the calls, and an item for each call whose turn this rank has taken
        try:
            self._note_change(key)
            listed = requests.checked(self._scope, "broadcast", key, value, out, priority)
            self._push_broadcasts(listed, taken, [call.outputs for call in listed], priority)
        except BaseException as error:  # also that of a signal handler
            self._refuse_rest("broadcast", key, listed, taken, error)
            raise
        for call in listed:
            self._values.lend(call)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum `value` over all workers and over all devices of a list.

        The value in the store does not change. With an optimizer (`set_optimizer`), the sum is the gradient by which
        the optimizer updates the value in the store, and `out` gets the new value.

        Parameters
        ----------
        key : int, str, or list of them
            The ranks' calls are matched by key.
        value : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            Any shape; the dtypes of this release of MXNet. float16 and bfloat16 are summed in float32. Not changed
            unless it is also in `out`.
        out : like `value`, optional
            The arrays that receive the sum, or the new value, on every rank; `value` by default. They may be on other
            devices than `value`. Floats are converted. An array may occur under several keys: all inputs are read
            before the first output is written.
        priority : int, optional
            Operations with a higher priority run first.

        Raises
        ------
        TypeError, ValueError
            Errors of this rank's arguments, as in `broadcast`; with an optimizer also a key that was never initialized.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> gradient = mx.nd.array([1.0, 2.0])
        >>> store.pushpull("gradient", gradient)
        >>> gradient.asnumpy().tolist()  # the sum over 2 workers
        [2.0, 4.0]
        """
        listed, taken = None, []
        try:
            listed = requests.checked(self._scope, "pushpull", key, value, out, priority)
            if len(listed) > 1:
                listed = requests.with_inputs_as_they_are(listed)
            if self._optimizers or self._functions:  # calls are counted: the same on all ranks, even if one has failed
                self._update(listed, taken, priority, True)
            else:
                self._push_sums(listed, taken, [call.outputs for call in listed], priority)
        except BaseException as error:
            self._refuse_rest("pushpull", key, listed, taken, error)
            raise

    def init(self, key: Any, value: Any) -> None:
        """Store a copy of rank 0's `value` on every rank. Returns at once.

        It replaces an earlier value of the key.

        Parameters
        ----------
        key : int, str, or list of them
            The ranks' calls are matched by key.
        value : NDArray, or list of NDArray for a list of keys
            As for `broadcast`; it is not changed.

        Raises
        ------
        TypeError, ValueError
            Errors of this rank's arguments, as in `broadcast`. The other ranks get an MXNetError in the arrays that
            they pull.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init("weight", mx.nd.array([3.0, 4.0]))
        """
        listed, taken = None, []
        try:
            self._note_change(key)
            listed = requests.checked(self._scope, "init", key, value, None, 0)
            self._push_broadcasts(listed, taken, [[self._values.create(call)] for call in listed], 0)
        except BaseException as error:
            self._refuse_rest("init", key, listed, taken, error)
            raise

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum `value` over all workers and all devices of a list, and store the sum. Returns at once.

        The sum replaces the value in the store, as in MXNet's dist_sync. With an optimizer (`set_optimizer`), the sum
        is the gradient by which the optimizer updates the value.

        Parameters
        ----------
        key : int, str, or list of them
            The ranks' calls are matched by key. init() or broadcast() must have been called for the key.
        value : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            With the shape and dtype of the value in the store; sums of floats are converted. It is not changed.
        priority : int, optional
            Operations with a higher priority run first.

        Raises
        ------
        TypeError, ValueError
            Errors of this rank's arguments: a key was never initialized, a wrong shape or dtype. The other ranks get an
            MXNetError in the arrays that they pull.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init("weight", mx.nd.zeros(2))
        >>> store.push("weight", mx.nd.array([1.0, 2.0]))  # the sum replaces the value
        """
        listed, taken = None, []
        try:
            listed = requests.checked(self._scope, "push", key, value, None, priority)
            if self._optimizers or self._functions:
                self._update(listed, taken, priority, False)
            else:
                self._check_homes(listed)
                self._push_sums(listed, taken, [[self._values.own(call)] for call in listed], priority)
        except BaseException as error:
            self._refuse_rest("push", key, listed, taken, error)
            raise

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the value in the store, after all earlier calls, into `out`. Returns at once.

        Nothing is sent: every worker holds the value.

        Parameters
        ----------
        key : int, str, or list of them
            Keys for which init() or broadcast() was called.
        out : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            With the shape and dtype of the value in the store; floats are converted.
        priority : int, optional
            Without effect.
        ignore_sparse : bool, optional
            True: sparse arrays in `out` are left alone. False: they get the whole value.

        Raises
        ------
        TypeError, ValueError
            `out` does not fit the value in the store, or a key was never initialized.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init("weight", mx.nd.zeros(2))
        >>> store.push("weight", mx.nd.array([1.0, 2.0]))
        >>> weight = mx.nd.zeros(2)
        >>> store.pull("weight", out=weight)
        >>> weight.asnumpy().tolist()  # the sum over 2 workers
        [2.0, 4.0]
        """
        for call in requests.checked(self._scope, "pull", key, out, None, priority):
            home = self._values.home(call)
            for array in call.inputs:
                if not (ignore_sparse and isinstance(array, SparseNDArray)):
                    arrays.copy(home, array)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Copy some rows of the value in the store into row_sparse arrays. Waits for the value, sends nothing.

        Parameters
        ----------
        key : int, str, or list of them
            Keys for which init() or broadcast() was called.
        out : row_sparse NDArray or list of them (several devices), or a list of these for a list of keys
            With the shape of the value in the store. They get only the requested rows. Floats are converted.
        priority : int, optional
            Without effect.
        row_ids : NDArray, list of NDArray, or a list of these for a list of keys
            Row numbers, in any order, possibly repeated: one array for all of `out`, or one for each array in it.

        Raises
        ------
        TypeError, ValueError
            `out` or `row_ids` do not fit the value in the store or each other, or a key was never initialized.
        IndexError
            The value has no such row.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init("vectors", mx.nd.arange(6).reshape((3, 2)).tostype("row_sparse"))
        >>> rows = mx.nd.sparse.zeros("row_sparse", (3, 2))
        >>> store.row_sparse_pull("vectors", out=rows, row_ids=mx.nd.array([2]))
        >>> rows.indices.asnumpy().tolist(), rows.data.asnumpy().tolist()
        ([2], [[4.0, 5.0]])
        """
        listed = requests.checked(self._scope, "pull", key, out, None, priority)
        numbers = iter(requests.row_ids(row_ids, listed))
        for call in listed:
            home = self._values.home(call)
            for array in call.inputs:
                arrays.copy_rows(home, next(numbers), array, f"out of key {call.key!r}")

    def barrier(self) -> None:
        """Wait until all workers call it. Operations that were started earlier may still be running.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.barrier()  # until all workers are here
        """
        gather.barrier(self._process_set)

    _barrier = barrier  # its name in MXNet's own stores

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has a capability: True for 'optimizer' (it can update weights), False for other names.

        Examples
        --------
        >>> mykv.MyKV.is_capable("optimizer")
        True
        """
        return isinstance(capability, str) and capability.lower() == KVStoreBase.OPTIMIZER

    def set_optimizer(self, optimizer: Any) -> None:
        """Set the optimizer that updates the values in the store: afterwards push() and pushpull() take gradients.

        Each worker updates a share of the values and keeps the states of that share only. The optimizer must be the
        same on all workers: if its class, its current settings, or the learning rate of an update differ, the update
        fails with an error that shows both. The first update after init() or broadcast() waits for all workers. States
        belong to the store, so another store begins without states. The optimizer is kept by reference, so changes to
        it (learning rate, rescale_grad) take effect at the next update. The store's keys are the optimizer's indices of
        parameters.

        Parameters
        ----------
        optimizer : mxnet.optimizer.Optimizer
            Any optimizer that works on single parameters. It replaces an earlier optimizer or updater, and begins
            without states. All workers must make this call. Setting the store's current optimizer again is a no-op.

        Raises
        ------
        TypeError, ValueError
            `optimizer` is not an optimizer, is a `DistributedOptimizer`, or cannot update a share on each worker
            (Nadam, SGLD); or a gluon.Trainer updates on the store.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init(0, mx.nd.array([1.0]))
        >>> store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.25))
        >>> weight = mx.nd.zeros(1)
        >>> store.pushpull(0, mx.nd.array([1.0]), out=weight)
        >>> float(weight.asnumpy()[0])  # 1 - 0.25 * (1 + 1), with the gradients of 2 workers
        0.5
        """
        self._optimizers += 1  # even if this call fails here: it may succeed on the other workers
        if self._optimizer is not None and optimizer is self._optimizer.optimizer:
            self._optimizer.set_again(self._optimizers)
            return
        self._replace_updates(StoreOptimizer(self._process_set, optimizer, self._optimizers), None)
        deadlock_check.saves_states(self, self._scope, self._process_set)

    def _replace_updates(self, optimizer: StoreOptimizer | None, function: Callable | None) -> None:
        if self._optimizer is not None and self._serves_trainer:
            raise ValueError(
                f"A gluon.Trainer updates on this store with its optimizer ({type(self._optimizer.optimizer).__name__})"
                ", so the store cannot take another optimizer or updater. Make another store, or change settings of "
                "the first optimizer in place, such as its learning rate."
            )
        self._optimizer, self._function = optimizer, function
        self._updates.clear()

    def _set_updater(self, updater: Callable[[Any, NDArray, NDArray], None]) -> None:
        """Set a function that changes the values in the store, given the sums of push() and pushpull().

        Every worker calls the function with the same sum, and the function must do the same on all workers. Use
        set_optimizer() for an optimizer: it divides the work and the states over the workers.

        Parameters
        ----------
        updater : callable
            Called with the key, the sum, and the value, which it changes in place.

        Raises
        ------
        TypeError, ValueError
            `updater` is not callable, or a gluon.Trainer updates on the store.
        """
        self._functions += 1
        if not callable(updater):
            raise TypeError(f"The updater must be a function, not {type(updater).__name__}.")
        self._replace_updates(None, updater)
        self._function_label = f"an update, _set_updater() calls: {self._functions}"

    @property
    def _updater(self) -> Any:
        # gluon.Trainer.load_states() reads the attribute `optimizer` of this object.
        return self._function if self._optimizer is None else self._optimizer.updater

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer on the store to a file. Collective; the store's first worker writes.

        The file has MXNet's format: it holds whole states, so that another number of workers can load it, or a Trainer
        without a store. It is written atomically. If some workers do not call this method within
        MYKV_CHECKPOINT_WAIT_S (60 s), the call fails on the other workers.

        Parameters
        ----------
        fname : str
            Only the first worker's value is used.
        dump_optimizer : bool, optional
            Whether the optimizer is written too, with its settings, scheduler and counts of updates.

        Raises
        ------
        RuntimeError
            The store has no optimizer.
        OSError
            On the first worker: the file cannot be written. An existing file is unchanged.
        MXNetError
            On the other workers if the first worker gets such an error. On all workers if some do not make this call,
            or have different parameters.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init(0, mx.nd.array([1.0]))
        >>> store.set_optimizer(mx.optimizer.create("adam"))
        >>> store.push(0, mx.nd.array([1.0]))
        >>> store.save_optimizer_states("adam.states")  # on all workers
        """
        self._assign_known("save_optimizer_states", fname)
        checkpoint.save(self._optimizer, self._scope, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Load the optimizer's states from a file. Collective; the store's first worker reads.

        The store must already have its values: each worker gets the states of its share of them. An optimizer in the
        file replaces the store's optimizer. For the contents of the file see docs/optimizer-on-the-store.md.

        Parameters
        ----------
        fname : str
            Only the first worker's value is used.

        Raises
        ------
        RuntimeError
            The store has no optimizer.
        OSError, ValueError
            On the first worker: the file cannot be read, is damaged, or belongs to another network or optimizer. The
            states are unchanged on all workers.
        MXNetError
            On the other workers if the first worker gets such an error. On all workers if some do not make this call,
            or have different parameters.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.init(0, mx.nd.array([1.0]))
        >>> store.set_optimizer(mx.optimizer.create("adam"))
        >>> store.push(0, mx.nd.array([1.0]))
        >>> store.save_optimizer_states("adam.states")
        >>> store.load_optimizer_states("adam.states")  # perhaps in another run
        """
        self._assign_known("load_optimizer_states", fname)
        checkpoint.load(self._optimizer, self._scope, fname)

    def _assign_known(self, method: str, fname: Any) -> None:
        """Before the states are saved or loaded: assign owners to all keys with values."""
        if self._optimizers:
            self._resume(replaces_states=method == "load_optimizer_states")
            call, name = f"{method}({fname!r})", deadlock_check.meeting_name(self._scope)
            if self._keys.is_due():
                with checkpoint.advising():
                    self._keys.compare(self._values.described, call, name, checkpoint.limit())
            if self._keys.differ:
                raise MXNetError(
                    f"{call}: the values in the store are not the same on all workers, since a call of init() or "
                    "broadcast() has failed or differed on one of them. Call it again on all workers."
                )
            with operation.Turn(self._process_set, name, call):  # where another worker has an optimizer, it waits
                self._check_optimizer(method)
        self._check_optimizer(method)
        self._optimizer.assign(self._trained())

    def _check_optimizer(self, method: str) -> None:
        if self._optimizer is None:
            raise RuntimeError(f"{method}: the store has no optimizer; call set_optimizer() first.")

    def _trained(self) -> Iterator[tuple[int | str, NDArray]]:
        """The keys that all workers hold alike and that may get gradients, with their homes."""
        for name, key, home in self._values.all():
            if self._keys.alike(name) and self._optimizer.is_trained(key):
                yield key, home

    def _resume(self, replaces_states: bool = False) -> None:
        """After a new init(), allow updates again.

        Raises a RuntimeError if the ranks have changed, so that states of the optimizer are lost, unless the caller
        replaces the states.
        """
        if self._generation == process.generation or not process.is_initialized():
            return
        if self._optimizer is not None and not process.has_same_ranks_as(self._generation):
            if self._optimizer.keys and not replaces_states:
                raise RuntimeError(resumption.STATES_ARE_LOST.format(whose=f"the store {self._scope}"))
            self._optimizer.clear()
        self._updates.clear()
        self._keys.begin_again()
        self._generation = process.generation

    def set_gradient_compression(self, compression_params: dict) -> None:
        """Compress the values that push() and pushpull() send to other hosts, from now on.

        Within a host everything is summed in full precision. Between hosts, the hosts' sums and the result are sent
        compressed; all workers get the same bits. The compression error is kept, and added to the next value of the
        same key (error feedback). Only float32 and float64 are compressed, in arrays of at least MYKV_COMPRESS_BYTES;
        row_sparse values are not. All workers must use the same compression; otherwise calls fail with an error that
        shows both.

        Parameters
        ----------
        compression_params : dict
            'type' (or 'compressor', as in BytePS), and parameters of that type. All types except 'none', 'fp16' and
            'bf16' have 'ef': whether to use error feedback, True by default.

            - 'none', 'fp16', 'bf16': as in `Compression`.
            - '2bit': 'threshold', above 0, 0.5 by default. MXNet's own: threshold, -threshold or 0 for each element.
            - '1bit': 'threshold', 0.5 by default. MXNet's own: 1 for elements above the threshold, else -1.
            - 'onebit': 'scaling', True by default. The signs, times the mean magnitude; without scaling 1 and -1
              (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
            - 'topk': 'k', 0.01 by default. The largest elements: a fraction of them, or a whole number for each array
              (Stich et al., Sparsified SGD with Memory, NeurIPS 2018).
            - 'randomk': 'k' as for 'topk'; 'seed', 0 by default. Random elements (Stich et al.); without error feedback
              they are scaled up, so that their mean is the value.
            - 'dithering': 'partition', 'linear' or 'natural'; 'normalize', 'max' or 'l2'; 'k', 127 or with 'natural' 7
              by default; 'seed'. Randomly rounded to k levels (Alistarh et al., QSGD, NeurIPS 2017), or to k powers of
              two (Horvath et al., Natural Compression, MSML 2022).

        Raises
        ------
        TypeError, ValueError
            `compression_params` is not a dict, has an unknown type, or has parameters or values that this type does
            not have.

        Examples
        --------
        >>> store = mx.kv.create("mykv")
        >>> store.set_gradient_compression({"type": "topk", "k": 0.01})
        >>> trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
        """
        self._wire = gradient_compression(compression_params).wire

    def __reduce__(self) -> tuple:
        _pickled.add(self._scope)
        return _store_named, (self._scope, self._process_set)

    def _next_scope(self, kind: str) -> str:
        """The prefix of the operations' names for the next object of a kind that uses this store."""
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"{self._scope}/{kind}{self._counts[kind]}"

    def _note_change(self, key: Any) -> None:
        """Note that init() or broadcast() was called, before its checks: on a worker where they fail, it counts too."""
        self._keys.changed()
        self._values.count(requests.names(self._scope, key))

    def _check_homes(self, listed: list[Call]) -> None:
        """Raise an error unless the keys have values in the store that the calls' arrays fit."""
        for call in listed:
            self._values.home(call)

    def _refuse_rest(
        self, method: str, key: Any, listed: list[Call] | None, taken: Sequence[Any], error: BaseException
    ) -> None:
        """After an exception, refuse the operations of the calls that this rank has not started: they fail on the other
        ranks too.

        `listed` is None if the exception came before the end of the checks.
        """
        is_of_arguments = isinstance(error, (TypeError, ValueError))  # such an error may be an MXNetError too
        if listed is not None and isinstance(error, MXNetError) and not is_of_arguments:
            return  # NaiveEngine has run the operation, and the other ranks get the error
        names = requests.names(self._scope, key) if listed is None else [call.name for call in listed[len(taken) :]]
        reason = errors.reason_of(error)
        for name in names:
            self._refuse(name, reason, method)
        if self._updates_on(method) and not taken:
            with contextlib.suppress(RuntimeError):  # states are lost: then no worker reaches the comparison
                self._resume()
            self._keys.refuse(f"{method}(): {reason}")

    def _updates_on(self, method: str) -> bool:
        """Whether calls of a method compare the workers' keys if that is due; the same on all workers."""
        return bool(self._optimizers or self._functions) and method in ("push", "pushpull")

    def _push_broadcasts(self, listed: list[Call], taken: list, targets: list[Any], priority: int) -> None:
        for number, call in enumerate(listed):
            try:
                push_broadcast(self._process_set, call.name, call.inputs[0], targets[number], 0, priority, taken)
            except (RuntimeError, ValueError, MemoryError) as error:
                _check_rejection(call, error, len(taken) > number)
                raise

    def _push_sums(self, listed: list[Call], taken: list, targets: list[Any], priority: int, label: str = "") -> None:
        for number, call in enumerate(listed):
            if is_row_sparse(call.inputs):
                self._sum_rows(listed[number:], taken, targets[number], priority, label)
                continue
            outputs = targets[number]
            try:
                written = call.inputs if outputs is call.inputs else _written_by_core(call.inputs, outputs)
                source = target = arrays.handles(call.inputs)
                if written is not call.inputs:
                    target = arrays.handles(written)
                push = self._process_set._core.push_allreduce
                arguments = (call.name, source, target, "sum", 1.0, priority, label, self._wire)
                operation.start(taken, functools.partial(push, *arguments))
            except (RuntimeError, ValueError, MemoryError) as error:
                _check_rejection(call, error, len(taken) > number)
                raise
            if written is not outputs:
                for at, array in enumerate(outputs):
                    arrays.copy(written[min(at, len(written) - 1)], array)

    def _sum_rows(self, listed: list[Call], taken: list, targets: Sequence[NDArray], priority: int, label: str) -> None:
        """Sum the row_sparse arrays of the first call of a list; on an error refuse the later calls."""
        call = listed[0]
        taken.append(call)  # the sum refuses its own turn
        try:
            rows = summed(self._process_set, call.name, f"value of key {call.key!r}", call.inputs, priority, label)
            for array in targets:
                assign(array, rows)
        except BaseException as error:
            for later in listed[1:]:
                taken.append(later)
                self._refuse(later.name, errors.reason_of(error), "push")
            raise

    def _update(self, listed: list[Call], taken: list, priority: int, with_outputs: bool) -> None:
        """Update values from the sums of the calls' inputs, by the optimizer or the function of _set_updater().

        Without them, since all calls that set them have failed on this worker, only sum.
        """
        has_updates = self._optimizer is not None or self._function is not None
        if has_updates or not with_outputs:
            self._check_homes(listed)
        self._compare_keys(listed, taken)
        if self._optimizer is not None:
            self._update_by_optimizer(listed, taken, priority, with_outputs)
        elif has_updates:
            self._update_by_function(listed, taken, priority, with_outputs)
        else:
            targets = [call.outputs if with_outputs else [self._values.own(call)] for call in listed]
            self._push_sums(listed, taken, targets, priority)

    def _compare_keys(self, listed: list[Call], taken: list) -> None:
        """Compare what the workers hold, if that is due, and assign owners to all keys that they hold alike."""
        try:
            self._resume()
            if self._keys.is_due():
                look = functools.partial(update_order.look, self._process_set, listed)
                self._keys.compare(self._values.described, f"the update of key {listed[0].key!r}", look=look)
            if self._optimizer is None:
                return
            for call in listed:
                self._keys.check(call.name)
            if any(not self._is_assigned(call) for call in listed):
                self._optimizer.assign(self._trained())
                self._optimizer.assign((call.key, self._values.home(call)) for call in listed)
        except BaseException as error:
            taken.extend(listed)
            self._refuse_all(listed, "push", errors.reason_of(error))
            raise

    def _update_by_optimizer(self, listed: list[Call], taken: list, priority: int, with_outputs: bool) -> None:
        for number, call in enumerate(listed):
            home = self._values.home(call)
            copies = [array for array in call.outputs if array is not home] if with_outputs else []
            if call.inputs[0].dtype != home.dtype:
                call = call._replace(inputs=[arrays.with_dtype_of(home, array) for array in call.inputs])
            calls = [call, *listed[number + 1 :]]
            if is_row_sparse(call.inputs):
                self._update_rows(calls, taken, [home, *copies], priority)
                continue
            if self._waits_in_updates():
                try:
                    update_order.meet(self._process_set, self._scope, call)
                except BaseException as error:
                    taken.extend(calls)
                    ShardedUpdate.refuse(self._process_set._core, call.name, errors.reason_of(error))
                    self._refuse_later(calls, error)
                    raise
            self._update_one(calls, taken, [home, *copies], priority)

    def _update_one(self, listed: list[Call], taken: list, weights: Sequence[NDArray], priority: int) -> None:
        """Update the value of the first call of a list by the optimizer; on an error refuse the later calls."""
        call, before = listed[0], len(taken)
        update = self._updates.get(call.name)
        try:
            gradient = arrays.total(call.inputs)
            member = Member(call.key, gradient, weights)
            if update is not None and update.is_begun():  # Ctrl-C came before its end
                update.refuse_weights("the update was interrupted on that rank")
            if update is None or not update.is_of([member]):
                update = self._updates[call.name] = ShardedUpdate(self._optimizer, call.name, [member], priority)
            update.reduce([gradient], wire=self._wire)
            taken.append(call)
            update.apply()
        except BaseException as error:
            is_taken = len(taken) > before
            if update is not None and update.is_begun():
                is_taken = True
                update.refuse_weights(f"the update has failed on that rank: {type(error).__name__}: {error}")
            if is_taken:
                del taken[before:]
                taken.extend(listed)
                self._refuse_later(listed, error)
                raise
            if isinstance(error, (RuntimeError, ValueError, MemoryError)):
                _check_rejection(call, error, False)
            raise

    def _update_by_function(self, listed: list[Call], taken: list, priority: int, with_outputs: bool) -> None:
        """Call the function of _set_updater() for the values of calls, on each worker separately."""
        sums = [
            mx.nd.sparse.zeros("row_sparse", first.shape, ctx=first.context, dtype=first.dtype)
            if is_row_sparse(first)
            else arrays.empty(first.shape, first)
            for first in (call.inputs[0] for call in listed)
        ]
        self._push_sums(listed, taken, [[total] for total in sums], priority, self._function_label)
        for call, one in zip(listed, sums):
            home = self._values.home(call)
            with arrays.not_recorded():
                self._function(call.key, one, home)
            for array in call.outputs if with_outputs else ():
                arrays.copy(home, array)

    def _update_rows(self, listed: list[Call], taken: list, weights: Sequence[NDArray], priority: int) -> None:
        """Update the value of the first call of a list by the optimizer, from row_sparse gradients."""
        call = listed[0]
        try:
            update = RowUpdate(self._optimizer, call.name, call.key, weights, priority, turn_of=call.name)
        except (RuntimeError, ValueError, MemoryError) as error:
            _check_rejection(call, error, False)
            raise
        label = self._optimizer.label() + BETWEEN
        taken.append(call)
        try:
            rows = summed(self._process_set, call.name, f"value of key {call.key!r}", call.inputs, priority, label)
        except BaseException as error:
            taken.extend(listed[1:])
            update.refuse(str(error))  # all other ranks of the set have raised an error too, and refuse as well
            self._refuse_later(listed, error)
            raise
        try:
            update.apply(rows)
        except BaseException as error:
            taken.extend(listed[1:])
            self._refuse_later(listed, error)
            raise

    def _refuse_later(self, listed: list[Call], error: BaseException) -> None:
        """Refuse the calls after the first call, whose update has failed."""
        for later in listed[1:]:
            self._refuse(later.name, f"the update of key {listed[0].key!r} has failed on that rank: {error}", "push")

    def _waits_in_updates(self) -> bool:
        """Whether the optimizer waits for gradients: then all workers must update keys in the same order."""
        return self._process_set.size() > 1 and traits.reads_gradients(self._optimizer.optimizer)

    def _is_assigned(self, call: Call) -> bool:
        return self._optimizer.is_assigned(call.key, self._values.home(call))

    def _refuse(self, name: str, reason: str, method: str) -> None:
        """Refuse the operation of a call of `method`, or both operations of an update: it fails on the other ranks."""
        is_update = self._optimizer is not None and method in ("push", "pushpull")
        if is_update:
            if self._waits_in_updates():
                update_order.refuse(self._process_set, self._scope, reason)
            ShardedUpdate.refuse(self._process_set._core, name, reason)
        else:
            self._process_set._core.refuse(name, reason)

    def _refuse_all(self, listed: list[Call], method: str, reason: str) -> None:
        for call in listed:
            self._refuse(call.name, reason, method)


def _check_rejection(call: Call, error: BaseException, has_started: bool) -> None:
    """Raise an error that names the key if the core has rejected the arrays of a call, with this error.

    An error after the start is that of a signal handler.
    """
    if not has_started and not isinstance(error, MXNetError):
        raise ArgumentValueError(f"Key {call.key!r}: {error}.") from error


def _written_by_core(inputs: Sequence[NDArray], outputs: Sequence[NDArray]) -> Sequence[NDArray]:
    """The arrays into which the core writes the sum: the outputs if they have the inputs' devices and dtype, else new
    arrays that have them."""
    first = inputs[0]
    if not _are_on_same_devices(inputs, outputs):
        return [arrays.empty(first.shape, first)]
    if all(array.dtype == first.dtype for array in outputs):
        return outputs
    return [array if array.dtype == first.dtype else arrays.empty(array.shape, first) for array in outputs]


def _are_on_same_devices(inputs: Sequence[NDArray], outputs: Sequence[NDArray]) -> bool:
    """Whether one operation of the core can use both lists: it cannot mix memory of the host and of GPUs."""
    if len(inputs) > 1 and len(outputs) > 1:
        return [array.context for array in inputs] == [array.context for array in outputs]
    if not HAS_GPUS:
        return True
    devices = [array.context for array in inputs]
    return all(array.context in devices for array in outputs)


# Stores by scope, so that a copy of a store, or a store from a pickle, is the same object.
_stores: weakref.WeakValueDictionary[str, MyKV] = weakref.WeakValueDictionary()
_pickled: set[str] = set()  # scopes of stores that were pickled, so a pickle may create them again


def _forget(scope: str, process_set: ProcessSet, generation: int) -> None:
    """Drop the core's counters for the keys of a deleted store."""
    operation_names.forget(process_set, scope, generation, comes_back=scope in _pickled)


def _store_named(scope: str, process_set: ProcessSet) -> MyKV:
    """The store with this scope; in a process without this store, a new store without values."""
    if scope not in _stores:
        store = MyKV.__new__(MyKV)
        store._begin(scope, process_set)
    return _stores[scope]


store_named = _store_named  # the public name; pickles of stores contain the private name

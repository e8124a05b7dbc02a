"""The store 'mykv': MXNet's KVStore interface over the compiled core.

Ranks are matched by key. What one rank can see to be wrong alone is refused there, and told to the others under the
same key, so that they get an error and do not wait.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, Sequence

from ..collectives import gather
from ..collectives.gradient_compression import gradient_compression
from ..collectives.row_sparse import is_row_sparse
from ..collectives.sparse_values import push_broadcast, sum_rows, summed
from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import KVStoreBase, MXNetError, NDArray, SparseNDArray, mx
from ..coordination import agreement, deadlock_check, operation_names
from ..coordination.step_label import BETWEEN
from ..sharded_optimizer import checkpoint, traits
from ..sharded_optimizer.optimizer import Member, ShardedUpdate, StoreOptimizer
from ..sharded_optimizer.row_update import RowUpdate
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from . import requests, update_order
from .requests import Call
from .values import StoredValues


@KVStoreBase.register
class MyKV(KVStoreBase):
    """Store for synchronous data-parallel training, made with ``mx.kv.create('mykv')`` or ``MyKV(process_set=...)``.

    Creating the first one initializes MPI and joins the other ranks, if kvstore_plugin.init() was not called before.
    Each store has keys of its own; all ranks must create their stores in the same order. 3 and '3' are different keys.
    In a process that no mpirun started it is rank 0 of 1.

    Calls return at once, and MXNet's engine orders their results: whatever reads or writes an array waits for them as
    for any operator. An error that another rank caused is raised as MXNetError where the array is read.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The ranks that take part, all of them by default. Where the store counts ranks, it does so within the set.

    Raises
    ------
    TypeError, ValueError
        It is no ProcessSet, is not added, or this process is not in it.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        process.require()
        process_sets.check(process_set)
        self._begin(operation_names.numbered(process_set, "kv"), process_set)

    def _begin(self, scope: str, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._scope = scope
        self._values = StoredValues()
        self._wire = ""  # how sums travel between hosts, in the words of the core
        self._left: dict[Any, None] = {}  # keys of a step that are still to be pushed
        self._label = ""  # what the calls of all workers have in common besides
        self._optimizer: StoreOptimizer | None = None
        self._function: Callable[[Any, NDArray, NDArray], None] | None = None  # of _set_updater()
        self._updates: dict[str, ShardedUpdate] = {}  # by the names of their keys
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
        """Number of this worker among those of the store, from 0."""
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
        """Number of this worker among those of its host, from 0."""
        return self._process_set.core.local_rank()

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self._process_set.core.local_size()

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy the bits of rank 0's `value` into `out` on every rank.

        The first array of `out` is the value in the store from then on: push() and an optimizer on the store change
        it, and pull() copies from it.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by.
        value : NDArray, or list of NDArray for a list of keys
            Any shape; the dtypes that the release has. On ranks other than 0 only its shape and dtype count, and it is
            nowhere changed unless it is in `out` itself.
        out : NDArray or list of NDArray (several devices), or a list of these for a list of keys; optional
            Where the result goes; into `value` by default.
        priority : int, optional
            Operations with a higher one run first.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone: wrong types, other shapes or dtypes in `out` than in `value`, lists of other
            lengths. The other ranks then get an MXNetError in `out` that says so.
        """
        listed = self._calls("broadcast", key, value, out, priority)
        self._push_broadcasts(listed, [call.outputs for call in listed], priority)
        for call in listed:
            self._values.lend(call)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum `value` over all workers and over all devices of a list.

        The value that the store holds under the key is left as it is. With an optimizer (`set_optimizer`), the sum is
        the gradient by which it updates the value, and `out` gets the new value.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by.
        value : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            Any shape; the dtypes that the release has. float16 and bfloat16 are summed in float32. Not changed unless
            it is in `out` itself.
        out : like `value`, optional
            Where the sum, or the new value, goes, on every rank; into `value` by default. As a list, it has the devices
            of `value` in the same order. Floats are converted. An array may be there under several keys: all are
            pushed before the first is pulled.
        priority : int, optional
            Operations with a higher one run first.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone, as for `broadcast`; with an optimizer also a key that was never initialized.
        """
        if self._left and isinstance(key, (int, str)):
            self._left.pop(key, None)
        updates = self._optimizer is not None or self._function is not None
        listed = self._calls("pushpull", key, value, out, priority, stored=updates)
        if len(listed) > 1:
            listed = requests.with_inputs_as_they_are(listed)
        if updates:
            self._update(listed, priority, True)
        else:
            self._push_sums(listed, [call.outputs for call in listed], priority)

    def init(self, key: Any, value: Any) -> None:
        """Store a copy of rank 0's `value` on every rank. Returns at once.

        A key that has a value already gets this one in its place.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by.
        value : NDArray, or list of NDArray for a list of keys
            As for `broadcast`; it is not changed.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone, as for `broadcast`. The other ranks get an MXNetError in what they pull.
        """
        listed = self._calls("init", key, value, None, 0)
        self._push_broadcasts(listed, [[self._values.create(call)] for call in listed], 0)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum `value` over all workers and all devices of a list, and store the sum. Returns at once.

        The sum replaces the value in the store, as in MXNet's dist_sync. With an optimizer (`set_optimizer`), it is the
        gradient by which that updates the value.

        Parameters
        ----------
        key : int, str, or list of them
            What the ranks are matched by; init() or broadcast() was called for them.
        value : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            Of the shape of the value in the store, and of its dtype; sums of floats are converted. It is not changed.
        priority : int, optional
            Operations with a higher one run first.

        Raises
        ------
        TypeError, ValueError
            What this rank can see alone: a key was never initialized, another shape or dtype, a list on other devices
            than another list for its key. The other ranks get an MXNetError in what they pull.
        """
        listed = self._calls("push", key, value, None, priority, stored=True)
        if self._optimizer is not None or self._function is not None:
            self._update(listed, priority, False)
            return
        self._push_sums(listed, [[self._values.own(call)] for call in listed], priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the value in the store, as the calls before this one leave it, into `out`. Returns at once.

        Nothing is sent: every worker holds the value.

        Parameters
        ----------
        key : int, str, or list of them
            Keys for which init() or broadcast() was called.
        out : NDArray or list of NDArray (several devices), or a list of these for a list of keys
            Of the shape of the value in the store, and of its dtype; floats are converted.
        priority : int, optional
            Without effect.
        ignore_sparse : bool, optional
            Whether sparse arrays in `out` are left alone. If not, they get the whole value.

        Raises
        ------
        TypeError, ValueError
            `out` does not fit the value in the store, or a key was never initialized.
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
            Of the shape of the value in the store. They hold the rows that were asked for, and no others. Floats are
            converted.
        priority : int, optional
            Without effect.
        row_ids : NDArray, list of NDArray, or a list of these for a list of keys
            Numbers of rows, in any order, also repeatedly: one array for all of `out`, or one for each array in it.

        Raises
        ------
        TypeError, ValueError
            `out` or `row_ids` do not fit the value in the store or each other, or a key was never initialized.
        IndexError
            The value has no such row.
        """
        listed = requests.checked(self._scope, "pull", key, out, None, priority)
        numbers = iter(requests.row_ids(row_ids, listed))
        for call in listed:
            home = self._values.home(call)
            for array in call.inputs:
                arrays.copy_rows(home, next(numbers), array, f"out of key {call.key!r}")

    def barrier(self) -> None:
        """Wait until all workers call it. Operations that were started before may still be under way."""
        gather.barrier(self._process_set)

    _barrier = barrier  # its name in MXNet's own stores

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do `capability`: 'optimizer', to update weights; False for other names."""
        return isinstance(capability, str) and capability.lower() == KVStoreBase.OPTIMIZER

    def set_optimizer(self, optimizer: Any) -> None:
        """Let an optimizer update the values in the store: push() and pushpull() bring it gradients from then on.

        Each worker updates a share of the values and keeps the states of that share alone. The optimizer must be the
        same on all workers: where its kind differs, its settings as they are now, or the learning rate of an update,
        the update is an error that shows both. States belong to the store, so another store begins without. The
        optimizer is kept by reference, so that what is changed in it (learning rate, rescale_grad) counts from the next
        update on. The store's keys are the indices by which it knows parameters.

        Parameters
        ----------
        optimizer : mxnet.optimizer.Optimizer
            Any that works on single parameters. The one that the store has already changes nothing.

        Raises
        ------
        TypeError, ValueError
            It is no optimizer, is a `DistributedOptimizer`, cannot update a share on each worker (Nadam, SGLD), or the
            store has another one.
        """
        if self._optimizer is None:
            self._optimizer = StoreOptimizer(self._process_set, optimizer)
            self._function = None
            deadlock_check.saves_states(self._scope, self._process_set)
        elif optimizer is not self._optimizer.optimizer:
            raise ValueError(
                f"The store has an optimizer already ({type(self._optimizer.optimizer).__name__}), whose states belong "
                f"to its values: make another store for this {type(optimizer).__name__}, or change the first one's "
                "learning rate and the like in place."
            )

    def _set_updater(self, updater: Callable[[Any, NDArray, NDArray], None]) -> None:
        """Let a function change the values in the store: what push() and pushpull() bring is summed and given to it.

        Every worker calls it with the same sum, and must do the same with it. An optimizer is better off with
        set_optimizer(), which divides its work and its states.

        Parameters
        ----------
        updater : callable
            Called with the key, the sum, and the value, which it changes in place.

        Raises
        ------
        TypeError, ValueError
            It is not callable, or the store has an optimizer.
        """
        if not callable(updater):
            raise TypeError(f"The updater must be a function, not {type(updater).__name__}.")
        if self._optimizer is not None:
            raise ValueError(
                f"The store has an optimizer already ({type(self._optimizer.optimizer).__name__}): make another store "
                "for an updater."
            )
        self._function = updater

    @property
    def _updater(self) -> Any:
        # gluon.Trainer.load_states reads its `optimizer`.
        return self._function if self._optimizer is None else self._optimizer.updater

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer on the store to a file. Collective; the store's first worker writes.

        The file is MXNet's own: it holds whole states, so that another number of workers can load it, or a Trainer
        without a store. It is written whole or not at all. Workers that do not call this within MYKV_CHECKPOINT_WAIT_S
        (60 s) make it an error on those that have.

        Parameters
        ----------
        fname : str
            Counts on the first worker.
        dump_optimizer : bool, optional
            Whether the optimizer is written too, with its settings, scheduler and counts of updates.

        Raises
        ------
        RuntimeError
            The store has no optimizer.
        OSError
            On the first worker: the file cannot be written, and is what it was before.
        MXNetError
            On the other workers then; workers are missing, or have other parameters.
        """
        self._assign_known("save_optimizer_states")
        checkpoint.save(self._optimizer, self._scope, fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """Go on with the optimizer's states from a file. Collective; the store's first worker reads.

        The values in the store must be there: each worker gets the states of its share of them. A file with an
        optimizer replaces that of the store. What the file may hold: see docs/optimizer-on-the-store.md.

        Parameters
        ----------
        fname : str
            Counts on the first worker.

        Raises
        ------
        RuntimeError
            The store has no optimizer.
        OSError, ValueError
            On the first worker: the file cannot be read, is damaged, or is of another network or optimizer. The states
            are what they were before, on all workers.
        MXNetError
            On the other workers then; workers are missing, or have other parameters.
        """
        self._assign_known("load_optimizer_states")
        checkpoint.load(self._optimizer, self._scope, fname)

    def _assign_known(self, call: str) -> None:
        if self._optimizer is None:
            raise RuntimeError(f"{call}: the store has no optimizer; call set_optimizer() first.")
        self._optimizer.assign(one for one in self._values.all() if self._optimizer.is_trained(one[0]))

    def set_gradient_compression(self, compression_params: dict) -> None:
        """Compress what push() and pushpull() bring to other hosts, from now on.

        Within a host everything is summed in full precision. Between hosts, the hosts' sums and the result travel
        compressed; all workers get the same bits. What is lost is kept, and added under the same key the next time
        (error feedback). Only float32 and float64 are compressed, in arrays of at least MYKV_COMPRESS_BYTES; not
        row_sparse values. All workers must choose the same; otherwise calls fail with an error that shows both.

        Parameters
        ----------
        compression_params : dict
            'type' (or 'compressor', as BytePS calls it), and parameters of that type. All but 'none', 'fp16' and 'bf16'
            have 'ef', whether there is error feedback, True by default.

            - 'none', 'fp16', 'bf16': as `Compression` has them.
            - '2bit': 'threshold', above 0, 0.5 by default. MXNet's own: threshold, -threshold or 0 for each element.
            - '1bit': 'threshold', 0.5 by default. MXNet's own: 1 for elements above it, else -1.
            - 'onebit': 'scaling', True by default. The signs, times the mean magnitude; without scaling 1 and -1
              (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
            - 'topk': 'k', 0.01 by default. The largest elements: a fraction of them, or a whole number for each array
              (Stich et al., Sparsified SGD with Memory, NeurIPS 2018).
            - 'randomk': 'k' as before, 'seed', 0 by default. Random elements (the same paper); without error feedback
              enlarged, so that their mean is the value.
            - 'dithering': 'partition', 'linear' or 'natural'; 'normalize', 'max' or 'l2'; 'k', 127 or with 'natural' 7
              by default; 'seed'. Randomly rounded to k levels (Alistarh et al., QSGD, NeurIPS 2017), or to k powers of
              two (Horvath et al., Natural Compression, MSML 2022).

        Raises
        ------
        TypeError, ValueError
            It is no dictionary, or has an unknown type, or parameters that this type does not know or take.
        """
        self._wire = gradient_compression(compression_params).wire

    @contextlib.contextmanager
    def labelled(self, label: str, keys: Sequence[int | str] = ()) -> Iterator[None]:
        """Let calls of pushpull() fail where other workers make them with another label.

        Those for `keys` that an exception leaves out fail on the other workers too, with its text.
        """
        before, self._label, self._left = self._label, label, dict.fromkeys(keys)
        try:
            yield
        except BaseException as error:
            self.refuse(list(self._left), f"the step was broken off there: {error}")
            raise
        finally:
            self._label, self._left = before, {}

    def __reduce__(self) -> tuple:
        _pickled.add(self._scope)
        return _store_named, (self._scope, self._process_set)

    def _calls(self, method: str, key: Any, value: Any, out: Any, priority: int, stored: bool = False) -> list[Call]:
        """Check a whole call before any of it runs; if something is wrong, refuse all of it on the other ranks too.

        With `stored`, the keys must have values in the store, and the arrays must fit them.
        """
        try:
            listed = requests.checked(self._scope, method, key, value, out, priority)
            for call in listed:
                if stored:
                    self._values.home(call)
                elif method == "pushpull" and (len(call.inputs) > 1 or len(call.outputs) > 1):
                    self._values.check_devices(call)
            return listed
        except (TypeError, ValueError) as error:
            for name in requests.names(self._scope, key):
                self._refuse(name, str(error), method)
            raise

    def meet(self, keys: Sequence[int | str], label: str) -> None:
        """Wait until all workers come to this with the same label, in place of their next call for the keys.

        Parameters
        ----------
        keys : sequence of int or str
            Those that a worker which does not come here would push next.
        label : str
            What all workers must be about to do.

        Raises
        ------
        MXNetError
            A worker has other things to do. The sentence has the label; the others get it in the results of their
            calls.
        """
        carrier, *others = [name for key in keys for name in requests.names(self._scope, key)]
        try:
            agreement.extremes(self._process_set, carrier, [], label)
        except RuntimeError as error:
            reason = f"{label} ({error})"  # the core shortens it at the end
            for name in others:
                self._refuse(name, reason, "pushpull")
            if self._optimizer is not None:
                if self._waits_in_updates():
                    update_order.refuse(self._process_set, self._scope, reason)
                self._process_set.core.refuse(ShardedUpdate.names(carrier)[1], reason, turn_of=carrier)
            raise MXNetError(str(error)) from error

    def awaited_by(self, keys: Sequence[int | str]) -> list[int]:
        """The ranks that have pushed one of some keys once more than this one."""
        names = [name for key in keys for name in requests.names(self._scope, key)]
        return sorted({rank for ranks in self._process_set.core.waiting_for_this(names) for rank in ranks})

    def refuse(self, keys: Sequence[int | str], reason: str) -> None:
        """Take no part in the next push of each of some keys, and let it fail on the other ranks with the reason."""
        for key in keys:
            for name in requests.names(self._scope, key):
                self._refuse(name, reason, "pushpull")

    def _push_broadcasts(self, listed: list[Call], targets: list[Any], priority: int) -> None:
        for number, call in enumerate(listed):
            try:
                push_broadcast(self._process_set, call.name, call.inputs[0], targets[number], 0, priority)
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError) as error:
                raise self._refused(listed[number:], error, "broadcast") from error

    def _push_sums(self, listed: list[Call], targets: list[Any], priority: int) -> None:
        for number, call in enumerate(listed):
            if is_row_sparse(call.inputs):
                self._sum_rows(listed[number:], targets[number], priority)
                continue
            dtype = call.inputs[0].dtype
            filled = targets[number]
            if any(array.dtype != dtype for array in filled):
                filled = [
                    array if array.dtype == dtype else arrays.empty(array.shape, call.inputs[0]) for array in filled
                ]
            source = arrays.handles(call.inputs)
            target = source if filled is call.inputs else arrays.handles(filled)
            try:
                self._process_set.core.push_allreduce(
                    call.name, source, target, "sum", 1.0, priority, self._label, wire=self._wire
                )
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError) as error:
                raise self._refused(listed[number:], error, "push") from error
            for array, made in zip(targets[number], filled):
                arrays.copy(made, array)

    def _sum_rows(self, listed: list[Call], targets: Sequence[NDArray], priority: int) -> None:
        """Sum the row_sparse arrays of the first one of some calls."""
        call = listed[0]
        try:
            sum_rows(self._process_set, call.name, f"value of key {call.key!r}", call.inputs, targets, priority)
        except Exception as error:
            for later in listed[1:]:
                self._refuse(later.name, str(error), "push")
            raise

    def _update(self, listed: list[Call], priority: int, with_outputs: bool) -> None:
        """Let the optimizer, or the function in its place, update the values of some calls from the sums of inputs."""
        if self._optimizer is None:
            self._update_by_function(listed, priority, with_outputs)
            return
        values = self._values.all() if any(not self._is_assigned(call) for call in listed) else []
        if values:
            self._optimizer.assign(one for one in values if self._optimizer.is_trained(one[0]))
            self._optimizer.assign((call.key, self._values.home(call)) for call in listed)
        for number, call in enumerate(listed):
            home = self._values.home(call)
            copies = [array for array in call.outputs if array is not home] if with_outputs else []
            if call.inputs[0].dtype != home.dtype:
                call = call._replace(inputs=[arrays.with_dtype_of(home, array) for array in call.inputs])
            if is_row_sparse(call.inputs):
                self._update_rows([call, *listed[number + 1 :]], [home, *copies], priority)
                continue
            if self._waits_in_updates():
                try:
                    update_order.meet(self._process_set, self._scope, call)
                except MXNetError as error:
                    ShardedUpdate.refuse(self._process_set.core, call.name, str(error))
                    self._refuse_later(listed[number:], error)
                    raise
            try:
                gradient = arrays.total(call.inputs)
                member = Member(call.key, gradient, [home, *copies])
                update = self._updates.get(call.name)
                if update is None or not update.is_of([member]):
                    update = self._updates[call.name] = ShardedUpdate(self._optimizer, call.name, [member], priority)
                update.reduce([gradient], wire=self._wire)
            except MXNetError:
                raise  # NaiveEngine has run the operation, and the other ranks get the same error
            except (RuntimeError, ValueError, MemoryError) as error:
                raise self._refused(listed[number:], error, "push") from error
            try:
                update.apply()
            except BaseException as error:
                self._refuse_later(listed[number:], error)
                raise

    def _update_by_function(self, listed: list[Call], priority: int, with_outputs: bool) -> None:
        """Let the function of _set_updater() change the values of some calls, on each worker by itself."""
        sums = [
            mx.nd.sparse.zeros("row_sparse", first.shape, ctx=first.context, dtype=first.dtype)
            if is_row_sparse(first)
            else arrays.empty(first.shape, first)
            for first in (call.inputs[0] for call in listed)
        ]
        self._push_sums(listed, [[one] for one in sums], priority)
        for call, one in zip(listed, sums):
            home = self._values.home(call)
            with arrays.not_recorded():
                self._function(call.key, one, home)
            for array in call.outputs if with_outputs else ():
                arrays.copy(home, array)

    def _update_rows(self, listed: list[Call], weights: Sequence[NDArray], priority: int) -> None:
        """Let the optimizer update the value of the first one of some calls from row_sparse gradients."""
        call = listed[0]
        try:
            update = RowUpdate(self._optimizer, call.name, call.key, weights, priority, turn_of=call.name)
        except NotImplementedError as error:
            raise self._refused(listed, error, "push") from error
        label = self._optimizer.label() + BETWEEN
        try:
            rows = summed(self._process_set, call.name, f"value of key {call.key!r}", call.inputs, priority, label)
        except Exception as error:
            update.refuse(str(error))  # the others have failed too, and refuse as well
            self._refuse_later(listed, error)
            raise
        try:
            update.apply(rows)
        except BaseException as error:
            self._refuse_later(listed, error)
            raise

    def _refuse_later(self, listed: list[Call], error: BaseException) -> None:
        """Refuse the calls after the first one, whose update has failed."""
        for later in listed[1:]:
            self._refuse(later.name, f"the update of key {listed[0].key!r} has failed there: {error}", "push")

    def _waits_in_updates(self) -> bool:
        """Whether the optimizer waits for gradients, so that workers must update keys in one order."""
        return self._process_set.size() > 1 and traits.reads_gradients(self._optimizer.optimizer)

    def _is_assigned(self, call: Call) -> bool:
        return self._optimizer.is_assigned(call.key, self._values.home(call))

    def _refuse(self, name: str, reason: str, method: str) -> None:
        """Let what the other ranks do with a key by this method fail: an update is two operations."""
        is_update = self._optimizer is not None and method in ("push", "pushpull")
        if is_update:
            if self._waits_in_updates():
                update_order.refuse(self._process_set, self._scope, reason)
            ShardedUpdate.refuse(self._process_set.core, name, reason)
        else:
            self._process_set.core.refuse(name, reason)

    def _refused(self, listed: list[Call], error: Exception, method: str) -> ArgumentValueError:
        """Refuse what is left of a call whose first array the core does not take (a dtype); returns what to raise.

        Where there is no core, this raises the RuntimeError that says so.
        """
        reason = f"Key {listed[0].key!r}: {error}."
        for call in listed:
            self._refuse(call.name, reason, method)
        return ArgumentValueError(reason)


# By scope, for copies: a copy of a store is the store.
_stores: weakref.WeakValueDictionary[str, MyKV] = weakref.WeakValueDictionary()
_pickled: set[str] = set()  # scopes of stores that may come back


def _forget(scope: str, process_set: ProcessSet, generation: int) -> None:
    """Let the core drop what it counts for the keys of a store that is gone."""
    operation_names.forget(process_set, scope, generation, comes_back=scope in _pickled)


def _store_named(scope: str, process_set: ProcessSet) -> MyKV:
    """The store with this name; in another process than the one that made it, one without values."""
    if scope not in _stores:
        store = MyKV.__new__(MyKV)
        store._begin(scope, process_set)
    return _stores[scope]


def is_ours(store: Any) -> bool:
    """Whether the argument `kvstore` of MXNet's trainers is a store of this package, or its name."""
    return isinstance(store, MyKV) or (isinstance(store, str) and store.lower() == "mykv")


def created(store: Any) -> Any:
    """The argument `kvstore` of MXNet's trainers, with the store in the place of its name 'mykv'."""
    return mx.kv.create("mykv") if isinstance(store, str) and is_ours(store) else store

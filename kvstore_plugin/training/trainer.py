"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from typing import Any, Callable, Mapping, Sequence

from ..collectives.compression import Compression
from ..compat import arrays, errors, mxnet
from ..compat.mxnet import MXNetError, NDArray, Parameter, gluon
from ..coordination import deadlock_check, operation, step_label
from ..coordination.operation_names import KeptNames
from ..gradients import bucket_memory, parameter_groups
from ..gradients.bucket_plan import Reduction
from ..gradients.clipping import Clipping
from ..gradients.communication_hook import GradientBucket
from ..gradients.dense_reducer import DenseReducer
from ..gradients.local_reducer import LocalReducer
from ..gradients.reducer import UPDATE_REFUSED, Comparing, Reducer, SharedReducer, WeakMethod, counted, fenced
from ..gradients.sparse_reducer import SparseReducer
from ..integrations import amp, horovod_scripts
from ..integrations.distributed_optimizer import DistributedOptimizer
from ..nn import sync_batch_norm
from ..parameters import broadcast, deferred_init, load_tracking, naming, placement, resumption, trainer_state
from ..parameters.aux_params import Averaging
from ..parameters.naming import Named
from ..sharded_optimizer import atomic_file, checkpoint, traits
from ..sharded_optimizer.optimizer import StoreOptimizer
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .stand_ins import LEFT_OUT, Listed
from .trainer_options import TrainerOptions

_DEVICES = "devices: "  # begins one of the lines that all workers compare
# A line that all workers compare: a trainer that was made after init() has no equal states.
_KEPT = "made before the last init()"
_NEVER_HELD = ("sentinel: unequal to every `_data`",)


def _without_store(original: Any) -> Any:
    """DistributedTrainer.__init__ with a clear error for `kvstore`, an argument that only gluon.Trainer has."""

    @functools.wraps(original)
    def __init__(self: DistributedTrainer, *arguments: Any, **named: Any) -> None:
        if "kvstore" in named:
            raise TypeError(
                "DistributedTrainer takes no kvstore. Leave it out, or use gluon.Trainer(..., kvstore='mykv')."
            )
        original(self, *arguments, **named)

    return __init__


class DistributedTrainer(gluon.Trainer):
    """Trains the same parameters on all workers, each worker on its own data.

    Gradients are averaged over the workers, so the arguments of step() mean the same as in one process with a worker's
    batch. Of a row_sparse gradient, only the rows that some worker has are sent. All workers start from the values of
    `root_rank`, even if parameters are initialized later (in the first forward pass) or again. Creating a trainer is
    collective and calls init() if needed. All workers must create their trainers in the same order, with the same
    arguments.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Matched between workers by key, or by position in a list or a ParameterDict; never by Parameter.name. A
        Parameter that occurs twice is trained once.
    optimizer : str or Optimizer
        As for gluon.Trainer. A `DistributedOptimizer` is unwrapped, with a UserWarning, since gradients need averaging
        once.
    optimizer_params : dict, optional
        As for gluon.Trainer.
    compression : optional
        Type in which gradients travel between hosts: `Compression.none`, `Compression.fp16` or `Compression.bf16`; or,
        as in Horovod, your own object or class with the methods ``compress(tensor) -> (tensor, ctx)`` and
        ``decompress(tensor, ctx)``. Then what compress() returns is summed over the workers, also within a host, and
        decompress() gets the sum, with the `ctx` of this worker. So it must return the same on all workers, and fit
        sums. `compression_params` has other compressors; give only one of the two arguments.
    gradient_predivide_factor : float, optional
        Finite and above 0. For Horovod compatibility. In Horovod it divides gradients before they are summed, so that
        sums of float16 stay in range, and multiplies the result. Here 16-bit gradients are summed in 32 bits and scaled
        once, so it does not change the mean. With ``gradients_after_allreduce='sum'`` it divides the sums, which are
        stored in 16 bits.
    prefix : str, optional
        Part of the names in error messages.
    num_groups : int, optional
        The number of groups in which gradients are reduced. Each group has as many gradients as the others, in the
        order of `params`; one operation reduces the gradients of a group and a dtype, whatever their size. 0:
        `bucket_bytes` divides the gradients. With more groups than gradients, each gradient is a group.
    process_set : ProcessSet, optional
        The workers that train together. On a worker outside the set all parameters stay local.
    root_rank : int, optional
        The worker, as a global rank, whose initial values all workers get. In a process set without rank 0, the
        default means the set's first worker.
    update_on_kvstore : bool, optional
        True: each worker runs the optimizer on its share of the parameters only, keeps the states of that share only,
        and gets the other weights from the workers that update them. The result is the same, in less time and memory.
        It needs step(), since no worker has whole gradients after allreduce_grads(), and one process set. False, the
        default: each worker updates all parameters itself.
    bucket_bytes : int, optional
        Gradients lie next to each other in shared memory, in buckets of up to this size; one operation reduces each
        bucket. 0: gradients stay where MXNet made them, and each is copied into shared memory and back (with
        `num_groups`, by one operation for each group). By default 16 MiB on one host. On several hosts 1 MiB, or 16 KiB
        for each worker if that is more: between hosts, a bucket that the next forward pass needs first overtakes other
        buckets. The same on all workers.
    reduce_method : str, optional
        'mean' or 'sum' of the gradients over the workers.
    gradients_after_allreduce : str, optional
        What the parameters' gradients are between allreduce_grads() and update(): 'mean' or 'sum' over the workers, by
        default as `reduce_method`. 'sum' with ``reduce_method='mean'`` works as Horovod: update() also divides by the
        number of workers, and step() gives the result of 'mean', up to rounding. Scripts for Horovod may need it, such
        as a script that clips at ``max_norm * hvd.size()``. The sum is then divided by `gradient_predivide_factor`. It
        needs one process set, and no `update_on_kvstore`.
    broadcast_period : int, optional
        0: parameters are broadcast at the start only. n > 0: in every n-th step, before the update, the parameters of
        `root_rank` overwrite those on every worker and device again. -1: parameters are never broadcast, not even after
        deferred initialization; the workers must ensure equal values themselves.
    aux_sync_period : int, optional
        n > 0: in every n-th step the running means and variances of BatchNorm, as far as they are in `params`, are
        averaged over all devices of all workers, as in `sync_aux_params`; the step does not wait for the averages. 0:
        never, so call `sync_aux_params` before evaluating and saving.
    compression_params : dict, optional
        How gradients are compressed between hosts, as for `MyKV.set_gradient_compression`: for example
        ``{'type': 'topk', 'k': 0.01}``. Only 'fp16' and 'bf16' compress row_sparse gradients.
    parameter_process_sets : dict, optional
        Process sets of single parameters, in place of `process_set`. Its keys are Parameters, or keys of `params`.
        If the value is None, or a set without this worker, the parameter stays local: it is neither broadcast nor
        reduced, and trained on this worker's gradients alone.
    clip_global_norm : float, optional
        Above 0. In each update the gradients are scaled so that their common norm is at most this number. It is the
        norm of all gradients together, over all parameters and process sets, after they were averaged and divided by
        the batch size: ``gluon.utils.clip_global_norm(gradients, clip_global_norm * batch_size)`` does the same in one
        process. `gradient_norm` has the norm. By default nothing is clipped.
    communication_hook : callable, optional
        Called with each `GradientBucket` in place of its reduction over the workers, as a hook of PyTorch's
        DistributedDataParallel: it must reduce ``bucket.arrays`` itself, in place, to the same bits on all workers, and
        return None. ``bucket.allreduce_()`` does what is done without a hook. It is called in step() or
        allreduce_grads(), in the thread that calls them, for the same buckets in the same order on all workers, while
        backward may still run. If it raises, step() raises this error, and the parameters of no worker change.
        `PowerSGD` is a hook. It needs dense gradients, and neither `compression`, `compression_params`,
        `update_on_kvstore` nor `elastic`.
    elastic : bool, optional
        True: when a worker dies, training can go on without it, in `run_elastic` (see there). It needs a job that was
        started with ``mykvrun --elastic`` (``mpirun --with-ft ulfm``), and all parameters on all workers.

    Raises
    ------
    NotImplementedError
        An argument has a value that is not supported yet; or a parameter is sparse, and its kind or this release of
        MXNet cannot be trained.
    TypeError, ValueError
        An argument is wrong, or a process set was not added.
    RuntimeError
        The workers have different parameters, arguments or numbers of devices; or `elastic` is set, and the job cannot
        outlive one of its processes.

    Examples
    --------
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    >>> for images, labels in loader:  # this worker's share of the digits
    ...     with autograd.record():
    ...         loss = loss_of(net(images), labels)
    ...     loss.backward()
    ...     trainer.step(len(images))  # gradients are means over all workers
    """

    @_without_store
    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        root_rank: int = 0,
        update_on_kvstore: bool | None = None,
        bucket_bytes: int | None = None,
        reduce_method: str = "mean",
        broadcast_period: int = 0,
        aux_sync_period: int = 0,
        compression_params: Mapping[str, Any] | None = None,
        parameter_process_sets: Mapping[Parameter | str, ProcessSet | None] | None = None,
        elastic: bool = False,
        gradients_after_allreduce: str | None = None,
        clip_global_norm: float | None = None,
        communication_hook: Callable[[GradientBucket], None] | None = None,
    ) -> None:
        process.require()
        sets = parameter_groups.sets_of(process_set, parameter_process_sets)
        try:
            options = TrainerOptions.checked(
                process_set=process_set,
                parameter_process_sets=parameter_process_sets,
                root_rank=root_rank,
                prefix=prefix,
                compression=compression,
                compression_params=compression_params,
                num_groups=num_groups,
                bucket_bytes=bucket_bytes,
                update_on_kvstore=update_on_kvstore,
                reduce_method=reduce_method,
                gradients_after_allreduce=gradients_after_allreduce,
                gradient_predivide_factor=gradient_predivide_factor,
                broadcast_period=broadcast_period,
                aux_sync_period=aux_sync_period,
                elastic=elastic,
                clip_global_norm=clip_global_norm,
                communication_hook=communication_hook,
            )
            named = naming.named_parameters(params)
            options.check_parameters(named)
            placement.check_devices((one.name, one.value) for one in named)
            named_of = parameter_groups.divide(params, named, process_set, parameter_process_sets)
            global_process_set._position_of(root_rank)  # raises if root_rank is not a rank
            roots = {one: parameter_groups.root_of(one, root_rank, process_set) for one in sets}
            super().__init__(_in_mxnets_order(params), _unwrapped(optimizer), optimizer_params, None, None, False)
            self._store_optimizer = StoreOptimizer(process_set, self._optimizer) if update_on_kvstore else None
        except Exception as error:
            parameter_groups.refuse(sets, error)
            raise
        self._begin(options)
        self._meet_members(options, self._numbered_alike(sets, named), roots, named_of)

    def _numbered_alike(self, sets: Sequence[ProcessSet], named: Sequence[Named]) -> dict[ProcessSet, str]:
        """Number the parameters in an order that is the same on all workers: by it workers exchange states. Collective.

        gluon.Trainer sorts the names in a ParameterDict. They begin with a counter of the process, so workers may
        differ, such as with 'dense9' and 'dense10' on one and 'dense10' and 'dense11' on another.

        Returns
        -------
        dict
            The prefix of operation names in each process set.
        """
        positions = {id(one.value): position for position, one in enumerate(named)}
        scopes, is_common = parameter_groups.scopes_of(sets, [positions[id(one)] for one in self._params])
        if not is_common:
            self._params = [one.value for one in named]
            self._param2idx = {parameter.name: number for number, parameter in enumerate(self._params)}
            self._optimizer.param_dict = dict(enumerate(self._params))
        return scopes

    def _begin(self, options: TrainerOptions) -> None:
        self._options = options
        # Devices at the last look at the gradients: each parameter's device, and each device's parameters.
        self._held: list[Any] = [_NEVER_HELD] * len(self._params)
        self._where: list[Any] = [None] * len(self._params)
        self._by_device: list[set[Parameter]] = []
        self._ignores_stale = False
        self._freshness_is_shared = False
        self._is_told_of_means = options.gradients_after_allreduce is not None or options.reduce_method == "sum"
        self._join: Any = None  # the `join` around the training loop
        self._losses = process.losses  # when the workers last met for this trainer
        self._steps = 0  # equal on all workers between two steps, also after a step that failed
        self._begun: tuple[str, bool] | None = None  # in step() and update(): label of a step, ignore_stale_grad
        self._awaits_update = False  # allreduce_grads() was called, and update() was not
        self._is_counted = False  # allreduce_grads() has failed here, and this worker has counted the update
        self._labelled: tuple[Any, str] = (None, "")  # cache of _label(): its input, and the label

    def _meet_members(
        self,
        options: TrainerOptions,
        scopes: dict[ProcessSet, str],
        roots: dict[ProcessSet, int],
        named_of: dict[ProcessSet | None, list[Named]],
    ) -> None:
        """Meet the other workers of all process sets, and create the reducers of the gradients."""
        self._clipping: Clipping | None = None
        suffix = f".{options.prefix}" if options.prefix else ""
        self._shares = [
            parameter_groups.Share(
                one, name + suffix, named_of.get(one, []), roots[one], KeptNames(one, *{name, name + suffix})
            )
            for one, name in scopes.items()
        ]
        local = [one.value for one in named_of.get(None, [])]
        self._company = parameter_groups.Company(options.process_set, self._shares, bool(local))
        how = options.reduction(self._store_optimizer)
        devices = f"{_DEVICES}{len(mxnet.trainer_contexts(self) or ())}"
        lines = [*options.lines(self._optimizer), devices, *self._lines()]
        self._meeting = (scopes, how, lines)  # for _meet_again()
        self._generation = process.generation
        self._gradients = self._met(scopes, how, lines)
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        if local:
            self._gradients.append(LocalReducer(local, WeakMethod(self, "_follow_devices")))
        if options.clip_global_norm is not None:
            self._begin_clipping(options.clip_global_norm)
        self._warn_of_noise()
        deadlock_check.made(self, type(self)._awaited_by, type(self)._refuse_awaited)
        if self._store_optimizer is not None:
            deadlock_check.saves_states(self._shares[0].names, self._shares[0].scope, options.process_set)

    def _begin_clipping(self, most: float) -> None:
        self._company.check("clip_global_norm")
        company = [
            one
            for one in self._gradients
            if isinstance(one, SharedReducer) and one.process_set is self._company.process_set
        ]
        if self._company.scope and not company:
            raise ValueError(
                "clip_global_norm needs a parameter in the trainer's process set, but parameter_process_sets names "
                "other sets for all parameters. Give the trainer the process set of some of them."
            )
        # The last one: the comparison of a SparseReducer is made in each step, even if all its parameters are frozen.
        carrier = company[-1] if company else None
        self._clipping = Clipping(most, self._gradients, carrier, self._params, self._store_optimizer is None)

    @property
    def gradient_norm(self) -> NDArray | None:
        """The global norm of the gradients in the last update, before they were clipped.

        An array of float32 with shape (1,), with the same bits on all workers. None without `clip_global_norm` and
        before the first update. Reading its value waits for the update.

        Examples
        --------
        >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", clip_global_norm=1.0)
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.step(len(images))
        >>> print(f"norm {float(trainer.gradient_norm):.3f}")
        """
        return self._clipping.norm if self._options.clip_global_norm is not None else None

    def _warn_of_noise(self) -> None:
        """Log a warning if the optimizer gives different weights to the workers; a LocalTrainer's workers have them."""
        if self._store_optimizer is None:
            traits.warn_of_noise(self._optimizer, self._options.process_set.size())

    def _lines(self) -> list[str]:
        """More lines that must be the same on all workers; for derived trainers."""
        return []

    def _more_arrays(self) -> dict[str, NDArray]:
        """Arrays beside weights and the optimizer's states that a commit of an ElasticState keeps."""
        return {}

    def _restore_arrays(self, kept: Mapping[str, NDArray]) -> None:
        """Take over copies of the arrays of `_more_arrays` at a commit."""

    def _before_commit(self) -> None:
        """Make the weights equal on all workers before a commit of an ElasticState. Collective."""

    @property
    def _is_elastic(self) -> bool:
        """Whether training can go on with the remaining workers after a worker has died."""
        return self._options.elastic

    def _meet_again(self) -> None:
        """Begin again with the remaining workers, which have given the parameters equal values. Collective.

        No graph recorded before may write gradients any more. With update_on_kvstore=True the states are empty
        afterwards, and the parameters with values have owners among the remaining workers.
        """
        if self._store_optimizer is not None:
            self._store_optimizer.clear()
        bucket_memory.renew(self._params)
        self._meet_once_more(are_equal=True)

    def _options_of_world(self) -> tuple[int, list[str]]:
        """Bytes of a bucket, and the options that workers compare. Both may depend on the workers at the beginning."""
        _, how, lines = self._meeting
        return how.bucket_bytes, lines

    def _take_options_of_world(self, bucket_bytes: int, lines: list[str]) -> None:
        """Meet with the options of another worker: this trainer was made by a new worker, in a world of its own."""
        scopes, how, mine = self._meeting
        devices = next(line for line in mine if line.startswith(_DEVICES))
        lines = [devices if line.startswith(_DEVICES) else line for line in lines]
        self._meeting = (scopes, how._replace(bucket_bytes=bucket_bytes), lines)

    def _meet_once_more(self, are_equal: bool) -> None:
        scopes, how, lines = self._meeting
        self._losses = process.losses
        for gradients in self._gradients:
            gradients.release()
        local = [gradients for gradients in self._gradients if isinstance(gradients, LocalReducer)]
        self._gradients = local
        for share in self._shares:
            deferred_init.forget(f"{share.scope}/values/")
        self._shares = [share._replace(root=0) for share in self._shares]
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        self._gradients = [*self._met(scopes, how, [*lines, _KEPT], are_equal), *local]
        if self._clipping is not None:
            self._begin_clipping(self._clipping.most)
        if self._store_optimizer is not None:
            self._assign_owners()
        self._generation = process.generation

    def _resume(self, replaces_states: bool = False) -> None:
        """Meet the workers of another init() than before: the first use of the trainer after it. Collective.

        All workers get values, optimizer states, settings and counts of rank 0. `replaces_states`: the caller replaces
        the states of an optimizer on the store.
        """
        kept = self._generation
        if kept == process.generation:
            return
        if self._losses != process.losses and self._shares:
            raise RuntimeError(resumption.WORKER_WAS_LOST)
        for share in self._shares:
            share.process_set._core  # noqa: B018 - raises if the set was not added again
        are_same = process.has_same_ranks_as(kept)
        self._meet_to_resume(None if are_same else self._why_not_resumed(replaces_states))
        if self._store_optimizer is not None and not are_same:
            self._store_optimizer.clear()
        self._steps = 0  # equal on all workers
        try:
            self._meet_once_more(are_equal=False)
            if self._options.broadcast_period >= 0:
                resumption.broadcast_states(self)
        except BaseException:
            self._generation = kept  # the next use tries again
            raise

    def _meet_to_resume(self, refusal: str | None) -> None:
        """Wait for the other workers' first use, as calls that wait do: a worker that waits elsewhere gets an error."""
        call, reason = "the first use of a DistributedTrainer made before the last init()", refusal
        for share in self._shares:
            turn = operation.waiting(share.process_set, call)
            if reason is not None:
                turn.leave_out(reason, None)
                continue
            try:
                with turn:
                    turn.meet(call, [])
            except Exception as error:
                failure, reason = error, str(error)
        if refusal is not None:
            raise RuntimeError(refusal)
        if reason is not None:
            raise failure

    def _why_not_resumed(self, replaces_states: bool) -> str | None:
        """Why other ranks than before cannot train on."""
        if self._store_optimizer is None or replaces_states or not self._store_optimizer.keys:
            return None
        return resumption.STATES_ARE_LOST.format(whose=f"{self._shares[0].scope} (update_on_kvstore=True)")

    def _met(
        self, scopes: dict[ProcessSet, str], how: Reduction, options: Sequence[str], are_equal: bool = False
    ) -> list[Any]:
        """Meet the other members of each process set, give the parameters equal values, and return their reducers."""
        met, sparse = [], []  # sparse last: they block until backward ends, and dense ones should be running by then
        for number, share in enumerate(self._shares):
            try:
                reduction = how._replace(process_set=share.process_set)
                meeting = f"{scopes[share.process_set]}/parameters"
                dense = [one for one in share.named if one.value._grad_stype == "default"]
                rest = [one for one in share.named if one.value._grad_stype != "default"]
                which = f"sparse gradients of {', '.join(one.name for one in rest) or 'no parameter'}"
                follow = WeakMethod(self, "_follow_devices")
                gradients = DenseReducer(share.scope, dense, reduction, follow, self._keys())
                gradients.meet(meeting, [*options, which])
                gradients.own_gradients()
                made = [gradients]
                if rest:
                    sparse.append(SparseReducer(share.scope, rest, reduction, follow, self._keys()))
                    made.append(sparse[-1])
                if share.process_set is self._company.process_set:
                    self._company.meet()
                    if not self._company.is_apart:
                        gradients.watch_batches()
                if self._options.broadcast_period >= 0:
                    known = broadcast.keep_equal(
                        share.process_set, share.named, share.scope, share.root, share.names, are_equal
                    )
                    for one in made:
                        one.have_values = known
            except Exception as error:
                for later in self._shares[number + 1 :]:
                    later.process_set._core.refuse(f"{scopes[later.process_set]}/parameters", str(error))
                raise
            if dense:
                met.append(gradients)
        return met + sparse

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Average the gradients over the workers and update the parameters.

        Returns at once, unless there are row_sparse gradients: then it waits until all workers have computed their
        gradients.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch, of all its devices together; gradients are divided by it. It must be the same
            on all workers. Different sizes are an error, since the weights would drift apart. An NDArray of one element
            is waited for.
        ignore_stale_grad : bool, optional
            A worker whose backward has not used a parameter contributes zeros. All workers update the parameter if some
            worker has used it, and no worker updates it otherwise. This waits for the other workers.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set. The other workers get an
            MXNetError.
        MXNetError
            A parameter has no values yet, here or on another worker; or the workers' steps differ, for example in batch
            size or learning rate. The error is mostly raised where the parameters are read. The parameters are then
            unchanged on all workers, and all workers have counted one more update.

        Examples
        --------
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.step(len(images))
        """
        errors.check()
        self._resume()
        if self._join is not None:
            factor = step_label.of_batch(self._scale, batch_size)
            self._join.take_part(self, "step", bool(ignore_stale_grad), factor)
            return
        if self._awaits_update:
            self._settle()
        self._step(*self._checked(batch_size, ignore_stale_grad, self._refuse))

    def _checked(self, batch_size: Any, ignore_stale: Any, refuse: Callable[[str], None]) -> tuple[float, bool]:
        """The factor of the gradients, and the flag; the other workers' call fails if an argument cannot be used."""
        what = "batch size"
        try:
            factor = step_label.of_batch(self._scale, batch_size)
            what = "ignore_stale_grad"
            return factor, bool(ignore_stale)
        except Exception as error:
            with _Counted(self):
                refuse(f"its {what} cannot be used: {error}")
                raise

    def _step(self, factor: float, ignore_stale_grad: bool) -> None:
        with _Counted(self):
            self._check_and_rescale_grad(factor)
            if not ignore_stale_grad:
                trainer_state.check_fresh(self._params, self._refuse)
            self._begun = self._label(factor), ignore_stale_grad
            try:  # subclasses override the two methods, as those of gluon.Trainer
                self._allreduce_grads()
                self._update(ignore_stale_grad)
            finally:
                self._begun = None

    def _settle(self) -> None:
        """After an allreduce_grads() without an update(): count an update if the other workers have made it.

        All workers may have left it out, for example to accumulate gradients or to skip a step that has overflowed.
        Then nothing is counted.
        """
        self._awaits_update = self._is_counted = False
        due = [gradients for gradients in self._gradients if gradients.is_due()]
        left_out = [gradients.is_left_out_by_all() for gradients in due]  # asks all of them, also after a no
        if not all(left_out):
            trainer_state.count_update(self)
            self._leave_out("update() was not called on that rank after allreduce_grads()")

    def _label(self, factor: float, what: str = "a step") -> str:
        """The label of a step's operations, which must be equal on all workers; see coordination/step_label.py."""
        try:
            rate = step_label.learning_rate_of(self._optimizer)
            state = (factor, step_label.scale_of(self), rate, what, traits.progress_of(self._optimizer))
        except Exception as error:
            refuse = self._refuse if what == "a step" else self._refuse_comparison
            refuse(f"its learning rate or scale cannot be used: {error}")
            raise
        if state != self._labelled[0]:
            self._labelled = (state, step_label.label(*state))
        return self._labelled[1]

    def allreduce_grads(self) -> None:
        """Average the gradients over the workers, for use before update(): to clip or inspect gradients.

        With ``gradients_after_allreduce='sum'`` gradients are summed, and update() divides the sums by the number of
        workers.

        Returns at once, unless there are row_sparse gradients, as step() does.

        After an update() with ignore_stale_grad=True, this method takes stale gradients as zeros, as step() does with
        that argument.

        Raises
        ------
        RuntimeError
            The trainer was made with update_on_kvstore=True.

        Examples
        --------
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.allreduce_grads()
        >>> gradient = net[0].weight.grad()  # the mean over the workers
        >>> trainer.update(len(images))
        """
        self._require_local_updates("allreduce_grads")
        self._resume()
        if not self._is_told_of_means:
            self._is_told_of_means = True
            horovod_scripts.tell_of_means(self, self._company.process_set, sys._getframe(1))
        if self._join is None:
            self._allreduce_grads()
        else:
            self._join.take_part(self, "allreduce_grads", self._ignores_stale)

    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update the parameters from gradients that allreduce_grads() has averaged.

        Returns at once, with two exceptions: ignore_stale_grad=True waits for the other workers, and a batch size in an
        NDArray is waited for.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch; gradients are divided by it. It must be the same on all workers, as for step().
        ignore_stale_grad : bool, optional
            As for step().

        Raises
        ------
        RuntimeError
            The trainer was made with update_on_kvstore=True.
        MXNetError
            The workers' updates differ, for example in batch size. The error is raised where parameters are read. The
            parameters are then unchanged on all workers.

        Examples
        --------
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.allreduce_grads()
        >>> net[0].weight.grad()[:] = mx.np.clip(net[0].weight.grad(), -1, 1)  # all workers clip the same values
        >>> trainer.update(len(images))
        """
        self._require_local_updates("update")
        self._resume()
        if self._join is not None:
            factor = step_label.of_batch(self._scale, batch_size)
            self._join.take_part(self, "update", bool(ignore_stale_grad), factor)
            return
        self._check_reduced()
        self._apply(*self._checked(batch_size, ignore_stale_grad, self._refuse_comparison))

    def _check_reduced(self) -> None:
        """Raise an error in an update after an allreduce_grads() that has failed here and was counted."""
        if self._is_counted:
            self._is_counted = False
            raise MXNetError(UPDATE_REFUSED)

    def _apply(self, factor: float, ignore_stale_grad: bool) -> None:
        with _Counted(self):
            self._check_and_rescale_grad(factor)
            self._compare(factor, ignore_stale_grad)
            self._begun = "", ignore_stale_grad
            try:
                self._update(ignore_stale_grad)
            finally:
                self._begun = None

    def _compare(self, factor: float, ignore_stale_grad: bool) -> None:
        """Compare an update outside of step() with those of the other workers."""
        self._ignores_stale = ignore_stale_grad
        if not ignore_stale_grad:
            trainer_state.check_fresh(self._params, self._refuse_comparison)
        label = self._label(factor, "an update")
        if self._clipping is not None:
            self._clipping.begin(self._freshness_is_shared, label, carries=False)
        self._for_each(lambda one: one.compare(label), lambda one, reason: one.refuse_comparison(reason))
        self._awaits_update = False
        if ignore_stale_grad and not self._freshness_is_shared:
            for gradients in self._gradients:
                gradients.share_freshness()

    def _for_each(self, call: Callable[[Reducer], None], refuse: Callable[[Reducer, str], None]) -> None:
        """Call all reducers; after an exception refuse the call of the later reducers, so that no worker waits."""
        for number, gradients in enumerate(self._gradients):
            try:
                call(gradients)
            except BaseException as error:
                for later in self._gradients[number + 1 :]:
                    refuse(later, str(error))
                raise

    def _check_and_rescale_grad(self, scale: float) -> None:
        """Let updates multiply gradients by `scale`; with `sums_of_means` also by the factor from sum to mean."""
        super()._check_and_rescale_grad(scale * self._mean_of_sum() if self._options.sums_of_means else scale)

    def _mean_of_sum(self) -> float:
        """The factor from a sum of allreduce_grads() to the mean."""
        of_all = self._company.process_set
        return self._options.predivide / of_all.size() if of_all.included() else 1.0

    def _refuse(self, reason: str) -> None:
        """Refuse a step of the other workers."""
        for gradients in self._gradients:
            gradients.refuse(reason)
        sync_batch_norm.end_step(self._params)

    def _awaited_by(self) -> list[int]:
        """The ranks that have begun a step or an update that this rank has not begun."""
        return sorted({rank for gradients in self._gradients for rank in gradients.awaited_by()})

    def _refuse_awaited(self, reason: str) -> None:
        """Refuse what the other ranks wait for; they have counted it as an update."""
        for gradients in self._gradients:
            gradients.refuse_awaited(reason)
        sync_batch_norm.end_step(self._params)
        if any(gradients.has_begun() for gradients in self._gradients):
            trainer_state.count_update(self)
            self._is_counted = False
            self._leave_out(reason)

    def _refuse_comparison(self, reason: str) -> None:
        """Refuse an update() of the other workers."""
        for gradients in self._gradients:
            gradients.refuse_comparison(reason)

    def _allreduce_grads(self) -> None:
        if self._begun is not None:
            self._allreduce(self._begun[1], self._begun[0])
            return
        self._require_local_updates("allreduce_grads")  # a subclass may call this method in a step() of its own
        self._resume()
        self._allreduce(self._ignores_stale, "")

    def _allreduce(self, ignore_stale: bool, label: str) -> None:
        if label and not ignore_stale:
            sync_batch_norm.end_step(self._params)
        deadlock_check.stepped(self, type(self)._awaited_by, type(self)._refuse_awaited)
        what = label or "allreduce_grads()"
        if self._awaits_update:
            self._settle()
        self._awaits_update = not label or self._clipping is not None
        sets: list[ProcessSet] = []  # those of the reducers so far

        def reduce(reducer: Reducer) -> None:
            if isinstance(reducer, SharedReducer):
                sets.append(reducer.process_set)
            reducer.allreduce(ignore_stale, what, self._comparison_after(reducer, label))

        try:
            self._for_each(reduce, lambda one, reason: one.refuse(reason))
        except BaseException as error:
            if any(one is not sets[-1] for one in sets):  # its workers may not have the error, and go on
                load_tracking.note_failure(self._params, self)
            if not label:
                for gradients in self._gradients:
                    if gradients.is_due():
                        gradients.refuse_comparison(str(error))
                if any(gradients.has_begun() for gradients in self._gradients):  # the other workers call update()
                    trainer_state.count_update(self)
                    self._leave_out(str(error))
                self._is_counted = True
            raise
        self._freshness_is_shared = ignore_stale

    def _comparison_after(self, reducer: Reducer, label: str) -> Comparing:
        """Which comparison follows the reduction of gradients, by the label of the step, if it is a step."""
        if not label:
            return Comparing.UPDATE
        carries = self._clipping is not None and self._clipping.is_carried_by(reducer)
        return Comparing.STEP if carries else Comparing.NOTHING

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._begun is not None:
            self._update_from_sums(ignore_stale_grad, self._begun[0])
            return
        self._require_local_updates("update")  # a subclass calls this method in a step() of its own
        self._resume()
        self._check_reduced()
        with _Counted(self):
            self._compare(step_label.value_of(self._optimizer.rescale_grad), ignore_stale_grad)
            self._update_from_sums(ignore_stale_grad, "")

    def _update_from_sums(self, ignore_stale_grad: bool, label: str) -> None:
        """Update from the reduced gradients; `label` is that of a step, and empty outside of step()."""
        shares, averagings = self._count_step()
        for share in shares:
            broadcast.broadcast_again(share.process_set, share.named, share.scope, share.root)
        for averaging in averagings:
            averaging.push()
        if self._clipping is not None:  # from here on all workers have counted, whatever fails on some of them
            factor = step_label.value_of(self._optimizer.rescale_grad)
            self._clip(factor, label)
            try:
                self._make_updates(ignore_stale_grad)
            except MXNetError:
                self._clipping.end(factor, broken=True)
                raise
            self._clipping.end(factor)
        else:
            self._make_updates(ignore_stale_grad)

    def _clip(self, factor: float, label: str) -> None:
        try:
            if label:
                self._clipping.begin(self._freshness_is_shared, label, carries=True)
            self._clipping.clip(factor)
        except MXNetError:
            raise  # of the step; the other workers have it too
        except BaseException:  # the other workers update, and get an error in their next step
            load_tracking.note_failure(self._params, self)
            raise

    def _make_updates(self, ignore_stale_grad: bool) -> None:
        scaler = getattr(self, "_amp_loss_scaler", None)
        if scaler is not None and self._store_optimizer is not None:
            if amp.skips_after(self, not self._clipping.is_finite()):
                for gradients in self._gradients:
                    gradients.drop_updates()
            else:
                self._run_updaters(ignore_stale_grad)
        elif not self._company.is_apart or scaler is None:
            self._run_updaters(ignore_stale_grad)
        elif not amp.skips_step(self, self._company):
            with amp.without_scaler(self):
                self._run_updaters(ignore_stale_grad)

    def _count_step(self) -> tuple[Sequence[parameter_groups.Share], Sequence[Averaging]]:
        """Count a step, once on each worker; returns the shares to be broadcast in it, and the averagings."""
        self._steps += 1
        broadcasts, averages = self._options.broadcast_period, self._options.aux_sync_period
        return (
            self._shares if broadcasts > 0 and self._steps % broadcasts == 0 else (),
            self._averagings if averages > 0 and self._steps % averages == 0 else (),
        )

    def _leave_out(self, reason: str) -> None:
        """Count a step that the other workers make, and refuse its periodic operations, which they push."""
        shares, averagings = self._count_step()
        for share in shares:
            broadcast.refuse_again(share.process_set, share.named, share.scope, share.root, reason)
        for averaging in averagings:
            averaging.refuse(reason)

    def _run_updaters(self, ignore_stale_grad: bool) -> None:
        with load_tracking.noting_failures(self):
            if self._store_optimizer is not None:
                self._for_each(lambda one: one.update(), lambda one, reason: one.refuse_update(reason))
                trainer_state.mark_stale(self._params)
                return
            with fenced(self._gradients if self._clipping is None else ()):  # clipping has a fence of its own
                if self._options.communication_hook is None:
                    self._update_on_all_devices(ignore_stale_grad)
                    return
                before = trainer_state.updates_counted(self)
                self._update_on_all_devices(ignore_stale_grad)
                if trainer_state.updates_counted(self) != before:  # AMP has not skipped them
                    for one in self._gradients:
                        one.updated()

    def _update_on_all_devices(self, ignore_stale_grad: bool) -> None:
        given, divided = self._params, self._by_device
        if not self._contains_sparse_weight and len(divided) < 2:
            super()._update(ignore_stale_grad)
            return
        # A call of an optimizer takes arrays of one device only. MXNet skips a Parameter with grad_req 'null'.
        try:
            for part in divided or [set(given)]:
                self._params = [
                    LEFT_OUT if one not in part else Listed(one) if one._stype == "row_sparse" else one for one in given
                ]
                super()._update(ignore_stale_grad)
        finally:
            self._params = given

    def save_states(self, fname: str) -> None:
        """Write the optimizer with its states to a file, which any Trainer of these parameters can load.

        The file is written atomically. With update_on_kvstore=True the call is collective, and the first worker writes.
        Otherwise each worker that calls it writes all states. They are the same on all workers, so call it on one.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError
            The file cannot be written. An existing file is unchanged.
        MXNetError
            With update_on_kvstore=True: another worker has failed, or does not call this within MYKV_CHECKPOINT_WAIT_S.

        Examples
        --------
        >>> if mykv.rank() == 0:  # with update_on_kvstore=True all workers call it
        ...     net.save_parameters("net.params")
        ...     trainer.save_states("net.states")
        """
        if self._store_optimizer is None:
            save = super().save_states  # opens a name or a descriptor, and closes it
            atomic_file.write(fname, lambda file: save(os.dup(file.fileno())))
            return
        self._resume()
        self._assign_owners()
        checkpoint.save(self._store_optimizer, self._shares[0].scope, fname, True)

    def load_states(self, fname: str) -> None:
        """Load the optimizer and its states from a file that any Trainer of these parameters has saved.

        With update_on_kvstore=True the call is collective, the first worker reads, and the parameters must have values;
        a failed call changes nothing. Otherwise each worker reads.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError, ValueError
            The file cannot be read, is damaged, or is of another network.
        MXNetError
            With update_on_kvstore=True: another worker has failed, or does not call this within MYKV_CHECKPOINT_WAIT_S.

        Examples
        --------
        >>> if mykv.rank() == 0:
        ...     trainer.save_states("net.states")
        >>> mykv.barrier()  # until the file is there
        >>> trainer.load_states("net.states")  # on all workers; broadcast_states is for files that one worker can read
        """
        if self._store_optimizer is None:
            super().load_states(fname)
            return
        self._resume(replaces_states=True)
        self._assign_owners()
        checkpoint.load(self._store_optimizer, self._shares[0].scope, fname)
        self._optimizer = self._store_optimizer.optimizer
        self._optimizer.param_dict = dict(enumerate(self._params))

    def _assign_owners(self) -> None:
        """Give owners to the parameters that have values, as the first step does."""
        self._store_optimizer.assign(
            (key, parameter._data[0])
            for key, parameter in enumerate(self._params)
            if parameter.grad_req != "null" and parameter._data is not None
        )

    def _keys(self) -> dict[int, int]:
        """The parameters' indices in the optimizer, by id()."""
        return {id(parameter): number for number, parameter in enumerate(self._params)}

    def _require_local_updates(self, method: str) -> None:
        if self._store_optimizer is not None:
            raise RuntimeError(
                f"{method}() needs all gradients on each worker, but with update_on_kvstore=True a worker has its "
                "share only. Call step(), or make the DistributedTrainer with update_on_kvstore=False."
            )

    def _check_mixed_precision(self) -> None:
        """Raise a ValueError if all workers cannot skip a step together after an overflow on one worker."""
        if self._store_optimizer is not None:
            if self._clipping is None:
                self._begin_clipping(math.inf)  # adds up squares, to find overflow
            return
        if len(placement.by_device(self._params)) > 1:
            raise ValueError("AMP needs all parameters on the same devices, since MXNet checks all gradients together.")
        self._company.check("AMP")

    def _row_sparse_pull(self, parameter: Parameter, out: Any, row_id: Any, full_idx: bool = False) -> None:
        """Copy rows of a row_sparse Parameter, which holds all its rows, for row_sparse_data() and for saving."""
        for array in out if isinstance(out, (list, tuple)) else [out]:
            if all(array is not weight for weight in parameter._data):
                arrays.copy_rows(parameter._data[0], row_id, array, f"out of {parameter.name}")

    def _init_kvstore(self) -> None:
        # There is no store to set up, and MXNet's own version needs all parameters to be initialized.
        self._kv_initialized = True

    def _check_contexts(self) -> list | None:
        # MXNet's own version, under either name, refuses a network that is spread over devices.
        devices = [mxnet.contexts(parameter) for parameter in self._params]
        return devices[0] if devices else None

    _check_devices = _check_contexts

    def _follow_devices(self) -> None:
        """After reset_ctx moved parameters, give each of their devices an updater with states on that device."""
        amp.warn_of_added_gradients(self._params)
        held = [one._data for one in self._params]
        if all(one is other for one, other in zip(held, self._held)):
            return
        self._held = held
        before, self._where = self._where, [one and one[0].context for one in held]
        old = mxnet.trainer_contexts(self)
        new = next((mxnet.contexts(p) for p in self._params if p._data is not None), old)
        moved = any(then is not None and then != now for then, now in zip(before, self._where))
        self._by_device = placement.by_device(self._params)
        if new == old and not moved:
            return
        states = self._updaters[0].get_states(dump_optimizer=False)
        self._updaters = [mxnet.updater_with(self._optimizer, states) for _ in new]
        mxnet.set_trainer_contexts(self, list(new))
        trainer_state.continue_counts(self)


class _Counted(counted):
    """A context that counts an update and a step even if they fail here, since the other workers count them."""

    __slots__ = ("_steps",)

    def __init__(self, trainer: DistributedTrainer) -> None:
        super().__init__(trainer, trainer._gradients)
        self._steps = trainer._steps

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        super().__exit__(kind, error, traceback)
        trainer = self._trainer
        if trainer._clipping is not None:
            trainer._clipping.refuse(f"the step was interrupted on that rank: {error}")
        if trainer._steps == self._steps and any(one.has_begun() for one in trainer._gradients):
            trainer._leave_out(f"the step has failed on that rank: {error}")


def _unwrapped(optimizer: Any) -> Any:
    if not isinstance(optimizer, DistributedOptimizer):
        return optimizer
    warnings.warn(
        "DistributedTrainer was given a DistributedOptimizer, which would average gradients too, so it uses the "
        "wrapped optimizer. Pass the wrapped optimizer to avoid this warning.",
        UserWarning,
        stacklevel=4,
    )
    return optimizer._optimizer


def _in_mxnets_order(params: Any) -> list[Parameter]:
    """The parameters, each once, in gluon.Trainer's order: their positions are the keys of saved states."""
    ordered = params if isinstance(params, (list, tuple)) else [params[key] for key in sorted(params.keys())]
    return list({id(parameter): parameter for parameter in ordered}.values())

"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from typing import Any, Callable, ContextManager, Iterator, Mapping, NamedTuple, Sequence

from ..collectives.compression import Compression
from ..compat.mxnet import NDArray, Parameter
from ..gradients import parameter_groups
from ..gradients.communication_hook import GradientBucket
from ..integrations import horovod_scripts
from ..integrations.distributed_optimizer import DistributedOptimizer
from ..parameters import naming, placement
from ..parameters.naming import Named
from ..sharded_optimizer import atomic_file, checkpoint
from ..sharded_optimizer.optimizer import StoreOptimizer
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .stand_ins import LEFT_OUT
from .stepping_trainer import SteppingTrainer
from .trainer_options import TrainerOptions


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


class DistributedTrainer(SteppingTrainer):
    """Trains the same parameters on all workers, each worker on its own data.

    Gradients are averaged over the workers, so the arguments of step() mean the same as in a single process that trains
    with one worker's batch. Of a row_sparse gradient, only the rows that some worker has are sent. All workers start
    from the values of `root_rank`, even if parameters are initialized later (in the first forward pass) or again.
    Creating a trainer is collective and calls init() if needed. All workers must create their trainers in the same
    order, with the same arguments.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Matched between workers by key, or by position in a list or a ParameterDict; never by Parameter.name. A
        Parameter that occurs twice is trained once.
    optimizer : str or Optimizer
        As for gluon.Trainer. A `DistributedOptimizer` is unwrapped, with a UserWarning, since gradients must be
        averaged only once.
    optimizer_params : dict, optional
        As for gluon.Trainer.
    compression : optional
        Type of gradients between hosts: `Compression.none`, `Compression.fp16` or `Compression.bf16`; or,
        as in Horovod, your own object or class with the methods ``compress(tensor) -> (tensor, ctx)`` and
        ``decompress(tensor, ctx)``. Then the results of compress() are summed over the workers, even within a host, and
        decompress() gets the sum, with the `ctx` of this worker. It must return the same on all workers.
        `compression_params` has other compressors; give only one of the two arguments.
    gradient_predivide_factor : float, optional
        Finite and above 0. For Horovod compatibility. In Horovod it divides gradients before they are summed, so that
        sums of float16 stay in range, and multiplies the result. Here 16-bit gradients are summed in 32 bits and scaled
        once, so it does not change the mean. With ``gradients_after_allreduce='sum'`` it divides the sums, which are
        stored in 16 bits.
    prefix : str, optional
        Part of the names in error messages.
    num_groups : int, optional
        The number of groups in which gradients are reduced. Groups have equally many gradients, in the order of
        `params`; one operation reduces a group's gradients of one dtype, whatever their size. 0: `bucket_bytes`
        divides the gradients. With more groups than gradients, each gradient is a group.
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
        Gradients are in buckets of up to this size in shared memory; one operation reduces each bucket. 0: gradients
        stay in MXNet's arrays, and each is copied into shared memory and back (with `num_groups`, by one operation for
        each group). By default 16 MiB on one host. On several hosts 1 MiB, or 16 KiB for each worker if that is more:
        between hosts, a bucket that the next forward pass needs first overtakes other buckets. The same on all workers.
    reduce_method : str, optional
        'mean' or 'sum' of the gradients over the workers.
    gradients_after_allreduce : str, optional
        The parameters' gradients between allreduce_grads() and update(): 'mean' or 'sum' over the workers, by default
        as `reduce_method`. 'sum' with ``reduce_method='mean'`` is as in Horovod: update() also divides by the number of
        workers, and step() gives the result of 'mean', up to rounding. Scripts for Horovod may need it, such as a
        script that clips at ``max_norm * hvd.size()``. The sum is then divided by `gradient_predivide_factor`. It needs
        one process set, and no `update_on_kvstore`.
    broadcast_period : int, optional
        0: parameters are broadcast at the start only. n > 0: in every n-th step, before the update, the parameters of
        `root_rank` overwrite those on every worker and device again. -1: parameters are never broadcast, not even after
        deferred initialization; the workers must ensure equal values themselves.
    aux_sync_period : int, optional
        n > 0: in every n-th step the running means and variances of BatchNorm that are in `params` are averaged over
        all devices of all workers, as in `sync_aux_params`; the step does not wait for the averages. 0: never, so call
        `sync_aux_params` before evaluating and saving.
    compression_params : dict, optional
        How gradients are compressed between hosts, as for `MyKV.set_gradient_compression`: for example
        ``{'type': 'topk', 'k': 0.01}``. Only 'fp16' and 'bf16' compress row_sparse gradients.
    parameter_process_sets : dict, optional
        Process sets of single parameters, instead of `process_set`. Its keys are Parameters, or keys of `params`.
        If the value is None, or a set without this worker, the parameter stays local: it is neither broadcast nor
        reduced, and trained on this worker's gradients alone.
    clip_global_norm : float, optional
        Above 0. In each update the gradients are scaled so that their common norm is at most this number. It is the
        norm over all parameters and process sets, after gradients were averaged and divided by the batch size:
        ``gluon.utils.clip_global_norm(gradients, clip_global_norm * batch_size)`` does the same in one process.
        `gradient_norm` has the norm. By default nothing is clipped.
    communication_hook : callable, optional
        Called with each `GradientBucket` instead of its reduction over the workers, like a hook of PyTorch's
        DistributedDataParallel. The hook must reduce ``bucket.arrays`` itself, in place, to the same bits on all
        workers, and return None. ``bucket.allreduce_()`` reduces a bucket as without a hook. The hook is called in
        step() or allreduce_grads(), in the thread that calls them, for the same buckets in the same order on all
        workers, while backward may still run. If the hook raises an error, step() raises this error, and the parameters
        of no worker change. `PowerSGD` is a hook. A hook needs dense gradients, and cannot be combined with
        `compression`, `compression_params`, `update_on_kvstore` or `elastic`.
    elastic : bool, optional
        True: when a worker dies, training can continue without it, in `run_elastic` (see there). It needs a job that
        was started with ``mykvrun --elastic`` (``mpirun --with-ft ulfm``), and all parameters on all workers.

    Raises
    ------
    NotImplementedError
        An argument has a value that is not supported yet; or a parameter is sparse, and cannot be trained with this
        release of MXNet or these arguments.
    TypeError, ValueError
        An argument is wrong, or a process set was not added.
    RuntimeError
        The workers have different parameters, arguments or numbers of devices; or `elastic` is set, and the job cannot
        outlive one of its processes.

    Examples
    --------
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    >>> for images, labels in loader:  # this worker's share of the samples
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
            placement.check_devices((item.name, item.value) for item in named)
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

    def allreduce_grads(self) -> None:
        """Average the gradients over the workers, for use before update(): to clip or inspect gradients.

        With ``gradients_after_allreduce='sum'`` gradients are summed, and update() divides the sums by the number of
        workers.

        Returns at once, unless there are row_sparse gradients, as step() does.

        After an update() with ignore_stale_grad=True, stale gradients count as zeros, as in step() with that argument.

        Raises
        ------
        RuntimeError
            The trainer was created with update_on_kvstore=True.

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
            horovod_scripts.tell_of_means(self, self._workers.process_set, sys._getframe(1))
        if self._join is not None:
            self._join.take_part(self, "allreduce_grads", 0.0, self._ignores_stale)
        else:
            self._allreduce_grads()

    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update the parameters from gradients that allreduce_grads() has averaged.

        Returns at once, with two exceptions: ignore_stale_grad=True waits for the other workers, and a batch size in an
        NDArray makes the call wait for its value.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch; gradients are divided by it. It must be the same on all workers, as for step().
        ignore_stale_grad : bool, optional
            As for step().

        Raises
        ------
        RuntimeError
            The trainer was created with update_on_kvstore=True.
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
        with contextlib.suppress(Exception):  # raised by _checked()
            self._ignores_stale = bool(ignore_stale_grad)  # even if this update fails here: the others know no less
        if self._join is None:
            self._check_reduced()
        factor, ignore_stale = self._checked("update", batch_size, ignore_stale_grad)
        if self._join is not None:
            self._join.take_part(self, "update", factor, ignore_stale)
        else:
            self._apply(factor, ignore_stale)

    def _apply(self, factor: float, ignore_stale: bool) -> None:
        """Update from gradients that are reduced already."""
        with self._guard():
            self._check_and_rescale_grad(factor)
            self._compare(factor, ignore_stale)
            self._begun = "", ignore_stale
            try:
                self._update(ignore_stale)
            finally:
                self._begun = None

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
            save = super().save_states  # MXNet's method takes a name or a descriptor, and closes the file
            atomic_file.write(fname, lambda file: save(os.dup(file.fileno())))
            return
        self._resume()
        new = self._assign_owners()
        checkpoint.save(self._store_optimizer, self._shares[0].scope, fname, True, new)

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
            The file cannot be read, is damaged, or belongs to another network.
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
        new = self._assign_owners()
        checkpoint.load(self._store_optimizer, self._shares[0].scope, fname, new)
        self._optimizer = self._store_optimizer.optimizer
        self._optimizer.param_dict = dict(enumerate(self._params))


class JoinHook(NamedTuple):
    """The interface of a trainer for `join`; created by `join_hook`.

    Attributes
    ----------
    process_set : ProcessSet
        The workers that train together.
    scope : str
        Prefix of the names of the trainer's operations; empty on a worker outside the process set.
    shared : sequence of Named
        The parameters that the workers train together.
    has_local_parameters : bool
        Whether the trainer has parameters that only this worker trains.
    is_mean, is_summed_first : bool
        Whether updates use means over the workers; and whether allreduce_grads() gives sums, which update() divides.
    attach : callable
        Given a join, lets step(), allreduce_grads() and update() call its take_part(); given None, ends that.
    resume : callable
        Meets the workers of a new init(), if there was one since the trainer's last use.
    step, update : callable
        Given the factor of gradients, and ignore_stale_grad: do what the trainer's methods do outside of join().
    allreduce_grads : callable
        The same, given ignore_stale_grad.
    without_local_parameters : callable
        Returns a context manager in which updates leave local parameters alone.
    """

    process_set: ProcessSet
    scope: str
    shared: Sequence[Named]
    has_local_parameters: bool
    is_mean: bool
    is_summed_first: bool
    attach: Callable[[Any], None]
    resume: Callable[[], None]
    step: Callable[[float, bool], None]
    allreduce_grads: Callable[[bool], None]
    update: Callable[[float, bool], None]
    without_local_parameters: Callable[[], ContextManager[None]]


def process_set_of(trainer: DistributedTrainer) -> ProcessSet:
    """The workers that train together."""
    return trainer._workers.process_set


def join_hook(trainer: DistributedTrainer) -> JoinHook:
    """The hook by which a join() steps a trainer.

    Raises
    ------
    ValueError
        The trainer cannot be used in a join().
    """
    workers, options = trainer._workers, trainer._options
    workers.check_undivided("join()")
    if trainer._is_elastic:
        raise ValueError(
            "join() cannot be used with a trainer that has elastic=True, since join() needs all workers until its "
            "end. Leave elastic out, or let all workers make the same number of steps."
        )
    shared = [item for share in trainer._shares for item in share.named]

    def attach(join: Any) -> None:
        trainer._join = join

    def allreduce_grads(ignore_stale: bool) -> None:
        trainer._ignores_stale = ignore_stale
        trainer._allreduce_grads()

    def update(factor: float, ignore_stale: bool) -> None:
        trainer._ignores_stale = ignore_stale
        trainer._apply(factor, ignore_stale)

    @contextlib.contextmanager
    def without_local_parameters() -> Iterator[None]:
        numbers = {id(item.value) for item in shared}
        given = trainer._params
        trainer._params = [one if id(one) in numbers else LEFT_OUT for one in given]
        try:
            yield
        finally:
            trainer._params = given

    return JoinHook(
        workers.process_set,
        workers.scope,
        shared,
        bool(workers.scope) and len(shared) < len(trainer._params),
        options.reduce_method == "mean",
        options.sums_of_means,
        attach,
        trainer._resume,
        trainer._step,
        allreduce_grads,
        update,
        without_local_parameters,
    )


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

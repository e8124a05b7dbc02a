"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from typing import Any, Callable, ContextManager, Iterator, Mapping, NamedTuple, Sequence

from ..collectives.compression import Compression
from ..compat import errors, patches
from ..compat.mxnet import MXNetError, NDArray, Parameter
from ..coordination import deadlock_check, step_label
from ..gradients import parameter_groups, step_guard
from ..gradients.communication_hook import GradientBucket
from ..gradients.reducer import UPDATE_REFUSED, Comparing, Reducer, SharedReducer
from ..gradients.step_guard import StepGuard
from ..integrations import amp, horovod_scripts
from ..integrations.distributed_optimizer import DistributedOptimizer
from ..nn import sync_batch_norm
from ..parameters import broadcast, load_tracking, naming, placement, trainer_state
from ..parameters.naming import Named
from ..sharded_optimizer import atomic_file, checkpoint, traits
from ..sharded_optimizer.optimizer import StoreOptimizer
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .meeting_trainer import MeetingTrainer
from .stand_ins import LEFT_OUT
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


class DistributedTrainer(MeetingTrainer):
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
        if self._generation != process.generation:
            self._resume()
        factor, ignore_stale = self._checked("step", batch_size, ignore_stale_grad)
        if self._join is not None:
            self._join.take_part(self, "step", factor, ignore_stale)
        else:
            self._step(factor, ignore_stale)

    def _step(self, factor: float, ignore_stale: bool) -> None:
        """A step from the first refusal to the last count: gradients are multiplied by `factor` in the update."""
        if self._awaits_update:
            self._settle()
        with self._guard():
            if not ignore_stale:
                step_guard.check_fresh(self._params, self._refuse)
            self._check_and_rescale_grad(factor)
            self._begun = self._label(factor), ignore_stale
            try:  # subclasses override the two methods, as those of gluon.Trainer
                self._allreduce_grads()
                self._update(ignore_stale)
            finally:
                self._begun = None

    def _guard(self) -> StepGuard:
        return StepGuard(self, self._gradients, functools.partial(self._end_failed, self._steps))

    def _end_failed(self, steps: int, error: BaseException) -> None:
        """After a step or an update that has failed here: refuse what the other workers await. `steps` before it."""
        if self._clipping is not None:
            self._clipping.refuse(f"the step was interrupted on that rank: {error}")
        if self._steps == steps and any(one.has_begun() for one in self._gradients):
            self._count_step(f"the step has failed on that rank: {error}")

    def _checked(self, method: str, batch_size: Any, ignore_stale: Any) -> tuple[float, bool]:
        """The factor of the gradients, and the flag; the other workers' call fails if an argument cannot be used."""
        what = "batch size"
        try:
            factor = step_label.of_batch(self._scale, batch_size)
            what = "ignore_stale_grad"
            return factor, bool(ignore_stale)
        except Exception as error:
            if self._join is not None:  # which has told the other workers nothing yet
                raise
            if method == "step" and self._awaits_update:
                self._settle()
            with self._guard():
                refuse = self._refuse if method == "step" else self._refuse_comparison
                refuse(f"its {what} cannot be used: {error}")
                raise

    def _settle(self) -> None:
        """After an allreduce_grads() without an update(): count an update if the other workers have made it.

        All workers may have left it out, for example to accumulate gradients or to skip a step that has overflowed.
        Then nothing is counted.
        """
        self._awaits_update = self._is_counted = False
        due = [gradients for gradients in self._gradients if gradients.is_due]
        left_out = [gradients.is_left_out_by_all() for gradients in due]  # asks all of them, also after a no
        if not all(left_out):
            trainer_state.count_update(self)
            self._count_step("update() was not called on that rank after allreduce_grads()")

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
        if self._join is not None:
            self._join.take_part(self, "allreduce_grads", 0.0, self._ignores_stale)
        else:
            self._allreduce_grads()

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
        if self._join is None:
            self._check_reduced()
        factor, ignore_stale = self._checked("update", batch_size, ignore_stale_grad)
        if self._join is not None:
            self._join.take_part(self, "update", factor, ignore_stale)
        else:
            self._apply(factor, ignore_stale)

    def _check_reduced(self) -> None:
        """Raise an error in an update after an allreduce_grads() that has failed here and was counted."""
        if self._is_counted:
            self._is_counted = False
            raise MXNetError(UPDATE_REFUSED)

    def _apply(self, factor: float, ignore_stale: bool) -> None:
        """An update of gradients that are reduced already."""
        with self._guard():
            self._check_and_rescale_grad(factor)
            self._compare(factor, ignore_stale)
            self._begun = "", ignore_stale
            try:
                self._update(ignore_stale)
            finally:
                self._begun = None

    def _compare(self, factor: float, ignore_stale_grad: bool) -> None:
        """Compare an update outside of step() with those of the other workers."""
        self._ignores_stale = ignore_stale_grad
        if not ignore_stale_grad:
            step_guard.check_fresh(self._params, self._refuse_comparison)
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
        workers = self._company.process_set
        if self._options.sums_of_means and workers.included():
            scale *= self._options.predivide / workers.size()
        self._optimizer.rescale_grad = scale  # MXNet's own method does nothing else for a trainer without a store

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
            self._count_step(reason)

    def _refuse_comparison(self, reason: str) -> None:
        """Refuse an update() of the other workers."""
        for gradients in self._gradients:
            gradients.refuse_comparison(reason)

    def _allreduce_grads(self) -> None:
        if self._begun is None:  # a subclass may call this method in a step() of its own
            self._require_local_updates("allreduce_grads")
            self._resume()
        label, ignore_stale = self._begun or ("", self._ignores_stale)
        if label and not ignore_stale:
            sync_batch_norm.end_step(self._params)
        deadlock_check.stepped(self, type(self)._awaited_by, type(self)._refuse_awaited)
        if self._awaits_update:
            self._settle()
        self._awaits_update = not label or self._clipping is not None
        for number, reducer in enumerate(self._gradients):
            compares = Comparing.NOTHING if label else Comparing.UPDATE
            if label and self._clipping is not None and self._clipping.is_carried_by(reducer):
                compares = Comparing.STEP
            try:
                reducer.allreduce(ignore_stale, label or "allreduce_grads()", compares)
            except BaseException as error:
                self._end_failed_sums(number, str(error), is_step=bool(label))
                raise
        self._freshness_is_shared = ignore_stale

    def _end_failed_sums(self, number: int, reason: str, is_step: bool) -> None:
        """After the reducer of this number has failed: refuse the call of the later reducers, so that none waits."""
        for later in self._gradients[number + 1 :]:
            later.refuse(reason)
        sets = [one.process_set for one in self._gradients[: number + 1] if isinstance(one, SharedReducer)]
        if any(one is not sets[-1] for one in sets):  # its workers may not have the error, and go on
            load_tracking.note_failure(self._params, self)
        if is_step:
            return
        for gradients in self._gradients:
            if gradients.is_due:
                gradients.refuse_comparison(reason)
        if any(gradients.has_begun() for gradients in self._gradients):  # the other workers call update()
            trainer_state.count_update(self)
            self._count_step(reason)
        self._is_counted = True

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._begun is None:  # a subclass calls this method in a step() of its own
            self._require_local_updates("update")
            self._resume()
            self._check_reduced()
            with self._guard():
                self._compare(step_label.value_of(self._optimizer.rescale_grad), ignore_stale_grad)
                self._count_and_update(ignore_stale_grad, "")
        else:
            self._count_and_update(ignore_stale_grad, self._begun[0])

    def _count_and_update(self, ignore_stale: bool, label: str) -> None:
        """Count, and update from the reduced gradients; `label` is that of a step, and empty outside of step()."""
        self._count_step()
        if self._clipping is None:
            self._make_updates(ignore_stale)
            return
        factor = step_label.value_of(self._optimizer.rescale_grad)
        self._clip(factor, label)  # from here on all workers have counted, whatever fails on some of them
        try:
            self._make_updates(ignore_stale)
        except MXNetError:
            self._clipping.end(factor, broken=True)
            raise
        self._clipping.end(factor)

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

    def _make_updates(self, ignore_stale: bool) -> None:
        """Update, unless AMP skips the step."""
        if vars(self).get("_amp_loss_scaler") is None:
            self._run_updaters(ignore_stale)
        elif self._store_optimizer is not None:
            if amp.skips_after(self, not self._clipping.is_finite()):
                for gradients in self._gradients:
                    gradients.drop_updates()
            else:
                self._run_updaters(ignore_stale)
        elif not self._company.is_apart:
            self._run_updaters(ignore_stale)  # MXNet's own update looks for overflow
        elif not amp.skips_step(self, self._company):
            with amp.without_scaler(self):
                self._run_updaters(ignore_stale)

    def _count_step(self, refusal: str | None = None) -> None:
        """Count a step, once on each worker, and push its periodic operations.

        `refusal`: why this worker does not take the step, which the others make: they push the operations.
        """
        self._steps += 1
        broadcasts, averages = self._options.broadcast_period, self._options.aux_sync_period
        for share in self._shares if broadcasts > 0 and self._steps % broadcasts == 0 else ():
            given = share.process_set, share.named, share.scope, share.root
            if refusal is None:
                broadcast.broadcast_again(*given)
            else:
                broadcast.refuse_again(*given, refusal)
        for averaging in self._averagings if averages > 0 and self._steps % averages == 0 else ():
            if refusal is None:
                averaging.push()
            else:
                averaging.refuse(refusal)

    def _run_updaters(self, ignore_stale: bool) -> None:
        if self._store_optimizer is not None:
            with step_guard.updates(self, ()):
                self._for_each(lambda one: one.update(), lambda one, reason: one.refuse_update(reason))
                trainer_state.mark_stale(self._params)
            return
        update = super()._update
        original = patches.originals.get(getattr(update, "__func__", None))  # our patch is for Trainers with a store
        update = update if original is None else functools.partial(original, self)
        is_hooked = self._options.communication_hook is not None
        with step_guard.updates(self, self._gradients if self._clipping is None else ()):  # clipping has a fence
            before = trainer_state.updates_counted(self) if is_hooked else 0
            if not self._contains_sparse_weight and len(self._by_device) < 2:
                update(ignore_stale)
            else:
                self._update_each_device(update, ignore_stale)
            if is_hooked and trainer_state.updates_counted(self) != before:  # AMP has not skipped them
                for one in self._gradients:
                    one.updated()

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


class JoinHook(NamedTuple):
    """What `join` uses of a trainer; `join_hook` makes it.

    Attributes
    ----------
    process_set : ProcessSet
        The workers that train together.
    scope : str
        Begins the names of the trainer's operations; empty on a worker outside the process set.
    shared : sequence of Named
        The parameters that the workers train together.
    is_mean, is_summed_first : bool
        Whether updates use means over the workers; and whether allreduce_grads() gives sums, which update() divides.
    attach : callable
        Given a join, lets step(), allreduce_grads() and update() call its take_part(); given None, ends that.
    step, update : callable
        Given the factor of gradients, and ignore_stale_grad: do what the trainer's methods do outside of join().
    allreduce_grads : callable
        The same, given ignore_stale_grad.
    without_local_parameters : callable
        Makes a context in which updates leave local parameters alone.
    """

    process_set: ProcessSet
    scope: str
    shared: Sequence[Named]
    is_mean: bool
    is_summed_first: bool
    attach: Callable[[Any], None]
    step: Callable[[float, bool], None]
    allreduce_grads: Callable[[bool], None]
    update: Callable[[float, bool], None]
    without_local_parameters: Callable[[], ContextManager[None]]


def join_hook(trainer: DistributedTrainer) -> JoinHook:
    """The hook by which a join() steps a trainer.

    Raises
    ------
    ValueError
        The trainer cannot be used in a join().
    """
    company, options = trainer._company, trainer._options
    company.check_undivided("join()")
    if trainer._is_elastic:
        raise ValueError(
            "join() cannot be used with a trainer that has elastic=True, since join() needs all workers until its "
            "end. Leave elastic out, or let all workers make the same number of steps."
        )
    shared = [one for share in trainer._shares for one in share.named]

    def attach(join: Any) -> None:
        trainer._join = join

    def allreduce_grads(ignore_stale: bool) -> None:
        trainer._ignores_stale = ignore_stale
        trainer._allreduce_grads()

    @contextlib.contextmanager
    def without_local_parameters() -> Iterator[None]:
        numbers = {id(one.value) for one in shared}
        given = trainer._params
        trainer._params = [one if id(one) in numbers else LEFT_OUT for one in given]
        try:
            yield
        finally:
            trainer._params = given

    return JoinHook(
        company.process_set,
        company.scope,
        shared,
        options.reduce_method == "mean",
        options.sums_of_means,
        attach,
        trainer._step,
        allreduce_grads,
        trainer._apply,
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

"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from typing import Any, Callable, Iterator, Mapping, Sequence

from ..collectives.compression import Compression
from ..compat import arrays, errors, mxnet
from ..compat.mxnet import Parameter, gluon
from ..coordination import deadlock_check, step_label
from ..coordination.operation_names import KeptNames
from ..gradients import bucket_memory, parameter_groups
from ..gradients.bucket_plan import Reduction
from ..gradients.local_reducer import LocalGradients
from ..gradients.reducer import Gradients
from ..gradients.sparse_reducer import SparseGradients
from ..integrations import amp, horovod_scripts
from ..integrations.distributed_optimizer import DistributedOptimizer
from ..nn import sync_batch_norm
from ..parameters import broadcast, deferred_init, load_tracking, naming, placement, trainer_state
from ..parameters.aux_params import Averaging
from ..parameters.naming import Named
from ..sharded_optimizer import atomic_file, checkpoint
from ..sharded_optimizer.optimizer import StoreOptimizer
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .sparse_weights import Listed
from .trainer_options import TrainerOptions


def _without_store(original: Any) -> Any:
    """DistributedTrainer.__init__, which says what to do about an argument that only gluon.Trainer has."""

    @functools.wraps(original)
    def __init__(self: DistributedTrainer, *arguments: Any, **named: Any) -> None:
        if "kvstore" in named:
            raise TypeError(
                "DistributedTrainer takes no kvstore: it is one, or use gluon.Trainer(..., kvstore='mykv')."
            )
        original(self, *arguments, **named)

    return __init__


class DistributedTrainer(gluon.Trainer):
    """Trains the same parameters on all workers, each on data of its own.

    Gradients are averaged over the workers, so that the arguments of step() mean what they mean in one process with a
    worker's batch. Of row_sparse gradients only rows travel that some worker has. All workers start from the values of
    `root_rank`, also where the parameters are initialized later, in the first forward pass or anew. Creating a trainer
    is collective, as init() is, which it calls if nobody has; all workers must create their trainers in the same order,
    with the same arguments.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Matched between workers by key, or by position in a list or a ParameterDict; never by Parameter.name. A
        Parameter that is there twice is trained once.
    optimizer : str or Optimizer
        As for gluon.Trainer. Of a `DistributedOptimizer` the wrapped optimizer is taken, with a UserWarning, since
        gradients need averaging once.
    optimizer_params : dict, optional
        As for gluon.Trainer.
    compression : optional
        Type in which gradients travel between hosts: `Compression.none`, `Compression.fp16` or `Compression.bf16`.
        Others are in `compression_params`; give only one of the two.
    gradient_predivide_factor : float, optional
        Finite and above 0. Elsewhere it divides gradients before they are summed, so that sums of float16 stay in
        range, and multiplies the result. Here sums of 16 bits are formed in 32, and one scale is applied to the sum, so
        the result is the mean whatever the factor is. Only sums that stand in 16 bits need it, those of
        `gradients_after_allreduce`, which it divides.
    prefix : str, optional
        Part of the names in error messages.
    num_groups : int, optional
        Gradients are reduced in so many groups, as many gradients in each, in the order of `params`: those of a group
        and a dtype by one operation, whatever their size. 0: `bucket_bytes` divides them. With more groups than
        gradients each is a group.
    process_set : ProcessSet, optional
        The workers that train together. In a trainer of another worker all parameters stay local.
    root_rank : int, optional
        The worker, as a global rank, whose initial values count. In a process set that does not hold rank 0, the
        default means its first one.
    update_on_kvstore : bool, optional
        True: each worker runs the optimizer on its share of the parameters only, keeps the states of that share only,
        and gets the other weights from the workers that update them. The result is the same, in less time and memory;
        it needs step(), since allreduce_grads() would have no gradients to show, and one process set. False, the
        default: each worker updates all parameters itself.
    bucket_bytes : int, optional
        Gradients are put into shared memory next to each other, up to so many bytes, and each such bucket is reduced
        by one operation. 0: they stay where MXNet made them, and each is copied into shared memory and back (with
        `num_groups`, by one operation for each group). By default 16 MiB on one host, and on several 1 MiB, or 16 KiB
        for each worker where that is more: there a bucket that the next forward pass needs first overtakes the others
        on their way. The same on all workers; the division of gradients into buckets is that of the set's first one.
    reduce_method : str, optional
        'mean' or 'sum': what becomes of the gradients of several workers.
    gradients_after_allreduce : str, optional
        What the gradients of the parameters are between allreduce_grads() and update(): 'mean' or 'sum' over the
        workers, by default what `reduce_method` says. 'sum' with means is Horovod's way: update() divides by the number
        of workers too, and by step() the result is that of 'mean', up to roundings. Scripts written for Horovod may
        need it, such as one that clips at ``max_norm * hvd.size()``. The sum is divided by `gradient_predivide_factor`
        then. It needs one process set, and no `update_on_kvstore`.
    broadcast_period : int, optional
        0: parameters are broadcast at the start only. n > 0: in every n-th step, before the update, they are again
        overwritten on every worker and device with those of `root_rank`. -1: they are never broadcast, those whose
        initialization is deferred neither; the workers must see to equal values themselves.
    aux_sync_period : int, optional
        n > 0: in every n-th step the running means and variances of BatchNorm, as far as they are in `params`, are
        averaged over all devices of all workers, as `sync_aux_params` does; the step does not wait for it. 0: never, so
        call `sync_aux_params` before evaluating and saving.
    compression_params : dict, optional
        How gradients are compressed between hosts, as `MyKV.set_gradient_compression` takes it: for example
        ``{'type': 'topk', 'k': 0.01}``. row_sparse gradients travel as they are, but for 'fp16' and 'bf16'.
    parameter_process_sets : dict, optional
        Process sets of single parameters, in place of `process_set`. Its keys are Parameters, or keys of `params`.
        Where the value is None, or a set without this worker, the parameter stays local: it is neither broadcast nor
        reduced, and trained on this worker's gradients alone.
    elastic : bool, optional
        True: when a worker dies, training can go on without it, in `run_elastic`, which see. It needs a job that was
        started with ``mpirun --with-ft ulfm``, and all parameters on all workers.

    Raises
    ------
    NotImplementedError
        An argument has a value that is not built yet; or a parameter is sparse, and of a kind or in a release of MXNet
        that cannot be trained.
    TypeError, ValueError
        An argument is wrong, or a process set was not added.
    RuntimeError
        The workers have other sets of parameters, or other arguments; or `elastic` is set, and the job ends with its
        first process that does.
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
            )
            named = naming.named_parameters(params)
            options.check_parameters(named)
            placement.check_devices((one.name, one.value) for one in named)
            named_of = parameter_groups.divide(params, named, process_set, parameter_process_sets)
            global_process_set.position_of(root_rank)  # raises where it is no rank
            roots = {one: parameter_groups.root_of(one, root_rank, process_set) for one in sets}
            super().__init__(_in_mxnets_order(params), _unwrapped(optimizer), optimizer_params, None, None, False)
            self._store_optimizer = StoreOptimizer(process_set, self._optimizer) if update_on_kvstore else None
        except Exception as error:
            parameter_groups.refuse(sets, error)
            raise
        self._begin(options)
        self._meet_members(options, parameter_groups.scopes_of(sets), roots, named_of)

    def _begin(self, options: TrainerOptions) -> None:
        self._options = options
        # Devices when gradients were last looked at: of each parameter, and the parameters of each.
        self._held: list[Any] = [self] * len(self._params)  # sentinel: unequal to every `_data`
        self._where: list[Any] = [None] * len(self._params)
        self._places: list[set[Parameter]] = []
        self._ignores_stale = False
        self._freshness_is_shared = False
        self._is_told_of_means = options.gradients_after_allreduce is not None or options.reduce_method == "sum"
        self._join: Any = None  # the `join` around the training loop
        self._steps = 0
        self._until_aux_sync = options.aux_sync_period
        self._labelled: tuple[Any, str] = (None, "")  # what _label() was made of, and the label

    def _meet_members(
        self,
        options: TrainerOptions,
        scopes: dict[ProcessSet, str],
        roots: dict[ProcessSet, int],
        named_of: dict[ProcessSet | None, list[Named]],
    ) -> None:
        """Meet the other workers of all process sets, and keep the gradients of the parameters."""
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
        lines = options.lines(self._optimizer)
        self._meeting = (scopes, how, lines) if options.elastic else None  # for _meet_again()
        self._gradients = self._met(scopes, how, lines)
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        if local:
            self._gradients.append(LocalGradients(local, self._follow_devices))
        deadlock_check.made(self, DistributedTrainer._awaited_by, DistributedTrainer._refuse_awaited)
        if self._store_optimizer is not None:
            deadlock_check.saves_states(self._shares[0].scope, options.process_set)

    @property
    def _is_elastic(self) -> bool:
        """Whether it can go on with the workers that are left when one has died."""
        return self._meeting is not None

    def _meet_again(self) -> None:
        """Begin anew with the workers that are left, which have given the parameters equal values. Collective.

        Nothing that was recorded before may write gradients any more. With update_on_kvstore=True the states are empty
        afterwards, and the parameters that have values have owners among these workers.
        """
        self._join = None
        for gradients in self._gradients:
            gradients.release()
        self._gradients = []
        for share in self._shares:
            deferred_init.forget(f"{share.scope}/values/")
        self._shares = [share._replace(root=0) for share in self._shares]
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        if self._store_optimizer is not None:
            self._store_optimizer.release(list(self._store_optimizer.keys))
            self._store_optimizer.replace({}, None)
        bucket_memory.renew(self._params)
        self._gradients = self._met(*self._meeting, are_equal=True)
        if self._store_optimizer is not None:
            self._assign_owners()

    def _met(
        self, scopes: dict[ProcessSet, str], how: Reduction, options: Sequence[str], are_equal: bool = False
    ) -> list[Any]:
        """Meet the other members of each process set, give the parameters equal values, and keep their gradients."""
        met, sparse = [], []  # these at the end, since they wait for backward, after which the dense ones have begun
        for number, share in enumerate(self._shares):
            try:
                reduction = how._replace(process_set=share.process_set)
                meeting = f"{scopes[share.process_set]}/parameters"
                dense = [one for one in share.named if one.value._grad_stype == "default"]
                rest = [one for one in share.named if one.value._grad_stype != "default"]
                which = f"sparse gradients of {', '.join(one.name for one in rest) or 'no parameter'}"
                gradients = Gradients(
                    meeting, share.scope, dense, reduction, self._follow_devices, [*options, which], self._keys()
                )
                made = [gradients]
                if rest:
                    sparse.append(SparseGradients(share.scope, rest, reduction, self._follow_devices, self._keys()))
                    made.append(sparse[-1])
                if share.process_set is self._company.process_set:
                    self._company.meet()
                if self._options.broadcast_period >= 0:
                    known = broadcast.keep_equal(
                        share.process_set, share.named, share.scope, share.root, share.names, are_equal
                    )
                    for one in made:
                        one.have_values = known
            except Exception as error:
                for later in self._shares[number + 1 :]:
                    later.process_set.core.refuse(f"{scopes[later.process_set]}/parameters", str(error))
                raise
            if dense:
                met.append(gradients)
        return met + sparse

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Average the gradients over the workers and update the parameters.

        Returns at once, unless there are row_sparse gradients: then it waits until all workers have computed theirs.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch, of all its devices together; gradients are divided by it. It must be the same
            on all workers, whatever their numbers of devices: with others their weights would drift apart, so that is
            an error. An NDArray of one element is waited for.
        ignore_stale_grad : bool, optional
            A worker whose backward has not used a parameter contributes zeros; all workers update it if any has used
            it, and none if none has. This waits for the other workers.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set. The other workers get an
            MXNetError.
        MXNetError
            A parameter has no values yet, here or on another worker, or the workers do not take this step alike, for
            example with batches of different sizes or other learning rates. Mostly that is seen where the parameters
            are read. They are what they were before then, on all workers, which have counted one update more.
        """
        errors.check()
        factor = self._factor_of(batch_size, self._refuse)
        if self._join is None:
            self._step(factor, ignore_stale_grad)
        else:
            self._join.step(self, factor, ignore_stale_grad)

    def _factor_of(self, batch_size: Any, refuse: Callable[[str], None]) -> float:
        """What gradients are multiplied by; where that cannot be told, the other workers' call fails too."""
        if self._join is not None:
            return step_label.of_batch(self._scale, batch_size)
        with self._counted():
            try:
                return step_label.of_batch(self._scale, batch_size)
            except Exception as error:
                refuse(f"its batch size cannot be used: {error}")
                raise

    def _step(self, factor: float, ignore_stale_grad: bool) -> None:
        with self._counted():
            self._check_and_rescale_grad(factor)
            if not ignore_stale_grad:
                self._check_fresh(self._refuse)
            self._allreduce(ignore_stale_grad, self._label(factor))
            self._update(ignore_stale_grad)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Whatever happens to an update here, count it, since the other workers do."""
        counted = self._updates_counted()
        try:
            yield
        except BaseException as error:  # also Ctrl-C, after which this worker may go on
            for gradients in self._gradients if self._store_optimizer is not None else ():
                gradients.refuse_update(f"the step was broken off there: {error}")
            if self._updates_counted() == counted and any(one.has_begun() for one in self._gradients):
                trainer_state.count_update(self)
            raise

    def _label(self, factor: float, what: str = "a step") -> str:
        """What the operations of a step have in common on all workers; see coordination/step_label.py."""
        try:
            state = (factor, step_label.scale_of(self), step_label.learning_rate_of(self._optimizer), what)
        except Exception as error:
            refuse = self._refuse if what == "a step" else self._refuse_comparison
            refuse(f"its learning rate or scale cannot be used: {error}")
            raise
        if state != self._labelled[0]:
            self._labelled = (state, step_label.label(*state))
        return self._labelled[1]

    def _updates_counted(self) -> int:
        return sum(self._optimizer._index_update_count.values())

    def allreduce_grads(self) -> None:
        """Average the gradients over the workers, for use before update(): clip them, look at them.

        With ``gradients_after_allreduce='sum'`` they are summed, and update() divides them by the number of workers.

        Returns at once, unless there are row_sparse gradients, as step() does.

        Once update() was called with ignore_stale_grad=True, this takes stale gradients as zeros, as step() then does.

        Raises
        ------
        RuntimeError
            The trainer was made with update_on_kvstore=True.
        """
        self._require_local_updates("allreduce_grads")
        if not self._is_told_of_means:
            self._is_told_of_means = True
            horovod_scripts.tell_of_means(self, self._company.process_set, sys._getframe(1))
        if self._join is None:
            self._allreduce(self._ignores_stale)
        else:
            self._join.allreduce_grads(self, self._ignores_stale)

    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update the parameters from gradients that allreduce_grads() has averaged.

        Returns at once, but for ignore_stale_grad=True, which waits for the other workers, and for a batch size in an
        NDArray, which is waited for.

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
            The workers do not update alike, for example with batches of different sizes. It is raised where parameters
            are read; they are what they were before then, on all workers.
        """
        self._require_local_updates("update")
        factor = self._factor_of(batch_size, self._refuse_comparison)
        if self._join is None:
            self._apply(factor, ignore_stale_grad)
        else:
            self._join.update(self, factor, ignore_stale_grad)

    def _apply(self, factor: float, ignore_stale_grad: bool) -> None:
        self._ignores_stale = ignore_stale_grad
        with self._counted():
            self._check_and_rescale_grad(factor)
            if not ignore_stale_grad:
                self._check_fresh(self._refuse_comparison)
            self._compare(self._label(factor, "an update"))
            if ignore_stale_grad and not self._freshness_is_shared:
                for gradients in self._gradients:
                    gradients.share_freshness()
            self._update(ignore_stale_grad)

    def _compare(self, label: str) -> None:
        for number, gradients in enumerate(self._gradients):
            try:
                gradients.compare(label)
            except Exception as error:
                for later in self._gradients[number + 1 :]:
                    later.refuse_comparison(str(error))
                raise

    def _check_and_rescale_grad(self, scale: float) -> None:
        """Let updates multiply gradients by `scale`, and sums that stand for means also by what makes means of them."""
        super()._check_and_rescale_grad(scale * self._mean_of_sum() if self._options.sums_of_means else scale)

    def _mean_of_sum(self) -> float:
        """What sums after allreduce_grads() are multiplied by to be means."""
        of_all = self._company.process_set
        return self._options.predivide / of_all.size() if of_all.included() else 1.0

    def _refuse(self, reason: str) -> None:
        """Take no part in a step of the other workers."""
        for gradients in self._gradients:
            gradients.refuse(reason)
        sync_batch_norm.end_step()

    def _awaited_by(self) -> list[int]:
        """The ranks that have begun a step, or an update, that this one has not called for."""
        return sorted({rank for gradients in self._gradients for rank in gradients.awaited_by()})

    def _refuse_awaited(self, reason: str) -> None:
        """Let what the others wait for fail; they have counted it as an update."""
        for gradients in self._gradients:
            gradients.refuse_awaited(reason)
        sync_batch_norm.end_step()
        if any(gradients.has_begun() for gradients in self._gradients):
            trainer_state.count_update(self)

    def _refuse_comparison(self, reason: str) -> None:
        """Take no part in an update() of the other workers."""
        for gradients in self._gradients:
            gradients.refuse_comparison(reason)

    def _allreduce(self, ignore_stale: bool, label: str = "") -> None:
        sync_batch_norm.end_step()
        deadlock_check.stepped(self, DistributedTrainer._awaited_by, DistributedTrainer._refuse_awaited)
        for number, gradients in enumerate(self._gradients):
            try:
                gradients.allreduce(ignore_stale, label or "allreduce_grads()", compares=not label)
            except Exception as error:
                for later in self._gradients[number + 1 :]:
                    later.refuse(str(error))
                for averaging in self._due_averagings():
                    averaging.refuse(str(error))
                raise
        self._freshness_is_shared = ignore_stale

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._options.broadcast_period > 0:
            self._steps += 1
            if self._steps % self._options.broadcast_period == 0:
                for share in self._shares:
                    broadcast.broadcast_again(share.process_set, share.named, share.scope, share.root)
        for averaging in self._due_averagings():
            averaging.push()
        if not self._company.is_apart or getattr(self, "_amp_loss_scaler", None) is None:
            self._run_updaters(ignore_stale_grad)
        elif not amp.skips_step(self, self._company):
            with amp.without_scaler(self):
                self._run_updaters(ignore_stale_grad)

    def _due_averagings(self) -> list[Averaging]:
        """Count a step, and return what is to be averaged in it."""
        self._until_aux_sync -= 1
        if self._until_aux_sync != 0:
            return []
        self._until_aux_sync = self._options.aux_sync_period
        return self._averagings

    def _run_updaters(self, ignore_stale_grad: bool) -> None:
        with load_tracking.noting_failures(self._params):
            self._run_all_updaters(ignore_stale_grad)

    def _run_all_updaters(self, ignore_stale_grad: bool) -> None:
        if self._store_optimizer is not None:
            for number, gradients in enumerate(self._gradients):
                try:
                    gradients.update()
                except Exception as error:
                    for later in self._gradients[number + 1 :]:  # the sparse ones
                        later.refuse_update(str(error))
                    raise
            for parameter in self._params:
                for weight in parameter._data if parameter.grad_req != "null" else ():
                    weight._fresh_grad = False
            return
        given, places = self._params, self._places
        if not self._contains_sparse_weight and len(places) < 2:
            super()._update(ignore_stale_grad)
            self._push_fences()
            return
        # One call of an optimizer takes arrays of one device. MXNet passes over a Parameter without gradient.
        try:
            for place in places or [set(given)]:
                self._params = [
                    _ELSEWHERE if one not in place else Listed(one) if one._stype == "row_sparse" else one
                    for one in given
                ]
                super()._update(ignore_stale_grad)
        finally:
            self._params = given
        self._push_fences()

    def _push_fences(self) -> None:
        for gradients in self._gradients:
            gradients.fence()

    def save_states(self, fname: str) -> None:
        """Write the optimizer with its states to a file, which any Trainer of these parameters can load.

        The file is written whole or not at all. With update_on_kvstore=True it is collective, and the first worker
        writes. Otherwise each worker that calls it writes all states, which are the same on all, so that one should.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError
            The file cannot be written, and is what it was before.
        MXNetError
            With update_on_kvstore=True: another worker has failed, or does not call this within MYKV_CHECKPOINT_WAIT_S.
        """
        if self._store_optimizer is None:
            save = super().save_states  # which opens what it is given, a name or a descriptor, and closes it
            atomic_file.write(fname, lambda file: save(os.dup(file.fileno())))
            return
        self._assign_owners()
        checkpoint.save(self._store_optimizer, self._shares[0].scope, fname, True)

    def load_states(self, fname: str) -> None:
        """Go on with the optimizer and its states from a file that any Trainer of these parameters has saved.

        With update_on_kvstore=True it is collective, the first worker reads, and the parameters must have values;
        nothing is changed where it fails. Otherwise each worker reads.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError, ValueError
            The file cannot be read, is damaged, or is of another network.
        MXNetError
            With update_on_kvstore=True: another worker has failed, or does not call this within MYKV_CHECKPOINT_WAIT_S.
        """
        if self._store_optimizer is None:
            super().load_states(fname)
            return
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
        """The numbers by which the optimizer knows the parameters."""
        return {id(parameter): number for number, parameter in enumerate(self._params)}

    def _require_local_updates(self, method: str) -> None:
        if self._store_optimizer is not None:
            raise RuntimeError(
                f"{method}() needs gradients that each worker has all of, and with update_on_kvstore=True it has its "
                "share only: call step(), or make the DistributedTrainer with update_on_kvstore=False."
            )

    def _check_fresh(self, refuse: Callable[[str], None]) -> None:
        """Raise MXNet's warning of gradients that no backward has written, and tell the other workers before."""
        sentence = trainer_state.stale_gradient(self._params)
        if sentence is not None:
            refuse(sentence)
            raise UserWarning(sentence)

    def _check_mixed_precision(self) -> None:
        """Raise a ValueError if a worker's overflow cannot be made to skip the step on all workers."""
        if self._store_optimizer is not None:
            raise ValueError(amp.ON_STORE)
        if len(placement.places(self._params)) > 1:
            raise ValueError("AMP needs all parameters on the same devices: MXNet looks at all gradients together.")
        self._company.check("AMP")

    def _allreduce_grads(self) -> None:
        self.allreduce_grads()

    def _row_sparse_pull(self, parameter: Parameter, out: Any, row_id: Any, full_idx: bool = False) -> None:
        """Some rows of a row_sparse Parameter, for its row_sparse_data() and for saving it; it holds all of them."""
        for array in out if isinstance(out, (list, tuple)) else [out]:
            if all(array is not weight for weight in parameter._data):
                arrays.copy_rows(parameter._data[0], row_id, array, f"out of {parameter.name}")

    def _init_kvstore(self) -> None:
        # There is no store to set up, and MXNet's own version wants all parameters to be initialized.
        self._kv_initialized = True

    def _check_contexts(self) -> list | None:
        # MXNet's own one, under either name, refuses a network that is spread over devices.
        devices = [mxnet.contexts(parameter) for parameter in self._params]
        return devices[0] if devices else None

    _check_devices = _check_contexts

    def _follow_devices(self) -> None:
        """Give each device of the parameters an updater whose states live there, after reset_ctx moved them."""
        held = [one._data for one in self._params]
        if all(one is other for one, other in zip(held, self._held)):
            return
        self._held = held
        before, self._where = self._where, [one and one[0].context for one in held]
        old = mxnet.trainer_contexts(self)
        new = next((mxnet.contexts(p) for p in self._params if p._data is not None), old)
        moved = any(then is not None and then != now for then, now in zip(before, self._where))
        self._places = placement.places(self._params)
        if new == old and not moved:
            return
        states = self._updaters[0].get_states(dump_optimizer=False)
        self._updaters = [mxnet.updater_with(self._optimizer, states) for _ in new]
        mxnet.set_trainer_contexts(self, list(new))


class _Elsewhere:
    """Stands for a Parameter that is updated in another call."""

    grad_req = "null"


_ELSEWHERE = _Elsewhere()


def _unwrapped(optimizer: Any) -> Any:
    if not isinstance(optimizer, DistributedOptimizer):
        return optimizer
    warnings.warn(
        "DistributedTrainer was given a DistributedOptimizer and takes the optimizer that it wraps, since both of them "
        "average gradients: pass that one.",
        UserWarning,
        stacklevel=4,
    )
    return optimizer._optimizer


def _in_mxnets_order(params: Any) -> list[Parameter]:
    """The parameters in the order in which gluon.Trainer numbers them, by which states are saved; each once."""
    ordered = params if isinstance(params, (list, tuple)) else [params[key] for key in sorted(params.keys())]
    return list({id(parameter): parameter for parameter in ordered}.values())

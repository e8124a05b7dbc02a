"""Meetings of a DistributedTrainer's workers: when it is created, after another init(), and after the loss of a worker.

In a meeting the workers compare the trainer's parameters and options, and get equal values of the parameters.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Hashable, Mapping, Sequence

from ..compat import arrays, mxnet
from ..compat.mxnet import NDArray, Parameter, gluon
from ..coordination import deadlock_check, operation
from ..coordination.operation_names import KeptNames
from ..gradients import bucket_memory, parameter_groups
from ..gradients.bucket_plan import Reduction
from ..gradients.clipping import Clipping
from ..gradients.dense_reducer import DenseReducer
from ..gradients.local_reducer import LocalReducer
from ..gradients.reducer import SharedReducer, Task, WeakMethod
from ..gradients.sparse_reducer import SparseReducer
from ..gradients.step_guard import Told
from ..integrations import amp
from ..parameters import broadcast, deferred_init, placement, resumption, trainer_state
from ..parameters.aux_params import Averaging
from ..parameters.naming import Named
from ..sharded_optimizer import traits
from ..world import process
from ..world.process_set import ProcessSet
from .stand_ins import LEFT_OUT, Listed
from .trainer_options import TrainerOptions

_DEVICES = "devices: "  # prefix of one of the lines that all workers compare
# All workers compare some lines about their trainers. A trainer that outlives its init() adds this line, so that it
# does not match a new trainer of another worker, whose states differ.
_KEPT = "made before the last init()"
_NEVER_HELD = ("sentinel: unequal to every `_data`",)


class MeetingTrainer(gluon.Trainer):
    """A gluon.Trainer without a store that knows its workers, and the devices of its parameters.

    `SteppingTrainer` adds steps.
    """

    def _begin(self, options: TrainerOptions) -> None:
        self._options = options
        # At the last check of the gradients: each parameter's arrays, its device, and the parameters of each device.
        self._held: list[Any] = [_NEVER_HELD] * len(self._params)
        self._where: list[Any] = [None] * len(self._params)
        self._by_device: list[set[Parameter]] = []
        self._ignores_stale = False
        self._freshness_is_shared = False
        self._is_told_of_means = options.gradients_after_allreduce is not None or options.reduce_method == "sum"
        self._join: Any = None  # the `join` around the training loop
        self._losses = process.losses  # the value when the workers last met for this trainer
        self._steps = 0  # equal on all workers between two steps, even after a failed step
        self._begun: tuple[str, bool] | None = None  # while step() or update() runs: a step's label, ignore_stale_grad
        self._told = Told.ALL
        self._mark: Any = None  # stands for the current step, see batch_norm_calls.end_step()
        self._awaits_update = False  # allreduce_grads() was called, and update() was not
        self._refuses_update = False  # allreduce_grads() has failed here, so the next update() raises an error
        self._labelled: tuple[Any, str] = (None, "")  # cache of _label(): its input, and the label

    def _numbered_alike(self, sets: Sequence[ProcessSet], named: Sequence[Named]) -> dict[ProcessSet, str]:
        """Number the parameters in the same order on all workers, for the exchange of states. Collective.

        gluon.Trainer sorts the names in a ParameterDict. They contain a counter of the process, so the order may differ
        between workers: 'dense9' and 'dense10' on one, 'dense10' and 'dense11' on another.

        Returns
        -------
        dict
            The prefix of operation names in each process set.
        """
        positions = {id(one.value): position for position, one in enumerate(named)}
        scopes, is_common = parameter_groups.scopes_of(sets, [positions[id(parameter)] for parameter in self._params])
        if not is_common:
            self._params = [item.value for item in named]
            self._param2idx = {parameter.name: number for number, parameter in enumerate(self._params)}
            self._optimizer.param_dict = dict(enumerate(self._params))
        return scopes

    def _meet_members(
        self,
        options: TrainerOptions,
        scopes: dict[ProcessSet, str],
        roots: dict[ProcessSet, int],
        named_of: dict[ProcessSet | None, list[Named]],
    ) -> None:
        """Compare the trainers of all workers in all process sets, and create the reducers of the gradients."""
        self._clipping: Clipping | None = None
        suffix = f".{options.prefix}" if options.prefix else ""
        self._shares = [
            parameter_groups.Share(
                one, name + suffix, named_of.get(one, []), roots[one], KeptNames(one, *{name, name + suffix})
            )
            for one, name in scopes.items()
        ]
        local = [one.value for one in named_of.get(None, [])]
        self._workers = parameter_groups.TrainerWorkers(options.process_set, self._shares, bool(local))
        how = options.reduction(self._store_optimizer)
        devices = f"{_DEVICES}{len(mxnet.trainer_contexts(self) or ())}"
        lines = [*options.lines(self._optimizer), devices, *self._lines()]
        self._meeting = (scopes, how, lines)  # for _meet_again()
        self._generation = process.generation
        self._reducers = self._met(scopes, how, lines)
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        if local:
            self._reducers.append(LocalReducer(local, WeakMethod(self, "_follow_devices")))
        if options.clip_global_norm is not None:
            self._begin_clipping(options.clip_global_norm)
        self._warn_of_noise()
        deadlock_check.register(self, type(self)._awaited_by, type(self)._refuse_awaited)
        if self._store_optimizer is not None:
            deadlock_check.saves_states(self._shares[0].names, self._shares[0].scope, options.process_set)

    def _met(
        self, scopes: dict[ProcessSet, str], how: Reduction, options: Sequence[str], are_equal: bool = False
    ) -> list[Any]:
        """Compare the options in each process set, give the parameters equal values, and return their reducers."""
        met, sparse = [], []  # sparse reducers last: they block until backward ends, and dense reductions run meanwhile
        for number, share in enumerate(self._shares):
            try:
                reduction = how._replace(process_set=share.process_set)
                meeting = f"{scopes[share.process_set]}/parameters"
                dense = [item for item in share.named if item.value._grad_stype == "default"]
                rest = [item for item in share.named if item.value._grad_stype != "default"]
                which = f"sparse gradients of {', '.join(one.name for one in rest) or 'no parameter'}"
                task = Task(share.scope, dense, reduction, WeakMethod(self, "_follow_devices"), self._keys())
                dense_reducer = DenseReducer(task)
                dense_reducer.meet(meeting, [*options, which])
                dense_reducer.own_gradients()
                made = [dense_reducer]
                if rest:
                    sparse.append(SparseReducer(task._replace(named=rest)))
                    made.append(sparse[-1])
                if share.process_set is self._workers.process_set:
                    self._workers.meet()
                    if not self._workers.gradients_may_differ:
                        dense_reducer.watch_batches()
                if self._options.broadcast_period >= 0:
                    known = broadcast.keep_equal(
                        share.process_set, share.named, share.scope, share.root, share.names, are_equal
                    )
                    for reducer in made:
                        reducer.have_values = known
                else:
                    for reducer in made:
                        reducer.values_may_differ = True
            except Exception as error:
                for later in self._shares[number + 1 :]:
                    later.process_set._core.refuse(f"{scopes[later.process_set]}/parameters", str(error))
                raise
            if dense:
                met.append(dense_reducer)
        return met + sparse

    def _begin_clipping(self, most: float) -> None:
        self._workers.check("clip_global_norm")
        reducers = [
            reducer
            for reducer in self._reducers
            if isinstance(reducer, SharedReducer) and reducer.process_set is self._workers.process_set
        ]
        if self._workers.scope and not reducers:
            raise ValueError(
                "clip_global_norm needs a parameter in the trainer's process set, but parameter_process_sets names "
                "other sets for all parameters. Give the trainer the process set of some of them."
            )
        # Use the last reducer: a SparseReducer compares in each step, even if all its parameters are frozen.
        norm_reducer = reducers[-1] if reducers else None
        self._clipping = Clipping(most, self._reducers, norm_reducer, self._params, self._store_optimizer is None)

    def _warn_of_noise(self) -> None:
        """Log a warning if the optimizer may give the workers different weights. Not in a LocalTrainer, which allows
        different weights."""
        if self._store_optimizer is None:
            traits.warn_of_noise(self._optimizer, self._options.process_set.size())

    def _lines(self) -> list[str]:
        """Further lines that must be the same on all workers; for subclasses."""
        return []

    def _keys(self) -> dict[int, int]:
        """The parameters' indices in the optimizer, by id()."""
        return {id(parameter): number for number, parameter in enumerate(self._params)}

    def _assign_owners(self) -> list[Hashable]:
        """Assign owners to the parameters that have values, as the first step does. Returns keys with new owners."""
        return self._store_optimizer.assign(
            (key, parameter._data[0])
            for key, parameter in enumerate(self._params)
            if parameter.grad_req != "null" and parameter._data is not None
        )

    @property
    def _is_elastic(self) -> bool:
        """Whether training can continue with the remaining workers after a worker has died."""
        return self._options.elastic

    def _resume(self, replaces_states: bool = False) -> None:
        """Meet the workers of a new init(), at the first use of the trainer after this init(). Collective.

        All workers get rank 0's values, optimizer states, settings and counts. `replaces_states`: the caller replaces
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
        """Wait until all workers use their trainer again; a worker that waits in another call gets an error.

        `refusal`: why this worker cannot continue; then all workers get an error.
        """
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
        """The reason why training cannot continue after a change of ranks; None if it can."""
        if self._store_optimizer is None or replaces_states or not self._store_optimizer.keys:
            return None
        return resumption.STATES_ARE_LOST.format(whose=f"{self._shares[0].scope} (update_on_kvstore=True)")

    def _meet_again(self) -> None:
        """Restart with the remaining workers, which have given the parameters equal values. Collective.

        The caller must not run backward on graphs recorded earlier. With update_on_kvstore=True the states are empty
        afterwards, and the parameters with values have owners among the remaining workers.
        """
        if self._store_optimizer is not None:
            self._store_optimizer.clear()
        bucket_memory.renew(self._params)
        self._meet_once_more(are_equal=True)

    def _meet_once_more(self, are_equal: bool) -> None:
        scopes, how, lines = self._meeting
        self._losses = process.losses
        for reducer in self._reducers:
            reducer.release()
        local = [reducer for reducer in self._reducers if isinstance(reducer, LocalReducer)]
        self._reducers = local
        for share in self._shares:
            deferred_init.forget(f"{share.scope}/values/")
        self._shares = [share._replace(root=0) for share in self._shares]
        self._averagings = [Averaging(share.process_set, share.scope, share.named) for share in self._shares]
        self._reducers = [*self._met(scopes, how, [*lines, _KEPT], are_equal), *local]
        if self._clipping is not None:
            self._begin_clipping(self._clipping.most)
        if self._store_optimizer is not None:
            self._assign_owners()
        self._generation = process.generation

    def _options_of_world(self) -> tuple[int, list[str]]:
        """Bytes of a bucket, and the options that workers compare; both may depend on the number of workers."""
        _, how, lines = self._meeting
        return how.bucket_bytes, lines

    def _take_options_of_world(self, bucket_bytes: int, lines: list[str]) -> None:
        """Use another worker's options in the next meeting: a new worker creates this trainer in a world of its own."""
        scopes, how, mine = self._meeting
        devices = next(line for line in mine if line.startswith(_DEVICES))
        lines = [devices if line.startswith(_DEVICES) else line for line in lines]
        self._meeting = (scopes, how._replace(bucket_bytes=bucket_bytes), lines)

    def _more_arrays(self) -> dict[str, NDArray]:
        """Arrays that a commit of an ElasticState keeps in addition to weights and optimizer states."""
        return {}

    def _restore_arrays(self, kept: Mapping[str, NDArray]) -> None:
        """Continue from copies of the arrays of `_more_arrays`, which a commit has kept."""

    def _before_commit(self) -> None:
        """Make the weights equal on all workers before a commit of an ElasticState. Collective."""

    def _require_local_updates(self, method: str) -> None:
        if self._store_optimizer is not None:
            raise RuntimeError(
                f"{method}() needs all gradients on each worker, but with update_on_kvstore=True a worker has its "
                "share only. Call step(), or make the DistributedTrainer with update_on_kvstore=False."
            )

    def _check_mixed_precision(self) -> None:
        """Raise a ValueError unless all workers can skip a step together after an overflow on one worker."""
        if self._store_optimizer is not None:
            if self._clipping is None:
                self._begin_clipping(math.inf)  # computes the norm, which shows an overflow
            return
        if len(placement.by_device(self._params)) > 1:
            raise ValueError("AMP needs all parameters on the same devices, since MXNet checks all gradients together.")
        self._workers.check("AMP")

    def _follow_devices(self) -> None:
        """After reset_ctx has moved parameters, create an updater for each new device, with states on that device."""
        amp.warn_of_added_gradients(self._params)
        held = [parameter._data for parameter in self._params]
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

    def _update_each_device(self, update: Callable[[bool], None], ignore_stale: bool) -> None:
        # A call of an optimizer takes arrays of one device only. MXNet skips a Parameter with grad_req 'null'.
        given = self._params
        try:
            for part in self._by_device or [set(given)]:
                self._params = [
                    LEFT_OUT if one not in part else Listed(one) if one._stype == "row_sparse" else one for one in given
                ]
                update(ignore_stale)
        finally:
            self._params = given

    def _check_contexts(self) -> list | None:
        # MXNet's own version, under either name, rejects a network on several devices.
        devices = [mxnet.contexts(parameter) for parameter in self._params]
        return devices[0] if devices else None

    _check_devices = _check_contexts

    def _init_kvstore(self) -> None:
        # There is no store to set up, and MXNet's own version needs all parameters to be initialized.
        self._kv_initialized = True

    def _row_sparse_pull(self, parameter: Parameter, out: Any, row_id: Any, full_idx: bool = False) -> None:
        """Copy rows of a row_sparse Parameter, which holds all its rows, for row_sparse_data() and for saving."""
        for array in out if isinstance(out, (list, tuple)) else [out]:
            if all(array is not weight for weight in parameter._data):
                arrays.copy_rows(parameter._data[0], row_id, array, f"out of {parameter.name}")

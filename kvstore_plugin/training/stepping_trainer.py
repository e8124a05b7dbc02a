"""The step of a DistributedTrainer: its sequence, its counts, and how it reports failures to the other workers."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

from ..compat import errors, patches
from ..compat.mxnet import MXNetError
from ..coordination import deadlock_check, step_label
from ..gradients import step_guard
from ..gradients.reducer import UPDATE_REFUSED, Comparing, Reducer, SharedReducer
from ..gradients.step_guard import StepGuard, Told
from ..integrations import amp
from ..nn import batch_norm_calls
from ..parameters import broadcast, load_tracking, trainer_state
from ..sharded_optimizer import traits
from ..world import process
from .meeting_trainer import MeetingTrainer


class SteppingTrainer(MeetingTrainer):
    """A trainer that takes steps with its workers.

    `DistributedTrainer` adds the arguments, the two calls that make up a step, and files of states.
    """

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Average the gradients over the workers and update the parameters.

        Returns at once. It waits for the other workers in the first step, after the set of gradients has changed, with
        `ignore_stale_grad`, and with row_sparse gradients until all workers have computed theirs.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch, of all its devices together; gradients are divided by it. It must be the same
            on all workers. Different sizes are an error, since the weights would drift apart. The call waits for the
            value of an NDArray, which must have one element.
        ignore_stale_grad : bool, optional
            A worker whose backward has not used a parameter contributes zeros. All workers update the parameter if some
            worker has used it; otherwise no worker does. This waits for the other workers.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set. The other workers get an
            MXNetError.
        MXNetError
            A parameter has no values yet, here or on another worker; or the workers' steps differ, for example in batch
            size or learning rate. The error is usually raised when the parameters are read. The parameters are then
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
        """A whole step, including refusals and counts. `factor` multiplies the gradients in the update."""
        if self._awaits_update:
            with self._guard(Told.NOTHING):
                self._settle()
        with self._guard(Told.NOTHING):
            if not ignore_stale:
                step_guard.check_fresh(self._params, self._refuse)
            self._check_and_rescale_grad(factor)
            self._begun = self._label(factor), ignore_stale
            try:  # subclasses may override the two methods, as in gluon.Trainer
                self._allreduce_grads()
                self._update(ignore_stale)
            finally:
                self._begun = None

    def _guard(self, told: Told = Told.ALL) -> StepGuard:
        """A context manager for a step or an update. `told`: what the other workers know of it; see _end_failed()."""
        self._told, self._mark = told, object()
        return StepGuard(self, self._reducers, functools.partial(self._end_failed, self._steps))

    def _end_failed(self, steps: int, error: BaseException) -> None:
        """After a failed step or update: refuse the operations that other workers wait for, or note missing updates.

        `steps`: the number of steps counted before it.
        """
        if self._told is Told.NOTHING:
            self._refuse(f"the step has failed on that rank: {errors.reason_of(error)}")
        elif self._told is Told.SUMS and self._store_optimizer is None:
            load_tracking.note_error(error, self)
        if self._clipping is not None:
            self._clipping.refuse(f"the step was interrupted on that rank: {error}")
        if self._steps == steps and any(reducer.has_begun() for reducer in self._reducers):
            self._count_step(f"the step has failed on that rank: {error}")

    def _checked(self, method: str, batch_size: Any, ignore_stale: Any) -> tuple[float, bool]:
        """The factor of the gradients, and the flag; the other workers' call fails if an argument cannot be used."""
        what = "batch size"
        try:
            factor = step_label.of_batch(self._scale, batch_size)
            what = "ignore_stale_grad"
            return factor, bool(ignore_stale)
        except Exception as error:
            if self._join is not None:  # join() has not told the other workers of this step yet
                raise
            if method == "step" and self._awaits_update:
                self._settle()
            with self._guard():
                refuse = self._refuse if method == "step" else self._refuse_comparison
                refuse(f"its {what} cannot be used: {error}")
                raise

    def _settle(self) -> None:
        """After an allreduce_grads() without an update(): count an update if the other workers have counted it.

        All workers may have left out update(), for example to accumulate gradients or to skip a step that has
        overflowed. Then nothing is counted.
        """
        self._awaits_update = self._refuses_update = False
        due = [reducer for reducer in self._reducers if not reducer.compared]
        left_out = [reducer.is_left_out_by_all() for reducer in due]  # ask every reducer, even after a False
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

    def _check_reduced(self) -> None:
        """Raise an error in an update if allreduce_grads() has failed here."""
        if self._refuses_update:
            self._refuses_update = False
            raise MXNetError(UPDATE_REFUSED)

    def _compare(self, factor: float, ignore_stale_grad: bool) -> None:
        """Compare an update outside of step() with those of the other workers."""
        if not ignore_stale_grad:
            step_guard.check_fresh(self._params, self._refuse_comparison)
        label = self._label(factor, "an update")
        if self._clipping is not None:
            self._clipping.begin(self._freshness_is_shared, label, makes_comparison=False)
        shares_freshness = ignore_stale_grad and not self._freshness_is_shared
        compared: list[Reducer] = []
        self._told = Told.SUMS  # an exception of a signal handler may follow a comparison that has started

        def compare(reducer: Reducer) -> None:
            reducer.compare(label)
            compared.append(reducer)

        try:
            self._for_each(compare, lambda one, reason: one.refuse_comparison(reason))
        except BaseException as error:
            if shares_freshness:
                self._end_comparisons(compared, error)
            raise
        self._awaits_update = False
        if shares_freshness:
            self._end_comparisons(compared)
            self._for_each(lambda one: one.share_freshness(), lambda one, reason: one.refuse_freshness(reason))

    def _end_comparisons(self, compared: Sequence[Reducer], error: BaseException | None = None) -> None:
        """Wait for comparisons, before freshness is shared in those process sets whose comparison has succeeded.

        After an error, here or in a comparison, this worker refuses to share it in these sets.

        Raises
        ------
        MXNetError
            A comparison has failed.
        """
        succeeded, failures = [], [] if error is None else [error]
        for reducer in compared:
            try:
                reducer.await_comparison()
                succeeded.append(reducer)
            except MXNetError as failure:
                failures.append(failure)
        if failures:
            for reducer in succeeded:
                reducer.refuse_freshness(str(failures[0]))
            raise failures[0]

    def _for_each(self, call: Callable[[Reducer], None], refuse: Callable[[Reducer, str], None]) -> None:
        """Call all reducers; after an exception refuse the calls of later reducers, so that no worker waits."""
        for number, reducer in enumerate(self._reducers):
            try:
                call(reducer)
            except BaseException as error:
                for later in self._reducers[number + 1 :]:
                    refuse(later, errors.reason_of(error))
                raise

    def _check_and_rescale_grad(self, scale: float) -> None:
        """Make updates multiply gradients by `scale`; with `sums_of_means` also by the factor from sum to mean.

        MXNet's own method does nothing else for a trainer without a store.
        """
        process_set = self._workers.process_set
        if self._options.sums_of_means and process_set.included():
            scale *= self._options.predivide / process_set.size()
        self._optimizer.rescale_grad = scale

    def _refuse(self, reason: str) -> None:
        """Refuse a step of the other workers."""
        self._told = Told.ALL
        for reducer in self._reducers:
            reducer.refuse(reason)
        batch_norm_calls.end_step(self._params, self._workers.process_set, reason, self._mark)

    def _awaited_by(self) -> list[int]:
        """The ranks that have begun a step or an update that this rank has not begun."""
        return sorted({rank for reducer in self._reducers for rank in reducer.awaited_by()})

    def _refuse_awaited(self, reason: str) -> None:
        """Refuse the operation that the other ranks wait for; they have counted it as an update."""
        is_step = all(reducer.compared for reducer in self._reducers)  # otherwise an update() after the sums
        for reducer in self._reducers:
            reducer.refuse_awaited(reason)
        if is_step:
            batch_norm_calls.end_step(self._params, self._workers.process_set, reason)
        if any(reducer.has_begun() for reducer in self._reducers):
            trainer_state.count_update(self)
            self._refuses_update = False
            self._count_step(reason)

    def _refuse_comparison(self, reason: str) -> None:
        """Refuse an update() of the other workers."""
        for reducer in self._reducers:
            reducer.refuse_comparison(reason)

    def _allreduce_grads(self) -> None:
        if self._begun is None:  # allreduce_grads(), or the step() of a subclass
            self._require_local_updates("allreduce_grads")
            self._resume()
            self._mark = object()
        label, ignore_stale = self._begun or ("", self._ignores_stale)
        turns = [reducer.turns for reducer in self._reducers]
        try:
            batch_norm_calls.end_step(self._params, self._workers.process_set, "", self._mark)
            self._told, self._refuses_update = Told.ALL, False  # the `except` below handles errors from here on
            deadlock_check.note_step(self, type(self)._awaited_by, type(self)._refuse_awaited)
            if self._awaits_update:
                self._settle()
            self._awaits_update = not label or self._clipping is not None
            for reducer in self._reducers:
                compares = Comparing.NOTHING if label else Comparing.UPDATE
                if label and self._clipping is not None and self._clipping.is_made_by(reducer):
                    compares = Comparing.STEP
                reducer.allreduce(ignore_stale, label or "allreduce_grads()", compares)
            self._freshness_is_shared = ignore_stale
            if label:
                self._told = Told.SUMS
        except BaseException as error:
            if self._told is not Told.NOTHING:
                self._end_failed_sums(turns, errors.reason_of(error), is_step=bool(label))
            raise

    def _end_failed_sums(self, turns: Sequence[int], reason: str, is_step: bool) -> None:
        """After an error: refuse what reducers have not begun, so that no worker waits.

        `turns`: the turns of the reducers before the sums.
        """
        step_guard.refuse_unbegun(self._reducers, turns, reason)
        shared = [one for one in self._reducers if isinstance(one, SharedReducer)]
        told = {one.process_set for one in shared if not one.is_begun}  # their workers get an error
        others_update = told and any(one.process_set not in told for one in shared)
        if others_update or (is_step and any(one.is_begun_in_part for one in shared)):
            load_tracking.note_failure(self._params, self)
        if is_step:
            self._told = Told.ALL if told else Told.SUMS
            return
        for reducer in self._reducers:
            if not reducer.compared:
                reducer.refuse_comparison(reason)
        if any(reducer.has_begun() for reducer in self._reducers):  # the other workers will count an update()
            trainer_state.count_update(self)
            self._count_step(reason)
        self._refuses_update = True

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._begun is None:  # a subclass calls this method in a step() of its own
            self._require_local_updates("update")
            self._resume()
            self._ignores_stale = ignore_stale_grad
            self._check_reduced()
            with self._guard():
                self._compare(step_label.value_of(self._optimizer.rescale_grad), ignore_stale_grad)
                self._count_and_update(ignore_stale_grad, "")
        else:
            self._count_and_update(ignore_stale_grad, self._begun[0])

    def _count_and_update(self, ignore_stale: bool, label: str) -> None:
        """Count a step, and update from the reduced gradients; `label`: the step's, empty outside of step()."""
        self._count_step()
        if self._clipping is None:
            self._make_updates(ignore_stale)
            return
        factor = step_label.value_of(self._optimizer.rescale_grad)
        self._clip(factor, label)  # from here on all workers have counted, even if some fail
        try:
            self._make_updates(ignore_stale)
        except MXNetError:
            self._clipping.end(factor, broken=True)
            raise
        self._clipping.end(factor)

    def _clip(self, factor: float, label: str) -> None:
        try:
            if label:
                self._clipping.begin(self._freshness_is_shared, label, makes_comparison=True)
            self._clipping.clip(factor)
        except MXNetError:
            raise  # an error of the step, which the other workers get too
        except BaseException:  # the other workers update, and get an error in their next step
            load_tracking.note_failure(self._params, self)
            raise

    def _make_updates(self, ignore_stale: bool) -> None:
        """Update, unless AMP skips the step."""
        is_scaled = vars(self).get("_amp_loss_scaler") is not None
        if is_scaled and self._store_optimizer is not None:
            if amp.skips_after(self, not self._clipping.is_finite()):
                for reducer in self._reducers:
                    reducer.drop_updates()
            else:
                self._run_updaters(ignore_stale)
        elif not is_scaled or not self._workers.gradients_may_differ:
            self._run_updaters(ignore_stale)  # if scaled, MXNet's own update checks for overflow
        elif not amp.skips_step(self, self._workers):
            with amp.without_scaler(self):
                self._run_updaters(ignore_stale)
        self._told = Told.ALL

    def _count_step(self, refusal: str | None = None) -> None:
        """Count a step, once on each worker, and push its periodic operations.

        `refusal`: why this worker does not take the step; then these operations fail on the other workers.
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
        original = patches.originals.get(getattr(update, "__func__", None))  # a patch for Trainers with a store
        update = update if original is None else functools.partial(original, self)
        is_hooked = self._options.communication_hook is not None
        with step_guard.updates(self, self._reducers if self._clipping is None else ()):  # clipping has its own fence
            before = trainer_state.updates_counted(self) if is_hooked else 0
            if not self._contains_sparse_weight and len(self._by_device) < 2:
                update(ignore_stale)
            else:
                self._update_each_device(update, ignore_stale)
            if is_hooked and trainer_state.updates_counted(self) != before:  # AMP has not skipped the updates
                for reducer in self._reducers:
                    reducer.updated()

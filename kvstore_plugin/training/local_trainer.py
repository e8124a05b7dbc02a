"""LocalTrainer: workers train alone for a period, then average their changes."""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

import numpy as np

from ..collectives import compression as compressions
from ..collectives.compression import Compression
from ..compat import arrays
from ..compat.arguments import positive_number, whole_number
from ..compat.mxnet import MXNetError, NDArray, mx
from ..coordination.operation import Turn
from ..coordination.uninterrupted import uninterrupted
from ..gradients import parameter_groups
from ..gradients.clipping import Clipping
from ..gradients.local_reducer import LocalReducer
from ..gradients.reducer import Comparing, SharedReducer, WeakMethod
from ..parameters import load_tracking
from ..sharded_optimizer import atomic_file, traits
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .outer_optimizer import Meetings, OuterOptimizer, OuterOptions, check_state
from .trainer import DistributedTrainer

_DTYPES = ("float32", "float64")


class LocalTrainer(DistributedTrainer):
    """A DistributedTrainer whose workers make most steps alone and meet once per period.

    Between meetings `step` sends nothing and waits for no other worker. In a meeting the changes of all workers since
    the last meeting are averaged, and an outer optimizer applies the average to the common weights, which are equal in
    bits on all workers afterwards (outer_optimizer.py has the formulas and their sources). The defaults are local SGD:
    the mean of the weights. ``outer_momentum=0.9, nesterov=True`` is BMUF with Nesterov block momentum and, with an
    `outer_learning_rate` of 0.7, the outer optimizer of DiLoCo.

    Workers may make different numbers of steps. At the end of an epoch, and before evaluation and saving, all workers
    call `synchronize`. Afterwards their weights, and running means of BatchNorm, are equal.

    Parameters
    ----------
    params, optimizer, optimizer_params
        As for `DistributedTrainer`. Parameters must be dense, of float32 or float64, and have values on all workers
        when the first local step is made. The optimizer updates each worker's weights, with its own states on each
        worker.
    period : int, optional
        Local steps between two meetings, at least 1. Give this or `period_seconds`.
    period_seconds : float, optional
        Seconds between two meetings, by each worker's own clock: slow workers make fewer steps. Above 0, and long
        enough for several steps of the slowest worker.
    warmup_steps : int, optional
        Number of initial steps made together, as with `DistributedTrainer` (post-local SGD).
    outer_learning_rate : float, optional
        Factor of the averaged change. Above 0.
    outer_momentum : float, optional
        Share of the last outer change that is added to the next. From 0 to below 1. Chen and Huo use 1 - 1/N with N
        workers.
    nesterov : bool, optional
        Nesterov's form of the outer momentum.
    reset_momentum : bool, optional
        Reset the states of the worker's own optimizer after each meeting. Not with an optimizer that corrects its
        states by the number of updates, such as Adam.
    overlap : bool, optional
        True: the average is exchanged during the next period's steps and applied in the next meeting. Then weights
        differ between workers by the steps that are not averaged yet, until `synchronize`.
    compression, compression_params : optional
        Compression of changes between hosts, as for `DistributedTrainer`. Your own compressor class is rejected.
    process_set, root_rank, prefix : optional
        As for `DistributedTrainer`. All workers begin the first local step with the weights that `root_rank` has at
        that moment. A worker outside the process set trains alone.
    clip_global_norm : float, optional
        As for `DistributedTrainer` in the warm-up. A local step clips by the norm of this worker's own gradients.
    elastic : bool, optional
        True: when a worker dies, training can continue without it, in `run_elastic`. Each commit calls `synchronize`.

    Raises
    ------
    NotImplementedError
        A parameter is sparse or of float16.
    TypeError, ValueError
        An argument is wrong.
    RuntimeError
        The workers have different parameters or arguments; or `elastic` is set, and the job cannot outlive one of its
        processes.

    Examples
    --------
    >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=16)
    >>> for epoch in range(2):
    ...     for images, labels in loader:
    ...         with autograd.record():
    ...             loss = loss_of(net(images), labels)
    ...         loss.backward()
    ...         trainer.step(len(images))
    ...     trainer.synchronize()  # at the end of an epoch all workers have the same weights
    """

    _when_steps_differ = (
        "it waits in a meeting of a LocalTrainer. Call synchronize() on all workers before other calls that wait."
    )

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict | None = None,
        *,
        period: int | None = None,
        period_seconds: float | None = None,
        warmup_steps: int = 0,
        outer_learning_rate: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        reset_momentum: bool = False,
        overlap: bool = False,
        compression: Any = Compression.none,
        compression_params: Mapping[str, Any] | None = None,
        process_set: ProcessSet = global_process_set,
        root_rank: int = 0,
        prefix: str | None = None,
        clip_global_norm: float | None = None,
        elastic: bool = False,
    ) -> None:
        process.require()
        try:
            self._period, self._period_seconds = _checked_periods(period, period_seconds)
            self._warmup_until = whole_number("warmup_steps", warmup_steps, 0)  # in steps of this trainer
            self._outer_options = OuterOptions(
                positive_number("outer_learning_rate", outer_learning_rate),
                _momentum(outer_momentum),
                bool(nesterov),
                bool(overlap),
                _between_hosts(compression, compression_params),
            )
        except Exception as error:
            parameter_groups.refuse(parameter_groups.sets_of(process_set, None), error)
            raise
        self._resets_momentum = bool(reset_momentum)
        self._meetings: Meetings | None = None  # None on a worker outside the process set
        self._outer: OuterOptimizer | None = None  # created in the first local step
        self._outer_state: dict | None = None  # loaded and not used yet
        self._exchange_has_failed = False  # whether the last exchange before local steps gave no worker a result
        self._steps_since = 0  # local steps since the last meeting
        self._period_began = 0.0
        super().__init__(
            params,
            optimizer,
            optimizer_params,
            compression,
            process_set=process_set,
            root_rank=root_rank,
            prefix=prefix,
            compression_params=compression_params,
            clip_global_norm=clip_global_norm,
            elastic=elastic,
        )
        if self._shares:
            self._meetings = Meetings(self._shares[0].process_set, self._shares[0].scope)
        if self._resets_momentum:
            _check_can_reset(self._optimizer)

    @property
    def _warmup_left(self) -> int:
        """Number of steps that the workers still make together. A failed step counts too, on all workers."""
        return max(self._warmup_until - self._steps, 0)

    @property
    def gradient_norm(self) -> NDArray | None:
        """The global norm of the gradients in the last step of this worker, before they were clipped.

        An array of float32 with shape (1,). In the warm-up the norm of the mean over the workers, and in local steps
        the norm of this worker's own gradients. None without `clip_global_norm` and before the first step. Reading its
        value waits for the step.

        Examples
        --------
        >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", period=4, clip_global_norm=1.0)
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.step(len(images))
        >>> print(f"norm {float(trainer.gradient_norm):.3f} on rank {mykv.rank()}")
        """
        return super().gradient_norm

    def _warn_of_noise(self) -> None:
        pass

    def _lines(self) -> list[str]:
        return [
            f"period={self._period}",
            f"period_seconds={self._period_seconds}",
            f"warmup_steps={self._warmup_until}",
            f"outer optimizer: {self._outer_options}",
            f"reset_momentum={self._resets_momentum}",
        ]

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update this worker's weights from its own gradients, and meet the others when a period has ended.

        Returns at once. With ``overlap=True`` a meeting waits until the previous meeting has ended. The first local
        step, and the first after `load_states`, waits until all workers make it or call `synchronize`, and begins to
        send the weights of `root_rank` to all workers.

        Parameters
        ----------
        batch_size : number or NDArray
            Size of this worker's batch. After the warm-up it may differ between workers.
        ignore_stale_grad : bool, optional
            As for gluon.Trainer, after the warm-up.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set.
        MXNetError
            A meeting has failed, for example because a worker has ended. It has changed no weight on any worker. The
            error is raised where weights are read; with overlap by the next meeting. Or, in the first local step: a
            parameter has no values yet, here or on another worker, or only some workers have called `load_states`.
        RuntimeError
            Within `join`, which local steps do not need; or a parameter that was frozen in the first local step is
            trained now.

        Examples
        --------
        >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=4)
        >>> for images, labels in loader:
        ...     with autograd.record():
        ...         loss = loss_of(net(images), labels)
        ...     loss.backward()
        ...     trainer.step(len(images))  # every fourth step averages the weights over the workers
        """
        if self._join is not None:
            raise RuntimeError("A LocalTrainer needs no join(): workers may make different numbers of steps.")
        if not self._shares:  # this worker is outside the process set
            super().step(batch_size, ignore_stale_grad)
            return
        if self._warmup_left > 0:
            super().step(batch_size, ignore_stale_grad)
            return
        self._resume()
        self._begin_if_due()
        super().step(batch_size, ignore_stale_grad)
        self._steps_since += 1
        if self._is_due():
            with uninterrupted():
                self._outer.meet(has_steps=True, goes_on=True)
                now, seconds = time.monotonic(), self._period_seconds
                # Periods begin at multiples of their length. Otherwise the delays of a slow worker would add up, and
                # the other workers would wait for it.
                self._after_meeting(now if seconds is None else now - (now - self._period_began) % seconds)

    def synchronize(self) -> None:
        """Make the weights equal on all workers. Collective; waits until all workers have called it.

        Workers may have made different numbers of steps: a worker that waits here joins the meetings of the others, and
        contributes no change. If no worker has made steps since the last call, the weights stay the same. During the
        warm-up, and on a worker outside the process set, this is a no-op.

        Raises
        ------
        MXNetError
            A meeting has failed, on all workers; or as in the first local step.

        Examples
        --------
        >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=4)
        >>> with autograd.record():
        ...     loss = loss_of(net(images), labels)
        >>> loss.backward()
        >>> trainer.step(len(images))
        >>> trainer.synchronize()  # now all workers have the same weights
        >>> mykv.check_in_step(net.collect_params())
        """
        if not self._shares or self._warmup_left > 0:
            return
        self._resume()
        self._begin_if_due()  # even on a worker without a batch: the others may have made steps
        with uninterrupted():
            self._outer.finish_pending()
        others_go_on = True
        while others_go_on:
            with uninterrupted():
                others_go_on = self._outer.meet_now(has_steps=self._steps_since > 0, goes_on=False) > 0
                self._after_meeting(time.monotonic())

    def _resume(self, replaces_states: bool = False) -> None:
        if self._shares and self._generation != process.generation:
            raise RuntimeError(
                f"{self._shares[0].scope} is a LocalTrainer of an earlier init(), and cannot meet the workers of this "
                "init(). Broadcast the parameters, then create another LocalTrainer."
            )

    def allreduce_grads(self) -> None:
        """Not available: gradients stay on their worker.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError("A LocalTrainer averages weights and not gradients: call step().")

    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Not available: call `step`.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError("A LocalTrainer has no update() apart from allreduce_grads(): call step().")

    def save_states(self, fname: str) -> None:
        """Write this worker's optimizer states to a file, and the outer optimizer's to ``fname + '.outer'``.

        Call it after `synchronize`: on each worker with its own name, or on one worker, whose states all workers then
        load.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError
            A file cannot be written. An existing file is unchanged.
        RuntimeError
            There were local steps since the last `synchronize`.

        Examples
        --------
        >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=4)
        >>> trainer.synchronize()
        >>> trainer.save_states(f"states-of-worker-{mykv.rank()}")
        """
        has_loaded = self._outer_state is not None
        if not has_loaded and (self._steps_since or (self._outer is not None and self._outer.is_pending)):
            raise RuntimeError(
                "save_states() of a LocalTrainer needs equal weights: call synchronize() on all workers first."
            )
        super().save_states(fname)
        # `warmup_left` is an array, since MXNet's format holds only arrays, and at least one array.
        state = {"warmup_left": mx.nd.array([self._warmup_left]), **self._more_arrays()}
        atomic_file.write(f"{fname}.outer", lambda file: mx.nd.save(f"/proc/self/fd/{file.fileno()}", state))

    def load_states(self, fname: str) -> None:
        """Load what `save_states` has written. Call it on all workers, between the same steps.

        In the next step all workers restart from the weights and the outer states of `root_rank`. Local steps since the
        last meeting, and a meeting in progress, are dropped.

        Parameters
        ----------
        fname : str

        Raises
        ------
        OSError, ValueError, MXNetError
            A file cannot be read, belongs to another network, or was written during the warm-up although this trainer
            makes local steps already.

        Examples
        --------
        >>> trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=4)
        >>> trainer.save_states(f"states-of-worker-{mykv.rank()}")
        >>> trainer.load_states(f"states-of-worker-{mykv.rank()}")
        """
        state = mx.nd.load(f"{fname}.outer")
        warmup_left = int(state.pop("warmup_left").asnumpy()[0])
        if warmup_left > 0 and self._outer is not None:
            raise ValueError(
                f"{fname} was written during the warm-up, and this LocalTrainer makes local steps already: load it "
                "into a new LocalTrainer."
            )
        if self._outer is not None:
            check_state(state, self._trained(), self._outer_options)
        super().load_states(fname)
        self._warmup_until = self._steps + warmup_left
        self._outer_state = state
        self._steps_since = 0

    def _more_arrays(self) -> dict[str, NDArray]:
        if self._outer_state is not None:  # loaded and not used yet
            return self._outer_state
        return self._outer.state() if self._outer is not None else {}

    def _restore_arrays(self, kept: Mapping[str, NDArray]) -> None:
        self._outer_state = dict(kept) or None

    def _before_commit(self) -> None:
        if self._outer is not None:
            self.synchronize()

    def _meet_again(self) -> None:
        """As in DistributedTrainer. Local steps begin again, with the velocities given to `_restore_arrays`."""
        self._outer = None
        self._steps_since = 0
        if not self._reducers_together():  # local steps had begun; restored counts may repeat the warm-up
            self._reducers = []
        super()._meet_again()
        self._meetings = Meetings(self._shares[0].process_set, self._shares[0].scope)

    def _trained(self) -> list[Any]:
        return [one.value for one in self._shares[0].named if one.value.grad_req != "null"] if self._shares else []

    def _is_due(self) -> bool:
        if self._period is not None:
            return self._steps_since >= self._period
        return time.monotonic() - self._period_began >= self._period_seconds

    def _begin_if_due(self) -> None:
        """Begin local steps, the first time and after load_states(). Waits for the other workers."""
        if self._outer is not None and self._outer_state is None:
            return
        share, state = self._shares[0], self._outer_state
        after = "" if state is None else " after load_states(), which all workers must call between the same steps"
        call = f"the first local step of {share.scope}{after}"
        self._exchange_has_failed = False
        try:
            self._meet(call)
        except BaseException as error:
            if self._exchange_has_failed or isinstance(error, MXNetError):  # raised on all workers
                raise
            # E.g. Ctrl-C: the other workers do not know of it, and may begin.
            reason = f"{type(error).__name__} has interrupted {call} on rank {process.rank()}"
            self._meetings.refuse_begin(len(self._trained()), bool(state), reason)
            raise
        with uninterrupted():
            load_tracking.forget(self._params)
            # From now on sum gradients over this worker's devices only.
            self._reducers = [_LocalSteps(self._params, WeakMethod(self, "_follow_devices"))]
            if self._clipping is not None:
                self._clipping = Clipping(self._clipping.most, self._reducers, None, self._params, True)
            self._outer = OuterOptimizer(self._meetings, [item.value for item in share.named], self._outer_options)
            # Workers' values may have changed since the trainer was created, but meetings need a common point.
            self._outer.begin(share.root, state or {})
            self._outer_state = None
            self._steps_since = 0
            self._period_began = time.monotonic()

    def _meet(self, call: str) -> None:
        """Wait until all workers make the same call and have values of all parameters.

        Raises
        ------
        DeferredInitializationError, MXNetError
            A parameter has no values on this worker, or on another; or the workers' calls differ.
        """
        together = self._reducers_together()
        for reducer in together:
            reducer.check_values(lambda numbers: self._exchange(call, numbers))
        if not together:
            self._exchange(call, [])

    def _exchange(self, call: str, numbers: Sequence[int]) -> np.ndarray:
        turn = Turn(self._meetings.process_set, self._meetings.whole, call)
        try:
            with turn:
                self._check_begin()
                return turn.meet(call, numbers)
        except BaseException as error:
            self._exchange_has_failed = turn.fails_for_all()
            if self._exchange_has_failed:  # in a meeting, workers also wait for changes
                self._meetings.refuse_changes(str(error))
                self._redefer(str(error))
            raise

    def _reducers_together(self) -> list[SharedReducer]:
        """The reducers of the steps made together; none after the first local step."""
        return [reducer for reducer in self._reducers if isinstance(reducer, SharedReducer)]

    def _redefer(self, reason: str) -> None:
        for reducer in self._reducers_together():
            reducer.redefer(reason)

    def _awaited_by(self) -> list[int]:
        """The ranks that wait for this rank in a meeting, or in a step made together."""
        meetings = [] if self._meetings is None else self._meetings.awaited_by()
        return sorted({*super()._awaited_by(), *meetings})

    def _refuse_awaited(self, reason: str) -> None:
        """Refuse the meeting or the step in which the other ranks wait."""
        if self._meetings is not None and self._meetings.awaited_by():
            self._meetings.refuse(reason)
            self._redefer(reason)
        else:
            super()._refuse_awaited(reason)

    def _check_begin(self) -> None:
        """Raise an error if the parameters do not allow local steps, or the loaded state has other parameters."""
        trained = [one for one in self._shares[0].named if one.value.grad_req != "null"]
        with_values = [item for item in trained if item.value._data is not None]
        for name, parameter, _ in with_values:
            _check_dtype(name, parameter)
        if self._outer_state is not None and len(with_values) == len(trained):
            check_state(self._outer_state, self._trained(), self._outer_options)

    def _after_meeting(self, period_began: float) -> None:
        self._steps_since = 0
        self._period_began = period_began
        if self._resets_momentum:
            for updater in self._updaters:  # each creates new states in its next update
                updater.states.clear()
                updater.states_synced.clear()


class _LocalSteps(LocalReducer):
    """The gradients of local steps. Other workers wait for this worker in meetings only."""

    def __init__(self, parameters: Any, when_moved: Any) -> None:
        super().__init__([parameter for parameter in parameters if parameter.grad_req != "null"], when_moved)
        self._frozen = [parameter for parameter in parameters if parameter.grad_req == "null"]

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        """Sum each gradient over the devices of this worker."""
        thawed = next((parameter for parameter in self._frozen if parameter.grad_req != "null"), None)
        if thawed is not None:
            raise RuntimeError(
                f"Parameter {thawed.name} was frozen (grad_req 'null') when the local steps began, so no meeting "
                "averages it: make a new LocalTrainer after a change of grad_req."
            )
        super().allreduce(ignore_stale, label, compares)


def _check_dtype(name: str, parameter: Any) -> None:
    dtype = arrays.dtype_name(parameter._data[0].dtype)
    if parameter._stype != "default" or dtype not in _DTYPES:
        raise NotImplementedError(
            f"LocalTrainer takes dense parameters of float32 and float64, but {name} is {parameter._stype} of {dtype}."
        )


def _between_hosts(compression: Any, compression_params: Any) -> str:
    """The core's text for the compression of changes between hosts."""
    chosen = compressions.choose(compression, compression_params)
    if isinstance(chosen, compressions.UserCompression):
        raise ValueError(
            f"LocalTrainer cannot use the compressor {compression!r} in its meetings. Use an attribute of Compression, "
            "or compression_params."
        )
    return chosen.wire


def _checked_periods(steps: Any, seconds: Any) -> tuple[int | None, float | None]:
    checked = (
        None if steps is None else whole_number("period", steps, 1),
        None if seconds is None else positive_number("period_seconds", seconds),
    )
    if (steps is None) == (seconds is None):
        raise ValueError("LocalTrainer needs either period (local steps) or period_seconds.")
    return checked


def _check_can_reset(optimizer: Any) -> None:
    if traits.corrects_by_count(optimizer):
        raise ValueError(
            f"reset_momentum=True does not work with {type(optimizer).__name__}, which corrects its states by the "
            "number of updates since the first. Leave reset_momentum out, or use an optimizer such as SGD."
        )


def _momentum(value: Any) -> float:
    number = 0.0 if value == 0 else positive_number("outer_momentum", value)
    if number >= 1:
        raise ValueError(f"outer_momentum must be at least 0 and below 1, not {value!r}.")
    return number

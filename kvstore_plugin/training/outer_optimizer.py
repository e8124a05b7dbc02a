"""The outer optimizer of a LocalTrainer: averages the workers' changes, and applies the average to a common point.

With s the common point, w_i the weights of worker i and c the number of workers that have made steps, a meeting is

    d = sum_i (w_i - s) / c
    v = outer_momentum * v + outer_learning_rate * d
    s = s + v                                               without nesterov
    s = s + outer_momentum * v + outer_learning_rate * d    with nesterov

This is blockwise model-update filtering, Chen and Huo, "Scalable training of deep learning machines by incremental
block training with intra-block parallel optimization and blockwise model-update filtering", ICASSP 2016, with classical
and Nesterov block momentum; the latter is also the outer optimizer of DiLoCo, Douillard et al. 2023. With a momentum of
0 and a learning rate of 1 it is the averaging of local SGD (Lin et al. 2018).
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple, Sequence

from ..compat import arrays, mxnet
from ..compat.mxnet import MXNetError, NDArray, Parameter, mx
from ..coordination.operation import Turn
from ..parameters.aux_params import is_auxiliary
from ..world import process
from ..world.process_set import ProcessSet

_CALL = "a meeting of a LocalTrainer"


class Meetings:
    """The names of the operations of a trainer's meetings, and queries about ranks that wait in these operations.

    A meeting has two operations. The first, named `whole`, sums counts and running means. The second, named `name`,
    sums the changes. Both have the same number, that of the call of `whole`. So the changes of a meeting that a rank
    did not finish cannot match a later meeting.
    """

    def __init__(self, process_set: ProcessSet, scope: str) -> None:
        self.process_set = process_set
        self.name = f"{scope}/meeting"
        self.whole = f"{self.name}/whole"

    def awaited_by(self) -> list[int]:
        """The ranks that wait for this rank in a meeting."""
        come = self.process_set._core.waiting_for_this([self.whole])
        return sorted({rank for ranks in come for rank in ranks})

    def refuse(self, reason: str) -> None:
        """Make the next meeting fail on all workers, with the reason."""
        self.process_set._core.refuse(self.whole, reason)
        self.refuse_changes(reason)

    def refuse_changes(self, reason: str) -> None:
        """Refuse the changes of a meeting whose first operation this rank has begun or refused."""
        self.process_set._core.refuse(self.name, reason, turn_of=self.whole)

    def of_begin(self, count: int, with_velocities: bool) -> list[str]:
        """The names of the broadcasts of weights and of their velocities in OuterOptimizer.begin()."""
        kinds = ("weight", "velocity") if with_velocities else ("weight",)
        return [f"{self.name}/{kind}/{number}" for kind in kinds for number in range(count)]

    def refuse_begin(self, count: int, with_velocities: bool, reason: str) -> None:
        """Refuse the broadcasts of OuterOptimizer.begin(), and the changes of a meeting."""
        for name in [*self.of_begin(count, with_velocities), self.name]:
            self.process_set._core.refuse(name, reason, turn_of=self.whole)


class OuterOptions(NamedTuple):
    """Settings of the outer optimizer; the same on all workers."""

    learning_rate: float
    momentum: float
    nesterov: bool
    overlap: bool
    wire: str  # compression of changes between hosts, in the core's form; empty: none


class _Weight:
    """One parameter with its common point (`anchor`), velocity and change, all as arrays of mx.nd."""

    def __init__(self, parameter: Parameter, with_velocity: bool, with_snapshot: bool) -> None:
        self.parameter = parameter
        self.anchor = self.weight.copy()
        self.velocity = mx.nd.zeros_like(self.anchor) if with_velocity else None
        self.change = mx.nd.zeros_like(self.anchor)
        self.snapshot = mx.nd.zeros_like(self.anchor) if with_snapshot else None

    @property
    def weight(self) -> NDArray:
        """The values on the first device."""
        return _classic(self.parameter._data[0])

    def held(self) -> list[NDArray]:
        """Arrays that a meeting changes together: none may be read before all have changed."""
        own = [self.anchor, self.velocity, self.change, self.snapshot]
        return [*map(_classic, self.parameter._data), *(array for array in own if array is not None)]

    def follow_anchor(self) -> None:
        """Set the weight to the common point, on all devices."""
        self.anchor.copyto(self.weight)
        self.spread()

    def spread(self) -> None:
        """Copy the values of the first device to the others."""
        for replica in self.parameter._data[1:]:
            self.weight.copyto(_classic(replica))


class OuterOptimizer:
    """Holds the common point of the weights, and moves it in meetings. Calls return at once unless they say otherwise.

    Parameters
    ----------
    meetings : Meetings
        The names of the meetings.
    parameters : sequence of Parameter
        All parameters, in an order that is the same on all workers. Those with gradients must have values, which
        `begin` makes equal. Auxiliary parameters (running means) are averaged; with overlap only by `meet_now`:
        training does not use them, and the average of an earlier period would undo the updates of later steps. Frozen
        parameters are left alone.
    options : OuterOptions
    """

    def __init__(self, meetings: Meetings, parameters: Sequence[Parameter], options: OuterOptions) -> None:
        self._meetings, self._options = meetings, options
        self._auxiliary = [
            parameter for parameter in parameters if is_auxiliary(parameter) and parameter._data is not None
        ]
        with _classic_operators():
            self._weights = [
                _Weight(parameter, options.momentum != 0, options.overlap)
                for parameter in parameters
                if parameter.grad_req != "null"
            ]
            self._averages = [_classic(parameter._data[0]).copy() for parameter in self._auxiliary]
        # Counts of the last meeting: workers with steps, workers that continue, and workers whose running means count.
        self._counts: Any = None
        self.is_pending = False  # a meeting is in progress, or its result is not applied yet
        self._broken = ""  # why this worker's weights may differ from those of other workers

    def begin(self, root: int, state: dict[str, NDArray]) -> None:
        """Start from the velocities and the weights of one rank.

        The broadcasts have the number of the last call of the operation `whole`.

        Parameters
        ----------
        root : int
            The rank within the process set.
        state : dict of NDArray
            The velocities as `state` has returned them; empty, for zeros, either on all workers or on none.
        """
        core, of_whole, own = self._meetings.process_set._core, self._meetings.whole, self.state()
        sent = [arrays.handles(weight.parameter._data) for weight in self._weights]
        with _classic_operators():
            for key, velocity in own.items() if state else ():
                _classic(state[key]).copyto(velocity)
                sent.append(arrays.handles([velocity]))
            for number, name in enumerate(self._meetings.of_begin(len(self._weights), bool(state))):
                core.push_broadcast(name, sent[number][0], sent[number], root, -number, turn_of=of_whole)
            for weight in self._weights:
                weight.weight.copyto(weight.anchor)

    def meet(self, has_steps: bool, goes_on: bool) -> None:
        """Average the changes of all workers, and apply the average; with overlap, that of the previous meeting.

        With overlap this waits for the previous meeting, which began a period ago.

        Parameters
        ----------
        has_steps : bool
            Whether this worker has made steps since its last meeting. Otherwise it contributes nothing.
        goes_on : bool
            Whether this worker will make more steps before it synchronizes.

        Raises
        ------
        MXNetError
            With overlap: the previous meeting has failed. It has changed nothing on any worker.
        """
        if not self._options.overlap:
            self._push(has_steps, goes_on)
            with self._unbroken():
                self._apply()
                self._apply_averages()
                self._fence()
            return
        self.finish_pending()
        self._push(has_steps, goes_on)
        self.is_pending = True

    def finish_pending(self) -> None:
        """Wait for a meeting that is in progress, and apply its result; otherwise a no-op.

        Raises
        ------
        MXNetError
            The meeting has failed, on all workers.
        """
        if self.is_pending:
            self.is_pending = False
            with self._unbroken(MXNetError):
                self._wait()
            with self._unbroken():
                self._apply()

    def meet_now(self, has_steps: bool, goes_on: bool) -> int:
        """Meet without overlap, wait for the others, and return the number of workers that continue.

        If no worker has made steps since the last meeting, the common point stays.

        Raises
        ------
        MXNetError
            The meeting has failed, on all workers, and has changed nothing.
        """
        with self._changes() as changes:
            self._push_whole(has_steps, goes_on)
            with self._unbroken(MXNetError):
                with_steps, going_on, _ = self._wait()
            # If all changes are zeros, error feedback would still send its residual, and no worker would use it.
            if with_steps > 0:
                self._push_changes(changes)
        with self._unbroken(MXNetError):
            self._wait()
        with self._unbroken():
            if with_steps > 0:
                self._apply(keeps_local=False)
            else:
                self._go_back()
            if with_steps > 0 or self._options.overlap:
                self._apply_averages()
        return int(going_on)

    @contextlib.contextmanager
    def _unbroken(self, *of_all: type[BaseException]) -> Iterator[None]:
        """Context manager: records an exception that ends a meeting on this worker only.

        Exceptions of the types `of_all` end the meeting on all workers, and are not recorded.
        """
        try:
            yield
        except of_all:
            raise
        except BaseException as error:
            self._broken = (
                f"{type(error).__name__} has interrupted an earlier meeting on rank {process.rank()}, whose weights "
                "may differ from those of the other workers. Load weights and call load_states() on all workers, or "
                "make a new LocalTrainer."
            )
            raise

    def _wait(self) -> list[float]:
        """Wait for the last meeting, and return its counts.

        Raises
        ------
        MXNetError
            The meeting has failed. Its arrays do not carry the error any more, so the next meeting can use them.
        """
        failed = None
        for array in [*(weight.change for weight in self._weights), *self._averages, self._counts]:
            try:
                array.wait_to_read()
            except MXNetError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self._counts.asnumpy().tolist()

    def state(self) -> dict[str, NDArray]:
        """The velocities by the number of the parameter, for files and `begin`."""
        return {str(number): one.velocity for number, one in enumerate(self._weights) if one.velocity is not None}

    def _push(self, has_steps: bool, goes_on: bool) -> None:
        """Start both operations of a meeting."""
        with self._changes() as changes:
            self._push_whole(has_steps, goes_on)
            self._push_changes(changes)

    def _changes(self) -> Turn:
        """Context manager for the second operation: an exception before this operation has started is reported to the
        other workers."""
        return Turn(self._meetings.process_set, self._meetings.name, _CALL, self._meetings.whole)

    def _push_whole(self, has_steps: bool, goes_on: bool) -> None:
        """Sum the counts and the running means of all workers."""
        with Turn(self._meetings.process_set, self._meetings.whole, _CALL) as whole, _classic_operators():
            self._compute(has_steps, goes_on)
            held = arrays.handles([*self._averages, self._counts])
            whole.push(whole.core.push_group, held, held, "sum", 1.0, label=self._label())

    def _push_changes(self, changes: Turn) -> None:
        """Sum the changes of all workers into `change`."""
        held = arrays.handles([weight.change for weight in self._weights])
        wire = {"wire": self._options.wire} if self._options.wire else {}
        changes.push(changes.core.push_group, held, held, "sum", 1.0, label=self._label(), **wire)

    def _label(self) -> str:
        return f"a meeting for {len(self._weights)} parameters"

    def _compute(self, has_steps: bool, goes_on: bool) -> None:
        """Compute this worker's contribution to a meeting."""
        if self._broken:
            raise MXNetError(self._broken)
        averages = has_steps or self._options.overlap
        self._counts = mx.nd.array([float(has_steps), float(goes_on), float(averages)], dtype="float64")
        for weight in self._weights:
            if weight.snapshot is not None:
                weight.weight.copyto(weight.snapshot)
            if has_steps:
                mx.nd.elemwise_sub(weight.weight, weight.anchor, out=weight.change)
            else:
                mx.nd.zeros_like(weight.anchor, out=weight.change)
        for parameter, average in zip(self._auxiliary, self._averages):
            if averages:
                _classic(parameter._data[0]).copyto(average)
            else:
                mx.nd.zeros_like(average, out=average)

    def _apply(self, keeps_local: bool = True) -> None:
        """Move the common point by the sums in `change`, and set the weights to it."""
        options = self._options
        with _classic_operators():
            for weight in self._weights:
                change = weight.change
                mx.nd.broadcast_div(change, _like(self._counts[0:1], change), out=change)
                change *= options.learning_rate
                if weight.velocity is None:
                    weight.anchor += change
                else:
                    # A single operation writes the velocity, so that a failed meeting leaves the velocity unchanged, as
                    # on workers that have refused the meeting.
                    mx.nd.elemwise_add(weight.velocity * options.momentum, change, out=weight.velocity)
                    weight.anchor += (
                        change + options.momentum * weight.velocity if options.nesterov else weight.velocity
                    )
                if weight.snapshot is not None and keeps_local:
                    mx.nd.elemwise_add(weight.anchor, weight.weight - weight.snapshot, out=weight.weight)
                    weight.spread()
                else:
                    weight.follow_anchor()

    def _go_back(self) -> None:
        """Set the weights to the common point; they differ only after a failed meeting."""
        with _classic_operators():
            for weight in self._weights:
                weight.follow_anchor()

    def _apply_averages(self) -> None:
        """Set the auxiliary parameters, such as running means, to their averages over the contributing workers."""
        with _classic_operators():
            for parameter, average in zip(self._auxiliary, self._averages):
                mx.nd.broadcast_div(average, _like(self._counts[2:3], average), out=average)
                for replica in parameter._data:
                    average.copyto(_classic(replica))

    def _fence(self) -> None:
        """Make all arrays of a meeting wait for each other: if it fails, all of them carry its error."""
        if not mxnet.engine_blocks():
            held = [array for weight in self._weights for array in weight.held()]
            held += [*self._averages, *(_classic(array) for parameter in self._auxiliary for array in parameter._data)]
            process.core.Fence(arrays.handles(held)).push()


def check_state(state: dict[str, NDArray], parameters: Sequence[Parameter], options: OuterOptions) -> None:
    """Raise a ValueError if velocities from a file do not fit these parameters, which must have values."""
    with_velocity = parameters if options.momentum else []
    own = {str(number): tuple(one._data[0].shape) for number, one in enumerate(with_velocity)}
    held = {key: tuple(value.shape) for key, value in state.items()}
    for key in [*own, *held]:
        if held.get(key) != own.get(key):
            raise ValueError(
                f"The outer state of trained parameter {key} is {held.get(key, 'no array')} in the file, but must be "
                f"{own.get(key, 'no array')}. Load it into the same network with the same outer_momentum."
            )


@contextlib.contextmanager
def _classic_operators() -> Iterator[None]:
    """Context manager for operators of mx.nd on arrays of any shape, including (), without recording."""
    with arrays.not_recorded(), mx.util.np_shape(True):
        yield


def _like(number: NDArray, array: NDArray) -> NDArray:
    """An array of one element with an array's number of axes, its dtype and its device."""
    return number.reshape((1,) * array.ndim).astype(array.dtype).as_in_context(array.context)


def _classic(array: NDArray) -> NDArray:
    """An array as an mx.nd.NDArray."""
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array

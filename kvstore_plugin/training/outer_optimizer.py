"""The outer optimizer of a LocalTrainer: it averages what workers have changed, and applies it to a common point.

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
from ..parameters.aux_params import is_auxiliary
from ..world import process
from ..world.process_set import ProcessSet


class OuterOptions(NamedTuple):
    """What the outer optimizer does in a meeting; the same on all workers."""

    learning_rate: float
    momentum: float
    nesterov: bool
    overlap: bool
    wire: str  # type or compressor between hosts; empty: uncompressed


class _Weight:
    """One parameter: its common point, its velocity, and what travels. Arrays of MXNet's classic kind, as `w`."""

    def __init__(self, parameter: Parameter, with_velocity: bool, with_snapshot: bool) -> None:
        self.parameter = parameter
        self.anchor = self.weight.copy()
        self.velocity = mx.nd.zeros_like(self.anchor) if with_velocity else None
        self.change = mx.nd.zeros_like(self.anchor)
        self.snapshot = mx.nd.zeros_like(self.anchor) if with_snapshot else None

    @property
    def weight(self) -> NDArray:
        """The values on the first device."""
        return self.parameter._data[0].as_nd_ndarray()

    def held(self) -> list[NDArray]:
        """Arrays that a meeting changes together: none may be read before all are changed, or none will be."""
        own = [self.anchor, self.velocity, self.change, self.snapshot]
        replicas = [replica.as_nd_ndarray() for replica in self.parameter._data]
        return replicas + [array for array in own if array is not None]

    def follow_anchor(self) -> None:
        """Give the weight the value of the common point, on all devices."""
        self.anchor.copyto(self.weight)
        self.spread()

    def spread(self) -> None:
        """Copy the values of the first device to the others."""
        for replica in self.parameter._data[1:]:
            self.weight.copyto(replica.as_nd_ndarray())


class OuterOptimizer:
    """Holds the common point of the weights, and moves it in meetings. All calls return at once, but where said.

    Parameters
    ----------
    process_set : ProcessSet
        The workers that meet.
    name : str
        The name of the operation.
    parameters : sequence of Parameter
        All parameters, in an order that is the same on all workers. Those with gradients need values that are equal on
        all workers. Auxiliary parameters (running means) are averaged, with overlap by `meet_now` only, since training
        does not use them, and the average of an earlier period would undo the steps since. Frozen parameters are left
        alone.
    options : OuterOptions
    """

    def __init__(
        self, process_set: ProcessSet, name: str, parameters: Sequence[Parameter], options: OuterOptions
    ) -> None:
        self._process_set, self._name, self._options = process_set, name, options
        self._auxiliary = [one for one in parameters if is_auxiliary(one) and one._data is not None]
        with _classic_operators():
            self._weights = [
                _Weight(one, options.momentum != 0, options.overlap) for one in parameters if one.grad_req != "null"
            ]
            self._averages = [one._data[0].as_nd_ndarray().copy() for one in self._auxiliary]
        # Of the last meeting: workers with steps, workers that go on, and workers whose running means count.
        self._counts: Any = None
        self.is_pending = False  # a meeting has begun and is not applied yet

    def meet(self, has_steps: bool, goes_on: bool) -> None:
        """Average the changes of all workers, and apply them; with overlap those of the meeting before.

        With overlap this waits for the meeting before, which has had a period's time.

        Parameters
        ----------
        has_steps : bool
            Whether this worker has made steps since its last meeting. Otherwise it contributes nothing.
        goes_on : bool
            Whether this worker will make more steps before it synchronizes.

        Raises
        ------
        MXNetError
            With overlap: the meeting before has failed. It has changed nothing on any worker.
        """
        if not self._options.overlap:
            self._push(has_steps, goes_on)
            self._apply()
            self._apply_averages()
            self._fence()
            return
        self.finish_pending()
        with _classic_operators():
            for one in self._weights:
                one.weight.copyto(one.snapshot)
        self._push(has_steps, goes_on)
        self.is_pending = True

    def finish_pending(self) -> None:
        """Wait for a meeting that is under way, and apply it; without one a no-op.

        Raises
        ------
        MXNetError
            The meeting has failed, on all workers.
        """
        if self.is_pending:
            self.is_pending = False
            self._wait()
            self._apply()

    def meet_now(self, has_steps: bool, goes_on: bool) -> int:
        """Meet without overlap, wait for the others, and return how many workers go on.

        If no worker has made steps since the last meeting, the common point stays.

        Raises
        ------
        MXNetError
            The meeting has failed, on all workers, and has changed nothing.
        """
        self._push(has_steps, goes_on)
        with_steps, going_on, _ = self._wait()
        if with_steps > 0:
            self._apply(keeps_local=False)
        else:
            self._go_back()
        if with_steps > 0 or self._options.overlap:
            self._apply_averages()
        return int(going_on)

    def _wait(self) -> list[float]:
        """Wait for the last meeting, and return its counts.

        Raises
        ------
        MXNetError
            The meeting has failed. Its arrays do not carry the error any more, so the next meeting can use them.
        """
        failed = None
        for array in [*(one.change for one in self._weights), *self._averages, self._counts]:
            try:
                array.wait_to_read()
            except MXNetError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self._counts.asnumpy().tolist()

    def awaited_by(self) -> list[int]:
        """The ranks that wait for this rank in a meeting."""
        names = [self._name, f"{self._name}/whole"]
        return sorted({rank for ranks in self._process_set.core.waiting_for_this(names) for rank in ranks})

    def refuse(self, reason: str) -> None:
        """Let the next meeting fail on all workers, with the reason."""
        self._process_set.core.refuse(f"{self._name}/whole", reason)
        self._process_set.core.refuse(self._name, reason)

    def state(self) -> dict[str, NDArray]:
        """The velocities by the number of the parameter, for files."""
        return {str(number): one.velocity for number, one in enumerate(self._weights) if one.velocity is not None}

    def load(self, state: dict[str, NDArray]) -> None:
        """Take over velocities, and the present weights, which are equal on all workers, as the common point.

        A meeting that is under way is forgotten.

        Raises
        ------
        ValueError
            The state is of another network.
        """
        own = self.state()
        if {key: value.shape for key, value in state.items()} != {key: value.shape for key, value in own.items()}:
            raise ValueError("The outer state in the file belongs to another network, or to another outer_momentum.")
        self.is_pending = False
        with _classic_operators():
            for key, value in state.items():
                value.as_nd_ndarray().copyto(own[key])
            for one in self._weights:
                one.weight.copyto(one.anchor)

    def _push(self, has_steps: bool, goes_on: bool) -> None:
        """Sum the changes of all workers into `change`."""
        averages = has_steps or self._options.overlap
        with _classic_operators():
            self._counts = mx.nd.array([float(has_steps), float(goes_on), float(averages)], dtype="float64")
            for one in self._weights:
                if has_steps:
                    mx.nd.elemwise_sub(one.weight, one.anchor, out=one.change)
                else:
                    mx.nd.zeros_like(one.anchor, out=one.change)
            for parameter, average in zip(self._auxiliary, self._averages):
                if averages:
                    parameter._data[0].as_nd_ndarray().copyto(average)
                else:
                    mx.nd.zeros_like(average, out=average)
            core, label = self._process_set.core, f"a meeting for {len(self._weights)} parameters"
            whole = arrays.handles([*self._averages, self._counts])
            changes = arrays.handles([one.change for one in self._weights])
            wire = {"wire": self._options.wire} if self._options.wire else {}
            try:
                core.push_group(f"{self._name}/whole", whole, whole, "sum", 1.0, label=label)
            except Exception as error:  # NaiveEngine: the meeting has failed, on all workers
                core.refuse(self._name, str(error))
                raise
            core.push_group(self._name, changes, changes, "sum", 1.0, label=label, **wire)

    def _apply(self, keeps_local: bool = True) -> None:
        """Move the common point by the sums in `change`, and let the weights follow."""
        options = self._options
        with _classic_operators():
            for one in self._weights:
                change = one.change
                mx.nd.broadcast_div(change, _like(self._counts[0:1], change), out=change)
                change *= options.learning_rate
                if one.velocity is None:
                    one.anchor += change
                else:
                    one.velocity *= options.momentum
                    one.velocity += change
                    one.anchor += change + options.momentum * one.velocity if options.nesterov else one.velocity
                if one.snapshot is not None and keeps_local:
                    mx.nd.elemwise_add(one.anchor, one.weight - one.snapshot, out=one.weight)
                    one.spread()
                else:
                    one.follow_anchor()

    def _go_back(self) -> None:
        """Give the weights the values of the common point, which they have unless a meeting has failed."""
        with _classic_operators():
            for one in self._weights:
                one.follow_anchor()

    def _apply_averages(self) -> None:
        """Give running means their averages."""
        with _classic_operators():
            for parameter, average in zip(self._auxiliary, self._averages):
                mx.nd.broadcast_div(average, _like(self._counts[2:3], average), out=average)
                for replica in parameter._data:
                    average.copyto(replica.as_nd_ndarray())

    def _fence(self) -> None:
        """Let all arrays of a meeting wait for each other: if it fails, all of them carry its error."""
        if not mxnet.engine_blocks():
            held = [array for one in self._weights for array in one.held()]
            held += [*self._averages, *(array.as_nd_ndarray() for one in self._auxiliary for array in one._data)]
            process.core.Fence(arrays.handles(held)).push()


@contextlib.contextmanager
def _classic_operators() -> Iterator[None]:
    """Operators of mx.nd on arrays of any shape, also (), that are not recorded."""
    with arrays.not_recorded(), mx.util.np_shape(True):
        yield


def _like(number: NDArray, array: NDArray) -> NDArray:
    """An array of one element with an array's number of axes, its dtype and its device."""
    return number.reshape((1,) * array.ndim).astype(array.dtype).as_in_context(array.context)

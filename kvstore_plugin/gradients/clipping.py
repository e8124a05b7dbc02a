"""Clipping by the global norm: all gradients of a step are scaled so that their common norm is at most a given number.

Each worker adds up the squares of its share of the gradients. An operation of the step adds up the workers' sums, so
the norm has the same bits on all workers. Then each worker scales its gradients. All of this is done by operations of
MXNet's engine. Python code waits only if there are row_sparse gradients, since Python code scales their rows.

(Pascanu, Mikolov and Bengio: On the difficulty of training recurrent neural networks, 2013.)
"""

from __future__ import annotations

import math
from typing import Sequence

from ..compat import arrays
from ..compat.mxnet import NDArray, Parameter, mx
from ..sharded_optimizer.partition import grouped
from ..world import process
from .fence import Fence
from .reducer import Reducer, SharedReducer, WeakMethod
from .squares import BYTES_AT_ONCE, Squares


class Clipping:
    """Clips the gradients of one trainer.

    Parameters
    ----------
    most : float
        The largest norm. Infinite: the norm is only computed.
    reducers : sequence of Reducer
        The reducers of all gradients of the trainer.
    norm_reducer : SharedReducer or None
        The reducer whose comparison adds up the workers' sums of squares; None if the worker trains alone.
    parameters : sequence of Parameter
        The trainer's parameters.
    updates_here : bool
        Whether each worker updates all parameters by itself, without an optimizer on the store.

    Attributes
    ----------
    norm : NDArray of float32, shape (1,), or None
        The norm in the last step, before clipping. None before the first step.
    """

    def __init__(
        self,
        most: float,
        reducers: Sequence[Reducer],
        norm_reducer: SharedReducer | None,
        parameters: Sequence[Parameter],
        updates_here: bool,
    ) -> None:
        self.most = most
        self._updates_here = updates_here and norm_reducer is not None
        self._reducers = list(reducers)
        self._norm_reducer = norm_reducer
        self._squares = Squares(None if norm_reducer is None else norm_reducer.process_set)
        self._fence = Fence(parameters, "" if norm_reducer is None else norm_reducer._scope, ends_step=True)
        self._only_fresh = False
        self._is_added_up = False  # whether the squares of this step were added up
        self.norm: NDArray | None = None
        if norm_reducer is not None:
            norm_reducer.sum_with_comparison(self._squares, WeakMethod(self, "_add_up"))

    def is_made_by(self, reducer: Reducer) -> bool:
        """Whether the reducer's comparison adds up the sums of squares."""
        return reducer is self._norm_reducer

    def begin(self, only_fresh: bool, label: str, makes_comparison: bool) -> None:
        """Begin to add up squares after the gradients were reduced. Returns at once.

        Parameters
        ----------
        only_fresh : bool
            Whether the workers have told each other which gradients are fresh. If True, stale gradients do not count.
        label : str
            As for `Reducer.compare`.
        makes_comparison : bool
            Whether to start the comparison of the norm's reducer. If False, the caller starts it right afterwards.
        """
        self._only_fresh, self._is_added_up = only_fresh, False
        if self._norm_reducer is None:
            self._add_up(0)
        elif makes_comparison:
            self._norm_reducer.compare(label)

    def _add_up(self, priority: int) -> None:
        self._is_added_up = True
        pieces = [piece for reducer in self._reducers for piece in reducer.pieces(self._only_fresh)]
        more = sum(reducer.squares_of_rows(self._only_fresh) for reducer in self._reducers)
        self._squares.add_up(pieces, more, priority)

    def refuse(self, reason: str) -> None:
        """Refuse the comparison if begin() or the reduction has failed on this worker, so that no worker waits."""
        if self._norm_reducer is not None:
            self._norm_reducer.leave_out_comparison(reason)

    def clip(self, factor: float) -> None:
        """Scale the gradients after begin() and the comparison. Waits only if there are row_sparse gradients.

        Parameters
        ----------
        factor : float
            The optimizer's factor for gradients. The norm is computed from the gradients times this factor.

        Raises
        ------
        MXNetError
            With row_sparse gradients: the step has failed.
        RuntimeError
            The trainer has gradients, but none in the process set that sums the squares.
        """
        if not self._is_added_up:
            if any(reducer.to_scale(self._only_fresh) or reducer.has_rows() for reducer in self._reducers):
                raise RuntimeError(
                    "clip_global_norm needs a gradient in the trainer's process set, but grad_req is 'null' for all "
                    "its parameters. Give the trainer the process set of a parameter that is trained."
                )
            return
        squares = self._squares.array
        if self._updates_here:
            self._fence.begin(also=[squares])
        if math.isinf(self.most):
            return
        if any(reducer.has_rows() for reducer in self._reducers):
            scale = process.core.clipping_factor(float(squares.asnumpy().item()), factor, self.most)
            for reducer in self._reducers if scale != 1.0 else ():
                reducer.scale_rows(scale)
        gradients = [gradient for reducer in self._reducers for gradient in reducer.to_scale(self._only_fresh)]
        in_host_memory = [gradient for gradient in gradients if not arrays.on_gpu(gradient)]
        for some in grouped(in_host_memory, lambda one: one.size * arrays.item_size(one), BYTES_AT_ONCE):
            process.core.push_clip(arrays.handles(some), squares.handle.value, factor, self.most)
        on_gpu = [gradient for gradient in gradients if arrays.on_gpu(gradient)]
        if on_gpu:
            _scale_on_gpus(on_gpu, squares, abs(factor), self.most)

    def is_finite(self) -> bool:
        """Whether all gradients of the step are finite; the same on all workers. Waits for the step's gradients.

        Raises
        ------
        MXNetError
            The step has failed.
        """
        # Squares of 32 bits do not overflow in float64, so the sum is finite if all gradients are.
        return math.isfinite(self._squares.array.asnumpy().item())

    def end(self, factor: float, broken: bool = False) -> None:
        """Call this after the updates, with the argument of clip(). It replaces the reducers' fences.

        `broken`: an exception has interrupted the updates.

        If the step fails, its gradients and the norm share one error. Reading one of these arrays clears the error for
        all of them, so no array may be read before all updates have run: see fence.py. The norm is computed after the
        fence.
        """
        if not self._is_added_up:
            return
        squares = self._squares.array
        self._fence.push(also=[squares], broken=broken)
        with arrays.not_recorded():
            norm = (squares.sqrt() * abs(factor)).astype("float32")
        self.norm = norm.as_np_ndarray() if mx.util.is_np_array() else norm


def _scale_on_gpus(gradients: Sequence[NDArray], squares: NDArray, factor: float, most: float) -> None:
    """Scale arrays on GPUs by MXNet's operators."""
    with arrays.not_recorded():
        scale = mx.nd.minimum(most / (squares.sqrt() * factor + 1e-8), 1.0)
        for gradient in gradients:
            plain = gradient.as_nd_ndarray()
            plain *= scale.astype(plain.dtype).as_in_context(plain.context)

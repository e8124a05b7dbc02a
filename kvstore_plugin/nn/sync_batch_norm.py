"""SyncBatchNorm: batch normalization by the mean and variance of all workers' batches.

The layer is a custom operator of MXNet, which can be hybridized. Its Python code runs in threads that MXNet keeps for
such operators, when the inputs are ready. The code sums this worker's batch (batch_norm_math.py), pushes one small
allreduce of the sums into the engine, and after it a second custom operator, which computes the output. So no thread
waits for other workers. The backward pass does the same.

A custom operator must not get an array in oneDNN's blocked layout: MXNet passes a plain copy to the operator, and frees
the copy before the operator has run. The same holds for gradients. So the operator is between two plain copies.

Calls are matched by the number of the layer and the number of the call (batch_norm_calls.py). The workers agree on the
number of a layer when they first call it in training, since a single worker may copy or create networks. Forward passes
of a layer run in the order in which they are called: each writes the running statistics, or a mark in MXNet's engine
separates them (batch_norm_graphs.py). Backward passes may run in any order, so each has the number of its forward pass.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar, Iterator

import numpy as np

from ..compat import arrays
from ..compat.arguments import whole_number
from ..compat.mxnet import BatchNorm, NDArray, contexts, mx
from ..coordination import operation_names
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from . import batch_norm_calls, batch_norm_graphs, batch_norm_math
from .plain_copies import plain

_LAYER, _FORWARD, _BACKWARD = "mykv_sync_batch_norm", "mykv_sync_batch_norm_forward", "mykv_sync_batch_norm_backward"


class SyncBatchNorm(BatchNorm):
    """Batch normalization whose mean and variance, in training, are computed over the batches of all workers.

    The results equal those of gluon.nn.BatchNorm in a process with the batches of all workers, which may have different
    sizes: the output, the gradients of input, gamma and beta (gamma's and beta's after they were averaged or summed
    over the workers, as a trainer does), and the running statistics, which are the same on all workers. The parameters
    have the same names as in gluon.nn.BatchNorm, so each of the two layers loads the other layer's files. In
    evaluation, with `use_global_stats`, and on a single worker the workers exchange nothing.

    All workers must call their layers for the first time in the same order. In training they must call each layer
    equally often, forward and backward. The first call in training waits for the other workers; a single worker may
    create and copy networks. The constructor calls init() if the program has not called it. If a worker calls a layer
    in evaluation mode, or not at all, while other workers call it in training, the other workers wait. They get an
    MXNetError within seconds of that worker's next step of a trainer. Later steps are not affected, if a trainer has
    the layer's parameters. The running statistics change in the forward pass; in MXNet's layer they change in the
    backward pass.

    Inputs are dense arrays in float16, bfloat16, float32 or float64 on one CPU of each worker; with 16 bits, parameters
    and statistics are float32.

    Parameters
    ----------
    in_channels : int, optional
        Number of channels; 0: the number of channels of the first input.
    num_devices : int, optional
        As in gluon.contrib.nn.SyncBatchNorm; must be None or 1, the number of devices of each worker.
    momentum, epsilon, center, scale, use_global_stats : optional
        As for gluon.nn.BatchNorm.
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer : optional
        As for gluon.nn.BatchNorm.
    axis : int, optional
        The axis of the channels.
    process_set : ProcessSet, optional
        The workers whose batches are normalized together.
    **kwargs
        As for gluon.Block: in MXNet 1.9.1 `prefix` and `params`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong; the process set was not added, or this worker is not in it.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, arXiv:1502.03167; over several devices: Zhang et al., "Context
    Encoding for Semantic Segmentation", 2018, arXiv:1803.08904.

    Examples
    --------
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(64, activation="relu"), mykv.SyncBatchNorm(), gluon.nn.Dense(10))
    >>> net.initialize()
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels)  # normalized by the batches of all workers
    """

    def __init__(
        self,
        in_channels: int = 0,
        num_devices: int | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        *,
        axis: int = 1,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        process.require()
        first_use = _first_use(process_set)
        process_sets.check(process_set)
        if num_devices is not None and whole_number("num_devices", num_devices, 1) > 1:
            raise ValueError(f"num_devices must be 1, not {num_devices}: each worker has its batch on one device.")
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            **kwargs,
        )
        self._process_set = process_set
        self._begin(first_use)

    def normalized(self, F: Any, *inputs: Any) -> Any:
        """The operator of the layer, on arrays or symbols: the data, gamma, beta and the running statistics."""
        process_sets.check(self._process_set)
        devices = contexts(self.gamma)
        if len(devices) > 1:
            raise ValueError(
                f"A SyncBatchNorm is on {len(devices)} devices of rank {process.rank()}, but only "
                "one device is supported. Use one process for each device."
            )
        options = {name: self._kwargs[name] for name in ("axis", "eps", "momentum", "fix_gamma", "use_global_stats")}
        data, *others = inputs
        if isinstance(data, NDArray):
            self._calls.follow()
        with batch_norm_calls.raising_interruption():
            result = F.Custom(plain(F, data), *others, op_type=_LAYER, scope=self._calls.key, **options)
        return plain(F, result)

    def _begin(self, first_use: operation_names.FirstUse) -> None:
        self._calls = batch_norm_calls.Calls(self, self._process_set, first_use)
        batch_norm_graphs.note_layer()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_calls"}

    def __setstate__(self, state: dict) -> None:
        # A copy is a separate layer: its calls must not match calls of the original.
        vars(self).update(state)
        self._begin(_first_use(self._process_set, is_copy=True))


def _first_use(process_set: Any, is_copy: bool = False) -> operation_names.FirstUse:
    call = "the first forward pass of a SyncBatchNorm in training"
    return operation_names.FirstUse(process_set, "sync_batch_norm", call, is_copy)


class _Prop(mx.operator.CustomOpProp):
    """Properties of a custom operator for MXNet. The layer's arguments are passed as text."""

    names: ClassVar[tuple[list[str], list[str], list[str]]]  # names of inputs, outputs and auxiliary states

    def __init__(self, scope: str, axis: str, eps: str, momentum: str, fix_gamma: str, use_global_stats: str) -> None:
        super().__init__(need_top_grad=True)
        self.texts = {
            "scope": scope,
            "axis": axis,
            "eps": eps,
            "momentum": momentum,
            "fix_gamma": fix_gamma,
            "use_global_stats": use_global_stats,
        }
        self.calls = batch_norm_calls.of_key.get(scope)  # None if this process has imported the graph
        batch_norm_graphs.note_layer()
        self.axis = int(axis)
        self.eps = float(eps)
        self.momentum = float(momentum)
        self.fix_gamma = fix_gamma == "True"
        self.use_global_stats = use_global_stats == "True"

    def seen(self, array: NDArray) -> np.ndarray:
        """The values of an array, in the shape (outer, channels, inner)."""
        return self.parted(_values(array))

    def parted(self, values: np.ndarray) -> np.ndarray:
        """A view of the values in the shape (outer, channels, inner)."""
        axis = self.axis % values.ndim
        outer, inner = math.prod(values.shape[:axis]), math.prod(values.shape[axis + 1 :])
        return values.reshape(outer, values.shape[axis], inner)

    def scale(self, gamma: NDArray) -> np.ndarray:
        """The factor by which normalized data are multiplied: gamma, or 1 with fix_gamma; as float64."""
        values = _values(gamma)
        return np.ones(values.shape) if self.fix_gamma else values.astype(np.float64)

    def list_arguments(self) -> list[str]:
        return self.names[0]

    def list_outputs(self) -> list[str]:
        return self.names[1]

    def list_auxiliary_states(self) -> list[str]:
        return self.names[2]

    def _channels(self, shape: Any) -> tuple[int]:
        return (shape[self.axis],)


@mx.operator.register(_LAYER)
class _LayerProp(_Prop):
    """The operator of the layer."""

    names = (["data", "gamma", "beta"], ["output"], ["running_mean", "running_var"])

    def infer_shape(self, in_shape: list) -> tuple:
        channels = self._channels(in_shape[0])
        return [in_shape[0], channels, channels], [in_shape[0]], [channels, channels]

    def infer_type(self, in_type: list) -> tuple:
        kind = _of_parameters(in_type[0])
        return [in_type[0], kind, kind], [in_type[0]], [kind, kind]

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Layer:
        if self.calls is not None and not self.use_global_stats:
            self.calls.note()
        return _Layer(self)


@mx.operator.register(_FORWARD)
class _ForwardProp(_Prop):
    """The rest of the forward pass, after the sums of all workers have arrived.

    The second output has the means, the inverse standard deviations and the number of elements of each channel.
    """

    names = (["data", "gamma", "beta", "total"], ["output", "statistics"], ["running_mean", "running_var"])

    def infer_shape(self, in_shape: list) -> tuple:
        channels = self._channels(in_shape[0])
        return in_shape, [in_shape[0], in_shape[3]], [channels, channels]

    def infer_type(self, in_type: list) -> tuple:
        return in_type, [in_type[0], np.float64], [in_type[1], in_type[1]]

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Forward:
        return _Forward(self)


@mx.operator.register(_BACKWARD)
class _BackwardProp(_Prop):
    """The rest of the backward pass, after the sums of all workers have arrived."""

    names = (["data", "gradient", "gamma", "statistics", "total"], ["output"], [])

    def infer_shape(self, in_shape: list) -> tuple:
        return in_shape, [in_shape[0]], []

    def infer_type(self, in_type: list) -> tuple:
        return in_type, [in_type[0]], []

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Backward:
        return _Backward(self)


class _Layer(mx.operator.CustomOp):
    """One call of the layer, forward and backward; in a static graph several, each before the next begins."""

    def __init__(self, prop: _LayerProp) -> None:
        super().__init__()
        self._prop = prop
        self._number = batch_norm_calls.Number(0, 0)
        self._in_training = False
        self._statistics: Any = None
        self._backward_passes = 0  # of the last forward pass

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        data, gamma, beta, mean, variance = (_readable(one) for one in [*in_data, *aux])
        prop = self._prop
        self._in_training = bool(is_train) and not prop.use_global_stats
        if not self._in_training:
            inverse = 1 / np.sqrt(_values(variance).astype(np.float64) + prop.eps)
            self._statistics = np.concatenate([_values(mean), inverse, [np.inf]])
            result = mx.nd.BatchNorm(
                *(data, gamma, beta, mean, variance),
                use_global_stats=True,
                fix_gamma=prop.fix_gamma,
                eps=prop.eps,
                axis=prop.axis,
            )
            return _assign(out_data[0], req[0], result)
        if prop.calls is None:  # not in a Gluon block, which raises the error in the call
            raise ValueError(batch_norm_graphs.ONLY_EVALUATES)
        self._number, self._backward_passes = prop.calls.take(), 0
        total = _added_up(prop.calls, "forward", self._number, batch_norm_math.sums(prop.seen(data)), data)
        output = out_data[0].as_nd_ndarray()
        target = _target(output, req[0])
        self._statistics = mx.nd.empty(total.shape, total.context, np.float64)
        inputs = (data, gamma, beta, total, mean, variance)
        mx.nd.Custom(*inputs, op_type=_FORWARD, out=[target, self._statistics], **prop.texts)
        return _assign(output, req[0], target)

    def backward(self, req: list, out_grad: list, in_data: list, out_data: list, in_grad: list, aux: list) -> None:
        data, gamma, gradient = (_readable(one) for one in [in_data[0], in_data[1], out_grad[0]])
        prop = self._prop
        statistics = _values(self._statistics) if self._in_training else self._statistics
        mean, inverse, _ = _parted(statistics)
        sums = batch_norm_math.gradient_sums(prop.seen(data), prop.seen(gradient), mean, inverse)
        of_beta, of_gamma = np.split(sums, 2)
        if self._in_training:
            prop.calls.runs_backward(self._number)
            again = f"-{self._backward_passes}" if self._backward_passes else ""  # a name is used only once
            total = _added_up(prop.calls, "backward", f"{self._number}{again}", sums, data)
            self._backward_passes += 1
            statistics = self._statistics
        else:
            total, statistics = (
                mx.nd.array(sums, data.context, np.float64),
                mx.nd.array(statistics, data.context, np.float64),
            )
        if req[0] != "null":
            inputs = (data, gradient, gamma, statistics, total)
            output = in_grad[0].as_nd_ndarray()
            target = _target(output, req[0])
            mx.nd.Custom(*inputs, op_type=_BACKWARD, out=target, **prop.texts)
            _assign(output, req[0], target)
        for index, values in ((1, np.zeros_like(of_gamma) if prop.fix_gamma else of_gamma), (2, of_beta)):
            if req[index] != "null":
                _assign(in_grad[index], req[index], mx.nd.array(values, data.context, in_grad[index].dtype))


class _Forward(mx.operator.CustomOp):
    def __init__(self, prop: _ForwardProp) -> None:
        super().__init__()
        self._prop = prop

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        data, gamma, beta, total = (array.as_nd_ndarray() for array in in_data)
        prop = self._prop
        batch = batch_norm_math.moments(_values(total))
        inverse = 1 / np.sqrt(batch.variance + prop.eps)
        scale = prop.scale(gamma) * inverse
        with _written(out_data[0]) as output:
            batch_norm_math.normalize(prop.seen(data), batch.mean, scale, _values(beta), prop.parted(output))
        with _written(out_data[1]) as statistics:
            statistics[:] = np.concatenate([batch.mean, inverse, [batch.count]])
        for one, value in zip(aux, (batch.mean, batch.variance)):
            with _written(one) as running:
                running[:] = prop.momentum * running + (1 - prop.momentum) * value
        prop.calls.has_run()


class _Backward(mx.operator.CustomOp):
    def __init__(self, prop: _BackwardProp) -> None:
        super().__init__()
        self._prop = prop

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        data, gradient, gamma, statistics, total = (array.as_nd_ndarray() for array in in_data)
        prop = self._prop
        mean, inverse, count = _parted(_values(statistics))
        means = _values(total).reshape(2, -1) / count
        scale = prop.scale(gamma)
        seen = (prop.seen(one) for one in (data, gradient))
        with _written(out_data[0]) as output:
            batch_norm_math.data_gradient(*seen, mean, inverse, scale, means, prop.parted(output))


def _added_up(calls: batch_norm_calls.Calls, kind: str, number: Any, values: np.ndarray, like: NDArray) -> NDArray:
    """Start to sum values over all workers. Returns the array of the sums, which MXNet's engine fills later."""
    total = mx.nd.array(values, like.context, np.float64)
    handles = arrays.handles([total])
    calls.process_set._core.push_allreduce(f"{calls.scope()}/{kind}/{number}", handles, handles, "sum", 1.0)
    return total


def _readable(array: NDArray) -> NDArray:
    """An array with a dtype that numpy has; bfloat16 becomes float32."""
    array = array.as_nd_ndarray()
    return array.astype("float32") if _is_bfloat16(array.dtype) else array


def _is_bfloat16(dtype: Any) -> bool:
    return arrays.dtype_name(dtype) == "bfloat16"


def _target(output: NDArray, req: str) -> NDArray:
    """The array in which to compute an output: the output itself, or a temporary array.

    A temporary array is needed if MXNet does not ask to overwrite the output, or if numpy lacks its dtype.
    """
    if req in ("write", "inplace") and not _is_bfloat16(output.dtype):
        return output
    return mx.nd.empty(output.shape, output.context, np.float32 if _is_bfloat16(output.dtype) else output.dtype)


def _assign(target: NDArray, req: str, values: NDArray) -> None:
    """Write values to an output of an operator, or add them to it, as MXNet requests."""
    if values is target:
        return
    target = target.as_nd_ndarray()
    if _is_bfloat16(target.dtype):
        values = values.astype(target.dtype)
    if req == "add":
        target += values
    elif req != "null":
        values.copyto(target)


def _parted(statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Means, inverse standard deviations, and the number of elements for each channel."""
    mean, inverse = np.split(statistics[:-1], 2)
    return mean, inverse, statistics[-1]


def _of_parameters(dtype: Any) -> Any:
    """The dtype of the parameters for data of this dtype."""
    return np.float32 if dtype == np.float16 or _is_bfloat16(dtype) else dtype


@contextlib.contextmanager
def _written(array: NDArray) -> Iterator[np.ndarray]:
    """Context manager for writing an array's values; for a GPU array a copy, which is copied back at the end."""
    values = _values(array)
    if not arrays.on_gpu(array):
        yield values
        return
    values = values.copy()  # arrays.memory() is read-only for an array on a GPU
    yield values
    mx.nd.array(values, array.context, array.dtype).copyto(array.as_nd_ndarray())


def _values(array: NDArray) -> np.ndarray:
    return arrays.memory(array).view(array.dtype).reshape(array.shape)

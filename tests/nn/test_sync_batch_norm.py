"""SyncBatchNorm: several workers, each with a part of a batch, get the results of one process with the whole batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import multiprocessing
import os
import subprocess
import sys
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import interrupted_after
from harness.support import BFLOAT16, IS_2, MXNetError, array, clear_errors, fill, mx, parameters, structure
from kvstore_plugin.compat import arrays
from kvstore_plugin.nn import batch_norm_calls
from kvstore_plugin.nn import batch_norm_math as moments
from mxnet import autograd
from mxnet.gluon import nn

_EPSILON = 1e-5
_MODES = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
_TOLERANCE = {"float16": 2e-3, "float32": 3e-6, "float64": 1e-12}


def _batch(seed, shape, dtype, axis=1, mean=3.0):
    """Data and the gradient of the result, with other moments in each channel."""
    rng = np.random.RandomState(seed)
    along = [-1 if number == axis % len(shape) else 1 for number in range(len(shape))]
    scale = 1 + np.arange(shape[axis]).reshape(along)
    return (mean * scale + scale * rng.randn(*shape)).astype(dtype), rng.randn(*shape).astype(dtype)


def _part(values, rank, size):
    """The rows of a worker: one more than that of the worker before it, and those that are left on the last."""
    ends = [min(1 + rank_ + rank_ * (rank_ + 1) // 2, len(values)) for rank_ in range(size)]
    ends[-1] = len(values)
    return values[(ends[rank - 1] if rank else 0) : ends[rank]]


class _Expected:
    """The formulas of batch normalization for a whole batch, in float64."""

    def __init__(self, data, gradient, axis, gamma, beta):
        data, gradient = data.astype("float64"), gradient.astype("float64")
        others = tuple(number for number in range(data.ndim) if number != axis % data.ndim)
        shape = [length if number == axis % data.ndim else 1 for number, length in enumerate(data.shape)]
        self.mean, self.variance = data.mean(others), data.var(others)
        inverse = 1 / np.sqrt(self.variance + _EPSILON).reshape(shape)
        normalized = (data - self.mean.reshape(shape)) * inverse
        self.output = normalized * gamma.reshape(shape) + beta.reshape(shape)
        self.of_gamma, self.of_beta = (gradient * normalized).sum(others), gradient.sum(others)
        count = data.size / data.shape[axis]
        self.of_data = (gamma.reshape(shape) * inverse) * (
            gradient - self.of_beta.reshape(shape) / count - normalized * self.of_gamma.reshape(shape) / count
        )


def _layer(channels, dtype, hybridize, axis=1, **options):
    """The layer in a network, since parents are what is hybridized; with gamma and beta that are not 1 and 0."""
    net = nn.HybridSequential()
    layer = mykv.SyncBatchNorm(axis=axis, **options)
    net.add(layer)
    net.initialize()
    net.cast(dtype)
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net, layer


def _run(net, data, gradient):
    x = array(data)
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(array(gradient))
    return y.asnumpy(), x.grad.asnumpy()


def _close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(np.abs(expected).max(), 1))


def _cases():
    """Shapes with the axis of the channels, drawn once, and some that are drawn by hand."""
    rng = np.random.RandomState(7)
    cases = [((11, 3), 1), ((9, 4, 1, 1), 1), ((10, 2, 3, 5), -1), ((7, 300, 31, 16), 1)]
    for dimensions in (2, 3, 4, 5):
        shape = (rng.randint(8, 20), *rng.randint(1, 6, dimensions - 1))
        cases.append((tuple(int(length) for length in shape), int(rng.randint(1, dimensions))))
    return cases


@pytest.mark.ranks(1, 2, 3, long=(4,))
@pytest.mark.parametrize("dtype", list(_TOLERANCE))
@pytest.mark.parametrize("shape, axis", _cases())
def test_equals_one_process_with_the_whole_batch(shape, axis, dtype, rank, size, gather):
    data, gradient = _batch(1, shape, dtype, axis)
    net, layer = _layer(shape[axis], dtype, None, axis)
    tolerance = _TOLERANCE[dtype]
    of_parameters = "float32" if dtype == "float16" else dtype
    gamma, beta = (values.astype(of_parameters) for values in np.random.RandomState(2).randn(2, shape[axis]))
    net(array(_part(data, rank, size)))  # in evaluation; gives the parameters their shapes
    layer.gamma.set_data(array(gamma))
    layer.beta.set_data(array(beta))
    output, of_data = _run(net, _part(data, rank, size), _part(gradient, rank, size))
    expected = _Expected(data, gradient, axis, gamma.astype("float64"), beta.astype("float64"))
    _close(output, _part(expected.output, rank, size), tolerance)
    _close(of_data, _part(expected.of_data, rank, size), tolerance)
    exact = _TOLERANCE[of_parameters]
    for parameter, whole in ((layer.gamma, expected.of_gamma), (layer.beta, expected.of_beta)):
        _close(sum(gather(parameter.grad().asnumpy())), whole, exact)
    _close(layer.running_mean.data().asnumpy(), 0.1 * expected.mean, exact)
    _close(layer.running_var.data().asnumpy(), 0.9 + 0.1 * expected.variance, exact)
    for parameter in (layer.running_mean, layer.running_var):
        assert parameter.data().dtype == np.dtype(of_parameters)
        assert len(set(gather(parameter.data().asnumpy().tobytes()))) == 1
    assert output.dtype == of_data.dtype == np.dtype(dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", _MODES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hybridized_in_every_way_and_without_known_shapes(hybridize, dtype, rank, size):
    net, layer = _layer(5, dtype, hybridize)
    for step in range(3):
        data, gradient = _batch(step, (7, 5, 2, 2), dtype)
        output, of_data = _run(net, _part(data, rank, size), _part(gradient, rank, size))
        expected = _Expected(data, gradient, 1, np.ones(5), np.zeros(5))
        _close(output, _part(expected.output, rank, size), _TOLERANCE[dtype])
        _close(of_data, _part(expected.of_data, rank, size), _TOLERANCE[dtype])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_arrays_on_gpus_are_copied_through_the_host(hybridize, dtype, rank, size, gather, monkeypatch):
    """Arrays on CPUs stand in, which Python takes for arrays on GPUs: it can read their values, not write in place."""
    data, gradient = _batch(1, (7, 5, 2, 2), dtype)
    net, layer = _layer(5, dtype, hybridize)
    net(array(_part(data, rank, size)))  # gives the parameters their shapes
    monkeypatch.setattr(arrays, "on_gpu", lambda one: True)
    output, of_data = _run(net, _part(data, rank, size), _part(gradient, rank, size))
    expected = _Expected(data, gradient, 1, np.ones(5), np.zeros(5))
    _close(output, _part(expected.output, rank, size), _TOLERANCE[dtype])
    _close(of_data, _part(expected.of_data, rank, size), _TOLERANCE[dtype])
    _close(sum(gather(layer.gamma.grad().asnumpy())), expected.of_gamma, _TOLERANCE["float32"])
    _close(layer.running_mean.data().asnumpy(), 0.1 * expected.mean, _TOLERANCE["float32"])
    _close(layer.running_var.data().asnumpy(), 0.9 + 0.1 * expected.variance, _TOLERANCE["float32"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
def test_bfloat16_as_amp_has_it(hybridize, rank, size, gather):
    net, layer = _layer(3, "float32", hybridize, in_channels=3)
    data, gradient = _batch(0, (9, 3, 4), "float32")
    x = array(_part(data, rank, size))
    x.attach_grad()
    with autograd.record():
        rounded = x.as_nd_ndarray().astype(BFLOAT16)
        y = net(rounded.as_np_ndarray() if IS_2 else rounded)
        loss = (y.as_nd_ndarray().astype("float32") * mx.nd.array(_part(gradient, rank, size))).sum()
    loss.backward()
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    assert str(np.dtype(y.dtype)) == str(BFLOAT16) and layer.running_mean.data().dtype == np.float32
    _close(y.as_nd_ndarray().astype("float32").asnumpy(), _part(expected.output, rank, size), 0.02)
    _close(x.grad.asnumpy(), _part(expected.of_data, rank, size), 0.02)
    _close(sum(gather(layer.gamma.grad().asnumpy())), expected.of_gamma, 0.02)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True}])
@pytest.mark.parametrize("center, scale", [(False, True), (True, False), (False, False)])
def test_without_beta_or_gamma(center, scale, hybridize, rank, size, gather):
    net, layer = _layer(3, "float64", hybridize, center=center, scale=scale)
    data, gradient = _batch(0, (6, 3, 2), "float64")
    output, of_data = _run(net, _part(data, rank, size), _part(gradient, rank, size))
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    _close(output, _part(expected.output, rank, size), 1e-12)
    _close(of_data, _part(expected.of_data, rank, size), 1e-12)
    if scale:
        _close(sum(gather(layer.gamma.grad().asnumpy())), expected.of_gamma, 1e-12)
    if center:
        _close(sum(gather(layer.beta.grad().asnumpy())), expected.of_beta, 1e-12)


def _network(layers, seed):
    net = nn.HybridSequential()
    first, second = layers
    net.add(nn.Conv2D(4, 3, in_channels=2), first, nn.Activation("tanh"), nn.Conv2D(3, 2, in_channels=4), second)
    net.add(nn.Flatten(), nn.Dense(2))
    net.initialize()
    net(array(np.zeros((1, 2, 6, 6), "float32")))
    fill(net, seed)
    for layer in layers:
        layer.running_mean.set_data(array(np.zeros(layer.running_mean.shape, "float32")))
        layer.running_var.set_data(array(np.ones(layer.running_var.shape, "float32")))
    return net


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True}])
def test_training_equals_that_of_one_process_with_mxnets_layer(hybridize, rank, size, gather):
    """Each worker's batch is as large; losses are means, so the mean of gradients is that of the whole batch."""
    whole = _network([nn.BatchNorm(), nn.BatchNorm()], seed=3)
    alone = mx.gluon.Trainer(whole.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=None)
    shared = _network([mykv.SyncBatchNorm(), mykv.SyncBatchNorm()], seed=3)
    together = mykv.DistributedTrainer(shared.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    if hybridize is not None:
        shared.hybridize(**hybridize)
    for step in range(4):
        x = np.random.RandomState(step).randn(4 * size, 2, 6, 6).astype("float32")
        for net, trainer, data in ((whole, alone, x), (shared, together, x[rank::size])):
            with autograd.record():
                loss = (net(array(data)) ** 2).mean()
            loss.backward()
            trainer.step(1)
    for (name, expected), actual in zip(parameters(whole).items(), parameters(shared).values()):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5, err_msg=name)
        assert len(set(gather(actual.tobytes()))) == 1


class _Joined(nn.HybridBlock):
    """The combined outputs of two blocks: `join` is "concat", along the channels, or "add"."""

    def __init__(self, first, second, join):
        super().__init__()
        self.first, self.second, self.join = first, second, join

    if IS_2:

        def forward(self, x):
            first, second = self.first(x), self.second(x)
            return first + second if self.join == "add" else mx.np.concatenate([first, second], axis=1)

    else:

        def hybrid_forward(self, F, x):
            first, second = self.first(x), self.second(x)
            return first + second if self.join == "add" else F.concat(first, second, dim=1)


def _sequence(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def _behind(what, channels):
    """Layers whose output oneDNN leaves in its own layout, if it has more than a few channels; without bias, whose
    gradient would be rounding."""
    wide = {"kernel_size": 3, "padding": 1, "use_bias": False}
    if what == "convolution":
        return nn.Conv2D(channels, **wide)
    if what == "pooling":
        return _sequence(nn.Conv2D(channels, **wide), nn.MaxPool2D(3, 1, 1))
    if what == "concatenation":
        parts = nn.Conv2D(channels - channels // 2, **wide), nn.Conv2D(channels // 2, 1, use_bias=False)
        return _Joined(*parts, "concat")
    return nn.Dense(channels, use_bias=False)


def _initialize(net, other, x):
    """Give two networks of the same form the same values, on all workers and in every run."""
    mx.random.seed(0)
    for each in (net, other):
        each.initialize(mx.init.Xavier())
        each(array(x))  # gives the parameters their shapes
    mykv.broadcast_parameters(structure(net))
    for name, parameter in structure(net).items():
        structure(other)[name].set_data(parameter.data())


def _assert_same_step(whole, shared, x, rank, size, gather):
    """The network of this worker, with its rows, and the other one, with all of them, do the same."""
    results = []
    for net, rows in ((whole, x), (shared, _part(x, rank, size))):
        data = array(rows)
        data.attach_grad()
        with autograd.record():
            y = net(data)
            loss = (y * y).sum()
        loss.backward()
        gradients = {name: p.grad() for name, p in structure(net).items() if p.grad_req != "null"}
        results.append((y, data.grad, gradients))
    for expected, actual in zip(results[0][:2], results[1][:2]):
        _close(actual.asnumpy(), _part(expected.asnumpy(), rank, size), 2e-4)
    for name, expected in results[0][2].items():
        _close(sum(gather(results[1][2][name].asnumpy())), expected.asnumpy(), 2e-4)
    for name in ("1.running_mean", "1.running_var"):
        _close(parameters(shared)[name], parameters(whole)[name], 1e-5)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", ["convolution", "pooling", "concatenation", "dense"])
def test_behind_layers_whose_output_has_a_layout_of_its_own(what, rank, size, gather):
    """Its gradient too, since a layer of the same kind follows. Only a few channels are left in the usual layout."""
    # MXNet itself cannot concatenate parts of 4 or 8 channels: backward ends in a floating point exception.
    for channels in (3, 32, 64, 256) if what == "concatenation" else (3, 8, 16, 64, 256):
        x = np.random.RandomState(channels).randn(5, 3, 7, 7).astype("float32")
        behind = (lambda: nn.Dense(4)) if what == "dense" else (lambda: nn.Conv2D(16, 3))
        whole = _sequence(_behind(what, channels), nn.BatchNorm(), nn.Activation("tanh"), behind())
        shared = _sequence(_behind(what, channels), mykv.SyncBatchNorm(), nn.Activation("tanh"), behind())
        _initialize(whole, shared, x)
        for hybridize in _MODES:
            if hybridize is not None:
                whole.hybridize(**hybridize)
                shared.hybridize(**hybridize)
            for step in range(2):
                _assert_same_step(whole, shared, x + step, rank, size, gather)


def _residual_network(layer):
    """Two residual blocks as those of ResNet, each with a convolution beside it, and what a classifier has behind."""

    def block(channels, stride):
        body = _sequence(
            *(nn.Conv2D(channels, 3, stride, 1, use_bias=False), layer(), nn.Activation("relu")),
            *(nn.Conv2D(channels, 3, 1, 1, use_bias=False), layer()),
        )
        shortcut = _sequence(nn.Conv2D(channels, 1, stride, use_bias=False), layer())
        return _sequence(_Joined(body, shortcut, "add"), nn.Activation("relu"))

    first = (nn.Conv2D(16, 3, 1, 1, use_bias=False), layer(), nn.Activation("relu"), nn.MaxPool2D(3, 2, 1))
    return _sequence(*first, block(16, 1), block(32, 2), nn.GlobalAvgPool2D(), nn.Dense(10))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("hybridize", _MODES)
def test_a_residual_network_trains_as_in_one_process(hybridize, rank, size, gather):
    x = np.random.RandomState(0).randn(3, 4 * size, 3, 16, 16).astype("float32")
    labels = np.random.RandomState(1).randint(0, 10, (3, 4 * size)).astype("float32")
    whole, shared = _residual_network(nn.BatchNorm), _residual_network(mykv.SyncBatchNorm)
    _initialize(whole, shared, x[0])
    options = {"learning_rate": 0.05, "momentum": 0.9}
    alone = mx.gluon.Trainer(whole.collect_params(), "sgd", options, kvstore=None)
    together = mykv.DistributedTrainer(shared.collect_params(), "sgd", options)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    if hybridize is not None:
        shared.hybridize(**hybridize)
    for data, label in zip(x, labels):
        losses = []
        for net, trainer, rows in ((whole, alone, slice(None)), (shared, together, slice(rank, None, size))):
            with autograd.record():
                loss = loss_of(net(array(data[rows])), array(label[rows])).mean()
            loss.backward()
            trainer.step(1)
            losses.append(loss.asnumpy().item())
        assert np.mean(gather(losses[1])) == pytest.approx(losses[0], rel=1e-4)
    for (name, expected), actual in zip(parameters(whole).items(), parameters(shared).values()):
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-3, err_msg=name)
        assert len(set(gather(actual.tobytes()))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("float64", 1e-6)])
def test_a_mean_that_is_large_beside_the_deviations(dtype, tolerance, rank, size):
    data, gradient = _batch(0, (40, 3, 7), dtype, mean=1e4)
    net, layer = _layer(3, dtype, None)
    output, _ = _run(net, _part(data, rank, size), _part(gradient, rank, size))
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    _close(output, _part(expected.output, rank, size), tolerance)
    _close(layer.running_var.data().asnumpy(), 0.9 + 0.1 * expected.variance, 1e-6)


class _Branches(nn.HybridBlock):
    """Four calls of one layer, of which three could run in any order in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def _result(self, x):
        return self.layer(x) * 1 + self.layer(x * x) * 2 + self.layer(self.layer(x) + x) * 3

    if IS_2:

        def forward(self, x):
            return self._result(x)

    else:

        def hybrid_forward(self, F, x):
            return self._result(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True}])
def test_a_layer_that_occurs_several_times(hybridize, rank, size):
    data, gradient = _batch(0, (5, 3, 4), "float64")
    whole, shared = _Branches(nn.BatchNorm(in_channels=3)), _Branches(mykv.SyncBatchNorm(in_channels=3))
    results = []
    for net, x, dy in ((whole, data, gradient), (shared, _part(data, rank, size), _part(gradient, rank, size))):
        net.initialize()
        net.cast("float64")
        if hybridize is not None:
            net.hybridize(**hybridize)
        for _ in range(2):
            results.append(_run(net, x, dy))
    for expected, actual in zip(results[:2], results[2:]):
        _close(actual[0], _part(expected[0], rank, size), 1e-6)
        _close(actual[1], _part(expected[1], rank, size), 1e-6)


@pytest.mark.ranks(1)
def test_a_layer_that_occurs_twice_in_a_graph_with_static_shape():
    net = _Branches(mykv.SyncBatchNorm(in_channels=3))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    data = array(np.ones((2, 3), "float32"))
    net(data).wait_to_read()
    with pytest.raises(ValueError, match="occurs twice in a graph with static_shape=True"), autograd.record():
        net(data)


def _late(data):
    """The data, after some time in the engine."""
    matrix = mx.nd.ones((600, 600)) / 600
    result = matrix
    for _ in range(30):
        result = mx.nd.dot(result, matrix)
    result = data.as_nd_ndarray() + 0 * result[0, 0]
    return result.as_np_ndarray() if IS_2 else result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", _MODES)
@pytest.mark.parametrize("between", ["nothing", "evaluation", "another mode", "backward", "new arrays", "step"])
def test_calls_run_in_the_programs_order(between, hybridize, rank, size):
    """Although the input of the first call is there last, on one worker."""
    net, layer = _layer(3, "float32", hybridize, in_channels=3)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0})
    batches = [_batch(number, (5, 3, 2), "float32") for number in (0, 1)]
    for number in range(2):
        results = []
        for (data, gradient), is_first in zip(batches, (True, False)):
            x = array(_part(data, rank, size))
            x = _late(x) if is_first and number and rank == 0 else x
            with autograd.record():
                y = net(x)
            results.append(y)
            if is_first and between == "backward":
                y.backward(array(_part(gradient, rank, size)))
            elif is_first and between == "evaluation":
                net(x)
            elif is_first and between == "another mode" and hybridize is not None:
                net.hybridize()
            elif is_first and between in ("new arrays", "step"):
                net.initialize(force_reinit=True)
                if between == "step":
                    trainer.step(1, ignore_stale_grad=True)
        for y, (data, gradient) in zip(results, batches):
            expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
            _close(y.asnumpy(), _part(expected.output, rank, size), _TOLERANCE["float32"])
        if between == "another mode" and hybridize is not None:
            net.hybridize(**hybridize)


@pytest.mark.ranks(2)
def test_gradients_are_added_up_where_they_are_wanted_so(rank, size, gather):
    net, layer = _layer(3, "float64", None, in_channels=3)
    layer.gamma.grad_req = layer.beta.grad_req = "add"
    data, gradient = _batch(0, (6, 3, 2), "float64")
    x = array(_part(data, rank, size))
    x.attach_grad("add")
    for _ in range(3):
        with autograd.record():
            y = net(x)
        y.backward(array(_part(gradient, rank, size)))
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    _close(x.grad.asnumpy(), 3 * _part(expected.of_data, rank, size), 1e-12)
    _close(sum(gather(layer.gamma.grad().asnumpy())), 3 * expected.of_gamma, 1e-12)
    _close(sum(gather(layer.beta.grad().asnumpy())), 3 * expected.of_beta, 1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
def test_evaluation_is_that_of_mxnets_layer_and_needs_no_other_worker(hybridize, rank, size):
    net, layer = _layer(5, "float32", hybridize, in_channels=5)
    data, gradient = _batch(0, (7, 5, 2, 2), "float32")
    _run(net, _part(data, rank, size), _part(gradient, rank, size))
    if rank == 1:
        stock = nn.BatchNorm(in_channels=5)
        stock.initialize()
        for name, parameter in structure(layer).items():
            structure(stock)[name].set_data(parameter.data())
        np.testing.assert_array_equal(net(array(data)).asnumpy(), stock(array(data)).asnumpy())
    # ... nor does what one worker does there disturb the others.
    _run(net, _part(data, rank, size), _part(gradient, rank, size))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
@pytest.mark.parametrize("how", ["use_global_stats", "train_mode=False"])
def test_running_statistics_in_place_of_those_of_the_batch(how, hybridize, rank):
    """Gradients are then those of this worker alone, which others need not compute."""
    options = {"use_global_stats": True} if how == "use_global_stats" else {}
    net, layer = _layer(3, "float64", hybridize, in_channels=3, **options)
    rng = np.random.RandomState(0)
    mean, variance, gamma = rng.randn(3), rng.uniform(1, 2, 3), rng.randn(3)
    layer.running_mean.set_data(array(mean))
    layer.running_var.set_data(array(variance))
    layer.gamma.set_data(array(gamma))
    data, gradient = _batch(rank, (4, 3, 2), "float64")
    if rank == 1:
        x = array(data)
        x.attach_grad()
        with autograd.record(train_mode=how == "use_global_stats"):
            y = net(x)
        y.backward(array(gradient))
        normalized = (data - mean[:, None]) / np.sqrt(variance[:, None] + _EPSILON)
        _close(y.asnumpy(), normalized * gamma[:, None], 1e-6)
        _close(x.grad.asnumpy(), gradient * gamma[:, None] / np.sqrt(variance[:, None] + _EPSILON), 1e-12)
        _close(layer.gamma.grad().asnumpy(), (gradient * normalized).sum((0, 2)), 1e-12)
        _close(layer.beta.grad().asnumpy(), gradient.sum((0, 2)), 1e-12)
        np.testing.assert_array_equal(layer.running_mean.data().asnumpy(), mean)


@pytest.mark.ranks(3)
def test_process_sets(rank):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    data, gradient = _batch(0, (6, 3, 2), "float64")
    if pair.included():
        net, _ = _layer(3, "float64", None, process_set=pair)
        output, _ = _run(net, data[pair.rank() :: 2], gradient[pair.rank() :: 2])
        _close(output, _Expected(data, gradient, 1, np.ones(3), np.zeros(3)).output[pair.rank() :: 2], 1e-12)
    else:
        with pytest.raises(ValueError, match="Rank 1 is not in ProcessSet"):
            mykv.SyncBatchNorm(process_set=pair)
    mykv.remove_process_set(pair)
    if rank != 1:
        with pytest.raises(ValueError, match="was removed"), autograd.record():
            net(array(data))
    mykv.barrier()


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_with_an_engine_that_runs_each_operation_at_once(rank, size):
    data, gradient = _batch(0, (6, 3, 2), "float64")
    net, _ = _layer(3, "float64", None)
    output, of_data = _run(net, _part(data, rank, size), _part(gradient, rank, size))
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    _close(output, _part(expected.output, rank, size), 1e-12)
    _close(of_data, _part(expected.of_data, rank, size), 1e-12)


@pytest.mark.ranks(2)
def test_copies_are_layers_of_their_own(rank, size):
    _, net = _layer(3, "float64", None, in_channels=3)
    copied = copy.deepcopy(net)
    data, gradient = _batch(0, (6, 3, 2), "float64")
    nets = [net, copied] if rank == 0 else [copied, net]  # matched crosswise, they would give the same as one
    expected = _Expected(data, gradient, 1, np.ones(3), np.zeros(3))
    outputs = []
    for one in nets:
        with autograd.record():
            outputs.append(one(array((1 if one is net else 2) * _part(data, rank, size))))
    doubled = _Expected(2 * data, gradient, 1, np.ones(3), np.zeros(3))
    for one, output in zip(nets, outputs):
        _close(output.asnumpy(), _part((expected if one is net else doubled).output, rank, size), 1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keeps", [False, True])
def test_an_imported_network_only_evaluates(keeps, rank, size, tmp_path):
    net, layer = _layer(3, "float32", {}, in_channels=3)
    data = array(_batch(0, (6, 3, 2), "float32")[0])
    with autograd.record():
        net(data).wait_to_read()
    expected = net(data).asnumpy()
    net.export(str(tmp_path / "net"))
    if not keeps:
        del net, layer
        gc.collect()
    files = [str(next(tmp_path.glob(f"net-{pattern}"))) for pattern in ("symbol.json", "*.params")]
    imported = mx.gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    np.testing.assert_array_equal(imported(data).asnumpy(), expected)
    with pytest.raises(ValueError, match="has its own parameters for a SyncBatchNorm"), autograd.record():
        imported(data)
    np.testing.assert_array_equal(imported(data).asnumpy(), expected)


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 makes no symbols of blocks")
def test_a_network_of_symbols_whose_layer_one_worker_has_freed(rank, gather):
    base = nn.HybridSequential()
    base.add(nn.Dense(3, in_units=2), mykv.SyncBatchNorm(in_channels=3))
    base.initialize()
    net = mx.gluon.SymbolBlock(base(mx.sym.var("data")), mx.sym.var("data"), params=base.collect_params())
    gc.disable()
    try:
        del base
        if rank == 1:
            gc.collect()
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0})
        for step in range(3):
            with autograd.record():
                y = net(array(np.random.RandomState(2 * step + rank).rand(2, 2).astype("float32")))
            y.backward()
            trainer.step(2)
            assert np.abs(np.sum(gather(y.asnumpy().sum(0)), axis=0)).max() < 1e-4
    finally:
        gc.enable()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
def test_workers_with_other_numbers_of_channels(hybridize, rank):
    net, _ = _layer(3, "float32", hybridize)
    with autograd.record():
        y = net(array(np.ones((2, 3 + rank), "float32")))
    with pytest.raises(MXNetError, match=r"sync_batch_norm\d+/forward.*rank 0.*\(7,\).*rank 1.*\(9,\)"):
        y.asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True}])
@pytest.mark.parametrize("stock", [False, True])
def test_a_worker_in_evaluation_mode_lets_the_others_fail_and_not_wait(stock, hybridize, rank):
    net, layer = _layer(3, "float32", hybridize, in_channels=3)
    params = net.collect_params()
    trainer = mx.gluon.Trainer(params, "sgd", kvstore="mykv") if stock else mykv.DistributedTrainer(params, "sgd")
    for train_mode in (True, False, True):  # the same on all workers
        with autograd.record(train_mode=train_mode):
            loss = net(array(np.ones((2, 3), "float32"))).sum()
        loss.backward()
        trainer.step(1)
    layer.gamma.data().asnumpy()
    with autograd.record(train_mode=rank == 0):
        loss = net(array(np.ones((2, 3), "float32"))).sum()
    loss.backward()
    sentence = r"rank 1.*sync_batch_norm\d+ was called on that rank in evaluation mode in this step"
    with pytest.raises(MXNetError, match=r"rank 0.*(carries the error of|was refused by)" if rank else sentence):
        trainer.step(1)
        layer.gamma.data().asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_worker_in_evaluation_mode_whose_gradient_is_stale_too(rank, gather, kind):
    """The next step's sums are of the next step's batches."""
    net, layer = _layer(3, "float32", None, in_channels=3)
    if kind == "own":
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    else:
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="mykv")

    def step(train_mode):
        with autograd.record(train_mode=train_mode):
            loss = (net(array(np.random.RandomState(rank).rand(2, 3).astype("float32"))) ** 2).sum()
        loss.backward()
        if not train_mode:
            layer.gamma.data()._fresh_grad = False
        trainer.step(1)
        mx.nd.waitall()

    step(True)
    with pytest.raises((UserWarning, MXNetError), match="on rank 1 is stale|called on that rank in evaluation mode"):
        step(train_mode=rank == 0)
    clear_errors()
    for number in range(2):
        step(True)
        assert len(set(gather(layer.running_mean.data().asnumpy().tobytes()))) == 1
        assert layer._calls._next == (number + 3, 0)


class _Skipping:
    """Training in which rank 0 cannot read the batch of one step, and goes on with step() as always."""

    def __init__(self, kind, rank, hybridize=None, ignores_stale=False):
        self.net = nn.HybridSequential()
        layer = mykv.SyncBatchNorm(in_channels=3)
        self.net.add(nn.Dense(3, in_units=2, use_bias=False), layer, nn.Dense(1, in_units=3))
        self.net.initialize(mx.init.One())
        if hybridize is not None:
            self.net.hybridize(**hybridize)
        params = self.net.collect_params()
        if kind == "own":
            self.trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 0.1})
        else:
            self.trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1}, kvstore="mykv")
        self._rank, self._ignores_stale = rank, ignores_stale

    def _batch(self, number):
        return array(np.random.RandomState(10 * number + self._rank).rand(2, 2).astype("float32"))

    def look(self, number):
        """A picture of saliency: a call that is recorded in evaluation mode."""
        x = self._batch(number)
        x.attach_grad()
        with autograd.record(train_mode=False):
            y = self.net(x).sum()
        autograd.grad(y, [x], train_mode=False)[0].asnumpy()

    def step(self, number, skips="", passes=1):
        """`skips`: where reading the batch of the last pass fails on rank 0, "before" or "after" the forward pass."""
        with contextlib.suppress(OSError):
            for last in [False] * (passes - 1) + [True]:
                if skips == "before" and last and self._rank == 0:
                    raise OSError("no such image")
                with autograd.record():
                    loss = (self.net(self._batch(number)) ** 2).sum()
                if skips == "after" and last and self._rank == 0:
                    raise OSError("no such image")
                loss.backward()
        self.trainer.step(2, ignore_stale_grad=self._ignores_stale)
        mx.nd.waitall()

    def weights(self):
        return [one.data().asnumpy() for one in self.net.collect_params().values() if one.grad_req != "null"]


def _assert_same_weights(one, other, gather):
    for actual, expected in zip(one.weights(), other.weights()):
        np.testing.assert_array_equal(actual, expected)
        assert len(set(gather(actual.tobytes()))) == 1


_STALE = r"that rank's step failed after {} calls of sync_batch_norm\d+ in training: .*rank 0 is stale"
_TOLD_RANK_1 = {
    ("before", "plain"): rf"/forward/2\.0 was refused by rank 0: {_STALE.format(0)}",
    ("before", "saliency"): rf"/forward/2\.0 was refused by rank 0: {_STALE.format(0)}",
    ("before", "ignore"): r"/forward/2\.0 was refused by rank 0: that rank took its step after 0 calls of sync_b",
    ("after", "plain"): rf"/backward/2\.0 was refused by rank 0: {_STALE.format(1)}",
    ("after", "saliency"): rf"/backward/2\.0 was refused by rank 0: {_STALE.format(1)}",
    ("after", "ignore"): r"rank 1 waits in sync_batch_norm\d+/backward/2\.0 for rank 0",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["plain", "ignore", "saliency"])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_batch_that_one_worker_skips_spoils_no_other_step(kind, place, how, rank, gather):
    """Its step fails on all workers, with the cause. The other steps are those of a run without it."""
    skipping, expected = (_Skipping(kind, rank, ignores_stale=how == "ignore") for _ in range(2))
    for number in (0, 1):
        if how == "saliency":
            skipping.look(number)
        skipping.step(number)
    if how == "saliency":
        skipping.look(2)
    told = r"rank 0 is stale" if how != "ignore" else r"rainer\d+/bucket0"
    with pytest.raises((UserWarning, MXNetError), match=_TOLD_RANK_1[place, how] if rank else told):
        skipping.step(2, skips=place)
    clear_errors()
    for number in (3, 4, 5):
        skipping.step(number)
    for number in (0, 1, 3, 4, 5):
        expected.step(number)
    _assert_same_weights(skipping, expected, gather)
    assert skipping.net[1]._calls._next == (6, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("hybridize", [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}])
def test_a_skipped_batch_of_a_hybridized_network(hybridize, place, rank, gather):
    skipping, expected = (_Skipping("own", rank, hybridize) for _ in range(2))
    for number in (0, 1):
        skipping.step(number)
    with pytest.raises((UserWarning, MXNetError), match="rank 0 is stale"):
        skipping.step(2, skips=place)
    clear_errors()
    for number in (3, 4, 5):
        skipping.step(number)
    for number in (0, 1, 3, 4, 5):
        expected.step(number)
    _assert_same_weights(skipping, expected, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_skipped_batch_among_several_of_a_step(kind, rank, gather):
    """Rank 0 has made a backward pass, so nothing is stale there, and its step waits for the others."""
    skipping, expected = (_Skipping(kind, rank) for _ in range(2))
    skipping.step(0, passes=2)
    told = r"/forward/1\.1 was refused by rank 0: that rank took its step after 1 calls of sync_batch_norm"
    with pytest.raises(MXNetError, match=told if rank else r"rainer\d+/bucket0 was refused by rank 1"):
        skipping.step(1, skips="before", passes=2)
    clear_errors()
    skipping.step(2, passes=2)
    for number in (0, 2):
        expected.step(number, passes=2)
    _assert_same_weights(skipping, expected, gather)


@pytest.mark.ranks(2)
def test_a_skipped_batch_among_many_of_a_step(rank, gather):
    """The other worker waits in all backward passes of the failed step."""
    skipping, expected = (_Skipping("own", rank) for _ in range(2))

    def step(run, number, skips=False):
        calls = 70 - (skips and rank == 0)
        with autograd.record():
            loss = sum((run.net(run._batch(number + call)) ** 2).sum() for call in range(calls))
        if calls == 70:
            loss.backward()
        run.trainer.step(140)
        mx.nd.waitall()

    step(skipping, 0)
    with pytest.raises((UserWarning, MXNetError), match="rank 0 is stale"):
        step(skipping, 100, skips=True)
    clear_errors()
    step(skipping, 200)
    for number in (0, 200):
        step(expected, number)
    _assert_same_weights(skipping, expected, gather)


@pytest.mark.ranks(1)
def test_a_backward_pass_that_begins_while_another_worker_is_found_to_wait_for_it(monkeypatch):
    run = _Skipping("own", 0)
    run.step(0)
    calls = run.net[1]._calls
    refused = []

    class Core:
        def waiting_for_this(self, names):
            calls.runs_backward(batch_norm_calls.Number(1, 0))
            return [[1] for _ in names]

        def refuse(self, name, reason):
            refused.append(name)

    with autograd.record():
        run.net(run._batch(1))
    with pytest.raises(UserWarning, match="is stale"):
        run.trainer.step(2)
    mx.nd.waitall()
    monkeypatch.setattr(type(calls.process_set), "_core", Core())
    calls.look()
    monkeypatch.undo()
    assert refused == [f"{calls.scope()}/forward/1.1"]


@pytest.mark.ranks(2)
def test_a_skipped_batch_in_the_first_step(rank, gather):
    """The workers agree on the layer's number in its first call, which rank 0 makes one step later."""
    skipping, expected = (_Skipping("own", rank) for _ in range(2))
    with pytest.raises((UserWarning, MXNetError), match="rank 0 is stale"):
        skipping.step(0, skips="before")
    clear_errors()
    for number in (1, 2, 3):
        skipping.step(number)
        expected.step(number)
    _assert_same_weights(skipping, expected, gather)
    assert len(set(gather(tuple(skipping.net[1]._calls._next)))) == 1


@pytest.mark.ranks(2)
def test_steps_of_two_trainers_and_steps_that_fail_elsewhere_are_counted_alike(rank, gather):
    """Two trainers have the layer. One worker fails in a step of one of them, and leaves out an update."""
    run = _Skipping("own", rank)
    other = mykv.DistributedTrainer(run.net.collect_params(), "sgd", {"learning_rate": 0.1})
    run.step(0)
    for number, wrong in enumerate(("batch size", "update", "")):
        with autograd.record():
            loss = (run.net(run._batch(number)) ** 2).sum()
        loss.backward()
        with contextlib.suppress(MXNetError, TypeError, ValueError, RuntimeError):
            if wrong == "update":
                other.allreduce_grads()
                if rank == 0:
                    other.update(2)
            else:
                other.step("many" if wrong == "batch size" and rank == 0 else 2)
            if wrong != "update":  # rank 0's update waits for the next step of rank 1
                mx.nd.waitall()
        run.net[1].running_mean.data().wait_to_read()
        if wrong != "update":
            clear_errors()
        assert len(set(gather(tuple(run.net[1]._calls._next)))) == 1
        assert run.net[1]._calls._next == (number + 2, 0)
    with contextlib.suppress(MXNetError):  # the update that rank 1 has left out
        run.step(8)
    clear_errors()
    run.step(9)
    assert len(set(gather(run.net[1].running_mean.data().asnumpy().tobytes()))) == 1


def _set_grad_req(net, value):
    for one in net.collect_params().values():
        if not one.name.endswith(("running_mean", "running_var")):
            one.grad_req = value


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "between"),
    [
        ("own", "all is frozen"),
        ("stock", "all is frozen"),
        ("own", "another trainer"),
        ("stock", "stale gradients are ignored"),
        ("own", "all in evaluation mode"),
        ("own", "a static graph is trained"),  # its operators run again without a call of the layer
        ("own", "a static graph is evaluated first"),
    ],
)
def test_a_worker_alone_that_records_in_evaluation_mode_where_no_worker_is_missing(kind, between, rank, gather):
    """A picture of saliency, say, in a step in which no worker calls the layer in training."""
    is_static = "static" in between
    net, layer = _layer(3, "float32", {"static_alloc": is_static, "static_shape": is_static}, in_channels=3)
    other = nn.Dense(1, in_units=3)
    other.initialize()

    def trainer_of(block):
        params = block.collect_params()
        return (
            mykv.DistributedTrainer(params, "sgd") if kind == "own" else mx.gluon.Trainer(params, "sgd", kvstore="mykv")
        )

    trainer, another = trainer_of(net), trainer_of(other)

    def recorded(block, train_mode):
        with autograd.record(train_mode=train_mode):
            loss = (block(array(np.random.RandomState(rank).rand(2, 3).astype("float32"))) ** 2).sum()
        loss.backward()

    def train():
        recorded(net, True)
        trainer.step(1)
        mx.nd.waitall()
        assert len(set(gather(layer.running_mean.data().asnumpy().tobytes()))) == 1

    def look(rows):
        image = array(np.ones((rows, 3), "float32"))
        image.attach_grad()
        with autograd.record(train_mode=False):
            loss = net(image).sum()
        loss.backward(train_mode=False)
        image.grad.asnumpy()

    if between == "a static graph is evaluated first" and rank == 1:
        look(2)
    train()
    if between == "all is frozen":
        _set_grad_req(net, "null")
    elif between == "all in evaluation mode":
        recorded(net, False)
    elif is_static:
        train()
        recorded(net, True)
    if rank == 1:
        look(4)  # a batch of another size begins a static graph anew
    if between == "another trainer":
        recorded(other, True)
        another.step(1)
    else:
        trainer.step(1, ignore_stale_grad=between == "stale gradients are ignored")
    _set_grad_req(net, "write")
    for _ in range(2):
        train()
    assert len(set(gather(tuple(layer._calls._next)))) == 1


def _fork_as_a_data_loader(monkeypatch):
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    assert process.exitcode == 0


def _run_a_program(monkeypatch):
    """As before Python 3.10: by fork(), without the functions of os.register_at_fork()."""
    if sys.version_info >= (3, 10):
        monkeypatch.setattr(subprocess, "_USE_VFORK", False)
    subprocess.run(["true"], check=True)


def _run_a_program_as_another_user(monkeypatch):
    subprocess.run(["true"], check=True, **({"user": os.getuid()} if sys.version_info >= (3, 9) else {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fork", [_fork_as_a_data_loader, _run_a_program, _run_a_program_as_another_user])
def test_a_worker_may_fork_while_the_layer_is_under_way(rank, monkeypatch, fork):
    """As a DataLoader does at the beginning of each epoch. MXNet waits in a fork for operators that need Python."""
    net = mykv.SyncBatchNorm(in_channels=3)
    net.initialize()
    data = array(np.random.RandomState(rank).rand(64, 3, 16, 16).astype("float32"))
    for _ in range(20):
        with autograd.record():
            loss = (net(data) ** 2).mean()
        loss.backward()
        fork(monkeypatch)
    assert np.isfinite(loss.asnumpy()).all()


@pytest.mark.ranks(1)
def test_wrong_arguments(rank):
    with pytest.raises(ValueError, match="num_devices must be 1, not 2"):
        mykv.SyncBatchNorm(num_devices=2)
    with pytest.raises(TypeError, match="process_set must be a ProcessSet, not int"):
        mykv.SyncBatchNorm(process_set=0)
    layer = mykv.SyncBatchNorm(in_channels=3, num_devices=1)
    layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="is on 2 devices of rank 0, but only one device is supported"):
        layer(array(np.ones((2, 3), "float32")))


@pytest.mark.ranks(1)
def test_files_load_into_mxnets_layer_and_back(tmp_path):
    layer, stock = mykv.SyncBatchNorm(in_channels=3), nn.BatchNorm(in_channels=3)
    layer.initialize()
    stock.initialize()
    fill(layer, 1)
    file = str(tmp_path / "layer.params")
    layer.save_parameters(file)
    stock.load_parameters(file)
    layer.load_parameters(file)
    for name, values in parameters(stock).items():
        np.testing.assert_array_equal(values, parameters(layer)[name])


@pytest.mark.parametrize("shape", [(3, 2, 4), (1, 1, 1), (5, 700, 400), (40, 3, 20000), (1, 2, 300000), (0, 3, 2)])
def test_moments_of_parts_are_those_of_the_whole(shape):
    data = (10 + np.random.RandomState(0).randn(*shape)).astype("float32")
    cut = shape[0] // 3
    total = moments.sums(data[:cut]) + moments.sums(data[cut:])
    assert total[-1] == shape[0] * shape[2] == data.size / shape[1]
    if math.prod(shape):
        batch = moments.moments(total)
        np.testing.assert_allclose(batch.mean, data.mean((0, 2), dtype="float64"), rtol=1e-12)
        np.testing.assert_allclose(batch.variance, data.astype("float64").var((0, 2)), rtol=1e-6, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True}])
def test_ctrl_c_in_the_first_forward_pass(rank, gather, hybridize):
    net = nn.HybridSequential()
    net.add(mykv.SyncBatchNorm(in_channels=2))
    net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)

    def forward():
        with autograd.record():
            y = net(array(np.full((1, 2), rank, "float32")))
        return y.asnumpy().tolist()

    if rank == 1:
        with interrupted_after(0.3, KeyboardInterrupt):
            forward()
    else:
        time.sleep(1)
    assert gather(np.round(forward(), 2).tolist()) == [[[-1, -1]], [[1, 1]]]


@pytest.mark.ranks(2)
def test_other_numbers_of_steps_before_init(rank, gather):
    net = nn.HybridSequential()
    net.add(mykv.SyncBatchNorm(in_channels=1))
    net.initialize()
    mykv.init()
    mykv.shutdown()
    mykv.init(comm=[rank])
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0})

    def step():
        with autograd.record():
            y = net(array(np.array([[1.0 + rank], [3.0 + rank]], "float32")))
            loss = (y * y * y).sum()
        loss.backward()
        trainer.step(2)
        return y.asnumpy().ravel()

    for _ in range(2 + rank):
        step()
    mykv.shutdown()
    mykv.init()
    for _ in range(2):
        outputs = np.concatenate(gather(step()))
        np.testing.assert_allclose(outputs, (np.array([1, 3, 2, 4]) - 2.5) / np.sqrt(1.25), rtol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 keeps the custom operators of graphs")
@pytest.mark.parametrize("hybridize", _MODES)
def test_a_dropped_network_leaves_nothing(rank, hybridize):
    gc.collect()  # networks of earlier tests
    before = set(batch_norm_calls.of_key)
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), mykv.SyncBatchNorm(in_channels=2))
    net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)
    with autograd.record():
        loss = net(array(np.ones((1, 2), "float32"))).sum()
    loss.backward()
    mx.nd.waitall()
    del net, loss
    for _ in range(2):
        gc.collect()
        mx.nd.waitall()
    assert set(batch_norm_calls.of_key) <= before

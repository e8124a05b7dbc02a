"""Networks of other people, layers with memory, and layers that users write: each step is that of one process.

The workers' step is compared with one process that adds up the gradients of the workers' batches. So BatchNorm, which
normalizes each worker's batch for itself, is compared as well.
"""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, array, checksum, mx, structure, value
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision

_BATCH = 4  # of one worker
_SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
_MODES = {"imperative": None, "hybridized": {}, "static": {"static_alloc": True, "static_shape": True}}


def _sequence(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def _concurrent():
    branches = nn.HybridConcatenate(axis=1) if IS_2 else gluon.contrib.nn.HybridConcurrent(axis=1)
    branches.add(nn.Conv2D(8, 3, padding=1), nn.Conv2D(5, 1))
    return _sequence(branches, nn.PReLU(), nn.InstanceNorm(), nn.Conv2DTranspose(7, 2, strides=2), nn.LayerNorm())


class _Sigmoid(autograd.Function):
    """An operator that a user has written in Python."""

    def forward(self, x):
        y = 1 / (1 + (-x).exp()) if not IS_2 else 1 / (1 + mx.np.exp(-x))
        self.save_for_backward(y)
        return y

    def backward(self, dy):
        (y,) = self.saved_tensors
        return dy * y * (1 - y)


class _OwnLayers(gluon.Block):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(8), nn.Dense(3)

    def forward(self, x):
        return self.second(_Sigmoid()(self.first(x)))


def _recurrent(kind, **options):
    return lambda: _sequence(nn.Embedding(30, 16), kind(16, 2, layout="NTC", **options), nn.Dense(30, flatten=False))


def _unrolled():
    cell = (rnn.SequentialRNNCell if IS_2 else rnn.HybridSequentialRNNCell)()
    cell.add(rnn.LSTMCell(8, input_size=8))
    cell.add(rnn.ResidualCell(rnn.GRUCell(8, input_size=8)))

    class Unrolled(gluon.Block):
        def __init__(self):
            super().__init__()
            self.cell, self.last = cell, nn.Dense(4)

        def forward(self, x):
            outputs, _ = self.cell.unroll(5, x, merge_outputs=True, layout="NTC")
            return self.last(outputs)

    return Unrolled()


# What makes the network; the shape of a sample; how many words its integers name, or None for images.
_NETWORKS = {
    "LSTM": (_recurrent(rnn.LSTM), (6,), 30),
    "bidirectional GRU": (_recurrent(rnn.GRU, bidirectional=True), (6,), 30),
    "unrolled cells": (_unrolled, (5, 8), None),
    "an operator in Python": (_OwnLayers, (6,), None),
    "branches": (_concurrent, (3, 15, 15), None),
    "3D convolutions": (
        lambda: _sequence(nn.Conv3D(6, 3), nn.MaxPool3D(2), nn.BatchNorm(), nn.Swish(), nn.Dense(4)),
        (2, 9, 9, 9),
        None,
    ),
    "MobileNet": (lambda: vision.mobilenet0_25(classes=10), (3, 64, 64), None),
    "MobileNet 2": (lambda: vision.mobilenet_v2_0_25(classes=10), (3, 64, 64), None),
    "ResNet-18": (lambda: vision.resnet18_v2(classes=10), (3, 32, 32), None),
}
_SMALL = [name for name in _NETWORKS if "Net" not in name]
_ZOO = [name for name in _NETWORKS if "Net" in name]


def _batch(shape, words, step, worker):
    rng = np.random.RandomState(100 * step + worker)
    if words is None:
        return array(rng.randn(_BATCH, *shape).astype("float32"))
    return array(rng.randint(0, words, (_BATCH, *shape)).astype("float32"))


def _backward(net, x):
    with autograd.record():
        loss = (net(x).reshape((_BATCH, -1)) ** 2).mean(axis=1)
    loss.backward()


def _trainer(kind, net, size):
    params = net.collect_params()
    if kind.startswith("own"):
        return mykv.DistributedTrainer(params, *_SGD, update_on_kvstore="store" in kind), _BATCH
    return gluon.Trainer(params, *_SGD, kvstore="mykv", update_on_kvstore="store" in kind), _BATCH * size


def _made(make, mode, x):
    net = make()
    net.initialize(mx.init.Uniform(0.2))
    if mode is not None:
        net.hybridize(**mode)
    with autograd.pause():
        net(x)
    return net


def _compare(name, mode, kind, rank, size, gather):
    make, shape, words = _NETWORKS[name]
    mx.random.seed(rank)
    net, alone = (_made(make, _MODES[mode], _batch(shape, words, 0, rank)) for _ in range(2))
    mykv.broadcast_parameters(net.collect_params())
    for given, copy in zip(structure(net).values(), structure(alone).values()):
        copy.set_data(given.data())
    trainer, batch_size = _trainer(kind, net, size)
    trainer_alone = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    trained = [one for one in structure(alone).values() if one.grad_req != "null"]
    for step in range(3):
        _backward(net, _batch(shape, words, step, rank))
        trainer.step(batch_size)
        sums = [0] * len(trained)
        for worker in range(size):
            _backward(alone, _batch(shape, words, step, worker))
            sums = [one + parameter.grad() for one, parameter in zip(sums, trained)]
        for one, parameter in zip(sums, trained):
            parameter.grad()[:] = one
        trainer_alone.step(_BATCH * size)
    for (key, mine), expected in zip(structure(net).items(), structure(alone).values()):
        if mine.grad_req != "null":
            scale = np.abs(value(expected.data())).max()
            np.testing.assert_allclose(value(mine.data()), value(expected.data()), atol=1e-3 * scale, err_msg=key)
    trained_bits = [value(one.data()).tobytes() for one in structure(net).values() if one.grad_req != "null"]
    assert len(set(gather(tuple(trained_bits)))) == 1


_KINDS = ["own", "own, on the store", "stock", "stock, on the store"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", _SMALL)
@pytest.mark.parametrize("mode", list(_MODES))
def test_layers_that_users_have(name, mode, rank, size, gather):
    if mode != "imperative" and name in ("unrolled cells", "an operator in Python"):
        pytest.skip("a Block in Python is not hybridized")
    for kind in _KINDS:
        _compare(name, mode, kind, rank, size, gather)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", _ZOO)
@pytest.mark.parametrize("mode", list(_MODES))
@pytest.mark.parametrize("kind", _KINDS)
def test_networks_of_the_model_zoo(name, mode, kind, rank, size, gather):
    _compare(name, mode, kind, rank, size, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", _KINDS)
def test_an_exported_network_is_trained_on(kind, rank, size, gather, tmp_path):
    given = _sequence(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Flatten(), nn.Dense(5))
    mx.random.seed(rank)
    given.initialize(mx.init.Xavier())
    given.hybridize()
    given(_batch((3, 9, 9), None, 0, rank))
    file = str(tmp_path / "net")
    given.export(file)
    net = gluon.SymbolBlock.imports(f"{file}-symbol.json", ["data"], f"{file}-0000.params")
    trainer, batch_size = _trainer(kind, net, size)
    for step in range(3):
        _backward(net, _batch((3, 9, 9), None, step, rank))
        trainer.step(batch_size)
    mykv.check_in_step(net.collect_params())  # running means differ, as those of any BatchNorm
    assert len(set(gather(checksum(net)))) == size
    mykv.sync_aux_params(net.collect_params())
    assert len(set(gather(checksum(net)))) == 1

"""A compressor of the user, with Horovod's interface: what compress() returns is summed, decompress() gets the sum."""

from __future__ import annotations

import re

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, checksum, clear_errors, dense_network, mx, parameters
from mxnet import autograd
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1})
_BATCH = 4
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


class _Half:
    """With static methods, as Horovod's FP16Compressor; the class itself is passed."""

    @staticmethod
    def compress(tensor):
        return tensor.astype("float16"), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.astype(ctx)


class _Nothing:
    """An object without a repr of its own, which returns the array itself."""

    def compress(self, tensor):
        return tensor, None

    def decompress(self, tensor, ctx):
        return tensor


class _Part:
    """Sends every second element of the flat gradient, doubled, so that sums of another shape travel."""

    def __init__(self):
        self.seen = []

    def compress(self, tensor):
        return mx.nd.array(tensor.asnumpy().reshape(-1)[::2] * 2, dtype=tensor.dtype), tensor

    def decompress(self, tensor, ctx):
        whole = np.zeros(ctx.size, ctx.dtype)
        whole[::2] = tensor.asnumpy() / 2
        self.seen.append(tensor.asnumpy())
        return array(whole.reshape(ctx.shape))


def _backward(net, rank, step):
    values = np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, 6)).astype("float32")
    with autograd.record():
        loss = (net(array(values)) ** 2).sum()
    loss.backward()


def _trained(rank, steps=3, **options):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, **options)
    for step in range(steps):
        _backward(net, rank, step)
        trainer.step(_BATCH)
    return net


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256}, {"gradient_predivide_factor": 4.0}], ids=str)
def test_compressors_of_the_user(rank, size, gather, options):
    plain = parameters(_trained(rank))
    for compressor, tolerance in ((_Half, 2e-3), (_Half(), 2e-3), (_Nothing(), 1e-6)):
        net = _trained(rank, compression=compressor, **options)
        assert len(set(gather(checksum(net)))) == 1
        for name, values in parameters(net).items():
            np.testing.assert_allclose(values, plain[name], rtol=tolerance, atol=tolerance, err_msg=name)
    half = parameters(_trained(rank, compression=_Half))
    assert any((half[name] != plain[name]).any() for name in plain)


@pytest.mark.smoke
@pytest.mark.ranks(4, env=_HOSTS)
def test_on_two_hosts(rank, size, gather):
    plain, net = parameters(_trained(rank)), _trained(rank, compression=_Half)
    assert len(set(gather(checksum(net)))) == 1
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, plain[name], rtol=2e-3, atol=2e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"reduce_method": "sum"}], ids=str)
def test_decompress_gets_the_sum(rank, size, options):
    parameter = mx.gluon.Parameter("weight", shape=(3, 3))
    parameter.initialize(init=mx.init.Zero())
    compressor = _Part()
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, compression=compressor, **options)
    parameter.grad()[:] = array(np.arange(9, dtype="float32").reshape(3, 3) * (rank + 1))
    parameter.data()._fresh_grad = True
    trainer.step(1)
    expected = np.arange(9, dtype="float32") * 3
    expected[1::2] = 0
    np.testing.assert_array_equal(compressor.seen[0], expected[::2] * 2)
    factor = 1 if options else 0.5
    np.testing.assert_array_equal(-parameter.data().asnumpy().reshape(-1), expected * factor)


class _NoTuple(_Half):
    @staticmethod
    def compress(tensor):
        return tensor


class _OtherShape(_Half):
    @staticmethod
    def decompress(tensor, ctx):
        return tensor.reshape((-1,))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "compressor, message",
    [(_NoTuple, "compress() of the compressor must return a tuple"), (_OtherShape, "must return an NDArray of shape")],
    ids=["compress", "decompress"],
)
def test_wrong_results_are_errors(rank, size, compressor, message):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, compression=compressor)
    before = checksum(net)
    _backward(net, rank, 0)
    with pytest.raises(TypeError, match=re.escape(message)):
        trainer.step(_BATCH)
    clear_errors()
    assert checksum(net) == before


class _FailsOnOne(_Half):
    rank = 0

    @classmethod
    def compress(cls, tensor):
        if cls.rank == 1:
            raise ValueError("a fault in the compressor")
        return _Half.compress(tensor)


@pytest.mark.ranks(2)
def test_an_error_on_one_worker_reaches_all(rank, size):
    _FailsOnOne.rank = rank
    with pytest.raises((ValueError, MXNetError), match="a fault in the compressor"):
        checksum(_trained(rank, steps=1, compression=_FailsOnOne))
    clear_errors()


@pytest.mark.ranks(1)
def test_what_is_refused(rank, size):
    given = dense_network(0).collect_params()
    for options, error, message in (
        ({"compression": object()}, TypeError, "needs methods compress(tensor) and decompress(tensor, ctx)"),
        ({"compression": _Half, "update_on_kvstore": True}, ValueError, "_Half cannot be combined with update_on_kv"),
        ({"compression": _Half, "compression_params": {"type": "topk"}}, ValueError, "not both"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            mykv.DistributedTrainer(given, *_SGD, **options)
    if not mx.__version__.startswith("2."):
        net = nn.Embedding(4, 3, sparse_grad=True)
        net.initialize()
        with pytest.raises(NotImplementedError, match="_Half needs dense gradients"):
            mykv.DistributedTrainer(net.collect_params(), *_SGD, compression=_Half)

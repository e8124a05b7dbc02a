"""Training with N workers equals training in one process with N times the batch."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, checksum, conv_network, dense_network, mx, parameters
from mxnet import autograd, gluon

_BATCH = 4  # of one worker
_STEPS = 6
_TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})
_ADAM = ("adam", {"learning_rate": 0.01})

_HYBRIDIZE = {
    "imperative": None,
    "hybridized": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def _distributed(params, optimizer, size):
    # step() takes a worker's batch: gradients are averaged over workers
    return mykv.DistributedTrainer(params, *optimizer), _BATCH


def _stock(params, optimizer, size):
    # step() takes the global batch: the store sums
    mykv.broadcast_parameters(params)
    return gluon.Trainer(params, *optimizer, kvstore=mx.kv.create("mykv")), _BATCH * size


def _stock_by_name(params, optimizer, size):
    mykv.broadcast_parameters(params)
    return gluon.Trainer(params, *optimizer, kvstore="mykv"), _BATCH * size


def _copying(params, optimizer, size):
    # gradients are not in shared memory: each is copied in and out
    return mykv.DistributedTrainer(params, *optimizer, bucket_bytes=0), _BATCH


def _small_buckets(params, optimizer, size):
    return mykv.DistributedTrainer(params, *optimizer, bucket_bytes=256), _BATCH


_TRAINERS = {
    "DistributedTrainer": _distributed,
    "DistributedTrainer, copying": _copying,
    "DistributedTrainer, small buckets": _small_buckets,
    "Trainer": _stock,
    "Trainer by name": _stock_by_name,
}
_NETWORKS = {"dense": (dense_network, (6,), 2), "conv": (conv_network, (1, 8, 8), 3)}


def _data(step: int, rank: int, shape: tuple, outputs: int, dtype: str):
    rng = np.random.RandomState(1000 * step + rank)
    return rng.randn(_BATCH, *shape).astype(dtype), rng.randn(_BATCH, outputs).astype(dtype)


def _l2(outputs, targets, weight: float = 1.0, ctx=None):
    """Half the mean squared difference of each row, by hand: MXNet 2.0 rounds the result of its L2Loss to float32."""
    factors = np.full(targets.shape, 0.5 * weight / targets.shape[1], dtype=targets.dtype)
    return ((outputs - array(targets, ctx=ctx)) ** 2 * array(factors, ctx=ctx)).sum(axis=1)


def _train(net, trainer, batch_size: int, data) -> list[float]:
    """Train on the batches in `data`; the sum of the losses over each batch."""
    losses = []
    for x, y in data:
        # MXNet gives 1 / batch_size to its optimizers as a float32, which is too coarse to compare float64 training.
        divisor = batch_size if x.dtype == "float64" else 1
        with autograd.record():
            loss = _l2(net(array(x)), y, 1 / divisor)
        loss.backward()
        trainer.step(batch_size // divisor)
        losses.append(float(loss.asnumpy().sum()) * divisor)
    return losses


def _check(gather, rank, size, network: str, dtype: str, trainer: str, hybridize, optimizer) -> None:
    build, shape, outputs = _NETWORKS[network]
    net = build(seed=rank, dtype=dtype)
    if hybridize is not None:
        net.hybridize(**hybridize)
    worker, batch_size = _TRAINERS[trainer](net.collect_params(), optimizer, size)
    mine = [_data(step, rank, shape, outputs, dtype) for step in range(_STEPS)]
    losses = np.sum(gather(_train(net, worker, batch_size, mine)), axis=0)

    alone = build(seed=0, dtype=dtype)
    everyone = [
        [np.concatenate(parts) for parts in zip(*(_data(step, k, shape, outputs, dtype) for k in range(size)))]
        for step in range(_STEPS)
    ]
    one = gluon.Trainer(alone.collect_params(), *optimizer, kvstore=None)
    expected_losses = _train(alone, one, _BATCH * size, everyone)

    assert len(set(gather(checksum(net)))) == 1, "the workers hold different weights"
    tolerance = _TOLERANCE[dtype]
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance, atol=tolerance)
    expected = parameters(alone)
    for name, values in parameters(net).items():
        assert values.dtype == dtype
        np.testing.assert_allclose(values, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
    start = parameters(build(seed=0, dtype=dtype))
    assert all(abs(expected[name] - start[name]).max() > 1e-3 for name in expected), "nothing was trained"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", _HYBRIDIZE.values(), ids=_HYBRIDIZE)
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.smoke), "float32"])
@pytest.mark.parametrize("network", _NETWORKS)
@pytest.mark.parametrize("trainer", ["DistributedTrainer", "DistributedTrainer, small buckets", "Trainer"])
def test_two_workers_equal_one_process(gather, rank, size, network, dtype, trainer, hybridize):
    _check(gather, rank, size, network, dtype, trainer, hybridize, _SGD)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("trainer", _TRAINERS)
def test_any_number_of_workers_equals_one_process(gather, rank, size, dtype, trainer):
    _check(gather, rank, size, "dense", dtype, trainer, {}, _SGD)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trainer", _TRAINERS)
def test_other_optimizers(gather, rank, size, trainer):
    _check(gather, rank, size, "conv", "float64", trainer, {}, _ADAM)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("trainer", ["DistributedTrainer", "Trainer"])
def test_workers_on_two_hosts(gather, rank, size, trainer):
    _check(gather, rank, size, "conv", "float64", trainer, {}, _SGD)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trainer", ["DistributedTrainer", "Trainer"])
def test_workers_of_two_devices_each(gather, rank, size, trainer):
    """Two workers of two devices equal one process with the four batches."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(seed=rank, dtype="float64", ctx=devices)
    worker, batch_size = _TRAINERS[trainer](net.collect_params(), _SGD, size)
    # Each device holds a whole batch of its own, so the worker's batch is twice as large.
    batch_size *= 2
    for step in range(_STEPS):
        with autograd.record():
            losses = []
            for number, device in enumerate(devices):
                x, y = _data(step, 2 * rank + number, (6,), 2, "float64")
                losses.append(_l2(net(array(x, ctx=device)), y, 1 / batch_size, ctx=device))
        autograd.backward(losses)
        worker.step(1)

    alone = dense_network(seed=0, dtype="float64")
    everyone = [
        [np.concatenate(parts) for parts in zip(*(_data(step, k, (6,), 2, "float64") for k in range(2 * size)))]
        for step in range(_STEPS)
    ]
    one = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    _train(alone, one, 2 * _BATCH * size, everyone)
    expected = parameters(alone)
    for parameter, values in zip(net.collect_params().values(), expected.values()):
        for device in devices:
            np.testing.assert_allclose(parameter.data(device).asnumpy(), values, rtol=1e-10, atol=1e-10)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_clipping_between_allreduce_and_update(gather, rank, size):
    def clipped(net, trainer, batch_size, data):
        l2 = gluon.loss.L2Loss()
        for x, y in data:
            with autograd.record():
                loss = l2(net(array(x)), array(y))
            loss.backward()
            trainer.allreduce_grads()
            grads = [parameter.grad() for parameter in net.collect_params().values()]
            gluon.utils.clip_global_norm(grads, 0.1 * batch_size)
            trainer.update(batch_size)

    net = dense_network(seed=rank, dtype="float32")
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    clipped(net, trainer, _BATCH, [_data(step, rank, (6,), 2, "float32") for step in range(_STEPS)])
    alone = dense_network(seed=0, dtype="float32")
    everyone = [
        [np.concatenate(parts) for parts in zip(*(_data(step, k, (6,), 2, "float32") for k in range(size)))]
        for step in range(_STEPS)
    ]
    one = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None, update_on_kvstore=False)
    clipped(alone, one, _BATCH * size, everyone)
    for name, values in parameters(alone).items():
        np.testing.assert_allclose(parameters(net)[name], values, rtol=1e-5, atol=1e-5)
    assert len(set(gather(checksum(net)))) == 1

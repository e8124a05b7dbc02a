"""Several devices in one process: summed there, then over the workers; the same devices in one order everywhere."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import (
    IS_2,
    MXNetError,
    array,
    checksum,
    clear_errors,
    dense_network,
    mx,
    numbers,
    parameters,
    structure,
    value,
)
from kvstore_plugin.compat.argument_errors import ArgumentValueError
from mxnet import autograd, gluon

_CPUS = [mx.cpu(number) for number in range(3)]


@pytest.fixture
def store():
    return mx.kv.create("mykv")


def _on(devices, rank=0, shape=(3, 5)):
    return [array(numbers(10 * rank + device.device_id, shape), ctx=device) for device in devices]


def _sum(size, devices, shape=(3, 5)):
    return sum(numbers(10 * rank + device.device_id, shape) for rank in range(size) for device in devices)


def _check(outs, devices, expected):
    for out, device in zip(outs, devices):
        assert out.context == device
        np.testing.assert_array_equal(value(out), expected)


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
def test_pushpull_sums_over_devices_and_workers(store, rank, size):
    values = _on(_CPUS, rank)
    store.pushpull("in place", values)
    _check(values, _CPUS, _sum(size, _CPUS))
    outs = _on(_CPUS)
    store.pushpull("out", _on(_CPUS, rank), outs)
    _check(outs, _CPUS, _sum(size, _CPUS))
    one = array(np.zeros((3, 5), "float32"))
    store.pushpull("one out", _on(_CPUS, rank), one)
    np.testing.assert_array_equal(value(one), _sum(size, _CPUS))
    outs = _on(_CPUS)
    store.pushpull("one value", _on(_CPUS[:1], rank)[0], outs)
    _check(outs, _CPUS, _sum(size, _CPUS[:1]))


@pytest.mark.ranks(2)
def test_broadcast_reaches_every_device(store, rank):
    outs = _on(_CPUS, rank)
    store.broadcast("key", outs[0], out=outs)
    _check(outs, _CPUS, numbers(0, (3, 5)))


@pytest.mark.ranks(2)
def test_init_push_and_pull(store, rank, size):
    store.init("key", array(numbers(rank, (3, 5))))
    store.push("key", _on(_CPUS, rank))
    outs = _on(_CPUS)
    store.pull("key", outs)
    _check(outs, _CPUS, _sum(size, _CPUS))


@pytest.mark.ranks(2)
def test_unequal_numbers_of_devices_are_summed(store, rank, size):
    devices = _CPUS[: 1 + rank]
    values = _on(devices, rank)
    store.pushpull("key", values)
    _check(values, devices, numbers(0, (3, 5)) + numbers(10, (3, 5)) + numbers(11, (3, 5)))


@pytest.mark.ranks(2)
def test_keys_may_have_devices_of_their_own(store, rank, size):
    for key, devices in (("a", _CPUS[:2]), ("b", _CPUS[1:]), ("c", _CPUS[:1])):
        outs = _on(devices, rank)
        store.broadcast(key, outs[0], out=outs)
        store.pushpull(key, _on(devices, rank), outs)
        _check(outs, devices, _sum(size, devices))


# The devices of a value and of its out, after a broadcast to cpu(0) and cpu(1).
_OTHER_DEVICES = {
    "out in another order": (_CPUS[:2], _CPUS[1::-1]),
    "out on other devices": (_CPUS[:2], _CPUS[1:]),
    "a device twice": (_CPUS[:2], [_CPUS[0], _CPUS[0]]),
    "more outs than values": (_CPUS[:2], _CPUS),
    "fewer outs than values": (_CPUS, _CPUS[:2]),
    "no out, other devices than before": (_CPUS[1::-1], None),
    "no out, more devices than before": (_CPUS, None),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _OTHER_DEVICES)
def test_lists_may_be_on_any_devices(store, rank, size, case):
    """As with MXNet's own stores: also in another order or number than the key's earlier lists."""
    devices, where = _OTHER_DEVICES[case]
    outs = _on(_CPUS[:2], rank)
    store.broadcast("key", outs[0], out=outs)
    values, outs = _on(devices, rank), None if where is None else _on(where)
    store.pushpull("key", values, outs)
    _check(values if outs is None else outs, devices if where is None else where, _sum(size, devices))
    store.push("key", _on(devices, rank))
    for number in (1, 3):
        pulled = _on(_CPUS[:number])
        store.pull("key", out=pulled)
        _check(pulled, _CPUS[:number], _sum(size, devices))


# Calls of one rank for the key 'key', whose parameter lies on cpu(0) and cpu(1).
_WRONG = {
    "an out of another shape on one device": (
        lambda s: s.pushpull("key", _on(_CPUS[:2]), [*_on(_CPUS[:1]), *_on(_CPUS[1:2], shape=(4,))]),
        r"the same shape and dtype",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG)
def test_other_devices_are_one_clear_error(store, rank, size, case):
    call, text = _WRONG[case]
    outs = _on(_CPUS[:2], rank)
    store.broadcast("key", outs[0], out=outs)
    if rank == 1:
        with pytest.raises(ValueError, match=text):
            call(store)
    else:
        inouts = _on(_CPUS[:2])
        store.pushpull("key", inouts)
        with pytest.raises(MXNetError, match="rank 1"):
            value(inouts[1])
    clear_errors()
    values = _on(_CPUS[:2], rank)
    store.pushpull("key", values)
    _check(values, _CPUS[:2], _sum(size, _CPUS[:2]))


@pytest.mark.ranks(2)
def test_outs_of_pull_in_another_order_or_number(store, rank, size):
    outs = _on(_CPUS[:2], rank)
    store.broadcast("key", outs[0], out=outs)
    for devices in (_CPUS[1::-1], _CPUS[:1], _CPUS[:3]):
        pulled = _on(devices, 5 + rank)
        store.pull("key", pulled)
        for one, device in zip(pulled, devices):
            assert one.context == device and (value(one) == value(outs[0])).all()


@pytest.mark.ranks(2)
def test_a_parameter_that_has_moved_is_broadcast_again(store, rank, size):
    for devices in (_CPUS[:2], _CPUS[1:], _CPUS[1::-1]):
        outs = _on(devices, rank)
        store.broadcast("key", outs[0], out=outs)
        store.pushpull("key", outs)
        _check(outs, devices, numbers(devices[0].device_id, (3, 5)) * 2 * size)


def _train(net, trainer, devices, rank, batches, steps=3):
    for step in range(steps):
        with autograd.record():
            losses = []
            for device in devices:
                x = np.random.RandomState(100 * step + 10 * rank + device.device_id).randn(4, 6).astype("float32")
                losses.append((net(array(x, ctx=device)) ** 2).sum())
        autograd.backward(losses)
        trainer.step(batches)


def _expected(size, device_count, steps=3):
    """Parameters of one process that has all batches."""
    net = dense_network(seed=0)
    trainer = gluon.Trainer(net.collect_params(), *_ADAM, kvstore=None)
    for step in range(steps):
        seeds = [100 * step + 10 * rank + number for rank in range(size) for number in range(device_count)]
        x = np.concatenate([np.random.RandomState(seed).randn(4, 6).astype("float32") for seed in seeds])
        with autograd.record():
            loss = (net(array(x)) ** 2).sum()
        loss.backward()
        trainer.step(4 * size * device_count)
    return list(parameters(net).values())


_ADAM = ("adam", {"learning_rate": 0.05})


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_stock_trainer_over_two_devices(rank, size, gather, update_on_kvstore):
    devices = _CPUS[:2]
    net = dense_network(seed=rank, ctx=devices)
    mykv.broadcast_parameters(structure(net))
    trainer = gluon.Trainer(
        net.collect_params(), *_ADAM, kvstore=mx.kv.create("mykv"), update_on_kvstore=update_on_kvstore
    )
    _train(net, trainer, devices, rank, 4 * 2 * size)
    for parameter, expected in zip(structure(net).values(), _expected(size, 2)):
        for device in devices:
            np.testing.assert_allclose(value(parameter.data(device)), expected, rtol=1e-5, atol=1e-6)
    assert len(set(gather(checksum(net)))) == 1


def _fill_gradients(net, devices):
    for parameter in structure(net).values():
        for device in devices:
            parameter.grad(device)[:] = 1
            parameter.data(device)._fresh_grad = True


_UNEQUAL = "devices: 1.*rank 1.*devices: 2"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "sparse", [False, pytest.param(True, marks=pytest.mark.skipif(IS_2, reason="only in MXNet 1.9"))]
)
def test_unequal_numbers_of_devices_are_refused(rank, sparse):
    parameter = gluon.Parameter("p", shape=(3, 2), grad_stype="row_sparse" if sparse else "default")
    parameter.initialize(ctx=_CPUS[: min(1 + rank, 2)])
    with pytest.raises(RuntimeError, match=_UNEQUAL):
        mykv.DistributedTrainer([parameter], "sgd")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("moved", [[1], [0, 1]], ids=["one worker", "both"])
def test_unequal_numbers_of_devices_are_refused_where_parameters_are_moved(rank, moved):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, bucket_bytes=0)
    _fill_gradients(net, _CPUS[:1])
    trainer.step(1)
    devices = _CPUS[: 2 + (rank if len(moved) > 1 else 0)] if rank in moved else _CPUS[:1]
    for parameter in structure(net).values() if rank in moved else ():
        getattr(parameter, "reset_device" if IS_2 else "reset_ctx")(devices)
    _fill_gradients(net, devices)
    with pytest.raises(MXNetError, match="devices: 2.*rank 1.*devices: 3" if len(moved) > 1 else "rank [01]"):
        trainer.step(1)
        parameters(net)
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_unequal_numbers_of_devices_are_refused_by_a_stock_trainer(rank, gather, update_on_kvstore):
    """No weight has changed then."""
    devices = _CPUS[: 1 + rank]
    net = dense_network(seed=0, ctx=devices)
    store = mx.kv.create("mykv")
    trainer = gluon.Trainer(net.collect_params(), *_ADAM, kvstore=store, update_on_kvstore=update_on_kvstore)
    before = checksum(net)
    for _ in range(2):
        _fill_gradients(net, devices)
        with pytest.raises(MXNetError, match="devices: 1.*devices: 2.*the same number of devices on all"):
            trainer.step(1)
            parameters(net)
        clear_errors()
        assert checksum(net) == before


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("on_store", [False, True], ids=["local", "on store"])
@pytest.mark.parametrize("optimizer", [("sgd", {"learning_rate": 0.1, "momentum": 0.9}), _ADAM], ids=["sgd", "adam"])
def test_a_network_spread_over_devices(rank, size, optimizer, on_store):
    """Some layers on one device, some on another; weights and states as where all are on one."""

    def train(devices):
        layers = [gluon.nn.Dense(3, in_units=3) for _ in range(4)]
        params = []
        for number, layer in enumerate(layers):
            layer.initialize(mx.init.One(), ctx=devices[number % len(devices)])
            params += [layer.weight, layer.bias]
        trainer = mykv.DistributedTrainer(params, *optimizer, update_on_kvstore=on_store)
        for step in range(3):
            with autograd.record():
                losses = [
                    (layer(array(np.full((2, 3), rank + step + 1, "float32"), ctx=one.data().context)) ** 2).sum()
                    for layer, one in zip(layers, params[::2])
                ]
            autograd.backward(losses)
            trainer.step(2 * size)
        return [one.data().asnumpy() for one in params]

    together, spread = train(_CPUS[:1]), train(_CPUS[:2])
    for one, other in zip(together, spread):
        np.testing.assert_array_equal(one, other)


@pytest.mark.ranks(1)
def test_states_follow_a_parameter_that_moves_alone(rank):
    def train(moves):
        params = [gluon.Parameter(name, shape=(3,)) for name in ("first", "second")]
        for parameter in params:
            parameter.initialize(mx.init.One(), ctx=_CPUS[0])
        trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for step in range(3):
            if moves and step == 1:
                getattr(params[1], "reset_device" if IS_2 else "reset_ctx")(_CPUS[1])
            for parameter in params:
                parameter.grad()[:] = step + 1
                parameter.data()._fresh_grad = True
            trainer.step(1)
        [updater] = trainer._updaters
        return [one.data().asnumpy().tolist() for one in params], [updater.states[key].context for key in range(2)]

    (stays, _), (moves, devices) = train(False), train(True)
    assert moves == stays and devices == _CPUS[:2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("devices", [_CPUS[1::-1], _CPUS[:1], _CPUS], ids=str)
def test_parameters_on_other_devices_than_others_are_refused(rank, devices):
    """Also where only one worker has put one of them elsewhere."""
    first, second = (gluon.Parameter(name, shape=(2,)) for name in ("first", "second"))
    first.initialize(ctx=_CPUS[:2])
    second.initialize(ctx=devices if rank else _CPUS[:2])
    error, text = (
        (ValueError, r"same devices in the same order.*cpu\(0\), cpu\(1\)") if rank else (RuntimeError, "rank 1")
    )
    with pytest.raises(error, match=text):
        mykv.DistributedTrainer([first, second], "sgd")


@pytest.mark.ranks(2)
def test_a_parameter_that_moves_away_from_the_others(rank):
    net = dense_network(seed=0, ctx=_CPUS[:2])
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM)
    _fill_gradients(net, _CPUS[:2])
    trainer.step(1)
    moved = list(structure(net).values())[-1]
    getattr(moved, "reset_device" if IS_2 else "reset_ctx")(_CPUS[1::-1])
    _fill_gradients(net, _CPUS[:2])
    with pytest.raises(ArgumentValueError, match=r"same devices in the same order.*cpu\(1\), cpu\(0\)"):
        trainer.step(1)

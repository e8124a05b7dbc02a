"""sync_aux_params: running means and variances become equal on all workers and devices, and nothing else changes."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, clear_errors, mx, parameters, structure
from kvstore_plugin.compat.argument_errors import ArgumentValueError
from kvstore_plugin.parameters import aux_params, naming
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SHAPE = (2, 3, 4, 4)


def _network(seed, ctx=None):
    """Two BatchNorms; their statistics are drawn from the seed on each device, all else is the same everywhere."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(3, 3, padding=1, in_channels=3),
        nn.BatchNorm(in_channels=3),
        nn.Conv2D(5, 1, in_channels=3),
        nn.BatchNorm(in_channels=5, scale=False),
    )
    net.initialize(mx.init.One(), ctx=ctx)
    for device in ctx or [mx.cpu()]:
        net(array(np.ones(_SHAPE, "float32"), ctx=device))
    rng = np.random.RandomState(seed)
    for name, parameter in structure(net).items():
        if "running" in name:
            for replica in parameter.list_data():
                replica[:] = array(rng.uniform(0, 1, parameter.shape).astype("float32"), ctx=replica.context)
    return net


def _statistics(net):
    """The values on each device, by name."""
    return {
        name: [replica.asnumpy() for replica in parameter.list_data()]
        for name, parameter in structure(net).items()
        if "running" in name
    }


@pytest.mark.ranks(1, 2, 3)
def test_by_default_all_get_the_mean(rank, size, gather):
    net = _network(rank)
    before = parameters(net)
    mykv.sync_aux_params(net)
    everyones = [_statistics(_network(one)) for one in range(size)]
    after = _statistics(net)
    assert len(after) == 4
    for name, (values,) in after.items():
        np.testing.assert_allclose(values, np.mean([one[name][0] for one in everyones], axis=0), rtol=1e-6)
        assert len(set(gather(values.tobytes()))) == 1
    for name, values in parameters(net).items():
        if name not in after:
            np.testing.assert_array_equal(values, before[name])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("root", [0, 2])
def test_all_get_the_bits_of_the_root(root, rank):
    net = _network(rank)
    mykv.sync_aux_params(net, root_rank=root)
    for name, (values,) in _statistics(_network(root)).items():
        np.testing.assert_array_equal(_statistics(net)[name][0], values)


@pytest.mark.ranks(2)
def test_the_mean_is_over_all_devices_however_many_a_worker_has(rank, size):
    devices = [[mx.cpu(0)], [mx.cpu(0), mx.cpu(1), mx.cpu(2)]]
    net = _network(rank, devices[rank])
    mykv.sync_aux_params(net)
    everyones = [_statistics(_network(one, devices[one])) for one in range(size)]
    for name, replicas in _statistics(net).items():
        mean = np.mean(everyones[0][name] + everyones[1][name], axis=0)
        assert len(replicas) == len(devices[rank])
        for values in replicas:
            np.testing.assert_allclose(values, mean, rtol=1e-6)
            np.testing.assert_array_equal(values, replicas[0])


@pytest.mark.ranks(2)
def test_a_root_gives_the_values_of_its_first_device_to_all_devices(rank):
    net = _network(rank, [mx.cpu(0), mx.cpu(1)])
    expected = _statistics(_network(1, [mx.cpu(0), mx.cpu(1)]))
    mykv.sync_aux_params(net, root_rank=1)
    for name, replicas in _statistics(net).items():
        for values in replicas:
            np.testing.assert_array_equal(values, expected[name][0])


class _Watched:
    def __init__(self, core):
        self._core = core
        self.pushed = []

    def __getattr__(self, name):
        if name.startswith("push"):
            self.pushed.append(name)
        return getattr(self._core, name)


@pytest.mark.ranks(2)
def test_the_mean_is_one_operation(rank, monkeypatch):
    net = _network(rank)
    mykv.init()
    watched = _Watched(process.core)
    monkeypatch.setattr(process, "core", watched)
    mykv.sync_aux_params(net)
    assert watched.pushed == ["push_group"]


@pytest.mark.ranks(2)
def test_frozen_parameters_and_constants_are_left_alone(rank):
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.BatchNorm(in_channels=2))
    net.initialize()
    frozen = structure(net)["0.weight"]
    frozen.grad_req = "null"
    frozen.set_data(array(np.full((2, 2), float(rank), "float32")))
    constant = gluon.Constant("constant", array([float(rank)])) if not IS_2 else gluon.Constant(array([float(rank)]))
    constant.initialize()
    net(array(np.ones((2, 2), "float32")))
    mykv.sync_aux_params([*net.collect_params().values(), constant])
    assert (frozen.data().asnumpy() == rank).all() and (constant.data().asnumpy() == rank).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_network_in_training(rank, gather, hybridize):
    net = _network(0)
    if hybridize:
        net.hybridize(static_alloc=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for step in range(3):
        x = array(np.random.RandomState(10 * step + rank).randn(*_SHAPE).astype("float32"))
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
        statistics = gather(_statistics(net))
        assert (statistics[0]["1.running_mean"][0] != statistics[1]["1.running_mean"][0]).any()
        mykv.sync_aux_params(net)
        for name, (values,) in _statistics(net).items():
            mean = (statistics[0][name][0] + statistics[1][name][0]) / 2
            np.testing.assert_allclose(values, mean, rtol=1e-6)
    x = array(np.ones(_SHAPE, "float32"))
    assert len(set(gather(net(x).asnumpy().tobytes()))) == 1  # evaluation


def _statistics_in_training(rank, steps, hybridize=None, ctx=None, **options):
    """Those after each step of a trainer, with batches of each rank and device."""
    net = _network(0, ctx)
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **options)
    after = []
    for step in range(steps):
        losses = []
        with autograd.record():
            for device in ctx or [mx.cpu()]:
                seed = 100 * step + 10 * rank + device.device_id
                x = array(np.random.RandomState(seed).randn(*_SHAPE).astype("float32"), ctx=device)
                losses.append((net(x) ** 2).mean())
        autograd.backward(losses)
        trainer.step(1)
        after.append(_statistics(net))
    return after


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True}])
def test_a_trainer_averages_in_every_nth_step(hybridize, rank, size, gather):
    mine = _statistics_in_training(rank, 4, hybridize, aux_sync_period=2)
    everyones = gather(mine)
    for step, names in enumerate(mine):
        for name, (values,) in names.items():
            distinct = {one[step][name][0].tobytes() for one in everyones}
            if step % 2:
                assert len(distinct) == 1, f"step {step}"
            elif name.startswith("1."):  # the second layer's mean depends on the first one's beta alone
                assert len(distinct) == size, f"step {step}"
            if step == 1 and name.startswith("1."):
                # Until then nothing of it has reached the weights, so each worker's own are those without averaging.
                alone = gather(_statistics_in_training(rank, 2))
                mean = np.mean([one[1][name][0] for one in alone], axis=0)
                np.testing.assert_allclose(values, mean, rtol=1e-6)


@pytest.mark.ranks(2)
def test_a_trainer_averages_over_all_devices(rank, gather):
    devices = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    averaged = _statistics_in_training(rank, 1, ctx=devices, aux_sync_period=1)[0]
    alone = gather(_statistics_in_training(rank, 1, ctx=devices)[0])
    for name, replicas in averaged.items():
        mean = np.mean(alone[0][name] + alone[1][name], axis=0)
        for values in replicas:
            np.testing.assert_allclose(values, mean, rtol=1e-6)
        assert len({values.tobytes() for one in gather(averaged) for values in one[name]}) == 1


@pytest.mark.ranks(2)
def test_a_trainer_does_not_average_by_default(rank, gather):
    mine = _statistics_in_training(rank, 2)
    assert len({one[1]["1.running_mean"][0].tobytes() for one in gather(mine)}) == 2


@pytest.mark.ranks(2)
def test_a_step_that_one_worker_cannot_take_does_not_leave_the_others_values_waiting(rank):
    net = _network(0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, aux_sync_period=1)
    with autograd.record():
        loss = (net(array(np.ones(_SHAPE, "float32"))) ** 2).mean()
    loss.backward()
    trainer.step(1)
    if rank == 1:
        net[0].weight.grad_req = "null"  # which the others would have to do as well
        net[0].weight.grad_req = "write"
        net.cast("float64")
    with autograd.record():
        loss = (net(array(np.ones(_SHAPE, "float64" if rank else "float32"))) ** 2).mean()
    loss.backward()
    with pytest.raises(MXNetError):
        trainer.step(1)
        net[1].running_mean.data().asnumpy()
    clear_errors()


@pytest.mark.ranks(2, timeout=30)
def test_workers_after_different_numbers_of_steps_get_an_error(rank):
    """Steps return at once, so a worker may come here before a step of its own that the other worker never takes."""
    net = _network(0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    x = array(np.ones(_SHAPE, "float32"))
    for _ in range(1 + 2 * rank):
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
    with pytest.raises(MXNetError, match="rank 0 is in sync_aux_params, but rank 1 .*different numbers of steps"):
        mykv.sync_aux_params(net)
    mykv.shutdown()  # ends the second of the steps that rank 0 has not taken
    clear_errors()
    mykv.init()


@pytest.mark.ranks(2)
def test_wrong_periods(rank):
    net = _network(0)
    with pytest.raises(ValueError, match="aux_sync_period must be at least 0, not -1"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", aux_sync_period=-1)
    with pytest.raises(RuntimeError, match=r"(?s)aux_sync_period=0.*aux_sync_period=1|=1.*aux_sync_period=0"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", aux_sync_period=rank)


@pytest.mark.ranks(2)
def test_arrays_as_of_a_module(rank):
    values = {"mean": array(np.full(3, rank + 1.0)), "count": array(np.array([4 * rank], "int32"))}
    mykv.sync_aux_params(values)
    assert (values["mean"].asnumpy() == 1.5).all() and (values["count"].asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_nothing_to_do():
    net = nn.Dense(2, in_units=2)
    net.initialize()
    mykv.sync_aux_params(net)
    mykv.sync_aux_params([], root_rank=1)


@pytest.mark.ranks(3)
def test_process_sets(rank, gather):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    net = _network(rank)
    if pair.included():
        mykv.sync_aux_params(net, process_set=pair)
    first = [one["1.running_mean"][0] for one in gather(_statistics(net))]
    mykv.remove_process_set(pair)
    np.testing.assert_array_equal(first[0], first[2])
    assert (first[0] != first[1]).any()


@pytest.mark.ranks(2)
def test_values_that_are_missing_on_one_rank(rank):
    net = nn.BatchNorm(in_channels=2)
    if rank == 0:
        net.initialize()
        net(array(np.ones((1, 2), "float32")))
        with pytest.raises(MXNetError, match="rank 1.*has no values yet: run a forward pass first"):
            mykv.sync_aux_params(net)
    else:
        with pytest.raises(ArgumentValueError, match=r"running_mean\)? has no values yet: run a forward pass first"):
            mykv.sync_aux_params(net)


@pytest.mark.ranks(2)
def test_ranks_that_differ(rank):
    values = {"mean": array(np.zeros(3 + rank, "float32"))}
    with pytest.raises(MXNetError, match=r"there are 1 on rank 0 and 1 on rank 1.*mean \([34],\) float32"):
        mykv.sync_aux_params(values)
    with pytest.raises(MXNetError, match="1 on rank 0 and 0 on rank 1"):
        mykv.sync_aux_params({} if rank else values)
    with pytest.raises(MXNetError, match="(?s)to the mean.*to the values of rank 1|values of rank 1.*to the mean"):
        mykv.sync_aux_params(values, root_rank=1 if rank else None)
    with pytest.raises(MXNetError, match="(?s)sync_aux_params.*barrier|barrier.*sync_aux_params"):
        mykv.barrier() if rank else mykv.sync_aux_params({})
    clear_errors()


@pytest.mark.ranks(2)
def test_wrong_arguments(rank):
    with pytest.raises(ValueError, match="root_rank must be a rank, from 0 to 1, not 2"):
        mykv.sync_aux_params({}, root_rank=2)
    with pytest.raises(TypeError, match="params must be a dict or a list of Parameters, such as .*, not int"):
        mykv.sync_aux_params(3)
    with pytest.raises(TypeError, match="must hold Parameters or NDArrays, but x is a str"):
        mykv.sync_aux_params({"x": "y"})
    mykv.sync_aux_params({})


@pytest.mark.ranks(2)
def test_a_layer_that_one_worker_alone_has_used_is_an_error_and_then_averaged(rank, gather):
    mykv.init()
    layer = nn.BatchNorm(in_channels=2)
    layer.initialize()
    values = layer.running_mean if rank == 0 else nn.BatchNorm().running_mean
    averaging = aux_params.Averaging(mykv.global_process_set, "layer/used", [naming.Named("mean", values, 0)])
    averaging.push()
    if rank == 0:
        with pytest.raises(MXNetError, match="rank 1: no auxiliary value is initialized"):
            values.data().asnumpy()
    clear_errors()
    averaging = aux_params.Averaging(
        mykv.global_process_set, "layer/used", [naming.Named("mean", layer.running_mean, 0)]
    )
    layer.running_mean.set_data(mx.nd.full((2,), rank + 1.0) if not IS_2 else mx.np.full((2,), rank + 1.0))
    averaging.push()
    assert gather(layer.running_mean.data().asnumpy().tolist()) == [[1.5, 1.5]] * 2

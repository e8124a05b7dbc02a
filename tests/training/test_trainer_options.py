"""Options of DistributedTrainer: sums, groups, buckets, broadcasts, compression."""

from __future__ import annotations

import logging
import warnings

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx, parameters, structure
from kvstore_plugin.gradients.bucket_sizes import default_bucket_bytes
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

_ADAM = ("adam", {"learning_rate": 0.01})
_SGD = ("sgd", {"learning_rate": 0.1})
_MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})
_BATCH = 4


def _batch(rank, step=0, dtype="float32"):
    return array(np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, 6)).astype(dtype))


def _backward(net, rank, step=0):
    with autograd.record():
        loss = (net(_batch(rank, step)) ** 2).sum()
    loss.backward()


def _train(net, trainer, rank, steps=3, batch_size=_BATCH):
    for step in range(steps):
        _backward(net, rank, step)
        trainer.step(batch_size)


def _trained(rank, steps=3, batch_size=_BATCH, build=dense_network, **options):
    """The checksum of a network after some steps with these options."""
    net = build(rank)
    _train(net, mykv.DistributedTrainer(net.collect_params(), *_MOMENTUM, **options), rank, steps, batch_size)
    return checksum(net)


class _WatchedCore:
    """The core, with a note of the number of arrays in each operation that reduces gradients."""

    def __init__(self, core):
        self._core = core
        self.pushed = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    def push_allreduce(self, name, inputs, *more, **named):
        self.pushed.append(len(inputs))
        self._core.push_allreduce(name, inputs, *more, **named)

    def push_group(self, name, inputs, *more, **named):
        self.pushed.append(len(inputs))
        self._core.push_group(name, inputs, *more, **named)

    def PreparedBucket(self, *arguments, **named):
        prepared = self._core.PreparedBucket(*arguments, **named)

        class Watched:
            def push(_, label):
                self.pushed.append(len(arguments[6]))
                prepared.push(label)

        return Watched()


@pytest.fixture
def watched(monkeypatch):
    mykv.init()
    core = _WatchedCore(process.core)
    monkeypatch.setattr(process, "core", core)
    return core


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("bucket_bytes", [0, 16 << 20])
def test_sums_equal_means_divided_by_the_batch_of_all(rank, size, gather, bucket_bytes):
    def train(net, trainer, batch_size):
        for step in range(3):
            x = array(np.random.RandomState(10 * step + rank).randn(_BATCH, 6))
            with autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            trainer.step(batch_size)
        return parameters(net)

    results = []
    for method, batch_size in (("mean", 8), ("sum", 8 * size)):
        net = dense_network(seed=rank, dtype="float64")
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, reduce_method=method, bucket_bytes=bucket_bytes)
        results.append(train(net, trainer, batch_size))
    for name, values in results[0].items():
        np.testing.assert_allclose(results[1][name], values, rtol=1e-6, err_msg=name)
    _backward_of_constants(net, rank)
    trainer.allreduce_grads()
    for parameter in structure(net).values():
        assert (parameter.grad().asnumpy() == size * (size + 1) / 2).all()


def _backward_of_constants(net, rank):
    for parameter in structure(net).values():
        parameter.grad()[:] = rank + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [0.1, 1, 3, 1e6])
def test_the_result_is_the_mean_whatever_the_predivide_factor_is(rank, factor):
    assert _trained(rank, gradient_predivide_factor=factor) == _trained(rank)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("bucket_bytes", [0, 1, 16 << 20])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 6, 100])
def test_groups_of_gradients(rank, gather, watched, num_groups, bucket_bytes):
    """Six gradients, those of a group reduced by one operation whatever bucket_bytes is; the same bits as alone."""
    net, reference = dense_network(rank), dense_network(rank)
    trainer = mykv.DistributedTrainer(
        net.collect_params(), *_MOMENTUM, num_groups=num_groups, bucket_bytes=bucket_bytes
    )
    _train(net, trainer, rank)
    expected = {1: [6], 2: [3, 3], 3: [2, 2, 2], 6: [1] * 6, 100: [1] * 6}[num_groups]
    assert watched.pushed == expected * 3
    _train(reference, mykv.DistributedTrainer(reference.collect_params(), *_MOMENTUM, bucket_bytes=0), rank)
    assert checksum(net) == checksum(reference)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_groups_of_gradients_of_several_dtypes(rank, watched, gather):
    dtypes = ["float32", "float64", "float32", "float64", "float32"]
    params = []
    for number, dtype in enumerate(dtypes):
        parameter = gluon.Parameter(f"p{number}", shape=(number + 1,), dtype=dtype)
        parameter.initialize(mx.init.Zero())
        params.append(parameter)
    trainer = mykv.DistributedTrainer(params, *_SGD, num_groups=1)
    for parameter in params:
        parameter.grad()[:] = rank
    trainer.allreduce_grads()
    assert watched.pushed == [3, 2]
    assert all((parameter.grad().asnumpy() == 0.5).all() for parameter in params)


@pytest.mark.ranks(2)
def test_groups_of_parameters_that_are_initialized_later(rank, watched, gather):
    net = nn.HybridSequential()
    net.add(*(nn.Dense(3) for _ in range(4)))
    net.initialize(mx.init.Uniform(rank + 1))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, num_groups=2)
    _train(net, trainer, rank)
    assert watched.pushed == [4, 4] * 3
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_frozen_parameters_do_not_count_in_groups(rank, watched, gather):
    net = dense_network(rank)
    for parameter in list(structure(net).values())[:2]:
        parameter.grad_req = "null"
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, num_groups=2)
    _train(net, trainer, rank)
    assert watched.pushed == [2, 2] * 3
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("bucket_bytes", [1, 100, 16 << 20])
def test_each_gradient_is_copied_where_layers_were_initialized_in_other_orders(
    rank, watched, gather, caplog, bucket_bytes
):
    def build(size):
        net = nn.Sequential()
        net.add(nn.Dense(3), nn.Dense(4), nn.Dense(5))
        net.initialize(mx.init.Constant(0.3))
        return net, mykv.DistributedTrainer(net.collect_params(), *_SGD, bucket_bytes=size)

    def train(net, trainer, turned):
        for step in range(3):
            layers = list(net)[::-1] if turned else list(net)
            with autograd.record():
                loss = sum((layer(_batch(rank, step)) ** 2).sum() for layer in layers)
            loss.backward()
            trainer.step(_BATCH)

    net, trainer = build(bucket_bytes)
    with caplog.at_level(logging.WARNING):
        train(net, trainer, turned=rank == 1)
    said = sum("different orders" in record.getMessage() for record in caplog.records)
    # Small buckets hold one gradient each, so their order is the same.
    assert said == (rank == 0 and bucket_bytes > 100)
    assert watched.pushed == [1] * 6 * 3
    reference, plain = build(0)
    train(reference, plain, turned=False)
    assert checksum(net) == checksum(reference)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.parametrize(
    "hosts, ranks, expected",
    [(1, 2, 16 << 20), (1, 4096, 16 << 20), (2, 2, 1 << 20), (4, 64, 1 << 20), (8, 128, 2 << 20), (64, 4096, 16 << 20)],
)
def test_buckets_are_smaller_between_hosts_but_not_tiny_for_each_rank(hosts, ranks, expected):
    assert default_bucket_bytes(hosts, ranks) == expected


@pytest.mark.ranks(2)
def test_one_bucket_holds_a_small_network_by_default(rank, watched):
    _train(net := _wide_network(rank), mykv.DistributedTrainer(net.collect_params(), *_SGD), rank)
    assert watched.pushed == [4] * 3


@pytest.mark.ranks(2, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_two_hosts_have_more_buckets_by_default(rank, watched):
    _train(net := _wide_network(rank), mykv.DistributedTrainer(net.collect_params(), *_SGD), rank)
    assert sum(watched.pushed) == 4 * 3 and len(watched.pushed) == 2 * 3, watched.pushed


def _wide_network(seed):
    """Gradients of 1.7 MB."""
    net = nn.HybridSequential()
    net.add(nn.Dense(25000, in_units=6), nn.Dense(10, in_units=25000))
    mx.random.seed(seed)
    net.initialize(mx.init.Uniform(0.01))
    return net


@pytest.mark.ranks(2)
def test_gradients_that_cannot_be_in_place_share_copied_buckets(rank, watched, gather):
    """The program holds their arrays, so they stay where they are."""
    results = []
    for bucket_bytes in (0, 200, 16 << 20):
        net = dense_network(seed=0)
        held = [one.grad() for one in structure(net).values()]
        watched.pushed.clear()
        trainer = mykv.DistributedTrainer(net.collect_params(), *_MOMENTUM, bucket_bytes=bucket_bytes)
        _train(net, trainer, rank)
        assert sum(watched.pushed) == 6 * 3
        assert len(watched.pushed) // 3 == {0: 6, 200: 3, 16 << 20: 1}[bucket_bytes], watched.pushed
        results.append(checksum(net))
        assert len(held) == 6
    assert len(set(results)) == 1 and len(set(gather(results[0]))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"bucket_bytes": 0}, {"bucket_bytes": 0, "num_groups": 2}])
def test_workers_with_two_devices(rank, gather, options):
    """Gradients are summed over devices, and averaged over workers."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(seed=rank, ctx=devices)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, **options)
    for step in range(2):
        for parameter in structure(net).values():
            for device in devices:
                parameter.grad(device)[:] = 1 + step
                parameter.data(device)._fresh_grad = True
        trainer.allreduce_grads()
        for parameter in structure(net).values():
            for device in devices:
                assert (parameter.grad(device).asnumpy() == 2 * (1 + step)).all()
        trainer.update(1)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("root_rank", [0, 1])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_parameters_are_broadcast_again_in_every_nth_step_before_the_update(rank, gather, period, root_rank):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, root_rank=root_rank, broadcast_period=period)
    for step in range(1, 7):
        for parameter in structure(net).values():
            parameter.data()[:] += rank  # the workers drift apart
        apart = len(set(gather(checksum(net)))) > 1
        expected = gather(parameters(net))[root_rank]
        _backward(net, rank, step)
        trainer.allreduce_grads()
        gradients = {name: parameter.grad().asnumpy() for name, parameter in structure(net).items()}
        trainer.update(_BATCH)
        assert apart
        assert (len(set(gather(checksum(net)))) == 1) == (step % period == 0), step
        if step % period == 0:
            for name, values in parameters(net).items():
                update = 0.1 * gradients[name] / _BATCH
                np.testing.assert_allclose(values, expected[name] - update, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_parameters_are_broadcast_again_to_every_device(rank, gather):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(seed=0, ctx=devices)
    frozen = next(iter(structure(net).values()))
    frozen.grad_req = "null"
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, broadcast_period=2)
    for step in range(1, 3):
        for parameter in structure(net).values():
            for number, device in enumerate(devices):
                parameter.data(device)[:] = 10 * rank + number
        with autograd.record():
            losses = [(net(_batch(rank).as_in_context(device)) ** 2).sum() for device in devices]
        autograd.backward(losses)
        trainer.step(_BATCH)
        for parameter in structure(net).values():
            for number, device in enumerate(devices):
                expected = 0 if step == 2 else 10 * rank + number
                assert (parameter.data(device).asnumpy() == expected).all(), (step, number)


@pytest.mark.ranks(2)
def test_parameters_that_are_never_broadcast(rank, gather):
    net, late = dense_network(seed=rank), nn.Dense(2)
    late.initialize(mx.init.Constant(rank + 1))
    for block in (net, late):
        trainer = mykv.DistributedTrainer(block.collect_params(), *_SGD, broadcast_period=-1)
    own = checksum(net)
    assert own == checksum(dense_network(seed=rank)) and len(set(gather(own))) == 2
    _backward(late, rank)
    assert (late.weight.data().asnumpy() == rank + 1).all()
    trainer.allreduce_grads()
    assert len(set(gather(late.weight.grad().asnumpy().tobytes()))) == 1
    trainer.update(_BATCH)
    assert len(set(gather(late.weight.data().asnumpy().tobytes()))) == 2


@pytest.mark.ranks(2)
def test_a_parameter_without_values_on_one_worker_when_all_are_broadcast_again(rank, gather):
    used = gluon.Parameter("used", shape=(2,))
    frozen = gluon.Parameter("frozen", shape=(-1 if IS_2 else 0,), grad_req="null", allow_deferred_init=True)
    for parameter in (used, frozen):
        parameter.initialize(mx.init.One())
    trainer = mykv.DistributedTrainer([used, frozen], *_SGD, broadcast_period=1)
    frozen.shape = (3,)
    if rank == 0:
        frozen._finish_deferred_init()
    used.data()._fresh_grad = True
    trainer.step(1)
    gather("both have made a step")
    if rank == 1:
        frozen._finish_deferred_init()
        assert (frozen.data().asnumpy() == 1).all()
    else:
        with pytest.raises(MXNetError, match="parameter 1.*no values yet on rank 1"):
            frozen.data().asnumpy()
    assert (used.data().asnumpy() == 1).all()
    clear_errors()


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("bucket_bytes", [0, 16 << 20])
@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_compressed_gradients_of_two_hosts(rank, size, gather, method, bucket_bytes):
    parameter = gluon.Parameter("weight", shape=(1000,))
    parameter.initialize(mx.init.Zero())
    trainer = mykv.DistributedTrainer(
        [parameter], *_SGD, compression=getattr(mykv.Compression, method), bucket_bytes=bucket_bytes
    )
    values = [np.random.RandomState(one).uniform(-1, 1, 1000).astype("float32") for one in range(size)]
    parameter.grad()[:] = array(values[rank])
    trainer.allreduce_grads()
    result = parameter.grad().asnumpy()
    precision = {"fp16": 2**-10, "bf16": 2**-7}[method]
    mean = np.mean(values, axis=0)
    np.testing.assert_allclose(result, mean, atol=2 * precision)
    assert abs(result - mean).max() > precision / 64, "nothing was compressed"
    assert len(set(gather(result.tobytes()))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["none", "fp16", "bf16"])
def test_compression_changes_nothing_within_a_host(rank, method):
    assert _trained(rank, compression=getattr(mykv.Compression, method)) == _trained(rank)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize(
    "argument, values",
    [
        ("reduce_method", ["mean", "sum"]),
        ("prefix", ["one", "other"]),
        ("num_groups", [0, 3]),
        ("broadcast_period", [0, 5]),
        ("root_rank", [0, 1]),
        ("gradient_predivide_factor", [1.0, 2.0]),
        ("compression", [mykv.Compression.none, mykv.Compression.fp16]),
    ],
)
def test_other_arguments_on_a_worker_are_an_error_on_all_that_shows_both(rank, gather, argument, values):
    net = dense_network(seed=0)
    with pytest.raises(RuntimeError) as failure:
        mykv.DistributedTrainer(net.collect_params(), *_SGD, **{argument: values[rank == 1]})
    for value in values:
        assert f"{argument}={value!r}" in str(failure.value)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _train(net, trainer, rank)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_numbers_of_numpy_are_numbers(rank, gather):
    options = {
        "gradient_predivide_factor": np.float32(2),
        "num_groups": np.int64(2),
        "bucket_bytes": np.int32(1000),
        "broadcast_period": np.int64(2),
    }
    assert len(set(gather(_trained(rank, **options)))) == 1


@pytest.mark.ranks(2)
def test_an_ordinary_optimizer_is_taken_without_a_warning():
    net = dense_network(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mykv.DistributedTrainer(net.collect_params(), mx.optimizer.SGD(learning_rate=0.1))


def _counts(trainer):
    optimizer = trainer._optimizer
    return optimizer.num_update, sorted(optimizer._index_update_count.items())


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("who", ["all", "one"])
def test_batches_of_different_sizes_are_an_error_after_which_all_go_on_in_step(rank, gather, who, on_store):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, update_on_kvstore=on_store)

    def step(batch_size):
        _backward(net, rank)
        trainer.step(batch_size)
        mx.nd.waitall()

    step(8)
    before = checksum(net)
    differs = 7 - rank % 2 if who == "all" else 7 if rank == 1 else 8
    shown = r"rank 0 has .*batch size 7 \(.*\), rank 1 .*batch size 6 \("
    if who == "one":
        shown = r"rank 0 has a step .*batch size 8 \(gradients times 0.125\), rank 1 .*batch size 7 \("
    with pytest.raises(MXNetError, match=shown):
        step(differs)
    clear_errors()
    assert checksum(net) == before
    for batch_size in (8, 4, 8):
        step(batch_size)
    assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1
    assert checksum(net) != before


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("who", ["all", "one"])
def test_update_compares_batch_sizes_too(rank, size, gather, who):
    """No weight has changed then, and all have counted one update."""
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM)

    def step(batch_size):
        _backward(net, rank)
        trainer.allreduce_grads()
        mx.nd.waitall()
        trainer.update(batch_size)

    step(8)
    before = checksum(net)
    with pytest.raises(MXNetError, match=r"an update with batch size 8 \(.*rank 1 .*batch size 7 \("):
        step(8 - (rank > 0 if who == "all" else rank == 1))
        mx.nd.waitall()  # reading a weight would clear the error for pending updates of other weights
    clear_errors()
    assert checksum(net) == before
    for batch_size in (8, 4, 8):
        step(batch_size)
    assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1


def _stock(params, *optimizer):
    return gluon.Trainer(params, *optimizer, kvstore="mykv", update_on_kvstore=False)


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("make", [mykv.DistributedTrainer, _stock], ids=["own", "stock"])
def test_update_does_not_wait(rank, gather, make):
    net = dense_network(rank)
    trainer = make(net.collect_params(), *_ADAM)
    for _ in range(2):
        _backward(net, rank)
        trainer.allreduce_grads()
        if rank:
            gather("rank 0 has called update()")
        trainer.update(4)
        if not rank:
            gather("rank 0 has called update()")
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_stale_gradient_in_update_leaves_the_weights_of_all(rank, gather):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM)

    def step(stale=False):
        _backward(net, rank)
        trainer.allreduce_grads()
        if stale:
            next(iter(structure(net).values())).data()._fresh_grad = False
        trainer.update(4)

    step()
    before = checksum(net)
    with pytest.raises((UserWarning, MXNetError), match="on rank 1 is stale"):
        step(stale=rank == 1)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    step()
    assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["ignore_stale_grad", "other call"])
def test_a_step_that_one_worker_does_not_take_counts_on_all(rank, gather, what):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM)
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    before = checksum(net)
    _backward(net, rank)
    with pytest.raises(MXNetError, match="differs between ranks: rank 0 has"):
        if what == "other call" and rank == 0:
            trainer.allreduce_grads()
            mx.nd.waitall()
        trainer.step(4, ignore_stale_grad=what == "ignore_stale_grad" and rank == 1)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    if what == "ignore_stale_grad":  # a worker that calls other methods can never be in step
        for _ in range(2):
            _backward(net, rank)
            trainer.step(4)
        assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1


@pytest.mark.ranks(2)
def test_a_stale_gradient_on_one_worker_leaves_the_weights_of_all(rank, gather):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    if rank == 0:
        _backward(net, rank)
    with pytest.raises((UserWarning, MXNetError), match="on rank 1 is stale: no backward has written it"):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    _backward(net, rank)
    trainer.step(4)
    assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_other_learning_rates_are_an_error_that_shows_both(rank, gather, on_store):
    net = dense_network(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, update_on_kvstore=on_store)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    trainer.set_learning_rate(0.25 if rank else 0.5)
    _backward(net, rank)
    shown = r"rank 0 has learning rate 0.5, rank 1 has learning rate 0.25\. Set the same learning rate on all workers"
    with pytest.raises(MXNetError, match=shown):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    trainer.set_learning_rate(0.5)
    _backward(net, rank)
    trainer.step(4)
    assert len({str(one) for one in gather((checksum(net), _counts(trainer)))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "others, shown",
    [
        (("sgd", {}), "optimizer Adam.*optimizer SGD"),
        (("adam", {"learning_rate": 0.01, "beta1": 0.5}), "and rank 1 has beta1=0.5. Give the same optimizer"),
        (("adam", {"learning_rate": 0.5}), "rank 0 has learning rate 0.01, and rank 1 has learning rate 0.5"),
    ],
)
def test_other_optimizers_are_an_error_that_shows_only_what_differs(rank, others, shown):
    net = dense_network(rank)
    with pytest.raises(RuntimeError, match=shown) as failure:
        mykv.DistributedTrainer(net.collect_params(), *(others if rank else ("adam", {"learning_rate": 0.01})))
    assert "num_groups" not in str(failure.value)


@pytest.mark.ranks(1)
def test_arguments_that_others_take():
    net = dense_network(seed=0)
    with pytest.raises(TypeError, match="params must be net.collect_params.., and not the network itself"):
        mykv.DistributedTrainer(net, "sgd")
    with pytest.raises(TypeError, match="such as net.collect_params.., not int"):
        mykv.DistributedTrainer(3, "sgd")
    with pytest.raises(TypeError, match="pass it by keyword, with what follows it: root_rank=1"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", {}, 1, {"compressor": "topk"})  # as in BytePS
    with pytest.raises(TypeError, match="takes no kvstore. Leave it out"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", kvstore="mykv")

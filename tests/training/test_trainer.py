"""DistributedTrainer: its gradients, parameters and arguments; whole training is in test_equivalence.py."""

from __future__ import annotations

import copy
import fractions
import inspect
import logging
import time

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
    fill,
    layers_named_after_others,
    mx,
    numbers,
    parameters,
    structure,
    value,
)
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1})


def _backward(net, rank, step=0, batch=4, inputs=6):
    x = array(np.random.RandomState(100 * step + rank).randn(batch, inputs).astype("float32"))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()


def _gradients(net) -> dict:
    return {name: p.grad().asnumpy() for name, p in structure(net).items() if p.grad_req != "null"}


def _own_gradients(seed, size, step=0) -> list[dict]:
    """The gradients that each of `size` workers would have alone."""
    result = []
    for rank in range(size):
        net = dense_network(seed)
        _backward(net, rank, step)
        result.append(_gradients(net))
    return result


def test_signature_is_that_of_horovod_with_more_behind_the_star():
    signature = inspect.signature(mykv.DistributedTrainer.__init__)
    names = list(signature.parameters)[1:9]
    assert names == [
        "params",
        "optimizer",
        "optimizer_params",
        "compression",
        "gradient_predivide_factor",
        "prefix",
        "num_groups",
        "process_set",
    ]
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert defaults["compression"] is mykv.Compression.none and defaults["num_groups"] == 0
    assert defaults["gradient_predivide_factor"] == 1.0 and defaults["root_rank"] == 0
    assert defaults["process_set"] is mykv.global_process_set
    assert signature.parameters["root_rank"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.ranks(3, long=(2,))
def test_gradients_are_averaged_and_grad_holds_the_mean(rank, size):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    assert isinstance(trainer, gluon.Trainer)
    _backward(net, rank)
    trainer.allreduce_grads()
    own = _own_gradients(0, size)
    for name, gradient in _gradients(net).items():
        mean = sum(gradients[name] for gradients in own) / size
        np.testing.assert_allclose(gradient, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_step_divides_by_the_workers_own_batch(rank, size):
    net = dense_network(seed=0)
    before = parameters(net)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, rank)
    trainer.step(4)
    own = _own_gradients(0, size)
    for name, values in parameters(net).items():
        mean = sum(gradients[name] for gradients in own) / size
        np.testing.assert_allclose(values, before[name] - 0.1 * mean / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("root_rank", [0, 1])
def test_workers_begin_with_the_values_of_the_root(rank, root_rank):
    net = dense_network(seed=rank)
    mykv.DistributedTrainer(net.collect_params(), *_SGD, root_rank=root_rank)
    assert checksum(net) == checksum(dense_network(seed=root_rank))


def _shapes():
    return {"a.weight": (3, 2), "b.weight": (4,), "c.bias": (2, 2)}


def _parameter(name, shape, rank):
    parameter = gluon.Parameter(name, shape=shape)
    parameter.initialize(mx.init.Constant(rank + 1))
    return parameter


@pytest.mark.ranks(2)
@pytest.mark.parametrize("container", ["dict", "list", "collected"])
def test_parameters_are_matched_by_key_or_position_and_never_by_name(rank, gather, container):
    """Counters in Parameter.name differ between workers when one has made other blocks before."""
    for _ in range(9 * rank):
        nn.Dense(1)  # so that names run across 9 and 10, which sort differently as text
    if container == "collected":
        net = dense_network(seed=rank, widths=(8, 5, 4, 3, 2))
        params = net.collect_params()
        values = params.values()
    else:
        pairs = [
            (name, _parameter(f"{name}{9 - 8 * rank + k}", shape, rank))
            for k, (name, shape) in enumerate(_shapes().items())
        ]
        values = [parameter for _, parameter in pairs]
        params = dict(pairs[::-1] if rank else pairs) if container == "dict" else values
    trainer = mykv.DistributedTrainer(params, *_SGD)
    for number, parameter in enumerate(values):
        parameter.grad()[:] = number + 10 * rank
    trainer.allreduce_grads()
    for number, parameter in enumerate(values):
        assert (parameter.grad().asnumpy() == number + 5).all(), parameter.name
    for parameter in values:
        assert len(set(gather(parameter.data().asnumpy().tobytes()))) == 1


class _WatchedCore:
    """The core, with a note of the priority and the output arrays of each operation that reduces gradients."""

    def __init__(self, core):
        self._core = core
        self.pushed = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    def push_allreduce(self, name, inputs, outputs, op, scale, priority, label):
        self.pushed.append((outputs, priority))
        self._core.push_allreduce(name, inputs, outputs, op, scale, priority, label)

    def PreparedBucket(self, *arguments):
        prepared = self._core.PreparedBucket(*arguments)

        class Watched:
            def push(_, label):
                self.pushed.append((arguments[6], arguments[-1]))
                prepared.push(label)

        return Watched()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [0, 1, 200, 16 << 20])
def test_earlier_layers_get_the_higher_priority(rank, monkeypatch, bucket_bytes):
    net = dense_network(seed=0, widths=(8,) * 6)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, bucket_bytes=bucket_bytes)
    watched = _WatchedCore(process.core)
    monkeypatch.setattr(process, "core", watched)
    _backward(net, rank)
    trainer.step(4)
    watched.pushed.clear()
    _backward(net, rank, 1)
    trainer.step(4)
    places = {p.grad().handle.value: place for place, p in enumerate(structure(net).values())}
    reduced = sorted((min(places[handle] for handle in outputs), priority) for outputs, priority in watched.pushed)
    assert sum(len(outputs) for outputs, _ in watched.pushed) == 12
    assert len(reduced) == {0: 12, 1: 12, 200: len(reduced), 16 << 20: 1}[bucket_bytes]
    priorities = [priority for _, priority in reduced]
    assert all(earlier > later for earlier, later in zip(priorities, priorities[1:])), reduced


@pytest.mark.ranks(2)
def test_several_trainers_in_one_program_do_not_collide(rank, gather):
    """A generator and a discriminator whose steps alternate, with gradients of one in the graph of the other."""
    nets = [dense_network(seed=10 * rank + k, inputs=6, widths=(4, 6)) for k in range(2)]
    trainers = [mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01}) for net in nets]
    for step in range(4):
        x = array(np.random.RandomState(100 * step + rank).randn(4, 6).astype("float32"))
        with autograd.record():
            loss = (nets[1](nets[0](x).detach()) ** 2).sum()
        loss.backward()
        trainers[1].step(4)
        with autograd.record():
            loss = (nets[1](nets[0](x)) ** 2).sum()
        loss.backward()
        trainers[0].step(4)
    for net in nets:
        assert len(set(gather(checksum(net)))) == 1
    assert checksum(nets[0]) != checksum(nets[1])


@pytest.mark.ranks(2)
def test_grad_req_add_accumulates_over_backwards(rank, size):
    net = dense_network(seed=0)
    net.collect_params().setattr("grad_req", "add") if not IS_2 else net.setattr("grad_req", "add")
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(2):
        _backward(net, rank, step)
    trainer.allreduce_grads()
    own = [_own_gradients(0, size, step) for step in range(2)]
    for name, gradient in _gradients(net).items():
        mean = sum(own[step][k][name] for step in range(2) for k in range(size)) / size
        np.testing.assert_allclose(gradient, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_frozen_layers_stay_as_the_root_has_them(rank, gather):
    net = dense_network(seed=rank)
    frozen = list(structure(net).values())[:2]
    for parameter in frozen:
        parameter.grad_req = "null"
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(3):
        _backward(net, rank, step)
        trainer.step(4)
    start = parameters(dense_network(seed=0))
    for name, parameter in structure(net).items():
        same = (parameter.data().asnumpy() == start[name]).all()
        assert same == any(parameter is other for other in frozen)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_layers_frozen_and_thawed_on_all_workers_in_the_middle(rank, gather):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    first = next(iter(structure(net).values()))
    for req in ("write", "null", "write", "add"):
        first.grad_req = req
        before = first.data().asnumpy()
        _backward(net, rank)
        trainer.step(4)
        assert (first.data().asnumpy() == before).all() == (req == "null")
        assert len(set(gather(checksum(net)))) == 1
        if req == "add":
            first.grad()[:] = 0


@pytest.mark.ranks(2)
def test_layer_frozen_on_one_worker_only_is_an_error_on_both(rank, gather):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, rank)
    trainer.step(4)
    if rank == 1:
        next(iter(structure(net).values())).grad_req = "null"
    _backward(net, rank, 1)
    with pytest.raises((MXNetError, RuntimeError)):
        trainer.step(4)
        mx.nd.waitall()
        for parameter in structure(net).values():
            parameter.data().asnumpy()


@pytest.mark.ranks(2)
def test_layer_frozen_on_one_worker_before_the_trainer_is_made_is_an_error_on_both(rank):
    net = dense_network(seed=0)
    count = len(structure(net))
    if rank == 1:
        next(iter(structure(net).values())).grad_req = "null"
    words = rf"parameters with gradients of .* rank {rank} has {count - rank} \(.*another rank has {count - 1 + rank}"
    with pytest.raises(RuntimeError, match=words):
        mykv.DistributedTrainer(net.collect_params(), *_SGD)


@pytest.mark.ranks(2)
def test_shared_parameters_are_trained_once(rank, gather):
    first = nn.Dense(6, in_units=6)
    second = (
        nn.Dense(6, in_units=6, params=first.params)
        if not IS_2
        else nn.Dense(6, in_units=6).share_parameters(first.collect_params())
    )
    net = nn.HybridSequential()
    net.add(first, second)
    net.initialize()
    rng = np.random.RandomState(rank)
    for parameter in (first.weight, first.bias):
        parameter.set_data(array(rng.randn(*parameter.shape).astype("float32")))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(3):
        _backward(net, rank, step)
        trainer.step(4)
    for layer in (first, second):
        assert len(set(gather(layer.weight.data().asnumpy().tobytes()))) == 1
    assert (first.weight.data().asnumpy() == second.weight.data().asnumpy()).all()


@pytest.mark.ranks(2)
def test_parameter_listed_twice_is_trained_once(rank):
    parameter = _parameter("twice", (3,), rank)
    trainer = mykv.DistributedTrainer([parameter, parameter], "sgd", {"learning_rate": 1.0})
    parameter.grad()[:] = 1
    parameter.data()._fresh_grad = True
    trainer.step(1)
    np.testing.assert_allclose(parameter.data().asnumpy(), 0)


@pytest.mark.ranks(2)
def test_states_are_saved_and_loaded(rank, gather, tmp_path):
    optimizer = ("adam", {"learning_rate": 0.05})
    path = str(tmp_path / f"states{rank}")
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *optimizer)
    for step in range(3):
        _backward(net, rank, step)
        trainer.step(4)
    trainer.save_states(path)
    values = parameters(net)

    again = dense_network(seed=5)
    for name, parameter in structure(again).items():
        parameter.set_data(array(values[name]))
    resumed = mykv.DistributedTrainer(again.collect_params(), *optimizer)
    resumed.load_states(path)
    for n, t in ((net, trainer), (again, resumed)):
        for step in range(3, 6):
            _backward(n, rank, step)
            t.step(4)
    for name, expected in parameters(net).items():
        np.testing.assert_allclose(parameters(again)[name], expected, rtol=1e-6, atol=1e-7)


_WITH_ARRAYS = ("adamw" if IS_2 else "adagrad", {"learning_rate": 0.1})  # an optimizer that computes with NDArrays


def _trainer(kind, net):
    if kind == "stock":
        return gluon.Trainer(net.collect_params(), *_WITH_ARRAYS, kvstore="mykv", update_on_kvstore=False)
    return mykv.DistributedTrainer(net.collect_params(), *_WITH_ARRAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
@pytest.mark.parametrize("method", ["step", "update"])
def test_batch_size_of_any_type_that_mxnet_takes(rank, kind, method):
    def trained(batch_size):
        net = dense_network(seed=0)
        trainer = _trainer(kind, net)
        for step in range(3):
            _backward(net, rank, step)
            if method == "update":
                trainer.allreduce_grads()
            getattr(trainer, method)(batch_size)
        return checksum(net)

    expected = trained(4)
    numbers = [4.0, np.float32(4), np.float16(4), np.int64(4), np.array(4.0), fractions.Fraction(4)]
    for batch_size in [*numbers, mx.nd.array([4.0])]:
        assert trained(batch_size) == expected, repr(batch_size)
    if IS_2 and kind == "own":  # of shape (), for SGD and most others; MXNet's own Trainer converts it, and waits
        net = dense_network(seed=0)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
        for step in range(2):
            _backward(net, rank, step)
            trainer.step(mx.np.array(4.0))
        mx.nd.waitall()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_other_batch_sizes_in_arrays_are_an_error_in_that_step(rank, gather, kind):
    net = dense_network(seed=0)
    trainer = _trainer(kind, net)
    for step, size in enumerate([4.0, [4.0, 8.0][rank], 4.0]):
        _backward(net, rank, step)
        trainer.step(mx.nd.array([size]))
        if step == 1:
            with pytest.raises(MXNetError, match=r"batch size 4 .*batch size 8 .*Give step\(\) the same batch size"):
                mx.nd.waitall()
            clear_errors()
    _backward(net, rank)
    trainer.step([4, mx.nd.array([4.0])][rank])
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["step", "update"])
def test_a_batch_size_that_is_no_number_fails_the_call_of_all_workers(rank, gather, method):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    for step in range(3):
        _backward(net, rank, step)
        if method == "update":
            trainer.allreduce_grads()
        if step == 1 and rank == 1:
            with pytest.raises(ValueError):
                getattr(trainer, method)(mx.nd.array([4.0, 4.0]))
        else:
            getattr(trainer, method)(4)
        if step == 1 and rank == 0:
            with pytest.raises(MXNetError, match="its batch size cannot be used"):
                mx.nd.waitall()
        clear_errors()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_call_waits_for_long_beside_a_copied_trainer(rank):
    net = dense_network(seed=0)
    trainer = copy.deepcopy(mykv.DistributedTrainer(net.collect_params(), *_SGD))
    trainer.allreduce_grads()
    time.sleep(3 * rank)  # the other rank looks for the reason after 2 s
    mykv.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_networks_and_trainers_are_copied_in_the_middle(rank, kind, on_store):
    """A network refers to its trainer. Rank 0 alone keeps the best network; then all ranks train a copy of both."""

    def make():
        net = dense_network(seed=0)
        options = {"update_on_kvstore": on_store}
        if kind == "stock":
            return net, gluon.Trainer(net.collect_params(), "adam", kvstore="mykv", **options)
        return net, mykv.DistributedTrainer(net.collect_params(), "adam", **options)

    def train(net, trainer, steps):
        for step in steps:
            _backward(net, 2 * step + rank)
            trainer.step(4)
        return checksum(net)

    expected = train(*make(), range(4))
    net, trainer = make()
    half = train(net, trainer, range(2))
    if rank == 0:
        assert checksum(copy.deepcopy(net)) == half
    if not IS_2:  # in MXNet 2.0 a copied network keeps no way to its gradients
        other, its_trainer = copy.deepcopy((net, trainer))
        for parameter in other.collect_params().values():  # a copy is not attached to its gradients
            parameter.grad_req = "null"
            parameter.grad_req = "write"
        assert train(other, its_trainer, range(2, 4)) == expected and checksum(net) == half
    if kind == "own" or not on_store:  # a copied stock Trainer has the same store, and its states
        assert train(net, trainer, range(2, 4)) == expected


@pytest.mark.ranks(2)
def test_learning_rate_and_scheduler(rank):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.set_learning_rate(0.0)
    before = checksum(net)
    _backward(net, rank)
    trainer.step(4)
    assert checksum(net) == before and trainer.learning_rate == 0.0

    trainer = mykv.DistributedTrainer(net.collect_params(), "adagrad")
    trainer.set_learning_rate(mx.nd.zeros(1))
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    assert checksum(net) == before and trainer.learning_rate == 0.0

    scheduler = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0, "lr_scheduler": scheduler})
    rates = []
    for step in range(3):
        _backward(net, rank, step)
        trainer.step(4)
        rates.append(trainer.learning_rate)
    assert rates[0] > rates[1] > rates[2] > 0


@pytest.mark.ranks(2)
def test_hybridize_between_steps(rank, gather):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    reference = dense_network(seed=0)
    plain = mykv.DistributedTrainer(reference.collect_params(), *_SGD)
    for step, form in enumerate([None, {}, {"static_alloc": True, "static_shape": True}, {}]):
        if form is not None:
            net.hybridize(**form)
        for turn in range(2):
            for n, t in ((net, trainer), (reference, plain)):
                _backward(n, rank, 10 * step + turn)
                t.step(4)
    for name, values in parameters(reference).items():
        np.testing.assert_allclose(parameters(net)[name], values, rtol=1e-5, atol=1e-6)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_cast_after_the_trainer_was_made(rank, gather, static):
    net = dense_network(seed=rank)
    if static:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, rank)
    trainer.step(4)
    net.cast("float64")
    before = checksum(net)
    for step in range(2):
        x = array(np.random.RandomState(100 * step + rank).randn(4, 6))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(4)
    assert all(values.dtype == "float64" for values in parameters(net).values())
    sums = gather(checksum(net))
    assert len(set(sums)) == 1 and sums[0] != before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("adam", {})])
def test_reset_ctx_after_the_trainer_was_made(rank, gather, optimizer):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *optimizer)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    move = net.reset_device if IS_2 else net.collect_params().reset_ctx
    move(mx.cpu(1))
    for step in range(2):
        x = array(np.random.RandomState(step + 10 * rank).randn(4, 6).astype("float32"), ctx=mx.cpu(1))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(4)
    sums = gather(checksum(net))
    assert len(set(sums)) == 1 and sums[0] != before


@pytest.mark.ranks(2)
def test_half_precision_weights_with_a_master_copy(rank, gather):
    weight = gluon.Parameter("weight", shape=(6,), dtype="float16")
    weight.initialize(mx.init.Constant(rank + 1))
    optimizer = ("sgd", {"learning_rate": 0.5, "multi_precision": True})
    trainer = mykv.DistributedTrainer({"weight": weight}, *optimizer)
    for _ in range(3):
        with autograd.record():
            loss = (weight.data() * array(np.full(6, rank + 1, "float16"))).sum()
        loss.backward()
        trainer.step(1)
    assert weight.data().dtype == np.float16
    np.testing.assert_array_equal(weight.data().asnumpy(), 1 - 3 * 0.5 * 1.5)
    assert len(set(gather(weight.data().asnumpy().tobytes()))) == 1


class _Branches(gluon.Block):
    """Two layers, of which a forward pass uses those that it is told."""

    def __init__(self):
        super().__init__()
        with self.name_scope() if not IS_2 else _nothing():
            self.left = nn.Dense(2, in_units=3)
            self.right = nn.Dense(2, in_units=3)
        self.initialize()
        fill(self, 0)

    def forward(self, x, left, right):
        parts = [layer(x) for layer, used in ((self.left, left), (self.right, right)) if used]
        return sum(parts[1:], parts[0])


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def _use(net, left, right):
    if left or right:
        with autograd.record():
            loss = net(array(np.ones((1, 3), dtype="float32")), left, right).sum()
        loss.backward()


@pytest.mark.ranks(2)
def test_unused_parameter_is_an_error_or_a_warning_as_in_the_stock_trainer(rank):
    net = _Branches()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _use(net, True, False)
    with pytest.raises(UserWarning, match="stale"):
        trainer.step(1)


@pytest.mark.ranks(2)
def test_ignore_stale_grad_counts_unused_as_zeros_and_skips_what_nobody_used(rank, size, gather):
    net = _Branches()
    # weight decay shows whether an update took place without a gradient
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0, "wd": 0.5})
    _use(net, True, True)
    trainer.step(1, ignore_stale_grad=True)  # leaves gradients behind, which are stale from now on
    for uses in [((True, False), (True, True)), ((True, False), (True, False)), ((False, True), (True, False))]:
        before = parameters(net)
        _use(net, *uses[rank])
        trainer.step(1, ignore_stale_grad=True)
        after = parameters(net)
        for name, values in after.items():
            branch = 0 if "left" in name else 1
            users = sum(use[branch] for use in uses)
            # The gradient of a sum of outputs at an input of ones is one, for weights and biases alike.
            expected = (
                before[name] if users == 0 else before[name] - (users / size + 0.5 * before[name] * _decays(net, name))
            )
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=f"{name} {uses}")
        assert len(set(gather(checksum(net)))) == 1


def _decays(net, name) -> float:
    return structure(net)[name].wd_mult


@pytest.mark.ranks(2)
def test_ignore_stale_grad_when_a_worker_used_nothing_at_all(rank, size, gather):
    net = _Branches()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    before = parameters(net)
    _use(net, rank == 0, rank == 0)
    trainer.step(1, ignore_stale_grad=True)
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, before[name] - 0.5, rtol=1e-5)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_ignore_stale_grad_with_update_after_allreduce(rank, size, gather):
    net = _Branches()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for uses in [((True, True), (True, True)), ((True, False), (True, True))]:
        _use(net, *uses[rank])
        trainer.allreduce_grads()
        trainer.update(1, ignore_stale_grad=True)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_parameter_still_deferred_on_one_rank_is_an_error_naming_both(rank, late, gather):
    net = nn.Dense(2)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    if rank != late:
        _backward(net, rank)
    with pytest.raises(MXNetError) as failure:
        trainer.step(4)
        for parameter in net.collect_params().values():
            parameter.grad().asnumpy()
    assert "weight" in str(failure.value) and f"rank {late}" in str(failure.value)
    clear_errors()
    gather("both have seen it")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"compression": "fp16"}, TypeError),
        ({"gradient_predivide_factor": "two"}, TypeError),
        ({"gradient_predivide_factor": 0.0}, ValueError),
        ({"gradient_predivide_factor": -2}, ValueError),
        ({"gradient_predivide_factor": float("nan")}, ValueError),
        ({"gradient_predivide_factor": float("inf")}, ValueError),
        ({"num_groups": -1}, ValueError),
        ({"num_groups": 1.5}, TypeError),
        ({"root_rank": 2}, ValueError),
        ({"root_rank": -1}, ValueError),
        ({"root_rank": "0"}, TypeError),
        ({"process_set": [0, 1]}, TypeError),
        ({"prefix": 3}, TypeError),
        ({"bucket_bytes": -1}, ValueError),
        ({"bucket_bytes": 0.5}, TypeError),
        ({"reduce_method": "max"}, ValueError),
        ({"reduce_method": None}, TypeError),
        ({"broadcast_period": -2}, ValueError),
        ({"broadcast_period": 1.5}, TypeError),
        ({"parameter_process_sets": [None]}, TypeError),
        ({"parameter_process_sets": {"nobody": None}}, ValueError),
    ],
)
def test_wrong_arguments(arguments, error):
    net = dense_network(seed=0)
    with pytest.raises(error, match=next(iter(arguments))):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, **arguments)


@pytest.mark.ranks(2)
def test_wrong_argument_on_one_rank_is_an_error_on_the_other_too(rank, gather):
    net = dense_network(seed=0)
    with pytest.raises((ValueError, RuntimeError)) as failure:
        mykv.DistributedTrainer(net.collect_params(), *_SGD, root_rank=7 * rank)
    assert "root_rank" in str(failure.value)
    assert rank == 1 or "rank 1" in str(failure.value)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, rank)
    trainer.step(4)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("params", [3, "weights", None, [3], {"a": np.zeros(3)}])
def test_params_that_are_no_parameters(params):
    with pytest.raises((TypeError, ValueError, AttributeError)):
        mykv.DistributedTrainer(params, *_SGD)


@pytest.mark.ranks(2)
def test_other_sets_of_parameters_on_the_ranks_are_an_error_on_both(rank):
    net = dense_network(seed=0, widths=(4,) * (2 + rank))
    with pytest.raises(RuntimeError, match=r"4 .*6|6 .*4"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD)


@pytest.mark.ranks(2)
def test_other_shapes_on_the_ranks_are_an_error_on_both(rank):
    parameter = _parameter("weight", (3 + rank,), rank)
    with pytest.raises(MXNetError) as failure:
        mykv.DistributedTrainer({"weight": parameter}, *_SGD)
        parameter.data().asnumpy()
    for word in ("weight", "(3,)", "(4,)"):
        assert word in str(failure.value)


@pytest.mark.ranks(2)
def test_other_shapes_are_an_error_and_no_warning_of_other_orders(rank, caplog):
    """Each worker's network gets its shapes from its own data, after the trainer was created."""
    net = nn.Dense(4)
    net.initialize(mx.init.Constant(0.1))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(MXNetError) as failure, caplog.at_level(logging.WARNING):
        with autograd.record():
            loss = net(mx.np.ones((2, 3 + rank)) if IS_2 else mx.nd.ones((2, 3 + rank))).sum()
        loss.backward()
        trainer.step(2)
        mx.nd.waitall()
    assert "weight" in str(failure.value) and "same shapes and dtypes on all workers" in str(failure.value)
    assert "different orders" not in caplog.text
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alike", [True, False])
def test_errors_have_the_names_of_counted_parameters(rank, alike):
    parameters = [_parameter("w" if alike else f"w{rank}", (3,), rank), _parameter("head_bias", (3 + rank,), rank)]
    with pytest.raises(MXNetError) as failure:
        mykv.DistributedTrainer(parameters, *_SGD)
        mx.nd.waitall()
    assert "values/parameter 1 (head_bias) differs between ranks" in str(failure.value)
    clear_errors()
    parameters = [_parameter("w" if alike else f"w{rank}", (3 + rank,), rank)]
    with pytest.raises(MXNetError) as failure:
        mykv.broadcast_parameters(parameters)
    assert f"parameter 0 ({'w' if alike else 'w0 on rank 0'}) differs between ranks" in str(failure.value)
    assert "same shapes and dtypes on all workers" in str(failure.value)
    clear_errors()


@pytest.mark.skipif(not IS_2, reason="MXNet 1.9 trains them: test_sparse_reducer.py")
@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused(rank):
    weight = gluon.Parameter("weight", shape=(10, 4), grad_stype="row_sparse")  # as nn.Embedding(sparse_grad=True) has
    with pytest.raises(NotImplementedError, match="sparse"):
        mykv.DistributedTrainer([weight], *_SGD)


@pytest.mark.ranks(2)
def test_step_returns_at_once(rank, gather):
    """Nothing in an ordinary step waits for the other rank."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, rank)
    trainer.step(4)
    _backward(net, rank, 1)
    if rank == 1:
        gather("rank 0 has returned")
    trainer.step(4)
    if rank == 0:
        gather("rank 0 has returned")
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.skipif(IS_2, reason="names of MXNet 2.0 are the same on all workers")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_states_belong_to_the_same_parameters_where_names_sort_differently(rank, gather, tmp_path, on_store):
    """On rank 1 the layers are 'dense9' and 'dense10', which gluon.Trainer would number the other way round."""
    net = layers_named_after_others(9 * rank)

    def made():
        return mykv.DistributedTrainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, update_on_kvstore=on_store
        )

    def step(trainer, seed):
        with autograd.record():
            loss = (net(array(numbers(rank + 10 * seed, (4, 4)))) ** 2).sum()
        loss.backward()
        trainer.step(4)

    trainer = made()
    assert trainer._optimizer.param_dict[0] is net[0].weight
    for seed in range(3):
        step(trainer, seed)
    file = gather(str(tmp_path / "states"))[0]
    if rank == 0 or on_store:
        trainer.save_states(file)
    mykv.barrier()
    kept = [layer.weight.data().copy() for layer in net]
    step(trainer, 3)
    expected = gather([value(layer.weight.data()) for layer in net])
    other = made()
    for layer, weight in zip(net, kept):
        layer.weight.set_data(weight)
    other.load_states(file)
    step(other, 3)
    for result in (expected, gather([value(layer.weight.data()) for layer in net])):
        for weights in zip(*result):
            np.testing.assert_array_equal(*weights)
    for weight, layer in zip(expected[rank], net):
        np.testing.assert_array_equal(weight, value(layer.weight.data()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock", "local"])
def test_an_optimizer_with_random_noise_is_a_warning(rank, caplog, kind):
    net = dense_network(rank)
    if kind == "own":
        mykv.DistributedTrainer(net.collect_params(), "sgld")
    elif kind == "local":
        mykv.LocalTrainer(net.collect_params(), "sgld", period=4)
    else:
        trainer = gluon.Trainer(net.collect_params(), "sgld", kvstore="mykv", update_on_kvstore=False)
        _backward(net, rank)
        trainer.step(4)
    assert caplog.text.count("SGLD adds random noise in the update of each worker") == (kind != "local")

"""clip_global_norm equals gluon.utils.clip_global_norm in one process with the gradients of all workers."""

from __future__ import annotations

import copy
import pickle
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
    conv_network,
    dense_network,
    mx,
    parameters,
    structure,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.5, "momentum": 0.9})
_BATCH = 4
_STEPS = 4
_MOST = 0.05  # less than the norm in every step of these networks
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


def _loss(net, rank, step, shape=(6,), dtype="float64"):
    x = np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, *shape)).astype(dtype)
    return (net(array(x)) ** 2).sum()


def _backward(net, rank, step, **how):
    with autograd.record():
        loss = _loss(net, rank, step, **how)
    loss.backward()


def _clip(gradients, most):
    """MXNet's own function, or in float64, which it does not take, the same by numpy."""
    if gradients[0].dtype == np.float32:
        return gluon.utils.clip_global_norm(gradients, most)
    norm = np.sqrt(sum((one.asnumpy() ** 2).sum() for one in gradients))
    for one in gradients:
        one *= min(most / (norm + 1e-8), 1.0)
    return norm


def _in_one_process(build, size, most=_MOST, steps=_STEPS, **how):
    """Norms of all steps, and the parameters, of one process with all batches and MXNet's own function."""
    net = build(0)
    trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore=None)
    norms = []
    for step in range(steps):
        with autograd.record():
            loss = sum(_loss(net, rank, step, **how) for rank in range(size)) / size
        loss.backward()
        gradients = [one.grad() for one in structure(net).values() if one.grad_req != "null"]
        norms.append(_clip(gradients, most * _BATCH) / _BATCH)
        trainer.step(_BATCH)
    return norms, parameters(net)


def _assert_equals(net, norms, expected, tolerance=1e-6):
    np.testing.assert_allclose(norms, expected[0], rtol=tolerance)
    for name, one in parameters(net).items():
        np.testing.assert_allclose(one, expected[1][name], rtol=tolerance, atol=tolerance, err_msg=name)


def _all_equal(net, norms):
    told = mykv.allgather_object((checksum(net), norms))
    assert all(one == told[0] for one in told)


def _norm(trainer) -> float:
    assert trainer.gradient_norm.shape == (1,) and trainer.gradient_norm.dtype == np.float32
    return float(trainer.gradient_norm.asnumpy()[0])


def _dense(seed):
    return dense_network(seed, dtype="float64")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.smoke),
        {"bucket_bytes": 0},
        {"bucket_bytes": 200},
        {"update_on_kvstore": True},
        {"update_on_kvstore": True, "bucket_bytes": 0},
        {"gradients_after_allreduce": "sum"},
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [_MOST, 1e6])
def test_training_equals_one_process(rank, size, options, most):
    net = _dense(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=most, **options)
    assert trainer.gradient_norm is None
    norms = []
    for step in range(_STEPS):
        _backward(net, rank, step)
        trainer.step(_BATCH)
        norms.append(trainer.gradient_norm)
    norms = [float(one.asnumpy()[0]) for one in norms]  # read after all steps: each step has its own array
    _assert_equals(net, norms, _in_one_process(_dense, size, most))
    assert min(norms) > _MOST
    _all_equal(net, norms)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}, {"update_on_kvstore": True}], ids=str)
def test_gradients_of_many_megabytes_count_once(rank, size, options):
    """Their squares are added up by several operations of the engine."""

    def build(seed):
        return dense_network(seed, inputs=6, widths=(1100, 1000, 900, 1), dtype="float64")

    net = build(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST, **options)
    norms = []
    for step in range(2):
        _backward(net, rank, step)
        trainer.step(_BATCH)
        norms.append(_norm(trainer))
    _assert_equals(net, norms, _in_one_process(build, size, steps=2))
    _all_equal(net, norms)


@pytest.mark.ranks(2, 4, env=_HOSTS)
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": True}], ids=str)
def test_on_two_hosts(rank, size, options):
    net = conv_network(rank)
    how = {"shape": (1, 8, 8), "dtype": "float32"}
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST, **options)
    norms = []
    for step in range(_STEPS):
        _backward(net, rank, step, **how)
        trainer.step(_BATCH)
        norms.append(_norm(trainer))
    _assert_equals(net, norms, _in_one_process(conv_network, size, **how), 1e-5)
    _all_equal(net, norms)


@pytest.mark.ranks(2)
def test_update_after_allreduce_grads(rank, size):
    net = _dense(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST)
    norms = []
    for step in range(_STEPS):
        _backward(net, rank, step)
        if step == 1:
            trainer.step(_BATCH)
        else:
            trainer.allreduce_grads()
            trainer.update(_BATCH)
        norms.append(_norm(trainer))
    _assert_equals(net, norms, _in_one_process(_dense, size))


@pytest.mark.alone
@pytest.mark.ranks(2)
def test_no_python_code_waits(rank, size):
    """step() returns while another worker has not begun it."""
    net = _dense(0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST)
    for step in range(2):
        _backward(net, rank, step)
        if step and rank == 1:
            mx.nd.waitall()
            time.sleep(1.5)
        begin = time.monotonic()
        trainer.step(_BATCH)
        assert not step or time.monotonic() - begin < 1
    assert _norm(trainer) > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": True}], ids=str)
def test_stale_gradients_do_not_count(rank, size, options):
    """A layer that no worker uses is not in the norm; a layer that one worker uses is."""
    used, half, unused = (nn.Dense(3, in_units=6, use_bias=False) for _ in range(3))
    params = []
    for number, one in enumerate((used, half, unused)):
        one.initialize()
        one.weight.set_data(array(np.full((3, 6), 0.1 * (number + 1), "float32")))
        params.append(one.weight)
    trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, clip_global_norm=0.5, **options)
    x = array(np.full((1, 6), rank + 1, "float32"))
    for step in range(2):
        before = [one.data().asnumpy() for one in params]
        with autograd.record():
            loss = used(x).sum() + (half(x).sum() if rank == 0 else 0)
            if step == 0:  # its gradient stays in the array, large and stale
                loss = loss + 100 * unused(x).sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        mean, of_half = 1.5, 0.5
        squares = 18 * (mean**2 + of_half**2 + (0 if step else 150.0**2))
        np.testing.assert_allclose(_norm(trainer), np.sqrt(squares), rtol=1e-6)
        clipping = 0.5 / np.sqrt(squares)
        after = [one.data().asnumpy() for one in params]
        np.testing.assert_allclose(before[0] - after[0], mean * clipping, rtol=1e-4)
        np.testing.assert_allclose(before[1] - after[1], of_half * clipping, rtol=1e-3)
        if step:
            np.testing.assert_array_equal(before[2], after[2])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": True}], ids=str)
def test_several_devices_count_once(rank, size, options):
    devices = [mx.cpu(0), mx.cpu(1)]
    parameter = gluon.Parameter("weight", shape=(7,))
    parameter.initialize(init="ones", ctx=devices)
    trainer = mykv.DistributedTrainer(
        [parameter], "sgd", {"learning_rate": 1.0}, clip_global_norm=1.0, reduce_method="sum", **options
    )
    with autograd.record():
        losses = [(parameter.data(one) * (rank + number + 1)).sum() for number, one in enumerate(devices)]
    autograd.backward(losses)
    trainer.step(2)
    total = (1 + 2 + 2 + 3) / 2
    np.testing.assert_allclose(_norm(trainer), total * np.sqrt(7), rtol=1e-6)
    for one in devices:
        np.testing.assert_allclose(parameter.data(one).asnumpy(), 1 - 1 / np.sqrt(7), rtol=1e-6)


@pytest.mark.ranks(3)
def test_process_sets_and_local_parameters_count_once(rank, size):
    """One parameter of all workers, one of ranks 0 and 1, and one of each worker alone."""
    mykv.init()
    pair = mykv.add_process_set([0, 1])
    try:
        params = {
            name: gluon.Parameter(name, shape=(length,)) for name, length in (("all", 5), ("pair", 4), ("own", 3))
        }
        for one in params.values():
            one.initialize(init="ones")
        trainer = mykv.DistributedTrainer(
            params,
            "sgd",
            {"learning_rate": 1.0},
            clip_global_norm=2.0,
            parameter_process_sets={"pair": pair, "own": None},
        )
        for _ in range(2):
            with autograd.record():
                loss = sum((one.data() * (rank + 1)).sum() for one in params.values())
            loss.backward()
            before = {name: one.data().asnumpy() for name, one in params.items()}
            trainer.step(1)
            squares = 5 * 2.0**2 + 4 * 1.5**2 + 4 * 3.0**2 + 3 * (1 + 4 + 9)  # rank 2 trains "pair" alone
            np.testing.assert_allclose(_norm(trainer), np.sqrt(squares), rtol=1e-6)
            for name, gradient in (("all", 2.0), ("pair", 3.0 if rank == 2 else 1.5), ("own", rank + 1)):
                change = before[name] - params[name].data().asnumpy()
                np.testing.assert_allclose(change, gradient * 2 / np.sqrt(squares), rtol=1e-5, err_msg=name)
    finally:
        mykv.remove_process_set(pair)


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": True}], ids=str)
@pytest.mark.parametrize("only", [False, True], ids=["and dense", "alone"])
def test_row_sparse_gradients_count(rank, size, options, only):
    embedding = nn.Embedding(8, 3, sparse_grad=True)
    dense = nn.Dense(2, in_units=3, use_bias=False)
    for one in (embedding, dense):
        one.initialize(init="ones")
    params = [embedding.weight] if only else [embedding.weight, dense.weight]
    trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, clip_global_norm=0.5, **options)
    with autograd.record():
        hidden = embedding(mx.nd.array([rank, 2]))
        loss = hidden.sum() if only else dense(hidden).sum()
    loss.backward()
    trainer.step(1)
    row = 1 if only else 2  # gradient of each element of a used row
    rows = np.zeros((8, 3))
    for one in range(size):
        rows[one] += row / size
        rows[2] += row / size
    squares = (rows**2).sum() + (0 if only else 6 * 2.0**2)
    np.testing.assert_allclose(_norm(trainer), np.sqrt(squares), rtol=1e-6)
    np.testing.assert_allclose(
        1 - embedding.weight.data().asnumpy(), rows * 0.5 / np.sqrt(squares), rtol=1e-5, atol=1e-6
    )
    if not only:
        np.testing.assert_allclose(1 - dense.weight.data().asnumpy(), 2 * 0.5 / np.sqrt(squares), rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_loss_scale_of_amp_does_not_count(rank, size, dtype):
    """AMP multiplies losses by a scale and the optimizer divides by it: the norm is that of the true gradients."""
    parameter = gluon.Parameter("weight", shape=(4,), dtype=dtype)
    parameter.initialize(init="ones")
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, clip_global_norm=1.0)
    trainer._scale = 1 / 512  # as AMP sets it
    with autograd.record():
        loss = (parameter.data() * (3 * 512)).sum()
    loss.backward()
    trainer.step(1)
    np.testing.assert_allclose(_norm(trainer), 6, rtol=1e-3)
    np.testing.assert_allclose(parameter.data().asnumpy(), 0.5, rtol=1e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}, {"update_on_kvstore": True}], ids=str)
@pytest.mark.parametrize("read", ["weights", "norm on one"])
def test_a_failed_step_changes_no_weight_and_the_next_one_works(rank, size, options, read):
    """Even if a worker reads the norm first, which clears the error that all arrays of the step share."""
    net, undisturbed = (dense_network(0, widths=(1100, 1000, 900, 2), dtype="float64") for _ in range(2))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST, **options)
    calm = mykv.DistributedTrainer(undisturbed.collect_params(), *_SGD, clip_global_norm=_MOST, **options)
    for step in range(3):
        _backward(net, rank, step)
        if step == 1:
            before = parameters(net)
            with pytest.raises(MXNetError, match="batch size"):
                trainer.step(_BATCH + rank)
                if rank == 0 and read == "norm on one":
                    trainer.gradient_norm.asnumpy()
                parameters(net)
            clear_errors()
            for name, one in parameters(net).items():
                np.testing.assert_array_equal(one, before[name], err_msg=name)
            _backward(net, rank, step)
        trainer.step(_BATCH)
        _backward(undisturbed, rank, step)
        calm.step(_BATCH)
    assert checksum(net) == checksum(undisturbed)
    assert _norm(trainer) == _norm(calm)
    _all_equal(net, [_norm(trainer)])


@pytest.mark.ranks(2)
def test_frozen_parameters(rank, size):
    """Frozen parameters do not count, and a network that is wholly frozen takes steps without a norm."""
    first, second = (nn.Dense(3, in_units=6, use_bias=False) for _ in range(2))
    for one in (first, second):
        one.initialize(init="ones")
    trainer = mykv.DistributedTrainer(
        [first.weight, second.weight], "sgd", {"learning_rate": 1.0}, clip_global_norm=0.5
    )
    x = array(np.ones((1, 6), "float32"))

    def step():
        with autograd.record():
            loss = first(x).sum() + 2 * second(x).sum()
        loss.backward()
        trainer.step(1)

    step()
    np.testing.assert_allclose(_norm(trainer), np.sqrt(18 * 5), rtol=1e-6)
    second.weight.grad_req = "null"
    step()
    np.testing.assert_allclose(_norm(trainer), np.sqrt(18), rtol=1e-6)
    first.weight.grad_req = "null"
    before = first.weight.data().asnumpy()
    trainer.step(1)
    np.testing.assert_array_equal(first.weight.data().asnumpy(), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        pytest.param(
            lambda one: pickle.loads(pickle.dumps(one)),
            marks=pytest.mark.skipif(IS_2, reason="MXNet 2.0 pickles no Parameter with a Trainer"),
        ),
    ],
    ids=["deepcopy", "pickled"],
)
def test_a_copy_of_a_trainer_clips_its_own_gradients(rank, size, duplicate):
    net = _dense(0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST)
    _backward(net, rank, 0)
    trainer.step(_BATCH)
    twin = duplicate(trainer)
    for parameter in twin._params:
        parameter.grad()[:] = 2 * rank
    twin.allreduce_grads()
    twin.update(1, ignore_stale_grad=True)  # MXNet attaches no gradients to the values of a copy, so all are stale
    elements = sum(parameter.grad().size for parameter in twin._params)
    np.testing.assert_allclose(_norm(twin), np.sqrt(elements), rtol=1e-6)
    for parameter in twin._params:
        np.testing.assert_allclose(parameter.grad().asnumpy(), _MOST / np.sqrt(elements), rtol=1e-6)
    assert _norm(trainer) != _norm(twin)


@pytest.mark.ranks(2)
def test_workers_that_end_early_follow(rank, size):
    net = _dense(rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST)
    with mykv.join(trainer):
        for step in range(2 + 2 * rank):
            _backward(net, rank, step)
            trainer.step(_BATCH)
    _all_equal(net, [_norm(trainer)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "value, kind", [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_wrong_values(rank, value, kind):
    net = _dense(0)
    with pytest.raises(kind, match="clip_global_norm must be"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=value)


@pytest.mark.ranks(2)
def test_workers_with_other_norms_are_refused(rank):
    net = _dense(0)
    with pytest.raises(RuntimeError, match=r"clip_global_norm=1\.0.*clip_global_norm=2\.0"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=1 + rank)


@pytest.mark.ranks(1)
def test_gradients_on_gpus_take_mxnets_operators(rank, monkeypatch):
    """The code path of GPU arrays, on CPU arrays."""
    from kvstore_plugin.gradients import clipping, squares

    results = []
    for on_gpu in (False, True):
        monkeypatch.setattr(clipping.arrays, "on_gpu", lambda one, answer=on_gpu: answer)
        assert squares.arrays.on_gpu(None) is on_gpu
        net = dense_network(0)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, clip_global_norm=_MOST)
        for step in range(2):
            _backward(net, rank, step, dtype="float32")
            trainer.step(_BATCH)
        results.append((_norm(trainer), parameters(net)))
        monkeypatch.undo()
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    for name, one in results[0][1].items():
        np.testing.assert_allclose(one, results[1][1][name], rtol=1e-5, err_msg=name)

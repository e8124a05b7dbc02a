"""DistributedOptimizer: an optimizer of MXNet that averages gradients, wherever MXNet takes an optimizer."""

from __future__ import annotations

import copy
import inspect
import pickle

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx, parameters
from mxnet import autograd, gluon

_BATCH = 4
_STEPS = 4

_OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "adam": {"learning_rate": 0.01},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "rmsprop": {"learning_rate": 0.01},
    "adagrad": {"learning_rate": 0.01},
    "lamb": {"learning_rate": 0.01},
}


def _optimizer(name="sgd", **changes):
    return mx.optimizer.create(name, **{**_OPTIMIZERS.get(name, {}), **changes})


def _data(step, rank, size=None):
    """A worker's batch, or with `size` the batch of all workers."""
    if size is not None:
        return np.concatenate([_data(step, one) for one in range(size)])
    return np.random.RandomState(1000 * step + rank).randn(_BATCH, 6).astype("float64")


def _train(net, trainer, batches, batch_size, dtype="float64"):
    # MXNet gives 1 / batch_size to its optimizers as a float32, which is too coarse to compare float64 training.
    factor = array(np.full((1,), 1 / batch_size, dtype))
    for x in batches:
        with autograd.record():
            loss = (net(array(x.astype(dtype))) ** 2 * factor).sum()
        loss.backward()
        trainer.step(1)


@pytest.mark.ranks(1)
def test_signature_is_that_of_horovod():
    signature = inspect.signature(mykv.DistributedOptimizer.__init__)
    assert list(signature.parameters)[1:] == ["optimizer", "gradient_predivide_factor", "num_groups", "process_set"]
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert defaults["gradient_predivide_factor"] == 1.0 and defaults["num_groups"] == 0
    assert defaults["process_set"] is mykv.global_process_set


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_two_workers_equal_one_process_on_the_joined_batch(rank, size, gather, name):
    _check_equivalence(rank, size, gather, name, 0, "float32", 1e-5)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_groups", [0, 1, 2, 100])
def test_three_workers_equal_one_process_in_any_number_of_groups(rank, size, gather, num_groups):
    _check_equivalence(rank, size, gather, "sgd", num_groups, "float64", 1e-10)


def _check_equivalence(rank, size, gather, name, num_groups, dtype, tolerance):
    net = dense_network(seed=rank, dtype=dtype)
    mykv.broadcast_parameters(net.collect_params())
    optimizer = mykv.DistributedOptimizer(_optimizer(name), num_groups=num_groups)
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    _train(net, trainer, [_data(step, rank) for step in range(_STEPS)], _BATCH, dtype)

    alone = dense_network(seed=0, dtype=dtype)
    one = gluon.Trainer(alone.collect_params(), _optimizer(name), kvstore=None)
    _train(alone, one, [_data(step, None, size) for step in range(_STEPS)], _BATCH * size, dtype)

    assert len(set(gather(checksum(net)))) == 1
    before = parameters(dense_network(seed=0, dtype=dtype))
    for key, values in parameters(alone).items():
        np.testing.assert_allclose(parameters(net)[key], values, rtol=tolerance, atol=tolerance, err_msg=key)
        assert abs(values - before[key]).max() > 1e-4


def _updated(optimizer, index, weight, gradient, state, precise=False):
    """Call update as this release's Updater does: 2.0 always passes lists."""
    method = optimizer.update_multi_precision if precise else optimizer.update
    if IS_2 and not isinstance(index, list):
        index, weight, gradient, state = [index], [weight], [gradient], [state]
    method(index, weight, gradient, state)


def _pair(rank, shape=(3, 2), dtype="float32"):
    return array(np.ones(shape, dtype), "nd"), array(np.full(shape, rank + 1, dtype), "nd")


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("precise", [False, True], ids=["update", "update_multi_precision"])
def test_update_averages_the_gradient_in_place(rank, size, precise):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", learning_rate=0.5, momentum=0.0, wd=0.0))
    weight, gradient = _pair(rank)
    state = optimizer.create_state_multi_precision(0, weight)
    for step in range(2):
        gradient[:] = rank + 1
        _updated(optimizer, 0, weight, gradient, state, precise)
        mean = (size + 1) / 2
        np.testing.assert_allclose(gradient.asnumpy(), mean)
        np.testing.assert_allclose(weight.asnumpy(), 1 - 0.5 * mean * (step + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_groups", [0, 2, 5])
def test_lists_of_indices(rank, size, num_groups):
    optimizer = _optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0)
    optimizer = mykv.DistributedOptimizer(optimizer, num_groups=num_groups)
    shapes = [(3, 2), (4,), (1, 5), (2, 2)]
    weights, gradients = zip(*(_pair(10 * k + rank, shape) for k, shape in enumerate(shapes)))
    states = [optimizer.create_state(k, weight) for k, weight in enumerate(weights)]
    for _ in range(3):
        for k, gradient in enumerate(gradients):
            gradient[:] = 10 * k + rank
        optimizer.update([0, 1, 2, 3], list(weights), list(gradients), states)
        for k, gradient in enumerate(gradients):
            assert (gradient.asnumpy() == 10 * k + 0.5).all()
    for k, weight in enumerate(weights):
        np.testing.assert_allclose(weight.asnumpy(), 1 - 3 * (10 * k + 0.5))


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("indices", ["ints", "strs", "mixed"])
@pytest.mark.parametrize("num_groups", [0, 3])
def test_workers_may_update_in_different_orders(rank, size, indices, num_groups):
    optimizer = _optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0)
    optimizer = mykv.DistributedOptimizer(optimizer, num_groups=num_groups)
    keys = {"ints": list(range(7)), "strs": [f"w{k}" for k in range(7)], "mixed": [0, "0", 1, "one", 2, 3, "3"]}[
        indices
    ]
    pairs = {key: _pair(0, (k + 1,)) for k, key in enumerate(keys)}
    for step in range(3):
        for k, key in enumerate(keys):
            pairs[key][1][:] = 10 * k + rank
        order = [keys[k] for k in np.random.RandomState(100 * step + rank).permutation(len(keys))]
        if num_groups:
            weights, gradients = ([pairs[key][half] for key in order] for half in (0, 1))
            optimizer.update(order, weights, gradients, [None] * len(order))
        else:
            for key in order:
                _updated(optimizer, key, *pairs[key], None)
        for k, key in enumerate(keys):
            np.testing.assert_allclose(pairs[key][1].asnumpy(), 10 * k + (size - 1) / 2, rtol=1e-6)


@pytest.mark.ranks(2)
def test_half_precision_weights_with_a_master_copy(rank, gather):
    optimizer = _optimizer("sgd", learning_rate=0.5, momentum=0.9, wd=0.0, multi_precision=True)
    optimizer = mykv.DistributedOptimizer(optimizer)
    weight, gradient = _pair(rank, dtype="float16")
    state = optimizer.create_state_multi_precision(0, weight)
    assert any(part.dtype == np.float32 for part in state)
    expected, momentum = 1.0, 0.0
    for _ in range(3):
        gradient[:] = rank + 1
        _updated(optimizer, 0, weight, gradient, state, precise=True)
        momentum = 0.9 * momentum + 0.5 * 1.5
        expected -= momentum
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-3)
    assert len(set(gather(weight.asnumpy().tobytes()))) == 1


@pytest.mark.ranks(1)
def test_attributes_are_those_of_the_wrapped_optimizer():
    wrapped = _optimizer("sgd")
    optimizer = mykv.DistributedOptimizer(wrapped)
    assert isinstance(optimizer, mx.optimizer.Optimizer)
    assert optimizer.rescale_grad == 1.0 and optimizer.momentum == wrapped.momentum
    optimizer.rescale_grad = 0.25
    optimizer.idx2name = {0: "weight"}
    optimizer.param_dict = {0: "a parameter"}
    optimizer.something_new = 7
    assert (wrapped.rescale_grad, wrapped.idx2name, wrapped.something_new) == (0.25, {0: "weight"}, 7)
    assert wrapped.param_dict == {0: "a parameter"}
    wrapped.lr = 0.75
    assert optimizer.lr == optimizer.learning_rate == 0.75
    optimizer.set_learning_rate(0.5)
    assert wrapped.lr == wrapped.learning_rate == 0.5
    optimizer.set_lr_mult({0: 2.0})
    optimizer.set_wd_mult({0: 3.0})
    assert wrapped.lr_mult == {0: 2.0} and wrapped.wd_mult[0] == 3.0
    assert optimizer.create_state.__self__ is wrapped
    assert "momentum" in dir(optimizer) and "SGD" in repr(optimizer)
    del optimizer.something_new
    assert not hasattr(wrapped, "something_new") and not hasattr(optimizer, "something_new")
    with pytest.raises(AttributeError, match="nowhere"):
        optimizer.nowhere  # noqa: B018


@pytest.mark.ranks(2)
def test_lr_and_wd_multipliers_count(rank):
    net = dense_network(seed=0, widths=(2,))
    weight, bias = net.collect_params().values()
    weight.lr_mult, bias.lr_mult, weight.wd_mult = 2.0, 0.0, 0.0
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", learning_rate=0.1, momentum=0.0, wd=0.5))
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    before = [parameter.data().asnumpy() for parameter in (weight, bias)]
    for parameter in (weight, bias):
        parameter.grad()[:] = rank + 1
        parameter.data()._fresh_grad = True
    trainer.step(1)
    np.testing.assert_allclose(weight.data().asnumpy(), before[0] - 0.1 * 2 * 1.5, rtol=1e-6)
    np.testing.assert_array_equal(bias.data().asnumpy(), before[1])


@pytest.mark.ranks(2)
def test_learning_rate_scheduler(rank):
    scheduler = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    optimizer = _optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0, lr_scheduler=scheduler)
    optimizer = mykv.DistributedOptimizer(optimizer)
    weight, gradient = _pair(rank)
    rates = []
    for _ in range(3):
        _updated(optimizer, 0, weight, gradient, None)
        rates.append(optimizer.learning_rate)
    assert rates[0] > rates[1] > rates[2] > 0
    gradient.wait_to_read()


@pytest.mark.ranks(2)
def test_two_optimizers_in_one_program_do_not_collide(rank):
    """They know their weights by the same indices, and the workers use them in different orders."""
    optimizers = [mykv.DistributedOptimizer(_optimizer("sgd")) for _ in range(2)]
    pairs = [_pair(10 * k + rank) for k in range(2)]
    for k in (0, 1) if rank else (1, 0):
        _updated(optimizers[k], 0, *pairs[k], optimizers[k].create_state(0, pairs[k][0]))
    for k, (_, gradient) in enumerate(pairs):
        assert (gradient.asnumpy() == 10 * k + 1.5).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("duplicate", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy, copy.copy])
def test_copies_average_too(rank, duplicate):
    wrapped = _optimizer("sgd", learning_rate=0.1, momentum=0.0, wd=0.0)
    optimizer = mykv.DistributedOptimizer(wrapped, num_groups=2)
    optimizer.rescale_grad = 0.5
    if rank:
        copy.deepcopy(optimizer)  # one worker's copy that is never used
    twin = duplicate(optimizer)
    assert isinstance(twin, mykv.DistributedOptimizer) and twin.rescale_grad == 0.5
    assert (twin._optimizer is wrapped) == (duplicate is copy.copy)
    for one in (optimizer, twin, optimizer, mykv.DistributedOptimizer(_optimizer("sgd")), twin):
        weight, gradient = _pair(rank)
        _updated(one, 0, weight, gradient, one.create_state(0, weight))
        assert (gradient.asnumpy() == 1.5).all()


@pytest.mark.ranks(2)
def test_states_are_saved_and_loaded(rank, gather, tmp_path):
    path = str(tmp_path / f"states{rank}")

    def build(seed):
        net = dense_network(seed=seed, dtype="float64")
        optimizer = mykv.DistributedOptimizer(_optimizer("adam"))
        return net, gluon.Trainer(net.collect_params(), optimizer, kvstore=None)

    net, trainer = build(0)
    _train(net, trainer, [_data(step, rank) for step in range(3)], _BATCH)
    trainer.save_states(path)
    again, resumed = build(5)
    for parameter, other in zip(again.collect_params().values(), net.collect_params().values()):
        parameter.set_data(other.data())
    resumed.load_states(path)
    assert isinstance(resumed.optimizer, mykv.DistributedOptimizer)
    assert resumed.optimizer.param_dict[0] is resumed._params[0]
    for one, its in ((net, trainer), (again, resumed)):
        _train(one, its, [_data(step, rank) for step in range(3, 6)], _BATCH)
    assert checksum(again) == checksum(net)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loads", ["all ranks", "rank 0"])
@pytest.mark.parametrize("store", [None, "device"])
def test_states_of_a_plain_optimizer(rank, tmp_path, store, loads):
    """MXNet loads the optimizer with the states: without care the trainer would average no longer."""
    path = str(tmp_path / f"states{rank}")
    on_store = store is not None
    store = store and mx.kv.create(store)
    plain = _optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0)
    net = dense_network(seed=0, widths=(2,))
    gluon.Trainer(net.collect_params(), plain, kvstore=store, update_on_kvstore=on_store).save_states(path)
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0))
    store = store and mx.kv.create("device")
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=store, update_on_kvstore=on_store)
    expected = {name: values - 2 * 1.5 for name, values in parameters(net).items()}
    for step in range(2):
        if step == 1:
            if loads == "all ranks" or rank == 0:
                trainer.load_states(path)
            if loads == "rank 0":
                mykv.broadcast_states(trainer)
        for parameter in net.collect_params().values():
            parameter.grad()[:] = rank + 1
            parameter.data()._fresh_grad = True
        trainer.step(1)
    assert isinstance(trainer._optimizer, mykv.DistributedOptimizer)
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5)


@pytest.mark.ranks(2)
def test_several_devices_of_a_worker(rank, size):
    """The store of the process sums over devices, and the optimizer then averages over workers."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(seed=0, widths=(2,), ctx=devices)
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", learning_rate=0.1, momentum=0.0, wd=0.0))
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore="device", update_on_kvstore=False)
    expected = {}
    for key, parameter in net.collect_params().items():
        expected[key] = parameter.data(devices[0]).asnumpy() - 0.1 * (10 + 2 * 0.5)
        for number, device in enumerate(devices):
            parameter.grad(device)[:] = 10 * number + rank
            parameter.data(device)._fresh_grad = True
    trainer.step(1)
    for key, parameter in net.collect_params().items():
        for device in devices:
            np.testing.assert_allclose(parameter.data(device).asnumpy(), expected[key], rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kvstore", ["mykv", "MyKV", "instance"])
def test_a_trainer_over_mykv_refuses_it_because_it_would_sum_twice(kvstore):
    net = dense_network(seed=0)
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd"))
    kvstore = mx.kv.create("mykv") if kvstore == "instance" else kvstore
    with pytest.raises(ValueError, match="them again.*kvstore=None"):
        gluon.Trainer(net.collect_params(), optimizer, kvstore=kvstore)
    with pytest.raises(ValueError, match="them again.*kvstore=None"):
        gluon.Trainer(net.collect_params(), optimizer, None, kvstore)
    gluon.Trainer(net.collect_params(), optimizer)  # MXNet's default, for the devices of one process


@pytest.mark.ranks(2)
def test_distributed_trainer_unwraps_it_and_averages_once(rank, gather):
    wrapped = _optimizer("sgd", learning_rate=0.1, momentum=0.0, wd=0.0)
    net = dense_network(seed=rank, widths=(2,))
    with pytest.warns(UserWarning, match="DistributedOptimizer.*average"):
        trainer = mykv.DistributedTrainer(net.collect_params(), mykv.DistributedOptimizer(wrapped))
    assert trainer.optimizer is wrapped
    before = parameters(net)
    for parameter in net.collect_params().values():
        parameter.grad()[:] = rank + 1
        parameter.data()._fresh_grad = True
    trainer.step(1)
    for key, values in parameters(net).items():
        np.testing.assert_allclose(values, before[key] - 0.1 * 1.5, rtol=1e-5, atol=1e-6)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
@pytest.mark.parametrize("num_groups", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_module_equals_one_process_on_the_joined_batch(rank, size, gather, name, num_groups):
    def module(batch_size):
        data = mx.sym.Variable("data")
        hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=8, name="first"), act_type="tanh")
        out = mx.sym.FullyConnected(hidden, num_hidden=3, name="second")
        net = mx.sym.SoftmaxOutput(out, name="softmax")
        module = mx.mod.Module(net, context=mx.cpu())
        module.bind([("data", (batch_size, 6))], [("softmax_label", (batch_size,))])
        return module

    def values(seed):
        rng = np.random.RandomState(seed)
        shapes = {"first_weight": (8, 6), "first_bias": (8,), "second_weight": (3, 8), "second_bias": (3,)}
        return {key: mx.nd.array(rng.uniform(-1, 1, shape)) for key, shape in shapes.items()}

    def train(module, optimizer, batches):
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        for x in batches:
            labels = mx.nd.array(np.tile(np.arange(_BATCH) % 3, len(x) // _BATCH))
            module.forward_backward(mx.io.DataBatch([mx.nd.array(x)], [labels]))
            module.update()
        return {key: value.asnumpy() for key, value in module.get_params()[0].items()}

    mine = module(_BATCH)
    mine.init_params(arg_params=values(rank))
    mykv.broadcast_parameters(mine.get_params())
    mine.set_params(*mine.get_params())
    optimizer = mykv.DistributedOptimizer(_optimizer(name, rescale_grad=1 / _BATCH), num_groups=num_groups)
    trained = train(mine, optimizer, [_data(step, rank) for step in range(_STEPS)])
    assert optimizer.idx2name[0] == "first_weight"  # Module wrote it

    alone = module(_BATCH * size)
    alone.init_params(arg_params=values(0))
    optimizer = _optimizer(name, rescale_grad=1 / (_BATCH * size))
    expected = train(alone, optimizer, [_data(step, None, size) for step in range(_STEPS)])
    for key, value in expected.items():
        np.testing.assert_allclose(trained[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
        assert abs(value - values(0)[key].asnumpy()).max() > 1e-3
    assert len(set(gather(b"".join(value.tobytes() for value in trained.values())))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"optimizer": "sgd"}, TypeError),
        ({"optimizer": None}, TypeError),
        ({"gradient_predivide_factor": 0}, ValueError),
        ({"gradient_predivide_factor": float("nan")}, ValueError),
        ({"gradient_predivide_factor": "two"}, TypeError),
        ({"num_groups": -1}, ValueError),
        ({"num_groups": 0.5}, TypeError),
        ({"process_set": [0, 1]}, TypeError),
        ({"process_set": mykv.ProcessSet([0])}, ValueError),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, error):
    arguments = {"optimizer": _optimizer("sgd"), **arguments}
    with pytest.raises(error, match=r"^[A-Z].*|[a-z_]+ must .*\.$"):
        mykv.DistributedOptimizer(**arguments)


@pytest.mark.ranks(2)
def test_one_in_another_is_refused():
    with pytest.raises(ValueError, match="already"):
        mykv.DistributedOptimizer(mykv.DistributedOptimizer(_optimizer("sgd")))


@pytest.mark.ranks(2)
def test_sparse_gradient_on_one_worker_is_an_error_on_both_and_the_next_update_works(rank):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0))
    weight, gradient = _pair(rank)
    if rank == 1:
        with pytest.raises(ValueError, match="index 0 is a sparse array"):
            _updated(optimizer, 0, weight, gradient.as_nd_ndarray().tostype("row_sparse"), None)
    else:
        _updated(optimizer, 0, weight, gradient, None)
        with pytest.raises(MXNetError, match="rank 1.*sparse"):
            gradient.asnumpy()
    clear_errors()
    weight, gradient = _pair(rank)
    _updated(optimizer, 0, weight, gradient, None)
    assert (gradient.asnumpy() == 1.5).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_groups", [0, 1])
def test_other_shapes_on_the_workers_are_an_error_on_both(rank, num_groups):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0), num_groups=num_groups)
    weight, gradient = _pair(rank, (3 + rank,))
    with pytest.raises(MXNetError, match=r"\(3,\).*\(4,\)"):
        optimizer.update([0], [weight], [gradient], [None])
        gradient.asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
def test_other_groups_on_the_workers_are_an_error_on_both(rank):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0), num_groups=1)
    pairs = [_pair(rank) for _ in range(2)]
    with pytest.raises(MXNetError, match="indices 0, 1.*indices 0, 2"):
        optimizer.update([0, 1 + rank], *([pair[half] for pair in pairs] for half in (0, 1)), [None, None])
        pairs[0][1].asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
def test_a_gradient_that_carries_an_error_fails_on_both(rank):
    from harness.support import fail

    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0))
    weight, gradient = _pair(rank)
    if rank == 1:
        fail(gradient)
    with pytest.raises(MXNetError):
        _updated(optimizer, 0, weight, gradient, None)
        weight.asnumpy()
    clear_errors()


@pytest.mark.ranks(3)
def test_a_process_set_averages_and_the_others_update_alone(rank, size):
    mykv.init()
    members = mykv.add_process_set([0, size - 1])
    try:
        optimizer = _optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0)
        optimizer = mykv.DistributedOptimizer(optimizer, process_set=members)
        everybody = mykv.DistributedOptimizer(_optimizer("sgd", learning_rate=1.0, momentum=0.0, wd=0.0))
        for one, ranks in ((optimizer, [0, size - 1]), (everybody, range(size)), (optimizer, [0, size - 1])):
            weight, gradient = _pair(rank)
            _updated(one, 0, weight, gradient, None)
            expected = np.mean([r + 1 for r in ranks]) if rank in ranks else rank + 1
            np.testing.assert_allclose(gradient.asnumpy(), expected)
            np.testing.assert_allclose(weight.asnumpy(), 1 - expected)
        twin = pickle.loads(pickle.dumps(optimizer))
        assert twin._mean.process_set is members
    finally:
        mykv.remove_process_set(members)
    with pytest.raises(ValueError, match="removed"):
        _updated(optimizer, 0, *_pair(rank), None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_groups", [0, 1])
def test_lists_of_other_lengths_on_one_worker_are_an_error_on_both(rank, num_groups):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0), num_groups=num_groups)
    weights, gradients = zip(*(_pair(rank) for _ in range(2)))
    if rank == 1:
        with pytest.raises(ValueError, match="2 indices but 1 gradients"):
            optimizer.update([0, 1], list(weights), list(gradients)[:1], [None, None])
    else:
        optimizer.update([0, 1], list(weights), list(gradients), [None, None])
        with pytest.raises(MXNetError, match="rank 1.*2 indices but 1 gradients"):
            gradients[1].asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
def test_after_shutdown_it_says_so_and_after_init_it_works_again(rank, gather):
    optimizer = mykv.DistributedOptimizer(_optimizer("sgd", momentum=0.0))
    gather("made")
    mykv.shutdown()
    weight, gradient = _pair(rank)
    with pytest.raises(RuntimeError, match="init"):
        _updated(optimizer, 0, weight, gradient, None)
    gather("all have left")
    mykv.init()
    _updated(optimizer, 0, weight, gradient, None)
    assert (gradient.asnumpy() == 1.5).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_stale_gradient_on_one_worker_is_an_error_on_both_and_the_next_step_works(rank, gather, first):
    params = [gluon.Parameter(f"stale{number}", shape=(2,), init="zeros") for number in range(3)]
    for parameter in params:
        parameter.initialize()
    trainer = gluon.Trainer(params, mykv.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0)), kvstore=None)

    def backward(factor, used=params):
        with autograd.record():
            loss = sum((parameter.data() * factor).sum() for parameter in used)
        loss.backward()

    if not first:
        backward(4.0)
        trainer.step(1)
    backward(10.0, params[1:] if rank == 1 else params)
    if rank == 1:
        with pytest.raises(UserWarning, match="stale"):
            trainer.step(1)
    else:
        with pytest.raises(MXNetError, match="refused by rank 1.*stale"):
            trainer.step(1)
            mx.nd.waitall()
    clear_errors()
    for parameter in params:
        parameter.set_data(parameter.data() * 0)  # both workers' weights are as they were
    for _ in range(2):
        backward(rank + 1.0)
        trainer.step(1)
        assert params[0].grad().asnumpy().tolist() == [1.5, 1.5]
    assert gather([parameter.data().asnumpy().tolist() for parameter in params]) == [[[-3.0, -3.0]] * 3] * 2

"""MXNet's Module API with the store 'mykv', which only MXNet 1.x has: equal to dist_sync, on the store and off it."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness import dist_sync
from harness.support import IS_2, MXNetError, mx

pytestmark = pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")

# Trains several Modules one after the other, and writes their weights. With dist_sync a process has one store: so each
# Module has names of its own, and only the first one weight decay, since the server finds out by the number of a key
# which of them are biases, and goes on counting from one Module to the next.
_TRAIN = """
    import os, sys
    store_name, file, on_store = sys.argv[1:]
    on_store = on_store == "True"
    if store_name == "mykv":
        import kvstore_plugin
    import numpy
    if "bool" not in vars(numpy):
        numpy.bool = bool
    import mxnet as mx

    one = mx.kv.create("dist_sync") if store_name == "dist_sync" else None
    rank, size = (one or mx.kv.create(store_name)).rank, (one or mx.kv.create(store_name)).num_workers
    numbers = numpy.random.RandomState(0)
    x = numbers.randn(24 * size, 5).astype("float32")
    y = (x.sum(axis=1) > 0).astype("float32")

    def network(name):
        value = mx.sym.Variable("data")
        value = mx.sym.FullyConnected(value, num_hidden=8, name=name + "one")
        value = mx.sym.BatchNorm(mx.sym.Activation(value, act_type="tanh"), name=name + "norm", fix_gamma=False)
        return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(value, num_hidden=3, name=name + "two"), name="softmax")

    def train(name, devices, optimizer, parameters, fixed=None):
        data = mx.io.NDArrayIter(x[rank::size], y[rank::size], 8)
        module = mx.mod.Module(
            network(name), context=[mx.cpu(number) for number in range(devices)], fixed_param_names=fixed
        )
        numpy.random.seed(0)  # dist_sync leaves the workers' weights as they are where it updates off the store
        mx.random.seed(0)
        store = one or mx.kv.create(store_name)
        module.fit(data, num_epoch=3, kvstore=store, optimizer=optimizer, optimizer_params=parameters,
                   initializer=mx.init.Xavier())
        assert module._update_on_kvstore == on_store
        weights, _ = module.get_params()
        return {key: value.asnumpy() for key, value in weights.items()}

    momentum = {"learning_rate": 0.2, "momentum": 0.9}
    results = train("decay_", 1, "sgd", {**momentum, "wd": 0.01})
    results.update(train("devices_", 2, "sgd", momentum))
    results.update(train("adam_", 1, "adam", {"learning_rate": 0.05}))
    results.update(train("fixed_", 1, "sgd", momentum, ["fixed_one_weight"]))
    numpy.savez(f"{file}.{rank}.npz", **results)
"""


@pytest.fixture(params=[False, True], ids=["off the store", "on the store"])
def on_store(request, monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(int(request.param)))
    return request.param


@pytest.mark.long
def test_training_equals_dist_sync(mpirun, tmp_path, on_store):
    workers = 2
    arguments = [[name, str(tmp_path / name), str(on_store)] for name in ("dist_sync", "mykv")]
    dist_sync.run(mpirun, workers, _TRAIN, *arguments[0], timeout=180)
    ours = mpirun(workers, _TRAIN, *arguments[1], timeout=180)
    assert ours.code == 0, ours.text
    expected = np.load(tmp_path / "dist_sync.0.npz")
    results = [np.load(tmp_path / f"mykv.{rank}.npz") for rank in range(workers)]
    assert expected.files
    for name in expected.files:
        np.testing.assert_allclose(results[0][name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0][name], other[name], err_msg=name)


_BATCH = 8


def _network():
    value = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="one")
    value = mx.sym.FullyConnected(mx.sym.Activation(value, act_type="tanh"), num_hidden=2, name="two")
    return mx.sym.SoftmaxOutput(value, name="softmax")


def _data(rank, size, batch=_BATCH, steps=4):
    numbers = np.random.RandomState(7)
    x = numbers.randn(batch * steps * size, 5).astype("float32")
    y = (x.sum(axis=1) > 0).astype("float32")
    return mx.io.NDArrayIter(x[rank::size], y[rank::size], batch)


def _module(rank, devices=1, batch=_BATCH, size=2):
    """A Module with weights of its own on each worker."""
    data = _data(rank, size, batch)
    module = mx.mod.Module(_network(), context=[mx.cpu(number) for number in range(devices)])
    module.bind(data.provide_data, data.provide_label)
    np.random.seed(rank)
    mx.random.seed(rank)
    module.init_params(mx.init.Xavier())
    return module, data


@pytest.mark.ranks(2)
def test_executors_keep_their_gradients_which_a_monitor_shows(rank, gather, on_store):
    """A Module has no Parameters, so none of its arrays is replaced; the arrays have the sums off the store alone."""
    module, data = _module(rank)
    monitor = mx.mon.Monitor(1, stat_func=lambda array: array.copy(), pattern="one_weight|softmax_output")
    module.install_monitor(monitor)
    held = [array for (array,) in module._exec_group.grad_arrays]
    module.init_optimizer(kvstore="mykv", optimizer="sgd")
    monitor.tic()
    module.forward_backward(next(data))
    own = [array.asnumpy() for array in held]
    module.update()
    mx.nd.waitall()
    assert all(one is array for one, (array,) in zip(held, module._exec_group.grad_arrays))
    for array, mine in zip(held, zip(*gather(own))):
        np.testing.assert_allclose(array.asnumpy(), mine[rank] if on_store else sum(mine), rtol=1e-5, atol=1e-6)
    shown = {name: value for _, name, value in monitor.toc()}
    assert shown.keys() == {"one_weight", "softmax_output"}
    assert shown["one_weight"] == f"{module._exec_group.param_arrays[0][0].asnumpy()}\t"


def _weights(module):
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


def _same(gather, module):
    values = gather(_weights(module))
    return all((one[name] == values[0][name]).all() for one in values for name in one)


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_workers_begin_with_the_weights_of_rank_0_and_stay_equal(rank, size, gather, on_store, by_name, devices):
    module, data = _module(rank, devices)
    first = gather(_weights(module))
    assert (first[0]["one_weight"] != first[1]["one_weight"]).any()
    module.init_optimizer(kvstore="mykv" if by_name else mx.kv.create("mykv"), optimizer="sgd")
    assert module._update_on_kvstore == on_store
    for name, value in _weights(module).items():
        np.testing.assert_array_equal(value, first[0][name])
    for batch in data:
        module.forward_backward(batch)
        module.update()
    assert _same(gather, module)
    assert (_weights(module)["one_weight"] != first[0]["one_weight"]).any()


@pytest.mark.ranks(1, 2, 3)
def test_rescale_grad_counts_the_workers(rank, size, on_store):
    module, _ = _module(rank, size=size)
    module.init_optimizer(kvstore=mx.kv.create("mykv"))
    assert module._optimizer.rescale_grad == 1 / (_BATCH * size)


@pytest.mark.ranks(2)
def test_rescale_grad_of_unequal_batches_is_that_of_all_together(rank, size, gather, on_store):
    """One worker has a device, the other two, with a batch for each; the mean is over all images."""
    module, data = _module(rank, devices=1 + rank, batch=_BATCH * (1 + rank))
    module.init_optimizer(kvstore=mx.kv.create("mykv"), optimizer_params={"learning_rate": 0.5})
    assert module._optimizer.rescale_grad == 1 / (_BATCH * 3)
    module.forward_backward(next(data))
    module.update()
    assert _same(gather, module)
    # One process with the same images.
    alone, _ = _module(0, batch=_BATCH * 3)
    ours = [_data(worker, size, _BATCH * (1 + worker)) for worker in range(size)]
    batches = [next(one) for one in ours]
    together = mx.io.DataBatch(
        [mx.nd.concat(*(one.data[0] for one in batches), dim=0)],
        [mx.nd.concat(*(one.label[0] for one in batches), dim=0)],
    )
    alone.init_optimizer(kvstore=None, optimizer_params={"learning_rate": 0.5})
    alone.forward_backward(together)
    alone.update()
    for name, value in _weights(alone).items():
        np.testing.assert_allclose(_weights(module)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_unequal_factors_of_the_user_are_an_error_on_all_workers(rank, size, on_store):
    module, _ = _module(rank)
    with pytest.raises(MXNetError, match=r"it is 0.5 on rank 0, 0.25 on rank 1"):
        module.init_optimizer(kvstore=mx.kv.create("mykv"), optimizer_params={"rescale_grad": 0.5 / (1 + rank)})


@pytest.mark.ranks(2)
def test_modules_with_other_parameters_are_an_error_on_all_workers(rank, size, on_store):
    data = _data(rank, size)
    value = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name=f"name{rank}")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(value, name="softmax"))
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    with pytest.raises(RuntimeError, match=r"parameters of a Module are not the same on all ranks.*Name the symbols"):
        module.init_optimizer(kvstore=mx.kv.create("mykv"))


@pytest.mark.ranks(2)
def test_one_worker_that_updates_on_the_store_and_one_that_does_not(rank, size, monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(rank))
    module, _ = _module(rank)
    with pytest.raises(RuntimeError, match="updates on the"):
        module.init_optimizer(kvstore=mx.kv.create("mykv"))


@pytest.mark.ranks(1)
def test_a_distributed_optimizer_is_refused():
    module, _ = _module(0)
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        module.init_optimizer(kvstore="mykv", optimizer=mykv.DistributedOptimizer(mx.optimizer.SGD()))


@pytest.mark.ranks(2)
def test_the_store_given_to_module_is_the_users(rank, size, on_store):
    store = mx.kv.create("mykv")
    module, _ = _module(rank)
    module.init_optimizer(kvstore=store)
    out = mx.nd.zeros((4, 5))
    store.pull("one_weight", out)
    np.testing.assert_array_equal(out.asnumpy(), _weights(module)["one_weight"])
    assert store.type == "mykv" and isinstance(module._kvstore, mykv.MyKV)


@pytest.mark.ranks(2)
def test_initializing_the_optimizer_again(rank, size, gather, on_store):
    store = mx.kv.create("mykv")
    module, data = _module(rank)
    optimizer = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1 / (_BATCH * size))
    module.init_optimizer(kvstore=store, optimizer=optimizer)
    module.init_optimizer(kvstore=store, optimizer=optimizer, force_init=True)
    for batch in data:
        module.forward_backward(batch)
        module.update()
    assert _same(gather, module)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_sequential_module_with_one_store(rank, size, gather, on_store, by_name):
    first = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="one")
    last = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="two")
    module = mx.mod.SequentialModule()
    module.add(mx.mod.Module(first, label_names=None))
    module.add(mx.mod.Module(mx.sym.SoftmaxOutput(last, name="softmax")), take_labels=True, auto_wiring=True)
    data = _data(rank, size)
    module.bind(data.provide_data, data.provide_label)
    mx.random.seed(rank)
    module.init_params(mx.init.Xavier())
    store = "mykv" if by_name else mx.kv.create("mykv")
    options = {"learning_rate": 0.1, "momentum": 0.9}
    module.init_optimizer(kvstore=store, optimizer="sgd", optimizer_params=options)
    before = _weights(module)
    for batch in data:
        module.forward_backward(batch)
        module.update()
    after = _weights(module)
    assert _same(gather, module) and all((before[name] != after[name]).any() for name in after if "weight" in name)


@pytest.mark.ranks(2)
def test_bucketing_module(rank, size, gather, on_store):
    def network(length):
        value = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=10, output_dim=3, name="embedding")
        value = mx.sym.FullyConnected(mx.sym.mean(value, axis=1), num_hidden=2, name="dense")
        return mx.sym.SoftmaxOutput(value, name="softmax"), ("data",), ("softmax_label",)

    np.random.seed(rank)
    module = mx.mod.BucketingModule(network, default_bucket_key=6)
    module.bind([("data", (4, 6))], [("softmax_label", (4,))])
    module.init_params()
    module.init_optimizer(kvstore=mx.kv.create("mykv"))
    for step in range(6):
        length = (6, 4)[step % 2]
        batch = mx.io.DataBatch(
            [mx.nd.array(np.random.randint(0, 10, (4, length)))],
            [mx.nd.array(np.random.randint(0, 2, 4))],
            bucket_key=length,
            provide_data=[("data", (4, length))],
            provide_label=[("softmax_label", (4,))],
        )
        module.forward_backward(batch)
        module.update()
    assert _same(gather, module)


class _Variable:
    """A variable of Keras-MXNet: the optimizers of that package hold their learning rate in one."""

    def __init__(self, value):
        self.tensor = mx.nd.array([value])


class _LikeKeras(mx.optimizer.SGD):
    def __init__(self, lr):
        super().__init__(learning_rate=lr)
        self.lr = _Variable(lr)

    def _get_lrs(self, indices):
        return [self.lr.tensor.asscalar()] * len(indices)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differs", [False, True])
def test_an_optimizer_that_holds_its_learning_rate_in_a_variable(rank, size, gather, monkeypatch, differs):
    module, data = _module(rank)
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    module.init_optimizer(kvstore="mykv", optimizer=_LikeKeras(0.125 * (1 + rank * differs)))
    if differs:
        with pytest.raises(MXNetError, match="rank 0 has learning rate 0.125, rank 1 has learning rate 0.25"):
            for batch in data:
                module.forward_backward(batch)
                module.update()
                mx.nd.waitall()
        return
    for batch in data:
        module.forward_backward(batch)
        module.update()
    assert _same(gather, module)


@pytest.mark.ranks(2)
def test_feed_forward(rank, size, gather, on_store):
    np.random.seed(rank)
    model = mx.model.FeedForward(_network(), num_epoch=2, initializer=mx.init.Xavier())
    model.fit(_data(rank, size), kvstore="mykv")
    values = gather({name: value.asnumpy() for name, value in model.arg_params.items()})
    assert all((values[1][name] == value).all() for name, value in values[0].items())

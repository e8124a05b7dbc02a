"""Parameters whose initialization is deferred: equal on all workers from the first forward pass on."""

from __future__ import annotations

import copy
import pickle

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, mx, parameters, structure
from kvstore_plugin.compat.mxnet import DeferredInitializationError
from kvstore_plugin.parameters import deferred_init
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1})


def _network(seed, norm=False):
    """A network that gets its shapes, and its random values, in its first forward pass."""
    mx.random.seed(seed)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, activation="tanh"), nn.AvgPool2D())
    if norm:
        net.add(nn.BatchNorm())
    net.add(nn.Dense(5, activation="tanh"), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    return net


def _images(rank, step=0):
    return array(np.random.RandomState(100 * step + rank).rand(3, 1, 8, 8).astype("float32"))


def _loss(net, rank, step=0):
    with autograd.record():
        return (net(_images(rank, step)) ** 2).sum()


def _values_from(seed, norm=False):
    net = _network(seed, norm)
    net(_images(0))
    return parameters(net)


class _Counting:
    """The core, counting the broadcasts."""

    def __init__(self, core):
        self._core = core
        self.broadcasts = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    def push_broadcast(self, name, *arguments, **options):
        self.broadcasts.append(name)
        self._core.push_broadcast(name, *arguments, **options)


@pytest.fixture
def counting(monkeypatch):
    mykv.init()
    core = _Counting(process.core)
    monkeypatch.setattr(process, "core", core)
    return core


def _distributed(net):
    return mykv.DistributedTrainer(net.collect_params(), *_SGD), 1


def _stock(net):
    mykv.broadcast_parameters(net.collect_params())
    return gluon.Trainer(net.collect_params(), *_SGD, kvstore=mx.kv.create("mykv")), mykv.size()


_BOTH = pytest.mark.parametrize("make", [_distributed, _stock], ids=["DistributedTrainer", "Trainer"])


@pytest.mark.smoke
@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
@_BOTH
def test_workers_agree_before_the_first_backward(rank, gather, make, hybridize):
    net = _network(seed=rank)
    if hybridize is not None:
        net.hybridize(**hybridize)
    make(net)
    loss = _loss(net, rank)
    assert len(set(gather(checksum(net)))) == 1
    loss.backward()
    np.testing.assert_equal(parameters(net), _values_from(seed=0))


@pytest.mark.ranks(2)
@_BOTH
def test_first_gradients_come_from_the_values_of_the_root(rank, size, gather, make):
    net = _network(seed=rank)
    trainer, workers = make(net)
    for step in range(3):
        _loss(net, rank, step).backward()
        trainer.step(3 * workers)
        assert len(set(gather(checksum(net)))) == 1
    alone = _network(seed=0)
    one = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    for step in range(3):
        both = array(np.concatenate([_images(k, step).asnumpy() for k in range(size)]))
        with autograd.record():
            loss = (alone(both) ** 2).sum()
        loss.backward()
        one.step(3 * size)
    for name, values in parameters(alone).items():
        np.testing.assert_allclose(parameters(net)[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("root_rank", [0, 1])
def test_values_of_another_root(rank, root_rank):
    net = _network(seed=rank)
    mykv.DistributedTrainer(net.collect_params(), *_SGD, root_rank=root_rank)
    _loss(net, rank)
    np.testing.assert_equal(parameters(net), _values_from(seed=root_rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", ["trainer", "broadcast", "removed trainer"])
@pytest.mark.parametrize("make", [_distributed, _stock, None], ids=["DistributedTrainer", "Trainer", "broadcast"])
def test_an_earlier_broadcast_of_another_process_set_does_not_count(rank, gather, before, make):
    mykv.init()
    sets = [mykv.add_process_set([one]) for one in range(2)]
    net = _network(seed=rank)
    if before == "broadcast":
        mykv.broadcast_parameters(net.collect_params(), root_rank=rank, process_set=sets[rank])
    else:
        mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=sets[rank])
    if before == "removed trainer":
        for one in sets:
            mykv.remove_process_set(one)
    if make is None:
        mykv.broadcast_parameters(net.collect_params())
    else:
        trainer, workers = make(net)
    loss = _loss(net, rank)
    np.testing.assert_equal(parameters(net), _values_from(seed=0))
    if make is not None:
        loss.backward()
        trainer.step(3 * workers)
        assert len(set(gather(checksum(net)))) == 1
    if before != "removed trainer":
        for one in sets:
            mykv.remove_process_set(one)


@pytest.mark.ranks(2)
def test_running_statistics_are_broadcast_too(rank, gather):
    net = _network(seed=rank, norm=True)
    mykv.DistributedTrainer(net.collect_params(), *_SGD)
    net(_images(rank))
    assert len(set(gather(checksum(net)))) == 1
    statistics = [name for name in parameters(net) if "running" in name]
    assert len(statistics) == 2


@pytest.mark.ranks(2)
def test_inference_as_the_first_forward_pass(rank, gather):
    net = _network(seed=rank)
    mykv.DistributedTrainer(net.collect_params(), *_SGD)
    net(_images(rank))
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_first_forward_pass_waits_for_the_values_of_the_root(rank, gather):
    """The first output on rank 1 comes from rank 0's weights, though rank 0 is late."""
    net = _network(seed=rank)
    mykv.DistributedTrainer(net.collect_params(), *_SGD)
    if rank == 0:
        gather("rank 1 has called the network")
    out = net(_images(0))
    if rank == 1:
        gather("rank 1 has called the network")
    first, second = gather(out.asnumpy())
    np.testing.assert_array_equal(first, second)


@pytest.mark.ranks(2)
def test_broadcast_happens_once_per_parameter(rank, counting):
    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    assert len(counting.broadcasts) == 3  # the biases, whose shapes are known
    _loss(net, rank).backward()
    assert len(set(counting.broadcasts)) == len(counting.broadcasts) == 6 == len(structure(net))
    for step in range(2):
        trainer.step(3)
        _loss(net, rank, step).backward()
    assert len(counting.broadcasts) == 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trainers", [0, 1, 2])
def test_hooks_do_not_stack(rank, counting, gather, trainers):
    """broadcast_parameters, twice, and then trainers: still one broadcast for each of the three deferred weights."""
    net = _network(seed=rank)
    for _ in range(2):
        mykv.broadcast_parameters(net.collect_params())
    for _ in range(trainers):
        mykv.DistributedTrainer(net.collect_params(), *_SGD)
    counting.broadcasts.clear()
    for _ in range(2):
        _loss(net, rank)
        assert len(counting.broadcasts) == 3, counting.broadcasts
    assert len(set(gather(checksum(net)))) == 1


def _pickled(net):
    return pickle.loads(pickle.dumps(net))


_COPIES = pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(_pickled, marks=pytest.mark.skipif(IS_2, reason="MXNet 2.0 cannot pickle a Sequential")),
        copy.deepcopy,
    ],
)


@pytest.mark.ranks(2)
@_COPIES
def test_copies_of_a_network_that_waits(rank, gather, duplicate):
    net = _network(seed=rank)
    mykv.broadcast_parameters(net.collect_params())
    twin = duplicate(net)
    net(_images(rank))
    assert len(set(gather(checksum(net)))) == 1
    # A copy is a network of its own: it can be used on one rank alone, or get a trainer.
    if rank == 1:
        twin(_images(1)).wait_to_read()
    mykv.DistributedTrainer(twin.collect_params(), *_SGD)
    twin(_images(rank))
    assert len(set(gather(checksum(twin)))) == 1


@pytest.mark.ranks(2)
@_COPIES
@pytest.mark.parametrize("trained", [False, True])
def test_copies_of_a_network_with_a_trainer(rank, gather, duplicate, trained):
    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    if trained:
        _loss(net, rank).backward()
        trainer.step(3)
    twin = duplicate(net)
    for parameter in structure(twin).values():  # MXNet's copies do not take part in autograd, nor know their Trainer
        parameter._trainer = None
        if parameter._grad is not None:
            parameter.grad_req = "null"
            parameter.grad_req = "write"
    other = mykv.DistributedTrainer(twin.collect_params(), *_SGD)
    for n, t in ((net, trainer), (twin, other)):
        _loss(n, rank, 1).backward()
        t.step(3)
        assert len(set(gather(checksum(n)))) == 1
    assert not trained or checksum(twin) == checksum(net)


@pytest.mark.ranks(2)
def test_a_layer_without_gradients_that_one_worker_does_not_use_is_named(rank):
    net, frozen = nn.Dense(2, in_units=2), nn.Dense(2, use_bias=False)
    for block in (net, frozen):
        block.initialize()
    for parameter in structure(frozen).values():
        parameter.grad_req = "null"
    trainer = mykv.DistributedTrainer([*structure(net).values(), *structure(frozen).values()], *_SGD)
    with autograd.record():
        out = net(array(np.ones((1, 2), "float32")))
        loss = (out if rank == 1 else frozen(out)).sum()
    loss.backward()
    with pytest.raises(MXNetError, match=r"No forward pass has used parameter 2 .*on all workers\. Pass a batch"):
        trainer.step(1)
        mx.nd.waitall()
    clear_errors()


@pytest.mark.ranks(2)
def test_values_whose_broadcast_has_failed_are_an_error_until_they_are_sent_again(rank, gather):
    net, frozen = nn.Dense(2, in_units=2), nn.Dense(2, use_bias=False)
    for block in (net, frozen):
        block.initialize(mx.init.Uniform())
    (weight,) = structure(frozen).values()
    weight.grad_req = "null"
    trainer = mykv.DistributedTrainer([*structure(net).values(), weight], *_SGD)

    def step(uses_frozen):
        with autograd.record():
            out = net(array(np.ones((1, 2), "float32")))
            loss = (frozen(out) if uses_frozen else out).sum()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()

    with pytest.raises(MXNetError, match="they wait for each other"):
        step(uses_frozen=rank == 1)
    clear_errors()
    # The script has caught the error, and rank 0 uses the layer too.
    if rank == 0:  # its broadcast ends with the same error, which would come before or after that of the next step
        frozen(array(np.ones((1, 2), "float32")))
        clear_errors()
    for _ in range(2):
        with pytest.raises(
            MXNetError, match=r"call broadcast_states\(\) .*the broadcast trainer.* has failed on rank 1"
        ):
            step(uses_frozen=True)
        clear_errors()
    mykv.broadcast_states(trainer)
    step(uses_frozen=True)
    assert len(set(gather((checksum(net), checksum(frozen))))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["deferred", "initialized", "trained"])
@_BOTH
def test_force_reinit(rank, gather, make, when):
    net = _network(seed=rank)
    trainer, workers = make(net)
    if when != "deferred":
        loss = _loss(net, rank)
        if when == "trained":
            loss.backward()
            trainer.step(3 * workers)
    mx.random.seed(10 + rank)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    if make is _stock and when != "deferred":
        mykv.broadcast_parameters(net.collect_params())  # the stock Trainer knows nothing of a new beginning
    for step in range(2):
        loss = _loss(net, rank, step)
        assert len(set(gather(checksum(net)))) == 1
        loss.backward()
        trainer.step(3 * workers)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loaders", [(0,), (1,), (0, 1)])
@_BOTH
def test_load_parameters_instead_of_a_first_forward_pass(rank, gather, tmp_path, make, loaders):
    """Resuming from a file that some ranks have: the root's values count, whether it loads or initializes them."""
    source = _network(seed=50 + rank)
    source(_images(0))
    path = str(tmp_path / f"net{rank}.params")
    source.save_parameters(path)
    net = _network(seed=rank)
    trainer, workers = make(net)
    if rank in loaders:
        net.load_parameters(path)
    loss = _loss(net, rank)
    sums = gather(checksum(net))
    assert len(set(sums)) == 1
    expected = _values_from(seed=50 if 0 in loaders else 0)
    np.testing.assert_equal(parameters(net), expected)
    loss.backward()
    trainer.step(3 * workers)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("early", [0, 1])
@_BOTH
def test_initialized_on_one_rank_and_deferred_on_the_other(rank, gather, make, early):
    net = _network(seed=rank)
    if rank == early:
        net(_images(rank))
    trainer, workers = make(net)
    for step in range(2):
        loss = _loss(net, rank, step)
        assert len(set(gather(checksum(net)))) == 1
        loss.backward()
        trainer.step(3 * workers)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_layers_used_in_other_orders_on_the_ranks(rank, gather):
    """Ranks initialize the two layers in opposite orders."""
    mx.random.seed(rank)
    layers = [nn.Dense(3), nn.Dense(3)]
    params = {f"{k}.{part}": getattr(layer, part) for k, layer in enumerate(layers) for part in ("weight", "bias")}
    for layer in layers:
        layer.initialize()
    trainer = mykv.DistributedTrainer(params, *_SGD)
    x = array(np.random.RandomState(rank).rand(2, 4).astype("float32"))
    for _ in range(2):
        with autograd.record():
            outs = [layer(x).sum() for layer in (layers[::-1] if rank else layers)]
        autograd.backward(outs)
        trainer.step(2)
        for layer in layers:
            assert len(set(gather(layer.weight.data().asnumpy().tobytes()))) == 1


@pytest.mark.ranks(2)
def test_cast_while_deferred(rank, gather):
    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    net.cast("float64")
    for step in range(2):
        x = array(np.random.RandomState(100 * step + rank).rand(3, 1, 8, 8))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(3)
        assert len(set(gather(checksum(net)))) == 1
    assert all(values.dtype == "float64" for values in parameters(net).values())


@pytest.mark.ranks(2)
def test_several_devices(rank, gather):
    devices = [mx.cpu(0), mx.cpu(1)]
    mx.random.seed(rank)
    net = nn.Dense(3)
    net.initialize(ctx=devices)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(2):
        with autograd.record():
            losses = [
                (
                    net(array(np.random.RandomState(rank + 7 * k + step).rand(2, 4).astype("float32"), ctx=device)) ** 2
                ).sum()
                for k, device in enumerate(devices)
            ]
        autograd.backward(losses)
        trainer.step(4)
        values = [net.weight.data(device).asnumpy().tobytes() for device in devices]
        assert len({value for both in gather(values) for value in both}) == 1


@pytest.mark.ranks(2)
def test_deferred_on_all_ranks_at_step_is_an_error_on_all(rank):
    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(MXNetError, match=f"rank {rank}"):
        trainer.step(3)
    clear_errors()


@pytest.mark.ranks(2)
def test_deferred_at_step_is_no_dead_end(rank, gather):
    """After the forward pass that was forgotten, training goes on."""
    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(MXNetError):
        trainer.step(3)
    clear_errors()
    for step in range(2):
        _loss(net, rank, step).backward()
        trainer.step(3)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_dropped_trainer_and_network_leave_nothing_behind(rank):
    import gc
    import weakref

    net = _network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _loss(net, rank).backward()
    trainer.step(3)
    mx.nd.waitall()
    references = [weakref.ref(parameter) for parameter in structure(net).values()]
    del net, trainer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.ranks(2)
def test_parameter_dict_of_a_part_of_the_network(rank, gather):
    net = _network(seed=rank)
    select = net.collect_params(".*weight")
    mykv.broadcast_parameters(select)
    net(_images(rank))
    for name, values in parameters(net).items():
        if "weight" in name:
            assert len(set(gather(values.tobytes()))) == 1


class _Drawn(mx.init.Initializer):
    """The same values whenever it is called."""

    def __init__(self, seed):
        super().__init__(seed=seed)
        self._seed = seed

    def _init_weight(self, name, values):
        values[:] = array(np.random.RandomState(self._seed).uniform(-0.3, 0.3, values.shape).astype("float32"))


def _mistake(net, trainer, rank, loses):
    """A step in which a worker has not used the network: an error on all, and nothing that is left waits."""
    if rank not in loses:
        _loss(net, rank).backward()
    with pytest.raises(MXNetError, match=f"has no values yet on rank {rank if rank in loses else loses[0]}"):
        trainer.step(3, ignore_stale_grad=True)
    clear_errors()
    mykv.barrier()  # also where one of them goes on to this at once
    clear_errors()


@pytest.mark.smoke
@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": True}, {"bucket_bytes": 0}], ids=str)
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}], ids=str)
@pytest.mark.parametrize("loser", [0, 1])
def test_deferred_on_one_rank_at_step_is_no_dead_end(rank, gather, loser, hybridize, options):
    """The weights are those of a run without the mistake, whichever rank has made it, and however often."""
    sums = []
    for loses in ((), (loser,)):
        net = _network(seed=rank, norm=True)
        net.initialize(_Drawn(rank), force_reinit=True)
        if hybridize is not None:
            net.hybridize(**hybridize)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, **options)
        for _ in range(2 * len(loses)):
            _mistake(net, trainer, rank, loses)
        for step in range(2):
            _loss(net, rank, step).backward()
            trainer.step(3)
        trained = {name: values.tobytes() for name, values in parameters(net).items() if "running" not in name}
        sums.append(str(sorted(trained.items())))
        assert len(set(gather(sums[-1]))) == 1
    assert sums[0] == sums[1]


@pytest.mark.ranks(2)
def test_values_from_before_the_trainer_are_kept_when_the_other_worker_has_not_used_the_network(rank):
    mykv.init()
    net = _network(seed=rank)
    if rank == 0:
        net(_images(rank))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _mistake(net, trainer, rank, (1,))
    _loss(net, rank)
    np.testing.assert_equal(parameters(net), _values_from(seed=0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [0, 1])
def test_a_layer_that_only_one_rank_has_used(rank, gather, first):
    """Its other layers train on; the error comes again until both have used it."""
    mx.random.seed(rank)
    shared, other = nn.Dense(3, in_units=4), nn.Dense(2)
    for layer in (shared, other):
        layer.initialize()
    params = {f"{k}.{part}": getattr(one, part) for k, one in enumerate((shared, other)) for part in ("weight", "bias")}
    trainer = mykv.DistributedTrainer(params, *_SGD)
    x = array(np.random.RandomState(rank).rand(2, 4).astype("float32"))

    def step(uses):
        with autograd.record():
            loss = shared(x).sum() + (other(shared(x)).sum() if uses else 0)
        loss.backward()
        trainer.step(2, ignore_stale_grad=True)
        mx.nd.waitall()

    for who in (first, 1 - first, first):
        with pytest.raises(MXNetError, match="has no values yet on rank"):
            step(uses=rank == who)
        clear_errors()
    for _ in range(2):
        step(uses=True)
        for layer in (shared, other):
            assert len(set(gather(layer.weight.data().asnumpy().tobytes()))) == 1


@pytest.mark.ranks(2)
def test_initialized_anew_and_not_used_by_one_rank(rank, gather):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.Dense(2))
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    x = array(np.random.RandomState(rank).rand(2, 3).astype("float32"))

    def step():
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(2)

    for _ in range(2):
        step()
    net[1].weight._shape = (2, -1 if IS_2 else 0)
    net[1].weight._data = net[1].weight._grad = None
    net[1].weight.initialize()
    net[1]._called_infer_shape_already = False  # of 2.0
    with pytest.raises(MXNetError, match="has no values yet on rank 1"):
        if rank == 0:
            step()
        else:
            trainer.step(2)
        mx.nd.waitall()
    clear_errors()
    mykv.barrier()
    for _ in range(2):
        step()
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_weights_that_were_trained_are_kept_when_a_new_layer_is_not_used(rank, gather):
    """A second trainer of the same network with a layer more, which one worker has not used in the first step."""
    net, late = _network(seed=rank), nn.Dense(2)
    late.initialize()
    first = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(2):
        _loss(net, rank, step).backward()
        first.step(3)
    before = checksum(net)
    params = {**{f"0.{k}": one for k, one in structure(net).items()}, "weight": late.weight, "bias": late.bias}
    trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 0.0})

    def step(uses):
        with autograd.record():
            out = net(_images(rank))
            loss = (late(out) if uses else out).sum()
        loss.backward()
        trainer.step(3)
        mx.nd.waitall()

    with pytest.raises(MXNetError, match="weight.* has no values yet on rank 1"):
        step(uses=rank == 0)
    clear_errors()
    assert checksum(net) == before
    step(uses=True)
    assert checksum(net) == before
    assert len(set(gather(late.weight.data().asnumpy().tobytes()))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("loser", [0, 1])
def test_a_worker_that_leaves_the_first_step_out_before_its_forward_pass(rank, gather, loser):
    net = _network(seed=rank, norm=True)
    net.initialize(_Drawn(rank), force_reinit=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    known = [parameter for parameter in structure(net).values() if parameter._data is not None]
    assert known
    for _ in range(2):
        with pytest.raises(MXNetError, match=f"rank {loser} is in barrier, but"):
            if rank != loser:
                _loss(net, rank).backward()
                trainer.step(3)
            mykv.barrier()
        clear_errors()
        if rank != loser:
            with pytest.raises(MXNetError, match=f"rank {loser} is in barrier, but"):
                mykv.barrier()
        mykv.barrier()
        assert all(parameter._data is not None for parameter in known)  # only the others wait for their next use
    for step in range(2):
        _loss(net, rank, step).backward()
        trainer.step(3)
        trained = {name: values.tobytes() for name, values in parameters(net).items() if "running" not in name}
        assert len(set(gather(str(sorted(trained.items()))))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [False, True], ids=["made in the forward pass", "made before the trainer"])
@pytest.mark.parametrize("how", ["load_parameters", "set_data"])
def test_values_that_the_root_loads_before_the_other_has_used_the_network(rank, gather, tmp_path, how, before):
    """The step fails, since the other rank has no values, and MXNet's engine has skipped the writes."""
    source = _network(seed=50, norm=True)
    source(_images(0))
    for parameter in structure(source).values():
        parameter.set_data(parameter.data() + 0.5)
    path = str(tmp_path / "net.params")
    source.save_parameters(path)
    net = _network(seed=rank, norm=True)
    mykv.init()
    if before and rank == 0:
        net(_images(rank))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    known = [name for name, one in structure(net).items() if "weight" not in name]

    def step(loads):
        if rank == 0:
            loss = _loss(net, rank)
            if loads and how == "load_parameters":
                net.load_parameters(path)
            elif loads:
                for name, parameter in structure(net).items():
                    if name not in known:
                        parameter.set_data(structure(source)[name].data())
            loss.backward()
        trainer.step(3)

    for loads in (True, False):
        with pytest.raises(MXNetError, match="has no values yet on rank 1"):
            step(loads)
        clear_errors()
    if how == "load_parameters":  # also those whose shapes were known, of which only rank 0 has the loaded values
        mykv.broadcast_states(trainer)
    net(_images(rank))
    # With MXNet 2.0 the writes to parameters whose shapes were known are lost as well, and they keep their old values.
    with_known = how == "load_parameters" and not IS_2
    expected = {name: one for name, one in parameters(source).items() if with_known or name not in known}
    np.testing.assert_equal({name: parameters(net)[name] for name in expected}, expected)
    for number in range(2):
        _loss(net, rank, number).backward()
        trainer.step(3)
        trained = {name: values.tobytes() for name, values in parameters(net).items() if "running" not in name}
        assert len(set(gather(str(sorted(trained.items()))))) == 1


@pytest.mark.ranks(1)
def test_a_parameter_that_was_new_on_another_rank_waits_for_its_next_use_here_too(monkeypatch):
    """Its broadcast may have failed there; if this rank kept its values, only the other rank would broadcast again."""
    mykv.init()
    withdrawn = []
    monkeypatch.setattr(deferred_init, "_withdraw", lambda parameter, is_new: withdrawn.append((parameter, is_new)))
    with_values, without = nn.Dense(2, in_units=3), nn.Dense(2)
    for layer in (with_values, without):
        layer.initialize()
    named = [("with values", with_values.weight), ("without", without.weight)]

    def exchange(numbers):
        assert [int(one) for one in numbers] == [0, 1, 0, 1, 0, 0]  # lacks values, needs them, is new
        return np.array([numbers, [0, 1, 0, 1, 1, 0]])

    with pytest.raises(DeferredInitializationError):
        deferred_init.check_values(mykv.global_process_set, named, [False, False], exchange)
    assert withdrawn == [(with_values.weight, False)]

"""broadcast_states: after only one worker has loaded a checkpoint, all continue as if all had loaded it.

Without the call, an error names it.
"""

from __future__ import annotations

import copy

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, fill, mx, name_scope, parameters, structure
from mxnet import autograd, gluon
from mxnet.gluon import nn

if IS_2:
    from mxnet.amp.loss_scaler import LossScaler
else:
    from mxnet.contrib.amp.loss_scaler import LossScaler

_OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "sgd-momentum": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
    "ftml": {"learning_rate": 0.01},
    "nadam": {"learning_rate": 0.01},
}


def _network(seed, ctx=None, deferred=False):
    net = nn.HybridSequential()
    with name_scope(net):  # a stock Trainer sorts the names: dense9 comes behind dense10
        net.add(
            nn.Dense(5, in_units=0 if deferred else 4, activation="tanh"),
            nn.BatchNorm(in_channels=0 if deferred else 5),
        )
        net.add(nn.Dense(2, in_units=0 if deferred else 5))
    net.initialize(ctx=ctx)
    net[2].bias.grad_req = "null"  # frozen
    if not deferred:
        fill(net, seed)
    return net


def _trainer(kind, net, optimizer, scheduler=None):
    options = dict(_OPTIMIZERS[optimizer])
    if scheduler is not None:
        options["lr_scheduler"] = scheduler
    created = mx.optimizer.create(optimizer.partition("-")[0], **options)
    params = net.collect_params()
    if kind == "distributed":
        return mykv.DistributedTrainer(params, created)
    if kind == "distributed on the store":
        return mykv.DistributedTrainer(params, created, update_on_kvstore=True)
    if kind == "wrapped":
        return gluon.Trainer(params, mykv.DistributedOptimizer(created), kvstore=None)
    return gluon.Trainer(params, created, kvstore="mykv", update_on_kvstore=kind == "stock on the store")


def _scheduler():
    return mx.lr_scheduler.FactorScheduler(step=3, factor=0.5)


def _step(net, trainer, seed, contexts=None):
    losses = []
    with autograd.record():
        for number, device in enumerate(contexts or [mx.cpu()]):
            x = array(np.random.RandomState(100 * seed + number).randn(3, 4).astype("float32"), ctx=device)
            losses.append((net(x) ** 2).sum())
    autograd.backward(losses)
    trainer.step(3)


def _checkpoint(kind, optimizer, path, rank, steps=5):
    """Train alike on all workers, save on rank 0, and return the state after the same number of further steps."""
    net = _network(seed=1)
    trainer = _trainer(kind, net, optimizer, _scheduler())
    for step in range(steps):
        _step(net, trainer, step)
    net.save_parameters(f"{path}.params.{rank}")
    trainer.save_states(f"{path}.states.{rank}")
    for step in range(steps, 2 * steps):
        _step(net, trainer, step)
    return parameters(net)


def _same_everywhere(net, gather):
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(1, 3, long=(2,))
@pytest.mark.parametrize("kind", ["distributed", "stock", "wrapped"])
@pytest.mark.parametrize("optimizer", list(_OPTIMIZERS))
def test_training_goes_on_as_if_all_had_loaded(optimizer, kind, rank, size, gather, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = _checkpoint(kind, optimizer, path, rank)
    net = _network(seed=10 + rank)
    trainer = _trainer(kind, net, optimizer, _scheduler())
    root = size - 1
    if rank == root:
        net.load_parameters(f"{path}.params.{rank}")
        trainer.load_states(f"{path}.states.{rank}")
    mykv.broadcast_states(trainer, root_rank=root)
    _same_everywhere(net, gather)
    for step in range(5, 10):
        _step(net, trainer, step)
    for name, values in parameters(net).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    counts = gather((trainer.optimizer.num_update, sorted(trainer.optimizer._index_update_count.items())))
    assert counts[0][0] == 10 and all(one == counts[0] for one in counts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "distributed on the store", "stock", "stock on the store", "wrapped"])
def test_workers_that_have_trained_before(kind, rank, gather, tmp_path):
    """Rank 1 loads in the middle of training; the states that rank 0 has by then are replaced."""
    net = _network(seed=1)
    trainer = _trainer(kind, net, "sgd-momentum")
    for step in range(2):
        _step(net, trainer, step)
    other = _network(seed=5)
    other.save_parameters(str(tmp_path / "other.params"))
    if rank == 1:
        net.load_parameters(str(tmp_path / "other.params"))
        if not kind.endswith("on the store"):
            for state in trainer._updaters[0].states.values():
                if state is not None:
                    state[:] = 1
    mykv.broadcast_states(trainer, root_rank=1)
    for name, values in parameters(net).items():
        np.testing.assert_array_equal(values, parameters(other)[name], err_msg=name)
    if not kind.endswith("on the store"):
        for state in trainer._updaters[0].states.values():
            assert state is None or (state.asnumpy() == 1).all()
    for step in range(2, 5):
        _step(net, trainer, step)
    _same_everywhere(net, gather)
    assert set(gather(trainer.optimizer.num_update)) == {5}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["stock", "stock on the store"])
@pytest.mark.parametrize("given", ["name", "object"])
def test_a_stock_trainer_sets_up_its_store_alone(given, kind, rank, gather, tmp_path):
    """load_states() does that before the first step, and load_parameters() undoes it with updates on the store."""
    mykv.init()
    store = "mykv" if given == "name" else mx.kv.create("mykv")
    net = _network(seed=rank)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=store, update_on_kvstore=kind == "stock on the store")
    other = _network(seed=5)
    other.save_parameters(str(tmp_path / "other.params"))
    if rank == 0:
        trainer._init_kvstore()
        trainer._init_params()
        net.load_parameters(str(tmp_path / "other.params"))
    mykv.broadcast_states(trainer)
    for name, values in parameters(net).items():
        np.testing.assert_array_equal(values, parameters(other)[name], err_msg=name)
    for step in range(3):
        _step(net, trainer, step)
    _same_everywhere(net, gather)


@pytest.mark.ranks(2)
def test_a_store_set_up_alone_has_taken_the_values_of_the_first_worker(rank):
    net = _network(seed=rank)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore="mykv", update_on_kvstore=False)
    if rank == 1:
        trainer._init_kvstore()
        trainer._init_params()
    with pytest.raises(
        MXNetError,
        match="On rank 1 the trainer has already set up.*all trainers get the values of rank 0. Load on rank 0",
    ):
        mykv.broadcast_states(trainer, root_rank=1)
    mykv.broadcast_states(trainer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "stock"])
def test_several_devices(kind, rank, gather):
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = _network(seed=rank, ctx=contexts)
    trainer = _trainer(kind, net, "adam", _scheduler())
    for step in range(2):
        _step(net, trainer, step, contexts)
    if rank == 0:
        for updater in trainer._updaters:
            updater.optimizer.num_update = 7
            for counts in updater.optimizer._all_index_update_counts.values():
                counts.update(dict.fromkeys(counts, 7))
            for state in updater.states.values():
                for one in state:
                    one[:] = 0.25
    mykv.broadcast_states(trainer)
    assert len(trainer._updaters) == 2
    seen = [one for updater in trainer._updaters for state in updater.states.values() for one in state]
    assert len({id(one) for one in seen}) == len(seen) and all((one.asnumpy() == 0.25).all() for one in seen)
    _step(net, trainer, 2, contexts)
    if kind == "distributed":
        replicas = [
            r.asnumpy().tobytes() for p in structure(net).values() if "running" not in p.name for r in p.list_data()
        ]
        assert len(set(gather(replicas[::2].__repr__()))) == 1
    counts = gather([dict(one) for one in trainer.optimizer._all_index_update_counts.values() if one])
    assert all(set(one.values()) == {8} for of_rank in counts for one in of_rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counters", [True, False])
def test_counters_and_scheduler(counters, rank):
    net = _network(seed=0)
    scheduler = _scheduler()
    trainer = _trainer("distributed", net, "adam", scheduler)
    for step in range(2):
        _step(net, trainer, step)
    if rank == 0:
        trainer.optimizer.num_update = trainer.optimizer.begin_num_update = 9
        trainer.optimizer._index_update_count[0] = 9
        scheduler.base_lr, scheduler.count = 0.125, 6
        trainer.optimizer.wd = 0.5
    optimizer = trainer.optimizer
    mykv.broadcast_states(trainer, counters=counters)
    assert trainer.optimizer is optimizer and optimizer.lr_scheduler is scheduler
    assert scheduler.base_lr == 0.125 and scheduler.count == 6 and optimizer.wd == 0.5
    own = rank == 1 and not counters
    assert optimizer.num_update == (2 if own else 9) and optimizer.begin_num_update == (0 if own else 9)
    assert optimizer._index_update_count[0] == (2 if own else 9)
    assert optimizer.param_dict  # which lr_mult and wd_mult are read from


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "stock"])
def test_the_scale_of_amp(kind, rank):
    net = _network(seed=0)
    trainer = _trainer(kind, net, "sgd")
    scaler = LossScaler()
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
    if rank == 0:
        scaler._loss_scale = scaler._next_loss_scale = 512.0
        scaler._unskipped = 77
        trainer._scale = 1 / 512
    mykv.broadcast_states(trainer)
    assert trainer._amp_loss_scaler is scaler and scaler.loss_scale == 512 and scaler._unskipped == 77
    assert trainer._scale == 1 / 512
    if rank == 1:
        del trainer._amp_loss_scaler
    with pytest.raises(MXNetError, match="rank 1 differs from the trainer of rank 0 in its use of AMP"):
        mykv.broadcast_states(trainer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "distributed on the store", "stock", "stock on the store"])
def test_parameters_that_wait_for_their_shapes_get_them(kind, rank, gather, tmp_path):
    _network(seed=5).save_parameters(str(tmp_path / "known.params"))
    net = _network(seed=rank, deferred=True)
    trainer = _trainer(kind, net, "adam")
    if rank == 0:
        net.load_parameters(str(tmp_path / "known.params"))
    mykv.broadcast_states(trainer)
    for name, values in parameters(_network(seed=5)).items():
        np.testing.assert_array_equal(parameters(net)[name], values, err_msg=name)
    _step(net, trainer, 0)
    _same_everywhere(net, gather)


@pytest.mark.ranks(3)
def test_process_sets_and_local_parameters(rank, gather):
    mykv.init()
    pair = mykv.add_process_set([1, 2])
    net = _network(seed=0)
    names = structure(net)
    own = {names["0.weight"]: pair, names["0.bias"]: None}
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", parameter_process_sets=own, broadcast_period=-1)
    _step(net, trainer, rank)
    for parameter in names.values():
        parameter.set_data(array(np.full(parameter.shape, float(rank), "float32")))
    mykv.broadcast_states(trainer, root_rank=2)
    expected = {"0.weight": 2 if pair.included() else 0, "0.bias": rank}
    for name, values in parameters(net).items():
        assert (values == expected.get(name, 2)).all(), name
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_sixteen_bits_with_master_copies(rank, gather):
    net = nn.PReLU() if not IS_2 else nn.PReLU(in_channels=3)  # MXNet has no convolutions in 16 bits on a CPU
    net.initialize()
    fill(net, rank)
    net.cast("float16")
    options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", options)
    (parameter,) = trainer._params
    if rank == 0:  # has states, and the other has none
        made = trainer.optimizer.create_state_multi_precision(0, parameter.data().as_nd_ndarray())
        trainer._updaters[0].states[0], trainer._updaters[0].states_synced[0] = made, True
    mykv.broadcast_states(trainer)
    for _ in range(2):
        with autograd.record():
            loss = (parameter.data() * parameter.data()).sum()
        loss.backward()
        trainer.step(1)
    _same_everywhere(net, gather)
    momentum, master = trainer._updaters[0].states[0]
    assert master.dtype == np.float32 and momentum.dtype == np.float32
    assert len(set(gather(momentum.asnumpy().tobytes() + master.asnumpy().tobytes()))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["parameters", "states"])
@pytest.mark.parametrize("kind", ["distributed", "distributed on the store", "stock", "stock on the store"])
def test_loading_on_one_worker_only_is_an_error_that_says_what_to_call(kind, what, rank, tmp_path):
    if kind.endswith("on the store") and what == "states":
        return  # loading them is collective there
    net = _network(seed=0)
    trainer = _trainer(kind, net, "sgd-momentum")
    _step(net, trainer, 0)
    _network(seed=5).save_parameters(str(tmp_path / "other.params"))
    if what == "states":
        trainer.save_states(str(tmp_path / "other.states"))
    if rank == 0 and what == "parameters":
        net.load_parameters(str(tmp_path / "other.params"))
    elif rank == 0:
        trainer.load_states(str(tmp_path / "other.states"))
    with pytest.raises(MXNetError, match=r"(?s)call broadcast_states\(\) on all"):
        _step(net, trainer, 1)
        net[0].weight.data().asnumpy()
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "distributed on the store", "stock", "stock on the store"])
def test_loading_on_all_workers_is_none(kind, rank, gather, tmp_path):
    net = _network(seed=0)
    trainer = _trainer(kind, net, "sgd-momentum")
    _step(net, trainer, 0)
    _network(seed=5).save_parameters(str(tmp_path / "other.params"))
    net.load_parameters(str(tmp_path / "other.params"))
    for step in range(3):
        _step(net, trainer, step)
    _same_everywhere(net, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "stock"])
def test_loading_on_one_worker_before_broadcast_parameters_is_none(kind, rank, gather, tmp_path):
    net = _network(seed=0)
    trainer = _trainer(kind, net, "sgd-momentum")
    _step(net, trainer, 0)
    _network(seed=5).save_parameters(str(tmp_path / "other.params"))
    if rank == 0:
        net.load_parameters(str(tmp_path / "other.params"))
    mykv.broadcast_parameters(net.collect_params())
    _step(net, trainer, 1)
    _same_everywhere(net, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["distributed", "stock"])
def test_loading_other_weights_for_a_while_is_none(kind, rank, gather, tmp_path):
    """As where one worker evaluates the best ones so far."""
    net = _network(seed=0)
    trainer = _trainer(kind, net, "sgd-momentum")
    _step(net, trainer, 0)
    if rank == 0:
        net.save_parameters(str(tmp_path / "mine.params"))
        _network(seed=5).save_parameters(str(tmp_path / "other.params"))
        net.load_parameters(str(tmp_path / "other.params"))
        net.load_parameters(str(tmp_path / "mine.params"))
    _step(net, trainer, 1)
    assert len(set(gather(parameters(net)["0.weight"].tobytes()))) == 1


@pytest.mark.ranks(2)
def test_workers_that_differ(rank):
    net = _network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    stock = gluon.Trainer(list(net.collect_params().values())[: 3 + rank], "sgd", kvstore="mykv")
    with pytest.raises(MXNetError, match="rank 1 differs from the trainer of rank 0 in its parameters; on this rank, "):
        mykv.broadcast_states(stock)
    with pytest.raises(MXNetError, match="(?s)from rank 0, counters=True.*from rank 1|from rank 1.*from rank 0"):
        mykv.broadcast_states(trainer, root_rank=rank)
    other = gluon.Trainer(net.collect_params(), "adam" if rank else "sgd", kvstore="mykv")
    kind, sentence = (ValueError, "The optimizer is Adam here, but SGD on rank 0") if rank else (MXNetError, "is Adam")
    with pytest.raises(kind, match=sentence):
        mykv.broadcast_states(other)
    wide = nn.Dense(2 + rank, in_units=3)
    wide.initialize()
    kind, sentence = (ValueError, r"is \(3, ?3?\) float32 here, but \(2") if rank else (MXNetError, r"rank 1.*is \(3")
    with pytest.raises(kind, match=sentence):
        mykv.broadcast_states(gluon.Trainer(wide.collect_params(), "sgd", kvstore="mykv"))
    mykv.barrier()


@pytest.mark.ranks(2)
def test_wrong_arguments(rank):
    net = _network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match="trainer must be a gluon.Trainer or DistributedTrainer, not HybridSequential"):
        mykv.broadcast_states(net)
    with pytest.raises(ValueError, match="root_rank must be a rank, from 0 to 1, not 2"):
        mykv.broadcast_states(trainer, root_rank=2)
    if rank == 0:
        with pytest.raises(TypeError, match="trainer must be"):
            mykv.broadcast_states(copy.copy(net))
    else:
        with pytest.raises(MXNetError, match="rank 0.*trainer must be"):
            mykv.broadcast_states(trainer)
    clear_errors()

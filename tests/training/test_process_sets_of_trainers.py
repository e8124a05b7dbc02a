"""Trainers, stores and broadcasts of a part of the workers, several of them at the same time."""

from __future__ import annotations

import contextlib
import copy
import pickle

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx, parameters, structure
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1})
_BATCH = 4


@contextlib.contextmanager
def _sets(*ranks):
    """Process sets of these ranks, which are removed again."""
    mykv.init()
    added = [mykv.add_process_set(list(one)) for one in ranks]
    try:
        yield added
    finally:
        for one in added:
            mykv.remove_process_set(one)


def _backward(net, rank, step=0):
    x = array(np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, 6)).astype("float64"))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()


def _train(net, trainer, rank, steps=3):
    for step in range(steps):
        _backward(net, rank, step)
        trainer.step(1)


def _alone(ranks, steps=3, learning_rate=0.1):
    """The expected result of the workers `ranks`, in one process: from the first worker's values, with the mean
    gradients."""
    net = dense_network(seed=ranks[0], dtype="float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": learning_rate}, kvstore=None)
    for step in range(steps):
        x = np.concatenate(
            [np.random.RandomState(1000 * step + one).uniform(-1, 1, (_BATCH, 6)) for one in ranks]
        ).astype("float64")
        with autograd.record():
            loss = (net(array(x)) ** 2 * array(np.full((1,), 1 / len(ranks)))).sum()
        loss.backward()
        trainer.step(1)
    return parameters(net)


def _assert_equal(values, expected):
    for name, one in values.items():
        np.testing.assert_allclose(one, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 0}, {"bucket_bytes": 200}, {"num_groups": 2}], ids=str)
def test_trainers_of_disjoint_sets_train_apart(rank, options):
    parts = [[0, 2], [1, 3]]
    with _sets(*parts) as sets:
        mine = rank % 2
        net = dense_network(seed=rank, dtype="float64")
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=sets[mine], **options)
        _train(net, trainer, rank)
        _assert_equal(parameters(net), _alone(parts[mine]))


@pytest.mark.ranks(3)
def test_trainers_of_overlapping_sets_and_of_all(rank, size):
    """Each worker creates and steps those that it takes part in; the numbers of the others' do not confuse it."""
    parts = [[0, 1], [1, 2], [0, 1, 2]]
    with _sets(*parts[:2]) as sets:
        networks = []
        for part, one in zip(parts, [*sets, mykv.global_process_set]):
            if rank in part:
                net = dense_network(seed=rank, dtype="float64")
                networks.append((part, net, mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=one)))
        for step in range(3):
            for _, net, trainer in networks if step % 2 else networks[::-1]:
                _backward(net, rank, step)
                trainer.step(1)
        for part, net, _ in networks:
            _assert_equal(parameters(net), _alone(part))


@pytest.mark.ranks(3)
def test_parameters_of_sets_of_their_own_and_local_ones(rank, size, gather):
    with _sets([0, 1], [1, 2]) as (first, second):
        layers = {
            name: gluon.Parameter(name, shape=(4,), dtype="float64") for name in ("all", "first", "second", "own")
        }
        for parameter in layers.values():
            parameter.initialize(mx.init.Constant(rank + 1))
        sets = {"first": first, layers["second"]: second, "own": None}
        trainer = mykv.DistributedTrainer(layers, "sgd", {"learning_rate": 1.0}, parameter_process_sets=sets)
        members = {
            "all": [0, 1, 2],
            "first": [0, 1] if rank < 2 else [2],
            "second": [1, 2] if rank > 0 else [0],
            "own": [rank],
        }
        for name, parameter in layers.items():
            root = 0 if 0 in members[name] else members[name][0]
            assert (parameter.data().asnumpy() == root + 1).all(), name
        for _ in range(3):
            for parameter in layers.values():
                parameter.grad()[:] = rank
                parameter.data()._fresh_grad = True
            before = {name: parameter.data().asnumpy() for name, parameter in layers.items()}
            trainer.step(1)
            for name, parameter in layers.items():
                expected = before[name] - np.mean(members[name])
                np.testing.assert_allclose(parameter.data().asnumpy(), expected, err_msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("key", ["key", "parameter", "position"])
def test_parameters_are_mapped_by_key_position_or_themselves(rank, key):
    net = dense_network(seed=rank, widths=(3, 2))
    params = dict(structure(net)) if key == "key" else list(structure(net).values())
    chosen = list(params)[1] if key != "position" else 1
    trainer = mykv.DistributedTrainer(params, *_SGD, parameter_process_sets={chosen: None})
    for parameter in structure(net).values():
        parameter.grad()[:] = rank
    trainer.allreduce_grads()
    for number, parameter in enumerate(structure(net).values()):
        assert (parameter.grad().asnumpy() == (rank if number == 1 else 0.5)).all()


@pytest.mark.ranks(2)
def test_local_parameters_on_several_devices_are_summed_over_these(rank):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(seed=rank, widths=(2,), ctx=devices)
    own = dict.fromkeys(structure(net).values())
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets=own)
    for parameter in own:
        for number, device in enumerate(devices):
            parameter.grad(device)[:] = 10 * rank + number
    trainer.allreduce_grads()
    for parameter in own:
        for device in devices:
            assert (parameter.grad(device).asnumpy() == 20 * rank + 1).all()


@pytest.mark.ranks(2)
def test_local_parameters_follow_to_another_device(rank):
    net = dense_network(seed=rank, widths=(2,))
    own = dict.fromkeys(structure(net).values())
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", parameter_process_sets=own)
    before = checksum(net)
    for device in (mx.cpu(0), mx.cpu(1)):
        for parameter in own:
            (parameter.reset_device if IS_2 else parameter.reset_ctx)(device)
            parameter.grad()[:] = 1
            parameter.data()._fresh_grad = True
        trainer.step(1)
    assert checksum(net) != before


@pytest.mark.ranks(3)
def test_deferred_parameters_of_a_set_get_the_values_of_its_root(rank, gather):
    with _sets([1, 2]) as (part,):
        net = nn.Dense(2)
        net.initialize(mx.init.Constant(rank + 1))
        if rank:
            trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part, root_rank=2)
        with autograd.record():
            loss = net(array(np.ones((1, 3), "float32"))).sum()
        assert (net.weight.data().asnumpy() == (3 if rank else 1)).all()
        loss.backward()
        if rank:
            trainer.step(1)
            net.weight.data().wait_to_read()


@pytest.mark.ranks(3)
def test_stale_gradients_are_shared_within_a_set(rank, gather):
    with _sets([0, 2]) as (part,):
        params = [gluon.Parameter(f"p{k}", shape=(2,)) for k in range(2)]
        for parameter in params:
            parameter.initialize(mx.init.Zero())
        if rank != 1:
            trainer = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, process_set=part)
            params[rank // 2].grad()[:] = 1
            params[rank // 2].data()._fresh_grad = True
            trainer.step(1, ignore_stale_grad=True)
            assert all((parameter.data().asnumpy() == -0.5).all() for parameter in params)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("root_rank", [0, 2])
def test_a_trainer_of_a_worker_outside_of_its_set_trains_alone(rank, root_rank):
    with _sets([0, 2]) as (part,):
        net = dense_network(seed=rank, dtype="float64")
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part, root_rank=root_rank)
        _train(net, trainer, rank)
        _assert_equal(parameters(net), _alone([1] if rank == 1 else [root_rank, 2 - root_rank]))
        everybody = mykv.DistributedTrainer(dense_network(seed=rank).collect_params(), *_SGD)
        everybody.allreduce_grads()


@pytest.mark.ranks(3)
def test_a_worker_outside_of_the_set_can_neither_make_a_store_of_it_nor_broadcast_in_it(rank):
    with _sets([0, 2]) as (part,):
        if rank == 1:
            for call in (lambda: mykv.MyKV(part), lambda: mykv.broadcast_parameters({}, 0, None, part)):
                with pytest.raises(ValueError, match="Rank 1 is not in"):
                    call()
        else:
            mykv.MyKV(part)
            mykv.broadcast_parameters({}, 0, None, part)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("root_rank, error", [(1, ValueError), (3, ValueError), (-1, ValueError), ("2", TypeError)])
def test_roots_outside_of_the_set_are_refused(rank, root_rank, error):
    with _sets([0, 2]) as (part,):
        net = dense_network(seed=rank)
        if rank != 1:
            with pytest.raises(error, match="root_rank"):
                mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part, root_rank=root_rank)
            with pytest.raises(error, match="root_rank"):
                mykv.broadcast_parameters(net.collect_params(), root_rank, process_set=part)


@pytest.mark.ranks(3)
def test_a_wrong_argument_on_one_worker_is_an_error_in_all_its_sets(rank, gather):
    with _sets([0, 1], [1, 2]) as (first, second):
        params = {name: gluon.Parameter(name, shape=(2,)) for name in ("first", "second")}
        for parameter in params.values():
            parameter.initialize(mx.init.One())
        sets = {"first": first, "second": second}
        options = {"num_groups": -1} if rank == 1 else {}
        with pytest.raises((ValueError, RuntimeError), match="num_groups must be at least 0") as failure:
            mykv.DistributedTrainer(params, *_SGD, parameter_process_sets=sets, **options)
        assert rank == 1 or "rank 1" in str(failure.value)
        trainer = mykv.DistributedTrainer(params, *_SGD, parameter_process_sets=sets)
        for parameter in params.values():
            parameter.grad()[:] = rank
        trainer.allreduce_grads()
        means = {0: (0.5, 0), 1: (0.5, 1.5), 2: (2, 1.5)}[rank]
        for parameter, mean in zip(params.values(), means):
            assert (parameter.grad().asnumpy() == mean).all()


@pytest.mark.ranks(3)
def test_a_failure_in_one_set_fails_the_step_in_the_others(rank, gather):
    """Rank 1 cannot step, for want of values in the first set; rank 2, which is in the second only, must not wait."""
    with _sets([0, 1], [1, 2]) as (first, second):
        unknown = -1 if IS_2 else 0
        params = {
            "first": gluon.Parameter("first", shape=(unknown,), allow_deferred_init=True),
            "second": gluon.Parameter("second", shape=(2,)),
        }
        for parameter in params.values():
            parameter.initialize(mx.init.One())
        sets = {"first": first, "second": second}
        trainer = mykv.DistributedTrainer(params, *_SGD, parameter_process_sets=sets)
        if rank != 1:
            params["first"].shape = (2,)
            params["first"]._finish_deferred_init()
        with pytest.raises(MXNetError, match="first.*no values yet on rank 1"):
            trainer.allreduce_grads()
            params["second" if rank == 2 else "first"].grad().asnumpy()
        clear_errors()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_a_trainer_stay_in_their_set(rank, duplicate):
    if IS_2 and duplicate is not copy.deepcopy:
        pytest.skip("MXNet 2.0 pickles no Parameter with a Trainer")
    with _sets([0, 2]) as (part,):
        if rank == 1:
            return
        net = dense_network(seed=rank)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part)
        trainer.allreduce_grads()
        twin = duplicate(trainer)
        for one in (twin, trainer):
            for number, parameter in enumerate(one._params):
                parameter.grad()[:] = number + rank
            one.allreduce_grads()
            for number, parameter in enumerate(one._params):
                assert (parameter.grad().asnumpy() == number + 1).all()


@pytest.mark.ranks(3, long=(2,))
def test_a_trainer_of_a_removed_set_says_so(rank, size, gather):
    mykv.init()
    part = mykv.ProcessSet([0])
    mykv.add_process_set(part)
    net = dense_network(seed=rank)
    if rank == 0:
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part)
        trainer.allreduce_grads()
    mykv.remove_process_set(part)
    if rank == 0:
        with pytest.raises(ValueError, match=r"ProcessSet\(\[0\]\) was removed"):
            trainer.allreduce_grads()
    mykv.add_process_set(part)
    if rank == 0:
        trainer.allreduce_grads()
    mykv.remove_process_set(part)


@pytest.mark.ranks(3)
def test_a_removed_set_of_one_parameter_fails_the_steps_of_all(rank, gather):
    mykv.init()
    pair = mykv.add_process_set([0, 1])
    first, second = (gluon.Parameter(name, shape=(1,), init="zeros") for name in ("first", "second"))
    first.initialize()
    second.initialize()
    trainer = mykv.DistributedTrainer([first, second], *_SGD, parameter_process_sets={first: pair})
    errors = []
    for step in range(4):
        if step == 2:
            mykv.remove_process_set(pair)
        with autograd.record():
            loss = (first.data() + second.data()).sum()
        loss.backward()
        try:
            trainer.step(1)
            mx.nd.waitall()
        except (MXNetError, ValueError) as error:
            errors.append(step)
            assert "was removed" in str(error) or "differs between ranks" in str(error)
            clear_errors()
    assert errors == ([3] if rank == 2 else [2, 3])  # in step 2 no other worker waits for the removed set


@pytest.mark.ranks(4)
def test_stores_of_sets(rank, size):
    parts = [[0, 2], [1, 3]]
    with _sets(*parts) as sets:
        everybody = mx.kv.create("mykv")
        mine = parts[rank % 2]
        store = mykv.MyKV(process_set=sets[rank % 2])
        assert (store.rank, store.num_workers, store.size) == (mine.index(rank), 2, 2)
        assert (store.local_rank, store.local_size) == (mine.index(rank), 2)
        assert (everybody.rank, everybody.num_workers) == (rank, 4)
        assert pickle.loads(pickle.dumps(store))._scope == store._scope != everybody._scope
        for one, ranks in ((store, mine), (everybody, range(size)), (store, mine)):
            value, out = array(np.full((3,), rank + 1.0)), array(np.zeros(3))
            one.pushpull("key", value, out=out)
            assert (out.asnumpy() == sum(r + 1 for r in ranks)).all()
            one.broadcast("key", value, out=out)
            assert (out.asnumpy() == ranks[0] + 1).all()


@pytest.mark.ranks(3)
def test_a_stock_trainer_over_the_store_of_a_set(rank):
    with _sets([0, 2]) as (part,):
        if rank == 1:
            return
        net = dense_network(seed=rank, dtype="float64")
        mykv.broadcast_parameters(net.collect_params(), process_set=part)
        # The store sums, and a power of two is exact in the float32 that MXNet makes of 1 / batch_size.
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=mykv.MyKV(part))
        for step in range(3):
            _backward(net, rank, step)
            trainer.step(2)
        _assert_equal(parameters(net), _alone([0, 2]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("root_rank", [0, 2])
def test_broadcast_of_parameters_in_a_set(rank, root_rank):
    with _sets([0, 2]) as (part,):
        net = dense_network(seed=rank)
        if rank != 1:
            mykv.broadcast_parameters(net.collect_params(), root_rank, None, part)
        assert checksum(net) == checksum(dense_network(seed=1 if rank == 1 else root_rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [[0, 1], None, "all"])
def test_what_is_no_process_set(wrong):
    net = dense_network(seed=0)
    for make in (
        lambda: mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=wrong),
        lambda: mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets={0: wrong or [0]}),
        lambda: mykv.MyKV(wrong),
        lambda: mykv.broadcast_parameters(net.collect_params(), process_set=wrong),
    ):
        with pytest.raises((TypeError, ValueError), match="process_set"):
            make()
    with pytest.raises(ValueError, match="was not added"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=mykv.ProcessSet([0]))
    net_parameter = next(iter(structure(net).values()))
    with pytest.raises(ValueError, match="was not added"):
        sets = {net_parameter: mykv.ProcessSet([0])}
        mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets=sets)


@pytest.mark.ranks(2)
def test_what_is_no_process_set_on_one_worker_is_an_error_on_both(rank, gather):
    net = dense_network(seed=0)
    wrong = {"process_set": "all"} if rank == 1 else {}
    with pytest.raises((TypeError, RuntimeError), match="process_set must be"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, **wrong)
    with pytest.raises((TypeError, RuntimeError), match="process_set must be"):
        mykv.broadcast_parameters(net.collect_params(), **wrong)
    mykv.DistributedTrainer(net.collect_params(), *_SGD)
    mykv.broadcast_parameters(net.collect_params())


@pytest.mark.ranks(3)
def test_a_set_ends_with_shutdown(rank, gather):
    mykv.init()
    part = mykv.add_process_set([0, 2])
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=part)
    optimizer = mykv.DistributedOptimizer(mx.optimizer.SGD(), process_set=part)
    trainer.allreduce_grads()
    mx.nd.waitall()
    gather("done")
    mykv.shutdown()
    weight = array(np.ones(2), "nd")

    def update():
        lists = ([one] if IS_2 else one for one in (0, weight, weight.copy(), None))
        optimizer.update(*lists)

    calls = [trainer.allreduce_grads, update] if rank != 1 else [update]
    for call in calls:
        with pytest.raises(RuntimeError, match="init"):
            call()
    gather("all have left")
    mykv.init()
    for call in calls:
        with pytest.raises(ValueError, match="shutdown.*add it again"):
            call()
    mykv.add_process_set(part)
    for call in calls:
        call()
    mykv.remove_process_set(part)

"""join: workers that take different numbers of steps."""

from __future__ import annotations

import itertools
import threading

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx, parameters, structure
from kvstore_plugin.compat.mxnet import metric as metrics
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

if IS_2:
    from mxnet import amp
else:
    from mxnet.contrib import amp

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01})
_ADAM = ("adam", {"learning_rate": 0.01})


def _batch(step, rank):
    return array(np.random.RandomState(100 * step + rank).randn(4, 6).astype("float32"))


def _loss(net, step, rank):
    return (net(_batch(step, rank)) ** 2).sum()


def _backward(net, step, rank):
    with autograd.record():
        loss = _loss(net, step, rank)
    loss.backward()


def _train(net, trainer, rank, steps, **options):
    with mykv.join(trainer, **options) as joined:
        for step in range(steps):
            _backward(net, step, rank)
            trainer.step(4)
    return joined


def _alone(steps, optimizer, divide_by_all=True, seed=0):
    """A network that one process has trained on the data of all workers, of which worker r takes steps[r] steps."""
    net = dense_network(seed)
    trainer = gluon.Trainer(net.collect_params(), *optimizer, kvstore=None)
    for step in range(max(steps)):
        active = [rank for rank, number in enumerate(steps) if step < number]
        with autograd.record():
            loss = sum(_loss(net, step, rank) for rank in active)
        loss.backward()
        trainer.step(4 * (len(steps) if divide_by_all else len(active)))
    return net


def _assert_equal(net, other):
    for name, values in parameters(other).items():
        np.testing.assert_allclose(parameters(net)[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def _states(trainer):
    """The bits of all states of the optimizer, and its counters."""
    trainer._updaters[0].get_states()
    states = {}
    for key, state in trainer._updaters[0].states.items():
        state = state if isinstance(state, (list, tuple)) else [state]
        states[key] = [one.asnumpy().tobytes() for one in state if one is not None]
    return states, trainer._optimizer.num_update, dict(trainer._optimizer._index_update_count)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("optimizer", [_SGD, _ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("order", ["first ends first", "last ends first", "one has nothing"])
def test_workers_with_more_data_go_on_and_the_others_stay_in_step(rank, size, gather, optimizer, order, divide_by_all):
    steps = {"first ends first": [3, 5, 8], "last ends first": [7, 4, 2], "one has nothing": [0, 4, 3]}[order][:size]
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *optimizer)
    joined = _train(net, trainer, rank, steps[rank], divide_by_initial_world_size=divide_by_all)
    _assert_equal(net, _alone(steps, optimizer, divide_by_all))
    assert joined.steps == max(steps) == trainer._optimizer.num_update
    assert joined.last_rank == int(np.argmax(steps))
    seen = gather((checksum(net), _states(trainer)))
    assert all(one == seen[0] for one in seen)
    # After the block everything continues as before.
    _backward(net, 99, rank)
    trainer.step(4)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("divide_by_all", [True, False])
def test_the_share_of_an_optimizer_on_the_store_is_updated_after_its_worker_has_ended(
    rank, size, gather, divide_by_all
):
    steps = [2, 5, 3][:size]
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, update_on_kvstore=True)
    _train(net, trainer, rank, steps[rank], divide_by_initial_world_size=divide_by_all)
    _assert_equal(net, _alone(steps, _ADAM, divide_by_all))
    assert set(gather(trainer._optimizer.num_update)) == {5} and len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_without_a_step_nothing_happens(rank):
    net = dense_network(seed=0)
    before = checksum(net)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with mykv.join(trainer) as joined:
        pass
    assert joined.last_rank is None and joined.steps == 0 and checksum(net) == before


@pytest.mark.ranks(3)
@pytest.mark.parametrize("hybridize", [False, True])
def test_epochs_of_uneven_shares(rank, size, gather, hybridize):
    """An epoch with each sample exactly once, several times, as one process goes through it."""
    inputs = np.random.RandomState(0).randn(23, 6).astype("float32")
    net = dense_network(seed=rank)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    sampler = mykv.DistributedSampler(len(inputs), seed=3, even=False)
    loader = gluon.data.DataLoader(inputs, batch_size=2, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        with mykv.join(trainer):
            for data in loader:
                with autograd.record():
                    loss = (net(data) ** 2).sum()
                loss.backward()
                trainer.step(2)
    assert len(set(gather(len(sampler)))) == 2
    alone = dense_network(seed=0)
    trainer = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    order = mykv.DistributedSampler(len(inputs), seed=3, even=False, rank=0, size=1)
    for epoch in range(3):
        order.set_epoch(epoch)
        indices = list(order)
        for begin in range(0, len(indices), 2 * size):
            with autograd.record():
                loss = (alone(array(inputs[indices[begin : begin + 2 * size]])) ** 2).sum()
            loss.backward()
            trainer.step(2 * size)
    _assert_equal(net, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divide_by_all", [True, False])
def test_gradients_that_are_clipped_reach_those_who_have_ended(rank, size, gather, divide_by_all):
    steps = [2, 5]
    net, alone = dense_network(seed=0), dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    trainer_alone = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    gradients = [parameter.grad() for parameter in structure(net).values()]
    with mykv.join(trainer, divide_by_initial_world_size=divide_by_all):
        for step in range(steps[rank]):
            _backward(net, step, rank)
            trainer.allreduce_grads()
            gluon.utils.clip_global_norm(gradients, 1.0)
            trainer.update(4)
    for step in range(max(steps)):
        active = [one for one in range(size) if step < steps[one]]
        with autograd.record():
            loss = sum(_loss(alone, step, one) for one in active) / (size if divide_by_all else len(active))
        loss.backward()
        gluon.utils.clip_global_norm([parameter.grad() for parameter in structure(alone).values()], 1.0)
        trainer_alone.step(4)
    _assert_equal(net, alone)
    assert len({str(one) for one in gather((checksum(net), _states(trainer)))}) == 1


@pytest.mark.ranks(2)
def test_a_learning_rate_that_the_loop_sets_reaches_those_who_have_ended(rank, gather):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with mykv.join(trainer):
        for step in range(3 + 3 * rank):
            trainer.set_learning_rate(0.1 / (step + 1))
            _backward(net, step, rank)
            trainer.step(4)
    assert gather(trainer.learning_rate) == [0.1 / 6] * 2
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_schedules_follow_the_steps_of_all(rank, gather):
    net = dense_network(seed=0)
    schedule = mx.lr_scheduler.FactorScheduler(2, factor=0.5, base_lr=0.1)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    _train(net, trainer, rank, 2 + 5 * rank)
    assert gather(trainer.learning_rate) == [gather(trainer.learning_rate)[1]] * 2
    assert trainer.learning_rate < 0.02
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ended", ["does not use it", "uses it"])
def test_stale_gradients(rank, gather, ended):
    """Ended workers use no parameter, so a parameter that the others do not use either is left alone."""
    net, rarely = dense_network(seed=0), dense_network(seed=1, widths=(6,))
    both = {**{f"a{k}": p for k, p in structure(net).items()}, **{f"b{k}": p for k, p in structure(rarely).items()}}
    trainer = mykv.DistributedTrainer(both, *_SGD)
    seen = []
    with mykv.join(trainer):
        for step in range(2 + rank):
            with autograd.record():
                inputs = _batch(step, rank)
                uses = (step == 0) if ended == "does not use it" else rank == 2
                loss = (net(rarely(inputs) if uses else inputs) ** 2).sum()
            loss.backward()
            seen.append(checksum(rarely))
            trainer.step(4, ignore_stale_grad=True)
    counts = {trainer._param2idx[p._uuid if IS_2 else p.name] for p in structure(rarely).values()}
    updates = {trainer._optimizer._index_update_count[number] for number in counts}
    assert updates == ({1} if ended == "does not use it" else {4})
    states = gather((checksum(net), checksum(rarely), _states(trainer)))
    assert all(one == states[0] for one in states)


@pytest.mark.ranks(2)
def test_an_overflow_in_amp_skips_the_step_of_those_who_have_ended_too(rank, gather, monkeypatch):
    monkeypatch.setattr(amp.amp, "_amp_initialized", True)
    monkeypatch.setattr(amp.amp, "_amp_loss_scale_initialized", True)
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    amp.init_trainer(trainer)
    with mykv.join(trainer):
        for step in range(2 + 4 * rank):
            with autograd.record():
                loss = _loss(net, step, rank) * (float("inf") if step == 3 else 1.0)
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(4)
    assert trainer._amp_loss_scaler.loss_scale == 2.0**15 and trainer._optimizer.num_update == 5
    states = gather((checksum(net), _states(trainer)))
    assert states[0] == states[1]


@pytest.mark.ranks(2)
def test_running_means_and_broadcasts_in_every_nth_step(rank, gather):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, broadcast_period=2, aux_sync_period=3)
    _train(net, trainer, rank, 3 + 3 * rank)
    mykv.check_in_step(net.collect_params(), auxiliary=True)


@pytest.mark.ranks(2)
def test_local_parameters_of_those_who_have_ended_are_left_alone(rank, gather):
    net, own = dense_network(seed=0), dense_network(seed=1, widths=(6,))
    local = structure(own)
    params = {**{f"a{k}": p for k, p in structure(net).items()}, **{f"b{k}": p for k, p in local.items()}}
    trainer = mykv.DistributedTrainer(params, *_SGD, parameter_process_sets=dict.fromkeys(local.values()))
    with mykv.join(trainer):
        for step in range(2 + 3 * rank):
            with autograd.record():
                loss = (net(own(_batch(step, rank))) ** 2).sum()
            loss.backward()
            trainer.step(4)
            after = checksum(own)
    assert checksum(own) == after
    assert len(set(gather(checksum(net)))) == 1 and len(set(gather(after))) == 2


@pytest.mark.ranks(3)
def test_two_trainers(rank, gather):
    """One is stepped more often than the other, as in adversarial training."""
    first, second = dense_network(seed=0), dense_network(seed=1)
    trainers = [mykv.DistributedTrainer(net.collect_params(), *_SGD) for net in (first, second)]
    with mykv.join(*trainers) as joined:
        for step in range(1 + rank):
            for net, trainer in ((first, trainers[0]), (second, trainers[1]), (first, trainers[0])):
                _backward(net, step, rank)
                trainer.step(4)
    assert joined.steps == 9 and joined.last_rank == 2
    assert [trainer._optimizer.num_update for trainer in trainers] == [6, 3]
    states = gather([checksum(first), checksum(second), *map(_states, trainers)])
    assert all(one == states[0] for one in states)


@pytest.mark.ranks(3)
def test_a_process_set_joins_by_itself(rank, gather):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=pair)
    joined = _train(net, trainer, rank, 3 + rank)
    if rank == 1:
        assert joined.last_rank is None and joined.steps == 0
    else:
        assert joined.last_rank == 2 and joined.steps == 5
    sums = gather(checksum(net))
    assert sums[0] == sums[2] != sums[1]
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_devices_of_a_process(rank, gather, factor):
    net = dense_network(seed=0, ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with mykv.join(trainer, divide_by_initial_world_size=factor == 1.0):
        for step in range(2 + 2 * rank):
            halves = [array(_batch(step, rank).asnumpy(), ctx=mx.cpu(number)) for number in range(2)]
            with autograd.record():
                losses = [(net(half) ** 2).sum() for half in halves]
            autograd.backward(losses)
            trainer.step(8)
    for parameter in structure(net).values():
        first, second = (parameter.data(mx.cpu(number)).asnumpy() for number in range(2))
        np.testing.assert_array_equal(first, second)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_exception_on_one_worker_ends_the_block_on_all(rank, gather, who):
    """Rank 0 has ended by then, and rank 2 is in the loop."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    steps = [2, 6, 6]
    expected = (ZeroDivisionError, "planted") if rank == who else (MXNetError, "ZeroDivisionError: planted")
    with pytest.raises(expected[0], match=expected[1]), mykv.join(trainer):
        for step in range(steps[rank]):
            if rank == who and step == (1 if who == 0 else 4):
                raise ZeroDivisionError("planted")
            _backward(net, step, rank)
            trainer.step(4)
    assert len(set(gather(checksum(net)))) == 1
    mykv.barrier()
    _train(net, trainer, rank, 1 + rank)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_other_batch_sizes_are_an_error_on_all(rank):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    sentence = r"rank 0 calls step\(\) .*times 0\.25.* rank 1 .*times 0\.5.*same batch size"
    with pytest.raises(MXNetError, match=sentence), mykv.join(trainer):
        _backward(net, 0, rank)
        trainer.step(2 if rank else 4)
    mykv.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["learning rate", "method", "trainer", "staleness"])
def test_other_steps_are_an_error_on_all(rank, what):
    nets = dense_network(seed=0), dense_network(seed=1)
    trainers = [mykv.DistributedTrainer(net.collect_params(), *_SGD) for net in nets]
    sentence = r"rank 0 calls \w+\(\) of trainer 0 .*rank 1 calls \w+\(\) of trainer \d"
    with pytest.raises(MXNetError, match=sentence), mykv.join(*trainers):
        for net in nets:
            _backward(net, 0, rank)
        if what == "learning rate":
            trainers[0].set_learning_rate(0.1 + rank)
        if what == "method" and rank:
            trainers[0].allreduce_grads()
        trainers[rank if what == "trainer" else 0].step(4, ignore_stale_grad=bool(what == "staleness" and rank))
    mykv.barrier()


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("caught", ["nowhere", "in the block"])
@pytest.mark.parametrize("wrong", [False, True], ids=["barrier", "refused barrier"])
def test_another_call_that_waits_is_an_error_on_all_and_the_next_join_works(rank, gather, caught, wrong):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)

    def wait():
        if wrong:
            mykv.allgather(array(np.float32(0)))  # a scalar
        else:
            mykv.barrier()

    sentence = r"(?s)barrier.*a step in join|a step in join.*barrier|allgather|scalar|out of step"
    with pytest.raises((MXNetError, ValueError), match=sentence), mykv.join(trainer):
        for step in range(2 + (rank > 0)):
            _backward(net, step, rank)
            trainer.step(4)
        if rank == 1:
            if caught == "nowhere":
                wait()
            with pytest.raises((MXNetError, ValueError)):
                wait()
            _backward(net, 3, rank)
            trainer.step(4)
        elif rank == 2:
            _backward(net, 3, rank)
            trainer.step(4)
    clear_errors()
    mykv.barrier()
    before = trainer._optimizer.num_update
    joined = _train(net, trainer, rank, 1 + rank)
    assert joined.steps == trainer._optimizer.num_update - before == len(gather("")), "calls were paired wrongly"
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_failed_block_that_goes_on_fails_again(rank):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(MXNetError, match="out of step"), mykv.join(trainer):
        _backward(net, 0, rank)
        with pytest.raises(MXNetError, match="same batch size"):
            trainer.step(4 + rank)
        trainer.step(4)


@pytest.mark.ranks(2)
def test_parameters_without_values(rank):
    net = nn.Dense(3)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    sentence = "has no values yet on rank 0.*zeros where a worker has no data"
    with pytest.raises((MXNetError, gluon.parameter.DeferredInitializationError), match=sentence), mykv.join(trainer):
        for step in range(2 * rank):
            _backward(net, step, rank)
            trainer.step(4)
            mx.nd.waitall()
    clear_errors()


@pytest.mark.ranks(2)
def test_wrong_arguments(rank):
    mykv.init()
    net = dense_network(seed=0)
    stock = gluon.Trainer(net.collect_params(), *_SGD, kvstore=None)
    trainer = mykv.DistributedTrainer(dense_network(seed=0).collect_params(), *_SGD)
    for arguments, kind, sentence in (
        ((), TypeError, "called without a trainer"),
        ((stock,), TypeError, "join.. needs DistributedTrainers, not Trainer"),
        ((trainer, trainer), ValueError, "a trainer twice"),
    ):
        with pytest.raises(kind, match=sentence):
            mykv.join(*arguments)
    other = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(ValueError, match="the same join.first, second."), mykv.join(trainer), mykv.join(other):
        pass
    mykv.barrier()


@pytest.mark.ranks(2)
def test_other_trainers_or_arguments_are_an_error_on_all(rank):
    trainers = [mykv.DistributedTrainer(dense_network(seed=0).collect_params(), *_SGD) for _ in range(2)]
    sentence = "divide_by_initial_world_size=False"
    with pytest.raises(MXNetError, match=sentence), mykv.join(*trainers, divide_by_initial_world_size=bool(rank)):
        pass
    with pytest.raises(MXNetError, match="join of trainer"), mykv.join(*trainers[: 1 + rank]):
        pass
    mykv.barrier()


@pytest.mark.ranks(2)
def test_local_parameters_are_not_scaled_by_the_workers_that_are_left():
    net = dense_network(seed=0)
    first = next(iter(structure(net).values()))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets={first: None})
    with pytest.raises(ValueError, match="would also scale the gradients of local parameters"):
        mykv.join(trainer, divide_by_initial_world_size=False)
    with mykv.join(trainer):
        pass


@pytest.mark.ranks(2)
def test_a_worker_outside_of_the_set_may_divide_by_the_workers_that_are_left(gather):
    mykv.init()
    alone = mykv.add_process_set([0])
    parameter = _vector()
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, process_set=alone)
    with mykv.join(trainer, divide_by_initial_world_size=False):
        _backward_of(parameter)
        trainer.step(1)
    assert gather(parameter.data().asnumpy().tolist()) == [[-1.0, -1.0]] * 2
    mykv.remove_process_set(alone)


@pytest.mark.ranks(3)
def test_wrong_arguments_are_refused_in_the_process_set_of_the_trainer(rank):
    mykv.init()
    pair = mykv.add_process_set([1, 2])
    trainer = mykv.DistributedTrainer(dense_network(seed=0).collect_params(), *_SGD, process_set=pair)
    if rank == 1:
        with pytest.raises(ValueError, match="a trainer twice"):
            mykv.join(trainer, trainer)
    elif rank == 2:
        with pytest.raises(MXNetError, match="rank 1.*a trainer twice"), mykv.join(trainer):
            pass
    mykv.barrier()
    mykv.remove_process_set(pair)


@pytest.mark.ranks(3)
def test_process_sets_of_parameters_are_refused(rank):
    mykv.init()
    pair = mykv.add_process_set([1, 2])
    net = dense_network(seed=0)
    first = next(iter(structure(net).values()))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets={first: pair})
    with pytest.raises(ValueError, match="parameter_process_sets names other process sets"):
        mykv.join(trainer)
    mykv.barrier()
    mykv.remove_process_set(pair)


@pytest.mark.ranks(3)
def test_any_order_of_ends(rank, gather):
    """All ways in which three workers can take up to two steps each."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for steps in itertools.product(range(3), repeat=3):
        joined = _train(net, trainer, rank, steps[rank])
        assert joined.steps == max(steps)
        latest = [one for one in range(3) if steps[one] == max(steps)][-1]
        assert joined.last_rank == (latest if max(steps) else None)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("store", [False, True], ids=["own updates", "on the store"])
@pytest.mark.parametrize("then", ["barrier", "metric", "parameters"])
def test_without_join_a_worker_that_goes_on_to_other_calls_is_an_error_on_all(rank, gather, then, store):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, update_on_kvstore=store)
    sentence = "rank 0 is in .*in a step of a trainer that rank 0 has not taken: .*join"
    with pytest.raises(MXNetError, match=sentence):
        for step in range(2 if rank == 0 else 4):
            _backward(net, step, rank)
            trainer.step(4)
            if rank:
                mx.nd.waitall()  # like a program that reads the loss
        if then == "barrier":
            mykv.barrier()
        elif then == "metric":
            mykv.allreduce_metric(metrics.Accuracy())
        else:
            mykv.check_in_step(net.collect_params())
    clear_errors()
    _come_late(rank)


@pytest.mark.ranks(2)
def test_without_join_the_first_step(rank):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    with pytest.raises(MXNetError, match="rank 0 is in barrier.*in a step of a trainer that rank 0 has not taken"):
        if rank:
            _backward(net, 0, rank)
            trainer.step(4)
        mykv.barrier()
    clear_errors()
    _come_late(rank)


def _come_late(rank):
    """Rank 0 was in a blocking call that the others had not reached; there they get the error too."""
    if rank:
        with pytest.raises(MXNetError, match="rank 0 is in"):
            mykv.barrier()
    mykv.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [0, 1])
def test_a_trainer_of_another_thread_may_be_behind(rank, gather, first):
    """Rank 0 waits long in the main thread, while a thread of its own comes late with a step that rank 1 has begun."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    may_go = threading.Event()

    def train():
        for step in range(3):
            if step == first and rank == 0:
                may_go.wait()
            _backward(net, step, rank)
            trainer.step(4)
            mx.nd.waitall()

    thread = threading.Thread(target=train)
    thread.start()
    if rank == 0:
        timer = threading.Timer(2 * process._FIRST_LOOK_S, may_go.set)  # while it waits
        timer.start()
    else:
        thread.join()
    mykv.barrier()
    thread.join()
    assert len(set(gather(checksum(net)))) == 1


def _vector():
    parameter = gluon.Parameter("vector", shape=(2,), init="zeros")
    parameter.initialize()
    return parameter


def _backward_of(parameter):
    with autograd.record():
        loss = parameter.data().sum()
    loss.backward()


@pytest.mark.ranks(2)
def test_a_learning_rate_that_the_loop_sets_to_zero(rank, gather):
    parameter = _vector()
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0})
    with mykv.join(trainer):
        for rate in (1.0, 0.5, 0.0, 0.25)[: 4 if rank == 0 else 1]:
            trainer.set_learning_rate(rate)
            _backward_of(parameter)
            trainer.step(1)
    assert gather(parameter.data().asnumpy().tolist()) == [[-1.375, -1.375]] * 2  # 1 + (0.5 + 0 + 0.25) / 2


@pytest.mark.ranks(2)
def test_a_worker_without_a_batch_after_another_init(rank, gather):
    parameter = _vector()
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0})
    _backward_of(parameter)
    trainer.step(1)
    mx.nd.waitall()
    mykv.shutdown()
    mykv.init()
    with mykv.join(trainer) as joined:
        for _ in range(2 if rank == 0 else 0):
            _backward_of(parameter)
            trainer.step(1)
    assert joined.steps == 2
    assert gather(parameter.data().asnumpy().tolist()) == [[-2.0, -2.0]] * 2


@pytest.mark.ranks(2)
def test_updates_that_ignore_stale_gradients_of_one_worker_alone(rank, gather):
    parameter = _vector()
    trainer = mykv.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0})
    for epoch in range(3):
        with mykv.join(trainer):
            for _ in range(2 if epoch else 1 - rank):  # in the first epoch rank 1 has no batch
                _backward_of(parameter)
                trainer.allreduce_grads()
                trainer.update(1, ignore_stale_grad=True)
    assert gather(parameter.data().asnumpy().tolist()) == [[-4.5, -4.5]] * 2

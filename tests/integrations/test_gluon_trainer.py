"""gluon.Trainer with the store 'mykv': its gradients lie in shared memory, and its steps are those of all workers."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import pickle
import threading
import time
import weakref

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import (
    IS_2,
    array,
    checksum,
    clear_errors,
    dense_network,
    layers_named_after_others,
    mx,
    numbers,
    parameters,
    structure,
    value,
)
from kvstore_plugin.integrations import gluon_trainer
from mxnet import MXNetError, autograd, gluon

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


def _trainer(net, how, **options):
    store = "mykv" if how == "name" else mx.kv.create("mykv")
    return gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, **options)


def _backward(net, rank, seed=0):
    with autograd.record():
        loss = (net(array(numbers(rank + 10 * seed, (4, 6)))) ** 2).sum()
    loss.backward()


def _gradients(net):
    return {name: value(one.grad()).copy() for name, one in structure(net).items()}


def _reduction(trainer):
    return gluon_trainer._reducer_of(trainer).described()


def _equal(gather, net):
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2, long=(1, 3, 4))
@pytest.mark.parametrize("how", ["name", "store"])
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_reduced_in_one_bucket(rank, size, gather, how, deferred):
    net = dense_network(0)
    if deferred:
        net = gluon.nn.HybridSequential()
        net.add(*[gluon.nn.Dense(width) for width in (8, 5, 2)])
        net.initialize(mx.init.Constant(0.1))
    trainer = _trainer(net, how, update_on_kvstore=False)
    _backward(net, rank)
    own = gather(_gradients(net))
    trainer.allreduce_grads()
    met = _gradients(net)
    assert len(set(gather(pickle.dumps(met)))) == 1
    for name, sums in met.items():
        np.testing.assert_allclose(sums, sum(one[name] for one in own), rtol=1e-5, atol=1e-6)
    found = _reduction(trainer)
    assert (found["adopted"], found["copied"], len(found["bucket_bytes"])) == (6, {}, 1)


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["name", "store"])
@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_a_network_that_only_one_worker_has_used(rank, gather, how, on_store, who):
    net = gluon.nn.Dense(3)
    net.initialize()
    trainer = _trainer(net, how, update_on_kvstore=on_store)
    for call in [lambda: trainer.step(4)] + [trainer.allreduce_grads] * (not on_store):
        if rank == who:
            _backward(net, rank)
        with pytest.raises(MXNetError, match=f"has no values yet on rank {1 - who}"):
            call()
    for seed in range(2):
        _backward(net, rank, seed)
        trainer.step(4)
    _equal(gather, net)
    assert trainer._optimizer.num_update == 2


@pytest.mark.ranks(2)
def test_a_worker_that_waits_elsewhere_during_the_first_step(rank, gather):
    net = dense_network(0)
    trainer = _trainer(net, "name")
    _backward(net, rank)
    with pytest.raises(MXNetError, match="(?s)first step of a gluon.Trainer with 6 parameters.*rank|barrier.*rank"):
        trainer.step(4) if rank else mykv.barrier()
    trainer.step(4)
    _equal(gather, net)


@pytest.mark.ranks(2)
def test_after_a_recorded_pass_gradients_are_copied_and_a_warning_says_so(rank, gather, caplog):
    nets = [dense_network(3)]
    with mx.autograd.record():
        loss = nets[0](array(numbers(rank, (4, 6)))).sum()
    nets.append(dense_network(3))
    caplog.set_level(logging.WARNING, "kvstore_plugin")
    trainers = [_trainer(net, "store", update_on_kvstore=False) for net in nets]
    said = [one.getMessage() for one in caplog.records if "since a recorded forward pass" in one.getMessage()]
    assert len(said) == (1 if rank == 0 else 0)
    assert not said or "6 of the 6 parameters of a gluon.Trainer" in said[0]
    for _ in range(2):
        for net, trainer in zip(nets, trainers):
            _backward(net, rank)
            trainer.step(4)
    assert _reduction(trainers[0])["copied"] == {"a recorded forward pass uses their parameters": 6}
    del loss
    assert checksum(nets[0]) == checksum(nets[1])
    _equal(gather, nets[0])


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("on_store", [False, True])
def test_workers_whose_gradients_lie_differently_copy_them(rank, gather, on_store):
    net = dense_network(4)
    held = [one.grad() for one in structure(net).values()] if rank == 1 else []  # which only rank 1 cannot move
    trainer = _trainer(net, "name", update_on_kvstore=on_store)
    for number in range(3):
        _backward(net, rank, number)
        trainer.step(4)
    _equal(gather, net)
    assert len(_reduction(trainer)["bucket_bytes"]) == 6 and len(held) == (6 if rank == 1 else 0)


@pytest.mark.ranks(2)
def test_two_trainers_of_one_store(rank, gather):
    store = mx.kv.create("mykv")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    nets = [dense_network(0, widths=widths) for widths in ((8, 5, 2), (3,))]
    trainers = [gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, update_on_kvstore=False) for net in nets]
    for number in range(3):
        for net, trainer in zip(nets, trainers) if number != 1 else zip(nets[::-1], trainers[::-1]):
            _backward(net, rank, number)
            trainer.step(4)
    for net in nets:
        _equal(gather, net)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("on_store", [False, True])
def test_a_layer_that_only_one_worker_uses(rank, size, gather, on_store):
    """With ignore_stale_grad, the worker that uses the layer decides for all; a layer that none uses keeps its bits."""
    layers = [gluon.nn.Dense(2, in_units=6) for _ in range(3)]
    net = gluon.nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Constant(0.1))
    trainer = _trainer(net, "store", update_on_kvstore=on_store)
    for number in range(3):
        with autograd.record():
            x = array(numbers(rank + 10 * number, (4, 6)))
            loss = (layers[0](x) + layers[1](x)).sum() if rank == 1 else layers[0](x).sum()
        loss.backward()
        before = parameters(net)
        trainer.step(4, ignore_stale_grad=True)
        _equal(gather, net)
        moved = {name for name, now in parameters(net).items() if not np.array_equal(now, before[name])}
        assert moved == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("on_store", [False, True])
def test_a_trainer_of_a_process_set(rank, gather, on_store):
    members = mykv.add_process_set([0, 2])
    net = dense_network(rank)
    if rank != 1:
        store = mykv.MyKV(process_set=members)
        trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, update_on_kvstore=on_store)
        for number in range(2):
            _backward(net, rank, number)
            trainer.step(4)
        assert _reduction(trainer)["adopted"] == 6
    sums = gather(checksum(net))
    assert sums[0] == sums[2] != sums[1]
    mykv.remove_process_set(members)


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("on_store", [False, True])
def test_compression_that_is_set_between_steps(rank, gather, on_store):
    net = dense_network(0, widths=(64, 32, 2))
    store = mx.kv.create("mykv")
    trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, update_on_kvstore=on_store)
    for number, params in enumerate((None, {"type": "fp16"}, {"type": "topk", "k": 2}, {"type": "none"})):
        if params is not None:
            store.set_gradient_compression(params)
        for again in range(2):
            _backward(net, rank, 2 * number + again)
            trainer.step(4)
        _equal(gather, net)
        assert len(_reduction(trainer)["bucket_bytes"]) == (6 if params == {"type": "topk", "k": 2} else 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_compression_that_only_one_worker_sets_fails_on_all_and_can_be_mended(rank, gather, on_store):
    net = dense_network(0)
    store = mx.kv.create("mykv")
    trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, update_on_kvstore=on_store)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    if rank == 0:
        store.set_gradient_compression({"type": "fp16"})
    _backward(net, rank)
    with pytest.raises(MXNetError):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    store.set_gradient_compression({"type": "fp16"})
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    _equal(gather, net)


@pytest.mark.ranks(2)
def test_a_frozen_layer_on_one_worker_is_an_error_on_all(rank, gather):
    net = dense_network(0)
    trainer = _trainer(net, "store")
    _backward(net, rank)
    trainer.step(4)
    before, frozen = checksum(net), next(iter(structure(net).values()))
    if rank == 1:
        frozen.grad_req = "null"
    _backward(net, rank)
    with pytest.raises(MXNetError):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    assert checksum(net) == before
    frozen.grad_req = "null"
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    _equal(gather, net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_a_trainer_that_nobody_holds_is_freed(rank, on_store):
    net = dense_network(0)
    trainer = _trainer(net, "name", update_on_kvstore=on_store)
    _backward(net, rank)
    trainer.step(4)
    mx.nd.waitall()
    gone = weakref.ref(trainer)
    del net, trainer
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 copies no trainer")
@pytest.mark.ranks(2)
def test_a_copied_trainer_steps(rank, gather):
    net = dense_network(0)
    trainer = _trainer(net, "store", update_on_kvstore=False)
    _backward(net, rank)
    trainer.step(4)
    other = copy.deepcopy(trainer)
    other.step(4, ignore_stale_grad=True)
    for one in (trainer, other):
        sums = b"".join(value(parameter.data()).tobytes() for parameter in one._params)
        assert len(set(gather(sums))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_an_error_between_operations_of_a_step_refuses_the_rest(rank, gather, monkeypatch, on_store):
    """A worker that breaks off between two operations must not let them meet those of the next step."""
    net = dense_network(0)
    held = [one.grad() for one in structure(net).values()]  # so that gradients are copied
    monkeypatch.setattr("kvstore_plugin.gradients.bucket_plan.LARGEST_COPIED_BUCKET", 64)
    trainer = _trainer(net, "store", update_on_kvstore=on_store)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    operations = gluon_trainer._reducer_of(trainer)._operations
    assert len(operations) > 2 and len(held) == 6
    if rank == 1:
        broken = operations[1]._replace(push=lambda label: (_ for _ in ()).throw(ArithmeticError("planted")))
        gluon_trainer._reducer_of(trainer)._operations = [operations[0], broken, *operations[2:]]
    _backward(net, rank)
    with pytest.raises(ArithmeticError if rank == 1 else MXNetError, match="planted"):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    gluon_trainer._reducer_of(trainer)._operations = operations
    if not on_store:
        assert checksum(net) == before or rank == 0  # rank 0 may have updated from the first operation
    mykv.broadcast_states(trainer)
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    _equal(gather, net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_a_gradient_that_is_stale_on_all_workers_moves_nothing(rank, gather, on_store):
    used, unused = gluon.nn.Dense(2, in_units=6), gluon.nn.Dense(2, in_units=6)
    net = gluon.nn.HybridSequential()
    net.add(used, unused)
    net.initialize(mx.init.Constant(0.1))
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="mykv", update_on_kvstore=on_store
    )
    kept = None
    for number in range(3):
        with autograd.record():
            x = array(numbers(rank + number, (4, 6)))
            loss = (used(x) + unused(x)).sum() if number == 0 else used(x).sum()
        loss.backward()
        trainer.step(4, ignore_stale_grad=True)
        kept = kept if number else value(unused.weight.data())
    np.testing.assert_array_equal(value(unused.weight.data()), kept)
    with pytest.raises((UserWarning, MXNetError), match="stale"):
        trainer.step(4)
        mx.nd.waitall()
    clear_errors()
    _equal(gather, net)


@pytest.mark.ranks(2)
def test_update_with_a_layer_that_only_one_worker_uses(rank, gather):
    layers = [gluon.nn.Dense(2, in_units=6) for _ in range(2)]
    net = gluon.nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Constant(0.1))
    trainer = _trainer(net, "store", update_on_kvstore=False)
    for number in range(3):
        with autograd.record():
            loss = layers[rank](array(numbers(rank + number, (4, 6)))).sum()
        loss.backward()
        if number:
            trainer.allreduce_grads()
            trainer.update(4, ignore_stale_grad=True)
        else:
            trainer.step(4, ignore_stale_grad=True)
        _equal(gather, net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["left out", "another batch size"])
def test_update_that_differs_on_one_worker_changes_no_weights(rank, gather, how):
    net = dense_network(0)
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore="mykv", update_on_kvstore=False)
    _backward(net, rank)
    trainer.step(4)
    before = checksum(net)
    _backward(net, rank)
    trainer.allreduce_grads()
    with contextlib.suppress(MXNetError):
        if how == "left out" and rank == 1:
            _backward(net, rank)
            trainer.allreduce_grads()
        else:
            trainer.update(4 if rank == 0 else 5)
        mx.nd.waitall()
    clear_errors()
    if how == "left out" and rank == 0:  # it meets rank 1's second call
        _backward(net, rank)
        with contextlib.suppress(MXNetError):
            trainer.allreduce_grads()
            mx.nd.waitall()
        clear_errors()
    if how == "left out":
        with contextlib.suppress(MXNetError):
            trainer.update(4)
            mx.nd.waitall()
        clear_errors()
    else:
        assert checksum(net) == before
    for _ in range(2):
        _backward(net, rank)
        trainer.step(4)
    _equal(gather, net)
    assert len(set(gather(str(sorted(trainer._optimizer._index_update_count.items()))))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_a_trainer_can_be_pickled_and_copied_after_a_step(rank, on_store):
    if IS_2:
        pytest.skip("MXNet 2.0 pickles no trainer")
    net = dense_network(0)
    trainer = _trainer(net, "store", update_on_kvstore=on_store)
    _backward(net, rank)
    trainer.step(4)
    mx.nd.waitall()
    assert len(pickle.loads(pickle.dumps(trainer))._params) == len(copy.deepcopy(trainer)._params) == 6


def test_trainers_made_before_the_import_and_sparse_ones_are_noticed(mpirun):
    result = mpirun(
        2,
        """
        import mxnet as mx
        from mxnet import autograd, gluon
        if mx.__version__.startswith("2."):
            mx.npx.set_np()
        ones = mx.np.ones if mx.__version__.startswith("2.") else mx.nd.ones
        net = gluon.nn.Dense(1, in_units=1)
        net.initialize(mx.init.Zero())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="mykv")
        import kvstore_plugin as mykv
        from mpi4py import MPI
        with autograd.record():
            loss = net(ones((1, 1)) * (MPI.COMM_WORLD.Get_rank() + 1)).sum()
        loss.backward()
        trainer.step(1)
        print("weight", net.weight.data().asnumpy().item(), mykv.size())
        if hasattr(mx.nd, "sparse") and mx.__version__.startswith("1"):
            table = gluon.nn.Embedding(4, 2, sparse_grad=True)
            table.initialize()
            try:
                gluon.Trainer(table.collect_params(), "sgd", kvstore="mykv").step(1)
            except ValueError as error:
                print("sparse", error)
        """,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert result.code == 0 and result.stdout.count("weight -3.0 2") == 2, result.text
    if not IS_2:
        assert result.stdout.count("sparse gluon.Trainer cannot train sparse parameters") == 2, result.text


def _train_net(net, trainer, rank, steps=3):
    for step in range(steps):
        with autograd.record():
            loss = (net(array(numbers(rank + 10 * step, (4, 4)))) ** 2).sum()
        loss.backward()
        trainer.step(4)


@pytest.mark.skipif(IS_2, reason="names of MXNet 2.0 are the same on all workers")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_names_that_sort_differently_on_the_workers_are_an_error(rank, on_store):
    net = layers_named_after_others(9 * rank)
    names = [one.name for one in net.collect_params().values()]
    assert (sorted(names) != names) == (rank == 1)
    trainer = _trainer(net, "store", update_on_kvstore=on_store)
    with pytest.raises(RuntimeError, match=f"Rank {rank} begins with net_dense"):
        _train_net(net, trainer, rank, 1)


@pytest.mark.skipif(IS_2, reason="names of MXNet 2.0 are the same on all workers")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_a_list_of_parameters_keeps_its_order_whatever_their_names(rank, gather, on_store):
    net = layers_named_after_others(9 * rank)
    trainer = gluon.Trainer(
        list(net.collect_params().values()), *_SGD, kvstore=mx.kv.create("mykv"), update_on_kvstore=on_store
    )
    _train_net(net, trainer, rank)
    weights = gather([value(layer.weight.data()) for layer in net])
    for mine, others in zip(*weights):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.ranks(2)
def test_a_dict_of_parameters_in_another_order_is_sorted_by_equal_names(rank, gather):
    layers = [gluon.nn.Dense(4, in_units=4, use_bias=False) for _ in range(2)]
    for layer in layers:
        layer.initialize()
    given = {"b": layers[0].weight, "a": layers[1].weight}
    given = given if rank else dict(reversed(list(given.items())))
    trainer = gluon.Trainer(given, *_SGD, kvstore=mx.kv.create("mykv"))
    with autograd.record():
        loss = (layers[1](layers[0](array(numbers(rank, (4, 4))))) ** 2).sum()
    loss.backward()
    trainer.step(4)
    assert len(set(gather(tuple(value(layer.weight.data()).tobytes() for layer in layers)))) == 1


def _two_trainers(on_store):
    nets = [dense_network(0), dense_network(0)]
    stores = {"kvstore": "mykv", "update_on_kvstore": on_store}
    return nets, [gluon.Trainer(list(net.collect_params().values()), *_SGD, **stores) for net in nets]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_first_steps_of_two_trainers_in_another_order_are_an_error_on_all(rank, gather, on_store):
    nets, trainers = _two_trainers(on_store)
    before = [checksum(net) for net in nets]
    for number in (0, 1) if rank == 0 else (1, 0):
        _backward(nets[number], rank, number)
        with pytest.raises(
            RuntimeError, match="first steps of different .*rank 0 that of number .*, and rank 1 that of"
        ):
            trainers[number].step(8)
    assert [checksum(net) for net in nets] == before
    for number in (0, 1):
        _backward(nets[number], rank, number)
        trainers[number].step(8)
    for number in (0, 1) if rank == 0 else (1, 0):  # not the first steps: matched by their names
        _backward(nets[number], rank, number)
        trainers[number].step(8)
    for net in nets:
        _equal(gather, net)
    assert checksum(nets[0]) != checksum(nets[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store, daemon", [(False, False), (True, False), (False, True)])
def test_first_steps_in_two_threads_come_in_any_order(rank, gather, on_store, daemon):
    nets, trainers = _two_trainers(on_store)
    before = [checksum(net) for net in nets]
    for number in (0, 1):
        _backward(nets[number], rank, number)
    errors = []

    def step(number):
        try:
            trainers[number].step(8)
            trainers[number].step(8, ignore_stale_grad=True)  # moves nothing: not a first step
            mx.nd.waitall()
        except RuntimeError as error:
            errors.append(str(error))

    order = (0, 1) if rank == 0 else (1, 0)
    threads = [threading.Thread(target=step, args=(number,), daemon=daemon) for number in order]
    for thread in threads:
        thread.start()
        time.sleep(0.3)  # the first thread waits for the other worker's first thread, which steps the other Trainer
    for thread in threads:
        thread.join()
    gather("all threads have ended")
    clear_errors()
    assert not errors
    for number, net in enumerate(nets):
        _equal(gather, net)
        assert checksum(net) != before[number]
    assert checksum(nets[0]) != checksum(nets[1])


@pytest.mark.ranks(2)
def test_trainers_that_hold_other_parameters_are_an_error_on_all(rank):
    net = gluon.nn.Dense(3, in_units=6 + rank)
    net.initialize()
    trainer = gluon.Trainer(list(net.collect_params().values()), *_SGD, kvstore="mykv")
    with autograd.record():
        loss = net(array(numbers(0, (4, 6 + rank)))).sum()
    loss.backward()
    with pytest.raises(
        RuntimeError, match=f"of rank {rank} begins with .*weight .3, {6 + rank}. float32.*same order on all workers"
    ):
        trainer.step(8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["stock", "own"])
def test_allreduce_grads_that_one_worker_leaves_out_is_an_error_on_all(rank, gather, kind):
    net = dense_network(0)
    stock = {"kvstore": "mykv", "update_on_kvstore": False}
    make = functools.partial(gluon.Trainer, **stock) if kind == "stock" else mykv.DistributedTrainer
    trainer = make(net.collect_params(), *_SGD)
    for step in range(5):
        before = checksum(net)
        _backward(net, rank, step)
        if step != 2:
            trainer.allreduce_grads()
            trainer.update(8)
            continue
        with pytest.raises(MXNetError, match="differs between ranks.*an update with|has failed since"):
            if rank == 0:
                trainer.allreduce_grads()
            trainer.update(8)
            mx.nd.waitall()
        clear_errors()
        mykv.barrier()
        assert checksum(net) == before
    _equal(gather, net)
    assert set(gather(trainer._optimizer.num_update)) == {5}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_one_worker_alone_saves_states_before_the_first_step(by, rank, gather, tmp_path, monkeypatch):
    net = dense_network(0)
    if by == "environment":
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    trainer = _trainer(net, "name", update_on_kvstore=False if by == "argument" else None)
    if rank == 0:
        trainer.save_states(str(tmp_path / "states"))
        assert (tmp_path / "states").stat().st_size > 0
    for number in range(2):
        _backward(net, rank, number)
        trainer.step(4)
    _equal(gather, net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("often", [False, True])
def test_gradients_that_accumulate_are_summed_as_by_mxnet_on_two_devices(often, rank, size, gather):
    """MXNet's Trainer sums the earlier sums once more where each backward is followed by allreduce_grads()."""

    def trained(devices, parts, store):
        net = gluon.nn.Dense(1, in_units=3, use_bias=False, weight_initializer=mx.init.Constant(0.5))
        net.initialize(ctx=devices)
        net.weight.grad_req = "add"
        trainer = gluon.Trainer(net.collect_params(), *_SGD, kvstore=store, update_on_kvstore=False)
        for _ in range(2):
            for number in range(3):
                with autograd.record():
                    data = [array(numbers(part + 10 * number, (4, 3))).as_in_context(devices[k]) for k, part in parts]
                    losses = [(net(one) ** 2).sum() for one in data]
                for loss in losses:
                    loss.backward()
                if often or number == 2:
                    trainer.allreduce_grads()
            trainer.update(24)
            for gradient in net.weight.list_grad():
                gradient[:] = 0
        return net.weight.data(devices[0]).asnumpy()

    ours = trained([mx.cpu(0)], [(0, rank)], "mykv")
    mxnets = trained([mx.cpu(0), mx.cpu(1)], [(0, 0), (1, 1)], "device")
    np.testing.assert_array_equal(ours, mxnets)
    assert len(set(gather(ours.tobytes()))) == 1

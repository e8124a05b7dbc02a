"""A communication hook reduces a trainer's buckets; if it fails on one worker, it fails on all."""

from __future__ import annotations

import re

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, checksum, clear_errors, dense_network, mx, parameters
from mxnet import autograd
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_BATCH = 4
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}
_SMALL = {"bucket_bytes": 256}  # several buckets


def _own(bucket):
    mykv.grouped_allreduce_(bucket.arrays, op=mykv.Sum, postscale_factor=bucket.scale, process_set=bucket.process_set)


def _each(bucket):
    for number, one in enumerate(bucket.arrays):
        mykv.allreduce_(one, op=mykv.Average, name=f"gradient{number}", process_set=bucket.process_set)


def _ours(bucket):
    bucket.allreduce_()


def _twice(bucket):
    """Halves, reduced by two operations."""
    for one in bucket.arrays:
        one *= 0.5
    kept = [one.copy() for one in bucket.arrays]
    bucket.allreduce_()
    mykv.grouped_allreduce_(kept, average=True, process_set=bucket.process_set)
    for one, other in zip(bucket.arrays, kept):
        one += other


def _backward(net, rank, step, contexts=None):
    values = np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, 6)).astype("float32")
    with autograd.record():
        losses = [(net(array(values, ctx=one)) ** 2).sum() for one in contexts or [None]]
    autograd.backward(losses)


def _train(net, rank, steps=3, contexts=None, **options):
    trainer = mykv.DistributedTrainer(list(net.collect_params().values()), *_SGD, **options)
    for step in range(steps):
        _backward(net, rank, step, contexts)
        trainer.step(_BATCH)
    return trainer


def _assert_close(net, other):
    for name, one in parameters(net).items():
        np.testing.assert_allclose(one, parameters(other)[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.smoke), _SMALL, {"bucket_bytes": 0}, {"num_groups": 2}], ids=str
)
def test_hooks_that_reduce_give_the_same_as_no_hook(rank, size, gather, options):
    plain = dense_network(0)
    _train(plain, rank, **options)
    for hook in (_own, _each, _ours, _twice):
        net = dense_network(rank)
        _train(net, rank, communication_hook=hook, **options)
        assert len(set(gather(checksum(net)))) == 1, hook.__name__
        _assert_close(net, plain)


@pytest.mark.ranks(4, env=_HOSTS)
def test_on_two_hosts(rank, size, gather):
    plain, net = dense_network(0), dense_network(rank)
    _train(plain, rank, **_SMALL)
    _train(net, rank, communication_hook=_own, **_SMALL)
    assert len(set(gather(checksum(net)))) == 1
    _assert_close(net, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"reduce_method": "sum"},
        {"gradients_after_allreduce": "sum", "gradient_predivide_factor": 2.0},
        {"clip_global_norm": 0.05},
        {"aux_sync_period": 1, "broadcast_period": 2},
    ],
    ids=str,
)
def test_options_mean_the_same(rank, size, options):
    plain, net = dense_network(0), dense_network(rank)
    _train(plain, rank, **options)
    _train(net, rank, communication_hook=_own, **options)
    _assert_close(net, plain)


@pytest.mark.ranks(2)
def test_several_devices(rank, size):
    devices = [mx.cpu(0), mx.cpu(1)]
    plain, net = dense_network(0, ctx=devices), dense_network(rank, ctx=devices)
    _train(plain, rank, contexts=devices)
    _train(net, rank, contexts=devices, communication_hook=_twice)
    _assert_close(net, plain)
    for one in net.collect_params().values():
        assert all((held.asnumpy() == one.list_data()[0].asnumpy()).all() for held in one.list_data())


@pytest.mark.ranks(2)
def test_what_a_hook_gets(rank, size, gather):
    """Every gradient once in a step, in the same order on all ranks, and the thread does not wait for it."""
    seen = []

    def hook(bucket):
        seen.append((bucket.index, tuple(bucket.names), [one.shape for one in bucket.arrays], bucket.scale))
        assert [one.shape for one in bucket.parameters] == [one.shape for one in bucket.arrays]
        assert bucket.process_set is mykv.global_process_set
        bucket.allreduce_()

    net = dense_network(0)
    _train(net, rank, steps=1, communication_hook=hook, **_SMALL)
    assert len(set(gather(str(seen)))) == 1
    assert [one[0] for one in seen] == list(range(len(seen))) and len(seen) > 1
    assert sorted(name for one in seen for name in one[1]) == [f"parameter {number}" for number in range(6)]
    assert {one[3] for one in seen} == {0.5}


@pytest.mark.ranks(3)
def test_process_sets_and_local_parameters(rank, size):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    try:
        nets = [dense_network(0), dense_network(0)]
        for net, hook in zip(nets, (None, _own)):
            first, second, third = list(net.collect_params().values())[:3]
            _train(net, rank, communication_hook=hook, parameter_process_sets={first: pair, second: pair, third: None})
        for name in list(parameters(nets[0]))[3:]:
            np.testing.assert_allclose(parameters(nets[1])[name], parameters(nets[0])[name], rtol=1e-5, atol=1e-6)
    finally:
        mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_stale_gradients_and_join(rank, size, gather):
    net = dense_network(0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, communication_hook=_own)
    with mykv.join(trainer):
        for step in range(2 + rank):
            _backward(net, rank, step)
            trainer.step(_BATCH)
    _backward(net, rank, 7)
    if rank == 1:
        next(iter(net.collect_params().values())).list_data()[0]._fresh_grad = False
    trainer.step(_BATCH, ignore_stale_grad=True)
    assert len(set(gather(checksum(net)))) == 1


class _Failing:
    """A hook that raises on rank 1 in one step, before its bucket number `at`, after `operations` operations."""

    def __init__(self, rank, step, operations, reads):
        self.step, self.operations, self.reads = (step if rank == 1 else None), operations, reads
        self.calls = 0

    def __call__(self, bucket):
        step, index = divmod(self.calls, 3)
        self.calls += 1
        for number, one in enumerate(bucket.arrays):
            if step == self.step and index == 1 and number == self.operations:
                raise ZeroDivisionError("a fault in the hook")
            mykv.allreduce_(one, average=True)
            if self.reads:
                one.asnumpy()
        if step == self.step and index == 1 and self.operations == len(bucket.arrays):
            raise ZeroDivisionError("a fault in the hook")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("operations", [0, 1, 2])
@pytest.mark.parametrize("reads", [False, True], ids=["lazy", "reads"])
def test_a_hook_that_raises_on_one_worker_fails_the_step_on_all(rank, size, gather, step, operations, reads):
    """All workers get the reason, no weight changes on any, and the next steps are right."""
    net = dense_network(0)
    hook = _Failing(rank, step, operations, reads)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, num_groups=3, communication_hook=hook)
    for number in range(step):
        _backward(net, rank, number)
        trainer.step(_BATCH)
    before = checksum(net)
    _backward(net, rank, step)
    if rank == 1:
        with pytest.raises(ZeroDivisionError, match="a fault in the hook"):
            trainer.step(_BATCH)
    else:
        with pytest.raises(MXNetError, match="(?s)rank 1.*ZeroDivisionError: a fault in the hook"):
            trainer.step(_BATCH)
            checksum(net)
    clear_errors()
    assert checksum(net) == before
    hook.calls = 30
    hook.step = None
    for number in range(2):
        _backward(net, rank, number)
        trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1 and checksum(net) != before


@pytest.mark.ranks(2)
def test_steps_that_differ_fail_before_the_hook_changes_anything(rank, size, gather):
    net = dense_network(0)
    trainer = _train(net, rank, communication_hook=_each, **_SMALL)
    before = checksum(net)
    _backward(net, rank, 5)
    trainer.step(_BATCH + rank)
    with pytest.raises(MXNetError, match="batch size"):
        checksum(net)
    clear_errors()
    assert checksum(net) == before
    _backward(net, rank, 6)
    trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1
    # A stale gradient on one worker refuses the step of the others.
    _backward(net, rank, 7)
    if rank == 1:
        next(iter(net.collect_params().values())).list_data()[0]._fresh_grad = False
        with pytest.raises(UserWarning):
            trainer.step(_BATCH)
    else:
        trainer.step(_BATCH)
        with pytest.raises(MXNetError, match="rank 1"):
            checksum(net)
    clear_errors()
    _backward(net, rank, 8)
    trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_different_numbers_of_operations_are_an_error_on_all_workers(rank, size):
    def hook(bucket):
        bucket.allreduce_()
        if rank == 1:
            bucket.allreduce_()

    with pytest.raises(MXNetError, match="started different numbers of operations for one bucket: 1 on rank 0, but 2"):
        _train(dense_network(0), rank, steps=1, communication_hook=hook)
    clear_errors()


class _Counting:
    """A hook that starts `start` operations for each bucket; the first of them reduces the bucket."""

    def __init__(self, start=1, touches=True, reads=False):
        self.start, self.touches, self.reads = start, touches, reads

    def __call__(self, bucket):
        for number in range(self.start):
            one = bucket.arrays[0] if self.touches else mx.nd.ones((3,))
            if number == 0:
                bucket.allreduce_()
            else:
                mykv.allreduce_(one, average=True)
            if self.reads:
                one.asnumpy()


def _other_number(net, hook, rank, size, gather, before, after):
    """One rank's hook starts `after` operations; all workers get an error that names a rank, and can continue."""
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, num_groups=3, communication_hook=hook)
    for step in range(2):
        _backward(net, rank, step)
        trainer.step(_BATCH)
    kept = checksum(net)
    if rank == size - 1:
        hook.start = after
    _backward(net, rank, 2)
    named = size - 1 if rank != size - 1 else rf"(?!{rank}\b)\d"  # the rank that differs learns of any other one
    with pytest.raises(MXNetError, match=rf"rank {named}\b"):
        trainer.step(_BATCH)
        checksum(net)
    clear_errors()
    assert checksum(net) == kept
    hook.start = before
    for step in range(3, 5):
        _backward(net, rank, step)
        trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1 and checksum(net) != kept


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("touches", [False, True], ids=["other arrays", "the bucket's"])
@pytest.mark.parametrize("reads", [False, True], ids=["lazy", "reads"])
@pytest.mark.parametrize("before, after", [(1, 2), (1, 4), (2, 1), (3, 1)])
def test_another_number_of_operations_later_is_an_error(rank, size, gather, touches, reads, before, after):
    hook = _Counting(before, touches, reads)
    _other_number(dense_network(0), hook, rank, size, gather, before, after)


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("before, after", [(1, 3), (2, 1)])
def test_another_number_of_operations_later_on_two_hosts(rank, size, gather, before, after):
    _other_number(dense_network(0), _Counting(before), rank, size, gather, before, after)


@pytest.mark.ranks(1, 2, 3)
def test_all_workers_may_start_other_numbers_of_operations(rank, size, gather):
    """As PowerSGD after some steps without it: more, fewer, and more again."""
    net, plain, hook = dense_network(0), dense_network(0), _Counting()
    trainer = mykv.DistributedTrainer(list(net.collect_params().values()), *_SGD, communication_hook=hook, **_SMALL)
    for step, start in enumerate((1, 2, 4, 4, 1, 3, 5)):
        hook.start = start
        _backward(net, rank, step)
        trainer.step(_BATCH)
    _train(plain, rank, steps=7, **_SMALL)
    _assert_close(net, plain)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("fails_after", [1, 2])
def test_a_hook_that_raises_where_the_others_start_more_operations(rank, size, gather, fails_after):
    net, hook = dense_network(0), _Counting()

    def fails(bucket):
        hook(bucket)
        if rank == 1 and hook.start == fails_after and step == 1:
            raise ZeroDivisionError("a fault in the hook")

    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, communication_hook=fails, **_SMALL)
    for step in range(4):
        hook.start = (fails_after if rank == 1 else 3) if step == 1 else 1 + step
        _backward(net, rank, step)
        if step == 1:
            kept = checksum(net)
            with pytest.raises(ZeroDivisionError if rank == 1 else MXNetError, match="a fault in the hook"):
                trainer.step(_BATCH)
                checksum(net)
            clear_errors()
            assert checksum(net) == kept
        else:
            trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_hook_that_reads_what_another_worker_does_not_start(rank, size):
    """In its first run: the worker that reads waits in its hook, and the other for the number of operations."""
    net = dense_network(0)
    with pytest.raises(MXNetError, match="was refused by rank 0: its communication hook has started fewer operations"):
        _train(net, rank, steps=1, communication_hook=_Counting(1 + rank, reads=True))
        checksum(net)
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda bucket: mykv.allgather(bucket.arrays[0]), ValueError, "allgather.* waits for the other workers"),
        (lambda bucket: mykv.barrier(), ValueError, "barrier.* waits for the other workers"),
        (lambda bucket: bucket.arrays, TypeError, "hook has returned list"),
    ],
    ids=["allgather", "barrier", "a result"],
)
def test_what_a_hook_must_not_do(rank, size, call, error, message):
    with pytest.raises(error, match=message):
        _train(dense_network(0), rank, steps=1, communication_hook=call)
    clear_errors()


def _over_all(bucket):
    mykv.grouped_allreduce_(bucket.arrays)


@pytest.mark.ranks(3)
def test_another_process_set_is_refused(rank, size):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    try:
        if rank != 1:
            with pytest.raises(ValueError, match="must be over the process set of its bucket"):
                _train(dense_network(0), rank, steps=1, communication_hook=_over_all, process_set=pair)
        clear_errors()
    finally:
        mykv.remove_process_set(pair)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"communication_hook": 5}, "communication_hook must be a function of a bucket or None, not int. Pass"),
        ({"compression": mykv.Compression.fp16}, "cannot be combined with the compression Compression.fp16"),
        ({"compression_params": {"type": "topk"}}, "cannot be combined with the compression"),
        ({"update_on_kvstore": True}, "communication_hook cannot be combined with update_on_kvstore=True"),
        ({"elastic": True}, "communication_hook cannot be combined with elastic=True"),
    ],
    ids=str,
)
def test_what_does_not_go_together(rank, size, options, message):
    options = {"communication_hook": _own, **options}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        mykv.DistributedTrainer(dense_network(0).collect_params(), *_SGD, **options)


@pytest.mark.ranks(1)
def test_row_sparse_gradients_are_refused(rank, size):
    if mx.__version__.startswith("2."):
        pytest.skip("MXNet 2.0 trains no sparse parameters")
    net = nn.Embedding(4, 3, sparse_grad=True)
    net.initialize()
    with pytest.raises(NotImplementedError, match="communication_hook needs dense gradients"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, communication_hook=_own)


@pytest.mark.ranks(2)
def test_workers_with_different_hooks_are_an_error(rank, size):
    hook = _own if rank == 0 else _each
    with pytest.raises(RuntimeError, match="(?s)_own.*_each"):
        mykv.DistributedTrainer(dense_network(0).collect_params(), *_SGD, communication_hook=hook)


@pytest.mark.ranks(1)
def test_a_bucket_reduces_in_a_hook_only(rank, size):
    kept = []

    def hook(bucket):
        kept.append(bucket)
        bucket.allreduce_()

    _train(dense_network(0), rank, communication_hook=hook)
    with pytest.raises(RuntimeError, match="outside of a communication hook"):
        kept[0].allreduce_()


@pytest.mark.ranks(2)
def test_accumulated_gradients(rank, size, gather):
    nets = [dense_network(0), dense_network(0)]
    for net, hook in zip(nets, (None, _own)):
        for one in net.collect_params().values():
            one.grad_req = "add"
        trainer = mykv.DistributedTrainer(list(net.collect_params().values()), *_SGD, communication_hook=hook)
        for step in range(4):
            _backward(net, rank, step)
            if step % 2:
                trainer.step(2 * _BATCH)
                for one in net.collect_params().values():
                    one.grad()[:] = 0
    _assert_close(nets[1], nets[0])
    assert len(set(gather(checksum(nets[1])))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [False, True])
def test_a_worker_that_leaves_the_loop_gets_an_error_and_so_do_the_others(rank, size, gather, first):
    """The deadlock check finds a bucket with a hook, even before the hook has run on any worker."""
    net = dense_network(0)
    trainer = mykv.DistributedTrainer(list(net.collect_params().values()), *_SGD, communication_hook=_each)
    for step in range(1 - first):
        _backward(net, rank, step)
        trainer.step(_BATCH)
    before = checksum(net)
    with pytest.raises(MXNetError, match="different numbers of steps|has not taken"):
        if rank == 0:
            _backward(net, rank, 1)
            trainer.step(_BATCH)
            checksum(net)
        else:
            mykv.barrier()
    clear_errors()
    if rank == 0:
        with pytest.raises(MXNetError, match="rank 1 is in barrier"):
            mykv.barrier()  # the call that rank 1 has given up
    assert checksum(net) == before
    _backward(net, rank, 2)
    trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1 and checksum(net) != before

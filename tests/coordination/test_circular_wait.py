"""Workers that wait for each other in operations of MXNet's engine: an error on all in seconds, with both halves."""

from __future__ import annotations

import contextlib
import re
import textwrap
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, dense_network, mx, value
from kvstore_plugin.coordination import circular_wait
from kvstore_plugin.coordination.circular_wait import in_circle
from kvstore_plugin.world import process
from mxnet import autograd

_LIMIT = 40.0  # seconds; found after some six on an idle machine


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ([[[1]], [[0]]], [0, 1]),
        ([[[1]], None], []),  # rank 1 may go on
        ([[[1]], [[0], []]], []),  # an operation of rank 1 has all ranks
        ([[[1], [2]], [[0]], [[0]]], [0, 1, 2]),
        ([[[1], [2]], [[0]], None], []),  # rank 2 may come to rank 0's second operation
        ([[[1]], [[0]], None], [0, 1]),
        ([[[1, 2]], [[0]], None], [0, 1]),  # rank 1 never comes, whatever rank 2 does
        ([[[1]], [[2]], [[0]]], [0, 1, 2]),
        ([None, None], []),
    ],
)
def test_who_can_never_go_on(waits, circle):
    assert in_circle(waits) == circle


def _step(net, trainer, rank):
    with autograd.record():
        loss = (net(array(np.random.RandomState(rank).rand(4, 6).astype("float32"))) ** 2).mean()
    loss.backward()
    trainer.step(4)
    return loss


@pytest.mark.ranks(2, timeout=150)
@pytest.mark.parametrize(("how", "late"), [("rank 0 alone", None), ("fewer batches", None), ("fewer batches", 0)])
def test_both_ranks_get_both_halves_and_the_next_call_works(how, late, rank, gather, monkeypatch):
    """Also a rank that gives up late: by then the other rank may have refused, since its array carries the error."""
    if rank == late:
        monkeypatch.setattr(circular_wait, "in_circle", lambda waits: time.sleep(3) or in_circle(waits))
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    loss = _step(net, trainer, rank)
    mx.nd.waitall()
    began = time.monotonic()
    halves = (
        r"rank 0 waits in the operation 'loss' for rank 1 at test_circular_wait.py:\d+; "
        r"rank 1 waits in step\(\) of trainer\d+ for rank 0 at test_circular_wait.py:\d+: they wait for each other"
    )
    with pytest.raises(MXNetError, match=halves):
        if rank == 0:
            mykv.allreduce(loss, name="loss").asnumpy()
        else:
            _step(net, trainer, rank)
            if how == "fewer batches":  # the second loss depends on the first step
                mykv.allreduce(_step(net, trainer, rank), name="loss").asnumpy()
            mx.nd.waitall()
    assert time.monotonic() - began < _LIMIT
    if how == "fewer batches" and rank == 0:
        # MXNet raises an error only once. Afterwards it may still run rank 1's second step, which waits for rank 0.
        for _ in range(2):
            with contextlib.suppress(MXNetError):
                _step(net, trainer, rank)
                mx.nd.waitall()
    clear_errors()
    gather("all have their error")
    assert (value(mykv.allreduce(array(np.ones(3)), average=False, name="next")) == 2).all()


def test_a_rank_that_has_its_error_and_ends_leaves_the_others_theirs(mpirun):
    script = """
        import time
        import kvstore_plugin as mykv
        import mxnet as mx
        from kvstore_plugin.coordination import circular_wait

        mykv.init()
        find = circular_wait.in_circle
        if mykv.rank() == 0:
            circular_wait.in_circle = lambda waits: time.sleep(3) or find(waits)
        try:
            mykv.allreduce(mx.nd.ones(3), name="ab"[mykv.rank()]).asnumpy()
        except mx.base.MXNetError as error:
            print(f"on rank {mykv.rank()}: {error}", flush=True)
        """
    result = mpirun(2, textwrap.dedent(script), timeout=120)
    for rank in range(2):
        assert re.search(rf"on rank {rank}: .*rank 0 waits in .*'a'.*rank 1 waits in .*'b'", result.stdout), result.text


_LINE = r" at test_circular_wait\.py:\d+"
_BATCHES = r"Make the same calls on all workers, none under `if rank == 0:`, and give all the same number of batches"
_SAVE = r"Call save_states\(\) and load_states\(\) on all workers, not under `if rank == 0:`"
_STORES = r"Create the same stores on all workers, in the same order"
_TRAINERS = r"The workers make or step their trainers in different orders\."


def _save(nets, trainers, rank, tmp_path):
    trainers[0].save_states(str(tmp_path / "x.states"))


def _step_both(nets, trainers, rank, tmp_path):
    for number in (0, 1) if rank == 0 else (1, 0):
        _step(nets[number], trainers[number], rank)
        mx.nd.waitall()


def _push_to_a_store(nets, trainers, rank, tmp_path):
    stores = [mx.kv.create("mykv") for _ in range(1 + rank)]
    stores[-1].pushpull("key", array(np.ones(3, "float32")))
    stores += [mx.kv.create("mykv") for _ in range(1 - rank)]  # the tests behind this one have equal numbers again
    mx.nd.waitall()


def _barrier(nets, trainers, rank, tmp_path):
    mykv.barrier()


def _read(nets, trainers, rank, tmp_path):
    mykv.allreduce(array(np.ones(3, "float32")), name="value").asnumpy()


@pytest.mark.ranks(2, timeout=150)
@pytest.mark.parametrize(
    ("calls", "halves"),
    [
        ((_barrier, _read), rf"rank 0 waits in barrier\(\) for rank 1{_LINE}; .*'value'.*other\. {_BATCHES}"),
        ((_save, _read), rf"rank 0 waits in save_states\('.*x\.states'\) of trainer\d+ for rank 1{_LINE}; .*{_SAVE}"),
        ((_step_both, _step_both), rf"in step\(\) of trainer\d+ for .*in step\(\) of trainer\d+ for .*{_TRAINERS}"),
        ((_push_to_a_store,) * 2, rf"of key 'key' of kv\d+ for .*of key 'key' of kv\d+ for .*{_STORES}"),
    ],
    ids=["barrier", "save_states", "trainers in another order", "another number of stores"],
)
def test_the_error_names_the_calls_and_their_remedy(calls, halves, rank, gather, tmp_path):
    nets = [dense_network(seed=0), dense_network(seed=1)]
    on_store = _save in calls
    trainers = [mykv.DistributedTrainer(net.collect_params(), "sgd", update_on_kvstore=on_store) for net in nets]
    for net, trainer in zip(nets, trainers):
        _step(net, trainer, rank)
    mx.nd.waitall()
    with pytest.raises(MXNetError, match=halves):
        calls[rank](nets, trainers, rank, tmp_path)
    clear_errors()
    gather("all have their error")
    if calls[0] is not calls[1]:
        with pytest.raises(MXNetError, match="they wait for each other"):  # the call has failed for both ranks
            calls[1 - rank](nets, trainers, rank, tmp_path)
        clear_errors()


@pytest.mark.parametrize(
    ("name", "call", "shown"),
    [
        ("world/waiting", "allgather_object 'x'", "allgather_object 'x'"),
        ("set1/waiting", "", "a call that waits for all workers"),
        ("world/call/trainer0/loss", "", "the operation 'trainer0/loss'"),
        ("world/allgather", "", "allgather()"),
        ("broadcast_states0/states/4", "", "broadcast_states()"),
        ("set1.broadcast_states2/values/weight", "", "broadcast_states()"),
        ("world/first use of optimizer", "", "the first use of optimizer"),
        ("trainer0/bucket1", "a step of trainer0", "step() of trainer0"),
        ("set1.trainer2/bucket1", "", "step() of set1.trainer2"),
        ("kv0/trainer0/bucket0", "", "step() of kv0/trainer0"),
        ("gluon.Trainer3/sparse", "", "step() of gluon.Trainer3"),
        ("trainer0/values/parameter 1 (weight)", "", "the broadcast of parameter 1 (weight)"),
        ("set1.broadcast0/weight", "", "the broadcast of weight"),
        ("broadcast0/parameters", "broadcast_parameters", "broadcast_parameters()"),
        ("trainer0/checkpoint/states", "", "save_states() or load_states() of trainer0"),
        ("kv0/checkpoint", "load_optimizer_states('x')", "load_optimizer_states('x') of kv0"),
        ("kv0/'key'", "", "a push or pull of key 'key' of kv0"),
        ("sync_batch_norm0/forward", "", "sync_batch_norm0/forward"),
    ],
)
def test_an_operation_is_told_as_the_users_call(name, call, shown):
    assert circular_wait._called(name, call) == shown


@pytest.mark.parametrize("trains_in", ["main thread", "other thread"])
def test_the_first_warning_has_both_halves_where_another_thread_may_go_on(trains_in, mpirun):
    script = """
        import sys, threading, time
        import kvstore_plugin as mykv
        import mxnet as mx

        def train():
            try:
                mykv.allreduce(mx.nd.ones(3), name="ab"[mykv.rank()]).asnumpy()
            except mx.base.MXNetError as error:
                print("failed", flush=True)

        mykv.init()
        function, other = (train, time.sleep) if sys.argv[1] == "main" else (time.sleep, train)
        thread = threading.Thread(target=other, args=[30] if other is time.sleep else [])
        thread.start()
        function(*[30] if function is time.sleep else [])
        thread.join()
        """
    settings = {"MYKV_STALL_WARN_S": "12", "MYKV_STALL_ABORT_S": "24"}
    result = mpirun(2, textwrap.dedent(script), *trains_in.split(), env=settings, timeout=120)
    warnings = re.findall(r"mykv on rank (\d): (.*)", result.stderr)
    for rank in "01":
        first = next(text for by, text in warnings if by == rank)
        halves = r"rank 0 waits in .*'a' for rank 1 at .*:\d+; rank 1 waits in .*'b' for rank 0 at .*:\d+: they wait"
        assert re.match(halves, first), result.text
    assert result.stdout.count("failed") == 2, result.text


@pytest.mark.ranks(2, timeout=150)
def test_a_rank_that_is_late_or_computes_is_waited_for(rank, gather):
    value = array(np.ones(3, "float32"))
    for name in ("first", "second"):
        if rank == 1:
            time.sleep(8)
        np.testing.assert_array_equal(mykv.allreduce(value, op=mykv.Sum, name=name).asnumpy(), 2)
    gather("end")


@pytest.mark.ranks(2, timeout=150)
def test_a_call_that_was_given_up_has_failed_for_a_rank_that_comes_later(rank, gather):
    """Otherwise its call would be matched with a later call of the other rank."""
    mykv.init()
    value = array(np.ones(3, "float32"))
    own, other = ("a", "b") if rank == 0 else ("b", "a")
    for name in (own, other):
        with pytest.raises(MXNetError, match="they wait for each other"):
            mykv.allreduce(value, name=name).asnumpy()
        clear_errors()
        gather("all have the error")  # a call that comes before the other rank gives up is its partner
    for name in ("a", "b"):
        np.testing.assert_array_equal(mykv.allreduce(value, op=mykv.Sum, name=name).asnumpy(), 2)


@pytest.mark.ranks(2)
def test_what_a_rank_has_begun_since_it_told_is_not_given_up(rank, gather):
    mykv.init()
    core = process.core
    state = {"name": "x", "call": "", "where": "", "is_certain": True}
    halves = [{**state, "waits": [[other]], "first": [other]} for other in (1, 0)]
    ones, sums = np.ones(3), np.zeros(3)
    gather("begin")
    if rank == 0:
        work = core.submit_allreduce("since", [ones], [sums])
        circular_wait._end_circle(core, halves, time.monotonic() - 30)
        assert not work.wait(0.2)
    gather("rank 0 waits")
    if rank == 1:
        work = core.submit_allreduce("since", [ones], [sums])
    assert work.wait(30)
    np.testing.assert_array_equal(sums, 2)

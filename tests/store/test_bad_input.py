"""Bad input: an error at the call of the rank that can see it, and at the arrays of all others, never a hang."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, dense_network, fail, mx, structure, value
from kvstore_plugin.world import process
from mxnet import autograd

_LIMIT = 5.0  # seconds until every rank has its error, on a machine that is busy


@pytest.fixture
def store():
    return mx.kv.create("mykv")


def _good(n=3):
    return array(np.ones(n))


class _Refusing:
    """The core, which refuses the arrays of one kind of operation."""

    def __init__(self, core, kind):
        self._core, self._kind = core, kind

    def __getattr__(self, name):
        return self._refuse if name == self._kind else getattr(self._core, name)

    def _refuse(self, *arguments, **options):
        raise ValueError("planted in the core")


def _next_call_works(store, key, size):
    clear_errors()
    inout = _good()
    store.pushpull(key, inout)
    assert (value(inout) == size).all()


_WRONG = {
    "value is numpy": (TypeError, lambda s: s.pushpull("k", np.ones(3))),
    "value is None": (TypeError, lambda s: s.pushpull("k", None)),
    "value is a number": (TypeError, lambda s: s.pushpull("k", 3.0)),
    "value is an empty list": (ValueError, lambda s: s.pushpull("k", [])),
    "value holds numpy": (TypeError, lambda s: s.pushpull("k", [_good(), np.ones(3)])),
    "value is csr": (ValueError, lambda s: s.pushpull("k", mx.nd.sparse.zeros("csr", (3, 2)))),
    "devices of other shapes": (ValueError, lambda s: s.pushpull("k", [_good(3), _good(4)])),
    "devices of other dtypes": (ValueError, lambda s: s.pushpull("k", [_good(), array(np.ones(3, "int32"))])),
    "out is numpy": (TypeError, lambda s: s.pushpull("k", _good(), np.ones(3))),
    "out of another shape": (ValueError, lambda s: s.pushpull("k", _good(3), _good(4))),
    "out of another rank": (ValueError, lambda s: s.pushpull("k", _good(4), array(np.ones((2, 2))))),
    "out of another dtype": (ValueError, lambda s: s.pushpull("k", _good(), array(np.ones(3, "int32")))),
    "one out of several of another shape": (ValueError, lambda s: s.pushpull("k", _good(), [_good(), _good(4)])),
    "priority is text": (TypeError, lambda s: s.pushpull("k", _good(), priority="high")),
    "priority is too large": (ValueError, lambda s: s.pushpull("k", _good(), priority=2**40)),
    "fewer values than keys": (ValueError, lambda s: s.pushpull(["k", "l"], [_good()])),
    "more values than keys": (ValueError, lambda s: s.pushpull(["k"], [_good(), _good()])),
    "fewer outs than keys": (ValueError, lambda s: s.pushpull(["k", "l"], [_good(), _good()], [_good()])),
    "value of keys is no list": (TypeError, lambda s: s.pushpull(["k"], _good())),
    "out of keys is no list": (TypeError, lambda s: s.pushpull(["k"], [_good()], _good())),
    "broadcast of numpy": (TypeError, lambda s: s.broadcast("k", np.ones(3), _good())),
    "broadcast of a list": (ValueError, lambda s: s.broadcast("k", [_good(), _good()], _good())),
    "broadcast into another shape": (ValueError, lambda s: s.broadcast("k", _good(3), _good(4))),
    "broadcast into another dtype": (ValueError, lambda s: s.broadcast("k", _good(), array(np.ones(3, "int8")))),
    "broadcast of fewer values than keys": (ValueError, lambda s: s.broadcast(["k", "l"], [_good()], [_good()])),
    "broadcast of a key twice": (ValueError, lambda s: s.broadcast(["k", "k"], [_good()] * 2, [_good()] * 2)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG)
def test_what_a_rank_can_see_alone_is_refused_there_and_reaches_the_other(store, rank, size, case):
    error, call = _WRONG[case]
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(error, match=r"\w+ \w+ \w+"):
            call(store)
    else:
        inout = _good()
        (store.broadcast if "broadcast" in case else store.pushpull)("k", inout)
        with pytest.raises(MXNetError, match="rank 1") as failure:
            value(inout)
        assert "k" in str(failure.value)
    assert time.monotonic() - begin < _LIMIT
    if "keys" in case:
        store = mx.kv.create("mykv")  # the refusal of 'l' would wait for a turn of rank 0
    _next_call_works(store, "k", size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG)
def test_the_same_mistake_on_all_ranks_leaves_them_in_step(store, rank, size, case):
    error, call = _WRONG[case]
    with pytest.raises(error) as failure:
        call(store)
    assert isinstance(failure.value, MXNetError)  # caught by scripts for MXNet's own stores
    _next_call_works(store, "k", size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("push", "push_reduce_to_owners"),
        ("push", "push_gather_from_owners"),
        ("pushpull", "push_allreduce"),
        ("broadcast", "push_broadcast"),
    ],
)
def test_arrays_that_the_core_refuses_on_one_rank_are_an_error_on_both_for_all_keys(
    store, rank, size, monkeypatch, method, kind
):
    keys, values, outs = ["k", "l"], [_good(), _good()], [_good(), _good()]
    if method == "push":
        store.init(keys, values)
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))

    def call():
        getattr(store, method)(keys, values, *([] if method == "push" else [outs]))
        mx.nd.waitall()

    if rank == 1:
        with monkeypatch.context() as changed, pytest.raises(ValueError, match="planted in the core"):
            changed.setattr(process, "core", _Refusing(process.core, kind))
            call()
    else:
        with pytest.raises(MXNetError, match="rank 1: .*planted in the core"):
            call()
    clear_errors()
    if kind == "push_gather_from_owners":  # rank 1 has updated its shards, and rank 0 did not get them
        store.init(keys, values)
    call()
    if method == "push":
        store.pull(keys, outs)
    expected = {"push": 1 - size, "pushpull": size, "broadcast": 1}[method]
    assert all((value(out) == expected).all() for out in outs)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("key", [None, 1.5, b"bytes", {"a": 1}, [1.5], [None], ("a", 2.5)], ids=repr)
def test_wrong_keys(store, key):
    for call in (store.pushpull, store.broadcast):
        with pytest.raises(TypeError, match="key"):
            call(key, [_good()] * 2 if isinstance(key, (list, tuple)) else _good())


@pytest.mark.ranks(1)
def test_sentence_names_key_and_both_values(store):
    with pytest.raises(ValueError) as failure:
        store.pushpull("the key", _good(3), array(np.ones(4, "int32")))
    for word in ("'the key'", "(3,)", "(4,)", "float64", "int32"):
        assert word in str(failure.value)


_DIFFERING = {
    "shape": (np.zeros((2, 3)), np.zeros((3, 2)), "(2, 3)", "(3, 2)"),
    "number of dimensions": (np.zeros(6), np.zeros((6, 1)), "(6,)", "(6, 1)"),
    "size": (np.zeros(3), np.zeros(3 << 20), "(3,)", "(3145728,)"),
    "dtype": (np.zeros(3, "float32"), np.zeros(3, "float64"), "float32", "float64"),
    "dtype of one size": (np.zeros(3, "float32"), np.zeros(3, "int32"), "float32", "int32"),
}


def _check_differing(store, rank, size, case, method):
    first, last, *words = _DIFFERING[case]
    inout = array((last if rank == size - 1 else first).copy())
    begin = time.monotonic()
    getattr(store, method)("the key", inout)
    with pytest.raises(MXNetError) as failure:
        value(inout)
    assert time.monotonic() - begin < _LIMIT
    for word in ("'the key'", f"rank {size - 1}", *words):
        assert word in str(failure.value)
    assert any(f"rank {other} has" in str(failure.value) for other in range(size - 1))
    _next_call_works(store, "the key", size)


@pytest.mark.smoke
@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("method", ["pushpull", "broadcast"])
@pytest.mark.parametrize("case", _DIFFERING)
def test_other_shapes_or_dtypes_are_an_error_on_every_rank(store, rank, size, case, method):
    _check_differing(store, rank, size, case, method)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("case", _DIFFERING)
def test_other_shapes_or_dtypes_on_two_hosts(store, rank, size, case):
    _check_differing(store, rank, size, case, "pushpull")


@pytest.mark.ranks(2)
def test_pushpull_against_broadcast(store, rank, size):
    inout = _good()
    (store.broadcast if rank else store.pushpull)("key", inout)
    with pytest.raises(MXNetError, match="broadcast") as failure:
        value(inout)
    assert "'key'" in str(failure.value)
    _next_call_works(store, "key", size)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("method", ["pushpull", "broadcast"])
@pytest.mark.parametrize("bad", [0, 1])
def test_array_that_carries_an_error_is_an_error_on_every_rank(store, rank, size, method, bad):
    inout = array(np.ones(3, "float32"))
    if rank == bad:
        fail(inout)
    begin = time.monotonic()
    getattr(store, method)("key", inout)
    with pytest.raises(MXNetError) as failure:
        value(inout)
    assert time.monotonic() - begin < _LIMIT
    assert f"rank {bad}" in str(failure.value) or (rank == bad and "scale" in str(failure.value))
    _next_call_works(store, "key", size)


@pytest.mark.ranks(2)
def test_error_of_an_array_keeps_its_text_where_it_came_from(store, rank, size):
    inout = array(np.ones(3, "float32"))
    if rank == 1:
        fail(inout)
    store.pushpull("key", inout)
    with pytest.raises(MXNetError, match="scale parameter" if rank == 1 else "rank 1"):
        value(inout)
    _next_call_works(store, "key", size)


@pytest.mark.ranks(2)
def test_out_that_carries_an_error(store, rank, size):
    """An error in an array that is only written is still an error, as in MXNet's own operators."""
    out = array(np.ones(3, "float32"))
    if rank == 1:
        fail(out)
    store.pushpull("key", array(np.ones(3, "float32")), out)
    with pytest.raises(MXNetError):
        value(out)
    _next_call_works(store, "key", size)


@pytest.mark.ranks(2)
def test_error_travels_on_through_what_is_computed_from_the_result(store, rank, size):
    inout = array(np.ones(3, "float32"))
    if rank == 1:
        fail(inout)
    store.pushpull("key", inout)
    with pytest.raises(MXNetError):
        value(inout * 2 + 1)
    _next_call_works(store, "key", size)


@pytest.mark.ranks(2)
def test_one_bad_key_in_a_list_does_not_stop_the_others(store, rank, size):
    inouts = [_good(3), _good(4 + rank), _good(5)]
    store.pushpull(["a", "b", "c"], inouts)
    with pytest.raises(MXNetError, match="'b'"):
        value(inouts[1])
    assert (value(inouts[0]) == 2).all() and (value(inouts[2]) == 2).all()
    _next_call_works(store, "b", size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_gradient_that_carries_an_error_in_a_step(rank, bad, gather):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        loss = (net(array(np.ones((2, 6), "float32"))) ** 2).sum()
    loss.backward()
    if rank == bad:
        fail(next(iter(structure(net).values())).grad())
    trainer.step(2)
    with pytest.raises(MXNetError) as failure:
        for parameter in structure(net).values():
            parameter.data().wait_to_read()
    assert rank == bad or f"rank {bad}" in str(failure.value)
    clear_errors()
    gather("both have their error")


@pytest.mark.ranks(2)
def test_many_errors_in_a_row_leave_nothing_behind(store, rank, size):
    for turn in range(20):
        inout = _good(3 + rank * (turn % 2))
        store.pushpull("key", inout)
        if turn % 2:
            with pytest.raises(MXNetError):
                value(inout)
        else:
            assert (value(inout) == 2).all()
    _next_call_works(store, "key", size)


@pytest.mark.ranks(3, long=(2,))
def test_trainers_with_other_bucket_sizes_or_compression_name_both(rank, size, gather):
    for option, values in (("bucket_bytes", (1 << 20, 2 << 20)), ("compression", ("fp16", "none"))):
        value_here = values[rank == size - 1]
        if option == "compression":
            value_here = getattr(mykv.Compression, value_here)
        net = dense_network(seed=0)
        with pytest.raises(Exception) as failure:
            mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **{option: value_here})
        text = str(failure.value)
        assert "rank 0" in text and f"rank {size - 1}" in text, text
        for one in values:
            assert f"{option}={one}" in text or f"{one}" in text, text
        gather("all know")


@pytest.mark.ranks(2)
def test_an_error_of_any_type_on_one_rank_fails_the_call_on_all(rank):
    """Here a TypeError of the optimizer's own. Then the calls of all ranks are matched as before."""
    store, optimizer = mx.kv.create("mykv"), mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0)
    store.set_optimizer(optimizer)
    store.init("a", array(np.zeros(2, "float32")))
    held = array(np.zeros(2, "float32"))
    if rank == 0:
        optimizer.rescale_grad = None
        with pytest.raises(TypeError, match="NoneType"):
            store.push("a", array(np.ones(2, "float32")))
        optimizer.rescale_grad = 1.0
    else:
        with pytest.raises(MXNetError, match="(?s)refused by rank 0.*NoneType"):
            store.push("a", array(np.ones(2, "float32")))
            store.pull("a", out=held)
            held.wait_to_read()
        clear_errors()
    store.push("a", array(np.full(2, 10.0, "float32")))
    store.pull("a", out=held)
    assert (value(held) == -20).all()

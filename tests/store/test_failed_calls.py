"""A call of the store that fails on one worker alone, where the script catches the error: later calls work."""

from __future__ import annotations

import contextlib
import os

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import Interrupt, raising_at
from harness.support import MXNetError, array, clear_errors, mx, value
from kvstore_plugin.coordination import operation

_COUNT = 50_000  # elements of a value, so many that workers share them


def _ones(factor=1.0):
    return array(np.full(_COUNT, factor, "float32"))


def _sgd():
    return mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0)


def _pushed(store, key, rank):
    """The new value of a key after a gradient of 1 on the first worker, and of 2 on the second."""
    out = _ones(0.0)
    store.pushpull(key, _ones(rank + 1.0), out=out)
    return set(value(out).tolist())


def _make(store, method, key, arrays):
    if method == "init":
        store.init(key, arrays)
    else:
        store.broadcast(key, arrays, arrays)


def _fail_on_rank_0(store, method, key, rank):
    """Make a call with a wrong argument on rank 0, where it raises an error."""
    if rank == 0:
        with pytest.raises(TypeError):
            _make(store, method, key, "no array")
    else:
        _make(store, method, key, _ones(0.0))


@pytest.fixture
def store():
    return mx.kv.create("mykv")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["init", "broadcast"])
def test_a_key_that_is_missing_on_one_worker_changes_no_other_key(store, rank, method, gather):
    store.set_optimizer(_sgd())
    store.init("a", _ones(0.0))
    _fail_on_rank_0(store, method, "b", rank)
    assert _pushed(store, "a", rank) == {-3.0}
    for _ in range(2):
        with pytest.raises(MXNetError, match="'b' was never initialized" if rank == 0 else "Key 'b' cannot be updated"):
            _pushed(store, "b", rank)
        clear_errors()
        assert len(set(gather(str(_pushed(store, "a", rank))))) == 1
    for key in "bc":
        _make(store, method, key, _ones(0.0))
    assert [_pushed(store, key, rank) for key in "abc"] == [{-12.0}, {-3.0}, {-3.0}]
    keys = [store._optimizer.shards_of(key) for key in "abc"]
    assert len(set(gather(str(keys)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["init", "broadcast"])
def test_a_value_that_one_worker_has_not_replaced_is_an_error_until_all_have(store, rank, method):
    store.set_optimizer(_sgd())
    for key in "ab":
        store.init(key, _ones(0.0))
    assert [_pushed(store, key, rank) for key in "ab"] == [{-3.0}, {-3.0}]
    _fail_on_rank_0(store, method, "a", rank)
    clear_errors()
    for key, is_wrong in (("b", False), ("a", True), ("a", True)):
        if not is_wrong:
            assert _pushed(store, key, rank) == {-6.0}
            continue
        with pytest.raises(MXNetError, match=rf"Key 'a' cannot be updated: rank {rank} holds an array \(50000,\)"):
            _pushed(store, key, rank)
        clear_errors()
    _make(store, method, "a", _ones(0.0))
    assert [_pushed(store, key, rank) for key in "ab"] == [{-3.0}, {-9.0}]


@pytest.mark.ranks(3)
def test_a_key_that_is_missing_on_one_worker_of_a_process_set(rank):
    mykv.init()
    process_set = mykv.add_process_set([1, 2])
    if rank > 0:
        store = mykv.MyKV(process_set)
        store.set_optimizer(_sgd())
        store.init("a", _ones(0.0))
        _fail_on_rank_0(store, "init", "b", store.rank)
        assert _pushed(store, "a", store.rank) == {-3.0}
        with pytest.raises(MXNetError, match="never initialized" if rank == 1 else "rank 2 holds .*, and rank 1 does"):
            _pushed(store, "b", store.rank)
        clear_errors()
        store.init("b", _ones(0.0))
        assert [_pushed(store, key, store.rank) for key in "ab"] == [{-6.0}, {-3.0}]
    mykv.remove_process_set(process_set)


@pytest.mark.ranks(2)
def test_states_are_not_saved_while_workers_hold_different_keys(rank, tmp_path):
    store = mx.kv.create("mykv")
    store.set_optimizer(mx.optimizer.create("adam"))
    store.init("a", _ones(0.0))
    _fail_on_rank_0(store, "init", "b", rank)
    path = str(tmp_path / "states")
    for call in (store.save_optimizer_states, store.load_optimizer_states):
        with pytest.raises(MXNetError, match="the values in the store are not the same on all workers"):
            call(path)
    clear_errors()
    store.init("b", _ones(0.0))
    store.save_optimizer_states(path)
    store.pushpull(["a", "b"], [_ones(), _ones()])
    store.save_optimizer_states(path)
    store.load_optimizer_states(path)
    clear_errors()


@pytest.mark.ranks(2)
def test_an_optimizer_that_one_worker_does_not_get(rank, tmp_path):
    store = mx.kv.create("mykv")
    store.init("a", _ones(0.0))
    for shown in ("differs between ranks", r"set_optimizer\(\) calls"):  # without an earlier optimizer, and with one
        if rank == 0:
            with pytest.raises(TypeError, match="must be an mxnet"):
                store.set_optimizer("sgd")
        else:
            optimizer = _sgd()
            store.set_optimizer(optimizer)
        with pytest.raises(MXNetError, match=shown):
            _pushed(store, "a", rank)
        clear_errors()
        store.init("a", _ones(0.0))
        store.set_optimizer(_sgd())
        assert [_pushed(store, "a", rank) for _ in range(2)] == [{-3.0}, {-6.0}]


@pytest.mark.ranks(2)
def test_states_of_an_optimizer_that_one_worker_does_not_get(rank, tmp_path):
    store = mx.kv.create("mykv")
    store.init("a", _ones(0.0))
    if rank == 0:
        with pytest.raises(TypeError):
            store.set_optimizer("sgd")
    else:
        store.set_optimizer(_sgd())
    with pytest.raises(MXNetError if rank else RuntimeError, match="the store has no optimizer"):
        store.save_optimizer_states(str(tmp_path / "states"))
    store.set_optimizer(_sgd())
    store.save_optimizer_states(str(tmp_path / "states"))


@pytest.mark.ranks(2)
def test_the_same_optimizer_again_after_one_worker_did_not_get_it(rank):
    store = mx.kv.create("mykv")
    store.init("a", _ones(0.0))
    optimizer = _sgd()
    if rank == 0:
        with pytest.raises(TypeError):
            store.set_optimizer("sgd")
    else:
        store.set_optimizer(optimizer)
    store.set_optimizer(optimizer)
    assert [_pushed(store, "a", rank) for _ in range(2)] == [{-3.0}, {-6.0}]


@pytest.mark.ranks(2)
def test_a_function_that_one_worker_does_not_get(rank):
    def add(key, total, held):
        held += total

    store = mx.kv.create("mykv")
    store.init("a", _ones(1.0))
    if rank == 0:
        with pytest.raises(TypeError, match="must be a function"):
            store._set_updater("add")
    else:
        store._set_updater(add)
    with pytest.raises(MXNetError, match=r"_set_updater\(\) calls: 1"):
        _pushed(store, "a", rank)
    clear_errors()
    store.init("a", _ones(1.0))
    store._set_updater(add)
    assert _pushed(store, "a", rank) == {4.0}


@pytest.mark.ranks(2)
def test_a_wrong_gradient_in_the_first_update_fails_on_all_at_once(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_sgd())
    store.init("a", _ones(0.0))
    with pytest.raises(MXNetError, match="must be an NDArray"):
        store.push("a", "no gradient" if rank == 0 else _ones())
    assert _pushed(store, "a", rank) == {-3.0}


@pytest.mark.ranks(2)
def test_a_wrong_gradient_in_the_first_update_after_a_new_init(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_sgd())
    store.init("a", _ones(0.0))
    assert _pushed(store, "a", rank) == {-3.0}
    mykv.shutdown()
    mykv.init()
    with pytest.raises(MXNetError, match="must be an NDArray"):
        store.push("a", "no gradient" if rank == 1 else _ones())
    assert _pushed(store, "a", rank) == {-6.0}


@pytest.mark.ranks(2)
def test_an_exception_before_a_comparison_refuses_it(store, rank, monkeypatch):
    def described():
        raise Interrupt

    store.set_optimizer(_sgd())
    store.init("a", _ones(0.0))
    expected = pytest.raises(MXNetError, match="refused by rank 0: .*Interrupt") if rank else pytest.raises(Interrupt)
    with monkeypatch.context() as patch, expected:
        if rank == 0:
            patch.setattr(store._values, "described", described)
        store.push("a", _ones())
    assert _pushed(store, "a", rank) == {-3.0}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differ, number", [(False, 0), (True, 0), (True, 1)])
def test_an_interrupted_comparison_goes_on_in_the_next_update(rank, monkeypatch, differ, number):
    """An exception in the wait for exchange `number` of the comparison, whose second exchange shows what differs."""
    store = mx.kv.create("mykv")
    store.set_optimizer(_sgd())
    store.init("a", _ones(0.0))
    if differ:
        _fail_on_rank_0(store, "init", "b", rank)
    waits = []

    def wait(*arguments):
        waits.append(arguments)
        if len(waits) == number + 1:
            raise Interrupt
        original(*arguments)

    original = operation.process.wait
    if rank == 0:
        with monkeypatch.context() as patch, pytest.raises(Interrupt):
            patch.setattr(operation.process, "wait", wait)
            store.push("a", _ones())
    else:
        with pytest.raises(MXNetError, match="was refused by rank 0: Interrupt"):
            store.push("a", _ones())
            out = _ones()
            store.pull("a", out)
            value(out)
    clear_errors()
    store.init("a", _ones(0.0))
    for times in (1, 2):
        assert _pushed(store, "a", rank) == {-3.0 * times}
    clear_errors()


_CALLS = {
    "pushpull": lambda store, one: store.pushpull("k", one),
    "pushpull of keys": lambda store, one: store.pushpull(["k", "l"], [one, _ones()]),
    "push": lambda store, one: store.push("k", one),
    "broadcast": lambda store, one: store.broadcast("k", one, one),
    "init": lambda store, one: store.init("k", one),
}


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("name", _CALLS)
def test_an_exception_of_a_signal_handler_at_any_line_leaves_the_workers_in_step(name, updates, rank, gather):
    """Each line of store/ raises once on one worker; then both workers' calls are still matched."""
    if updates and name in ("broadcast", "init"):
        pytest.skip("these calls do not update")
    folders = (os.path.join(os.path.dirname(mykv.__file__), "store"),)
    call = _CALLS[name]
    number = 2  # the first two lines are the beginning of the call, where Python runs no signal handler
    while True:
        store = mx.kv.create("mykv")
        store.init(["k", "l"], [_ones(0.0), _ones(0.0)])
        if updates:
            store.set_optimizer(_sgd())
            store.pushpull(["k", "l"], [_ones(0.0), _ones(0.0)])
        raised = []
        with contextlib.suppress(Interrupt, MXNetError):
            if rank == 1:
                with raising_at(number, folders) as raised:
                    call(store, _ones())
            else:
                call(store, _ones())
        clear_errors()
        places = gather(raised)
        if not places[1]:
            break
        for key in "kl":
            store.init(key, _ones(0.0))
            assert _pushed(store, key, rank) == ({-3.0} if updates else {3.0}), places
        clear_errors()
        number += 1
    assert number > 8

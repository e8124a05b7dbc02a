"""Optimizers that wait while they update: workers that push keys in different orders get an error instead of
hanging."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, mx, value

_NAMES = [name for name in ("lars", "lbsgd") if name in mx.optimizer.Optimizer.opt_registry]
_LIMIT = 20.0  # seconds; a deadlock would take forever
_every = pytest.mark.parametrize("name", _NAMES)


def _store(name: str):
    """A store with two values, which different workers own."""
    store = mx.kv.create("mykv")
    for key in "ab":
        store.init(key, array(np.ones((40, 30), "float32")))
    store.set_optimizer(mx.optimizer.create(name, learning_rate=0.1))
    return store


def _push(store, key: str) -> None:
    store.push(key, array(np.ones((40, 30), "float32")))


def _pulled(store, key: str) -> np.ndarray:
    out = array(np.zeros((40, 30), "float32"))
    store.pull(key, out)
    return value(out)


def _next_pushes_work(store, gather) -> None:
    clear_errors()
    for key in "ab":
        store.init(key, array(np.ones((40, 30), "float32")))
        before = _pulled(store, key)
        _push(store, key)
        after = _pulled(store, key)
        assert (before != after).any()
        assert len({one.tobytes() for one in gather(after)}) == 1


@pytest.mark.ranks(3, long=(2,))
@_every
def test_other_orders_are_an_error_that_shows_both_keys(name, rank, size, gather):
    store = _store(name)
    begin = time.monotonic()
    for key in "ab" if rank != size - 1 else "ba":
        with pytest.raises(MXNetError) as failure:
            _push(store, key)
        for text in ("the update of key 'a'", "the update of key 'b'", f"rank {size - 1}", "rank 0"):
            assert text in str(failure.value)
    assert time.monotonic() - begin < _LIMIT
    gather("all have their errors")
    _next_pushes_work(store, gather)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@_every
def test_other_orders_on_two_hosts(name, rank, size, gather):
    store = _store(name)
    for key in "ab" if rank != 3 else "ba":
        with pytest.raises(MXNetError, match="the update of key 'a'"):
            _push(store, key)
    _next_pushes_work(store, gather)


@pytest.mark.ranks(2)
@_every
def test_a_list_of_keys_in_another_order(name, rank, gather):
    store = _store(name)
    gradients = [array(np.ones((40, 30), "float32")) for _ in "ab"]
    with pytest.raises(MXNetError, match="the update of key"):
        store.push(["a", "b"] if rank else ["b", "a"], gradients)
    _next_pushes_work(store, gather)


@pytest.mark.ranks(2)
@_every
def test_wrong_arguments_on_one_worker_reach_the_other_and_the_next_push_works(name, rank, gather):
    store = _store(name)
    with pytest.raises(ValueError if rank else MXNetError, match="" if rank else "rank 1"):
        store.push("a", array(np.ones(3 if rank else (40, 30), "float32")))
    _next_pushes_work(store, gather)


@pytest.mark.ranks(2)
@_every
def test_a_gradient_that_carries_an_error(name, rank, gather):
    from harness.support import fail

    store = _store(name)
    gradient = array(np.ones((40, 30), "float32"))
    if rank:
        fail(gradient)
    try:
        store.push("a", gradient)
        with pytest.raises(MXNetError):
            _pulled(store, "a")
    except MXNetError:
        pass  # on the worker whose share it is
    _next_pushes_work(store, gather)


@pytest.mark.ranks(2)
@_every
def test_another_optimizer_on_one_worker_is_an_error_and_no_hang(name, rank, gather):
    store = _store(name if rank else "sgd")
    begin = time.monotonic()
    with pytest.raises(MXNetError, match="Set the same optimizer on all workers"):
        _push(store, "a")
        _pulled(store, "a")
    assert time.monotonic() - begin < _LIMIT
    clear_errors()

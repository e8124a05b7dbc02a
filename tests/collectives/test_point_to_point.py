"""send and recv: values, order, gradients, and errors on both sides."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, mx, numbers, value
from mxnet import autograd

_TWO_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_what_arrives_is_what_was_sent_in_order(rank, dtype):
    sent = [numbers(number, (3, 5), dtype) for number in range(6)]
    if rank == 0:
        ends = [mykv.send(array(one), 1, name="x") for one in sent]
        assert [end.asnumpy().tolist() for end in ends] == [[0]] * 6
    else:
        for one in sent:
            assert (value(mykv.recv(array(np.zeros_like(one)), 0, name="x")) == one).all()


@pytest.mark.ranks(2, long=(3, 4))
def test_both_directions_at_once_and_names_in_any_order(rank, size):
    pair = mykv.global_process_set if size == 2 else mykv.add_process_set([0, size - 1])
    other = size - 1 - rank
    if pair.included():
        like = array(np.zeros((2, 3), "float32"))
        names = ["a", "b"] if rank == 0 else ["b", "a"]
        for name in names:
            mykv.send(array(numbers(rank + ord(name), (2, 3))), other, name, process_set=pair)
        for name in names:
            received = mykv.recv(like, other, name, process_set=pair)
            assert (value(received) == numbers(other + ord(name), (2, 3))).all()
        mx.nd.waitall()
    if size > 2:
        mykv.remove_process_set(pair)


@pytest.mark.ranks(2, env=_TWO_HOSTS)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_the_gradient_comes_back(rank, grad_req):
    x = array(numbers(1, (4, 3)))
    x.attach_grad(grad_req=grad_req)
    weight = array(numbers(2, (4, 3)))
    for _ in range(2):
        with autograd.record():
            if rank == 0:
                ends = [mykv.send(x * factor, 1, "x") for factor in (1, 2)]
            else:
                received = [mykv.recv(x, 0, "x") for _ in range(2)]
                ends = [(one * weight).sum() for one in received]
        autograd.backward(ends[:: 1 - 2 * rank])  # the ranks go through them in different orders
    expected = 3 * numbers(2, (4, 3)) * (2 if grad_req == "add" else 1)
    assert (value(x.grad) == (expected if rank == 0 else 0)).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mistake", ["shape", "dtype", "recorded"])
def test_both_ranks_get_the_error_of_calls_that_differ(rank, mistake):
    x = array(np.ones((2, 3), "float64" if mistake == "dtype" and rank else "float32"))
    if mistake == "shape" and rank:
        x = x.reshape((3, 2))
    x.attach_grad()
    scope = autograd.record() if mistake == "recorded" and rank else autograd.pause()
    with pytest.raises(MXNetError, match="send from rank 0 to rank 1"), scope:
        result = mykv.send(x, 1, "x") if rank == 0 else mykv.recv(x, 0, "x")
        result.wait_to_read()
    clear_errors()
    assert mykv.allreduce(array(np.ones(1, "float32"))).asnumpy() == 1  # the ranks continue together


@pytest.mark.ranks(2)
def test_a_refusal_reaches_the_other_rank(rank):
    if rank == 0:
        with mx.util.np_shape(True):
            empty = mx.nd.zeros((0, 2))
        with pytest.raises(ValueError, match="has no elements"):
            mykv.send(empty, 1, "x")
    else:
        with pytest.raises(MXNetError, match="The tensor of send has no elements"):
            mykv.recv(array(np.ones((2, 2), "float32")), 0, "x").wait_to_read()
        clear_errors()


@pytest.mark.ranks(1, 2, 3)
def test_wrong_ranks(rank, size):
    x = array(np.ones(2, "float32"))
    if size != 2:
        with pytest.raises(ValueError, match=f"send needs a process set of two ranks.* has {size}"):
            mykv.send(x, 0)
        return
    with pytest.raises(ValueError, match=f"recv: rank {rank} is this rank"):
        mykv.recv(x, rank)
    with pytest.raises(ValueError, match="7"):
        mykv.send(x, 7)
    with pytest.raises(TypeError):
        mykv.send(x, "1")


@pytest.mark.ranks(2, env={"MYKV_STALL_ABORT_S": "3", "MYKV_STALL_WARN_S": "1"})
def test_a_send_without_its_recv_is_named_and_ends(rank, gather):
    if rank == 0:
        with pytest.raises(MXNetError, match="send from rank 0 to rank 1/lonely"):
            mykv.send(array(np.ones(2, "float32")), 1, "lonely").wait_to_read()
        clear_errors()
    gather("the other rank has waited")

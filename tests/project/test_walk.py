"""A warm step stays readable: it calls a limited number of functions in a limited number of files."""

from __future__ import annotations

import gc
import os
import sys

import kvstore_plugin as mykv
import pytest
from harness.support import IS_2, array, dense_network, mx, numbers

_PACKAGE = os.path.dirname(mykv.__file__) + os.sep
_MXNETS = os.path.join("mxnet", "gluon", "trainer.py")


def _walk(call):
    """The calls in the package and in MXNet's Trainer: how many, in how many files, and the ways between these."""
    files = []

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and (name.startswith(_PACKAGE) or name.endswith(_MXNETS)):
            files.append(name)

    gc.disable()  # it would call what forgets the arrays of earlier tests
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    hops = sum(one != other for one, other in zip(files, files[1:]))
    distinct = len(set(files))
    return {"calls": len(files), "files": distinct, "hops": hops, "returns to a file left before": hops + 1 - distinct}


def _warm(trainer, net, rank):
    for _ in range(12):  # in the first steps that have ended, equal gradients of all workers are looked for
        with mx.autograd.record():
            loss = (net(array(numbers(rank, (4, 6)))) ** 2).sum()
        loss.backward()
        yield lambda: trainer.step(4)


@pytest.mark.skipif(IS_2, reason="the numbers are those with MXNet 1.9")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind, most",
    [
        ("DistributedTrainer", (50, 12, 25, 12)),
        ("gluon.Trainer", (65, 13, 28, 14)),
    ],
)
def test_a_warm_step_is_short_to_read(rank, kind, most):
    gc.collect()  # networks of earlier tests
    net = dense_network(1)
    if kind == "DistributedTrainer":
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    else:
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="mykv", update_on_kvstore=False)
    for step in _warm(trainer, net, rank):
        walked = _walk(step)
        mx.nd.waitall()
    assert all(count <= bound for count, bound in zip(walked.values(), most)), walked


@pytest.mark.ranks(2)
def test_a_sum_is_short_to_read(rank):
    store, tensor = mx.kv.create("mykv"), array(numbers(rank, (4,)))
    store.pushpull(0, tensor)
    walked = _walk(lambda: store.pushpull(0, tensor))
    mx.nd.waitall()
    assert all(count <= bound for count, bound in zip(walked.values(), (15, 6, 10, 5))), walked

"""An exception of a signal handler at any line of a call of several operations, which the script catches.

The handler is played by a trace function that raises on one rank. All ranks get an error or a result, none waits, and
the next call works.
"""

from __future__ import annotations

import os
import tempfile
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import Interrupt, raising_at
from harness.marks import long
from harness.support import MXNetError, array, checksum, clear_errors, dense_network, mx
from mxnet import autograd

_PACKAGE = os.path.dirname(mykv.__file__)
_LIMIT = 20.0  # seconds, on a busy machine


def _try_all_lines(make, rank, gather, folders, first=0, stride=1, most=1000):
    """Let each line raise once that runs below the folders in a call that `make` returns, or some of the lines.

    `make` returns the call, and the network whose weights a call may leave different, or None.
    """
    folders = tuple(os.path.join(_PACKAGE, one) for one in folders)
    mykv.init()
    for number in range(first, first + stride * most, stride):
        call, net = make()
        began = time.monotonic()
        raised = []
        if rank == 1:
            with raising_at(number, folders) as raised:
                is_well = _is_well(call, Interrupt)
        else:
            is_well = _is_well(call)
        # A rank that has left out a call before its turn meets the other rank there: both have an error, once.
        for attempt in range(2):
            try:
                mykv.barrier()
                break
            except MXNetError:
                assert attempt == 0, raised
        places, well = zip(*gather((raised, is_well)))
        assert time.monotonic() - began < _LIMIT, places
        if not places[1]:
            assert all(well)
            break
        assert all(well) or not well[1], places
        _goes_on(call, net, gather, places)
    assert number > 10


def _is_well(call, *others):
    try:
        call()
        mx.nd.waitall()
    except (MXNetError, *others):
        clear_errors()
        return False
    return True


def _goes_on(call, net, gather, places):
    """The next call works; or it is an error on all ranks, because weights may differ, and broadcasting mends that."""
    well = set(gather(_is_well(call)))
    if net is None:
        assert well == {True}, places
        return
    assert len(well) == 1, places
    if well == {False}:
        mykv.broadcast_parameters(net.collect_params())
        call()
    assert len(set(gather(checksum(net)))) == 1, places


_ROWS = np.ones((2, 3), "float32")
_CALLS = {
    "allgather": lambda: mykv.allgather(array(_ROWS)).asnumpy(),
    "grouped_allgather": lambda: [one.asnumpy() for one in mykv.grouped_allgather([array(_ROWS), array(_ROWS)])],
    "alltoall": lambda: mykv.alltoall(array(_ROWS), splits=[2, 0])[0].asnumpy(),
    "allgather_object": lambda: mykv.allgather_object("object"),
    "broadcast_object": lambda: mykv.broadcast_object("object", root_rank=1),
}


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("call", [long(one) if one == "allgather" else one for one in _CALLS])
def test_calls_that_wait(call, rank, gather):
    _try_all_lines(lambda: (_CALLS[call], None), rank, gather, ["coordination", "collectives"])


def _trained():
    """A trainer after a step with the optimizer on the store, its network, and a function that makes a step."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, update_on_kvstore=True)

    def step():
        with autograd.record():
            loss = (net(array(np.ones((4, 6), "float32"))) ** 2).sum()
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()

    step()
    return trainer, net, step


def _constructing():
    def construct():
        mykv.DistributedTrainer(dense_network(seed=0).collect_params(), "sgd", update_on_kvstore=True)
        mx.nd.waitall()

    return construct, None


def _broadcasting():
    net = dense_network(seed=0)
    return lambda: mykv.broadcast_parameters(net.collect_params(), root_rank=0), None


def _broadcasting_states():
    trainer, _, _ = _trained()
    return lambda: mykv.broadcast_states(trainer), None


def _checkpointing():
    trainer, _, _ = _trained()

    def checkpoint():
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_states(os.path.join(folder, "states"))
            mykv.barrier()
            trainer.load_states(os.path.join(folder, "states"))
            mykv.barrier()

    return checkpoint, None


def _averaging():
    values = [array(_ROWS), array(_ROWS)]

    def average():
        mykv.sync_aux_params(values)
        mykv.sync_aux_params(values, root_rank=1)

    return average, None


def _stepping():
    _, net, step = _trained()
    return step, net


# What makes the call, and the files in which a line raises.
_OTHER_CALLS = {
    "DistributedTrainer": (_constructing, ["training", "gradients"]),
    "broadcast_parameters": (_broadcasting, ["parameters"]),
    "broadcast_states": (_broadcasting_states, ["training/broadcast_states.py", "parameters"]),
    "save_states": (_checkpointing, ["sharded_optimizer/checkpoint.py"]),
    "sync_aux_params": (_averaging, ["parameters/aux_params.py"]),
    "step": (_stepping, ["sharded_optimizer/optimizer.py", "gradients/dense_reducer.py"]),
}
_PARTS = 8


@pytest.mark.ranks(2, timeout=170)
@pytest.mark.parametrize("call", _OTHER_CALLS)
def test_some_lines_of_calls_of_several_meetings(call, rank, gather):
    """Where a meeting of the call is not refused, the workers find out within seconds that they wait for each other."""
    make, folders = _OTHER_CALLS[call]
    _try_all_lines(make, rank, gather, folders, first=11, stride=37, most=4)


@pytest.mark.long  # together they take many minutes
@pytest.mark.ranks(2, timeout=170)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("call", _OTHER_CALLS)
def test_all_lines_of_calls_of_several_meetings(call, part, rank, gather):
    make, folders = _OTHER_CALLS[call]
    _try_all_lines(make, rank, gather, folders, first=part, stride=_PARTS)

"""Many operations that fail at once, which MXNet's engine by itself does not bear: it changes its list of errors
without a lock."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import pytest
from harness.support import array, clear_errors, mx, np
from kvstore_plugin.compat import engine_errors
from kvstore_plugin.compat import mxnet as mxnet_compat
from kvstore_plugin.world import core

_ROUNDS, _KEYS = 40, 40


@pytest.mark.ranks(2)
def test_many_operations_fail_and_the_process_goes_on(rank):
    """On threads of the engine and on the core's, with operations of MXNet behind them that end on others.

    Chance decides whether they meet: without the mend one in some fifty of these tests would crash. That they do not
    end at the same time is shown in test_gpu_bridge.py.
    """
    mykv.init()
    for number in range(_ROUNDS):
        arrays = [array(np.ones(8 + rank, "float32")) for _ in range(_KEYS)]
        later = []
        for key, one in enumerate(arrays):
            mykv.allreduce_(one, name=f"{number} {key}")
            later.append(one + 1)
        for one in later:
            with pytest.raises(mx.MXNetError, match="differs between ranks"):
                one.wait_to_read()
        clear_errors()
    assert mykv.allreduce(array(np.ones(3, "float32")), average=False).asnumpy().tolist() == [2.0] * 3


@pytest.mark.ranks(1)
def test_room_for_errors_leaves_errors_of_others_as_they_are(rank, monkeypatch):
    mykv.init()
    other = array(np.zeros(1, "float32"))
    core.load().push_failing(other.handle.value)
    monkeypatch.setattr(engine_errors, "_made", False)
    calls = []
    push = core.load().push_failing
    monkeypatch.setattr(core.load(), "push_failing", lambda handle: (calls.append(handle), push(handle)))
    began = time.monotonic()
    engine_errors.make_room(mxnet_compat)
    seconds = time.monotonic() - began
    assert len(calls) == engine_errors._ERRORS and other.handle.value not in calls
    assert seconds < 2, seconds
    engine_errors.make_room(mxnet_compat)
    assert len(calls) == engine_errors._ERRORS
    with pytest.raises(mx.MXNetError, match="an error that makes room"):
        other.wait_to_read()
    mx.nd.waitall()  # which finds nothing more

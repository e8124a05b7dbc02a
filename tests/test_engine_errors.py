"""Many operations that fail at once, which MXNet's engine by itself does not bear: it changes its list of errors
without a lock."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import pytest
from kvstore_plugin import core, engine_errors, mxnet_compat
from support import array, clear_errors, mx, np

_ROUNDS, _KEYS = 40, 40


@pytest.mark.ranks(2)
def test_many_operations_fail_and_the_process_goes_on(rank):
    """On threads of the engine and on the core's, with operations of MXNet behind them that end on others."""
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
    monkeypatch.setattr(engine_errors, "_made", False)
    mykv.init()
    other = mx.nd.zeros(1)
    core.load().push_failing(other.handle.value)
    began = time.monotonic()
    engine_errors.make_room(mxnet_compat)
    assert time.monotonic() - began < 1
    with pytest.raises(mx.MXNetError, match="an error to make room for others"):
        other.wait_to_read()
    mx.nd.waitall()  # which finds nothing more

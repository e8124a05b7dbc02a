"""Views of memory end on threads that Python does not know, also while Python exits."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from pathlib import Path

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import mx
from kvstore_plugin.compat.mxnet import view_of_memory

_EXITS = f"""
import ctypes, sys, time
import kvstore_plugin as mykv
import mxnet as mx
import numpy as np

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from compiled import testing

mykv.init()
holder = mx.nd.ndarray if mx.__version__.startswith("1.") else mx.dlpack
deleter = ctypes.cast(holder.dl_managed_tensor_deleter, ctypes.c_void_p).value
owner = np.zeros(3)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
view = holder.DLManagedTensor()
view.manager_ctx = id(owner)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(view))


class Slow:
    given = testing.call_later, deleter, ctypes.addressof(view), time.sleep, print

    def __del__(self):  # when Python drops the names of the script, behind all exit handlers
        call_later, deleter, view, sleep, print = self.given
        call_later(deleter, view, 100)
        sleep(0.5)  # without Python's lock, which the thread may ask for
        print("was dropped")


slow = Slow()
"""


def test_a_view_may_end_while_python_exits():
    done = subprocess.run([sys.executable, "-c", _EXITS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "was dropped" in done.stdout, done


class _Memory(np.ndarray):
    """An array of numpy that weak references may refer to."""


@pytest.mark.ranks(1)
def test_memory_comes_back_after_its_views_have_ended(rank):
    """More of them at once than Python takes calls from other threads."""
    mykv.init()
    memory = [np.zeros(3).view(_Memory) for _ in range(100)]
    watched = [weakref.ref(one) for one in memory]
    views = [view_of_memory(one, mx.nd.zeros(1)) for one in memory]
    mx.nd.waitall()
    del memory
    gc.collect()
    assert all(one() is not None for one in watched)
    views.clear()
    mx.nd.waitall()
    last = time.monotonic() + 10
    while any(one() is not None for one in watched) and time.monotonic() < last:
        time.sleep(0.01)
    assert not any(one() is not None for one in watched)

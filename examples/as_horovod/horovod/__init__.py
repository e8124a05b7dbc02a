"""A package `horovod` that is mykv, for programs that import Horovod and cannot be changed.

Put the folder above this package on PYTHONPATH:
``PYTHONPATH=examples/as_horovod mykvrun -n 2 python -m sockeye.train ...``. It has what programs for MXNet import:
`horovod.mxnet` with its submodules, and the parts of `horovod.common` that say what the build has. Horovod itself must
not be installed in the same environment.
"""

__version__ = "0.28.1"  # the release whose names these are

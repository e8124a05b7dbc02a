"""A package `horovod` that is mykv, for programs that import Horovod and are not changed: ``mykvrun --as horovod``.

mykvrun puts the folder above this package on PYTHONPATH, before an installed Horovod. The package has what programs for
MXNet import: `horovod.mxnet` with its submodules, `horovod.run`, and the parts of `horovod.common` that say what the
build has.
"""

from .runner import run  # noqa: F401

__version__ = "0.28.1"  # the release whose names these are

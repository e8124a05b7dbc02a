"""A package `horovod` over mykv, for unchanged programs that import Horovod: ``mykvrun --as horovod``.

mykvrun puts the folder above this package on PYTHONPATH, before an installed Horovod. This package has the modules that
programs for MXNet import: `horovod.mxnet` with its submodules, `horovod.run`, and the parts of `horovod.common` about
features of the build.
"""

from .runner import run  # noqa: F401

__version__ = "0.28.1"  # the release of Horovod with these names

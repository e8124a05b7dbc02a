"""Imports MXNet without the optional scipy and scikit-learn, which take a quarter of the import time.

MXNet requires neither. A script that imports them itself gets them.
"""

import sys


class _Without:
    """A finder of modules, the first in `sys.meta_path`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Refuse these two while MXNet is being imported; find nothing else."""
        if name in ("scipy", "sklearn"):
            mxnet = sys.modules.get("mxnet")
            if mxnet is not None and getattr(mxnet.__spec__, "_initializing", False):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, _Without)

"""Says in one sentence why this Python cannot make the environment that `make` needs, or says nothing.

It must run on every Python 3, since the wrong version is the first thing that it looks for.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def problem():
    """What is wrong with this Python and the remedy, in one sentence; None if it will do."""
    version = sys.version_info[:2]
    if not (3, 8) <= version <= (3, 12):
        return "%s is Python %d.%d, for which there is no MXNet: name a Python 3.8 to 3.12, as in make PYTHON=python3.11." % (
            (sys.executable,) + version
        )
    missing = []
    if importlib.util.find_spec("ensurepip") is None and shutil.which("virtualenv") is None:
        missing.append(("the modules for virtual environments", "python%d.%d-venv" % version))
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        missing.append(("the header files", "python%d.%d-dev" % version))
    if not missing:
        return None
    return "%s comes without %s: install them (on Debian: apt-get install %s)." % (
        sys.executable,
        " and ".join(what for what, _ in missing),
        " ".join(package for _, package in missing),
    )


sys.exit(problem())

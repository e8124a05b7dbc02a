"""Says in one sentence why this Python cannot make the environment that `make` needs, or says nothing.

It must run on every Python, since the wrong version is the first thing that it looks for.
"""

import os
import sys
import sysconfig


def can_make_environments():
    """Whether venv, which Debian packs apart from Python, or virtualenv is there."""
    from shutil import which

    try:
        from ensurepip import version  # noqa: F401
    except ImportError:
        return which("virtualenv") is not None
    return True


def problem():
    """What is wrong with this Python and the remedy, in one sentence; None if it will do."""
    version = sys.version_info[:2]
    if not (3, 8) <= version <= (3, 12):
        return "%s is Python %d.%d, for which there is no MXNet: name a Python 3.8 to 3.12, as in make PYTHON=python3.11." % (
            (sys.executable,) + version
        )
    missing = []
    if not can_make_environments():
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

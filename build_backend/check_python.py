"""Checks whether this Python can create the environment that `make` needs; prints one message if not.

It must run on every Python, since it first checks the version. The build backend uses that check too.
"""

import os
import sys
import sysconfig


def can_make_environments():
    """Whether venv, which Debian packages separately, or virtualenv is installed."""
    from shutil import which

    try:
        from ensurepip import version  # noqa: F401
    except ImportError:
        return which("virtualenv") is not None
    return True


def wrong_version(remedy):
    """Message that this Python is too old or too new, with the remedy; None if it is neither."""
    version = sys.version_info[:2]
    if (3, 8) <= version <= (3, 14):
        return None
    return "{} is Python {}.{}, but mykv and MXNet need 3.8 to 3.14: {}.".format(
        sys.executable, version[0], version[1], remedy
    )


def problem():
    """Message about this Python's problem, with the remedy; None if it is suitable."""
    wrong = wrong_version("name another, as in make PYTHON=python3.11")
    if wrong:
        return wrong
    version = sys.version_info[:2]
    missing = []
    if not can_make_environments():
        missing.append(("the modules for virtual environments", "venv"))
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        missing.append(("the header files", "dev"))
    if not missing:
        return None
    return "{} comes without {}: install them (on Debian: apt-get install {}).".format(
        sys.executable,
        " and ".join(what for what, _ in missing),
        " ".join("python{}.{}-{}".format(version[0], version[1], part) for _, part in missing),
    )


if __name__ == "__main__":
    sys.exit(problem())

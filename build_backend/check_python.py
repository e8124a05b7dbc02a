"""Says in one message why this Python cannot make the environment that `make` needs, or says nothing.

It must run on every Python, since the wrong version is the first thing that it looks for. The build backend asks it for
that too.
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


def wrong_version(remedy):
    """That this Python is too old or too new, with the remedy, in one message; None if it is neither."""
    version = sys.version_info[:2]
    if (3, 8) <= version <= (3, 14):
        return None
    return "{} is Python {}.{}, but mykv and MXNet need 3.8 to 3.14: {}.".format(
        sys.executable, version[0], version[1], remedy
    )


def problem():
    """What is wrong with this Python and the remedy, in one message; None if it will do."""
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

"""What MXNet needs of numpy: the name numpy.bool, and a release before 2."""

from __future__ import annotations

import re
import sys


def release() -> tuple[int, int]:
    """Major and minor number of the numpy that is imported here."""
    import numpy

    major, minor = (int(number) for number in re.findall(r"\d+", numpy.__version__)[:2])
    return major, minor


def put_bool_back() -> None:
    """Put numpy.bool back, which MXNet uses and numpy 1.24 to 1.26 do not have.

    MXNet requires numpy<1.24 for that reason, but there is no such numpy for Python 3.12.
    """
    import numpy

    if (1, 24) <= release() < (2, 0) and "bool" not in vars(numpy):
        numpy.bool = bool


def is_too_new() -> bool:
    """Whether MXNet's import fails with this numpy, whatever is put back."""
    return release() >= (2, 0)


def too_new() -> ImportError:
    """The error for a numpy that is too new."""
    import numpy

    return ImportError(f"numpy {numpy.__version__} is too new for MXNet: {remedy()}.", name="mxnet")


def remedy() -> str:
    """The command that installs a numpy that MXNet can use."""
    return "pip install 'numpy<2'" if sys.version_info >= (3, 12) else "pip install 'numpy<1.24'"

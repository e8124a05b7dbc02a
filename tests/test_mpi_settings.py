"""Settings of MPI: set at import unless the user did, and named where they come too late."""

from __future__ import annotations

import pytest
from kvstore_plugin import mpi_settings

_YIELD = "OMPI_MCA_mpi_yield_when_idle"

_PRINT = f"""
import os
import kvstore_plugin as mykv
mykv.init()
print("value", os.environ.get("{_YIELD}"))
"""


def test_import_sets_what_the_user_has_not_set(mpirun):
    assert "value 1" in mpirun(0, _PRINT, env={_YIELD: None}).stdout


def test_what_the_user_set_stays(mpirun):
    assert "value 0" in mpirun(0, _PRINT, env={_YIELD: "0"}).stdout


@pytest.mark.parametrize("line, kept", [("mpi_yield_when_idle = 0", True), ("# mpi_yield_when_idle = 0", False)])
def test_the_users_file_of_parameters_counts_too(tmp_path, monkeypatch, line, kept):
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"btl_tcp_links=2\n{line}\n")
    monkeypatch.setattr(mpi_settings, "_initialized", lambda: False)
    environment = {"HOME": str(tmp_path)}
    mpi_settings.apply(environment)
    assert (_YIELD not in environment) == kept


_LATE = """
import logging
logging.basicConfig()
from mpi4py import MPI
import kvstore_plugin as mykv
mykv.init()
"""


def test_one_line_names_them_where_mpi_was_initialized_before(mpirun):
    result = mpirun(2, _LATE, env={_YIELD: None, "MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0, result.text
    lines = [line for line in result.text.splitlines() if "initialized before" in line]
    if "Open MPI" in _library(mpirun):
        assert len(lines) == 1 and f"{_YIELD}=1" in lines[0], result.text
    else:
        assert not lines, result.text


def _library(mpirun) -> str:
    return mpirun(0, "from mpi4py import MPI; print(MPI.Get_library_version())").stdout


def test_nothing_is_said_where_they_were_set(mpirun):
    result = mpirun(2, _LATE, env={_YIELD: "1", "MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0 and "initialized before" not in result.text, result.text

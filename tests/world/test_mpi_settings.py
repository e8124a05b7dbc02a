"""Settings of MPI: set at import unless the user did, and named where they come too late."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from harness.world_alone import HEAD
from kvstore_plugin.world import mpi_settings
from kvstore_plugin.world.launch_checks import parse_version

_YIELD = "OMPI_MCA_mpi_yield_when_idle"
_OF_INTEL = "I_MPI_WAIT_MODE"

_PRINT = f"""
import os
import kvstore_plugin as mykv
mykv.init()
print("values", os.environ.get("{_YIELD}"), os.environ.get("{_OF_INTEL}"))
"""


def test_import_sets_what_the_user_has_not_set(mpirun):
    assert "values 1 1" in mpirun(0, _PRINT, env={_YIELD: None, _OF_INTEL: None}).stdout


def test_what_the_user_set_stays(mpirun):
    assert "values 0 0" in mpirun(0, _PRINT, env={_YIELD: "0", _OF_INTEL: "0"}).stdout


@pytest.mark.parametrize("line, kept", [("mpi_yield_when_idle = 0", True), ("# mpi_yield_when_idle = 0", False)])
def test_the_users_file_of_parameters_counts_too(tmp_path, monkeypatch, line, kept):
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"btl_tcp_links=2\n{line}\n")
    monkeypatch.setattr(mpi_settings, "_initialized", lambda: False)
    environment = {"HOME": str(tmp_path)}
    mpi_settings.apply(environment)
    assert (_YIELD not in environment) == kept


@pytest.mark.parametrize("outlives", [False, True])
def test_only_a_job_that_outlives_its_processes_is_finalized_without_the_launchers_barrier(monkeypatch, outlives):
    monkeypatch.setattr(mpi_settings, "_initialized", lambda: False)
    environment = {"OMPI_MCA_mpi_ft_enable": "1"} if outlives else {}
    mpi_settings.apply(environment)
    assert ("OMPI_MCA_async_mpi_finalize" in environment) == outlives


_LATE = """
import logging
logging.basicConfig()
from mpi4py import MPI
import kvstore_plugin as mykv
mykv.init()
"""


def test_one_line_names_them_where_mpi_was_initialized_before(mpirun):
    result = mpirun(2, _LATE, env={_YIELD: None, _OF_INTEL: None, "MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0, result.text
    lines = [line for line in result.text.splitlines() if "initialized before" in line]
    mpi = parse_version(mpirun(0, "from mpi4py import MPI; print(MPI.Get_library_version())").stdout)[0]
    expected = {"Open MPI": f"{_YIELD}=1", "Intel MPI": f"{_OF_INTEL}=1"}.get(mpi)
    if expected is None:  # it needs none
        assert not lines, result.text
    else:
        assert len(lines) == 1 and f"set {expected}." in lines[0], result.text


def test_nothing_is_said_where_they_were_set(mpirun):
    result = mpirun(2, _LATE, env={_YIELD: "1", _OF_INTEL: "1", "MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0 and "initialized before" not in result.text, result.text


_SHARED_MEMORY = Path("/dev/shm")
_ALONE = f"""{HEAD}
mykv.init()
if os.fork() == 0:
    sys.exit(0)
os.wait()
print("alone", os.environ.get("OMPI_MCA_btl"), flush=True)
"""
_CHILD = """
from mpi4py import MPI
import numpy as np
parent = MPI.Comm.Get_parent()
parent.Send(np.ones(100000), 0)
parent.Disconnect()
"""
_SPAWNING = f"""{HEAD}
mykv.init()
from mpi4py import MPI
child = MPI.COMM_SELF.Spawn(sys.executable, ["-c", {_CHILD!r}])
got = np.zeros(100000)
child.Recv(got, 0)
child.Disconnect()
print("sum", got.sum())
"""


_ENDED = f"{_ALONE}os.kill(os.getpid(), signal.SIGTERM)"


def _files():
    return {path for pattern in ("sm_segment.*", "mykv-*") for path in _SHARED_MEMORY.glob(pattern)}


@pytest.mark.skipif(not _SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
@pytest.mark.parametrize(
    "script, output, code",
    [(_ENDED, "alone None", -15), long(_ALONE, "alone None", 0), long(_SPAWNING, "sum 100000.0", 0)],
    ids=["ended", "alone", "spawning"],
)
def test_a_process_without_a_launcher_leaves_no_file_in_dev_shm(mpirun, script, output, code):
    """Also if a signal ends it."""
    if not launcher.is_open_mpi():
        pytest.skip("only Open MPI leaves a file")
    before = _files()
    as_root = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = mpirun(0, script, env={"OMPI_MCA_btl_sm_backing_directory": None, **as_root})
    assert result.code == code and output in result.stdout, result.text
    assert not _files() - before, result.text
    assert "backing" not in result.stderr and "segment" not in result.stderr, result.text

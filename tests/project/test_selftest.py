"""python -m kvstore_plugin.selftest: a report alone and under mpirun, even of a broken installation."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
from pathlib import Path

import pytest
from harness.marks import long

_NAMES = (
    "kvstore_plugin",
    "Python",
    "numpy",
    "MXNet",
    "kvstore_plugin._core",
    "MPI built against",
    "MPI loaded",
    "kernels",
    "mpi4py",
    "CPU",
    "shared memory",
    "host 0",
    "transport host",
    "transport mpi",
)
_MEASURED = ("allreduce of 4 KB", "allreduce of 64 MB")


def _copy_without_core(folder: Path) -> None:
    """Copy the package, so that it finds no core, the installed one neither."""
    package = Path(importlib.util.find_spec("kvstore_plugin").origin).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("_core.*.so"))
    with (folder / package.name / "_load_core.py").open("a") as file:
        file.write("\n\ndef find():\n    raise ModuleNotFoundError(name=_NAME)\n")


@pytest.fixture
def selftest(mpirun, tmp_path):
    def run(ranks: int, env=None, missing=None):
        if missing == "kvstore_plugin._core":
            _copy_without_core(tmp_path)
        elif missing:  # a module of this name that is found first, and fails as if it were missing
            source = f"raise ModuleNotFoundError('No module named {missing}', name={missing!r})"
            (tmp_path / f"{missing}.py").write_text(source)
        if missing:
            env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        return mpirun(ranks, "-m kvstore_plugin.selftest", env=env, timeout=90)

    return run


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [0, 2, long(3)])
def test_report_of_what_works(selftest, ranks):
    result = selftest(ranks)
    assert result.code == 0, result.text
    for name in (*_NAMES, *(_MEASURED if ranks else ("allreduce",))):
        assert result.stdout.count(f"\n{name} ") + result.stdout.startswith(f"{name} ") == 1, (name, result.text)
    assert "WRONG" not in result.stdout
    assert result.stdout.rstrip().endswith("All that was checked works."), result.text
    last = max(ranks, 1) - 1
    assert (f"ranks 0-{last}" if last else "ranks 0") in result.stdout


@pytest.mark.parametrize("ranks", [0, long(2)])
def test_help_is_help_and_no_test(mpirun, ranks):
    result = mpirun(ranks, "-m kvstore_plugin.selftest", "--help")
    assert result.code == 0 and "--gpu" in result.stdout and "mykvrun -n 2 --check" in result.stdout, result.text
    assert "All that was checked" not in result.stdout and "allreduce" not in result.stdout, result.text


@pytest.mark.long
def test_two_hosts_and_more_ranks_than_cores_are_slow_and_not_wrong(selftest):
    result = selftest(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
    assert result.code == 0, result.text
    assert "host 1" in result.stdout and "WRONG" not in result.stdout, result.text
    slow = [line for line in result.stdout.splitlines() if line.startswith("SLOW")]
    assert any("MYKV_VIRTUAL_HOSTS=2" in line for line in slow), result.text
    assert any("4 ranks share" in line for line in slow) == (len(os.sched_getaffinity(0)) < 4), result.text


@pytest.mark.parametrize(
    "missing, ranks",
    [
        ("kvstore_plugin._core", 0),
        ("mxnet", 2),
        ("mpi4py", 0),
        *itertools.starmap(long, [("kvstore_plugin._core", 2), ("mxnet", 0), ("mpi4py", 2)]),
    ],
)
def test_report_of_what_is_missing(selftest, ranks, missing):
    result = selftest(ranks, missing=missing)
    assert result.code == 1, result.text
    assert "Traceback" not in result.stderr, result.text
    wrong = [line for line in result.stdout.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1 and "pip install" in wrong[0], result.text
    assert result.stdout.count("Python ") >= 1
    assert result.stdout.rstrip().endswith("1 thing wrong."), result.text


@pytest.mark.long
def test_launcher_of_another_mpi(selftest):
    result = selftest(0, env={"PMI_SIZE": "2", "PMI_RANK": "0"})
    assert result.code == 1 and "PMI_SIZE=2" in result.stdout, result.text
    assert selftest(0, env={"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}).stdout == ""

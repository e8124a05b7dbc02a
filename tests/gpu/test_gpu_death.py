"""Ranks that are killed while their GPUs sum, with stand-ins: the job ends, or goes on with those that are left."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from standin import gpu_support
from standin.gpu_arrays import FAILING

_PATHS = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
_LIMIT = 10.0  # seconds from a death to the end of the job, or of the operations


def _environment(**settings) -> dict[str, str]:
    return {**gpu_support.environment(devices=4, delay_us=200, **settings), "PYTHONPATH": ":".join(_PATHS)}


@pytest.mark.parametrize("ranks", [long(2), 3])
def test_a_rank_that_is_killed_while_nccl_sums_ends_the_job_and_leaves_no_process(mpirun, ranks):
    script = """
    import os, signal, time
    import numpy as np
    from standin import gpu_support
    from standin.gpu_support import DeviceArray
    import mykv_core as core
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    core.find_gpus([gpu_support.cuda_library()], [gpu_support.nccl_library()])
    core.init(MPI.COMM_WORLD.py2f(), {})
    assert core.gpu_road()[1]
    arrays = [DeviceArray(np.ones(200000, "float32"), rank) for _ in range(20)]
    works = []
    for number, array in enumerate(arrays):
        place = [(array.pointer, rank)]
        memory = {"inputs": place, "outputs": place}
        works.append(core.submit_on_gpu(str(number), "allreduce", "float32", [200000], memory))
    works[0].wait()
    if rank == 1:
        print("now", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for work in works:
        work.wait()
    time.sleep(60)
    """
    running = mpirun.start(ranks, script, env=_environment(nccl_launch_us=300))
    running.wait_for("now")
    began = time.monotonic()
    result = running.wait(_LIMIT + 20)
    assert time.monotonic() - began < _LIMIT
    assert result.code != 0, result.text
    assert running.members() == []


def test_failures_between_layers_end_on_all_ranks_and_leave_nothing_behind(mpirun):
    """MYKV_GPU_HOSTS=arena: what fails in NCCL on one host ends on the others too."""
    script = (
        FAILING
        + """
    def hang():
        nccl.standin_nccl_plant("hang", 1, 1)
        threading.Thread(target=stall).start()

    cases = {
        "call": (lambda: nccl.standin_nccl_plant("ncclReduceScatter", 1, 3), "NCCL failed in ncclReduceScatter"),
        "hang": (hang, "0.5 s"),
    }
    before = left()
    for name, (spoil, text) in cases.items():
        core.init(world.py2f(), {"virtual_hosts": 2, "gpu_hosts": "arena"})
        assert submit("well").wait(20)
        if rank == 1:
            spoil()
        world.Barrier()
        began = time.monotonic()
        error = ""
        try:
            submit(name).wait(20) or os._exit(3)
        except RuntimeError as failure:
            error = str(failure)
        took = time.monotonic() - began
        print(name, rank, round(took, 1), error, flush=True)
        assert error.startswith(name) and text in error, error
        assert rank == 1 or "rank 1" in error, error
        assert took < 9, (name, took)
        began = time.monotonic()
        try:
            submit("next").wait(20) or os._exit(3)
            assert False, "it can do no more"
        except RuntimeError as failure:
            print(name, rank, "next:", failure, flush=True)
            assert "rank 1 has left" in str(failure) or rank == 1, failure
        core.shutdown()
        assert left() == before, (name, left(), before)
        nccl.standin_nccl_resume()
        world.Barrier()

    for turn in range(4):
        fly({"virtual_hosts": 2, "gpu_hosts": "arena"}, turn % 2)
        assert left() == before, (left(), before)
    assert cuda.violations() == []
    print("all is well", flush=True)
    """
    )
    result = mpirun(4, script, env=_environment(nccl_launch_us=300))
    assert result.code == 0, result.text
    assert result.stdout.count("all is well") == 4, result.text


@pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")
def test_elastic_workers_go_on_by_another_road_each_time(mpirun):
    running = mpirun.start(
        4, Path(__file__).parents[1] / "programs" / "elastic_gpus.py", options=("--with-ft", "ulfm"), env=_environment()
    )
    result = running.wait(100)
    assert result.stdout.count("all is well") == 1, result.text
    lost = re.findall(r"^lost (\d) after ([\d.]+) s: (.*)$", result.stdout, re.MULTILINE)
    assert sorted(size for size, _, _ in lost) == ["2", "3", "3", "4", "4", "4"], result.text
    for size, seconds, error in lost:
        assert float(seconds) < _LIMIT, result.text
        victim = {"4": 0, "3": 2, "2": 0}[size]
        assert f"rank {victim} has" in error, result.text
    assert "summed 1 by host memory" in result.stdout, result.text

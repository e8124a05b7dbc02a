"""Ranks that are killed while their GPUs sum, with stand-ins: the job ends, or goes on with the remaining ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from harness import launcher
from harness.marks import long
from standin import gpu_support

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
    from compiled import core
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
        assert f"rank {victim} of {size} has" in error, result.text
    assert "summed 1 by host memory" in result.stdout, result.text

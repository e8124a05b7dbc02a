"""What is found of CUDA and NCCL, which road arrays on GPUs take, and how ranks share GPUs out; with stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import gpu_support
import pytest

_FIND = "import kvstore_plugin.gpu as gpu, json; print('found', json.dumps(gpu.find()))"
_ROAD = """
    import mykv_core
    from kvstore_plugin import process
    process.init()
    print("road", mykv_core.gpu_road())
    """
_SHARE = """
    import kvstore_plugin as mykv
    from kvstore_plugin.own_gpus import own_gpus
    mykv.init()
    print("rank", mykv.rank(), "has", own_gpus(), own_gpus(), mykv.default_devices())
    """


def _found(**environment):
    names = ("MYKV_CUDA_LIBRARY", "MYKV_NCCL_LIBRARY")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", _FIND], env={**inherited, **environment}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("found ", 1)[1])


@pytest.mark.smoke
def test_both_are_found():
    found = _found(**gpu_support.environment(devices=3))
    assert found["cuda"] == {"path": gpu_support.cuda_library(), "version": 12040, "problem": ""}
    assert found["nccl"] == {"path": gpu_support.nccl_library(), "version": 22304, "problem": ""}
    assert (found["driver"], found["devices"]) == (12040, 3)


def test_a_file_that_is_not_there():
    found = _found(MYKV_CUDA_LIBRARY="/none/libcudart.so", MYKV_NCCL_LIBRARY="/none/libnccl.so")
    assert found["cuda"] == {
        "path": "",
        "version": 0,
        "problem": "the CUDA runtime was not found in /none/libcudart.so",
    }
    assert found["nccl"] == {"path": "", "version": 0, "problem": "NCCL was not found in /none/libnccl.so"}
    assert (found["driver"], found["devices"]) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "which", "problem"),
    [
        ({"cuda_version": 10020}, "cuda", r"the CUDA runtime in \S+ has version 10\.2; mykv needs 11\.0 or later"),
        (
            {"cuda_version": 13000, "driver_version": 12040},
            "cuda",
            r"the CUDA runtime in \S+ is of CUDA 13, and the driver knows only CUDA 12",
        ),
        ({"nccl_version": 21003}, "nccl", r"the NCCL in \S+ has version 2\.10\.3; mykv needs 2\.14 or later"),
        ({"nccl_version": 2708}, "nccl", r"the NCCL in \S+ has version 2\.7\.8; mykv needs 2\.14 or later"),
    ],
)
def test_versions_that_cannot_be_used(settings, which, problem):
    found = _found(**gpu_support.environment(**settings))
    assert found[which]["version"] == 0 and re.fullmatch(problem, found[which]["problem"]), found


def test_a_newer_minor_version_than_the_drivers_is_fine():
    found = _found(**gpu_support.environment(cuda_version=12080, driver_version=12020))
    assert found["cuda"]["version"] == 12080


@pytest.mark.parametrize(
    ("ranks", "settings", "road"),
    [
        (2, {"devices": 2}, r"\(True, True, ''\)"),
        (
            3,
            {"devices": 2},
            r"\(True, False, 'the host of rank 0 has 3 ranks and 2 GPUs, and NCCL needs one for each'\)",
        ),
        (1, {"devices": 0}, r"\(False, False, 'rank 0: the CUDA runtime finds no GPU'\)"),
    ],
)
def test_the_road_and_its_reason(mpirun, ranks, settings, road):
    result = mpirun(ranks, _ROAD, env=gpu_support.environment(**settings), timeout=60)
    assert result.code == 0, result.text
    assert len(re.findall(f"road {road}", result.stdout)) == ranks, result.text


def test_host_memory_on_demand(mpirun):
    env = {**gpu_support.environment(), "MYKV_GPU": "host"}
    result = mpirun(2, _ROAD, env=env, timeout=60)
    assert result.stdout.count("road (True, False, 'MYKV_GPU=host')") == 2, result.text
    env = {**gpu_support.environment(), "MYKV_GPU_HOSTS": "arena", "MYKV_VIRTUAL_HOSTS": "2"}
    result = mpirun(2, _ROAD, env=env, timeout=60)
    reason = "MYKV_GPU_HOSTS=arena, and there are several hosts"
    assert result.stdout.count(f"road (True, False, '{reason}')") == 2, result.text


def test_nccl_that_was_asked_for_and_is_not_there(mpirun):
    env = {**gpu_support.environment(), "MYKV_GPU": "nccl", "MYKV_NCCL_LIBRARY": "/none/libnccl.so"}
    result = mpirun(2, _ROAD, env=env, timeout=60)
    assert result.code != 0
    sentence = "MYKV_GPU=nccl asks for NCCL, but rank 0: NCCL was not found in /none/libnccl.so"
    assert sentence in result.stderr, result.text


def test_a_word_that_it_does_not_know(mpirun):
    result = mpirun(1, _ROAD, env={"MYKV_GPU": "cuda"}, timeout=60)
    assert result.code != 0
    assert "MYKV_GPU must be one of auto, nccl, host, but it is 'cuda'." in result.stderr, result.text


def test_ranks_with_other_settings(mpirun):
    script = """
    import os
    from mpi4py import MPI
    os.environ["MYKV_GPU"] = "host" if MPI.COMM_WORLD.rank else "auto"
    """
    result = mpirun(2, script + _ROAD, env=gpu_support.environment(), timeout=60)
    assert result.code != 0
    sentence = "the road of GPU arrays (MYKV_GPU) is 'auto' on rank 0 and 'host' on rank 1"
    assert sentence in result.stderr, result.text


@pytest.mark.parametrize(
    ("ranks", "devices", "shares", "warned"),
    [
        (1, 2, [[0, 1]], False),
        (2, 4, [[0, 1], [2, 3]], False),
        (2, 3, [[0], [1]], False),
        (3, 2, [[0], [1], [0]], True),
    ],
)
def test_ranks_share_the_gpus_out(mpirun, ranks, devices, shares, warned):
    result = mpirun(ranks, _SHARE, env=gpu_support.environment(devices=devices), timeout=60)
    assert result.code == 0, result.text
    for rank, share in enumerate(shares):
        # MXNet's own build here is for the CPU alone.
        assert f"rank {rank} has {share} {share} [cpu(0)]" in result.stdout, result.text
    sentence = f"{ranks} ranks share {devices} GPUs on the host of rank 0, so several ranks use one"
    assert result.stderr.count(sentence) == warned, result.text


def test_ranks_that_see_one_gpu_each(mpirun):
    script = """
    import os
    from mpi4py import MPI
    os.environ["CUDA_VISIBLE_DEVICES"] = str(MPI.COMM_WORLD.rank)
    """
    result = mpirun(2, script + _SHARE, env=gpu_support.environment(devices=2), timeout=60)
    assert result.code == 0, result.text
    assert "rank 0 has [0] [0]" in result.stdout and "rank 1 has [0] [0]" in result.stdout, result.text
    assert "share" not in result.stderr, result.text

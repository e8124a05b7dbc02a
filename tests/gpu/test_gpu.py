"""What is found of CUDA and NCCL, which road arrays on GPUs take, and how ranks share GPUs out; with stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.marks import long
from kvstore_plugin.world import own_gpus, settings
from standin import gpu_support

_FIND = "import kvstore_plugin.world.gpu_libraries as gpu, json; print('found', json.dumps(gpu.find()))"
# The package without its __init__, which imports MXNet and with it takes most of such a script's time.
_BARE = f"""
import sys, types
package = sys.modules["kvstore_plugin"] = types.ModuleType("kvstore_plugin")
package.__path__ = [{str(Path(settings.__file__).parents[1])!r}]
"""
# Without MXNet, whose import takes most of such a script's time.
_ROAD = """
    import os
    from compiled import core
    from mpi4py import MPI
    core.find_gpus([os.environ["MYKV_CUDA_LIBRARY"]], [os.environ["MYKV_NCCL_LIBRARY"]])
    options = {"options"}
    try:
        core.init(MPI.COMM_WORLD.py2f(), options)
        print("road", core.gpu_road())
    except core.Error as error:
        print("refused:", error)
    """
_SHARE = """
    import kvstore_plugin as mykv
    from kvstore_plugin.world.own_gpus import own_gpus
    mykv.init()
    print("rank", mykv.rank(), "has", own_gpus(), own_gpus(), mykv.default_devices())
    """


def _found(head: str = _BARE, **environment):
    names = ("MYKV_CUDA_LIBRARY", "MYKV_NCCL_LIBRARY")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command, environment = [sys.executable, "-c", head + _FIND], {**inherited, **environment}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("found ", 1)[1])


@pytest.mark.smoke
def test_both_are_found():
    found = _found("", **gpu_support.environment(devices=3))
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


def test_named_files_that_cannot_be_used_are_told(monkeypatch):
    from kvstore_plugin.world import gpu_libraries as gpu

    found = {
        "cuda": {"version": 12040, "problem": ""},
        "nccl": {"version": 0, "problem": "NCCL was not found in /none"},
    }
    monkeypatch.setattr(gpu, "find", lambda: found)
    monkeypatch.setattr(settings, "_read", {})  # else those of an init() before count
    for variable in ("MYKV_CUDA_LIBRARY", "MYKV_NCCL_LIBRARY"):
        monkeypatch.delenv(variable, raising=False)
    assert gpu.unusable() == []
    monkeypatch.setenv("MYKV_CUDA_LIBRARY", "/some")
    monkeypatch.setenv("MYKV_NCCL_LIBRARY", "/none")
    sentence = "MYKV_NCCL_LIBRARY names a file that cannot be used: NCCL was not found in /none."
    assert gpu.unusable() == [sentence]


@pytest.mark.parametrize(
    ("settings", "which", "problem"),
    [
        ({"cuda_version": 10020}, "cuda", r"the CUDA runtime in \S+ has version 10\.2; mykv needs 11\.0 or later"),
        (
            {"cuda_version": 13000, "driver_version": 12040},
            "cuda",
            r"the CUDA runtime in \S+ is of CUDA 13, but the driver supports only CUDA 12",
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


def _road(mpirun, ranks, options="{}", environment=None):
    script = _ROAD.replace('{"options"}', options)
    return mpirun(ranks, script, env={**gpu_support.environment(), **(environment or {})}, timeout=60)


@pytest.mark.parametrize(
    ("ranks", "options", "road"),
    [
        (2, "{}", "(True, True, '', False)"),
        (
            3,
            "{}",
            "(True, False, 'the host of rank 0 has 3 ranks but 2 GPUs, and NCCL needs a GPU for each rank', False)",
        ),
        (2, "{'gpu': 'host'}", "(True, False, 'MYKV_GPU=host', True)"),
    ],
)
def test_the_road_and_its_reason(mpirun, ranks, options, road):
    result = _road(mpirun, ranks, options)
    assert result.code == 0, result.text
    assert result.stdout.count(f"road {road}") == ranks, result.text


def test_a_machine_without_gpus(mpirun):
    result = _road(mpirun, 1, environment={"STANDIN_DEVICES": "0"})
    assert "road (False, False, 'rank 0: the CUDA runtime finds no GPU', False)" in result.stdout, result.text


def test_nccl_that_was_asked_for_and_is_not_there(mpirun):
    result = _road(mpirun, 2, "{'gpu': 'nccl'}", {"MYKV_NCCL_LIBRARY": "/none/libnccl.so"})
    sentence = "refused: MYKV_GPU=nccl asks for NCCL, but rank 0: NCCL was not found in /none/libnccl.so"
    assert result.stdout.count(sentence) == 2, result.text


def test_ranks_with_other_settings(mpirun):
    result = _road(mpirun, 2, "{'gpu': 'host'} if MPI.COMM_WORLD.rank else {}")
    sentence = "but the road of GPU arrays (MYKV_GPU) is 'auto' on rank 0 and 'host' on rank 1"
    assert result.stdout.count(sentence) == 2, result.text


def test_settings_become_options(monkeypatch):
    monkeypatch.setattr(settings, "_read", {})
    monkeypatch.setenv("MYKV_GPU", "host")
    monkeypatch.setenv("MYKV_GPU_HOSTS", "nccl")
    settings.read()
    assert settings.core_options() == {"gpu": "host"}


def test_sums_in_layers_are_gone(monkeypatch):
    monkeypatch.setattr(settings, "_read", {})
    monkeypatch.setenv("MYKV_GPU_HOSTS", "arena")
    sentence = (
        "MYKV_GPU_HOSTS=arena is no longer supported. Use the default, nccl, for NCCL's own network between hosts, or "
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        settings.read()
    monkeypatch.setenv("MYKV_GPU_HOSTS", "mpi")
    with pytest.raises(ValueError, match=r"MYKV_GPU_HOSTS must be one of nccl, but it is 'mpi'\."):
        settings.read()


def test_a_word_that_it_does_not_know(monkeypatch):
    monkeypatch.setattr(settings, "_read", {})
    monkeypatch.setenv("MYKV_GPU", "cuda")
    with pytest.raises(ValueError, match=r"MYKV_GPU must be one of auto, nccl, host, but it is 'cuda'\."):
        settings.core_options()


class _Process:
    """What own_gpus() asks: this rank, all ranks' hosts, and which GPUs each sees."""

    def __init__(self, rank: int, seen: list[list[str]], hosts: list[list[int]]):
        self.rank, self.generation, self.core = (lambda: rank), object(), self
        self.gpus, self.host_ranks = (lambda: seen), (lambda: hosts)


@pytest.mark.parametrize(
    ("seen", "hosts", "shares", "warned"),
    [
        (["ab"], [[0]], [[0, 1]], []),
        (["abcd", "abcd"], [[0, 1]], [[0, 1], [2, 3]], []),
        (["abc", "abc"], [[0, 1]], [[0], [1]], []),
        (["ab", "ab", "ab"], [[0, 1, 2]], [[0], [1], [0]], ["3 ranks share 2 GPUs on the host of rank 0"]),
        (["ab", "ab"], [[0], [1]], [[0, 1], [0, 1]], []),
        (["", "a", "a"], [[0], [1, 2]], [[], [0], [0]], ["2 ranks share 1 GPU on the host of rank 1"]),
        (["a", "b"], [[0, 1]], [[0], [0]], []),  # each sees one of them
    ],
)
def test_ranks_share_the_gpus_of_their_host_out(monkeypatch, caplog, seen, hosts, shares, warned):
    for rank, share in enumerate(shares):
        monkeypatch.setattr(own_gpus, "process", _Process(rank, [list(gpus) for gpus in seen], hosts))
        assert own_gpus.own_gpus() == own_gpus.own_gpus() == share
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == len(warned) and all(text in one for text, one in zip(warned, logged))


def test_ranks_that_share_a_gpu_say_so(mpirun):
    result = mpirun(2, _SHARE, env=gpu_support.environment(devices=1), timeout=60)
    assert result.code == 0, result.text
    for rank in range(2):
        # MXNet's own build here is for the CPU alone.
        assert f"rank {rank} has [0] [0] [cpu(0)]" in result.stdout, result.text
    sentence = "2 ranks share 1 GPU on the host of rank 0"
    assert result.stderr.count(sentence) == 1, result.text


@pytest.mark.parametrize(
    ("ranks", "devices", "road"), [long(1, 2, "NCCL"), (2, 2, "NCCL"), long(2, 1, "through host memory")]
)
def test_the_self_test(mpirun, ranks, devices, road):
    script = """
    import sys
    from kvstore_plugin.selftest import __main__ as selftest
    from kvstore_plugin.selftest import gpu as selftest_gpu
    selftest_gpu._SPEED_BYTES = (4 << 10, 1 << 20)
    selftest_gpu._SIZES = (0, 1, 1000)
    selftest_gpu._DTYPES = ("float16", "float32", "int64", "bool")
    selftest_gpu._ORDER_ELEMENTS = 1 << 16
    sys.argv.append("--gpu")
    sys.exit(selftest.main())
    """
    environment = gpu_support.environment(devices=devices, delay_us=10)
    result = mpirun(ranks, script, env=environment, timeout=110)
    assert result.code == 0, result.text
    for fact in (f"road of GPU arrays +{road}", "CUDA runtime +12.4 in /", "NCCL +2.23.4 in /"):
        assert re.search(f"^{fact}", result.stdout, re.MULTILINE), (fact, result.text)
    assert len(re.findall(r"^\w+ on GPUs +24 results equal numpy's", result.stdout, re.MULTILINE)) == 4, result.text
    speeds = re.findall(
        rf"^allreduce of \d+ KiB, {ranks} ranks +[\d.]+ ms .*copied 4 times [\d.]+ ms", result.stdout, re.M
    )
    assert len(speeds) == 2, result.text
    assert result.stdout.count("NCCL called directly") == (2 if road == "NCCL" else 0), result.text
    assert "WRONG" not in result.stdout, result.text


def test_the_self_test_finds_an_operation_that_does_not_wait_for_its_stream(mpirun):
    """The operations of the self-test do not get their streams here, in which all work comes a second late."""
    script = """
    import ctypes
    import sys
    from compiled import core
    from kvstore_plugin.selftest import __main__ as selftest
    from kvstore_plugin.selftest import gpu as selftest_gpu
    from standin.gpu_support import Cuda
    cuda, submit = Cuda(), core.submit_on_gpu

    class LateStream(selftest_gpu.Stream):
        def __init__(self, device):
            super().__init__(device)
            cuda.standin_delay(device, self._handle, 1_000_000)

    def submit_without_streams(name, kind, dtype, counts, memory):
        del memory["streams"]
        return submit(name, kind, dtype, counts, memory)

    core.submit_on_gpu, selftest_gpu.Stream = submit_without_streams, LateStream
    selftest_gpu._SPEED_BYTES = selftest_gpu._DTYPES = ()
    selftest_gpu._TURNS = 1
    sys.argv.append("--gpu")
    sys.exit(selftest.main())
    """
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**gpu_support.environment(devices=2), "PYTHONPATH": ":".join(paths)}
    result = mpirun(2, script, env=environment, timeout=60)
    assert result.code == 1, result.text
    wrong = "order of streams: a sum of values written by earlier work in its stream is wrong"
    assert wrong in result.stdout, result.text


def test_the_self_test_without_a_gpu(mpirun):
    result = mpirun(1, "-m kvstore_plugin.selftest --gpu", env=gpu_support.environment(devices=0), timeout=60)
    assert result.code == 1 and "There is no GPU" in result.stdout, result.text


def test_an_operation_waits_for_the_stream_of_its_run_context(mpirun):
    """What the engine gives to an operation is made here: a device, and a stream object that begins with CUDA's."""
    script = """
    import ctypes
    import numpy as np
    from compiled import core
    from standin import gpu_support
    from standin.gpu_support import Cuda, DeviceArray
    from mpi4py import MPI
    core.find_gpus([gpu_support.cuda_library()], [gpu_support.nccl_library()])
    core.init(MPI.COMM_WORLD.py2f(), {})
    rank, cuda = MPI.COMM_WORLD.rank, Cuda()

    class RunContext(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("number", ctypes.c_int), ("stream", ctypes.c_void_p)]

    cuda.cudaSetDevice(rank)
    handle = cuda.stream()
    holder = (ctypes.c_void_p * 2)(handle.value, 0)
    late = DeviceArray(np.full(1000, rank + 1, "float32"), rank)
    for stream in (ctypes.addressof(holder), None):
        context = RunContext(2, rank, stream)
        array = DeviceArray(np.zeros(1000, "float32"), rank)
        cuda.standin_delay(rank, handle, 500000)
        cuda.cudaMemcpyAsync(array.pointer, late.pointer, 4000, 3, handle)
        place = [(array.pointer, rank)]
        memory = {"inputs": place, "outputs": place, "context": ctypes.addressof(context)}
        core.submit_on_gpu("late", "allreduce", "float32", [1000], memory).wait()
        print("sum", stream is not None, array.numpy()[0])
    cuda.cudaStreamSynchronize(handle)
    """
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**gpu_support.environment(delay_us=0), "PYTHONPATH": ":".join(paths)}
    result = mpirun(2, script, env=environment, timeout=60)
    assert result.code == 0, result.text
    # Without a stream everything has happened already, as far as the core can know.
    assert result.stdout.count("sum True 3.0") == 2 and result.stdout.count("sum False 0.0") == 2, result.text

"""The stand-in for libcudart does to a program what CUDA does, and fails when it is told to."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from standin import gpu_support
from standin.gpu_support import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaError, DeviceArray

_FUNCTIONS = [
    "cudaGetDeviceCount",
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaRuntimeGetVersion",
    "cudaDriverGetVersion",
    "cudaDeviceGetPCIBusId",
    "cudaDeviceGetStreamPriorityRange",
    "cudaStreamCreateWithPriority",
    "cudaStreamCreateWithFlags",
    "cudaStreamDestroy",
    "cudaStreamSynchronize",
    "cudaStreamQuery",
    "cudaStreamWaitEvent",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventDestroy",
    "cudaMalloc",
    "cudaFree",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaPointerGetAttributes",
    "cudaGetErrorString",
    "cudaGetErrorName",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaDeviceSynchronize",
    "cudaMemGetInfo",
]
_NOT_READY = 600
_LATE = 100_000  # microseconds; long beside what the host does in between
_COUNT = 64


class _Attributes(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("devicePointer", ctypes.c_void_p),
        ("hostPointer", ctypes.c_void_p),
    ]


@pytest.fixture
def cuda():
    """The stand-in, current device 0; a test that expects violations looks at them itself."""
    made = gpu_support.Cuda()
    made.cudaSetDevice(0)
    before = len(made.violations())
    yield made
    made.expected = getattr(made, "expected", 0)
    assert len(made.violations()) == before + made.expected
    made.cudaSetDevice(0)
    made.cudaGetLastError()


def _child(script: str, **settings) -> subprocess.CompletedProcess:
    env = {**os.environ, **gpu_support.environment(**settings), "PYTHONPATH": str(Path(__file__).parents[1])}
    program = "import ctypes, os\nfrom standin import gpu_support\ncuda = gpu_support.Cuda()\n" + textwrap.dedent(
        script
    )
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)


def _fill(cuda, array: DeviceArray, value: int, stream) -> None:
    cuda.cudaMemsetAsync(array.pointer, value, array.nbytes, stream)


def test_all_functions_are_there():
    library = gpu_support.Cuda().library
    assert not [name for name in _FUNCTIONS if not hasattr(library, name)]


def test_host_code_that_touches_device_memory_crashes():
    child = _child("ctypes.string_at(gpu_support.DeviceArray([1.0], cuda=cuda).pointer, 1)")
    assert child.returncode == -signal.SIGSEGV, child.stderr


def test_device_memory_has_contents_and_a_device(cuda):
    arrays = [DeviceArray(np.arange(5.0) + device, device, cuda) for device in (0, 1)]
    for device, array in enumerate(arrays):
        attributes = _Attributes()
        cuda.cudaPointerGetAttributes(ctypes.byref(attributes), array.pointer + 8)
        assert (attributes.type, attributes.device, attributes.hostPointer) == (2, device, None)
        assert attributes.devicePointer == array.pointer + 8
        np.testing.assert_array_equal(array.numpy(), np.arange(5.0) + device)
        array.free()
    host = np.zeros(4)
    cuda.cudaPointerGetAttributes(ctypes.byref(attributes), host.ctypes.data)
    assert (attributes.type, attributes.devicePointer) == (0, None)


def test_new_memory_holds_nothing_that_one_could_count_on(cuda):
    pointer, host = ctypes.c_void_p(), np.zeros(4, "float32")
    cuda.cudaMalloc(ctypes.byref(pointer), host.nbytes)
    cuda.cudaMemcpy(host.ctypes.data, pointer, host.nbytes, DEVICE_TO_HOST)
    assert np.isnan(host).all()
    assert cuda.code("cudaMemcpy", host.ctypes.data, pointer.value + 8, host.nbytes, DEVICE_TO_HOST) == 1
    cuda.cudaFree(pointer)
    assert cuda.code("cudaFree", pointer) == 1


def test_memory_ends(cuda, monkeypatch):
    monkeypatch.setenv("STANDIN_MEMORY_MB", "1")
    before = cuda.standin_allocated(1)
    with pytest.raises(CudaError, match="cudaMalloc: out of memory"):
        DeviceArray(np.zeros(1 << 20), 1, cuda)
    assert cuda.standin_allocated(1) == before


def test_streams_overtake_each_other(cuda):
    slow, fast = cuda.stream(), cuda.stream()
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    cuda.standin_delay(0, slow, _LATE)
    _fill(cuda, array, 1, slow)
    _fill(cuda, array, 2, fast)
    cuda.cudaStreamSynchronize(fast)
    assert cuda.code("cudaStreamQuery", slow) == _NOT_READY
    cuda.cudaStreamSynchronize(slow)
    assert (array.numpy() == 1).all()


def test_an_event_orders_streams_also_of_two_devices(cuda):
    slow, event = cuda.stream(), cuda.event()
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    other = DeviceArray(np.zeros(_COUNT, "uint8"), 1, cuda)
    cuda.standin_delay(0, slow, _LATE)
    _fill(cuda, array, 1, slow)
    cuda.cudaEventRecord(event, slow)
    assert cuda.code("cudaEventQuery", event) == _NOT_READY
    cuda.cudaSetDevice(1)
    stream = cuda.stream()
    cuda.cudaStreamWaitEvent(stream, event, 0)
    cuda.cudaMemcpyAsync(other.pointer, array.pointer, _COUNT, 3, stream)
    cuda.cudaStreamSynchronize(stream)
    assert (other.numpy() == 1).all()
    assert cuda.code("cudaEventQuery", event) == 0
    assert cuda.code("cudaEventRecord", event, stream) == 400  # an event of device 0


def test_a_wait_means_the_last_record_before_it(cuda):
    one, two, waiting, event = cuda.stream(), cuda.stream(), cuda.stream(), cuda.event()
    cuda.cudaStreamWaitEvent(waiting, event, 0)  # never recorded: nothing to wait for
    cuda.cudaEventRecord(event, one)
    cuda.cudaStreamWaitEvent(waiting, event, 0)
    cuda.standin_delay(0, two, _LATE)
    cuda.cudaEventRecord(event, two)
    cuda.cudaStreamSynchronize(waiting)
    assert cuda.code("cudaEventQuery", event) == _NOT_READY
    cuda.cudaStreamWaitEvent(waiting, event, 0)
    cuda.cudaStreamSynchronize(waiting)
    assert cuda.code("cudaEventQuery", event) == 0


def test_the_default_stream_waits_for_streams_that_block(cuda):
    blocking, other = cuda.stream(flags=0), cuda.stream(flags=1)
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    cuda.standin_delay(0, other, 2 * _LATE)
    cuda.standin_delay(0, blocking, _LATE // 2)
    _fill(cuda, array, 3, blocking)
    assert (array.numpy() == 3).all()
    assert cuda.code("cudaStreamQuery", other) == _NOT_READY


@pytest.mark.parametrize("count", [_COUNT, 1 << 20])  # staged at once, or when the stream has come to it
def test_a_copy_from_pageable_memory_has_read_it_and_one_from_registered_memory_has_not(cuda, count):
    stream = cuda.stream()
    array = DeviceArray(np.zeros(count, "uint8"), 0, cuda)
    host = np.ones(count, "uint8")
    cuda.standin_delay(0, stream, _LATE)
    cuda.cudaMemcpyAsync(array.pointer, host.ctypes.data, count, HOST_TO_DEVICE, stream)
    host[:] = 2
    cuda.cudaStreamSynchronize(stream)
    assert (array.numpy() == 1).all()

    cuda.cudaHostRegister(host.ctypes.data, count, 1)
    cuda.standin_delay(0, stream, _LATE)
    cuda.cudaMemcpyAsync(array.pointer, host.ctypes.data, count, HOST_TO_DEVICE, stream)
    host[:] = 3
    cuda.cudaStreamSynchronize(stream)
    assert (array.numpy() == 3).all()
    cuda.cudaHostUnregister(host.ctypes.data)


def test_a_copy_to_pageable_memory_is_done_and_one_to_registered_memory_is_not(cuda):
    stream = cuda.stream()
    array = DeviceArray(np.ones(_COUNT, "uint8"), 0, cuda)
    host = np.zeros(_COUNT, "uint8")
    cuda.standin_delay(0, stream, _LATE)
    cuda.cudaMemcpyAsync(host.ctypes.data, array.pointer, _COUNT, DEVICE_TO_HOST, stream)
    assert (host == 1).all()

    host[:] = 0
    cuda.cudaHostRegister(host.ctypes.data, _COUNT, 1)
    cuda.standin_delay(0, stream, _LATE)
    cuda.cudaMemcpyAsync(host.ctypes.data, array.pointer, _COUNT, DEVICE_TO_HOST, stream)
    assert (host == 0).all()
    cuda.cudaHostUnregister(host.ctypes.data)  # too early
    cuda.expected = 1
    assert "still uses" in cuda.violations()[-1]
    cuda.cudaStreamSynchronize(stream)
    assert (host == 1).all()


def test_registration_is_once(cuda):
    host = np.zeros(4 * _COUNT, "uint8")
    cuda.cudaHostRegister(host.ctypes.data + _COUNT, _COUNT, 1)
    for offset, length in [(_COUNT, _COUNT), (0, _COUNT + 1), (2 * _COUNT - 1, 1)]:
        assert cuda.code("cudaHostRegister", host.ctypes.data + offset, length, 1) == 712
    cuda.cudaHostRegister(host.ctypes.data + 2 * _COUNT, _COUNT, 1)
    attributes = _Attributes()
    cuda.cudaPointerGetAttributes(ctypes.byref(attributes), host.ctypes.data + 2 * _COUNT + 1)
    assert (attributes.type, attributes.devicePointer) == (1, host.ctypes.data + 2 * _COUNT + 1)
    cuda.cudaHostUnregister(host.ctypes.data + _COUNT)
    cuda.cudaHostUnregister(host.ctypes.data + 2 * _COUNT)
    assert cuda.code("cudaHostUnregister", host.ctypes.data) == 713


def test_a_freed_pointer_waits_for_the_work_of_its_device(cuda):
    stream = cuda.stream()
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    cuda.standin_delay(0, stream, _LATE)
    _fill(cuda, array, 1, stream)
    array.free()
    assert cuda.code("cudaStreamQuery", stream) == 0


def test_what_was_destroyed_is_not_used(cuda):
    stream, event = cuda.stream(), cuda.event()
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    cuda.standin_delay(0, stream, _LATE // 10)
    _fill(cuda, array, 1, stream)
    cuda.cudaEventRecord(event, stream)
    cuda.cudaStreamDestroy(stream)  # its work goes on
    while cuda.code("cudaEventQuery", event) == _NOT_READY:
        time.sleep(0.001)
    assert (array.numpy() == 1).all()
    cuda.cudaEventDestroy(event)
    assert [cuda.code("cudaStreamQuery", stream), cuda.code("cudaEventQuery", event)] == [400, 400]
    cuda.expected = 2


def test_a_planted_failure_strikes_once_and_is_the_last_error(cuda):
    before = cuda.standin_calls("cudaStreamQuery")
    cuda.standin_plant("cudaStreamQuery", 2, 999)
    stream = cuda.stream()
    assert [cuda.code("cudaStreamQuery", stream) for _ in range(3)] == [0, 999, 0]
    assert cuda.standin_calls("cudaStreamQuery") == before + 3
    assert [cuda.cudaGetLastError(), cuda.cudaGetLastError()] == [999, 0]
    assert cuda.cudaGetErrorName(600) == b"cudaErrorNotReady"


def test_a_held_stream_goes_on_when_told(cuda):
    stream = cuda.stream()
    array = DeviceArray(np.zeros(_COUNT, "uint8"), 0, cuda)
    cuda.standin_hold(0, stream, 1)
    _fill(cuda, array, 1, stream)
    time.sleep(0.05)
    assert cuda.code("cudaStreamQuery", stream) == _NOT_READY
    cuda.standin_hold(0, stream, 0)
    cuda.cudaStreamSynchronize(stream)
    assert (array.numpy() == 1).all()


def test_a_lost_device_stops_and_the_other_goes_on():
    child = _child(
        """
        stream, event = cuda.stream(), cuda.event()
        cuda.standin_delay(0, stream, 20_000)
        cuda.cudaEventRecord(event, stream)  # the device is lost with the next one
        print(cuda.code("cudaEventRecord", event, stream), cuda.code("cudaStreamSynchronize", stream),
              cuda.code("cudaEventQuery", event), cuda.code("cudaMalloc", ctypes.byref(ctypes.c_void_p()), 1),
              cuda.code("cudaSetDevice", 0), cuda.code("cudaSetDevice", 1))
        print(gpu_support.DeviceArray([5], 1, cuda).numpy())
    """,
        plant="cudaEventRecord:2:719:lost",
    )
    assert child.stdout.split("\n")[:2] == ["719 719 719 719 719 0", "[5]"], child.stderr


def test_the_machine_is_what_the_environment_says():
    script = """
        count, version = ctypes.c_int(-1), ctypes.c_int()
        code = cuda.code("cudaGetDeviceCount", ctypes.byref(count))
        cuda.cudaRuntimeGetVersion(ctypes.byref(version))
        print(code, count.value, version.value, [cuda.standin_bus_id(d).decode() for d in range(count.value)])
        if os.fork() == 0:
            print(cuda.code("cudaSetDevice", 0), flush=True)
            os._exit(0)
        os.wait()
    """
    visible = "\n        os.environ['CUDA_VISIBLE_DEVICES'] = '2,0,7,1'"
    child = _child(visible + script, devices=3, cuda_version=11080)
    assert child.stdout.split("\n")[0] == "0 2 11080 ['0000:12:00.0', '0000:10:00.0']", child.stderr
    assert child.stdout.split("\n")[1] == "3"  # CUDA does not survive a fork
    assert _child(script, devices=0).stdout.startswith("100 0 ")
    assert _child(script, driver_version=0).stdout.startswith("35 0 ")

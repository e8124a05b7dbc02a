"""Machines without a GPU: stand-ins for libcudart, libnccl and libmxnet (tests/standin), and device memory for tests.

The stand-ins have CUDA's and NCCL's names, prototypes and semantics, and are deliberately less orderly than a real GPU
wherever both are allowed: streams overtake each other, device memory cannot be touched by host code, an operation of
NCCL's holds its device until all ranks have come. tests/standin/standin.h and nccl.h have their additional functions.

=========================== ==========================================================================================
STANDIN_DEVICES             GPUs of the machine (2); CUDA_VISIBLE_DEVICES chooses among them
STANDIN_MEMORY_MB           memory of each, per process (4096)
STANDIN_CUDA_VERSION        of the runtime (12040)
STANDIN_DRIVER_VERSION      of the driver (that of the runtime); 0 is no driver
STANDIN_DELAY_US            upper bound of the pause before each operation of a stream (100)
STANDIN_SEED                of the pauses (0)
STANDIN_PLANT               failures of CUDA's functions: "function:call:code[:lost],..."
STANDIN_NCCL_VERSION        22304
STANDIN_NCCL_PLANT          the same for NCCL's; the functions "async" and "hang" are operations (nccl.h)
STANDIN_NCCL_ORDER          "launch" (each device runs NCCL's operations in the order of their launch), or "ready"
STANDIN_NCCL_IN_PROGRESS    of 100 operations of a communicator without blocking, how many give ncclInProgress (25)
STANDIN_NCCL_LAUNCH_US      how long such an operation takes to come into its stream (2000)
STANDIN_NCCL_REMOTE_ERROR   1: the death of a rank becomes ncclRemoteError at the others; another number: that error
=========================== ==========================================================================================

With MYKV_TEST_GPU=1 the same tests use a real GPU (`make test-gpu`), without those that need a stand-in's functions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness.marks import ON_REAL_GPU

SOURCES = Path(__file__).parent
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread -shared"
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
_LATE_BYTES = 64 << 20  # of one of the copies that make a real stream late
_LATE_US = 20  # a lower bound of its time on any GPU so far: 64 MB read and written at 6 TB/s


@functools.lru_cache(maxsize=None)
def _library(name: str, pattern: str) -> Path:
    """Build a stand-in, unless one of these sources was built already; processes may do so at the same time."""
    sources = sorted(SOURCES.glob(pattern))
    digest = hashlib.sha256(FLAGS.encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix == ".h" or source in sources:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"mykv-standin-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else")
    library = folder / digest.hexdigest()[:16] / name
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as place:
            made = Path(place) / name
            link = [f"-Wl,-soname,{name},-z,nodelete", "-ldl"]
            subprocess.run(["g++", *FLAGS.split(), *map(str, sources), "-o", str(made), *link], check=True)
            made.rename(library)
    return library


def cuda_library() -> str:
    """Path of the stand-in for libcudart, or of the real library."""
    if ON_REAL_GPU:
        return os.environ["MYKV_CUDA_LIBRARY"]
    return str(_library("libcudart.so.12", "cudart*.cpp"))


def nccl_library() -> str:
    """Path of the stand-in for libnccl, or of the real library."""
    if ON_REAL_GPU:
        return os.environ["MYKV_NCCL_LIBRARY"]
    return str(_library("libnccl.so.2", "nccl*.cpp"))


def mxnet_library() -> str:
    """Path of the stand-in for libmxnet."""
    return str(_library("libmxnet.so", "mxnet*.cpp"))


def environment(**settings) -> dict[str, str]:
    """Environment of ranks that use the stand-ins; `settings` without their prefix, as in `delay_us=0`."""
    if ON_REAL_GPU:
        return {}
    return {
        "MYKV_CUDA_LIBRARY": cuda_library(),
        "MYKV_NCCL_LIBRARY": nccl_library(),
        "STANDIN_CUDART": cuda_library(),
        **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()},
    }


def start_core(request, by_nccl: bool = True, **options):
    """The core, started over all ranks of a test where it was not; it stays so between tests, as in a training program.

    Parameters
    ----------
    request : pytest.FixtureRequest
        Whose mark `ranks` has MYKV_VIRTUAL_HOSTS in its environment, where there are several hosts.
    by_nccl : bool, optional
        NCCL must serve; a test is skipped on a real machine with fewer GPUs than ranks.
    **options
        Of init().
    """
    from compiled import core
    from mpi4py import MPI

    if not core.is_initialized():
        hosts = int(dict(request.node.get_closest_marker("ranks").kwargs["env"]).get("MYKV_VIRTUAL_HOSTS", 1))
        os.environ.update(environment(devices=16, delay_us=200, nccl_launch_us=300, seed=os.getpid()))
        core.find_gpus([cuda_library()], [nccl_library()])
        core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": hosts, **options})
    if ON_REAL_GPU and by_nccl and len(set().union(*core.gpus())) < MPI.COMM_WORLD.size:
        pytest.skip("NCCL needs a GPU for each rank")
    if by_nccl:
        assert core.gpu_road() == (True, True, "", False)
        assert core.transports()["nccl"] == ""
    return core


class CudaError(RuntimeError):
    """A CUDA function did not return cudaSuccess."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Cuda:
    """The libcudart of this process, for calls by ctypes: `Cuda().cudaSetDevice(1)` raises CudaError.

    On a real GPU the stand-in's counters are 0, and devices beyond those of the machine are its first ones.
    """

    def __init__(self, path: str | None = None):
        self.library = ctypes.CDLL(path or os.environ.get("MYKV_CUDA_LIBRARY") or cuda_library())
        self._may_go_on: dict[int, threading.Event] = {}
        self._held: list = []  # functions that a real GPU still calls
        for name in ("cudaGetErrorName", "cudaGetErrorString"):
            getattr(self.library, name).restype = ctypes.c_char_p
        if ON_REAL_GPU:
            return
        for name in ("standin_bus_id", "standin_violation"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("standin_alias",):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("standin_extent", "standin_allocated"):
            getattr(self.library, name).restype = ctypes.c_size_t
        self.library.standin_calls.restype = ctypes.c_long

    def __getattr__(self, name: str):
        """A function that raises what it returns (CUDA's), or returns it (cudaGetError..., standin_...)."""
        if ON_REAL_GPU and name.startswith("standin_"):
            return lambda *_: 0
        function = getattr(self.library, name)

        def call(*arguments):
            result = function(*(_plain(argument) for argument in arguments))
            if name.startswith("standin_") or name in ("cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError"):
                return result
            if result != 0:
                text = self.library.cudaGetErrorString(result).decode()
                raise CudaError(result, f"{name}: {text} ({result})")
            return None

        return call

    def code(self, name: str, *arguments) -> int:
        """The result of a function that is expected to fail."""
        return getattr(self.library, name)(*(_plain(argument) for argument in arguments))

    def device(self) -> int:
        """The current device of this thread."""
        found = ctypes.c_int()
        self.cudaGetDevice(ctypes.byref(found))
        return found.value

    def at_hand(self, device: int) -> int:
        """The number of a device that exists."""
        if not ON_REAL_GPU:
            return device
        count = ctypes.c_int()
        self.cudaGetDeviceCount(ctypes.byref(count))
        return device % count.value

    def delay(self, device: int, stream, microseconds: int) -> None:
        """Let what comes next into a stream of a device begin so late."""
        if not ON_REAL_GPU:
            self.standin_delay(device, stream, microseconds)
            return
        with _Current(self, device):
            memory = ctypes.c_void_p()
            self.cudaMalloc(ctypes.byref(memory), _LATE_BYTES)  # not freed, since that would wait for the stream
            half = _LATE_BYTES // 2
            for _ in range(2 * microseconds // _LATE_US):
                self.cudaMemcpyAsync(memory.value + half, memory.value, half, DEVICE_TO_DEVICE, stream)

    def hold(self, device: int, stream, is_held: bool) -> None:
        """Let nothing that comes next into a stream begin, until this is called once more."""
        if not ON_REAL_GPU:
            self.standin_hold(device, stream, int(is_held))
        elif not is_held:
            self._may_go_on[stream.value].set()
        else:
            may_go_on = self._may_go_on[stream.value] = threading.Event()
            function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: may_go_on.wait(60))
            self._held.append(function)
            self.cudaLaunchHostFunc(stream, function, None)

    def stream(self, flags: int = 1) -> ctypes.c_void_p:
        """A new stream of the current device."""
        made = ctypes.c_void_p()
        self.cudaStreamCreateWithFlags(ctypes.byref(made), flags)
        return made

    def event(self) -> ctypes.c_void_p:
        """A new event of the current device."""
        made = ctypes.c_void_p()
        self.cudaEventCreateWithFlags(ctypes.byref(made), 2)
        return made

    def violations(self) -> list[str]:
        """Misuses in this process that would fail on a real machine."""
        return [self.standin_violation(index).decode() for index in range(self.standin_violations())]


class NcclError(RuntimeError):
    """An NCCL function returned neither ncclSuccess nor ncclInProgress."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_char * 128)]  # noqa: RUF012


class NcclConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17 to 2.23."""

    _fields_ = [  # noqa: RUF012
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    ]

    def __init__(self, blocking: int):
        unset = -(2**31)
        super().__init__(ctypes.sizeof(NcclConfig), 0xCAFEBEEF, 22304, blocking, unset, unset, unset, None, unset)


class Nccl:
    """The stand-in for libnccl of this process, for calls by ctypes; functions raise NcclError, or give their code."""

    INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
    SUM, PROD, MAX, MIN, AVG = range(5)
    INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 4, 5, 6, 7

    def __init__(self, path: str | None = None):
        self.cuda = Cuda()
        self.library = ctypes.CDLL(path or os.environ.get("MYKV_NCCL_LIBRARY") or nccl_library())
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self.library, name).restype = ctypes.c_char_p
        if not ON_REAL_GPU:
            self.library.standin_nccl_calls.restype = ctypes.c_long

    def __getattr__(self, name: str):
        if ON_REAL_GPU and name.startswith("standin_"):
            return lambda *_: 0
        function = getattr(self.library, name)

        def call(*arguments):
            result = function(*(_plain(argument) for argument in arguments))
            if name.startswith("nccl") and isinstance(result, int) and result not in (0, self.IN_PROGRESS):
                text = self.library.ncclGetErrorString(result).decode()
                detail = self.library.ncclGetLastError(None).decode()
                raise NcclError(result, f"{name}: {text} ({result}): {detail}")
            return result

        return call

    def unique_id(self) -> bytes:
        """A new id; this process must live until all ranks have met."""
        made = UniqueId()
        self.ncclGetUniqueId(ctypes.byref(made))
        return bytes(made)

    def comm(self, size: int, unique_id: bytes, rank: int, blocking: bool = True) -> ctypes.c_void_p:
        """A communicator on the current device; without blocking it may still be in progress."""
        made = ctypes.c_void_p()
        config = NcclConfig(int(blocking))
        name = UniqueId.from_buffer_copy(unique_id)
        self.ncclCommInitRankConfig(ctypes.byref(made), size, name, rank, ctypes.byref(config))
        return made

    def async_error(self, comm) -> int:
        """The result of ncclCommGetAsyncError."""
        code = ctypes.c_int(-1)
        self.ncclCommGetAsyncError(comm, ctypes.byref(code))
        return code.value


class DeviceArray:
    """Memory of a device with a shape and a dtype, for one test.

    Parameters
    ----------
    values : numpy.ndarray
        Contents, copied to the device.
    device : int
        Number of the device.
    cuda : Cuda, optional
    """

    def __init__(self, values, device: int = 0, cuda: Cuda | None = None):
        values = np.asarray(values)
        self.cuda = cuda or Cuda()
        self.device, self.shape = self.cuda.at_hand(device), values.shape
        self.dtype, self.nbytes = values.dtype, values.nbytes
        pointer = ctypes.c_void_p()
        with self._current():
            self.cuda.cudaMalloc(ctypes.byref(pointer), max(values.nbytes, 1))
        self.pointer = pointer.value
        self.fill(values)

    def fill(self, values) -> None:
        """Copy values of the same size to the device, and wait."""
        values = np.ascontiguousarray(values, dtype=self.dtype)
        assert values.nbytes == self.nbytes
        with self._current():
            self.cuda.cudaMemcpy(self.pointer, values.ctypes.data, self.nbytes, HOST_TO_DEVICE)
            if self.nbytes:  # the call may return while the values are on their way; this one comes after them
                self.cuda.cudaMemcpy(ctypes.byref(ctypes.c_char()), self.pointer, 1, DEVICE_TO_HOST)

    def numpy(self) -> np.ndarray:
        """The values, after what the legacy default stream waits for."""
        values = np.empty(self.shape, self.dtype)
        with self._current():
            self.cuda.cudaMemcpy(values.ctypes.data, self.pointer, self.nbytes, DEVICE_TO_HOST)
        return values

    def free(self) -> None:
        """Free the memory. Not done by the destructor, since streams may still use it."""
        with self._current():
            self.cuda.cudaFree(self.pointer)
        self.pointer = None

    def _current(self):
        return _Current(self.cuda, self.device)


class _Current:
    """Context manager that makes a device this thread's current one."""

    def __init__(self, cuda: Cuda, device: int):
        self.cuda, self.device = cuda, device

    def __enter__(self):
        self.before = self.cuda.device()
        self.cuda.cudaSetDevice(self.cuda.at_hand(self.device))

    def __exit__(self, *_):
        self.cuda.code("cudaSetDevice", self.before)


class Mxnet:
    """The stand-in for libmxnet of this process: arrays that say that they are on GPUs, and an engine for them.

    Parameters
    ----------
    major : int
        Of the release whose interface it has.
    on_start : callable, optional
        What the engine of 2.0 does before an operation touches data.
    """

    DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
    CPU, GPU, PRIORITIZED = 1, 2, 3  # kinds of devices, and a FnProperty

    def __init__(self, major: int = 1, on_start=None):
        from compiled import core

        self.library = ctypes.CDLL(mxnet_library())
        self.library.standin_mx_array.restype = ctypes.c_void_p
        self._on_start = ctypes.CFUNCTYPE(None)(on_start) if on_start else None
        self.library.standin_mx_release(major, self._on_start)
        self.made: list[int] = []
        core.attach_mxnet(self.library._handle, major)

    def array(self, memory) -> int:
        """Handle of an array over the memory of a DeviceArray or of a numpy.ndarray; free() frees all."""
        shape = (ctypes.c_int64 * len(memory.shape))(*memory.shape)
        on_gpu = isinstance(memory, DeviceArray)
        pointer, place = (memory.pointer, (self.GPU, memory.device)) if on_gpu else (memory.ctypes.data, (self.CPU, 0))
        dtype = self.DTYPES.index(str(memory.dtype))
        self.made.append(
            self.library.standin_mx_array(ctypes.c_void_p(pointer), *place, dtype, len(memory.shape), shape)
        )
        return self.made[-1]

    def wait(self, array: int, seconds: float = 20.0) -> str:
        """Wait until nothing is under way on an array; the text of its error, or ''."""
        text = ctypes.create_string_buffer(2000)
        code = self.library.standin_mx_wait(ctypes.c_void_p(array), ctypes.c_double(seconds), text, 2000)
        assert code >= 0, "an operation hangs"
        return text.value.decode()

    def spoil(self, array: int, text: str) -> None:
        """Set an array's error as from an earlier operation."""
        self.library.standin_mx_spoil(ctypes.c_void_p(array), text.encode())

    def fail_to_push(self, how: int) -> None:
        """Let the next push fail: 1 before the engine has made anything of it, 2 after, when it runs the deleter."""
        self.library.standin_mx_fail_to_push(how)

    def free(self) -> None:
        """Free all arrays, and assert that nothing else is left of them."""
        for array in self.made:
            self.library.MXNDArrayFree(ctypes.c_void_p(array))
        self.made.clear()
        end = time.monotonic() + 5
        while (left := (self.library.standin_mx_operations(), self.library.standin_mx_handles())) != (0, 0):
            assert time.monotonic() < end, left  # operations, handles
            time.sleep(0.001)
        self.library.standin_mx_release(1, None)


def _plain(argument):
    """Pointers and sizes are 64 bits wide, which ctypes would not do with an int; so is an int in a register."""
    if isinstance(argument, int):
        return ctypes.c_void_p(argument) if argument > 0x7FFFFFFF else ctypes.c_ssize_t(argument)
    return argument.encode() if isinstance(argument, str) else argument

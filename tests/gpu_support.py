"""Machines without a GPU: stand-ins for libcudart and libnccl (tests/standin), and device memory for tests.

The stand-ins have CUDA's and NCCL's names, prototypes and semantics, and are made to be less orderly than a real GPU
where both may be: streams overtake each other, device memory cannot be touched by host code, an operation of NCCL's
holds its device until all ranks have come. tests/standin/standin.h and nccl.h tell what they offer beside.

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
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

SOURCES = Path(__file__).parent / "standin"
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -pthread -shared"
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


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
    """Path of the stand-in for libcudart."""
    return str(_library("libcudart.so.12", "cudart*.cpp"))


def nccl_library() -> str:
    """Path of the stand-in for libnccl."""
    return str(_library("libnccl.so.2", "nccl*.cpp"))


def environment(**settings) -> dict[str, str]:
    """Environment of ranks that use the stand-ins; `settings` without their prefix, as in `delay_us=0`."""
    return {
        "MYKV_CUDA_LIBRARY": cuda_library(),
        "MYKV_NCCL_LIBRARY": nccl_library(),
        "STANDIN_CUDART": cuda_library(),
        **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()},
    }


class CudaError(RuntimeError):
    """A function of CUDA's gave something else than cudaSuccess."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Cuda:
    """The stand-in for libcudart of this process, for calls by ctypes: `Cuda().cudaSetDevice(1)` raises CudaError."""

    def __init__(self, path: str | None = None):
        self.library = ctypes.CDLL(path or os.environ.get("MYKV_CUDA_LIBRARY") or cuda_library())
        for name in ("cudaGetErrorName", "cudaGetErrorString", "standin_bus_id", "standin_violation"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("standin_alias",):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("standin_extent", "standin_allocated"):
            getattr(self.library, name).restype = ctypes.c_size_t
        self.library.standin_calls.restype = ctypes.c_long

    def __getattr__(self, name: str):
        """A function that raises what it returns (CUDA's), or returns it (cudaGetError..., standin_...)."""
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
        """What a function returns, for those that are expected to fail."""
        return getattr(self.library, name)(*(_plain(argument) for argument in arguments))

    def device(self) -> int:
        """The current device of this thread."""
        return self.library.standin_current_device()

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
        """What was done in this process that a real machine would punish."""
        return [self.standin_violation(index).decode() for index in range(self.standin_violations())]


class NcclError(RuntimeError):
    """A function of NCCL's gave neither ncclSuccess nor ncclInProgress."""

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
        self.library.standin_nccl_calls.restype = ctypes.c_long

    def __getattr__(self, name: str):
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
        """What ncclCommGetAsyncError tells."""
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
        self.device, self.shape, self.dtype, self.nbytes = device, values.shape, values.dtype, values.nbytes
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

    def numpy(self) -> np.ndarray:
        """The values, after what the legacy default stream waits for."""
        values = np.empty(self.shape, self.dtype)
        with self._current():
            self.cuda.cudaMemcpy(values.ctypes.data, self.pointer, self.nbytes, DEVICE_TO_HOST)
        return values

    def free(self) -> None:
        """Give the memory back; not done when the object goes, since streams may still use it."""
        with self._current():
            self.cuda.cudaFree(self.pointer)
        self.pointer = None

    def _current(self):
        return _Current(self.cuda, self.device)


class _Current:
    """Make a device the current one of this thread for a while."""

    def __init__(self, cuda: Cuda, device: int):
        self.cuda, self.device = cuda, device

    def __enter__(self):
        self.before = self.cuda.device()
        self.cuda.cudaSetDevice(self.device)

    def __exit__(self, *_):
        self.cuda.code("cudaSetDevice", self.before)


def _plain(argument):
    """Pointers and sizes are 64 bits wide, which ctypes would not do with an int; so is an int in a register."""
    if isinstance(argument, int):
        return ctypes.c_void_p(argument) if argument > 0x7FFFFFFF else ctypes.c_ssize_t(argument)
    return argument.encode() if isinstance(argument, str) else argument

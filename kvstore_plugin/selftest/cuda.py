"""Memory and streams of GPUs for the self-test, created by the CUDA runtime that the core uses."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ..world import gpu_libraries

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind


@functools.lru_cache(maxsize=None)
def _runtime() -> Any:
    return ctypes.CDLL(gpu_libraries.find()["cuda"]["path"])


def call(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA runtime.

    Raises
    ------
    RuntimeError
        The function fails; the message contains CUDA's name for the error.
    """
    runtime = _runtime()
    code = getattr(runtime, function)(*arguments)
    if code:
        runtime.cudaGetErrorName.restype = ctypes.c_char_p
        raise RuntimeError(f"{function} failed: {runtime.cudaGetErrorName(code).decode()}")


class Stream:
    """A stream of one GPU.

    Parameters
    ----------
    device : int
        Number of the GPU.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._handle = ctypes.c_void_p()
        call("cudaSetDevice", device)
        call("cudaStreamCreateWithFlags", ctypes.byref(self._handle), 1)  # cudaStreamNonBlocking

    @property
    def address(self) -> int:
        """The stream's handle as an int, for the core."""
        return self._handle.value or 0

    def wait(self) -> None:
        """Wait until all work in the stream is done."""
        call("cudaStreamSynchronize", self._handle)

    def close(self) -> None:
        """Destroy the stream."""
        call("cudaStreamDestroy", self._handle)


class DeviceArray:
    """An array in a GPU's memory.

    Parameters
    ----------
    values : numpy.ndarray
        The initial values.
    device : int
        Number of the GPU.
    """

    def __init__(self, values: np.ndarray, device: int) -> None:
        self.device, self.dtype, self.shape, self.nbytes = device, values.dtype, values.shape, values.nbytes
        self._memory = ctypes.c_void_p()
        call("cudaSetDevice", device)
        call("cudaMalloc", ctypes.byref(self._memory), ctypes.c_size_t(max(self.nbytes, 1)))
        self.fill(values)

    @property
    def address(self) -> int:
        """Address of the first element."""
        return self._memory.value or 0

    @property
    def pointer(self) -> tuple[int, int]:
        """Address and device, for the core."""
        return self.address, self.device

    def fill(self, values: np.ndarray) -> None:
        """Copy values into the array, and wait for the copy."""
        values = np.ascontiguousarray(values)
        size = ctypes.c_size_t(self.nbytes)
        call("cudaMemcpy", self._memory, values.ctypes.data_as(ctypes.c_void_p), size, _HOST_TO_DEVICE)
        call("cudaStreamSynchronize", None)  # cudaMemcpy may return before a small array has reached the GPU

    def numpy(self) -> np.ndarray:
        """A copy of the values in host memory, made after all work in the GPU's default stream."""
        values = np.empty(self.shape, self.dtype)
        size = ctypes.c_size_t(self.nbytes)
        call("cudaMemcpy", values.ctypes.data_as(ctypes.c_void_p), self._memory, size, _DEVICE_TO_HOST)
        return values

    def copy_from(self, other: DeviceArray, stream: Stream) -> None:
        """Enqueue in a stream a copy from another array of the same GPU into this array."""
        size = ctypes.c_size_t(self.nbytes)
        handle = ctypes.c_void_p(stream.address)
        call("cudaSetDevice", self.device)
        call("cudaMemcpyAsync", self._memory, ctypes.c_void_p(other.address), size, _DEVICE_TO_DEVICE, handle)

    def close(self) -> None:
        """Free the memory."""
        call("cudaSetDevice", self.device)
        call("cudaFree", self._memory)

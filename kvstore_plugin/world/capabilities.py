"""Functions with Horovod's names that tell which libraries this build supports, and which it uses."""

from __future__ import annotations

from . import gpu_libraries, process


def mpi_built() -> bool:
    """True: the core is always built for an MPI.

    Examples
    --------
    >>> mykv.mpi_built()
    True
    """
    return True


def mpi_enabled() -> bool:
    """Whether MPI is in use, which is from init() to shutdown().

    Examples
    --------
    >>> mykv.mpi_enabled()  # after init()
    True
    """
    return process.is_initialized()


def mpi_threads_supported() -> bool:
    """True: init() rejects an MPI without MPI_THREAD_MULTIPLE, so scripts may use mpi4py in addition to this package.

    Raises
    ------
    RuntimeError
        kvstore_plugin is not initialized.

    Examples
    --------
    >>> mykv.mpi_threads_supported()  # so mpi4py may send messages of its own
    True
    >>> from mpi4py import MPI
    >>> MPI.COMM_WORLD.bcast("a message of the script", root=0)
    'a message of the script'
    """
    process.rank()
    return True


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks.

    Raises
    ------
    RuntimeError
        kvstore_plugin is not initialized.

    Examples
    --------
    >>> if mykv.is_homogeneous():
    ...     hosts = mykv.size() // mykv.local_size()
    """
    return len({len(ranks) for ranks in process.core.host_ranks()}) == 1


def gloo_built() -> bool:
    """False: this package does not use Gloo.

    Examples
    --------
    >>> mykv.gloo_built()
    False
    """
    return False


def gloo_enabled() -> bool:
    """False: this package does not use Gloo.

    Examples
    --------
    >>> mykv.gloo_enabled()
    False
    """
    return False


def nccl_built() -> int:
    """Version of the NCCL that was found (docs/gpu.md), as in NCCL_VERSION_CODE; 0 if none was found.

    The core is built without NCCL and loads it at run time.

    Examples
    --------
    >>> version = mykv.nccl_built()  # such as 22105, for NCCL 2.21.5
    >>> text = f"NCCL {version}" if version else "no NCCL"
    """
    return int(gpu_libraries.find()["nccl"]["version"])


def cuda_built() -> bool:
    """Whether a CUDA runtime was found that the core can use (docs/gpu.md); there may still be no GPU.

    Examples
    --------
    >>> road = "GPU to GPU" if mykv.cuda_built() and mykv.nccl_built() else "through host memory"
    """
    return bool(gpu_libraries.find()["cuda"]["version"])


def rocm_built() -> bool:
    """False: this package does not use ROCm.

    Examples
    --------
    >>> mykv.rocm_built()
    False
    """
    return False


def ddl_built() -> bool:
    """False: this package does not use IBM DDL.

    Examples
    --------
    >>> mykv.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """False: this package does not use oneCCL.

    Examples
    --------
    >>> mykv.ccl_built()
    False
    """
    return False

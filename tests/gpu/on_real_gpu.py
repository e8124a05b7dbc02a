"""Runs tests of arrays on GPUs with a real GPU in place of the stand-ins: ``python tests/gpu/on_real_gpu.py``.

Arguments go to pytest. Arrays of MXNet are of the stand-in for libmxnet, except in test_mxnet_on_gpu.py, which needs an
MXNet that is built for CUDA and is skipped without one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvstore_plugin.world import gpu_libraries

_FILES = ("test_gpu_staged.py", "test_gpu_nccl.py", "test_gpu_bridge.py", "test_gpu_reads.py", "test_mxnet_on_gpu.py")


def main() -> None:
    """Start pytest with the libraries that mykv finds."""
    found = gpu_libraries.find()
    if not found["devices"]:
        sys.exit(f"There is no GPU to test. {found['cuda']['problem']}".rstrip())
    os.environ["MYKV_TEST_GPU"] = "1"
    os.environ["MYKV_CUDA_LIBRARY"] = found["cuda"]["path"]
    os.environ["MYKV_NCCL_LIBRARY"] = found["nccl"]["path"]
    files = [str(Path(__file__).with_name(name)) for name in _FILES]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *files, *sys.argv[1:]])


if __name__ == "__main__":
    main()

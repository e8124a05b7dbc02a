"""Finds the CUDA runtime and NCCL of this environment."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any

from . import core as core_loader
from . import settings
from .loaded_files import loaded_files

_log = logging.getLogger("kvstore_plugin")
_logged = ""
mxnet_has_cuda = True  # whether MXNet supports arrays on GPUs; set by compat/engine.py

# File names that the system's loader tries to load, in this order.
_SYSTEM_CUDA = ("libcudart.so.12", "libcudart.so.13", "libcudart.so.11.0", "libcudart.so")
_SYSTEM_NCCL = ("libnccl.so.2", "libnccl.so")


@functools.lru_cache(maxsize=None)
def find() -> dict[str, Any]:
    """Look for the CUDA runtime and for NCCL, once per process.

    Files named by MYKV_CUDA_LIBRARY and MYKV_NCCL_LIBRARY replace all others. Otherwise the order is: libraries that
    the process has loaded already, since MXNet works with them; the PyPI packages nvidia-*; the system.

    Returns
    -------
    dict
        ``cuda`` and ``nccl``, each with ``path`` ('' for none), ``version`` (0 for none) and ``problem``; ``driver``,
        the newest CUDA version of the driver; ``devices``, the number of GPUs that this process sees.
    """
    named_cuda, named_nccl = settings.value("MYKV_CUDA_LIBRARY"), settings.value("MYKV_NCCL_LIBRARY")
    cuda = [named_cuda] if named_cuda else [*loaded_files("libcudart.so"), *_packaged("libcudart.so"), *_SYSTEM_CUDA]
    mxnet = loaded_files("libmxnet.so")  # CUDA builds of MXNet may contain NCCL
    nccl = (
        [named_nccl] if named_nccl else [*loaded_files("libnccl.so"), *mxnet, *_packaged("libnccl.so"), *_SYSTEM_NCCL]
    )
    return core_loader.load().find_gpus(cuda, nccl)


def unusable() -> list[str]:
    """Messages about unusable files that environment variables name."""
    return [
        f"{variable} names a file that cannot be used: {find()[library]['problem'].rstrip('.')}."
        for variable, library in (("MYKV_CUDA_LIBRARY", "cuda"), ("MYKV_NCCL_LIBRARY", "nccl"))
        if settings.value(variable) and not find()[library]["version"]
    ]


def log_road(core: Any) -> None:
    """Log on rank 0 how arrays on GPUs are exchanged, and why: once, and again only after a change."""
    global _logged
    if core.rank() == 0:
        for sentence in unusable():
            _log.warning("%s", sentence)
    some_gpu, by_nccl, reason, is_chosen = core.gpu_road()
    if not some_gpu or core.rank() != 0:
        return
    text = "Arrays on GPUs are exchanged " + _shown(by_nccl, reason)
    if text != _logged:
        _logged = text
        _log.log(_level(by_nccl or is_chosen), "%s.", text)


def log_road_of_set(world: Any, group: Any, name: str) -> None:
    """Log on a process set's first member how the set exchanges arrays on GPUs, if not as the set of all ranks."""
    some_gpu, by_nccl, reason, is_chosen = group.gpu_road()
    if some_gpu and group.rank() == 0 and by_nccl != world.gpu_road()[1]:
        _log.log(_level(by_nccl or is_chosen), "Arrays on GPUs of %s are exchanged %s.", name, _shown(by_nccl, reason))


def _shown(by_nccl: bool, reason: str) -> str:
    return "by NCCL" if by_nccl else f"through host memory: {reason}"


def _level(is_fine: bool) -> int:
    return logging.INFO if is_fine or not mxnet_has_cuda else logging.WARNING


def _packaged(name: str) -> list[str]:
    """The files in the PyPI packages nvidia-cuda-runtime*, nvidia-nccl-cu11, -cu12, -cu13; the newest CUDA last."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    folders.append(os.path.join(sysconfig.get_paths()["purelib"], "nvidia"))
    found = {path for folder in folders for path in Path(folder).glob(f"*/lib/{name}*")}
    return sorted(str(path) for path in found)

"""Attaches the core to MXNet in init(), and waits for MXNet's engine when this rank leaves the job."""

from __future__ import annotations

from typing import Any

from ..world import gpu_libraries, process
from . import draining, engine_errors, late_views, mxnet, patches  # noqa: F401 - registered when imported


class _Engine(process.Follower):
    def __init__(self) -> None:
        self._has_drain_thread = False

    def versions(self) -> dict[str, str]:
        return {"MXNet": mxnet.mx.__version__}

    def joined(self, core: Any) -> None:
        patches.install()
        core.attach_mxnet(mxnet.library_handle(), mxnet.MAJOR, mxnet.engine_blocks(), mxnet.MXNetError)
        if mxnet.MAJOR == 1:
            core.drop_crash_handler_of("libmxnet")
        if not mxnet.engine_blocks():
            engine_errors.make_room(mxnet)
        if not self._has_drain_thread:
            self._has_drain_thread = True
            draining.begin()

    def drain(self, seconds: float) -> int:
        return draining.wait(mxnet.wait_for_all, seconds)


process.follow(_Engine())
gpu_libraries.mxnet_has_cuda = mxnet.HAS_GPUS

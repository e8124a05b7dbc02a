"""Attaches the core to MXNet's engine in init(), and waits for the engine when this rank leaves."""

from __future__ import annotations

from typing import Any

from . import draining, engine_errors, gpu, mxnet_compat, process


class _Engine(process.Follower):
    def __init__(self) -> None:
        self._has_drain_thread = False

    def versions(self) -> dict[str, str]:
        return {"MXNet": mxnet_compat.mx.__version__}

    def joined(self, core: Any) -> None:
        core.attach_mxnet(
            mxnet_compat.library_handle(), mxnet_compat.MAJOR, mxnet_compat.engine_blocks(), mxnet_compat.MXNetError
        )
        if mxnet_compat.MAJOR == 1:
            core.drop_crash_handler_of("libmxnet")
        if not mxnet_compat.engine_blocks():
            engine_errors.make_room(mxnet_compat)
        if not self._has_drain_thread:
            self._has_drain_thread = True
            draining.begin()

    def drain(self, seconds: float) -> list[str]:
        return draining.wait(mxnet_compat.wait_for_all, seconds)


process.follow(_Engine())
gpu.mxnet_has_cuda = mxnet_compat.HAS_GPUS

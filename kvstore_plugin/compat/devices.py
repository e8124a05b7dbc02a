"""Selects the devices of a worker."""

from __future__ import annotations

from ..world import process
from ..world.own_gpus import own_gpus
from .mxnet import HAS_GPUS, mx


def default_devices() -> list:
    """Devices of this worker, for `ctx` or `device` of Gluon's methods.

    If MXNet is built for GPUs and finds some: this worker's share of the host's GPUs, in the order of local ranks, for
    example ``[mx.gpu(2), mx.gpu(3)]`` for the second of two workers that see four GPUs. If there are more workers than
    GPUs, several workers share a GPU, which is logged. Without GPUs: ``[mx.cpu()]``.

    Returns
    -------
    list of mx.Context

    Raises
    ------
    RuntimeError
        kvstore_plugin is not initialized, and init() fails.

    Examples
    --------
    >>> devices = mykv.default_devices()  # on a machine without GPUs: [mx.cpu()]
    >>> net.initialize(mx.init.Xavier(), devices, force_reinit=True)
    >>> parts = gluon.utils.split_and_load(images, devices)
    """
    process.require()
    own = own_gpus() if HAS_GPUS and mx.context.num_gpus() else []
    return [mx.gpu(number) for number in own] or [mx.cpu()]

"""A worker of test_gpu_death.py: four of them sum arrays on GPUs (stand-ins), and three are killed in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from kvstore_plugin.world import process, settings
from standin.gpu_support import Cuda, DeviceArray, Nccl

# By the number of its ranks, each world's victim, its settings, its road, and whether NCCL tells of a death.
_WORLDS = {
    4: (0, {"MYKV_VIRTUAL_HOSTS": "2"}, "NCCL", True),
    3: (2, {"MYKV_VIRTUAL_HOSTS": "1"}, "NCCL", False),
    2: (0, {"MYKV_GPU": "host"}, "host memory", False),
    1: (None, {"MYKV_GPU": "host"}, "host memory", False),
}
_COUNT, _POSTED = 200_000, 48  # so many that the victim dies among them, also where it is late


def _submit(name: str, array: DeviceArray):
    place = [(array.pointer, array.device)]
    return process.core.submit_on_gpu(
        name, "allreduce", "float32", [_COUNT], {"inputs": place, "outputs": place}, "max"
    )


def train(state, cuda: Cuda, nccl: Nccl, device: int) -> None:
    """Post many operations; the victim dies when the first has ended."""
    size, began = mykv.size(), time.monotonic()
    victim, _, road, nccl_tells = _WORLDS[size]
    nccl.standin_nccl_remote_error(int(nccl_tells))
    _, by_nccl, _, _ = process.core.gpu_road()
    assert road == ("NCCL" if by_nccl else "host memory")
    arrays = [DeviceArray(np.full(_COUNT, 1.0, "float32"), device, cuda) for _ in range(_POSTED)]
    works = [_submit(f"{size}/{number}", array) for number, array in enumerate(arrays)]
    if victim is not None:
        os.environ.update(_WORLDS[size - 1][1])  # whoever is left asks for the same in the next world
        settings.read()  # init() alone reads them
    try:
        process.wait(works[0])
        if mykv.rank() == victim:
            print("dies", size, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        for work in works:
            process.wait(work)
        if victim is not None:
            time.sleep(60)  # the victim is late with its death, and all was done before
    except RuntimeError as error:
        print(f"lost {size} after {time.monotonic() - began:.1f} s: {error}", flush=True)
        for work in works:  # each lets go of its memory when it has ended, and some end after others
            with contextlib.suppress(RuntimeError):
                process.wait(work)
        for array in arrays:
            array.free()
        raise
    for array in arrays:
        assert (array.numpy() == 1).all()
        array.free()
    print("summed", size, "by", road, flush=True)


def main() -> None:
    os.environ.update(_WORLDS[4][1])
    mykv.init()
    device, cuda, nccl = mykv.rank(), Cuda(), Nccl()
    net = mx.gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)
    mykv.run_elastic(train, mykv.ElasticState(net=net, trainer=trainer), cuda, nccl, device)
    mykv.shutdown()
    assert nccl.standin_nccl_live() == 0
    assert cuda.violations() == []
    print("all is well", flush=True)


if __name__ == "__main__":
    main()

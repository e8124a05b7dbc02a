"""A rank that trains and saves until somebody kills it: ``victim core`` with numpy alone, ``victim gluon``."""

from __future__ import annotations

import importlib.util
import sys
import time
import zlib
from pathlib import Path
from typing import BinaryIO, Callable

import numpy as np

from .job import say, say_pid


def _core() -> None:
    from mpi4py import MPI

    say_pid(MPI.COMM_WORLD.Get_rank())
    import mykv_core as core

    # By its path: the package itself imports MXNet, which takes seconds.
    path = Path(importlib.util.find_spec("kvstore_plugin").origin).with_name("atomic_file.py")
    spec = importlib.util.spec_from_file_location("atomic_file", path)
    atomic_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(atomic_file)
    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": int(sys.argv[2])})
    say("inited")
    sizes = [10, 5000, 300000, 1 << 20]
    arrays = [np.ones(size, "float32") for size in sizes]
    buffer = core.allocate(4 << 20)
    while True:
        for turn in range(10):
            works = [core.submit_allreduce(f"x{k}", [one], [one], "max") for k, one in enumerate(arrays)]
            works.append(core.submit_bucket("bucket", buffer, 0, 1 << 20, "float32"))
            for work in works:
                work.wait()
            time.sleep(0.002 * turn)
        if core.rank() == 0:
            say("saving")
            atomic_file.write("numbers", _with_checksum(arrays[3].tobytes()))


def _with_checksum(content: bytes) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(zlib.crc32(content).to_bytes(4, "little") + content)


def _gluon() -> None:
    import os

    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if name in os.environ:
            say_pid(int(os.environ[name]))
            break
    import kvstore_plugin as mykv

    mykv.init()
    say("inited")
    from support import array, dense_network
    from mxnet import autograd  # isort: skip

    net = dense_network(seed=0, inputs=300, widths=(300, 300, 2))
    trainer = mykv.DistributedTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.001}, update_on_kvstore=int(sys.argv[2]) > 1
    )
    data = array(np.ones((16, 300), "float32"))
    step = 0
    while True:
        with autograd.record():
            loss = (net(data) ** 2).sum()
        loss.backward()
        trainer.step(16)
        step += 1
        if step == 3:
            say("step")
        if step % 20 == 0:
            say("saving")
            trainer.save_states("states")


if __name__ == "__main__":
    {"core": _core, "gluon": _gluon}[sys.argv[1]]()

"""A rank that trains and saves until it is killed: ``victim MODE HOSTS``.

The mode core has numpy alone; the others are a training with MXNet each, as training.py makes it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import zlib
from pathlib import Path
from typing import BinaryIO, Callable

import numpy as np

from .job import say, say_pid

_SAVES_AFTER = 20  # steps
# What is trained on one host, and on several.
_MODES = {
    "gluon": ("buckets", "store"),
    "stock": ("stock on the store", "stock on the store"),  # without it, its files are MXNet's own, and may be half
    "sparse": ("sparse", "sparse on the store"),
    "join": ("join", "join"),
    "amp": ("amp", "amp"),
    "compression": ("compression", "compression"),
}


def _core() -> None:
    from mpi4py import MPI

    say_pid(MPI.COMM_WORLD.Get_rank())
    from compiled import core

    # By its path: the package itself imports MXNet, which takes seconds.
    path = Path(importlib.util.find_spec("kvstore_plugin").origin).parent / "sharded_optimizer" / "atomic_file.py"
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


def _gluon(mode: str, hosts: int) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        if name in os.environ:
            say_pid(int(os.environ[name]))
            break
    import kvstore_plugin as mykv

    mykv.init()
    say("inited")
    from .training import Training
    from mxnet import autograd  # isort: skip

    training = Training(_MODES[mode][hosts > 1], width=300)
    done = 0
    while True:
        with training.context():
            for step in range(training.steps(_SAVES_AFTER)):
                with autograd.record():
                    loss = training.loss(step)
                training.backward(loss, step)
                training.update()
                done += 1
                if done == 3:
                    say("step")
        say("saving")
        training.trainer.save_states("states")


if __name__ == "__main__":
    if sys.argv[1] == "core":
        _core()
    else:
        _gluon(sys.argv[1], int(sys.argv[2]))

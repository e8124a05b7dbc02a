"""A rank that makes very many small steps: ``soaking MODE SECONDS STEPS``; prints what it holds while it goes on.

core     reductions, broadcasts and buckets of a few numbers, on numpy arrays
trainer  steps of a DistributedTrainer with one small layer
store    push, pull and pushpull on a store, collective operations without a name
made     trainers, stores and process sets that come and go
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from .job import say

_SAMPLES = 20
_ROUND = 50  # steps between two looks at the clock, which all ranks share


def _core():
    from compiled import core

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": int(os.environ.get("MYKV_VIRTUAL_HOSTS", "1"))})
    buffer = core.allocate(4096)
    array = np.ones(8, "float32")

    def step(number: int) -> None:
        works = [core.submit_allreduce("sum", [array], [array], "max")]
        if number % 3 == 0:
            works.append(core.submit_bucket("bucket", buffer, 0, 64, "float32"))
        if number % 7 == 0:
            works.append(core.submit_broadcast("broadcast", array, [array], number % core.size()))
        for work in works:
            work.wait()

    return step


def _trainer():
    import kvstore_plugin as mykv
    from harness.support import array, dense_network, mx
    from mxnet import autograd  # isort: skip

    mykv.init()
    net = dense_network(seed=0, inputs=3, widths=(2,))
    net.hybridize(static_alloc=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1e-6})
    data = array(np.ones((1, 3), "float32"))

    def step(number: int) -> None:
        with autograd.record():
            loss = net(data)
        loss.backward()
        trainer.step(1)
        if number % 10 == 0:
            mx.nd.waitall()

    return step


def _store():
    import kvstore_plugin as mykv
    from harness.support import array, mx

    store = mx.kv.create("mykv")
    kept, other, out = (array(np.zeros(4, "float32")) for _ in range(3))
    store.init("kept", kept)

    def step(number: int) -> None:
        store.pushpull("sum", other)
        store.push("kept", other)
        store.pull("kept", out)
        mykv.allreduce(other)
        if number % 10 == 0:
            mx.nd.waitall()
        if number % 50 == 0:
            other[:] = 0
            mykv.barrier()

    return step


def _made():
    import kvstore_plugin as mykv
    from harness.support import array, dense_network, mx
    from mxnet import autograd  # isort: skip

    mykv.init()
    data = array(np.ones((1, 3), "float32"))

    def step(number: int) -> None:
        net = dense_network(seed=0, inputs=3, widths=(2,))
        on_store = number % 2 == 0
        trainer = mykv.DistributedTrainer(net.collect_params(), "adam", update_on_kvstore=on_store)
        with autograd.record():
            loss = net(data)
        loss.backward()
        trainer.step(1)
        store = mx.kv.create("mykv")
        store.pushpull("a", array(np.ones(4, "float32")))
        mx.nd.waitall()
        if number % 10 == 0:
            part = mykv.add_process_set([number // 10 % mykv.size()])
            if part.included():
                mykv.allreduce(array(np.ones(4, "float32")), process_set=part).asnumpy()
            mykv.remove_process_set(part)
        del net, trainer, store, loss
        gc.collect()

    return step


def held() -> dict[str, int]:
    """What this process has of what may grow."""
    from compiled import core, testing

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "own_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared_files": Path("/proc/self/maps").read_text().count("/dev/shm/"),
        "maps": Path("/proc/self/maps").read_text().count("\n"),
        "names": testing.counted_names(core.world()),  # of operations, among all ranks
    }


def main() -> None:
    mode, seconds, most = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    comm = MPI.COMM_WORLD
    step = {"core": _core, "trainer": _trainer, "store": _store, "made": _made}[mode]()
    begin = time.monotonic()
    done = samples = 0
    size = 1 if mode == "made" else _ROUND
    while True:
        spent = comm.bcast(max((time.monotonic() - begin) / seconds, done / most))
        if spent >= samples / _SAMPLES:
            if "mxnet" in sys.modules:
                sys.modules["mxnet"].nd.waitall()
            say(f"held {comm.Get_rank()} {done} {held()}")
            samples += 1
        if spent >= 1:
            break
        for _ in range(size):
            step(done)
            done += 1
    comm.Barrier()
    if comm.Get_rank() == 0:
        say(f"steps {done}")


if __name__ == "__main__":
    main()

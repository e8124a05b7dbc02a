"""A rank that creates and drops very many keys, repeatedly: ``keyed MODE KEYS ROUNDS AT_ONCE``.

It prints for each round the time, the maximum memory and the remaining memory. AT_ONCE: number of keys under way
together.

core      operations on numpy arrays, each under a name of its own
store     init, push and pull of keys of a store, which then goes
trainers  parameters of a DistributedTrainer that makes a step, and goes
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time

import numpy as np
from mpi4py import MPI

from .job import say
from .soaking import held

_PARAMETERS = 1000  # of one trainer


def _core(at_once: int):
    import os

    from compiled import core

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": int(os.environ.get("MYKV_VIRTUAL_HOSTS", "1"))})
    arrays = np.ones((at_once, 4), "float32")

    def make(keys: int) -> None:
        for first in range(0, keys, at_once):
            works = [
                core.submit_allreduce(f"made/{first + number}", [one], [one], "max")
                for number, one in enumerate(arrays[: keys - first])
            ]
            for work in works:
                work.wait()

    def drop() -> None:
        core.world().forget("made/")

    return make, drop


def _store(at_once: int):
    import kvstore_plugin as mykv
    from harness.support import array, mx

    mykv.init()
    value = array(np.ones(4, "float32"))
    outs = [array(np.ones(4, "float32")) for _ in range(at_once)]  # with one only, all pulls would wait in line for it
    stores = []

    def make(keys: int) -> None:
        stores.append(mx.kv.create("mykv"))
        for key in range(keys):
            stores[0].init(key, value)
            stores[0].push(key, value)
            stores[0].pull(key, outs[key % at_once])
            if key % at_once == 0:
                mx.nd.waitall()
        mx.nd.waitall()
        assert all(out.asnumpy()[0] == mykv.size() for out in outs[: keys : max(1, at_once // 100)])

    return make, stores.clear


def _trainers(_: int):
    import kvstore_plugin as mykv
    from harness.support import array, mx
    from mxnet import autograd, gluon  # isort: skip

    mykv.init()

    def make(keys: int) -> None:
        for first in range(0, keys, _PARAMETERS):
            parameters = [gluon.Parameter(f"p{n}", shape=(4,)) for n in range(min(_PARAMETERS, keys - first))]
            for one in parameters:
                one.initialize(mx.init.One())
            named = {one.name: one for one in parameters}
            trainer = mykv.DistributedTrainer(named, "sgd", {"learning_rate": 0.5})
            with autograd.record():
                losses = [(one.data() * array(np.ones(4, "float32"))).sum() for one in parameters]
            autograd.backward(losses)
            trainer.step(1)
            mx.nd.waitall()
            assert parameters[-1].data().asnumpy()[0] == 0.5

    return make, lambda: None


def main() -> None:
    mode, keys, rounds, at_once = sys.argv[1], *map(int, sys.argv[2:])
    comm = MPI.COMM_WORLD
    make, drop = {"core": _core, "store": _store, "trainers": _trainers}[mode](at_once)
    trim = ctypes.CDLL(None).malloc_trim
    make(min(keys, 100))  # what is made once
    drop()
    before = held()
    for number in range(rounds):
        begin = time.process_time()  # of the processor, since other work slows a round down
        make(keys)
        made = time.process_time()
        most = held()
        drop()
        gc.collect()
        dropped = time.process_time()
        comm.Barrier()
        trim(0)  # memory that the allocator keeps is not a leak
        say(f"round {comm.Get_rank()} {number} {[made - begin, dropped - made, before, most, held()]}")
        comm.Barrier()
    if comm.Get_rank() == 0:
        say("fine")


if __name__ == "__main__":
    main()

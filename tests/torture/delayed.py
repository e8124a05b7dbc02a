"""A rank that trains the same network several times, each time with other delays: ``delayed MODE RUNS STEPS SLEEP_S``.

Prints the digest of the weights after each run, which must be the same for all runs and ranks.
"""

from __future__ import annotations

import random
import sys
import time

import kvstore_plugin as mykv
import numpy as np
from support import array, checksum, conv_network, dense_network, mx

from .job import say, say_pid

from mxnet import autograd  # isort: skip

_BATCH = 4


def _trainer(mode: str, net):
    adam = ("adam", {"learning_rate": 0.01})
    momentum = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
    if mode == "buckets":  # small ones, so that there are several
        return mykv.DistributedTrainer(net.collect_params(), *adam, bucket_bytes=1024)
    if mode == "store":
        return mykv.DistributedTrainer(net.collect_params(), *adam, update_on_kvstore=True, bucket_bytes=1024)
    mykv.broadcast_parameters(net.collect_params())
    store = mx.kv.create("mykv")
    return mx.gluon.Trainer(
        net.collect_params(), *momentum, kvstore=store, update_on_kvstore=mode == "stock on the store"
    )


def _train(mode: str, steps: int, longest: float, chance: random.Random) -> str:
    def wait() -> None:
        if chance.random() < 0.5:
            time.sleep(chance.random() ** 3 * longest)

    is_conv = mode in ("buckets", "stock")
    net = conv_network(seed=1) if is_conv else dense_network(seed=1, inputs=64, widths=(70, 50, 3))
    net.hybridize()
    trainer = _trainer(mode, net)
    shape = (_BATCH, 1, 8, 8) if is_conv else (_BATCH, 64)
    factor = 1 if mode in ("buckets", "store") else mykv.size()
    for step in range(steps):
        data = np.random.RandomState(100 * step + mykv.rank()).uniform(-1, 1, shape).astype("float32")
        wait()
        with autograd.record():
            output = net(array(data))
            wait()
            loss = ((output - 0.3) ** 2).sum()
        loss.backward()
        wait()
        trainer.step(_BATCH * factor)
        wait()
        if chance.random() < 0.2:
            mx.nd.waitall()
    return checksum(net)


def main() -> None:
    mode, runs, steps, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    mykv.init()
    say_pid(mykv.rank())
    chance = random.Random()  # of the operating system: every rank and run has other delays
    for number in range(runs):
        say(f"run {number} digest {_train(mode, steps, longest if number else 0.0, chance)}")


if __name__ == "__main__":
    main()

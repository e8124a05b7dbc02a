"""A rank that trains the same network several times, with different delays: ``delayed MODE RUNS STEPS SLEEP_S``.

Prints the digest of the weights after each run, which must be the same for all runs and ranks.
"""

from __future__ import annotations

import random
import sys
import time

import kvstore_plugin as mykv
from harness.support import checksum, mx

from .job import say, say_pid
from .training import Training

from mxnet import autograd  # isort: skip


def _train(mode: str, steps: int, longest: float, chance: random.Random) -> str:
    def wait() -> None:
        if chance.random() < 0.5:
            time.sleep(chance.random() ** 3 * longest)

    training = Training(mode)
    with training.context():
        for step in range(training.steps(steps)):
            wait()
            with autograd.record():
                loss = training.loss(step)
                wait()
            training.backward(loss, step)
            wait()
            training.update()
            wait()
            if chance.random() < 0.2:
                mx.nd.waitall()
    return checksum(training.net)


def main() -> None:
    mode, runs, steps, longest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    mykv.init()
    say_pid(mykv.rank())
    chance = random.Random()  # of the operating system: every rank and run has other delays
    for number in range(runs):
        say(f"run {number} digest {_train(mode, steps, longest if number else 0.0, chance)}")


if __name__ == "__main__":
    main()

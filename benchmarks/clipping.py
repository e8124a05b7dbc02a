"""The cost of clipping by the global norm: ``mpirun -n 2 python -m benchmarks.clipping --batch 8``.

One trainer alternates between steps with and without clipping. With two trainers, different memory addresses would
change a step by up to 6%, more than clipping does.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Callable

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from mxnet import gluon

from .workers.with_mxnet import Network

_WAYS = {
    "no clipping": None,
    "norm alone": 1e9,
    "scaled": 1e-3,
    "gluon.utils.clip_global_norm": None,
    "no clipping again": None,
}
_STEPS = 4  # consecutive steps that clip in the same way


def main() -> None:
    """Print the median and quartiles of each way's time, as ratios to that without clipping in the same turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8, help="of one worker, images of 64 pixels")
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args()
    mykv.init()
    step = _training(given.batch)
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    in_order = random.Random(1)  # the same on all ranks
    for turn in range(given.turns + 1):
        for way in in_order.sample(list(_WAYS), len(_WAYS)):
            taken = _timed(step, way)
            if turn > 0:  # the first warms up
                times[way].append(taken)
    base = np.array(times["no clipping"])
    if mykv.rank() == 0:
        print(f"batch {given.batch}, {mykv.size()} workers, a step without clipping: {np.median(base):.0f} ms")
        for way, taken in times.items():
            low, median, high = np.percentile(np.array(taken) / base, [25, 50, 75])
            print(f"{way:30} {median:.3f} ({low:.3f} to {high:.3f})")


def _training(batch: int) -> Callable[[str], None]:
    """A function that takes one step of ResNet-18 in one of the ways."""

    def trainer_of(parameters: list[gluon.Parameter]) -> mykv.DistributedTrainer:
        return mykv.DistributedTrainer(parameters, "sgd", {"learning_rate": 1e-5}, clip_global_norm=1.0)

    network = Network({"network": "resnet18_v1", "batch": batch, "pixels": 64}, trainer_of)
    trainer = network.trainer
    clipping, reducer = trainer._clipping, trainer._clipping._norm_reducer
    summed = reducer._summed

    def step(way: str) -> None:
        most = _WAYS[way]
        trainer._clipping, reducer._summed = (None, None) if most is None else (clipping, summed)
        clipping.most = most
        if not way.startswith("gluon"):
            return network.step()
        network.backward()
        trainer.allreduce_grads()
        gradients = [parameter.grad() for parameter in trainer._params]
        gluon.utils.clip_global_norm(gradients, 1e-3 * batch, check_isfinite=False)  # the check would wait
        trainer.update(batch)

    return step


def _timed(step: Callable[[str], None], way: str) -> float:
    """The time of a step, in ms."""
    mx.nd.waitall()
    mykv.barrier()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        step(way)
    mx.nd.waitall()
    return (time.perf_counter() - begin) / _STEPS * 1e3


if __name__ == "__main__":
    main()

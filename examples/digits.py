"""Train a small network on scans of handwritten digits, on several workers:

    mykvrun -n 2 python examples/digits.py

The three lines that distribute it are marked. Everything else is as in a program for one process.
"""

import sys

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from digits_common import EPOCHS, SGD, batches, data, loss_of, network, report, tqdm
from mxnet import autograd


def main():
    mykv.init()  # <------------------------------------------------------------------------- 1: find the other workers
    rank, size = mykv.rank(), mykv.size()

    (images, labels), _ = data()
    length = len(images) // size
    share = slice(rank, length * size, size)  # <-------------------------------------------- 2: each takes its share
    images, labels = images[share], labels[share]

    net = network(seed=rank)  # workers begin with different weights, and the trainer gives them those of rank 0
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", SGD)  # <----------------- 3: mean over all workers

    curve = []
    for epoch in tqdm(range(EPOCHS), desc="epochs", disable=rank != 0):
        losses = []
        for positions in batches(epoch, length, size):
            with autograd.record():
                loss = loss_of(net(mx.np.array(images[positions])), mx.np.array(labels[positions]))
            loss.backward()
            trainer.step(len(positions))
            losses.append(loss.mean())
        curve.append(np.mean([float(loss) for loss in losses]))

    return report(net, len(images), curve)


if __name__ == "__main__":
    sys.exit(main())

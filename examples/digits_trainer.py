"""The same as digits.py with the stock gluon.Trainer, for programs that are to keep it:

    mykvrun -n 2 python examples/digits_trainer.py

The lines that distribute it are marked. The stock Trainer sums over workers, so step() is told the global batch. It
updates on the store, as is its default (update_on_kvstore=True): each worker updates its share of the weights.
"""

import sys

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from digits_common import EPOCHS, SGD, batches, data, loss_of, network, report, tqdm
from mxnet import autograd, gluon


def main():
    store = mx.kv.create("mykv")  # <-------------------------------------------------------- 1: find the other workers
    rank, size = store.rank, store.size

    (images, labels), _ = data()
    length = len(images) // size
    share = slice(rank, length * size, size)  # <-------------------------------------------- 2: each takes its share
    images, labels = images[share], labels[share]

    net = network(seed=rank)
    # The Trainer itself broadcasts only inside its first step(): the first gradients would come from different weights.
    mykv.broadcast_parameters(net.collect_params())  # <------------------------------------- 3: begin alike,
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=store)  # <------------    stay alike

    curve = []
    for epoch in tqdm(range(EPOCHS), desc="epochs", disable=rank != 0):
        losses = []
        for positions in batches(epoch, length, size):
            with autograd.record():
                loss = loss_of(net(mx.np.array(images[positions])), mx.np.array(labels[positions]))
            loss.backward()
            trainer.step(len(positions) * size)
            losses.append(loss.mean())
        curve.append(np.mean([float(loss) for loss in losses]))

    return report(net, len(images), curve)


if __name__ == "__main__":
    sys.exit(main())

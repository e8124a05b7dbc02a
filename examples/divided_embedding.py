"""An embedding table that is divided over the workers by rows, with a network that all workers have (as in DLRM):

    mykvrun -n 2 python examples/divided_embedding.py

Worker r holds the rows whose number leaves r when it is divided by the number of workers. A worker sends the numbers of
the rows that its batch needs to the workers that hold them, and gets the rows; both by alltoall. In the backward pass
the gradients of the rows go back the same way. So the workers do what one process with the whole table does: run it
with -n 1.
"""

import argparse

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, BATCH, ROWS, WIDTH = 20, 32, 101, 6  # BATCH: samples of all workers together
mx.npx.set_np()


class Table:
    """This worker's rows of the table."""

    def __init__(self):
        whole = np.random.RandomState(7).randn(ROWS, WIDTH) * 0.3
        rows = whole[mykv.rank() :: mykv.size()]
        self.layer = nn.Embedding(len(rows), WIDTH)
        self.layer.initialize()
        self.layer.cast("float64")
        self.layer.weight.set_data(mx.np.array(rows, dtype="float64"))

    def rows(self, numbers):
        """The rows with these numbers, from all workers."""
        holder = numbers % mykv.size()
        order = np.argsort(holder, kind="stable")
        asked = np.bincount(holder, minlength=mykv.size()).tolist()
        wanted, counts = mykv.alltoall(mx.np.array(numbers[order] // mykv.size(), dtype="int32"), splits=asked)
        found, _ = mykv.alltoall(self.layer(wanted), splits=counts)  # <--- gradients go back through this
        return mx.np.take(found, mx.np.array(np.argsort(order), dtype="int32"), axis=0)

    def whole(self):
        """The rows of all workers, in the order of their numbers."""
        parts = mykv.allgather_object(self.layer.weight.data().asnumpy())
        table = np.empty((ROWS, WIDTH))
        for rank, part in enumerate(parts):
            table[rank :: mykv.size()] = part
        return table


def batch(step):
    """Numbers of rows, two for each sample of this worker, and what to predict."""
    numbers = np.random.RandomState(step).randint(0, ROWS, (BATCH, 2))
    share = slice(mykv.rank() * BATCH // mykv.size(), (mykv.rank() + 1) * BATCH // mykv.size())
    numbers = numbers[share]
    return numbers, mx.np.array(np.sin(numbers.sum(axis=1, keepdims=True)), dtype="float64")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the weights and the loss, as numpy.savez writes them")
    save = parser.parse_args().save
    mykv.init()
    table = Table()
    net = nn.HybridSequential()
    net.add(nn.Dense(16, in_units=2 * WIDTH, activation="tanh"))
    net.add(nn.Dense(1, in_units=16))
    mx.random.seed(mykv.rank())  # workers begin with different weights, and the trainer gives them those of rank 0
    net.initialize(mx.init.Xavier())
    net.cast("float64")
    loss_of = gluon.loss.L2Loss()
    options = {"learning_rate": 0.3, "momentum": 0.9}
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", options)
    of_table = gluon.Trainer(table.layer.collect_params(), "sgd", options, kvstore=None)  # no worker has these rows too
    for step in range(STEPS):
        numbers, target = batch(step)
        with autograd.record():
            rows = table.rows(numbers.reshape(-1)).reshape(len(numbers), -1)
            loss = loss_of(net(rows), target).mean()
        loss.backward()
        trainer.step(1)  # the loss is a mean already; the trainer averages over the workers
        of_table.step(mykv.size())  # the gradients of the rows are sums over the workers
        mean = float(mykv.allreduce(loss.reshape(1))[0])
        if mykv.rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean:.6f}", flush=True)
    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    whole = table.whole()
    if save and mykv.rank() == 0:
        np.savez(save, whole, *weights, loss=mean)


if __name__ == "__main__":
    main()

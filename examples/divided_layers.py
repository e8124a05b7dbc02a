"""Two Dense layers that are divided over the workers, the first by columns and the second by rows (as in Megatron):

    mykvrun -n 2 python examples/divided_layers.py

Each worker computes some units of the hidden layer, and what these units give to the output. The sum over the workers
is the output: one allreduce forward, and one backward. So the workers do what one process with whole layers does: run
it with -n 1. All workers have the same batch.
"""

import argparse

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, BATCH, INPUTS, HIDDEN, OUTPUTS = 20, 32, 10, 24, 3
mx.npx.set_np()


class DividedPair:
    """This worker's part of Dense(HIDDEN, activation="tanh") and Dense(OUTPUTS)."""

    def __init__(self):
        random = np.random.RandomState(3)
        first, second = random.randn(HIDDEN, INPUTS) * 0.3, random.randn(OUTPUTS, HIDDEN) * 0.3
        own = slice(mykv.rank() * HIDDEN // mykv.size(), (mykv.rank() + 1) * HIDDEN // mykv.size())
        units = own.stop - own.start
        self.columns = nn.Dense(units, in_units=INPUTS, activation="tanh")
        # The sum over the workers must have the bias once.
        self.rows = nn.Dense(OUTPUTS, in_units=units, use_bias=mykv.rank() == 0)
        for layer, weight in ((self.columns, first[own]), (self.rows, second[:, own])):
            layer.initialize()
            layer.cast("float64")
            layer.weight.set_data(mx.np.array(weight, dtype="float64"))

    def __call__(self, x):
        return mykv.allreduce(self.rows(self.columns(x)), op=mykv.Sum)  # <--- gradients go through this

    def parameters(self):
        return [*self.columns.collect_params().values(), *self.rows.collect_params().values()]

    def whole(self):
        """The weights of the two layers, put together."""
        own = [layer.weight.data().asnumpy() for layer in (self.columns, self.rows)]
        firsts, seconds = zip(*mykv.allgather_object(own))
        return np.concatenate(firsts), np.concatenate(seconds, axis=1)


def batch(step):
    x = np.random.RandomState(step).randn(BATCH, INPUTS)
    return mx.np.array(x, dtype="float64"), mx.np.array(np.sin(x[:, :OUTPUTS] + x[:, 1:2]), dtype="float64")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the weights and the loss, as numpy.savez writes them")
    save = parser.parse_args().save
    mykv.init()
    pair = DividedPair()
    loss_of = gluon.loss.L2Loss()
    # No worker has the parameters of another worker, so nothing is exchanged here.
    trainer = gluon.Trainer(pair.parameters(), "sgd", {"learning_rate": 0.3, "momentum": 0.9}, kvstore=None)
    for step in range(STEPS):
        x, target = batch(step)
        with autograd.record():
            loss = loss_of(pair(x), target).mean()
            share = loss / mykv.size()  # the backward pass adds the losses of all workers, which are the same
        share.backward()
        trainer.step(1)
        if mykv.rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {float(loss):.6f}", flush=True)
    first, second = pair.whole()
    if save and mykv.rank() == 0:
        np.savez(save, first, second, loss=float(loss))


if __name__ == "__main__":
    main()

"""Contrastive learning (SimCLR) whose loss compares the samples of all workers:

    mykvrun -n 2 python examples/contrastive.py

The loss, NT-Xent, is small where the two views of a sample are closer to each other than to the views of all other
samples. More other samples make a better loss, so each worker gathers the views of all workers. The gradients go back
to the worker that a view comes from. So the workers do what one process with the whole batch does: run it with -n 1.
"""

import argparse

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

STEPS, BATCH, TEMPERATURE = 20, 32, 0.5  # BATCH: samples of all workers together
mx.npx.set_np()


def encoder():
    net = nn.HybridSequential()
    net.add(nn.Dense(32, in_units=20, activation="tanh"))
    net.add(nn.Dense(8, in_units=32))
    mx.random.seed(mykv.rank())  # workers begin with different weights, and the trainer gives them those of rank 0
    net.initialize(mx.init.Xavier())
    net.cast("float64")
    return net


def views(step):
    """Two views of this worker's samples: each is the samples with other noise."""
    random = np.random.RandomState(step)
    samples = random.randn(BATCH, 20)
    share = slice(mykv.rank() * BATCH // mykv.size(), (mykv.rank() + 1) * BATCH // mykv.size())
    return [mx.np.array((samples + 0.3 * random.randn(BATCH, 20))[share], dtype="float64") for _ in range(2)]


def normalized(vectors):
    return vectors / mx.np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))


def nt_xent(first, second):
    """The mean of the loss over this worker's views; all workers' views are the ones to tell apart."""
    everyones = mx.np.concatenate([mykv.allgather(first), mykv.allgather(second)])  # <--- gradients go through this
    likeness = mx.np.dot(mx.np.concatenate([first, second]), everyones.T) / TEMPERATURE
    own = np.arange(len(first)) + mykv.rank() * BATCH // mykv.size()
    same, other = np.concatenate([own, own + BATCH]), np.concatenate([own + BATCH, own])
    itself = np.eye(2 * BATCH)[same]  # a view is not compared with itself
    logits = mx.npx.log_softmax(likeness - mx.np.array(1e9 * itself, dtype="float64"))
    return -(logits * mx.np.array(np.eye(2 * BATCH)[other], dtype="float64")).sum(axis=1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the weights and the loss, as numpy.savez writes them")
    save = parser.parse_args().save
    mykv.init()
    net = encoder()
    parameters = net.collect_params()
    trainer = mykv.DistributedTrainer(parameters, "sgd", {"learning_rate": 0.5, "momentum": 0.9})
    for step in range(STEPS):
        one, two = views(step)
        with autograd.record():
            loss = nt_xent(normalized(net(one)), normalized(net(two)))
        loss.backward()
        trainer.step(1)  # the loss is a mean already; the trainer averages over the workers
        mean = float(mykv.allreduce(loss.reshape(1))[0])
        if mykv.rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean:.6f}", flush=True)
    if save and mykv.rank() == 0:
        weights = [parameter.data().asnumpy() for parameter in parameters.values()]
        np.savez(save, *weights, loss=mean)


if __name__ == "__main__":
    main()

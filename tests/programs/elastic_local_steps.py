"""A worker of the jobs of test_elastic_local_steps.py: trains with a LocalTrainer, and dies where its plan says so.

Argument: a JSON object with `deaths`: for each worker that dies, by its first rank, the moment and the step; `options`
of the LocalTrainer; `steps`; `every` (steps from commit to commit). Moments: "step", before a local step; "meeting",
when this worker has begun a meeting; "commit", while it copies.

At the end each survivor compares its weights with a model of all workers in one process: the steps by gluon.Trainer,
the meetings by numpy.
"""

import json
import os
import signal
import sys
import time
import zlib

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from kvstore_plugin.elastic import snapshots
from kvstore_plugin.training import outer_optimizer
from mxnet import autograd, gluon
from mxnet.gluon import nn

mx.npx.set_np()
plan = json.loads(sys.argv[1])
steps, every, options = plan["steps"], plan["every"], plan["options"]
SGD, BATCH, MOST = ("sgd", {"learning_rate": 0.1, "momentum": 0.9}), 4, 0.5
mykv.init()
me, workers = mykv.rank(), mykv.size()


def network(seed):
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=6, activation="tanh"), nn.Dense(2, in_units=8))
    net.initialize()
    generator = np.random.RandomState(seed)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.np.array(generator.uniform(-0.5, 0.5, parameter.shape).astype("float32")))
    return net


def backward(net, step, rank):
    values = np.random.RandomState(100 * step + rank).randn(BATCH, 6).astype("float32")
    with autograd.record():
        loss = (net(mx.np.array(values)) ** 2).sum()
    loss.backward()


def weights(net):
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def crc(net):
    return zlib.crc32(b"".join(one.tobytes() for one in weights(net)))


def die_at(moment):
    if plan["deaths"].get(str(me)) == [moment, state.step]:
        print("dies", me, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def dying_after(moment, original):
    def function(*arguments, **named):
        result = original(*arguments, **named)
        die_at(moment)
        return result

    return function


net = network(me)
trainer = mykv.LocalTrainer(net.collect_params(), *SGD, elastic=True, clip_global_norm=MOST, **options)
state = mykv.ElasticState(net=net, trainer=trainer, step=0, history=[])
outer_optimizer.OuterOptimizer._push = dying_after("meeting", outer_optimizer.OuterOptimizer._push)
snapshots._copied = dying_after("commit", snapshots._copied)


def note_loss():
    """All survivors begin again from the same weights, and know the workers that are left by their first ranks."""
    told = mykv.allgather_object((me, state.step, crc(net)))
    assert len({one[1:] for one in told}) == 1, told
    state.history = [*state.history, (state.step, [one[0] for one in told])]


def train(state):
    while state.step < steps:
        backward(net, state.step, mykv.rank())
        die_at("step")
        trainer.step(BATCH)
        if "period_seconds" in options:
            mx.nd.waitall()
            time.sleep(0.01 * mykv.rank())
        state.step += 1
        if state.step % every == 0:
            state.commit()
    trainer.synchronize()


class Model:
    """All workers in one process."""

    def __init__(self):
        self.nets = {worker: network(0) for worker in range(workers)}
        self.trainers = {
            worker: gluon.Trainer(one.collect_params(), *SGD, kvstore=None) for worker, one in self.nets.items()
        }
        self.anchor = weights(self.nets[0])
        self.velocity = [np.zeros_like(one) for one in self.anchor]
        self.since = 0

    def step(self, number, left):
        together = number < options.get("warmup_steps", 0)
        gradients = {}
        for rank, worker in enumerate(left):
            backward(self.nets[worker], number, rank)
            gradients[worker] = [one.grad() for one in self.nets[worker].collect_params().values()]
        if together:
            for row in zip(*gradients.values()):
                mean = np.mean([one.asnumpy() for one in row], axis=0)
                for one in row:
                    one[:] = mx.np.array(mean)
        for worker in left:
            gluon.utils.clip_global_norm([one.as_nd_ndarray() for one in gradients[worker]], MOST * BATCH)
            self.trainers[worker].step(BATCH)
        if together:
            self.anchor = weights(self.nets[left[0]])
            return
        self.since += 1
        if self.since == options["period"]:
            self.meet(left)

    def meet(self, left):
        if self.since == 0:
            return
        self.since = 0
        rate, momentum = options.get("outer_learning_rate", 1.0), options.get("outer_momentum", 0.0)
        values = [weights(self.nets[worker]) for worker in left]
        for number, start in enumerate(self.anchor):
            change = rate * np.mean([one[number] - start for one in values], axis=0)
            self.velocity[number] = momentum * self.velocity[number] + change
            more = momentum * self.velocity[number] + change if options.get("nesterov") else self.velocity[number]
            self.anchor[number] = (start + more).astype("float32")
        for worker in left:
            for parameter, value in zip(self.nets[worker].collect_params().values(), self.anchor):
                parameter.set_data(mx.np.array(value))


def difference():
    """The largest difference of a weight from the model."""
    model, left, history = Model(), list(range(workers)), list(state.history)
    for number in range(steps):
        while history and history[0][0] == number:
            left = history.pop(0)[1]
        model.step(number, left)
        if (number + 1) % every == 0:
            model.meet(left)
    model.meet(left)
    return max(float(abs(a - b).max()) for a, b in zip(weights(net), weights(model.nets[me])))


state.register_reset_callbacks([note_loss])
mykv.run_elastic(train, state)
mykv.check_in_step(net.collect_params())
told = "none" if "period_seconds" in options else f"{difference():.2e}"
print(f"end {me} size {mykv.size()} steps {state.step} weights {crc(net)} difference {told}", flush=True)

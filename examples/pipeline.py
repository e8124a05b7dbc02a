"""A network whose two stages are on two workers, with four micro-batches in each step (a pipeline, as in GPipe):

    mykvrun -n 2 python examples/pipeline.py

Worker 0 sends what its stage gives to worker 1, and gets the gradients back. While worker 1 computes one micro-batch,
worker 0 computes the next. So the workers do what one process with the whole network does: run it with -n 1.
"""

import argparse

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, BATCH, PARTS, INPUTS, HIDDEN, OUTPUTS = 20, 32, 4, 10, 24, 3
mx.npx.set_np()


def make_stage(number):
    random = np.random.RandomState(number)
    inputs, units = ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))[number]
    layer = nn.Dense(units, in_units=inputs, activation=("tanh", None)[number])
    layer.initialize()
    layer.cast("float64")
    layer.weight.set_data(mx.np.array(random.randn(units, inputs) * 0.3, dtype="float64"))
    for parameter in layer.collect_params().values():
        parameter.grad_req = "add"  # over the micro-batches
    return layer


def micro_batches(step):
    x = np.random.RandomState(step).randn(BATCH, INPUTS)
    for part in np.split(x, PARTS):
        yield mx.np.array(part, dtype="float64"), mx.np.array(np.sin(part[:, :OUTPUTS]), dtype="float64")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="file for the weights and the loss, as numpy.savez writes them")
    save = parser.parse_args().save
    mykv.init()
    numbers = [mykv.rank()] if mykv.size() == 2 else [0, 1]
    stages = {number: make_stage(number) for number in numbers}
    parameters = [one for stage in stages.values() for one in stage.collect_params().values()]
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.3, "momentum": 0.9}, kvstore=None)
    loss_of = gluon.loss.L2Loss()
    for step in range(STEPS):
        ends = []  # where backward begins, of each micro-batch
        with autograd.record():
            for x, target in micro_batches(step):
                hidden = stages[0](x) if 0 in stages else mx.np.zeros((len(x), HIDDEN), dtype="float64")
                if mykv.size() == 2 and 0 in stages:
                    ends.append(mykv.send(hidden, dest=1, name="hidden"))  # <--- its gradient comes back
                    continue
                if mykv.size() == 2:
                    hidden = mykv.recv(hidden, source=0, name="hidden")  # <--- and is sent from here
                ends.append(loss_of(stages[1](hidden), target))
        autograd.backward(ends)
        trainer.step(BATCH)
        for parameter in parameters:
            parameter.grad()[:] = 0
        if 1 in stages:
            loss = np.concatenate([one.asnumpy() for one in ends]).mean()
            if step % 5 == 4:
                print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    held = [{number: stage.weight.data().asnumpy() for number, stage in stages.items()}, loss if 1 in stages else None]
    everyones = mykv.allgather_object(held)
    weights = {number: weight for of_worker, _ in everyones for number, weight in of_worker.items()}
    if save and mykv.rank() == 0:
        np.savez(save, weights[0], weights[1], loss=everyones[-1][1])


if __name__ == "__main__":
    main()

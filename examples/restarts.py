"""Training that outlives its job: a checkpoint in every fifth step, from which a job that is started again goes on.

    mykvrun -n 2 --max-restarts 3 python examples/restarts.py FOLDER
    mykvrun -n 2 --max-restarts 3 python examples/restarts.py FOLDER --kill 7 12 18

With --kill a worker kills itself in these steps. The weights at the end are the same, bit by bit.
"""

import argparse
import json
import os
import signal
import zlib
from pathlib import Path

import kvstore_plugin as mykv  # before mxnet, which needs it with numpy 2
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="where the checkpoints are, which all hosts must see")
parser.add_argument("--kill", type=int, nargs="*", default=[], metavar="STEP", help="a step for each restart")
options = parser.parse_args()

mx.npx.set_np()  # arrays that MXNet 1.9.1 and 2.0.0b1 both understand
mykv.init()
mx.random.seed(0)
inputs = np.random.RandomState(0).rand(256, 10).astype("float32")
dataset = gluon.data.ArrayDataset(inputs, inputs.argmax(axis=1).astype("int32"))
sampler = mykv.DistributedSampler(len(dataset))  # the same order in the same epoch, in each job
data = gluon.data.DataLoader(dataset, batch_size=16, sampler=sampler)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(32, activation="relu", in_units=10), gluon.nn.Dense(10, in_units=32))
net.initialize()
trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.02})
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def files(step):
    """The files of a checkpoint, which have names of their own: those of the last one stay until these are whole."""
    return [str(options.folder / f"step{step}.{kind}") for kind in ("params", "states")]


def save(step):
    """Save a checkpoint. It counts from the moment on that the file `last` names it."""
    mx.nd.waitall()  # an error of the last step is raised here
    if mykv.rank() == 0:
        weights, states = files(step)
        net.save_parameters(weights)
        trainer.save_states(states)
        (options.folder / "last.new").write_text(json.dumps(step))
        os.replace(options.folder / "last.new", options.folder / "last")


def load():
    """Load the last checkpoint where there is one, and return the number of steps that are done."""
    step = 0
    if mykv.rank() == 0 and (options.folder / "last").exists():
        step = json.loads((options.folder / "last").read_text())
        weights, states = files(step)
        net.load_parameters(weights)
        trainer.load_states(states)
    mykv.broadcast_states(trainer, root_rank=0)
    return mykv.broadcast_object(step, 0)


options.folder.mkdir(parents=True, exist_ok=True)
done = load()
if mykv.rank() == 0:
    print(f"restart {mykv.restart_count()} begins after {done} steps", flush=True)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for numbers, labels in data:
        step += 1
        if step <= done:
            continue
        with autograd.record():
            loss = loss_of(net(numbers), labels)
        loss.backward()
        trainer.step(len(numbers))
        if options.kill[mykv.restart_count() :][:1] == [step] and mykv.rank() == step % mykv.size():
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 5 == 0:
            save(step)
mx.nd.waitall()
digest = 0
for parameter in net.collect_params().values():
    digest = zlib.crc32(parameter.data().asnumpy().tobytes(), digest)
if mykv.rank() == 0:
    print(f"{step} steps, weights {digest:08x}")

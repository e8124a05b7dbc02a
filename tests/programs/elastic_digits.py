"""A worker of the jobs of test_elastic.py: trains on digits, dies where it is told to, and shows what became of it.

Arguments: a JSON object with
`deaths`: the moment and the step of each death, by the first rank of the one that dies; of moments in which workers
begin again, the number of the attempt,
`sharded`, `adam`, `epochs`, `most` (steps), `every` (steps from commit to commit),
`by_mpi`: deaths are noticed as those on another machine,
`checkpoint`: a file of states that is written before each commit,
`save`, `load`: begin of the names of files, written at the end, or read at the beginning,
`progress`: tell of every tenth step.

Beside the accuracy it compares the weights with those of a second training, in one process with MXNet's own Trainer on
the batches of all workers: a step that was applied twice, by half or not at all would show there.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
import zlib

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from kvstore_plugin.compat.state_tree import leaves
from kvstore_plugin.elastic import members, snapshots
from kvstore_plugin.elastic import run as elastic
from kvstore_plugin.elastic import shard_replicas as kept_shares
from kvstore_plugin.elastic import state as elastic_state
from kvstore_plugin.sharded_optimizer import partition as sharding
from kvstore_plugin.world import failure_detector as liveness
from kvstore_plugin.world import launch_checks as launch
from kvstore_plugin.world import process
from kvstore_plugin.world import process_watch as followed
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

mx.npx.set_np()
plan = json.loads(sys.argv[1])
deaths = {int(rank): death for rank, death in plan["deaths"].items()}
sharded, epochs, every = plan.get("sharded", False), plan.get("epochs", 1), plan.get("every", 1)
most = plan.get("most", sys.maxsize)
HELD_OUT, GLOBAL_BATCH = 360, 48
SGD, ADAM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 5e-4}), ("adam", {"learning_rate": 0.003})
OPTIMIZER = ADAM if plan.get("adam") else SGD
sharding._SMALLEST_PIECE = 1024  # cut these small weights too

if plan.get("by_mpi"):
    followed.Followed._follow = lambda *_: None
mykv.init()
me = mykv.rank()  # at the beginning: the name of this worker


def note_notice(record):
    """A filter of log records that keeps all: this worker's name beside its own words that it has noticed a death."""
    if "left before the others were done" in record.getMessage():
        say("notices", me, record.created)
    return True


logging.getLogger("kvstore_plugin").addFilter(note_notice)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
digits = load_digits()
order = np.random.RandomState(0).permutation(len(digits.images))
images = (digits.images / 16.0).astype("float32")[order, None]
labels = digits.target.astype("int32")[order]
test, train_images, train_labels = slice(0, HELD_OUT), images[HELD_OUT:], labels[HELD_OUT:]


def network():
    net = nn.HybridSequential()
    net.add(  # shapes come with the first batch
        nn.Conv2D(32, 3, padding=1, activation="tanh"),
        nn.Conv2D(32, 3, padding=1, activation="tanh"),
        nn.AvgPool2D(),
        nn.Dense(128, activation="tanh"),
        nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def say(*words):
    print(*words, flush=True)


def batches(epoch, size):
    batch = GLOBAL_BATCH // size
    length = len(train_images) // size
    mixed = np.random.RandomState(epoch).permutation(length)
    return [mixed[begin : begin + batch] * size for begin in range(0, length - batch + 1, batch)]


def backward(net, at):
    with autograd.record():
        loss = loss_of(net(mx.np.array(train_images[at])), mx.np.array(train_labels[at])).mean()
    loss.backward()


def weights(net):
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def crc():
    """Of all bits of the weights, and of the states of the optimizer where this worker has all of them."""
    if any(parameter._data is None for parameter in net.collect_params().values()):
        return "without-values"
    value = 0
    for one in weights(net):
        value = zlib.crc32(one.tobytes(), value)
    for one in leaves(list(trainer._updaters[0].states.values()), mx.nd.NDArray):
        value = zlib.crc32(one.asnumpy().tobytes(), value)
    return f"{value:08x}"


def accuracy(net):
    return float((net(mx.np.array(images[test])).asnumpy().argmax(axis=1) == labels[test]).mean())


def die(*_):
    say(f"dies {me} {time.time():.3f}")
    os.kill(os.getpid(), signal.SIGKILL)


def is_time(moment):
    kind, step = deaths.get(me, ("", 0))
    return kind == moment and (step == state.steps or (step == -1 and state.steps > 3))


def dying(moment, original, calls=1):
    """A function that dies in its n-th call in the step of the plan, after it has run."""
    seen = []

    def function(*arguments, **named):
        result = original(*arguments, **named)
        if is_time(moment):
            seen.append(1)
            if len(seen) == calls:
                die()
        return result

    return function


mx.random.seed(me)
net = network()
trainer = mykv.DistributedTrainer(
    net.collect_params(), *OPTIMIZER, elastic=True, update_on_kvstore=sharded, bucket_bytes=4096
)
state = mykv.ElasticState(checkpoint=plan.get("checkpoint"), net=net, trainer=trainer, epoch=0, batch=0, steps=0)
if "load" in plan:
    net.load_parameters(plan["load"] + ".params")
    trainer.load_states(plan["load"] + ".states")
    with open(plan["load"] + ".json") as file:
        vars(state).update(json.load(file))
first = {"epoch": state.epoch, "batch": state.batch, "steps": state.steps}
state.history = []  # (step, number of workers) from which on there were so many
initial = []

# In the middle: after the first bucket, the first weight, the first array of a copy.
snapshots._copied = dying("commit", snapshots._copied)
kept_shares.pass_on = dying("pass_on", kept_shares.pass_on)
kind = type(trainer._optimizer)
kind.update_multi_precision = dying("update", kind.update_multi_precision)


attempts = 0  # of this worker to begin again


def beginning_again(original, moment, attempt):
    """A function that dies when it is called in this attempt; the first one begins before join_again() is called."""

    def function(*arguments, **named):
        if deaths.get(me) == [moment, attempt()]:
            die()
        return original(*arguments, **named)

    return function


def dying_soon(original):
    """join_again() of a worker that dies while it joins those that are left, or soon after."""

    def function(*arguments):
        global attempts
        attempts += 1
        if deaths.get(me) == ["joining", attempts]:
            threading.Timer(np.random.uniform(0, 0.04), die).start()
        return original(*arguments)

    return function


process.join_again = dying_soon(process.join_again)
elastic.all_agree = beginning_again(elastic.all_agree, "shrink", lambda: attempts + 1)
members.all_agree = beginning_again(members.all_agree, "shrink", lambda: attempts + 1)
liveness.this_process = beginning_again(liveness.this_process, "watch", lambda: attempts)
launch.check_size = beginning_again(launch.check_size, "init", lambda: attempts)
elastic_state.allgather_object = beginning_again(elastic_state.allgather_object, "restore", lambda: attempts)
mykv.ElasticState._commit = beginning_again(mykv.ElasticState._commit, "recommit", lambda: attempts)


def note_reset():
    state.history = [*state.history, (state.steps, mykv.size())]
    say(f"reset {me} {mykv.rank()} {mykv.size()} {state.steps} {crc()} {time.time():.3f}")


state.register_reset_callbacks([note_reset])


def write_checkpoint():
    """States as they are now, with counters of an earlier step, which must not come back."""
    optimizer = trainer._optimizer
    counts, number = optimizer._index_update_count, optimizer.num_update
    kept = dict(counts)
    counts.update({key: count - 1 for key, count in kept.items()})
    optimizer.num_update -= 1
    trainer.save_states(plan["checkpoint"])
    counts.update(kept)
    optimizer.num_update = number


def train(state):
    size, rank = mykv.size(), mykv.rank()
    say(f"trains {me} {size}")
    while state.epoch < epochs and state.steps < most:
        todo = batches(state.epoch, size)
        while state.batch < len(todo) and state.steps < most:
            if is_time("forward"):
                die()
            backward(net, todo[state.batch] + rank)
            if state.steps == first["steps"]:
                initial[:] = weights(net)
            if is_time("reduction"):
                operations = trainer._reducers[0]._operations
                trainer._reducers[0]._operations = operations[:1]  # the others never come
                trainer.allreduce_grads() if not sharded else trainer._reducers[0].allreduce(False, "a step", False)
                time.sleep(0.02)
                die()
            if is_time("any"):
                threading.Timer(np.random.uniform(0, 0.05), die).start()
            trainer.step(1)
            state.batch += 1
            state.steps += 1
            if "progress" in plan and state.steps % 10 == 0:
                say(f"at {state.steps}")
            if state.steps % every == 0:
                if "checkpoint" in plan:
                    write_checkpoint()
                state.commit()
        if state.batch >= len(todo):
            state.epoch, state.batch = state.epoch + 1, 0
    state.commit()
    return "done"


state.history = [(first["steps"], mykv.size())]
say(f"pid of {me}: {os.getpid()}")
assert mykv.run_elastic(train, state) == "done"
total = mykv.allreduce(mx.np.ones(3), op=mykv.Sum).asnumpy()
assert (total == mykv.size()).all(), total
updates = trainer._optimizer.num_update
if "save" in plan:
    trainer.save_states(plan["save"] + ".states")
    if mykv.rank() == 0:
        net.save_parameters(plan["save"] + ".params")
        with open(plan["save"] + ".json", "w") as file:
            json.dump({"epoch": state.epoch, "batch": state.batch, "steps": state.steps}, file)


def replay():
    """The same training in one process; the largest difference of a weight."""
    other = network()
    other(mx.np.array(images[:1]))
    for parameter, value in zip(other.collect_params().values(), initial):
        parameter.set_data(mx.np.array(value))
    alone = gluon.Trainer(other.collect_params(), *OPTIMIZER, kvstore=None)
    if "load" in plan:
        alone.load_states(plan["load"] + ".states")
    history, size, steps, epoch, batch = (
        list(state.history),
        mykv.size(),
        first["steps"],
        first["epoch"],
        first["batch"],
    )
    while epoch < epochs and steps < most:
        while history and history[0][0] <= steps:
            size = history.pop(0)[1]
        todo = batches(epoch, size)
        if batch < len(todo):
            backward(other, np.concatenate([todo[batch] + rank for rank in range(size)]))
            alone.step(1)
            batch, steps = batch + 1, steps + 1
        if batch >= len(todo):
            epoch, batch = epoch + 1, 0
    return steps, max(float(abs(a - b).max()) for a, b in zip(weights(net), weights(other)))


steps, difference = replay()
say(
    f"end {me} {mykv.rank()} {mykv.size()} steps {state.steps} replayed {steps} updates {updates} "
    f"accuracy {accuracy(net):.4f} difference {difference:.2e} weights {crc()}"
)

"""A worker of the jobs of test_respawn.py and test_grow.py: trains a small network, dies where it is told to, and shows
its weights.

Arguments: a JSON object with
`deaths`: a list of [moment, step, rank, who], where who is "first" (a worker of the beginning, by its first rank),
"new" (the first of them that comes there), "every new" or "any",
`folder`: an empty one,
`pause`: seconds to sleep in each step,
`waits`: "new" for workers that never come to run_elastic(),
`fails`: 1 + the rank that raises an exception at the end,
`ends`: what a worker does to die, as code,
`kind`: "plain", "store" (the optimizer on the store), "local" (LocalTrainer), "deferred" (shapes come with data), or
"alone": gluon.Trainer makes the steps of three workers,
`saves`: a file that gets the weights at the end,
`unpicklable`: "value" or "scheduler", for what pickle does not take on rank 1,
`grow_to`, `hostfile`: of run_elastic(). All workers then have the whole batch, so that weights are the same with any
power of two of workers,
`writes`: {step: text of the hostfile}, which rank 0 writes before that step.
"""

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from kvstore_plugin.elastic import snapshots
from mxnet import autograd, gluon

STEPS, BATCH = 12, 12

mx.npx.set_np()
plan = json.loads(sys.argv[1])
if "unpicklable" in plan:
    sys.modules["cloudpickle"] = None  # as where it is not installed
kind, ends = plan.get("kind", "plain"), plan.get("ends", "os.kill(os.getpid(), signal.SIGKILL)")
who = "new" if mykv.is_respawned() else "first"


def die_if(moment, step=-1):
    rank = me if who == "first" else mykv.rank()
    kinds = [one[3] for one in plan.get("deaths", []) if one[:3] == [moment, step, rank]]
    if who in kinds and who == "new":
        try:
            os.close(os.open(f"{plan['folder']}/{moment}-{step}-{rank}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another one has died here
    if {who, f"every {who}", "any"} & set(kinds):
        print(f"dies {moment} {step} {mykv.rank()} {who}", flush=True)
        exec(ends, {"os": os, "signal": signal})


class Fixed(mx.init.Initializer):
    """The same values whenever it is called."""

    def _init_weight(self, name, values):
        draw = np.random.RandomState(values.size)
        values[:] = mx.np.array(draw.uniform(-0.5, 0.5, values.shape).astype("float32"))


def network():
    net = gluon.nn.HybridSequential()
    sizes = {} if kind == "deferred" else {"in_units": 5}
    net.add(gluon.nn.Dense(7, activation="tanh", **sizes))
    if kind == "local":
        net.add(mykv.SyncBatchNorm(in_channels=7))
    net.add(gluon.nn.Dense(1, **({} if kind == "deferred" else {"in_units": 7})))
    net.initialize(Fixed())
    return net


def data(step):
    draw = np.random.RandomState(step)
    inputs = draw.rand(BATCH, 5).astype("float32")
    return inputs, inputs.sum(axis=1, keepdims=True)


def weights_of(net):
    return [parameter.data().asnumpy().ravel() for parameter in net.collect_params().values()]


def train_alone():
    net = network()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.003 * 3}, kvstore=None)
    for step in range(STEPS):
        inputs, labels = map(mx.np.array, data(step))
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(inputs), labels)
        loss.backward()
        trainer.step(BATCH)
    np.save(plan["saves"], np.concatenate(weights_of(net)))
    sys.exit()


if kind == "alone":
    train_alone()
mykv.init()
me = mykv.rank()
print(f"pid {os.getpid()}", flush=True)
die_if("begin")
net = network()
mykv.broadcast_parameters(net.collect_params())
mykv.barrier()
if kind == "local":
    trainer = mykv.LocalTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, period=2, elastic=True)
else:
    trainer = mykv.DistributedTrainer(
        net.collect_params(),
        "adam",
        {"learning_rate": 0.006 if "grow_to" in plan else 0.003 * mykv.size()},
        elastic=True,
        update_on_kvstore=kind == "store",
    )
state = mykv.ElasticState(net=net, trainer=trainer, step=0, sizes=[], score=None)
if mykv.rank() == 1 and plan.get("unpicklable") == "value":
    state.score = lambda: 0
if mykv.rank() == 1 and plan.get("unpicklable") == "scheduler":
    trainer._optimizer.lr_scheduler = type("Falling", (mx.lr_scheduler.LRScheduler,), {"__call__": lambda *_: 0.1})()
loss_of = gluon.loss.L2Loss()

copied, commits = snapshots._copied, []


def dying_copy(*arguments):
    """In the middle of a commit; in that of a new worker that takes over, its own step is not known yet."""
    result = copied(*arguments)
    die_if("commit", state.step)
    return result


snapshots._copied = dying_copy
restore = mykv.ElasticState._restore


def dying_restore(self):
    commits.append(1)
    die_if("restore", len(commits))
    restore(self)


mykv.ElasticState._restore = dying_restore


def train(state):
    while state.step < STEPS:
        inputs, labels = data(state.step)
        time.sleep(plan.get("pause", 0))
        if mykv.rank() == 0 and str(state.step) in plan.get("writes", {}):
            Path(plan["hostfile"]).write_text(plan["writes"][str(state.step)])
        count = BATCH if "grow_to" in plan else BATCH // mykv.size()
        mine = slice(0, BATCH) if "grow_to" in plan else slice(count * mykv.rank(), count * mykv.rank() + count)
        die_if("forward", state.step)
        with autograd.record():
            loss = loss_of(net(mx.np.array(inputs[mine])), mx.np.array(labels[mine]))
        loss.backward()
        die_if("backward", state.step)
        trainer.step(count)
        if kind != "local":
            mykv.check_in_step(net.collect_params(), every=3)
        state.step += 1
        state.sizes = [*state.sizes, mykv.size()]
        state.commit()
        print(f"at {state.step}", flush=True)
    return "done"


if plan.get("waits") == who:
    time.sleep(1000)
grows = {name: plan[name] for name in ("grow_to", "hostfile") if name in plan}
assert mykv.run_elastic(train, state, **(grows or {"respawn": True})) == "done"
crc = 0
for values in weights_of(net):
    crc = zlib.crc32(values.tobytes(), crc)
if "saves" in plan and mykv.rank() == 0:
    np.save(plan["saves"], np.concatenate(weights_of(net)))
print(
    f"end {mykv.rank()} of {mykv.size()} {who} steps {state.step} sizes {len(state.sizes)} {sorted(set(state.sizes))} "
    f"updates {trainer._optimizer.num_update} weights {crc:08x}",
    flush=True,
)
if plan.get("fails"):
    mykv.barrier()
    if mykv.rank() == plan["fails"] - 1:
        raise TypeError("planted")
    mykv.barrier()

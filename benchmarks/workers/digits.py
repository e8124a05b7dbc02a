"""A worker of benchmarks/pictures.py: trains on scans of digits; rank 0 prints losses and accuracies as JSON.

Argument after the module's name: a JSON object with `trainer` ("DistributedTrainer" or "LocalTrainer"), `options` of
it, `epochs`, `hidden` (units of the first dense layer) and `timeline` (a file, or null).

Printed: {"losses": mean over the workers for each step, "epochs": [[seconds of training until its end, accuracy], ...],
"steps": unix times at which rank 0 begins each step, "same": whether all workers end with the same weights,
"parameters": number of them}. Accuracy is measured on 360 digits that no worker trains on, with the clock stopped.
"""

import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
from digits_common import SGD, accuracy, batches, checksum, data, gather, loss_of, network
from mxnet import autograd


def main() -> None:
    """Train, and print."""
    job = json.loads(sys.argv[2])
    mykv.init()
    rank, size = mykv.rank(), mykv.size()
    (images, labels), _ = data()
    length = len(images) // size
    share = slice(rank, length * size, size)
    images, labels = images[share], labels[share]
    net = network(rank, job["hidden"])
    net(mx.np.array(images[:1]))  # initialized first, so that the trainer broadcasts before the clock starts
    trainer = getattr(mykv, job["trainer"])(net.collect_params(), "sgd", SGD, **job["options"])
    mx.nd.waitall()
    mykv.barrier()
    if job["timeline"]:
        mykv.start_timeline(job["timeline"])
    losses, ends, begins, clock = [], [], [], 0.0
    for epoch in range(job["epochs"]):
        began = time.perf_counter()
        for positions in batches(epoch, length, size):
            begins.append(time.time())
            with autograd.record():
                loss = loss_of(net(mx.np.array(images[positions])), mx.np.array(labels[positions]))
            loss.backward()
            trainer.step(len(positions))
            losses.append(loss.mean())
            losses[-1].wait_to_read()  # like a program that shows its loss
        if isinstance(trainer, mykv.LocalTrainer):
            trainer.synchronize()
        mx.nd.waitall()
        clock += time.perf_counter() - began
        ends.append([clock, accuracy(net)])
        mykv.barrier()
    if job["timeline"]:
        mykv.stop_timeline()
    store = mx.kv.create("mykv")
    told = gather(store, [checksum(net), *(float(one) for one in losses)])
    if rank == 0:
        found = {"losses": told[:, 1:].mean(axis=0).tolist(), "epochs": ends, "steps": begins}
        found["same"] = len(set(told[:, 0])) == 1
        found["parameters"] = int(sum(np.prod(one.shape) for one in net.collect_params().values()))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""Train on scans of handwritten digits with a script as Horovod's users have it:

    mykvrun -n 2 python examples/gluon_digits.py

Only the import was changed. With the line that it was, `import horovod.mxnet as hvd`, the script runs under Horovod.
"""

import sys
import time

import kvstore_plugin as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("This example needs scikit-learn: pip install 'mykv[demo]'")

EPOCHS = 12
BATCH = 32  # images of one worker in one step
LEARNING_RATE = 0.05  # for one worker
HELD_OUT = 360  # of 1797 scans; the accuracy is measured on these

mx.npx.set_np()  # mx.np arrays, which MXNet 1.9.1 and 2.0.0b1 both understand


class Share(gluon.data.Sampler):
    """This worker's part of a dataset, in another order each time; equally long on all workers."""

    def __init__(self, length):
        self._positions = np.arange(hvd.rank(), length - length % hvd.size(), hvd.size())

    def __iter__(self):
        return iter(np.random.permutation(self._positions).tolist())

    def __len__(self):
        return len(self._positions)


def network():
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(32, 3, padding=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Conv2D(64, 3, padding=1, activation="relu"),
        nn.Flatten(),
        nn.Dense(128, activation="relu"),
        nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main():
    hvd.init()
    np.random.seed(hvd.rank())
    mx.random.seed(hvd.rank())  # so workers begin with different weights, until they are broadcast

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    labels = digits.target.astype("int32")
    train = gluon.data.ArrayDataset(images[HELD_OUT:], labels[HELD_OUT:])
    data = gluon.data.DataLoader(train, BATCH, sampler=Share(len(train)), last_batch="discard")
    mine = slice(hvd.rank(), HELD_OUT - HELD_OUT % hvd.size(), hvd.size())
    held_out_images, held_out_labels = mx.np.array(images[mine]), labels[mine]

    net = network()
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer = mx.optimizer.create("sgd", learning_rate=LEARNING_RATE * hvd.size(), momentum=0.9)
    trainer = hvd.DistributedTrainer(params, optimizer)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(EPOCHS):
        begin, losses = time.perf_counter(), []
        for batch, target in data:
            with autograd.record():
                loss = loss_of(net(batch), target)
            loss.backward()
            trainer.step(BATCH)
            losses.append(loss.mean())

        # What each worker has seen, averaged over all of them.
        right = np.mean(net(held_out_images).asnumpy().argmax(axis=1) == held_out_labels)
        seen = mx.nd.array([np.mean([float(loss) for loss in losses]), right])
        loss, accuracy = hvd.allreduce(seen, name="metrics").asnumpy()
        if hvd.rank() == 0:
            seconds = time.perf_counter() - begin
            print(f"epoch {epoch + 1:2d}: loss {loss:.4f}, accuracy {accuracy:.1%}, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())

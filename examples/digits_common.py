"""What digits.py and digits_trainer.py share: the data, the network, and the proof that training was distributed.

None of this is needed to distribute a program. The proof trains a second time, in one process and on the same global
batches, and compares the two loss curves; it compares the weights of all workers bit for bit; and it measures the
accuracy on digits that no worker has trained on.
"""

import sys
import zlib

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("This example needs scikit-learn and tqdm: pip install 'mykv[demo]'")

__all__ = ["EPOCHS", "SGD", "batches", "data", "loss_of", "network", "report", "tqdm"]

EPOCHS = 20
GLOBAL_BATCH = 64  # samples of all workers together in one step
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 5e-4}
HELD_OUT = 360  # of 1797 scans
MOST_DIFFERENCE = 1e-4  # between the two loss curves: float32 sums in another order
LEAST_ACCURACY = 0.97

mx.npx.set_np()  # mx.np arrays, which MXNet 1.9.1 and 2.0.0b1 both understand
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def data():
    """Scans of handwritten digits: ((images, labels) to train on, (images, labels) held out).

    Images are float32 in [0, 1] of shape (N, 1, 8, 8), labels int32 of shape (N,).
    """
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[:, None]
    labels = digits.target.astype("int32")
    order = np.random.RandomState(0).permutation(len(images))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return (images[train], labels[train]), (images[test], labels[test])


def network(seed, hidden=128):
    """A small convolutional network whose weights start from `seed`; the shapes come with the first batch.

    `hidden` is the number of units in the first dense layer.
    """
    mx.random.seed(seed)
    net = nn.HybridSequential()
    # tanh and average pooling are smooth, so that rounding stays rounding. With ReLU, a sum in another order sooner or
    # later switches a unit on or off, and two runs that are both right part by a hundredth within 20 epochs.
    net.add(
        nn.Conv2D(32, 3, padding=1, activation="tanh"),
        nn.Conv2D(32, 3, padding=1, activation="tanh"),
        nn.AvgPool2D(),
        nn.Dense(hidden, activation="tanh"),
        nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def batches(epoch, length, size):
    """Positions within a worker's share, one array for each step of `epoch`; the same on every worker."""
    batch = max(1, GLOBAL_BATCH // size)
    order = np.random.RandomState(epoch).permutation(length)
    return [order[begin : begin + batch] for begin in range(0, length - batch + 1, batch)]


def train_alone(size):
    """Train in this process alone on the batches that `size` workers would see; the mean loss of each epoch."""
    (images, labels), _ = data()
    length = len(images) // size
    net = network(seed=0)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=None)
    curve = []
    for epoch in range(EPOCHS):
        losses = []
        for positions in batches(epoch, length, size):
            # Worker r holds the samples r, r + size, r + 2 size, ...
            everyone = np.concatenate([positions * size + rank for rank in range(size)])
            with autograd.record():
                loss = loss_of(net(mx.np.array(images[everyone])), mx.np.array(labels[everyone]))
            loss.backward()
            trainer.step(len(everyone))
            losses.append(loss.mean())
        curve.append(np.mean([float(loss) for loss in losses]))
    return curve


def accuracy(net):
    """Share of the held-out digits that `net` recognizes."""
    _, (images, labels) = data()
    return float((net(mx.np.array(images)).asnumpy().argmax(axis=1) == labels).mean())


def checksum(net):
    """CRC-32 of the bits of all weights."""
    value = 0
    for parameter in net.collect_params().values():
        value = zlib.crc32(parameter.data().asnumpy().tobytes(), value)
    return value


def gather(store, numbers):
    """One row of `numbers` (float64) from each worker; every worker gets all of them."""
    rows = np.zeros((store.size, len(numbers)))
    rows[store.rank] = numbers
    rows = mx.np.array(rows, dtype="float64")
    store.pushpull(f"gather of {len(numbers)}", rows)  # a sum: all rows but one's own are zero
    return rows.asnumpy()


def report(net, images_of_this_worker, losses):
    """Print, on rank 0, whether training was distributed and right.

    Parameters
    ----------
    net : Block
        After training.
    images_of_this_worker : int
        How many of the images this worker has trained on.
    losses : list of float
        This worker's mean loss in each epoch.

    Returns
    -------
    int
        Exit code of the program: 0 if all is well, 1 on every worker if anything is not.
    """
    store = mx.kv.create("mykv")
    size = store.size
    workers = gather(store, [images_of_this_worker, checksum(net)])
    curve = gather(store, losses).mean(axis=0)
    well = 1.0
    if store.rank == 0:
        alone = train_alone(size)
        worst = max(abs(curve - alone))
        right = accuracy(net)
        same = len(set(workers[:, 1])) == 1
        well = float(worst <= MOST_DIFFERENCE and right >= LEAST_ACCURACY and same)

        print("\nworker  images  checksum of the weights")
        for rank, (images, crc) in enumerate(workers):
            print(f"{rank:6d}  {int(images):6d}  {int(crc):08x}")
        print(f"\nepoch  loss, {size} worker{'s' * (size > 1)}  loss, one process  difference")
        for epoch in sorted({*range(0, EPOCHS, 4), EPOCHS - 1}):
            difference = abs(curve[epoch] - alone[epoch])
            print(f"{epoch + 1:5d}  {curve[epoch]:15.7f}  {alone[epoch]:17.7f}  {difference:10.1e}")
        print(f"\nweights of all workers: {'the same' if same else 'NOT THE SAME'}")
        print(f"largest difference of the loss curves: {worst:.1e} (at most {MOST_DIFFERENCE:.0e})")
        print(f"accuracy on {HELD_OUT} held-out digits: {right:.1%} (at least {LEAST_ACCURACY:.0%})")
        print("PASSED" if well else "FAILED", flush=True)
    return 0 if gather(store, [well])[0, 0] else 1

"""Dive into Deep Learning: two of the book's training functions, whose Trainer is replaced."""

from __future__ import annotations

from comparison import Case, Curve, digest, main

_EPOCHS = 4
_BATCHES = 10
_BATCH_SIZE = 16  # of each worker


def _book():
    """The book's module, and what its functions have given to their plot."""
    import matplotlib

    matplotlib.use("Agg")
    from d2l import mxnet as d2l

    shown = []

    class Animator:
        def __init__(self, *_, **__):
            pass

        def add(self, x, y):
            shown.append(y)

    d2l.Animator = Animator
    return d2l, shown


def _lenet(nn):
    net = nn.Sequential()
    net.add(
        nn.Conv2D(6, 5, padding=2, activation="relu"),
        nn.AvgPool2D(2, 2),
        nn.Conv2D(16, 5, activation="relu"),
        nn.AvgPool2D(2, 2),
        nn.Dense(120, activation="relu"),
        nn.Dense(84, activation="relu"),
        nn.Dense(10),
    )
    return net


def _train(chapter):
    import kvstore_plugin as hvd
    import mxnet as mx
    import numpy as np
    from mxnet import gluon, init

    mx.npx.set_np()
    d2l, shown = _book()
    gluon.Trainer = hvd.DistributedTrainer
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 10, 2 * _BATCHES * _BATCH_SIZE)
    images = (rng.randn(len(labels), 1, 28, 28) / 4 + labels[:, None, None, None] / 5 - 1).astype("float32")
    mine = slice(hvd.rank(), None, hvd.size())
    data = gluon.data.DataLoader(
        gluon.data.ArrayDataset(images[mine], labels[mine].astype("float32")), 2 * _BATCH_SIZE // hvd.size()
    )
    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    net = _lenet(gluon.nn)
    if chapter == 6:
        d2l.train_ch6(net, data, data, _EPOCHS, 0.1, mx.cpu())
    else:
        net.initialize(init.Xavier())
        trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.005})
        d2l.train_ch13(net, data, data, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, _EPOCHS, [mx.cpu()])
    losses = [float(one[0]) for one in shown if one[0] is not None]
    return Curve(losses, digest(net))


_CASES = [
    Case("LeNet, train_ch6, SGD", lambda: _train(6)),
    Case("LeNet, train_ch13, Adam", lambda: _train(13)),
]

if __name__ == "__main__":
    main(_CASES)

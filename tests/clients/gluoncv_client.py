"""GluonCV: its SSDEstimator with horovod=True, and its networks in the steps of its classification scripts.

The scripts themselves are not on PyPI. All images are made here, and no weights are downloaded.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from comparison import WORKERS, Case, Curve, digest, main

_CLASSES = 4


def _images(seed, count, size):
    """Images of shape (count, 3, size, size), each with a bright square in one of four corners, and the corners."""
    import numpy as np

    rng = np.random.RandomState(seed)
    images = rng.randn(count, 3, size, size).astype("float32") * 0.5
    corners = rng.randint(0, _CLASSES, count)
    half = size // 2
    for image, corner in zip(images, corners):
        image[:, (corner // 2) * half :, (corner % 2) * half :][:, :half, :half] += 1
    return images, corners.astype("float32")


def _classify(net, size, steps, batch, devices, learning_rate, hybridize=True):
    """Train as GluonCV's scripts do: its schedule, Nesterov's momentum, weight decay, cross entropy."""
    import horovod.mxnet as hvd
    import mxnet as mx
    import numpy as np
    from gluoncv.utils import LRScheduler, LRSequential
    from mxnet import autograd, gluon

    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    net.initialize(mx.init.MSRAPrelu(), ctx=devices)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    schedule = LRSequential(
        [
            LRScheduler("linear", base_lr=0, target_lr=learning_rate, nepochs=1, iters_per_epoch=4),
            LRScheduler("cosine", base_lr=learning_rate, target_lr=0, nepochs=1, iters_per_epoch=steps),
        ]
    )
    options = {"wd": 1e-4, "momentum": 0.9, "lr_scheduler": schedule}
    trainer = hvd.DistributedTrainer(net.collect_params(), "nag", options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    workers = range(WORKERS) if hvd.size() == 1 else [hvd.rank()]
    losses = []
    for step in range(steps):
        parts = [_images(100 * (step % 4) + worker, batch, size) for worker in workers]
        data, label = (
            gluon.utils.split_and_load(mx.nd.array(np.concatenate(one)), devices, even_split=False)
            for one in zip(*parts)
        )
        with autograd.record():
            of_devices = [loss_of(net(x), y) for x, y in zip(data, label)]
        autograd.backward(of_devices)
        trainer.step(batch * len(workers))
        losses.append(float(np.mean([loss.mean().asscalar() for loss in of_devices])))
    return Curve(losses, digest(net))


def _train_synchronized(hybridize):
    """One process with the whole batch, or two workers with half of it and the statistics of the whole.

    There are few steps, since the network multiplies roundings by ten in each: one process that is given its batches in
    another order differs as much.
    """
    import horovod.mxnet as hvd
    import mxnet as mx
    from gluoncv.model_zoo import resnet18_v1b

    net = resnet18_v1b(classes=_CLASSES, norm_layer=hvd.SyncBatchNorm if hvd.size() > 1 else mx.gluon.nn.BatchNorm)
    return _classify(net, size=64, steps=5, batch=8, devices=[mx.cpu()], learning_rate=3e-4, hybridize=hybridize)


def _train_apart():
    """One process with two devices, or two workers: either way each half of a batch has its own statistics."""
    import horovod.mxnet as hvd
    import mxnet as mx
    from gluoncv.model_zoo import cifar_resnet20_v1

    devices = [mx.cpu(0), mx.cpu(1)] if hvd.size() == 1 else [mx.cpu()]
    net = cifar_resnet20_v1(classes=_CLASSES)
    losses = _classify(net, size=32, steps=16, batch=8, devices=devices, learning_rate=0.05).losses
    hvd.sync_aux_params(net)
    return Curve(losses, digest(net))


def _detection_data(directory):
    """Images with one square each, as the data set of GluonCV's detectors."""
    import cv2
    import numpy as np
    from gluoncv.auto.data.dataset import ObjectDetectionDataset

    rng = np.random.RandomState(0)
    rows = {"image": [], "rois": [], "image_attr": []}
    for number in range(16):
        image = rng.randint(0, 60, (160, 160, 3)).astype("uint8")
        left, top = rng.randint(10, 70, 2)
        name = ("red", "blue")[number % 2]
        image[top : top + 70, left : left + 70, 2 if name == "red" else 0] = 255
        path = directory / f"{number}.png"
        cv2.imwrite(str(path), image)
        box = {"xmin": left / 160, "ymin": top / 160, "xmax": (left + 70) / 160, "ymax": (top + 70) / 160}
        rows["image"].append(str(path))
        rows["rois"].append([{"class": name, **box, "difficult": 0}])
        rows["image_attr"].append({"width": 160, "height": 160})
    return ObjectDetectionDataset(rows, dataset_type="voc", classes=["red", "blue"])


def _train_ssd():
    """GluonCV gives all workers the same batches, so one process with the batch of one worker does the same."""
    import autocfg.dataclasses
    import horovod.mxnet as hvd
    import mxnet as mx

    autocfg.dataclasses.is_instance = lambda *_: True  # it cannot tell Union's types from Python 3.11 on
    from gluoncv.auto.estimators.ssd import ssd

    directory = Path(sys.argv[1]) / f"ssd-{hvd.size()}-{hvd.rank()}"
    directory.mkdir(parents=True, exist_ok=True)
    losses = []

    class RecordedLoss(ssd.SSDMultiBoxLoss):
        def forward(self, *arguments):
            total, of_classes, of_boxes = super().forward(*arguments)
            losses.append(float(total[0].sum().asscalar()))
            return total, of_classes, of_boxes

    make = ssd.custom_ssd
    # Without weights from the network, and with fewer channels.
    ssd.custom_ssd = lambda **given: make(**{**given, "pretrained_base": False, "filters": [64, 64, 32, 32]})
    ssd.SSDMultiBoxLoss = RecordedLoss
    ssd.SSDEstimator._reload_best = lambda _, result: result  # only the first worker has looked for the best
    estimator = ssd.SSDEstimator(
        {
            "log_dir": str(directory),
            "horovod": hvd.size() > 1,
            "gpus": (),
            "num_workers": 0,
            "ssd": {"transfer": None, "base_network": "mobilenet0.25", "data_shape": 300},
            "train": {"batch_size": 4 * hvd.size(), "epochs": 4, "lr": 0.01},
            "valid": {"batch_size": 4},
        }
    )
    mx.random.seed(hvd.rank())
    data = _detection_data(directory)
    with _gpus_are_cpus():
        estimator.fit(data, data)
    return Curve(losses, digest(estimator.net))


@contextlib.contextmanager
def _gpus_are_cpus():
    """With horovod=True GluonCV asks for a GPU of each worker."""
    import mxnet as mx

    gpu, mx.gpu = mx.gpu, lambda _: mx.cpu()
    try:
        yield
    finally:
        mx.gpu = gpu


if __name__ == "__main__":
    main(
        [
            Case("resnet18_v1b with SyncBatchNorm", lambda: _train_synchronized(True), allowed=1e-3),
            Case("resnet18_v1b with SyncBatchNorm, not hybridized", lambda: _train_synchronized(False), allowed=1e-3),
            Case("cifar_resnet20_v1", _train_apart),
            Case("SSDEstimator, horovod=True", _train_ssd),
        ]
    )

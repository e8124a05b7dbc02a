"""Classify pictures of a RecordIO file. Each worker reads a part of the file:

    mykvrun -n 2 python examples/image_records.py

The pictures are made: 32 x 32 or 48 x 48 pixels with a bright square in one of four corners. `part_index` and
`num_parts` divide the file by its bytes, so workers get different numbers of pictures; `join` lets them take different
numbers of steps.

What the real task needs: a file of ImageNet's pictures in random order (im2rec.py of MXNet's tools makes it),
`data_shape=(3, 224, 224)`, a network of gluon.model_zoo.vision, batches of 32 to 256 pictures and a GPU for each
worker, some 90 epochs, a schedule of the learning rate, and as many `preprocess_threads` as a worker has cores.
"""

import os
import struct
import sys
import tempfile
import zlib

import kvstore_plugin as mykv  # before mxnet, which needs it with numpy 2
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

PICTURES, CLASSES = 600, 4
BATCH = 20  # pictures of a worker in a step
EPOCHS = 4

mx.npx.set_np()  # arrays that MXNet 1.9.1 and 2.0.0b1 both understand


def png(pixels):
    """The bytes of a PNG file with pixels of uint8 of shape (height, width, 3)."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    file = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        file += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return file


def write_records(path):
    """Make the file. Its first half has larger pictures, so its parts have different numbers of them."""
    rng = np.random.RandomState(0)
    records = mx.recordio.MXRecordIO(path, "w")
    for number in range(PICTURES):
        label, side = rng.randint(CLASSES), 48 if number < PICTURES // 2 else 32
        pixels = rng.randint(0, 120, (side, side, 3)).astype("uint8")
        top, left = (label // 2) * side // 2, (label % 2) * side // 2
        pixels[top : top + side // 2, left : left + side // 2] += 80
        records.write(mx.recordio.pack(mx.recordio.IRHeader(0, label, number, 0), png(pixels)))
    records.close()


def part_of_this_worker(path, epoch=0, shuffle=True):
    """An iterator over this worker's part of the file, for one epoch.

    Each epoch has a new one: after reset(), an iterator leaves out the pictures that have filled up its last batch.
    """
    return mx.io.ImageRecordIter(
        path_imgrec=path,
        data_shape=(3, 32, 32),
        resize=32,
        batch_size=BATCH,
        shuffle=shuffle,
        seed=1 + epoch,  # of the order
        part_index=mykv.rank(),
        num_parts=mykv.size(),
        scale=1 / 255,
        preprocess_threads=1,
        verbose=False,
    )


def arrays_of(batch):
    """Pictures and labels of a batch, without those that fill up the last batch of an epoch."""
    count = BATCH - batch.pad
    # ImageRecordIter's arrays are in memory for copies to GPUs, as_in_ctx() brings them to the network's.
    return [one[0].as_np_ndarray().as_in_ctx(mx.cpu())[:count] for one in (batch.data, batch.label)]


def network():
    """A small convolutional network."""
    net = gluon.nn.HybridSequential()
    for channels in (8, 16):
        net.add(gluon.nn.Conv2D(channels, 3, padding=1, strides=2), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
    net.add(gluon.nn.Flatten(), gluon.nn.Dense(CLASSES))
    net.initialize(mx.init.Xavier())
    net(mx.np.zeros((1, 3, 32, 32)))  # so that also a worker without a picture has all parameters
    net.hybridize()
    return net


def train_epoch(net, data, trainer, loss_of):
    """Train on each picture of all workers once; returns the pictures of this worker, its batches, and all steps."""
    pictures = batches = 0
    with mykv.join(trainer) as joined:
        for batch in data:
            images, labels = arrays_of(batch)
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(BATCH)  # the same on all workers, also for a smaller last batch
            pictures, batches = pictures + len(labels), batches + 1
    mykv.sync_aux_params(net.collect_params())  # running means and variances of BatchNorm
    return pictures, batches, joined.steps


def accuracy(net, data):
    """Share of the pictures of all workers that the network recognizes."""
    right = mx.np.zeros(2)
    for batch in data:
        images, labels = arrays_of(batch)
        right += mx.np.array([float((net(images).argmax(axis=1).astype("float32") == labels).sum()), len(labels)])
    right = mykv.allreduce(right, op=mykv.Sum).asnumpy()
    return right[0] / right[1]


def main():
    """Make the file, train, and print from rank 0 what came out."""
    mykv.init()
    folder = mykv.broadcast_object(tempfile.mkdtemp() if mykv.rank() == 0 else None)  # on a disk that all workers see
    path = os.path.join(folder, "pictures.rec")
    if mykv.rank() == 0:
        write_records(path)
    mykv.barrier()

    net = network()
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.005})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(EPOCHS):
        shares = mykv.allgather_object(train_epoch(net, part_of_this_worker(path, epoch), trainer, loss_of))
        if mykv.rank() == 0:
            pictures, batches, steps = ([share[which] for share in shares] for which in range(3))
            print(f"epoch {epoch}: pictures {pictures}, batches {batches}, steps {steps}", flush=True)
    recognized = accuracy(net, part_of_this_worker(path, shuffle=False))
    mykv.check_in_step(net.collect_params(), auxiliary=True)  # an error unless all workers have the same weights
    if mykv.rank() == 0:
        os.remove(path)
        os.rmdir(folder)
        print(f"accuracy {100 * recognized:.1f}%, weights of all workers: the same")


if __name__ == "__main__":
    sys.exit(main())

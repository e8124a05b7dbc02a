"""Train on scans of handwritten digits with Module.fit, which only MXNet 1.x has, and the store 'mykv':

    mykvrun -n 2 python examples/module_store_digits.py

Written for dist_sync, the script would differ in the line `import kvstore_plugin`, in the name of the store, and in how
it is started. The optimizer runs on the store: each worker updates its share of the weights.
"""

import sys
import zlib

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("This example needs scikit-learn: pip install 'mykv[demo]'")

EPOCHS = 12
BATCH = 32  # images of one worker in one step
HELD_OUT = 360  # of 1797 scans


def network():
    value = mx.sym.Variable("data")
    for filters in (32, 64):
        value = mx.sym.Convolution(value, num_filter=filters, kernel=(3, 3), pad=(1, 1))
        value = mx.sym.Activation(value, act_type="relu")
        value = mx.sym.Pooling(value, kernel=(2, 2), stride=(2, 2), pool_type="max")
    value = mx.sym.FullyConnected(mx.sym.Flatten(value), num_hidden=10)
    return mx.sym.SoftmaxOutput(value, name="softmax")


def main():
    store = mx.kv.create("mykv")
    np.random.seed(store.rank)  # the order of images, and the weights that all but rank 0 throw away
    mx.random.seed(store.rank)

    digits = load_digits()
    images, labels = (digits.images / 16).astype("float32")[:, None], digits.target.astype("float32")
    size = store.num_workers
    rest = len(images) - HELD_OUT
    mine = slice(HELD_OUT + store.rank, HELD_OUT + rest - rest % size, size)  # equally many everywhere
    data = mx.io.NDArrayIter(images[mine], labels[mine], BATCH, shuffle=True, last_batch_handle="discard")
    held_out = mx.io.NDArrayIter(images[:HELD_OUT], labels[:HELD_OUT], BATCH)

    model = mx.mod.Module(network())
    sgd = {"learning_rate": 0.05 * size, "momentum": 0.9}
    model.fit(
        data, num_epoch=EPOCHS, kvstore=store, optimizer="sgd", optimizer_params=sgd, initializer=mx.init.Xavier()
    )

    weights, _ = model.get_params()
    checksum = zlib.crc32(b"".join(weights[name].asnumpy().tobytes() for name in sorted(weights)))
    ((_, accuracy),) = model.score(held_out, "acc")
    checksums = mykv.allgather_object(checksum)
    if store.rank == 0:
        print(f"weights of all workers: {'the same' if len(set(checksums)) == 1 else 'NOT THE SAME'}")
        print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

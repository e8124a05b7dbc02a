"""Train on scans of handwritten digits with the Module API, which only MXNet 1.x has, and a DistributedOptimizer:

    mykvrun -n 2 python examples/module_digits.py

As for gluon_digits.py, the script runs under Horovod with the line `import horovod.mxnet as hvd`.
"""

import sys
import zlib

import kvstore_plugin as hvd
import mxnet as mx
import numpy as np

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("This example needs scikit-learn: pip install 'mykv[demo]'")

EPOCHS = 12
BATCH = 32  # images of one worker in one step
LEARNING_RATE = 0.05  # for one worker
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
    hvd.init()
    np.random.seed(hvd.rank())
    mx.random.seed(hvd.rank())  # so workers begin with different weights, until they are broadcast

    digits = load_digits()
    images, labels = (digits.images / 16).astype("float32")[:, None], digits.target.astype("float32")
    rest = len(images) - HELD_OUT
    mine = slice(HELD_OUT + hvd.rank(), HELD_OUT + rest - rest % hvd.size(), hvd.size())  # equally long everywhere
    data = mx.io.NDArrayIter(images[mine], labels[mine], BATCH, shuffle=True, last_batch_handle="discard")
    held_out = mx.io.NDArrayIter(images[:HELD_OUT], labels[:HELD_OUT], BATCH)

    model = mx.mod.Module(network())
    model.bind(data.provide_data, data.provide_label)
    model.init_params(mx.init.Xavier())
    weights, states = model.get_params()
    hvd.broadcast_parameters(weights, root_rank=0)
    hvd.broadcast_parameters(states, root_rank=0)
    model.set_params(weights, states)

    # The mean over the workers is the optimizer's work; the mean over a worker's batch is rescale_grad's, as ever.
    optimizer = mx.optimizer.create(
        "sgd", learning_rate=LEARNING_RATE * hvd.size(), momentum=0.9, rescale_grad=1 / BATCH
    )
    model.init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(optimizer))
    for _ in range(EPOCHS):
        data.reset()
        for batch in data:
            model.forward_backward(batch)
            model.update()

    weights, _ = model.get_params()
    checksum = zlib.crc32(b"".join(weights[name].asnumpy().tobytes() for name in sorted(weights)))
    ((_, accuracy),) = model.score(held_out, "acc")
    checksums = hvd.allgather_object(checksum)
    if hvd.rank() == 0:
        same = len(set(checksums)) == 1
        print(f"weights of all workers: {'the same' if same else 'NOT THE SAME'}")
        print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

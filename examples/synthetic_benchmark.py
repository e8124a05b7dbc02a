"""Images per second of a network of the model zoo, ResNet-50 by default, on images that are noise:

    mykvrun -n 4 python examples/synthetic_benchmark.py --batch-size 32

Every worker trains on one batch of its own again and again, so that reading data costs nothing. Measured are forward,
backward, the mean of the gradients over all workers, and the update. Workers use their share of the host's GPUs where
MXNet is built for them, else the CPU.
"""

import argparse
import sys
import time

import kvstore_plugin as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

# Networks of MXNet 2 take mx.np arrays only, and some of the model zoo of MXNet 1 take mx.nd arrays only.
if mx.__version__.startswith("2."):
    mx.npx.set_np()
    array = mx.np.array
else:
    array = mx.nd.array


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50_v1", help="name in gluon.model_zoo.vision (resnet50_v1)")
    parser.add_argument("--batch-size", type=int, default=32, help="images of one worker in one step (32)")
    parser.add_argument("--image-size", type=int, default=224, help="width and height in pixels (224)")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes (1000)")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps before the measurement (10)")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps timed together (10)")
    parser.add_argument("--num-iters", type=int, default=10, help="how many such times are taken (10)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel between hosts in 16 bits")
    parser.add_argument("--update-on-kvstore", action="store_true", help="each worker updates its share of the weights")
    return parser.parse_args()


def make_step(args):
    """A function that trains for one step."""
    random = np.random.RandomState(hvd.rank())  # every worker has other images
    devices = hvd.default_devices()
    images = random.uniform(-1, 1, (args.batch_size, 3, args.image_size, args.image_size))
    labels = random.randint(0, args.classes, args.batch_size)
    parts = []
    for device, *arrays in zip(devices, *(np.array_split(one, len(devices)) for one in (images, labels))):
        with device:
            parts.append([array(one, dtype="float32") for one in arrays])
    net = gluon.model_zoo.vision.get_model(args.model, classes=args.classes)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True, static_shape=True)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    optimizer = mx.optimizer.create("sgd", learning_rate=0.0125 * hvd.size(), momentum=0.9)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    trainer = hvd.DistributedTrainer(
        params, optimizer, compression=compression, update_on_kvstore=args.update_on_kvstore
    )

    def step():
        with autograd.record():
            losses = [loss_of(net(some), classes) for some, classes in parts]
        autograd.backward(losses)
        trainer.step(args.batch_size)

    return step


def main():
    args = arguments()
    hvd.init()
    step = make_step(args)

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    def seconds(steps):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        mx.nd.waitall()
        return time.perf_counter() - begin

    say(f"{args.model}, {args.batch_size} images of {args.image_size} x {args.image_size} pixels per worker and step")
    seconds(args.num_warmup_batches)
    rates = []
    for number in range(args.num_iters):
        rates.append(args.batch_size * args.num_batches_per_iter / seconds(args.num_batches_per_iter))
        say(f"iteration {number}: {rates[-1]:.1f} img/sec per worker")

    # Workers wait for each other in every step, so all of them measure the same, but for the last step of an iteration.
    mean, deviation = np.mean(rates), np.std(rates)
    say(f"img/sec per worker: {mean:.1f} +- {1.96 * deviation:.1f} (mean and 1.96 standard deviations)")
    say(f"img/sec on {hvd.size()} worker(s): {hvd.size() * mean:.1f} +- {hvd.size() * 1.96 * deviation:.1f}")


if __name__ == "__main__":
    sys.exit(main())

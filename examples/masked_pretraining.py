"""Pretraining as BERT's: hidden words are guessed, with AMP, gradient accumulation and LAMB:

    mykvrun -n 2 python examples/masked_pretraining.py

The texts are generated: each has a topic, and its words follow from topic and place; some are hidden. AMP takes float16
on GPUs and bfloat16 on CPUs that compute in it (AVX-512); elsewhere the script trains in float32. It needs MXNet 1.9.1,
whose AMP is in mxnet.contrib.

What the real task needs: Wikipedia and books as word pieces, divided by rank; sequences of 128 and then 512 pieces;
12 layers of 768 units and 12 heads (110 M parameters), with dropout; a GPU for each worker; some thousand sequences in
BATCH * ACCUMULATE * workers; a learning rate that rises in the first tenth of 100,000 steps and then falls; checkpoints
(docs/checkpoints.md); between hosts `compression=mykv.Compression.fp16`.
"""

import contextlib
import math
import sys
from pathlib import Path

import kvstore_plugin as mykv  # before mxnet, which needs it with numpy 2
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

WORDS, LENGTH, HIDDEN_SHARE = 40, 12, 0.2
MASK = WORDS  # the number that stands for a hidden word
WIDTH, HEADS, LAYERS = 32, 4, 2
BATCH, ACCUMULATE = 16, 2  # sequences of a worker in a backward pass, and backward passes in a step
STEPS = 120


def short_dtype():
    """What AMP computes in here: 'float16', 'bfloat16', or None where MXNet has layers in neither."""
    if mx.context.num_gpus():
        return "float16"
    return "bfloat16" if "avx512bw" in Path("/proc/cpuinfo").read_text() else None


class Layer(gluon.nn.HybridBlock):
    """Self-attention and two dense layers, each with a sum around it and a normalization behind it."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.question = gluon.nn.Dense(3 * WIDTH, flatten=False, in_units=WIDTH)
            self.answer = gluon.nn.Dense(WIDTH, flatten=False, in_units=WIDTH)
            self.inner = gluon.nn.Dense(4 * WIDTH, flatten=False, in_units=WIDTH)
            self.outer = gluon.nn.Dense(WIDTH, flatten=False, in_units=4 * WIDTH)
            self.first, self.second = gluon.nn.LayerNorm(in_channels=WIDTH), gluon.nn.LayerNorm(in_channels=WIDTH)

    def hybrid_forward(self, F, x):
        """From and to shape (sequences, LENGTH, WIDTH)."""
        split = F.split(self.question(x), num_outputs=3, axis=2)
        heads = [one.reshape((0, 0, HEADS, -1)).transpose((0, 2, 1, 3)).reshape((-3, 0, 0)) for one in split]
        seen = F.softmax(F.batch_dot(heads[0], heads[1], transpose_b=True) / math.sqrt(WIDTH / HEADS), axis=-1)
        mixed = F.batch_dot(seen, heads[2]).reshape((-4, -1, HEADS, 0, 0)).transpose((0, 2, 1, 3)).reshape((0, 0, -3))
        x = self.first(x + self.answer(mixed))
        return self.second(x + self.outer(F.LeakyReLU(self.inner(x), act_type="gelu")))


class Encoder(gluon.nn.HybridBlock):
    """Scores of each place's word, shape (sequences, LENGTH, WORDS), from words and places."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.words = gluon.nn.Embedding(WORDS + 1, WIDTH)
            self.places = gluon.nn.Embedding(LENGTH, WIDTH)
            self.layers = gluon.nn.HybridSequential()
            self.layers.add(*(Layer() for _ in range(LAYERS)))
            self.scores = gluon.nn.Dense(WORDS, flatten=False, in_units=WIDTH)

    def hybrid_forward(self, F, words, places):
        """Words of shape (sequences, LENGTH), places of shape (1, LENGTH)."""
        scores = self.scores(self.layers(F.broadcast_add(self.words(words), self.places(places))))
        return F.cast(scores, "float32")  # the loss is computed in float32


def batch(rng):
    """Words with hidden ones, the words themselves, and which count: three arrays of shape (BATCH, LENGTH)."""
    words = rng.randint(WORDS // 4, size=(BATCH, 1)) * 4 + np.arange(LENGTH) % 4  # 10 topics of 4 words
    hidden = rng.rand(BATCH, LENGTH) < HIDDEN_SHARE
    return [mx.nd.array(one) for one in (np.where(hidden, MASK, words), words, hidden)]


def main():
    """Train, and print from rank 0 what came out."""
    mykv.init()
    dtype = short_dtype()
    if dtype:
        amp.init(dtype)  # before the network is made
    device = mykv.default_devices()[0]
    net = Encoder()
    net.initialize(mx.init.Normal(0.1), ctx=device)
    net.hybridize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "lamb", {"learning_rate": 0.01, "wd": 0.01})
    if dtype:
        amp.init_trainer(trainer)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    places = mx.nd.arange(LENGTH, ctx=device).reshape((1, LENGTH))
    rng = np.random.RandomState(mykv.rank())  # each worker has sentences of its own
    gradients = [parameter.grad(device) for parameter in net.collect_params().values()]
    right = []
    for step in range(STEPS):
        # Not with grad_req "add", by which MXNet 1.9.1 loses gradients of layers that AMP computes in bfloat16.
        sums = [gradient.zeros_like() for gradient in gradients]
        for _ in range(ACCUMULATE):
            words, truth, counts = (one.as_in_context(device) for one in batch(rng))
            with autograd.record():
                scores = net(words, places)
                loss = loss_of(scores, truth, counts.expand_dims(2)) / HIDDEN_SHARE
                with amp.scale_loss(loss, trainer) if dtype else contextlib.nullcontext(loss) as scaled:
                    autograd.backward(scaled)
            sums = [total + gradient for total, gradient in zip(sums, gradients)]
            right.append(((scores.argmax(axis=2) == truth) * counts).sum() / counts.sum())
        for total, gradient in zip(sums, gradients):
            total.copyto(gradient)
        trainer.step(BATCH * ACCUMULATE)  # the sums are averaged over the workers, once
        if (step + 1) % (STEPS // 4) == 0:
            share = float(mykv.allreduce(mx.nd.concat(*[one.reshape(1) for one in right], dim=0).mean()).asscalar())
            right = []
            if mykv.rank() == 0:
                print(f"step {step + 1}: {100 * share:.1f}% of the hidden words guessed", flush=True)
    mykv.check_in_step(net.collect_params())  # an error unless all workers have the same weights
    if mykv.rank() == 0:
        scale = f", loss scale {trainer._amp_loss_scaler.loss_scale:g}" if dtype else ""
        print(f"computed in {dtype or 'float32'}{scale}\nweights of all workers: the same")


if __name__ == "__main__":
    sys.exit(main())

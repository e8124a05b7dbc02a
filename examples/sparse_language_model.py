"""A language model whose words have sparse gradients, with the norm of all gradients clipped:

    mykvrun -n 2 python examples/sparse_language_model.py

The text is made of 20,000 words, few of them frequent; each word decides on the topic of the next one. A batch has some
hundred different words, so the gradient of the words' vectors has some hundred rows (`row_sparse`), and only rows that
a worker has used travel. It needs MXNet 1.9.1: Gluon 2.0 has no sparse gradients.

What the real task needs: a text such as WikiText-103 as numbers of words, a share of it for each worker, 1 or 2 LSTM
layers of 1024 units and 400 numbers for each word, sequences of 35 to 150 words whose state goes on from batch to
batch, dropout, a sampled softmax over all words in place of the topic, and a learning rate that falls with the loss of
all workers (docs/training.md).
"""

import sys

import kvstore_plugin as mykv  # before mxnet, which needs it with numpy 2
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

WORDS, TOPICS = 20000, 20
WIDTH, LENGTH, BATCH = 32, 12, 16  # numbers for a word, words of a sequence, sequences of a worker in a step
EPOCHS, STEPS = 4, 40
MOST = 0.2  # of the norm of all gradients together


class LanguageModel(gluon.Block):
    """The topic of each next word, from the words before it."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.words = gluon.nn.Embedding(WORDS, WIDTH, sparse_grad=True)
            self.memory = gluon.rnn.LSTM(WIDTH, layout="NTC", input_size=WIDTH)
            self.topic = gluon.nn.Dense(TOPICS, flatten=False, in_units=WIDTH)

    def forward(self, words):
        """Scores of shape (sequences, words, topics)."""
        return self.topic(self.memory(self.words(words)))


def text(rng, sequences):
    """Sequences of words, shape (sequences, LENGTH + 1). Word w has topic w % TOPICS; topic t calls for 3 t + 1."""
    rank_of_word = np.minimum(rng.zipf(1.3, (sequences, LENGTH + 1)), WORDS // TOPICS) - 1  # 0 is the most frequent
    words = np.zeros((sequences, LENGTH + 1), "int64")
    topic = rng.randint(TOPICS, size=sequences)
    for place in range(LENGTH + 1):
        words[:, place] = rank_of_word[:, place] * TOPICS + topic
        surprising = rng.rand(sequences) < 0.1
        topic = np.where(surprising, rng.randint(TOPICS, size=sequences), (3 * topic + 1) % TOPICS)
    return words


def perplexity(net, loss_of, words):
    """Of all workers' sequences; 1 is the best, TOPICS is guessing."""
    loss = loss_of(net(mx.nd.array(words[:, :-1])), mx.nd.array(words[:, 1:] % TOPICS)).mean()
    return float(np.exp(mykv.allreduce(loss).asscalar()))


def main():
    """Train, and print from rank 0 what came out."""
    mykv.init()
    net = LanguageModel()
    net.initialize(mx.init.Xavier())
    trainer = mykv.DistributedTrainer(
        net.collect_params(), "adam", {"learning_rate": 0.01, "lazy_update": True}, clip_global_norm=MOST
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(mykv.rank())  # each worker has a text of its own
    held_out = text(np.random.RandomState(1000 + mykv.rank()), 64)
    rows = clipped = 0
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            words = text(rng, BATCH)
            with autograd.record():
                loss = loss_of(net(mx.nd.array(words[:, :-1])), mx.nd.array(words[:, 1:] % TOPICS))
            loss.backward()
            trainer.step(BATCH)
            rows += net.words.weight.grad().indices.shape[0]  # of all workers together
            clipped += trainer.gradient_norm.asscalar() > MOST
        now = perplexity(net, loss_of, held_out)
        if mykv.rank() == 0:
            print(f"epoch {epoch}: perplexity {now:.2f}", flush=True)
    mykv.check_in_step(net.collect_params())  # an error unless all workers have the same weights
    if mykv.rank() == 0:
        steps = EPOCHS * STEPS
        print(f"rows in a step {rows / steps:.0f} of {WORDS}, steps with a clipped norm {clipped} of {steps}")
        print("weights of all workers: the same")


if __name__ == "__main__":
    sys.exit(main())

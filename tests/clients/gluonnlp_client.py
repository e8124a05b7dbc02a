"""GluonNLP: the steps of its BERT pretraining script, with its model, optimizer and clipping, on made sentences.

The script itself is not on PyPI. It clips sums of gradients at the norm times the number of workers, as Horovod leaves
them, so the trainer is created with gradients_after_allreduce='sum'.
"""

from __future__ import annotations

from comparison import WORKERS, Case, Curve, digest, main

_STEPS = 24
_BATCH = 8  # of each worker
_LENGTH, _MASKED = 16, 3
_WORDS = 10
_MASK = 1  # the word that stands for what is to be guessed
_MAX_NORM = 0.5


def _model():
    import gluonnlp as nlp
    import mxnet as mx

    encoder = nlp.model.BERTEncoder(
        units=32, hidden_size=64, num_layers=2, num_heads=2, max_length=_LENGTH, dropout=0.0
    )
    model = nlp.model.BERTModel(encoder, vocab_size=_WORDS, token_type_vocab_size=2, units=32, embed_size=32)
    model.initialize(mx.init.Normal(0.1))
    return model


def _batch(step, worker):
    """Ids, segments, masked positions and words, and whether the second half continues the first; as numpy arrays."""
    import numpy as np

    rng = np.random.RandomState(10 * (step % 2) + worker)  # few, so that they are soon learned
    begins = rng.randint(2, _WORDS, (_BATCH, 1))
    continues = rng.randint(0, 2, _BATCH)
    words = 2 + (begins + np.arange(_LENGTH) - 2) % (_WORDS - 2)
    half = _LENGTH // 2
    words[:, half:] = np.where(continues[:, None], words[:, half:], rng.randint(2, _WORDS, (_BATCH, 1)))
    segments = np.repeat([[0] * half + [1] * half], _BATCH, axis=0)
    positions = np.stack([rng.permutation(np.arange(1, half))[:_MASKED] for _ in range(_BATCH)])
    guessed = np.take_along_axis(words, positions, 1)
    np.put_along_axis(words, positions, _MASK, 1)
    return [words, segments, positions, guessed, continues]


def _clipped(trainer, params, workers):
    """As clip_grad_global_norm() is used, with a wait in each step."""
    import gluonnlp as nlp

    trainer.allreduce_grads()
    norm = nlp.utils.clip_grad_global_norm(params, _MAX_NORM * workers)
    trainer.update(1)
    return float(norm.asscalar()) / workers


def _scaled(trainer, params, workers):
    """As the pretraining script does it: the ratio divides in the update, as an array that is not waited for."""
    import gluonnlp as nlp

    trainer.allreduce_grads()
    norm, ratio, _ = nlp.utils.grad_global_norm(params, _MAX_NORM * workers)
    trainer.update(ratio)
    return float(norm.asscalar()) / workers


def _train(optimizer, options, update):
    import horovod.mxnet as hvd
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon

    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    model = _model()
    model.hybridize(static_alloc=True)
    trainer = hvd.DistributedTrainer(
        model.collect_params(), optimizer, options, gradients_after_allreduce="sum" if hvd.size() > 1 else None
    )
    params = [parameter for parameter in model.collect_params().values() if parameter.grad_req != "null"]
    loss_of = gluon.loss.SoftmaxCELoss()
    losses, norms = [], []
    for step in range(_STEPS):
        workers = range(WORKERS) if hvd.size() == 1 else [hvd.rank()]
        of_workers = [_batch(step, worker) for worker in workers]
        words, segments, positions, guessed, continues = (
            mx.nd.array(np.concatenate(parts), dtype="float32") for parts in zip(*of_workers)
        )
        lengths = mx.nd.full((len(words),), _LENGTH)
        with autograd.record():
            _, _, continuation, decoded = model(words, segments, lengths, positions)
            loss = loss_of(decoded.reshape((-1, _WORDS)), guessed.reshape((-1,))).mean()
            loss = loss + loss_of(continuation, continues).mean()
        loss.backward()
        norms.append(update(trainer, params, hvd.size()))
        losses.append(float(loss.asscalar()))
    if not any(norm > _MAX_NORM for norm in norms):
        raise AssertionError(f"Nothing was clipped: {norms}.")
    return Curve(losses, digest(model))


_ADAM = ("bertadam", {"learning_rate": 1e-3, "wd": 0.01})
_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})

if __name__ == "__main__":
    main(
        [
            Case("BERT, SGD, clip_grad_global_norm", lambda: _train(*_SGD, _clipped)),
            Case("BERT, BERTAdam, clip_grad_global_norm", lambda: _train(*_ADAM, _clipped)),
            Case("BERT, BERTAdam, grad_global_norm and update(NDArray)", lambda: _train(*_ADAM, _scaled)),
        ]
    )

"""GluonTS: two of its estimators, trained by its own Trainer on made series.

GluonTS knows nothing of several workers. Three things are changed, as docs/training.md says: its Trainer makes a
DistributedTrainer, each worker has data of its own, and the loss of an epoch is that of all workers.
"""

from __future__ import annotations

import itertools

from comparison import Case, Curve, digest, main

_EPOCHS = 24
_BATCHES = 4  # in an epoch, of each worker
_BATCH_SIZE = 16
_LENGTH, _PREDICTED = 24, 6  # hours


def _series():
    import numpy as np
    from gluonts.dataset.common import ListDataset

    rng = np.random.RandomState(0)
    hours = np.arange(1200)
    targets = [10 + rng.uniform(1, 5) * np.sin(hours / 24 * 2 * np.pi) + rng.randn(1200) for _ in range(10)]
    return ListDataset([{"target": one, "start": "2020-01-01 00:00"} for one in targets], freq="H")


def _estimator(kind, trainer):
    from gluonts.transform import ExpectedNumInstanceSampler

    # Of a window that begins before its series all may be zeros, and then its loss is so steep that roundings show.
    sampler = ExpectedNumInstanceSampler(num_instances=1.0, min_past=3 * 168 + _LENGTH, min_future=_PREDICTED)
    if kind == "DeepAR":
        from gluonts.mx import DeepAREstimator

        return DeepAREstimator(
            freq="H",
            prediction_length=_PREDICTED,
            context_length=_LENGTH,
            num_layers=1,
            num_cells=16,
            dropout_rate=0.0,
            batch_size=_BATCH_SIZE,
            train_sampler=sampler,
            trainer=trainer,
        )
    from gluonts.mx import SimpleFeedForwardEstimator

    return SimpleFeedForwardEstimator(
        prediction_length=_PREDICTED,
        context_length=_LENGTH,
        num_hidden_dimensions=[16, 16],
        batch_size=_BATCH_SIZE,
        train_sampler=sampler,
        trainer=trainer,
    )


def _batches_of(make_loader, worker):
    """What the estimator's own loader gives a worker."""
    import numpy as np

    np.random.seed(worker)
    return list(itertools.islice(make_loader(), _EPOCHS * _BATCHES))


def _share_data(estimator):
    """Let the estimator load this worker's batches, or in one process those of all workers, joined."""
    import comparison
    import horovod.mxnet as hvd
    import mxnet as mx

    load = estimator.create_training_data_loader

    def create_training_data_loader(*arguments, **named):
        def make():
            return load(*arguments, **named)

        if hvd.size() > 1:
            return iter(_batches_of(make, hvd.rank()))  # which goes on in the next epoch
        of_all = [_batches_of(make, worker) for worker in range(comparison.WORKERS)]
        return (
            {key: mx.nd.concat(*(batch[key] for batch in batches), dim=0) for key in batches[0]}
            for batches in zip(*of_all)
        )

    estimator.create_training_data_loader = create_training_data_loader


def _train(kind, of_all_workers=True, patience=1):
    import horovod.mxnet as hvd
    import mxnet as mx
    from gluonts.mx import trainer as gluonts_trainer
    from gluonts.mx.trainer import _base, learning_rate_scheduler
    from gluonts.mx.trainer.callback import Callback

    class AveragingTrainer(hvd.DistributedTrainer):
        def __init__(self, params, optimizer, kvstore):
            super().__init__(params, optimizer)

    class Losses(Callback):
        def __init__(self):
            self.losses, self.learning_rates = [], []

        def on_epoch_end(self, epoch_loss, trainer, **_):
            self.losses.append(epoch_loss)
            self.learning_rates.append(trainer.learning_rate)
            return True

    mx.gluon.Trainer = AveragingTrainer
    if of_all_workers:
        _base.loss_value = lambda metric: hvd.allreduce_metric(metric).get()[1]
    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    losses = Losses()
    reduction = learning_rate_scheduler.LearningRateReduction("min", patience=patience, base_lr=0.05, decay_factor=0.5)
    estimator = _estimator(
        kind,
        gluonts_trainer.Trainer(
            epochs=_EPOCHS,
            num_batches_per_epoch=_BATCHES,
            learning_rate=0.05,
            callbacks=[losses, reduction],
        ),
    )
    _share_data(estimator)
    trained = estimator.train_model(_series())
    return Curve(losses.losses, f"{digest(trained.trained_net)}, learning rates {losses.learning_rates}")


_CASES = [
    Case("SimpleFeedForwardEstimator", lambda: _train("SimpleFeedForward"), allowed=1e-3),
    Case("DeepAREstimator", lambda: _train("DeepAR"), allowed=1e-3),
    Case(
        "Each worker lowers its learning rate by its own loss",
        lambda: _train("SimpleFeedForward", of_all_workers=False, patience=1),
        error=r"rank 0 .*learning rate [\d.]+.* rank 1 .*learning rate [\d.]+",
    ),
]

if __name__ == "__main__":
    main(_CASES)

"""Keras-MXNet: two of its models, which train by BucketingModule with optimizers of their own.

The store's name goes into the model's attribute `_kvstore`: its compile() takes an argument `kvstore` and ignores it.
"""

from __future__ import annotations

import collections
import collections.abc
import hashlib
import os

from comparison import Case, Curve, main

_EPOCHS = 8
_BATCHES = 6
_BATCH_SIZE = 16  # of each worker


def _keras():
    """Keras, which needs names that Python 3.10 has moved."""
    for name in ("Callable", "Iterable", "Mapping", "Sequence"):
        setattr(collections, name, getattr(collections.abc, name))
    os.environ["KERAS_BACKEND"] = "mxnet"
    import keras

    return keras


def _images(keras, rng):
    import numpy as np

    layers = keras.layers
    labels = rng.randint(0, 4, _BATCHES * _BATCH_SIZE * 2)
    images = rng.randn(len(labels), 1, 12, 12) + labels[:, None, None, None]
    model = keras.models.Sequential(
        [
            layers.Conv2D(16, (3, 3), activation="relu", input_shape=(1, 12, 12), data_format="channels_first"),
            layers.MaxPooling2D(data_format="channels_first"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    return model, images.astype(np.float32), keras.utils.to_categorical(labels, 4), "categorical_crossentropy"


def _words(keras, rng):
    layers = keras.layers
    words = rng.randint(0, 50, (_BATCHES * _BATCH_SIZE * 2, 8))
    given = layers.Input((8,))
    hidden = layers.LSTM(24, unroll=True)(layers.Embedding(50, 16, input_length=8)(given))
    model = keras.models.Model(given, layers.Dense(1, activation="sigmoid")(hidden))
    return model, words, (words[:, 0] > 25).astype("float32"), "binary_crossentropy"


def _train(make, optimizer, **options):
    import kvstore_plugin as hvd
    import mxnet as mx
    import numpy as np

    keras = _keras()
    mx.random.seed(hvd.rank())  # the others get the values of the first worker
    np.random.seed(hvd.rank())
    model, inputs, labels, loss = make(keras, np.random.RandomState(0))
    chosen = getattr(keras.optimizers, optimizer)(**options)
    chosen.rescale_grad = 1.0 / hvd.size()  # Module sums, and Keras's loss is the mean of a worker's batch
    model.compile(loss=loss, optimizer=chosen)
    model._kvstore = "mykv"
    mine = slice(hvd.rank(), None, hvd.size())
    history = model.fit(
        inputs[mine], labels[mine], batch_size=2 * _BATCH_SIZE // hvd.size(), epochs=_EPOCHS, verbose=0, shuffle=False
    )
    weights = hashlib.sha256(b"".join(one.tobytes() for one in model.get_weights())).hexdigest()
    return Curve([float(one) for one in history.history["loss"]], weights)


_CASES = [
    Case("convolutions, SGD with momentum", lambda: _train(_images, "SGD", lr=0.02, momentum=0.9)),
    Case("embedding and LSTM, Adam", lambda: _train(_words, "Adam", lr=0.01, decay=1e-3)),
]

if __name__ == "__main__":
    main(_CASES)

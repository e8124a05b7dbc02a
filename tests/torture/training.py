"""The trainings that targets disturb, each by a name: the network, the trainer, and a step.

buckets, store         DistributedTrainer, its optimizer on each worker or on the store
stock, stock on the store   gluon.Trainer with update_on_kvstore=False and True
sparse, sparse on the store   DistributedTrainer, the gradient of an Embedding row_sparse
join                   DistributedTrainer in join(); the last worker makes the most steps
amp                    DistributedTrainer with a loss scale, and now and then an overflow on one worker
compression            DistributedTrainer, of which the largest tenth travels between hosts, with error feedback
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

import kvstore_plugin as mykv
import numpy as np
from harness.support import IS_2, array, conv_network, dense_network, fill, mx

from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon import nn  # isort: skip

_BATCH, _WORDS, _VOCABULARY = 4, 6, 200
_ADAM = ("adam", {"learning_rate": 0.01})
_MOMENTUM = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
_FIRST_SCALE = 2.0**10
_OVERFLOWS = 7  # every so many steps, on the rank of the step's number
_COMPRESSION = {"type": "topk", "k": 0.1}


class Training:
    """One network with its trainer.

    Parameters
    ----------
    mode : str
        Of those above.
    width : int, optional
        Of the hidden layers of a network that is dense then; by default the modes have different small ones.

    Attributes
    ----------
    net, trainer
    """

    def __init__(self, mode: str, width: int | None = None) -> None:
        self._mode, self._width = mode, width or 70
        self._is_conv = mode in ("buckets", "stock") and width is None
        self.net = self._network()
        self.trainer = self._trainer()

    def context(self) -> ContextManager:
        """The context of a loop of steps."""
        return mykv.join(self.trainer) if self._mode == "join" else contextlib.nullcontext()

    def steps(self, most: int) -> int:
        """The number of steps that this worker makes, of at most this number."""
        return max(most - (mykv.size() - 1 - mykv.rank()), 1) if self._mode == "join" else most

    def loss(self, step: int) -> Any:
        """The loss of this worker in a step; to be called while autograd records."""
        draw = np.random.RandomState(100 * step + mykv.rank())
        if self._mode.startswith("sparse"):
            data = draw.randint(0, _VOCABULARY, (_BATCH, _WORDS)).astype("float32")
        else:
            data = draw.uniform(-1, 1, (_BATCH, 1, 8, 8) if self._is_conv else (_BATCH, 64)).astype("float32")
        return ((self.net(array(data)) - 0.3) ** 2).sum()

    def backward(self, loss: Any, step: int) -> None:
        """Compute the gradients."""
        if self._mode != "amp":
            loss.backward()
            return
        overflows = step % _OVERFLOWS == _OVERFLOWS - 1 and mykv.rank() == step % mykv.size()
        with autograd.record(), _amp().scale_loss(loss * (np.inf if overflows else 1.0), self.trainer) as scaled:
            autograd.backward(scaled)

    def update(self) -> None:
        """Take the step."""
        self.trainer.step(_BATCH * (mykv.size() if self._mode.startswith("stock") else 1))

    def _network(self) -> Any:
        if self._is_conv:
            net = conv_network(seed=1)
        elif self._mode.startswith("sparse"):
            net = nn.HybridSequential()
            net.add(
                nn.Embedding(_VOCABULARY, self._width, sparse_grad=True),
                nn.HybridLambda(lambda F, words: F.mean(words, axis=1)),
                nn.Dense(3, in_units=self._width),
            )
            net.initialize()
            fill(net, 1)
            return net  # MXNet computes sparse gradients where nothing is hybridized
        else:
            net = dense_network(seed=1, inputs=64, widths=(self._width, self._width // 2, 3))
        net.hybridize()
        return net

    def _trainer(self) -> Any:
        parameters = self.net.collect_params()
        if self._mode.startswith("stock"):
            mykv.broadcast_parameters(parameters)
            store = mx.kv.create("mykv")
            on_store = self._mode == "stock on the store"
            return gluon.Trainer(parameters, *_MOMENTUM, kvstore=store, update_on_kvstore=on_store)
        options: dict[str, Any] = {"bucket_bytes": 1024}  # small ones, so that there are several
        if self._mode in ("store", "sparse on the store"):
            options["update_on_kvstore"] = True
        if self._mode == "compression":
            options["compression_params"] = _COMPRESSION
        trainer = mykv.DistributedTrainer(parameters, *_ADAM, **options)
        if self._mode == "amp":
            amp = _amp()
            amp.amp._amp_initialized = amp.amp._amp_loss_scale_initialized = True  # without amp.init()'s casts
            amp.init_trainer(trainer)
            scaler = trainer._amp_loss_scaler
            scaler._loss_scale = scaler._next_loss_scale = _FIRST_SCALE
            scaler._scale_seq_len = 3
        return trainer


def _amp() -> Any:
    if IS_2:
        from mxnet import amp
    else:
        from mxnet.contrib import amp
    return amp

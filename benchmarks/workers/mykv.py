"""mykv itself: the store, the stock Trainer over it, and DistributedTrainer."""

from __future__ import annotations

import kvstore_plugin
import mxnet as mx
from mxnet import gluon

from . import with_mxnet
from .job import Job


class MyKVPeer(with_mxnet.Peer):
    """The flavour 'own' is DistributedTrainer. `options`: further arguments for it."""

    averages = True

    def __init__(self, options: dict) -> None:
        self._options = options
        self._store = mx.kv.create("mykv")
        self.rank, self.size = self._store.rank, self._store.num_workers

    def pushpull(self, key, array):
        self._store.pushpull(key, array)

    def trainer(self, params, flavour, optimizer="sgd"):
        given, on_store = (params, optimizer, with_mxnet.OPTIMIZERS[optimizer]), flavour.endswith("store")
        if flavour in ("own", "store"):
            return kvstore_plugin.DistributedTrainer(*given, update_on_kvstore=on_store, **self._options)
        store = mx.kv.create("mykv") if on_store else self._store  # one store has one optimizer
        return gluon.Trainer(*given, kvstore=store, update_on_kvstore=on_store)


if __name__ == "__main__":
    job = Job()
    with_mxnet.main(MyKVPeer(job.options), job)

"""mykv itself: the store, the stock Trainer over it, and DistributedTrainer."""

from __future__ import annotations

import kvstore_plugin
import mxnet as mx
from mxnet import gluon

from . import with_mxnet
from .job import Job


class MyKVPeer(with_mxnet.Peer):
    """The flavour 'own' is DistributedTrainer; `options` are more arguments for it."""

    averages = True

    def __init__(self, options: dict) -> None:
        self._options = options
        self._store = mx.kv.create("mykv")
        self.rank, self.size = self._store.rank, self._store.num_workers

    def pushpull(self, key, array):
        self._store.pushpull(key, array)

    def trainer(self, params, flavour):
        if flavour == "own":
            return kvstore_plugin.DistributedTrainer(params, "sgd", with_mxnet.SGD, **self._options)
        return gluon.Trainer(params, "sgd", with_mxnet.SGD, kvstore=self._store, update_on_kvstore=False)


if __name__ == "__main__":
    job = Job()
    with_mxnet.main(MyKVPeer(job.options), job)

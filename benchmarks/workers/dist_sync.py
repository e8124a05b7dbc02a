"""MXNet's own dist_sync, a parameter server; schedulers and servers run inside `import mxnet`."""

from __future__ import annotations

import os

import mxnet as mx
from mxnet import gluon

from . import with_mxnet
from .job import Job


class ShiftedStore(mx.kvstore.KVStore):
    """This process's only store, with shifted keys, since every Trainer numbers its keys from 0."""

    def __init__(self, store: mx.kvstore.KVStore, base: int) -> None:
        super().__init__(store.handle)
        self._base = base

    def __del__(self) -> None:
        pass  # the handle belongs to the store itself

    def broadcast(self, key, value, out, priority=0):
        super().broadcast(key + self._base, value, out, priority)

    def pushpull(self, key, value, out=None, priority=0):
        super().pushpull(key + self._base, value, out, priority)


class DistSyncPeer(with_mxnet.Peer):
    """Both flavours are gluon.Trainer(update_on_kvstore=False), since update_on_kvstore would move the update too."""

    # In some runs one parameter started from the sum of two gradients, about 2 instead of 0.
    begins_alike = False

    def __init__(self) -> None:
        self._store = mx.kv.create("dist_sync")
        self._keys: dict = {}
        self._next = 0
        self.rank, self.size = self._store.rank, self._store.num_workers

    def pushpull(self, key, array):
        if key not in self._keys:
            self._keys[key] = self._take_keys(1)
            self._store.init(self._keys[key], array)
        self._store.pushpull(self._keys[key], array)

    def trainer(self, params, flavour, optimizer="sgd"):
        store = ShiftedStore(self._store, self._take_keys(len(params)))
        arguments = with_mxnet.OPTIMIZERS[optimizer]
        return gluon.Trainer(params, optimizer, arguments, kvstore=store, update_on_kvstore=False)

    def _take_keys(self, count):
        self._next += count
        return self._next - count


if __name__ == "__main__" and os.environ["DMLC_ROLE"] == "worker":
    with_mxnet.main(DistSyncPeer(), Job())

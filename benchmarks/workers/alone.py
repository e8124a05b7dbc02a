"""Processes without communication: memory and time of a step without an allreduce."""

from __future__ import annotations

from mxnet import gluon

from . import with_mxnet
from .job import Job, launched_rank


class AlonePeer(with_mxnet.Peer):
    """Both flavours are gluon.Trainer without a store."""

    reduces = False

    def __init__(self, size: int) -> None:
        self.rank, self.size = launched_rank(), size

    def pushpull(self, key, array):
        pass

    def trainer(self, params, flavour, optimizer="sgd"):
        return gluon.Trainer(params, optimizer, with_mxnet.OPTIMIZERS[optimizer], kvstore=None)


if __name__ == "__main__":
    job = Job()
    with_mxnet.main(AlonePeer(job.size), job)

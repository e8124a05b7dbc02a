"""Horovod for MXNet."""

from __future__ import annotations

import horovod.mxnet as hvd

from . import with_mxnet
from .job import Job


class HorovodPeer(with_mxnet.Peer):
    """Both flavours are horovod.mxnet.DistributedTrainer. `options`: further arguments, such as num_groups."""

    def __init__(self, options: dict) -> None:
        self._options = options
        self._trainers = 0
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def pushpull(self, key, array):
        hvd.allreduce_(array, average=False, name=key)

    def trainer(self, params, flavour, optimizer="sgd"):
        self._trainers += 1  # names of tensors come from the prefix
        named = {f"{number:06d}": parameter for number, parameter in enumerate(params)}
        prefix = f"{self._trainers}."
        arguments = with_mxnet.OPTIMIZERS[optimizer]
        return hvd.DistributedTrainer(named, optimizer, arguments, prefix=prefix, **self._options)


if __name__ == "__main__":
    job = Job()
    with_mxnet.main(HorovodPeer(job.options), job)
    hvd.shutdown()

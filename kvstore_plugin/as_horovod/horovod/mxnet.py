"""The module horovod.mxnet, and at the same time each of its submodules."""

import sys

import kvstore_plugin
from kvstore_plugin import *  # noqa: F403


class DistributedTrainer(kvstore_plugin.DistributedTrainer):
    """As in Horovod, gradients are sums after allreduce_grads(), and update() divides them by the number of workers."""

    def __init__(self, *args, **kwargs):
        needs_means = kwargs.get("update_on_kvstore") or kwargs.get("parameter_process_sets") is not None
        if not needs_means and kwargs.get("reduce_method", "mean") == "mean":
            kwargs.setdefault("gradients_after_allreduce", "sum")
        super().__init__(*args, **kwargs)


for _name in ("compression", "functions", "mpi_ops"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]

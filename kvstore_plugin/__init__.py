"""mykv: synchronous data-parallel training of MXNet networks over shared memory and MPI.

Importing the package registers the store, ``mx.kv.create('mykv')``. MPI is initialized by init(), or by the first use
of the store, `DistributedTrainer` or `broadcast_parameters`.

All messages go to the logger ``kvstore_plugin``.
"""

from __future__ import annotations

from pathlib import Path

from mykvrun import auto_register
from mykvrun.function_job import run

from .world import log_prefix, mpi_settings, process
from .world.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from .world.launched import restart_count
from .world.new_workers import is_respawned
from .world.process import cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, shutdown, size
from .world.process_set import ProcessSet, global_process_set
from .world.timeline import start_timeline, stop_timeline
from .world.version import VERSION

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "DistributedTrainer",
    "ElasticState",
    "GradientBucket",
    "LocalTrainer",
    "Max",
    "Min",
    "MyKV",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "StatisticsCallback",
    "StatisticsHandler",
    "Sum",
    "SyncBatchNorm",
    "WorkersLost",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_metric",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "broadcast_states",
    "ccl_built",
    "check_in_step",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "default_devices",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_respawned",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "recv",
    "reducescatter",
    "remove_process_set",
    "restart_count",
    "rocm_built",
    "run",
    "run_elastic",
    "send",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
    "sync_aux_params",
]

__version__: str = VERSION

auto_register.withdraw()  # undo its changes of MXNet before this package replaces functions of MXNet
log_prefix.install()
mpi_settings.apply()


def _is_selftest() -> bool:
    """Whether this is ``python -m kvstore_plugin.selftest``, which reports failed imports and must not fail itself."""
    try:
        arguments = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    module = f"{__name__}.selftest"
    return f"-m{module}" in arguments or ("-m", module) in zip(arguments, arguments[1:])


try:
    from .collectives.compression import Compression
    from .collectives.gather import allgather, alltoall, barrier, grouped_allgather
    from .collectives.objects import allgather_object, broadcast_object
    from .collectives.point_to_point import recv, send
    from .collectives.reduce import (
        allreduce,
        allreduce_,
        broadcast,
        broadcast_,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_reducescatter,
        reducescatter,
    )
    from .collectives.reduce_ops import Adasum, Average, Max, Min, Product, Sum
    from .compat import engine  # noqa: F401
    from .compat.devices import default_devices
    from .compat.errors import WorkersLost
    from .coordination import circular_wait  # noqa: F401
    from .coordination.process_sets import add_process_set, remove_process_set
    from .elastic.run import run_elastic
    from .elastic.state import ElasticState
    from .gradients.communication_hook import GradientBucket
    from .gradients.power_sgd import PowerSGD
    from .integrations import gluon_trainer, module_api  # noqa: F401
    from .integrations.distributed_optimizer import DistributedOptimizer
    from .nn.sync_batch_norm import SyncBatchNorm
    from .parameters.aux_params import sync_aux_params
    from .parameters.broadcast import broadcast_parameters
    from .parameters.check_in_step import check_in_step
    from .store.kvstore import MyKV
    from .training.broadcast_states import broadcast_states
    from .training.join import join
    from .training.local_trainer import LocalTrainer
    from .training.metrics import allreduce_metric
    from .training.sampler import DistributedSampler
    from .training.statistics import statistics
    from .training.statistics_callbacks import StatisticsCallback, StatisticsHandler
    from .training.trainer import DistributedTrainer
except ImportError:
    if not _is_selftest():
        raise

process.install_hooks()  # after MXNet's exit handler is registered: handlers run in reverse order, mykv's first

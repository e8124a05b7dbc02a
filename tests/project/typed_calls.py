"""Calls of every public name as a program makes them, for ``mypy --strict`` (`make lint`); nothing runs this file.

mxnet has no types, so its arrays are Any. Results are assigned to annotated names. Each call in wrong_calls() is wrong:
mypy reports a comment there that ignores no error.
"""

from __future__ import annotations

from typing import Any

import kvstore_plugin as mykv
from kvstore_plugin import _core
from mxnet import gluon, nd

import mykv as the_same_package


def processes() -> None:
    mykv.init()
    mykv.init(comm=[0, 1], process_sets=[mykv.ProcessSet([0, 1])])
    numbers: list[int] = [mykv.rank(), mykv.size(), mykv.local_rank(), mykv.local_size()]
    numbers += [mykv.cross_rank(), mykv.cross_size(), mykv.nccl_built(), mykv.restart_count()]
    facts: list[bool] = [
        mykv.is_initialized(),
        mykv.is_respawned(),
        mykv.is_homogeneous(),
        mykv.mpi_built(),
        mykv.mpi_enabled(),
    ]
    facts += [mykv.mpi_threads_supported(), mykv.cuda_built(), mykv.rocm_built(), mykv.ccl_built(), mykv.ddl_built()]
    facts += [mykv.gloo_built(), mykv.gloo_enabled()]
    devices: list[Any] = mykv.default_devices()
    version: str = mykv.__version__
    mykv.start_timeline("timeline.mykv", mark_cycles=True)
    mykv.stop_timeline()
    mykv.barrier()
    mykv.shutdown()
    results: list[Any] = mykv.run(len, ([1],), workers=2, env={"NAME": "value"}, options=["--threads", "1"])
    print(results)
    print(numbers, facts, devices, version, the_same_package.rank() + 1)


def process_sets() -> None:
    part: mykv.ProcessSet = mykv.add_process_set([0, 1])
    ranks: list[int] | None = part.ranks
    number: int | None = part.process_set_id
    where: tuple[int | None, int | None, bool | None] = part.rank(), part.size(), part.included()
    removed: bool = mykv.remove_process_set(part)
    everybody: mykv.ProcessSet = mykv.global_process_set
    print(ranks, number, where, removed, everybody)


def collectives(part: mykv.ProcessSet) -> None:
    array = nd.ones((2, 3))
    mykv.allreduce(array, op=mykv.Sum, name="sum", prescale_factor=0.5, process_set=part)
    mykv.allreduce_(array, average=False, priority=1)
    mykv.broadcast(array, root_rank=0)
    mykv.broadcast_(array, 0, name="weights")
    for op in (mykv.Average, mykv.Max, mykv.Min, mykv.Product, mykv.Adasum):
        mykv.reducescatter(array, op=op)
    several: list[nd.NDArray] = mykv.grouped_allreduce([array, array], op=mykv.Average)
    several += mykv.grouped_allgather([array]) + mykv.grouped_reducescatter([array], mykv.Sum)
    mykv.grouped_allreduce_([array])
    mykv.allgather(array)
    received: nd.NDArray | tuple[nd.NDArray, nd.NDArray] = mykv.alltoall(array, splits=[1, 1])
    objects: list[Any] = mykv.allgather_object({"rank": mykv.rank()})
    print(mykv.broadcast_object(objects, root_rank=0), several, received)


def hook(bucket: mykv.GradientBucket) -> None:
    bucket.allreduce_()
    arrays: list[nd.NDArray] = bucket.arrays
    mykv.grouped_allreduce_(arrays, process_set=bucket.process_set, priority=bucket.priority)
    told: tuple[int, list[str], float, list[gluon.Parameter]] = (
        bucket.index,
        bucket.names,
        bucket.scale,
        bucket.parameters,
    )
    print(told)


def training(net: gluon.Block, data: Any) -> None:
    trainer = mykv.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, compression=mykv.Compression.fp16, bucket_bytes=1 << 20
    )
    trainer.step(32)
    power: mykv.PowerSGD = mykv.PowerSGD(rank=4, seed=1)
    power.save_states("power.npz")
    power.load_states("power.npz")
    mykv.DistributedTrainer(net.collect_params(), "sgd", communication_hook=power)
    mykv.DistributedTrainer(net.collect_params(), "sgd", communication_hook=hook)
    local = mykv.LocalTrainer(net.collect_params(), "adam", period=4, outer_momentum=0.9)
    local.step(32)
    optimizer = mykv.DistributedOptimizer("sgd", gradient_predivide_factor=1.0)
    store = mykv.MyKV(process_set=mykv.global_process_set)
    mykv.SyncBatchNorm(in_channels=8, momentum=0.9)
    sampler = mykv.DistributedSampler(100, shuffle=True, seed=7)
    sampler.set_epoch(1)
    order: list[int] = list(sampler)
    count: int = len(sampler)
    mykv.broadcast_parameters(net.collect_params(), root_rank=0)
    mykv.broadcast_states(trainer)
    mykv.check_in_step(net.collect_params(), every=10)
    mykv.sync_aux_params(net.collect_params())
    mykv.allreduce_metric(data)
    mykv.join(trainer, divide_by_initial_world_size=False)
    print(optimizer, store, order, count)


def elastic(net: gluon.Block) -> None:
    def train(state: mykv.ElasticState, epochs: int) -> int:
        state.commit()
        return epochs

    state = mykv.ElasticState(net=net, checkpoint="run.state", epoch=0)
    state.register_reset_callbacks([lambda: None])
    try:
        mykv.run_elastic(train, state, 3)
    except mykv.WorkersLost as lost:
        code: str = lost.code
        ranks: tuple[int, ...] = lost.ranks
        print(code, ranks)


def core() -> None:
    try:
        group: _core.Group | None = _core.world()
        waiting: list[tuple[str, float, list[int], list[int]]] = _core.waiting(least_seconds=1.0)
        print(group, waiting)
    except _core.Error as error:
        print(error.code, error.ranks)


def wrong_calls() -> None:
    mykv.allreduce(nd.ones(1), op="sum")  # type: ignore[arg-type]
    mykv.broadcast(nd.ones(1))  # type: ignore[call-arg]
    mykv.add_process_set(0)  # type: ignore[arg-type]
    mykv.DistributedSampler("100")  # type: ignore[arg-type]
    mykv.start_timeline(1)  # type: ignore[arg-type]
    mykv.run_elastic(train=3)  # type: ignore[arg-type]
    mykv.no_such_name()  # type: ignore[attr-defined]
    the_same_package.no_such_name()  # type: ignore[attr-defined]
    _core.submit_broadcast("name", None, [], root="0")  # type: ignore[arg-type]
    _core.no_such_name()  # type: ignore[attr-defined]

"""The process face: init, shutdown, rank and size, and the user's own MPI beside it."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, dense_network, mx, value
from kvstore_plugin.compat import draining
from kvstore_plugin.compat import mxnet as mxnet_compat


@pytest.fixture
def fresh():
    """Not initialized at the beginning of a test; initialized again for the next one."""
    mykv.shutdown()
    yield
    mykv.shutdown()
    mykv.init()


def test_import_does_not_start_mpi(mpirun):
    result = mpirun(
        2,
        """
        import sys
        import kvstore_plugin
        assert not kvstore_plugin.is_initialized()
        if "mpi4py.MPI" in sys.modules:
            from mpi4py import MPI
            assert not MPI.Is_initialized()
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        print("fine")
        """,
    )
    assert result.code == 0 and result.stdout.count("fine") == 2, result.text


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "use",
    [
        lambda: mx.kv.create("mykv"),
        lambda: mykv.DistributedTrainer(dense_network(0).collect_params(), "sgd"),
        lambda: mykv.broadcast_parameters(dense_network(0).collect_params()),
        lambda: mykv.init(),
    ],
    ids=["store", "trainer", "broadcast_parameters", "init"],
)
def test_init_on_demand(fresh, rank, size, use):
    assert not mykv.is_initialized()
    use()
    assert mykv.is_initialized()
    assert (mykv.rank(), mykv.size()) == (rank, size)
    assert (mykv.local_rank(), mykv.local_size(), mykv.cross_rank(), mykv.cross_size()) == (rank, size, 0, 1)


_WRONG = {
    "MYKV_PART_BYTES": "1e6",
    "MYKV_STAGING_BYTES": "1",
    "MYKV_NETWORK_BYTES": "4 MB",
    "MYKV_FAN_OUT": "0",
    "MYKV_EXCHANGE": "ring",
    "MYKV_COMPRESS_BYTES": "-1",
    "MYKV_TABLE_PLACES": "0",
    "MYKV_VIRTUAL_HOSTS": "two",
    "MYKV_EXIT_WAIT_S": "5s",
    "MYKV_RESPAWN_WAIT_S": "2 min",
    "MYKV_STALL_WARN_S": "-1",
    "MYKV_STALL_ABORT_S": "nan",
    "MYKV_CHECKPOINT_WAIT_S": "1m",
    "MYKV_GPU": "cuda",
    "MYKV_GPU_HOSTS": "",
    "MYKV_KERNELS": "sse4.1",
    "MYKV_REPORT": "0.5",
    "MYKV_RESTART": "once",
    "MYKV_VERBOSE": "2",
    "MYKV_AUTO_REGISTER": "yes",
}


@pytest.mark.ranks(1, 2)
def test_a_wrong_setting_ends_init_on_all_ranks_whatever_it_is_for(fresh, rank, size, monkeypatch, gather):
    from kvstore_plugin.world import settings

    files = {"MYKV_TIMELINE", "MYKV_CUDA_LIBRARY", "MYKV_NCCL_LIBRARY"}
    assert set(_WRONG) == set(settings._TABLE) - files
    for variable, text in _WRONG.items():
        with monkeypatch.context() as changed:
            if rank == size - 1:
                changed.setenv(variable, text)
            where = "" if size == 1 else " on rank 1"
            with pytest.raises(ValueError, match=rf"^{variable} must be .*, but it is '{text}'{where}\.$"):
                mykv.init()
        assert not mykv.is_initialized()
    with monkeypatch.context() as changed:
        changed.setenv("MYKV_GPU", "cuda")
        with pytest.raises(ValueError, match=r"but it is 'cuda'\.$"):  # the same on all ranks
            mykv.init()


@pytest.mark.ranks(2)
def test_settings_are_those_of_init_and_take_fractions_of_seconds(fresh, monkeypatch):
    from kvstore_plugin.world import settings

    monkeypatch.setenv("MYKV_EXIT_WAIT_S", "0.5")
    mykv.init()
    for variable, text in _WRONG.items():
        monkeypatch.setenv(variable, text)
    assert settings.value("MYKV_EXIT_WAIT_S") == 0.5 and settings.value("MYKV_CHECKPOINT_WAIT_S") == 60
    assert settings.core_options() == {}
    mykv.shutdown()
    monkeypatch.undo()


@pytest.mark.ranks(2)
def test_asking_before_init_is_an_error_with_the_remedy(fresh):
    for ask in (
        mykv.rank,
        mykv.size,
        mykv.local_rank,
        mykv.local_size,
        mykv.cross_rank,
        mykv.cross_size,
    ):
        with pytest.raises(RuntimeError, match=r"init\(\)"):
            ask()


@pytest.mark.ranks(2)
def test_init_twice_does_nothing(fresh, rank):
    mykv.init()
    store = mx.kv.create("mykv")
    mykv.init()
    inout = array(np.ones(3))
    store.pushpull("key", inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(2)
def test_shutdown_twice_does_nothing_and_leaves_mpi_alone(fresh, rank):
    from mpi4py import MPI

    mykv.init()
    mykv.shutdown()
    mykv.shutdown()
    assert not mykv.is_initialized()
    assert MPI.Is_initialized() and not MPI.Is_finalized()
    assert MPI.COMM_WORLD.allreduce(1) == 2


@pytest.mark.ranks(2)
def test_store_works_after_shutdown_and_init(fresh):
    for _ in range(3):
        mykv.init()
        store, inout = mx.kv.create("mykv"), array(np.ones(3))
        store.pushpull("key", inout)
        assert (value(inout) == 2).all()
        mykv.shutdown()


@pytest.mark.ranks(2)
def test_use_of_a_store_after_shutdown_is_an_error(fresh):
    mykv.init()
    store = mx.kv.create("mykv")
    mykv.shutdown()
    with pytest.raises(RuntimeError, match=r"init\(\)"):
        store.pushpull("key", array(np.ones(3)))


@pytest.mark.ranks(2)
def test_shutdown_of_one_rank_fails_what_the_other_asks_for(fresh, rank, gather):
    mykv.init()
    store, inout = mx.kv.create("mykv"), array(np.ones(3))
    if rank == 0:
        mykv.shutdown()
    else:
        store.pushpull("key", inout)
        with pytest.raises(MXNetError, match="rank 0"):
            value(inout)
    gather("done")


@pytest.mark.ranks(2)
def test_shutdown_waits_for_what_this_rank_has_asked_for(fresh, rank):
    mykv.init()
    store = mx.kv.create("mykv")
    arrays = [mx.nd.ones((1 << 20,)) for _ in range(5)]
    for key, inout in enumerate(arrays):
        store.pushpull(key, inout)
    mykv.shutdown()
    for inout in arrays:
        assert (inout.asnumpy() == 2).all()


@pytest.mark.ranks(3)
def test_init_with_a_communicator_of_some_ranks(fresh, rank, gather):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if rank < 2 else 1, -rank)
    mykv.init(part)
    assert (mykv.rank(), mykv.size()) == ((1 - rank, 2) if rank < 2 else (0, 1))
    mykv.init(part)
    with pytest.raises(RuntimeError, match="another communicator"):
        mykv.init(MPI.COMM_WORLD)
    inout = array(np.full(3, 10.0**rank))
    mx.kv.create("mykv").pushpull("part", inout)
    assert (value(inout) == (11 if rank < 2 else 100)).all()
    mykv.shutdown()
    part.Free()
    gather("done")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("comm, error", [(3, TypeError), ("world", TypeError)])
def test_init_with_what_is_no_communicator(fresh, comm, error):
    with pytest.raises(error, match="comm"):
        mykv.init(comm)
    assert not mykv.is_initialized()


@pytest.mark.ranks(2)
def test_init_with_the_null_communicator(fresh):
    from mpi4py import MPI

    with pytest.raises(ValueError, match="null"):
        mykv.init(MPI.COMM_WORLD.Split(MPI.UNDEFINED))


@pytest.mark.ranks(3, long=(2,))
def test_users_own_messages_go_on_beside_ours(rank, size):
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    store, comm = mx.kv.create("mykv"), MPI.COMM_WORLD
    arrays = [mx.nd.ones((1 << 18,)) for _ in range(20)]
    for key, inout in enumerate(arrays):
        store.pushpull(key, inout)
        comm.send((rank, key), (rank + 1) % size, tag=7)
        assert comm.recv(source=(rank - 1) % size, tag=7) == ((rank - 1) % size, key)
        assert comm.allreduce(key) == key * size
    for inout in arrays:
        assert (inout.asnumpy() == size).all()


@pytest.mark.ranks(2)
def test_forked_child_is_told_that_it_cannot(rank):
    import multiprocessing

    mykv.init()

    def child(answers):
        try:
            mykv.barrier()
            answers.put("no error")
        except RuntimeError as error:
            answers.put(str(error))

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    assert "fork" in answers.get()
    process.join(10)
    inout = array(np.ones(3))
    mx.kv.create("mykv").pushpull("parent", inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(1)
def test_one_logger():
    import logging

    import kvstore_plugin

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("kvstore_plugin", "mykv")]
    assert set(names) <= {"kvstore_plugin"}, names
    assert kvstore_plugin.__all__


class _Work:
    """As the core's Work."""

    def __init__(self, finished):
        self.finished = finished

    def wait(self, seconds):
        return True

    def done(self):
        return self.finished


def test_work_whose_wait_was_broken_off_is_kept_until_it_has_finished():
    work = _Work(False)
    mykv.world.process.keep(work)
    mykv.world.process.wait(_Work(True))
    assert work in mykv.world.process._interrupted
    work.finished = True
    mykv.world.process.wait(_Work(True))
    assert work not in mykv.world.process._interrupted


def test_errors_of_the_engine_that_are_no_mxnet_errors_end_no_later_wait(monkeypatch):
    """MXNet makes an error that begins with the name of a class, as "TypeError: ", one of that class."""
    raised = [TypeError("one"), MXNetError("another")]

    def waitall():
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(mxnet_compat.ndarray, "waitall", waitall)
    waiter = draining._Waiter()
    waiter.ask(mxnet_compat.wait_for_all, 10)
    assert not raised and waiter._done == 1

    def breaks():
        raise OSError("a third")

    waiter.ask(breaks, 10)
    waiter.ask(mxnet_compat.wait_for_all, 10)
    assert waiter._done == 3

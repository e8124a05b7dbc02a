"""Process sets: who is in them, how they come and go, and that they work independently of each other."""

from __future__ import annotations

import copy
import pickle
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, mx, value


@pytest.fixture(autouse=True)
def initialized():
    """Initialized, with no process sets but that of all ranks."""
    mykv.shutdown()  # the tests of another file may have left sets
    mykv.init()
    yield
    mykv.shutdown()
    mykv.init()


@pytest.fixture
def fresh():
    """Not initialized."""
    mykv.shutdown()


def _sum(process_set, number=1.0):
    return value(mykv.allreduce(array(np.full(3, number)), op=mykv.Sum, process_set=process_set))[0]


@pytest.mark.ranks(1, 3)
def test_set_of_all_ranks(rank, size):
    every = mykv.global_process_set
    assert (every.process_set_id, every.rank(), every.size(), every.included()) == (0, rank, size, True)
    assert every.ranks == list(range(size))
    assert copy.deepcopy(every) is every and pickle.loads(pickle.dumps(every)) is every
    assert str(every) == f"ProcessSet(process_set_id=0, ranks={every.ranks}, mpi_comm=None)"
    assert not mykv.remove_process_set(every)
    assert _sum(every) == size


@pytest.mark.ranks(4)
def test_sets_of_even_and_odd_ranks(rank, size):
    even, odd = mykv.ProcessSet([2, 0]), mykv.ProcessSet(range(1, 4, 2))
    assert (even.process_set_id, even.rank(), even.size(), even.included()) == (None,) * 4
    assert mykv.add_process_set(even) is even
    mykv.add_process_set(odd)
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    assert (even.ranks, odd.ranks) == ([0, 2], [1, 3])
    assert (mine.rank(), mine.size(), mine.included()) == (rank // 2, 2, True)
    assert (other.rank(), other.size(), other.included()) == (None, 2, False)
    assert _sum(mine, rank) == (4 if rank % 2 else 2)
    with pytest.raises(ValueError, match=f"Rank {rank} is not in ProcessSet"):
        _sum(other)
    assert value(mykv.broadcast(array(np.full(2, rank)), mine.ranks[1], process_set=mine))[0] == 2 + rank % 2
    for root in (other.ranks[0], 4):
        with pytest.raises(ValueError, match="root_rank"):
            mykv.broadcast(array(np.ones(3)), root, process_set=mine)
    clear_errors()
    assert _sum(mykv.global_process_set) == size


@pytest.mark.ranks(3)
def test_init_with_sets_as_horovod_has_it(fresh, rank):
    pair, single = mykv.ProcessSet([0, 2]), mykv.ProcessSet([1])
    mykv.init(process_sets=[pair, single])
    assert (pair.process_set_id, single.process_set_id) == (1, 2)
    assert _sum(single if rank == 1 else pair) == (1 if rank == 1 else 2)
    mykv.init(process_sets=[pair])  # is initialized with it
    with pytest.raises(RuntimeError, match="add_process_set"):
        mykv.init(process_sets=[mykv.ProcessSet([0, 1])])
    mykv.shutdown()
    mykv.init(process_sets="dynamic")
    assert pair.process_set_id is None
    mykv.add_process_set(pair)
    assert rank == 1 or _sum(pair) == 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("at_init", [True, False])
def test_sets_of_a_split_communicator(fresh, rank, gather, at_init):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(rank % 2, -rank)
    one = mykv.ProcessSet(part)
    assert one.ranks is None
    mykv.init(MPI.COMM_WORLD, process_sets=[one] if at_init else None)
    if not at_init:
        mykv.add_process_set(one)
    assert one.ranks == ([3, 1] if rank % 2 else [2, 0])
    assert (one.rank(), one.size(), one.mpi_comm) == (1 - rank // 2, 2, part)
    assert _sum(one, rank) == (4 if rank % 2 else 2)
    assert value(mykv.allgather(array(np.array([rank])), process_set=one)).tolist() == one.ranks
    assert len(set(gather((rank % 2, one.process_set_id)))) == 2
    part.Free()
    assert _sum(one) == 2
    assert mykv.remove_process_set(one)


@pytest.mark.ranks(3)
def test_communicator_that_some_ranks_are_not_in(rank):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0 if rank else MPI.UNDEFINED)
    one = mykv.add_process_set(part)
    assert (one.ranks, one.included()) == ([1, 2], rank > 0)
    if rank:
        assert _sum(one) == 2
        part.Free()


@pytest.mark.ranks(3)
def test_overlapping_sets_work_at_the_same_time(rank):
    sets = [mykv.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    mine = [one for one in [mykv.global_process_set, *sets] if one.included()]
    results = []
    for step in range(30):
        for one in mine if rank % 2 else mine[::-1]:  # the same name in each of them
            tensor = array(np.full(100, step + rank))
            results.append((one, step, mykv.allreduce(tensor, name="x", op=mykv.Sum, process_set=one)))
    for one, step, result in results:
        assert (value(result) == sum(step + member for member in one.ranks)).all()
    for one in mine[1:]:
        mykv.barrier(one)
        assert mykv.allgather_object(rank, process_set=one) == one.ranks


@pytest.mark.ranks(2)
def test_a_set_goes_on_while_another_waits(rank, gather):
    alone = mykv.add_process_set([0])
    mykv.add_process_set([1])
    if rank == 0:
        waiting = mykv.allreduce(array(np.ones(3)), op=mykv.Sum)
        assert _sum(alone) == 1
    gather("rank 0 was not held up")
    if rank == 1:
        waiting = mykv.allreduce(array(np.ones(3)), op=mykv.Sum)
    assert (value(waiting) == 2).all()


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_sets_over_two_hosts(rank):
    across, within = mykv.add_process_set([0, 3]), mykv.add_process_set([0, 1])
    if rank in (0, 3):
        assert _sum(across, rank) == 3
        assert value(mykv.allgather(array(np.array([rank])), process_set=across)).tolist() == [0, 3]
    if rank in (0, 1):
        assert _sum(within) == 2
    mykv.remove_process_set(across)


@pytest.mark.ranks(2)
def test_remove_and_add_again(rank):
    one = mykv.ProcessSet([1])
    for turn in range(5):
        mykv.add_process_set(one)
        assert one.process_set_id == turn + 1
        if rank == 1:
            assert _sum(one) == 1
        assert mykv.remove_process_set(one) is True
        assert (one.process_set_id, one.size(), one.included()) == (None, None, None)
        with pytest.raises(ValueError, match="was removed"):
            _sum(one)
        assert mykv.remove_process_set(one) is False


@pytest.mark.ranks(2)
def test_what_was_asked_for_before_a_set_is_removed_is_done(rank):
    one = mykv.add_process_set([0])
    if rank == 0:
        results = [mykv.allreduce(mx.nd.ones((1 << 20,)), op=mykv.Sum, process_set=one) for _ in range(5)]
    mykv.remove_process_set(one)
    if rank == 0:
        assert all((result.asnumpy() == 1).all() for result in results)


@pytest.mark.ranks(2)
def test_copies_of_a_set_that_is_added_are_that_set(rank):
    one = mykv.add_process_set([0])
    assert copy.deepcopy(one) is one and pickle.loads(pickle.dumps(one)) is one
    mykv.remove_process_set(one)
    other = pickle.loads(pickle.dumps(one))
    assert other is not one and other.ranks == [0] and other.process_set_id is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "given, error, words",
    [
        ([0, 0], ValueError, "rank 0 twice"),
        ([0, 7], ValueError, "rank 7"),
        ([-1], ValueError, "-1"),
        ([], ValueError, "at least one"),
        ([0.5], TypeError, "list of ranks"),
        ("01", TypeError, "list of ranks"),
        (3, TypeError, "list of ranks"),
        (None, TypeError, "list of ranks"),
        ([0, 1], ValueError, "global_process_set"),
    ],
)
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
def test_wrong_sets(rank, given, error, words, where):
    if where == "all ranks" or rank == 1:
        if where == "one rank" and given == [0, 1]:
            error, words = MXNetError, "do not add the same"
        with pytest.raises(error, match=words):
            mykv.add_process_set(given)
    else:
        with pytest.raises(MXNetError, match="rank 1"):
            mykv.add_process_set([0])
    assert mykv.add_process_set([0]).process_set_id == 1
    assert _sum(mykv.global_process_set) == 2


@pytest.mark.ranks(3)
def test_the_same_set_twice(rank):
    one = mykv.add_process_set([0, 2])
    with pytest.raises(ValueError, match="added already"):
        mykv.add_process_set(one)
    with pytest.raises(ValueError, match=r"\[0, 2\].*twice"):
        mykv.add_process_set([2, 0])
    assert rank == 1 or _sum(one) == 2


@pytest.mark.ranks(3)
def test_ranks_that_add_or_remove_different_sets(rank):
    with pytest.raises(MXNetError, match="do not add the same"):
        mykv.add_process_set([0, 1] if rank else [0, 2])
    one, two = mykv.add_process_set([0, 1]), mykv.add_process_set([1, 2])
    with pytest.raises(MXNetError, match="do not remove the same"):
        mykv.remove_process_set(two if rank == 2 else one)
    with pytest.raises(MXNetError, match="add_process_set.*remove_process_set"):
        mykv.remove_process_set(one) if rank == 2 else mykv.add_process_set([2])
    assert rank == 2 or _sum(one) == 2
    assert mykv.remove_process_set(one) and mykv.remove_process_set(two)


@pytest.mark.ranks(3)
def test_a_rank_that_a_set_waits_for_has_its_number_among_all(rank, gather):
    pair, seen = mykv.add_process_set([1, 2]), []
    if rank == 1:
        array = np.ones(3)
        work = pair._core.submit_allreduce("x", [array], [array])
        until = time.monotonic() + 20
        while not seen and time.monotonic() < until:
            seen = [missing for _, _, missing, _ in pair._core.waiting("x")]
    gather(None)
    if rank == 2:
        array = np.ones(3)
        work = pair._core.submit_allreduce("x", [array], [array])
    assert rank == 0 or work.wait(20)
    assert rank != 1 or seen == [[2]]


@pytest.mark.ranks(2)
def test_wrong_arguments_of_operations(rank):
    with pytest.raises(ValueError, match="was not added"):
        _sum(mykv.ProcessSet([0, 1]))
    for wrong in (None, [0, 1], 0):
        with pytest.raises(TypeError, match="process_set"):
            _sum(wrong)
    with pytest.raises(TypeError, match="must be a ProcessSet"):
        mykv.remove_process_set([0])
    assert _sum(mykv.global_process_set) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", ["text", 3, [[0, 0]], [[5]], [[0], [0]]], ids=str)
def test_init_with_wrong_sets_leaves_nothing_behind(fresh, rank, wrong):
    with pytest.raises((TypeError, ValueError)):
        mykv.init(process_sets=wrong)
    assert not mykv.is_initialized()
    with pytest.raises(RuntimeError, match="has failed"):
        mykv.rank()
    mykv.init()
    assert _sum(mykv.global_process_set) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [None, [[0], [1]], 3], ids=str)
def test_init_with_other_sets_on_one_rank(fresh, rank, gather, wrong):
    with pytest.raises((TypeError, RuntimeError)):
        mykv.init(process_sets=wrong if rank else [[0]])
    gather("both have their error")
    mykv.init()
    assert _sum(mykv.global_process_set) == 2


@pytest.mark.ranks(3)
def test_init_with_ranks(fresh, rank, gather):
    mykv.init([2, 0] if rank != 1 else [1])
    assert (mykv.rank(), mykv.size()) == ((0, 1) if rank == 1 else (1 - rank // 2, 2))
    assert _sum(mykv.global_process_set, rank) == (1 if rank == 1 else 2)
    mykv.init([2, 0] if rank != 1 else [1])
    with pytest.raises(RuntimeError, match="another communicator"):
        mykv.init([0, 1, 2])
    if rank != 1:
        one = mykv.add_process_set([0])  # rank 2 of MPI_COMM_WORLD
        assert rank == 0 or _sum(one) == 1
    gather("done")
    mykv.shutdown()
    for wrong, error in (
        ([0, 0, 1, 2], ValueError),
        ([0, 9], ValueError),
        (["0"], TypeError),
        ([rank - 1], ValueError),
    ):
        with pytest.raises(error, match="comm"):
            mykv.init(wrong)
    mykv.init([])
    assert mykv.size() == 3


@pytest.mark.ranks(1, 2)
def test_what_this_build_can_do(rank, size):
    assert mykv.mpi_built() is True and mykv.mpi_enabled() is True and mykv.mpi_threads_supported() is True
    assert mykv.is_homogeneous() is True
    assert type(mykv.nccl_built()) is int
    assert type(mykv.cuda_built()) is bool
    for nothing in (mykv.gloo_built, mykv.gloo_enabled, mykv.ddl_built, mykv.ccl_built, mykv.rocm_built):
        assert nothing() is False
    mykv.shutdown()
    assert mykv.mpi_built() and not mykv.mpi_enabled()


@pytest.mark.ranks(3, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_hosts_with_other_numbers_of_ranks_are_not_homogeneous(rank):
    assert mykv.is_homogeneous() is False

"""The compiled core on numpy buffers, in processes that never import MXNet."""

from __future__ import annotations

import fcntl
import os
import sys
import time

import hypothesis
import numpy as np
import pytest
from harness import dtypes
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

# A pool of its own, so that no other test file has imported MXNet into its ranks.
_ENV = {"MYKV_TEST_POOL": "numpy"}
_TWO_HOSTS = {"MYKV_TEST_POOL": "numpy", "MYKV_VIRTUAL_HOSTS": "2"}


@pytest.fixture
def core(request):
    """The core, initialized over all ranks; it stays so between tests, as in a training program."""
    from compiled import core
    from mpi4py import MPI

    if not core.is_initialized():
        hosts = int(dict(request.node.get_closest_marker("ranks").kwargs["env"]).get("MYKV_VIRTUAL_HOSTS", 1))
        core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": hosts})
    yield core
    assert "mxnet" not in sys.modules


def _of(rank: int, shape, dtype: str) -> np.ndarray:
    """Values of a rank, small enough that no dtype overflows in a sum."""
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + rank * 3) % 11).reshape(shape).astype(dtype)


def _sum(size: int, shape, dtype: str) -> np.ndarray:
    total = sum(_of(rank, shape, dtype).astype("float64") for rank in range(size))
    return total.astype(dtype)


def _allreduce(core, name: str, array: np.ndarray, **options) -> np.ndarray:
    result = np.empty_like(array)
    assert core.submit_allreduce(name, [array], [result], **options).wait(30)
    return result


@pytest.mark.ranks(1, 2, 3, 4, env=_ENV)
def test_rank_and_size_are_those_of_mpi(core, rank, size):
    assert (core.rank(), core.size()) == (rank, size)
    assert (core.local_rank(), core.local_size()) == (rank, size)
    assert (core.cross_rank(), core.cross_size()) == (0, 1)
    assert core.host_ranks() == [list(range(size))]


@pytest.mark.ranks(1, 2, 3, 4, env=_ENV)
@pytest.mark.parametrize("dtype", dtypes.NUMPY)
def test_sum_of_every_dtype_is_that_of_numpy(core, rank, size, dtype):
    mine = _of(rank, (3, 1001), dtype)
    kept = mine.copy()
    result = _allreduce(core, f"sum {dtype}", mine)
    np.testing.assert_array_equal(result, _sum(size, (3, 1001), dtype))
    np.testing.assert_array_equal(mine, kept)


@pytest.mark.ranks(3, env=_ENV)
@pytest.mark.parametrize(
    "op, expected", [("sum", np.add), ("min", np.minimum), ("max", np.maximum), ("product", np.multiply)]
)
def test_operations_are_those_of_numpy(core, rank, size, op, expected):
    values = [np.random.RandomState(k).randn(1000) for k in range(size)]
    result = _allreduce(core, f"op {op}", values[rank], op=op)
    np.testing.assert_allclose(result, expected.reduce(values), rtol=1e-15)


@pytest.mark.ranks(2, env=_ENV)
def test_unknown_operation_is_refused_here(core):
    with pytest.raises(ValueError, match="median"):
        core.submit_allreduce("median", [np.zeros(3)], [np.zeros(3)], op="median")


@pytest.mark.ranks(2, 3, env=_ENV)
def test_scale_is_applied_once_to_the_sum(core, rank, size):
    result = _allreduce(core, "scale", np.full(1000, rank + 1.0), scale=1 / size)
    np.testing.assert_allclose(result, (size + 1) / 2, rtol=1e-15)


@pytest.mark.ranks(3, env=_ENV)
def test_float16_is_summed_in_float32(core, rank, size):
    # 2048 + 1 rounds back to 2048 in float16; in float32 the ones add up.
    result = _allreduce(core, "half", np.array([2048 if rank == 0 else 1], dtype="float16"))
    assert result[0] == 2050


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (5,), (2, 3, 4)])
def test_every_shape(core, rank, size, shape):
    result = _allreduce(core, f"shape {shape}", _of(rank, shape, "float32"))
    assert result.shape == shape
    np.testing.assert_array_equal(result, _sum(size, shape, "float32"))


@pytest.mark.ranks(2, 3, env=_ENV)
def test_arrays_larger_than_the_parts_they_travel_in(core, rank, size):
    shape = (3 << 20) + 17  # 12 MB and a bit
    np.testing.assert_array_equal(_allreduce(core, "large", _of(rank, shape, "float32")), _sum(size, shape, "float32"))


@pytest.mark.ranks(2, env=_ENV)
def test_array_in_both_lists_is_reduced_in_place(core, rank, size):
    array = _of(rank, 1000, "float32")
    assert core.submit_allreduce("in place", [array], [array]).wait(30)
    np.testing.assert_array_equal(array, _sum(size, 1000, "float32"))


@pytest.mark.ranks(2, env=_ENV)
def test_replicas_of_several_devices_are_summed_and_all_written(core, rank, size):
    inputs = [np.full(100, 10.0 * rank + k) for k in range(3)]
    outputs = [np.zeros(100) for _ in range(2)]
    assert core.submit_allreduce("replicas", inputs, [*outputs, inputs[2]]).wait(30)
    for output in [*outputs, inputs[2]]:
        assert (output == 0 + 1 + 2 + 10 + 11 + 12).all()
    assert (inputs[0] == 10.0 * rank).all() and (inputs[1] == 10.0 * rank + 1).all()


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("offset", [1, 4, 8, 40])
def test_buffers_that_are_not_aligned(core, rank, offset):
    room = np.zeros(8 * 1000 + 64, dtype="uint8")
    room = room[-room.ctypes.data % 64 :]
    array = room[offset : offset + 8 * 900].view("float64")
    array[:] = rank + 1
    assert core.submit_allreduce("unaligned", [array], [array]).wait(30)
    assert (array == 3).all()


@pytest.mark.ranks(3, env=_ENV)
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("dtype", dtypes.NUMPY)
def test_broadcast_copies_the_bits_of_the_root(core, rank, dtype, root):
    bits = np.random.RandomState(rank).bytes(1001 * np.dtype(dtype).itemsize)
    expected = np.random.RandomState(root).bytes(len(bits))
    mine = np.frombuffer(bits, dtype)
    result = np.empty_like(mine)
    core.submit_broadcast(f"bits {dtype}", mine, [result], root).wait(30)
    assert result.tobytes() == expected
    assert mine.tobytes() == bits


@pytest.mark.ranks(2, env=_ENV)
def test_broadcast_of_none_on_ranks_that_only_receive(core, rank):
    result = np.zeros(10)
    core.submit_broadcast("none", np.arange(10.0) if rank == 0 else None, [result]).wait(30)
    np.testing.assert_array_equal(result, np.arange(10.0))


@pytest.mark.ranks(2, env=_ENV)
def test_broadcast_without_output_on_the_root(core, rank):
    result = np.zeros(10)
    work = core.submit_broadcast("no output", np.arange(10.0), [] if rank == 0 else [result])
    assert work.wait(30)
    assert rank == 0 or (result == np.arange(10.0)).all()


@pytest.mark.ranks(2, 3, env=_ENV)
def test_different_order_on_different_ranks_is_no_deadlock(core, rank, size):
    names = [f"order {k}" for k in range(50)]
    order = np.random.RandomState(rank).permutation(len(names))
    results = {k: np.full(100 * (k + 1), float(k)) for k in order}
    works = [core.submit_allreduce(names[k], [results[k]], [results[k]], priority=int(k) * (-1) ** rank) for k in order]
    assert all(work.wait(30) for work in works)
    for k, result in results.items():
        assert (result == size * k).all()


@pytest.mark.ranks(2, 3, env=_ENV)
def test_different_order_of_arrays_that_fill_the_staging_memory_is_no_deadlock(core, rank, size):
    count = 10 << 18  # each is larger than all the memory for parts under way
    names = [f"large{number}" for number in range(6)]
    shares = {name: np.full(count, number + rank, np.float32) for number, name in enumerate(names)}
    for turn in range(3):
        order = names if (rank + turn) % size == 0 else names[::-1]
        works = {name: core.submit_allreduce(name, [shares[name]], [shares[name]], "max") for name in order}
        for name in names:
            assert works[name].wait(30), name
    for number, name in enumerate(names):
        assert (shares[name] == number + size - 1).all()


@pytest.mark.ranks(2, env=_ENV)
def test_calls_of_one_name_are_matched_in_their_order(core, rank, size):
    arrays = [np.full(1000, float(k + rank)) for k in range(100)]
    works = [core.submit_allreduce("same", [array], [array]) for array in arrays]
    assert all(work.wait(30) for work in works)
    for k, array in enumerate(arrays):
        assert (array == 2 * k + 1).all()


@pytest.mark.alone
@pytest.mark.ranks(2, env=_ENV)
def test_wait_with_a_time_limit_returns_false_until_the_peer_comes(core, rank, gather):
    array = np.ones(10)
    if rank == 1:
        gather("rank 0 has seen that it is alone")
    work = core.submit_allreduce("late", [array], [array])
    if rank == 0:
        begin = time.monotonic()
        assert work.wait(0.2) is False
        assert 0.15 < time.monotonic() - begin < 2
        assert work.done() is False
        gather("rank 0 has seen that it is alone")
    assert work.wait(30) is True
    assert work.done() is True
    assert (array == 2).all()


@pytest.mark.ranks(2, 3, env=_ENV)
@pytest.mark.parametrize(
    "mine, others, words",
    [
        (np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32"), ["(2, 3)", "(3, 2)"]),
        (np.zeros(4, "float32"), np.zeros(4, "int32"), ["float32", "int32"]),
        (np.zeros(4, "float32"), np.zeros(5 << 20, "float32"), ["(4,)", "(5242880,)"]),
    ],
)
def test_different_shapes_or_dtypes_fail_on_every_rank_and_the_next_call_works(core, rank, size, mine, others, words):
    array = (mine if rank == 0 else others).copy()
    begin = time.monotonic()
    with pytest.raises(core.Error) as failure:
        core.submit_allreduce("differs", [array], [array]).wait(30)
    assert time.monotonic() - begin < 10  # not the time limit
    for word in ["differs", "rank", *words]:
        assert word in str(failure.value)
    again = np.ones(10)
    assert core.submit_allreduce("differs", [again], [again]).wait(30)
    assert (again == size).all()


@pytest.mark.ranks(2, env=_ENV)
def test_broadcast_against_allreduce_fails_on_both_ranks(core, rank):
    array = np.zeros(10)
    if rank == 0:
        work = core.submit_broadcast("kinds", array, [array])
    else:
        work = core.submit_allreduce("kinds", [array], [array])
    with pytest.raises(core.Error, match="broadcast"):
        work.wait(30)


_SMALL, _PART, _PARTS = (
    1000,
    20_000,
    300_000,
)  # float32 elements: copied by the poster, one part, several


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("count, apart", [(_PART, 1), (_PARTS, 1), (_PARTS, 1 - _PARTS)])
def test_an_output_that_overlaps_the_input_in_part_is_an_error_on_all_ranks(core, rank, count, apart):
    """Whichever rank owns a part, and reads the input while others have written the output."""
    for wrong_rank in range(2):
        memory = np.arange(2 * count, dtype="float32")
        kept = memory.copy()
        begin = count // 2 if apart == 1 else count - 1
        moved = begin + (apart if rank == wrong_rank else 0)
        work = core.submit_allreduce("overlap", [memory[begin:][:count]], [memory[moved:][:count]])
        with pytest.raises(core.Error, match=f"refused by rank {wrong_rank}: its input and its output overlap in part"):
            work.wait(30)
        np.testing.assert_array_equal(memory, kept)


@pytest.mark.ranks(2, env=_ENV)
def test_outputs_that_overlap_each_other_are_an_error_where_parts_end_in_any_order(core, rank):
    memory, mine = np.zeros(_PARTS + 1, "float32"), np.ones(_PARTS, "float32")
    with pytest.raises(core.Error, match="its outputs overlap in part"):
        core.submit_allreduce("outputs", [mine], [memory[:-1], memory[1:]]).wait(30)
    assert not memory.any()


@pytest.mark.ranks(2, env=_ENV)
def test_small_arrays_may_overlap(core, rank, size):
    memory = np.arange(_SMALL + 1, dtype="float32")
    expected = memory[:-1] * size
    core.submit_allreduce("small", [memory[:-1]], [memory[1:]]).wait(30)
    np.testing.assert_array_equal(memory[1:], expected)


@pytest.mark.ranks(2, env=_ENV)
def test_different_roots_or_scales_fail(core, rank):
    array = np.zeros(10)
    with pytest.raises(core.Error, match="roots"):
        core.submit_broadcast("roots", array, [array], root=rank).wait(30)
    with pytest.raises(core.Error, match="scales"):
        core.submit_allreduce("scales", [array], [array], scale=1.0 + rank).wait(30)


@pytest.mark.ranks(3, env=_ENV)
def test_refusal_reaches_the_others_with_its_reason_and_rank(core, rank, size):
    array = np.ones(10)
    if rank == 1:
        core.refuse("refused", "it has no wings")
    else:
        with pytest.raises(core.Error, match="wings") as failure:
            core.submit_allreduce("refused", [array], [array]).wait(30)
        assert "rank 1" in str(failure.value) and "refused" in str(failure.value)
    assert core.submit_allreduce("refused", [array], [array]).wait(30)
    assert (array == size).all()


@pytest.mark.ranks(2, env=_ENV)
def test_refusal_may_come_long_before_or_after_the_others(core, rank, gather):
    for early in (0, 1):
        array = np.ones(10)
        if rank == 1 and early == 0:
            gather("wait")
        if rank == 0:
            core.refuse("timing", "no")
        else:
            work = core.submit_allreduce("timing", [array], [array])
        if rank == 0 and early == 0:
            gather("wait")
        if rank == 1:
            with pytest.raises(core.Error, match="rank 0"):
                work.wait(30)
        gather("next")


@pytest.mark.ranks(2, env=_ENV)
def test_forget_drops_the_counters_of_a_prefix(core, rank, size):
    for _ in range(3):
        array = np.ones(10)
        assert core.submit_allreduce("gone/a", [array], [array]).wait(30)
        core.forget("gone/")
    assert (array == size).all()


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "U3", "O"])
def test_unknown_dtype_is_refused_here(core, dtype):
    array = np.zeros(3, dtype)
    with pytest.raises(ValueError, match="dtype"):
        core.submit_allreduce("dtype", [array], [array])


@pytest.mark.ranks(2, env=_ENV)
def test_arrays_that_differ_within_a_rank_are_refused_here(core):
    for other in (np.zeros(4), np.zeros(3, "float32")):
        with pytest.raises(ValueError, match="differ"):
            core.submit_allreduce("within", [np.zeros(3)], [other])


@pytest.mark.ranks(2, env=_ENV)
def test_arrays_that_cannot_be_written_or_are_no_block_are_refused_here(core):
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        core.submit_allreduce("frozen", [np.zeros(3)], [frozen])
    with pytest.raises(ValueError, match="contiguous"):
        core.submit_allreduce("strided", [np.zeros(6)[::2]], [np.zeros(3)])


@pytest.mark.ranks(2, env=_ENV)
def test_dropped_work_is_finished_all_the_same(core, rank, size, gather):
    array = np.full(1 << 20, rank + 1.0)
    work = core.submit_allreduce("dropped", [array], [array])
    del work
    gather("both dropped")
    assert (array == 3).all()


@pytest.mark.ranks(2, 4, env=_TWO_HOSTS)
def test_two_hosts_reduce_and_broadcast_as_one(core, rank, size):
    assert [len(ranks) for ranks in core.host_ranks()] == [size // 2] * 2
    assert sorted(rank for ranks in core.host_ranks() for rank in ranks) == list(range(size))
    assert core.cross_size() == 2 and core.local_size() == size // 2
    for dtype in dtypes.NUMPY:
        result = _allreduce(core, f"hosts {dtype}", _of(rank, (3, 1001), dtype))
        np.testing.assert_array_equal(result, _sum(size, (3, 1001), dtype))
    for root in range(size):
        value = np.full(1000, rank)
        core.submit_broadcast("hosts root", value, [value], root).wait(30)
        assert (value == root).all()


@pytest.mark.ranks(3, env=_TWO_HOSTS)
def test_hosts_of_different_numbers_of_ranks(core, rank, size):
    assert sorted(len(ranks) for ranks in core.host_ranks()) == [1, 2]
    shape = (1 << 20) + 3
    np.testing.assert_array_equal(_allreduce(core, "uneven", _of(rank, shape, "float32")), _sum(size, shape, "float32"))


@pytest.mark.ranks(4, env=_TWO_HOSTS)
def test_two_hosts_agree_bit_for_bit(core, rank, size, gather):
    array = np.random.RandomState(rank).randn(100_003).astype("float32")
    result = _allreduce(core, "bits", array, scale=1 / 3)
    assert len(set(gather(result.tobytes()))) == 1
    np.testing.assert_allclose(result, sum(np.random.RandomState(k).randn(100_003) for k in range(size)) / 3, atol=1e-5)


@pytest.mark.ranks(4, env=_TWO_HOSTS)
def test_two_hosts_report_what_differs(core, rank, size):
    array = np.zeros(10 + (rank == 3))
    with pytest.raises(core.Error) as failure:
        core.submit_allreduce("far", [array], [array]).wait(30)
    assert "far" in str(failure.value) and "(10,)" in str(failure.value) and "(11,)" in str(failure.value)
    again = np.ones(10)
    assert core.submit_allreduce("far", [again], [again]).wait(30)
    assert (again == size).all()


@pytest.mark.ranks(3, env=_ENV)
def test_ranks_agree_bit_for_bit_whatever_the_size(core, rank, gather):
    for count in (1, 7, 1000, 100_003):
        array = (
            np.random.RandomState(rank).randn(count) * 10.0 ** np.random.RandomState(rank).randint(-8, 8, count)
        ).astype("float32")
        assert len(set(gather(_allreduce(core, f"bits {count}", array).tobytes()))) == 1


@pytest.mark.ranks(2, env=_ENV)
def test_sum_does_not_depend_on_the_instruction_set(core, rank, gather):
    array = np.random.RandomState(rank).randn(10_007)
    best = core.kernel_path()
    results = set()
    try:
        for path in core.build_info()["kernels"]:
            if core.select_kernel_path(path):
                gather("both have switched")
                for dtype in ("float16", "float32", "float64"):
                    results.add((dtype, _allreduce(core, "kernels", array.astype(dtype), scale=1 / 3).tobytes()))
                gather("both are done")
    finally:
        core.select_kernel_path(best)
    assert len(results) == 3


@pytest.mark.ranks(2, env=_ENV)
def test_shutdown_fails_what_the_others_wait_for_and_init_joins_again(core, rank, gather):
    from mpi4py import MPI

    array = np.ones(10)
    if rank == 1:
        work = core.submit_allreduce("left alone", [array], [array])
        gather("submitted")
        begin = time.monotonic()
        with pytest.raises(core.Error, match="rank 0"):
            work.wait(30)
        assert time.monotonic() - begin < 5
    else:
        gather("submitted")
    core.shutdown()
    assert not core.is_initialized()
    core.init(MPI.COMM_WORLD.py2f(), {})
    array = np.ones(10)
    assert core.submit_allreduce("left alone", [array], [array]).wait(30)
    assert (array == 2).all()


@pytest.mark.ranks(2, env=_ENV)
def test_leave_gives_the_others_the_reason(core, rank, gather):
    from mpi4py import MPI

    array = np.ones(10)
    if rank == 0:
        core.leave("the cat sat on the keyboard")
    else:
        with pytest.raises(core.Error, match="cat") as failure:
            core.submit_allreduce("after leave()", [array], [array]).wait(30)
        assert "rank 0" in str(failure.value)
    gather("done")
    core.shutdown()
    core.init(MPI.COMM_WORLD.py2f(), {})


@pytest.mark.ranks(3, env=_ENV)
def test_init_over_a_part_of_the_ranks(core, rank, gather):
    from mpi4py import MPI

    core.shutdown()
    part = MPI.COMM_WORLD.Split(0 if rank < 2 else 1, -rank)
    core.init(part.py2f(), {})
    assert (core.size(), core.rank()) == ((2, 1 - rank) if rank < 2 else (1, 0))
    result = _allreduce(core, "part", np.array([10.0**rank]))
    assert result[0] == (11 if rank < 2 else 100)
    gather("all parts are done")
    core.shutdown()
    core.init(MPI.COMM_WORLD.py2f(), {})
    part.Free()


@pytest.mark.ranks(2, env=_ENV)
def test_users_own_messages_go_on_beside_ours(core, rank, size):
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    array = np.ones(1 << 20)
    works = [core.submit_allreduce(f"beside {k}", [array.copy()], [np.empty_like(array)]) for k in range(5)]
    total = MPI.COMM_WORLD.allreduce(rank)
    assert total == size * (size - 1) // 2
    assert all(work.wait(30) for work in works)


@pytest.mark.ranks(1, env=_ENV)
def test_use_before_init_is_an_error_with_the_remedy(core):
    from mpi4py import MPI

    core.shutdown()
    try:
        for call in (core.rank, core.size, lambda: core.submit_allreduce("early", [np.zeros(1)], [np.zeros(1)])):
            with pytest.raises(core.Error, match=r"init\(\)"):
                call()
    finally:
        core.init(MPI.COMM_WORLD.py2f(), {})
    with pytest.raises(core.Error, match="already"):
        core.init(MPI.COMM_WORLD.py2f(), {})


@pytest.mark.ranks(1, env=_ENV)
def test_build_info_names_the_mpi(core):
    info = core.build_info()
    assert info["mpi"] and info["compiler"] and "generic" in info["kernels"]
    assert core.mpi_library_version()
    assert core.transports()["host"] == ""


_plain = strategies.sampled_from(["float32", "float64", "int8", "int32", "int64", "uint8"])


@pytest.mark.ranks(2, 3, env=_ENV)
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=strategies.data())
def test_any_batch_of_allreduces_is_that_of_numpy(core, rank, size, data):
    """Several operations under way at once, each of any dtype, shape, number of replicas, in any order per rank."""
    specs = data.draw(
        strategies.lists(
            strategies.tuples(
                _plain,
                arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40),
                strategies.integers(1, 3),  # inputs
                strategies.integers(0, 3),  # outputs beside the first input
                strategies.integers(-5, 5),  # priority
            ),
            min_size=1,
            max_size=6,
        )
    )
    order = data.draw(strategies.permutations(range(len(specs))))
    turned = order if rank % 2 else order[::-1]
    kept, works = {}, {}
    for k in turned:
        dtype, shape, n_inputs, n_outputs, priority = specs[k]
        inputs = [_of(rank + 10 * j + k, shape, dtype) for j in range(n_inputs)]
        outputs = [np.zeros_like(inputs[0]) for _ in range(n_outputs)] + [inputs[0]]
        works[k] = core.submit_allreduce(f"any {k}", inputs, outputs, priority=priority)
        kept[k] = outputs
    for k in order:
        dtype, shape, n_inputs, _, _ = specs[k]
        assert works[k].wait(30)
        expected = sum(
            _of(other + 10 * j + k, shape, dtype).astype("float64") for other in range(size) for j in range(n_inputs)
        )
        for output in kept[k]:
            np.testing.assert_array_equal(output, np.asarray(expected).astype(dtype))


@pytest.mark.ranks(1, env=_ENV)
def test_sizes_near_the_largest_number_are_refused(core):
    for nbytes in (2**64 - 1, 2**64 - 4096, 2**63, 1 << 62):
        for function in (core.reserve, core.allocate):
            with pytest.raises(core.Error, match="is used up"):
                function(nbytes)
    before, buffer = core.allocate(4096), core.allocate(4096)
    np.frombuffer(before, "float32")[:] = 1
    for begin, count in [(2**64 - 8, 16), (2**64 - 1, 2), (0, 2**64 - 1), (1024, 1), (2**62, 2**62), (1, 1024)]:
        with pytest.raises(ValueError, match="is not in the buffer"):
            core.submit_bucket("x", buffer, begin, count, "float32", scale=5.0)
    for shards in ([(0, 2**64 - 1, 0), (2**64 - 1, 9, 0)], [(0, 9, 0)]):
        with pytest.raises(ValueError, match="shards must cover all elements"):
            core.submit_bucket("x", buffer, 0, 8, "float32", shards=shards)
    assert (np.frombuffer(before, "float32") == 1).all()


@pytest.mark.ranks(2, 3, 4, env=_TWO_HOSTS)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 7, 33, 1000, 300001])
def test_values_travel_between_hosts_in_another_type(core, rank, size, gather, wire, dtype, count):
    values = [np.random.RandomState(r).uniform(-1, 1, count).astype(dtype) for r in range(size)]
    expected = sum(value.astype("float64") for value in values) / size
    best = core.kernel_path()
    for path in [*core.build_info()["kernels"][::-1], best]:
        if not all(gather(core.select_kernel_path(path))):
            continue
        result = np.empty_like(values[rank])
        assert core.submit_allreduce("wire", [values[rank]], [result], scale=1 / size, wire=wire).wait(30)
        assert len(set(gather(result.tobytes()))) == 1, path
        # Each host's sum is rounded on its way, and the mean is.
        error = np.abs(result - expected)
        assert (error <= (size + 1) * 2.0 ** (-11 if wire == "float16" else -8)).all(), (path, error.max())
        if wire == "float16":
            assert (result == result.astype("float16")).all(), path
        else:
            assert not (result.astype("float32").view("uint32") & 0xFFFF).any(), path


@pytest.mark.ranks(2, env=_TWO_HOSTS)
def test_type_between_hosts_leaves_other_types_alone(core, rank):
    for dtype in ("int32", "float16", "bool"):
        result = np.ones(100, dtype)
        assert core.submit_allreduce(f"not sent as bfloat16 {dtype}", [result], [result], wire="bfloat16").wait(30)
        assert (result == np.asarray(2).astype(dtype)).all()
    big = np.full(3, [1e30, np.nan, -np.inf], "float32")
    assert core.submit_allreduce("special values", [big], [big], wire="float16").wait(30)
    np.testing.assert_array_equal(big, np.array([np.inf, np.nan, -np.inf], "float32"))


@pytest.mark.ranks(2, env=_TWO_HOSTS)
def test_different_types_between_hosts_are_reported(core, rank):
    array = np.ones(10, "float32")
    work = core.submit_allreduce("sent differently", [array], [array], wire=["float16", ""][rank])
    with pytest.raises(core.Error, match="differs between ranks.*as float16 between hosts.*Use the same compression"):
        work.wait(30)
    with pytest.raises(ValueError, match="int8"):
        core.submit_allreduce("sent as int8", [array], [array], wire="int8")


@pytest.mark.ranks(2, env=_ENV)
def test_a_rank_that_waits_for_memory_does_not_keep_the_table_locked(core, rank, gather):
    """Memory for more operations is taken in turns of all ranks, which may last a second each."""
    _allreduce(core, "before", np.ones(10))
    slowest = 0.0
    if rank == 1:
        segments = [fd for fd in os.listdir("/proc/self/fd") if "memfd:mykv" in _link(fd)]
        assert segments
        for fd in segments:
            fcntl.lockf(int(fd), fcntl.LOCK_EX)  # a turn
    gather("rank 1 has the turn")
    many = [np.ones(1) for _ in range(150 if rank == 0 else 20)]
    works = []
    for number, one in enumerate(many):
        begun = time.monotonic()
        works.append(core.submit_allreduce(f"{rank} {number}", [one], [one]))
        if rank == 1:
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.1)
    if rank == 1:
        for fd in segments:
            fcntl.lockf(int(fd), fcntl.LOCK_UN)
    assert slowest < 0.6
    gather("rank 1 has given it back")
    works += [core.submit_allreduce(f"{1 - rank} {k}", [np.ones(1)], []) for k in range(20 if rank == 0 else 150)]
    assert all(work.wait(30) for work in works)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

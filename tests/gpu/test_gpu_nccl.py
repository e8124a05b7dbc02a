"""GPU arrays by NCCL, with stand-ins for libcudart and libnccl (gpu_support.py), in processes without MXNet."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from harness import launcher
from harness.marks import needs_standin
from standin import gpu_support
from standin.gpu_arrays import FAILING, LIMIT, Gpus, check_random_allreduces, of_numbers, piece, place, to_numbers
from standin.gpu_support import ON_REAL_GPU, DeviceArray

_ENV = {"MYKV_TEST_POOL": "nccl"}
_TWO_HOSTS = {"MYKV_TEST_POOL": "nccl", "MYKV_VIRTUAL_HOSTS": "2"}


@pytest.fixture
def core(request):
    """The core on stand-ins."""
    return gpu_support.start_core(request)


@pytest.fixture
def gpus(core, rank, size, gather):
    made = Gpus(core, rank, size, gather)
    yield made
    for array in made.arrays:
        array.free()
    assert made.cuda.violations() == []


# Within hosts and between them. A real machine with one GPU can have only one rank.
_apart = pytest.mark.ranks(2, 4, env=_TWO_HOSTS)
_everywhere = pytest.mark.ranks(1, 2, env=_ENV) if ON_REAL_GPU else _apart


@pytest.mark.ranks(2, 3, long=(1, 4), env=_ENV)
@pytest.mark.parametrize("seed", [1, 2])
def test_allreduces_of_all_kinds_in_any_order_are_those_of_numpy(gpus, seed):
    check_random_allreduces(gpus, seed)


@pytest.mark.ranks(1, env=_ENV)
@pytest.mark.parametrize("dtype, size_of", [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_a_scaled_sum_of_one_rank_has_all_elements(gpus, dtype, size_of):
    """NCCL before 2.29.7 leaves out the last ones of some counts, in its blocks of 16 KiB."""
    block = (16 << 10) // size_of
    for blocks in [1, 2, 9, 31, 32, 33, 100]:
        for more in [-1, 0, 1, 3, 17, 33]:
            count = blocks * block + more
            work, out = gpus.allreduce(f"{dtype} {count}", of_numbers(np.full(count, 4), dtype), dtype=dtype, scale=0.5)
            assert work.wait(LIMIT)
            assert (to_numbers(out.numpy(), dtype) == 2).all()


@_everywhere
def test_allreduces_between_hosts_are_those_of_numpy(gpus):
    check_random_allreduces(gpus, 3)


@pytest.mark.ranks(2, 4, env=_ENV)
def test_groups_with_members_in_common_launch_in_one_order(gpus):
    """The stand-in hangs, as a GPU does, where two ranks launch two communicators' operations in other orders."""
    from mpi4py import MPI

    members = [[0, 1], list(range(gpus.size))[-2:], list(range(gpus.size))]
    groups = []
    for ranks in members:
        comm = MPI.COMM_WORLD.Split(0 if gpus.rank in ranks else MPI.UNDEFINED, gpus.rank)
        if gpus.rank in ranks:
            groups.append((gpus.core.make_group(comm.py2f(), ranks, {}), ranks))
            comm.Free()
    groups.append((None, list(range(gpus.size))))
    posted = [(g, k) for g in range(len(groups)) for k in range(8)]
    works = []
    for g, k in np.random.RandomState(gpus.rank).permutation(posted):
        group, ranks = groups[g]
        name = f"set {ranks} {group is None} {k}"
        work, out = gpus.allreduce(name, np.full(100 * k + 1, gpus.rank + 1.0), group)
        works.append((work, out, sum(r + 1.0 for r in ranks)))
    for work, out, expected in works:
        assert work.wait(LIMIT)
        assert (out.numpy() == expected).all()
    for group, _ in groups[:-1]:
        group.leave("the test is over")


@pytest.mark.ranks(4, env=_TWO_HOSTS)
def test_a_set_on_several_hosts_goes_through_host_memory(gpus):
    from mpi4py import MPI

    apart = "the process set is on several hosts, where it cannot keep the world's order"
    for members, reason in (([0, 1], ""), ([1, 3], apart)):
        comm = MPI.COMM_WORLD.Split(0 if gpus.rank in members else MPI.UNDEFINED, gpus.rank)
        if gpus.rank not in members:
            continue
        group = gpus.core.make_group(comm.py2f(), members, {"virtual_hosts": 2 if reason else 1})
        comm.Free()
        assert group.gpu_road()[1] == (not reason) and group.gpu_road()[2].startswith(reason)
        work, out = gpus.allreduce(f"of {members}", np.ones(5000), group)
        assert work.wait(LIMIT)
        assert (out.numpy() == 2).all()
        group.leave("the test is over")


@pytest.mark.ranks(2, env=_ENV)
def test_an_operation_comes_after_what_is_in_the_streams_it_names(gpus):
    values, out = np.full(1000, gpus.rank + 1.0), gpus.array(np.zeros(1000))
    data, late = gpus.array(np.zeros(1000)), gpus.array(values)
    gpus.cuda.cudaSetDevice(gpus.device())
    stream = gpus.cuda.stream()
    gpus.cuda.delay(gpus.device(), stream, 50000)
    gpus.cuda.cudaMemcpyAsync(data.pointer, late.pointer, data.nbytes, 3, stream)
    memory = {"inputs": [place(data)], "outputs": [place(out)], "streams": [(stream.value, gpus.device())]}
    assert gpus.submit("after", "allreduce", values, memory).wait(LIMIT)
    assert (out.numpy() == 3).all()
    gpus.cuda.cudaStreamDestroy(stream)


@pytest.mark.ranks(1, 2, 3, env=_ENV)
@pytest.mark.parametrize("outputs", [[0, 1], [0], [1, 0, 0], [2]])
def test_several_devices_of_a_rank_are_summed(gpus, outputs):
    """Ranks may have other numbers of devices, and want the result where they have no input."""
    inputs = [0, 1] if gpus.rank != 1 else [1]
    data = [gpus.array(np.arange(5000) + 10.0 * gpus.rank + i, i) for i in inputs]
    outs = [gpus.array(np.zeros(5000), i) for i in outputs]
    memory = {"inputs": [place(a) for a in data], "outputs": [place(a) for a in outs]}
    assert gpus.submit(f"devices {outputs}", "allreduce", (5000,), memory, dtype="float64", scale=0.5).wait(LIMIT)
    expected = 0.5 * sum(np.arange(5000) + 10.0 * r + i for r in range(gpus.size) for i in ([0, 1] if r != 1 else [1]))
    for out in outs:
        np.testing.assert_allclose(out.numpy(), expected)


@pytest.mark.ranks(3, env=_ENV)
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_and_reduce_with_several_devices(gpus, root):
    is_root = gpus.rank == root
    outs = [gpus.array(np.zeros(100, "float32"), i) for i in (0, 1)]
    source = gpus.array(np.arange(100, dtype="float32") + root, 1)
    memory = {"inputs": [place(source)] if is_root else [], "outputs": [place(a) for a in outs]}
    assert gpus.submit(f"from {root}", "broadcast", (100,), memory, dtype="float32", root=root).wait(LIMIT)
    for out in outs:
        np.testing.assert_array_equal(out.numpy(), np.arange(100) + root)
    data = gpus.array(np.arange(100, dtype="float32") + gpus.rank)
    memory = {"inputs": [place(data)], "outputs": [place(a) for a in outs] if is_root else []}
    assert gpus.submit(f"to {root}", "reduce", (100,), memory, dtype="float32", root=root).wait(LIMIT)
    if is_root:
        for out in outs:
            np.testing.assert_array_equal(out.numpy(), 3 * np.arange(100) + 3)


def _rows(counts):
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return [(int(b), int(c), r) for r, (b, c) in enumerate(zip(begins, counts))]


@_everywhere
@pytest.mark.parametrize("counts", [[7, 7, 7, 7], [3, 0, 8, 1]])
def test_allgather_and_reducescatter(gpus, counts):
    shards = _rows(counts[: gpus.size])
    total = sum(counts[: gpus.size])
    begin, count, _ = shards[gpus.rank]
    whole = np.arange(total, dtype="int64") * 3
    before = gpus.calls("ncclAllGather"), gpus.calls("ncclReduceScatter")

    mine, out = gpus.array(whole[begin : begin + count]), gpus.array(np.zeros(total, "int64"))
    memory = {"sources": [piece(mine, begin, count)], "targets": [piece(out, 0, total)], "shards": shards}
    assert gpus.submit(f"gather {counts}", "broadcast", whole, memory).wait(LIMIT)
    np.testing.assert_array_equal(out.numpy(), whole)

    data, own = gpus.array(whole + gpus.rank), gpus.array(np.zeros(count, "int64"))
    memory = {"sources": [piece(data, 0, total)], "targets": [piece(own, begin, count)], "shards": shards}
    assert gpus.submit(f"scatter {counts}", "reduce", whole, memory).wait(LIMIT)
    expected = gpus.size * whole + gpus.size * (gpus.size - 1) // 2
    np.testing.assert_array_equal(own.numpy(), expected[begin : begin + count])

    equal = int(len(set(counts[: gpus.size])) == 1)
    calls = gpus.calls("ncclAllGather"), gpus.calls("ncclReduceScatter")
    assert ON_REAL_GPU or calls == (before[0] + equal, before[1] + equal)


@pytest.mark.ranks(2, 3, env=_ENV)
def test_shards_in_pieces_that_do_not_fit_them(gpus):
    """Where a shard lies across pieces, or is not wanted, it goes through memory of ours."""
    size, rng = gpus.size, np.random.RandomState(5)
    total = 101
    bounds = [0, *sorted(rng.choice(np.arange(1, total), 6, replace=False)), total]
    shards = [(int(a), int(b - a), k % size) for k, (a, b) in enumerate(zip(bounds, bounds[1:]))]
    whole = rng.randint(0, 1000, total).astype("int32")
    own = np.random.RandomState(gpus.rank)
    for kind in ("broadcast", "reduce"):
        cuts = [0, *sorted(own.choice(np.arange(1, total), 4, replace=False)), total]
        windows = [(int(a), int(b - a)) for a, b in zip(cuts, cuts[1:])]
        wanted = windows[::2]
        data = [gpus.array(whole[b : b + c] + (gpus.rank if kind == "reduce" else 0)) for b, c in windows]
        outs = [gpus.array(np.full(c, -1, "int32")) for _, c in wanted]
        memory = {
            "sources": [piece(a, *w) for a, w in zip(data, windows)],
            "targets": [piece(a, *w) for a, w in zip(outs, wanted)],
            "shards": shards,
        }
        assert gpus.submit(f"pieces {kind}", kind, whole, memory).wait(LIMIT)
        expected, mine = whole.copy(), np.ones(total, bool)
        if kind == "reduce":
            expected = size * whole + size * (size - 1) // 2
            mine = np.concatenate([np.full(c, root == gpus.rank) for _, c, root in shards])
        for out, (b, c) in zip(outs, wanted):
            np.testing.assert_array_equal(out.numpy(), np.where(mine[b : b + c], expected[b : b + c], -1))


@_everywhere
def test_a_group_of_arrays_is_one_group_of_calls(gpus):
    shapes = [3, 1, 0, 500, 64]
    data = [gpus.array(np.arange(n, dtype="float32") + gpus.rank) for n in shapes]
    outs = [gpus.array(np.zeros(n, "float32")) for n in shapes]
    begins = np.concatenate([[0], np.cumsum(shapes)]).tolist()
    memory = {
        "sources": [piece(a, b, n) for a, b, n in zip(data, begins, shapes)],
        "targets": [piece(a, b, n) for a, b, n in zip(outs, begins, shapes)],
    }
    for turn in range(2):  # the first one also makes what all of its name need
        before = [gpus.calls(name) for name in ("ncclAllReduce", "ncclGroupStart")]
        assert gpus.submit("group", "allreduce", (sum(shapes),), memory, dtype="float32").wait(LIMIT)
        after = [gpus.calls(name) for name in ("ncclAllReduce", "ncclGroupStart")]
        assert ON_REAL_GPU or after[0] - before[0] == 4
        assert ON_REAL_GPU or turn == 0 or after[1] - before[1] == 1
    for n, out in zip(shapes, outs):
        np.testing.assert_array_equal(out.numpy(), gpus.size * np.arange(n) + gpus.size * (gpus.size - 1) / 2)


@pytest.mark.ranks(2, env=_ENV)
def test_a_group_that_lies_otherwise_on_another_rank_is_packed(gpus):
    cuts = [0, 10, 30] if gpus.rank == 0 else [0, 25, 30]
    whole = np.arange(30, dtype="int32")
    pieces = list(zip(cuts, cuts[1:]))
    data = [gpus.array(whole[a:b] * (gpus.rank + 1)) for a, b in pieces]
    outs = [gpus.array(np.zeros(b - a, "int32")) for a, b in pieces]
    memory = {
        "sources": [piece(array, a, b - a) for array, (a, b) in zip(data, pieces)],
        "targets": [piece(array, a, b - a) for array, (a, b) in zip(outs, pieces)],
    }
    assert gpus.submit("otherwise", "allreduce", whole, memory).wait(LIMIT)
    np.testing.assert_array_equal(np.concatenate([out.numpy() for out in outs]), 3 * whole)


@_everywhere
def test_alltoall(gpus):
    size = gpus.size
    counts = np.random.RandomState(8).randint(0, 9, (size, size))
    begins = np.concatenate([[0], np.cumsum(counts.ravel())])[:-1].reshape(size, size)
    total = int(counts.sum())
    shards = [(int(begins[i, j]), int(counts[i, j]), i) for i in range(size) for j in range(size)]
    whole = np.arange(total, dtype="float32")
    first, sent = int(begins[gpus.rank, 0]), int(counts[gpus.rank].sum())
    data, out = gpus.array(whole[first : first + sent]), gpus.array(np.zeros(counts[:, gpus.rank].sum(), "float32"))
    skips = np.concatenate([[0], np.cumsum(counts[:, gpus.rank])])
    memory = {
        "sources": [piece(data, first, sent)],
        "targets": [
            piece(out, int(begins[i, gpus.rank]), int(counts[i, gpus.rank]), int(skips[i])) for i in range(size)
        ],
        "shards": shards,
    }
    assert gpus.submit("alltoall", "alltoall", whole, memory).wait(LIMIT)
    expected = [whole[b : b + c] for b, c in zip(begins[:, gpus.rank], counts[:, gpus.rank])]
    np.testing.assert_array_equal(out.numpy(), np.concatenate(expected))


@_everywhere
def test_a_communicator_is_made_once_and_a_name_may_change_its_devices(gpus):
    for turn in range(3):
        made = gpus.calls("ncclCommInitRankConfig")
        for _ in range(3):
            index = 2 if gpus.rank == 0 else turn % 2  # of one rank alone; and the turns come back
            data, out = gpus.array(np.ones(10, "float32"), index), gpus.array(np.zeros(10, "float32"), index)
            memory = {"inputs": [place(data)], "outputs": [place(out)]}
            assert gpus.submit("moves", "allreduce", (10,), memory, dtype="float32").wait(LIMIT)
            assert (out.numpy() == gpus.size).all()
        assert ON_REAL_GPU or gpus.calls("ncclCommInitRankConfig") - made == (1 if turn < 2 else 0)


@pytest.mark.ranks(2, env=_ENV)
def test_the_same_gpus_divided_otherwise_among_the_ranks_are_another_arrangement(gpus):
    for turn, of_ranks in enumerate(([[0, 2], [3]], [[0], [2, 3]])):
        mine = of_ranks[gpus.rank]
        inputs = [DeviceArray(np.ones(10, "float32"), number, gpus.cuda) for number in mine]
        out = DeviceArray(np.zeros(10, "float32"), mine[0], gpus.cuda)
        gpus.arrays += [*inputs, out]
        memory = {"inputs": [place(one) for one in inputs], "outputs": [place(out)]}
        assert gpus.submit(f"divided {turn}", "allreduce", (10,), memory, dtype="float32").wait(LIMIT)
        assert (out.numpy() == 3).all()


@_apart
def test_another_shape_on_one_rank_is_the_same_error_as_on_the_cpu(gpus):
    shape = (3,) if gpus.rank == 1 else (2,)
    with pytest.raises(RuntimeError) as error:
        gpus.core.submit_allreduce("cpu", [np.zeros(shape)], [np.zeros(shape)]).wait(LIMIT)
    work, _ = gpus.allreduce("gpu", np.zeros(shape))
    with pytest.raises(RuntimeError) as other:
        work.wait(LIMIT)
    text = str(other.value).replace(" on GPU by NCCL", "").replace("gpu", "cpu")
    # On several hosts the one that comes first is named first. The last sentence says what to do.
    parts = [sorted(re.split(r": |, (?=rank)|\. ", one)) for one in (text, str(error.value))]
    assert len(parts[0]) == 4 and parts[0] == parts[1]
    work, out = gpus.allreduce("gpu", np.ones(2))
    assert work.wait(LIMIT)
    assert (out.numpy() == gpus.size).all()


@pytest.mark.ranks(2, env=_ENV)
def test_an_array_on_the_cpu_of_one_rank_is_an_error_that_names_both(gpus):
    if gpus.rank == 0:
        work, _ = gpus.allreduce("mixed", np.zeros(4))
    else:
        work = gpus.core.submit_allreduce("mixed", [np.zeros(4)], [np.zeros(4)])
    both = r"rank 0 has .*on GPU by NCCL, rank 1 has allreduce sum of float64 \(4,\) on CPU\. Use the same .*device"
    with pytest.raises(RuntimeError, match=both):
        work.wait(LIMIT)


@_apart
def test_two_ranks_on_one_gpu_are_an_error_that_names_both(gpus):
    data = DeviceArray(np.zeros(4), 0, gpus.cuda)  # of rank 0
    gpus.arrays.append(data)
    work = gpus.submit("same", "allreduce", (4,), {"inputs": [place(data)], "outputs": [place(data)]}, dtype="float64")
    with pytest.raises(RuntimeError, match="^same: ranks 0 and 1 have their arrays on the same GPU.*MYKV_GPU=host"):
        work.wait(LIMIT)
    work, out = gpus.allreduce("other", np.ones(4))
    assert work.wait(LIMIT)
    assert (out.numpy() == gpus.size).all()


@pytest.mark.ranks(2, env=_ENV)
def test_arrays_that_overlap_in_part_are_refused(gpus):
    data = gpus.array(np.zeros(20))
    shifted = (data.pointer + 8, data.device)
    work = gpus.submit("overlap", "allreduce", (10,), {"inputs": [place(data)], "outputs": [shifted]}, dtype="float64")
    with pytest.raises(RuntimeError, match="overlap in part"):
        work.wait(LIMIT)


@needs_standin("a failure is planted")
@pytest.mark.ranks(2, env=_ENV)
def test_a_gpu_without_memory_for_ours_is_an_error_and_the_rest_goes_on(gpus):
    if gpus.rank == 0:
        gpus.cuda.standin_plant("cudaMalloc", 2, 2)  # after the array's own
    data = gpus.array(np.ones(9 << 20, "uint8"), 0)  # more than what other tests took
    far = DeviceArray(np.zeros(9 << 20, "uint8"), gpus.device(0), gpus.cuda) if gpus.rank else None
    targets = [] if far is None else [piece(far, 0, 9 << 20)]
    memory = {"sources": [piece(data, 0, 9 << 20)], "targets": targets}
    work = gpus.submit("memory", "allreduce", (9 << 20,), memory, dtype="uint8")
    with pytest.raises(RuntimeError, match="refused by rank 0: CUDA failed in cudaMalloc: cudaErrorMemoryAllocation"):
        work.wait(LIMIT)
    if far is not None:
        far.free()
    work, _ = gpus.allreduce("rest", np.ones(4))
    assert work.wait(LIMIT)


_FAILURES = (
    FAILING
    + """
    size, hosts = world.size, int(sys.argv[1])

    def leave():
        core.leave("it was told to")

    def plant(function, code, nth=1):
        return lambda: (nccl.standin_nccl_plant if "cuda" not in function else cuda.standin_plant)(function, nth, code)

    # what goes wrong on rank 1, and what its error says
    cases = {
        "call": (plant("ncclAllReduce", 3), "NCCL failed in ncclAllReduce"),
        "async": (plant("async", 3), "NCCL failed in an operation"),
        "event": (plant("cudaEventRecord", 719), "CUDA failed in cudaEventRecord"),
        "hang": (lambda: (plant("hang", 1)(), threading.Thread(target=stall).start()), "0.5 s"),
        "leave": (leave, "it was told to"),
        "init": (plant("ncclCommInitRankConfig", 2), "NCCL failed in ncclCommInitRankConfig"),
    }
    if hosts == 2:  # where a departure takes 5 s
        cases = {"call": cases["call"]}
    before = left()
    for name, (spoil, text) in cases.items():
        core.init(world.py2f(), {"virtual_hosts": hosts})
        assert core.gpu_road() == (True, True, "", False), core.gpu_road()
        if name != "init":
            assert submit("well").wait(20)
        began = time.monotonic()
        error = ""
        try:
            if rank == 1:
                spoil()
            submit(name).wait(20) or os._exit(3)
        except RuntimeError as failure:
            error = str(failure)
        took = time.monotonic() - began
        print(name, rank, round(took, 1), error, flush=True)
        if rank == 0 and name == "event" and not error:  # its GPU was through with it
            pass
        else:
            assert error and (text in error or name == "hang"), (text, error)
        if rank == 0 and error and name != "hang":
            assert error.startswith(name + ": rank 1 has left: "), error
        assert took < (4 if hosts == 1 else 9), (name, took)
        core.shutdown()
        assert left() == before, (name, left(), before)
        if name == "hang":
            nccl.standin_nccl_resume()
        world.Barrier()

    # nothing is lost by a shutdown with operations under way, nor left over in ten rounds
    for turn in range(10 if hosts == 1 else 4):
        fly({"virtual_hosts": hosts}, turn % 2)
        assert left() == before, (left(), before)
        assert cuda.standin_live_events() < 20  # they are kept for the next operations
    assert cuda.violations() == []
    print("all is well", flush=True)
"""
)


def _environment(**settings):
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    return {
        **gpu_support.environment(devices=8, delay_us=100, nccl_launch_us=300, **settings),
        "PYTHONPATH": ":".join(paths),
    }


@needs_standin("failures are planted, and each rank has a GPU")
@pytest.mark.parametrize("hosts", [1, 2])
def test_failures_end_on_all_ranks_and_leave_nothing_behind(mpirun, hosts):
    result = mpirun(2, _FAILURES, str(hosts), env=_environment(), timeout=60)
    assert result.code == 0, result.text
    assert result.stdout.count("all is well") == 2, result.text


_ORDER = (
    FAILING
    + """
    import signal
    from compiled import testing

    core.init(world.py2f(), {"virtual_hosts": 1})
    assert core.gpu_road() == (True, True, "", False), core.gpu_road()
    assert submit("well").wait(20)
    world.Barrier()
    if rank == 1:
        work = submit("late")
        time.sleep(0.5)  # it has arrived
        print("now", os.getpid(), flush=True)
        testing.signal_with_launch_order(core.world(), int(sys.argv[1]))
    else:
        time.sleep(1.5)
        began = time.monotonic()
        work = submit("late")
    try:
        work.wait(20) or os._exit(3)
    except RuntimeError as failure:
        print("error", rank, failure, flush=True)
    if rank == 0:
        print("took", round(time.monotonic() - began, 1), flush=True)
    if int(sys.argv[1]) == signal.SIGKILL:
        time.sleep(60)  # mpirun would end the others
    core.shutdown()
"""
)


@needs_standin("failures are planted, and each rank has a GPU")
def test_a_rank_that_is_stopped_with_the_order_of_launches_is_named(mpirun):
    running = mpirun.start(2, _ORDER, str(int(signal.SIGSTOP)), env=_environment())
    running.wait_for("took", timeout=60)
    os.kill(int(re.search(r"now (\d+)", running.read()[0]).group(1)), signal.SIGCONT)
    result = running.wait(60)
    said = "the order of launches on GPUs is kept locked by rank 1, which does not respond (is it stopped?)"
    assert result.code == 0 and result.stdout.count(said) == 2, result.text
    assert 4 < float(re.search(r"took (\S+)", result.stdout).group(1)) < 15, result.text


@needs_standin("failures are planted, and each rank has a GPU")
@pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")
def test_a_rank_that_dies_with_the_order_of_launches_is_named(mpirun):
    running = mpirun.start(2, _ORDER, str(int(signal.SIGKILL)), env=_environment(), options=("--with-ft", "ulfm"))
    running.wait_for("took", timeout=60)
    text = running.read()[0]
    running.kill()
    assert "error 0 late: rank 1 has died while it ordered launches on GPUs" in text, text
    assert float(re.search(r"took (\S+)", text).group(1)) < 4, text


@needs_standin("failures are planted, and each rank has a GPU")
def test_another_nccl_on_one_rank_is_the_reason_why_it_does_not_serve(mpirun):
    script = """
        import os
        from compiled import core
        from standin import gpu_support
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
        os.environ["STANDIN_NCCL_VERSION"] = ["22304", "21803"][rank]
        core.find_gpus([gpu_support.cuda_library()], [gpu_support.nccl_library()])
        core.init(MPI.COMM_WORLD.py2f(), {})
        reason = "rank 0 has NCCL 2.23.4 and rank 1 has NCCL 2.18.3"
        assert core.gpu_road() == (True, False, reason, False), core.gpu_road()
        assert core.transports()["nccl"] == reason
        core.shutdown()
    """
    assert mpirun(2, script, env=_environment()).code == 0

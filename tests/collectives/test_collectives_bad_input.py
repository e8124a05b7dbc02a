"""Bad input to collective operations: a clear error on every rank concerned, nothing hangs, and the next call works."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from compiled import core
from harness.support import MXNetError, array, clear_errors, fail, mx, value
from kvstore_plugin.compat import arrays
from kvstore_plugin.timeline.recording import read

_LIMIT = 5.0  # seconds until every rank has its error, on a machine that is busy


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


def _good(*shape, dtype="float32"):
    return array(np.ones(shape or (4,), dtype))


def _sparse():
    return mx.nd.sparse.zeros("row_sparse", (4, 2))


def _read(result):
    for one in result if isinstance(result, (list, tuple)) else [result]:
        value(one)


def _next_calls_work(size):
    clear_errors()
    assert (value(mykv.allreduce(_good(), op=mykv.Sum, name="x")) == size).all()
    assert (value(mykv.allreduce(_good(), op=mykv.Sum)) == size).all()
    group = mykv.grouped_allreduce([_good(), _good(dtype="float64"), _good(dtype="int32")], op=mykv.Sum, name="x")
    assert all((value(one) == size).all() for one in group)
    assert value(mykv.allgather(_good(), name="x")).shape == (4 * size,)
    mykv.barrier()


# Rank 1's call, and the other ranks' calls meanwhile.
_WRONG = {
    "numpy": (TypeError, lambda: mykv.allreduce(np.ones(4), name="x"), "allreduce"),
    "None": (TypeError, lambda: mykv.allreduce_(None, name="x"), "allreduce"),
    "list": (TypeError, lambda: mykv.allreduce([_good()], name="x"), "allreduce"),
    "sparse": (ValueError, lambda: mykv.allreduce(_sparse(), name="x"), "allreduce"),
    "op and average": (ValueError, lambda: mykv.allreduce(_good(), True, name="x", op=mykv.Sum), "allreduce"),
    "op is text": (TypeError, lambda: mykv.allreduce(_good(), name="x", op="sum"), "allreduce"),
    "average is text": (TypeError, lambda: mykv.allreduce(_good(), "sum", name="x"), "allreduce"),
    "average of bool": (ValueError, lambda: mykv.allreduce(_good(dtype="bool"), name="x"), "allreduce"),
    "scaled bool": (
        ValueError,
        lambda: mykv.allreduce(_good(dtype="bool"), name="x", op=mykv.Max, prescale_factor=2),
        "allreduce",
    ),
    "Adasum": (ValueError, lambda: mykv.allreduce(_good(), name="x", op=mykv.Adasum), "allreduce"),
    "factor is text": (TypeError, lambda: mykv.allreduce(_good(), name="x", prescale_factor="2"), "allreduce"),
    "factor is NaN": (ValueError, lambda: mykv.allreduce(_good(), name="x", postscale_factor=np.nan), "allreduce"),
    "priority is text": (TypeError, lambda: mykv.allreduce(_good(), name="x", priority="high"), "allreduce"),
    "priority is large": (ValueError, lambda: mykv.allreduce(_good(), name="x", priority=2**40), "allreduce"),
    "group is an array": (TypeError, lambda: mykv.grouped_allreduce(_good(), name="x"), "group"),
    "group holds numpy": (TypeError, lambda: mykv.grouped_allreduce([_good(), np.ones(4)], name="x"), "group"),
    "group holds sparse": (ValueError, lambda: mykv.grouped_allreduce_([_good(), _sparse()], name="x"), "group"),
    "group holds one twice": (ValueError, lambda: mykv.grouped_allreduce_([_good()] * 2, name="x"), "group"),
    "root is no rank": (ValueError, lambda: mykv.broadcast(_good(), 7, name="x"), "broadcast"),
    "root is negative": (ValueError, lambda: mykv.broadcast_(_good(), -1, name="x"), "broadcast"),
    "root is text": (TypeError, lambda: mykv.broadcast(_good(), "0", name="x"), "broadcast"),
    "rows of numpy": (TypeError, lambda: mykv.reducescatter(np.ones(4), name="x"), "scatter"),
    "Adasum of rows": (ValueError, lambda: mykv.reducescatter(_good(), mykv.Adasum, name="x"), "scatter"),
    "gather numpy": (TypeError, lambda: mykv.allgather(np.ones(4), name="x"), "gather"),
    "gather sparse": (ValueError, lambda: mykv.allgather(_sparse(), name="x"), "gather"),
    "gather numpy in a group": (TypeError, lambda: mykv.grouped_allgather([np.ones(4)], name="x"), "gather"),
    "splits have another sum": (ValueError, lambda: mykv.alltoall(_good(), [1] * mykv.size(), name="x"), "alltoall"),
    "splits have another length": (ValueError, lambda: mykv.alltoall(_good(), [4], name="x"), "alltoall"),
    "splits are negative": (
        ValueError,
        lambda: mykv.alltoall(_good(), [5, -1] + [0] * (mykv.size() - 2), name="x"),
        "alltoall",
    ),
    "splits are floats": (TypeError, lambda: mykv.alltoall(_good(), [2.0, 2.0], name="x"), "alltoall"),
    "splits are no int32": (ValueError, lambda: mykv.alltoall(_good(), array(np.array([4, 0])), name="x"), "alltoall"),
    "splits are a number": (TypeError, lambda: mykv.alltoall(_good(), 4, name="x"), "alltoall"),
    "rows do not divide": (ValueError, lambda: mykv.alltoall(_good(5 * mykv.size() + 1), name="x"), "alltoall"),
    "object that is no pickle": (Exception, lambda: mykv.allgather_object(_Unpicklable()), "objects"),
    "root of an object": (ValueError, lambda: mykv.broadcast_object(1, 9), "object"),
}
_MEANWHILE = {
    "allreduce": lambda: mykv.allreduce(_good(), name="x"),
    "group": lambda: mykv.grouped_allreduce([_good(), _good(dtype="float64")], name="x"),
    "broadcast": lambda: mykv.broadcast(_good(), 0, name="x"),
    "scatter": lambda: mykv.reducescatter(_good(), name="x"),
    "gather": lambda: mykv.allgather(_good(), name="x"),
    "alltoall": lambda: mykv.alltoall(_good(2 * mykv.size()), name="x"),
    "objects": lambda: mykv.allgather_object(1),
    "object": lambda: mykv.broadcast_object(1),
}
_BLOCKING = {
    "gather": "allgather 'x'",
    "alltoall": "alltoall 'x'",
    "objects": "allgather_object",
    "object": "broadcast_object",
}


class _Unpicklable:
    def __reduce__(self):
        raise ValueError("this object cannot be pickled")


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("case", _WRONG)
def test_what_one_rank_can_see_is_refused_there_and_an_error_elsewhere(rank, size, case):
    error, call, meanwhile = _WRONG[case]
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(error, match=r"\w+ \w+ \w+"):
            call()
    else:
        with pytest.raises(MXNetError, match="rank 1") as failure:
            _read(_MEANWHILE[meanwhile]())
        blocking = _BLOCKING.get(meanwhile)
        if blocking is not None:
            assert str(failure.value).startswith(f"{blocking} was refused by rank 1: ")
        else:
            assert "'x'" in str(failure.value) or "/x" in str(failure.value)
    assert time.monotonic() - begin < _LIMIT
    _next_calls_work(size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG)
def test_the_same_mistake_on_all_ranks_leaves_them_in_step(rank, size, case):
    error, call, _ = _WRONG[case]
    with pytest.raises(error) as failure:
        call()
    # Scripts for Horovod catch (MXNetError, RuntimeError). Errors of pickle are passed on.
    assert isinstance(failure.value, MXNetError) or "pickle" in str(failure.value)
    _next_calls_work(size)


@pytest.mark.ranks(2)
def test_an_array_of_numpy_is_refused_with_what_to_use():
    for call in (lambda: mykv.allreduce(np.ones(4)), lambda: mykv.grouped_allreduce([_good(), np.ones(4)])):
        with pytest.raises(TypeError, match=r"not numpy.ndarray: use mx.nd.array\(x\)"):
            call()


@pytest.mark.ranks(2)
def test_numbers_in_arrays_and_of_numpy(rank, size):
    for two in (2, np.float32(2), np.array([2.0]), mx.nd.array([2.0]), mx.np.array(2.0)):
        assert (value(mykv.allreduce(_good(), op=mykv.Sum, prescale_factor=two, priority=np.int64(1))) == 4).all()
    store = mx.kv.create("mykv")
    mine = _good()
    store.pushpull("key", mine, priority=np.int64(1))
    assert (value(mine) == 2).all()
    assert (value(mykv.broadcast(_good(), np.int64(1))) == 1).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [1.5, b"x", ("a",), mx.cpu()], ids=str)
def test_names_of_other_types(rank, size, name):
    """The refusal takes the turn of an operation without a name."""
    if rank == 1:
        with pytest.raises(TypeError, match="name"):
            mykv.allreduce(_good(), name=name)
    else:
        with pytest.raises(MXNetError, match="rank 1"):
            _read(mykv.allreduce(_good()))
    _next_calls_work(size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call", [mykv.allgather, mykv.alltoall, mykv.reducescatter, lambda t: mykv.grouped_reducescatter([t])]
)
def test_scalar_where_rows_are_needed(rank, size, call):
    with mx.util.np_shape(True), pytest.raises(ValueError, match="scalar"):
        call(array(np.float32(1), "np"))
    _next_calls_work(size)


@pytest.mark.ranks(2)
def test_views_of_one_array_that_overlap_in_part_are_an_error_on_all_ranks(rank, size):
    """In a group, whose arrays the owner of it reads and writes where they are."""
    core, count = mykv.global_process_set._core, 20_000
    for number in range(4):  # each rank is the owner of some
        memory = mx.nd.arange(2 * count)
        mine, moved = memory[:count], memory[1 : count + 1]
        core.push_group(f"{number}", arrays.handles([mine]), arrays.handles([moved]))
        with pytest.raises(MXNetError, match="its input and its output overlap in part"):
            moved.asnumpy()
        clear_errors()
        memory = mx.nd.arange(2 * count)
        views = [memory[:count], memory[count:]]
        core.push_group(f"{number} in place", arrays.handles(views), arrays.handles(views))
        np.testing.assert_array_equal(memory.asnumpy(), np.arange(2 * count, dtype="float32") * size)


# Rank 0's call, the others' call, and words that the error must contain.
_DIFFERING = {
    "shape": (lambda: mykv.allreduce(_good(4), name="x"), lambda: mykv.allreduce(_good(5), name="x"), ["(4,)", "(5,)"]),
    "dtype": (
        lambda: mykv.allreduce(_good(), name="x"),
        lambda: mykv.allreduce(_good(dtype="int32"), name="x"),
        ["float32", "int32"],
    ),
    "operator": (
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Min),
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Max),
        ["Min", "Max"],
    ),
    "Average and Sum": (
        lambda: mykv.allreduce(_good(), name="x"),
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Sum),
        ["Average", "sum"],
    ),
    "prescale_factor": (
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Min, prescale_factor=2),
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Min, prescale_factor=3),
        ["prescale_factor 2", "prescale_factor 3"],
    ),
    "postscale_factor": (
        lambda: mykv.allreduce(_good(), name="x", postscale_factor=0.5),
        lambda: mykv.allreduce(_good(), name="x"),
        ["postscale_factor 0.5", "Average"],
    ),
    "number of members": (
        lambda: mykv.grouped_allreduce([_good()] * 3, name="x"),
        lambda: mykv.grouped_allreduce([_good()] * 2, name="x"),
        ["group of 3", "group of 2"],
    ),
    "dtypes of a group": (
        lambda: mykv.grouped_allreduce([_good(), _good(dtype="float64")], name="x"),
        lambda: mykv.grouped_allreduce([_good(dtype="float64"), _good()], name="x"),
        ["float32 (4,), float64 (4,)", "float64 (4,), float32 (4,)"],
    ),
    "group and one": (
        lambda: mykv.grouped_allreduce([_good(), _good(dtype="float64")], name="x"),
        lambda: mykv.allreduce(_good(), name="x"),
        ["group of 2"],
    ),
    "members to scatter": (
        lambda: mykv.grouped_reducescatter([_good()] * 2, name="x"),
        lambda: mykv.grouped_reducescatter([_good()], name="x"),
        ["group of 2", "group of 1"],
    ),
    "root": (
        lambda: mykv.broadcast(_good(), 0, name="x"),
        lambda: mykv.broadcast(_good(), 1, name="x"),
        ["rank 0", "rank 1"],
    ),
    "allreduce and broadcast": (
        lambda: mykv.allreduce(_good(), name="x"),
        lambda: mykv.broadcast(_good(), 0, name="x"),
        ["allreduce", "broadcast"],
    ),
    "allreduce and reducescatter": (
        lambda: mykv.allreduce(_good(), name="x"),
        lambda: mykv.reducescatter(_good(), name="x"),
        ["reducescatter"],
    ),
    "Min and Sum": (
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Min),
        lambda: mykv.allreduce(_good(), name="x", op=mykv.Sum),
        ["sum"],
    ),
    "without a name": (
        lambda: mykv.allreduce(_good(4)),
        lambda: mykv.broadcast_(_good(4), 0),
        ["allreduce", "broadcast"],
    ),
    "gathered dtypes": (
        lambda: mykv.allgather(_good(), name="x"),
        lambda: mykv.allgather(_good(dtype="int8"), name="x"),
        ["float32 (*)", "int8 (*)"],
    ),
    "gathered rows": (
        lambda: mykv.allgather(_good(4, 2), name="x"),
        lambda: mykv.allgather(_good(4, 3), name="x"),
        ["(*, 2)", "(*, 3)"],
    ),
    "gathered members": (
        lambda: mykv.grouped_allgather([_good()] * 2, name="x"),
        lambda: mykv.grouped_allgather([_good()] * 3, name="x"),
        ["2 arrays", "3 arrays"],
    ),
    "names of calls that wait": (
        lambda: mykv.allgather(_good(), name="x"),
        lambda: mykv.allgather(_good(), name="y"),
        ["'x'", "'y'"],
    ),
    "order of calls that wait": (
        lambda: mykv.allgather(_good(), name="x"),
        lambda: mykv.barrier(),
        ["allgather 'x'", "barrier"],
    ),
    "order of objects": (
        lambda: mykv.allgather_object(1),
        lambda: mykv.broadcast_object(1),
        ["allgather_object", "broadcast_object"],
    ),
    "roots of objects": (
        lambda: mykv.broadcast_object(1, 0),
        lambda: mykv.broadcast_object(1, 1),
        ["from rank 0", "from rank 1"],
    ),
    "alltoall and allgather": (
        lambda: mykv.alltoall(_good(6), name="x"),
        lambda: mykv.allgather(_good(6), name="x"),
        ["alltoall 'x'", "allgather 'x'"],
    ),
}


_SHAPES = ["Give the same shapes and dtypes on all workers"]
_REMEDIES = dict.fromkeys(
    ("shape", "dtype", "number of members", "dtypes of a group", "group and one", "members to scatter"), _SHAPES
)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("case", _DIFFERING)
def test_what_only_the_ranks_together_can_see_is_an_error_on_all_of_them(rank, size, case):
    first, others, words = _DIFFERING[case]
    begin = time.monotonic()
    with pytest.raises(MXNetError) as failure:
        _read(others() if rank else first())
    assert time.monotonic() - begin < _LIMIT
    for word in ("differs between ranks", "rank 0 has", *words, *_REMEDIES.get(case, ["Make the same calls"])):
        assert word in str(failure.value)
    _next_calls_work(size)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("call", [mykv.allgather, mykv.alltoall])
def test_rows_on_a_gpu_of_one_rank_and_on_the_cpu_of_others_are_an_error_that_names_both(rank, size, call, monkeypatch):
    """There is no GPU here: the array of rank 1 only says that it is on one."""
    monkeypatch.setattr(arrays, "on_gpu", lambda array: rank == 1)
    of = rf"{call.__name__} of float32 \(\*, 3\)"
    with pytest.raises(MXNetError, match=rf"rank 0 has {of} on CPU, rank 1 has {of} on GPU\. Make the same calls"):
        call(_good(size, 3))
    monkeypatch.undo()
    _next_calls_work(size)


@pytest.mark.ranks(2, 4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("case", ["shape", "dtypes of a group", "group and one", "order of calls that wait"])
def test_differences_between_two_hosts(rank, size, case):
    first, others, words = _DIFFERING[case]
    with pytest.raises(MXNetError) as failure:
        _read(others() if rank else first())
    for word in words:
        assert word in str(failure.value)
    _next_calls_work(size)


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
@pytest.mark.parametrize("case", ["shape", "operator", "number of members", "root", "gathered rows"])
def test_with_an_engine_that_runs_operations_at_once_the_call_raises(rank, size, case):
    first, others, words = _DIFFERING[case]
    with pytest.raises(MXNetError) as failure:
        (others if rank else first)()
    for word in words:
        assert word in str(failure.value)
    _next_calls_work(size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call", [mykv.reducescatter, lambda t, **options: mykv.grouped_reducescatter([t, t], **options)]
)
def test_a_rank_without_rows_gets_the_error_too(rank, size, call):
    """One row, for rank 0. MXNet's asnumpy() waits for no array without elements, but wait_to_read() does."""
    result = call(_good(1, 3 + rank), name="x")
    with pytest.raises(MXNetError, match="differs between ranks"):
        for one in result if isinstance(result, list) else [result]:
            one.wait_to_read()
    _next_calls_work(size)


_LANGUAGES = {
    "Chinese": "读取校准文件",
    "Greek": "βαθμονόμηση",
    "Hindi": "अंशांकन",
    "Arabic": "المعايرة",
    "emoji": "🚀🎉",
}


@pytest.mark.ranks(2, long=(3,))
@pytest.mark.parametrize("language", _LANGUAGES)
def test_names_keys_and_files_of_all_languages(rank, size, language, gather, tmp_path):
    """The names are longer than the table has room for, and cut at each byte of a character."""
    word = _LANGUAGES[language]
    path = str(tmp_path / f"{word}{{rank}}.mykv")
    mykv.start_timeline(path)
    for k in range(4):
        with pytest.raises(MXNetError) as failure:
            _read(mykv.allreduce(_good(4 + (rank > 0)), name="x" * k + word * 40))
        assert word in str(failure.value) and "\ufffd" not in str(failure.value)
    assert word in core.failures()["mismatch"][1]
    store = mx.kv.create("mykv")
    store.init(word, _good())
    assert (value(_pushed(store, word)) == size).all()
    gather("no operation is under way")
    mykv.stop_timeline()
    assert any(word in call.name for call in read(str(tmp_path / f"{word}{rank}.mykv")).calls)
    clear_errors()


def _pushed(store, key):
    result = _good()
    store.pushpull(key, result)
    return result


@pytest.mark.ranks(2)
def test_empty_group_against_one_with_members(rank, size):
    if rank:
        assert mykv.grouped_allreduce([], name="x") == []
    else:
        with pytest.raises(MXNetError, match="rank 1.*empty"):
            _read(mykv.grouped_allreduce([_good()], name="x"))
    _next_calls_work(size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "call",
    [
        lambda t: mykv.allreduce(t, name="x"),
        lambda t: mykv.grouped_allreduce([t, _good()], name="x"),
        lambda t: mykv.broadcast(t, 1, name="x"),
        lambda t: mykv.reducescatter(t, name="x"),
        lambda t: mykv.grouped_reducescatter([t], name="x"),
        lambda t: mykv.allgather(t, name="x"),
        lambda t: mykv.alltoall(t, name="x"),
    ],
    ids=["allreduce", "group", "broadcast", "reducescatter", "grouped_reducescatter", "allgather", "alltoall"],
)
def test_array_that_carries_an_error_is_an_error_at_the_result_on_all_ranks(rank, size, call):
    mine = _good(4)
    if rank == 1:
        fail(mine)
    with pytest.raises(MXNetError) as failure:
        _read(call(mine))
    assert rank == 1 or "rank 1" in str(failure.value)
    _next_calls_work(size)


@pytest.mark.ranks(2)
def test_use_before_init_and_after_shutdown(rank, size, gather):
    calls = [
        lambda: mykv.allreduce(np.ones(4)),
        lambda: mykv.allreduce(_good()),
        lambda: mykv.allreduce_(_good(), name="x"),
        lambda: mykv.grouped_allreduce([_good()]),
        lambda: mykv.broadcast(_good(), 0),
        lambda: mykv.reducescatter(_good()),
        lambda: mykv.grouped_reducescatter([_good()]),
        lambda: mykv.allgather(_good()),
        lambda: mykv.grouped_allgather([_good()]),
        lambda: mykv.alltoall(_good()),
        lambda: mykv.barrier(),
        lambda: mykv.broadcast_object(1),
        lambda: mykv.allgather_object(1),
        lambda: mykv.add_process_set([0]),
        lambda: mykv.remove_process_set(mykv.global_process_set),
        lambda: mykv.is_homogeneous(),
        lambda: mykv.mpi_threads_supported(),
    ]
    for _ in range(2):
        mykv.shutdown()
        for call in calls:
            with pytest.raises(RuntimeError, match=r"init\(\)"):
                call()
        gather("both have tried")
        mykv.init()
        _next_calls_work(size)


@pytest.mark.ranks(2)
def test_the_other_rank_has_left(rank, size, gather):
    if rank == 1:
        mykv.shutdown()
    gather("rank 1 has left")
    if rank == 0:
        for call in (lambda: mykv.allreduce(_good()), lambda: mykv.allgather(_good()), mykv.barrier):
            with pytest.raises(MXNetError, match="rank 1"):
                result = call()
                if result is not None:
                    value(result)
        clear_errors()
        mykv.shutdown()
    gather("both have left")
    mykv.init()
    _next_calls_work(size)

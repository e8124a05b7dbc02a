"""The classic calls of MXNet's KVStore, as scripts for dist_sync use them: init, push, pull and so on."""

from __future__ import annotations

import gc
import pickle
import sys
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness import dist_sync
from harness.support import DTYPES, MXNetError, array, clear_errors, mx, numbers, total, value


@pytest.fixture
def store():
    return mx.kv.create("mykv")


# Writes each worker's pulled values to a file, with either store. Values are multiples of a quarter: sums are exact.
_CALLS = """
    import sys
    store_name, file = sys.argv[1:]
    if store_name == "mykv":
        import kvstore_plugin
    import numpy
    if "bool" not in vars(numpy):
        numpy.bool = bool
    import mxnet as mx

    store = mx.kv.create(store_name)
    rank, size = store.rank, store.num_workers
    results = {}

    def mine(shape, step, ctx=None):
        draw = numpy.random.RandomState(100 * step + rank)
        return mx.nd.array(draw.randint(-8, 8, shape) / 4, ctx=ctx)

    def pull(name, key, shape):
        out = mx.nd.zeros(shape)
        store.pull(key, out=out)
        results[name] = out.asnumpy()

    shapes = {"matrix": (3, 4), "vector": (5,), "large": (300, 700)}
    for key, shape in shapes.items():
        store.init(key, mine(shape, 1))  # other values on each worker: those of rank 0 count
        pull(f"{key} after init", key, shape)
    for step in range(2, 4):
        for key, shape in shapes.items():
            store.push(key, mine(shape, step), priority=-step)
            pull(f"{key} after push {step}", key, shape)
    devices = [mx.cpu(0), mx.cpu(1)]
    store.push("matrix", [mine((3, 4), 4 + device.device_id, device) for device in devices])
    outs = [mx.nd.zeros((3, 4), device) for device in devices]
    store.pull("matrix", out=outs)
    for number, out in enumerate(outs):
        results[f"devices {number}"] = out.asnumpy()
    keys = ["matrix", "large"]
    store.push(keys, [mine(shapes[key], 8) for key in keys])
    outs = [mx.nd.zeros(shapes[key]) for key in keys]
    store.pull(keys, out=outs)
    for key, out in zip(keys, outs):
        results[f"list {key}"] = out.asnumpy()
    sparse = mx.nd.sparse.zeros("row_sparse", (3, 4))
    store.pull("matrix", out=sparse)  # left alone
    results["sparse"] = sparse.asnumpy()
    value = mine((3, 4), 9)
    store.pushpull("matrix", value, out=outs[0])
    results["pushpull"] = outs[0].asnumpy()
    out = mx.nd.zeros((2, 2))
    store.broadcast("new", mine((2, 2), 10), out=out)
    results["broadcast"] = out.asnumpy()
    store._barrier()
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=1 / size))
    weights = {"first": (3, 4), "second": (1000,), "third": (30, 50)}
    for key, shape in weights.items():
        store.init(key, mine(shape, 20))
    for step in range(21, 25):
        for key, shape in weights.items():
            store.push(key, mine(shape, step))
        for key, shape in weights.items():
            pull(f"{key} updated {step}", key, shape)
    out = mx.nd.zeros((3, 4))
    store.pushpull("first", mine((3, 4), 30), out=out)
    results["updated by pushpull"] = out.asnumpy()
    gradients = [mine((1000,), 31 + device.device_id, device) for device in devices]
    outs = [mx.nd.zeros((1000,), device) for device in devices]
    store.push("second", gradients)
    store.pull("second", out=outs)
    for number, out in enumerate(outs):
        results[f"updated devices {number}"] = out.asnumpy()
    store._barrier()
    numpy.savez(f"{file}.{rank}.npz", **results)
"""


@pytest.mark.long
def test_what_is_pulled_equals_dist_sync(mpirun, tmp_path):
    workers = 3
    dist_sync.run(mpirun, workers, _CALLS, "dist_sync", str(tmp_path / "dist_sync"), timeout=180)
    ours = mpirun(workers, _CALLS, "mykv", str(tmp_path / "mykv"), timeout=180)
    assert ours.code == 0, ours.text
    for rank in range(workers):
        expected, results = (np.load(tmp_path / f"{name}.{rank}.npz") for name in ("dist_sync", "mykv"))
        assert len(expected.files) == 31 and sorted(expected.files) == sorted(results.files)
        for name in expected.files:
            tolerance = 1e-5 if "updated" in name else 0
            np.testing.assert_allclose(
                results[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} on rank {rank}"
            )


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nd", "np"])
def test_every_dtype(store, rank, size, dtype, kind):
    shape = (3, 17)
    store.init("key", array(numbers(rank, shape, dtype), kind))
    out = array(np.zeros(shape, dtype), kind)
    store.pull("key", out)
    np.testing.assert_array_equal(value(out), numbers(0, shape, dtype))
    store.push("key", array(numbers(rank, shape, dtype), kind))
    store.pull("key", out)
    np.testing.assert_array_equal(value(out), total(size, shape, dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_every_shape(store, rank, size, shape):
    with mx.util.np_shape(True):
        store.init("key", array(numbers(rank, shape), "np"))
        store.push("key", array(numbers(rank, shape), "np"))
        out = array(np.zeros(shape, "float32"), "np")
        store.pull("key", out)
        np.testing.assert_array_equal(value(out), total(size, shape))


def _check_calls(store, rank, size):
    shape = (4, 33)
    store.init("key", array(numbers(rank, shape)))
    out = array(np.zeros(shape, "float32"))
    store.pull("key", out)
    np.testing.assert_array_equal(value(out), numbers(0, shape))
    store.push("key", [array(numbers(rank, shape), ctx=device) for device in (mx.cpu(0), mx.cpu(1))])
    store.pull("key", out)
    np.testing.assert_array_equal(value(out), 2 * total(size, shape))
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    store.push("key", array(numbers(rank, shape)))
    store.pull("key", out)
    np.testing.assert_allclose(value(out), 1.5 * total(size, shape), rtol=1e-6)
    store.barrier()


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_on_two_hosts(store, rank, size):
    _check_calls(store, rank, size)


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_with_the_engine_that_blocks(store, rank, size):
    _check_calls(store, rank, size)


@pytest.mark.ranks(3)
def test_in_a_process_set(rank):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    if pair.included():
        _check_calls(mykv.MyKV(process_set=pair), pair.rank(), pair.size())
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_init_copies(store, rank):
    """A later change of the value does not reach the store, and a push does not change the value."""
    mine = array(np.full(3, 1.0 + rank))
    store.init("key", mine)
    mine[:] = 50
    out = array(np.zeros(3))
    store.pull("key", out)
    assert (value(out) == 1).all()
    store.push("key", array(np.ones(3)))
    assert (value(mine) == 50).all()


@pytest.mark.ranks(2)
def test_init_again_gives_the_new_value_of_rank_0(store, rank):
    for turn in range(3):
        store.init("key", array(np.full(3 + turn, 10.0 * turn + rank)))
        out = array(np.zeros(3 + turn))
        store.pull("key", out)
        assert (value(out) == 10 * turn).all()


@pytest.mark.ranks(2)
def test_broadcast_lends_its_out_to_the_store(store, rank, size):
    """A weight is not stored twice; a sum that is pushed without an optimizer does not overwrite it."""
    weight = array(np.full(3, 5.0 + rank))
    store.broadcast("weight", weight, out=weight)
    weight += 1
    out = array(np.zeros(3))
    store.pull("weight", out)
    assert (value(out) == 6).all()
    store.push("weight", array(np.ones(3)))
    store.pull("weight", out)
    assert (value(out) == size).all() and (value(weight) == 6).all()


@pytest.mark.ranks(2)
def test_pushpull_leaves_the_value_in_the_store(store, rank, size):
    store.init("key", array(np.full(3, 7.0)))
    inout = array(np.ones(3))
    store.pushpull("key", inout)
    out = array(np.zeros(3))
    store.pull("key", out)
    assert (value(inout) == size).all() and (value(out) == 7).all()


@pytest.mark.ranks(2)
def test_a_key_twice_in_a_list_is_pushed_as_devices(store, rank, size):
    store.init("a", array(np.zeros(3)))
    store.push(["a", "a"], [array(np.ones(3)), array(np.full(3, 10.0))])
    outs = [array(np.zeros(3)) for _ in range(2)]
    store.pull(["a", "a"], out=outs)
    for out in outs:
        assert (value(out) == 11 * size).all()


@pytest.mark.ranks(2)
def test_keys_of_one_text_are_different(store):
    store.init(3, array(np.zeros(2)))
    store.init("3", array(np.ones(5)))
    out = array(np.full(2, 9.0))
    store.pull(3, out)
    assert (value(out) == 0).all()


@pytest.mark.ranks(2)
def test_calls_return_while_another_rank_has_not_come(store, rank, gather):
    """Only reading waits."""
    out = array(np.zeros(3))
    if rank == 1:
        gather("rank 0 has made its calls")
    store.init("key", array(np.ones(3)))
    store.push("key", array(np.ones(3)))
    store.pull("key", out)
    if rank == 0:
        gather("rank 0 has made its calls")
    assert (value(out) == 2).all()


@pytest.mark.ranks(2)
def test_pushes_in_different_order_of_keys(store, rank, size):
    keys = [f"key {number}" for number in range(20)]
    store.init(keys, [array(np.zeros(50)) for _ in keys])
    for key in keys[:: -1 if rank else 1]:
        store.push(key, array(np.full(50, float(keys.index(key)))))
    for number, key in enumerate(keys):
        out = array(np.zeros(50))
        store.pull(key, out)
        assert (value(out) == number * size).all()


@pytest.mark.ranks(2)
def test_a_copy_of_the_store_has_its_values(store):
    store.init("key", array(np.full(3, 4.0)))
    out = array(np.zeros(3))
    pickle.loads(pickle.dumps(store)).pull("key", out)
    assert (value(out) == 4).all()


@pytest.mark.ranks(2)
def test_barrier(store, rank, gather):
    began = gather(time.monotonic())
    if rank == 0:
        time.sleep(0.2)
    left = time.monotonic()
    store.barrier()
    store._barrier()
    passed = time.monotonic()
    assert all(one >= gather(left)[0] for one in gather(passed)) and len(began) == 2


@pytest.mark.ranks(1, 2)
def test_some_rows_of_a_dense_value(store, rank, size):
    values = np.arange(24, dtype="float32").reshape(6, 4)
    store.init("table", mx.nd.array(values))
    store.init("other", mx.nd.array(-values))
    out = mx.nd.sparse.zeros("row_sparse", (6, 4))
    for wanted in ([4, 1], [2, 2, 0], [], [0, 1, 2, 3, 4, 5]):
        store.row_sparse_pull("table", out=out, row_ids=_row_ids(wanted))
        assert out.indices.asnumpy().tolist() == sorted(set(wanted))
        np.testing.assert_array_equal(out.asnumpy(), np.where(np.isin(np.arange(6), wanted)[:, None], values, 0))
    outs = [mx.nd.sparse.zeros("row_sparse", (6, 4)) for _ in range(2)]
    store.row_sparse_pull("table", out=outs, row_ids=[_row_ids([1]), _row_ids([2])])
    assert [out.indices.asnumpy().tolist() for out in outs] == [[1], [2]]
    store.row_sparse_pull(["table", "other"], out=outs, row_ids=_row_ids([3 + rank]))
    for out, sign in zip(outs, (1, -1)):
        np.testing.assert_array_equal(out.data.asnumpy(), sign * values[3 + rank : 4 + rank])


def _row_ids(wanted):
    with mx.util.np_shape(True):
        return mx.nd.array(np.asarray(wanted, dtype="int64"), dtype="int64")


@pytest.mark.ranks(2)
def test_sparse_outs_of_pull(store, rank):
    values = np.arange(6, dtype="float32").reshape(3, 2)
    store.init("key", mx.nd.array(values))
    sparse, dense = mx.nd.sparse.zeros("row_sparse", (3, 2)), mx.nd.zeros((3, 2))
    store.pull("key", out=[sparse, dense])
    assert sparse.indices.size == 0
    np.testing.assert_array_equal(dense.asnumpy(), values)
    store.pull("key", out=sparse, ignore_sparse=False)
    np.testing.assert_array_equal(sparse.asnumpy(), values)


def _ones(n=3):
    return array(np.ones(n))


_LIMIT = 5.0  # seconds until every rank has its error, on a machine that is busy

# One rank's call instead of a push of the key 'k', which holds three numbers.
_WRONG_PUSHES = {
    "never initialized": (ValueError, "never initialized", lambda s: s.push("other", _ones())),
    "another shape": (ValueError, r"\(3,\) .* \(4,\)", lambda s: s.push("k", _ones(4))),
    "another dtype": (ValueError, "float64.* int32", lambda s: s.push("k", array(np.ones(3, "int32")))),
    "numpy": (TypeError, "NDArray", lambda s: s.push("k", np.ones(3))),
    "nothing": (TypeError, "NDArray", lambda s: s.push("k", None)),
    "sparse": (ValueError, "sparse", lambda s: s.push("k", mx.nd.sparse.zeros("csr", (3, 2)))),
    "fewer values than keys": (ValueError, "2 keys but 1", lambda s: s.push(["k", "l"], [_ones()])),
    "priority": (TypeError, "priority", lambda s: s.push("k", _ones(), priority="high")),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG_PUSHES)
def test_a_wrong_push_is_an_error_on_both_ranks(store, rank, size, case):
    error, text, call = _WRONG_PUSHES[case]
    store.init(["k", "l"], [_ones(), _ones()])
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(error, match=text) as failure:
            call(store)
        assert isinstance(failure.value, MXNetError)
    out = _ones()
    if rank == 0:
        key = "other" if case == "never initialized" else "k"
        if key == "other":
            store.init(key, _ones())
        else:
            store.push(key, _ones())
        store.pull(key, out)
        with pytest.raises(MXNetError, match="rank 1"):
            value(out)
    assert time.monotonic() - begin < _LIMIT
    clear_errors()
    store = mx.kv.create("mykv")
    store.init("k", _ones())
    store.push("k", _ones())
    store.pull("k", out)
    assert (value(out) == size).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["init", "broadcast", "push"])
def test_other_shapes_on_the_ranks_are_an_error_on_both(store, rank, size, method):
    mine = _ones(3 + rank)
    if method == "push":  # each worker has its own value in the store, since the error was never read
        store.init("k", mine)
    begin = time.monotonic()
    (store.push if method == "push" else getattr(store, method))("k", mine)
    out = _ones(3 + rank)
    store.pull("k", out)
    with pytest.raises(MXNetError) as failure:
        value(out)
    assert time.monotonic() - begin < _LIMIT
    for word in ("'k'", "(3,)", "(4,)", "rank 0", "rank 1"):
        assert word in str(failure.value)
    clear_errors()


@pytest.mark.ranks(2)
def test_init_against_push(store, rank, size):
    store.init("k", _ones())
    (store.init if rank else store.push)("k", _ones())
    out = _ones()
    store.pull("k", out)
    with pytest.raises(MXNetError, match="broadcast"):
        value(out)
    clear_errors()


_WRONG_PULLS = {
    "never initialized": (ValueError, "never initialized", lambda s: s.pull("other", _ones())),
    "no out": (TypeError, "out of key 'k'", lambda s: s.pull("k")),
    "another shape": (ValueError, r"\(3,\) .* \(4,\)", lambda s: s.pull("k", _ones(4))),
    "another dtype": (ValueError, "float64.* int32", lambda s: s.pull("k", array(np.ones(3, "int32")))),
    "fewer outs than keys": (ValueError, "2 keys but 1 outs", lambda s: s.pull(["k", "l"], [_ones()])),
    "numpy": (TypeError, "NDArray", lambda s: s.pull("k", np.ones(3))),
    "rows into a dense array": (
        ValueError,
        "row_sparse",
        lambda s: s.row_sparse_pull("t", mx.nd.zeros((2, 3)), row_ids=_row_ids([0])),
    ),
    "rows without numbers": (
        TypeError,
        "row_ids",
        lambda s: s.row_sparse_pull("t", mx.nd.sparse.zeros("row_sparse", (2, 3))),
    ),
    "a row that is none": (
        IndexError,
        "from 0 to 1",
        lambda s: s.row_sparse_pull("t", mx.nd.sparse.zeros("row_sparse", (2, 3)), row_ids=_row_ids([2])),
    ),
    "more lists of rows than arrays": (
        ValueError,
        "1 arrays in `out` but 2",
        lambda s: s.row_sparse_pull("t", mx.nd.sparse.zeros("row_sparse", (2, 3)), row_ids=[_row_ids([0])] * 2),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _WRONG_PULLS)
def test_a_wrong_pull_is_an_error_of_its_rank_alone(store, rank, size, case):
    error, text, call = _WRONG_PULLS[case]
    store.init(["k", "l", "t"], [_ones(), _ones(), mx.nd.zeros((2, 3))])
    if rank == 1:
        with pytest.raises(error, match=text) as failure:
            call(store)
        assert isinstance(failure.value, MXNetError)
    out = _ones()
    store.push("k", _ones())
    store.pull("k", out)
    assert (value(out) == size).all()


@pytest.mark.ranks(2)
def test_an_error_in_what_is_pushed_reaches_all_who_pull(store, rank):
    store.init("k", array(np.ones(3, "float32")))
    pushed = array(np.ones(3, "float32"))
    if rank == 1:
        mx.nd.random.normal(0, -1, (3,), out=pushed.as_nd_ndarray())
    store.push("k", pushed)
    out = array(np.ones(3, "float32"))
    store.pull("k", out)
    with pytest.raises(MXNetError, match="rank 1" if rank == 0 else "scale"):
        value(out)
    clear_errors()
    store.push("k", array(np.ones(3, "float32")))
    out = array(np.ones(3, "float32"))
    store.pull("k", out)
    assert (value(out) == 2).all()


@pytest.mark.ranks(1)
def test_values_are_let_go_with_the_store():
    store = mx.kv.create("mykv")
    weight = array(np.ones(3))
    before = sys.getrefcount(weight)
    store.broadcast("k", weight)
    assert sys.getrefcount(weight) > before
    del store
    gc.collect()
    assert sys.getrefcount(weight) == before


def _as_mxnet_does(store, rank):
    """The results of calls on a store, the same calls on all workers."""
    results = []

    def pull(key, like):
        store.pull(key, out=like)
        results.append((np.dtype(like.dtype).name, like.asnumpy().tolist()))

    half = mx.nd.array([0.5, 1, 2], dtype="float16")
    store.init("half", half)
    store.init("single", mx.nd.array([1, 2, 3]))
    pull("half", mx.nd.zeros(3))
    pull("half", mx.nd.zeros(3, dtype="float64"))
    pull("single", mx.nd.zeros(3, dtype="float16"))
    store.push("single", half)
    pull("single", mx.nd.zeros(3))
    store.push("half", mx.nd.array([3, 4, 5]))
    pull("half", mx.nd.zeros(3, dtype="float16"))
    out = mx.nd.zeros(3)
    store.pushpull("half", half, out=out)
    results.append(out.asnumpy().tolist())

    keys = ["a", "b", "c"]
    store.init(keys, [mx.nd.zeros(2)] * 3)
    same, other = mx.nd.ones(2), 2 * mx.nd.ones(2)
    store.pushpull(keys, [same, other, same], out=[same, same, other])
    results += [same.asnumpy().tolist(), other.asnumpy().tolist()]

    tables = {"float16": mx.nd.array(np.arange(8).reshape(4, 2), dtype="float16"), "float32": mx.nd.ones((4, 2))}
    store.init(list(tables), [one.tostype("row_sparse") for one in tables.values()])
    rows = [[mx.nd.array([1]), mx.nd.array([0, 3])], [mx.nd.array([2]), mx.nd.array([2, 1])]]
    outs = [[mx.nd.sparse.zeros("row_sparse", (4, 2)) for _ in range(2)] for _ in range(2)]
    store.row_sparse_pull(list(tables), out=outs, row_ids=rows)
    results += [out.asnumpy().tolist() for of_key in outs for out in of_key]

    called = []

    def update(key, total, value):
        called.append(key if isinstance(key, str) else key.decode())
        value += 2 * total.astype(value.dtype)

    store.init(["d", "e"], [mx.nd.ones(2), mx.nd.ones(2)])
    store._set_updater(update)
    assert store._updater is update
    store.push(["d", "e"], [mx.nd.ones(2), 3 * mx.nd.ones(2)])
    pull("d", mx.nd.zeros(2))
    pull("e", mx.nd.zeros(2))
    out = mx.nd.zeros(2)
    store.pushpull("d", mx.nd.ones(2), out=out)
    results += [out.asnumpy().tolist(), called]
    return results


@pytest.mark.ranks(1, 2)
def test_calls_do_what_mxnets_own_store_does(store, rank, size):
    class TimesSize:
        """MXNet's own store of one process, as a store of several workers with equal inputs."""

        num_workers = size

        def __init__(self):
            self._store = mx.kv.create("local")

        def __getattr__(self, name):
            return getattr(self._store, name)

        def push(self, key, value):
            self._store.push(key, [size * one for one in value] if isinstance(value, list) else size * value)

        def pushpull(self, key, value, out):
            self.push(key, value)
            self._store.pull(key, out=out)

    expected = _as_mxnet_does(TimesSize(), rank)
    assert _as_mxnet_does(store, rank) == expected


@pytest.mark.ranks(2)
def test_the_optimizer_takes_gradients_of_another_float(store, rank, size):
    for sparse in (False, True):
        store = mx.kv.create("mykv")
        store.init("key", mx.nd.ones((3, 2)))
        store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
        gradient = mx.nd.array(np.full((3, 2), 0.25), dtype="float16")
        gradient = gradient.tostype("row_sparse") if sparse else gradient
        store.push("key", gradient)
        out = mx.nd.zeros((3, 2), dtype="float16")
        store.pull("key", out)
        assert (out.asnumpy() == 0.5).all()
        store.pushpull("key", gradient, out=gradient)
        assert (gradient.asnumpy() == 0).all() and np.dtype(gradient.dtype) == "float16"


@pytest.mark.ranks(1)
def test_wrong_updaters(store):
    with pytest.raises(TypeError, match="function, not int"):
        store._set_updater(3)

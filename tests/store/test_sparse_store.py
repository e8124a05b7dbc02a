"""row_sparse arrays in the calls of the store, in both releases of MXNet."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, clear_errors, mx
from mxnet import autograd, gluon

_SHAPE = (6, 2)


@pytest.fixture
def store():
    return mx.kv.create("mykv")


def _row_sparse(indices, value=1.0, shape=_SHAPE, dtype="float32", ctx=None):
    """Rows that all hold one value."""
    if not len(indices):
        return mx.nd.sparse.zeros("row_sparse", shape, ctx=ctx, dtype=dtype)
    values = np.full((len(indices), *shape[1:]), value, dtype)
    return mx.nd.sparse.row_sparse_array((values, indices), shape=shape, ctx=ctx, dtype=dtype)


def _held(array) -> list[int]:
    return array.indices.asnumpy().tolist()


def _column(array) -> list[float]:
    return array.asnumpy()[:, 0].tolist()


@pytest.mark.ranks(1, 2, 3, 4)
def test_pushpull_sums_what_the_dense_arrays_sum_up_to(rank, size, gather, store):
    for seed, dtype in enumerate(["float32", "float64", "float16", "int32", "float32", "float32"]):
        rng = np.random.RandomState(100 * seed + rank)
        shape = [(50, 3), (9, 2, 2), (400, 1)][seed % 3]
        rows = np.flatnonzero(rng.rand(shape[0]) < [0.2, 0.0, 1.0][(seed + rank) % 3])
        mine = _row_sparse([], shape=shape, dtype=dtype)
        if len(rows):
            values = (8 * rng.randn(len(rows), *shape[1:])).astype(dtype)
            mine = mx.nd.sparse.row_sparse_array((values, rows), shape=shape, dtype=dtype)
        expected = mine.tostype("default")
        store.pushpull("dense", expected)
        out = _row_sparse([0], shape=shape, dtype=dtype)
        store.pushpull("sparse", mine, out=out)
        np.testing.assert_array_equal(out.asnumpy(), expected.asnumpy())
        assert _held(out) == sorted({row for of_rank in gather(rows.tolist()) for row in of_rank})
        assert _held(mine) == rows.tolist()
        dense = mx.nd.ones(shape, dtype=dtype)
        store.pushpull("into a dense array", mine, out=dense)
        np.testing.assert_array_equal(dense.asnumpy(), expected.asnumpy())
        store.pushpull("in place", mine)
        np.testing.assert_array_equal(mine.asnumpy(), expected.asnumpy())


@pytest.mark.ranks(2)
def test_devices_are_summed_and_all_get_the_result(rank, store):
    devices = [mx.cpu(0), mx.cpu(1)]
    values = [_row_sparse([rank, 3 + i], 10**i, ctx=ctx) for i, ctx in enumerate(devices)]
    outs = [_row_sparse([], ctx=ctx) for ctx in devices]
    store.pushpull("k", values, out=outs)
    for out, ctx in zip(outs, devices):
        assert _column(out) == [11, 11, 0, 2, 20, 0] and out.context == ctx


@pytest.mark.ranks(2)
def test_lists_of_keys_may_mix_kinds(rank, store):
    first, second, third = _row_sparse([rank]), mx.nd.ones((2, 2)), _row_sparse([5])
    store.pushpull(["a", "b", 3], [first, second, third])
    assert (_column(first), _column(second), _column(third)) == ([1, 1, 0, 0, 0, 0], [2, 2], [0, 0, 0, 0, 0, 2])


@pytest.mark.ranks(2)
def test_a_row_sparse_value_is_pushed_and_its_rows_are_pulled(rank, store):
    store.init("table", _row_sparse([1, 2], rank + 5))
    out = _row_sparse([])
    store.row_sparse_pull("table", out=out, row_ids=mx.nd.array([2, 0, 2]))
    assert _held(out) == [0, 2] and _column(out) == [0, 0, 5, 0, 0, 0]
    store.push("table", _row_sparse([rank, 4], rank + 1))
    store.row_sparse_pull("table", out=out, row_ids=mx.nd.array([0, 1, 2, 4]))
    assert _column(out) == [1, 2, 0, 0, 3, 0]
    dense = mx.nd.ones(_SHAPE)
    store.pull("table", out=dense)
    assert _column(dense) == [1, 2, 0, 0, 3, 0]
    store.pull("table", out=out, ignore_sparse=False)
    assert _column(out) == [1, 2, 0, 0, 3, 0]


@pytest.mark.ranks(2)
def test_broadcast_of_a_row_sparse_array(rank, store):
    value, out, dense = _row_sparse([1 + rank], rank + 5), _row_sparse([0]), mx.nd.zeros(_SHAPE)
    store.broadcast("table", value, out=[out, dense])
    assert _column(out) == _column(dense) == [0, 5, 0, 0, 0, 0]
    assert _held(value) == [1 + rank]
    rows = _row_sparse([])
    store.row_sparse_pull("table", out=rows, row_ids=mx.nd.array([1]))
    assert _held(rows) == [1] and _column(rows) == [0, 5, 0, 0, 0, 0]
    store.push("table", _row_sparse([3]))
    assert _column(out) == [0, 5, 0, 0, 0, 0]  # the caller's array is left alone
    store.pull("table", out=dense)
    assert _column(dense) == [0, 0, 0, 2, 0, 0]


@pytest.mark.ranks(2)
def test_process_sets_sum_rows_of_their_own(rank):
    alone = mykv.add_process_set([0]), mykv.add_process_set([1])
    store = mykv.MyKV(process_set=alone[rank])
    value = _row_sparse([rank])
    store.pushpull("k", value)
    assert _column(value) == [float(row == rank) for row in range(6)]
    for one in alone:
        mykv.remove_process_set(one)


# --- an optimizer on the store ----------------------------------------------------------------------------------------

_TABLE = (4000, 16)  # large enough to be divided among the workers
_REFUSED = {"nadam", "sgld"}
_NEITHER_DENSE_NOR_SPARSE = {"ftml"}  # its operator reads memory that nothing has written, also on one worker
_MISCOUNTS = {"test", "lamb"} if IS_2 else {"test"}  # 2.0 counts updates from sparse gradients twice, "test" none
_OPTIMIZERS = {
    name: (name, {}) for name in sorted(set(mx.optimizer.Optimizer.opt_registry) - _REFUSED - _NEITHER_DENSE_NOR_SPARSE)
}
_OPTIMIZERS["sgd, momentum"] = ("sgd", {"momentum": 0.9, "wd": 1e-3})
_OPTIMIZERS["sgd, not lazy"] = ("sgd", {"momentum": 0.9, "wd": 1e-3, "lazy_update": False})
_OPTIMIZERS["adam, not lazy"] = ("adam", {"lazy_update": False})
_OPTIMIZERS["nag, momentum"] = ("nag", {"momentum": 0.9, "wd": 1e-3})


def _gradient(step: int, rank: int):
    """Some rows, other ones on each rank and in each step; in step 2 none on rank 0."""
    rng = np.random.RandomState(100 * step + rank)
    rows = np.flatnonzero(rng.rand(_TABLE[0]) < (0 if (step, rank) == (2, 0) else 0.1))
    if not len(rows):
        return mx.nd.sparse.zeros("row_sparse", _TABLE)
    values = rng.randint(-8, 8, (len(rows), _TABLE[1])).astype("float32") / 4  # sums are exact
    return mx.nd.sparse.row_sparse_array((values, rows), shape=_TABLE)


def _start():
    return mx.nd.array(np.random.RandomState(5).uniform(-1, 1, _TABLE).astype("float32"))


def _updated_alone(optimizer, size: int, steps: int) -> np.ndarray:
    updater = mx.optimizer.get_updater(optimizer)
    weight = _start()
    for step in range(steps):
        total = mx.nd.sparse.zeros("row_sparse", _TABLE)
        mx.nd.add_n(*[_gradient(step, rank) for rank in range(size)]).tostype("row_sparse").copyto(total)
        updater(0, total, weight)
    return weight.asnumpy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_the_optimizer_on_the_store_updates_as_one_process_does(rank, size, gather, name):
    kind, arguments = _OPTIMIZERS[name]
    store = mx.kv.create("mykv")
    store.set_optimizer(mx.optimizer.create(kind, **arguments))
    store.init(0, _start())
    for step in range(4):
        store.push(0, _gradient(step, rank))
    weight = mx.nd.empty(_TABLE)
    store.pull(0, out=weight)
    expected = _updated_alone(mx.optimizer.create(kind, **arguments), size, 4)
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-6, atol=1e-6)
    assert len(set(gather(weight.asnumpy().tobytes()))) == 1
    optimizer = store._updater.optimizer
    if name not in _MISCOUNTS:
        assert optimizer._index_update_count[0] == optimizer.num_update == 4


@pytest.mark.ranks(2)
def test_each_worker_keeps_the_states_of_its_rows_only(rank, store):
    store.set_optimizer(mx.optimizer.create("adam"))
    store.init(0, _start())
    store.push(0, _gradient(0, rank))
    mean, variance = store._updater.states[0]
    assert mean.size == variance.size == _TABLE[0] * _TABLE[1] // 2


@pytest.mark.ranks(2)
def test_pushpull_gives_the_new_weight_to_all_devices(rank, store):
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    devices = [mx.cpu(0), mx.cpu(1)]
    outs = [mx.nd.zeros(_SHAPE, ctx=ctx) for ctx in devices]
    store.broadcast("table", mx.nd.ones(_SHAPE), out=outs)
    store.pushpull("table", [_row_sparse([rank], ctx=ctx) for ctx in devices], out=outs)
    for out in outs:
        assert _column(out) == [-1, -1, 1, 1, 1, 1]
    rows = _row_sparse([])
    store.row_sparse_pull("table", out=rows, row_ids=mx.nd.array([1, 4]))
    assert _column(rows) == [0, -1, 0, 0, 1, 0]


@pytest.mark.ranks(2)
def test_keys_with_dense_and_with_sparse_gradients(rank, gather, store):
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    store.init(["table", "bias"], [_start(), mx.nd.zeros((5,))])
    before = _start().asnumpy()
    for _ in range(2):
        store.push(["bias", "table"], [mx.nd.ones((5,)), _row_sparse([7 + 3000 * rank], shape=_TABLE)])
    table, bias = mx.nd.empty(_TABLE), mx.nd.empty((5,))
    store.pull(["table", "bias"], out=[table, bias])
    changed = table.asnumpy() - before
    assert np.flatnonzero(changed.any(axis=1)).tolist() == [7, 3007]
    np.testing.assert_allclose(changed[[7, 3007]], -2, rtol=1e-6)
    assert bias.asnumpy().tolist() == [-4] * 5


@pytest.mark.ranks(2)
def test_an_update_that_one_rank_refuses_is_an_error_on_both_and_the_next_one_works(rank, gather, store):
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    store.init(["table", "other"], [mx.nd.zeros(_SHAPE), mx.nd.zeros(_SHAPE)])
    for bad in (_row_sparse([1, 1]), _row_sparse([1], shape=(6, 3)), mx.nd.ones(_SHAPE).tostype("csr")):
        with pytest.raises(ValueError if rank == 1 else MXNetError, match="table|'table'"):
            store.push(["table", "other"], [bad if rank == 1 else _row_sparse([1]), _row_sparse([2])])
    out = mx.nd.ones(_SHAPE)
    store.push(["table", "other"], [_row_sparse([1]), _row_sparse([2])])
    store.pull("table", out=out)
    assert _column(out) == [0, -2, 0, 0, 0, 0]
    store.pull("other", out=out)
    assert _column(out) == [0, 0, -2, 0, 0, 0]


@pytest.mark.ranks(2)
def test_a_gradient_that_is_dense_on_the_other_rank_is_an_error_on_both_and_the_next_one_works(rank, gather, store):
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    store.init("table", mx.nd.zeros(_SHAPE))
    out = mx.nd.ones(_SHAPE)
    with pytest.raises(MXNetError, match="table"):
        store.push("table", _row_sparse([1]) if rank else mx.nd.ones(_SHAPE))
        store.pull("table", out=out)
        out.wait_to_read()
    clear_errors()
    gather("both have failed")
    store = mx.kv.create("mykv")
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    store.init("table", mx.nd.zeros(_SHAPE))
    store.push("table", _row_sparse([1]))
    store.pull("table", out=out)
    assert _column(out) == [0, -2, 0, 0, 0, 0]


@pytest.mark.ranks(2)
def test_row_sparse_values_of_the_caller_are_updated(rank, store):
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    weight = _row_sparse([0, 1])
    store.broadcast("table", weight)
    store.pushpull("table", _row_sparse([1, 4]), out=weight)
    assert _column(weight) == [1, -1, 0, 0, -2, 0]


@pytest.mark.ranks(2)
def test_rows_that_are_divided_are_an_error_on_both(rank, store):
    """Rows of more than 64 KiB, too few to be divided among the workers whole."""
    store.set_optimizer(mx.optimizer.create("sgd"))
    store.init("table", mx.nd.zeros((3, 50000)))
    with pytest.raises(ValueError, match="table.*long rows"):
        store.push("table", _row_sparse([1], shape=(3, 50000)))


@pytest.mark.ranks(2)
def test_an_optimizer_that_raises_on_its_owner_is_an_error_on_both_and_the_next_update_works(rank, gather, store):
    class Fails(mx.optimizer.SGD):
        fails = True

        def update_multi_precision(self, index, weight, grad, state):
            if self.fails:
                raise ArithmeticError("this rank does not update")
            super().update_multi_precision(index, weight, grad, state)

    optimizer = Fails(learning_rate=1.0)
    store.set_optimizer(optimizer)
    store.init(["table", "other"], [mx.nd.zeros(_SHAPE), mx.nd.zeros(_SHAPE)])
    out = mx.nd.ones(_SHAPE)
    with pytest.raises((ArithmeticError, MXNetError), match="does not update"):
        store.push(["table", "other"], [_row_sparse([1]), _row_sparse([2])])
        store.pull("table", out=out)
        out.wait_to_read()
    clear_errors()
    gather("both have failed")
    optimizer.fails = False
    store.init(["table", "other"], [mx.nd.zeros(_SHAPE), mx.nd.zeros(_SHAPE)])
    store.push(["table", "other"], [_row_sparse([1]), _row_sparse([2])])
    for key, row in (("table", 1), ("other", 2)):
        store.pull(key, out=out)
        assert _column(out) == [-2.0 * (number == row) for number in range(6)]


@pytest.mark.skipif(IS_2, reason="there AdaGrad takes any weight decay")
@pytest.mark.ranks(2)
def test_an_operator_that_refuses_the_gradient_is_an_error_on_both(rank, gather, store):
    store.set_optimizer(mx.optimizer.create("adagrad", wd=0.1))
    store.init("table", mx.nd.zeros(_SHAPE))
    out = mx.nd.ones(_SHAPE)
    with pytest.raises(MXNetError):
        store.push("table", _row_sparse([1]))
        store.pull("table", out=out)
        out.wait_to_read()
    clear_errors()
    gather("both have failed")


# --- errors -----------------------------------------------------------------------------------------------------------

_WRONG = {
    "a row twice": lambda: _row_sparse([1, 1]),
    "a row beyond the last": lambda: _row_sparse([1, 6]),
    "csr": lambda: mx.nd.ones(_SHAPE).tostype("csr"),
    "kinds mixed": lambda: [_row_sparse([1]), mx.nd.ones(_SHAPE)],
    "an empty list": lambda: [],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", _WRONG)
def test_bad_values_are_an_error_on_both_and_the_key_works_again(rank, store, what):
    good = _row_sparse([0])
    with pytest.raises(ValueError if rank == 1 else MXNetError) as failure:
        store.pushpull("table", _WRONG[what]() if rank == 1 else good)
    assert "table" in str(failure.value)
    store.pushpull("table", good)
    assert _column(good) == [2, 0, 0, 0, 0, 0]


@pytest.mark.ranks(2)
def test_a_bad_value_in_a_list_of_keys_lets_no_key_wait(rank, store):
    values = [_row_sparse([0]), _row_sparse([1, 1] if rank == 1 else [1]), _row_sparse([2]), mx.nd.ones((2,))]
    with pytest.raises((ValueError, MXNetError), match="key 'b'"):
        store.pushpull(["a", "b", "c", "d"], values)
        values[3].wait_to_read()
    assert _column(values[0]) == [2, 0, 0, 0, 0, 0]
    clear_errors()
    good = _row_sparse([3]), mx.nd.ones((2,))
    store.pushpull(["c", "d"], list(good))
    assert _column(good[0]) == [0, 0, 0, 2, 0, 0] and good[1].asnumpy().tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_a_value_that_is_dense_on_the_other_rank_is_an_error_on_both(rank, store):
    value = _row_sparse([0]) if rank else mx.nd.ones(_SHAPE)
    with pytest.raises(MXNetError, match="table") as failure:
        store.pushpull("table", value)
        value.wait_to_read()
    assert "row_sparse" in str(failure.value)
    clear_errors()


@pytest.mark.ranks(2)
def test_other_shapes_on_the_ranks_are_an_error_on_both(rank, store):
    with pytest.raises(MXNetError) as failure:
        store.pushpull("table", _row_sparse([0], shape=(6 + rank, 2)))
    for word in ("table", "(6, 2)", "(7, 2)"):
        assert word in str(failure.value)


@pytest.mark.ranks(2)
def test_a_value_that_carries_an_error_reaches_the_other_rank(rank, store):
    value = _row_sparse([0])
    if rank == 1:
        mx.nd.random.normal(0, -1, _SHAPE).tostype("row_sparse").copyto(value)
    with pytest.raises(MXNetError, match="rank 1" if rank == 0 else ""):
        store.pushpull("table", value)
    clear_errors()


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")
@pytest.mark.parametrize("kvstore", ["object", "mykv"])
@pytest.mark.parametrize("values", ["default", "row_sparse"])
def test_stock_trainer_with_sparse_parameters_is_an_error_that_names_distributed_trainer(store, kvstore, values):
    net = gluon.nn.Embedding(6, 2, sparse_grad=True)
    if values == "row_sparse":
        net = gluon.contrib.nn.SparseEmbedding(6, 2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store if kvstore == "object" else kvstore)
    with pytest.raises(ValueError, match="DistributedTrainer"):
        with autograd.record():
            net(mx.nd.array([1, 2])).sum().backward()
        trainer.step(1)

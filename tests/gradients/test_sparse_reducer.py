"""row_sparse gradients and values: sums that equal the dense ones, and training on them. MXNet 1.9 only."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, clear_errors, mx
from kvstore_plugin.collectives import row_sparse as sparse
from kvstore_plugin.world import process
from mxnet import autograd, gluon
from mxnet.gluon import nn

pytestmark = pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")

_SGD = ("sgd", {"learning_rate": 0.1})
_VOCABULARY, _WIDTH = 30, 4
_BATCH, _WORDS = 4, 5
_OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "sgd, momentum": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "sgd, not lazy": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3, "lazy_update": False},
    "adam": {"learning_rate": 0.01},
    "adagrad": {"learning_rate": 0.1},
    "ftrl": {"learning_rate": 0.1},  # has no kernel for sparse gradients of dense weights, and takes them as dense ones
}


def _row_sparse(shape, indices, values, dtype="float32", ctx=None):
    ctx = ctx or mx.cpu()
    if not len(indices):
        return mx.nd.sparse.zeros("row_sparse", shape, ctx=ctx, dtype=dtype)
    values = np.asarray(values, dtype).reshape(len(indices), *shape[1:])
    return mx.nd.sparse.row_sparse_array((values, np.asarray(indices)), shape=shape, ctx=ctx, dtype=dtype)


def _held(array) -> list[int]:
    """Numbers of the rows that an array holds."""
    return array.indices.asnumpy().tolist()


def _rows_of_case(rng, case: str, rank: int, count: int) -> np.ndarray:
    """Ascending numbers of rows; how those of the ranks relate is what a case is about."""
    if case == "none on any" or (case == "none on rank 0" and rank == 0):
        return np.empty(0, int)
    if case == "all":
        return np.arange(count)
    if case == "the same":
        return np.arange(count)[::3]
    if case == "disjoint":
        return np.arange(count)[rank::4]
    return np.flatnonzero(rng.rand(count) < rng.rand())


_CASES = ["random", "disjoint", "the same", "all", "none on rank 0", "none on any"]


class _Words(gluon.Block):
    """The mean of the vectors of a sentence's words, and a Dense layer on it."""

    def __init__(self, kind: str = "sparse gradients", ctx=None, vocabulary: int = _VOCABULARY):
        super().__init__()
        with self.name_scope():
            if kind == "sparse values":
                self.embedding = gluon.contrib.nn.SparseEmbedding(vocabulary, _WIDTH)
            else:
                self.embedding = nn.Embedding(vocabulary, _WIDTH, sparse_grad=kind == "sparse gradients")
            self.dense = nn.Dense(2, in_units=_WIDTH)
        self.initialize(ctx=ctx)

    def forward(self, words):
        return self.dense(self.embedding(words).mean(axis=1))


def _words(seed: int, kind: str = "sparse gradients", ctx=None, vocabulary: int = _VOCABULARY) -> _Words:
    """A network with values drawn by numpy from `seed`."""
    net = _Words(kind, ctx, vocabulary)
    rng = np.random.RandomState(seed)
    for parameter in (net.embedding.weight, net.dense.weight, net.dense.bias):
        values = mx.nd.array(rng.uniform(-0.5, 0.5, parameter.shape))
        for array in parameter._data:
            values.tostype(array.stype).copyto(array)
    return net


def _values(net) -> list[np.ndarray]:
    return [parameter._data[0].asnumpy() for parameter in net.collect_params().values()]


def _sentences(step: int, rank: int) -> tuple:
    rng = np.random.RandomState(1000 * step + rank)
    return rng.randint(0, _VOCABULARY, (_BATCH, _WORDS)), rng.randn(_BATCH, 2)


def _backward(net, words, targets, ctx=None) -> None:
    with autograd.record():
        loss = ((net(mx.nd.array(words, ctx=ctx)) - mx.nd.array(targets, ctx=ctx)) ** 2).sum()
    loss.backward()


def _train(net, trainer, batches) -> list[np.ndarray]:
    for words, targets in batches:
        _backward(net, words, targets)
        trainer.step(len(words))
    return _values(net)


def _optimizer(name: str):
    return mx.optimizer.create(name.partition(",")[0], **_OPTIMIZERS[name])


# --- sums -------------------------------------------------------------------------------------------------------------


def _parameters_with_gradients(rng, rank, case, dtype, devices):
    """Parameters of several shapes, each with a row_sparse gradient and its dense copies on some devices."""
    made = []
    for number, shape in enumerate([(40, 3), (7, 2, 5), (1000, 1), (1, 4)]):
        contexts = [mx.cpu(i) for i in range(devices)]
        parameter = gluon.Parameter(f"p{number}", shape=shape, dtype=dtype, grad_stype="row_sparse")
        parameter.initialize(ctx=contexts)
        copies = []
        for ctx in contexts:
            rows = _rows_of_case(rng, case, rank, shape[0])
            values = rng.randn(len(rows), *shape[1:])
            gradient = _row_sparse(shape, rows, values, dtype, ctx)
            gradient.copyto(parameter.grad(ctx))
            copies.append(gradient.tostype("default"))
        made.append((parameter, copies))
    return made


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", _CASES)
def test_means_have_the_bits_of_the_dense_ones_and_the_rows_that_occur(rank, size, gather, case):
    for seed, (dtype, devices) in enumerate([("float32", 1), ("float64", 1), ("float16", 1), ("float32", 2)]):
        rng = np.random.RandomState(1000 * seed + rank)
        made = _parameters_with_gradients(rng, rank, case, dtype, devices)
        own = [sorted({row for gradient in parameter.list_grad() for row in _held(gradient)}) for parameter, _ in made]
        rows_of_ranks = gather(own)
        trainer = mykv.DistributedTrainer([parameter for parameter, _ in made], *_SGD)
        trainer.allreduce_grads()
        for number, (parameter, copies) in enumerate(made):
            store = mx.kv.create("mykv")
            store.pushpull("dense", copies)
            union = sorted({row for of_rank in rows_of_ranks for row in of_rank[number]})
            for gradient, total in zip(parameter.list_grad(), copies):
                assert _held(gradient) == union, (dtype, devices)
                expected = (total.asnumpy() * np.dtype(dtype).type(1 / size)) if size & (size - 1) == 0 else None
                if expected is not None:  # a product with a power of two is exact
                    np.testing.assert_array_equal(gradient.asnumpy(), expected)
                else:
                    tolerance = 1e-2 if dtype == "float16" else 1e-6
                    np.testing.assert_allclose(gradient.asnumpy(), total.asnumpy() / size, rtol=tolerance, atol=1e-6)
        bits = b"".join(parameter.list_grad()[0].asnumpy().tobytes() for parameter, _ in made)
        assert len(set(gather(bits))) == 1


@pytest.mark.ranks(2)
def test_sum_in_place_of_the_mean(rank, size):
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse")
    parameter.initialize()
    trainer = mykv.DistributedTrainer([parameter], *_SGD, reduce_method="sum")
    _row_sparse((5, 2), [rank, 4], [[1, 1], [2, 2]]).copyto(parameter.grad())
    trainer.allreduce_grads()
    np.testing.assert_array_equal(parameter.grad().asnumpy()[:, 0], [1, 1, 0, 0, 4])


@pytest.mark.ranks(2)
def test_rows_in_any_order_are_summed(rank):
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse")
    parameter.initialize()
    trainer = mykv.DistributedTrainer([parameter], *_SGD, reduce_method="sum")
    _row_sparse((5, 2), [3, 0, 1] if rank else [4, 1], [[1, 1], [2, 2], [3, 3]][: 3 if rank else 2]).copyto(
        parameter.grad()
    )
    trainer.allreduce_grads()
    np.testing.assert_array_equal(parameter.grad().asnumpy()[:, 0], [2, 5, 0, 1, 1])
    assert _held(parameter.grad()) == [0, 1, 3, 4]


@pytest.mark.ranks(2)
def test_workers_with_two_devices(rank):
    devices = [mx.cpu(0), mx.cpu(1)]
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse")
    parameter.initialize(ctx=devices)
    trainer = mykv.DistributedTrainer([parameter], *_SGD, reduce_method="sum")
    for rows in ([0], [0, 3], [1, 2, 3, 4], [2]):
        for ctx in devices:
            _row_sparse((5, 2), rows, np.ones((len(rows), 2)), ctx=ctx).copyto(parameter.grad(ctx))
        trainer.allreduce_grads()
        for gradient in parameter.list_grad():
            assert gradient.asnumpy()[:, 1].tolist() == [4.0 * (row in rows) for row in range(5)]


@pytest.mark.ranks(2)
def test_gradients_of_several_dtypes_that_grow_from_step_to_step(rank, size):
    params = [
        gluon.Parameter(f"p{i}", shape=(500, 3), dtype=dtype, grad_stype="row_sparse")
        for i, dtype in enumerate(["float32", "float64", "float32"])
    ]
    for parameter in params:
        parameter.initialize()
    trainer = mykv.DistributedTrainer(params, *_SGD, reduce_method="sum")
    for count in (0, 1, 7, 200, 3, 500):
        for number, parameter in enumerate(params):
            rows = np.arange(count)[:: number + 1]
            _row_sparse((500, 3), rows, np.full((len(rows), 3), number + rank), parameter.dtype).copyto(
                parameter.grad()
            )
        trainer.allreduce_grads()
        for number, parameter in enumerate(params):
            expected = np.zeros(500)
            expected[: count : number + 1] = 2 * number + 1
            np.testing.assert_array_equal(parameter.grad().asnumpy()[:, 2], expected)


@pytest.mark.ranks(2)
def test_a_huge_matrix_is_summed_by_its_rows(rank, size):
    """8 GB as a dense array: nothing but the rows is ever made."""
    mykv.init()
    shape = (2 * 10**7, 100)
    array = _row_sparse(shape, [7, 10**7 + rank], np.full((2, 100), rank + 1.0))
    one = sparse.contribution([array], "gradient")
    sendings = sparse.turns(mykv.global_process_set, "huge", [one])
    rows = sparse.allreduce(sendings, [one], np.full((size, 1), 2))[0]
    sparse.assign(array, rows)
    assert _held(array) == [7, 10**7, 10**7 + 1]
    np.testing.assert_array_equal(array.data.asnumpy()[:, 99], [3, 1, 2])


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("kind", ["sparse gradients", "sparse values"])
def test_workers_train_as_one_process_with_all_their_batches(rank, size, gather, kind, optimizer):
    steps = 5
    net = _words(seed=rank, kind=kind)
    trainer = mykv.DistributedTrainer(net.collect_params(), _optimizer(optimizer))
    values = _train(net, trainer, [_sentences(step, rank) for step in range(steps)])
    assert len({b"".join(array.tobytes() for array in one) for one in gather(values)}) == 1

    alone = _words(seed=0, kind=kind)
    batches = [[_sentences(step, worker) for worker in range(size)] for step in range(steps)]
    whole = [tuple(np.concatenate(parts) for parts in zip(*of_step)) for of_step in batches]
    store = "local" if kind == "sparse values" else None  # MXNet wants one there
    _train(alone, gluon.Trainer(alone.collect_params(), _optimizer(optimizer), kvstore=store), whole)
    for one, parameter in zip(values, alone.collect_params().values()):
        other = parameter._reduce().asnumpy()
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(3, long=(2,))
def test_training_has_the_bits_of_that_with_dense_gradients(rank):
    """Without momentum and weight decay, which leave rows alone that do not occur if gradients are sparse."""
    results = []
    for kind in ("sparse gradients", "dense gradients", "sparse values"):
        net = _words(seed=rank, kind=kind)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
        results.append(_train(net, trainer, [_sentences(step, rank) for step in range(4)]))
    for sparse_one, dense_one, third in zip(*results):
        np.testing.assert_array_equal(sparse_one, dense_one)
        np.testing.assert_array_equal(third, dense_one)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_training_between_hosts_equals_that_with_dense_gradients(rank, gather, compression):
    results = []
    for kind in ("sparse gradients", "dense gradients"):
        net = _words(seed=rank, kind=kind)
        how = getattr(mykv.Compression, compression)
        trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, compression=how)
        results.append(_train(net, trainer, [_sentences(step, rank) for step in range(3)]))
    # Where an element is rounded to 16 bits depends on its place in what travels.
    tolerance = 0.0 if compression == "none" else 1e-2
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(results[0])}) == 1


@pytest.mark.ranks(2)
def test_rows_that_no_worker_has_used_keep_their_bits(rank):
    net = _words(seed=0)
    before = net.embedding.weight.data().asnumpy()
    trainer = mykv.DistributedTrainer(net.collect_params(), _optimizer("sgd, momentum"))
    for _ in range(3):
        _backward(net, np.full((_BATCH, _WORDS), 2 + rank), np.zeros((_BATCH, 2)))
        trainer.step(_BATCH)
    changed = np.flatnonzero((net.embedding.weight.data().asnumpy() != before).any(axis=1))
    assert changed.tolist() == [2, 3]


@pytest.mark.ranks(2)
def test_several_devices_of_a_process(rank, size, gather):
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = _words(seed=rank, ctx=contexts)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, reduce_method="sum")
    for step in range(3):
        for number, ctx in enumerate(contexts):
            _backward(net, *_sentences(step, 2 * rank + number), ctx=ctx)
        trainer.step(2 * size * _BATCH)
    alone = _words(seed=0)
    batches = [[_sentences(step, worker) for worker in range(2 * size)] for step in range(3)]
    whole = [tuple(np.concatenate(parts) for parts in zip(*of_step)) for of_step in batches]
    expected = _train(alone, gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None), whole)
    for parameter, other in zip(net.collect_params().values(), expected):
        for array in parameter.list_data():
            np.testing.assert_allclose(array.asnumpy(), other, rtol=1e-5, atol=1e-6)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(2)
def test_a_parameter_that_one_worker_has_not_used(rank, gather):
    """With ignore_stale_grad the worker contributes no rows; what nobody has used is left alone."""
    net, unused = _words(seed=0), _words(seed=1)
    params = [net.embedding.weight, unused.embedding.weight]
    trainer = mykv.DistributedTrainer(params, _optimizer("sgd, momentum"))
    before = [parameter.data().asnumpy() for parameter in params]
    rows = sorted(set(_sentences(0, 0)[0].flat))
    for step in range(2):
        if rank == 0:
            _backward(net, *_sentences(0, 0))
        trainer.step(_BATCH, ignore_stale_grad=True)
        assert _held(net.embedding.weight.grad()) == rows, step
    after = [parameter.data().asnumpy() for parameter in params]
    assert np.flatnonzero((after[0] != before[0]).any(axis=1)).tolist() == rows
    np.testing.assert_array_equal(after[1], before[1])
    assert len({array.tobytes() for array in gather(after[0])}) == 1


@pytest.mark.ranks(2)
def test_freshness_is_shared_when_the_update_is_separate(rank, gather):
    net = _words(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    if rank == 0:
        _backward(net, *_sentences(0, 0))
    trainer.allreduce_grads()
    trainer.update(_BATCH, ignore_stale_grad=True)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1
    assert (_values(net)[0] != _values(_words(seed=0))[0]).any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_in_join_who_has_ended_contributes_no_rows(rank, gather, on_store):
    net = _words(seed=0)
    before = net.embedding.weight.data().asnumpy()
    trainer = mykv.DistributedTrainer(
        net.collect_params(), _optimizer("sgd, momentum"), update_on_kvstore=on_store, reduce_method="sum"
    )
    with mykv.join(trainer):
        for step in range(1 + 2 * rank):
            _backward(net, np.full((_BATCH, _WORDS), 10 * rank + step), np.zeros((_BATCH, 2)))
            trainer.step(_BATCH)
    changed = np.flatnonzero((net.embedding.weight.data().asnumpy() != before).any(axis=1))
    assert changed.tolist() == [0, 10, 11, 12]
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(3)
def test_process_sets_have_sums_of_their_own(rank, gather):
    members = mykv.add_process_set([0, 2])
    everywhere, local = (gluon.Parameter(name, shape=(6, 2), grad_stype="row_sparse") for name in ("e", "l"))
    shared = gluon.Parameter("s", shape=(6, 2), grad_stype="row_sparse")
    params = {"everywhere": everywhere, "shared": shared, "local": local}
    for parameter in params.values():
        parameter.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        for ctx in (mx.cpu(0), mx.cpu(1)):
            _row_sparse((6, 2), [rank, 5], np.ones((2, 2)), ctx=ctx).copyto(parameter.grad(ctx))
    trainer = mykv.DistributedTrainer(
        params, *_SGD, reduce_method="sum", parameter_process_sets={"shared": members, "local": None}
    )
    trainer.allreduce_grads()
    in_shared = [2, 0, 2, 0, 0, 4] if rank != 1 else [0, 2, 0, 0, 0, 2]
    in_local = [2 * (row == rank) + 2 * (row == 5) for row in range(6)]
    for parameter, expected in ((everywhere, [2, 2, 2, 0, 0, 6]), (shared, in_shared), (local, in_local)):
        for gradient in parameter.list_grad():
            np.testing.assert_array_equal(gradient.asnumpy()[:, 1], expected)
    mykv.remove_process_set(members)


@pytest.mark.ranks(2)
def test_gradients_can_be_clipped_before_the_update(rank, gather):
    net = _words(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, *_sentences(0, rank))
    trainer.allreduce_grads()
    for parameter in net.collect_params().values():
        gradient = parameter.grad()
        mx.nd.clip(gradient, -0.01, 0.01).tostype(gradient.stype).copyto(gradient)
    trainer.update(1)
    moved = np.abs(_values(net)[0] - _values(_words(seed=0))[0]).max()
    assert 0 < moved <= 0.001001
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("optimizer", ["sgd", "sgd, momentum", "sgd, not lazy", "adam", "adagrad"])
def test_updates_on_the_store_have_the_bits_of_those_on_each_worker(rank, gather, optimizer):
    results = []
    for on_store in (False, True):
        net = _words(seed=rank, vocabulary=5000)  # large enough to be divided among the workers
        trainer = mykv.DistributedTrainer(net.collect_params(), _optimizer(optimizer), update_on_kvstore=on_store)
        batches = [
            (words + 1000 * rank * (step % 3), targets)
            for step in range(4)
            for words, targets in [_sentences(step, rank)]
        ]
        results.append(_train(net, trainer, batches))
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(results[1])}) == 1


@pytest.mark.ranks(2)
def test_updates_on_the_store_with_several_devices_and_unused_parameters(rank, gather):
    contexts = [mx.cpu(0), mx.cpu(1)]
    net, unused = _words(seed=rank, ctx=contexts), _words(seed=1, ctx=contexts)
    params = [*net.collect_params().values(), unused.embedding.weight]
    trainer = mykv.DistributedTrainer(params, *_SGD, update_on_kvstore=True)
    before = unused.embedding.weight.data(contexts[1]).asnumpy()
    for step in range(2):
        for number, ctx in enumerate(contexts[: 2 - rank]):  # rank 1 uses one device only
            _backward(net, *_sentences(step, 2 * rank + number), ctx=ctx)
        trainer.step(_BATCH, ignore_stale_grad=True)
    for parameter in net.collect_params().values():
        one, other = (array.asnumpy() for array in parameter.list_data())
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(unused.embedding.weight.data(contexts[1]).asnumpy(), before)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd, momentum", "adam"])
def test_states_that_the_store_has_saved_are_loaded_on_the_store_and_off_it(rank, gather, tmp_path, optimizer):
    file = gather(str(tmp_path / "trainer.states"))[0]
    batches = [_sentences(step, rank) for step in range(4)]
    batches = [(words + 1000 * ((step + rank) % 4), targets) for step, (words, targets) in enumerate(batches)]
    net = _words(seed=0, vocabulary=5000)
    trainer = mykv.DistributedTrainer(net.collect_params(), _optimizer(optimizer), update_on_kvstore=True)
    between = _train(net, trainer, batches[:2])
    trainer.save_states(file)
    gather("it is written")
    expected = _train(net, trainer, batches[2:])
    for on_store in (True, False):
        other = _words(seed=1, vocabulary=5000)
        for parameter, values in zip(other.collect_params().values(), between):
            parameter.set_data(mx.nd.array(values))
        trainer = mykv.DistributedTrainer(other.collect_params(), _optimizer(optimizer), update_on_kvstore=on_store)
        trainer.load_states(file)
        for one, same in zip(_train(other, trainer, batches[2:]), expected):
            np.testing.assert_array_equal(one, same)


@pytest.mark.ranks(2)
def test_row_sparse_values_are_not_updated_on_the_store(rank):
    net = _words(seed=0, kind="sparse values")
    with pytest.raises(NotImplementedError, match="row_sparse"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, update_on_kvstore=True)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_sparse_values_begin_as_those_of_the_root(rank):
    net = _words(seed=rank, kind="sparse values")
    mykv.DistributedTrainer(net.collect_params(), *_SGD, root_rank=1)
    for one, other in zip(_values(net), _values(_words(seed=1))):
        np.testing.assert_array_equal(one, other)
    assert _held(net.embedding.weight._data[0]) == list(range(_VOCABULARY))


@pytest.mark.ranks(2)
def test_sparse_values_that_are_initialized_later_are_broadcast(rank, gather):
    parameter = gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse")
    parameter.initialize(mx.init.Constant(rank + 1))
    trainer = mykv.DistributedTrainer([parameter], *_SGD)
    parameter.initialize(mx.init.Constant(rank + 3), force_reinit=True)
    assert parameter.row_sparse_data(mx.nd.arange(6)).asnumpy().tolist() == [[3, 3]] * 6
    assert trainer.learning_rate == 0.1


@pytest.mark.ranks(2)
def test_sparse_values_are_saved_and_loaded(rank, tmp_path):
    net = _words(seed=0, kind="sparse values")
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _train(net, trainer, [_sentences(0, rank)])
    file = str(tmp_path / "net.params")
    net.save_parameters(file)
    other = _Words("sparse values")
    other.load_parameters(file)
    for one, loaded in zip(_values(net), _values(other)):
        np.testing.assert_array_equal(one, loaded)


@pytest.mark.ranks(2)
def test_broadcast_period_overwrites_sparse_values(rank):
    net = _words(seed=0, kind="sparse values")
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, broadcast_period=1)
    weight = net.embedding.weight._data[0]
    mx.nd.full(weight.shape, rank + 5).tostype("row_sparse").copyto(weight)
    _backward(net, *_sentences(0, rank))
    trainer.step(_BATCH)
    np.testing.assert_array_equal(weight.asnumpy(), np.full(weight.shape, 5))


@pytest.mark.ranks(2)
def test_rows_of_a_parameter_that_are_asked_for(rank):
    net = _words(seed=0, kind="sparse values")
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    out = mx.nd.sparse.zeros("row_sparse", (_VOCABULARY, _WIDTH))
    trainer._row_sparse_pull(net.embedding.weight, out, mx.nd.array([9, 3, 3]))
    assert _held(out) == [3, 9]
    np.testing.assert_array_equal(out.asnumpy()[[3, 9]], _values(net)[0][[3, 9]])


@pytest.mark.ranks(2)
def test_broadcast_parameters_and_check_in_step_take_sparse_values(rank):
    net = _words(seed=rank, kind="sparse values")
    array = _row_sparse((5, 2), [rank], [[1, 1]])
    with pytest.raises(MXNetError, match="embedding0_weight|parameter 0"):
        mykv.check_in_step(net.collect_params())
    mykv.broadcast_parameters(net.collect_params())
    mykv.broadcast_parameters({"a": array})
    mykv.check_in_step(net.collect_params())
    mykv.check_in_step({"a": array})
    np.testing.assert_array_equal(array.asnumpy()[:, 0], [1, 0, 0, 0, 0])
    for one, other in zip(_values(net), _values(_words(seed=0))):
        np.testing.assert_array_equal(one, other)


# --- errors -----------------------------------------------------------------------------------------------------------


def _steps_again(net, trainer, rank, gather) -> None:
    _backward(net, *_sentences(9, rank))
    trainer.step(_BATCH)
    assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("with_dense", [False, True])
def test_batches_of_other_sizes_are_an_error_on_both_and_the_next_step_works(rank, gather, with_dense):
    net = _words(seed=0)
    params = net.collect_params() if with_dense else [net.embedding.weight]
    trainer = mykv.DistributedTrainer(params, *_SGD)
    _steps_again(net, trainer, rank, gather)
    _backward(net, *_sentences(0, rank))
    with pytest.raises(MXNetError, match=r"rank 0 has .*batch size \d+ \(.*, rank 1 has .*batch size \d+ \("):
        trainer.step(_BATCH + rank)
    clear_errors()
    _steps_again(net, trainer, rank, gather)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("with_dense", [False, True])
@pytest.mark.parametrize("what", ["left out", "refused", "in a barrier"])
def test_an_update_that_one_worker_leaves_out_fails_on_the_other_and_the_next_step_works(
    rank, gather, with_dense, what
):
    """Dense and sparse gradients, and the counts of updates, stay at the same step on all workers."""
    net = _words(seed=0)
    params = net.collect_params() if with_dense else [net.embedding.weight]
    trainer = mykv.DistributedTrainer(params, "adam" if what != "left out" else "sgd", {"learning_rate": 0.1})
    for step in range(2):
        _backward(net, *_sentences(step, rank))
        trainer.allreduce_grads()
        if what == "refused":
            net.embedding.weight.data()._fresh_grad = rank == 0
            with pytest.raises((MXNetError, UserWarning), match="on rank 1 is stale"):
                trainer.update(_BATCH)
                mx.nd.waitall()
        elif rank == 0:
            trainer.update(_BATCH)
            with pytest.raises(
                MXNetError, match="rank 1.*" + ("barrier" if what == "in a barrier" else r"no update\(\)")
            ):
                mx.nd.waitall()
        if what == "in a barrier":
            with pytest.raises(MXNetError, match="rank 1 is in barrier, but rank 0 is in a step"):
                mykv.barrier()
        clear_errors()
        for again in range(2):
            _backward(net, *_sentences(10 * step + again, rank))
            trainer.allreduce_grads()
            trainer.update(_BATCH)
            assert len({b"".join(array.tobytes() for array in one) for one in gather(_values(net))}) == 1


@pytest.mark.ranks(2)
def test_a_gradient_that_carries_an_error_reaches_the_other_worker(rank, gather):
    net = _words(seed=0)
    trainer = mykv.DistributedTrainer([net.embedding.weight], *_SGD)
    _backward(net, *_sentences(0, rank))
    if rank == 1:
        mx.nd.random.normal(0, -1, (2, 2)).tostype("row_sparse")
        failed = mx.nd.random.normal(0, -1, (_VOCABULARY, _WIDTH)).tostype("row_sparse")
        failed.copyto(net.embedding.weight.grad())
    with pytest.raises(MXNetError, match="rank 1" if rank == 0 else "positive"):
        trainer.step(_BATCH)
    clear_errors()
    gather("before the next step")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", ["twice", "beyond"])
def test_rows_that_cannot_be_are_an_error_on_both(rank, gather, wrong):
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse")
    parameter.initialize()
    trainer = mykv.DistributedTrainer({"table": parameter}, *_SGD)
    rows = [1, 2] if rank == 0 else [1, 1] if wrong == "twice" else [1, 7]
    _row_sparse((5, 2), rows, np.ones((2, 2))).copyto(parameter.grad())
    with pytest.raises((ValueError, MXNetError)) as failure:
        trainer.allreduce_grads()
    assert "gradient of table" in str(failure.value)
    assert ("twice" if wrong == "twice" else "from 1 to 7") in str(failure.value)
    _row_sparse((5, 2), [rank], [[2, 2]]).copyto(parameter.grad())
    trainer.allreduce_grads()
    np.testing.assert_array_equal(parameter.grad().asnumpy()[:, 0], [1, 1, 0, 0, 0])


@pytest.mark.ranks(2)
def test_other_shapes_on_the_workers_are_an_error_on_both(rank):
    parameter = gluon.Parameter("p", shape=(5 + rank, 2), grad_stype="row_sparse")
    parameter.initialize()
    trainer = mykv.DistributedTrainer({"table": parameter}, *_SGD, broadcast_period=-1)
    with pytest.raises(MXNetError) as failure:
        trainer.allreduce_grads()
    for word in ("table", "(5, 2)", "(6, 2)"):
        assert word in str(failure.value)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_dense_on_the_other_worker_is_an_error_on_both(rank):
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse" if rank else "default")
    parameter.initialize()
    with pytest.raises((MXNetError, RuntimeError), match="sparse gradients of table"):
        mykv.DistributedTrainer({"table": parameter}, *_SGD)


@pytest.mark.ranks(2)
def test_a_parameter_without_values_on_one_worker_is_an_error_on_both(rank, gather):
    shape = (5 if rank == 0 else 0, 2)
    parameter = gluon.Parameter("p", shape=shape, grad_stype="row_sparse", allow_deferred_init=True)
    parameter.initialize()
    trainer = mykv.DistributedTrainer({"table": parameter}, *_SGD, broadcast_period=-1)
    if rank == 0:
        parameter.list_data()[0]._fresh_grad = True
    with pytest.raises((MXNetError, RuntimeError), match="table.*no values yet on rank 1"):
        trainer.step(1)
    gather("both have failed")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loser", [0, 1])
def test_a_worker_that_leaves_the_first_step_out_before_values_are_there(rank, gather, loser):
    """As with dense gradients: no worker waits for values of the other, and these come in the next forward pass."""
    net = _Words()
    net.embedding.weight._shape, net.embedding.weight._data, net.embedding.weight._grad = (0, _WIDTH), None, None
    mx.random.seed(rank)
    net.embedding.weight.initialize(mx.init.Uniform(0.5))
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for _ in range(2):
        with pytest.raises(MXNetError, match=f"rank {loser} is in barrier, but"):
            if rank != loser:
                _backward(net, *_sentences(0, rank))
                trainer.step(_BATCH)
            mykv.barrier()
        clear_errors()
        if rank != loser:
            with pytest.raises(MXNetError, match=f"rank {loser} is in barrier, but"):
                mykv.barrier()
        mykv.barrier()
    for _ in range(2):
        _steps_again(net, trainer, rank, gather)


@pytest.mark.ranks(2)
def test_a_worker_that_refuses_its_dense_gradients_does_not_let_the_other_wait(rank, gather):
    net = _words(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _steps_again(net, trainer, rank, gather)
    late = gluon.Parameter("late", shape=(3 if rank == 0 else 0,), allow_deferred_init=True)
    late.initialize()
    trainer = mykv.DistributedTrainer({"late": late, "table": net.embedding.weight}, *_SGD)
    _backward(net, *_sentences(0, rank))
    if rank == 0:
        late.data()._fresh_grad = True
    with pytest.raises((MXNetError, RuntimeError), match="late.*no values yet on rank 1"):
        trainer.step(_BATCH)
        mx.nd.waitall()
    clear_errors()


def test_csr_gradients_are_refused():
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="csr")
    with pytest.raises(NotImplementedError, match="csr"):
        mykv.DistributedTrainer({"table": parameter}, *_SGD)


def test_shutdown_is_noticed():
    parameter = gluon.Parameter("p", shape=(5, 2), grad_stype="row_sparse")
    parameter.initialize()
    trainer = mykv.DistributedTrainer([parameter], *_SGD)
    process.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.allreduce_grads()
    mykv.init()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_row_sparse_values_that_begin_as_zeros_are_trained(optimizer, rank, size):
    """MXNet's optimizers update only row_sparse values that hold all their rows; zeros hold none."""

    def train(workers, make_trainer, batch):
        net = gluon.contrib.nn.SparseEmbedding(6, 3, weight_initializer="zeros")
        net.initialize()
        trainer = make_trainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
        for step in range(3):
            with autograd.record():
                loss = sum(((net(mx.nd.array([[step + worker, 3]])) - 1 - worker) ** 2).sum() for worker in workers)
            loss.backward()
            trainer.step(batch)
        return net.weight.row_sparse_data(mx.nd.arange(6)).asnumpy()

    together = train([rank], mykv.DistributedTrainer, 1)
    alone = train(range(size), lambda *arguments: gluon.Trainer(*arguments, kvstore="device"), size)
    np.testing.assert_allclose(together, alone, atol=1e-6)

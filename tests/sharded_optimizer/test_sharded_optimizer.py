"""The optimizer on the store: each worker updates its share, and all get what one process alone would get."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import weakref

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, conv_network, dense_network, mx, value
from kvstore_plugin.sharded_optimizer import traits as optimizer_kinds
from kvstore_plugin.sharded_optimizer.optimizer import StoreOptimizer
from mxnet import autograd, gluon

# One is large enough to be cut for four workers, the others are not.
_SHAPES = [(7,), (220, 200), (3, 5), (64, 65), (1,)]
_REGISTERED = sorted(mx.optimizer.Optimizer.opt_registry)
_WHOLE = ("lars", "lamb", "lans", "groupadagrad", "lbsgd")  # need norms of whole parameters or rows
_DIVIDED = [name for name in _REGISTERED if name not in ("nadam", "sgld")]
# What these take besides the learning rate that all take.
_ARGUMENTS = {
    "sgd": {"momentum": 0.9},
    "ccsgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "signum": {"momentum": 0.9},
    "rmsprop": {"centered": True},
    "lars": {"momentum": 0.9},
}
# Made of several operators, whose roundings MXNet leaves open; all others are the same operators on other elements.
_ROUNDED = 1e-6


def _optimizer(name: str, **more):
    more = {**_ARGUMENTS.get(name, {}), **more}
    if name != "test":
        more.setdefault("learning_rate", 0.05)
        more.setdefault("wd", 0.0 if name == "groupadagrad" else 0.01)
    return mx.optimizer.create(name, rescale_grad=0.25, param_idx2name=dict(enumerate("abcde")), **more)


def _weights(dtype="float32"):
    rng = np.random.RandomState(3)
    return [rng.randn(*shape).astype(dtype) for shape in _SHAPES]


def _gradients(step: int, rank: int, dtype="float32"):
    # Sixteenths, whose sums no order of adding rounds.
    rng = np.random.RandomState(100 * step + rank + 1)
    return [(rng.randint(-40, 41, shape) / 16).astype(dtype) for shape in _SHAPES]


def _keys(optimizer) -> list:
    matrices_only = type(optimizer).__name__ == "GroupAdaGrad"
    return [key for key, shape in enumerate(_SHAPES) if len(shape) == 2 or not matrices_only]


def _alone(optimizer, steps: int, size: int, dtype="float32", between=lambda step, optimizer: None, kind=None):
    """The weights of one process that updates from the summed gradients."""
    updater = mx.optimizer.get_updater(optimizer)
    weights = [array(values, kind) for values in _weights(dtype)]
    for step in range(steps):
        between(step, optimizer)
        for key, weight in enumerate(weights):
            if key not in _keys(optimizer):
                continue
            total = sum(_gradients(step, rank, "float64")[key] for rank in range(size)).astype(dtype)
            updater(key, array(total, kind), weight)
    return [value(weight) for weight in weights]


def _on_the_store(optimizer, steps: int, rank: int, dtype="float32", between=lambda step, optimizer: None, kind=None):
    store = mx.kv.create("mykv")
    store.set_optimizer(optimizer)
    weights = [array(values, kind) for values in _weights(dtype)]
    for key, weight in enumerate(weights):
        store.broadcast(key, weight, out=weight)
    for step in range(steps):
        between(step, optimizer)
        for key, gradient in enumerate(_gradients(step, rank, dtype)):
            if key not in _keys(optimizer):
                continue
            store.pushpull(key, array(gradient, kind), out=weights[key], priority=-key)
    return [value(weight) for weight in weights], store


def _same_on_all(gather, arrays) -> None:
    seen = gather([one.tobytes() for one in arrays])
    assert all(one == seen[0] for one in seen)


def _all_states(state) -> list:
    """The arrays in a state of MXNet's, which may be nested."""
    if state is None:
        return []
    if isinstance(state, (tuple, list)):
        return [one for part in state for one in _all_states(part)]
    return [state]


@pytest.mark.ranks(1)
def test_each_registered_optimizer_is_known(size):
    known = set(optimizer_kinds._ELEMENTWISE) | set(_WHOLE) | set(optimizer_kinds._REFUSED)
    assert set(_REGISTERED) <= known


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [one for one in _REGISTERED if one in optimizer_kinds._ELEMENTWISE])
def test_what_counts_as_elementwise_is(name):
    """A slice that is updated alone gets the bits that it gets within the whole."""
    assert optimizer_kinds.is_elementwise(_optimizer(name))
    whole, parts = mx.optimizer.get_updater(_optimizer(name)), mx.optimizer.get_updater(_optimizer(name))
    weight, pieces = array(_weights()[1].reshape(-1), "nd"), array(_weights()[1].reshape(-1), "nd")
    cuts = [0, 16, 20_000, 20_001, pieces.size]
    for step in range(4):
        gradient = array(_gradients(step, 0)[1].reshape(-1), "nd")
        whole(1, gradient.copy(), weight)  # some change the gradient too
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:])):
            parts.optimizer.idx2name[number] = parts.optimizer.idx2name[1]
            parts(number, gradient[begin:end], pieces[begin:end])
    np.testing.assert_allclose(value(pieces), value(weight), rtol=_ROUNDED, atol=_ROUNDED)


@pytest.mark.ranks(1)
def test_what_works_on_whole_parameters_is_not_cut(size):
    class Mine(mx.optimizer.SGD):
        pass

    assert not optimizer_kinds.is_elementwise(Mine())
    for name in set(_WHOLE) & set(_REGISTERED):
        assert not optimizer_kinds.is_elementwise(_optimizer(name))


@pytest.mark.ranks(1)
def test_a_class_under_a_name_of_mxnets_has_no_traits(monkeypatch):
    """A program may have registered it before it imports mykv."""

    class Mine(mx.optimizer.Adam):
        def update(self, *arguments):
            raise NotImplementedError

    monkeypatch.setitem(mx.optimizer.Optimizer.opt_registry, "adam", Mine)
    spec = importlib.util.spec_from_file_location(f"{optimizer_kinds.__name__}_again", optimizer_kinds.__file__)
    imported_later = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported_later)
    for traits in (optimizer_kinds, imported_later):
        assert not traits.is_elementwise(Mine()) and not traits.leaves_other_rows(Mine())
        assert traits.is_elementwise(mx.optimizer.Adam()) and traits.leaves_other_rows(mx.optimizer.Adam())


_ROW_WISE = """
import numpy as np
if "bool" not in vars(np):
    np.bool = bool
import mxnet as mx

@mx.optimizer.Optimizer.register
class Adam(mx.optimizer.Optimizer):
    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        if isinstance(index, (list, tuple)):
            for one in zip(index, weight, grad, state):
                self.update(*one)
            return
        self._update_count([index])
        rows = grad.asnumpy()
        weight[:] = weight.asnumpy() - 0.1 * rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))

    update_multi_precision = step = update

import kvstore_plugin as mykv
if mx.__version__.startswith("2"):
    mx.npx.set_np()
make = mx.np.array if mx.__version__.startswith("2") else mx.nd.array
mykv.init()
x = np.random.RandomState(0).randn(8, 300).astype("float32")
for kind in ("own", "stock"):
    weights = np.random.RandomState(1).randn(61, 300)
    net = mx.gluon.nn.Dense(61, in_units=300, use_bias=False)
    net.initialize()
    net.weight.set_data(make(weights.astype("float32")))
    if kind == "own":
        trainer = mykv.DistributedTrainer(net.collect_params(), "adam", update_on_kvstore=True)
    else:
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", kvstore="mykv", update_on_kvstore=True)
    for _ in range(2):
        with mx.autograd.record():
            loss = (net(make(x[mykv.rank() :: 2])) ** 2).sum()
        loss.backward()
        trainer.step(8)
        rows = (x @ weights.T).T @ x
        weights = weights - 0.1 * rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))
    print(kind, np.abs(net.weight.data().asnumpy() - weights).max() < 1e-4)
"""


def test_training_by_an_optimizer_that_took_a_name_of_mxnets_before_the_import(mpirun):
    """It needs whole rows, so no row may be cut."""
    result = mpirun(2, _ROW_WISE, timeout=150)
    assert result.stdout.count("own True") == result.stdout.count("stock True") == 2, result.text


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("name", _DIVIDED)
def test_each_optimizer_gives_what_one_process_gives(name, rank, size, gather):
    expected = _alone(_optimizer(name), 5, size)
    got, store = _on_the_store(_optimizer(name), 5, rank)
    _same_on_all(gather, got)
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=_ROUNDED, atol=_ROUNDED)
    if name != "test":  # which does not count
        assert store._updater.optimizer._index_update_count == dict.fromkeys(_keys(store._updater.optimizer), 5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "rmsprop", "ftrl", "ftml", "signum", "lamb"])
def test_operators_give_the_same_bits(name, rank, size):
    expected = _alone(_optimizer(name), 4, size)
    got, _ = _on_the_store(_optimizer(name), 4, rank)
    assert all((one == other).all() for one, other in zip(got, expected))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_schedules_multipliers_clipping_and_changes_on_the_way(name, rank, size, gather):
    def made():
        optimizer = _optimizer(
            name, lr_scheduler=mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1), clip_gradient=0.4
        )
        optimizer.set_lr_mult({"b": 0.5, "c": 0.0})
        optimizer.set_wd_mult({"a": 3.0})
        return optimizer

    def between(step, optimizer):
        if step == 3:  # other batches
            optimizer.rescale_grad = 0.125
        if step == 4:
            optimizer.lr_scheduler = None
            optimizer.set_learning_rate(0.3)

    expected = _alone(made(), 7, size, between=between)
    got, _ = _on_the_store(made(), 7, rank, between=between)
    _same_on_all(gather, got)
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=_ROUNDED, atol=_ROUNDED)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "schedule", "backward", "bytes_"),
    [
        ("sgd", "poly", False, None),
        ("sgd", "factor", True, None),
        ("sgd", "poly", True, 40),
        ("adam", "factor", True, None),
        ("lamb", "poly", True, None),
    ],
)
def test_parameters_that_steps_leave_out_have_the_rate_of_one_process(name, schedule, backward, bytes_, rank, size):
    """Some optimizers count several parameters before they ask the schedule for their rates.

    MXNet's FactorScheduler never goes back to an earlier rate.
    """
    data = np.random.RandomState(0).randn(12, 4).astype("float32")

    def trained(is_alone):
        layers = [gluon.nn.Dense(4, in_units=4, weight_initializer=mx.init.Constant(0.1 * k)) for k in (1, 2)]
        for one in layers:
            one.initialize()
        numbered = zip((1, 0) if backward else (0, 1), layers)  # trainers sort parameters by name
        params = {f"{k} {name}": one for k, layer in numbered for name, one in layer.collect_params().items()}
        rates = {
            "poly": mx.lr_scheduler.PolyScheduler(5, base_lr=0.1, pwr=1),
            "factor": mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.1),
        }
        optimizer = mx.optimizer.create(name, learning_rate=0.1, lr_scheduler=rates[schedule])
        optimizer.aggregate_num = 3 if name in ("sgd", "lamb") else optimizer.aggregate_num
        if is_alone:
            trainer = gluon.Trainer(params, optimizer, kvstore=None)
        else:
            trainer = mykv.DistributedTrainer(params, optimizer, update_on_kvstore=True, bucket_bytes=bytes_)
        own = data if is_alone else data[rank::size]
        for uses_second in (True, False, False, True):
            with autograd.record():
                hidden = layers[0](array(own))
                loss = ((layers[1](hidden) if uses_second else hidden) ** 2).sum()
            loss.backward()
            trainer.step(len(own), ignore_stale_grad=True)
        return [one.data().asnumpy() for one in params.values()]

    for got, right in zip(trained(False), trained(True)):
        np.testing.assert_allclose(got, right, rtol=_ROUNDED, atol=_ROUNDED)


@pytest.mark.ranks(2)
def test_a_scheduler_that_no_other_process_can_unpickle_is_followed(rank, size, gather):
    """Servers of dist_sync get a pickled optimizer, and train on with another one where they cannot unpickle it."""

    class OfThisScript(mx.lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            return 0.2 / num_update

    def made():
        return _optimizer("sgd", lr_scheduler=OfThisScript())

    expected = _alone(made(), 4, size)
    got, _ = _on_the_store(made(), 4, rank)
    _same_on_all(gather, got)
    assert all((one == other).all() for one, other in zip(got, expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_float16_weights_with_a_copy_in_float32(name, rank, size, gather):
    expected = _alone(_optimizer(name, multi_precision=True), 4, size, "float16")
    got, store = _on_the_store(_optimizer(name, multi_precision=True), 4, rank, "float16")
    _same_on_all(gather, got)
    for one, other in zip(got, expected):
        assert one.dtype == np.float16
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    dtypes = {one.dtype for state in store._updater.states.values() for one in _all_states(state)}
    assert np.float32 in dtypes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype, rank, size, gather):
    got, _ = _on_the_store(_optimizer("sgd"), 3, rank, dtype)
    _same_on_all(gather, got)
    expected = _alone(_optimizer("sgd"), 3, size, dtype)
    assert all((one == other).all() for one, other in zip(got, expected))


@pytest.mark.ranks(2)
@pytest.mark.skipif(not IS_2, reason="mx.np weights are those of 2.0's blocks")
def test_weights_of_both_kinds(rank, size, gather):
    nd, _ = _on_the_store(_optimizer("adam"), 3, rank, kind="nd")
    np_, _ = _on_the_store(_optimizer("adam"), 3, rank, kind="np")
    assert all((one == other).all() for one, other in zip(nd, np_))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("name", "most"), [("sgd", 0.55), ("adam", 0.55), ("lamb", 1.0)])
def test_states_are_those_of_the_own_share(name, most, rank, size, gather):
    _, store = _on_the_store(_optimizer(name), 2, rank)
    own = sum(one.size for state in store._updater.states.values() for one in _all_states(state))
    alone = sum(np.prod(shape) for shape in _SHAPES) * (1 if name == "sgd" else 2)
    everyone = gather(own)
    assert sum(everyone) == alone
    assert max(everyone) <= (most * 2 / size if most < 1 else 1) * alone


@pytest.mark.ranks(2)
def test_push_and_pull_update_too(rank, size):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd", wd=0.0))
    weights = _weights()
    store.init([str(key) for key in range(5)], [array(one) for one in weights])
    gradients = _gradients(0, rank)
    store.push([str(key) for key in range(5)], [array(one) for one in gradients])
    out = [array(np.zeros_like(one)) for one in weights]
    store.pull([str(key) for key in range(5)], out=out)
    expected = _alone(_optimizer("sgd", wd=0.0), 1, size)
    assert all((value(one) == other).all() for one, other in zip(out, expected))


@pytest.mark.ranks(2)
def test_several_devices_of_a_key(rank, size, gather):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("adam"))
    devices = [mx.cpu(0), mx.cpu(1)]
    start = _weights()[1]
    weights = [array(start, ctx=device) for device in devices]
    store.broadcast(0, weights[0], out=weights)
    gradients = [array(_gradients(0, 2 * rank + n)[1], ctx=device) for n, device in enumerate(devices)]
    store.pushpull(0, gradients, out=weights)
    updater, expected = mx.optimizer.get_updater(_optimizer("adam")), array(start)
    updater(0, array(sum(_gradients(0, n)[1] for n in range(2 * size)).astype("float32")), expected)
    for weight in weights:
        assert (value(weight) == value(expected)).all()


@pytest.mark.ranks(2)
def test_out_need_not_be_the_weight(rank, size):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd"))
    weight, out = array(_weights()[1]), array(np.zeros(_SHAPES[1], "float32"))
    store.broadcast("w", weight, out=weight)
    for step in range(2):
        store.pushpull("w", array(_gradients(step, rank)[1]), out=out)
    assert (value(out) == value(weight)).all()
    updater, expected = mx.optimizer.get_updater(_optimizer("sgd")), array(_weights()[1])
    for step in range(2):
        updater("w", array(sum(_gradients(step, n)[1] for n in range(size)).astype("float32")), expected)
    assert (value(out) == value(expected)).all()


@pytest.mark.ranks(2)
def test_gradients_are_left_as_they_are(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd"))
    weight, gradient = array(_weights()[1]), array(_gradients(0, rank)[1])
    store.broadcast("w", weight, out=weight)
    store.pushpull("w", gradient, out=weight)
    value(weight)
    assert (value(gradient) == _gradients(0, rank)[1]).all()


@pytest.mark.ranks(2)
def test_the_same_optimizer_again_keeps_the_states(rank):
    store = mx.kv.create("mykv")
    optimizer = _optimizer("sgd")
    store.set_optimizer(optimizer)
    updater = store._updater
    store.set_optimizer(optimizer)
    assert store._updater is updater


@pytest.mark.ranks(2)
def test_another_optimizer_begins_again_as_in_mxnets_store(rank, size, gather, tmp_path):
    def trained(store):
        def push(times):
            for number in range(times):
                store.push("w", array(np.full(5, (1 if store is mxnets else 1 / size) * (number + 1), "float32")))
            out = array(np.zeros(5, "float32"))
            store.pull("w", out=out)
            return value(out).tolist()

        store.init("w", array(np.arange(5, dtype="float32")))
        store.set_optimizer(_optimizer("sgd", momentum=0.9))
        results = [push(2)]
        for kind in ("adam", "adam", "sgd"):
            store.set_optimizer(_optimizer(kind))
            results.append(push(2))
        store._set_updater(lambda key, total, held: held.__iadd__(total))
        results.append(push(1))
        store.set_optimizer(_optimizer("adam"))
        return [*results, push(2)]

    mxnets = mx.kv.create("local")
    store = mx.kv.create("mykv")
    results = trained(store)
    np.testing.assert_allclose(results, trained(mxnets), rtol=1e-6)
    store.save_optimizer_states(str(tmp_path / "states"))
    assert len(set(gather(str(results)))) == 1


@pytest.mark.ranks(2)
def test_another_optimizer_on_one_worker_alone_is_an_error_on_all(rank):
    store = mx.kv.create("mykv")
    store.init("w", array(np.ones(4, "float32")))
    store.set_optimizer(_optimizer("adam"))
    out = array(np.zeros(4, "float32"))
    store.pushpull("w", out, out=out)
    if rank == 1:
        store.set_optimizer(_optimizer("adam"))
    with pytest.raises(
        MXNetError, match=r"rank 0 has set_optimizer\(\) calls: 1, rank 1 has set_optimizer\(\) calls: 2\."
    ):
        store.pushpull("w", out, out=out)
        value(out)
    clear_errors()


@pytest.mark.ranks(2)
def test_a_store_on_which_a_trainer_updates_keeps_its_optimizer(rank):
    store = mx.kv.create("mykv")
    for number in range(2):
        net = dense_network(0)
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=True)
        with autograd.record():
            loss = net(array(np.ones((2, 6), "float32"))).sum()
        loss.backward()
        if number == 0:
            trainer.step(2)
            continue
        with pytest.raises(ValueError, match=r"A gluon.Trainer updates on this store .*Make another store"):
            trainer.step(2)
    with pytest.raises(ValueError, match="A gluon.Trainer updates on this store"):
        store._set_updater(print)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["nadam", "sgld"])
def test_what_cannot_be_divided_is_refused_in_a_sentence(name):
    store = mx.kv.create("mykv")
    with pytest.raises(ValueError, match=r"cannot update a share .*update_on_kvstore=False\."):
        store.set_optimizer(_optimizer(name))
    derived = _optimizer(name)
    derived.__class__ = type("Derived", (type(derived),), {})
    with pytest.raises(ValueError, match=r"^Derived .*cannot update a share"):
        store.set_optimizer(derived)
    with pytest.raises(TypeError, match="must be an mxnet.optimizer.Optimizer, not str"):
        store.set_optimizer("sgd")
    with pytest.raises(ValueError, match="both would reduce the gradients"):
        store.set_optimizer(mykv.DistributedOptimizer(_optimizer("sgd")))
    assert mykv.MyKV.is_capable("optimizer") and not mykv.MyKV.is_capable("teleport")


@pytest.mark.ranks(2)
def test_the_store_holds_no_gradient_after_its_update(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd"))
    weight, gradient = array(_weights()[1]), array(_gradients(0, rank)[1])
    store.init("w", weight)
    before = sys.getrefcount(gradient)
    store.pushpull("w", gradient, out=weight)
    value(weight)
    assert sys.getrefcount(gradient) == before


@pytest.mark.ranks(2)
def test_a_key_that_was_never_initialized_is_an_error_on_all(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd"))
    weight = array(_weights()[1])
    if rank == 0:
        store._values.lend(mykv.store.requests._call(store._scope, "broadcast", "w", weight, weight))
        store.pushpull("w", array(_gradients(0, rank)[1]), out=weight)
        with pytest.raises(MXNetError, match="never initialized"):
            value(weight)
    else:
        with pytest.raises(ValueError, match="never initialized"):
            store.pushpull("w", array(_gradients(0, rank)[1]), out=weight)
    clear_errors()


@pytest.mark.ranks(2)
def test_weights_of_other_shapes_are_an_error_that_shows_both(rank):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("sgd"))
    shape = (3, 4) if rank else (3, 5)
    weight = array(np.ones(shape, "float32"))
    store.broadcast("w", weight, out=weight)
    with pytest.raises(MXNetError, match=r"\(3, 5\).*\(3, 4\)"):
        value(weight)
    clear_errors()


@pytest.mark.ranks(2)
def test_other_batch_sizes_are_an_error_that_shows_both(rank):
    store = mx.kv.create("mykv")
    optimizer = _optimizer("sgd")
    store.set_optimizer(optimizer)
    weight = array(_weights()[1])
    store.broadcast("w", weight, out=weight)
    optimizer.rescale_grad = 1 / (8 + rank)
    store.pushpull("w", array(_gradients(0, rank)[1]), out=weight)
    shown = r"batch size 8 \(gradients times 0\.125\), rank 1 has .*batch size 9 \(.* 0\.1+\)\. Give .*DataLoader"
    with pytest.raises(MXNetError, match=shown):
        value(weight)
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "others, shown",
    [
        (("sgd", {}), "rank 0 has .*optimizer Adam, .*rank 1 has optimizer SGD"),
        (("adam", {"beta2": 0.5}), r"rank 0 has beta2=0\.999, rank 1 has beta2=0\.5\. Give the same optimizer"),
        (("adam", {"learning_rate": 0.5}), r"rank 0 has learning rate 0\.01, rank 1 has learning rate 0\.5\. Set"),
        (("adam", {"wd": 0.5}), r"rank 0 has wd=0\.0, rank 1 has wd=0\.5\. Give the same optimizer"),
    ],
)
@pytest.mark.parametrize("how", ["store", "trainer on the store", "trainer"])
def test_other_optimizers_are_an_error_that_shows_what_differs(rank, size, gather, others, shown, how):
    name, options = others if rank else ("adam", {})
    optimizer = mx.optimizer.create(name, **{"learning_rate": 0.01, **options})
    store = mx.kv.create("mykv")
    if how == "store":
        store.set_optimizer(optimizer)
        weight = array(_weights()[1])
        store.broadcast("w", weight, out=weight)
        store.pushpull("w", array(_gradients(0, rank)[1]), out=weight)
        with pytest.raises(MXNetError, match=shown):
            value(weight)
    else:
        net = dense_network(0)
        trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=store, update_on_kvstore=how != "trainer")
        before = checksum(net)
        with autograd.record():
            loss = net(array(np.ones((2, 6), "float32"))).sum()
        loss.backward()
        with pytest.raises(MXNetError, match=shown):
            trainer.step(2 * size)
            mx.nd.waitall()
        clear_errors()
        assert checksum(net) == before
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("what", ["batch size", "learning rate"])
def test_a_stock_trainer_notices_what_differs_and_stays_in_step(rank, size, gather, on_store, what):
    net = dense_network(0)
    store = mx.kv.create("mykv")
    given = ("adam", {"learning_rate": 0.01})
    trainer = gluon.Trainer(net.collect_params(), *given, kvstore=store, update_on_kvstore=on_store)

    def step(batch_size):
        with autograd.record():
            loss = net(array(np.full((2, 6), 1.0 + rank, "float32"))).sum()
        loss.backward()
        trainer.step(batch_size)
        mx.nd.waitall()

    step(8)
    before = checksum(net)
    shown = r"batch size 8 \(.*\), rank 1 has .*batch size 6 \(.* times 0\.16+7?\)\. Give step\(\) the .*DataLoader"
    if what == "learning rate":
        trainer.set_learning_rate(0.25 + rank)
        shown = r"rank 0 has learning rate 0\.25, rank 1 has learning rate 1\.25\. Set the same"
    with pytest.raises(MXNetError, match=shown):
        step(8 - 2 * rank if what == "batch size" else 8)
    clear_errors()
    assert checksum(net) == before
    trainer.set_learning_rate(0.02)
    step(8)
    assert checksum(net) != before
    counts = trainer._optimizer.num_update, sorted(trainer._optimizer._index_update_count.items())
    assert len({str(one) for one in gather((checksum(net), counts))}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["DistributedTrainer", "stock", "stock on the store"])
@pytest.mark.parametrize("what", ["count", "rate"])
def test_other_counts_of_updates_or_rates_of_a_schedule_are_an_error(kind, what, rank, size, gather):
    """Adam corrects by the count, and a schedule follows it: weights would drift apart."""
    net = dense_network(seed=0)
    if what == "count":
        optimizer, shown = mx.optimizer.create("adam"), "7 updates before"
        optimizer.num_update = 7 * rank
    else:
        scheduler = mx.lr_scheduler.FactorScheduler(1000)
        optimizer = mx.optimizer.create("sgd", learning_rate=0.5, lr_scheduler=scheduler)
        scheduler.base_lr, shown = (0.5, 0.25)[rank], "0 updates before, the last at the learning rate 0.25"
    if kind == "DistributedTrainer":
        trainer = mykv.DistributedTrainer(net.collect_params(), optimizer)
    else:
        is_on_store = kind == "stock on the store"
        trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore="mykv", update_on_kvstore=is_on_store)
    with autograd.record():
        loss = net(array(np.ones((2, 6), "float32"))).sum()
    loss.backward()
    before = checksum(net)
    with pytest.raises(MXNetError, match=shown):
        trainer.step(2)
        mx.nd.waitall()
    clear_errors()
    assert set(gather(checksum(net))) == {before}


@pytest.mark.ranks(2)
def test_other_counts_of_updates_after_a_step_are_an_error(rank, gather):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam")

    def step():
        with autograd.record():
            loss = net(array(np.ones((2, 6), "float32"))).sum()
        loss.backward()
        trainer.step(2)
        mx.nd.waitall()

    step()
    trainer._optimizer.num_update += rank  # as where one worker has called the optimizer by itself
    before = checksum(net)
    with pytest.raises(MXNetError, match="2 updates before"):
        step()
    clear_errors()
    assert set(gather(checksum(net))) == {before}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first_is_kept", ["everywhere", "on rank 0", "nowhere"])
def test_another_store_for_an_optimizer_begins_without_states(first_is_kept, rank, gather):
    """Whether the garbage collection of a rank has found the first one or not."""
    optimizer = _optimizer("adam")
    kept = []
    for _ in range(2):
        store = mx.kv.create("mykv")
        store.set_optimizer(optimizer)
        assert not store._updater.states
        weight = array(_weights()[1])
        store.broadcast("w", weight, out=weight)
        store.pushpull("w", array(_gradients(0, rank)[1]), out=weight)
        weight.wait_to_read()
        if first_is_kept == "everywhere" or (first_is_kept == "on rank 0" and rank == 0):
            kept.append(store)
        del store
        gc.collect()
    assert len(set(gather(value(weight).tobytes()))) == 1


@pytest.mark.ranks(2)
def test_an_optimizer_that_fails_on_one_worker_fails_on_all_and_later_steps_match(rank, size):
    class Fails(mx.optimizer.SGD):
        broken = rank == 1

        def update_multi_precision(self, *arguments):
            if self.broken:
                raise ArithmeticError("no luck")
            super().update_multi_precision(*arguments)

    optimizer = Fails(learning_rate=1.0)
    store = mx.kv.create("mykv")
    store.set_optimizer(optimizer)
    weights = [array(np.zeros(3000, "float32")) for _ in range(2)]
    for key, weight in enumerate(weights):
        store.broadcast(key, weight, out=weight)

    def push():
        for key, weight in enumerate(weights):  # each worker owns one
            store.pushpull(key, array(np.ones(3000, "float32")), out=weight)

    if rank == 1:
        with pytest.raises(ArithmeticError, match="no luck"):
            push()
    else:
        push()
        with pytest.raises(MXNetError, match="no luck"):
            value(weights[1])
    clear_errors()
    optimizer.broken = False
    weights = [array(np.zeros(3000, "float32")) for _ in range(2)]
    for key, weight in enumerate(weights):
        store.broadcast(key, weight, out=weight)
    push()
    assert all((value(weight) == -size).all() for weight in weights)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_name", [False, True])
def test_states_survive_what_makes_the_trainer_set_up_its_store_again(by_name, rank, size, tmp_path, gather):
    net = dense_network(5)
    net(array(np.ones((2, 6), "float32")))
    start = str(tmp_path / f"start{rank}")
    net.save_parameters(start)
    given = "mykv" if by_name else mx.kv.create("mykv")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=given, update_on_kvstore=True)
    gc.collect()

    def step():
        with autograd.record():
            loss = net(array(np.full((2, 6), 1.0 + rank, "float32"))).sum()
        loss.backward()
        trainer.step(2 * size)

    def states():
        return {key: value(one) for key, one in trainer._kvstore._updater.states.items() if one is not None}

    step()
    before = states()
    net.load_parameters(start)  # resets the trainer's store
    assert trainer._kvstore is None
    trainer._init_kvstore()
    after = states()
    assert before.keys() == after.keys()
    assert all((before[key] == after[key]).all() for key in before)
    step()
    assert len(set(gather(checksum(net)))) == 1
    assert trainer._kvstore._updater.optimizer.num_update == 2


def _conv_data(step, rank):
    rng = np.random.RandomState(10 * step + rank)
    return rng.randn(4, 1, 8, 8).astype("float32"), rng.randint(0, 3, 4).astype("float32")


def _train(net, trainer, rank, batch_size, steps=6):
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(steps):
        x, y = _conv_data(step, rank)
        with autograd.record():
            loss = loss_of(net(array(x)), array(y))
        loss.backward()
        trainer.step(batch_size)
        if step == 2:
            net(array(x)).wait_to_read()  # an inference pass leaves weights in a layout of the operator's
            trainer.set_learning_rate(0.02)


def _started(hybridize):
    mx.random.seed(5)
    np.random.seed(5)
    net = conv_network(5)
    net(array(_conv_data(0, 0)[0]))
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def _trainer(kind, net, optimizer, size):
    params, arguments = net.collect_params(), (optimizer, {"learning_rate": 0.05})
    if kind == "local":
        return mykv.DistributedTrainer(params, *arguments), 4
    if kind == "stock":
        return gluon.Trainer(params, *arguments, kvstore=mx.kv.create("mykv"), update_on_kvstore=True), 4 * size
    options = {
        "buckets": {},
        "small": {"bucket_bytes": 300},
        "copying": {"bucket_bytes": 0},
        "groups": {"num_groups": 2},
    }
    return mykv.DistributedTrainer(params, *arguments, update_on_kvstore=True, **options[kind]), 4


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
@pytest.mark.parametrize("kind", ["stock", "buckets", "small", "copying", "groups"])
def test_trainers_give_what_local_updates_give(kind, hybridize, optimizer, rank, size, gather):
    trained = {}
    for one in ("local", kind):
        net = _started(hybridize)
        trainer, batch_size = _trainer(one, net, optimizer, size)
        _train(net, trainer, rank, batch_size)
        assert len(set(gather(checksum(net)))) == 1
        trained[one] = [value(parameter.data()) for parameter in net.collect_params().values()]
    for ours, local in zip(trained[kind], trained["local"]):
        # The means are rounded at other places, and LAMB divides by norms.
        np.testing.assert_allclose(ours, local, rtol=1e-4, atol=1e-3 if optimizer == "lamb" else 1e-5)
    if kind == "stock":
        assert trainer._update_on_kvstore is True  # by default


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
@pytest.mark.parametrize("kind", ["stock", "buckets", "copying"])
def test_on_several_hosts(kind, rank, size, gather):
    trained = {}
    for one in ("local", kind):
        net = _started(None)
        trainer, batch_size = _trainer(one, net, "adam", size)
        _train(net, trainer, rank, batch_size)
        assert len(set(gather(checksum(net)))) == 1
        trained[one] = [value(parameter.data()) for parameter in net.collect_params().values()]
    for ours, local in zip(trained[kind], trained["local"]):
        np.testing.assert_allclose(ours, local, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_distributed_trainer_updates_locally_by_default(rank):
    net = dense_network(5)
    assert mykv.DistributedTrainer(net.collect_params(), "sgd")._store_optimizer is None


@pytest.mark.ranks(2)
def test_gradients_alone_are_refused_with_what_to_do_instead(rank):
    net = dense_network(5)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", update_on_kvstore=True)
    with pytest.raises(RuntimeError, match=r"allreduce_grads\(\) .*Call step\(\).*update_on_kvstore=False"):
        trainer.allreduce_grads()
    with pytest.raises(RuntimeError, match=r"update\(\) .*Call step\(\)"):
        trainer.update(4)


@pytest.mark.ranks(2)
def test_a_stale_gradient_on_one_worker_fails_the_step_on_all_and_the_next_one_works(rank, gather):
    net = dense_network(5)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", update_on_kvstore=True)

    def backward():
        with autograd.record():
            loss = net(array(np.full((2, 6), 1.0 + rank, "float32"))).sum()
        loss.backward()

    backward()
    trainer.step(2)
    if rank == 0:
        backward()
        trainer.step(2)
        with pytest.raises(MXNetError, match="rank 1 is stale"):
            checksum(net)
    else:
        with pytest.raises(UserWarning, match="rank 1 is stale"):
            trainer.step(2)
    clear_errors()


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 0}], ids=["buckets", "copying"])
def test_parameters_that_no_worker_used_are_left_alone(options, rank, size, gather):
    first, second = dense_network(5), dense_network(6)
    both = gluon.nn.HybridSequential()
    both.add(first, second)
    trainer = mykv.DistributedTrainer(both.collect_params(), "adam", update_on_kvstore=True, **options)

    def step(net):
        with autograd.record():
            loss = net(array(np.full((2, 6), 1.0 + rank, "float32"))).sum()
        loss.backward()
        trainer.step(2, ignore_stale_grad=True)

    second(array(np.ones((2, 6), "float32")))
    step(first)
    before = checksum(second)
    step(first)
    assert checksum(second) == before
    step(second if rank == 0 else first)  # one worker is enough
    assert checksum(second) != before
    assert len(set(gather((checksum(first), checksum(second))))) == 1


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_with_an_engine_that_blocks(rank, size, gather):
    got, _ = _on_the_store(_optimizer("adam"), 3, rank)
    _same_on_all(gather, got)
    expected = _alone(_optimizer("adam"), 3, size)
    assert all((one == other).all() for one, other in zip(got, expected))


@pytest.mark.ranks(1)
def test_one_process_alone(rank, size):
    got, _ = _on_the_store(_optimizer("adam"), 3, rank)
    expected = _alone(_optimizer("adam"), 3, size)
    assert all((one == other).all() for one, other in zip(got, expected))


@pytest.mark.ranks(2)
def test_a_key_of_another_shape_gets_new_states(rank, size, gather):
    store = mx.kv.create("mykv")
    store.set_optimizer(_optimizer("adam"))
    for shape in ((300, 100), (200, 120)):
        weight = array(np.ones(shape, "float32"))
        store.broadcast("w", weight, out=weight)
        for _ in range(2):
            store.pushpull("w", array(np.full(shape, 1.0 + rank, "float32")), out=weight)
        _same_on_all(gather, [value(weight)])


@pytest.mark.ranks(1)
def test_a_share_cannot_be_pickled(size):
    import copy

    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", update_on_kvstore=True)
    share = StoreOptimizer(mykv.global_process_set, _optimizer("sgd"))
    holders = [] if IS_2 else [trainer, net.weight]  # MXNet 2.0 pickles no parameter of a trainer
    for duplicate, what in [(copy.copy, share), *((pickle.dumps, one) for one in (share, *holders))]:
        with pytest.raises(TypeError, match=r"cannot be pickled.*trainer.save_states\(\)"):
            duplicate(what)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 40_000])
def test_each_call_may_bring_another_array_for_the_result(count, size):
    store = mx.kv.create("mykv")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    weight = array(np.zeros(count, "float32"), "nd")
    store.broadcast("w", weight, out=weight)
    for gradient in (0, 0, 1, 2):  # the first two results are equal
        out = array(np.full(count, 7, "float32"), "nd")
        store.pushpull("w", array(np.full(count, gradient, "float32"), "nd"), out=out)
        np.testing.assert_array_equal(value(out), value(weight))
    np.testing.assert_array_equal(value(weight), np.full(count, -3.0 * size, "float32"))


@pytest.mark.ranks(2)
def test_an_update_that_fails_on_one_worker_fails_for_the_keys_after_it_too(rank, size, gather):
    class Failing(mx.optimizer.SGD):
        fails = False

        def update_multi_precision(self, index, weight, grad, state):
            if self.fails:
                raise ArithmeticError("no update today")
            super().update_multi_precision(index, weight, grad, state)

    optimizer = Failing(learning_rate=1.0)
    store = mx.kv.create("mykv")
    store.set_optimizer(optimizer)
    weights = [array(np.zeros(4, "float32"), "nd") for _ in range(3)]
    store.broadcast([0, 1, 2], weights, out=weights)
    optimizer.fails = rank == 0  # which owns the first key
    gradients = [array(np.ones(4, "float32"), "nd") for _ in range(3)]
    if rank == 0:
        with pytest.raises(ArithmeticError, match="no update today"):
            store.pushpull([0, 1, 2], gradients, out=weights)
    else:
        store.pushpull([0, 1, 2], gradients, out=weights)
        for weight in weights:
            with pytest.raises(MXNetError, match="no update today"):
                weight.wait_to_read()
    clear_errors()
    optimizer.fails = False
    for _ in range(2):
        store.pushpull([0, 1, 2], [array(np.ones(4, "float32"), "nd") for _ in range(3)], out=weights)
    _same_on_all(gather, [value(weight) for weight in weights])


@pytest.mark.ranks(1)
def test_an_optimizer_that_nobody_holds_is_forgotten(size):
    optimizer = mx.optimizer.Adam()
    store = mx.kv.create("mykv")
    store.set_optimizer(optimizer)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is mx.optimizer.Adam
    gone = [weakref.ref(optimizer), weakref.ref(store._optimizer)]
    del store, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.ranks(2)
def test_save_states_where_one_worker_alone_has_all_values(rank, gather, tmp_path):
    """The error leaves nothing: later steps and calls divide the parameters alike on all workers."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(400, in_units=300), gluon.nn.Dense(400), gluon.nn.Dense(5))
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", update_on_kvstore=True)
    data = array(np.ones((2, 300), "float32"))
    if rank == 0:
        net(data)
    with pytest.raises(MXNetError, match="rank 0 has 6, and rank 1 has 4"):
        trainer.save_states(str(tmp_path / "states"))
    for _ in range(2):
        with autograd.record():
            loss = (net(data) ** 2).sum()
        loss.backward()
        trainer.step(2)
    trainer.save_states(str(tmp_path / "states"))
    assert len(set(gather(checksum(net)))) == 1

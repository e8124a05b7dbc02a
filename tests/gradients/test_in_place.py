"""Every way in which a gradient array that is older than its trainer can still be read or written.

docs/architecture.md has the same list. Training must equal that with copied gradients, and statistics() tells why a
gradient is copied.
"""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import weakref

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, array, checksum, dense_network, mx, numbers, structure
from kvstore_plugin.compat import references
from kvstore_plugin.integrations import gluon_trainer
from mxnet import autograd, gluon

_BATCH = 4
_STATIC = {"static_alloc": True, "static_shape": True}
_HELD = "something else holds their arrays"
_RECORDED = "a recorded forward pass uses their parameters"


def _own(net, **options):
    return mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **options)


def _stock(net, on_store=False):
    how = {"kvstore": "mykv", "update_on_kvstore": on_store}
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **how)


_TRAINERS = {
    "own": _own,
    "own, on the store": lambda net: _own(net, update_on_kvstore=True),
    "stock": _stock,
    "stock, on the store": lambda net: _stock(net, True),
}
_each_trainer = pytest.mark.parametrize("make", _TRAINERS.values(), ids=_TRAINERS)


def _loss(net, rank, step):
    [device, *_] = next(iter(structure(net).values())).list_data()
    return (net(array(numbers(100 * step + rank, (_BATCH, 6)), ctx=device.context)) ** 2).sum()


def _backward(net, rank, step):
    with autograd.record():
        loss = _loss(net, rank, step)
    loss.backward()


def _train(net, trainer, rank, steps):
    for step in steps:
        _backward(net, rank, step)
        trainer.step(_BATCH)


def _gradients(net):
    return [parameter.grad() for parameter in structure(net).values()]


def _described(trainer):
    """How the gradients of a trainer are reduced: how many in place, and why others are not."""
    own = isinstance(trainer, mykv.DistributedTrainer)
    reduced = (trainer._reducers[0] if own else gluon_trainer._reducer_of(trainer)).described()
    return reduced["adopted"], reduced["copied"]


def _trained(make, steps, rank):
    """The weights of a network that has trained from its first step on, without anything special."""
    net = dense_network(seed=0)
    _train(net, make(net), rank, steps)
    return checksum(net)


_ALIASES = {
    "the object": lambda parameter: parameter.grad(),
    "the list": lambda parameter: parameter.list_grad(),
    "grad of the weight": lambda parameter: parameter.data().grad,
    "a slice": lambda parameter: parameter.grad()[0:1],
    "detach()": lambda parameter: parameter.grad().detach(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [_own, _stock], ids=["own", "stock"])
def test_gradient_arrays_that_the_program_fetched_before(rank, make):
    for what, alias in _ALIASES.items():
        net = dense_network(seed=0)
        held = [alias(parameter) for parameter in structure(net).values()]
        trainer = make(net)
        for step in range(2):
            _backward(net, rank, step)
            trainer.allreduce_grads()
            for one, gradient in zip(held, _gradients(net)):
                (one[0] if isinstance(one, list) else one)[:] = 0.25  # like clipping, through arrays fetched first
                assert (gradient[0] == 0.25).asnumpy().all(), what
            trainer.update(_BATCH)
        assert _described(trainer) == ((6, {}) if what == "the list" else (0, {_HELD: 6})), what


@pytest.mark.ranks(2)
@_each_trainer
def test_a_forward_pass_recorded_before(rank, gather, make):
    expected = _trained(make, range(3), rank)
    for ignore_stale_grad in (False, True):
        net = dense_network(seed=0)
        with autograd.record():
            loss = _loss(net, rank, 0)
        trainer = make(net)
        loss.backward()
        trainer.step(_BATCH, ignore_stale_grad=ignore_stale_grad)
        assert _described(trainer) == (0, {_RECORDED: 6})
        _train(net, trainer, rank, range(1, 3))
        assert set(gather(checksum(net))) == {expected}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [None, {}, _STATIC], ids=["imperative", "hybridized", "static"])
def test_passes_whose_graph_is_gone_hold_nothing(rank, form):
    """An inference pass gives a network its shapes; a recorded pass may have been for its shapes too."""
    net = dense_network(seed=0)
    if form is not None:
        net.hybridize(**form)
    _loss(net, rank, 0)
    if form is not _STATIC:
        with autograd.record():
            _loss(net, rank, 0)
    trainer = _own(net)
    assert _described(trainer) == (6, {})


@pytest.mark.ranks(2)
def test_a_gradient_keeps_its_value_and_its_mark_when_it_is_moved_after_a_backward(rank, gather):
    expected = _trained(_own, range(3), rank)
    net = dense_network(seed=0)
    _backward(net, rank, 0)
    trainer = _own(net)
    assert _described(trainer) == (6, {})
    trainer.step(_BATCH)  # of the backward before
    _train(net, trainer, rank, range(1, 3))
    assert set(gather(checksum(net))) == {expected}


@pytest.mark.ranks(2)
@_each_trainer
def test_a_cached_graph_with_static_alloc(rank, gather, make):
    """It keeps writing to the arrays of its first backward."""
    expected = _trained(make, range(3), rank)
    net = dense_network(seed=0)
    net.hybridize(**_STATIC)
    _backward(net, rank, 0)
    trainer = make(net)
    trainer.step(_BATCH)
    assert _described(trainer) == (0, {_HELD: 6})
    _train(net, trainer, rank, range(1, 3))
    assert set(gather(checksum(net))) == {expected}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [None, pytest.param(_STATIC, marks=pytest.mark.smoke)], ids=["imperative", "static"])
def test_the_newest_trainer_reduces_in_place_whether_or_not_the_one_before_is_gone(rank, gather, form):
    """It takes the buckets as they are, since a network with static_alloc goes on writing there."""
    net, reference = dense_network(seed=0), dense_network(seed=0)
    if form is not None:
        net.hybridize(**form)
    kept = []
    for stage in range(4):
        if stage == 2:
            for one in (net, reference):
                one.initialize(mx.init.Constant(0.1), force_reinit=True)
        trainer = _own(net)
        if stage % 2 == rank:
            kept.append(trainer)
        _train(net, trainer, rank, range(3 * stage, 3 * stage + 3))
        assert _described(trainer) == (6, {}), stage
        _train(reference, _own(reference, bucket_bytes=0), rank, range(3 * stage, 3 * stage + 3))
        if stage % 2 != rank:
            del trainer
            gc.collect()
    assert checksum(net) == checksum(reference)
    assert len(set(gather(checksum(net)))) == 1


_OPTIONS = [
    {},
    {"update_on_kvstore": True},
    {"clip_global_norm": 1.0},
    {"aux_sync_period": 1, "broadcast_period": 1},
    {"compression": mykv.Compression.fp16, "num_groups": 2},
]


@pytest.mark.ranks(1)
def test_a_dropped_trainer_ends_at_once():
    """Without the garbage collector, which runs at other times on each rank."""
    makes = [functools.partial(_own, **options) for options in _OPTIONS]
    gc.collect()
    gc.disable()
    try:
        for make in [*makes, _stock, functools.partial(_stock, on_store=True)]:
            net = dense_network(seed=0)
            trainer = make(net)
            _train(net, trainer, 0, range(2))
            dropped = weakref.ref(trainer)
            gluon.Trainer(net.collect_params(), "sgd", kvstore=None)  # MXNet 1.9's parameters hold their last trainer
            del trainer
            assert dropped() is None, make
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_two_trainers_of_one_network_in_turn(rank, gather):
    """The first looks again after the second is made, on all ranks, whatever each of them could move."""
    results = []
    for bucket_bytes in (16 << 20, 0):
        net = dense_network(seed=0)
        first = _own(net, bucket_bytes=bucket_bytes)
        _train(net, first, rank, range(2))
        held = _gradients(net) if rank == 0 else None
        second = _own(net, bucket_bytes=bucket_bytes)
        for step in range(2, 8):
            _train(net, (first, second)[step % 2], rank, [step])
        del held
        results.append(checksum(net))
    assert results[0] == results[1]
    assert len(set(gather(results[0]))) == 1


def _initialize_anew(net):
    net.initialize(mx.init.Constant(0.1), force_reinit=True)


def _move(net, device=mx.cpu(0)):  # noqa: B008
    for parameter in structure(net).values():
        (parameter.reset_device if IS_2 else parameter.reset_ctx)(device)


def _accumulate(net):
    for parameter in structure(net).values():
        parameter.grad_req = "add"


_CHANGES = (_initialize_anew, _move, _accumulate, _initialize_anew)


@pytest.mark.ranks(2)
@_each_trainer
def test_what_one_rank_alone_does_before_a_change_is_no_matter(rank, gather, make):
    """Rank 0 alone holds gradients, runs another network and collects garbage; then all ranks change all gradients."""
    results = []
    for disturbs in (False, True):
        net = dense_network(seed=0)
        if disturbs and rank == 0:
            held = _gradients(net)
            _backward(dense_network(seed=9), rank, 0)
        trainer = make(net)
        _train(net, trainer, rank, range(2))
        if disturbs and rank == 0:
            del held
            gc.collect()
        for turn, change in enumerate(_CHANGES):
            change(net)
            for step in range(10 * turn, 10 * turn + 2):
                _train(net, trainer, rank, [step])
                for gradient in _gradients(net):
                    gradient[:] = 0  # for grad_req 'add'
        results.append(checksum(net))
    assert results[0] == results[1]
    assert len(set(gather(results[0]))) == 1


_MOVING = {
    **_TRAINERS,
    "own, by copying": lambda net: _own(net, bucket_bytes=0),
    "own, by copying, on the store": lambda net: _own(net, bucket_bytes=0, update_on_kvstore=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [{}, {"static_alloc": True}], ids=["dynamic", "static_alloc"])
@pytest.mark.parametrize("make", _MOVING.values(), ids=_MOVING)
def test_reset_ctx_concerns_the_worker_that_calls_it(rank, gather, make, form):
    """Rank 0 evaluates the network alone, moving it to where it is; later each worker moves to a device of its own."""
    results = []
    for moves in (False, True):
        net = dense_network(seed=0)
        net.hybridize(**form)
        trainer = make(net)
        for step in range(8):
            if moves and rank == 0 and step in (1, 2, 5):
                _move(net, structure(net)["0.weight"].data().context)
                _loss(net, rank, 50).wait_to_read()
            if moves and step == 4:
                _move(net, mx.cpu(rank))
            _train(net, trainer, rank, [step])
        if moves:
            assert structure(net)["0.weight"].data().context == mx.cpu(rank)
        results.append(checksum(net))
    assert results[0] == results[1]
    assert len(set(gather(results[0]))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("attach", [_move, lambda net: net.cast("float32")], ids=["reset_ctx", "cast"])
@_each_trainer
def test_reset_ctx_and_cast_attach_the_gradients_of_a_copy(rank, gather, make, attach):
    """A deep copy has gradients, but no backward writes them. Programs call reset_ctx() next, to the same device."""
    net = dense_network(seed=0)
    twin = copy.deepcopy(net)
    attach(twin)
    _train(twin, make(twin), rank, range(3))
    assert checksum(twin) == _trained(make, range(3), rank)
    assert len(set(gather(checksum(twin)))) == 1


@pytest.mark.ranks(2)
def test_running_statistics_after_a_reset_ctx_of_one_worker(rank, gather):
    """MXNet alone loses updates here: backward passes with static_alloc still write the statistics while it copies."""
    mx.random.seed(0)
    net = gluon.model_zoo.vision.mobilenet0_25(classes=4)
    net.initialize()
    net.hybridize(**_STATIC)
    images = array(numbers(1, (8, 3, 128, 128)))
    net(images)
    trainer = _own(net)
    for _ in range(4):
        with autograd.record():
            loss = (net(images) ** 2).mean()
        loss.backward()
        trainer.step(1)
        loss.wait_to_read()
        if rank == 0:
            _move(net)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", _MOVING.values(), ids=_MOVING)
def test_a_cast_to_the_same_dtype_concerns_nobody_else(rank, gather, make):
    net = dense_network(seed=0)
    trainer = make(net)
    for step in range(4):
        _backward(net, rank, step)
        if rank == 0:
            net.cast("float32")  # for a file, say
        trainer.step(_BATCH)
    assert checksum(net) == _trained(make, range(4), rank)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", _MOVING.values(), ids=_MOVING)
def test_reset_ctx_forgets_gradients_as_in_mxnet(rank, gather, make):
    net = dense_network(seed=0)
    trainer = make(net)
    _train(net, trainer, rank, range(1))
    _backward(net, rank, 1)
    _move(net)
    assert not any(gradient.asnumpy().any() for gradient in _gradients(net))
    with pytest.raises(UserWarning, match="stale"):
        trainer.step(_BATCH)
    _train(net, trainer, rank, [2])
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_shallow_copy_of_a_parameter_holds_its_gradient(rank):
    net = dense_network(seed=0)
    twins = [copy.copy(parameter) for parameter in structure(net).values()]
    trainer = _own(net)
    _train(net, trainer, rank, range(1))
    for twin, gradient in zip(twins, _gradients(net)):
        np.testing.assert_array_equal(twin.grad().asnumpy(), gradient.asnumpy())


def _backward_of_child(net, answers):
    _backward(net, 0, 7)
    answers.put([gradient.asnumpy() for gradient in _gradients(net)])


class _Adversarial:
    """A transform that runs the network forward and backward in a process of the DataLoader."""

    def __init__(self, net):
        self._net = net

    def __call__(self, sample):
        sample = array(np.asarray(sample))
        sample.attach_grad()
        with autograd.record():
            loss = (self._net(sample.reshape((1, -1))) ** 2).sum()
        loss.backward()
        return sample.grad.asnumpy()


@pytest.mark.ranks(1)
def test_a_data_loader_whose_transform_runs_the_network(rank):
    """With one worker too, and with the gradients of a backward that the parent has made and not used."""
    net = dense_network(seed=0)
    trainer = _own(net)
    _backward(net, rank, 0)
    before, weights = [gradient.asnumpy() for gradient in _gradients(net)], checksum(net)
    samples = np.random.RandomState(3).uniform(-1, 1, (6, 6)).astype("float32")
    data = gluon.data.SimpleDataset(list(samples)).transform(_Adversarial(net))
    loader = gluon.data.DataLoader(data, batch_size=2, num_workers=2, batchify_fn=np.stack)
    found = np.concatenate([np.asarray(batch) for batch in loader])
    for gradient, mine in zip(_gradients(net), before):
        np.testing.assert_array_equal(gradient.asnumpy(), mine)
    assert checksum(net) == weights
    np.testing.assert_allclose(found, np.stack([_Adversarial(net)(one) for one in samples]), rtol=1e-5, atol=1e-6)
    _backward(net, rank, 0)
    trainer.step(_BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [_own, _stock], ids=["own", "stock"])
def test_a_forked_child(rank, gather, make):
    """It computes in memory of its own, and nothing that it does reaches its parent or another rank."""
    expected = _trained(make, range(3), rank)
    net, alone = dense_network(seed=0), dense_network(seed=0)
    trainer = make(net)
    _backward(net, rank, 0)
    before = [gradient.asnumpy() for gradient in _gradients(net)]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_backward_of_child, args=(net, answers))
    child.start()
    of_child = answers.get()
    child.join(60)
    _backward(alone, 0, 7)
    for one, mine, gradient, right in zip(of_child, before, _gradients(net), _gradients(alone)):
        np.testing.assert_array_equal(gradient.asnumpy(), mine)
        np.testing.assert_array_equal(one, right.asnumpy())
    trainer.step(_BATCH)
    _train(net, trainer, rank, range(1, 3))
    assert set(gather(checksum(net))) == {expected}


@pytest.mark.ranks(1)
def test_the_references_of_this_build_are_known(monkeypatch):
    assert references.are_known()
    net = dense_network(seed=0)
    monkeypatch.setattr(references, "are_known", lambda: False)
    trainer = _own(net)
    assert _described(trainer) == (0, {"this build of MXNet does not show what holds their arrays": 6})

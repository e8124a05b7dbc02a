"""Gradients in shared memory train like copied gradients, whatever happens to their arrays."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import pickle
import re
import time
from pathlib import Path
from types import SimpleNamespace

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import (
    IS_2,
    array,
    checksum,
    clear_errors,
    conv_network,
    dense_network,
    fill,
    mx,
    parameters,
    structure,
    value,
)
from kvstore_plugin.gradients import bucket_memory
from mxnet import autograd, gluon
from mxnet.gluon import nn

_SGD = ("sgd", {"learning_rate": 0.1})
_MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})
_BATCH = 4
_STEPS = 4
_ALL_IN_ONE = 16 << 20
_FORMS = {"imperative": None, "hybridized": {}, "static": {"static_alloc": True, "static_shape": True}}
_STATIC = _FORMS["static"]


def _address(array) -> int:
    """The address of an MXNet array's elements."""
    place = ctypes.c_void_p()
    array.wait_to_read()
    assert mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(place)) == 0
    return place.value


def _segments() -> list[tuple[int, int]]:
    """Address ranges of the shared segments that are mapped here."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mykv" in line]
    return [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]


def _shared(net) -> list[bool]:
    """For each gradient, whether it is in shared memory."""
    segments = _segments()
    places = [_address(p.grad(p.list_ctx()[0])) for p in structure(net).values() if p.grad_req != "null"]
    return [any(begin <= place < end for begin, end in segments) for place in places]


def _addresses(net) -> list[int]:
    return [_address(p.grad()) for p in structure(net).values()]


def _images(rank, step, shape=(6,), dtype="float32", ctx=None):
    values = np.random.RandomState(1000 * step + rank).uniform(-1, 1, (_BATCH, *shape)).astype(dtype)
    return array(values, ctx=ctx)


def _backward(net, rank, step=0, shape=(6,), dtype="float32", ctx=None):
    with autograd.record():
        loss = (net(_images(rank, step, shape, dtype, ctx)) ** 2).sum()
    loss.backward()


def _train(net, trainer, rank, steps, **data):
    for step in steps:
        _backward(net, rank, step, **data)
        trainer.step(_BATCH)


def _trainer(net, bucket_bytes=_ALL_IN_ONE, optimizer=_SGD):
    return mykv.DistributedTrainer(net.collect_params(), *optimizer, bucket_bytes=bucket_bytes)


def _all_parameters(net, method, *arguments):
    """Call a method that both releases have for all parameters of a block, in different places."""
    return getattr(net if IS_2 else net.collect_params(), method)(*arguments)


def _set_grad_req(net, req):
    _all_parameters(net, "setattr", "grad_req", req)


def _move(net, device):
    for parameter in structure(net).values():
        (parameter.reset_device if IS_2 else parameter.reset_ctx)(device)


def _assert_equal(net, expected, tolerance=1e-5):
    expected = parameters(expected)
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def _deferred_network(seed):
    """A network that gets its shapes and values in its first forward pass."""
    mx.random.seed(seed)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, activation="tanh"), nn.AvgPool2D(), nn.Dense(5, activation="tanh"), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    return net


def _norm_network(seed):
    """Layers that MXNet has for float16 on CPUs too."""
    net = nn.HybridSequential()
    net.add(nn.LayerNorm(in_channels=6), nn.PReLU(), nn.LayerNorm(in_channels=6))
    net.initialize()
    fill(net, seed)
    return net


_NETWORKS = {
    "dense": (dense_network, (6,)),
    "conv": (conv_network, (1, 8, 8)),
    "deferred": (_deferred_network, (1, 8, 8)),
}


def _twins(build, seed, form, bucket_bytes, optimizer=_SGD):
    """A network whose gradients are in place, and one whose gradients are copied, each with its trainer."""
    pairs = []
    for size in (bucket_bytes, 0):
        net = build(seed)
        if form is not None:
            net.hybridize(**form)
        pairs.append((net, _trainer(net, size, optimizer)))
        if build is _deferred_network:
            net(_images(0, 0, (1, 8, 8)))  # draws its values before the twin's seed is set
    return pairs


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("bucket_bytes", [1, 300, _ALL_IN_ONE], ids=["each alone", "some in one", "all in one"])
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize("network", _NETWORKS)
def test_training_in_place_and_by_copying_gives_the_same_bits(rank, gather, network, form, bucket_bytes):
    build, shape = _NETWORKS[network]
    (in_place, a), (copied, c) = _twins(build, rank, form, bucket_bytes, _MOMENTUM)
    before = checksum(in_place)
    assert before == checksum(copied)
    for step in range(_STEPS):
        _train(in_place, a, rank, [step], shape=shape)
        _train(copied, c, rank, [step], shape=shape)
    assert all(_shared(in_place)) and not any(_shared(copied))
    assert checksum(in_place) == checksum(copied) != before
    assert len(set(gather(checksum(in_place)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize("network", ["dense", "conv"])
def test_each_worker_may_have_a_cpu_with_its_own_number(rank, gather, caplog, network, form):
    """Examples of MXNet and Horovod write mx.cpu(hvd.local_rank())."""
    build, shape = _NETWORKS[network]
    results = []
    for device, bucket_bytes in ((mx.cpu(rank + 1), _ALL_IN_ONE), (mx.cpu(0), 0)):
        net = build(0, ctx=device)
        if form is not None:
            net.hybridize(**form)
        trainer = _trainer(net, bucket_bytes, _MOMENTUM)
        for step in range(_STEPS):
            _train(net, trainer, rank, [step], shape=shape, ctx=device)
            gradients = [parameter.grad(device) for parameter in structure(net).values()]
            assert all((gradient.asnumpy() != 0).any() for gradient in gradients)
            gluon.utils.clip_global_norm(gradients, 1.0)
            _all_parameters(net, "zero_grad")
        assert _shared(net) == [bucket_bytes > 0] * len(gradients)
        results.append(checksum(net))
    assert len(set(gather(results[0]))) == 1 and results[0] == results[1]
    assert not caplog.records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_accumulated_gradients_give_the_same_bits(rank, gather, form):
    (in_place, a), (copied, c) = _twins(dense_network, rank, form, _ALL_IN_ONE)
    for net, trainer in ((in_place, a), (copied, c)):
        _set_grad_req(net, "add")
        for step in range(_STEPS):
            for part in range(3):
                _backward(net, rank, 10 * step + part)
            trainer.step(3 * _BATCH)
            _all_parameters(net, "zero_grad")
    assert all(_shared(in_place))
    assert checksum(in_place) == checksum(copied)
    assert len(set(gather(checksum(in_place)))) == 1


@pytest.mark.ranks(2)
def test_gradients_of_several_dtypes_lie_in_buckets_of_their_own(rank, gather):
    def build(seed):
        net = nn.HybridSequential()
        net.add(nn.Dense(8, in_units=6), nn.Dense(4, in_units=8, dtype="float64"), nn.Dense(3, in_units=4))
        net.initialize()
        fill(net, seed)
        return net

    def train(net, trainer):
        first, second, third = net
        cast = (lambda x, dtype: x.astype(dtype)) if IS_2 else mx.nd.cast
        for step in range(_STEPS):
            with autograd.record():
                middle = second(cast(first(_images(rank, step)), dtype="float64"))
                loss = third(cast(middle, dtype="float32")).sum()
            loss.backward()
            trainer.step(_BATCH)

    (in_place, a), (copied, c) = _twins(build, rank, None, _ALL_IN_ONE)
    train(in_place, a)
    train(copied, c)
    assert all(_shared(in_place))
    assert checksum(in_place) == checksum(copied)
    assert len(set(gather(checksum(in_place)))) == 1


def _warnings(caplog, words) -> int:
    return sum(bool(re.search(words, record.getMessage())) for record in caplog.records if record.levelno >= 30)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_a_trainer_made_after_the_first_backward_trains_right_and_says_where_it_copies(rank, gather, caplog, form):
    """A network with static_alloc and static_shape keeps writing to the arrays of its first backward."""
    late, reference = dense_network(seed=0), dense_network(seed=0)
    if form is not None:
        late.hybridize(**form)
    _backward(late, rank)
    with caplog.at_level(logging.WARNING):
        trainer = _trainer(late)
        _train(late, trainer, rank, range(_STEPS))
    copies = form is _STATIC
    assert _warnings(caplog, "6 of the 6 parameters .* before its first backward") == int(copies and rank == 0)
    assert _shared(late) == [not copies] * 6
    _train(reference, _trainer(reference, 0), rank, range(_STEPS))
    _assert_equal(late, reference)
    assert len(set(gather(checksum(late)))) == 1


@pytest.mark.ranks(2)
def test_only_the_gradients_that_were_there_before_a_backward_are_copied(rank, gather, caplog):
    """Fine-tuning: a network that has run a backward, with a new layer behind it."""

    def build(late):
        body = dense_network(seed=0)
        body.hybridize(**_STATIC)
        if late:
            _backward(body, rank)
        net = nn.HybridSequential()
        head = nn.Dense(3, in_units=2)
        head.initialize()
        net.add(body, head)
        fill(net, 1)
        return net

    net, reference = build(late=True), build(late=False)
    with caplog.at_level(logging.WARNING):
        trainer = _trainer(net)
    assert _warnings(caplog, "6 of the 8 parameters") == (1 if rank == 0 else 0)
    _train(net, trainer, rank, range(_STEPS))
    assert _shared(net) == [False] * 6 + [True] * 2
    _train(reference, _trainer(reference, 0), rank, range(_STEPS))
    _assert_equal(net, reference)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_gradients_to_other_arrays_do_not_count(rank, caplog):
    net, x = dense_network(seed=0), _images(rank, 0)
    x.attach_grad()
    with autograd.record():
        loss = net(x).sum()
    autograd.grad([loss], [x])
    del loss  # with its graph
    _trainer(net)
    assert all(_shared(net))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("on_store", [False, True])
def test_memory_that_one_rank_alone_has_used_behind_the_gradients_is_no_matter(rank, gather, on_store):
    """As of a gradient that something held on the other rank alone, and that was in this bucket until it was moved."""
    net = dense_network(0)
    optimizer = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    trainer = mykv.DistributedTrainer(net.collect_params(), *optimizer, update_on_kvstore=on_store)
    _train(net, trainer, rank, range(2))
    first = next(iter(structure(net).values()))
    if rank == 0:
        other = gluon.Parameter("other", shape=(9,))
        other.initialize()
        bucket_memory._owner(first).put_in_bucket(other)
        del other
    assert len(set(gather(bucket_memory._bucket_of(first).used))) == 2
    for req in ("add", "write"):
        _set_grad_req(net, req)
    _train(net, trainer, rank, range(2, 4))
    assert all(_shared(net))
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize("other", ["float64", "float16"])
def test_cast_and_back_between_steps(rank, gather, form, other):
    (in_place, a), (copied, c) = _twins(_norm_network, rank, form, _ALL_IN_ONE)
    places = {}
    for turn, dtype in enumerate(["float32", other, "float32", other]):
        for net, trainer in ((in_place, a), (copied, c)):
            net.cast(dtype)
            _train(net, trainer, rank, [2 * turn, 2 * turn + 1], dtype=dtype)
        assert all(_shared(in_place)) and not any(_shared(copied))
        # The second time as the first, or memory would grow with every cast.
        assert places.setdefault(dtype, _addresses(in_place)) == _addresses(in_place)
        assert checksum(in_place) == checksum(copied)
        assert len(set(gather(checksum(in_place)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_reset_ctx_and_back_between_steps(rank, gather, form):
    """Every cpu(n) is the same memory: the network goes on writing to where it wrote first."""
    net, reference = dense_network(seed=rank), dense_network(seed=rank)
    if form is not None:
        net.hybridize(**form)
    pairs = [(net, _trainer(net, optimizer=_MOMENTUM)), (reference, _trainer(reference, 0, _MOMENTUM))]
    places = _addresses(net)
    for turn, device in enumerate([mx.cpu(0), mx.cpu(1), mx.cpu(0)]):
        for one, trainer in pairs:
            _move(one, device)
            _train(one, trainer, rank, [2 * turn, 2 * turn + 1], ctx=device)
        assert all(_shared(net)) and _addresses(net) == places
        _assert_equal(net, reference)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_new_grad_req_between_steps(rank, gather, form):
    net, reference = dense_network(seed=rank), dense_network(seed=rank)
    if form is not None:
        net.hybridize(**form)
    pairs = [(net, _trainer(net)), (reference, _trainer(reference, 0))]
    places = _addresses(net)
    for turn, req in enumerate(["write", "add", "write"]):
        for one, trainer in pairs:
            _set_grad_req(one, req)
            for step in (2 * turn, 2 * turn + 1):
                _backward(one, rank, step)
                trainer.step(_BATCH)
                if req == "add":  # after "write" the new arrays must begin with zeros by themselves
                    _all_parameters(one, "zero_grad")
        assert all(_shared(net)) and _addresses(net) == places
        _assert_equal(net, reference)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_a_layer_frozen_and_thawed_between_steps(rank, gather, form):
    """Its bucket goes on without it, and has it again afterwards."""
    net, reference = dense_network(seed=rank), dense_network(seed=rank)
    if form is not None:
        net.hybridize(**form)
    pairs = [(net, _trainer(net)), (reference, _trainer(reference, 0))]
    for turn, req in enumerate(["write", "null", "write"]):
        for one, trainer in pairs:
            for parameter in list(structure(one).values())[2:4]:
                parameter.grad_req = req
            _train(one, trainer, rank, [2 * turn, 2 * turn + 1])
        assert _shared(net) == [True] * (4 if req == "null" else 6)
        _assert_equal(net, reference)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_initialization_anew_between_steps(rank, gather, form):
    net, reference = dense_network(seed=rank), dense_network(seed=rank)
    if form is not None:
        net.hybridize(**form)
    pairs = [(net, _trainer(net)), (reference, _trainer(reference, 0))]
    places = _addresses(net)
    for turn in range(3):
        for one, trainer in pairs:
            _train(one, trainer, rank, [2 * turn, 2 * turn + 1])
            one.initialize(mx.init.Constant(0.1 * (turn + 1) * (rank + 1)), force_reinit=True)
            _train(one, trainer, rank, [100 + turn])
        assert all(_shared(net)) and _addresses(net) == places
        _assert_equal(net, reference)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, _ALL_IN_ONE])
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_user_code_that_reads_and_writes_gradients_in_place(rank, gather, form, bucket_bytes):
    """Before and after the reduction, clipping by the norm among it; nothing waits between the operations."""
    twins = _twins(dense_network, rank, form, bucket_bytes)
    norms = []
    for net, trainer in twins:
        norms.append([])
        for step in range(_STEPS):
            _backward(net, rank, step)
            for parameter in structure(net).values():
                parameter.grad()[:] += 0.25 * (rank + 1)
                parameter.grad()[:1] *= 2
            trainer.allreduce_grads()
            grads = [parameter.grad() for parameter in structure(net).values()]
            norms[-1].append(float(gluon.utils.clip_global_norm(grads, 0.5)))
            grads[0][:] = -grads[0]
            trainer.update(_BATCH)
            _all_parameters(net, "zero_grad")
            assert not any(grad.asnumpy().any() for grad in grads)
    assert all(_shared(twins[0][0]))
    assert norms[0] == norms[1] and min(norms[0]) > 0.5
    assert checksum(twins[0][0]) == checksum(twins[1][0])
    assert len(set(gather(checksum(twins[0][0])))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, _ALL_IN_ONE])
def test_two_trainers_that_share_parameters(rank, gather, bucket_bytes):
    """A body trained with two heads in turn: the second trainer takes over gradients that are the first one's already.

    They leave a bucket in which the first trainer has others; a bucket that has no others stays.
    """

    def build(size):
        body = dense_network(seed=rank)
        heads, places = [], []
        for number in range(2):
            head = dense_network(seed=10 * number + rank, inputs=2, widths=(3,))
            net = nn.HybridSequential()
            net.add(body, head)
            heads.append((net, _trainer(net, size)))
            places.append(_addresses(body))
        assert (places[0] == places[1]) == (size <= 1)
        return body, heads

    results = []
    for size in (bucket_bytes, 0):
        body, heads = build(size)
        for step in range(_STEPS):
            for number, (net, trainer) in enumerate(heads):
                _train(net, trainer, rank, [2 * step + number])
        if size:
            assert all(_shared(heads[0][0])) and all(_shared(heads[1][0]))
        results.append([checksum(body), *(checksum(net) for net, _ in heads)])
    assert results[0] == results[1]
    assert len(set(map(tuple, gather(results[0])))) == 1


class _Branches(gluon.Block):
    """Two layers, of which a forward pass uses those that it is told."""

    def __init__(self):
        super().__init__()
        self.left = nn.Dense(2, in_units=3)
        self.right = nn.Dense(2, in_units=3)
        self.initialize()
        fill(self, 0)

    def forward(self, x, left, right):
        parts = [layer(x) for layer, used in ((self.left, left), (self.right, right)) if used]
        return sum(parts[1:], parts[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 60, _ALL_IN_ONE])
def test_stale_gradients_in_buckets_count_as_zeros(rank, gather, bucket_bytes):
    """A bucket that some worker has used in part is reduced; what nobody has used is not updated."""
    uses = [
        ((True, True), (True, True)),
        ((True, False), (True, True)),
        ((True, False), (False, True)),
        ((True, False), (True, False)),
        ((False, False), (False, False)),
        ((False, True), (False, False)),
    ]
    results = []
    for size in (bucket_bytes, 0):
        net = _Branches()
        trainer = _trainer(net, size, ("sgd", {"learning_rate": 0.1, "wd": 0.5}))
        for step, use in enumerate(uses):
            before = parameters(net)
            if any(use[rank]):
                with autograd.record():
                    loss = (net(_images(rank, step, (3,)), *use[rank]) ** 2).sum()
                loss.backward()
            trainer.step(_BATCH, ignore_stale_grad=True)
            for name, values in parameters(net).items():
                used = any(of_rank["right" in name] for of_rank in use)
                assert (values != before[name]).any() == used, (name, use)
        assert all(_shared(net)) == bool(size)
        results.append(checksum(net))
    assert results[0] == results[1]
    assert len(set(gather(results[0]))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("bucket_bytes", [1, _ALL_IN_ONE])
def test_ranks_that_initialize_parameters_in_different_order_copy_and_say_so(rank, gather, caplog, bucket_bytes):
    def build(size):
        net = nn.Sequential()
        net.add(nn.Dense(3), nn.Dense(3))
        net.initialize(mx.init.Constant(0.3))
        return net, _trainer(net, size)

    def train(net, trainer, turned):
        for step in range(_STEPS):
            layers = list(net)[::-1] if turned else list(net)
            with autograd.record():
                loss = sum((layer(_images(rank, step)) ** 2).sum() for layer in layers)
            loss.backward()
            trainer.step(_BATCH)

    net, trainer = build(bucket_bytes)
    with caplog.at_level(logging.WARNING):
        train(net, trainer, turned=rank == 1)
    # A bucket for each gradient is the same on all ranks.
    assert _warnings(caplog, "initialized in different orders") == (rank == 0 and bucket_bytes == _ALL_IN_ONE)
    reference, plain = build(0)
    train(reference, plain, turned=rank == 1)
    assert checksum(net) == checksum(reference)
    assert len(set(gather(checksum(net)))) == 1


class _Strict(logging.Handler):
    """Raises warnings as errors."""

    def emit(self, record):
        raise RuntimeError(record.getMessage())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["creation", "step"])
def test_a_handler_of_logging_that_raises_fails_on_all_ranks_alike(rank, gather, where):
    mykv.init()
    layers = [nn.Dense(1, in_units=2 if where == "creation" else 0) for _ in range(2)]
    named = {}
    for number, layer in enumerate(layers):
        layer.initialize()
        named.update({f"{number}.{name}": one for name, one in structure(layer).items()})
    gradients = [one.grad() for one in named.values()] if where == "creation" else []  # held, so they are copied

    def train(turned=False):
        for layer in layers[::-1] if turned else layers:
            layer(array(np.ones((1, 2), dtype="float32")))  # in another order on rank 1, so all are copied
        trainer = mykv.DistributedTrainer(named, *_SGD) if where == "creation" else made
        with autograd.record():
            loss = sum(layer(array(np.full((1, 2), rank + 1, dtype="float32"))).sum() for layer in layers)
        loss.backward()
        trainer.step(1)

    made = None if where == "creation" else mykv.DistributedTrainer(named, *_SGD)
    log, strict = logging.getLogger("kvstore_plugin"), _Strict(level=logging.WARNING)
    log.addHandler(strict)
    try:
        with pytest.raises(RuntimeError, match="reduced by copying"):  # an MXNetError is a RuntimeError
            train(turned=rank == 1)
            mx.nd.waitall()
    finally:
        log.removeHandler(strict)
    clear_errors()
    for _ in range(2):
        train()
        first, second = gather([value(one.data()).tolist() for one in named.values()])
        assert first == second
    del gradients


_DUPLICATES = [
    pytest.param(
        lambda thing: pickle.loads(pickle.dumps(thing)),
        id="pickled",
        marks=pytest.mark.skipif(IS_2, reason="MXNet 2.0 pickles no Parameter with a Trainer"),
    ),
    pytest.param(copy.deepcopy, id="deepcopy"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("duplicate", _DUPLICATES)
def test_a_copy_of_a_network_has_gradients_of_its_own(rank, gather, duplicate):
    def build():
        layer = nn.Dense(3, in_units=6, activation="tanh")  # MXNet 2.0's copy of a Sequential shares its layers
        layer.initialize()
        fill(layer, rank)
        return layer

    net, reference = build(), build()
    trainer = _trainer(net)
    _train(net, trainer, rank, range(2))
    twin = duplicate(net)
    assert all(_shared(net)) and not any(_shared(twin))
    for one, other in zip(structure(net).values(), structure(twin).values()):
        kept = one.grad().asnumpy()
        np.testing.assert_array_equal(kept, other.grad().asnumpy())
        other.grad()[:] = 77
        np.testing.assert_array_equal(one.grad().asnumpy(), kept)
    _train(net, trainer, rank, range(2, 4))
    _train(reference, _trainer(reference, 0), rank, range(4))
    assert checksum(net) == checksum(reference)

    # MXNet neither attaches the gradients of a copy nor gives it up to another trainer.
    for parameter in structure(twin).values():
        parameter._trainer = None
    twin.initialize(force_reinit=True)
    fill(twin, rank)
    _train(twin, _trainer(twin), rank, range(4))
    assert all(_shared(net) + _shared(twin)) and not set(_addresses(net)) & set(_addresses(twin))
    assert checksum(twin) == checksum(reference)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("duplicate", _DUPLICATES)
def test_a_copy_of_a_trainer_reduces_its_own_gradients(rank, gather, duplicate):
    net = dense_network(seed=rank)
    trainer = _trainer(net)
    _train(net, trainer, rank, range(2))
    kept = parameters(net)
    twin = duplicate(trainer)
    own = {id(parameter) for parameter in trainer._params}
    assert len(twin._params) == 6 and not any(id(parameter) in own for parameter in twin._params)
    for number, parameter in enumerate(twin._params):
        parameter.grad()[:] = number + 2 * rank
    twin.allreduce_grads()  # no step(): MXNet attaches no gradients to the values of a copy
    for number, parameter in enumerate(twin._params):
        assert (parameter.grad().asnumpy() == number + 1).all()
    for name, values in parameters(net).items():
        np.testing.assert_array_equal(values, kept[name])
    _train(net, trainer, rank, range(2, 4))
    assert all(_shared(net))
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_training_goes_on_after_shutdown_and_init(rank, gather, form):
    """The gradients are in the old segment, which the new core does not use."""
    (in_place, a), (copied, c) = _twins(dense_network, rank, form, _ALL_IN_ONE)
    for net, trainer in ((in_place, a), (copied, c)):
        _train(net, trainer, rank, range(2))
    gather("all ranks are done with what they asked for")
    mykv.shutdown()
    gather("all ranks have left")
    mykv.init()
    for net, trainer in ((in_place, a), (copied, c)):
        _train(net, trainer, rank, range(2, 4))
        _set_grad_req(net, "add")
        _train(net, trainer, rank, [4])
    assert checksum(in_place) == checksum(copied)
    assert len(set(gather(checksum(in_place)))) == 1
    fresh = dense_network(seed=rank)
    _train(fresh, _trainer(fresh), rank, range(2))
    assert all(_shared(fresh))
    assert len(set(gather(checksum(fresh)))) == 1


@pytest.mark.ranks(2)
def test_a_network_outlives_its_trainer(rank, gather):
    net, reference = dense_network(seed=rank), dense_network(seed=rank)
    net.hybridize(**_STATIC)
    trainer = _trainer(net)
    _train(net, trainer, rank, range(2))
    del trainer
    gc.collect()
    _backward(net, rank, 2)  # writes to memory of which the network is the last owner
    _all_parameters(net, "zero_grad")
    _train(net, _trainer(net), rank, range(2, 4))
    _train(reference, _trainer(reference, 0), rank, range(4))
    _assert_equal(net, reference)
    assert len(set(gather(checksum(net)))) == 1


def _resident() -> int:
    """Bytes of the shared segments that are in memory here."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return sum(int(re.search(r"Rss: +(\d+) kB", block)[1]) << 10 for block in blocks if "memfd:mykv" in block)


def _own_bytes() -> int:
    """Bytes of this process that it shares with no other."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim()")
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 keeps freed memory")
def test_the_memory_of_moved_gradients_goes_back_to_the_system(rank):
    """Between arrays that stay, glibc keeps what is freed."""
    net = nn.Sequential()
    for _ in range(500):  # gradients of 80 KB, which are in glibc's heap
        net.add(nn.Dense(100, in_units=200, use_bias=False))
    net.initialize()
    mx.nd.waitall()
    before = _own_bytes()
    _trainer(net).allreduce_grads()
    mx.nd.waitall()
    assert before - _own_bytes() > 0.8 * 500 * 80e3


@pytest.mark.ranks(2)
def test_memory_is_given_back_with_the_trainer(rank, gather):
    width = 500  # 1 MB of gradients

    def one_round():
        net = dense_network(seed=0, inputs=width, widths=(width, 4))
        net.hybridize(**_STATIC)
        trainer = _trainer(net)
        _train(net, trainer, rank, range(2), shape=(width,))
        assert all(_shared(net))
        mx.nd.waitall()
        return _resident()

    def leftover():
        gc.collect()
        mx.nd.waitall()
        # The engine frees arrays when it comes to it; the other rank's buckets, which this one has read, count too.
        smallest = time.monotonic()
        least = _resident()
        while time.monotonic() < smallest + 0.5:
            time.sleep(0.02)
            if _resident() < least:
                smallest, least = time.monotonic(), _resident()
        return least

    one_round()
    own = leftover()
    before = max(gather(own))
    assert one_round() > own + 2 * width * width  # half of its gradients, for what earlier tests give back meanwhile
    for _ in range(20):
        one_round()
    # The table of operations, in the same segment, comes into use little by little.
    assert max(gather(leftover())) < before + 4 * width * width, "20 rounds leave more behind than one of them takes"


@pytest.mark.ranks(2)
def test_memory_is_given_back_with_the_network_when_its_trainer_went_first(rank, gather):
    net = dense_network(seed=0, inputs=500, widths=(500,))
    trainer = _trainer(net)
    _train(net, trainer, rank, range(1), shape=(500,))
    gc.collect()  # networks of earlier tests
    mx.nd.waitall()
    gather("trained")
    full = _resident()
    del trainer
    gc.collect()
    gather("without trainer")
    assert _resident() == full and all(_shared(net))
    del net
    gc.collect()
    mx.nd.waitall()
    gather("without network")
    assert _resident() <= full - 500 * 500 * 4


class _DeviceMemory:
    """Simulates GPU memory in CPU memory, DLPack's device (1, 0)."""

    def __init__(self, device, capacity):
        self.device, self.values = device, np.zeros(capacity, "uint8")
        self.address = self.values.ctypes.data


def test_a_bucket_of_a_gpu_holds_gradients_on_cache_lines_and_is_reduced_from_its_first_element(monkeypatch):
    made = SimpleNamespace(PreparedBucket=lambda *given, **options: (given, options), GpuMemory=_DeviceMemory)
    made.world = lambda: "group of all ranks"
    monkeypatch.setattr(bucket_memory.process, "core", made)
    monkeypatch.setattr(bucket_memory, "_DLPACK_GPU", 1)
    bucket = bucket_memory.DeviceBucket(SimpleNamespace(_core=made), np.dtype("float32"), 1024, 0)
    owner = gluon.Parameter("owner", shape=(1,))
    views = [bucket.add(owner, array(np.full(count, count, "float32"))).view for count in (3, 17, 1)]
    for view in views:
        view += 1
    mx.nd.waitall()
    assert [place.begin for place in bucket.members] == [0, 64, 192] and bucket.used == 256
    values = bucket._memory.values.view("float32")
    assert values[:3].tolist() == [4] * 3 and values[16:33].tolist() == [18] * 17 and values[48] == 2
    given, options = bucket.prepare("name", 64, "layout", [7], "sum", shards=[(0, 64, 0)])
    assert given == ("name", "group of all ranks", bucket._memory, 0, 64, "float32", "layout", [7], "sum")
    assert options == {"shards": [(0, 64, 0)]}


_IN_PLACE = {"stype": "default", "shape": (2, 3), "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(
    ("other", "in_place"),
    [
        ({}, True),
        ({"dtype": "int64"}, True),
        ({"device": "gpu"}, True),
        ({"device": "cpu_pinned"}, False),
        ({"dtype": "bool"}, False),
        ({"stype": "row_sparse"}, False),
        ({"shape": (0, 3)}, False),
        ({"shape": ()}, False),
    ],
    ids=str,
)
def test_gradients_that_a_bucket_can_hold(other, in_place):
    how = {**_IN_PLACE, **other}
    context = SimpleNamespace(device_type=how["device"])
    gradient = SimpleNamespace(**how, size=int(np.prod(how["shape"])), context=context)
    parameter = SimpleNamespace(_grad=[gradient])
    assert bucket_memory.GradientMemory._fits_bucket(parameter) is in_place
    parameter._grad.append(gradient)  # a replica on another device
    assert not bucket_memory.GradientMemory._fits_bucket(parameter)

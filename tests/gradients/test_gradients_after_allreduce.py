"""Between allreduce_grads() and update(): gradients that are sums, as scripts for Horovod expect them."""

from __future__ import annotations

import logging
import sys
import types

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, array, checksum, dense_network, mx, parameters, structure
from kvstore_plugin.integrations import horovod_scripts
from mxnet import autograd, gluon
from mxnet.gluon import nn

if IS_2:
    from mxnet import amp
else:
    from mxnet.contrib import amp

_MOMENTUM = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})
_BATCH = 4
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2", "MYKV_COMPRESS_BYTES": "0"}


def _trainer(net, shown="sum", **options):
    return mykv.DistributedTrainer(net.collect_params(), *_MOMENTUM, gradients_after_allreduce=shown, **options)


def _batch(seed, dtype="float32"):
    return array(np.random.RandomState(seed).uniform(-1, 1, (_BATCH, 6)).astype(dtype))


def _backward(net, rank, step=0, dtype="float32"):
    with autograd.record():
        loss = (net(_batch(1000 * step + rank, dtype)) ** 2).sum()
    loss.backward()


def _gradients(net):
    return [parameter.grad(parameter.list_ctx()[0]) for parameter in structure(net).values()]


def _train(net, trainer, rank, by_step=False, max_norm=None, steps=3, dtype="float32"):
    for step in range(steps):
        _backward(net, rank, step, dtype)
        if by_step:
            trainer.step(_BATCH)
            continue
        trainer.allreduce_grads()
        if max_norm is not None:
            gluon.utils.clip_global_norm(_gradients(net), max_norm)
        trainer.update(_BATCH)
    return parameters(net)


def _assert_close(values, expected, rtol=1e-6):
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name], rtol, atol=1e-7, err_msg=name)


@pytest.mark.ranks(1, 2, 3)
def test_sums_are_shown_and_training_is_that_of_means(rank, size, gather):
    for bucket_bytes, predivide in ((0, 4.0), (16 << 20, 1.0)):
        options = {"bucket_bytes": bucket_bytes, "gradient_predivide_factor": predivide}
        for by_step in (False, True):
            nets = [dense_network(seed=rank) for _ in range(2)]
            trained = [
                _train(net, _trainer(net, one, **options), rank, by_step) for net, one in zip(nets, ("mean", "sum"))
            ]
            _assert_close(trained[1], trained[0])
            if size < 3:  # halves are exact
                assert checksum(nets[1]) == checksum(nets[0])
            assert len(set(gather(checksum(nets[1])))) == 1
        trainer = _trainer(nets[1], **options)
        for gradient in _gradients(nets[1]):
            gradient[:] = rank + 1
        trainer.allreduce_grads()
        for gradient in _gradients(nets[1]):
            assert (gradient.asnumpy() == size * (size + 1) / 2 / predivide).all()


@pytest.mark.ranks(1, 2, 3)
def test_clipping_of_sums_at_so_many_norms_is_that_of_one_process(rank, size, gather):
    """As scripts for Horovod clip: at the norm times the number of workers."""
    max_norm = 0.5 * _BATCH
    net, alone = dense_network(seed=0), dense_network(seed=0)
    _train(net, _trainer(net), rank, max_norm=max_norm * size)
    trainer = gluon.Trainer(alone.collect_params(), *_MOMENTUM, kvstore=None)
    for step in range(3):
        with autograd.record():
            loss = sum((alone(_batch(1000 * step + one)) ** 2).sum() for one in range(size))
        loss.backward()
        gluon.utils.clip_global_norm(_gradients(alone), max_norm * size)
        trainer.step(_BATCH * size)
    _assert_close(parameters(net), parameters(alone), rtol=1e-5)
    unclipped = dense_network(seed=0)
    assert checksum(net) != checksum(unclipped)
    _train(unclipped, _trainer(unclipped), rank)
    assert checksum(net) != checksum(unclipped), "nothing was clipped"


@pytest.mark.ranks(3)
def test_sums_over_a_process_set(rank, gather):
    pair = mykv.add_process_set([0, 2])
    try:
        trained = []
        for shown in ("mean", "sum"):
            net = dense_network(seed=rank)
            trained.append(_train(net, _trainer(net, shown, process_set=pair), rank))
            _backward(net, rank)
        _assert_close(trained[1], trained[0])
        trainer = _trainer(net, process_set=pair, gradient_predivide_factor=2.0)
        for gradient in _gradients(net):
            gradient[:] = 1.0
        trainer.allreduce_grads()
        # The worker outside trains alone, on its own gradients.
        assert {float(gradient.asnumpy().max()) for gradient in _gradients(net)} == {1.0}
    finally:
        mykv.remove_process_set(pair)


@pytest.mark.ranks(2, env=_HOSTS)
@pytest.mark.parametrize("options", [{}, {"type": "fp16"}, {"type": "topk", "k": 0.3}], ids=lambda one: one.get("type"))
def test_sums_between_hosts(rank, gather, options):
    more = {"compression_params": options} if options else {}
    trained = []
    for shown in ("mean", "sum"):
        net = dense_network(seed=0)
        trained.append(_train(net, _trainer(net, shown, **more), rank))
        assert len(set(gather(checksum(net)))) == 1
    _assert_close(trained[1], trained[0], rtol=1e-5)


@pytest.mark.ranks(2)
def test_sums_of_several_devices(rank, gather):
    trained = []
    for shown in ("mean", "sum"):
        devices = [mx.cpu(number) for number in range(2)]
        net = dense_network(seed=0, ctx=devices)
        trainer = _trainer(net, shown)
        for _ in range(2):
            for parameter in structure(net).values():
                for device in devices:
                    parameter.grad(device)[:] = 1
                    parameter.data(device)._fresh_grad = True
            trainer.allreduce_grads()
            for parameter in structure(net).values():
                for device in devices:
                    assert (parameter.grad(device).asnumpy() == (4 if shown == "sum" else 2)).all()
            trainer.update(5)
        trained.append(parameters(net))
        assert len(set(gather(checksum(net)))) == 1
    _assert_close(trained[1], trained[0])


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")
def test_sums_of_rows(rank):
    trained = []
    for shown in ("mean", "sum"):
        net = nn.Embedding(8, 3, sparse_grad=True)
        net.initialize(mx.init.One())
        trainer = mykv.DistributedTrainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1}, gradients_after_allreduce=shown
        )
        with autograd.record():
            loss = net(array(np.array([rank, 5]))).sum()
        loss.backward()
        trainer.allreduce_grads()
        gradient = net.weight.grad()
        assert gradient.indices.asnumpy().tolist() == [0, 1, 5]
        assert gradient.data.asnumpy()[:, 0].tolist() == ([1.0, 1.0, 2.0] if shown == "sum" else [0.5, 0.5, 1.0])
        trainer.update(1)
        trained.append(net.weight.data().asnumpy())
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-6)


@pytest.mark.ranks(2)
def test_sums_stay_sums_where_mixed_precision_unscales_them(rank, monkeypatch):
    monkeypatch.setattr(amp.amp, "_amp_initialized", True)  # without the operators, which would be replaced for good
    monkeypatch.setattr(amp.amp, "_amp_loss_scale_initialized", True)
    trained, norms = [], []
    for shown in ("mean", "sum"):
        net = dense_network(seed=0)
        trainer = _trainer(net, shown)
        amp.init_trainer(trainer)
        scaler = trainer._amp_loss_scaler
        scaler._loss_scale = scaler._next_loss_scale = 2.0**10
        for step in range(4):
            factor = float("inf") if (step, rank) == (2, 1) else 1.0
            with autograd.record():
                loss = (net(_batch(1000 * step + rank)) ** 2).sum() * factor
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.allreduce_grads()
            amp.unscale(trainer)
            norms.append(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in _gradients(net)) ** 0.5)
            before = checksum(net)
            trainer.update(_BATCH)
            assert (checksum(net) == before) == (step == 2)
        trained.append(parameters(net))
    _assert_close(trained[1], trained[0])
    np.testing.assert_allclose(norms[4:6], np.multiply(norms[:2], 2), rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("by_step", [True, False], ids=["step", "update"])
def test_sums_of_workers_that_have_not_ended(rank, gather, divide_by_all, by_step):
    nets = [dense_network(seed=0) for _ in range(2)]
    trained = []
    for net, shown in zip(nets, ("mean", "sum")):
        trainer = _trainer(net, shown)
        with mykv.join(trainer, divide_by_initial_world_size=divide_by_all):
            trained.append(_train(net, trainer, rank, by_step, steps=2 + 3 * rank))
    _assert_close(parameters(nets[1]), parameters(nets[0]), rtol=1e-5)
    assert len(set(gather(checksum(nets[1])))) == 1


_REFUSED = [
    ({"gradients_after_allreduce": "average"}, ValueError, "must be 'mean' or 'sum', not 'average'"),
    ({"gradients_after_allreduce": 1}, TypeError, "must be a str or None, not int"),
    ({"gradients_after_allreduce": "mean", "reduce_method": "sum"}, ValueError, "reduce_method='sum'"),
    ({"gradients_after_allreduce": "sum", "update_on_kvstore": True}, ValueError, "update_on_kvstore=True"),
    ({"gradients_after_allreduce": "sum", "parameter_process_sets": {0: None}}, ValueError, "parameter_process_sets"),
]


@pytest.mark.ranks(2)
def test_what_does_not_go_together_is_refused():
    net = dense_network(seed=0)
    for options, kind, words in _REFUSED:
        with pytest.raises(kind, match=words):
            mykv.DistributedTrainer(list(net.collect_params().values()), *_MOMENTUM, **options)


@pytest.mark.ranks(2)
def test_workers_with_other_ideas_of_their_gradients_are_told(rank):
    net = dense_network(seed=0)
    with pytest.raises(RuntimeError, match=r"gradients_after_allreduce='mean'.*gradients_after_allreduce='sum'"):
        _trainer(net, "sum" if rank else None)
    _trainer(net, None if rank else "mean")  # which are the same


_SCRIPT = """
def step(trainer):
    trainer.allreduce_grads()
"""
_PROGRAM = """
import kvstore_plugin as hvd

def train(trainer, step):
    step(trainer)
"""


def _run(source):
    module = types.ModuleType("of_a_user")
    exec(source, vars(module))
    return module


def _warnings(caplog):
    return sum("gradients_after_allreduce='sum'" in record.getMessage() for record in caplog.records)


def _reexport(monkeypatch):
    offered = types.ModuleType("horovod.mxnet")
    vars(offered).update({name: getattr(mykv, name) for name in mykv.__all__})
    monkeypatch.setitem(sys.modules, "horovod.mxnet", offered)


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(horovod_scripts, "_told", set())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("known_by", ["hvd", "horovod.mxnet", "nothing"])
def test_a_script_for_horovod_is_told_of_means_once(rank, size, told, caplog, monkeypatch, known_by):
    class OfUser(mykv.DistributedTrainer):
        pass

    if known_by == "horovod.mxnet":
        _reexport(monkeypatch)
    step = _run(_SCRIPT).step
    train = _run(_PROGRAM if known_by == "hvd" else _PROGRAM.replace("hvd", "mykv")).train
    for make in (mykv.DistributedTrainer, OfUser):
        net = dense_network(seed=0)
        trainer = make(net.collect_params(), *_MOMENTUM)
        for number in range(2):
            _backward(net, rank, number)
            with caplog.at_level(logging.WARNING):
                train(trainer, step)
            trainer.update(_BATCH)
    assert _warnings(caplog) == (rank == 0 and size > 1 and known_by != "nothing")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"gradients_after_allreduce": "sum"}, {"gradients_after_allreduce": "mean"}, {"reduce_method": "sum"}],
    ids=["sum", "mean", "reduced to sums"],
)
def test_who_has_chosen_is_not_warned(rank, told, caplog, monkeypatch, options):
    _reexport(monkeypatch)
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_MOMENTUM, **options)
    _backward(net, rank)
    with caplog.at_level(logging.WARNING):
        trainer.allreduce_grads()
    assert _warnings(caplog) == 0


@pytest.mark.ranks(2)
def test_step_and_other_peoples_modules_warn_of_nothing(rank, told, caplog, monkeypatch):
    other = types.ModuleType("horovod.mxnet")
    other.DistributedTrainer = type("DistributedTrainer", (gluon.Trainer,), {})
    monkeypatch.setitem(sys.modules, "horovod.mxnet", other)
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_MOMENTUM)
    _backward(net, rank)
    with caplog.at_level(logging.WARNING):
        trainer.allreduce_grads()
        trainer.update(_BATCH)
        _reexport(monkeypatch)
        _backward(net, rank)
        trainer.step(_BATCH)
    assert _warnings(caplog) == 0

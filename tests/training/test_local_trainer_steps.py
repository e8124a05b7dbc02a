"""Local steps of a LocalTrainer with clipping and with mixed precision, compared with gluon.Trainer in one process."""

from __future__ import annotations

import textwrap

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.marks import long
from harness.support import IS_2, array, checksum, dense_network, parameters, structure
from mxnet import autograd, gluon

if IS_2:
    from mxnet import amp
else:
    from mxnet.contrib import amp

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_BATCH, _STEPS, _PERIOD, _WARMUP = 4, 8, 3, 2
_MOST = 0.5  # some norms of these gradients are larger, and some smaller


@pytest.fixture(autouse=True)
def _amp_without_casts(monkeypatch):
    """AMP as amp.init() leaves it, but for the operators, which it would replace for good and for all other tests."""
    monkeypatch.setattr(amp.amp, "_amp_initialized", True)
    monkeypatch.setattr(amp.amp, "_amp_loss_scale_initialized", True)  # a scaler of its own for each trainer


def _loss(net, step, rank):
    return (net(array(np.random.RandomState(100 * step + rank).randn(_BATCH, 6).astype("float32"))) ** 2).sum()


class _Model:
    """All workers in this process: local SGD with clipping, which leaves some steps of some workers out."""

    def __init__(self, size, most=None, skipped=()):
        self.nets = [dense_network(0) for _ in range(size)]
        self._trainers = [gluon.Trainer(net.collect_params(), *_SGD, kvstore=None) for net in self.nets]
        self._most, self._skipped = most, skipped
        self.norms = []  # for each step, those of all workers

    def step(self, number):
        for rank, net in enumerate(self.nets):
            with autograd.record():
                loss = _loss(net, number, rank)
            loss.backward()
        if number < _WARMUP:
            for replicas in zip(*(structure(net).values() for net in self.nets)):
                mean = np.mean([one.grad().asnumpy() for one in replicas], axis=0)
                for one in replicas:
                    one.grad()[:] = array(mean)
        everywhere = number < _WARMUP and any(step == number for step, _ in self._skipped)
        norms = []
        for rank, (net, trainer) in enumerate(zip(self.nets, self._trainers)):
            gradients = [one.grad() for one in structure(net).values()]
            norms.append(np.sqrt(sum((one.asnumpy().astype("float64") ** 2).sum() for one in gradients)) / _BATCH)
            if self._most is not None and norms[-1] > self._most:
                for one in gradients:
                    one *= self._most / norms[-1]
            if not everywhere and (number, rank) not in self._skipped:
                trainer.step(_BATCH)
        self.norms.append(norms)
        if number >= _WARMUP and (number - _WARMUP) % _PERIOD == _PERIOD - 1:
            self.meet()

    def meet(self):
        values = [parameters(net) for net in self.nets]
        for net in self.nets:
            for name, parameter in structure(net).items():
                parameter.set_data(array(np.mean([one[name] for one in values], axis=0)))


def _compare(net, model, rank):
    expected = parameters(model.nets[rank])
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def _made(net, **options):
    return mykv.LocalTrainer(net.collect_params(), *_SGD, period=_PERIOD, warmup_steps=_WARMUP, **options)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("most", [_MOST, 1e6])
def test_a_local_step_clips_by_the_norm_of_its_own_gradients(gather, rank, size, most):
    net = dense_network(rank)
    trainer, model = _made(net, clip_global_norm=most), _Model(size, most)
    assert trainer.gradient_norm is None
    norms = []
    for step in range(_STEPS):
        with autograd.record():
            loss = _loss(net, step, rank)
        loss.backward()
        trainer.step(_BATCH)
        norms.append(trainer.gradient_norm)
        model.step(step)
    assert len(set(gather(checksum(net)))) == 1, "step 7 ends with a meeting"
    norms = [float(one.asnumpy()[0]) for one in norms]
    expected = np.array(model.norms)
    np.testing.assert_allclose(norms, expected[:, rank], rtol=1e-4)
    assert expected.min() < _MOST < expected.max(), "the test clips some steps and not others"
    for step, told in enumerate(zip(*gather(norms))):
        assert len(set(told)) == (1 if step < _WARMUP else size), "in the warm-up the norm is that of the mean"
    _compare(net, model, rank)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("most", [None, _MOST])
def test_an_overflow_skips_a_local_step_of_its_worker_alone(gather, rank, size, most):
    skipped = {(1, 0), (3, 1), (6, 0), (7, 0)}  # a step of the warm-up; a step in a period; two at the end of a period
    net = dense_network(rank)
    trainer, model = _made(net, clip_global_norm=most), _Model(size, most, skipped)
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 2.0**10
    scales, meetings = [], []
    for step in range(_STEPS):
        with autograd.record():
            loss = _loss(net, step, rank) * (float("inf") if (step, rank) in skipped else 1.0)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(_BATCH)
        model.step(step)
        scales.append(trainer._amp_loss_scaler.loss_scale)
        if len(set(gather(checksum(net)))) == 1:
            meetings.append(step)
        _compare(net, model, rank)
    assert meetings == [0, 1, 4, 7], "weights are equal in the warm-up and after meetings"
    # MXNet uses a new scale a step after it has found it: 2**9 after step 1, and later this worker's own.
    assert scales[2] == 2.0**9 and scales[4] == (2.0**8 if rank == 1 else 2.0**9)
    assert scales[7] == (2.0**8 if rank in (0, 1) else 2.0**9)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


# On a CPU MXNet computes relu in float16 on every machine, and dense layers in float32 only.
_RELU = (
    """
    def forward(self, x):
        return mx.npx.relu(x).astype("float32")
"""
    if IS_2
    else """
    def hybrid_forward(self, F, x):
        return F.cast(F.relu(x), dtype="float32")
"""
)
_INIT = "from mxnet import amp; mx.npx.set_np()" if IS_2 else "from mxnet.contrib import amp"
_ARRAY = "mx.np.array" if IS_2 else "mx.nd.array"
_SCRIPT = f"""
import mxnet as mx, numpy as np
import kvstore_plugin as mykv
from mxnet import autograd, gluon
{_INIT}

class Relu(gluon.HybridBlock):
{_RELU}
amp.init("float16", target_precision_ops=["{"_npx_relu" if IS_2 else "relu"}"], fp32_ops=[])
mykv.init()
rank = mykv.rank()
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(16), Relu(), gluon.nn.Dense(2))
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = mykv.LocalTrainer(net.collect_params(), "adam", {{"learning_rate": 0.05}}, period=4, warmup_steps=4,
                            clip_global_norm=1.0, overlap=OVERLAP)
amp.init_trainer(trainer)
scaler = trainer._amp_loss_scaler
scaler._loss_scale = scaler._next_loss_scale = 2.0**12
losses, skipped, before = [], [], None
for step in range(44):
    values = np.random.RandomState(2 * step + rank).randn(16, 8).astype("float32")
    with autograd.record():
        loss = loss_of(net({_ARRAY}(values)), {_ARRAY}((values.sum(axis=1) > 0).astype("float32")))
        if step in (9, 18, 21) and rank == step % 2:
            loss = loss * float("inf")
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(16)
    weights = np.concatenate([p.data().asnumpy().ravel() for p in net.collect_params().values()])
    if before is not None and (weights == before).all():
        skipped.append(step)
    before = weights
    losses.append(loss.mean().asnumpy().item())
trainer.synchronize()
mykv.check_in_step(net.collect_params())
assert len(set(mykv.allgather_object(np.concatenate(
    [p.data().asnumpy().ravel() for p in net.collect_params().values()]).tobytes()))) == 1
assert skipped == ([18] if rank == 0 else [9, 21]), skipped
assert scaler.loss_scale == (2.0**11 if rank == 0 else 2.0**10), scaler.loss_scale
assert np.isfinite(weights).all()
assert np.mean(losses[-5:]) < 0.6 * losses[0], losses
print("trained", rank)
"""


@pytest.mark.parametrize("overlap", [long(False), True])
def test_a_script_with_float16(mpirun, overlap):
    result = mpirun(2, textwrap.dedent(_SCRIPT).replace("OVERLAP", str(overlap)), timeout=120)
    assert result.code == 0 and result.stdout.count("trained") == 2, result.text

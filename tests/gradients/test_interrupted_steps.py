"""An exception of a signal handler within a step, which the script catches on one worker: no sum mixes two steps.

The gradients of step k are 2**k, so a sum shows the steps of its gradients. Lines before the step's guard are left out:
there the worker has left out a whole step, which only the end of training shows.
"""

from __future__ import annotations

import os
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import Interrupt, interrupted_after, raising_at
from harness.support import IS_2, MXNetError, array, clear_errors, mx
from kvstore_plugin.gradients import dense_reducer
from kvstore_plugin.nn import batch_norm_calls
from mxnet import autograd, gluon
from mxnet.gluon import nn

_STEPS, _AT = 7, 2  # the exception comes in step _AT, after which an error may follow, and right steps
_FILES = [
    "gradients/dense_reducer.py",
    "gradients/planned_reducer.py",
    "gradients/sparse_reducer.py",
    "gradients/reducer.py",
    "gradients/bucket_plan.py",
    "gradients/communication_hook.py",
    "gradients/fence.py",
    "collectives/row_sparse.py",
    "coordination/operation.py",
    "sharded_optimizer/optimizer.py",
]
_PACKAGE = os.path.dirname(mykv.__file__)
_FOLDERS = tuple(os.path.join(_PACKAGE, one) for one in _FILES)


class _Network(gluon.Block):
    def __init__(self, is_sparse: bool):
        super().__init__()
        layers = {"first": nn.Dense(1, use_bias=False, in_units=1), "second": nn.Dense(1, use_bias=False, in_units=1)}
        if is_sparse:
            layers["words"] = nn.Embedding(3, 1, sparse_grad=True)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.initialize(mx.init.Zero())

    def forward(self, data):
        total = self.first(data) + self.second(data)
        if hasattr(self, "words"):
            total = total + self.words(array(np.zeros(1, "float32")))
        return total

    def values(self) -> list[float]:
        return [float(one.data().asnumpy().ravel()[0]) for one in self.collect_params().values()]


def _hook(bucket):
    for one in bucket.arrays:
        mykv.allreduce_(one, process_set=bucket.process_set)


_SGD = "sgd", {"learning_rate": 1.0}
# For each kind of trainer its options; a stock Trainer sums the gradients.
_OWN = {
    "own": {},
    "copied": {"bucket_bytes": 0},
    "clipped": {"clip_global_norm": 1e9},
    "hook": {"communication_hook": _hook},
    "on the store": {"update_on_kvstore": True},
    "stale": {},
    "subset": {"num_groups": 2},  # all ignore stale gradients; in step _AT one of the two operations is left out
    "two calls": {},
    "sparse": {},
}
_KINDS = [*_OWN, "stock", "stock two calls", "stock on the store", "optimizer"]


def _trainer(kind: str, params):
    if kind in _OWN:
        return mykv.DistributedTrainer(params, *_SGD, **_OWN[kind])
    if kind == "optimizer":
        return gluon.Trainer(params, mykv.DistributedOptimizer(mx.optimizer.create(_SGD[0], **_SGD[1])), kvstore=None)
    return gluon.Trainer(params, *_SGD, kvstore="mykv", update_on_kvstore=kind == "stock on the store")


def _step(kind: str, trainer, batch_size: object = 1) -> None:
    if kind.endswith("two calls"):
        trainer.allreduce_grads()
        trainer.update(1)
    else:
        trainer.step(batch_size, ignore_stale_grad=kind in ("stale", "subset"))
    mx.nd.waitall()


def _outcomes(kind: str, net: _Network, number: int | None, at: int, freezes: bool) -> tuple[list[str], list]:
    """What the steps have done to the weights, and the line of the exception. `freezes`: a weight before step `at`."""
    trainer, outcomes, raised = _trainer(kind, net.collect_params()), [], []
    for step in range(_STEPS):
        is_subset = kind == "subset" and step == at
        if freezes and step == at:
            net.second.weight.grad_req = "null"
        with autograd.record():
            part = net.first if is_subset else net
            loss = part(array(np.full((1, 1), 2.0**step, "float32"))) if kind != "sparse" else 2.0**step * net(_ONE)
        loss.backward()
        outcome = "failed"
        try:
            before = net.values()
            if step == at and number is not None:
                with raising_at(number, _FOLDERS) as raised:
                    _step(kind, trainer)
            else:  # a wrong batch size refuses the step after a subset as well
                _step(kind, trainer, "no number" if kind == "subset" and step == at + 1 and raised else 1)
            each = 2.0**step * (mykv.size() if kind.startswith("stock") else 1)
            changes = [old - new for old, new in zip(before, net.values())]
            right = [each, 0.0] if is_subset or (freezes and step >= at) else [each] * len(changes)
            outcome = "right" if changes == right else f"changed by {changes}, not {right}"
        except Interrupt:
            outcome = "interrupted"
        except (MXNetError, TypeError):
            clear_errors()
        outcomes.append(outcome)
    return outcomes, raised


_ONE = array(np.ones((1, 1), "float32"))


def _try_lines(
    kind: str, rank: int, gather, first: int, stride: int, most: int = 1000, at: int = _AT, freezes: bool = False
) -> None:
    mykv.init()
    for number in range(first, first + stride * most, stride):
        net = _Network(kind == "sparse")
        outcomes, raised = _outcomes(kind, net, number if rank == 1 else None, at, freezes)
        for attempt in range(2):  # a step that only one worker has begun fails with the barrier
            try:
                mykv.barrier()
                break
            except MXNetError:
                assert attempt == 0, raised
        (theirs, _, weights), (ours, lines, changed) = gather((outcomes, raised, net.values()))
        if not lines:
            assert ours == theirs == ["right"] * _STEPS
            break
        later = slice(at + 1, None)
        if kind.endswith("on the store"):  # an owner may have updated before the refusal reached it, and sends values
            later = slice(at + 2, None)
        assert set(theirs[:at] + ours[:at]) <= {"right"}, lines
        assert set(theirs[later] + ours[later]) <= {"right", "failed"}, (lines, theirs, ours)
        assert theirs[-1] == ours[-1], (lines, theirs, ours)
        if (at == 0 or freezes) and kind != "on the store":  # there an update without its owner has failed on all
            assert theirs[at] == "right" or ours[-1] == "right", (lines, theirs, ours)
        if kind != "optimizer":  # nothing compares the updates of a DistributedOptimizer
            assert weights == changed or ours[-1] == "failed", (lines, theirs, ours)
    assert number > 10


def _runs(kinds):
    return [pytest.param(one, marks=_NO_SPARSE if one == "sparse" else ()) for one in kinds]


_NO_SPARSE = pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("kind", _runs(_KINDS))
def test_some_lines_of_a_step(kind, rank, gather):
    _try_lines(kind, rank, gather, first=7, stride=13, most=12)


@pytest.mark.long
@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("kind", _runs(_KINDS))
def test_all_lines_of_a_step(kind, rank, gather):
    _try_lines(kind, rank, gather, first=0, stride=1)


# Without "hook": a hook's first run has an exchange of its own.
_AGREEING = ["own", "copied", "on the store", "stale"]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("freezes", [False, True])
def test_some_lines_of_a_step_in_which_the_workers_agree_on_operations(rank, gather, freezes):
    """The first step, and a step after a change of grad_req. A worker that is interrupted takes the others' plan."""
    _try_lines("own", rank, gather, first=5, stride=19, at=_AT if freezes else 0, freezes=freezes)


@pytest.mark.long
@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("kind", _AGREEING)
def test_all_lines_of_a_step_in_which_the_workers_agree_on_operations(kind, rank, gather, freezes):
    _try_lines(kind, rank, gather, first=0, stride=1, at=_AT if freezes else 0, freezes=freezes)


class _OfTheScript(RuntimeError):
    """Errors of the core are RuntimeErrors too."""


def _load(net: _Network, path: str) -> None:
    net.load_parameters(path)


def _freeze(net: _Network, path: str) -> None:
    net.second.weight.grad_req = "null"


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("error", [Interrupt, KeyboardInterrupt, _OfTheScript])
@pytest.mark.parametrize("kind", ["own", "stale", "on the store", "stock"])
@pytest.mark.parametrize("change", [_load, _freeze])
def test_an_exception_while_a_step_waits_for_a_late_worker(rank, gather, tmp_path, kind, change, error):
    mykv.init()
    net, outcomes, path = _Network(False), [], str(tmp_path / f"{rank}.params")
    trainer = _trainer(kind, net.collect_params())
    net.save_parameters(path)
    for step in range(_STEPS):
        if step == _AT:
            change(net, path)
        with autograd.record():
            loss = net(array(np.full((1, 1), 2.0**step, "float32")))
        loss.backward()
        before = net.values()
        try:
            if step == _AT and rank == 1:
                with interrupted_after(0.3, error):
                    _step(kind, trainer)
            else:
                time.sleep(0.8 if step == _AT else 0)
                _step(kind, trainer)
        except MXNetError:
            clear_errors()
            outcomes.append("failed")
            continue
        outcomes.append(before[0] - net.values()[0])
    each = [2.0**step * (mykv.size() if kind == "stock" else 1) for step in range(_STEPS)]
    for of_rank in gather(outcomes):
        assert of_rank[:_AT] == each[:_AT]
        assert all(one in ("failed", right) for one, right in zip(of_rank[_AT + 1 :], each[_AT + 1 :])), of_rank
    (theirs, weights), (ours, changed) = gather((outcomes, net.values()))
    assert theirs[_AT] == "failed" and ours[_AT] == 0
    assert theirs[_AT + 1 :] == ours[_AT + 1 :]
    assert ours[-1] == "failed" or weights == changed


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("kind", ["own", "two calls", "stock"])
def test_an_exception_after_the_batch_norm_calls_of_a_step(rank, gather, kind, monkeypatch):
    mykv.init()
    net = nn.Sequential()
    net.add(nn.Dense(2, in_units=2), mykv.SyncBatchNorm(in_channels=2))
    net.initialize()
    trainer, outcomes = _trainer(kind, net.collect_params()), []
    end_step = batch_norm_calls.end_step

    def raise_after(*given):
        end_step(*given)
        monkeypatch.setattr(batch_norm_calls, "end_step", end_step)
        raise Interrupt("in a signal handler")

    for step in range(_STEPS):
        with autograd.record():
            loss = (net(array(np.full((2, 2), rank + step + 1, "float32"))) ** 2).sum()
        loss.backward()
        if step == _AT and rank == 1:
            monkeypatch.setattr(batch_norm_calls, "end_step", raise_after)
        try:
            _step(kind, trainer)
            outcomes.append("right")
        except (Interrupt, MXNetError):
            clear_errors()
            outcomes.append("failed")
    assert outcomes == ["right"] * _AT + ["failed"] + ["right"] * (_STEPS - _AT - 1)
    theirs, ours = gather([one.data().asnumpy().tolist() for one in net.collect_params().values()])
    assert theirs == ours


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["own", "clipped", "on the store", "two calls", "stock", "stock two calls"])
def test_a_worker_that_cannot_start_one_of_two_operations(rank, gather, kind, failing, monkeypatch):
    """The other worker may have updated from the first operation, so weights would drift apart."""
    mykv.init()
    nets = [nn.Dense(1, use_bias=False, in_units=1, dtype=dtype) for dtype in ("float32", "float64")]
    params = {}
    for net in nets:
        net.initialize(mx.init.One())
        params.update({f"{len(params)}{name}": value for name, value in net.collect_params().items()})
    trainer, outcomes = _trainer(kind, params), []

    def fail(label):
        raise ValueError("no memory")

    def planned_again(reducer, allreduce=dense_reducer.DenseReducer.allreduce):
        def call(*given):
            operations = reducer._operations
            reducer._operations = [*operations]
            reducer._operations[failing] = operations[failing]._replace(push=fail)
            try:
                allreduce(reducer, *given)
            finally:
                reducer._operations = operations

        return call

    for step in range(_STEPS):
        with autograd.record():
            losses = [net(array(np.full((1, 1), 2.0**step, net.weight.dtype))) for net in nets]
        autograd.backward(losses)
        with monkeypatch.context() as patched:
            if step == _AT and rank == 1:
                (reducer,) = (one for one in dense_reducer.living if one._parameters[0] is nets[0].weight)
                assert len(reducer._operations) == 2
                patched.setattr(reducer, "allreduce", planned_again(reducer))
            try:
                _step(kind, trainer)
                outcomes.append("right")
            except (MXNetError, ValueError):
                clear_errors()
                outcomes.append("failed")
    weights = [float(net.weight.data().asnumpy().ravel()[0]) for net in nets]
    (theirs, their_weights), (ours, our_weights) = gather((outcomes, weights))
    assert theirs == ours and ours[: _AT + 1] == ["right"] * _AT + ["failed"]
    assert their_weights == our_weights or set(ours[_AT:]) == {"failed"}
    if failing == 0 or kind.endswith("on the store"):
        assert ours[-1] == "right"

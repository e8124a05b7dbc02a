"""LocalTrainer equals a model of it in one process: every worker's steps by gluon.Trainer, every meeting by numpy."""

from __future__ import annotations

import re
import signal
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import interrupted_after
from harness.support import (
    MXNetError,
    array,
    checksum,
    clear_errors,
    conv_network,
    dense_network,
    mx,
    parameters,
    structure,
)
from kvstore_plugin.training import local_trainer
from kvstore_plugin.training.outer_optimizer import OuterOptimizer
from mxnet import autograd, gluon

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_BATCH = 4
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


def _backward(net, step: int, rank: int, shape=(6,)) -> None:
    x = array(np.random.RandomState(1000 * step + rank).randn(_BATCH, *shape).astype("float32"))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()


def _zero(state) -> None:
    for one in state if isinstance(state, tuple) else [state]:
        one[:] = 0


class _Model:
    """All workers in this process."""

    def __init__(self, size, build=dense_network, rate=1.0, momentum=0.0, nesterov=False, overlap=False, reset=False):
        self.nets = [build(0) for _ in range(size)]
        self.trainers = [gluon.Trainer(net.collect_params(), *_SGD, kvstore=None) for net in self.nets]
        self.anchor = parameters(self.nets[0])
        self.velocity = {name: np.zeros_like(value) for name, value in self.anchor.items()}
        self.rate, self.momentum, self.nesterov, self.overlap, self.reset = rate, momentum, nesterov, overlap, reset
        self.pending = None  # changes under way, and the weights when they were taken

    def steps(self, numbers, first: int, shape=(6,)) -> None:
        """Make numbers[i] steps on worker i."""
        for rank, (net, trainer, number) in enumerate(zip(self.nets, self.trainers, numbers)):
            for step in range(first, first + number):
                _backward(net, step, rank, shape)
                trainer.step(_BATCH)

    def meet(self, numbers, finishes=False) -> None:
        """A meeting; workers whose number is 0 have made no steps."""
        if self.pending is not None:
            changes, snapshots = self.pending
            self.pending = None
            self._move(changes)
            for net, snapshot in zip(self.nets, snapshots):
                here = parameters(net)
                self._set(net, {name: self.anchor[name] + here[name] - snapshot[name] for name in here})
        values = [parameters(net) for net in self.nets]
        taken = [one for one, number in zip(values, numbers) if number]
        changes = {
            name: np.sum([one[name] - start for one in taken], axis=0) / max(len(taken), 1) if taken else 0 * start
            for name, start in self.anchor.items()
        }
        if self.overlap and not finishes:
            self.pending = (changes, values)
        else:
            self._move(changes)
            for net in self.nets:
                self._set(net, self.anchor)
        if self.reset:
            for trainer in self.trainers:
                for state in trainer._updaters[0].states.values():
                    _zero(state)

    def _move(self, changes) -> None:
        for name, change in changes.items():
            self.velocity[name] = self.momentum * self.velocity[name] + self.rate * change
            more = self.momentum * self.velocity[name] + self.rate * change if self.nesterov else self.velocity[name]
            self.anchor[name] = (self.anchor[name] + more).astype("float32")

    @staticmethod
    def _set(net, values) -> None:
        for name, parameter in structure(net).items():
            parameter.set_data(array(values[name].astype("float32")))


_OUTER = {
    "means": {},
    "momentum": {"rate": 0.8, "momentum": 0.5},
    "nesterov": {"rate": 0.7, "momentum": 0.9, "nesterov": True},
    "overlap": {"momentum": 0.5, "overlap": True},
    "reset": {"reset": True},
}


def _arguments(outer) -> dict:
    names = {"rate": "outer_learning_rate", "momentum": "outer_momentum", "reset": "reset_momentum"}
    return {names.get(name, name): value for name, value in outer.items()}


def _compare(net, model, rank) -> None:
    expected = parameters(model.nets[rank])
    for name, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-6, err_msg=name)


_EACH_OUTER = pytest.mark.parametrize(
    "outer",
    [pytest.param(outer, marks=[pytest.mark.smoke] if name == "nesterov" else []) for name, outer in _OUTER.items()],
    ids=_OUTER,
)


@pytest.mark.ranks(1, 2, 3)
@_EACH_OUTER
def test_three_periods_equal_the_model(gather, rank, size, outer):
    _three_periods(gather, rank, size, outer)


@pytest.mark.ranks(4, env=_HOSTS)
@_EACH_OUTER
def test_three_periods_equal_the_model_on_two_hosts(gather, rank, size, outer):
    _three_periods(gather, rank, size, outer)


def _three_periods(gather, rank, size, outer) -> None:
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=3, **_arguments(outer))
    model = _Model(size, **outer)
    for step in range(9):
        _backward(net, step, rank)
        trainer.step(_BATCH)
        model.steps([1] * size, step)
        if step % 3 == 2:
            model.meet([1] * size)
    _compare(net, model, rank)
    if not outer.get("overlap"):
        assert len(set(gather(checksum(net)))) == 1, "the workers hold different weights"
    elif size > 1:
        assert len(set(gather(checksum(net)))) == size
    trainer.synchronize()
    model.meet([int(bool(outer.get("overlap")))] * size, finishes=True)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.smoke
@pytest.mark.ranks(4, env=_HOSTS)
def test_two_hosts_after_steps_made_together(gather, rank, size):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, warmup_steps=3)
    for step in range(7):
        _backward(net, step, rank)
        trainer.step(_BATCH)
        is_equal = len(set(gather(checksum(net)))) == 1
        assert is_equal == (step in (0, 1, 2, 4, 6)), step


@pytest.mark.ranks(2, 3)
def test_workers_make_different_numbers_of_steps(gather, rank, size):
    _different_numbers(gather, rank, size)


@pytest.mark.ranks(4, env=_HOSTS)
def test_workers_of_two_hosts_make_different_numbers_of_steps(gather, rank, size):
    _different_numbers(gather, rank, size)


def _different_numbers(gather, rank, size) -> None:
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.5, nesterov=True)
    model = _Model(size, momentum=0.5, nesterov=True)
    mine = 2 + 3 * rank
    for step in range(mine):
        _backward(net, step, rank)
        trainer.step(_BATCH)
    trainer.synchronize()
    left, done = [2 + 3 * one for one in range(size)], [0] * size
    while any(left):
        now = [min(2, one) for one in left]
        for one in range(size):
            model.steps([now[k] if k == one else 0 for k in range(size)], done[one])
        model.meet(now)
        left = [a - b for a, b in zip(left, now)]
        done = [a + b for a, b in zip(done, now)]
    assert len(set(gather(checksum(net)))) == 1
    _compare(net, model, rank)


@pytest.mark.ranks(2)
def test_a_period_in_seconds_lets_a_slow_worker_make_fewer_steps(gather, rank):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period_seconds=0.2)
    begin, steps = time.monotonic(), 0
    while time.monotonic() - begin < 1.5:
        _backward(net, steps, rank)
        trainer.step(_BATCH)
        mx.nd.waitall()
        time.sleep(0.1 * rank)
        steps += 1
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    fast, slow = gather(steps)
    assert fast > 2 * slow > 2


@pytest.mark.ranks(1)
def test_delays_of_a_slow_worker_do_not_add_up(rank, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(local_trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period_seconds=10)
    met = []
    for step in range(20):
        _backward(net, step, rank)
        trainer.step(_BATCH)
        if trainer._steps_since == 0:
            met.append(clock[0])
        clock[0] += 3
    assert met == [12, 21, 30, 42, 51]


@pytest.mark.ranks(2)
def test_running_means_are_averaged(gather, rank):
    net = conv_network(rank)
    net.add(gluon.nn.BatchNorm())
    net.initialize()
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    for step in range(2):
        _backward(net, step, rank, (1, 8, 8))
        if step == 1:
            mx.nd.waitall()
            means = [v for k, v in parameters(net).items() if k.endswith("running_mean")]
            before = gather(means)
        trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1
    after = [v for k, v in parameters(net).items() if k.endswith("running_mean")]
    assert after and not np.array_equal(before[0][0], before[1][0])
    for k, value in enumerate(after):
        np.testing.assert_allclose(value, (before[0][k] + before[1][k]) / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
def test_running_means_go_on_with_overlap(gather, rank):
    net = conv_network(rank)
    net.add(gluon.nn.BatchNorm())
    net.initialize()
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, overlap=True)
    seen = []
    for step in range(8):
        _backward(net, step, rank, (1, 8, 8))
        trainer.step(_BATCH)
        seen.append(next(v.tobytes() for k, v in parameters(net).items() if k.endswith("running_mean")))
    assert len(set(seen)) == 8, "a meeting has brought back older running means"
    mean = gather(next(v for k, v in parameters(net).items() if k.endswith("running_mean")))
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    after = next(v for k, v in parameters(net).items() if k.endswith("running_mean"))
    np.testing.assert_allclose(after, (mean[0] + mean[1]) / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_stay_where_no_worker_has_made_steps(gather, rank, overlap):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.9, overlap=overlap)
    for step in range(4):
        _backward(net, step, rank)
        trainer.step(_BATCH)
    trainer.synchronize()
    before = gather(checksum(net))
    trainer.synchronize()
    assert gather(checksum(net)) == before and len(set(before)) == 1


@pytest.mark.ranks(2)
def test_a_worker_without_a_batch_synchronizes(gather, rank):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    for step in range(3 * rank):
        _backward(net, step, rank)
        trainer.step(_BATCH)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_weights_that_one_worker_has_loaded(gather, rank):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    if rank == 0:
        _Model._set(net, parameters(dense_network(7)))
    for step in range(2):
        _backward(net, step, rank)
        trainer.step(_BATCH)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_worker_that_does_not_synchronize(gather, rank):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    _backward(net, 0, rank)
    trainer.step(_BATCH)
    with pytest.raises(MXNetError, match="rank 0 is in barrier.*meeting of a LocalTrainer. Call synchronize"):
        trainer.synchronize() if rank else mykv.barrier()
    clear_errors()
    gather("both have their error")
    if rank:
        with pytest.raises(MXNetError, match="rank 0 is in"):
            mykv.barrier()
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_worker_outside_the_process_set_trains_alone(rank):
    with_one = mykv.add_process_set([0])
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, warmup_steps=1, process_set=with_one)
    model = _Model(1, lambda seed: dense_network(rank))
    for step in range(3):
        _backward(net, step, 0)
        trainer.step(_BATCH)
        model.steps([1], step)
    trainer.synchronize()
    _compare(net, model, 0)
    mykv.remove_process_set(with_one)  # other tests of this job add it too


@pytest.mark.ranks(2)
def test_a_parameter_that_is_trained_later_is_refused(rank):
    net = dense_network(rank)
    frozen = next(iter(net.collect_params().values()))
    frozen.grad_req = "null"
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    _backward(net, 0, rank)
    trainer.step(_BATCH)
    frozen.grad_req = "write"
    _backward(net, 1, rank)
    with pytest.raises(RuntimeError, match="was frozen"):
        trainer.step(_BATCH)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_two_devices(gather, rank, overlap):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = dense_network(rank, ctx=devices)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.5, overlap=overlap)
    model = _Model(2, momentum=0.5, overlap=overlap)
    for step in range(4):
        x = np.random.RandomState(1000 * step + rank).randn(_BATCH, 6).astype("float32")
        halves = [array(part, ctx=device) for part, device in zip((x[:1], x[1:]), devices)]
        with autograd.record():
            losses = [(net(half) ** 2).sum() for half in halves]
        autograd.backward(losses)
        trainer.step(_BATCH)
        model.steps([1, 1], step)
        if step % 2:
            model.meet([1, 1])
    expected = parameters(model.nets[rank])
    for name, parameter in structure(net).items():
        first, second = (one.asnumpy() for one in parameter.list_data())
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected[name], rtol=0, atol=1e-6)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


class _Rank(mx.init.Initializer):
    def __init__(self, value):
        super().__init__()
        self._value = value

    def _init_weight(self, _name, array):
        array[()] = self._value


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_axes(gather, rank, overlap, tmp_path):
    with mx.util.np_shape(True), mx.util.np_array(True):
        scalar = gluon.Parameter("scalar", shape=())
        scalar.initialize(_Rank(rank + 1.0))
        options = {"outer_momentum": 0.5, "reset_momentum": True, "overlap": overlap}
        trainer = mykv.LocalTrainer({"scalar": scalar}, *_SGD, period=2, **options)
        for _ in range(3 + rank):
            with autograd.record():
                loss = scalar.data() * (1 + 2 * rank)
            loss.backward()
            trainer.step(1)
        trainer.synchronize()
        assert len(set(gather(float(scalar.data())))) == 1 and float(scalar.data()) < 1
        trainer.save_states(str(tmp_path / f"{rank}"))
        trainer.load_states(str(tmp_path / f"{rank}"))


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
@pytest.mark.parametrize("overlap", [False, True])
def test_naive_engine(gather, rank, overlap):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, overlap=overlap, outer_momentum=0.5)
    model = _Model(2, momentum=0.5, overlap=overlap)
    for step in range(4):
        _backward(net, step, rank)
        trainer.step(_BATCH)
        model.steps([1, 1], step)
        if step % 2:
            model.meet([1, 1])
    _compare(net, model, rank)
    _backward(net, 4, rank)
    trainer.step(_BATCH)
    if rank == 0:
        trainer._meetings.refuse("told to")
    else:
        with pytest.raises(MXNetError, match="told to"):
            trainer.synchronize()
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_refused_meeting_changes_nothing_and_the_next_one_works(gather, rank, size, overlap):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, overlap=overlap)
    for step in range(2):
        _backward(net, step, rank)
        if step == 1 and rank == 0:
            before = parameters(net)
            trainer._meetings.refuse("told to")
            trainer._steps_since = -1  # this worker skips the meeting
            trainer.step(_BATCH)
            trainer._steps_since = 0
            break
        trainer.step(_BATCH)
    if rank == 1:
        with pytest.raises(MXNetError, match="told to"):
            trainer.synchronize() if overlap else mx.nd.waitall()
        if not overlap:
            clear_errors()
    else:
        mx.nd.waitall()
        assert any((parameters(net)[name] != value).any() for name, value in before.items())
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_states_go_on_from_files(gather, rank, size, tmp_path):
    def train(net, trainer, steps):
        for step in steps:
            _backward(net, step, rank)
            trainer.step(_BATCH)

    def made(net):
        return mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.9, nesterov=True)

    net = dense_network(0)
    trainer = made(net)
    train(net, trainer, range(3))
    with pytest.raises(RuntimeError, match="synchronize"):
        trainer.save_states(str(tmp_path / "states"))
    trainer.synchronize()
    name = str(tmp_path / f"states{rank}")
    trainer.save_states(name)
    weights = parameters(net)
    train(net, trainer, range(3, 7))
    trainer.synchronize()

    again = dense_network(0)
    _Model._set(again, weights)
    other = made(again)
    other.load_states(name)
    other.save_states(name)  # before the first step: nothing is lost
    other.load_states(name)
    train(again, other, range(3, 7))
    other.synchronize()
    assert len({*gather(checksum(net)), *gather(checksum(again))}) == 1
    plain = mykv.LocalTrainer(again.collect_params(), *_SGD, period=2)  # without a velocity
    train(again, plain, range(1))
    plain.synchronize()
    with pytest.raises(ValueError, match="in the file, but must be no array"):
        plain.load_states(name)
    warm = mykv.LocalTrainer(again.collect_params(), *_SGD, period=2, warmup_steps=1)
    warm.save_states(name)
    with pytest.raises(ValueError, match="during the warm-up"):
        plain.load_states(name)


def _train(net, trainer, steps, rank) -> None:
    for step in steps:
        _backward(net, step, rank)
        trainer.step(_BATCH)


def _said(call) -> str:
    """Call, wait for MXNet's engine, and return the message of the error; empty when there was none."""
    try:
        call()
        mx.nd.waitall()
    except (MXNetError, ValueError) as error:
        clear_errors()
        return str(error)
    return ""


def _interrupting(original, monkeypatch, owner):
    """Make a method raise KeyboardInterrupt once, at its end."""

    def interrupt(self, *arguments, **named):
        monkeypatch.undo()
        result = original(self, *arguments, **named)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, original.__name__, interrupt)


_PLACES = [(OuterOptimizer._compute, False), (OuterOptimizer._apply, False), (OuterOptimizer._wait, True)]


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize(["place", "overlap"], _PLACES, ids=["before", "behind", "while it waits"])
def test_ctrl_c_in_a_meeting_waits_for_its_end(gather, rank, overlap, place, monkeypatch):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.5, overlap=overlap)
    _train(net, trainer, range(5), rank)
    _backward(net, 5, rank)
    if rank == 0:
        _interrupting(place, monkeypatch, OuterOptimizer)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(_BATCH)
    else:
        trainer.step(_BATCH)
    assert overlap or len(set(gather(checksum(net)))) == 1
    _train(net, trainer, range(6, 9), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_a_signal_while_another_worker_is_awaited_for_the_first_local_step(gather, rank, kind):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    _backward(net, 0, rank)
    if rank == 0:
        with interrupted_after(0.3, kind):
            trainer.step(_BATCH)
        gather("interrupted")
    else:
        gather("interrupted")
        assert re.search(f"{kind.__name__}.*first local step.*rank 0", _said(lambda: trainer.step(_BATCH)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_cannot_take_part_in_a_meeting(gather, rank, overlap, monkeypatch):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.5, overlap=overlap)
    _train(net, trainer, range(3), rank)
    trainer.synchronize()

    def fail(self, *arguments):
        monkeypatch.undo()
        raise ValueError("no memory")

    if rank == 0:
        monkeypatch.setattr(OuterOptimizer, "_compute", fail)
    _train(net, trainer, range(3, 4), rank)
    _backward(net, 4, rank)
    assert "no memory" in _said(trainer.synchronize if overlap else lambda: trainer.step(_BATCH))
    _train(net, trainer, range(5, 8), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    velocities = [one.asnumpy().tobytes() for one in trainer._outer.state().values()]
    assert len(set(gather(b"".join(velocities)))) == 1, "a failed meeting has changed the velocity of one worker"


@pytest.mark.ranks(2)
def test_a_meeting_that_breaks_off_on_one_worker_ends_all_later_meetings(gather, rank, tmp_path, monkeypatch):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.5)
    _train(net, trainer, range(2), rank)
    trainer.synchronize()
    trainer.save_states(str(tmp_path / f"{rank}"))
    _train(net, trainer, range(3), rank)

    def fail(self, *arguments):
        monkeypatch.undo()
        raise ValueError("no memory")

    if rank == 0:
        monkeypatch.setattr(OuterOptimizer, "_apply", fail)
    _backward(net, 3, rank)
    said = _said(lambda: trainer.step(_BATCH))
    assert said == ("" if rank else "no memory")
    for _ in range(2):
        assert "ValueError has interrupted an earlier meeting on rank 0" in _said(trainer.synchronize)
    trainer.load_states(str(tmp_path / f"{rank}"))
    _train(net, trainer, range(4, 8), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_network_that_one_worker_has_not_used(gather, rank, who, warmup):
    net = gluon.nn.Dense(3)
    net.initialize()
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, warmup_steps=warmup)
    if rank == who:
        _backward(net, 0, rank)
    said = _said(lambda: trainer.step(_BATCH) if warmup or rank == who else trainer.synchronize())
    assert f"has no values yet on rank {1 - who}" in said
    _train(net, trainer, range(4), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_worker_that_waits_elsewhere_during_the_first_local_step(gather, rank):
    net = gluon.nn.Dense(3)
    net.initialize()
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    _backward(net, 0, rank)
    said = _said(lambda: trainer.step(_BATCH) if rank else mykv.barrier())
    assert re.search("rank 0 is in barrier.*meeting of a LocalTrainer. Call synchronize", said)
    gather("both have their error")
    if rank:
        with pytest.raises(MXNetError, match="rank 0 is in"):
            mykv.barrier()
    _train(net, trainer, range(4), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("steps", [(0, None), (3, None), (3, 5)], ids=["before the first", "one", "at other steps"])
def test_states_that_not_all_workers_load_at_the_same_step(gather, rank, momentum, steps, tmp_path):
    net = dense_network(rank)
    made = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=momentum)
    name = str(tmp_path / f"{rank}")
    _train(net, made, range(3), rank)
    made.synchronize()
    made.save_states(name)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=momentum)
    for step in range(6):
        if step == steps[rank]:
            trainer.load_states(name)
        _backward(net, step, rank)
        said = _said(lambda: trainer.step(_BATCH))
        if said:
            break
    assert "after load_states(), which all workers must call between the same steps" in said
    gather("all have their error")
    trainer.load_states(name)
    _train(net, trainer, range(4), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_states_and_weights_of_the_root_count(gather, rank, tmp_path):
    def made(net):
        return mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, outer_momentum=0.9)

    net = dense_network(rank)
    trainer = made(net)
    name = str(tmp_path / f"{rank}")
    _train(net, trainer, range(3 + 2 * rank), rank)
    trainer.synchronize()
    if rank == 0:
        trainer.save_states(name)
    _train(net, trainer, range(2), rank)
    trainer.synchronize()
    if rank == 1:
        trainer.save_states(name)  # of a later meeting
    _Model._set(net, parameters(dense_network(rank)))
    trainer.load_states(name)
    _train(net, trainer, range(5), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    velocities = [one.asnumpy().tobytes() for one in trainer._outer.state().values()]
    assert len(set(gather(b"".join(velocities)))) == 1


@pytest.mark.ranks(2)
def test_a_failed_step_of_the_warm_up_counts_on_all_workers(gather, rank):
    net = dense_network(rank)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2, warmup_steps=3)
    _train(net, trainer, range(1), rank)
    if rank == 0:
        with pytest.raises(UserWarning, match="stale"):
            trainer.step(_BATCH)
    else:
        _backward(net, 1, rank)
        assert "stale" in _said(lambda: trainer.step(_BATCH))
    gather("all have their error")
    _train(net, trainer, range(2, 6), rank)
    trainer.synchronize()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_the_warm_up_of_a_file_is_made_by_a_trainer_that_has_made_steps(gather, rank, tmp_path):
    """Two steps of the warm-up are left in the file; then each worker steps alone."""
    name = str(tmp_path / f"states{rank}")
    net = dense_network(0)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=100, warmup_steps=3)
    _train(net, trainer, range(1), rank)
    trainer.save_states(name)
    _train(net, trainer, range(1, 2), rank)
    trainer.load_states(name)
    for _ in range(2):
        _train(net, trainer, range(2, 3), rank)
        assert len(set(gather(checksum(net)))) == 1
    _train(net, trainer, range(3, 4), rank)
    assert len(set(gather(checksum(net)))) == 2


_OPTIMIZERS = {
    "sgd": {},
    "nag": {"momentum": 0.9},
    "dcasgd": {},
    "rmsprop": {},
    "signum": {},
    "adagrad": {},
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_begins_with_new_states_in_each_period(rank, name):
    arguments = (name, {"learning_rate": 0.01, **_OPTIMIZERS[name]})
    net, other = dense_network(0), dense_network(0)
    trainer = mykv.LocalTrainer(net.collect_params(), *arguments, period=3, reset_momentum=True)
    for step in range(9):
        if step % 3 == 0:
            stock = gluon.Trainer(other.collect_params(), *arguments, kvstore=None)
        _backward(net, step, 0)
        trainer.step(_BATCH)
        _backward(other, step, 0)
        stock.step(_BATCH)
        for key, value in parameters(other).items():
            np.testing.assert_allclose(parameters(net)[key], value, rtol=1e-5, atol=1e-6, err_msg=f"{step} {key}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["adam", "nadam", "ftml", "lamb"])
def test_optimizers_whose_states_depend_on_the_count_of_updates_cannot_begin_again(rank, name):
    with pytest.raises(ValueError, match=f"(?i)reset_momentum=True does not work with {name}"):
        mykv.LocalTrainer(dense_network(0).collect_params(), name, period=2, reset_momentum=True)


class _OwnCompressor:
    """A compressor as Horovod's users write it."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({}, ValueError, "either period"),
        ({"period": 2, "period_seconds": 1}, ValueError, "either period"),
        ({"period": 0}, ValueError, "period"),
        ({"period": 1.5}, TypeError, "period"),
        ({"period_seconds": 0}, ValueError, "period_seconds"),
        ({"period": 2, "outer_momentum": 1}, ValueError, "outer_momentum"),
        ({"period": 2, "outer_learning_rate": float("nan")}, ValueError, "outer_learning_rate"),
        ({"period": 2, "warmup_steps": -1}, ValueError, "warmup_steps"),
        ({"period": 2, "compression": _OwnCompressor}, ValueError, "cannot use the compressor .* in its meetings"),
    ],
)
def test_wrong_arguments(rank, arguments, error, said):
    with pytest.raises(error, match=said):
        mykv.LocalTrainer(dense_network(0).collect_params(), *_SGD, **arguments)


@pytest.mark.ranks(2)
def test_workers_with_other_periods_get_an_error(rank):
    with pytest.raises(RuntimeError, match="period=2.*|period=3.*"):
        mykv.LocalTrainer(dense_network(0).collect_params(), *_SGD, period=2 + rank)


@pytest.mark.ranks(1)
def test_calls_that_do_not_fit(rank):
    net = dense_network(0)
    trainer = mykv.LocalTrainer(net.collect_params(), *_SGD, period=2)
    trainer.synchronize()  # before the first step: nothing to do
    for call in (trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(RuntimeError, match="step"):
            call()
    half = mykv.LocalTrainer(dense_network(0, dtype="float16").collect_params(), "sgd", period=2)
    with pytest.raises(NotImplementedError, match="float16"):
        half.step(1, ignore_stale_grad=True)


@pytest.mark.long
@pytest.mark.parametrize("period", [8, 32])
def test_digits_are_learned_as_well_as_with_steps_made_together(mpirun, period):
    pytest.importorskip("sklearn")
    script = f"""
    import sys
    sys.path.insert(0, {str(_EXAMPLES)!r})
    import kvstore_plugin as mykv, mxnet as mx
    from digits_common import SGD, accuracy, batches, data, loss_of, network
    from mxnet import autograd

    mykv.init()
    rank, size = mykv.rank(), mykv.size()
    (images, labels), _ = data()
    length = len(images) // size
    share = slice(rank, length * size, size)
    images, labels = images[share], labels[share]
    for period in (None, {period}):
        net = network(seed=rank)
        if period is None:
            trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", SGD)
        else:
            outer = dict(outer_momentum=0.5, nesterov=True)
            trainer = mykv.LocalTrainer(net.collect_params(), "sgd", SGD, period=period, warmup_steps=22, **outer)
        for epoch in range(20):
            for positions in batches(epoch, length, size):
                with autograd.record():
                    loss = loss_of(net(mx.np.array(images[positions])), mx.np.array(labels[positions]))
                loss.backward()
                trainer.step(len(positions))
        if period is not None:
            trainer.synchronize()
        if rank == 0:
            print(f"accuracy {{accuracy(net):.4f}}")
    """
    result = mpirun(2, textwrap.dedent(script), timeout=120)
    assert result.code == 0, result.text
    together, local = map(float, re.findall(r"accuracy (\S+)", result.stdout))
    print(period, together, local)
    assert together >= 0.95 and local >= together - 0.01

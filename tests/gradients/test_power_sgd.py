"""PowerSGD gives what a model of the paper in numpy gives, and the same bits on all workers."""

from __future__ import annotations

import contextlib
import copy
import pickle
import zlib

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, mx
from kvstore_plugin.gradients import fence
from mxnet import gluon

_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}
_SHAPES = [(12, 9), (10, 3, 2, 2), (7,), (3, 2)]  # the last two travel as they are


def _parameter(number, shape, dtype="float32"):
    parameter = gluon.Parameter(f"p{number}", shape=shape, dtype=dtype)
    parameter.initialize(init=mx.init.Zero())
    return parameter


def _trainer(hook, shapes=_SHAPES, dtype="float32", **options):
    parameters = [_parameter(number, shape, dtype) for number, shape in enumerate(shapes)]
    sgd = ("sgd", {"learning_rate": 1.0})
    return parameters, mykv.DistributedTrainer(parameters, *sgd, communication_hook=hook, **options)


def _gradient(rank, step, number, shape, dtype="float32"):
    random = np.random.RandomState(10000 * step + 100 * number + rank)
    return random.uniform(-1, 1, shape).astype(dtype)


def _set(parameters, rank, step, dtype="float32"):
    for number, one in enumerate(parameters):
        one.grad()[:] = array(_gradient(rank, step, number, one.shape, dtype))
        one.data()._fresh_grad = True


def _step(parameters, trainer, rank, step, dtype="float32"):
    """The mean that the trainer has used, of each gradient."""
    before = [one.data().asnumpy() for one in parameters]
    _set(parameters, rank, step, dtype)
    trainer.step(1)
    return [old - one.data().asnumpy() for old, one in zip(before, parameters)]


class _Model:
    """Algorithms 1 and 2 of the paper without momentum, in float64, for all workers at once."""

    def __init__(self, size, rank, seed=0):
        self.size, self.rank, self.seed = size, rank, seed
        self.errors, self.q = {}, {}

    def means(self, step, shapes=_SHAPES, factor=1.0):
        return [self._mean(step, number, shape) * factor for number, shape in enumerate(shapes)]

    def _mean(self, step, number, shape):
        given = [_gradient(rank, step, number, shape).astype("float64") for rank in range(self.size)]
        n, m = shape[0], int(np.prod(shape[1:]))
        if len(shape) < 2 or (n + m) * self.rank >= n * m:
            return sum(given) / self.size
        if number not in self.q:
            random = np.random.default_rng([self.seed, zlib.crc32(f"p{number}".encode())])
            self.q[number] = random.standard_normal((m, self.rank)).astype("float32").astype("float64")
            self.errors[number] = [0.0] * self.size
        matrices = [one.reshape(n, m) + error for one, error in zip(given, self.errors[number])]
        p = _gram_schmidt(sum(one @ self.q[number] for one in matrices) / self.size)
        self.q[number] = sum(one.T @ p for one in matrices) / self.size
        mean = p @ self.q[number].T
        self.errors[number] = [one - mean for one in matrices]
        return mean.reshape(shape)


def _gram_schmidt(p):
    p = p.copy()
    for column in range(p.shape[1]):
        p[:, column] /= np.linalg.norm(p[:, column])
        for later in range(column + 1, p.shape[1]):
            p[:, later] -= (p[:, column] @ p[:, later]) * p[:, column]
    return p


def _named(hook, **options):
    parameters, trainer = _trainer(hook, **options)
    return {f"p{number}": one for number, one in enumerate(parameters)}, trainer


@pytest.fixture(autouse=True)
def _names(monkeypatch):
    """The names of parameters in a list are 'parameter 0' and so on; the model knows them as p0."""
    original = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda text: original(text.replace(b"parameter ", b"p")))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256}, {"reduce_method": "sum"}], ids=str)
def test_equals_the_model(rank, size, gather, width, options):
    parameters, trainer = _trainer(mykv.PowerSGD(rank=width), **options)
    model = _Model(size, width)
    for step in range(4):
        used = _step(parameters, trainer, rank, step)
        for got, expected in zip(used, model.means(step, factor=size if options.get("reduce_method") else 1.0)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert len(set(gather([one.data().asnumpy().tobytes() for one in parameters].__repr__()))) == 1


@pytest.mark.smoke
@pytest.mark.ranks(4, env=_HOSTS)
def test_on_two_hosts(rank, size, gather):
    parameters, trainer = _trainer(mykv.PowerSGD())
    model = _Model(size, 2)
    for step in range(3):
        for got, expected in zip(_step(parameters, trainer, rank, step), model.means(step)):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(rank, size, dtype):
    parameters, trainer = _trainer(mykv.PowerSGD(), dtype=dtype)
    model = _Model(size, 2)
    tolerance = 5e-3 if dtype == "float16" else 1e-5
    for got, expected in zip(_step(parameters, trainer, rank, 0, dtype), model.means(0)):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(2)
def test_dependent_columns(rank, size, gather):
    """Gradients of rank 1, and of zeros, are exact, and later gradients use all columns again."""
    shapes = [(8, 9)]
    parameters, trainer = _trainer(mykv.PowerSGD(rank=2), shapes=shapes)
    outer = np.outer(np.arange(1, 9), np.arange(1, 10)).astype("float32") * (rank + 1)
    for given in (outer * 0, outer, outer * 0):
        before = parameters[0].data().asnumpy()
        parameters[0].grad()[:] = array(given)
        parameters[0].data()._fresh_grad = True
        trainer.step(1)
        np.testing.assert_allclose(before - parameters[0].data().asnumpy(), given / (rank + 1) * 1.5, atol=1e-3)
    for step in range(2):
        used = _step(parameters, trainer, rank, step)
    assert np.linalg.matrix_rank(used[0], tol=1e-3) == 2
    assert len(set(gather(repr(used[0].tobytes())))) == 1


@pytest.mark.ranks(2)
def test_what_is_left_out_comes_later(rank, size):
    """Error feedback: the sums of what was used follow the sums of the gradients."""
    parameters, trainer = _trainer(mykv.PowerSGD(rank=1), shapes=[(12, 9)])
    same = sum(_gradient(one, 0, 0, (12, 9)) for one in range(size)) / size
    total = 0
    for _ in range(60):
        total = total + _step(parameters, trainer, rank, 0)[0]
    assert np.linalg.norm(total / 60 - same) < 0.2 * np.linalg.norm(same)


def _are_same(before, after):
    return sorted(before) == sorted(after) and all((before[key] == after[key]).all() for key in before)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256}, {"clip_global_norm": 1.0}], ids=str)
def test_a_step_that_is_not_finite_changes_no_state(rank, size, gather, where, options):
    """One gradient of one worker is not finite; the others must not lose what they have kept either."""
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook, **options)
    _step(parameters, trainer, rank, 0)
    before = hook._values()
    _set(parameters, rank, 1)
    if rank == 1:
        parameters[where].grad()[:] = np.nan if where % 2 else np.inf
    trainer.step(1)
    assert not np.isfinite(parameters[where].data().asnumpy()).all()
    assert _are_same(before, hook._values())
    for one in parameters:
        one.set_data(array(np.zeros(one.shape, "float32")))
    _step(parameters, trainer, rank, 2)
    assert not _are_same(before, hook._values())
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1


@pytest.mark.ranks(2)
def test_float16_that_overflows_only_as_float16(rank, size):
    """The means are finite in float32, in which they are computed, and not in the gradient's dtype."""
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook, dtype="float16", reduce_method="sum")
    _step(parameters, trainer, rank, 0, "float16")
    before = hook._values()
    _set(parameters, rank, 1, "float16")
    parameters[0].grad()[:] = 60000
    trainer.step(1)
    assert np.isinf(parameters[0].data().asnumpy()).any()
    assert _are_same(before, hook._values())


class _Scaler:
    """AMP's scaler, as far as a Trainer uses it."""

    loss_scale = 1.0

    def __init__(self):
        self.skipped = 0

    def has_overflow(self, parameters):
        found = not all(np.isfinite(one._grad[0].asnumpy()).all() for one in parameters)
        self.skipped += found
        return found


@pytest.mark.ranks(2)
def test_a_step_that_amp_skips_changes_no_state(rank, size):
    """The hook compresses two gradients, and the overflow is in a third."""
    hook = mykv.PowerSGD()

    def some(bucket):
        (hook if bucket.arrays[0].ndim > 1 else type(bucket).allreduce_)(bucket)

    parameters, trainer = _trainer(some, num_groups=4)
    _step(parameters, trainer, rank, 0)
    before = hook._values()
    trainer._amp_loss_scaler, trainer._amp_original_scale = _Scaler(), trainer._scale
    _set(parameters, rank, 1)
    if rank == 1:
        parameters[2].grad()[:] = np.inf
    trainer.step(1)
    assert trainer._amp_loss_scaler.skipped == 1
    assert _are_same(before, hook._values())
    _step(parameters, trainer, rank, 2)
    assert trainer._amp_loss_scaler.skipped == 1 and not _are_same(before, hook._values())


@pytest.mark.ranks(2)
def test_gradients_that_are_not_used_change_no_state(rank, size):
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook)
    _step(parameters, trainer, rank, 0)
    before = hook._values()
    _set(parameters, rank, 1)
    trainer.allreduce_grads()
    assert _are_same(before, hook._values())
    _set(parameters, rank, 2)
    trainer.allreduce_grads()
    trainer.update(1)
    assert not _are_same(before, hook._values())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("late", [False, True])
def test_a_later_bucket_that_fails_changes_no_state(rank, size, gather, late):
    """The hook fails on one worker when it has reduced the gradients before on all."""
    hook, parameters_of = mykv.PowerSGD(), []

    def fails(bucket):
        hook(bucket)
        parameters_of.extend(bucket.parameters)
        if rank == 1 and fails.now and len(parameters_of) == 4 * (step + 1):
            raise ZeroDivisionError("a fault in the hook")

    fails.now = False
    parameters, trainer = _trainer(fails, num_groups=4)
    for step in range(3):
        fails.now = step == 1
        if not fails.now:
            _step(parameters, trainer, rank, step)
            before = hook._values()
            continue
        _set(parameters, rank, step)
        with pytest.raises(ZeroDivisionError if rank == 1 else MXNetError, match="a fault in the hook"):
            trainer.step(1)
            if late:
                mx.nd.waitall()
            parameters[0].data().asnumpy()
        clear_errors()
        assert _are_same(before, hook._values())
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads_early", [False, True])
def test_a_failed_step_changes_no_state(rank, size, gather, monkeypatch, reads_early):
    """With `reads_early`, the error is read, and so cleared, before the operations that write the state have begun."""
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook)
    where = mx.nd.where

    def where_after_the_error(*given, **named):
        if "out" in named:  # writes the state
            fence.Fence(parameters).push()
            with contextlib.suppress(MXNetError):
                parameters[0].data().asnumpy()
        return where(*given, **named)

    for step in range(0, 40, 2):
        _step(parameters, trainer, rank, step)
        before = hook._values()
        _set(parameters, rank, step + 1)
        with monkeypatch.context() as patch, pytest.raises(MXNetError, match="batch size"):
            patch.setattr(mx.nd, "where", where_after_the_error if reads_early else where)
            trainer.step(1 + rank)
            for one in parameters:
                one.data().asnumpy()
            assert reads_early
            raise MXNetError("batch size")  # was read
        clear_errors()
        assert _are_same(before, hook._values())
    _step(parameters, trainer, rank, 40)
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1


@pytest.mark.ranks(2)
def test_states_are_saved_loaded_and_copied(rank, size, tmp_path):
    hook = mykv.PowerSGD(rank=3, seed=5)
    parameters, trainer = _trainer(hook)
    _step(parameters, trainer, rank, 0)
    hook.save_states(str(tmp_path / f"power-{rank}.npz"))
    copies = [copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))]
    copies.append(mykv.PowerSGD(rank=3, seed=5))
    copies[-1].load_states(str(tmp_path / f"power-{rank}.npz"))
    expected = _step(parameters, trainer, rank, 1)
    for one in copies:
        assert repr(one) == "PowerSGD(rank=3, seed=5)"
        others, other = _trainer(one)
        for got, wanted in zip(_step(others, other, rank, 1), expected):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    fresh = _step(*_trainer(mykv.PowerSGD(rank=3, seed=5)), rank, 1)
    assert not np.allclose(fresh[0], expected[0], atol=1e-3)
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    with pytest.raises(ValueError, match="is not a file of PowerSGD.save_states"):
        copies[0].load_states(str(tmp_path / "other.npz"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "shapes, width, found",
    [
        ([(12, 9), (7, 9)], 2, "parameter 1/error', but load_states.. has read an array of shape .10, 12.*network"),
        ([(12, 9), (10, 3, 2, 2), (8, 8)], 2, "'parameter 2/error', but load_states.. has read nothing"),
        ([(12, 9), (10, 3, 2, 2)], 3, "'parameter 0/q', but load_states.. has read an array of shape .9, 2"),
    ],
    ids=["shape", "missing", "rank"],
)
def test_states_of_another_network_are_an_error(rank, size, tmp_path, shapes, width, found):
    file = str(tmp_path / f"power-{rank}.npz")
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook)
    _step(parameters, trainer, rank, 0)
    hook.save_states(file)
    other = mykv.PowerSGD(rank=width)
    other.load_states(file)
    parameters, trainer = _trainer(other, shapes=shapes)
    with pytest.raises(ValueError, match=found):
        _step(parameters, trainer, rank, 0)
    clear_errors()
    with pytest.raises(ValueError, match=found):  # until another file is loaded
        _step(parameters, trainer, rank, 0)
    clear_errors()


@pytest.mark.ranks(2)
def test_a_file_of_another_network_on_one_worker_fails_the_step_on_all(rank, size, gather, tmp_path):
    file = str(tmp_path / f"power-{rank}.npz")
    hook = mykv.PowerSGD()
    _step(*_trainer(hook, shapes=[(20, 9)]), rank, 0)
    hook.save_states(file)
    hook = mykv.PowerSGD()
    parameters, trainer = _trainer(hook)
    if rank == 1:
        hook.load_states(file)
    with pytest.raises(ValueError if rank == 1 else MXNetError, match="(?s)parameter 0/error.*of shape .20, 9"):
        _step(parameters, trainer, rank, 0)
        parameters[0].data().asnumpy()
    clear_errors()
    hook = trainer._options.communication_hook
    hook.__setstate__(mykv.PowerSGD().__getstate__())
    _step(parameters, trainer, rank, 1)
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1


@pytest.mark.ranks(1)
def test_a_file_from_before_the_first_step(rank, size, tmp_path):
    file = str(tmp_path / "power.npz")
    hook = mykv.PowerSGD()
    hook.save_states(file)
    hook.load_states(file)
    _step(*_trainer(hook), rank, 0)
    assert len(hook._values()) == 4


@pytest.mark.ranks(2)
def test_states_that_no_gradient_has_are_forgotten(rank, size, tmp_path, caplog):
    file = str(tmp_path / f"power-{rank}.npz")
    hook = mykv.PowerSGD()
    _step(*_trainer(hook), rank, 0)
    hook.save_states(file)
    hook = mykv.PowerSGD()
    hook.load_states(file)
    parameters, trainer = _trainer(hook, shapes=_SHAPES[:1])
    _set(parameters, rank, 0)
    trainer.step(1)
    assert "forgets them: parameter 1." in caplog.text
    assert sorted(hook._values()) == ["parameter 0/error", "parameter 0/q"]


@pytest.mark.ranks(2)
def test_the_workers_need_the_same_arguments(rank, size):
    with pytest.raises(RuntimeError, match="(?s)PowerSGD.rank=2, seed=0.*PowerSGD.rank=3, seed=0"):
        _trainer(mykv.PowerSGD(rank=2 + rank))
    for arguments, message in (({"rank": 0}, "rank must be at least 1"), ({"seed": 1.5}, "seed must be an int")):
        with pytest.raises((TypeError, ValueError), match=message):
            mykv.PowerSGD(**arguments)


@pytest.mark.ranks(2)
def test_equal_bits_where_workers_round_sums_differently(rank, size, gather, monkeypatch):
    """As on different CPUs: every sum of products on rank 1 is a little larger."""
    dot = mx.nd.dot

    def rounded(a, b, transpose_a=False):
        made = dot(a, b, transpose_a=transpose_a)
        return made * (1 + 1e-6) if rank == 1 and a.shape[0 if transpose_a else 1] > 1 else made

    monkeypatch.setattr(mx.nd, "dot", rounded)
    parameters, trainer = _trainer(mykv.PowerSGD(rank=3))
    for step in range(3):
        _step(parameters, trainer, rank, step)
    assert len(set(gather(repr([one.data().asnumpy().tobytes() for one in parameters])))) == 1

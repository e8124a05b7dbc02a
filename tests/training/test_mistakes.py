"""A worker makes a user's mistake in a step, all catch the error and continue: no weight differs between them."""

from __future__ import annotations

import contextlib

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, fail, mx, structure
from mxnet import autograd, gluon
from mxnet.gluon import nn

_BATCH = 4
_SGD = ("sgd", {"learning_rate": 0.1})


class _Optimizer(mx.optimizer.SGD):
    """SGD that may be told to fail."""

    fails = False

    def update_multi_precision(self, *arguments):
        if self.fails:
            raise ArithmeticError("planted in the update")
        super().update_multi_precision(*arguments)


class _LateUpdate(mx.optimizer.SGD):
    """SGD whose update of one parameter waits, in MXNet's engine, for work that takes a while."""

    late = None

    def update_multi_precision(self, index, weight, gradient, state):
        if self.late is not None and np.ravel(index).tolist() == [self.late]:
            large = mx.nd.ones((600, 600))
            for _ in range(20):
                large = mx.nd.dot(large, large) / 600
            zero = large[0, :1] * 0
            is_list = isinstance(gradient, (list, tuple))
            late = [
                one + (zero.as_np_ndarray() if type(one) is not type(zero) else zero)
                for one in (gradient if is_list else [gradient])
            ]
            gradient = late if is_list else late[0]
        super().update_multi_precision(index, weight, gradient, state)


_KINDS = ["own", "own on the store", "stock", "stock on the store"]
_every_kind = pytest.mark.parametrize("kind", _KINDS)


class _Training:
    def __init__(self, kind, rank, optimizer=None, net=None, **options):
        self.net = dense_network(seed=rank) if net is None else net
        self.optimizer = optimizer or mx.optimizer.Adam(learning_rate=0.01)
        params, on_store = self.net.collect_params(), kind.endswith("on the store")
        if kind.startswith("own"):
            self.trainer = mykv.DistributedTrainer(params, self.optimizer, update_on_kvstore=on_store, **options)
            self._batch = _BATCH
        else:
            mykv.broadcast_parameters(params)
            store = mx.kv.create("mykv")
            self.trainer = gluon.Trainer(params, self.optimizer, kvstore=store, update_on_kvstore=on_store)
            self._batch = _BATCH * mykv.size()
        self._rank, self._step = rank, 0

    def backward(self):
        draw = np.random.RandomState(10 * self._step + self._rank)
        self._step += 1
        with autograd.record():
            loss = (self.net(array(draw.rand(_BATCH, 6).astype("float32"))) ** 2).sum()
        loss.backward()

    def step(self):
        self.backward()
        self.trainer.step(self._batch)
        mx.nd.waitall()

    def step_in_two(self):
        self.backward()
        self.trainer.allreduce_grads()
        self.trainer.update(self._batch)

    def state(self):
        return checksum(self.net), sorted(self.trainer._optimizer._index_update_count.items())


def _goes_on(gather, training, step=None):
    """Two more steps, after each of which weights and counts of updates are equal on all workers."""
    for _ in range(2):
        (step or training.step)()
        mx.nd.waitall()
        assert len({str(state) for state in gather(training.state())}) == 1


def _goes_on_after_broadcast_states(gather, training, match):
    """Each step fails with an error that matches, until all workers have equal states."""
    for _ in range(2):
        with pytest.raises(MXNetError, match=match):
            training.step()
        clear_errors()
    mykv.broadcast_states(training.trainer)
    _goes_on(gather, training)


@pytest.mark.ranks(3, long=(2,))
@_every_kind
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_stale_gradient_on_one_worker_fails_the_step_of_all(rank, gather, kind, first):
    training = _Training(kind, rank)
    if not first:
        training.step()
    before = training.state()[0]
    training.backward()
    if rank == 1:
        next(iter(structure(training.net).values())).data()._fresh_grad = False
    with pytest.raises((UserWarning, MXNetError), match="on rank 1 is stale"):
        training.trainer.step(training._batch)
        mx.nd.waitall()
    clear_errors()
    assert first or training.state()[0] == before
    _goes_on(gather, training)
    if kind == "own":
        _goes_on(gather, training, training.step_in_two)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "own on the store"])
def test_stale_gradients_that_one_worker_ignores_fail_all_operations_of_the_step(rank, gather, kind):
    training = _Training(kind, rank, bucket_bytes=0)
    training.step()
    before = training.state()[0]
    training.backward()
    with pytest.raises(MXNetError, match="do not take the same step" if rank == 1 else "rank 1"):
        training.trainer.step(training._batch, ignore_stale_grad=rank == 1)
        mx.nd.waitall()
    clear_errors()
    assert training.state()[0] == before
    _goes_on(gather, training)


@pytest.mark.ranks(2)
@_every_kind
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("read", ["weight", "gradient"])
def test_who_reads_one_array_of_a_failed_step_lets_no_other_update_run(rank, gather, kind, read, late):
    """MXNet clears an error that several arrays share as soon as one of them has raised it."""
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    optimizer.__class__, optimizer.aggregate_num = _LateUpdate, 1
    training = _Training(kind, rank, optimizer)
    training.step()
    before = training.state()[0]
    optimizer.late = late
    training.backward()
    training.trainer.step(training._batch + rank)
    first = next(iter(structure(training.net).values()))
    with pytest.raises(MXNetError, match="rank 1"):
        (first.data() if read == "weight" else first.grad()).asnumpy()
        training.trainer._params[0].data().asnumpy()
    clear_errors()
    assert training.state()[0] == before
    optimizer.late = None
    _goes_on(gather, training)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
def test_update_after_the_error_of_allreduce_grads_was_caught(rank, gather, kind, who):
    """On workers that have read a gradient nothing else would stop the update."""
    training = _Training(kind, rank)

    def step(wrong=0):
        training.backward()
        first = next(iter(structure(training.net).values())).grad()
        if wrong and rank == 1:
            mykv.world.process.core.push_failing(first.handle.value, "planted")
        training.trainer.allreduce_grads()
        if wrong and rank in who:
            with pytest.raises(MXNetError):
                first.asnumpy()
            for parameter in structure(training.net).values():
                with contextlib.suppress(MXNetError):
                    parameter.grad().asnumpy()
        training.trainer.update(training._batch)

    if kind == "stock":
        training.trainer = gluon.Trainer(
            training.net.collect_params(), training.optimizer, kvstore=mx.kv.create("mykv"), update_on_kvstore=False
        )
    step()
    before = checksum(training.net)
    with pytest.raises(MXNetError, match="carries the error|update.. is refused") as caught:
        step(wrong=1)
        mx.nd.waitall()
    refused = "update() is refused" in str(caught.value)
    assert refused or rank not in who
    clear_errors()
    assert checksum(training.net) == before
    _goes_on(gather, training, step)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("kind", [*_KINDS, "own copied on the store"])
def test_an_update_that_fails_on_one_worker_is_an_error_on_all_until_states_are_broadcast(rank, gather, kind):
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.5)
    optimizer.__class__ = _Optimizer
    training = _Training(kind, rank, optimizer, **({"bucket_bytes": 0} if "copied" in kind else {}))
    training.step()
    optimizer.fails = rank == 1
    if rank == 1:
        with pytest.raises(ArithmeticError, match="planted in the update"):
            training.step()
    else:
        with contextlib.suppress(MXNetError):
            training.step()
    optimizer.fails = False
    clear_errors()
    _goes_on_after_broadcast_states(gather, training, "a failed update.*broadcast_states")


def _override(trainer, method, fails):
    """Make the trainer one of a subclass whose method raises an error before MXNet's, if fails() is true."""

    def overriding(self, *arguments):
        if fails():
            raise FloatingPointError("planted in a subclass")
        return getattr(super(made, self), method)(*arguments)

    made = type("Mine", (type(trainer),), {method: overriding})
    trainer.__class__ = made


@pytest.mark.ranks(2, long=(3,))
@_every_kind
@pytest.mark.parametrize("method", ["_allreduce_grads", "_update"])
@pytest.mark.parametrize("who", ["one worker", "all workers"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_subclass_whose_method_fails(rank, gather, kind, method, who, first):
    """The others do not sum with gradients of this worker's next step, and do not update alone."""
    training = _Training(kind, rank, mx.optimizer.SGD(learning_rate=0.1, momentum=0.5))
    failing = False
    _override(training.trainer, method, lambda: failing)
    if not first:
        training.step()
    before = checksum(training.net)
    failing = rank == 1 or who == "all workers"
    leaves_out_sums = method == "_allreduce_grads"
    if failing:
        with pytest.raises(FloatingPointError, match="planted in a subclass"):
            training.step()
    elif leaves_out_sums:
        with pytest.raises(MXNetError, match="rank 1.*planted in a subclass"):
            training.step()
    else:
        with contextlib.suppress(MXNetError):
            training.step()
    failing = False
    clear_errors()
    if leaves_out_sums:
        assert checksum(training.net) == before
    if leaves_out_sums or who == "all workers" or kind.endswith("on the store"):
        _goes_on(gather, training)
    else:
        _goes_on_after_broadcast_states(gather, training, "a failed update.*broadcast_states")


@pytest.mark.ranks(2)
def test_a_subclass_whose_update_fails_on_one_worker_after_the_updates_were_compared(rank, gather):
    training = _Training("own", rank)
    training.step_in_two()
    _override(training.trainer, "_update", lambda: rank == 1)
    if rank == 1:
        with pytest.raises(FloatingPointError, match="planted in a subclass"):
            training.step_in_two()
    else:
        training.step_in_two()
    training.trainer.__class__ = mykv.DistributedTrainer
    _goes_on_after_broadcast_states(gather, training, "a failed update.*broadcast_states")


class _Failing(mx.optimizer.SGD):
    """SGD of which an operation fails in MXNet's engine, or where MXNet refuses it, as for lack of memory."""

    fails = ""

    def update_multi_precision(self, index, weight, gradient, state):
        if self.fails == "refused" and 2 in np.ravel(index):
            mx.nd.dot(mx.nd.ones((2, 3)), mx.nd.ones((2, 3)))
        super().update_multi_precision(index, weight, gradient, state)
        if self.fails == "in the engine" and 2 in np.ravel(index):
            fail(weight[0] if isinstance(weight, (list, tuple)) else weight)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("kind", ["own", "own in two", "own clipped", "own copied", "stock"])
@pytest.mark.parametrize("fails", ["in the engine", "refused"])
def test_an_operation_of_mxnet_that_fails_in_the_update_of_one_worker(rank, gather, kind, fails):
    """The others have updated: the workers are told in the next steps, until states are broadcast."""
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.5)
    optimizer.__class__ = _Failing
    options = {"own clipped": {"clip_global_norm": 0.1}, "own copied": {"bucket_bytes": 0}}.get(kind, {})
    training = _Training(kind, rank, optimizer, **options)
    step = training.step_in_two if kind == "own in two" else training.step
    step()
    mx.nd.waitall()
    optimizer.fails = fails if rank == 1 else ""
    with pytest.raises(MXNetError) if rank == 1 else contextlib.nullcontext():
        step()
        mx.nd.waitall()
    optimizer.fails = ""
    clear_errors()
    for _ in range(2):
        with pytest.raises(MXNetError, match="an operation of MXNet in an update|update.. is refused"):
            step()
            mx.nd.waitall()
        clear_errors()
    mykv.broadcast_states(training.trainer)
    _goes_on(gather, training, step)


class _TwoTrainers:
    """A network with a trainer, all of whose parameters another trainer has too, with a parameter of its own."""

    def __init__(self, rank, optimizer):
        self.net, self._rank = dense_network(seed=rank), rank
        self._other = nn.Dense(2, in_units=2)
        self._other.initialize()
        params = [one for net in (self.net, self._other) for one in net.collect_params().values()]
        self.first = mykv.DistributedTrainer(params[:-2], optimizer)
        self.second = mykv.DistributedTrainer(params, "sgd", {"learning_rate": 0.1})

    def step(self, trainer):
        with autograd.record():
            loss = (self._other(self.net(array(np.full((_BATCH, 6), 1.0 + self._rank, "float32")))) ** 2).sum()
        loss.backward()
        trainer.step(_BATCH)
        mx.nd.waitall()


@pytest.mark.ranks(2)
def test_a_failed_update_of_one_of_two_trainers_of_the_same_parameters(rank, gather):
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    optimizer.__class__ = _Failing
    training = _TwoTrainers(rank, optimizer)
    training.step(training.first)
    training.step(training.second)
    optimizer.fails = "in the engine" if rank == 1 else ""
    with pytest.raises(MXNetError) if rank == 1 else contextlib.nullcontext():
        training.step(training.first)
    optimizer.fails = ""
    clear_errors()
    for trainer in (training.first, training.second):
        with pytest.raises(MXNetError, match="an operation of MXNet in an update"):
            training.step(trainer)
        clear_errors()
    mykv.broadcast_states(training.first)  # the other trainer's own parameter is unchanged
    for trainer in (training.second, training.first):
        training.step(trainer)
        assert len(set(gather(checksum(training.net)))) == 1


@pytest.mark.ranks(2)
def test_failed_updates_in_different_steps_of_one_of_two_trainers(rank):
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    optimizer.__class__ = _Optimizer
    training = _TwoTrainers(rank, optimizer)
    training.step(training.first)
    for step in range(2):
        optimizer.fails = rank == step
        with pytest.raises((ArithmeticError, MXNetError)) if rank == step or step else contextlib.nullcontext():
            training.step(training.first)
        clear_errors()
    optimizer.fails = False
    with pytest.raises(MXNetError, match="a failed update"):
        training.step(training.first)
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mistake", ["stale", "batch size", "barrier", "in allreduce_grads", "in update"])
@pytest.mark.parametrize("failing", [(2,), (1, 2)], ids=["once", "twice"])
def test_periodic_operations_of_all_workers_are_in_the_same_steps_after_a_mistake(rank, gather, mistake, failing):
    """Without that, rank 1 would take part in them one step later than rank 0."""
    mx.random.seed(rank)
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4))
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, broadcast_period=2, aux_sync_period=2)
    in_two = mistake.startswith("in ")

    def step(number, wrong):
        with autograd.record():
            loss = (net(array(np.random.RandomState(9 * number + rank).rand(_BATCH, 6).astype("float32"))) ** 2).sum()
        loss.backward()
        weight = net[0].weight.data()
        if wrong and mistake == "barrier":
            mykv.barrier()
        if in_two:
            weight._fresh_grad = True
            original = trainer._reducers[0].allreduce
            if wrong and mistake == "in allreduce_grads":
                trainer._reducers[0].allreduce = lambda *_: (trainer._refuse("planted"), 1 / 0)
            try:
                trainer.allreduce_grads()
            finally:
                trainer._reducers[0].allreduce = original
            weight._fresh_grad = not wrong
            trainer.update(_BATCH)
        else:
            weight._fresh_grad = not (wrong and mistake == "stale")
            trainer.step("many" if wrong and mistake == "batch size" else _BATCH)
        mx.nd.waitall()

    for number in range(5):
        if number not in failing:
            step(number, False)
            continue
        with pytest.raises((MXNetError, UserWarning, TypeError, ValueError, ArithmeticError)):
            step(number, rank == 1)
            mykv.barrier()
        clear_errors()
        if mistake == "barrier" and rank == 0:
            with contextlib.suppress(MXNetError):
                mykv.barrier()
        mykv.barrier()
        clear_errors()
    statistics = net[1].running_mean.data().asnumpy().tobytes()
    assert len(set(gather(trainer._steps))) == 1
    assert trainer._steps % 2 or len(set(gather(statistics))) == 1
    assert len(set(gather(checksum(net[0])))) == 1


@pytest.mark.ranks(3, long=(2,))
@_every_kind
def test_a_worker_that_leaves_a_step_out_and_waits_for_the_others(rank, gather, kind):
    """As with an exception in the loss that is caught around the whole step."""
    training = _Training(kind, rank)
    training.step()
    before = training.state()[0]
    with pytest.raises(
        MXNetError, match="rank 1 is in barrier, but .*in a step of a trainer that rank 1 has not taken"
    ):
        if rank != 1:
            training.step()
        mykv.barrier()
    clear_errors()
    if rank != 1:
        with pytest.raises(MXNetError, match="rank 1 is in barrier"):
            mykv.barrier()
    mykv.barrier()
    assert training.state()[0] == before
    _goes_on(gather, training)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_worker_that_fails_before_or_between_allreduce_grads_and_update(rank, gather, when):
    training = _Training("own", rank)

    def step(fails=""):
        training.backward()
        if fails != "before":
            training.trainer.allreduce_grads()
        if fails:
            raise ArithmeticError("planted")
        training.trainer.update(_BATCH)
        mx.nd.waitall()

    step()
    before = checksum(training.net)
    with pytest.raises(ArithmeticError if rank == 1 else MXNetError, match="planted|rank 1 is in barrier, but"):
        step(when if rank == 1 else "")
    clear_errors()
    with pytest.raises(MXNetError, match="rank 1 is in barrier, but"):
        mykv.barrier()
    clear_errors()
    mykv.barrier()
    assert checksum(training.net) == before
    _goes_on(gather, training, step)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("on_store", [False, True])
def test_a_stock_trainer_that_cannot_read_a_gradient_fails_the_step_of_all(rank, gather, on_store):
    training = _Training("stock on the store" if on_store else "stock", rank)
    training.step()
    before = training.state()[0]
    broken = list(structure(training.net).values())[2]
    gradients = broken.list_grad
    if rank == 1:
        broken.list_grad = lambda: (_ for _ in ()).throw(ArithmeticError("planted"))
    with pytest.raises(ArithmeticError if rank == 1 else MXNetError, match="planted"):
        training.step()
    clear_errors()
    broken.list_grad = gradients
    assert training.state()[0] == before
    _goes_on(gather, training)


class _Schedule(mx.lr_scheduler.LRScheduler):
    """A constant learning rate that may be told to fail."""

    fails = False

    def __call__(self, num_update):
        if self.fails:
            raise ArithmeticError("planted in the schedule")
        return self.base_lr


@pytest.mark.ranks(3, long=(2,))
@_every_kind
@pytest.mark.parametrize("what", ["rate", "batch", "schedule"])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
def test_a_learning_rate_or_batch_size_that_cannot_be_told_fails_the_step_of_all(rank, gather, kind, what, first):
    schedule = _Schedule(0.01) if what == "schedule" else None
    training = _Training(kind, rank, mx.optimizer.Adam(learning_rate=0.01, lr_scheduler=schedule))
    if not first:
        training.step()
    before = training.state()[0]
    training.backward()
    optimizer, batch = training.trainer._optimizer, training._batch
    if rank == 1 and what == "batch":
        batch = "many"
    elif rank == 1 and what == "schedule":
        schedule.fails = True
    elif rank == 1:
        optimizer.lr = "fast"
    try:
        training.trainer.step(batch)
        mx.nd.waitall()
    except (ArithmeticError, TypeError, ValueError, MXNetError):
        pass
    else:
        assert what == "schedule" and rank != 1
    clear_errors()
    optimizer.lr = 0.01
    if schedule is not None:  # the update of one worker has failed, and the others have made theirs
        schedule.fails = False
        with pytest.raises(MXNetError, match="a failed update.*broadcast_states"):
            training.step()
        clear_errors()
        mykv.broadcast_states(training.trainer)
    else:
        assert first or training.state()[0] == before
    _goes_on(gather, training)


@pytest.mark.ranks(2)
def test_a_first_step_that_fails_leaves_stock_trainers_alike(rank, gather):
    """What they compare in the next step is the same on all workers, and still has all settings."""
    training = _Training("stock", rank)
    training.backward()
    if rank == 1:
        next(iter(structure(training.net).values())).data()._fresh_grad = False
    with pytest.raises((UserWarning, MXNetError), match="on rank 1 is stale"):
        training.trainer.step(training._batch)
        mx.nd.waitall()
    clear_errors()
    training.trainer._optimizer.beta1 = 0.9 + 0.05 * rank
    with pytest.raises(MXNetError, match=r"beta1=0.9, rank 1 has .*beta1=0.95\d*\. Give the same"):
        training.step()
    clear_errors()
    training.trainer._optimizer.beta1 = 0.9
    _goes_on(gather, training)


@pytest.mark.ranks(2)
def test_states_that_one_stock_trainer_has_loaded_before_the_first_step(rank, gather, tmp_path):
    other = _Training("own", rank)
    other.step()
    other.trainer.save_states(str(tmp_path / f"states{rank}"))
    training = _Training("stock", rank)
    if rank == 1:
        training.trainer.load_states(str(tmp_path / f"states{rank}"))
    _goes_on_after_broadcast_states(gather, training, "load_states.*broadcast_states")


@pytest.mark.ranks(2)
def test_parameters_that_one_stock_trainer_has_loaded_and_loads_back_after_the_error(rank, gather, tmp_path):
    """The step that has failed is counted on all workers."""
    training = _Training("stock", rank)
    training.step()
    own, other = (str(tmp_path / f"{which}{rank}") for which in ("own", "other"))
    training.net.save_parameters(own)
    dense_network(seed=7).save_parameters(other)
    if rank == 1:
        training.net.load_parameters(other)
    with pytest.raises(MXNetError, match="load_states.*broadcast_states"):
        training.step()
    clear_errors()
    if rank == 1:
        training.net.load_parameters(own)
    _goes_on(gather, training)


def _perturb(training):
    """Change the optimizer's state of one parameter on this worker."""
    state = training.trainer._updaters[0].states[1]
    next(one for one in (state if isinstance(state, (list, tuple)) else [state]) if one is not None)[:] += 1


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind, what",
    [
        *((kind, "parameters") for kind in _KINDS),
        ("stock on the store", "set_data"),
        ("own", "states"),
        ("stock", "states"),
    ],
)
@pytest.mark.parametrize("equal", [False, True], ids=["other values", "equal values"])
def test_all_workers_load_values_of_their_own(rank, gather, kind, what, equal, tmp_path):
    """As where each worker saves the weights with which its own validation was best."""
    training = _Training(kind, rank)
    training.step()
    file = str(tmp_path / f"{what}{rank}")
    if what == "states":
        if rank == 1 and not equal:
            _perturb(training)
        training.trainer.save_states(file)
        training.trainer.load_states(file)
    elif what == "parameters":
        training.net.save_parameters(file)
        training.step()
        if rank == 1 and not equal:
            training.net.save_parameters(file)
        training.step()
        training.net.load_parameters(file)
    else:
        for parameter in training.net.collect_params().values():
            parameter.set_data(array(np.full(parameter.shape, 1.0 + (0 if equal else rank), "float32")))
    if equal:
        _goes_on(gather, training)
        return
    differs = "states of the optimizer" if what == "states" else "values on rank 1 than on rank 0"
    match = f"has other {differs}.*Load the same files.*broadcast_states"
    _goes_on_after_broadcast_states(gather, training, match)


@pytest.mark.ranks(2)
@_every_kind
@pytest.mark.parametrize("how", ["set_data", "load_parameters"])
def test_one_worker_may_evaluate_with_other_values_and_restore_them(rank, gather, kind, how, tmp_path):
    """As for averaged weights, or the best so far."""
    training = _Training(kind, rank)
    training.step()
    kept, other = str(tmp_path / "kept"), str(tmp_path / "other")
    dense_network(seed=7).save_parameters(other)
    for _ in range(2):
        if rank == 0:
            training.net.save_parameters(kept)
            values = [(one, one.data().copy()) for one in training.net.collect_params().values()]
            if how == "load_parameters":
                training.net.load_parameters(other)
            for parameter, before in values if how == "set_data" else ():
                parameter.set_data(before * 0.5)
            training.net(array(np.ones((_BATCH, 6), "float32"))).wait_to_read()
            if how == "load_parameters":
                training.net.load_parameters(kept)
            for parameter, before in values if how == "set_data" else ():
                parameter.set_data(before)
        _goes_on(gather, training)


@pytest.mark.ranks(2)
@_every_kind
@pytest.mark.parametrize("how", ["set_data", "load_parameters"])
def test_one_worker_may_load_if_all_broadcast_the_parameters(rank, gather, kind, how, tmp_path):
    training = _Training(kind, rank)
    training.step()
    if rank == 0:
        dense_network(seed=7).save_parameters(str(tmp_path / "other"))
        if how == "load_parameters":
            training.net.load_parameters(str(tmp_path / "other"))
        for parameter in training.net.collect_params().values() if how == "set_data" else ():
            parameter.set_data(parameter.data() * 0.5)
    mykv.broadcast_parameters(training.net.collect_params())
    _goes_on(gather, training)


@pytest.mark.ranks(2)
@_every_kind
def test_one_worker_may_set_running_statistics(rank, gather, kind):
    """They differ between workers anyway."""
    net = nn.Sequential()
    net.add(nn.BatchNorm(in_channels=6), nn.Dense(2, in_units=6))
    net.initialize(mx.init.Xavier())
    training = _Training(kind, rank, net=net)
    training.step()
    if rank == 0:
        net[0].running_mean.set_data(array(np.ones(6, "float32")))
    for _ in range(2):
        training.step()
        trained = [one.data().asnumpy().tolist() for one in net.collect_params().values() if one.grad_req != "null"]
        assert len(set(map(str, gather(trained)))) == 1


@pytest.mark.ranks(2)
def test_a_worker_that_loads_states_and_another_that_loads_parameters(rank, gather, tmp_path):
    training = _Training("own", rank)
    training.step()
    training.trainer.save_states(str(tmp_path / "states"))
    if rank == 1:
        training.trainer.load_states(str(tmp_path / "states"))
    else:
        dense_network(seed=7).save_parameters(str(tmp_path / "other"))
        training.net.load_parameters(str(tmp_path / "other"))
    _goes_on_after_broadcast_states(gather, training, "has other values on rank 1 than on rank 0")


@pytest.mark.ranks(2)
def test_values_may_differ_between_the_workers_of_a_trainer_that_never_broadcasts_them(rank, tmp_path):
    training = _Training("own", rank, broadcast_period=-1)
    dense_network(seed=7 + rank).save_parameters(str(tmp_path / "other"))
    for _ in range(2):
        training.step()
        training.net.load_parameters(str(tmp_path / "other"))
    training.step()


@pytest.mark.smoke
@pytest.mark.ranks(2, long=(3,))
@pytest.mark.parametrize(
    "kind",
    [
        "own",
        "own clipped",
        pytest.param("own sparse", marks=pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no sparse parameters")),
        "stock",
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_an_update_that_ignores_stale_gradients_fails_on_one_worker(rank, gather, kind, first):
    """The others do not wait for the exchange of stale flags that follows the comparison of a good update."""
    training = _Training(kind, rank, **({"clip_global_norm": 1.0} if "clipped" in kind else {}))
    if "sparse" in kind:
        training.net = nn.HybridSequential()
        training.net.add(nn.Embedding(7, 3, sparse_grad=True), nn.Flatten(), nn.Dense(2, in_units=18))
        training.net.initialize()
        training.trainer = mykv.DistributedTrainer(training.net.collect_params(), "sgd", {"learning_rate": 0.01})
    if kind == "stock":
        training.trainer = gluon.Trainer(
            training.net.collect_params(), training.optimizer, kvstore="mykv", update_on_kvstore=False
        )

    def step(batch=training._batch):
        training.backward()
        training.trainer.allreduce_grads()
        training.trainer.update(batch, ignore_stale_grad=True)
        mx.nd.waitall()

    if not first:
        step()
    before = checksum(training.net)
    for wrong in (0, "many"):
        with pytest.raises((ZeroDivisionError, TypeError, ValueError) if rank == 1 else MXNetError, match="zero|str"):
            step(wrong if rank == 1 else training._batch)
        clear_errors()
    assert first or checksum(training.net) == before
    _goes_on(gather, training, step)


@pytest.mark.smoke
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock"])
@pytest.mark.parametrize("where", ["in a metric", "in another trainer", "in a process set of one worker"])
def test_an_operation_that_fails_elsewhere_does_not_refuse_an_update(rank, gather, kind, where):
    training, undisturbed = _Training(kind, rank), _Training(kind, rank)
    other = _Training(kind, rank)
    alone = mykv.add_process_set([0])
    for one in (training, undisturbed):
        if kind == "stock":
            one.trainer = gluon.Trainer(
                one.net.collect_params(), mx.optimizer.Adam(learning_rate=0.01), kvstore="mykv", update_on_kvstore=False
            )
    other.step()

    def fail_elsewhere():
        if where == "in a metric":
            mykv.allreduce("no array" if rank == 0 else mx.nd.ones(2), name="metric").wait_to_read()
        elif where == "in another trainer":
            other.backward()
            other.trainer.step(0 if rank == 0 else other._batch)
            mx.nd.waitall()
        elif rank == 0:
            bad = array(np.ones(2, "float32"))
            fail(bad)
            mykv.allreduce(bad, process_set=alone).wait_to_read()

    for step in range(4):
        training.backward()
        training.trainer.allreduce_grads()
        if step in (0, 2):
            with contextlib.suppress(MXNetError, TypeError, ZeroDivisionError):
                fail_elsewhere()
        training.trainer.update(training._batch)
        undisturbed.step_in_two()
    assert checksum(training.net) == checksum(undisturbed.net)
    _goes_on(gather, training, training.step_in_two)
    mykv.remove_process_set(alone)


@pytest.mark.ranks(2)
def test_other_numbers_of_parameters_are_shown_with_their_last_names(rank):
    parameters = [gluon.Parameter(f"layer{number}_weight", shape=(2,)) for number in range(6 + 2 * rank)]
    for one in parameters:
        one.initialize()
    mine, other = (8, 6) if rank else (6, 8)
    last = ", ".join(rf"parameter {number} \(layer{number}_weight\)" for number in range(mine - 5, mine))
    for call in (
        lambda: mykv.DistributedTrainer(parameters, "sgd"),
        lambda: mykv.broadcast_parameters(parameters),
    ):
        with pytest.raises(
            RuntimeError, match=rf"rank {rank} has {mine} \(the last {last}\), and another rank has {other}\."
        ):
            call()


def _both(call, wrong, right, rank):
    """A call of rank 1 with a wrong argument, which all ranks must get an error of."""
    if rank == 1:
        with pytest.raises((TypeError, ValueError)):
            call(wrong)
    else:
        with pytest.raises(MXNetError, match="rank 1"):
            call(right)
            mx.nd.waitall()
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock", "own on the store", "stock on the store"])
def test_a_wrong_type_of_an_argument_on_one_worker_is_an_error_on_all(rank, gather, kind, tmp_path):
    training = _Training(kind, rank, mx.optimizer.Adam(learning_rate=0.01))
    trainer, batch = training.trainer, training._batch
    training.step()
    several = np.ones(3)

    def stepped(flag):
        training.backward()
        trainer.step(batch, ignore_stale_grad=flag)

    def updated(flag):
        training.backward()
        trainer.allreduce_grads()
        trainer.update(batch, ignore_stale_grad=flag)

    _both(stepped, several, False, rank)
    gather("all have their error")
    if kind.endswith("on the store"):
        for call in (trainer.save_states, trainer.load_states):
            _both(call, 3.5, str(tmp_path / "states"), rank)
            gather("all have their error")
    else:
        _both(updated, several, False, rank)
        gather("all have their error")
    _both(lambda flag: mykv.broadcast_states(trainer, counters=flag), several, True, rank)
    gather("all have their error")
    _goes_on(gather, training)


@pytest.mark.ranks(2)
def test_a_wrong_type_of_a_process_set_is_an_error_on_all(rank, gather):
    mykv.init()
    ones = array(np.ones(4, "float32"))
    for call in (
        lambda one: mykv.allreduce(ones, process_set=one).wait_to_read(),
        lambda one: mykv.allreduce(ones, name="x", process_set=one).wait_to_read(),
        lambda one: mykv.allgather(ones, process_set=one),
        lambda one: mykv.barrier(process_set=one),
    ):
        _both(call, 3, mykv.global_process_set, rank)
        gather("all have their error")
    assert (mykv.allreduce(ones, op=mykv.Sum, name="x").asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_a_parameter_that_is_frozen_on_one_rank_is_named_as_a_change(rank):
    mykv.init()
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    for step in range(3):
        if step == 2 and rank == 0:
            next(iter(net.collect_params().values())).grad_req = "null"
        with autograd.record():
            loss = (net(array(np.ones((2, 6), "float32"))) ** 2).sum()
        loss.backward()
        if step < 2:
            trainer.step(2)
        else:
            with pytest.raises(MXNetError, match="rank 0 has a step after a change of parameters, by grad_req"):
                trainer.step(2)
                mx.nd.waitall()
    clear_errors()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["device", "dist_sync", "mykv"])
def test_a_store_in_the_place_of_compression_is_an_error_that_says_so(name):
    mykv.init()
    with pytest.raises(TypeError, match=f"fourth argument .* is compression, not a store such as '{name}'"):
        mykv.DistributedTrainer(dense_network(seed=0).collect_params(), "sgd", {"learning_rate": 0.1}, name)

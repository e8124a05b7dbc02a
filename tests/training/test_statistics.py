"""The statistics: counts match the calls, the slow worker is named, and a report never delays a job."""

from __future__ import annotations

import re
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, dense_network, mx, numbers
from kvstore_plugin.training import statistics, statistics_report
from kvstore_plugin.world import process

_LATE = 0.06  # seconds
_STEPS = 8
_TWO_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


def _step(net, trainer, rank):
    with mx.autograd.record():
        loss = (net(array(numbers(rank, (4, 6)))) ** 2).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()


def _trainers(net):
    sgd = ("sgd", {"learning_rate": 0.01})
    return {
        "DistributedTrainer": lambda: mykv.DistributedTrainer(net.collect_params(), *sgd),
        "on the store": lambda: mykv.DistributedTrainer(net.collect_params(), *sgd, update_on_kvstore=True),
        "copied": lambda: mykv.DistributedTrainer(net.collect_params(), *sgd, bucket_bytes=0),
        "Trainer": lambda: mx.gluon.Trainer(net.collect_params(), *sgd, kvstore="mykv", update_on_kvstore=False),
    }


@pytest.fixture
def count(gather):
    """``count(work) -> dict``: the statistics of `work()`, with no operation of another worker in between."""

    def run(work):
        mx.nd.waitall()
        gather("nothing is under way")
        mykv.statistics(reset=True)
        gather("all have begun to count")
        work()
        mx.nd.waitall()
        gather("all have ended")
        return mykv.statistics()

    return run


@pytest.mark.smoke
@pytest.mark.ranks(1, 2)
def test_counts_are_what_was_called(size, rank, count):
    store = mx.kv.create("mykv")
    shapes = {"small": (1000,), "large": (600, 1000)}

    def work():
        for key, shape in shapes.items():
            for _ in range(3):
                store.pushpull(key, array(numbers(rank, shape)))

    counted = count(work)
    nbytes = sum(3 * 4 * int(np.prod(shape)) for shape in shapes.values())
    assert (counted["operations"], counted["bytes"], counted["steps"]) == (6, nbytes, 0)
    assert counted["roads"]["copied"] == {"operations": 6, "bytes": nbytes}
    assert counted["overlapped"] is None and counted["failed"] == mykv.statistics()["failed"]
    assert sum(one["operations"] for one in counted["late"]) == (6 if size > 1 else 0)
    assert counted["late_among"] == "all workers"
    again = count(lambda: None)
    assert again["operations"] == 0 and again["late"] == [] and again["seconds"] < counted["seconds"] + 60


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["DistributedTrainer", "on the store", "copied", "Trainer"])
def test_the_late_worker_is_named(rank, kind, count, gather):
    net = dense_network(3)
    trainer = _trainers(net)[kind]()
    _step(net, trainer, rank)

    def work():
        for _ in range(_STEPS):
            time.sleep(_LATE * rank)
            _step(net, trainer, rank)

    # On a busy machine the other worker may come last to a step: such a trial shows nothing.
    for _ in range(4):
        counted = count(work)
        assert counted["steps"] == _STEPS
        late = counted["late"][0]
        if all(gather(late["steps"] == _STEPS)):
            break
    assert late["rank"] == 1 and late["steps"] == _STEPS and late["step_share"] == 1.0
    assert late["machine"] == process.machine_of(1)
    assert 0.7 * _LATE < late["step_wait"] < 0.9 * counted["seconds"] / _STEPS + _LATE
    mine = counted["waited_in_steps"]
    if rank == 0:
        assert mine == pytest.approx(_STEPS * late["step_wait"], rel=1e-6)
        # All of a step's operations were under way, and their last gradients there, before the other worker came.
        assert mine < counted["communication"] < counted["seconds"] and counted["overlapped"] < 0.5
    else:
        assert mine == 0 and counted["communication"] < _STEPS * _LATE
    assert 0 < counted["update"] < counted["seconds"]
    assert counted["waited"] >= mine


@pytest.mark.ranks(3, 4, env=_TWO_HOSTS)
def test_rank_0_names_the_late_worker_of_another_host(rank, size, count):
    last = size - 1
    net = dense_network(3)
    trainer = _trainers(net)["DistributedTrainer"]()
    _step(net, trainer, rank)

    def work():
        for _ in range(_STEPS):
            time.sleep(_LATE * (rank == last))
            _step(net, trainer, rank)

    counted = count(work)
    hosts = process.core.host_ranks()
    assert counted["steps"] == _STEPS and len(hosts) == 2
    assert counted["late_among"] == ("workers of this host" if rank else "all workers")
    if rank == 0 or (rank in hosts[1] and len(hosts[1]) > 1):
        late = counted["late"][0]
        assert late["rank"] == last and late["step_share"] > 0.6  # other work may hold another rank up once
        assert 0.6 * _LATE < late["step_wait"] < 0.9 * counted["seconds"] / _STEPS + _LATE
    if rank == 0:
        assert sum(one["steps"] for one in counted["late"]) == _STEPS
        assert sum(one["operations"] for one in counted["late"]) == counted["operations"]
    if rank != last:
        assert counted["waited_in_steps"] > 0.6 * _LATE * _STEPS


@pytest.mark.ranks(2)
def test_share_of_communication_while_backward_runs(rank, count, gather):
    store = mx.kv.create("mykv")

    def push(part, key):
        process.core.set_step_phase(part)  # as DenseReducer does in a step
        store.pushpull(key, array(numbers(rank, (100,))))
        process.core.set_step_phase("")

    def work():
        if rank == 0:
            push("some", "early")
            time.sleep(4 * _LATE)  # as if backward continued
            push("last", "late")
            gather("waiting")
            time.sleep(_LATE)
        else:
            gather("waiting")
            time.sleep(_LATE)
            push("some", "early")
            push("last", "late")

    counted = count(work)
    assert counted["steps"] == 1
    if rank == 0:
        assert 4 * _LATE < counted["communication"] < counted["seconds"]
        # 4 / 5, or less on a machine on which the second half takes longer.
        assert 4 * _LATE / counted["communication"] * 0.95 < counted["overlapped"] < 0.9


def _hook(bucket):
    for one in bucket.arrays:
        mykv.allreduce_(one, process_set=bucket.process_set)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"bucket_bytes": 0}], ids=str)
@pytest.mark.parametrize("hook", [None, _hook])
def test_each_step_counts_once(rank, count, hook, options):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, communication_hook=hook, **options
    )
    counted = count(lambda: [_step(net, trainer, rank) for _ in range(_STEPS)])
    assert counted["steps"] == _STEPS


class _LongUpdates(mx.optimizer.SGD):
    """SGD whose updates take a while in MXNet's engine."""

    def update_multi_precision(self, index, weight, gradient, state):
        large = mx.nd.ones((300, 300))
        for _ in range(10):
            large = mx.nd.dot(large, large) / 300
        zero = large[0, :1] * 0
        late = gradient if isinstance(gradient, (list, tuple)) else [gradient]
        late = [one + (zero if type(one) is type(zero) else zero.as_np_ndarray()) for one in late]
        super().update_multi_precision(index, weight, late if isinstance(gradient, (list, tuple)) else late[0], state)


@pytest.mark.ranks(2)
def test_updates_of_several_buckets_are_timed_once(rank, count):
    optimizer = mx.optimizer.SGD(learning_rate=0.01)
    optimizer.__class__, optimizer.aggregate_num = _LongUpdates, 1
    net = dense_network(seed=0, widths=(6, 6, 6, 6, 2))
    trainer = mykv.DistributedTrainer(net.collect_params(), optimizer, bucket_bytes=1)
    _step(net, trainer, rank)
    counted = count(lambda: _step(net, trainer, rank))
    assert 0 < counted["update"] < counted["seconds"]


@pytest.mark.ranks(2)
def test_a_process_set_has_statistics_of_its_own(rank, count):
    part = mykv.add_process_set([1])
    counted = count(lambda: mykv.allreduce(array(np.ones(3, "float32")), process_set=part) if rank else None)
    assert counted["operations"] == 0
    if rank:
        assert mykv.statistics(part)["operations"] == 1
    else:
        with pytest.raises(ValueError):
            mykv.statistics(part)
    mykv.remove_process_set(part)


@pytest.mark.ranks(2)
def test_how_gradients_are_reduced(rank):
    def described(trainer):
        _step(net, trainer, rank)
        return mykv.statistics()["trainers"][-1]

    net = dense_network(3)
    sizes = [parameter.data().size for parameter in net.collect_params().values()]
    adopted = described(_trainers(net)["DistributedTrainer"]())
    assert adopted["adopted"] == len(sizes) and adopted["copied"] == {}
    assert adopted["bucket_bytes"] == [4 * sum(sizes)]
    later = described(_trainers(net)["DistributedTrainer"]())
    assert later["adopted"] == len(sizes) and later["copied"] == {}  # in the buckets of the trainer before
    net = dense_network(3)
    with mx.autograd.record():
        loss = net(array(numbers(rank, (4, 6)))).sum()
    late = described(_trainers(net)["DistributedTrainer"]())
    assert late["copied"] == {"a recorded forward pass uses their parameters": len(sizes)}
    del loss
    net = dense_network(3)
    trainer = _trainers(net)["copied"]()
    copied = described(trainer)
    assert copied["copied"] == {"the trainer has no buckets (bucket_bytes=0)": len(sizes)}
    assert sorted(copied["bucket_bytes"]) == sorted(4 * size for size in sizes)
    text = statistics_report.table(mykv.statistics())
    assert f"{len(sizes)} gradients copied: the trainer has no buckets (bucket_bytes=0)" in text


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("on_store", [False, True])
def test_what_a_stock_trainer_does_with_sums_is_told(rank, size, on_store):
    net, other = dense_network(3), dense_network(3)
    options = {"kvstore": "mykv", "update_on_kvstore": on_store}
    stock = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, **options)
    own = _trainers(other)["DistributedTrainer"]()
    _step(other, own, rank)
    before = mykv.statistics()["trainers"]  # and trainers of earlier tests
    _step(net, stock, rank)
    names = [one["name"] for one in before]
    (told,) = [one for one in mykv.statistics()["trainers"] if one["name"] not in names]
    assert told["sums_times"] == "batch size 4 (gradients times 0.25)" and before[-1]["sums_times"] is None
    text = statistics_report.table({**mykv.statistics(), "trainers": [before[-1], told]})
    line = f"gradients summed over {size} workers; step() for {told['sums_times']}"
    assert text.count(line) == (size > 1)


class _Bar:
    """Like a tqdm progress bar."""

    def __init__(self):
        self.texts = []

    def set_postfix_str(self, text):
        self.texts.append(text)


class _Writer:
    """Like mxboard's SummaryWriter."""

    def __init__(self):
        self.points = []

    def add_scalar(self, tag, value, global_step):
        self.points.append((tag, value, global_step))


@pytest.mark.ranks(2)
def test_callbacks_show_what_is_new(rank, gather):
    net = dense_network(3)
    trainer = _trainers(net)["DistributedTrainer"]()
    bar, writer, texts = _Bar(), _Writer(), []
    shows = [mykv.StatisticsCallback(one, every=2) for one in (bar, writer, texts.append)]
    for number in range(4):
        time.sleep(_LATE * rank * (number > 1))
        _step(net, trainer, rank)
        gather("a step")
        for show in shows:
            show()
    assert len(bar.texts) == len(texts) == 2
    assert re.fullmatch(r"waits \d+%, slowest rank 1 \(\d+%\), overlap \d+%, update [\d.]+ \w+", bar.texts[1]), (
        bar.texts
    )
    assert {tag for tag, _, _ in writer.points} == {
        "mykv/waited_ms_a_step",
        "mykv/communication_ms_a_step",
        "mykv/update_ms_a_step",
        "mykv/overlapped",
        "mykv/slowest_rank",
    }
    waited = {step: point for tag, point, step in writer.points if tag == "mykv/waited_ms_a_step"}
    assert list(waited) == [2, 4]
    assert waited[4] > 0.7e3 * _LATE if rank == 0 else waited[4] < 0.5e3 * _LATE


@pytest.mark.parametrize(
    ("target", "every", "kind"), [(3, 1, TypeError), (print, 0, ValueError), (print, 1.5, TypeError)]
)
def test_wrong_arguments_of_callbacks(target, every, kind):
    for made in (mykv.StatisticsCallback, mykv.StatisticsHandler):
        with pytest.raises(kind):
            made(target, every)


@pytest.mark.smoke
@pytest.mark.ranks(2)
def test_the_estimator_shows_them(rank):
    from mxnet.gluon.contrib.estimator import estimator

    texts = []
    net = dense_network(3)
    trainer = _trainers(net)["DistributedTrainer"]()
    data = mx.gluon.data.ArrayDataset(array(numbers(rank, (8, 6))), array(np.zeros((8, 2), "float32")))
    loader = mx.gluon.data.DataLoader(data, batch_size=2)
    loss = mx.gluon.loss.L2Loss()
    metric = mx.gluon.metric.Loss() if hasattr(mx.gluon, "metric") else mx.metric.Loss()
    fitting = estimator.Estimator(net, loss, train_metrics=metric, trainer=trainer, **_device_argument())
    log = fitting.logger
    lines = []
    log.info = lambda text, *values: lines.append(text % values if values else text)
    fitting.fit(
        loader, epochs=1, event_handlers=[mykv.StatisticsHandler(texts.append, 2), mykv.StatisticsHandler(None, 2)]
    )
    mx.nd.waitall()
    assert len(texts) == 2 and "slowest rank" in texts[1]
    assert len([line for line in lines if line.startswith("mykv: ")]) == (2 if rank == 0 else 0)


def _device_argument():
    return {"context": mx.cpu()} if mx.__version__.startswith("1.") else {"device": mx.cpu()}


_JOB = """
import sys, time
import kvstore_plugin as mykv
import mxnet as mx
make = mx.np if mx.__version__.startswith("2.") else mx.nd
if mx.__version__.startswith("2."):
    mx.npx.set_np()
store = mx.kv.create("mykv")
fails, seconds = sys.argv[1], float(sys.argv[2])
for number in range(10):
    time.sleep(0.03 * store.rank)
    store.pushpull("x", make.ones((100,)))
    mx.nd.waitall()
time.sleep(seconds)
if fails == str(store.rank):
    raise ValueError("this worker is broken")
"""
_TABLE = re.compile(r"^mykv: [\d.,]+ m?s, 0 steps, on rank 0 of 2$", re.MULTILINE)
# Other work on the machine may delay rank 0 even more, which then has the line above this one.
_SLOW = re.compile(
    r"^ +(?:slow +)?rank 1 of \S+ came last in \d+% of \d+ operations; the others waited [\d.]+ m?s", re.MULTILINE
)


def _tables(result):
    return _TABLE.findall(result.stderr.replace("\0", ""))  # Open MPI may write a NUL before a line


def test_rank_0_prints_the_table_once(mpirun):
    result = mpirun(2, _JOB, "nobody", "1.5", env={"MYKV_REPORT": "1"})
    assert result.code == 0, result.text
    assert len(_tables(result)) == 1 and len(_SLOW.findall(result.stderr)) == 1, result.text
    assert "mykv:" not in result.stdout


def test_the_table_comes_every_so_often(mpirun):
    result = mpirun(2, _JOB, "nobody", "2.5", env={"MYKV_REPORT": "1.1"})
    assert result.code == 0, result.text
    assert len(_tables(result)) >= 3, result.text


@pytest.mark.parametrize("fails", [0, 1])
def test_a_worker_that_fails_does_not_make_the_report_hang(mpirun, fails):
    result = mpirun(2, _JOB, str(fails), "0", env={"MYKV_REPORT": "1"})
    assert result.code != 0 and "this worker is broken" in result.stderr, result.text
    assert result.seconds < 30
    tables = len(_tables(result))
    assert tables == 1 if fails == 0 else tables <= 1, result.text


def test_without_the_setting_nothing_is_printed(mpirun):
    result = mpirun(2, _JOB, "nobody", "0")
    assert result.code == 0 and "mykv:" not in result.stderr, result.text


def test_the_tenth_trainer_comes_after_the_ninth():
    names = ["trainer10", "trainer9", "own", "trainer2"]
    assert sorted(names, key=statistics._in_order_made) == ["own", "trainer2", "trainer9", "trainer10"]

"""Jobs whose workers are killed, one after another: the others go on, from one state, and no step counts twice."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
import pytest
from harness import elastic_outcome, launcher
from harness.marks import long
from harness.several_hosts import Hosts
from harness.support import MXNetError
from kvstore_plugin.compat.state_tree import Leaf, described_array
from kvstore_plugin.elastic import run
from kvstore_plugin.elastic import shard_replicas as kept_shares
from kvstore_plugin.sharded_optimizer import partition as sharding
from kvstore_plugin.world import exit_notifier as failed_exits
from kvstore_plugin.world import failure_detector
from kvstore_plugin.world import process_watch as followed
from mpi4py import MPI
from mxnet.gluon import nn

_WORKER = Path(__file__).parents[1] / "programs" / "elastic_digits.py"
_LIMIT_S = 150.0

pytestmark = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")


@pytest.fixture
def job(mpirun):
    """Run a plan of elastic_digits.py; returns the result and what each survivor says at the end (elastic_outcome.py).

    `per_host`: so many workers on each of `network`, in the place of `ranks`.
    """

    def run(ranks: int, plan: dict, network: Hosts | None = None, per_host=(), **env: str):
        options = ("--with-ft", "ulfm")
        if network is None:
            running = mpirun.start(ranks, _WORKER, json.dumps(plan), options=options, env=env)
        else:
            running = network.start(mpirun, per_host, _WORKER, json.dumps(plan), env=env, options=options)
        result = running.wait(_LIMIT_S)
        died = {int(rank): float(at) for rank, at in re.findall(r"^dies (\d+) ([\d.]+)$", result.stdout, re.MULTILINE)}
        assert sorted(died) == sorted(map(int, plan["deaths"])), result.text
        try:
            return result, elastic_outcome.survivors(ranks, died, result.stdout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{result.text}") from error

    return run


@pytest.fixture(scope="module")
def two_hosts():
    """Two hosts with a network between them."""
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.long
def test_four_workers_down_to_one(job):
    deaths = {"0": ["forward", 6], "2": ["reduction", 15], "3": ["commit", 26]}
    result, (last,) = job(4, {"deaths": deaths, "epochs": 20, "every": 2})
    assert float(last["accuracy"]) >= 0.95, result.text


@pytest.mark.long
def test_four_workers_down_to_one_with_the_optimizer_on_the_store(job):
    deaths = {"1": ["update", 6], "0": ["reduction", 15], "3": ["pass_on", 25]}
    result, (last,) = job(4, {"deaths": deaths, "epochs": 20, "sharded": True})
    assert float(last["accuracy"]) >= 0.95, result.text


@pytest.mark.long
def test_two_die_at_once_and_one_before_the_first_step(job):
    job(4, {"deaths": {"0": ["forward", 0], "1": ["update", 13], "3": ["update", 13]}, "every": 3})


_MOMENTS = {
    "while they find who is left, and soon after": ("shrink", "joining"),
    "while they begin to watch each other, and agree": ("watch", "restore"),
    "while they meet, and commit": ("init", "recommit"),
}


@pytest.mark.long
@pytest.mark.parametrize("hosts, moments", [(1 + number % 2, one) for number, one in enumerate(_MOMENTS.values())])
def test_more_die_while_the_others_begin_again(job, hosts, moments):
    deaths = {"0": ["forward", 6], "1": [moments[0], 1], "3": [moments[1], 1 if moments[0] == "shrink" else 2]}
    job(4, {"deaths": deaths, "sharded": False}, MYKV_VIRTUAL_HOSTS=str(hosts))


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_death_at_any_moment_on_two_hosts(job, sharded):
    job(
        3,
        {"deaths": {"1": ["any", -1]}, "every": 2, "sharded": sharded, "adam": sharded, "by_mpi": True},
        MYKV_VIRTUAL_HOSTS="2",
    )


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_a_worker_and_then_all_of_another_host_die(job, two_hosts, sharded):
    """Noticed through the network; with the optimizer on the store, the first host has the copies of the second."""
    deaths = {"0": ["update", 5], "3": ["forward", 12], "4": ["forward", 12]} if sharded else {}
    deaths = deaths or {"3": ["update", 5], "0": ["forward", 12], "1": ["forward", 12]}  # mpirun is where 0 and 1 are
    plan = {"deaths": deaths, "sharded": sharded, "adam": sharded, "by_mpi": True}
    job(5, plan, two_hosts, [3, 2])


_FEW_STEPS = """
import ctypes, os, signal, sys, time
import kvstore_plugin as mykv, mxnet as mx
from kvstore_plugin.elastic import run as elastic

mx.npx.set_np()
mykv.init()
me, elastic_or_not, dying = mykv.rank(), sys.argv[1] == "elastic", [int(one) for one in sys.argv[3]]
net = mx.gluon.nn.Dense(1, in_units=3)
net.initialize()
trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=elastic_or_not)
state = mykv.ElasticState(net=net, trainer=trainer, step=0) if elastic_or_not else None

def die():
    print("dies", me, flush=True)
    exec(sys.argv[2])

def train(state=None):
    for step in range(0 if state is None else state.step, 30):
        if step == 5 and me in dying[:-1]:
            die()
        with mx.autograd.record():
            loss = net(mx.np.ones((4, 3))).sum()
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()
        if state is not None:
            state.step = step + 1
            state.commit()

recover = elastic._recover

def recovering(*arguments):
    if me == dying[-1]:
        die()
    recover(*arguments)

elastic._recover = recovering
mykv.run_elastic(train, state) if elastic_or_not else train()
print("finished", me, "of", mykv.size(), flush=True)
"""


@pytest.mark.parametrize(
    "ends, dying",
    [
        long("ctypes.string_at(0)", "123"),
        long("ctypes.CDLL(None).exit(3)", "123"),
        long("os.abort()", "123"),
        ("os._exit(1)", "13"),
    ],
)
def test_workers_that_end_by_themselves_are_outlived_as_killed_ones(mpirun, ends, dying):
    """The last of them while the others begin again."""
    result = mpirun(5, _FEW_STEPS, "elastic", ends, dying, options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert set(re.findall(r"^dies (\d)$", result.stdout, re.MULTILINE)) == set(dying), result.text
    finished = {f"{rank} of {5 - len(dying)}" for rank in set("01234") - set(dying)}
    assert set(re.findall(r"^finished (\d of \d)$", result.stdout, re.MULTILINE)) == finished, result.text


@pytest.mark.long
def test_an_exception_in_forward_ends_an_elastic_job(mpirun):
    fails = """
def full(*_):
    raise MemoryError("no room")
net.register_forward_pre_hook(full)
"""
    result = mpirun(3, _FEW_STEPS, "elastic", fails, "12", options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code != 0 and "MemoryError: no room" in result.stderr, result.text
    assert "finished" not in result.stdout, result.text


@pytest.mark.parametrize("outlives, pauses", [(True, [0.0, 0.5, 5.0]), (False, [])])
def test_workers_abort_a_job_one_after_another_where_mpirun_would_hang(monkeypatch, outlives, pauses):
    paused, aborted = [], []
    monkeypatch.setattr(failure_detector, "is_possible", lambda: outlives)
    monkeypatch.setattr(failure_detector.time, "sleep", paused.append)
    for rank in (0, 1, 40):
        comm = SimpleNamespace(Get_rank=lambda rank=rank: rank, Abort=aborted.append)
        monkeypatch.setattr(MPI, "COMM_WORLD", comm)
        failure_detector.abort(comm, 3)
    assert paused == pauses and aborted == [3, 3, 3]


@pytest.mark.long
def test_mpirun_ends_a_job_whose_workers_all_fail_at_once(mpirun):
    """Open MPI's mpirun hangs in a quarter of such jobs if its workers abort them at the same time."""
    script = """
    import kvstore_plugin as mykv

    mykv.init()
    mykv.barrier()
    raise ValueError("all at once")
    """
    for _ in range(8):
        result = mpirun(2, script, options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
        assert result.code not in (0, None) and "all at once" in result.stderr, result.text


_WITHOUT_ELASTIC = """
import os, signal
import mxnet as mx
import kvstore_plugin as mykv
mykv.init()
me = mykv.rank()

def made(**options):
    net = mx.gluon.nn.Dense(1, in_units=3)
    net.initialize()
    return net, mykv.DistributedTrainer(net.collect_params(), "sgd", **options)

def step(net, trainer):
    with mx.autograd.record():
        loss = net(mx.nd.ones((4, 3))).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()

net, trainer = made(elastic=True)
other = made()
state = mykv.ElasticState(net=net, trainer=trainer, step=0)

def train(state):
    global other
    while state.step < 4:
        if state.step == 2 and me == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(*other)
        except mykv.WorkersLost:
            raise
        except RuntimeError as error:
            print(me, "is told", error, flush=True)
            other = made()
        step(net, trainer)
        state.step += 1
        state.commit()

mykv.run_elastic(train, state)
mykv.check_in_step(other[0].collect_params())
print("finished", me, "of", mykv.size(), flush=True)
"""


def test_a_trainer_that_is_not_elastic_ends_with_a_worker(mpirun):
    result = mpirun(3, _WITHOUT_ELASTIC, options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    told = re.findall(r"^(\d) is told This trainer is from before a worker was lost", result.stdout, re.MULTILINE)
    assert sorted(told) == ["0", "1"], result.text
    assert result.stdout.count("of 2") == 2, result.text


def test_join_of_an_elastic_trainer_is_refused(mpirun):
    script = """
    import mxnet as mx
    import kvstore_plugin as mykv

    net = mx.gluon.nn.Dense(1, in_units=3)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)
    try:
        mykv.join(trainer)
    except ValueError as error:
        print(error)
    """
    result = mpirun(1, script, options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert "join() cannot be used with a trainer that has elastic=True" in result.stdout, result.text


def test_users_may_shrink_and_begin_again_themselves_and_finalize_mpi(mpirun):
    script = """
    import os, signal
    import kvstore_plugin as mykv, mxnet as mx
    from mpi4py import MPI

    mykv.init()
    store, array = mx.kv.create("mykv"), mx.nd.ones(1000)
    try:
        while True:
            store.pushpull("w", array, out=array)
            array.wait_to_read()
            if mykv.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except mykv.WorkersLost:
        mykv.shutdown()
    mykv.init(MPI.COMM_WORLD.Shrink())
    array = mx.nd.ones(1000)
    mx.kv.create("mykv").pushpull("v", array, out=array)
    print("sum", array.asnumpy().sum(), flush=True)
    mykv.barrier()
    MPI.Finalize()
    print("finalized", flush=True)
    """
    result = mpirun(3, script, options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code == 0, result.text
    assert result.stdout.count("sum 2000.0") == 2 and result.stdout.count("finalized") == 2, result.text


def test_rounds_of_init_in_jobs_that_outlive_workers_leave_nothing_behind(mpirun):
    script = """
    import os, threading, time
    import kvstore_plugin as mykv

    def left():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

    def settled(expected=None):
        deadline = time.monotonic() + 10  # the kernel lists a thread a little longer than it is joined
        while True:
            found = left()
            time.sleep(0.1)
            if left() == found == (expected or found) or time.monotonic() > deadline:
                return found

    for turn in range(30):
        mykv.init()
        mykv.barrier()
        mykv.shutdown()
        if turn == 4:
            before = settled()
    after = settled(before)
    assert after == before, (before, after)
    """
    assert mpirun(2, script, options=("--with-ft", "ulfm"), timeout=_LIMIT_S).code == 0


def test_an_end_that_open_mpi_cannot_be_told_of_is_logged(caplog):
    """This process has no part in a job, and no PMIx."""
    ended = subprocess.Popen(["true"])
    teller = failed_exits._Teller(
        [followed.this_process(), (followed.this_process()[0], ended.pid)], [("a", 3), ("a", 7)]
    )
    deadline = time.monotonic() + 10
    while "rank 7 of MPI_COMM_WORLD has ended" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    teller.end()
    ended.wait()
    assert re.search(r"cannot tell Open MPI that rank 7 of MPI_COMM_WORLD has ended \(.+\)\. .* may hang", caplog.text)


@pytest.mark.parametrize("ends", [long("os._exit(1)"), "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_job_that_could_outlive_its_workers_ends_with_them_where_nothing_is_elastic(mpirun, ends):
    result = mpirun(4, _FEW_STEPS, "plain", ends, "13", options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code != 0 and "finished" not in result.stdout, result.text
    assert re.search(r"WorkersLost: .*rank 1 of 4 has ended", result.stderr), result.text


@pytest.mark.parametrize(
    "hosts, dies",
    [
        (2, "os.kill(os.getpid(), signal.SIGKILL)"),
        long(1, "testing.signal_under_lock(process.core.world(), signal.SIGKILL)"),
    ],
)
def test_operations_name_who_has_died_also_where_they_fail_before_that_is_known(mpirun, hosts, dies):
    """MPI fails at once, and so does the table of a host that was locked."""
    script = f"""
    import os, signal, time
    import kvstore_plugin as mykv, mxnet as mx
    from compiled import testing
    from kvstore_plugin.world import failure_detector as liveness
    from kvstore_plugin.world import process

    notice = liveness._Watch._notice

    def notice_late(watch, ended):
        time.sleep(0.7)
        notice(watch, ended)

    liveness._Watch._notice = notice_late
    mykv.init()
    store = mx.kv.create("mykv")
    arrays = [mx.nd.ones(size) for size in (10, 100000)]
    try:
        for step in range(100000):
            if store.rank == 2 and step == 50:
                {dies}
            for key, array in enumerate(arrays):
                store.pushpull(key, array, out=array)
            mx.nd.waitall()
    except mykv.WorkersLost as error:
        print(f"told rank {{store.rank}}: {{error}}", flush=True)
    time.sleep(2)  # else the other one sees this end too
    os._exit(0)
    """
    result = mpirun(3, script, options=("--with-ft", "ulfm"), env={"MYKV_VIRTUAL_HOSTS": str(hosts)}, timeout=_LIMIT_S)
    for rank in (0, 1):
        assert re.search(rf"^told rank {rank}: .*rank 2 of 3 has ended", result.stdout, re.MULTILINE), result.text


def test_states_that_died_with_their_copy_end_the_job(mpirun):
    plan = {"deaths": {"1": ["forward", 4], "2": ["forward", 4]}, "sharded": True}
    result = mpirun(4, _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code != 0
    assert re.search(r"optimizer states of rank 1 of 4 are lost, since rank 2, .* has died too", result.stderr)


@pytest.mark.long
def test_states_that_died_with_their_copy_come_from_a_checkpoint(job, tmp_path):
    """Of the last commit here, so that the weights must be what they would have been without the deaths."""
    plan = {"deaths": {"1": ["forward", 6], "2": ["forward", 6]}, "sharded": True, "every": 2}
    job(4, {**plan, "checkpoint": str(tmp_path / "states")})


@pytest.mark.long
def test_a_checkpoint_that_is_not_there_ends_the_job(mpirun, tmp_path):
    plan = {"deaths": {"1": ["forward", 4], "0": ["forward", 4]}, "sharded": True, "checkpoint": "/nowhere/states"}
    script = _WORKER.read_text().replace("write_checkpoint()\n                state", "pass\n                state")
    result = mpirun(3, script, json.dumps(plan), options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code != 0
    assert "/nowhere/states" in result.stderr, result.text


@pytest.mark.long
def test_a_job_goes_on_with_more_workers_from_a_checkpoint(job, tmp_path):
    """docs/elastic.md: three workers of which one dies, then four of which one dies."""
    kept = str(tmp_path / "kept")
    job(3, {"deaths": {"1": ["update", 4]}, "sharded": True, "most": 9, "save": kept})
    _, said = job(4, {"deaths": {"2": ["forward", 14]}, "sharded": True, "most": 20, "load": kept})
    assert [one["steps"] for one in said] == ["20"] * 3


_NOTICED = """
notices 0 10.100
notices 2 10.200
notices 3 10.300
reset 0 0 3 5 aa 11.000
reset 2 1 3 5 aa 11.100
reset 3 2 3 5 aa 11.200
notices 0 11.250
notices 3 11.300
reset 0 0 2 6 bb 12.000
reset 3 1 2 6 bb 12.000
"""


@pytest.mark.parametrize(
    "died_at, without, words",
    [
        ((10.0, 11.21), "", None),
        ((10.0, 11.21), "notices 3 11.300", "worker 3 noticed the death of worker 2 not at all"),
        ((10.0, 11.21), "notices 0 10.100", "worker 0 noticed the death of worker 1 not at all"),
        ((8.2, 11.21), "", "worker 3 noticed the death of worker 1 after 2.1 s"),
        ((10.0, 10.1), "", None),  # what is noticed there may be the first death alone, but they go on without both
        ((10.0, 10.1), "notices 3 11.300", None),
        ((10.0, 10.1), "reset 3 1 2 6 bb 12.000", "worker 3 noticed the death of worker 2 not at all"),
        ((1.0, 1.1), "", "worker 0 noticed the death of worker 1 after 9.1 s"),
    ],
)
def test_what_jobs_say_must_show_that_each_survivor_noticed_each_death(died_at, without, words):
    deaths = dict(zip((1, 2), died_at))
    expectation = pytest.raises(AssertionError, match=words) if words else contextlib.nullcontext()
    with expectation:
        elastic_outcome.require_notices(4, deaths, _NOTICED.replace(f"{without}\n", "") if without else _NOTICED)


def test_a_job_that_ends_with_its_first_process_is_refused():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(RuntimeError, match="Start it with `mykvrun --elastic`, which calls `mpirun --with-ft ulfm`"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)


def test_names_that_belong_to_the_state_itself_are_refused():
    for name in ("_epoch", "_number", "commit", "register_reset_callbacks", "__dict__"):
        with pytest.raises(ValueError, match=f"cannot keep a value as '{name}'.*another name"):
            mykv.ElasticState(**{name: 0})
    state = object.__new__(mykv.ElasticState)  # whole ones need a job that outlives its processes
    vars(state).update(_own={"_own", "_number"}, _number=0)
    for name in ("_epoch", "commit"):
        with pytest.raises(AttributeError, match=f"cannot keep a value as '{name}'"):
            setattr(state, name, 0)
    state.epoch, state._number = 1, 2
    assert state._values() == {"epoch": 1} and state._number == 2


def test_members_without_a_name_are_refused():
    with pytest.raises(TypeError, match="takes its members by name"):
        mykv.ElasticState(nn.Dense(1))


def test_process_sets_and_other_trainers_are_refused():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(ValueError, match="process sets end"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", parameter_process_sets={"weight": None}, elastic=True)
    with pytest.raises(ValueError, match="needs a DistributedTrainer"):
        mykv.ElasticState(net=net)
    with pytest.raises(TypeError, match="elastic=True"):
        mykv.ElasticState(net=net, trainer=mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None))


def test_a_share_of_states_survives_its_way_as_bytes():
    state = mx.nd.array(np.arange(12).reshape(3, 4))
    half = state.astype("float16")
    states = {0: (state, None, half), "key": state[0:1]}
    unpacked = kept_shares.unpack(kept_shares.pack(states))
    assert list(unpacked) == [0, "key"]
    assert unpacked[0][0] == (described_array(state), None, described_array(half))
    assert unpacked[0][1][1].tobytes() == half.asnumpy().tobytes()
    assert unpacked["key"][1][0].tobytes() == state[0:1].asnumpy().tobytes()


@pytest.mark.parametrize("lengths", [[1], [4], [2, 2], [1, 1, 1], [3, 2], [3, 3, 1], [4, 1]])
def test_copies_of_shares_are_on_other_hosts_where_these_have_room(lengths):
    begins = np.cumsum([0, *lengths])
    hosts = [list(range(begin, begin + length)) for begin, length in zip(begins, lengths)]
    kept_by = kept_shares.keepers(hosts)
    assert sorted(kept_by) == list(range(sum(lengths)))
    if sum(lengths) > 1:
        assert all(keeper != rank for rank, keeper in enumerate(kept_by))
    elsewhere = sum(
        not {rank, keeper} <= set(ranks) for ranks in hosts for rank, keeper in enumerate(kept_by) if rank in ranks
    )
    most = max(lengths)
    assert elsewhere == min(sum(lengths), 2 * (sum(lengths) - most))


def test_shards_are_filled_from_those_of_another_division():
    values = np.arange(100, dtype=np.float32)
    new = sharding.Shard(0, 30, 50)
    array = mx.nd.zeros(50)
    for old in (sharding.Shard(0, 0, 40), sharding.Shard(1, 40, 5), sharding.Shard(2, 45, 55)):
        piece = values[old.begin : old.begin + old.count].view(np.uint8)
        kept_shares._fill(array, piece, 4, old, new, False)
    assert (array.asnumpy() == values[30:80]).all()


@pytest.mark.parametrize(
    ("before", "now", "state", "made"),
    [
        pytest.param([12], 12, (3, 1), (3, 1), id="a number for each row"),
        pytest.param([12], 12, (12,), (12,), id="another shape than that of its weight"),
        pytest.param([12], 5, (3, 4), (5,), id="a part of a whole weight"),
        pytest.param([7, 5], 12, (7,), (3, 4), id="a whole weight of parts"),
        pytest.param([7, 5], 6, (7,), (6,), id="a part of parts"),
    ],
)
def test_a_state_of_a_whole_weight_keeps_its_shape(before, now, state, made):
    """An optimizer of the user updates whole weights of shape (3, 4), and its states may have any shapes."""
    store_optimizer = SimpleNamespace(own_shard=lambda key: sharding.Shard(0, 0, now), shape_of=lambda key: (3, 4))
    begins = np.cumsum([0, *before])
    shards = [sharding.Shard(rank, begin, count) for rank, (begin, count) in enumerate(zip(begins, before))]
    array = kept_shares._made(store_optimizer, "key", Leaf(state, np.float32, False), shards)
    assert array.shape == made


@pytest.mark.parametrize("kind", [MXNetError, mykv.WorkersLost])
def test_the_exception_of_another_worker_ends_the_job_although_its_process_is_gone(monkeypatch, kind):
    """Its process may be gone before the launcher has ended the others."""
    monkeypatch.setattr(run.failure_detector, "lost", lambda seconds=0: "rank 1 has died")
    monkeypatch.setattr(run.process, "leave_lost", lambda: pytest.fail("goes on without the worker"))

    def train(state):
        raise kind("mykv: trainer0: rank 1 ended with MemoryError: no room")

    with pytest.raises(kind, match="rank 1 ended with MemoryError"):
        run._train_until_all_return(train, None, SimpleNamespace(respawn=False), True, (), {})

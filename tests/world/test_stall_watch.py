"""Ranks that do not come: who waits for whom, operations that are given up, and the warnings of the stall watch."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from harness.marks import long

_ENV = {"MYKV_TEST_POOL": "hosts"}  # ranks that never import MXNet
_every_split = pytest.mark.parametrize("hosts", [1, 2, 3])


@pytest.fixture
def core(hosts, gather):
    """The core over so many hosts, made for this test."""
    from compiled import core
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": hosts})
    yield core
    gather("no rank asks for anything more")
    core.shutdown()
    assert "mxnet" not in sys.modules


def _start(core, name: str, array=None):
    array = np.ones(10) if array is None else array
    return core.submit_allreduce(name, [array], [array])


def _works(core, size: int, name: str) -> None:
    """Assert that all ranks can still reduce together under this name."""
    array = np.ones(10)
    assert _start(core, name, array).wait(20)
    assert (array == size).all()


def _missing(core, name: str, ranks: list[int]) -> list[tuple]:
    """What the core says of operations of this name, once it names these ranks; it may hear of arrivals late."""
    deadline = time.monotonic() + 20
    while True:
        waiting = core.waiting(name)
        if [one[2] for one in waiting] == [ranks] or time.monotonic() > deadline:
            return waiting


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_missing_ranks_are_named_wherever_they_are(core, rank, size, hosts, gather):
    for late in ([0], [size - 1], list(range(1, size))):
        work = None if rank in late else _start(core, "meeting")
        gather("those that come early have come")
        if work is not None:
            ((name, seconds, missing, unresponsive),) = _missing(core, "meeting", late)
            assert (name, missing, unresponsive) == ("meeting", late, [])
            assert 0 <= seconds < 60
            assert core.waiting("another name") == []
            assert core.waiting("", 1000.0) == []
        gather("they have looked")
        work = work or _start(core, "meeting")
        assert work.wait(20)
        assert core.waiting() == []


@pytest.mark.ranks(3, env=_ENV)
@_every_split
def test_large_arrays_and_buckets_are_waited_for_too(core, rank, size, hosts, gather):
    count = 1 << 20  # many parts
    buffer = core.allocate(4 * count)
    works = []
    for turn in range(2):
        if turn == (rank == 1):
            works.append(_start(core, "large", np.ones(count, "float32")))
            works.append(core.submit_bucket("bucket", buffer, 0, count, "float32"))
        gather("rank 1 comes later")
        if turn == 0 and rank != 1:
            for name in ("large", "bucket"):
                assert [one[0] for one in _missing(core, name, [1])] == [name]
        gather("the others have looked")
    assert all(work.wait(30) for work in works)


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_what_is_given_up_fails_on_all_ranks_also_on_those_that_come_later(core, rank, size, hosts, gather):
    for early in ([0], [size - 1], list(range(size - 1))):
        if rank in early:
            work = _start(core, "meeting")
            gather("the early ones are here")
            if rank == early[-1]:
                core.give_up("meeting", "tired of waiting")
            with pytest.raises(core.Error, match="meeting: tired of waiting"):
                work.wait(20)
            gather("they have given up")
        else:
            gather("the early ones are here")
            gather("they have given up")
            if hosts == 1:
                with pytest.raises(core.Error, match="meeting: tired of waiting"):
                    _start(core, "meeting").wait(20)
            else:
                work = _start(core, "meeting")
        gather("so have the late ones, where their host has heard of it")
        if hosts > 1 and rank not in early:
            with pytest.raises(core.Error, match="meeting: tired of waiting"):
                work.wait(20)
        _works(core, size, "meeting")
        _works(core, size, "something else")


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_giving_up_what_all_have_come_to_changes_nothing(core, rank, size, hosts, gather):
    """Ranks give up and arrive at the same time: all get the result, or all get the error."""
    outcomes = []
    for turn in range(40):
        array = np.ones(10)
        work = _start(core, f"race {turn}", array)
        if rank == turn % size:
            core.give_up(f"race {turn}", "too early")
        try:
            assert work.wait(20)
            assert (array == size).all()
            outcomes.append("sum")
        except core.Error as error:
            assert "too early" in str(error)
            outcomes.append("error")
    assert len(set(map(tuple, gather(outcomes)))) == 1
    _works(core, size, "race 0")
    assert core.waiting() == []


@pytest.mark.ranks(2, 3, 4, env=_ENV)
@_every_split
def test_a_large_array_is_given_up_as_a_whole(core, rank, size, hosts, gather):
    array = np.ones(1 << 20)
    if rank == 0:
        work = _start(core, "large", array)
        _missing(core, "large", list(range(1, size)))
        core.give_up("large", "no")
        with pytest.raises(core.Error, match="large: no"):
            work.wait(20)
    gather("rank 0 has given up")
    if rank != 0:
        with pytest.raises(core.Error, match="large: no"):
            _start(core, "large", array).wait(20)
    _works(core, size, "large")


_SCRIPT = """
import hashlib, logging, os, signal, sys, time
import kvstore_plugin as mykv
import mxnet as mx
from mxnet import autograd
if mx.__version__.startswith("2."):
    mx.npx.set_np()
make = mx.np if mx.__version__.startswith("2.") else mx.nd
logging.basicConfig(format="%(name)s|%(levelname)s|%(message)s", stream=sys.stderr, force=True)
seen = []
class Seen(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())
logging.getLogger("kvstore_plugin").addHandler(Seen())
mykv.init()
rank, size = mykv.rank(), mykv.size()
mode, who = sys.argv[1], int(sys.argv[2])
"""

_TRAINING = """
def trained(stopping):
    net = mx.gluon.nn.Dense(3, in_units=6)
    net.initialize(mx.init.Constant(0.1))
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    for turn in range(6):
        if turn == 3 and stopping and rank == who:
            print("now", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        with autograd.record():
            loss = ((net(make.ones((4, 6)) * (1 + rank + turn)) - 1) ** 2).sum()
        loss.backward()
        trainer.step(4)
    return hashlib.sha256(net.weight.data().asnumpy().tobytes() + net.bias.data().asnumpy().tobytes()).hexdigest()

print("digest", trained(False), flush=True)
print("digest", trained(True), flush=True)
if str(rank) in mode:
    # The watch looks several times in a second.
    deadline = time.monotonic() + 20
    while not any("continue after" in text for text in seen) and time.monotonic() < deadline:
        time.sleep(0.05)
"""

_WARNING = re.compile(r"kvstore_plugin\|WARNING\|mykv on rank (\d+): (.*)")


def _wait_for_error_text(running, pattern: str, timeout: float = 60.0) -> str:
    deadline = time.monotonic() + timeout
    while not re.search(pattern, running.read()[1]):
        if time.monotonic() > deadline:
            out, err = running.read()
            pytest.fail(f"stderr never held {pattern!r}:\n--- stdout\n{out}\n--- stderr\n{err}")
        time.sleep(0.02)
    return running.read()[1]


@pytest.mark.parametrize(
    "ranks, hosts, who, speakers", [(2, 1, 1, "0"), long(3, 1, 0, "1"), long(4, 2, 2, "03"), long(4, 2, 0, "1")]
)
def test_a_stopped_worker_is_named_and_goes_on_with_the_same_numbers(mpirun, ranks, hosts, who, speakers):
    """Also the first rank of a host, which answers for the others of its host."""
    env = {"MYKV_STALL_WARN_S": "1", "MYKV_VIRTUAL_HOSTS": str(hosts)}
    running = mpirun.start(ranks, _SCRIPT + _TRAINING, speakers, str(who), env=env)
    running.wait_for("now")
    pid = int(re.search(r"now (\d+)", running.read()[0]).group(1))
    # It may have come to the operation before it was stopped.
    text = _wait_for_error_text(running, rf"rank {who}, which (has not arrived and )?does not respond \(is it stopped")
    os.kill(pid, signal.SIGCONT)
    result = running.wait(120)
    assert result.code == 0, result.text
    if hosts == 2 and who == 2:
        assert "ranks 2 and 3, whose hosts do not answer" in text, text
    warnings = _WARNING.findall(result.stderr)
    assert {one for one, said in warnings if "waited" in said} >= set(speakers), result.text
    # On a busy machine init() may warn of a late worker; the warnings of the stopped one's own waits are meant.
    own = [said for one, said in warnings if one == str(who) and "waited" in said and not said.startswith("init()")]
    assert not own, result.text
    assert any("operations continue after a wait of" in said for _, said in warnings), result.text
    digests = re.findall(r"digest (\w+)", result.stdout)
    assert len(digests) == 2 * ranks and len(set(digests)) == 1, result.text


def test_a_job_that_was_stopped_for_longer_than_the_limit_goes_on(mpirun):
    """As by Ctrl-Z in the shell. The time for which nobody ran is no time of waiting."""
    body = """
    store, array = mx.kv.create("mykv"), make.ones((4,))
    mykv.barrier()
    print(f"now{rank} {os.getpid()}", flush=True)
    begun = time.monotonic()
    while rank == 1 and time.monotonic() - begun < 7:
        time.sleep(0.01)
    store.pushpull("key", array)
    assert (array.asnumpy() == size).all()
    """
    running = mpirun.start(2, _SCRIPT + _dedented(body), "none", "1", env={"MYKV_STALL_ABORT_S": "4"})
    for rank in range(2):
        running.wait_for(f"now{rank}")
    pids = [int(pid) for pid in re.findall(r"now\d (\d+)", running.read()[0])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    result = running.wait(60)
    assert result.code == 0 and "given up" not in result.text, result.text


def test_a_long_stall_is_reported_at_growing_distances_with_its_keys(mpirun):
    body = """
    store = mx.kv.create("mykv")
    arrays = {key: make.ones((4,)) for key in "abcdefg"}
    if rank == 1:
        time.sleep(6)
    for key, array in arrays.items():
        store.pushpull(key, array)
    assert all((array.asnumpy() == size).all() for array in arrays.values())
    """
    result = mpirun(3, _SCRIPT + _dedented(body), "keys", "1", env={"MYKV_STALL_WARN_S": "0.5"})
    assert result.code == 0, result.text
    waits = [text for who, text in _WARNING.findall(result.stderr) if who == "0" and "waited" in text]
    warnings = [text for text in waits if not text.startswith("init()")]  # a worker that starts late is not meant
    assert 2 <= len(warnings) <= 5, result.text  # at 0.5, 1, 2 and 4 s, unless the machine is busy
    assert re.match(r"kv0/'\w', kv0/'\w', kv0/'\w', kv0/'\w', kv0/'\w' and 2 more have waited for \d", warnings[-1]), (
        result.text
    )
    assert all("for rank 1, which has not arrived" in text for text in warnings)
    others = [text for who, text in _WARNING.findall(result.stderr) if who in "12" and not text.startswith("init()")]
    assert not others, result.text


def test_a_call_of_one_rank_is_named_with_what_to_look_for(mpirun):
    body = """
    net = mx.gluon.nn.BatchNorm(in_channels=3)
    net.initialize()
    calls = [
        lambda: mykv.barrier(),
        lambda: mykv.sync_aux_params(net),
        lambda: mykv.allreduce(make.ones((4,)), name="loss").asnumpy(),
    ]
    for number, call in enumerate(calls):
        while rank == 1 and not os.path.exists(f"{sys.argv[3]}{number}"):
            time.sleep(0.05)
        call()
    """
    flag = f"/tmp/mykv-test-stall-{os.getpid()}-"
    running = mpirun.start(2, _SCRIPT + _dedented(body), "one", "0", flag, env={"MYKV_STALL_WARN_S": "0.5"})
    try:
        for number, shown in enumerate(["barrier", "sync_aux_params to the mean", "'loss'"]):
            text = _wait_for_error_text(running, rf"mykv on rank 0: {shown} has waited for")
            (warning,) = (said for _, said in _WARNING.findall(text) if said.startswith(shown))
            looks = r"rank 1, which has not arrived\. All ranks must .* under `if rank\(\) == 0:`"
            assert re.search(looks, warning), warning
            with open(f"{flag}{number}", "w"):
                pass
        result = running.wait(120)
    finally:
        for number in range(3):
            if os.path.exists(f"{flag}{number}"):
                os.remove(f"{flag}{number}")
    assert result.code == 0, result.text


@pytest.mark.parametrize("ranks, hosts, who", [long(3, 1, 0), (4, 2, 3), long(3, 3, 0)])
def test_after_the_second_limit_all_ranks_get_the_error_and_go_on(mpirun, ranks, hosts, who):
    body = """
    array = make.ones((4,))
    store = mx.kv.create("mykv")
    fine = make.ones((4,))
    store.pushpull("fine", fine)
    assert (fine.asnumpy() == size).all()
    if rank == who:
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.05)
    store.pushpull("key", array)
    try:
        array.asnumpy()
    except mx.MXNetError as error:
        print("error", rank, str(error).splitlines()[-1] if "given up" not in str(error) else
              [line for line in str(error).splitlines() if "given up" in line][0], flush=True)
    store.pushpull("fine", fine)
    assert (fine.asnumpy() == size * size).all()
    print("fine", rank, flush=True)
    """
    env = {"MYKV_STALL_WARN_S": "0", "MYKV_STALL_ABORT_S": "1", "MYKV_VIRTUAL_HOSTS": str(hosts)}
    flag = f"/tmp/mykv-test-stall-{os.getpid()}"
    running = mpirun.start(ranks, _SCRIPT + _dedented(body), "abort", str(who), flag, env=env)
    try:
        for rank in range(ranks):
            if rank != who:
                running.wait_for(f"error {rank} ")
        with open(flag, "w"):
            pass
        result = running.wait(120)
    finally:
        if os.path.exists(flag):
            os.remove(flag)
    assert result.code == 0, result.text
    errors = dict(re.findall(r"error (\d) (.*)", result.stdout))
    assert len(errors) == ranks, result.text
    for text in errors.values():
        assert "kv0/'key': given up after" in text and f"rank {who}, which has not arrived" in text, result.text
        assert "MYKV_STALL_ABORT_S" in text
    assert len(re.findall(r"fine \d", result.stdout)) == ranks, result.text


def test_settings_that_do_not_exist_are_named_with_those_that_they_look_like(mpirun):
    env = {"MYKV_STALL_WARN": "3", "MYKV_GPUS": "host", "MYKV_NOTE_OF_MINE": "1"}
    result = mpirun(2, "import kvstore_plugin as mykv\nmykv.init()", env=env)
    said = re.findall(r"There is no setting (\w+), so it has no effect. Is (\w+) meant", result.stderr)
    assert result.code == 0 and said == [("MYKV_GPUS", "MYKV_GPU"), ("MYKV_STALL_WARN", "MYKV_STALL_WARN_S")], (
        result.text
    )


@pytest.mark.parametrize("hosts", [1, long(2)])
def test_after_the_second_limit_more_operations_than_the_table_holds_end_too(mpirun, hosts):
    """They are in no table that others look at: rank 1 never comes to them, and finds no entry for its own."""
    body = """
    import numpy as np
    mykv.init()
    core, array = mykv.world.process.core, np.ones(1)
    if rank == 1:
        time.sleep(2)
    names = [f"many {number}" for number in range(65_600)] if rank == 0 else ["another"]
    works = [core.submit_allreduce(name, [array], [array]) for name in names]
    for work in works:
        try:
            assert not work.wait(40), "it has not arrived"
            print("hangs", rank, flush=True)
            os._exit(1)
        except core.Error:
            pass
    mykv.shutdown()
    mykv.init()
    assert (mykv.allreduce(make.ones((4,)), name="again", average=False).asnumpy() == 2).all()
    print("again", rank, flush=True)
    """
    # On one host the table must be full two seconds before the second limit, also on a busy machine.
    abort = "10" if hosts == 1 else "4"
    env = {"MYKV_STALL_WARN_S": "2", "MYKV_STALL_ABORT_S": abort, "MYKV_VIRTUAL_HOSTS": str(hosts)}
    result = mpirun(2, _SCRIPT + _dedented(body), "full", "1", env=env, timeout=120)
    assert result.code == 0 and len(re.findall(r"again \d", result.stdout)) == 2, result.text
    if hosts == 1:  # on two, what was given up makes room, since all ranks of its host had come
        told = "for a free entry in its host's table of operations (its share is in use)"
        told += ", and so for rank 1, which has not arrived"
        assert told in result.stderr, result.text


@pytest.mark.parametrize("hosts", [long(1), 2])
def test_a_stopped_worker_that_holds_a_bucket_fails_the_others_after_the_second_limit(mpirun, hosts):
    """Also where all ranks have come already, and where the one that decides between hosts is stopped."""
    body = """
    import numpy as np, threading
    from kvstore_plugin.world import process
    core = process.core
    if rank == who:
        stop = threading.Timer(0.3, lambda: (print("now", os.getpid(), flush=True), os.kill(os.getpid(), 19)))
        stop.start()
    arrays = [np.ones(1 << 18, "float32") for _ in range(8)]
    try:
        for turn in range(10**9):
            for work in [core.submit_allreduce(f"x{k}", [a], [a], scale=1 / size) for k, a in enumerate(arrays)]:
                work.wait()
    except core.Error as error:
        print("error", rank, str(error).replace("\\n", " "), flush=True)
        time.sleep(600)  # mpirun would wake the stopped rank to end it
    """
    env = {"MYKV_STALL_WARN_S": "0", "MYKV_STALL_ABORT_S": "7", "MYKV_VIRTUAL_HOSTS": str(hosts)}
    running = mpirun.start(4, _SCRIPT + _dedented(body), "abort", "0", env=env)
    running.wait_for("now")
    try:
        deadline = time.monotonic() + 30
        while len(set(re.findall(r"error (\d) ", running.read()[0]))) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        errors = dict(re.findall(r"error (\d) (.*)", running.read()[0]))
    finally:
        running.kill()
    assert sorted(errors) == ["1", "2", "3"], errors
    for text in errors.values():
        assert "rank 0" in text or "ranks 0 and 1, whose hosts do not answer" in text, text


def test_nothing_is_logged_and_no_thread_runs_where_it_is_off(mpirun):
    body = """
    import threading
    assert not [one for one in threading.enumerate() if "stalls" in one.name]
    array = make.ones((4,))
    if rank == 1:
        time.sleep(1)
    mx.kv.create("mykv").pushpull("key", array)
    array.asnumpy()
    """
    off = {"MYKV_STALL_WARN_S": "0", "MYKV_STALL_ABORT_S": "0"}
    result = mpirun(2, _SCRIPT + _dedented(body), "off", "0", env=off)
    assert result.code == 0 and "waited" not in result.stderr, result.text


def test_operations_that_go_on_are_not_reported_however_short_the_limit(mpirun):
    body = """
    array = make.ones((4,))
    store = mx.kv.create("mykv")
    end = time.monotonic() + 2
    turn = 0
    flag = make.ones((1,))
    while flag.asnumpy()[0] > 0:
        store.pushpull(turn % 50, array)
        turn += 1
        if turn % 20 == 0:
            flag = make.array([1.0 if rank != 0 or time.monotonic() < end else -100.0])
            store.pushpull("flag", flag)
            array[:] = 1
    """
    result = mpirun(2, _SCRIPT + _dedented(body), "busy", "0", env={"MYKV_STALL_WARN_S": "5"})
    assert result.code == 0 and "waited" not in result.stderr, result.text


def test_by_default_a_wait_is_named_after_a_minute_and_ends_after_half_an_hour(monkeypatch):
    from kvstore_plugin.world import settings

    monkeypatch.setattr(settings, "_read", {})  # else those of an init() before count
    for variable in ("MYKV_STALL_WARN_S", "MYKV_STALL_ABORT_S"):
        monkeypatch.delenv(variable, raising=False)
    assert (settings.value("MYKV_STALL_WARN_S"), settings.value("MYKV_STALL_ABORT_S")) == (60, 1800)


@pytest.mark.parametrize("variable", ["MYKV_STALL_WARN_S", "MYKV_STALL_ABORT_S"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_limits_that_are_no_times_are_refused(monkeypatch, variable, value):
    from kvstore_plugin.world import settings

    monkeypatch.setattr(settings, "_read", {})  # else those of an init() before count
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        ValueError, match=f"{variable} must be a number of seconds of at least 0.*, but it is {value!r}"
    ):
        settings.value(variable)


def _dedented(body: str) -> str:
    import textwrap

    return textwrap.dedent(body)

"""The timeline: what its file says of a run, and that it can be read whatever happens to run, file or disk."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import threading
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.marks import long
from harness.support import array, mx, numbers, total, value
from kvstore_plugin.timeline.recording import read
from kvstore_plugin.timeline.trace import trace
from kvstore_plugin.world import process

_PHASES = {"copy in", "wait", "reduce", "network", "spread", "copy out"}
_TWO_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}
_LATE = 0.2  # seconds


class Trace:
    """The trace of a timeline's file, checked: every bar is in a named row, and the bars of a row nest."""

    def __init__(self, path) -> None:
        self.content = json.loads(json.dumps(trace([read(str(path))], [0])))
        self.rows: dict[str, list[dict]] = {}
        names = {}
        lanes: dict[int, list[dict]] = {}
        for event in self.content["traceEvents"]:
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            if event["ph"] == "X":
                assert event["ts"] >= 0 and event["pid"] == 0
                lanes.setdefault(event["tid"], []).append(event)
                self.rows.setdefault(names[event["tid"]], []).append(event)
        for bars in lanes.values():
            _check_nesting(bars)

    def row(self, key) -> list[dict]:
        """The bars of the row of a key, whatever the number of the store."""
        return [bar for row, bars in self.rows.items() if row.endswith(f"/{key!r}") for bar in bars]

    def calls(self, key) -> list[dict]:
        """Those of whole operations."""
        return [bar for bar in self.row(key) if bar["name"] not in _PHASES]

    def phases(self, key) -> list[str]:
        return [bar["name"] for bar in self.row(key) if bar["name"] in _PHASES]


def _check_nesting(bars: list[dict]) -> None:
    around: list[int] = []
    times = [(round(bar["ts"] * 1000), round((bar["ts"] + bar["dur"]) * 1000)) for bar in bars]
    for begin, end in sorted(times, key=lambda of_bar: (of_bar[0], -of_bar[1])):
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], "two bars of a row overlap without one being inside the other"
        around.append(end)


def _push(store, rank: int, key, shape=(1000,)):
    result = array(numbers(rank, shape))
    store.pushpull(key, result)
    return result


@pytest.fixture
def path(request, rank, tmp_path, gather):
    """A file of this rank; no timeline is on before the test and after it."""
    gather("nobody is at work")
    yield str(tmp_path / f"timeline{rank}.mykv")
    mykv.stop_timeline()
    gather("all have stopped")


@pytest.mark.ranks(1, 2, 3)
def test_each_key_has_a_row_with_every_call(rank, size, path):
    store = mx.kv.create("mykv")
    mykv.start_timeline(path)
    for _ in range(3):
        for key in ("small", 7):
            assert (value(_push(store, rank, key)) == total(size, (1000,))).all()
    assert (value(_push(store, rank, "large", (600, 1000))) == total(size, (600, 1000))).all()
    mykv.stop_timeline()
    assert os.path.exists(path) == (rank == 0)
    if rank == 0:
        shown = Trace(path)
        for key in ("small", 7):
            assert [call["args"]["turn"] for call in shown.calls(key)] == [0, 1, 2]
            assert {call["name"] for call in shown.calls(key)} == {"allreduce sum"}
        (large,) = shown.calls("large")
        assert large["args"]["bytes"] == 2_400_000 and large["args"]["parts"] == 5
        copied = {"copy in", "copy out"} if size > 1 else set()  # a rank alone works on its arrays themselves
        assert {"reduce"} | copied <= set(shown.phases("large"))
        assert {"reduce"} <= set(shown.phases("small")) <= _PHASES


@pytest.mark.ranks(3)
@pytest.mark.parametrize("late", [0, 2])
def test_who_came_late_and_by_how_much(rank, path, late, gather):
    store = mx.kv.create("mykv")
    value(_push(store, rank, "warm"))
    mykv.start_timeline(path)
    value(_push(store, rank, "together"))
    # All others are there before the late one begins to be late, however slow the machine is.
    pushed = None if rank == late else _push(store, rank, "late")
    gather("the others have pushed")
    if rank == late:
        time.sleep(_LATE)
        pushed = _push(store, rank, "late")
    value(pushed)
    mykv.stop_timeline()
    if rank == 0:
        shown = Trace(path)
        (call,) = shown.calls("late")
        assert sorted(call["args"]["order"]) == [0, 1, 2] and call["args"]["order"][-1] == late
        delays = call["args"]["late_ms"]
        assert delays[0] == 0 and delays == sorted(delays)
        assert delays[-1] - delays[-2] > _LATE * 1000 * 0.8
        waits = [bar for bar in shown.row("late") if bar["name"] == "wait"]
        if late == 0:  # nobody waits for others that are there
            assert sum(bar["dur"] for bar in waits) < delays[-1] * 1000 / 2
        else:
            assert waits[0]["args"]["order"][-1] == late
            assert sum(bar["dur"] for bar in waits) > _LATE * 1e6 * 0.8


@pytest.mark.ranks(3, 4, env=_TWO_HOSTS)
def test_several_hosts(rank, size, path, gather):
    store = mx.kv.create("mykv")
    value(_push(store, rank, "warm"))
    mykv.start_timeline(path)
    last = rank == size - 1  # on the second host
    pushed = None if last else _push(store, rank, "x", (300, 1000))
    gather("the others have pushed")
    if last:
        time.sleep(_LATE)
        pushed = _push(store, rank, "x", (300, 1000))
    assert (value(pushed) == total(size, (300, 1000))).all()
    mykv.stop_timeline()
    if rank == 0:
        shown = Trace(path)
        (call,) = shown.calls("x")
        second = shown.content["otherData"]["host_ranks"][1][0]
        assert call["args"]["host_order"] == [0, second]
        assert call["args"]["host_late_ms"][1] > _LATE * 1000 * 0.8
        assert {"copy in", "wait", "reduce", "network", "spread", "copy out"} == set(shown.phases("x"))


@pytest.mark.ranks(2)
def test_trainers_have_a_row_for_each_bucket(rank, path):
    net = mx.gluon.nn.Dense(3, in_units=4)
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    mykv.start_timeline(path)
    for _ in range(2):
        with mx.autograd.record():
            loss = net(array(np.ones((2, 4), "float32"))).sum()
        loss.backward()
        trainer.step(2)
    mx.nd.waitall()
    mykv.stop_timeline()
    if rank == 0:
        shown = Trace(path)
        buckets = [
            row for row, bars in shown.rows.items() if sum("in place" in str(bar.get("args")) for bar in bars) == 2
        ]
        assert len(buckets) == 1, sorted(shown.rows)


@pytest.mark.ranks(2)
def test_calls_under_one_name_that_overlap_still_nest(rank, path):
    core = process.require()
    mykv.start_timeline(path)
    arrays = [np.full(100_000, turn, "float32") for turn in range(20)]
    works = [core.submit_allreduce(f"set/unnamed/{turn}", [one], [one]) for turn, one in enumerate(arrays)]
    works += [core.submit_allreduce("set/twice", [one], [np.empty_like(one)]) for one in arrays[:5]]
    for work in works:
        assert work.wait(20)
    mykv.stop_timeline()
    if rank == 0:
        shown = Trace(path)
        calls = [bar for bar in shown.rows["set/unnamed"] if bar["name"] not in _PHASES]
        assert {bar["args"]["operation"] for bar in calls} == {f"set/unnamed/{turn}" for turn in range(20)}
        twice = [bar for bar in shown.rows["set/twice"] if bar["name"] not in _PHASES]
        assert sorted(bar["args"]["turn"] for bar in twice) == [0, 1, 2, 3, 4]


@pytest.mark.ranks(2)
def test_starts_and_stops_while_other_threads_push(rank, size, path, gather):
    store = mx.kv.create("mykv")
    errors = []

    def push(number):
        try:
            for turn in range(150):
                result = _push(store, rank, f"thread {number}", (100, 50 + 200 * (turn % 3)))
                assert (value(result) == total(size, (100, 50 + 200 * (turn % 3)))).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    traces = 0
    while any(thread.is_alive() for thread in threads) or traces == 0:
        mykv.start_timeline(path, mark_cycles=traces % 2 == 1)
        time.sleep(0.005)
        mykv.stop_timeline()
        if rank == 0:
            Trace(path)
        traces += 1
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors
    gather("done")


@pytest.mark.ranks(2)
def test_one_rank_alone_may_start_it(rank, path, gather):
    store = mx.kv.create("mykv")
    if rank == 0:
        mykv.start_timeline(path)
    gather("on")
    value(_push(store, rank, "x"))
    if rank == 0:
        mykv.stop_timeline()
        (call,) = Trace(path).calls("x")
        assert sorted(call["args"]["order"]) == [0, 1]


@pytest.mark.ranks(2)
def test_mark_cycles_shows_when_the_thread_is_awake(rank, path):
    store = mx.kv.create("mykv")
    mykv.start_timeline(path, mark_cycles=True)
    for _ in range(5):
        value(_push(store, rank, "x", (300, 1000)))
        time.sleep(0.01)
    mykv.stop_timeline()
    if rank == 0:
        bars = Trace(path).rows["runtime thread of ranks 0 1"]
        assert len(bars) >= 2 and {bar["name"] for bar in bars} == {"awake"}


@pytest.mark.ranks(2)
def test_an_operation_that_fails_is_shown_with_its_error(rank, path):
    core = process.require()
    mykv.start_timeline(path)
    one = np.ones(10 + rank, "float32")
    with pytest.raises(core.Error, match="differs between ranks"):
        core.submit_allreduce("set/differs", [one], [one]).wait(20)
    mykv.stop_timeline()
    if rank == 0:
        (call,) = [bar for bar in Trace(path).rows["set/differs"] if bar["name"] not in _PHASES]
        assert "differs between ranks" in call["args"]["error"]


@pytest.mark.ranks(2)
def test_names_may_hold_any_characters(rank, path):
    core = process.require()
    name = 'a "name" \\ with\nlines, 中文 and \x01'
    mykv.start_timeline(path)
    one = np.ones(10, "float32")
    assert core.submit_allreduce(name, [one], [one]).wait(20)
    mykv.stop_timeline()
    if rank == 0:
        assert name in Trace(path).rows


@pytest.mark.ranks(2)
def test_a_second_start_says_that_one_is_on(rank, path, tmp_path):
    process.require()
    mykv.start_timeline(path)
    other = str(tmp_path / "other.mykv")
    if rank == 0:  # the others have none
        with pytest.raises(RuntimeError, match="already.*stop_timeline"):
            mykv.start_timeline(other)
    assert not os.path.exists(other)
    mykv.stop_timeline()
    mykv.stop_timeline()  # without effect
    mykv.start_timeline(other)
    mykv.stop_timeline()
    if rank == 0:
        Trace(path), Trace(other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "warned"), [("t.json", True), ("t-{rank}.json", True), ("t.mykv", False)])
def test_a_file_that_is_named_json_has_a_warning(rank, tmp_path, caplog, name, warned):
    """Users of Horovod expect JSON under this name."""
    process.require()
    file = str(tmp_path / name)
    with caplog.at_level("WARNING", logger="kvstore_plugin"):
        mykv.start_timeline(file)
    mykv.stop_timeline()
    writes = rank == 0 or "{rank}" in name
    command = f"python -m kvstore_plugin.timeline {file.replace('{rank}', str(rank))} --trace trace.json"
    assert (command in caplog.text) == (warned and writes)


@pytest.mark.ranks(2)
def test_all_may_try_another_file_where_rank_0_cannot_write_the_first(rank, path, tmp_path):
    process.require()
    with pytest.raises(FileNotFoundError) if rank == 0 else contextlib.nullcontext():
        mykv.start_timeline(str(tmp_path / "no folder" / "x.mykv"))
    mykv.start_timeline(file_path=path)
    mykv.stop_timeline()
    if rank == 0:
        Trace(path)


@pytest.mark.ranks(1)
def test_a_file_that_cannot_be_written_is_an_error_at_the_call(path, tmp_path):
    process.require()
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for bad, kind in [
        (str(tmp_path / "no folder" / "x.mykv"), FileNotFoundError),
        (str(tmp_path), IsADirectoryError),
        ("/dev/full", OSError),
        (pipe, OSError),
        ("", ValueError),
        (None, TypeError),
        (7, TypeError),
    ]:
        with pytest.raises(kind):
            mykv.start_timeline(bad)
    mykv.start_timeline(path)  # nothing of it was left on
    mykv.stop_timeline()
    Trace(path)


@pytest.mark.ranks(2)
def test_shutdown_ends_it_and_init_does_not_start_it_again(rank, path, gather):
    store = mx.kv.create("mykv")
    mykv.start_timeline(path)
    value(_push(store, rank, "x"))
    gather("done")
    mykv.shutdown()
    if rank == 0:
        assert len(Trace(path).calls("x")) == 1
    with pytest.raises(RuntimeError, match="init"):
        mykv.start_timeline(path)
    mykv.stop_timeline()
    gather("shut down")
    mykv.init()
    if rank == 0:
        before = os.stat(path)
    store = mx.kv.create("mykv")
    value(_push(store, rank, "y"))
    mykv.stop_timeline()
    if rank == 0:
        assert os.stat(path) == before
        mykv.start_timeline(path)
        mykv.stop_timeline()


@pytest.mark.ranks(2)
def test_a_forked_child_leaves_it_alone(rank, path):
    store = mx.kv.create("mykv")
    mykv.start_timeline(path)
    value(_push(store, rank, "x"))

    def child(results):
        try:
            mykv.stop_timeline()
            mykv.start_timeline(path)
        except RuntimeError as error:
            results.put(str(error))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    forked = context.Process(target=child, args=(results,))
    forked.start()
    forked.join(20)
    assert forked.exitcode == 0
    assert "fork" in results.get()
    value(_push(store, rank, "y"))
    mykv.stop_timeline()
    if rank == 0:
        shown = Trace(path)
        assert len(shown.calls("x")) == len(shown.calls("y")) == 1


_SCRIPT = """
    import os, resource, signal, sys, time
    import kvstore_plugin as mykv
    import mxnet as mx
    make = mx.np if mx.__version__.startswith("2.") else mx.nd
    store = mx.kv.create("mykv")

    def push(times):
        for _ in range(times):
            array = make.ones((1000,))
            store.pushpull("x", array)
            array.wait_to_read()

    push(3)
    path = sys.argv[1]
    mykv.start_timeline(path)
    push(20)
"""


@pytest.mark.parametrize(
    ("end", "least"),
    [
        long("", 20),  # the script's end
        long("sys.exit(0)", 20),
        ("mykv.shutdown()", 20),
        long("from mpi4py import MPI; MPI.Finalize()", 20),
        ("time.sleep(1); store.barrier() if hasattr(store, 'barrier') else None; os._exit(0)", 20),
    ],
)
def test_the_file_is_complete_at_the_end_of_the_program(mpirun, tmp_path, end, least):
    path = tmp_path / "timeline.mykv"
    mpirun(2, _SCRIPT + "    " + end, str(path))
    assert len(Trace(path).calls("x")) >= least


def test_the_file_of_a_killed_process_is_valid(mpirun, tmp_path):
    path = tmp_path / "timeline.mykv"
    mpirun(2, _SCRIPT + "    time.sleep(1)\n    push(1)\n    os.kill(os.getpid(), signal.SIGKILL)", str(path))
    assert len(Trace(path).calls("x")) >= 20


def test_a_full_disk_ends_it_with_a_valid_file_and_an_error_at_stop(mpirun, tmp_path):
    """Played by a limit of the size of files; the training goes on."""
    path = tmp_path / "timeline.mykv"
    result = mpirun(
        2,
        _SCRIPT
        + """
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    push(300)
    time.sleep(0.5)
    push(3)
    try:
        mykv.stop_timeline()
    except OSError as error:
        print("rank", store.rank, type(error).__name__, error, error.filename == path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    mykv.start_timeline(path + ".second")
    push(3)
    mykv.stop_timeline()
    """,
        str(path),
    )
    assert result.code == 0, result.text
    assert "rank 0 OSError" in result.stdout and "not complete" in result.stdout and "True" in result.stdout
    assert "rank 1" not in result.stdout
    assert path.stat().st_size <= 20_000
    Trace(path)
    assert len(Trace(f"{path}.second").calls("x")) == 3


# Writes at a place in a file end only when a file of this name is gone, as on a server that does not answer.
_DEAD_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#define WRITE(name, offset)                                                              \\
  ssize_t name(int fd, const void* data, size_t bytes, offset at) {                      \\
    while (access(getenv("DEAD_DISK"), F_OK) == 0) usleep(10000);                        \\
    return ((ssize_t(*)(int, const void*, size_t, offset))dlsym(RTLD_NEXT, #name))(fd, data, bytes, at); \\
  }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
"""


def test_shutdown_does_not_wait_for_a_file_system_that_does_not_answer(mpirun, tmp_path):
    source, library, mark = tmp_path / "disk.c", tmp_path / "disk.so", tmp_path / "dead"
    source.write_text(_DEAD_DISK)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    result = mpirun(
        2,
        _SCRIPT
        + """
    rank = store.rank
    if rank == 0:
        open(os.environ["DEAD_DISK"], "w").close()
    push(20)
    began = time.monotonic()
    mykv.shutdown()
    print("rank", rank, round(time.monotonic() - began), flush=True)
    if rank == 0:
        os.remove(os.environ["DEAD_DISK"])
        time.sleep(0.5)
    """,
        str(tmp_path / "timeline.mykv"),
        env={"LD_PRELOAD": str(library), "DEAD_DISK": str(mark)},
    )
    assert result.code == 0 and "rank 1 " in result.stdout, result.text
    assert 9 <= int(re.search(r"rank 0 (\d+)", result.stdout).group(1)) < 40, result.text


@pytest.mark.parametrize("what", ["profile_all", long("profile_imperative")])
def test_the_profiler_of_mxnet_shows_our_operations_by_name(mpirun, tmp_path, what):
    """In a run of its own: MXNet's profiler cannot be configured twice in a process."""
    result = mpirun(
        2,
        f"""
        import sys
        import kvstore_plugin as mykv
        import mxnet as mx
        make = mx.np if mx.__version__.startswith("2.") else mx.nd
        store = mx.kv.create("mykv")
        mx.profiler.set_config(filename=sys.argv[1] + str(store.rank), aggregate_stats=False, {what}=True)
        mx.profiler.set_state("run")
        store.pushpull("a key", make.ones((1000,)))
        store.pushpull(5, make.ones((300, 1000)))
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        """,
        str(tmp_path / "profile"),
    )
    assert result.code == 0, result.text
    for rank in range(2):
        events = json.loads((tmp_path / f"profile{rank}").read_text())["traceEvents"]
        names = {event.get("name", "") for event in events}
        for key in ("a key", 5):
            assert any(name.startswith("mykv ") and name.endswith(f"/{key!r}") for name in names), names

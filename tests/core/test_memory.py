"""A lack of memory is an error that does not end the process, and unused memory is given back."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import kvstore_plugin as mykv
import numpy as np
import pytest
from compiled import testing
from harness import launcher
from harness.cgroups import memory_cgroup
from harness.marks import long
from harness.support import MXNetError, array, checksum, dense_network, mx, value
from mxnet import autograd

_MIB = 1 << 20


def _resident() -> int:
    """Bytes of memory of this process, with what it has touched of the shared segment."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class _MallocInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def _malloc_info() -> _MallocInfo | None:
    """malloc's statistics of its heaps; None before glibc 2.33."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallocInfo
    return library.mallinfo2()


def _held() -> int:
    """Allocated bytes of malloc's heaps, without the holes between them; 0 before glibc 2.33."""
    info = _malloc_info()
    return info.uordblks + info.hblkhd if info else 0


def _resident_but_for_holes() -> int:
    """Bytes of memory of this process, after the holes in malloc's heaps have been returned to the system.

    They grow by 0.4 MB with each round here, since MXNet wants arrays on boundaries of 64 bytes: glibc 2.36 looks for
    a hole for them that is larger than one in which such an array has been.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return _resident()


def _cgroup(tmp_path, version: int, files: dict[str, dict[str, str]], place: str = "/job/step") -> str:
    """A folder in place of /proc, of a process in a cgroup with these files in each folder."""
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900000 kB\nMemAvailable: 500000 kB\nSwapFree: 0 kB\n")
    for folder, contents in files.items():
        (top / folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (top / folder / name).write_text(content)
    if version == 2:
        (proc / "self" / "cgroup").write_text(f"0::{place}\n")
        mount = f"30 24 0:26 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    else:
        (proc / "self" / "cgroup").write_text(f"9:cpu:/elsewhere\n4:memory:{place}\n")
        mount = f"35 32 0:31 / {top} rw - cgroup cgroup rw,memory\n"
    (proc / "self" / "mountinfo").write_text("21 1 0:20 / /sys rw - sysfs sysfs rw\n" + mount)
    return str(proc)


def _headroom(proc: str):
    return testing.memory_headroom(proc)


_V2 = {"memory.current": "100000000", "memory.stat": "anon 5\ninactive_file 20000000\nactive_file 10000000\n"}
_V1 = {
    "memory.usage_in_bytes": "100000000",
    "memory.stat": "cache 9\ntotal_inactive_file 20000000\ntotal_active_file 10000000\n",
}


@pytest.mark.ranks(1)
def test_headroom_is_that_of_the_machine_without_a_limit(tmp_path):
    bytes_, what = _headroom(_cgroup(tmp_path, 2, {"job/step": {**_V2, "memory.max": "max\n"}}))
    assert bytes_ == 500000 << 10 and "machine" in what


@pytest.mark.ranks(1)
def test_headroom_counts_what_the_kernel_can_free_at_once(tmp_path):
    bytes_, what = _headroom(_cgroup(tmp_path, 2, {"job/step": {**_V2, "memory.max": "200000000\n"}}))
    assert bytes_ == 130000000 and "limit of 190 MiB" in what and "job/step/memory.max" in what


@pytest.mark.ranks(1)
def test_headroom_is_the_least_of_all_groups_above(tmp_path):
    files = {"job/step": {**_V2, "memory.max": "400000000"}, "job": {**_V2, "memory.max": "110000000"}}
    bytes_, what = _headroom(_cgroup(tmp_path, 2, files))
    assert bytes_ == 40000000 and "job/memory.max" in what


@pytest.mark.ranks(1)
def test_headroom_of_cgroup_version_1(tmp_path):
    files = {"job/step": {**_V1, "memory.limit_in_bytes": "200000000"}}
    bytes_, what = _headroom(_cgroup(tmp_path, 1, files))
    assert bytes_ == 130000000 and "memory.limit_in_bytes" in what


_LIMITED = """
import os, subprocess, sys
folder, limit, usage = {folder!r}, {limit!r}, {usage!r}
open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
import kvstore_plugin as mykv, mxnet as mx
store = mx.kv.create("mykv")
inout = mx.nd.ones((1000,))
store.pushpull("before", inout)
assert inout.asnumpy()[0] == 2
holder = None
if {locked} and store.rank == 0:
    opened = [int(fd) for fd in os.listdir("/proc/self/fd")]
    (segment,) = [fd for fd in opened if "/memfd:mykv" in os.path.realpath("/proc/self/fd/%d" % fd)]
    program = "import fcntl; fcntl.lockf({{}}, fcntl.LOCK_EX); print(flush=True); input()".format(segment)
    holder = subprocess.Popen([sys.executable, "-c", program], pass_fds=[segment], stdin=-1, stdout=-1)
    holder.stdout.readline()
mykv.barrier()
if store.rank == 0:
    used = int(open(folder + "/" + usage).read())
    open(folder + "/" + limit, "w").write(str(used + ({room} << 20)))
mykv.barrier()
try:
    kept = [mykv.world.process.core.allocate({size} << 20) for _ in range(8)]
    print("no error", flush=True)
except RuntimeError as error:
    print("allocate:", error, flush=True)
mykv.barrier()
kept = None
if holder is not None:
    holder.communicate(b"end\\n")
mykv.barrier()
store.pushpull("before", inout)
assert inout.asnumpy()[0] == 4
print("lives", flush=True)
"""


@pytest.mark.parametrize(
    "room, size, locked", [long(160, 64, False), (320, 256, True)], ids=["in-turns", "side-by-side"]
)
def test_beyond_the_limit_of_a_container_is_an_error_and_the_processes_live(mpirun, room, size, locked):
    """Ranks take memory in turns, and side by side where another holds the turn; there is room for one rank's then."""
    with memory_cgroup() as made:
        if made is None:
            pytest.skip("no memory cgroup can be made here")
        names = {"folder": str(made.folder), "limit": made.limit, "usage": made.usage}
        result = mpirun(2, _LIMITED.format(**names, room=room, size=size, locked=locked))
        assert result.code == 0, result.text
        assert result.stdout.count("lives") == 2 and "no error" not in result.stdout, result.text
        assert "of this container's limit of" in result.stdout and "MiB are free" in result.stdout, result.text


_SHORT = """
import os, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
open({folder!r} + "/cgroup.procs", "w").write(str(os.getpid()))
import numpy as np
from compiled import core
if comm.rank == 0:
    open({folder!r} + "/{limit}", "w").write(str(int(open({folder!r} + "/{usage}").read()) + (300 << 20)))
comm.Barrier()
core.init(comm.py2f(), {{}})
from compiled import testing
ballast = []
if comm.rank == 0:
    while testing.memory_headroom()[0] > (40 << 20):
        ballast.append(np.ones(1 << 20, dtype="uint8"))
    try:
        while True:
            ballast.append(core.allocate(1 << 19))
    except core.Error as error:
        assert error.code == "no_memory", error
comm.Barrier()
x = np.ones(1000, "float32")
begun = time.process_time()
work = core.submit_allreduce("first", [x], [x])
try:
    assert work.wait(20), core.waiting()
    print("a result", flush=True)
except core.Error as error:
    print("error:", error, flush=True)
assert time.process_time() - begun < 5
del ballast
comm.Barrier()
core.shutdown()
comm.Barrier()
"""


def test_the_first_operation_ends_however_little_memory_is_left(mpirun):
    with memory_cgroup() as made:
        if made is None:
            pytest.skip("no memory cgroup can be made here")
        result = mpirun(2, _SHORT.format(folder=str(made.folder), limit=made.limit, usage=made.usage), timeout=90)
        assert result.code == 0 and result.stdout.count("error:") + result.stdout.count("a result") == 2, result.text
        for line in result.stdout.splitlines():
            assert not line.startswith("error:") or "MiB are free" in line, result.text


_LIMITED_FILES = """
import resource, sys
from mpi4py import MPI
import numpy as np
from compiled import core
most = int(sys.argv[1])
if MPI.COMM_WORLD.rank == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    core.init(MPI.COMM_WORLD.py2f(), {})
except core.Error as error:
    print("error:", error, flush=True)
else:
    x = np.ones(1 << 20, "float32")
    assert core.submit_allreduce("x", [x], [x]).wait(30) and (x == 2).all()
    MPI.COMM_WORLD.Barrier()
    core.shutdown()
    print("works", flush=True)
"""


def test_a_limit_of_the_size_of_files_bounds_the_shared_memory(mpirun):
    """The kernel takes the segment for a file, although it is only addresses."""
    result = mpirun(2, _LIMITED_FILES, str(1 << 30), timeout=60)
    assert result.code == 0 and result.stdout.count("works") == 2, result.text
    result = mpirun(2, _LIMITED_FILES, str(1 << 20), timeout=60)
    assert result.stdout.count("error: rank 0: ") == 2, result.text
    assert result.stdout.count("(`ulimit -f`) is 1 MiB") == 2, result.text


_SHRINKING = """
import os
open({folder!r} + "/cgroup.procs", "w").write(str(os.getpid()))
from compiled import testing
region = testing.Region(2 << 30)
print("begins", flush=True)
try:
    region.allocate(1 << 30)
except RuntimeError as error:
    print(error)
print("taken:", region.taken())
"""


def test_what_was_taken_of_a_slot_is_given_back_when_memory_runs_out_in_the_middle():
    with memory_cgroup() as made:
        if made is None:
            pytest.skip("no memory cgroup can be made here")
        limit, usage = made.folder / made.limit, made.folder / made.usage
        limit.write_text(str(2 << 30))
        program = _SHRINKING.format(folder=str(made.folder))
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout.readline() == "begins\n"
            enough = int(usage.read_text()) + 100 * _MIB
            while running.poll() is None and int(usage.read_text()) < enough:
                pass
            limit.write_text(str(int(usage.read_text()) + 200 * _MIB))
            told, _ = running.communicate(timeout=60)
        assert running.returncode == 0 and f"mykv cannot get {1 << 30} bytes" in told, told
        assert told.endswith("taken: 0\n"), told


@pytest.mark.ranks(2)
def test_more_than_the_address_space_of_a_rank_is_an_error_and_the_next_call_works(rank):
    """The address space of a rank's slots equals the machine's memory: more is refused."""
    mykv.init()
    too_much = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") + (64 << 20)
    with pytest.raises(RuntimeError, match="shared memory"):
        mykv.world.process.core.allocate(too_much)
    inout = array(np.ones(1000, "float32"))
    mx.kv.create("mykv").pushpull("after", inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(2)
def test_a_worker_without_room_for_gradients_is_an_error_on_all_and_another_trainer_works(rank, gather):
    mykv.init()
    held = []
    if rank == 1:  # addresses are used up, not memory
        for size in (1 << 32, 1 << 28, 1 << 24, 1 << 23):
            with pytest.raises(RuntimeError, match="used up"):
                while True:
                    held.append(mykv.world.process.core.reserve(size))
    net = dense_network(0, inputs=2000, widths=(2000,))
    with pytest.raises((RuntimeError, MXNetError), match="shared memory is used up"):
        mykv.DistributedTrainer(net.collect_params(), "sgd")
    held.clear()
    net = dense_network(rank)
    mykv.DistributedTrainer(net.collect_params(), "sgd")
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_rounds_of_init_and_shutdown_leave_nothing(rank, gather, monkeypatch, hosts):
    """Descriptors, threads and memory; between hosts each round has the communicators of the one before."""
    monkeypatch.setenv("MYKV_VIRTUAL_HOSTS", str(hosts))

    def seen():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _resident_but_for_holes(), _held()

    def round_():
        mykv.init()
        store = mx.kv.create("mykv")
        arrays = [array(np.ones(100_000, "float32")) for _ in range(3)]
        for key, one in enumerate(arrays):
            store.pushpull(key, one)
        if round_.number % 2:  # otherwise with operations under way
            for one in arrays:
                one.wait_to_read()
        mykv.shutdown()
        assert all((value(one) == 2).all() for one in arrays)
        round_.number += 1

    round_.number = 0
    mykv.shutdown()
    for _ in range(10):
        round_()
    before = seen()
    for _ in range(50):
        round_()
    after = seen()
    monkeypatch.undo()
    mykv.init()
    assert after[:2] == before[:2]
    more = after[2] - before[2]
    most = 2 + hosts  # two of Python's arenas and what is held
    assert more < most * _MIB, f"{more / _MIB:.1f} MiB more"
    if launcher.is_open_mpi():  # of which a communicator takes 9.3 KiB
        held = after[3] - before[3]
        assert held < 256 << 10, f"{held / 1024:.0f} KiB more are held"


@pytest.mark.ranks(2)
def test_keys_of_stores_that_are_gone_take_no_memory(rank):
    """20,000 keys for each store. What the core counts for a key, some 100 bytes, goes with the store."""
    mykv.init()
    sizes = []
    inout = array(np.ones(8, "float32"))
    for _ in range(5):
        store = mx.kv.create("mykv")
        for key in range(20_000):
            store.pushpull(f"a key of some length {key}", inout)
            if key % 1000 == 999:
                inout.wait_to_read()
                inout[:] = 1
        del store
        gc.collect()
        sizes.append(_resident_but_for_holes())
    assert sizes[-1] - sizes[1] < 2 * _MIB, [f"{(size - sizes[0]) / _MIB:.1f}" for size in sizes]


@pytest.mark.ranks(2)
def test_broadcasts_of_parameters_leave_nothing(rank):
    mykv.init()
    params = {f"parameter of some length {number}": array(np.ones(4, "float32")) for number in range(500)}
    sizes = []
    for _ in range(6):
        for _ in range(8):
            mykv.broadcast_parameters(params)
        sizes.append(_resident_but_for_holes())
    # A leak grows in each round. In one whole run 1.5 MiB came in a single round on both ranks, for an unknown cause.
    assert 4 * np.median(np.diff(sizes[1:])) < 1 * _MIB, [f"{(size - sizes[0]) / _MIB:.1f}" for size in sizes]


@pytest.mark.ranks(2)
def test_names_of_trainers_go_with_the_trainer_and_its_parameters(rank, gather):
    mykv.init()

    def names():
        gc.collect()
        return testing.counted_names(mykv.world.process.core.world())

    def train(on_store):
        net = dense_network(rank)
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", prefix="a", update_on_kvstore=on_store)
        with autograd.record():
            loss = net(array(np.ones((2, 6), "float32")))
        loss.backward()
        trainer.step(2)
        mx.nd.waitall()
        return net

    train(False), train(True)
    before = names()
    net = train(False)
    assert names() > before
    del net
    assert names() == before
    for on_store in (False, True, True):
        train(on_store)
    assert names() == before


@pytest.mark.ranks(2)
def test_names_stay_while_a_parameter_uses_them_whose_trainer_is_gone_on_one_rank(rank, gather):
    """The first trainer of a parameter broadcasts its values, also where there is a second one."""
    mykv.init()
    net = dense_network(rank)
    trainers = [mykv.DistributedTrainer(net.collect_params(), "sgd") for _ in range(2)]
    if rank == 0:
        del trainers[0]
    gc.collect()
    for _ in range(2):
        mx.random.seed(rank)
        net.initialize(force_reinit=True)
        assert len(set(gather(checksum(net)))) == 1

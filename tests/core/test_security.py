"""Access to the ranks' shared memory: only the job's ranks get it, and foreign processes do not delay them."""

from __future__ import annotations

# A process that is no rank. Whenever the ranks of a job open their door, it stops the rank that opened it and knocks
# there as often as it likes: what it says is in the queue before the rank goes on. What it is handed, it prints.
_STRANGER = r"""
import array, os, select, signal, socket, sys, time

how, uid, opener, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
said = {"silent": b"", "garbage": bytes(range(200)), "wrong": bytes(16), "short": b"abc", "gone": None}[how]


def doors():
    with open("/proc/net/unix") as table:
        return {line.split()[-1] for line in table if "@mykv-" in line and len(line.split()[-1]) == 38}


def knock(name):
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    try:
        one.connect("\0" + name[1:])
        if said:
            one.send(said)
    except OSError:
        one.close()
        return None
    if said is None:
        one.close()
    return one


def knock_as_other_user(name):
    child = os.fork()
    if child == 0:
        os.setuid(uid)
        ones = [knock(name) for _ in range(most)]
        os._exit(0 if any(ones) else 1)
    return [child] if os.waitpid(child, 0)[1] == 0 else []


kept, knocked, seen = [], 0, set()
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for name in doors() - seen:
        os.kill(opener, signal.SIGSTOP)
        try:
            seen.add(name)
            new = knock_as_other_user(name) if uid else [one for one in (knock(name) for _ in range(most)) if one]
        finally:
            os.kill(opener, signal.SIGCONT)
        knocked += bool(new)
        kept += new
for one in kept:
    if uid or one.fileno() < 0:
        continue
    one.setblocking(False)
    space = array.array("i", [-1])
    try:
        data, ancillary, *_ = one.recvmsg(1, socket.CMSG_SPACE(4))
    except OSError:
        continue
    if data or ancillary:
        print("handed over", flush=True)
print("knocked", knocked, flush=True)
"""

# Groups are made, each with memory of its own, until the strangers of each kind have come to the doors of some.
_JOB = r"""
import logging, os, subprocess, sys, time
import kvstore_plugin as mykv
from kvstore_plugin.world import core as loader
from mpi4py import MPI

def strangers(how, uid, most):
    started = subprocess.Popen(
        [sys.executable, "-c", STRANGER, how, str(uid), str(os.getpid()), str(most)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert started.stdout.readline() == "ready\n"
    return started

mykv.init()
world, core = MPI.COMM_WORLD, loader.load()
nobody = 65534 if os.geteuid() == 0 else 0
kinds = [("silent", 0, 400), ("garbage", 0, 3), ("wrong", 0, 3), ("short", 0, 3), ("gone", 0, 3)]
for how, uid, most in kinds + [("silent", nobody, 3)] * (nobody > 0):
    if world.Get_rank() == 0:
        stranger = strangers(how, uid, most)
    world.Barrier()
    slowest, turned_away, end = 0.0, 0, time.monotonic() + 20
    while True:
        began = time.monotonic()
        group = core.make_group(world.Dup().py2f(), [0, 1, 2])
        slowest = max(slowest, time.monotonic() - began)
        assert group.local_size() == 3, (how, uid, most, "the ranks were parted")
        turned_away += group.rejected_callers()
        if world.bcast(turned_away >= 3 or time.monotonic() > end, 0):
            break
    if world.Get_rank() == 0:
        out, _ = stranger.communicate("stop\n", timeout=20)
        report = (how, uid, most, slowest, turned_away, out)
        print(report)
        assert turned_away >= 3 and "handed over" not in out and slowest < 5, report

# Those at the door of a process set are told of, by the rank that opened it.
told = []
logging.getLogger("kvstore_plugin").addFilter(lambda record: told.append(record.getMessage()) or False)
if world.Get_rank() == 0:
    stranger = strangers("wrong", 0, 3)
end = time.monotonic() + 20
while not world.bcast(told or time.monotonic() > end, 0):
    mykv.remove_process_set(mykv.add_process_set([0, 1]))
if world.Get_rank() == 0:
    stranger.communicate("stop\n", timeout=20)
    assert "outside of this job asked" in told[0] and "the ranks of ProcessSet([0, 1])" in told[0], told
else:
    assert not told, told
print("fine")
"""


def test_strangers_get_nothing_and_keep_nobody_waiting(mpirun):
    result = mpirun(3, f"STRANGER = {_STRANGER!r}\n{_JOB}", timeout=120)
    assert result.code == 0 and result.stdout.count("fine") == 3, result.text


def test_init_says_that_strangers_called(mpirun):
    script = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    import kvstore_plugin as mykv
    from kvstore_plugin.world import core as loader
    class WithStrangers:
        def __getattr__(self, name):
            return (lambda: 3) if name == "rejected_callers" else getattr(loader.load(), name)
    from kvstore_plugin.world import process
    join = process._join
    def joined(comm, **named):
        join(comm, **named)
        process.core = WithStrangers()
    process._join = joined
    mykv.init()
    """
    result = mpirun(1, script)
    assert result.code == 0 and "3 processes outside of this job" in result.stdout, result.text


def test_shared_memory_is_sealed_private_and_not_inherited(mpirun):
    script = """
    import fcntl, os, stat, subprocess, sys
    import kvstore_plugin as mykv
    mykv.init()
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "memfd:mykv" in target:
            found.append(fd)
    assert found
    for fd in found:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        size = os.fstat(fd).st_size
        for change in (lambda: os.ftruncate(fd, 4096), lambda: os.ftruncate(fd, 2 * size),
                       lambda: fcntl.fcntl(fd, 1033, 0)):
            try:
                change()
            except OSError:
                continue
            raise AssertionError("the shared memory is not sealed")
    listed = "import os; print([os.readlink('/proc/self/fd/' + fd) for fd in ('3', '4', '5', '6', '7', '8', '9') \
        if os.path.lexists('/proc/self/fd/' + fd)], [l for l in open('/proc/self/maps') if 'mykv' in l])"
    child = subprocess.run([sys.executable, "-c", listed], close_fds=False, capture_output=True, text=True, check=True)
    assert "memfd:mykv" not in child.stdout, child.stdout
    print("fine")
    """
    result = mpirun(2, script)
    assert result.code == 0 and result.stdout.count("fine") == 2, result.text

"""Ranks that leave, or can do no more, while operations between hosts are under way: each operation ends on every rank.

It ends with its sum, or with an error that names the rank that has gone. No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

import re
import textwrap

import pytest
from harness.marks import long

_BEGIN = """
import os, signal, subprocess, sys, time
import numpy as np
from mpi4py import MPI
from compiled import core, testing

comm = MPI.COMM_WORLD
core.init(comm.py2f(), {"virtual_hosts": int(sys.argv[1])})
rank, size = core.rank(), core.size()

def say(*words):
    os.write(1, (" ".join(str(one).replace("\\n", " ") for one in words) + "\\n").encode())

def stop(seconds):
    # Stop this process, and let a child wake it.
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def submit(name, count):
    array = np.full(count, rank + 1, "float32")
    return array, core.submit_allreduce(name, [array], [array])

def check(name, started, seconds):
    # A result, an error, or neither after so many seconds.
    array, work = started
    try:
        if not work.wait(seconds):
            say("hang", rank, name)
        elif (array == size * (size + 1) // 2).all():
            say("sum", rank, name)
        else:
            say("wrong", rank, name)
    except core.Error as error:
        say("error", rank, name, error)

check("first", submit("first", 10), 60)
comm.Barrier()
"""
# No rank ends MPI while others have no answer yet.
_END = """
comm.Barrier()
core.shutdown()
say("end", rank)
"""


def _run(mpirun, ranks: int, hosts: int, body: str) -> tuple[dict[int, str], str]:
    """Run a script; the last words on the operation "x" by rank, and the whole output."""
    script = textwrap.dedent(_BEGIN) + textwrap.dedent(body) + textwrap.dedent(_END)
    result = mpirun(ranks, script, str(hosts), timeout=90)
    assert not re.search(r"^(hang|wrong) ", result.stdout, re.MULTILINE), result.text
    assert result.code == 0 and len(re.findall(r"^end \d", result.stdout, re.MULTILINE)) == ranks, result.text
    outcomes = re.findall(r"^((?:sum|error) (\d) x.*)$", result.stdout, re.MULTILINE)
    return {int(rank): text for text, rank in outcomes}, result.text


@pytest.mark.parametrize("count", [1 << 24, long(1 << 15)], ids=["large", "small"])
def test_a_rank_that_was_stopped_while_its_partner_left_gets_a_result_or_an_error(mpirun, count):
    """The partner waits for it for five seconds and then goes without it."""
    body = f"""
    if rank == 1:
        started = submit("x", {count})
        time.sleep(0.012)
        stop(6.5)
    else:
        started = submit("x", {count})
        time.sleep(0.3)
        core.leave("it had enough")
    check("x", started, 10)
    """
    outcomes, text = _run(mpirun, 2, 2, body)
    assert set(outcomes) == {0, 1}, text
    if outcomes[1].startswith("error"):
        assert "rank 0 has left: it had enough" in outcomes[1], text


def test_the_neighbours_of_a_host_leader_that_leaves_do_not_wait_for_its_messages(mpirun):
    """Rank 0 decides what runs, and is stopped; rank 2 speaks for ranks 2 and 3, and goes before it hears of rank 0."""
    body = """
    if rank == 0:
        stop(7)
    time.sleep(0.5)
    started = submit("x", 1000)
    if rank == 2:
        time.sleep(0.5)
        core.leave("it had enough")
    check("x", started, 15)
    """
    outcomes, text = _run(mpirun, 4, 2, body)
    assert set(outcomes) == {0, 1, 2, 3}, text
    assert all("rank 2 has left: it had enough" in outcomes[rank] for rank in (0, 1, 3)), text


@pytest.mark.parametrize("ranks, hosts, who", [long(2, 2, 0), long(2, 2, 1), (4, 2, 3), long(3, 3, 2)])
def test_a_rank_that_can_do_no_more_but_lives_is_named_on_all_hosts(mpirun, ranks, hosts, who):
    """A call of MPI fails, there is no memory for what hosts exchange, a message is damaged: at several moments."""
    body = f"""
    for fault, count in [(fault, count) for fault in ("mpi", "memory", "message") for count in (1, 2, 5, 13)]:
        comm.Barrier()
        if rank == {who}:
            testing.plant(fault, count)
        name = f"x {{fault}} {{count}}"
        works = [submit(f"{{name}} {{k}}", 300 << k) for k in range(11)]
        for k, work in enumerate(works):
            check(f"{{name}} {{k}}", work, 15)
        comm.Barrier()
        testing.plant(fault, 0)
        core.shutdown()
        core.init(comm.py2f(), {{"virtual_hosts": {hosts}}})
    """
    outcomes, text = _run(mpirun, ranks, hosts, body)
    assert set(outcomes) == set(range(ranks)), text
    causes = {"mpi": "MPI failed in ", "memory": "there is no memory for", "message": "a malformed message"}
    for fault, cause in causes.items():
        errors = re.findall(rf"^error (\d) x {fault}.*$", text, re.MULTILINE)
        is_met = fault != "message" or who != 3  # only the first rank of a host has messages of others
        assert set(map(int, errors)) == (set(range(ranks)) if is_met else set()), (fault, text)
        for line in re.findall(rf"^error \d x {fault}.*$", text, re.MULTILINE):
            assert cause in line and (line.startswith(f"error {who} ") or f"rank {who} has left" in line), text


def test_an_operation_that_is_done_succeeds_on_all_ranks_of_a_host_when_some_break_down(mpirun):
    """Many operations end at about the same time, and a call of MPI of rank 0 or 3 fails: of each, ranks 0 and 1 have
    its sum, or neither; so do ranks 2 and 3."""
    body = """
    both = comm.Split(rank // 2, rank)
    torn = 0
    for count in range(20, 1220, 40):
        comm.Barrier()
        if rank == (0, 3)[count // 40 % 2]:
            testing.plant("mpi", count)
        works = [submit(f"y {k}", 12000) for k in range(100)]
        ends = []
        for array, work in works:
            try:
                assert work.wait(20)
                assert (array == size * (size + 1) // 2).all()
                ends.append("sum")
            except core.Error as error:
                ends.append(str(error))
        for k, pair in enumerate(zip(*both.allgather(ends))):
            if (pair[0] == "sum") != (pair[1] == "sum"):
                torn += 1
        say("ends", rank, count, ends.count("sum"), len(ends) - ends.count("sum"))
        comm.Barrier()
        testing.plant("mpi", 0)
        core.shutdown()
        core.init(comm.py2f(), {"virtual_hosts": 2})
    say("torn", rank, torn)
    check("x", submit("x", 10), 20)
    """
    outcomes, text = _run(mpirun, 4, 2, body)
    assert len(re.findall(r"^torn \d 0$", text, re.MULTILINE)) == 4, text
    ends = re.findall(r"^ends \d \d+ (\d+) (\d+)$", text, re.MULTILINE)
    assert any(int(sums) > 0 and int(errors) > 0 for sums, errors in ends), text  # some end before the fault


@pytest.mark.long
def test_a_departure_of_which_the_notices_are_lost_is_noticed_all_the_same(mpirun):
    """Rank 0 has told that it has left; twenty seconds after that its partner waits no more for its slice."""
    body = """
    started = submit("x", 1 << 24)
    if rank == 1:
        time.sleep(0.012)
        stop(6.5)
    else:
        testing.plant("notice", 1)
        time.sleep(0.3)
        core.leave("it had enough")
    check("x", started, 40)
    """
    outcomes, text = _run(mpirun, 2, 2, body)
    assert "rank 0 has left: it had enough" in outcomes[1], text


def test_what_a_single_rank_posts_while_it_leaves_ends(mpirun):
    """The post comes before the departure, and the arrival after it.

    Small; a part that the runtime's thread would sum; several.
    """
    script = """
    import threading, time
    import numpy as np
    from mpi4py import MPI
    from compiled import core, testing

    for kind, count in (("small", 0), ("part", 1 << 15), ("parts", 1 << 18)):
        core.init(MPI.COMM_WORLD.py2f(), {})
        group = core.world()
        buffer = core.allocate(1 << 20)
        array = np.ones(10)
        works = []

        def post():
            if count:
                works.append(group.submit_bucket("x", buffer, 0, count, "float32"))
            else:
                works.append(group.submit_allreduce("x", [array], [array]))

        testing.plant("late", 1)
        thread = threading.Thread(target=post)
        thread.start()
        time.sleep(0.1)
        begin = time.monotonic()
        group.leave("it had enough")
        thread.join()
        try:
            print(kind, "ended" if works[0].wait(10) else "hang", time.monotonic() - begin)
        except core.Error as error:
            print(kind, "ended with", error)
        core.shutdown()
    """
    result = mpirun(0, script, timeout=60)
    assert result.code == 0 and result.stdout.count("ended") == 3, result.text

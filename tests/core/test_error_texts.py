"""The text of errors: whole characters of any language, the first known cause, and differences of signatures.

No MXNet: the core alone, on numpy arrays.
"""

from __future__ import annotations

import re
import textwrap

import pytest
from harness.marks import long

_BEGIN = """
import os, sys, time
import numpy as np
from mpi4py import MPI
from compiled import core

core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": int(sys.argv[1])})
rank, size = core.rank(), core.size()

def submit(name, count=10, label=""):
    array = np.full(count, rank + 1, "float32")
    return core.submit_allreduce(name, [array], [array], label=label)

def fails(work):
    try:
        assert work.wait(30), "hang"
    except core.Error as error:
        return error
    raise AssertionError("no error")

def say(*words):
    os.write(1, (" ".join(str(one) for one in words) + "\\n").encode())
"""
_END = """
MPI.COMM_WORLD.Barrier()
core.shutdown()
say("end", rank)
"""


def _run(mpirun, ranks: int, hosts: int, body: str):
    result = mpirun(ranks, textwrap.dedent(_BEGIN) + textwrap.dedent(body) + _END, str(hosts), timeout=90)
    assert result.code == 0 and len(re.findall(r"^end \d", result.stdout, re.MULTILINE)) == ranks, result.text
    return result


@pytest.mark.parametrize("hosts", [1, 2])
def test_texts_are_cut_between_two_characters(mpirun, hosts):
    """Names, reasons and errors that are too long, whose cut falls on each byte of a character of two to four bytes."""
    body = """
    for text in ("é", "€", "😀"):
        for k in range(4):
            name = f"{text} {k} " + "x" * k + text * 700
            if rank == 0:
                core.refuse(name, "y" * k + text * 3000)
                continue
            error = str(fails(submit(name)))
            assert "\\ufffd" not in error and error.endswith(text) and f"by rank 0: {'y' * k}{text}" in error, error
            assert len(error.encode()) > 900, error
        for k in range(4):
            error = str(fails(submit("x" * k + text * 700, 10 + rank)))
            assert "\\ufffd" not in error and "rank 0 has allreduce sum of float32 (10,)" in error, error
    """
    _run(mpirun, 2, hosts, body)


def test_a_reason_that_is_not_unicode_reaches_the_other_ranks(mpirun):
    """As of a file whose name is in another encoding: Python shows it with surrogates."""
    body = """
    if rank == 0:
        core.refuse("x", "no such file: " + os.fsdecode(b"/data/\\xff.rec"))
    else:
        assert str(fails(submit("x"))).endswith("no such file: /data/\\\\udcff.rec")
    """
    _run(mpirun, 2, 1, body)


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_error_shows_where_two_long_signatures_differ(mpirun, hosts):
    """The label stands in for what is long: a group of many arrays, or any other text."""
    body = """
    shapes = [f"float32 ({k}, 64)" for k in range(300)]
    arrays = ", ".join(shapes)
    for at in (0, 7, 299):
        mine = list(shapes)
        mine[at] = f"float32 ({1000 + rank}, 3)"
        error = str(fails(submit(f"arrays {at}", label="a group of 300: " + ", ".join(mine))))
        for r in (0, 1):
            shown = f"rank {r} has a group of 300, array {at + 1}: float32 ({1000 + r}, 3)"
            assert shown in error, (shown, error)
        assert len(error.encode()) < 600 and error.endswith("on all workers"), error
    for before in (200, 5000):
        error = str(fails(submit(f"text {before}", label="é" * before + f"it is {rank}" + "z" * 5000)))
        assert "it is 0" in error and "it is 1" in error and "\\ufffd" not in error and len(error) < 1000, error
    error = str(fails(submit("number", label=f"a group of {40 + rank}: " + arrays)))
    assert "a group of 40: float32 (0, 64)" in error and "a group of 41: float32 (0, 64)" in error, error
    fails(submit("digits", label="a group of " + "9" * 400 + f": {rank}" + arrays))
    """
    _run(mpirun, 2, hosts, body)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("seconds", [0.5, long(7)])
def test_a_rank_that_comes_late_gets_the_reason_of_a_rank_that_refused_and_left(mpirun, hosts, seconds):
    body = f"""
    if rank == 0:
        core.refuse("x", "the calibration file is missing")
        core.leave("it had enough")
    else:
        time.sleep({seconds})
        error = fails(submit("x"))
        assert "the calibration file is missing" in str(error), error
        if {hosts} == 1:
            assert error.code == "refused" and tuple(error.ranks) == (0,), (error.code, error.ranks)
            assert "left" not in str(error), error
    """
    _run(mpirun, 2, hosts, body)


def test_what_a_host_has_announced_with_an_error_ends_with_it_when_a_rank_leaves(mpirun):
    """Ranks 0 and 1 of the first host differ; rank 2, on the other host, leaves without having come."""
    body = """
    if rank == 2:
        time.sleep(1)
        core.leave("it had enough")
    else:
        error = fails(submit("x", 10 + rank))
        assert error.code == "mismatch" and "(10,)" in str(error) and "(11,)" in str(error), error
    """
    _run(mpirun, 3, 2, body)

"""Several threads of one rank that use it at once, and forks, which do not disturb their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, mx, numbers, total, value
from kvstore_plugin.world import process

_THREADS = 6


def _in_threads(function) -> None:
    """Run function(number) in several threads at once, and raise what one of them raised."""
    errors = []
    gate = threading.Barrier(_THREADS)

    def run(number):
        gate.wait()
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.ranks(3, long=(2,))
def test_threads_that_push_at_once_under_keys_of_their_own(rank, size):
    store = mx.kv.create("mykv")
    turns = 30
    shape = [(10 + 100 * number,) for number in range(_THREADS)]
    arrays = [[array(numbers(rank + turn, shape[number])) for turn in range(turns)] for number in range(_THREADS)]
    outs = [[array(np.zeros(shape[number], "float32")) for _ in range(turns)] for number in range(_THREADS)]

    def push(number):
        for turn in range(turns):
            store.pushpull(f"thread {number}", arrays[number][turn], out=outs[number][turn], priority=turn % 3)

    _in_threads(push)
    for number in range(_THREADS):
        for turn in range(turns):
            expected = sum(numbers(r + turn, shape[number]) for r in range(size))
            np.testing.assert_array_equal(value(outs[number][turn]), expected)


@pytest.mark.ranks(3, long=(2,))
def test_threads_that_wait_at_once(rank, size):
    """With arrays of numpy, each thread waits for its own operations, in parts that travel side by side."""
    mykv.init()

    def reduce(number):
        for turn in range(10):
            mine = np.full(1 + 200_000 * (number % 2), float(rank + turn))
            work = process.core.submit_allreduce(f"waiting {number}", [mine], [mine], priority=number)
            assert work.wait(30)
            assert (mine == size * turn + size * (size - 1) / 2).all()

    _in_threads(reduce)


@pytest.mark.ranks(1)
def test_what_a_fork_writes_to_shared_memory_stays_there():
    """Also what its own fork writes; and a fork costs no time for memory that is large."""
    mykv.init()
    buffer = process.core.reserve(1 << 34)  # 16 GiB of addresses
    buffer.commit(1 << 16)
    shared = np.frombuffer(buffer, dtype=np.uint8, count=1 << 16)
    shared[:] = 1
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        was = int(shared[0])
        shared[:] = 2
        grandchild = os.fork()
        if grandchild == 0:
            was_there = int(shared[-1])
            shared[:] = 3
            os._exit(was_there)
        of_grandchild = os.WEXITSTATUS(os.waitpid(grandchild, 0)[1])
        os._exit(100 * was + 10 * int(shared[-1]) + of_grandchild)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 122
    assert time.monotonic() - began < 5
    assert (shared == 1).all()


def _exits_at_once() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _refused(answers) -> None:
    try:
        process.core.waiting()
    except RuntimeError as error:
        answers.put((mykv.is_initialized(), str(error)))


def _asks_in_vain() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    worker = context.Process(target=_refused, args=(answers,), daemon=True)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    initialized, sentence = answers.get()
    assert not initialized and "forked child" in sentence


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fork", [_exits_at_once, _asks_in_vain])
def test_a_fork_does_not_disturb_its_parent(rank, size, fork):
    """One with operations under way too, and of one rank only, as that of a DataLoader's worker."""
    store = mx.kv.create("mykv")
    for turn in range(3):
        outs = [array(np.zeros(50_000, "float32")) for _ in range(4)]
        values = [array(numbers(rank, (50_000,))) for _ in outs]
        for key, (mine, out) in enumerate(zip(values, outs)):
            store.pushpull(key, mine, out=out)
        if rank == turn % size:
            fork()
        for out in outs:
            np.testing.assert_array_equal(value(out), total(size, (50_000,)))

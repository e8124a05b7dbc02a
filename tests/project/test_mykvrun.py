"""mykvrun: one line starts a job, and names the failed worker at the end."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from harness import launcher, several_hosts
from harness.marks import long
from harness.processes import descendants, wait_until_ended

from mykvrun import attempt, commands, hosts, main, worker_notes, workers
from mykvrun.command_line import parse
from mykvrun.errors import LaunchError
from mykvrun.hosts import Host
from mykvrun.job import Job
from mykvrun.mpi import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mykvrun.output import (
    OPEN_MPI_4,
    OPEN_MPI_LINES,
    OPEN_MPI_PIECES,
    SRUN,
    FailedWorker,
    Output,
    Stream,
    hydra_marks,
)
from mykvrun.rank_files import RankFiles, RankFolders
from mykvrun.shown_ranks import ShownRanks, parse_ranks
from mykvrun.sinks import Sink

_OPEN_MPI = Mpi(OPEN_MPI, 5, "/mpi/bin/mpirun")
_MPICH = Mpi(MPICH, 0, "/mpi/bin/mpirun")
_INTEL = Mpi(INTEL_MPI, 0, "/mpi/bin/mpirun")

_SUM = """
import sys
import kvstore_plugin as mykv
import mxnet as mx

mykv.init()
print("sum", mykv.allreduce(mx.nd.ones(2), average=False).asnumpy().tolist(), flush=True)
if "fail" in sys.argv and mykv.rank() == 1:
    raise ValueError("this worker is broken")
if "wait" in sys.argv:
    while True:
        mykv.barrier()
"""


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch, request):
    """The commands do not depend on the machine, unless a test starts a job."""
    if not {"script", "two_hosts"} & set(request.fixturenames):
        for name in ("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("mykvrun.job.usable_cores", lambda: 4)
        monkeypatch.setattr("mykvrun.job.is_bound", lambda: False)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def script(tmp_path):
    """A program that sums over all workers; ``fail`` as an argument breaks rank 1, ``wait`` never ends."""
    (tmp_path / "train.py").write_text(_SUM)
    return str(tmp_path / "train.py")


def _start(tmp_path, *arguments, **options):
    command = [sys.executable, "-m", "mykvrun", *arguments]
    return subprocess.Popen(
        command,
        env=launcher.environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def _run(tmp_path, *arguments):
    process = _start(tmp_path, *arguments)
    try:
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def test_a_script_runs_on_as_many_workers_as_asked_for(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "3", script)
    assert code == 0, stderr
    assert stdout.splitlines() == ["sum [3.0, 3.0]"] * 3


def test_options_of_horovodrun_ranks_before_lines_and_a_timeline(tmp_path, script):
    options = [
        "-np",
        "2",
        "-H",
        "localhost:2",
        "--fusion-threshold-mb",
        "32",
        "--timeline-filename",
        str(tmp_path / "t.mykv"),
    ]
    code, stdout, stderr = _run(tmp_path, *options, "--tag-output", sys.executable, script)
    assert code == 0, stderr
    if launcher.is_open_mpi():  # Hydra marks pieces of lines
        assert sorted(stdout.splitlines()) == ["[0] sum [2.0, 2.0]", "[1] sum [2.0, 2.0]"]
    assert "--fusion-threshold-mb: no effect" in stderr
    assert b'"size": 2' in (tmp_path / "t.mykv").read_bytes()


def test_the_worker_that_failed_is_named_with_its_last_lines(tmp_path, script):
    code, _, stderr = _run(tmp_path, "-n", "2", script, "fail")
    assert code == 1
    if launcher.is_open_mpi():
        assert "\nmykvrun: rank 1" in stderr and "\0" not in stderr
    assert "failed first, and the job ended with status 1" in stderr.partition("mykvrun: rank 1")[2]
    assert "MPI_ABORT" not in stderr and "prterun" not in stderr
    assert stderr.count("\nValueError: this worker is broken") == 1  # the traceback; mykvrun also names it


_FEWER_BATCHES = """
import kvstore_plugin as mykv
import mxnet as mx
from mxnet import autograd, gluon

mykv.init()
net = gluon.nn.Dense(2, in_units=3)
net.initialize()
trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
for batch in range(6 - 2 * mykv.rank()):  # the last loss of rank 0 depends on a step that rank 1 leaves out
    with autograd.record():
        loss = net(mx.nd.ones((4, 3))).sum()
    loss.backward()
    trainer.step(4)
print(mykv.allreduce(loss, name="loss").asscalar())
"""


def test_fewer_batches_on_one_worker_print_one_traceback_and_both_halves(tmp_path):
    (tmp_path / "train.py").write_text(_FEWER_BATCHES)
    code, _, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "train.py"))
    assert code == 1, stderr
    assert "rank 0 waits in step() of trainer0 for rank 1" in stderr, stderr
    assert "rank 1 waits in the operation 'loss' for rank 0" in stderr, stderr
    if launcher.is_open_mpi():
        assert len(stderr.splitlines()) <= 22, stderr  # a traceback, and a line each for the other worker and mykvrun
        assert stderr.count("Traceback (most recent call last)") == 1, stderr


_NOTED = """
import pathlib, sys, time
from mykvrun import worker_notes

rank, told = worker_notes.rank_in(worker_notes.os.environ), pathlib.Path(__file__).with_name("told")
if rank == 1:
    worker_notes.tell_end(3, "sys.exit(3)")
    told.touch()
    time.sleep(0.5)  # waits in MPI_Finalize
while not told.exists():
    time.sleep(0.01)
time.sleep(0.05)
worker_notes.tell_end(1, "MXNetError: rank 1 has left")
sys.exit(1)
"""


def test_the_worker_that_ended_first_is_named_with_its_status_although_another_one_ended_the_job(tmp_path):
    (tmp_path / "ends.py").write_text(_NOTED)
    code, _, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "ends.py"))
    assert code == 3 and "rank 1 ended with sys.exit(3). It failed first" in stderr, stderr


@pytest.mark.parametrize(
    "named, noted, rank",
    [
        (0, [(0, 1, 2.0), (1, 3, 1.0)], 1),  # rank 0 has ended the job, since rank 1 had ended
        (2, [(0, 1, 1.0)], None),  # a signal has ended rank 2, and so rank 0 failed
        (None, [(0, 143, 1.0), (1, 1, 2.0)], 1),  # the launcher has ended rank 0
        (None, [(0, 0, 1.0), (1, 1, 2.0)], 1),
        (None, [(0, 143, 1.0)], 0),
        (None, [], None),
    ],
)
def test_the_first_failure_is_the_earliest_that_is_no_consequence(named, noted, rank):
    failed = None if named is None else FailedWorker(named, "n1")
    ends = [worker_notes.End(one, status, "", when) for one, status, when in noted]
    first = attempt.first_failure(failed, sorted(ends, key=lambda end: end.time))
    assert (first and first.rank) == rank


@pytest.mark.parametrize(
    "how, rank",
    [("KeyError: 'label'", 1), ("MXNetError: barrier: rank 0 has died", None), ("MXNetError: rank 01 differs", 1)],
)
def test_a_worker_that_srun_has_killed_is_not_the_first(how, rank):
    """Where an exception aborts a job, srun reports the workers that it kills in any order."""
    killed = FailedWorker(0, "n1", is_uncertain=True)
    first = attempt.first_failure(killed, [worker_notes.End(1, 1, how, 1.0)])
    assert (first and first.rank) == rank
    assert attempt.first_failure(killed, []) is None


def test_a_worker_of_another_host_fails_as_the_others_tell():
    told = worker_notes.End(0, 3, "MXNetError: barrier: rank 2 ended with sys.exit(3)", 1.0)
    for failed in (None, FailedWorker(0, "n1"), FailedWorker(2, "n2")):
        assert attempt.first_failure(failed, [told]) == told._replace(rank=2, how="sys.exit(3)")
    own = worker_notes.End(2, 3, "sys.exit(3)", 2.0)
    assert attempt.first_failure(None, [told, own]).rank == 0


def test_notes_of_workers_are_kept_as_they_came_first(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "12")
    worker_notes.tell_end(3, "without a folder nothing is done")
    monkeypatch.setenv(worker_notes.VARIABLE, str(tmp_path))
    worker_notes.tell_joined()
    worker_notes.tell_end(3, "KeyError: 'a'\nsecond line")
    worker_notes.tell_end(1, "later")
    (tmp_path / "end.3").write_text("not JSON")
    assert worker_notes.ranks_with(tmp_path, worker_notes.JOINED) == {12}
    ((rank, status, how, _),) = worker_notes.ends(tmp_path)
    assert (rank, status, how) == (12, 3, "KeyError: 'a'")
    monkeypatch.setenv(worker_notes.VARIABLE, str(tmp_path / "gone"))
    worker_notes.tell_joined()


def test_the_death_of_a_worker_of_an_elastic_job_is_not_taken_for_the_failure_of_another(capsys):
    """Ranks of new workers begin at 0 again."""
    output = Output(OPEN_MPI_LINES, is_elastic=True)
    _read(
        output,
        b"[prterun-vm-7@1,0]<stdout>: still here\n",
        b"prterun noticed that process rank 0 with PID 77 on node n1 exited on\n",
    )
    attempt.failure(137, output, None).tell()
    said = capsys.readouterr().err
    assert "a worker on n1 died, and the job ended with signal 9 (SIGKILL). The others may still have finished" in said
    assert "still here" not in said


def _read(output, *pieces, moves=False, name="stdout"):
    """The shown part of pieces of a launcher's output, in a terminal if ``moves``."""
    stream = Stream(output, name, moves)
    return b"".join(stream.take(piece) for piece in (*pieces, b""))


@pytest.mark.parametrize("marks", [OPEN_MPI_LINES, OPEN_MPI_PIECES])
@pytest.mark.parametrize("shows_all", [False, True])
def test_the_nul_of_open_mpi_is_dropped_wherever_it_falls(marks, shows_all):
    """It ends a text of the launcher. It comes alone, or before what a worker or the launcher writes next."""
    hyphens = b"-" * 74 + b"\n"
    text = hyphens + b"prterun detected that one or more processes exited with non-zero status\n" + hyphens + b"\0"
    rank_0, rank_1 = (b"[prterun-vm-7@1,%d]<stderr>: " % rank for rank in (0, 1))
    abort = [rank_1, hyphens, rank_1, b"MPI_ABORT was invoked on rank 1\n", rank_1, hyphens]
    for lines in (
        [text, text, rank_0, b"after\n"],
        [rank_1, b"before\n", text, rank_0, b"after\n", text],
        [*abort, text, rank_0, b"after\n"],
        [*abort, rank_1, b"\0\n", rank_1, b"after\n"],
        [*abort, rank_1, b"\0after\n"],
        [text, b"Another text of the launcher\n", rank_0, b"after\n"],
        [text[:-1], rank_1, b"after\n", b"\0"],
        [text[:-1], rank_1, b"after\n", b"\0\n"],
    ):
        output = Output(marks, shows_all=shows_all)
        shown = _read(output, *lines, name="stderr")
        assert b"after\n" in shown and b"\0" not in shown, lines
        assert not any("\0" in one for rank in (0, 1) for one in output.last_lines(rank))


def test_a_notice_of_open_mpi_behind_a_progress_bar_is_left_out_and_what_follows_is_kept():
    """A bar ends without the end of a line. A line of hyphens that a worker writes is no notice."""
    output = Output(OPEN_MPI_PIECES)
    hyphens, mark = b"-" * 74, b"[prterun-vm-7@1,1]<stderr>: "
    pieces = [b"\rbar 10%", b"\rbar 20%", hyphens + b"\nMPI_ABORT was invoked on rank 1\n" + hyphens + b"\n"]
    pieces += [b"-" * 80 + b"\n", b"Traceback\nValueError: broken\n"]
    _read(output, *(mark + piece for piece in pieces), moves=True)
    assert output.last_lines(1) == ["bar 20%", "-" * 80, "Traceback", "ValueError: broken"]


_BROKEN = (
    b"M1:Traceback\nM0:one\nlauncher\nM1:  line 3\n"  # whole lines of two ranks and of the launcher
    b"M0:tw" + b"M1:Value" + b"M0:o\n" + b"M1:Error\nM1:\n" + b"M1:the end"  # pieces of lines
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "marks, form",
    [(hydra_marks("mykvrun-17.+-"), b"mykvrun-17.+-%s:"), (OPEN_MPI_4, b"[1,%s]<stderr>:")],
    ids=["Hydra", "Open MPI 4"],
)
def test_pieces_of_lines_are_put_together_wherever_they_are_cut(marks, form, size):
    """MPICH, Intel MPI and Open MPI 4 mark each piece of a worker's output; reads may end anywhere."""
    text = _BROKEN.replace(b"M0:", form % b"0").replace(b"M1:", form % b"1")
    output = Output(marks)
    shown = _read(output, *(text[i : i + size] for i in range(0, len(text), size)))
    assert sorted(shown.split(b"\n")) == sorted(
        [b"Traceback", b"one", b"launcher", b"  line 3", b"two", b"ValueError", b"", b"the end"]
    )
    assert output.last_lines(1) == ["Traceback", "  line 3", "ValueError", "the end"]
    assert output.last_lines(0) == ["one", "two"]


def test_a_progress_bar_moves_in_a_terminal():
    """Open MPI 5.0.11 marks a piece of several lines once, 5.0.8 marks each line."""
    stream = Stream(Output(OPEN_MPI_PIECES), "stderr", moves=True)
    assert stream.take(b"[prterun-vm-7@1,0]<stderr>: \rbar 1%") == b"\rbar 1%"
    assert (
        stream.take(b"[prterun-vm-7@1,1]<stderr>: half a [prterun-vm-7@1,0]<stderr>: \rbar 2%[prterun-vm-7@1,")
        == b"\rbar 2%"
    )
    assert stream.take(b"1]<stderr>: line\nand another\n") == b"half a line\nand another\n"
    assert stream.take(b"[prterun-vm-7@1,0]<stderr>:  end\n") == b" end\n"
    assert stream._output.last_lines(0) == ["bar 2% end"]
    assert stream._output.last_lines(1) == ["half a line", "and another"]


def test_what_a_worker_writes_about_marks_stays_as_it_is_where_lines_are_marked():
    shown = _read(Output(OPEN_MPI_LINES), b"[prterun-vm-7@1,0]<stdout>: see [1,3]<stdout>: text\n 7: no mark\n")
    assert shown == b"see [1,3]<stdout>: text\n 7: no mark\n"
    assert _read(Output(SRUN, prefix=True), b"0: a 1: b\n 1: c\n") == b"[0] a 1: b\n[1] c\n"
    assert _read(Output(), b"as it", b" comes") == b"as it comes"


@pytest.mark.parametrize("marks", [OPEN_MPI_LINES, OPEN_MPI_PIECES])
def test_the_mark_behind_a_line_without_an_end_is_not_shown(marks):
    form = b"[prterun-vm-7@1,%d]<stdout>: no end %d"
    assert _read(Output(marks), *(form % (rank, rank) for rank in (1, 0))) == b"no end 0\nno end 1"


def test_nul_bytes_of_a_worker_stay():
    text = b"[prterun-vm-7@1,0]<stdout>: \0\0binary\n[prterun-vm-7@1,0]<stdout>: \0\n"
    for name in ("stdout", "stderr"):
        assert _read(Output(OPEN_MPI_LINES), text, name=name) == b"\0\0binary\n\0\n"


def test_a_sink_that_takes_no_more_is_told_of_once_and_may_take_again(tmp_path):
    """A full disk, a reader that has gone, and a folder that cannot be made."""

    class _Full(io.RawIOBase):
        error: OSError | None = OSError(28, "No space left on device")
        text = b""

        def write(self, data):
            if self.error:
                raise self.error
            self.text += bytes(data[:2])  # as a pipe may
            return min(len(data), 2)

    told = []
    file = _Full()
    sink = Sink(file, "it", lambda name, error: told.append((name, error.errno)))
    for _ in range(2):
        sink.write(b"lost")
    file.error = None
    sink.write(b"there")
    assert file.text == b"there" and told == [("it", 28)]
    file.error = BrokenPipeError(32, "Broken pipe")
    other = Sink(file, "other", lambda name, error: told.append((name, error.errno)))
    for _ in range(2):
        other.write(b"lost")
    (tmp_path / "file").write_text("")
    Sink.of_path(tmp_path / "file" / "stdout", lambda _, error: told.append(type(error))).write(b"lost")
    assert told[1:] == [("other", 32), FileExistsError]


_WRITES = """
import time
for _ in range({times}):
    print("x" * 1000, flush=True)
    time.sleep({pause})
print("end")
"""


@pytest.mark.parametrize("where", ["/dev/full", "folder"])
def test_a_job_goes_on_where_its_output_cannot_be_written(tmp_path, where):
    """More than a pipe holds, so that workers would wait if nobody read."""
    folder = tmp_path / "out" / "rank.1"
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to("/dev/full")
    options = ["--output-filename", str(folder.parent)] if where == "folder" else []
    program = [sys.executable, "-c", _WRITES.format(times=300, pause=0) + f"open({str(tmp_path / 'done')!r}, 'w')"]
    with open(where if where == "/dev/full" else tmp_path / "shown", "wb") as file:
        command = [sys.executable, "-m", "mykvrun", "-n", "2", *options, *program]
        env = launcher.environment(tmp_path)
        done = subprocess.run(command, env=env, stdout=file, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1 and (tmp_path / "done").exists(), done.stderr
    assert done.stderr.count("No space left on device") == 1, done.stderr
    if where == "folder":
        assert (tmp_path / "shown").read_text().count("end\n") == 2


def test_a_job_ends_when_nobody_reads_its_output_any_more(tmp_path):
    """``mykvrun ... | head -1``."""
    process = _start(tmp_path, "-n", "2", sys.executable, "-c", _WRITES.format(times=100_000, pause=0.01))
    try:
        assert process.stdout.readline().startswith("x")
        workers = descendants(process.pid)
        process.stdout.close()
        assert process.wait(30) == 128 + signal.SIGPIPE, process.stderr.read()
        assert process.stderr.read() == ""
        wait_until_ended(workers)
    finally:
        process.kill()


def test_a_file_in_the_place_of_a_ranks_folder_is_an_error_before_the_job_begins(tmp_path, capsys):
    (tmp_path / "rank.1").write_text("")
    assert main.main(["-n", "2", "--output-filename", str(tmp_path), "true"]) == 2
    assert "rank.1 is a file" in capsys.readouterr().err


def _tagged(*lines):
    """Lines of ranks, and of the launcher (None), as Open MPI 5 writes them."""
    return b"".join(
        (b"" if rank is None else b"[prterun-vm-7@1,%d]<stderr>: " % rank) + line + b"\n" for rank, line in lines
    )


def _shown(*lines, **options):
    stream = Stream(Output(OPEN_MPI_LINES, **options), "stderr", False)
    return (stream.take(_tagged(*lines)) + stream.take(b"")).decode().splitlines()


_TRACEBACK = [b"Traceback (most recent call last):", b'  File "x.py", line 3, in <module>', b"    f()"]
_CHAINED = [
    *_TRACEBACK,
    b"KeyError: 1",
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"",
]


def _mixed(*texts):
    """The lines of several ranks in turns."""
    return [(rank, lines[i]) for i in range(max(map(len, texts))) for rank, lines in enumerate(texts) if i < len(lines)]


@pytest.mark.parametrize("before", [[], _CHAINED])
def test_a_traceback_of_several_workers_is_shown_once_and_each_other_worker_with_one_line(before):
    text = [*before, *_TRACEBACK, b"ValueError: rank %d is broken"]
    texts = [[*text[:-1], text[-1] % rank] for rank in range(3)]
    shown = _shown(*_mixed(*texts), (1, b"and goes on"))
    assert shown[: len(text)] == [line.decode() for line in texts[0]]
    said = "mykvrun: rank {0} has written the same traceback as rank 0: ValueError: rank {0} is broken"
    assert shown[len(text) :] == [said.format(1), "and goes on", said.format(2)]
    assert len(_shown(*_mixed(*texts), shows_all=True)) == 3 * len(text)


def test_a_worker_whose_error_tells_of_another_worker_gets_one_line():
    text = [b"mxnet.base.MXNetError: mykv: x: rank 1 ended with KeyError: 'label'" + 300 * b"."]
    frames = [b'  File "/v/site-packages/mxnet/base.py", line 246, in check_call', b"    raise get_last_ffi_error()"]
    first = [*_TRACEBACK, b"KeyError: 'label'"]
    shown = _shown(*((1, line) for line in first), *((0, line) for line in [*_TRACEBACK, *frames, *text]))
    said = f"mykvrun: rank 0 has failed too at x.py:3: {text[0].decode()}"
    assert shown == [*(line.decode() for line in first), said]
    # Not if the worker has its own error, or is the first.
    own = [*_CHAINED, *_TRACEBACK, *text]
    assert len(_shown(*((1, line) for line in first), *((0, line) for line in own))) == len(first) + len(own)
    assert len(_shown(*((0, line) for line in [*_TRACEBACK, *text]))) == len(_TRACEBACK) + 1


def test_a_warning_amid_a_traceback_belongs_to_no_traceback():
    warned = [(rank, b"WARNING:kvstore_plugin:mykv on rank %d: the same" % rank) for rank in (0, 1)]
    lines = [*((1, line) for line in _TRACEBACK), *warned, (1, b"KeyError: 1"), (1, b"a")]
    assert _shown(*lines) == [line.decode() for _, line in [*lines[:4], *lines[5:]]]


def test_tracebacks_that_differ_are_shown_whole():
    other = [*_TRACEBACK[:2], b"    g()", b"ValueError: broken"]
    longer = [*_TRACEBACK, b"  [bt] (1)", b"ValueError: broken"]
    texts = [[*_TRACEBACK, b"ValueError: broken"], other, longer, [*_TRACEBACK, b"ValueError: other"], _TRACEBACK]
    shown = _shown(*((rank, line) for rank, lines in enumerate(texts) for line in lines))
    assert shown == [line.decode() for lines in texts for line in lines]
    # A worker's own tracebacks, of errors that it catches.
    twice = [(0, line) for line in texts[0]] * 2
    assert len(_shown(*twice)) == 2 * len(texts[0])


def test_a_warning_of_mykv_on_several_workers_is_shown_once():
    lines = [(rank, b"mykv on rank %d: the same" % rank) for rank in (1, 0, 1)]
    lines += [(0, b"mykv on rank 0: waits for rank 1"), (1, b"mykv on rank 1: waits for rank 0"), (0, b"a"), (1, b"a")]
    assert _shown(*lines) == [lines[i][1].decode() for i in (0, 2, 3, 4, 5, 6)]


_HYPHENS = b"-" * 74


@pytest.mark.parametrize("rank", [None, 0])
def test_texts_of_launchers_about_a_failure_are_left_out(rank):
    notice = [_HYPHENS, b"prterun noticed that process rank 1 with PID 2 on node vm exited on", b"signal 9.", _HYPHENS]
    other = [_HYPHENS, b"There are not enough slots available", _HYPHENS]
    text = [(rank, line) for line in (b"a", *notice, b"b", *other, b"c")]
    assert _shown(*text) == ["a", "b", *(line.decode() for line in other), "c"]
    assert len(_shown(*text, shows_all=True)) == len(text)
    assert _shown((rank, b"a"), *((rank, line) for line in notice[:2])) == [
        "a",
        *(line.decode() for line in notice[:2]),
    ]


def test_a_text_of_the_launcher_behind_a_line_that_has_no_end_is_left_out():
    lines = [b"prterun noticed that process rank 1 with PID 2 on node vm exited on", _HYPHENS, b"\0"]
    assert _shown((1, b"bar 20%" + _HYPHENS), *((None, line) for line in lines), (0, b"b")) == ["bar 20%", "b"]


def test_the_banner_of_hydra_is_left_out():
    banner = ["=" * 82, "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   EXIT CODE: 9", "=" * 82]
    banner += ["YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"]
    text = "m-0:" + "=" * 82 + "\n" + "\n".join(banner) + "\nm-0:end\n"
    assert _read(Output(hydra_marks("m-")), text.encode()) == b"=" * 82 + b"\nend\n"
    stream = Stream(Output(hydra_marks("m-")), "stderr", False)
    assert (
        stream.take(b"m-0:Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort(x, 1) - process 0\n")
        == b""
    )


def test_lines_begin_with_the_time_and_the_rank():
    shown = _read(Output(OPEN_MPI_LINES, prefix=True, timestamps=True), b"[prterun-vm-7@1,0]<stdout>: a\nlauncher\n")
    assert re.fullmatch(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ){1}\[0\] a\n\d{4}-[-\d]+ [:\d]+ launcher\n", shown), shown


@pytest.mark.long
def test_the_output_of_each_rank_goes_to_files_too(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--output-filename", str(tmp_path / "out"), script, "fail")
    assert code == 1 and stdout.splitlines() == ["sum [2.0, 2.0]"] * 2
    for rank in (0, 1):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == "sum [2.0, 2.0]\n"
    assert "ValueError: this worker is broken" in (tmp_path / "out" / "rank.1" / "stderr").read_text()
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--output-filename", script, script)
    assert code == 2 and "of --output-filename cannot be created" in stderr


def test_folders_of_ranks_are_in_order(tmp_path):
    files = RankFiles(RankFolders(str(tmp_path)), 11, lambda *_: None)
    output = Output(OPEN_MPI_LINES, files=files)
    _read(output, b"[prterun-vm-7@1,3]<stdout>: a\n[prterun-vm-7@1,10]<stdout>: b\n")
    output.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.03", "rank.10"]


def _of_ranks(stream, *pieces, **options):
    """The shown part of pieces of ranks, with only rank 0 shown completely."""
    output = Output(OPEN_MPI_LINES, ranks=ShownRanks(parse_ranks("0", 3)))
    marked = (b"[prterun-vm-7@1,%d]<stdout>: %s" % piece for piece in pieces)
    return _read(output, *marked, name=stream, **options).decode()


def test_of_the_ranks_that_are_not_shown_errors_are():
    assert _of_ranks("stdout", (0, b"a\n"), (1, b"b\n"), (1, b"error\n"), (0, b"c\n")) == "a\nc\n"
    lines = [*_CHAINED, *_TRACEBACK, b"ValueError: broken"]
    lines += [b"mykv on rank 1: waits", b"Fatal Python error: Aborted", b"  File x", b"FAILED: CUDA out of memory"]
    said = b"".join(b"%s\n" % line for line in lines).decode()
    quiet = [b"epoch 3", b"  indented", b"INFO: validation error 0.3", b"\rbar 10% error=0.3\rbar 20% error=0.2"]
    pieces = [(1, line + b"\n") for line in [*quiet, *lines, *quiet]]
    assert _of_ranks("stderr", *pieces) == said
    assert _of_ranks("stderr", *pieces, (0, b"shown\n")) == said + "shown\n"
    assert _of_ranks(
        "stderr", (1, b"\rbar"), (1, b"\rbar" + lines[0] + b"\n"), (1, b"KeyError: 1\n"), moves=True
    ).endswith("KeyError: 1\n")
    assert _of_ranks("stderr", (1, b"\rbar 1"), (0, b"\rbar 0"), moves=True) == "\rbar 0"


def test_ranks_are_lists_and_ranges():
    assert parse_ranks("0,3,5-7", 8) == {0, 3, 5, 6, 7} == parse_ranks("7,0-0,3,5-6", None)
    for wrong in ("", "a", "0,", "-1", "1-"):
        with pytest.raises(LaunchError, match="--ranks .*is not a list of ranks"):
            parse_ranks(wrong, 8)
    with pytest.raises(LaunchError, match="--ranks 3-1 names no rank: write the lower rank first"):
        parse_ranks("3-1", None)
    with pytest.raises(LaunchError, match="--ranks 8: the job has only the ranks 0 to 7"):
        parse_ranks("8", 8)
    with pytest.raises(LaunchError, match="--output in --mpi-args"):
        main._reading(Job(["a"], 2, mpi_arguments=["--output", "x"]), parse(["-n", "2", "--ranks", "0", "a"]), "")


def test_a_job_of_which_one_rank_is_shown_and_each_has_a_file(tmp_path, script):
    options = ["-n", "3", "--quiet-except", "0", "--log-dir", str(tmp_path / "logs")]
    code, stdout, stderr = _run(tmp_path, *options, script, "fail")
    assert code == 1 and stdout.splitlines() == ["sum [3.0, 3.0]"], stdout + stderr
    assert "\nValueError: this worker is broken\n" in stderr and "rank 1" in stderr
    for rank in range(3):
        log = (tmp_path / "logs" / f"rank.{rank}.log").read_text()
        assert "sum [3.0, 3.0]\n" in log and ("\nValueError: this worker is broken" in log) == (rank == 1)


_IN_A_TERMINAL = """
import sys, time
import kvstore_plugin as mykv

mykv.init()
for percent in (10, 20, 30):
    sys.stderr.write(f"\\rbar {percent}%")
    sys.stderr.flush()
    time.sleep(1.0)
    mykv.barrier()
if mykv.rank() == 1:
    raise ValueError("this worker is broken")
mykv.barrier()
"""


def test_in_a_terminal_a_bar_moves_and_the_failed_worker_is_named(tmp_path):
    end = _end_in_a_terminal(tmp_path)
    assert "failed first, and the job ended with status 1.\n" in end


def test_the_last_lines_of_the_failed_worker_follow_where_others_have_written_much_since(capsys):
    output = Output(OPEN_MPI_LINES)
    stream = Stream(output, "stderr", False)
    output.failed = FailedWorker(1, "")
    stream.take(_tagged((1, b"broken"), (0, b"fine")))
    attempt.failure(1, output, None).tell()
    assert capsys.readouterr().err == "mykvrun: rank 1 failed first, and the job ended with status 1.\n"
    stream.take(_tagged(*[(0, b"fine")] * 20))
    attempt.failure(1, output, None).tell()
    assert capsys.readouterr().err.endswith("with status 1. Its last lines:\n  broken\n")


_OPEN_MPI_IMPROPER = """\
prterun has exited due to process rank 1 with PID 530 on node vm exiting
improperly. There are three reasons this could occur:
"""


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_worker_that_ends_before_init_is_told_from_others(has_joined, capsys):
    output = Output(OPEN_MPI_LINES)
    _read(output, _OPEN_MPI_IMPROPER.encode())
    attempt.failure(1, output, None, has_joined).tell()
    assert ("rank 1 on vm ended with status 0 before the end of init()" in capsys.readouterr().err) == (not has_joined)
    aborted = Output(OPEN_MPI_LINES)
    _read(aborted, _OPEN_MPI_IMPROPER.replace("exiting\nimproperly", 'calling\n"abort"').encode())
    attempt.failure(1, aborted, None).tell()
    assert capsys.readouterr().err == "mykvrun: rank 1 on vm failed first, and the job ended with status 1.\n"


def _end_in_a_terminal(tmp_path) -> str:
    """mykvrun's last output in a terminal, with single newlines."""
    (tmp_path / "bar.py").write_text(_IN_A_TERMINAL)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mykvrun", "-n", "2", str(tmp_path / "bar.py")]
    process = subprocess.Popen(command, env=launcher.environment(tmp_path), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text, before_the_next = b"", None
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and select.select([ours], [], [], 120)[0]:
            try:
                text += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if before_the_next is None and b"bar 10%" in text:
                before_the_next = b"bar 20%" not in text
        assert process.wait(30) == 1, text
    finally:
        process.kill()
        os.close(ours)
    assert before_the_next, text
    return text.decode().replace("\r\n", "\n").partition("\nmykvrun: rank 1")[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_workers_and_is_the_status(tmp_path, script, number):
    process = _start(tmp_path, "-n", "2", script, "wait")
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("sum")
        workers = descendants(process.pid)
        assert len(workers) >= 3
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert f"mykvrun: the job was ended by {number.name}" in error, error
        wait_until_ended(workers)
    finally:
        process.kill()


def test_sigterm_ends_a_job_whose_output_nobody_reads(tmp_path):
    program = "print('here', flush=True)\nwhile True: print('x' * 999)"
    process = _start(tmp_path, "-n", "2", sys.executable, "-c", program)
    try:
        assert process.stdout.readline() == "here\n"
        workers = descendants(process.pid)
        time.sleep(1)  # the pipes are full: workers and mykvrun wait in write()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        wait_until_ended(workers)
    finally:
        process.kill()


@pytest.mark.parametrize("name, whose", [("SIGKILL", "mykvrun"), ("SIGQUIT", "mykvrun"), ("SIGKILL", "launcher")])
def test_workers_end_when_mykvrun_or_the_launcher_is_killed(tmp_path, name, whose):
    program = "import time; print('here', flush=True); time.sleep(100)"
    process = _start(tmp_path, "-n", "2", sys.executable, "-c", program)
    try:
        for _ in range(2):
            assert process.stdout.readline() == "here\n"
        below = descendants(process.pid)
        os.kill(process.pid if whose == "mykvrun" else below[0], getattr(signal, name))
        process.communicate(timeout=30)
        assert process.returncode != 0
        wait_until_ended(below)
    finally:
        process.kill()


# A launcher of one worker, which hangs as Open MPI's does where a worker connects to it while it is ending the job.
_HANGING = """#!{python}
import subprocess, sys, time
print("status", subprocess.call([sys.executable, "-c", "import sys, time; time.sleep(2); sys.exit(3)"]), flush=True)
time.sleep(100)
"""


def test_a_launcher_that_outlives_its_workers_is_ended(tmp_path, monkeypatch, capfd):
    launcher = tmp_path / "mpirun"
    launcher.write_text(_HANGING.format(python=sys.executable))
    launcher.chmod(0o755)
    monkeypatch.setattr(main, "find_mpi", lambda: _OPEN_MPI._replace(mpirun=str(launcher)))
    monkeypatch.setattr(workers, "WITHOUT_WORKERS_S", 1.0)
    begin = time.monotonic()
    assert main.main(["-n", "1", "true"]) == 1
    assert time.monotonic() - begin < 60
    shown = capfd.readouterr()
    killed = "the launcher was killed, since it had not ended 1 seconds after its last worker"
    assert "status 3" in shown.out and killed in shown.err


def test_a_launcher_may_outlive_its_processes_here_if_workers_may_run_elsewhere(monkeypatch):
    job = Job(["train.py"], workers=2)
    for name in main._ALLOCATIONS:
        monkeypatch.delenv(name, raising=False)
    assert main._all_here(job)
    assert not main._all_here(replace(job, hosts=[Host("elsewhere", 2)]))
    assert not main._all_here(replace(job, mpi_arguments=["--hostfile", "hosts"]))
    monkeypatch.setenv("PBS_NODEFILE", "/nodes")
    assert not main._all_here(job)


def test_a_dry_run_prints_a_command_that_a_shell_takes(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--dry-run", script)
    assert code == 0, stderr
    again = subprocess.run(
        stdout, shell=True, env=launcher.environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert again.stdout.count("sum [2.0, 2.0]") == 2, again.stderr


@pytest.mark.parametrize(("options", "value"), [(["--report"], "1"), (["--report-every", "20"], "20")])
def test_a_report_is_asked_for(tmp_path, script, options, value):
    code, stdout, stderr = _run(tmp_path, "-n", "2", *options, "--dry-run", script)
    assert code == 0 and f"MYKV_REPORT={value} " in stdout, stderr


def test_within_slurm_srun_starts_the_job(tmp_path, script):
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $@ with $OMP_NUM_THREADS threads"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {**launcher.environment(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    del env["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "mykvrun", "-n", "4", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plugin = "pmix" if launcher.is_open_mpi() else "pmi2"
    assert done.stdout.startswith(f"srun --mpi={plugin} --kill-on-bad-exit=1 --ntasks=4 --cpus-per-task=3")
    assert done.stdout.rstrip().endswith(f"{sys.executable} {script} with 3 threads")


def test_a_launcher_that_cannot_be_started_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("MPIRUN", "/nowhere/mpirun")
    assert main.main(["-n", "2", "python", "x.py"]) == 2
    assert capsys.readouterr().err == "mykvrun: /nowhere/mpirun cannot be started: No such file or directory.\n"


def test_a_mistyped_program_is_one_sentence(tmp_path, monkeypatch, capsys):
    said = "The program {!r} was not found, or may not be executed. No worker has been started."
    monkeypatch.setattr(
        main, "find_mpi", lambda: _OPEN_MPI._replace(mpirun=shutil.which("true"))
    )  # a launcher that starts nothing
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no program")
    (tmp_path / "train.sh").write_text("#!/bin/sh")
    (tmp_path / "train.sh").chmod(0o755)
    for wrong in ("pyhton", "./pyhton", "notes.txt", str(tmp_path)):
        assert main.main(["-n", "1", wrong, "x.py"]) == 2
        assert capsys.readouterr().err == f"mykvrun: {said.format(wrong)}\n"
    assert main.main(["-n", "1", "--dry-run", "pyhton", "x.py"]) == 0
    # Programs of this host, and those that the launcher may find elsewhere.
    for options in (["./train.sh"], ["train.sh"], ["train.py"], ["-x", f"PATH={tmp_path}", "train.sh"]):
        assert main.main(["-n", "1", *options]) == 0
    for options in (["-H", "node1:1"], ["--mpi-args=--wdir /elsewhere"]):
        assert main.main(["-n", "1", *options, "pyhton"]) == 0
    assert "not found" not in capsys.readouterr().err


@pytest.mark.parametrize("in_terminal", [False, True])
@pytest.mark.parametrize(
    "mpi, marks",
    [
        (_OPEN_MPI, ["--output", "tag-fullname"]),
        (_OPEN_MPI._replace(major=4), ["--tag-output"]),
        (_MPICH, ["-prepend-pattern"]),
        (_INTEL, ["-prepend-pattern"]),
    ],
    ids=["Open MPI 5", "Open MPI 4", "MPICH", "Intel MPI"],
)
def test_each_launcher_marks_what_a_rank_writes(mpi, marks, in_terminal, monkeypatch):
    started = []
    monkeypatch.setattr(main, "find_mpi", lambda: mpi)
    monkeypatch.setattr(main, "run_once", lambda *started_with: started.append(started_with[:2]) or attempt.Ended(0))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: in_terminal, raising=False)
    assert main.main(["-n", "1", "true"]) == 0
    ((command, output),) = started
    text = " ".join(command.arguments)
    assert " ".join(marks) in text and output.marks is not None
    assert ("tag-fullname:raw" in text) == (in_terminal and mpi is _OPEN_MPI)
    # The user's own option for that, which launchers take once.
    assert main.main(["-n", "1", f"--mpi-args={marks[0]} x", "true"]) == 0
    command, output = started[1]
    assert command.arguments.count(marks[0]) == 1 and output.marks is None


def test_workers_that_train_alone_without_mykv_are_told(tmp_path):
    (tmp_path / "alone.py").write_text("print('trained')")
    code, stdout, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "alone.py"))
    assert code == 0 and stdout.splitlines() == ["trained"] * 2
    assert "no worker has called init() of mykv" in stderr
    code, stdout, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "alone.py"), "--help")
    assert code == 0 and "no worker" not in stderr
    (tmp_path / "together.py").write_text("import mykv; mykv.init(); print(mykv.size())")
    code, stdout, stderr = _run(tmp_path, "-n", "2", str(tmp_path / "together.py"))
    assert code == 0 and stdout.splitlines() == ["2"] * 2
    assert "no worker" not in stderr


def test_hosts_and_hostfiles(tmp_path):
    assert hosts.parse_hosts("a:4,b") == [Host("a", 4), Host("b", 1)]
    for wrong in ("a:", "a:0", "a:x", ",", "a:2,a:2", "a b:3", "-x:3"):
        with pytest.raises(LaunchError):
            hosts.parse_hosts(wrong)
    file = tmp_path / "hosts"
    file.write_text("# three hosts\nnode1 slots=4\n\nnode2:2  # small\nnode3\nnode4.cluster  slots = 2 max-slots=8\n")
    assert hosts.read_hostfile(str(file)) == [*map(Host, ("node1", "node2", "node3", "node4.cluster"), (4, 2, 1, 2))]
    for wrong in ("", "a slots=x", "a slots=0", "no/de", "a slot=4", "a slots=4 b", "a slots", "a:0", "-x", "a\na:2"):
        file.write_text(wrong)
        with pytest.raises(LaunchError, match="hostfile"):
            hosts.read_hostfile(str(file))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.read_hostfile(str(tmp_path / "none"))


_WHERE = """
import socket
import kvstore_plugin as mykv
import mxnet as mx

mykv.init()
total = mykv.allreduce(mx.nd.ones(1), average=False).asscalar()
here = f"rank {mykv.rank()} on {socket.gethostname()}"
print(here, "host", mykv.cross_rank(), "of", mykv.cross_size(), total, flush=True)
"""
_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
case $1 in a) number=1 ;; b) number=2 ;; *) echo "ssh: unknown host $1" >&2; exit 255 ;; esac
name=$1
shift
exec {enter} $number "mount --bind {hosts} /etc/hosts && hostname $name && $*"
"""


@pytest.fixture
def two_hosts(tmp_path):
    """A command line on host a, from which ``ssh`` reaches host b: network namespaces with names and addresses."""
    module = several_hosts.network_module()
    reason = module.unavailable()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(module.Network(2))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be joined: {error}")
        hosts, ssh = tmp_path / "etc-hosts", tmp_path / "bin" / "ssh"
        hosts.write_text(f"127.0.0.1 localhost\n{network.address(1)} a\n{network.address(2)} b\n")
        ssh.parent.mkdir()
        ssh.write_text(_SSH.format(enter=shlex.quote(network._script("enter")), hosts=shlex.quote(str(hosts))))
        ssh.chmod(0o755)
        yield lambda *words: [str(ssh), "a", f"PATH={shlex.quote(str(ssh.parent))}:$PATH", shlex.join(words)]


@pytest.mark.parametrize("how", ["-H", long("--hostfile"), long("--check")])
def test_workers_on_two_hosts_as_the_readme_starts_them(tmp_path, two_hosts, how):
    """``mykvrun -H a:2,b:2 python where.py`` and the like in network namespaces, which need root."""
    (tmp_path / "where.py").write_text(_WHERE)
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=2\n")
    named = ["--hostfile", str(tmp_path / "hostfile")] if how == "--hostfile" else ["-H", "a:2,b:2"]
    program = ["--check"] if how == "--check" else [sys.executable, str(tmp_path / "where.py")]
    command = two_hosts(sys.executable, "-m", "mykvrun", *named, *program)
    process = subprocess.Popen(
        command,
        env=launcher.environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stdout + stderr
    if how == "--check":
        assert re.search(r"host 1 +b, ranks 2-3\n", stdout) and "All that was checked works" in stdout, stdout
    else:
        assert sorted(stdout.splitlines()) == [
            f"rank {rank} on {'ab'[rank // 2]} host {rank // 2} of 2 4.0" for rank in range(4)
        ], stderr


def test_a_hostfile_of_this_host(tmp_path, script):
    (tmp_path / "hosts").write_text("# this host\nlocalhost slots=3\n")
    code, stdout, stderr = _run(tmp_path, "--hostfile", str(tmp_path / "hosts"), script)
    assert code == 0, stderr
    assert stdout.splitlines() == ["sum [3.0, 3.0]"] * 3


@pytest.mark.long
def test_check_runs_the_self_test_before_the_program(tmp_path, script):
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--check")
    assert code == 0 and "sum" not in stdout, stdout + stderr
    report = stdout
    code, stdout, stderr = _run(tmp_path, "-n", "2", "--check", script)
    assert code == 0 and stdout.splitlines()[-2:] == ["sum [2.0, 2.0]"] * 2, stdout + stderr
    assert stdout.splitlines()[0] == report.splitlines()[0]
    # Where it fails, the program is not started.
    code, stdout, stderr = _run(tmp_path, "-n", "2", "-x", "MYKV_KERNELS=none", "--check", script)
    assert code != 0 and "sum" not in stdout, stdout + stderr


def _words(job, mpi=_OPEN_MPI):
    return " ".join(commands.mpirun_command(job, mpi).arguments)


def test_workers_share_the_cores_or_are_not_bound():
    assert "--map-by slot:PE=2" in _words(Job(["a"], 2))
    assert commands.mpirun_command(Job(["a"], 2), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "2"}
    assert "--oversubscribe --bind-to none" in _words(Job(["a"], 5))
    assert commands.mpirun_command(Job(["a"], 5), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "1"}
    assert "--bind-to none" in _words(Job(["a"], hosts=[Host("other", 2)]))
    assert "--map-by slot:PE=3" in _words(Job(["a"], hosts=[Host("other", 1)], cores_per_worker=3))
    assert "-bind-to core:2" in _words(Job(["a"], 2), _MPICH)
    assert commands.mpirun_command(Job(["a"], 2), _INTEL).variables["I_MPI_PIN_DOMAIN"] == "2"
    assert commands.mpirun_command(Job(["a"], 9), _INTEL).variables["I_MPI_PIN"] == "0"


def test_threads_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert commands.mpirun_command(Job(["a"], 2), _OPEN_MPI).variables == {}
    assert commands.mpirun_command(Job(["a"], 2, threads=3), _OPEN_MPI).variables == {"OMP_NUM_THREADS": "3"}


def test_variables_reach_other_hosts(monkeypatch):
    monkeypatch.setenv("MYKV_STALL_WARN_S", "5")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    job = Job(["a"], hosts=[Host("n1", 2), Host("n2", 2)], variables={"MINE": "1", "HOME": None})
    words = _words(job)
    for name in ("MYKV_STALL_WARN_S", "PYTHONPATH", "MINE", "HOME", "OMP_NUM_THREADS"):
        assert f"-x {name} " in words
    assert commands.mpirun_command(job, _OPEN_MPI).variables["MINE"] == "1"
    assert "-hosts n1:2,n2:2" in _words(job, _MPICH) and "MYKV_STALL_WARN_S" in _words(job, _MPICH)
    assert "-hosts n1,n2 -ppn 2" in _words(job, _INTEL)


def test_elastic_root_and_ssh(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = _words(Job(["a"], hosts=[Host("n1", 2)], elastic=True, ssh_port=2222, interfaces="eth1"))
    for wanted in ("--allow-run-as-root", "--with-ft ulfm", "plm_ssh_agent ssh -p 2222", "btl_tcp_if_include eth1"):
        assert wanted in words


@pytest.mark.parametrize(
    "job, mpi, said",
    [
        (Job(["a"], 2, elastic=True), _MPICH, "--elastic needs Open MPI 5"),
        (Job(["a"], 2, elastic=True), _OPEN_MPI._replace(major=4), "this is Open MPI 4"),
        (Job(["a"], hosts=[Host("a", 1), Host("b", 2)]), _INTEL, "the same number of workers"),
        (Job(["a"], 2, ssh_port=3), _MPICH, "ssh/config"),
        (Job(["a"]), _OPEN_MPI, "number of workers is missing"),
    ],
)
def test_what_an_mpi_cannot_do_is_one_sentence(job, mpi, said):
    with pytest.raises(LaunchError, match=said):
        commands.mpirun_command(job, mpi)


@pytest.mark.parametrize(
    "line, said",
    [
        ("-n 3 -H a:2 python x", "do not fit"),
        ("--min-np 2 -np 4 python x", "Use --elastic"),
        ("-H a:2 --hostfile f python x", "Give one of them"),
    ],
)
def test_options_that_do_not_go_together(line, said, capsys):
    assert main.main(line.split()) == 2
    assert said in capsys.readouterr().err


# Options of horovodrun 0.28 (horovod/runner/launch.py), with values.
_WITH_A_MEANING = {
    "-np 2": "workers",
    "--num-proc 2": "workers",
    "-p 2222": "ssh_port",
    "--ssh-port 2222": "ssh_port",
    "-i key": "ssh_key",
    "--ssh-identity-file key": "ssh_key",
    "-H a:2": "hosts",
    "--hosts a:2": "hosts",
    "-hostfile FILE": "hosts",
    "--hostfile FILE": "hosts",
    "--network-interfaces eth0,eth1": "interfaces",
    "--network-interface eth0": "interfaces",
    "--timeline-filename t.mykv": "variables",
    "--no-stall-check": "variables",
    "--stall-check-warning-time-seconds 5": "variables",
    "--stall-check-shutdown-time-seconds 5": "variables",
    "--tcp": "tcp_only",
    "--mpi-args=--mca --x": "mpi_arguments",
    "--binding-args=--map-by node": "mpi_arguments",
}
_FOR_THE_LAUNCHER = [
    "--verbose",
    "--stall-check",
    "--output-filename out",
    "-prefix-timestamp",
    "--prefix-output-with-timestamp",
    "-cb",
    "--check-build",
]
_WITHOUT_EFFECT = [
    "--disable-cache",
    "--start-timeout 5",
    "--fusion-threshold-mb 32",
    "--cycle-time-ms 1",
    "--cache-capacity 5",
    "--hierarchical-allreduce",
    "--no-hierarchical-allreduce",
    "--hierarchical-allgather",
    "--no-hierarchical-allgather",
    "--autotune",
    "--no-autotune",
    "--autotune-log-file f",
    "--autotune-warmup-samples 3",
    "--autotune-steps-per-sample 3",
    "--autotune-bayes-opt-max-samples 3",
    "--autotune-gaussian-process-noise 0.8",
    "--elastic-timeout 600",
    "--reset-limit 3",
    "--blacklist-cooldown-range 60 300",
    "--timeline-mark-cycles",
    "--no-timeline-mark-cycles",
    "--mpi-threads-disable",
    "--no-mpi-threads-disable",
    "--num-nccl-streams 1",
    "--thread-affinity 1",
    "--gloo-timeout-seconds 30",
    "--log-level INFO",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--log-hide-timestamp",
    "--no-log-hide-timestamp",
    "--gloo",
    "--mpi",
]
_REFUSED = [
    "--min-np 2",
    "--min-num-proc 2",
    "--max-np 8",
    "--max-num-proc 8",
    "--slots-per-host 4",
    "--host-discovery-script s.sh",
    "--config-file c.yaml",
    "--jsrun",
]


def _words_of(option):
    return [option] if "=" in option else option.split()


@pytest.mark.parametrize("option", _WITH_A_MEANING)
def test_options_of_horovodrun_that_mean_something(option, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    words = [str(tmp_path / "hosts") if word == "FILE" else word for word in _words_of(option)]
    field = _WITH_A_MEANING[option]
    plain, request = parse(["-n", "1", "python", "x.py"]), parse(["-n", "1", *words, "python", "x.py"])
    assert getattr(request.job, field) != getattr(plain.job, field) and not request.ignored
    assert request.job.program == ["python", "x.py"]


@pytest.mark.parametrize("option", _FOR_THE_LAUNCHER + _WITHOUT_EFFECT)
def test_other_options_of_horovodrun_are_taken(option):
    request = parse(["-np", "2", *_words_of(option), "python", "x.py"])
    assert request.ignored == ([option.split()[0]] if option in _WITHOUT_EFFECT else [])
    assert request.job.workers == 2
    assert request.is_check == (option in ("-cb", "--check-build"))


@pytest.mark.parametrize("option", _REFUSED)
def test_options_of_horovodrun_without_which_the_job_is_another_are_refused_in_a_sentence(option, capsys):
    assert main.main(["-np", "2", *option.split(), "python", "x.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mykvrun: {option.split()[0]} is ") and said.count("\n") == 1


def test_what_options_of_horovodrun_mean_for_the_launcher(monkeypatch):
    job = parse(["-np", "2", "--network-interface", "eth0", "--network-interface", "eth1", "--tcp", "x"]).job
    assert "--mca btl_tcp_if_include eth0,eth1" in _words(job)
    assert commands.mpirun_command(job, _OPEN_MPI).variables["OMPI_MCA_pml"] == "ob1"
    assert commands.mpirun_command(job, _MPICH).variables["FI_PROVIDER"] == "tcp"
    # Launchers take an option for binding once.
    job = parse(["-np", "2", "--binding-args=--bind-to socket --map-by socket", "x"]).job
    for mpi in (_OPEN_MPI, _MPICH):
        assert _words(job, mpi).replace("--", "-").count("-bind-to") == 1
    assert "slot:PE" not in _words(job) and _words(job).endswith("--bind-to socket --map-by socket x")
    assert "I_MPI_PIN_DOMAIN" not in commands.mpirun_command(job, _INTEL).variables
    assert parse(["--check-build", "--verbose"]).job.workers == 1


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_version(option, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([option])
    assert ended.value.code == 0 and re.fullmatch(r"mykv \S+\n", capsys.readouterr().out)


def test_options_after_the_program_are_the_programs():
    request = parse(["-n", "2", "python", "train.py", "-n", "9", "--epochs", "3"])
    assert request.job.program == ["python", "train.py", "-n", "9", "--epochs", "3"]
    assert request.job.workers == 2


@pytest.mark.parametrize(
    "start", [[], ["--"], ["--tag-output", "-x", "A=1"], ["-n3", "--mpi-args", "--mca btl self", "--"]]
)
def test_nothing_behind_the_program_is_an_option_of_mykvrun(start):
    """Scripts have options that equal options of mykvrun, or begin like them."""
    program = ["python", "train.py", "--network", "vgg16", "--net", "x", "--n", "-ho", "--log=3", "--", "-v", "--check"]
    request = parse(["-n", "2", *start, *program])
    assert request.job.program == program and not request.is_check


@pytest.mark.parametrize("mistake", ["--outptu x", "--num 2", "-n", "-n --tag-output x", "-n 0 x", "-n 2", "-n 2 --"])
def test_a_wrong_option_ends_with_the_usage(mistake, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(mistake.split())
    assert ended.value.code == 2 and "mykvrun: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--mpi-args", '"x'], "No closing quotation"),
        (["--binding-args", "'"], "No closing"),
        (["-x", "=1"], "'' is not"),
    ]
    + [(["-x", name], "is not the name of a variable") for name in ("BAD NAME=1", "1A", "a,b=1", "")],
)
def test_a_text_that_no_launcher_can_take_is_an_error_of_one_line(words, said, capsys):
    assert main.main(["-n", "2", *words, "python", "x.py"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert parse(["-n", "2", "-x", "BASH_FUNC_module%%=() { :; }", "x"]).job.variables


_OPEN_MPI_SIGNAL = """\
[prterun-vm-7@1,0]<stdout>: a
[prterun-vm-7@1,1]<stderr>: bar 1%\rbar 2%
[prterun-vm-7@1,1]<stderr>: the end
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 2738 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
_OPEN_MPI_STATUS = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-2072@1,11]
   Exit code:    3
"""


@pytest.mark.parametrize(
    "text, failed",
    [
        (_OPEN_MPI_SIGNAL, FailedWorker(1, "vm")),
        (_OPEN_MPI_STATUS, FailedWorker(11, "")),
        (_OPEN_MPI_STATUS.replace("[prterun-vm-2072@1,11]", "[[14460,1],11]"), FailedWorker(11, "")),
        ("[1] Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort", FailedWorker(1, "")),
        ("=   RANK 3 PID 123 RUNNING AT node2\n", FailedWorker(3, "node2")),
        ("srun: error: node7: task 5: Exited with exit code 1\n", FailedWorker(5, "node7")),
        ("srun: error: node7: task 5: Killed\n", FailedWorker(5, "node7", is_uncertain=True)),
        ("all is well\n", None),
    ],
)
def test_what_launchers_say_of_the_failed_worker(text, failed):
    output = Output(OPEN_MPI_LINES if text.startswith("[prterun") else None, prefix=True)
    shown = _read(output, text.encode())
    assert output.failed == failed
    if text is _OPEN_MPI_SIGNAL:
        assert output.last_lines(1) == ["bar 2%", "the end"]
        assert shown.startswith(b"[0] a\n[1] bar 1%\rbar 2%\n[1] the end\n----")


def test_the_abort_of_a_worker_of_mpich_names_its_rank_in_the_world():
    output = Output(hydra_marks("m-"))
    _read(output, b"m-3:Abort(7) on node 3 (rank 1 in comm 496): application called MPI_Abort\n")
    assert output.failed == FailedWorker(3, "")

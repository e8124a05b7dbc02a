"""mykvrun --max-restarts: a failed job is restarted, after all its remaining processes have ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import launcher

from mykvrun import main, restarts
from mykvrun.attempt import Ended
from mykvrun.output import OPEN_MPI_LINES, Output
from mykvrun.restarts import Restarts
from mykvrun.signals import EndSignals

_EXAMPLE = Path(__file__).parents[2] / "examples/restarts.py"


def _start(tmp_path, *arguments, **variables):
    command = [sys.executable, "-m", "mykvrun", *map(str, arguments)]
    env = launcher.environment(tmp_path, variables)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def _run(tmp_path, *arguments, timeout=120, **variables):
    process = _start(tmp_path, *arguments, **variables)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


@pytest.fixture
def waits(monkeypatch):
    """The pauses before restarts, which take no time."""
    pauses = []
    monkeypatch.setattr(restarts.workers, "end_orphans", lambda: None)  # this process has other children
    monkeypatch.setattr(EndSignals, "wait", lambda self, seconds: pauses.append(seconds))
    return pauses


def _numbers(outcomes, most, signals=None):
    """Run attempts with these outcomes; return the last status and the numbers of the attempts."""
    numbers = []

    def start(number):
        numbers.append(number)
        return outcomes[min(number, len(outcomes) - 1)]

    return restarts.run_again(start, Restarts(most), signals or EndSignals()), numbers


_FAILED = Ended(3, "rank 1 failed.", may_mend=True)


def test_a_failed_job_is_started_again_until_it_ends_well_or_too_often(waits, capsys):
    assert _numbers([_FAILED, _FAILED, Ended(0)], 5) == (0, [0, 1, 2])
    assert capsys.readouterr().err.splitlines() == [
        "mykvrun: rank 1 failed. Restart 1 of 5 begins in 1 s.",
        "mykvrun: rank 1 failed. Restart 2 of 5 begins in 2 s.",
    ]
    assert _numbers([_FAILED, _FAILED._replace(status=4)], 1) == (4, [0, 1])
    assert capsys.readouterr().err.endswith("rank 1 failed. It was attempt 2 of 2.\n")
    waits.clear()
    _numbers([_FAILED], 7)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert Restarts(1, 60).pause_before(9) == 60 and Restarts(1, 0).pause_before(9) == 0


def test_a_mistake_and_a_signal_are_no_reason_to_start_again(waits):
    assert _numbers([_FAILED._replace(may_mend=False)], 5) == (3, [0])
    signals = EndSignals()
    signals.received = signal.SIGTERM
    assert _numbers([_FAILED], 5, signals) == (3, [0])


@pytest.mark.parametrize(
    "line",
    [
        "prterun was unable to find the specified executable file, and therefore did",
        "An unrecognized option was included on the mpirun command line:",
        "There are not enough slots available in the system to satisfy the 20",
        "[proxy:0@vm] HYDU_create_process: execvp error on file x (No such file or directory)",
        "srun: error: node1: task 0: execve(): x: No such file or directory",
    ],
)
def test_what_launchers_say_of_mistakes_is_known(line):
    output = Output(OPEN_MPI_LINES)
    output.take(0, line.encode(), "stderr")
    assert not output.tells_mistake, "a worker wrote it"
    output.take(None, line.encode(), "stderr")
    assert output.tells_mistake


_LEAVES_A_PROCESS = """
import os, socket, subprocess, sys, time
restart = int(os.environ["MYKV_RESTART"])
print("restart", restart, flush=True)
others_wait = f"{sys.argv[2]}/waits {restart}"
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
    holder = "import signal, socket, sys, time; signal.signal(15, signal.SIG_IGN)\\n"
    holder += f"server = socket.create_server(('127.0.0.1', {sys.argv[1]})); print('holds', flush=True); time.sleep(99)"
    child = subprocess.Popen([sys.executable, "-c", holder], start_new_session=True, stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), flush=True)  # nothing, if the port is in use
    while not os.path.exists(others_wait):
        time.sleep(0.01)
    sys.exit(5 + restart)
open(others_wait, "w").close()
time.sleep(99)
"""


def test_nothing_of_the_failed_attempt_is_left_and_the_last_status_counts(tmp_path):
    """Its process holds a port that the next attempt needs, in its own session, and ignores SIGTERM."""
    port = 20000 + hash(str(tmp_path)) % 10000
    (tmp_path / "leaves.py").write_text(_LEAVES_A_PROCESS)
    options = ["-n", "2", "--max-restarts", "1", "--restart-pause", "0.1", "--output-filename", tmp_path / "out"]
    code, stdout, stderr = _run(tmp_path, *options, tmp_path / "leaves.py", port, tmp_path)
    assert code == 6, stderr
    assert stdout.count("holds") == 2 and stdout.count("restart 1") == 2, stdout + stderr
    if launcher.is_open_mpi():
        said = r"mykvrun: rank 0.* failed first, .* status 5. Restart 1 of 1 begins in 0.1 s"
        assert re.search(said, stderr), stderr
    assert "It was attempt 2 of 2." in stderr
    assert "restart 0" in (tmp_path / "out/rank.0/stdout").read_text()
    assert "restart 1" in (tmp_path / "out/restart.1/rank.0/stdout").read_text()


@pytest.mark.parametrize("program", [["python", "nowhere.py"], ["sh", "-c", "exec nowhere"], ["nowhere"]])
def test_a_program_that_is_not_there_is_not_started_again(tmp_path, program):
    code, _, stderr = _run(tmp_path, "-n", "1", "--max-restarts", "3", *program)
    assert code in (2, 127) and "begins in" not in stderr, stderr


def test_sigterm_ends_the_pause_before_a_restart(tmp_path):
    process = _start(tmp_path, "-n", "1", "--max-restarts", "3", "--restart-pause", "90", "sh", "-c", "exit 3")
    try:
        assert "Restart 1 of 3 begins in 90 s" in process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_hosts_that_do_not_answer_are_left_out(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    options = ["-H", "localhost:2,far:2", "--restart-pause", "0.1", "--max-restarts", "1", "--min-workers"]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    code, stdout, stderr = _run(tmp_path, *options, "2", "echo", "here", **path)
    assert code == 0 and stdout.split() == ["here"] * 2, stderr
    assert "no answer from far. 2 of 4 workers start on the other hosts." in stderr
    code, _, stderr = _run(tmp_path, *options, "3", "echo", "here", **path)
    assert code == 1 and stderr.count("The other hosts have slots for 2 workers, but --min-workers is 3.") == 2, stderr


@pytest.mark.parametrize(
    "line, said",
    [
        ("--elastic --max-restarts 1", "must not both be given"),
        ("--min-workers 1", "among the hosts"),
    ],
)
def test_options_of_restarts_that_do_not_go_together(line, said, capsys):
    assert main.main(["-n", "2", *line.split(), "true"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_an_example_that_is_killed_three_times_ends_with_the_weights_of_one_that_was_not(tmp_path):
    options = ["-n", "2", "--max-restarts", "3", "--restart-pause", "0", _EXAMPLE]
    code, whole, stderr = _run(tmp_path, *options, tmp_path / "whole", timeout=170)
    assert code == 0 and "restart 0 begins after 0 steps" in whole, stderr
    code, killed, stderr = _run(tmp_path, *options, tmp_path / "killed", "--kill", "7", "13", "18", timeout=170)
    assert code == 0, stderr
    assert re.findall(r"restart (\d) begins after (\d+) steps", killed) == [
        ("0", "0"),
        ("1", "5"),
        ("2", "10"),
        ("3", "15"),
    ]
    assert killed.splitlines()[-1] == whole.splitlines()[-1] and "24 steps, weights" in whole
    assert len(re.findall(r"signal 9 \(SIGKILL\)\. Restart \d of 3", stderr)) == 3, stderr

"""mykv.run: a function as a job."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import kvstore_plugin as mykv
import pytest
from harness import launcher
from harness.processes import descendants, wait_until_ended
from harness.several_hosts import network_module

_PAGE = Path(__file__).parents[2] / "docs/notebooks.md"


@pytest.fixture(autouse=True)
def _own_files(tmp_path, monkeypatch):
    """Launchers write into a separate folder, and do not see a launcher around these tests."""
    environment = launcher.environment(tmp_path)
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class _OwnError(Exception):
    def __init__(self, rank, what):
        super().__init__(f"{rank}: {what}")  # its constructor has other arguments, so pickle cannot recreate it


def _work(scale, what="", own=False):
    """A function of a module that workers cannot import; it needs no mykv."""
    import os
    import signal

    rank = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
    print("here", os.environ["MINE"], flush=True)
    if what and rank == 0:
        time.sleep(99)
    if what == "raise":
        raise _OwnError(rank, "broken") if own else KeyError("label")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rank": rank * scale, "lambda": lambda: rank}


def test_results_come_in_the_order_of_ranks_and_output_with_ranks(capsys):
    results = mykv.run(_work, (10,), workers=3, env={"MINE": "yes"})
    assert [result["rank"] for result in results] == [0, 10, 20] and results[2]["lambda"]() == 2
    if launcher.is_open_mpi():  # Hydra marks pieces of lines
        assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}] here yes" for rank in range(3)]


def test_the_exception_of_a_worker_is_raised_with_its_traceback_and_rank():
    with pytest.raises(KeyError, match="label") as raised:
        mykv.run(_work, (1, "raise"), env={"MINE": ""})
    text = str(raised.value.__cause__)
    assert "rank 1:" in text and "in _work" in text and "KeyError: 'label'" in text
    with pytest.raises(RuntimeError, match="rank 1 failed: .*_OwnError: 1: broken"):
        mykv.run(_work, [1], {"what": "raise", "own": True}, env={"MINE": ""})


def test_a_job_that_fails_without_an_exception_says_how():
    with pytest.raises(RuntimeError, match="mykv.run: rank 1 .*failed first, and the job ended with signal 9"):
        mykv.run(_work, (1, "die"), env={"MINE": ""})
    with pytest.raises(RuntimeError, match="rank 0 ended before the function returned"):
        mykv.run(os._exit, (0,), workers=1)
    with pytest.raises(RuntimeError, match="do not fit on the hosts"):
        mykv.run(_work, workers=3, hosts="localhost:2")


_CALLER = """
import os, signal, time
from mykvrun.function_job import run

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background

def wait():
    print("waits", flush=True)
    time.sleep(99)

try:
    run(wait)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_nothing_is_left_when_the_caller_is_interrupted_or_killed(tmp_path, name):
    (tmp_path / "caller.py").write_text(_CALLER)
    process = subprocess.Popen([sys.executable, tmp_path / "caller.py"], stdout=subprocess.PIPE, text=True)
    try:
        assert [process.stdout.readline()[4:] for _ in range(2)] == ["waits\n"] * 2
        below = descendants(process.pid)
        assert len(below) >= 4  # mykvrun, the launcher, two workers
        process.send_signal(getattr(signal, name))
        stdout, _ = process.communicate(timeout=60)
        assert ("interrupted" in stdout) == (name == "SIGINT")
        wait_until_ended(below, 30)
    finally:
        process.kill()


@pytest.mark.timeout(240)
def test_the_page_is_a_notebook_that_runs(tmp_path):
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    sources = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": source}
        for n, source in enumerate(sources)
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "job.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--stdout", tmp_path / "job.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)["cells"][-1]["outputs"]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert "[0, 1] equal weights: True" in text and "[1] epoch 1: loss " in text, outputs


def test_the_module_of_the_launcher_does_not_hide_the_function():
    assert importlib.import_module("kvstore_plugin.run") is mykv.run
    import kvstore_plugin.run as again

    assert again is mykv.run


_CALLER_ON_HOSTS = """
import socket, sys
import kvstore_plugin as mykv
import mxnet as mx

def work(fails):
    mykv.init()
    if fails and mykv.rank() == 2:
        raise KeyError("label")
    total = mykv.allreduce(mx.nd.ones(1) * (mykv.rank() + 1), average=False).asscalar()
    return float(total), socket.gethostname(), mykv.local_rank()

results = mykv.run(work, (False,), hosts=sys.argv[1])
print(results)
try:
    mykv.run(work, (True,), hosts=sys.argv[1])
except KeyError as error:
    print("KeyError", error, str(error.__cause__).strip().splitlines()[0])
"""


@pytest.mark.long
def test_a_function_runs_on_several_hosts(tmp_path):
    """The caller is on the first host, and has two workers on each of two hosts. Then rank 2, on the second, fails."""
    (tmp_path / "caller.py").write_text(_CALLER_ON_HOSTS)
    network = network_module()
    if network.unavailable():
        pytest.skip(network.unavailable())
    with network.Network(2) as up:
        slots = ",".join(f"{up.address(host)}:2" for host in (1, 2))
        command = up.inside(1, [sys.executable, "caller.py", slots])
        env = {**os.environ, **up.variables()}
        done = subprocess.run(command, cwd=tmp_path, env=env, timeout=180, capture_output=True, text=True)
    first, second = done.stdout.splitlines()[-2:]
    found = ast.literal_eval(first)
    assert [total for total, _, _ in found] == [10.0] * 4, done
    assert [rank for _, _, rank in found] == [0, 1, 0, 1] and len({host for _, host, _ in found}) == 2, done
    assert second == "KeyError 'label' rank 2:", done
    assert os.listdir(tmp_path) == ["caller.py"]  # the folder of each job has gone

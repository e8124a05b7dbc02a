"""Workers end when their launcher is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from harness import launcher
from harness.processes import is_alive, wait_until_ended

_PROGRAM = """
import os, time
from kvstore_plugin.world import launcher_watch

launcher_watch.begin()
launcher_watch.begin()
print("worker", os.getpid(), flush=True)
time.sleep(100)
"""


def test_workers_end_when_mpirun_is_killed_also_behind_a_shell(tmp_path):
    shell = ["sh", "-c", 'if [ "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 1 ]; then "$@"; true; else exec "$@"; fi', "sh"]
    command = launcher.command(2, [*shell, sys.executable, "-c", _PROGRAM])
    environment = launcher.environment(tmp_path)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = []
    try:
        while len(workers) < 2:
            word, pid = process.stdout.readline().split()
            assert word == "worker"
            workers.append(int(pid))
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        wait_until_ended(workers, 60)
    finally:
        process.kill()
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)


def test_a_process_without_a_launcher_watches_nobody(monkeypatch):
    from kvstore_plugin.world import launched

    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert launched.launcher() is None

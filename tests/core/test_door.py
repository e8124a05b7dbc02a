"""The door at which the ranks of a host ask for their segment, with more strangers than a process has descriptors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SILENT = 300

# Strangers that say nothing, and behind them a rank. What a stranger connects to stays open until this process ends.
_CALLERS = r"""
import array, os, socket, sys

name, secret, silent = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])


def knock():
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(30)
    one.connect(b"\0mykv-" + name.hex().encode())
    return one


strangers = [knock() for _ in range(silent)]
rank = knock()
rank.send(secret)
_, control, *_ = rank.recvmsg(1, socket.CMSG_SPACE(4))
(descriptor,) = array.array("i", control[0][2])
print(os.read(descriptor, 100).decode())
"""

_KEEPER = rf"""
import os, resource, subprocess, sys, tempfile, time

from compiled import testing

with tempfile.TemporaryFile() as file:
    file.write(b"the segment")
    file.seek(0)
    door = testing.Door()
    words = [sys.executable, "-c", {_CALLERS!r}, door.name.hex(), door.secret.hex(), sys.argv[1]]
    callers = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + int(sys.argv[2]), most))
    end = time.monotonic() + 40
    while not door.served() and time.monotonic() < end:
        door.attend(file.fileno(), 50)
    print("served", door.served(), "rejected", door.rejected_callers())
    assert door.served() == 1
    print(callers.communicate(timeout=20)[0])
"""


@pytest.mark.parametrize("descriptors", [1000, 40])
def test_a_rank_behind_silent_strangers_gets_its_descriptor(descriptors):
    words = [sys.executable, "-c", _KEEPER, str(_SILENT), str(descriptors)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done
    assert "the segment" in done.stdout and f"rejected {_SILENT}" in done.stdout, done

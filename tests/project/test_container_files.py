"""examples/Dockerfile and examples/mpijob.yaml fit this tree. Neither Docker nor Kubernetes runs here."""

from __future__ import annotations

import re
from pathlib import Path

from mykvrun import commands
from mykvrun.command_line import parse
from mykvrun.mpi import OPEN_MPI, Mpi

_ROOT = Path(__file__).parents[2]
# What setup.py reads, compiles and installs.
_NEEDED = "README.md build_backend csrc docs/requirements.txt kvstore_plugin mykv.py mykvrun pyproject.toml setup.py"


def test_dockerfile_copies_what_the_build_needs():
    lines = re.findall(r"^COPY (?!--from)(.*)$", (_ROOT / "examples/Dockerfile").read_text(), re.MULTILINE)
    copied = [source for line in lines for source in line.split()[:-1]]
    assert all((_ROOT / source).exists() for source in copied)
    assert set(_NEEDED.split()) <= set(copied)


def test_mpijob_starts_a_worker_for_each_slot(tmp_path, monkeypatch):
    text = (_ROOT / "examples/mpijob.yaml").read_text()
    slots, pods = int(re.search(r"slotsPerWorker: (\d+)", text).group(1)), int(re.findall(r"replicas: (\d+)", text)[1])
    command = re.search(r"\[mykvrun, (.*)\]", text).group(1).replace('"', "").split(", ")
    # As the operator writes it.
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"mykv-worker-{number}.mykv.default.svc slots={slots}\n" for number in range(pods)))
    assert "/etc/mpi/hostfile" in command
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = parse([str(hostfile) if word == "/etc/mpi/hostfile" else word for word in command]).job
    started = commands.mpirun_command(job, Mpi(OPEN_MPI, 5, "mpirun")).arguments
    assert job.workers == slots * pods
    assert f"mykv-worker-0.mykv.default.svc:{slots},mykv-worker-1.mykv.default.svc:{slots}" in started
    assert started[-2:] == ["python", "train.py"] and job.threads == 1

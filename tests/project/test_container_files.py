"""examples/Dockerfile and examples/mpijob.yaml fit this tree. Neither Docker nor Kubernetes runs here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from mykvrun import commands
from mykvrun.command_line import parse
from mykvrun.mpi import OPEN_MPI, Mpi

_ROOT = Path(__file__).parents[2]


def test_dockerfile_copies_what_the_build_needs(tmp_path):
    lines = re.findall(r"^COPY (?!--from)(.*)$", (_ROOT / "examples/Dockerfile").read_text(), re.MULTILINE)
    for line in lines:
        *sources, target = line.split()
        folder = tmp_path / target.lstrip("/")
        for source in sources:
            if (_ROOT / source).is_dir():
                shutil.copytree(_ROOT / source, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                whole = folder / Path(source).name if target.endswith("/") else folder
                whole.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(_ROOT / source, whole)
    source = tmp_path / "src"
    assert (source / "csrc").is_dir()
    # All but the compilation, which takes minutes.
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (source / "built/mykvrun/__init__.py").exists()


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
